"""What a model is: frozen parts, checked once, with every derived size in one place.

A `DecoderConfig` is made of the parts its layers take (`AttentionConfig`,
`GatedDeltaNetConfig`, `MLPConfig`, `MoEConfig`), the kind of each layer in order,
and how the model is run (scanning, rematerialisation, dtypes).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from shared.plan import Group, LayerPlan, make_plan

Mixer = Literal["linear_attention", "sliding_attention", "full_attention"]
FeedForward = Literal["dense", "moe", "dense_and_moe"]
Activation = Literal["silu", "gelu_tanh"]
AttentionKernel = Literal[
    "auto", "reference", "splash", "splash_interpreted", "dot_product", "cudnn"
]
ExpertKernel = Literal[
    "auto", "reference", "ragged_dot", "megablox", "megablox_interpreted"
]


class ConfigError(ValueError):
    """A config that describes no model; the message names field, values and the fix."""


@dataclasses.dataclass(frozen=True, order=True)
class LayerKind:
    """All that shapes a layer's weights and state: equal kinds can share one scan.

    Attributes:
      mixer: what moves between tokens.
      feed_forward: what works on each token; "dense_and_moe" adds the two.
      borrows_keys: the layer attends to the keys and values of the last layer before
        it that has the same mixer and its own.
    """

    mixer: Mixer
    feed_forward: FeedForward
    borrows_keys: bool = False

    def __post_init__(self):
        _one_of("mixer", self.mixer, get_args(Mixer))
        _one_of("feed_forward", self.feed_forward, get_args(FeedForward))
        if self.borrows_keys and self.mixer == "linear_attention":
            raise ConfigError(
                "borrows_keys=True and mixer='linear_attention' do not go together: "
                "linear attention has no keys to borrow; use an attention mixer."
            )

    @property
    def is_global(self) -> bool:
        """Whether every earlier token is seen: such layers are the rare ones."""
        return self.mixer == "full_attention"

    @property
    def section(self) -> str:
        """Layers of different sections never share a scan: see `make_plan`."""
        return "shared" if self.borrows_keys else ""

    def __str__(self) -> str:
        borrows = "+borrowed_keys" if self.borrows_keys else ""
        return f"{self.mixer}+{self.feed_forward}{borrows}"


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        _positive(factor=self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Slow frequencies are divided by `factor`, fast ones kept (arXiv:2309.00071).

    Attributes:
      factor: how much longer rows may be than those first trained on.
      original_length: tokens of those.
      beta_fast: a pair of components that turns more often over `original_length` is
        kept as it is.
      beta_slow: one that turns less often is divided by `factor`; between the two,
        in proportion.
      mscale: of the rotated components: they are scaled by
        `magnitude(mscale) / magnitude(mscale_all_dim)`.
      mscale_all_dim: of the scores: they are scaled by its magnitude squared (latent
        attention only).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        _positive(
            factor=self.factor,
            original_length=self.original_length,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )

    def magnitude(self, mscale: float) -> float:
        """`0.1 * mscale * ln(factor) + 1`; 1 where rows are not longer."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions over the first `rotary_dim` components of a head.

    Attributes:
      theta: base of the frequencies `theta ** (-2 j / rotary_dim)`.
      rotary_dim: components that are paired, even.
      turning_pairs: only so many of the first pairs turn, at the frequencies they have
        among all of them ("proportional"); None: all.
      sections: frequencies that follow the second and third axis of [3, B, T]
        positions are interleaved with those of the first; the numbers of frequencies
        of the three axes. None: all axes are one.
      interleaved: components 2j and 2j + 1 are a pair, and come out apart; else j and
        j + rotary_dim / 2 are.
      scaling: for rows longer than those first trained on.
    """

    theta: float
    rotary_dim: int
    turning_pairs: int | None = None
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    scaling: LinearScaling | YarnScaling | None = None

    def __post_init__(self):
        _positive(theta=self.theta)
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ConfigError(
                f"rotary_dim must be even and not negative. Got {self.rotary_dim}: "
                "components are rotated in pairs; change head_dim or "
                "partial_rotary_factor."
            )
        pairs = self.rotary_dim // 2
        if (
            not 0
            <= (pairs if self.turning_pairs is None else self.turning_pairs)
            <= pairs
        ):
            raise ConfigError(
                f"turning_pairs must be 0 to {pairs}, half of rotary_dim="
                f"{self.rotary_dim}. Got {self.turning_pairs}."
            )
        if self.sections is not None and (
            len(self.sections) != 3
            or min(self.sections) < 0
            or sum(self.sections) != pairs
        ):
            raise ConfigError(
                f"sections must be three numbers of frequencies, {pairs} in all, half "
                f"of rotary_dim={self.rotary_dim}. Got {self.sections}."
            )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention; with a `window`, to that many tokens at most.

    A token counts itself: with a window of 1 it sees nothing else.

    Attributes:
      hidden_size: width of the residual stream.
      num_heads: of queries.
      num_kv_heads: of keys and values.
      head_dim: width of a head.
      rope: rotary positions.
      norm_eps: of the norms of queries, keys and values.
      use_bias: whether the projections have a bias.
      initializer_range: standard deviation of first values.
      window: None: all earlier tokens are seen.
      gated: the output is multiplied by a sigmoid of the input before `o_proj`.
      zero_centered_norms: the norms multiply by 1 + w, else by w.
      value_norm: values are scaled to unit root mean square.
      keys_are_values: there is no `v_proj`: values are what `k_proj` gives, before
        norm and rotation.
      scale: of the scores; None: head_dim ** -0.5.
      borrows_keys: the layer has queries only and attends to the keys of another;
        set by the kind of a layer.
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
    gated: bool = True
    zero_centered_norms: bool = True
    value_norm: bool = False
    keys_are_values: bool = False
    scale: float | None = None
    borrows_keys: bool = False

    def __post_init__(self):
        _positive(
            window=1 if self.window is None else self.window,
            scale=1.0 if self.scale is None else self.scale,
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
class LatentAttentionConfig:
    """Attention to a compressed latent of each token (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
      hidden_size: width of the residual stream.
      num_heads: of queries; each has keys and values of its own, made of the latent.
      q_lora_rank: width of the queries' latent; None: queries are projected at once.
      kv_lora_rank: width of the latent of keys and values, which the cache holds.
      nope_head_dim: components of queries and keys without positions.
      value_head_dim: width of a value.
      rope: rotary positions of the other components; one rotated key for all heads.
      latent_norm_eps: of the norms of the two latents.
      use_bias: whether the projections into latents and `o_proj` have a bias.
      initializer_range: standard deviation of first values.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    value_head_dim: int
    rope: RopeConfig
    latent_norm_eps: float = 1e-6
    use_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self):
        _positive(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=1 if self.q_lora_rank is None else self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            nope_head_dim=self.nope_head_dim,
            value_head_dim=self.value_head_dim,
            latent_norm_eps=self.latent_norm_eps,
            initializer_range=self.initializer_range,
        )

    @property
    def window(self) -> None:
        """All earlier tokens are seen."""
        return None

    @property
    def head_dim(self) -> int:
        """Width of queries and keys: without and with positions."""
        return self.nope_head_dim + self.rope.rotary_dim

    @property
    def cached_width(self) -> int:
        """Numbers that the cache holds for a token: latent and rotated key."""
        return self.kv_lora_rank + self.rope.rotary_dim


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Linear attention with a gated delta rule.

    With `grouped_projections` two weights hold what goes in, by key head; else four
    do, each in flat order of heads. The rule runs by chunks of `chunk_size` tokens, and
    the backward pass holds what the chunks of `span_size` tokens need: sizes change the
    cost and the rounding only.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int = 4
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    chunk_size: int = 32
    span_size: int = 512
    grouped_projections: bool = True

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        del sizes["grouped_projections"]
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
    """A gated feed-forward layer: down(activation(gate x) * up x)."""

    hidden_size: int
    intermediate_size: int
    initializer_range: float = 0.02
    activation: Activation = "silu"

    def __post_init__(self):
        _positive(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size
        )
        _one_of("activation", self.activation, get_args(Activation))


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Routed experts, and a shared expert where `shared_expert_size` is not 0.

    Attributes:
      hidden_size: width of the residual stream.
      num_experts: routed experts.
      experts_per_token: that a token goes to.
      expert_size: feed-forward width of an expert.
      shared_expert_size: of the expert that all tokens go to; 0: there is none.
      shared_expert_gated: it stands behind a sigmoid gate.
      normalize_weights: the chosen experts' weights are divided by their sum.
      scores: of the router's logits.
      correction_bias: a bias is added to the scores for choosing, not for weighing
        (Wang et al., arXiv:2408.15664).
      num_groups: experts are chosen from some groups of experts only.
      groups_per_token: so many, those whose two best experts have the highest sum.
      scaling_factor: of the weights, after normalising.
      per_expert_scale: each expert's weight is multiplied by a parameter of its own.
      norm_router_input: the router sees the residual stream at unit root mean square,
        times a parameter and hidden_size ** -0.5; else the normalised stream.
      router_norm_eps: of that norm.
      activation: of the experts.
      initializer_range: standard deviation of first values.
    """

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_expert_size: int
    normalize_weights: bool = True
    initializer_range: float = 0.02
    shared_expert_gated: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scaling_factor: float = 1.0
    per_expert_scale: bool = False
    norm_router_input: bool = False
    router_norm_eps: float = 1e-6
    activation: Activation = "silu"

    def __post_init__(self):
        _positive(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            expert_size=self.expert_size,
            shared_expert_size=self.shared_expert_size or 1,
            num_groups=self.num_groups,
            groups_per_token=self.groups_per_token,
            scaling_factor=self.scaling_factor,
            router_norm_eps=self.router_norm_eps,
        )
        _one_of("scores", self.scores, ("softmax", "sigmoid"))
        _one_of("activation", self.activation, get_args(Activation))
        self._check_groups()
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is larger than "
                f"num_experts={self.num_experts}: a token cannot choose an expert "
                "twice; lower the first or raise the second."
            )

    def _check_groups(self):
        if self.num_groups == 1:
            return
        _multiple("num_experts", self.num_experts, "num_groups", self.num_groups)
        size = self.num_experts // self.num_groups
        if size < 2:
            raise ConfigError(
                f"num_groups={self.num_groups} of num_experts={self.num_experts} "
                f"leaves {size} expert in a group: a group is judged by its best two."
            )
        if self.groups_per_token > self.num_groups:
            raise ConfigError(
                f"groups_per_token={self.groups_per_token} is larger than "
                f"num_groups={self.num_groups}: lower the first."
            )
        if self.experts_per_token > self.groups_per_token * size:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is larger than the "
                f"{self.groups_per_token * size} experts of groups_per_token="
                f"{self.groups_per_token} groups: raise groups_per_token."
            )

    @property
    def shared_expert(self) -> MLPConfig | None:
        """The shared expert is a gated feed-forward layer of its own width."""
        if not self.shared_expert_size:
            return None
        return MLPConfig(
            self.hidden_size,
            self.shared_expert_size,
            self.initializer_range,
            self.activation,
        )


@dataclasses.dataclass(frozen=True)
class LayerInputConfig:
    """A second, narrow embedding of the tokens, with a part for each layer.

    Attributes:
      vocab_size: rows of the second embedding.
      size: width of a layer's part.
      activation: of the gate through which it goes in.
    """

    vocab_size: int
    size: int
    activation: Activation = "gelu_tanh"

    def __post_init__(self):
        _positive(vocab_size=self.vocab_size, size=self.size)
        _one_of("activation", self.activation, get_args(Activation))


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
      borrower_mlp: of those of them that borrow keys; None: they have `mlp`, too.
      moe: part of the mixture layers; None where there are none.
      layer_inputs: a second embedding that goes into every layer; None: there is none.
      zero_centered_norms: norms multiply by 1 + w, else by w.
      output_norms: what a mixer or feed-forward gives is normalised, too, before it is
        added to the residual stream.
      layer_scalar: the residual stream is multiplied by a number of its own, which is
        not trained, after each layer.
      scale_embeddings: the embedding is multiplied by hidden_size ** 0.5.
      logit_softcap: logits are cap * tanh(logits / cap); None: as they are.
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
      block_form: "nested": runs of a block are loops, and each layer is rematerialised
        by itself. "flat": the layers of a block stand one after another, and the block
        is rematerialised as a whole, which takes more memory and a larger program: for
        comparison. Parameters and values are the same.
      param_dtype: dtype of new parameters; a few stay at least float32 (`ParamSpec`).
      dtype: dtype of activations.
      axis_rules: where activations stand on the mesh at hand (`shared.sharding`); ():
        nothing is said of them.
      expert_chunks: on a mesh, in how many parts a device gathers the weights of a
        layer's experts: what it holds at once is a part.
      attention_kernel: what computes the attention of tokens to themselves. "auto":
        JAX's splash attention in programs for a TPU, else "reference", the op of this
        package. "splash": always; it then has its own gradient. "splash_interpreted":
        the same on any platform, slowly, for tests. "dot_product" and "cudnn":
        `jax.nn.dot_product_attention`. What a kernel cannot, the reference does.
      expert_kernel: what multiplies rows by their expert's matrices. "auto": JAX's
        Megablox in programs for a TPU, else "reference": a loop of this package on a
        CPU, `jax.lax.ragged_dot` elsewhere. "ragged_dot", "megablox" and, for tests,
        "megablox_interpreted": on all platforms. What Megablox cannot, the reference
        does.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    attention: AttentionConfig | LatentAttentionConfig | None = None
    sliding_attention: AttentionConfig | None = None
    delta_net: GatedDeltaNetConfig | None = None
    mlp: MLPConfig | None = None
    borrower_mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    layer_inputs: LayerInputConfig | None = None
    zero_centered_norms: bool = True
    output_norms: bool = False
    layer_scalar: bool = False
    scale_embeddings: bool = False
    logit_softcap: float | None = None
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
    block_form: Literal["nested", "flat"] = "nested"
    param_dtype: str = "float32"
    dtype: str = "float32"
    axis_rules: tuple[tuple[str, str | tuple[str, ...] | None], ...] = ()
    expert_chunks: int = 1
    attention_kernel: AttentionKernel = "auto"
    expert_kernel: ExpertKernel = "auto"

    def __post_init__(self):
        _positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            norm_eps=self.norm_eps,
            initializer_range=self.initializer_range,
            logit_softcap=1.0 if self.logit_softcap is None else self.logit_softcap,
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
        if self.expert_chunks < 1:
            raise ConfigError(
                f"expert_chunks must be at least 1. Got {self.expert_chunks}."
            )
        self._check_parts()
        self._check_borrowers()
        for field in ("param_dtype", "dtype"):
            _one_of(field, getattr(self, field), FLOAT_DTYPES)
        if {self.param_dtype, self.dtype} == {"bfloat16", "float16"}:
            raise ConfigError(
                f"param_dtype={self.param_dtype} and dtype={self.dtype} do not mix: "
                "neither holds the other's values. Make them equal, or one float32."
            )
        _one_of("attention_kernel", self.attention_kernel, get_args(AttentionKernel))
        _one_of("expert_kernel", self.expert_kernel, get_args(ExpertKernel))
        _one_of("block_form", self.block_form, BLOCK_FORMS)
        resolve_remat_policy(self.remat_policy)
        self.plan  # noqa: B018  (an explicit period that contradicts the kinds raises)

    def _check_parts(self):
        used = {
            "attention": any(k.mixer == "full_attention" for k in self.layers),
            "sliding_attention": any(
                k.mixer == "sliding_attention" for k in self.layers
            ),
            "delta_net": any(k.mixer == "linear_attention" for k in self.layers),
            "mlp": any(k.feed_forward != "moe" for k in self.layers),
            "borrower_mlp": False,
            "moe": any(k.feed_forward != "dense" for k in self.layers),
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

    def _check_borrowers(self):
        borrowing = [kind.borrows_keys for kind in self.layers]
        if borrowing != sorted(borrowing):
            raise ConfigError(
                "layers that borrow keys must be the last ones. Got a layer with keys "
                f"of its own behind layer {borrowing.index(True)}, which borrows."
            )
        for index, kind in enumerate(self.layers):
            if kind.borrows_keys and not any(
                k.mixer == kind.mixer and not k.borrows_keys
                for k in self.layers[:index]
            ):
                raise ConfigError(
                    f"layer {index} borrows keys, but no layer before it is of "
                    f"{kind.mixer} with keys of its own: change the kinds."
                )
        full = any(k.borrows_keys and k.is_global for k in self.layers)
        if full and isinstance(self.attention, LatentAttentionConfig):
            raise ConfigError(
                "attention is a LatentAttentionConfig, whose layers lend no keys, but "
                "layers borrow them: give an AttentionConfig, or change the kinds."
            )

    @functools.cached_property
    def lenders(self) -> dict[Mixer, int]:
        """Index of the layer whose keys are borrowed, by mixer; empty: none are."""
        borrowing = {kind.mixer for kind in self.layers if kind.borrows_keys}
        return {
            kind.mixer: index
            for index, kind in enumerate(self.layers)
            if kind.mixer in borrowing and not kind.borrows_keys
        }

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

    def is_flat(self, group: Group) -> bool:
        """Whether the blocks of a group are flat (see `block_form`)."""
        return self.block_form == "flat" and group.repeats is not None

    def loops_over_one(self, group: Group) -> bool:
        """Whether a single layer of a group stands in a loop of one step.

        A rematerialised layer does: without a loop around it, XLA makes all layers of a
        block again before the first is done with, or merges both forward passes.
        """
        return self.remat_policy != "none" and not self.is_flat(group)

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
BLOCK_FORMS = ("nested", "flat")
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


def rematerialised(
    call: Callable[..., Any], config: DecoderConfig, checkpoint: Callable[..., Any]
) -> Callable[..., Any]:
    """`call` under the config's policy, by a frontend's own form of `jax.checkpoint`.

    What is rematerialised stands in a loop, so nothing need keep XLA from merging it.
    """
    if config.remat_policy == "none":
        return call
    policy = resolve_remat_policy(config.remat_policy)
    return checkpoint(call, policy=policy, prevent_cse=False)


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
