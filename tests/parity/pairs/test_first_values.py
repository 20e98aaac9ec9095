"""Whether first values are drawn from one distribution, told from one draw of each."""

import numpy as np
import pytest

from parity.pairs import first_values
from parity.pairs.first_values import other_distribution

SIZE = 4096
DRAWS = {
    "normal": lambda random, size: random.standard_normal(size),
    "uniform": lambda random, size: random.uniform(-1, 1, size),
    "truncated": lambda random, size: np.clip(random.standard_normal(size), -2, 2),
    "log-uniform": lambda random, size: np.log(random.uniform(1, 16, size)),
    "few values": lambda random, size: random.integers(0, 9, size),
}


def normal(seed, size=SIZE):
    return np.random.default_rng(seed).standard_normal(size)


@pytest.mark.parametrize("size", [8, 16, 64, 256, 1024])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_one_distribution_raise_no_alarm(name, size):
    draw = DRAWS[name]
    for seed in range(1000):
        random = np.random.default_rng(seed)
        assert other_distribution(draw(random, size), draw(random, size)) is None, seed


@pytest.mark.parametrize("factor", [10.0, 0.1, np.sqrt(2.0), 1 / np.sqrt(2.0), 1.2])
def test_another_spread_is_named_with_both_values(factor):
    for seed in range(20):
        a, b = normal(seed), factor * normal(seed + 100)
        text = other_distribution(a, b)
        assert text.startswith("standard deviation"), (seed, text)
        assert f"{np.std(a):.3g} in linen" in text
        assert f"{np.std(b):.3g} in nnx" in text


@pytest.mark.parametrize("size", [32, 64])
def test_ten_times_the_spread_is_seen_in_small_leaves(size):
    found = [
        other_distribution(normal(seed, size), 10 * normal(seed + 100, size))
        for seed in range(20)
    ]
    assert sum(text is not None for text in found) >= 19


def test_a_shifted_mean_is_named():
    for seed in range(20):
        text = other_distribution(normal(seed), normal(seed + 100) + 0.2)
        assert text.startswith("mean"), (seed, text)


def test_another_shape_at_equal_mean_and_spread_is_named():
    for seed in range(20):
        random = np.random.default_rng(seed)
        uniform = random.uniform(-np.sqrt(3), np.sqrt(3), SIZE)  # of variance 1
        text = other_distribution(normal(seed + 100), uniform)
        assert text.startswith("another shape"), (seed, text)


def test_constants_must_be_equal():
    zeros, ones = np.zeros(16), np.ones(16)
    assert other_distribution(ones, ones) is None
    assert other_distribution(ones, zeros) == "1 in linen, 0 in nnx"
    assert other_distribution(zeros, normal(0, 16)) == "constant in linen only"
    assert other_distribution(normal(0, 16), zeros) == "constant in nnx only"


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_number_alone_says_nothing_of_a_distribution(shape):
    # It may be a constant, and it may be drawn.
    assert other_distribution(np.full(shape, 0.3), np.full(shape, -0.7)) is None


def test_few_numbers_tell_nothing():
    assert other_distribution(normal(0, 14), 100 * normal(1, 14)) is None


def test_a_leaf_that_is_not_finite_is_named():
    broken = normal(0)
    broken[3] = np.nan
    assert "NaN" in other_distribution(broken, normal(1))
    assert "NaN" in other_distribution(normal(1), np.full(SIZE, np.inf))


def test_integers_and_low_precision_are_compared_as_numbers():
    random = np.random.default_rng(0)
    a, b = (random.integers(0, 9, SIZE) for _ in range(2))
    assert other_distribution(a, b) is None
    assert other_distribution(a, b + 1) is not None
    assert other_distribution(a.astype(np.float16), b.astype(np.float16)) is None


def test_equal_bytes_prove_the_tier():
    values = {"params/a": normal(0, 8), "params/b": np.float32(2)}
    tier = first_values.check_first_values(values, dict(values))
    assert (tier.status, tier.compared.leaves, tier.compared.elements) == (
        "proved",
        2,
        9,
    )


def test_other_bytes_are_counted_and_other_distributions_named_by_path():
    linen = {"params/a": normal(0), "params/b": normal(1), "params/c": np.ones(3)}
    nnx = {"params/a": normal(2), "params/b": 10 * normal(3), "params/c": np.ones(3)}
    tier = first_values.check_first_values(linen, nnx)
    assert tier.status == "failed"
    summary, odd = tier.differences
    assert summary.detail == "2 of 3 leaves have other bytes: params/a, params/b"
    assert (odd.path, odd.what) == ("params/b", "distribution")
    assert "another distribution" in tier.note


def test_other_bytes_of_one_distribution_are_said_to_be_that():
    tier = first_values.check_first_values(
        {"params/a": normal(0)}, {"params/a": normal(1)}
    )
    assert [d.what for d in tier.differences] == ["value"]
    assert "as far as told the same distributions" in tier.note
