"""Comparison with a reference's numbers: an npz as `parity golden` writes it.

| keys | what |
|---|---|
| fwd/S/input_ids, fwd/S/logits | plain rows of length S |
| leftpad/*, rightpad/* | input_ids, attention_mask, position_ids, logits |
| hidden65/embed, layer_i, final_norm | residual stream for fwd/65 |
| loss/input_ids, labels, ce, total, aux | one batch with its losses |
| loss_masked/labels, ce, total, aux | the same for rightpad's batch |
| grad/names, norm, proj | gradient of loss/total by tensor name |

`norm` is the L2 norm of a tensor's gradient and `proj` its sum with cos(0), cos(1), …:
the second tells layouts apart.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import shared
from parity.decoders import Apply
from parity.report import Tier
from parity.trees import Comparison, Difference

# float32 against float32 of another framework. The delta rule amplifies rounding: the
# reference itself is 1e-4 from float64 on these models (3e-3 at the worst), and padding
# moves the edges of chunks (up to 1e-3 within the reference).
FORWARD_ATOL = 2e-3
PADDED_ATOL = 5e-3
LOSS_ATOL = 1e-4
GRADIENT_RTOL = 1e-3


class OracleError(ValueError):
    """A golden file that cannot be read or does not fit the model."""


class Match(NamedTuple):
    """One array against the reference's.

    Attributes:
      name: key in the golden file.
      error: largest absolute difference (for gradients relative).
      tolerance: largest that is allowed.
      elements: how many numbers were compared.
    """

    name: str
    error: float
    tolerance: float
    elements: int


def check_oracle(
    config: shared.DecoderConfig,
    params: Mapping[str, Any],
    apply: Apply,
    golden: Mapping[str, np.ndarray],
    name: str,
) -> Tier:
    """Compares everything in `golden` that this version knows."""
    with jax.default_matmul_precision("highest"):
        matches = list(compare_golden(config, params, apply, golden))
    differences = tuple(
        Difference(m.name, "value", f"off by {m.error:.3g}, allowed {m.tolerance:.3g}")
        for m in matches
        if not m.error <= m.tolerance
    )
    worst = max((m.error / m.tolerance for m in matches), default=0.0)
    compared = Comparison(len(matches), sum(m.elements for m in matches), differences)
    return Tier(
        "oracle", compared, len(matches), f"{name}: worst {worst:.2f} of the tolerance"
    )


def read_golden(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a golden file.

    Raises:
      OracleError: there is none, it is no npz, or it holds nothing this version knows.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise OracleError(f"No golden file at {path}. `parity golden` writes one.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            golden = {name: arrays[name] for name in arrays}
    except (ValueError, OSError, EOFError) as error:
        raise OracleError(f"{path} is no npz of plain arrays: {error}") from error
    if not any(name.split("/")[0] in _SECTIONS for name in golden):
        raise OracleError(
            f"{path} holds none of {', '.join(_SECTIONS)}. Its keys begin with "
            f"{', '.join(sorted({name.split('/')[0] for name in golden}))}."
        )
    return golden


def compare_golden(
    config: shared.DecoderConfig,
    params: Mapping[str, Any],
    apply: Apply,
    golden: Mapping[str, np.ndarray],
) -> Iterator[Match]:
    """Runs the model on each section of `golden` and measures the distance."""
    run = jax.jit(apply, static_argnames="output_hidden_states")
    for section, compare in _SECTIONS.items():
        keys = {k: v for k, v in golden.items() if k.split("/")[0] == section}
        if keys:
            yield from compare(section, keys, config, params, run, golden)


def _forward(section, keys, config, params, run, golden) -> Iterator[Match]:
    del config, golden
    lengths = sorted({int(key.split("/")[1]) for key in keys})
    for length in lengths:
        tokens = keys[f"{section}/{length}/input_ids"]
        name = f"{section}/{length}/logits"
        logits = run(params, tokens).logits
        yield _absolute(name, logits, keys[name], FORWARD_ATOL)


def _padded(section, keys, config, params, run, golden) -> Iterator[Match]:
    del config, golden
    mask = keys[f"{section}/attention_mask"]
    output = run(
        params,
        keys[f"{section}/input_ids"],
        positions=keys[f"{section}/position_ids"],
        segment_ids=mask,
    )
    name = f"{section}/logits"
    real = mask > 0
    yield _absolute(
        name, np.asarray(output.logits)[real], keys[name][real], PADDED_ATOL
    )


def _hidden(section, keys, config, params, run, golden) -> Iterator[Match]:
    tokens = golden[f"fwd/{section.removeprefix('hidden')}/input_ids"]
    states = run(params, tokens, output_hidden_states=True).hidden_states
    named = {"embed": states.embedding, "final_norm": states.final_norm}
    named |= {f"layer_{i}": states.layers[i] for i in range(config.num_layers)}
    for key in keys:
        part = key.split("/")[1]
        if part in named:
            yield _absolute(key, named[part], keys[key], FORWARD_ATOL)


def _loss(section, keys, config, params, run, golden) -> Iterator[Match]:
    segment_ids, inputs = None, keys.get(f"{section}/input_ids")
    if inputs is None:
        inputs = golden["rightpad/input_ids"]
        segment_ids = golden["rightpad/attention_mask"]
    output = run(params, inputs, segment_ids=segment_ids)
    labels = keys[f"{section}/labels"]
    loss = shared.decoder_loss(output, labels, config, segment_ids)
    parts = {"ce": loss.cross_entropy, "total": loss.total, "aux": loss.router}
    for part, value in parts.items():
        key = f"{section}/{part}"
        if key in keys:
            yield _absolute(key, value, keys[key], LOSS_ATOL)
    key = f"{section}/router_logits"
    if key in keys:
        mine = np.asarray(output.router_logits).reshape(keys[key].shape)
        yield _absolute(key, mine, keys[key], FORWARD_ATOL)


def _gradient(section, keys, config, params, run, golden) -> Iterator[Match]:
    def total(params):
        output = run(params, golden["loss/input_ids"])
        return shared.decoder_loss(output, golden["loss/labels"], config).total

    gradients = jax.jit(jax.grad(total))(params)
    mine = dict(shared.checkpoint.hf_tensors(config, gradients))
    norms = dict(zip(keys["grad/names"], keys["grad/norm"], strict=True))
    projections = dict(zip(keys["grad/names"], keys["grad/proj"], strict=True))
    for name, norm in norms.items():
        tensor = np.asarray(mine[str(name)], np.float64).ravel()
        yield _relative(f"grad/norm/{name}", np.linalg.norm(tensor), norm, norm)
        projection = np.sum(tensor * np.cos(np.arange(tensor.size)))
        yield _relative(f"grad/proj/{name}", projection, projections[name], norm)


_SECTIONS: dict[str, Callable[..., Iterator[Match]]] = {
    "fwd": _forward,
    "leftpad": _padded,
    "rightpad": _padded,
    "hidden65": _hidden,
    "hidden5": _hidden,
    "loss": _loss,
    "loss_masked": _loss,
    "grad": _gradient,
}


def _absolute(name: str, mine: Any, reference: Any, tolerance: float) -> Match:
    mine, reference = np.asarray(mine, np.float64), np.asarray(reference, np.float64)
    if mine.shape != reference.shape:
        raise OracleError(
            f"{name} has shape {reference.shape} in the golden file, but the model "
            f"gives {mine.shape}: the file belongs to another model."
        )
    error = float(np.max(np.abs(mine - reference), initial=0.0))
    return Match(name, error, tolerance, mine.size)


def _relative(name: str, mine: float, reference: float, scale: float) -> Match:
    floor = 1e-6  # below it a gradient is rounding
    error = abs(float(mine) - float(reference)) / max(float(scale), floor)
    return Match(name, error, GRADIENT_RTOL, 1)
