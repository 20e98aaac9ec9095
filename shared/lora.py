"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) of a frozen model.

A projection W [D, F] with an adapter computes x (W + s A B): A [D, R] and B [R, F] are
trained, s = alpha / R is fixed. The three stand beside W in the tree of parameters, so
both frontends slice them with W, layer by layer, and add x A B to the output:

    layers/local_layers/linear_attn/out_proj              [2, 3, F, D]
    layers/local_layers/linear_attn/out_proj_lora_a       [2, 3, F, R]
    layers/local_layers/linear_attn/out_proj_lora_b       [2, 3, R, D]
    layers/local_layers/linear_attn/out_proj_lora_scale   [2, 3, 1]

Adapters are a tree of their own, of these three leaves for each target. `join` puts
one into the parameters of a model without copying these; `merge` makes plain ones.

The weights of routed experts, and those of latent attention in a cache, are not applied
to the residual stream one by one: W + s A B is made for the layer at hand, in the dtype
of W.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from shared.config import ConfigError, DecoderConfig, LayerKind
from shared.layers import decoder, decoder_layer
from shared.layers.linear import ADAPTER, adapted
from shared.params import (
    ParamSpec,
    SpecTree,
    constant,
    draw_tree,
    layer_key,
    uniform,
)
from shared.plan import Group, Run, insert, node_at, run_path, stack_sizes
from shared.trees import Path, check_same_paths, flatten, path_text


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections have adapters, and of what size.

    Attributes:
      rank: R, columns of A and rows of B.
      alpha: the change of a weight is alpha / rank * A B.
      targets: names of projections, or ends of their paths in a layer, as in PEFT:
        "q_proj", "mlp/shared_expert/up_proj" (`targets` lists them).
      param_dtype: of A and B.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    param_dtype: str = "float32"

    def __post_init__(self):
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1. Got {self.rank}.")
        if not 0 < self.alpha < float("inf"):
            raise ConfigError(f"alpha must be positive and finite. Got {self.alpha}.")
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigError(
                f"targets must be a tuple of at least one name. Got {self.targets!r}."
            )

    @property
    def scale(self) -> float:
        """Of A B."""
        return self.alpha / self.rank

    def is_target(self, path: Path) -> bool:
        """Whether a projection, by its path in the tree of its layer, is wanted."""
        text = f"/{path_text(path)}"
        return any(text.endswith(f"/{target}") for target in self.targets)


def targets(config: DecoderConfig) -> list[str]:
    """Every projection that can have an adapter, by its path in a layer.

    Example usage::

      >>> import shared
      >>> from shared import lora
      >>> lora.targets(shared.preset("gemma-3-tiny"))[:4]
      ['mlp/down_proj', 'mlp/gate_proj', 'mlp/up_proj', 'self_attn/k_proj']
    """
    kinds = dict.fromkeys(config.layers)
    found = (
        path_text(path) for kind in kinds for path, _ in _projections(config, kind)
    )
    return sorted(set(found))


def param_specs(config: DecoderConfig, lora: LoraConfig) -> dict[str, Any]:
    """Every leaf of the adapters, stack axes included, with the names of its axes.

    Raises:
      ConfigError: a target is no projection of the model.
    """
    known = targets(config)
    for target in lora.targets:
        if not any(f"/{name}".endswith(f"/{target}") for name in known):
            raise ConfigError(
                f"targets has {target!r}, which is no projection of the model. It has "
                f"{', '.join(known)}."
            )

    def of_layer(group: Group, run: Run) -> SpecTree:
        return _layer_specs(config, lora, run.kind)

    return _pruned(decoder.stack_specs(config, of_layer))


def init(key: PRNGKeyArray, config: DecoderConfig, lora: LoraConfig) -> dict[str, Any]:
    """New adapters, which change nothing yet: B is zero.

    A is uniform within 1 / sqrt(D), as in PEFT. Equal bytes in every layout: a key
    depends on the layer and the name, as those of parameters do.

    Args:
      key: of all adapters.
      config: of the model.
      lora: which adapters.

    Raises:
      ConfigError: a target is no projection of the model.
    """
    param_specs(config, lora)

    def init_layer(index: Array, kind: LayerKind) -> dict[str, Any]:
        specs = _layer_specs(config, lora, kind)
        return draw_tree(specs, layer_key(key, index), lora.param_dtype)

    traced = isinstance(key, jax.core.Tracer)
    return _pruned(config.plan.build(init_layer, config.param_scan_axis, traced=traced))


def join(
    config: DecoderConfig, params: Mapping[str, Any], adapters: Mapping[str, Any]
) -> dict[str, Any]:
    """Parameters with adapters beside them, for either frontend; no array is copied.

    Args:
      config: of the model.
      params: of the model, without adapters.
      adapters: of `init`; abstract ones do.

    Raises:
      ValueError: lists every leaf of the adapters that does not fit the config.
    """
    check(config, adapters)
    return _joined(params, adapters)


def split(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of `join`: parameters of a model, and the adapters beside them."""
    model: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for path, leaf in flatten(params):
        insert(adapters if _is_adapter(path) else model, path, leaf)
    return model, adapters


def merge(
    config: DecoderConfig, params: Mapping[str, Any], adapters: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain parameters W + s A B, in the dtype of W, summed in at least float32.

    Weights without an adapter are the arrays that were given.

    Args:
      config: of the model.
      params: of the model, without adapters.
      adapters: of it.

    Raises:
      ValueError: lists every leaf of the adapters that does not fit the config.
    """
    tree = join(config, params, adapters)
    for group, run in config.plan.runs():
        path, merged = run_path(group, run), adapted
        for _ in stack_sizes(group, run):
            merged = _over(merged, config.param_scan_axis)
        insert(tree, path, _merged(node_at(tree, path), merged))
    return tree


def relayout(
    config: DecoderConfig, adapters: Mapping[str, Any], **layout: Any
) -> tuple[DecoderConfig, dict[str, Any]]:
    """The same adapters for layers that are stacked in another way.

    Args:
      config: of the model.
      adapters: in the layout of the config's plan.
      **layout: as `shared.relayout` takes it.

    Returns:
      The config with the new layout, and the adapters in it.
    """
    tree: dict[str, Any] = {}
    for group, run in config.plan.runs():
        path = run_path(group, run)
        insert(tree, path, _node(adapters, path))
    new, tree = decoder.relayout(config, tree, **layout)
    return new, _pruned(tree)


def from_qwix(
    config: DecoderConfig, params: Mapping[str, Any], *, rank: int, alpha: float
) -> dict[str, Any]:
    """The adapters that Qwix made in the parameters of a model, as ours.

    Args:
      config: of the model.
      params: with Qwix's LoRA parameters, as nested dicts, in the layout of the plan.
      rank: of Qwix's rule.
      alpha: of Qwix's rule.

    Raises:
      ValueError: a leaf of the adapters does not fit the config.
    """
    _, adapters = split(params)
    for path, spec in flatten(_specs_of(config, adapters, alpha / rank)):
        if path[-1].endswith("_lora_scale"):
            insert(adapters, path, jnp.full(spec.shape, alpha / rank, jnp.float32))
    check(config, adapters)
    return adapters


def check(config: DecoderConfig, adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Compares paths and shapes of adapters with what a model can have.

    Returns:
      Their specs; the rank of each is that of the A given.

    Raises:
      ValueError: lists every leaf that does not fit.
    """
    specs = _specs_of(config, adapters)
    check_same_paths(specs, adapters)
    return specs


def _projections(
    config: DecoderConfig, kind: LayerKind
) -> Iterator[tuple[Path, ParamSpec]]:
    """The matrices of a layer that are applied by `shared.layers.linear`."""
    for path, spec in flatten(decoder_layer.param_specs(config, kind)):
        if len(spec.shape) > 1 and path[-1] != "conv1d":
            yield path, spec


def _layer_specs(
    config: DecoderConfig, lora: LoraConfig, kind: LayerKind
) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    for path, spec in _projections(config, kind):
        if lora.is_target(path):
            _insert_specs(specs, path, spec, lora.rank, lora.scale)
    return specs


def _specs_of(
    config: DecoderConfig, adapters: Mapping[str, Any], scale: float = 1.0
) -> dict[str, Any]:
    """What adapters must be, whose A are those given."""

    def of_layer(group: Group, run: Run) -> SpecTree:
        node = _node(adapters, run_path(group, run))
        specs: dict[str, Any] = {}
        for path, spec in _projections(config, run.kind):
            a = _node(node, path[:-1]).get(f"{path[-1]}_lora_a")
            if a is not None:
                _insert_specs(specs, path, spec, a.shape[-1], scale)
        return specs

    return _pruned(decoder.stack_specs(config, of_layer))


def _insert_specs(
    specs: dict[str, Any], path: Path, spec: ParamSpec, rank: int, scale: float
) -> None:
    """Puts the specs of the adapter of a projection into the tree of its layer."""
    shape, axes, bound = spec.shape, spec.axes, 1 / math.sqrt(spec.shape[-2])
    narrowing, widening = (*shape[:-1], rank), (*shape[:-2], rank, shape[-1])
    parts = (
        ParamSpec(narrowing, (*axes[:-1], None), uniform(-bound, bound)),
        ParamSpec(widening, (*axes[:-2], None, axes[-1]), constant(0.0)),
        ParamSpec((1,), (None,), constant(scale), at_least_float32=True),
    )
    for name, part in zip(ADAPTER, parts, strict=True):
        insert(specs, (*path[:-1], f"{path[-1]}_{name}"), part)


def _is_adapter(path: Path) -> bool:
    return path[-1].endswith(tuple(f"_{part}" for part in ADAPTER))


def _node(tree: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """What is at a path; nothing where the path ends before."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _joined(params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    tree = dict(params)
    for name, node in adapters.items():
        below = tree.get(name, {})
        tree[name] = _joined(below, node) if isinstance(node, Mapping) else node
    return tree


def _over(merged: Any, axis: int) -> Any:
    """The same function of weights with one more stack axis."""
    return lambda weights, name: jax.vmap(
        lambda own: merged(own, name), in_axes=axis, out_axes=axis
    )(weights)


def _merged(node: Mapping[str, Any], merged: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, below in node.items():
        if isinstance(below, Mapping):
            tree[name] = _merged(below, merged)
        elif f"{name}_lora_scale" in node:
            parts = (name, *(f"{name}_{part}" for part in ADAPTER))
            tree[name] = merged({part: node[part] for part in parts}, name)
        elif not _is_adapter((name,)):
            tree[name] = below
    return tree


def _pruned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Without nodes that have no leaves."""
    kept: dict[str, Any] = {}
    for path, leaf in flatten(tree):
        insert(kept, path, leaf)
    return kept
