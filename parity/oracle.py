"""Comparison with a reference's numbers: an npz as `parity golden` writes it.

| keys | what |
|---|---|
| fwd/S/input_ids, fwd/S/logits | plain rows of length S |
| leftpad/*, rightpad/* | input_ids, attention_mask, position_ids, logits |
| hidden65/embed, layer_i, final_norm | residual stream for fwd/65 |
| loss/input_ids, labels, ce, total, aux | one batch with its losses |
| loss_masked/labels, ce, total, aux | the same for rightpad's batch |
| mrope/* | input_ids, position_ids_text_t_h_w, logits |
| grad/names, norm, proj | gradient of loss/total by tensor name |

`norm` is the L2 norm of a tensor's gradient and `proj` its sum with cos(0), cos(1), …:
the second tells layouts apart.
"""

from __future__ import annotations

import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import shared
from parity.decoders import Apply
from parity.reporting.report import Tier
from parity.trees import Comparison, Difference
from shared.checkpoint import hf_names

# float32 against float32 of another framework. The delta rule amplifies rounding: the
# reference itself is 1e-4 from float64 on these models (3e-3 at the worst), and padding
# moves the edges of chunks (up to 1e-3 within the reference). Where the reference's
# numbers are small (root mean square under 1), the tolerance shrinks along.
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
    matches = list(compare_golden(config, params, apply, golden))
    differences = tuple(
        Difference(m.name, "value", f"off by {m.error:.3g}, allowed {m.tolerance:.3g}")
        for m in matches
        if not m.error <= m.tolerance
    )
    differences += tuple(
        Difference(m.name, "empty", "0 elements were compared")
        for m in matches
        if m.elements == 0
    )
    worst = max((m.error / m.tolerance for m in matches), default=0.0)
    compared = Comparison(len(matches), sum(m.elements for m in matches), differences)
    note = f"{name}: worst {worst:.2f} of the tolerance"
    unknown = {key.split("/")[0] for key in golden} - set(_SECTIONS)
    if unknown:
        note += f"; not compared: {', '.join(sorted(unknown))}"
    return Tier("oracle", compared, len(matches), note)


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
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise OracleError(f"{path} is no npz of plain arrays: {error}") from error
    if not _sections_of(golden):
        raise OracleError(
            f"{path} holds none of {', '.join(_SECTIONS)}. Its keys begin with "
            f"{', '.join(sorted({name.split('/')[0] for name in golden}))}."
        )
    return golden


class _Keys(dict[str, Any]):
    """Arrays or tensors by name; to lack one is bad input."""

    def __missing__(self, name: str) -> Any:
        raise OracleError(
            f"{name!r} is needed, but there is none: the golden file is not complete, "
            "or belongs to another model. `parity golden` writes one."
        )


class _Inputs(NamedTuple):
    """What a section is compared with; `keys` are those of the section."""

    section: str
    keys: Mapping[str, np.ndarray]
    golden: Mapping[str, np.ndarray]
    config: shared.DecoderConfig
    params: Mapping[str, Any]
    run: Apply


def compare_golden(
    config: shared.DecoderConfig,
    params: Mapping[str, Any],
    apply: Apply,
    golden: Mapping[str, np.ndarray],
    run: Apply | None = None,
) -> Iterator[Match]:
    """Runs the model on each section of `golden` and measures the distance.

    One function serves all sections: `run`, if the caller has a `runner` that gives
    hidden states where `golden` has some, else one of its own.
    """
    hidden = any(section.startswith("hidden") for section in _sections_of(golden))
    run = run or runner(apply, hidden)
    golden = _Keys(golden)
    for section in _sections_of(golden):
        compare = _SECTIONS[section]
        keys = _Keys((k, v) for k, v in golden.items() if k.split("/")[0] == section)
        yield from compare(_Inputs(section, keys, golden, config, params, run))


def runner(apply: Apply, hidden_states: bool) -> Apply:
    """`apply`, jitted: inputs of one shape compile once."""

    @jax.jit
    def compiled(*args: Any, **kw: Any) -> shared.DecoderOutput:
        return apply(*args, output_hidden_states=hidden_states, **kw)

    def run(*args: Any, **kw: Any) -> shared.DecoderOutput:
        with jax.default_matmul_precision("highest"):
            return compiled(*args, **kw)

    return run


def _sections_of(golden: Mapping[str, np.ndarray]) -> list[str]:
    there = {name.split("/")[0] for name in golden}
    return [section for section in _SECTIONS if section in there]


def _forward(inputs: _Inputs) -> Iterator[Match]:
    lengths = {key.split("/")[1] if "/" in key else "" for key in inputs.keys}
    if not all(length.isdigit() for length in lengths):
        raise OracleError(
            f"Keys of {inputs.section} must be {inputs.section}/LENGTH/…. "
            f"Got {', '.join(sorted(inputs.keys))}."
        )
    for length in sorted(lengths, key=int):
        tokens = inputs.keys[f"{inputs.section}/{length}/input_ids"]
        name = f"{inputs.section}/{length}/logits"
        logits = inputs.run(inputs.params, tokens).logits
        yield _scaled(name, logits, inputs.keys[name], FORWARD_ATOL)


def _padded(inputs: _Inputs) -> Iterator[Match]:
    name = f"{inputs.section}/logits"
    real = inputs.keys[f"{inputs.section}/attention_mask"] > 0
    mine = np.asarray(_run_padded(inputs, inputs.section).logits)
    yield _scaled(name, mine[real], inputs.keys[name][real], PADDED_ATOL)


def _multimodal(inputs: _Inputs) -> Iterator[Match]:
    """Positions by time, height and width, as of images between text."""
    name = f"{inputs.section}/logits"
    positions = inputs.keys[f"{inputs.section}/position_ids_text_t_h_w"][1:]
    tokens = inputs.keys[f"{inputs.section}/input_ids"]
    logits = inputs.run(inputs.params, tokens, positions=positions).logits
    yield _scaled(name, logits, inputs.keys[name], FORWARD_ATOL)


def _run_padded(inputs: _Inputs, section: str) -> shared.DecoderOutput:
    """The padded batch of a section; its mask is one segment and padding."""
    return inputs.run(
        inputs.params,
        inputs.golden[f"{section}/input_ids"],
        positions=inputs.golden[f"{section}/position_ids"],
        segment_ids=inputs.golden[f"{section}/attention_mask"],
    )


def _hidden(inputs: _Inputs) -> Iterator[Match]:
    length = inputs.section.removeprefix("hidden")
    tokens = inputs.golden[f"fwd/{length}/input_ids"]
    states = inputs.run(inputs.params, tokens).hidden_states
    assert states is not None
    named = _Keys(embed=states.embedding, final_norm=states.final_norm)
    named |= {f"layer_{i}": layer for i, layer in enumerate(states.layers)}
    for key, reference in inputs.keys.items():
        part = key.split("/")[1]
        if part in named or part.startswith("layer_"):
            yield _scaled(key, named[part], reference, FORWARD_ATOL)


def _loss(inputs: _Inputs) -> Iterator[Match]:
    section, keys = inputs.section, inputs.keys
    segment_ids, tokens = None, keys.get(f"{section}/input_ids")
    if tokens is not None:
        output = inputs.run(inputs.params, tokens)
    else:
        segment_ids = jnp.asarray(inputs.golden["rightpad/attention_mask"])
        output = _run_padded(inputs, "rightpad")
    labels = jnp.asarray(keys[f"{section}/labels"])
    loss = shared.decoder_loss(output, labels, inputs.config, segment_ids)
    total = loss.total if _adds_router_loss(inputs.golden) else loss.cross_entropy
    parts = {"ce": loss.cross_entropy, "total": total, "aux": loss.router}
    for part, value in parts.items():
        key = f"{section}/{part}"
        if key in keys:
            yield _absolute(key, value, keys[key], LOSS_ATOL)
    key = f"{section}/router_logits"
    if key in keys:
        mine = np.asarray(output.router_logits).reshape(keys[key].shape)
        yield _scaled(key, mine, keys[key], FORWARD_ATOL)


def compare_gradients(
    config: shared.DecoderConfig,
    params: Mapping[str, Any],
    apply: Apply,
    golden: Mapping[str, np.ndarray],
) -> Iterator[Match]:
    """Norm and signature of the gradient of loss/total, tensor by tensor."""
    labels = jnp.asarray(golden["loss/labels"])
    adds_router_loss = _adds_router_loss(golden)

    def total(params: Mapping[str, Any]) -> Array:
        output = apply(params, golden["loss/input_ids"])
        loss = shared.decoder_loss(output, labels, config)
        return loss.total if adds_router_loss else loss.cross_entropy

    with jax.default_matmul_precision("highest"):
        gradients = jax.jit(jax.grad(total))(params)
    names = [str(name) for name in golden["grad/names"]]
    prefix, ignored = hf_names.find_prefix(names), hf_names.ignored(config, names)
    mine = _Keys(shared.checkpoint.hf_tensors(config, gradients, prefix=prefix))
    for name, norm, projection in zip(
        names, golden["grad/norm"], golden["grad/proj"], strict=True
    ):
        if name in ignored:  # of what is no part of the decoder
            continue
        tensor = np.asarray(mine[name], np.float64).ravel()
        signature = np.sum(tensor * np.cos(np.arange(tensor.size)))
        size = float(np.linalg.norm(tensor))
        yield _relative(f"grad/norm/{name}", size, norm, norm)
        yield _relative(f"grad/proj/{name}", float(signature), projection, norm)


def _adds_router_loss(golden: Mapping[str, np.ndarray]) -> bool:
    """A multimodal class of the reference leaves it out of the total."""
    return "loss/aux" in golden


def _gradient(inputs: _Inputs) -> Iterator[Match]:
    yield from compare_gradients(
        inputs.config, inputs.params, inputs.run, inputs.golden
    )


_SECTIONS: dict[str, Callable[[_Inputs], Iterator[Match]]] = {
    "fwd": _forward,
    "leftpad": _padded,
    "rightpad": _padded,
    "hidden65": _hidden,
    "hidden5": _hidden,
    "loss": _loss,
    "loss_masked": _loss,
    "mrope": _multimodal,
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


def _scaled(name: str, mine: Any, reference: Any, tolerance: float) -> Match:
    """As `_absolute`, but small numbers have to be as near in proportion."""
    size = float(np.sqrt(np.mean(np.square(np.asarray(reference, np.float64)))))
    return _absolute(name, mine, reference, tolerance * min(1.0, size))


def _relative(name: str, mine: float, reference: float, scale: float) -> Match:
    floor = 1e-6  # below it a gradient is rounding
    error = abs(float(mine) - float(reference)) / max(float(scale), floor)
    return Match(name, error, GRADIENT_RTOL, 1)
