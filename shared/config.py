"""What a model is: frozen parts, checked once, with every derived size in one place.

A `DecoderConfig` is made of the parts its layers take (`AttentionConfig`,
`GatedDeltaNetConfig`, `MLPConfig`, `MoEConfig`), the kind of each layer in order,
and how the model is run (scanning, rematerialisation, dtypes).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shared.plan import LayerPlan, make_plan

Mixer = Literal["linear_attention", "sliding_attention", "full_attention"]
FeedForward = Literal["dense", "moe"]


class ConfigError(ValueError):
    """A config that describes no model; the message names field, values and the fix."""


@dataclasses.dataclass(frozen=True, order=True)
class LayerKind:
    """All that shapes a layer's weights and state: equal kinds can share one scan."""

    mixer: Mixer
    feed_forward: FeedForward

    def __post_init__(self):
        _one_of("mixer", self.mixer, get_args(Mixer))
        _one_of("feed_forward", self.feed_forward, ("dense", "moe"))

    @property
    def is_global(self) -> bool:
        """Whether every earlier token is seen: such layers are the rare ones."""
        return self.mixer == "full_attention"

    def __str__(self) -> str:
        return f"{self.mixer}+{self.feed_forward}"


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions over the first `rotary_dim` components of a head."""

    theta: float
    rotary_dim: int

    def __post_init__(self):
        _positive(theta=self.theta)
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim must be even and not negative. Got {self.rotary_dim}: "
                "components are rotated in pairs; change head_dim or "
                "partial_rotary_factor."
            )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Gated grouped-query attention; with a `window`, to that many tokens at most.

    A token counts itself: with a window of 1 it sees nothing else.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_eps: float = 1e-6
    use_bias: bool = False
    initializer_range: float = 0.02
    window: int | None = None

    def __post_init__(self):
        _positive(
            window=1 if self.window is None else self.window,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            initializer_range=self.initializer_range,
        )
        _multiple("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads)
        if self.rope.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rotary_dim={self.rope.rotary_dim} is larger than "
                f"head_dim={self.head_dim}: lower partial_rotary_factor."
            )


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Linear attention with a gated delta rule."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    chunk_size: int = 32

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        _positive(**sizes)
        _multiple(
            "num_value_heads",
            self.num_value_heads,
            "num_key_heads",
            self.num_key_heads,
        )

    @property
    def key_dim(self) -> int:
        """Width of all key heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def values_per_key(self) -> int:
        """Value heads that share one key head."""
        return self.num_value_heads // self.num_key_heads


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A gated feed-forward layer: down(silu(gate x) * up x)."""

    hidden_size: int
    intermediate_size: int
    initializer_range: float = 0.02

    def __post_init__(self):
        _positive(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size
        )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Routed experts and one shared expert behind a sigmoid gate."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalize_weights: bool = True
    initializer_range: float = 0.02

    def __post_init__(self):
        _positive(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            shared_expert_size=self.shared_expert_size,
        )
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is larger than "
                f"num_experts={self.num_experts}: a token cannot choose an expert "
                "twice; lower the first or raise the second."
            )

    @property
    def shared_expert(self) -> MLPConfig:
        """The shared expert is a gated feed-forward layer of its own width."""
        return MLPConfig(
            self.hidden_size, self.shared_expert_size, self.initializer_range
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder, hashable, so that it can be a static argument.

    Attributes:
      family: Hugging Face `model_type`; format tables and presets look at it, the
        mathematics never does.
      layers: the kind of each layer, in order.
      attention: part of the full-attention layers; None where there are none.
      sliding_attention: part of the sliding-window layers, which has a window; None
        where there are none.
      delta_net: part of the linear-attention layers; None where there are none.
      mlp: part of the dense feed-forward layers; None where there are none.
      moe: part of the mixture layers; None where there are none.
      tie_word_embeddings: the head is the transposed embedding: one leaf.
      router_aux_loss_coef: weight of the load-balance loss in the total loss.
      dropout_rate: dropout on both residual branches of each layer (the published
        models use none).
      vocab_padding: rows of zeros behind the vocabulary, so that it divides by what it
        is sharded over; no token, no logit and no Hugging Face tensor has them.
      scan_layers: stack and scan whole periods of layers, or keep `layers_0` ….
      scan_period: layers in a period; None finds it from the kinds.
      param_scan_axis: where the stack axes stand in a stacked leaf.
      remat_policy: "none", "full", the name of a `jax.checkpoint_policies` policy, or
        "names:a,b" to save only the values so named.
      param_dtype: dtype of new parameters; a few stay at least float32 (`ParamSpec`).
      dtype: dtype of activations.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig | None = None
    sliding_attention: AttentionConfig | None = None
    delta_net: GatedDeltaNetConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    router_aux_loss_coef: float = 0.001
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    dropout_rate: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    vocab_padding: int = 0
    scan_layers: bool = True
    scan_period: int | None = None
    param_scan_axis: int = 0
    remat_policy: str = "none"
    param_dtype: str = "float32"
    dtype: str = "float32"

    def __post_init__(self):
        _positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            norm_eps=self.norm_eps,
            initializer_range=self.initializer_range,
        )
        if not self.layers or not isinstance(self.layers, tuple):
            raise ConfigError(
                "layers must be a tuple of at least one LayerKind. "
                f"Got {self.layers!r}, which is empty or no tuple."
            )
        if not 0.0 <= self.router_aux_loss_coef < float("inf"):
            raise ConfigError(
                "router_aux_loss_coef must be finite and not negative. "
                f"Got {self.router_aux_loss_coef}."
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ConfigError(
                f"dropout_rate must be in [0, 1). Got {self.dropout_rate}."
            )
        if self.vocab_padding < 0:
            raise ConfigError(
                f"vocab_padding must be at least 0. Got {self.vocab_padding}."
            )
        if self.param_scan_axis not in (0, 1):
            raise ConfigError(
                f"param_scan_axis must be 0 or 1. Got {self.param_scan_axis}."
            )
        self._check_parts()
        for field in ("param_dtype", "dtype"):
            _one_of(field, getattr(self, field), FLOAT_DTYPES)
        if {self.param_dtype, self.dtype} == {"bfloat16", "float16"}:
            raise ConfigError(
                f"param_dtype={self.param_dtype} and dtype={self.dtype} do not mix: "
                "neither holds the other's values. Make them equal, or one float32."
            )
        resolve_remat_policy(self.remat_policy)
        self.plan  # noqa: B018  (an explicit period that contradicts the kinds raises)

    def _check_parts(self):
        used = {
            "attention": any(k.mixer == "full_attention" for k in self.layers),
            "sliding_attention": any(
                k.mixer == "sliding_attention" for k in self.layers
            ),
            "delta_net": any(k.mixer == "linear_attention" for k in self.layers),
            "mlp": any(k.feed_forward == "dense" for k in self.layers),
            "moe": any(k.feed_forward == "moe" for k in self.layers),
        }
        for name, needed in used.items():
            part = getattr(self, name)
            if needed and part is None:
                raise ConfigError(
                    f"layers has kinds that need the part {name}, but {name}=None: "
                    "give that part or change the kinds."
                )
            if part is not None and part.hidden_size != self.hidden_size:
                raise ConfigError(
                    f"{name}.hidden_size={part.hidden_size} differs from "
                    f"hidden_size={self.hidden_size}: every part works on the same "
                    "residual stream; make them equal."
                )
        for name, windowed in (("attention", False), ("sliding_attention", True)):
            part = getattr(self, name)
            if part is not None and (part.window is not None) != windowed:
                raise ConfigError(
                    f"{name}.window={part.window}: full-attention layers have no "
                    "window (None), sliding ones need one; move the part or change it."
                )

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self.layers)

    @functools.cached_property
    def plan(self) -> LayerPlan:
        """How the layers are grouped for running and storing them."""
        return make_plan(
            self.layers, period=self.scan_period, scan_layers=self.scan_layers
        )

    @classmethod
    def from_hf(
        cls, source: str | os.PathLike[str] | Mapping[str, Any]
    ) -> DecoderConfig:
        """Reads a Hugging Face config: a folder, a config.json or its contents."""
        from shared.checkpoint import hf_config

        return hf_config.from_hf(source)

    def to_hf(self, *, hub_style: bool = False) -> dict[str, Any]:
        """As Hugging Face writes it; `hub_style` gives the older spelling."""
        from shared.checkpoint import hf_config

        return hf_config.to_hf(self, hub_style=hub_style)

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


SAVEABLE_NAMES = ("mixer_output", "feed_forward_output")  # see decoder_layer.apply
FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


def resolve_remat_policy(name: str) -> Any:
    """The JAX checkpoint policy called `name`; None saves nothing ("full").

    Raises:
      ConfigError: the name is neither "none", "full", "names:…" nor one of JAX's.
    """
    if name in ("none", "full"):
        return None
    if str(name).startswith("names:"):
        names = name.removeprefix("names:").split(",")
        unknown = sorted(set(names) - set(SAVEABLE_NAMES))
        if unknown:
            raise ConfigError(
                f"remat_policy={name!r} names {', '.join(unknown) or 'nothing'}. The "
                f"values that can be saved are {', '.join(SAVEABLE_NAMES)}."
            )
        return jax.checkpoint_policies.save_only_these_names(*names)
    plain = sorted(
        n
        for n in dir(jax.checkpoint_policies)
        if not n.startswith("_") and not n.startswith(("save_", "offload_"))
    )
    if name not in plain:
        raise ConfigError(
            f"remat_policy={name!r} is unknown. Use 'none', 'full', "
            f"'names:a,b' or one of {', '.join(plain)}."
        )
    return getattr(jax.checkpoint_policies, name)


def compute_dtype(config: DecoderConfig) -> Any:
    """The dtype of activations."""
    return jnp.dtype(config.dtype)


def _positive(**sizes: float | int) -> None:
    for name, size in sizes.items():
        if not 0 < size < float("inf"):
            raise ConfigError(f"{name} must be positive and finite. Got {size}.")


def _multiple(name: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(
            f"{name} must be a multiple of {of}. Got {name}={value} and "
            f"{of}={divisor}: heads are shared in equal groups; change one of the two."
        )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {choices}. Got {value!r}.")
