import dataclasses
import functools

import jax
import numpy as np
import pytest

import shared
from parity.programs.cost import equations
from shared import generation
from shared.generation import Sampling
from shared.generation.generate import begin, go_on
from shared.generation.rows import Rows, advance_many
from tests.shared.generation.models import (
    LOGITS_ATOL,
    PLACES,
    SMALL,
    forward,
    greedy,
    model_of,
    prompt,
    weights,
)

PROMPTS = [prompt(3), prompt(7), prompt(11)]
LIMITS = (2, 8, 5)
# Stands in the second answer, before its limit.
STOP = greedy(PROMPTS[1], 4)[3]


def options(**changes):
    settings = {
        "max_new_tokens": LIMITS,
        "stop_tokens": [STOP],
        "max_length": PLACES,
    }
    return settings | changes


def generate(prompts=PROMPTS, **changes):
    return generation.generate(model_of(), weights(), prompts, **options(**changes))


def stream(prompts=PROMPTS, **changes):
    return generation.stream(model_of(), weights(), prompts, **options(**changes))


def drawn():
    return Sampling.create(3, temperature=[0.0, 1.5, 0.7], seed=[1, 2, 3])


@functools.cache
def answers():
    return generate()


def test_answers_are_the_arg_max_of_a_plain_forward_over_the_growing_prefix():
    for prompt_, limit, answer in zip(PROMPTS, LIMITS, answers(), strict=True):
        expected = greedy(prompt_, limit)
        if STOP in expected:
            expected = expected[: expected.index(STOP) + 1]
        assert answer.tokens == expected
        assert answer.reason == ("stop" if STOP in expected else "length")
    # Limits and the stop token are each what ends an answer.
    assert [len(answer.tokens) for answer in answers()] == [2, 4, 5]
    assert [a.reason for a in answers()] == ["length", "stop", "length"]


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_streamed_tokens_are_those_of_generate(steps_per_call):
    """To the bit, in the order of steps, however many of them are fetched at once."""
    tokens = list(stream(sampling=drawn(), steps_per_call=steps_per_call))
    for row, answer in enumerate(generate(sampling=drawn())):
        mine = [token for token in tokens if token.row == row]
        assert [token.token for token in mine] == answer.tokens
        assert [token.log_prob for token in mine] == answer.log_probs
        assert [token.reason for token in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].reason == answer.reason
    steps = [
        [t.row for t in tokens[:place]].count(t.row) for place, t in enumerate(tokens)
    ]
    assert [(step, t.row) for step, t in zip(steps, tokens, strict=True)] == sorted(
        (step, t.row) for step, t in zip(steps, tokens, strict=True)
    )


def test_a_stream_gives_the_first_token_before_the_second_is_made():
    tokens = stream([prompt(5)], max_new_tokens=PLACES - 4)
    first = next(tokens)
    assert first.token == greedy(prompt(5), 1)[0]
    assert first.reason is None
    tokens.close()


def test_one_limit_for_all_rows_is_that_limit_for_each():
    each, one = generate(max_new_tokens=[4, 4, 4]), generate(max_new_tokens=4)
    assert each == one
    assert [len(answer.tokens) for answer in one] == [4, 4, 4]


def test_a_stop_token_as_the_first_ends_the_answer():
    (first, *_) = answers()[0].tokens
    answer, *_ = generate(stop_tokens=[first])
    assert (answer.tokens, answer.reason) == ([first], "stop")


def test_the_configs_end_token_stops_unless_others_are_given():
    config = SMALL.replace(eos_token_id=STOP)
    unused = next(i for i in range(SMALL.vocab_size) if i not in greedy(PROMPTS[1], 8))
    ended, going = (
        generation.generate(
            model_of(config=config), weights(), PROMPTS, **options(stop_tokens=stop)
        )
        for stop in (None, [unused])
    )
    assert ended == answers()
    assert [len(answer.tokens) for answer in going] == list(LIMITS)
    assert {answer.reason for answer in going} == {"length"}


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_the_chunk_size_does_not_change_the_answers(chunk_size):
    for answer, expected in zip(
        generate(chunk_size=chunk_size), answers(), strict=True
    ):
        assert answer.tokens == expected.tokens
        np.testing.assert_allclose(
            answer.log_probs, expected.log_probs, rtol=0, atol=LOGITS_ATOL
        )


@pytest.mark.parametrize("sampling", [None, drawn()], ids=["greedy", "drawn"])
def test_log_probs_are_those_of_the_models_own_softmax(sampling):
    """Whatever the temperature: the log softmax of a plain forward, at the token."""
    for prompt_, answer in zip(PROMPTS, generate(sampling=sampling), strict=True):
        logits = forward([*prompt_, *answer.tokens[:-1]])[len(prompt_) - 1 :]
        wide = logits.astype(np.float64)
        expected = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
        at_tokens = expected[np.arange(len(answer.tokens)), answer.tokens]
        np.testing.assert_allclose(
            answer.log_probs, at_tokens, rtol=0, atol=LOGITS_ATOL
        )


def test_drawn_answers_repeat_with_their_seeds_and_differ_without():
    assert generate(sampling=drawn()) == generate(sampling=drawn())
    others = generate(sampling=drawn()._replace(seed=np.uint32([4, 5, 6])))
    assert others[0] == answers()[0]  # of temperature 0
    assert others[1].tokens != generate(sampling=drawn())[1].tokens


def test_nothing_is_compiled_again_as_prompts_and_answers_grow():
    run = functools.partial(stream, steps_per_call=1)
    list(run([prompt(1)], max_new_tokens=2))
    compiled = begin._cache_size(), go_on._cache_size()
    for length in range(2, 17):
        list(run([prompt(length)], max_new_tokens=3))
    list(run([prompt(5)], max_new_tokens=PLACES - 4))
    assert (begin._cache_size(), go_on._cache_size()) == compiled


# What the loop is made of.


def loop_of(config):
    """The decoding loop's jaxpr, of 3 rows."""
    arguments = jax.eval_shape(
        lambda: (
            shared.init_cache(config, 3, PLACES),
            Rows(
                token=np.zeros(3, np.int32),
                generated=np.zeros(3, np.int32),
                limit=np.zeros(3, np.int32),
                active=np.zeros(3, bool),
                seen=np.zeros((3, config.vocab_size), bool),
                sampling=Sampling.create(3),
            ),
            np.zeros(1, np.int32),
        )
    )
    many = functools.partial(advance_many, model_of(config=config), steps=4)
    return jax.make_jaxpr(many)(shared.abstract_params(config), *arguments)


def test_the_loop_stays_on_the_device():
    names = {equation.primitive.name for equation in equations(loop_of(SMALL))}
    assert "while" in names
    leaving = ("callback", "infeed", "outfeed", "print", "device_put")
    assert not [name for name in names if any(word in name for word in leaving)]


def test_a_step_is_not_filled_up_to_a_chunk_of_the_delta_rule():
    delta_net = dataclasses.replace(SMALL.delta_net, chunk_size=37)
    config = SMALL.replace(delta_net=delta_net)

    def sizes(jaxpr):
        return {
            size
            for equation in equations(jaxpr)
            for variable in equation.outvars
            for size in getattr(variable.aval, "shape", ())
        }

    assert 37 not in sizes(loop_of(config))
    tokens = jax.ShapeDtypeStruct((1, 40), np.int32)
    reading = jax.make_jaxpr(model_of(config=config))(
        shared.abstract_params(config), tokens
    )
    assert 37 in sizes(reading)  # so that the test can fail


def test_the_room_of_a_batch_is_no_array_of_the_program():
    """As an argument it would have to fit in 32 bits, unused."""
    batch = generation.Batch.create(SMALL, PROMPTS, LIMITS, max_length=2**40)
    leaves = jax.tree.leaves(batch)
    assert batch.max_length == 2**40
    assert len(leaves) == 4 + len(jax.tree.leaves(batch.sampling))
    assert all(leaf.dtype.itemsize <= 4 for leaf in leaves)


def test_the_cache_is_given_away_and_not_copied():
    batch = generation.Batch.create(
        SMALL, PROMPTS, LIMITS, stop_tokens=STOP, max_length=PLACES
    )
    cache = shared.init_cache(SMALL, 3, PLACES)
    begun, rows, _ = begin(model_of(), weights(), cache, batch, None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    go_on(model_of(), weights(), begun, rows, batch.stop_tokens, 1)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(begun))
