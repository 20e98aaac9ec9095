"""The optimizer: AdamW behind a warm-up and a cosine, gradients clipped before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from shared.config import ConfigError, DecoderConfig
from shared.layers.decoder import param_specs
from shared.params import SpecTree, map_specs
from shared.plan import STACK_AXES


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What `make_optimizer` makes.

    Attributes:
      learning_rate: at its peak, after the warm-up.
      warmup_steps: it rises linearly from 0 over so many steps.
      decay_steps: it falls as a cosine until this step, the warm-up included; None: it
        stays.
      final_learning_rate: from then on.
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the square root of that.
      weight_decay: of matrices; norms, biases and the like have none.
      clip_norm: gradients are scaled down to this global norm; None: they are not.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_learning_rate: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} must be positive and finite. Got {getattr(self, name)}."
                )
        for name in ("warmup_steps", "weight_decay", "final_learning_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} must not be negative. Got {getattr(self, name)}."
                )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be in [0, 1). Got {getattr(self, name)}."
                )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm must be positive. Got {self.clip_norm}.")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"decay_steps={self.decay_steps} must be after "
                f"warmup_steps={self.warmup_steps}: it counts from the first step."
            )


def make_optimizer(
    options: OptimizerConfig,
    config: DecoderConfig,
    specs: SpecTree | None = None,
) -> optax.GradientTransformation:
    """The optimizer for the parameters of a model, in the layout of its plan.

    Args:
      options: see there.
      config: of the model.
      specs: of what is trained, such as `shared.lora.param_specs` gives; None: of all
        parameters.

    Example usage::

      >>> import shared
      >>> from shared import training
      >>> config = shared.preset("qwen3-next-tiny")
      >>> optimizer = training.make_optimizer(training.OptimizerConfig(), config)
      >>> state = optimizer.init(shared.abstract_params(config))
    """
    adamw = optax.adamw(
        learning_rate(options),
        b1=options.b1,
        b2=options.b2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        mask=is_matrix(param_specs(config) if specs is None else specs),
    )
    if options.clip_norm is None:
        return adamw
    return optax.chain(clip_by_global_norm(options.clip_norm), adamw)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Of all leaves together, in at least float32."""
    leaves = jax.tree.leaves(tree)
    wide = functools.reduce(
        np.promote_types, (leaf.dtype for leaf in leaves), np.dtype(np.float32)
    )
    squares = [jnp.sum(jnp.square(leaf.astype(wide))) for leaf in leaves]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), wide)))


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Optax's transformation of that name, with the norm of bfloat16 in float32."""

    def clip(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = global_norm(updates)
        scale = limit / jnp.maximum(norm, limit)
        scaled = lambda leaf: (leaf.astype(scale.dtype) * scale).astype(leaf.dtype)
        return jax.tree.map(scaled, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), clip)


def learning_rate(options: OptimizerConfig) -> optax.Schedule:
    """Of a step, counted from 0."""
    if options.decay_steps is not None:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=options.learning_rate,
            warmup_steps=options.warmup_steps,
            decay_steps=options.decay_steps,
            end_value=options.final_learning_rate,
        )
    if not options.warmup_steps:
        return optax.constant_schedule(options.learning_rate)
    return optax.linear_schedule(0.0, options.learning_rate, options.warmup_steps)


def is_matrix(specs: SpecTree) -> dict[str, Any]:
    """Whether a parameter has two dimensions or more, stack axes not counted."""
    return map_specs(
        lambda spec: sum(axis not in STACK_AXES for axis in spec.axes) > 1, specs
    )


def update(
    optimizer: optax.GradientTransformation,
    gradients: Mapping[str, Any],
    opt_state: Any,
    params: Mapping[str, Any],
) -> tuple[dict[str, Any], Any]:
    """The parameters and the optimizer's state after a step; dtypes stay.

    Optax mixes dtypes on the way, which the strict promotion of a caller would refuse.
    """
    with jax.numpy_dtype_promotion("standard"):
        updates, new_state = optimizer.update(gradients, opt_state, params)
        new_params = optax.apply_updates(params, updates)
    keep = lambda new, old: new.astype(old.dtype)
    return (
        jax.tree.map(keep, new_params, dict(params)),
        jax.tree.map(keep, new_state, opt_state),
    )
