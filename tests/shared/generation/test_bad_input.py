"""What cannot be is refused: the thing by its name, both values, and the way out."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

import shared
import zoo_nnx
from shared import generation
from shared.config import LayerKind
from shared.generation import Engine, Request, Sampling
from tests.shared.generation.models import (
    PLACES,
    SMALL,
    assert_same_rows,
    model_of,
    prompt,
    row_of,
    weights,
)

BATCH, TIME, ROOM = 2, 4, 6
TOKENS = np.array([prompt(TIME), prompt(TIME, seed=1)], np.int32)
WIDE = SMALL.replace(
    attention=dataclasses.replace(SMALL.attention, head_dim=20),
)

prefill = jax.jit(generation.prefill, static_argnames="model")
decode = jax.jit(generation.decode, static_argnames="model")


def assert_says(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value), (word, str(error.value))


def empty(config=SMALL, batch_size=BATCH, room=ROOM):
    return shared.init_cache(config, batch_size, room)


def layer_list(config=SMALL, rows=BATCH):
    return shared.to_layer_list(config, empty(config, rows))


# Tokens and caches. Nothing is compiled for these.

ONES = np.ones((BATCH, TIME), np.int32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": TOKENS[:, :0]}, ("tokens", "[batch, time]", "(2, 0)")),
        ({"tokens": TOKENS[:0]}, ("tokens", "[batch, time]", "(0, 4)")),
        ({"tokens": TOKENS[0]}, ("tokens", "[batch, time]", "(4,)")),
        (
            {"lengths": np.int32([4, 4]), "segment_ids": ONES},
            ("lengths or segment_ids, not both", "segment_ids say where padding is"),
        ),
        ({"segment_ids": ONES[:, 1:]}, ("segment_ids", "(2, 4)", "(2, 3)")),
        ({"positions": ONES[:, 1:]}, ("positions", "(2, 4)", "(2, 3)")),
        ({"lengths": np.int32([4])}, ("lengths", "(2,)", "(1,)")),
        (
            {"lengths": np.int32([4, 5])},
            ("lengths", "between 0 and the 4 tokens", "[4 5]"),
        ),
        (
            {"lengths": np.int32([-1, 4])},
            ("lengths", "between 0 and the 4 tokens", "[-1  4]"),
        ),
        ({"chunk_size": 0}, ("chunk_size", "at least 1", "0")),
        ({"chunk_size": -3}, ("chunk_size", "at least 1", "-3")),
    ],
)
def test_tokens_that_do_not_fit(options, words):
    options = {"tokens": TOKENS} | options
    tokens = options.pop("tokens")
    assert_says(
        lambda: generation.prefill(model_of(), weights(), tokens, empty(), **options),
        *words,
    )


@pytest.mark.parametrize("frontend", ["linen", "nnx"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: layer_list()[:1],
            ("1 layer caches", "2 layers", "one entry a layer, in order"),
        ),
        (
            lambda: layer_list() * 2,
            ("4 layer caches", "2 layers", "one entry a layer, in order"),
        ),
        (list, ("0 layer caches", "2 layers")),
        (
            lambda: layer_list()[::-1],
            (
                "does not fit",
                "in order",
                "entry 0 must hold a GatedDeltaNetCache",
                "got KVCache",
                "entry 1 must hold a KVCache",
                "got GatedDeltaNetCache",
            ),
        ),
        (
            lambda: [layer_list()[0], layer_list(rows=3)[1]],
            ("entry 1 has 3 rows", "the tokens have 2"),
        ),
        (
            lambda: layer_list(WIDE),
            ("entry 1/keys", "(2, 6, 2, 16)", "(2, 6, 2, 20)"),
        ),
    ],
    ids=["short", "long", "empty", "order", "rows", "config"],
)
def test_a_list_of_other_layers(make, words, frontend):
    assert_says(
        lambda: generation.prefill(model_of(frontend), weights(), TOKENS, make()),
        *words,
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: empty(WIDE),
            ("layers_1/keys", "(2, 6, 2, 16)", "(2, 6, 2, 20)", "shared.init_cache"),
        ),
        (
            lambda: empty(batch_size=3),
            ("3 rows", "the tokens have 2", "batch_size"),
        ),
        (
            lambda: empty(SMALL.replace(layers=SMALL.layers[::-1])),
            ("layers_0 must hold a GatedDeltaNetCache", "got KVCache"),
        ),
        (
            lambda: empty(SMALL.replace(layers=SMALL.layers * 2, scan_layers=True)),
            ("layers_0 must hold a GatedDeltaNetCache", "got nothing"),
        ),
        (dict, ("layers_0", "got nothing", "shared.init_cache")),
    ],
    ids=["width", "rows", "order", "layout", "empty"],
)
@pytest.mark.parametrize("frontend", ["linen", "nnx"])
def test_a_cache_of_another_config(make, words, frontend):
    assert_says(
        lambda: generation.prefill(model_of(frontend), weights(), TOKENS, make()),
        *words,
    )
    assert_says(
        lambda: generation.decode(model_of(frontend), weights(), TOKENS[:, 0], make()),
        *words,
    )


def test_a_list_given_to_the_module_itself():
    model = zoo_nnx.from_params(SMALL, weights())
    assert_says(
        lambda: model(TOKENS, cache=layer_list()),
        "list of 2",
        "shared.from_layer_list",
        "generation.prefill or decode",
    )


@pytest.mark.parametrize(
    ("name", "sizes"), [("batch_size", (0, 8)), ("max_length", (2, -1))]
)
def test_a_cache_of_no_size(name, sizes):
    call = functools.partial(shared.init_cache, SMALL, *sizes)
    assert_says(call, name, "at least 1", f"Got {min(sizes)}")


# Requests.


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, ("no prompt", "at least one")),
        ([[1], []], {}, ("prompt 1", "at least one token", "(0,)")),
        ([[[1, 2]]], {}, ("prompt 0", "(1, 2)")),
        ([[1.0, 2.0]], {}, ("prompt 0", "integers", "float64")),
        ([[1], [1, 2, 96]], {}, ("prompt 1", "id 96 at 2", "vocabulary of 96")),
        ([[3, -1]], {}, ("prompt 0", "id -1 at 1", "vocabulary of 96")),
        ([[2**31]], {}, ("prompt 0", f"id {2**31} at 0", "vocabulary of 96")),
        ([[1]], {"stop_tokens": [2, 96]}, ("stop_tokens", "id 96 at 1", "of 96")),
        ([[1]], {"stop_tokens": -1}, ("stop_tokens", "id -1 at 0", "of 96")),
        ([[1]], {"max_new_tokens": 0}, ("max_new_tokens", "at least 1", "0")),
        ([[1]], {"max_new_tokens": -7}, ("max_new_tokens", "at least 1", "-7")),
        ([[1], [2]], {"max_new_tokens": [3, -7]}, ("max_new_tokens", "-7")),
        ([[1]], {"max_new_tokens": 1.5}, ("max_new_tokens", "integer", "1.5")),
        (
            [[1], [2]],
            {"max_new_tokens": [1, 2, 3]},
            ("max_new_tokens", "each of 2 rows", "[1, 2, 3]"),
        ),
        (
            [[1], [1] * 33],
            {"max_new_tokens": 1, "max_length": 32},
            ("Row 1", "prompt of 33", "1 more", "holds 32", "raise max_length"),
        ),
        (
            [[1] * 30],
            {"max_new_tokens": 4, "max_length": 32},
            ("Row 0", "prompt of 30", "4 more", "holds 32", "lower max_new_tokens"),
        ),
        (
            [[1]],
            {"sampling": Sampling.create(2)},
            ("settings for 2 rows", "1 prompts", "Sampling.create(1"),
        ),
        ([[1]], {"steps_per_call": 0}, ("steps_per_call", "at least 1", "0")),
        ([[1]], {"chunk_size": 0}, ("chunk_size", "at least 1", "0")),
    ],
)
def test_prompts_and_options_of_generate(prompts, options, words):
    options = {"max_new_tokens": 2} | options
    for function in (generation.generate, generation.stream):  # not by the first `next`
        call = functools.partial(function, model_of(), weights(), prompts, **options)
        assert_says(call, *words)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 2), ("prompt", "at least one token", "(0,)")),
        (Request([1, 96], 2), ("prompt has the id 96 at 1", "vocabulary of 96")),
        (Request([1], 0), ("max_new_tokens", "at least 1", "0")),
        (Request([1], [1, 2]), ("max_new_tokens", "each of 1 rows", "[1, 2]")),
        (
            Request([1] * (PLACES + 1), 1),
            ("prompt of 33", "1 more", "holds 32", "raise max_length"),
        ),
        (
            Request([1], 2, Sampling.create(2)),
            ("settings for 2 rows", "1 prompts", "Sampling.create(1"),
        ),
    ],
)
def test_requests_to_an_engine(request_, words):
    engine = Engine(model_of(), weights(), slots=2, max_length=PLACES)
    assert_says(lambda: engine.prefill(request_), *words)
    assert_says(lambda: next(engine.run([request_])), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 0}, ("batch_size", "at least 1", "0")),
        ({"max_length": 0}, ("max_length", "at least 1", "0")),
        ({"stop_tokens": [1, 99]}, ("stop_tokens", "id 99 at 1", "vocabulary of 96")),
    ],
)
def test_options_of_an_engine(options, words):
    options = {"slots": 2, "max_length": PLACES} | options
    assert_says(lambda: Engine(model_of(), weights(), **options), *words)


def test_a_row_for_other_lengths_or_of_another_dtype():
    cache = empty()
    assert_says(
        lambda: shared.insert_row(SMALL, cache, empty(room=9), 0),
        "holds 9 positions",
        "6",
        "same max_length",
    )
    narrow = shared.init_cache(SMALL, 1, ROOM, "bfloat16")
    assert_says(
        lambda: shared.insert_row(SMALL, cache, narrow, 0), "bfloat16", "float32"
    )


# More tokens than there is room for.


def test_overflow_is_an_error_before_anything_is_done():
    held = prefill(model_of(), weights(), TOKENS, empty(), lengths=np.int32([4, 2]))
    calls = {
        ("row 0 has 4 tokens", "gets 3 more", "7 in all"): lambda: generation.prefill(
            model_of(), weights(), TOKENS, held.cache, lengths=np.int32([3, 1])
        ),
        ("row 1 has 2 tokens", "gets 5 more", "7 in all"): lambda: generation.prefill(
            model_of(),
            weights(),
            np.ones((BATCH, 5), np.int32),
            held.cache,
            lengths=np.int32([0, 5]),
            chunk_size=2,
        ),
        ("row 0 has 0 tokens", "gets 4 more", "4 in all"): lambda: generation.prefill(
            model_of(), weights(), TOKENS, empty(room=3)
        ),
    }
    for words, call in calls.items():
        places = "3 positions" if "4 in all" in words else "6 positions"
        assert_says(call, *words, places, "larger max_length")
    full = prefill(model_of(), weights(), TOKENS, held.cache, lengths=np.int32([2, 4]))
    assert_says(
        lambda: generation.decode(model_of(), weights(), TOKENS[:, 0], full.cache),
        "row 0 has 6 tokens",
        "gets 1 more",
        "6 positions",
    )


@pytest.mark.parametrize("frontend", ["linen", "nnx"])
def test_inside_jit_rows_that_overflow_get_nan_and_no_other_is_harmed(frontend):
    run = functools.partial(prefill, model_of(frontend), weights(), TOKENS)
    held = run(empty(), lengths=np.int32([4, 1])).cache
    before = row_of(held, 0)
    over, fits = (run(held, lengths=np.int32([n, 2])) for n in (3, 2))
    assert np.isnan(over.logits[0]).all()
    assert np.isfinite(fits.logits).all()  # exactly full
    np.testing.assert_array_equal(over.logits[1], fits.logits[1])
    assert_same_rows(row_of(over.cache, 1), row_of(fits.cache, 1))

    # What was held is still there; how many tokens came is said.
    after = row_of(over.cache, 0)
    for name in ("keys", "values", "segment_ids"):
        (path,) = (path for path in before if path.endswith(f".{name}"))
        assert before[path][:4].any()
        np.testing.assert_array_equal(after[path][:4], before[path][:4])
    positions = [leaf for path, leaf in after.items() if path.endswith(".position")]
    assert positions == [7, 7]

    # Nor does it come back to life, while the other goes on and rests.
    step = functools.partial(decode, model_of(frontend), weights(), TOKENS[:, 0])
    both = step(over.cache, active=np.array([True, True]))
    assert np.isnan(both.logits[0]).all()
    assert np.isfinite(both.logits[1]).all()
    rests = step(fits.cache, active=np.array([False, True]))
    np.testing.assert_array_equal(rests.logits[0], 0)
    np.testing.assert_array_equal(rests.logits[1], both.logits[1])
    assert_same_rows(row_of(rests.cache, 0), row_of(fits.cache, 0))


@pytest.mark.parametrize("bad", [96, 10_000, -1])
def test_an_id_outside_the_vocabulary_is_no_other_token(bad):
    """Inside `jit` it gives NaN to its own row only, and nothing at padding."""
    broken = TOKENS.copy()
    broken[0, 2] = bad
    run = functools.partial(prefill, model_of(), weights())
    good = run(TOKENS, empty(), lengths=np.int32([2, 4]))
    padding = run(broken, empty(), lengths=np.int32([2, 4]))
    np.testing.assert_array_equal(padding.logits, good.logits)
    real = run(broken, empty(), lengths=np.int32([3, 4]))
    assert np.isnan(real.logits[0]).all()
    np.testing.assert_array_equal(real.logits[1], good.logits[1])


# What was once taken and did something else.


@pytest.mark.parametrize("limit", [2**31 - 1, 2**32 + 1, 2**62])
def test_limits_that_do_not_fit_into_int32(limit):
    words = ("max_new_tokens", "at most 1073741824", str(limit))
    assert_says(lambda: list(answer_of(limit)), *words)


def answer_of(limit):
    return generation.stream(model_of(), weights(), [prompt(3)], max_new_tokens=limit)


@pytest.mark.parametrize("rows", [np.int32(1), np.ones(1, bool), np.ones((1, 2), bool)])
def test_rows_to_empty_are_told_by_a_bool_each(rows):
    assert_says(lambda: shared.reset_rows(SMALL, empty(), rows), "rows", "bool [2]")


@pytest.mark.parametrize(("slot", "source"), [(2, 0), (-1, 0), (0, 1)])
def test_rows_that_are_not_there_are_not_inserted(slot, source):
    row = empty(batch_size=1)
    assert_says(
        lambda: shared.insert_row(SMALL, empty(), row, slot, source),
        "slot" if source == 0 else "source",
        "one of the",
    )


SLIDING = SMALL.replace(
    layers=(SMALL.layers[0], LayerKind("sliding_attention", "dense")),
    attention=None,
    sliding_attention=dataclasses.replace(SMALL.attention, window=8),
)


def test_a_ring_shorter_than_its_window_can_be_full():
    """Without a full-attention layer, too: the window would lose what it should see."""
    params, model = weights(SLIDING), model_of(config=SLIDING)
    short = empty(SLIDING, room=TIME)
    step = generation.prefill(model, params, TOKENS, short)
    assert_says(
        lambda: generation.decode(model, params, TOKENS[:, 0], step.cache),
        "4 positions",
        "5 in all",
        "max_length",
    )
    inside = decode(model, params, TOKENS[:, 0], step.cache)
    assert np.all(np.isnan(inside.logits))
    long = generation.prefill(model, params, TOKENS, empty(SLIDING, room=8))
    assert_says(
        lambda: shared.insert_row(SLIDING, long.cache, empty(SLIDING, 1, TIME), 0),
        "4 positions",
        "the cache 8",
        "max_length",
    )


def test_layers_of_one_run_have_one_length():
    config = SMALL.replace(layers=SMALL.layers[:1] * 4, scan_layers=True)
    layers = layer_list(config)
    layers[2] = layers[2]._replace(state=layers[2].state.astype(np.float16))
    assert_says(
        lambda: shared.from_layer_list(config, layers), "Entries 0 and 2", "dtype"
    )


def test_an_engine_without_a_chunk_is_refused_at_once():
    options = {"slots": 1, "max_length": PLACES, "chunk_size": 0}
    assert_says(lambda: Engine(model_of(), weights(), **options), "chunk_size", "0")


def test_a_model_in_training_decodes_without_dropout():
    config = SMALL.replace(dropout_rate=0.5)
    model = zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
    model.train()
    step = generation.prefill(
        zoo_nnx.as_function(model), weights(), TOKENS, empty(config)
    )
    expected = generation.prefill(model_of(), weights(), TOKENS, empty())
    np.testing.assert_allclose(step.logits, expected.logits, rtol=0, atol=1e-5)


def test_positions_of_ones_own_go_on_in_decoding():
    """A packed row whose second sequence counts from 0 is as that sequence alone."""
    ids, own = np.int32([[1, 1, 2, 2]] * 2), np.int32([[0, 1, 0, 1]] * 2)
    packed = prefill(
        model_of(), weights(), TOKENS, empty(), segment_ids=ids, positions=own
    )
    alone = prefill(model_of(), weights(), TOKENS[:, 2:], empty())
    token = TOKENS[:, 0]
    step = decode(model_of(), weights(), token, packed.cache, positions=own[:, 1] + 1)
    expected = decode(model_of(), weights(), token, alone.cache)
    np.testing.assert_allclose(step.logits, expected.logits, rtol=0, atol=2e-5)


def test_a_step_takes_one_token_a_row():
    call = lambda: generation.decode(
        model_of(), weights(), np.ones((2, 1), np.int32), empty()
    )
    assert_says(call, "one token a row", "[2, 1]", "prefill")
