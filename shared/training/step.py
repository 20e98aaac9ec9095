"""One step of training, as a pure function of nested dicts of arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from shared.config import ConfigError, DecoderConfig
from shared.layers.decoder import DecoderOutput
from shared.ops import losses
from shared.training.loss import CHUNK_SIZE, decoder_loss
from shared.training.optimizer import global_norm, update
from shared.trees import flatten

State = Mapping[str, Any]  # params, opt_state, step
Batch = Mapping[str, ArrayLike]  # tokens [B, T], and what else `gradients` names
# From what is trained to the parameters of the model.
Complete = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_MODEL_INPUTS = ("segment_ids", "positions")  # besides the tokens


@runtime_checkable
class DecoderFunction(Protocol):
    """What `zoo_linen.as_function` and `zoo_nnx.as_function` give."""

    @property
    def config(self) -> DecoderConfig:
        """Of the model."""

    def __call__(
        self, params: Mapping[str, Any], tokens: Array, **options: Any
    ) -> DecoderOutput:
        """Calls the model."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a step computes its gradients.

    Attributes:
      accumulation_steps: the rows of a batch go through the model in so many parts, one
        after the other.
      z_loss_coef: weight of the z-loss.
      loss_chunk_size: tokens of a row whose logits are held at once.
    """

    accumulation_steps: int = 1
    z_loss_coef: float = 0.0
    loss_chunk_size: int = CHUNK_SIZE

    def __post_init__(self):
        for name in ("accumulation_steps", "loss_chunk_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1. Got {getattr(self, name)}."
                )


class Metrics(NamedTuple):
    """What a step says.

    Attributes:
      loss: that was differentiated.
      cross_entropy: mean over the predicted tokens of the batch.
      z_loss: mean over the same, not weighted.
      router_loss: load-balance loss, not weighted: the mean over the parts of a batch;
        None for a model without experts.
      tokens: how many were predicted.
      gradient_norm: global norm, before clipping.
    """

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]
    router_loss: Float[Array, ""] | None
    tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def gradients(
    function: DecoderFunction,
    params: Mapping[str, Any],
    batch: Batch,
    options: StepOptions = StepOptions(),
    dropout_key: Array | None = None,
    complete: Complete | None = None,
) -> tuple[Metrics, dict[str, Any]]:
    """What the loss of a batch is, and its gradient to every parameter.

    The loss is a mean over all predicted tokens of the batch, in however many parts it
    is computed; the load-balance loss alone is taken part by part. Gradients of several
    parts are added up in at least float32.

    Args:
      function: the model.
      params: its parameters; with `complete`, what is trained instead of them.
      batch: `tokens` [B, T]; optional `segment_ids` and `positions` as the model takes
        them, and `labels`, not shifted (-100: not predicted; the tokens by default).
      options: see there.
      dropout_key: None: no dropout.
      complete: makes the parameters of the model of `params`, such as
        `functools.partial(shared.lora.join, config, base)`.

    Raises:
      ValueError: the rows do not divide into so many parts.
    """
    steps = options.accumulation_steps
    arrays = {name: jnp.asarray(leaf) for name, leaf in batch.items()}
    rows = arrays["tokens"].shape[0]
    if rows % steps:
        raise ValueError(
            f"accumulation_steps={steps} does not divide the {rows} rows of a batch."
        )
    part = functools.partial(_part, function, options, complete)
    if steps == 1:
        (_, metrics), grads = jax.value_and_grad(part, has_aux=True)(
            params, arrays, dropout_key, None
        )
    else:
        metrics, grads = _accumulated(part, params, arrays, dropout_key, steps)
    norm = global_norm(grads)
    return metrics._replace(gradient_norm=norm), grads


def _part(
    function: DecoderFunction,
    options: StepOptions,
    complete: Complete | None,
    params: Mapping[str, Any],
    batch: Mapping[str, Array],
    dropout_key: Array | None,
    whole: tuple[Array, int] | None,
) -> tuple[Array, Metrics]:
    """The loss of some rows; as a share of that of `whole`: its tokens, its parts."""
    config, tokens = function.config, batch["tokens"]
    if complete is not None:
        params = complete(params)
    given = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
    output = function(
        params, tokens, output_logits=False, dropout_key=dropout_key, **given
    )
    loss = decoder_loss(
        output,
        batch.get("labels", tokens),
        config,
        batch.get("segment_ids"),
        params=params,
        z_loss_coef=options.z_loss_coef,
        chunk_size=options.loss_chunk_size,
    )
    total, cross_entropy, router, _, z_loss = loss
    if whole is not None:
        share = loss.tokens / jnp.maximum(whole[0], 1)
        cross_entropy, z_loss = cross_entropy * share, z_loss * share
        total = cross_entropy + options.z_loss_coef * z_loss
        if router is not None:
            router = router / whole[1]
            total = total + config.router_aux_loss_coef * router
    zero = jnp.zeros((), total.dtype)
    return total, Metrics(total, cross_entropy, z_loss, router, loss.tokens, zero)


def _accumulated(
    part: Callable[..., tuple[Array, Metrics]],
    params: Mapping[str, Any],
    batch: Mapping[str, Array],
    dropout_key: Array | None,
    steps: int,
) -> tuple[Metrics, dict[str, Any]]:
    _, counted = losses.next_tokens(
        batch.get("labels", batch["tokens"]), batch.get("segment_ids")
    )
    whole = jnp.sum(counted, dtype=jnp.float32), steps
    parts = {name: _split(leaf, steps) for name, leaf in batch.items()}
    numbers = jnp.arange(steps, dtype=jnp.int32)

    def one(number: Array, rows: Mapping[str, Array]) -> tuple[Metrics, Any]:
        key = dropout_key
        if key is not None:
            key = jax.random.fold_in(key, number)
        (_, metrics), grads = jax.value_and_grad(part, has_aux=True)(
            params, rows, key, whole
        )
        return metrics, jax.tree.map(_wide, grads)

    def add(sums: Any, given: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, one(*given)), None

    shapes = jax.eval_shape(one, numbers[0], jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (metrics, grads), _ = jax.lax.scan(add, zeros, (numbers, parts))
    return metrics, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, dict(params))


def _split(leaf: Array, steps: int) -> Array:
    """Rows in `steps` parts; positions [3, B, T] have theirs in the second axis."""
    axis = leaf.ndim - 2
    shape = *leaf.shape[:axis], steps, -1, *leaf.shape[axis + 1 :]
    return jnp.moveaxis(leaf.reshape(shape), axis, 0)


def _wide(leaf: Array) -> Array:
    return leaf.astype(np.promote_types(leaf.dtype, np.float32))


def init_state(
    params: Mapping[str, Any], optimizer: optax.GradientTransformation
) -> dict[str, Any]:
    """The state before the first step: what `checkpoint.training.Manager` saves."""
    return {
        "params": dict(params),
        "opt_state": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
    }


def train_step(
    function: DecoderFunction,
    optimizer: optax.GradientTransformation,
    state: State,
    batch: Batch,
    options: StepOptions = StepOptions(),
    dropout_key: Array | None = None,
    complete: Complete | None = None,
) -> tuple[dict[str, Any], Metrics]:
    """The state after one step, and what the step says.

    Args:
      function: the model.
      optimizer: from `make_optimizer`, or of your own.
      state: of `init_state`.
      batch: see `gradients`.
      options: see there.
      dropout_key: of the run: a step folds its number into it. None: no dropout.
      complete: see `gradients`; None: the model's parameters are trained themselves.
    """
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, state["step"])
    params = state["params"]
    metrics, grads = gradients(function, params, batch, options, dropout_key, complete)
    params, opt_state = update(optimizer, grads, state["opt_state"], params)
    new = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
    return new, metrics


def state_shardings(
    state: Mapping[str, Any], param_shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """Where a training state stands: what follows a parameter stands where that does.

    All else, such as counts, is whole on every device.

    Args:
      state: of `init_state`; shapes do.
      param_shardings: of `shared.sharding.tree_shardings`.
    """
    named = dict(flatten(param_shardings))
    mesh = next(iter(named.values())).mesh
    shapes = {path: leaf.shape for path, leaf in flatten(state["params"])}
    whole = NamedSharding(mesh, PartitionSpec())

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = [getattr(key, "key", None) for key in path]
        for start in range(len(keys)):
            found = tuple(keys[start:])
            if found in named and shapes[found] == leaf.shape:
                return named[found]
        return whole

    placed: dict[str, Any] = jax.tree_util.tree_map_with_path(place, dict(state))
    return placed
