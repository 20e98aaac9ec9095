"""Decoding in both frontends: every step to the bit, and what the answer should be.

B rows, T time, V vocabulary, N ids of a row: one after prefill, one after each step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import shared
import zoo_nnx
from parity import decoders
from parity.decoders import Example, Moment, Pair, Prompt, Side, Sides
from parity.pairs import tolerance
from parity.reporting.report import Status, Tier
from parity.trees import Comparison, Difference, compare_bytes, compare_structure
from shared import generation
from shared.generation import rows as row_states
from shared.generation.generate import tokens_of
from shared.generation.rows import Emitted

Plain = Callable[[Mapping[str, Any], Example], Mapping[str, Any]]

MOVES = 2  # runs with moved weights, which tell what rounding may do
# A cached pass adds up in other orders than a plain one; a move rounds each weight.
# Measured on tests/goldens/qwen3_next_6l (6 seeds) the distance of the passes is at
# most 0.8 of that of a move in float32, and 0.07 in bfloat16.
MOST_MOVES = 8.0


# The decode tier.


class Answer(NamedTuple):
    """What was decoded greedily.

    Attributes:
      prompt: what was read first.
      ids: int [N, B].
      logits: [N, B, V], whose arg-max the ids are.
    """

    prompt: Prompt
    ids: np.ndarray
    logits: np.ndarray


class Definition(NamedTuple):
    """Decoded ids beside the arg-max of a plain forward pass over the growing prefix.

    Attributes:
      compared: a leaf a row, an element for each id that could be judged.
      undecided: a line for each that could not: two logits so near that rounding
        chooses between them.
      distance: the largest between logits with a cache and without.
      explained: the largest that rounding explains.
    """

    compared: Comparison
    undecided: tuple[str, ...]
    distance: float
    explained: float

    @property
    def near(self) -> bool:
        """Whether rounding explains all that a cache changes."""
        return self.distance <= self.explained

    def lines(self) -> tuple[str, ...]:
        """What could not be judged, and why."""
        if self.near:
            return self.undecided
        said = (
            f"inconclusive: logits with a cache are up to {self.distance:.3g} from "
            f"those without, of which rounding explains {self.explained:.3g}"
        )
        return (*self.undecided, said)


def check_decode(
    pair: Pair, seed: int = 0, sides: Sides | None = None, plain: Plain | None = None
) -> Tier:
    """Rows of different lengths are read in one padded batch, then decoded greedily.

    Both frontends have Linen's weights. Each step is compared to the bit, and the ids
    are judged by a plain forward pass, which has no cache.

    Args:
      pair: over arrays.
      seed: of the prompt, and of the moves that measure rounding.
      sides: of the pair, if they are there already.
      plain: gives the "logits" of an `Example`; None: Linen's forward is compiled.
    """
    held = compare_structure(pair.params, zoo_nnx.to_params(pair.nnx))
    if not decoders.fits(held):
        note = "Linen's weights do not fit into NNX"
        return Tier("decode", Comparison(), note=note, status="skipped")
    sides = sides or decoders.make_sides(pair)
    prompt = draw_prompt(pair.config, seed)
    decode = lambda side: decode_greedily(side, pair.params, prompt)
    moments = decoders.both(decode, sides)
    compared = _compare(pair.config, *moments)
    repeated = [
        _compare(pair.config, decode(side), first)
        for side, first in zip(sides, moments, strict=True)
    ]
    # Where all is equal, one answer is both.
    answers = {"linen ": moments[0], "nnx ": moments[1]}
    if not compared.differences:
        answers = {"": moments[0]}
    details: tuple[str, ...] = ()
    conclusive, measure = True, _Measure(pair, plain or _forward(sides[0]), seed)
    for name, found in answers.items():
        judged = measure(_answer(prompt, found))
        compared += judged.compared.under(f"{name.strip()}/" if name else "")
        details += tuple(name + line for line in judged.lines())
        conclusive &= judged.near and judged.compared.elements > 0
    status: Status = "proved" if conclusive else "inconclusive"
    return Tier(
        "decode",
        compared,
        len(prompt.lengths),
        f"prefill and {decoders.STEPS} steps under jit: logits, ids, every cache leaf, "
        "to the bit; ids: arg-max of a plain forward pass",
        "failed" if compared.differences else status,
        details,
        deterministic=not any(again.differences for again in repeated),
    )


def draw_prompt(config: shared.DecoderConfig, seed: int) -> Prompt:
    """Random tokens: the first row is full, the others are shorter."""
    random = np.random.default_rng(seed)
    rows, time = decoders.ROWS, decoders.PROMPT
    lengths = random.integers(2, time - 1, rows, dtype=np.int32)
    lengths[0] = time
    tokens = random.integers(0, config.vocab_size, (rows, time), dtype=np.int32)
    return Prompt(np.where(np.arange(time) < lengths[:, None], tokens, 0), lengths)


def compare_moments(
    config: shared.DecoderConfig, left: Any, right: Any, name: str
) -> Comparison:
    """Two results of one call: each field, and each leaf of each layer's cache.

    Args:
      config: of the model.
      left: a named tuple of arrays, of rows of arrays, and a cache.
      right: the same of the other side.
      name: before each path.
    """
    trees = [_as_dicts(config, moment) for moment in (left, right)]
    return compare_bytes(*trees, finite=True).under(f"{name}/")


def judge(plain: np.ndarray, answer: Answer, moved: float) -> Definition:
    """Whether the ids of an answer are those of a plain forward pass.

    An id is judged only where no tie is near: two logits of the plain pass whose gap is
    within the floor of the noise. That is twice the distance of cached and plain logits
    in this run, as far as rounding explains the distance.

    Args:
      plain: [N, B, V], logits without a cache over prompt and answer.
      answer: what was decoded.
      moved: how far plain logits move where every weight is rounded once.
    """
    distance = float(np.max(np.abs(plain - answer.logits)))
    explained = MOST_MOVES * moved
    floor = 2 * min(distance, explained)
    wrong, undecided, count = [], [], 0
    for step, row in np.ndindex(answer.ids.shape):
        logits, chosen = plain[step, row], int(answer.ids[step, row])
        best = int(np.argmax(logits))
        rest = np.where(np.arange(logits.size) == chosen, -np.inf, logits)
        other = int(np.argmax(rest))
        gap = abs(float(logits[chosen]) - float(logits[other]))
        where = f"row_{row}/{_name(step)}"
        said = f"decoded {chosen}, arg-max of the plain forward pass {best}"
        if gap <= floor:
            said += f"; {chosen} and {other} are {gap:.3g} apart, the noise is"
            undecided.append(f"{where}: inconclusive: {said} {floor:.3g}")
            continue
        count += 1
        if chosen != best:
            said += f", {gap:.3g} above it; the noise is {floor:.3g}"
            wrong.append(Difference(f"definition/{where}", "id", said, gap))
    compared = Comparison(answer.ids.shape[1], count, tuple(wrong))
    return Definition(compared, tuple(undecided), distance, explained)


def decode_greedily(
    side: Side, params: Mapping[str, Any], prompt: Prompt
) -> list[Moment]:
    """What one frontend gives after prefill, and after each step."""
    moments = [side.read(params, prompt, decoders.new_cache(side.apply.config))]
    for _ in range(decoders.STEPS):
        last = moments[-1]
        moments.append(side.step(params, last.ids, last.cache))
    return moments


class _Measure:
    """Judges answers by plain forward passes."""

    def __init__(self, pair: Pair, plain: Plain, seed: int):
        self.params, self.plain = pair.params, plain
        random = np.random.default_rng(seed)
        coarsest = float(jax.numpy.finfo(pair.config.dtype).eps)
        self.moved = [
            tolerance.move(pair.params, random, coarsest) for _ in range(MOVES)
        ]

    def __call__(self, answer: Answer) -> Definition:
        plain, *moved = (
            self._logits(params, answer) for params in (self.params, *self.moved)
        )
        apart = (float(np.max(np.abs(each - plain))) for each in moved)
        return judge(plain, answer, max(apart))

    def _logits(self, params: Mapping[str, Any], answer: Answer) -> np.ndarray:
        """After each prefix [N, B, V], from one pass over prompts and answers."""
        (tokens, lengths), ids = answer.prompt, answer.ids
        example = np.zeros((decoders.ROWS, decoders.LENGTH), np.int32)
        segments = np.zeros_like(example)
        example[:, : tokens.shape[1]] = tokens
        for row, length in enumerate(lengths):
            end = length + len(ids) - 1  # the last id is never read
            example[row, length:end] = ids[:-1, row]
            segments[row, :end] = 1
        logits = self.plain(params, Example(example, example, segments))["logits"]
        at = lengths[None] - 1 + np.arange(len(ids))[:, None]
        wide = np.asarray(logits).astype(np.float64)
        return wide[np.arange(len(lengths))[None], at]


def _forward(side: Side) -> Plain:
    run = decoders.jitted(side.forward, decoders.quick_options())
    return lambda params, example: {"logits": run(params, example).logits}


def _answer(prompt: Prompt, moments: Sequence[Moment]) -> Answer:
    ids = np.stack([np.asarray(moment.ids) for moment in moments])
    logits = np.stack([np.asarray(moment.logits) for moment in moments])
    return Answer(prompt, ids, logits.astype(np.float64))


def _compare(
    config: shared.DecoderConfig, left: Sequence[Moment], right: Sequence[Moment]
) -> Comparison:
    compared = (
        compare_moments(config, a, b, _name(step))
        for step, (a, b) in enumerate(zip(left, right, strict=True))
    )
    return sum(compared, Comparison())


def _name(step: int) -> str:
    return f"step_{step}" if step else "prefill"


def _as_dicts(config: shared.DecoderConfig, moment: Any) -> dict[str, Any]:
    named = moment._asdict()
    layers = shared.to_layer_list(config, named.pop("cache"))
    caches = {f"layer_{i}": layer._asdict() for i, layer in enumerate(layers)}
    return {**named, "cache": caches}


# Generation in both frontends, with all settings.


class Generated(NamedTuple):
    """What a call of generation gives.

    Attributes:
      logits: [B, V].
      ids: [B], chosen from them; of rows that have ended, the last.
      log_probs: [B].
      new: [B], whether the row has a token here.
      last: [B], whether it is the row's last.
      cache: continued.
    """

    logits: Any
    ids: Any
    log_probs: Any
    new: Any
    last: Any
    cache: Any


def stream_both(
    sides: Sequence[generation.DecoderFunction],
    params: Mapping[str, Any],
    batch: generation.Batch,
    *,
    chunk_size: int | None = None,
) -> Iterator[tuple[list[generation.Token], Comparison]]:
    """Continues prompts in both frontends, step by step.

    Args:
      sides: both decoders. The tokens are the first one's.
      params: of both.
      batch: prompts and settings.
      chunk_size: see `generation.prefill`.

    Returns:
      Of each step the new tokens, and how the two compare in all they computed.
    """
    config = sides[0].config

    def begin(side: generation.DecoderFunction) -> Any:
        with jax.default_matmul_precision("highest"):
            cache = shared.init_cache(side.config, len(batch.lengths), batch.max_length)
            return _begin(side, params, cache, batch, chunk_size)

    def go_on(at: Any) -> Any:
        side, (found, rows) = at
        with jax.default_matmul_precision("highest"):
            return _go_on(side, params, found.cache, rows, batch.stop_tokens)

    states = decoders.both(begin, sides)
    for step in itertools.count():
        (first, _), (second, _) = states
        emitted = Emitted(first.ids, first.log_probs, first.new, first.last)
        tokens = list(tokens_of(emitted, batch.stop_tokens))
        yield tokens, compare_moments(config, first, second, _name(step))
        if not any(np.any(rows.active) for _, rows in states):
            return
        states = decoders.both(go_on, list(zip(sides, states, strict=True)))


@functools.partial(jax.jit, static_argnames=("model", "chunk_size"))
def _begin(
    model: generation.DecoderFunction,
    params: Mapping[str, Any],
    cache: Any,
    batch: generation.Batch,
    chunk_size: int | None,
) -> tuple[Generated, row_states.Rows]:
    tokens, lengths = batch.tokens, batch.lengths
    step = generation.prefill(
        model, params, tokens, cache, lengths=lengths, chunk_size=chunk_size
    )
    return _generated(step, *row_states.start(step.logits, batch))


@functools.partial(jax.jit, static_argnames="model")
def _go_on(
    model: generation.DecoderFunction,
    params: Mapping[str, Any],
    cache: Any,
    rows: row_states.Rows,
    stop: Any,
) -> tuple[Generated, row_states.Rows]:
    step = generation.decode(model, params, rows.token, cache, active=rows.active)
    return _generated(step, *row_states.choose(step.logits, rows, stop))


def _generated(
    step: generation.Step, rows: row_states.Rows, emitted: row_states.Emitted
) -> tuple[Generated, row_states.Rows]:
    return Generated(step.logits, *emitted, step.cache), rows
