"""Runs the layers of a plan with Linen's own lifted scan and rematerialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array

from shared.config import DecoderConfig, rematerialised
from shared.context import Context
from shared.layers.decoder import PerLayer
from shared.layers.decoder_layer import KEEP_SINGLE_TRIP, pass_keys_on
from shared.plan import STACK_AXES, Group, Run, cache_slot

# The residual stream, the caches of what is run, and the keys to lend, by mixer.
Carry = tuple[Array, Any, Any]
REST = nn.DenyList("params")  # everything a layer may own besides its parameters


class Block(nn.Module):
    """One repeat of a group: its runs, one after the other.

    Attributes:
      config: of the model.
      group: of the plan.
      layer: class of the layers.
    """

    config: DecoderConfig
    group: Group
    layer: type[nn.Module]

    @nn.compact
    def __call__(
        self, carry: Carry, context: Context, told: Mapping[str | None, Any]
    ) -> tuple[Carry, dict[str | None, Any]]:
        """Runs the block; caches and results are held by the name of the run."""
        x, caches, lent = carry
        new_caches, aux = {}, {}
        for run in self.group.runs:
            layer = self.layer(self.config, run.kind, name=run.name)
            carry = x, None if caches is None else caches[run.name], lent
            carry, aux[run.name] = run_layers(
                layer, self.group, run, carry, context, told[run.name], self.config
            )
            x, new_caches[run.name], lent = carry
        return (x, None if caches is None else new_caches, lent), aux


def run_group(
    block: Block,
    group: Group,
    carry: Carry,
    context: Context,
    told: Mapping[str | None, Any],
) -> tuple[Carry, dict[str | None, Any]]:
    """Runs a block once, or scans it over its repeats; `told` is sliced as weights."""
    if group.repeats is None:
        return block(carry, context, told)
    call, config = Block.__call__, block.config
    if config.is_flat(group):
        call = rematerialised(call, config, nn.remat)
    scan = _scan(call, group.repeats, STACK_AXES[0], config)
    return scan(block, carry, context, told)


def run_layers(
    layer: nn.Module,
    group: Group,
    run: Run,
    carry: Carry,
    context: Context,
    told: PerLayer,
    config: DecoderConfig,
) -> tuple[Carry, Any]:
    """Runs equal layers by scan, a rematerialised one alone by a scan of length one.

    Caches of stacked layers are carried whole, and each layer writes into them what is
    its own: as inputs and outputs of the scan they would be copied at every step.

    The scan of length one closes over the weights: carried, they would be saved for
    the backward pass of every block. Of the layer's other variables it carries those
    that may change; what is made on the way, such as sown values, has no stack axis.

    In a flat block there is no inner loop, and the block is rematerialised as a whole.
    """
    flat = config.is_flat(group)

    def call(
        layer: nn.Module, x: Array, cache: Any, context: Context, told: PerLayer
    ) -> tuple[Array, Any, Any]:
        slot = () if cache is None else cache_slot(group, run, told.layer)
        return layer(x, context.at_layer(told.layer, slot, told.input), cache)

    if not flat:
        call = rematerialised(call, config, nn.remat)

    def step(
        layer: nn.Module, carry: Carry, context: Context, told: PerLayer
    ) -> tuple[Carry, Any]:
        x, cache, lent = carry
        x, cache, aux = call(layer, x, cache, context, told)
        lent, aux = pass_keys_on(lent, aux, run.kind)
        return (x, cache, lent), aux

    if run.stacked:
        unroll = run.length if flat else 1
        scan = _scan(step, run.length, STACK_AXES[1], config, unroll)
        return scan(layer, carry, context, told)
    if not config.loops_over_one(group):
        return step(layer, carry, context, told)
    held = [n for n in layer.variables if n not in ("params", "intermediates")]
    changing = [name for name in held if layer.is_mutable_collection(name)]
    fixed = ["params", *(name for name in held if name not in changing)]
    made = nn.DenyList((*fixed, *changing))
    once = nn.scan(
        step,
        variable_broadcast=fixed,
        variable_carry=changing,
        variable_axes={made: 0},
        split_rngs={nn.DenyList("params"): True, "params": False},
        in_axes=nn.broadcast,
        length=1,
        # Without the check, parameters that others make on the way (Qwix) are lost.
        check_constancy_invariants=layer.is_initializing(),
    )
    once = nn.map_variables(once, made, _add_axis, _drop_axis, mutable=True)
    with set_xla_metadata(**KEEP_SINGLE_TRIP):
        carry, aux = once(layer, carry, context, told)
    return carry, _drop_axis(aux)


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _drop_axis(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _scan(
    step: Callable[..., Any],
    length: int,
    axis_name: str,
    config: DecoderConfig,
    unroll: int = 1,
) -> Callable[..., Any]:
    return nn.scan(
        step,
        variable_axes={"params": config.param_scan_axis, REST: 0},
        split_rngs={True: True},
        in_axes=(nn.broadcast, 0),
        length=length,
        unroll=unroll,
        check_constancy_invariants=False,
        metadata_params={nn.PARTITION_NAME: axis_name},
    )
