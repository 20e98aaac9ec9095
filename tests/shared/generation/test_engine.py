import itertools

import jax
import numpy as np
import pytest

from shared import generation
from shared.generation import Engine, Request, Sampling
from tests.shared.generation.models import (
    LOGITS_ATOL,
    PLACES,
    assert_same_rows,
    greedy,
    model_of,
    prompt,
    row_of,
    weights,
)

SLOTS = 2
# Stands in the third request's answer, before its limit.
STOP = greedy(prompt(5, seed=2), 3)[2]
DRAWN = {"temperature": 1.5, "top_k": 20}
REQUESTS = [
    Request(prompt(3), 6),
    Request(prompt(7), 1),
    Request(prompt(5, seed=2), 8),
    Request(prompt(16), 4, Sampling.create(1, seed=11, **DRAWN)),
    Request(prompt(1), 7),
    Request(prompt(12), 5, Sampling.create(1, seed=12, **DRAWN)),
    Request(prompt(12), 5, Sampling.create(1, seed=13, **DRAWN)),
]


def new_engine(frontend="linen"):
    return Engine(
        model_of(frontend),
        weights(),
        slots=SLOTS,
        max_length=PLACES,
        stop_tokens=[STOP],
    )


def serve(engine, requests):
    """Tokens, log-probabilities and the reason of each request's answer."""
    answers = [([], [], []) for _ in requests]
    for token in engine.run(requests):
        tokens, log_probs, reasons = answers[token.row]
        assert not reasons, "A token came after the last."
        tokens.append(token.token)
        log_probs.append(token.log_prob)
        reasons += [] if token.reason is None else [token.reason]
    return answers


def alone(request):
    """The answer that `generate` gives to this request only."""
    (answer,) = generation.generate(
        model_of(),
        weights(),
        [request.prompt],
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop_tokens=[STOP],
        max_length=PLACES,
        steps_per_call=1,
    )
    return answer


def start(engine, request, slot):
    """Reads a prompt into a slot; the first token of its answer."""
    prefix = engine.prefill(request)
    engine.insert(prefix, slot)
    return int(prefix.first.token[0])


def decode(engine, steps):
    """The tokens of each slot in so many steps."""
    found = [[] for _ in range(SLOTS)]
    for token in itertools.chain.from_iterable(engine.generate() for _ in range(steps)):
        found[token.row].append(token)
    return found


def ids(tokens):
    return [token.token for token in tokens]


# What a request gets depends on itself alone.


def test_each_of_more_requests_than_slots_gets_what_it_gets_alone():
    engine = new_engine()
    answers = serve(engine, REQUESTS)
    for request, (tokens, log_probs, reasons) in zip(REQUESTS, answers, strict=True):
        expected = alone(request)
        assert tokens == expected.tokens
        assert reasons == [expected.reason]
        np.testing.assert_allclose(
            log_probs, expected.log_probs, rtol=0, atol=LOGITS_ATOL
        )
    assert [reasons for _, _, reasons in answers].count(["stop"]) >= 1
    assert answers[2][0] == greedy(REQUESTS[2].prompt, 3)  # ended by the stop token
    assert answers[5][0] != answers[6][0]  # only their seeds differ
    assert not np.any(engine.rows.active)


def test_both_frontends_serve_the_same_to_the_bit():
    linen, other = new_engine("linen"), new_engine("nnx")
    assert serve(linen, REQUESTS) == serve(other, REQUESTS)
    everything = slice(None)
    assert_same_rows(row_of(linen.cache, everything), row_of(other.cache, everything))


def test_the_order_of_requests_changes_nothing():
    forwards = serve(new_engine(), REQUESTS)
    backwards = serve(new_engine(), REQUESTS[::-1])
    assert backwards[::-1] == forwards  # log-probabilities to the bit


def test_prompts_of_3_and_7_in_slots_1_and_0_get_8_greedy_tokens_each():
    """The state of linear layers has to get from prefill into its slot."""
    engine = new_engine()
    firsts = [
        start(engine, Request(prompt(length, seed=1), 9), slot)
        for length, slot in ((3, 1), (7, 0))
    ]
    found = decode(engine, 8)
    for length, slot, first in ((3, 1, firsts[0]), (7, 0, firsts[1])):
        expected = greedy(prompt(length, seed=1), 9)
        assert STOP not in expected, "Take another seed."
        assert [first, *ids(found[slot])] == expected


def test_a_slot_and_the_order_of_slots_change_nothing():
    results = []
    for slots in ((0, 1), (1, 0)):
        for order in (slots, slots[::-1]):
            engine = new_engine()
            requests = dict(zip(slots, REQUESTS[2:4], strict=True))
            for slot in order:
                start(engine, requests[slot], slot)
            found = decode(engine, 2)
            results.append(
                [
                    (
                        [t._replace(row=0) for t in found[slot]],
                        row_of(engine.cache, slot),
                    )
                    for slot in slots
                ]
            )
    for result in results[1:]:
        for (tokens, row), (first_tokens, first_row) in zip(
            result, results[0], strict=True
        ):
            assert tokens == first_tokens
            assert_same_rows(row, first_row)


def test_a_request_may_fill_its_slot_to_the_last_place():
    """The last token is never read: 16 + 17 tokens fit into 32 places."""
    engine = new_engine()
    limit = PLACES - 16 + 1
    expected = greedy(prompt(16, seed=2), limit)
    assert STOP not in expected, "Take another seed."
    ((tokens, _, reasons),) = serve(engine, [Request(prompt(16, seed=2), limit)])
    assert tokens == expected
    assert reasons == ["length"]


# Slots.


@pytest.mark.parametrize("freed", [True, False])
def test_a_reused_slot_is_a_fresh_one_to_the_bit(freed):
    used, fresh = new_engine(), new_engine()
    start(used, REQUESTS[3], 0)
    decode(used, 5)  # to its end
    if freed:
        used.free(0)
        empty = row_of(fresh.cache, 0)
        assert_same_rows(row_of(used.cache, 0), empty)
        assert not any(leaf.any() for leaf in empty.values())
    results = []
    for engine in (used, fresh):
        first = start(engine, REQUESTS[0], 0)
        found = decode(engine, 3)
        results.append((first, found, row_of(engine.cache, 0)))
    assert results[0][:2] == results[1][:2]
    assert_same_rows(results[0][2], results[1][2])


def test_freeing_a_busy_slot_ends_its_request_and_no_other():
    engine, undisturbed = new_engine(), new_engine()
    for each in (engine, undisturbed):
        start(each, REQUESTS[0], 0)
        start(each, REQUESTS[2]._replace(prompt=prompt(3, seed=4)), 1)
        decode(each, 1)
    engine.free(1)
    assert not any(leaf.any() for leaf in row_of(engine.cache, 1).values())
    found, expected = decode(engine, 3), decode(undisturbed, 3)
    assert found[1] == []
    assert len(expected[1]) == 3
    assert found[0] == expected[0]
    assert_same_rows(row_of(engine.cache, 0), row_of(undisturbed.cache, 0))
    assert not any(leaf.any() for leaf in row_of(engine.cache, 1).values())


def test_slots_that_are_not_busy_stay_as_they_are_to_the_bit():
    engine = new_engine()
    start(engine, REQUESTS[0], 0)
    never = row_of(engine.cache, 1)
    decode(engine, 1)
    assert_same_rows(row_of(engine.cache, 1), never)

    start(engine, Request(prompt(7, seed=1), 2), 1)
    decode(engine, 1)  # its last token
    assert engine.rows.active.tolist() == [True, False]
    ended, going = row_of(engine.cache, 1), row_of(engine.cache, 0)
    assert len(decode(engine, 2)[0]) == 2
    assert_same_rows(row_of(engine.cache, 1), ended)
    assert any(
        leaf.tobytes() != going[path].tobytes()
        for path, leaf in row_of(engine.cache, 0).items()
    )


def test_without_busy_slots_nothing_happens():
    engine = new_engine()
    before = row_of(engine.cache, slice(None))
    assert engine.generate() == []
    assert_same_rows(row_of(engine.cache, slice(None)), before)


def test_a_busy_slot_is_not_overwritten():
    engine = new_engine()
    prefix = engine.prefill(REQUESTS[0])
    engine.insert(prefix, 1)
    before = row_of(engine.cache, 1)
    with pytest.raises(ValueError, match="Slot 1 is busy: free it first"):
        engine.insert(prefix, 1)
    assert_same_rows(row_of(engine.cache, 1), before)
    engine.free(1)
    engine.insert(prefix, 1)  # what was read can be used again
    assert_same_rows(row_of(engine.cache, 1), before)


@pytest.mark.parametrize("slot", [-1, SLOTS, 7])
def test_slots_that_there_are_not_are_refused(slot):
    engine = new_engine()
    prefix = engine.prefill(REQUESTS[0])
    for call in (lambda: engine.insert(prefix, slot), lambda: engine.free(slot)):
        with pytest.raises(ValueError, match=f"no slot {slot}: slots are 0 to 1"):
            call()


def test_run_needs_all_slots_free():
    engine = new_engine()
    start(engine, REQUESTS[0], 1)
    with pytest.raises(ValueError, match="run needs all slots free"):
        next(engine.run(REQUESTS[:1]))
    engine.free(1)
    assert serve(engine, REQUESTS[:1])[0][0] == alone(REQUESTS[0]).tokens


def test_run_takes_a_request_when_there_is_a_slot_for_it():
    taken = []

    def requests():
        for number, request in enumerate(REQUESTS[:4]):
            taken.append(number)
            yield request

    tokens = new_engine().run(requests())
    assert next(tokens).row == 0
    assert taken == [0]
    ended = 0
    for token in tokens:
        ended += token.reason is not None
        assert len(taken) <= SLOTS + ended + 1
    assert taken == [0, 1, 2, 3]


def test_the_cache_is_given_away_and_not_copied():
    engine = new_engine()
    start(engine, REQUESTS[0], 0)
    held = jax.tree.leaves(engine.cache)
    engine.generate()
    assert all(leaf.is_deleted() for leaf in held)


def test_a_slot_freed_while_serving_takes_the_next_request():
    engine = new_engine()
    first, second, third = Request(prompt(3), 20), Request(prompt(7), 2), REQUESTS[4]
    answers, freed = {0: [], 1: [], 2: []}, False
    for token in engine.run([first, second, third]):
        answers[token.row].append(token.token)
        if not freed and len(answers[0]) == 2:
            engine.free(0)
            freed = True
    assert answers[0] == greedy(first.prompt, 2)
    assert answers[2] == alone(third).tokens
    assert not np.any(engine.rows.active)


def test_a_bad_request_is_refused_after_those_before_it_are_served():
    engine, good = new_engine(), Request(prompt(3), 4)
    tokens = engine.run([good, Request([], 2), Request(prompt(7), 1)])
    answer = [next(tokens).token for _ in alone(good).tokens]
    assert answer == alone(good).tokens
    with pytest.raises(ValueError, match="at least one token id"):
        next(tokens)
    assert serve(engine, [good])[0][0] == answer  # the engine goes on
