"""The reference's greedy answers, in both frontends, scanned and not.

All prompts of a case are rows of one batch: filled up on the right to 64, or padded on
the left as the reference's `genpad` was. Tolerances stand in `parity.oracle`.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import shared
from parity import oracle
from shared import generation
from shared.cache import BorrowedCache, GatedDeltaNetCache, KVCache
from tests.golden_models import (
    CASES,
    FRONTENDS,
    frontend,
    golden,
    layouts,
    load,
)

WIDTH, STEPS, MAX_LENGTH = 64, 12, 80

prefill = jax.jit(generation.prefill, static_argnames=("model", "chunk_size"))
decode = jax.jit(generation.decode, static_argnames="model")


class Row(NamedTuple):
    """One prompt with what the reference makes of it.

    Attributes:
      prompt: without padding.
      left: whether it is padded on the left.
      tokens: [STEPS], the greedy answer.
      logits: [STEPS, V], before each of them.
    """

    prompt: np.ndarray
    left: bool
    tokens: np.ndarray
    logits: np.ndarray


@functools.cache
def rows_of(case: str) -> list[Row]:
    """gen61 and gen5; genpad padded on the left, as it is stored, and on the right."""
    keys, rows = golden(case), []
    for name in ("gen61", "gen5"):
        tokens = keys[f"{name}/tokens_cached"]
        np.testing.assert_array_equal(tokens, keys[f"{name}/tokens_full"])
        stored = keys[f"{name}/input_ids"], tokens, keys[f"{name}/step_logits"]
        rows += [Row(ids, False, *answer) for ids, *answer in zip(*stored, strict=True)]
    mask = keys["genpad/attention_mask"] > 0
    assert mask.sum(axis=1).tolist() == [9, 4]
    assert not mask[1, :5].any()
    for left, row in itertools.product((True, False), (0, 1)):
        prompt = keys["genpad/input_ids"][row][mask[row]]
        answer = keys["genpad/tokens"][row], keys["genpad/step_logits"][row]
        rows.append(Row(prompt, left, *answer))
    return rows


def padded(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids [B, WIDTH]; padding holds a token that means something."""
    tokens, segment_ids = np.full((2, len(rows), WIDTH), [[[7]], [[0]]], np.int32)
    for i, row in enumerate(rows):
        n = len(row.prompt)
        at = slice(WIDTH - n, None) if row.left else slice(n)
        tokens[i, at], segment_ids[i, at] = row.prompt, 1
    return tokens, segment_ids


# Compiling is what costs: those whose caches are new in their layout are decoded
# unscanned, too. Both frontends run in one test, so that the program of the first is
# there for the second.
UNSCANNED = ("qwen3_next_6l", "gemma4_ple_kvshare", "deepseek_v3")


@pytest.mark.parametrize(
    ("case", "scan_layers"),
    [
        (case, scan_layers)
        for case in CASES
        for scan_layers in layouts(case)
        if scan_layers or case in UNSCANNED
    ],
)
def test_caches_step_logits_and_ids_are_the_references(case, scan_layers):
    for name in FRONTENDS:
        assert_decodes_as_the_reference(case, scan_layers, name)


def assert_decodes_as_the_reference(case, scan_layers, name):
    config, params = load(case, scan_layers)
    model, rows = frontend(case, scan_layers, name), rows_of(case)
    tokens, segment_ids = padded(rows)
    cache = shared.init_cache(config, len(rows), MAX_LENGTH)
    ids, logits = [], []
    with jax.default_matmul_precision("highest"):
        step = prefill(model, params, tokens, cache, segment_ids=segment_ids)
        held = step.cache
        for _ in range(STEPS - 1):
            logits.append(step.logits)
            ids.append(np.argmax(step.logits, axis=-1).astype(np.int32))
            step = decode(model, params, ids[-1], step.cache)
        logits.append(step.logits)
        ids.append(np.argmax(step.logits, axis=-1))

    assert_caches_are_near(config, held, case)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal([step[i] for step in ids], row.tokens)
        assert_near([step[i] for step in logits], row.logits)
    lengths = [len(row.prompt) + STEPS - 1 for row in rows]
    for layer in shared.to_layer_list(config, step.cache):
        np.testing.assert_array_equal(layer.position, lengths)


def test_generate_gives_the_references_ids():
    """Filled up to a bucket of 64 and read by chunks; what follows a prompt is told by
    its length alone.
    """
    case = "qwen3_next_6l"
    _, params = load(case, True)
    model = frontend(case, True, "linen")
    rows = [row for row in rows_of(case) if not row.left]
    with jax.default_matmul_precision("highest"):
        answers = generation.generate(
            model,
            params,
            [row.prompt for row in rows],
            max_new_tokens=STEPS,
            stop_tokens=(),
            max_length=MAX_LENGTH,
            chunk_size=8,
        )
    for row, answer in zip(rows, answers, strict=True):
        assert answer.tokens == row.tokens.tolist()
        log_probs = jax.nn.log_softmax(row.logits)[np.arange(STEPS), row.tokens]
        assert_near(answer.log_probs, log_probs)


def assert_caches_are_near(config, cache, case):
    """What gen61's two rows, the first, hold after their prompt, layer by layer."""
    named = {
        key.removeprefix("gen61/cache_after_prefill/"): value
        for key, value in golden(case).items()
        if key.startswith("gen61/cache_after_prefill/")
    }
    for i, layer in enumerate(shared.to_layer_list(config, cache)):
        ours = {
            name: leaf[:2] for name, leaf in layer._asdict().items() if leaf.ndim > 2
        }
        if isinstance(layer, GatedDeltaNetCache):
            # The reference keeps one input more than the next token needs.
            tail = named.pop(f"{i}/conv_state")[:, :, 1:]
            assert_near(ours["conv_tail"].swapaxes(1, 2), tail)
            assert_near(ours["state"], named.pop(f"{i}/recurrent_state"))
            continue
        if isinstance(layer, BorrowedCache):  # the reference holds nothing for it
            assert not ours
            continue
        assert isinstance(layer, KVCache)
        theirs = {k: named.pop(f"{i}/{k}").swapaxes(1, 2) for k in ("keys", "values")}
        if not layer.values.shape[-1]:  # latent and rotated key, in one
            theirs["keys"] = np.concatenate([theirs["keys"], theirs["values"]], axis=-1)
            del theirs["values"]
        assert_places_are_near(layer, theirs, held=theirs["keys"].shape[1])
    assert not named


def assert_places_are_near(layer, theirs, held):
    """The newest `held` tokens of a prompt of 61, each at its place; the rest empty.

    A ring holds one token more than the reference, which keeps what the next one needs.
    """
    ring = layer.capacity < MAX_LENGTH
    tokens = np.arange(61 - held, 61)
    places = tokens % layer.capacity if ring else tokens
    for name, expected in theirs.items():
        ours = np.asarray(getattr(layer, name)[:2])
        assert_near(ours[:, places], expected)
        assert ring or not np.any(ours[:, held:])
    filled = np.arange(layer.capacity) < 61
    np.testing.assert_array_equal(
        layer.segment_ids[:2], np.broadcast_to(filled, (2, layer.capacity))
    )


def assert_near(ours, theirs):
    """Within the tolerance of cached logits; small numbers in proportion."""
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    size = float(np.sqrt(np.mean(np.square(theirs))))
    atol = oracle.PADDED_ATOL * min(1.0, size)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
