"""Plants faults in the shared mathematics, and measures what they do to the numbers.

A fault is a function of a `pytest.MonkeyPatch` whose docstring says what is wrong. Both
frontends call the same functions, so they go wrong together: the oracle has to see it.
"""

import contextlib
import functools
import pathlib
import types
from typing import NamedTuple

import jax
import numpy as np
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, oracle
from shared.layers import grouped_query_attention

GOLDENS = pathlib.Path(__file__).parent / "goldens"
TOLERANCES = {"logits": oracle.FORWARD_ATOL, "aux_loss": oracle.LOSS_ATOL}
# A fault has to move the numbers by so many tolerances.
MARGIN = 10
_REFERENCE = {"logits": "logits", "aux_loss": "aux"}


def identity(x):
    return x


def jax_with(**functions):
    """What a module calls `jax`, with some functions of `jax.nn` changed."""
    nn = types.SimpleNamespace(**{**vars(jax.nn), **functions})
    return types.SimpleNamespace(**{**vars(jax), "nn": nn})


def change_rope(patch, change, module=grouped_query_attention):
    """`change`: (heads, config of the rotation) -> another config."""
    original = module.rotate
    patch.setattr(
        module,
        "rotate",
        lambda x, positions, rope: original(x, positions, change(x, rope)),
    )


@contextlib.contextmanager
def planted(fault):
    """`fault` in place; JAX forgets what it traced before and meanwhile."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            jax.clear_caches()
            yield
    finally:
        jax.clear_caches()


class Model(NamedTuple):
    config: shared.DecoderConfig
    params: dict
    frontends: tuple
    golden: dict


@functools.cache
def load(name):
    config, params = shared.checkpoint.load_hf(GOLDENS / name)
    pair = decoders.make_pair(config, params)
    frontends = zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx)
    golden = oracle.read_golden(GOLDENS / name / "golden.npz")
    return Model(config, params, frontends, golden)


def measure(model, section, what="logits", both=True):
    """What the frontends give, and how far `what` of it is from the reference.

    `section` of the golden file has the inputs, and the reference's numbers for them.
    `both`: in NNX, too, not in Linen alone.
    """
    tokens = model.golden[f"{section}/input_ids"]
    positions = model.golden.get(f"{section}/position_ids_text_t_h_w")
    options = {} if positions is None else {"positions": positions[1:]}
    results = []
    for apply in model.frontends[: 1 + both]:
        # One name: where both frontends lower to the same program, it is compiled once.
        def forward(params, tokens, options, apply=apply):
            output = apply(params, tokens, **options)
            given = {"logits": output.logits, "aux_loss": output.aux_loss}
            return {name: x for name, x in given.items() if x is not None}

        with jax.default_matmul_precision("highest"):
            results.append(jax.jit(forward)(model.params, tokens, options))
    reference = model.golden[f"{section}/{_REFERENCE[what]}"]
    return results, max(np.abs(result[what] - reference).max() for result in results)
