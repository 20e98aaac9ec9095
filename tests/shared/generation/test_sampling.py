import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.generation.sampling import Sampling, filtered_logits, mark_seen, sample
from tests.references import sampling as reference

BATCH, VOCAB = 6, 7
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# Few values, so that ties are common. No sum of up to 7 equal weights is a share p of
# them, and no ratio of two is min_p: there float32 may decide otherwise than float64.
LOGITS = st.sampled_from([0.0, -0.0, 0.5, -1.0, 1.5, 3.0, -4.0, -np.inf])
SETTINGS = {
    "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 2, 3, VOCAB, VOCAB + 5]),
    "top_p": st.sampled_from([0.05, 0.37, 0.62, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3, 2.0]),
}

sample_ = jax.jit(sample)
filtered_logits_ = jax.jit(filtered_logits)
mark_seen_ = jax.jit(mark_seen)


@jax.jit
def noise(seed, index):
    """The noise that `sample` documents, one row at a time."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
    return jax.random.gumbel(key, (VOCAB,), jnp.float32, mode="high")


@st.composite
def batches(draw):
    """Logits, seen ids, and a list of settings for each field."""
    logits = draw(hnp.arrays(np.float32, (BATCH, VOCAB), elements=LOGITS))
    logits[:, 2] = np.maximum(logits[:, 2], -5)  # at least one is finite
    seen = draw(hnp.arrays(bool, (BATCH, VOCAB)))
    per_row = {
        field: draw(st.lists(values, min_size=BATCH, max_size=BATCH))
        for field, values in SETTINGS.items()
    }
    return logits, seen, per_row


def expected_distributions(logits, seen, sampling):
    """The loop's probabilities of each row, and its distance from a boundary."""
    rows, distances = [], []
    for b in range(len(logits)):
        settings = {field: float(getattr(sampling, field)[b]) for field in FIELDS}
        settings["top_k"] = int(settings["top_k"])
        probabilities, distance = reference.distribution(logits[b], seen[b], **settings)
        rows.append(probabilities)
        distances.append(distance)
    return np.array(rows), min(distances)


def distribution_of(logits, sampling, seen):
    kept = np.float64(filtered_logits_(logits, sampling, seen))
    weights = np.exp(kept - kept.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def one_row(logits, seen=(), **settings):
    """The filtered distribution of one row of at most 10 logits."""
    padded = np.full((1, 10), -np.inf, np.float32)
    padded[0, : len(logits)] = logits
    marks = np.isin(np.arange(10), seen)[None]
    actual = distribution_of(padded, Sampling.create(1, **settings), marks)[0]
    assert not actual[len(logits) :].any()
    return actual[: len(logits)]


def support(logits, seen=(), **settings):
    return list(np.flatnonzero(one_row(logits, seen, **settings)))


@hypothesis.settings(max_examples=60)
@hypothesis.given(batches())
def test_filtered_distribution_matches_the_loop(batch):
    logits, seen, per_row = batch
    sampling = Sampling.create(BATCH, **per_row)
    expected, distance = expected_distributions(logits, seen, sampling)
    hypothesis.assume(distance > 1e-5)
    actual = distribution_of(logits, sampling, seen)
    # exp((a - b) / 0.3) in float32, with a - b up to 11.
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-30)
    np.testing.assert_array_equal(actual > 0, expected > 0)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    batches(),
    hnp.arrays(np.uint32, BATCH),
    hnp.arrays(np.int32, BATCH, elements=st.integers(0, 2**20)),
)
def test_the_token_is_a_gumbel_draw_from_that_distribution(batch, seeds, index):
    logits, seen, per_row = batch
    sampling = Sampling.create(BATCH, seed=seeds, **per_row)
    probabilities, distance = expected_distributions(logits, seen, sampling)
    hypothesis.assume(distance > 1e-5)
    with np.errstate(divide="ignore"):
        scores = np.log(probabilities)
    scores += np.stack([noise(*row) for row in zip(seeds, index, strict=True)])
    best_two = np.sort(scores, axis=1)[:, -2:]
    hypothesis.assume(np.all(best_two[:, 1] - best_two[:, 0] > 1e-4))

    sampled = sample_(logits, sampling, index, seen)
    np.testing.assert_array_equal(sampled.tokens, np.argmax(scores, axis=1))
    expected = [
        reference.log_softmax(row)[token]
        for row, token in zip(logits, sampled.tokens, strict=True)
    ]
    np.testing.assert_allclose(sampled.log_probs, expected, rtol=2e-6, atol=1e-6)
    assert sampled.tokens.dtype == jnp.int32
    assert sampled.log_probs.dtype == jnp.float32


DRAWS = 20_000


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"repetition_penalty": 1.7},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ],
)
@pytest.mark.parametrize("moving", ["seed", "index"])
def test_frequencies_are_those_of_the_filtered_distribution(settings, moving):
    logits = np.float32([1.0, -1.0, 2.0, 0.3, 1.7, -0.4, 0.9])
    seen = np.bool_([1, 1, 0, 0, 0, 0, 1])
    settings = {"temperature": 1.0, **settings}
    ids = np.arange(DRAWS)
    sampling = Sampling.create(
        DRAWS, seed=ids if moving == "seed" else [7] * DRAWS, **settings
    )
    tile = lambda row: np.broadcast_to(row, (DRAWS, VOCAB))
    index = np.int32(ids if moving == "index" else 0 * ids)
    tokens = sample_(tile(logits), sampling, index, tile(seen)).tokens

    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    probabilities, _ = reference.distribution(logits, seen, **{**defaults, **settings})
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = DRAWS * np.array(probabilities)
    kept = expected > 0
    assert not counts[~kept].any()
    chi_square = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
    # 6 degrees of freedom at most: above 30 in 4 of 100 000 runs. The seed is fixed.
    assert chi_square < 30


def many_rows(vocab_size, copies=1):
    """Rows with all kinds of settings, each its own seed and index."""
    batch_size = copies * BATCH
    generator = np.random.default_rng(vocab_size)
    logits = generator.normal(size=(batch_size, vocab_size)).astype(np.float32) * 3
    seen = generator.random((batch_size, vocab_size)) < 0.4
    sampling = Sampling.create(
        batch_size,
        temperature=[0.0, 0.5, 1.0, 1.3, 0.8, 1.0] * copies,
        top_k=[0, 0, 3, 0, 5, 0] * copies,
        top_p=[0.5, 1.0, 1.0, 0.9, 0.8, 1.0] * copies,
        min_p=[0.0, 0.0, 0.1, 0.0, 0.01, 0.02] * copies,
        repetition_penalty=generator.uniform(0.7, 1.5, batch_size),
        seed=generator.integers(0, 2**32, batch_size),
    )
    return logits, sampling, generator.integers(0, 99, batch_size, np.int32), seen


def rows(inputs, which):
    return jax.tree.map(lambda leaf: leaf[which], inputs)


def assert_same_bytes(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_row_alone_is_the_row_in_a_batch():
    # At this size XLA's own sum of a row differs between the whole and a row alone.
    inputs = many_rows(250, copies=3)
    whole = sample_(*inputs)
    for b in range(len(inputs[0])):
        alone = sample_(*rows(inputs, slice(b, b + 1)))
        assert_same_bytes(alone, rows(whole, slice(b, b + 1)))


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.permutations(range(BATCH)), st.integers(0, BATCH - 1))
def test_neighbours_and_places_do_not_matter(order, replaced):
    inputs = many_rows(VOCAB)
    whole = sample_(*inputs)
    order = np.array(order)
    assert_same_bytes(sample_(*rows(inputs, order)), rows(whole, order))
    # All others become copies of one row, of whatever settings.
    others = np.where(np.arange(BATCH) % 2 == 0, np.arange(BATCH), replaced)
    assert_same_bytes(sample_(*rows(inputs, others)), rows(whole, others))


def test_a_loop_may_be_cut_anywhere():
    logits, sampling, _, seen = many_rows(VOCAB)

    @jax.jit
    def four_steps(logits, seen, first):
        def step(index, _):
            return index + 1, sample(logits, sampling, index, seen)

        return jax.lax.scan(step, first, length=4)[1]

    first = np.zeros(BATCH, np.int32)
    scanned = [four_steps(logits, seen, first + start).tokens for start in (0, 4)]
    single = [sample_(logits, sampling, first + i, seen).tokens for i in range(8)]
    np.testing.assert_array_equal(np.concatenate(scanned), single)
    assert len(np.unique(np.array(single)[:, 3])) > 1


def test_rows_of_one_seed_differ():
    sampling = Sampling.create(DRAWS, temperature=1.0, seed=2**32 - 2)
    assert sampling.seed.dtype == jnp.uint32
    np.testing.assert_array_equal(sampling.seed[:4], [2**32 - 2, 2**32 - 1, 0, 1])
    flat = np.zeros((DRAWS, VOCAB), np.float32)
    tokens = sample_(flat, sampling, np.zeros(DRAWS, np.int32), flat > 0).tokens
    assert set(tokens[:64].tolist()) == set(range(VOCAB))


def test_one_seed_for_each_row_is_taken_as_it_is():
    sampling = Sampling.create(3, seed=[5, 5, 2**32 - 1])
    np.testing.assert_array_equal(sampling.seed, [5, 5, 2**32 - 1])


def test_greedy_takes_the_lowest_of_the_greatest_whatever_the_filters():
    logits = np.full((BATCH, VOCAB), -np.inf, np.float32)
    logits[:, 1:5] = [
        [1, 3, 3, 0],
        [0, -1, 0, -0.0],
        [-5, -np.inf, -4, -4],
        [2] * 4,
        [0] * 4,
        [0, 1, 2, 3],
    ]
    sampling = Sampling.create(
        BATCH, top_k=[1, 2, 0, 9, 0, 0], top_p=0.1, min_p=1.0, seed=3
    )
    for index in range(3):
        index = np.full(BATCH, index, np.int32)
        sampled = sample_(logits, sampling, index, np.zeros((BATCH, VOCAB), bool))
        np.testing.assert_array_equal(sampled.tokens, [2, 1, 3, 1, 1, 4])
    assert support(logits[0], top_k=3) == [2]


def test_greedy_sees_the_penalty_and_log_probs_do_not():
    logits = np.full((BATCH, VOCAB), -9, np.float32)
    pairs = [[2.0, 1.5], [-1.0, -1.5], [2.0, 0.5], [-1.0, -2.5], [0, -1], [-8, 8]]
    logits[:, :2] = pairs
    seen = np.arange(VOCAB)[None] == np.zeros((BATCH, 1))
    sampling = Sampling.create(BATCH, repetition_penalty=2.0)
    sampled = sample_(logits, sampling, np.zeros(BATCH, np.int32), seen)
    np.testing.assert_array_equal(sampled.tokens, [1, 1, 0, 0, 0, 1])
    expected = [
        reference.log_softmax(row)[token]
        for row, token in zip(logits, sampled.tokens, strict=True)
    ]
    np.testing.assert_allclose(sampled.log_probs, expected, rtol=1e-6, atol=1e-6)


def primitives(jaxpr):
    """The names of what a jaxpr calls, apart from the branches of its conditions."""
    found, conditions = set(), []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            conditions.append(equation.params["branches"])
            continue
        found.add(equation.primitive.name)
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                inner, more = primitives(value.jaxpr)
                found, conditions = found | inner, conditions + more
    return found, conditions


def test_what_a_batch_does_not_need_it_does_not_pay_for():
    jaxpr = jax.make_jaxpr(sample)(*many_rows(VOCAB)).jaxpr
    always, [(greedy, draws)] = primitives(jaxpr)
    costly = {"sort", "random_bits", "random_wrap", "random_fold_in", "random_seed"}
    assert not (always | primitives(greedy.jaxpr)[0]) & costly
    drawing, [(unsorted, filtering)] = primitives(draws.jaxpr)
    assert "random_bits" in drawing and "sort" not in drawing
    assert "sort" not in primitives(unsorted.jaxpr)[0]
    assert "sort" in primitives(filtering.jaxpr)[0]


HALVES = np.log([0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [0]), (0.39, [0]), (0.41, [0, 1]), (0.69, [0, 1]), (0.71, [0, 1, 2])],
)
def test_top_p_keeps_the_token_that_crosses_and_none_after(top_p, kept):
    assert support(HALVES, temperature=1.0, top_p=top_p) == kept
    # The places of the tokens do not matter.
    mirrored = support(HALVES[::-1], temperature=1.0, top_p=top_p)
    assert mirrored == [3 - token for token in reversed(kept)]


def test_top_p_that_is_reached_exactly_needs_no_more():
    assert support([0.0] * 4, temperature=1.0, top_p=0.5) == [0, 1]
    assert support([0.0] * 8, temperature=1.0, top_p=0.125) == [0]


def test_top_p_keeps_the_lowest_of_equal_tokens():
    logits = [0.0, 1.0, 2.0, 1.0, 1.0]
    # Of e^2 + 3 e + 1, e^2 is 0.447 and each e 0.165.
    assert support(logits, temperature=1.0, top_p=0.6) == [1, 2]
    assert support(logits, temperature=1.0, top_p=0.7) == [1, 2, 3]
    assert support(logits, temperature=1.0, top_p=0.9) == [1, 2, 3, 4]


def test_top_p_just_below_one_and_one():
    logits = np.concatenate([[20.0], np.zeros(9)])
    assert len(support(logits, temperature=1.0, top_p=1.0)) == 10
    # In float32 the sums end before the last tokens; off is off all the same.
    steep = np.float32([40.0, 0.0, -40.0])
    assert support(steep, temperature=1.0, top_p=1.0) == [0, 1, 2]
    assert support(steep, temperature=1.0, top_p=0.999) == [0]


def test_top_k_keeps_all_that_equal_the_kth():
    logits = [0.0, 1.0, 2.0, 1.0, 1.0, -1.0]
    assert support(logits, temperature=1.0, top_k=1) == [2]
    for k in (2, 3, 4):
        assert support(logits, temperature=1.0, top_k=k) == [1, 2, 3, 4]
    assert support(logits, temperature=1.0, top_k=5) == [0, 1, 2, 3, 4]
    assert support([1.0, 1.0, 1.0], temperature=1.0, top_k=1) == [0, 1, 2]


def test_logits_that_scaling_makes_equal_are_no_ties():
    """1 - 2**-24 and 1 are both -(2**25 - 1) after the shift by 2**25."""
    logits = [2.0**25, 1 - 2.0**-24, 1.0]
    assert support(logits, temperature=1e30, top_k=2) == [0, 2]


def test_filters_follow_each_other_in_the_order_of_hugging_face():
    # Top-k first: of 0.4 and 0.3 the first is 0.57.
    assert support(HALVES, temperature=1.0, top_p=0.55) == [0, 1]
    assert support(HALVES, temperature=1.0, top_k=2, top_p=0.55) == [0]
    # The temperature first: at 0.5 it is 0.53.
    assert support(HALVES, temperature=0.5, top_p=0.52) == [0]
    # The penalty first: 0.9 / 3 is less than 0.4.
    assert support([0.9, 0.4, 0.0], [0], temperature=1.0, top_k=1) == [0]
    kept = support([0.9, 0.4, 0.0], [0], temperature=1, top_k=1, repetition_penalty=3)
    assert kept == [1]
    # Top-p before min-p: min-p first would leave 0.57 and 0.43 to it.
    assert support(HALVES, temperature=1.0, top_p=0.5, min_p=0.7) == [0, 1]
    assert support(HALVES, temperature=1.0, top_p=0.5, min_p=0.8) == [0]
    assert support(HALVES, temperature=1.0, top_p=0.39, min_p=0.7) == [0]


def test_a_low_temperature_does_not_overflow():
    logits = [1e4, 1e4 - 1, -1e4]
    for temperature in (1e-30, 1e-37):
        np.testing.assert_array_equal(
            one_row(logits, temperature=temperature), [1, 0, 0]
        )
    # A subnormal is 0 on many machines: greedy.
    assert support([1.0, 1.0], temperature=1e-40) == [0]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 1, "min_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_and_infinity_show_in_their_row_only(value, settings, temperature):
    logits, _, index, seen = many_rows(VOCAB)
    sampling = Sampling.create(BATCH, temperature=temperature, **settings)
    spoilt = logits.copy()
    spoilt[2, 5] = value
    clean, sampled = (sample_(x, sampling, index, seen) for x in (logits, spoilt))
    others = np.delete(np.arange(BATCH), 2)
    assert_same_bytes(rows(sampled, others), rows(clean, others))
    assert sampled.tokens[2] == 5
    assert np.isnan(sampled.log_probs[2])


def test_low_precision_logits_are_computed_with_in_float32():
    logits, *others = many_rows(VOCAB)
    low = jnp.asarray(logits, jnp.bfloat16)
    assert_same_bytes(sample_(low, *others), sample_(low.astype(np.float32), *others))
    assert filtered_logits_(low, others[0], others[2]).dtype == jnp.float32


def test_float64_stays_float64():
    logits, sampling, index, seen = many_rows(VOCAB)
    with jax.enable_x64(True):
        sampled = sample_(np.float64(logits), sampling, index, seen)
    assert sampled.tokens.dtype == jnp.int32
    expected = [
        reference.log_softmax(row)[token]
        for row, token in zip(logits, sampled.tokens, strict=True)
    ]
    np.testing.assert_allclose(sampled.log_probs, expected, rtol=1e-14)


@hypothesis.given(
    hnp.arrays(bool, (2, VOCAB)),
    hnp.arrays(np.int32, (2, 5), elements=st.integers(-2, VOCAB + 1)),
    hnp.arrays(bool, (2, 5)),
)
def test_real_tokens_are_marked_as_seen(seen, tokens, real):
    expected = reference.mark_seen(seen, tokens, real)
    np.testing.assert_array_equal(mark_seen_(seen, tokens, real), expected)


def test_settings_come_as_one_number_or_one_a_row():
    sampling = Sampling.create(
        3,
        temperature=1,
        top_k=np.array([1, 2, 3]),
        top_p=jnp.array([0.5, 0.25, 1.0]),
        min_p=(0, 0.5, 1),
        repetition_penalty=np.float64(1.5),
    )
    np.testing.assert_array_equal(sampling.temperature, [1, 1, 1])
    np.testing.assert_array_equal(sampling.top_k, [1, 2, 3])
    np.testing.assert_array_equal(sampling.top_p, [0.5, 0.25, 1])
    np.testing.assert_array_equal(sampling.min_p, [0, 0.5, 1])
    np.testing.assert_array_equal(sampling.repetition_penalty, [1.5] * 3)
    np.testing.assert_array_equal(sampling.seed, [0, 1, 2])
    assert {x.dtype.name for x in sampling} == {"float32", "int32", "uint32"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "at least 0 and finite in float32. Got -0.1 for all"),
        ("temperature", [1, np.inf], "at least 0 and finite .* Got inf in row 1"),
        ("temperature", 1e39, "finite in float32. Got 1e"),
        ("temperature", [np.nan, 1], "Got nan in row 0"),
        ("top_k", [3, -1], "an integer from 0 to 2147483647. Got -1 in row 1"),
        ("top_k", [2.0, 1], "an integer from 0 .* Got 2.0 in row 0"),
        ("top_k", True, "an integer from 0 .* Got True for all rows"),
        ("top_p", [1.0, 0.0], "above 0 in float32 and at most 1. Got 0.0 in row 1"),
        ("top_p", 1.01, "at most 1. Got 1.01 for all rows"),
        ("min_p", [-0.5, 0], "from 0 to 1. Got -0.5 in row 0"),
        ("min_p", np.array([0, 1.5]), "from 0 to 1. Got 1.5 in row 1"),
        ("repetition_penalty", 0, "above 0 and finite in float32. Got 0 for all"),
        ("repetition_penalty", [1, 1e-40], "above 0 .* Got 1e-40 in row 1"),
        ("repetition_penalty", "1.3", "above 0 .* Got '1.3' for all rows"),
        ("seed", 2**32, "an integer from 0 to 4294967295. Got 4294967296"),
        ("seed", [0, -1], "from 0 to 4294967295. Got -1 in row 1"),
        ("seed", [1, 2, 3], r"one for each of the 2 rows. Got the shape \(3,\)"),
        ("top_p", [[0.5, 0.5]], r"one for each of the 2 rows. Got the shape \(1, 2\)"),
    ],
)
def test_a_setting_out_of_range_is_named(field, value, message):
    with pytest.raises(ValueError, match=f"{field} must be .*{message}"):
        Sampling.create(2, **{field: value})


def test_a_batch_has_a_row():
    with pytest.raises(ValueError, match="batch_size must be at least 1. Got 0"):
        Sampling.create(0)


# Temperature, top-k, top-p, min-p and penalty; then the softmax of what the processors
# of transformers 5.24.0 leave in float64 (torch 2.13.0), for these logits and seen ids.
MEASURED_LOGITS, MEASURED_SEEN = [2.0, 1.5, -0.5, 1.0, -2.0, 0.25], [0, 2]
MEASURED = [
    ((0.7, 0, 1, 0, 1), [0.542684, 0.265667, 0.015258, 0.130055, 0.00179, 0.044546]),
    ((1, 3, 1, 0, 1), [0.50648, 0.307196, 0, 0.186324, 0, 0]),
    ((1, 0, 0.6, 0, 1), [0.622459, 0.377541, 0, 0, 0, 0]),
    ((1, 0, 1, 0.1, 1), [0.465509, 0.282346, 0, 0.171251, 0, 0.080893]),
    ((1, 0, 1, 0, 1.5), [0.294417, 0.347812, 0.036659, 0.210959, 0.010503, 0.09965]),
    ((0.8, 4, 0.7, 0.1, 1.3), [0.512017, 0.487983, 0, 0, 0, 0]),
    ((1.5, 5, 0.95, 0.15, 0.8), [0.475189, 0.24397, 0, 0.174812, 0, 0.106029]),
]


@pytest.mark.parametrize(("settings", "expected"), MEASURED)
def test_distributions_measured_with_transformers(settings, expected):
    actual = one_row(
        MEASURED_LOGITS, MEASURED_SEEN, **dict(zip(FIELDS, settings, strict=True))
    )
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")  # the reference's own
def test_distributions_are_those_of_transformers():
    import torch
    from transformers.generation import logits_process as processors

    generator = np.random.default_rng(0)
    size, vocab_size = 200, 50
    logits = generator.normal(size=(size, vocab_size)).astype(np.float32) * 2
    logits[:, 7] = logits[:, 3]  # a tie, sometimes at the k-th place
    draw = lambda *values: generator.choice(values, size).tolist()
    per_row = {
        "temperature": draw(0.5, 1.0, 1.6),
        "top_k": draw(0, 1, 4, 20, 60),
        "top_p": draw(0.3, 0.8, 0.95, 1.0),
        "min_p": draw(0.0, 0.02, 0.3),
        "repetition_penalty": draw(0.8, 1.0, 1.4),
    }
    seen = generator.random((size, vocab_size)) < 0.2
    seen[:, 7] = seen[:, 3]
    actual = distribution_of(logits, Sampling.create(size, **per_row), seen)

    for b in range(size):
        temperature, top_k, top_p, min_p, penalty = (per_row[f][b] for f in FIELDS)
        steps = [
            processors.RepetitionPenaltyLogitsProcessor(penalty),
            processors.TemperatureLogitsWarper(temperature),
        ]
        if top_k:
            steps.append(processors.TopKLogitsWarper(top_k))
        if top_p < 1:
            steps.append(processors.TopPLogitsWarper(top_p))
        steps.append(processors.MinPLogitsWarper(min_p))
        scores, ids = (
            torch.tensor(logits[b : b + 1]),
            torch.tensor(seen[b].nonzero()[0]),
        )
        for step in steps:
            scores = step(ids[None], scores)
        expected = torch.softmax(scores.double(), dim=-1)[0].numpy()
        # Which of two equal tokens top-p keeps is open there.
        pair = [3, 7]
        for probabilities in (actual[b], expected):
            probabilities[pair] = np.sort(probabilities[pair])
        np.testing.assert_allclose(actual[b], expected, rtol=2e-5, err_msg=str(b))
