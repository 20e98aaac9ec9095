"""Both frontends get the same random keys, and so drop the same entries."""

from __future__ import annotations

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from parity.pairs.masks import shared_keys

KEY = jax.random.key(3)
ONES = jnp.ones((4, 8))
RATE = 0.5


class LinenDropped(nn.Module):
    """Dropout of its own, twice; some see a sum that tells the order, too."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(RATE, deterministic=False)(x)
        return x + 3 * nn.Dropout(RATE, deterministic=False)(jnp.ones_like(x))


class NNXDropped(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Dropout(RATE, rngs=rngs)
        self.second = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return x + 3 * self.second(jnp.ones_like(x))


class LinenShared(nn.Module):
    """One module, called twice."""

    def setup(self):
        self.dropout = nn.Dropout(RATE, deterministic=False)

    def __call__(self, x):
        return self.dropout(x) + 3 * self.dropout(jnp.ones_like(x))


class NNXShared(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) + 3 * self.dropout(jnp.ones_like(x))


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda module, x, _: (module(x), None),
            split_rngs={"dropout": True},
            length=3,
        )
        return body(LinenDropped(), x, None)[0]


class NNXScanned(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return NNXDropped(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        scan = nnx.scan(
            lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )
        return scan(self.layers, x)


class LinenRemat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(LinenDropped)()(x)


class NNXRemat(nnx.Module):
    def __init__(self, rngs):
        self.layer = NNXDropped(rngs)

    def __call__(self, x):
        return nnx.remat(lambda layer, x: layer(x))(self.layer, x)


class LinenMapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            LinenDropped, split_rngs={"dropout": True}, in_axes=None, axis_size=3
        )
        return mapped()(x)


class NNXMapped(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return NNXDropped(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        apply = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return apply(self.layers, x)


PAIRS = {
    "two of them": (LinenDropped, NNXDropped, 2),
    "one called twice": (LinenShared, NNXShared, 2),
    "scanned": (LinenScanned, NNXScanned, 2),
    "remat": (LinenRemat, NNXRemat, 2),
    "vmapped": (LinenMapped, NNXMapped, 2),
}


def run_linen(module, key=KEY):
    with shared_keys(key) as requests:
        return module.apply({}, ONES, rngs={"dropout": key}), len(requests)


def run_nnx(module, key=KEY):
    with shared_keys(key) as requests:
        return module(ONES), len(requests)


def gradients(linen, nnx_module):
    """Of both, by inputs: transforms trace once more for these."""
    graphdef, state = nnx.split(nnx_module)

    def left(x):
        with shared_keys(KEY):
            return jnp.sum(linen.apply({}, x, rngs={"dropout": KEY}) ** 2)

    def right(x):
        fresh = jax.tree.map(jnp.copy, state)
        with shared_keys(KEY):
            return jnp.sum(nnx.merge(graphdef, fresh)(x) ** 2)

    return jax.grad(left)(ONES), jax.grad(right)(ONES)


@pytest.mark.parametrize("name", PAIRS)
def test_masks_are_the_same_in_both_frontends(name):
    linen, make, count = PAIRS[name]
    left, asked = run_linen(linen())
    right, asked_nnx = run_nnx(make(nnx.Rngs(0)))
    np.testing.assert_array_equal(left, right)
    assert (asked, asked_nnx) == (count, count)
    # Something was dropped, something was kept, and not by one mask for both.
    assert len(np.unique(left)) > 3


@pytest.mark.parametrize("name", PAIRS)
def test_masks_are_the_same_when_differentiated(name):
    linen, make, _ = PAIRS[name]
    np.testing.assert_array_equal(*gradients(linen(), make(nnx.Rngs(0))))


def test_another_key_gives_other_masks_and_the_same_key_the_same():
    first, again, other = (
        run_linen(LinenDropped(), key)[0] for key in (KEY, KEY, jax.random.key(4))
    )
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


def test_masks_do_not_depend_on_the_seed_of_the_nnx_module():
    first, second = (run_nnx(NNXDropped(nnx.Rngs(seed)))[0] for seed in (0, 1))
    np.testing.assert_array_equal(first, second)


def test_masks_are_those_of_the_key_and_the_number_of_the_request():
    with shared_keys(KEY):
        dropped = nnx.Dropout(RATE, rngs=nnx.Rngs(0))(ONES)
    kept = jax.random.bernoulli(jax.random.fold_in(KEY, 0), 1 - RATE, ONES.shape)
    np.testing.assert_array_equal(dropped, jnp.where(kept, ONES / (1 - RATE), 0))


def test_keys_of_first_values_are_left_alone():
    plain = nn.Dense(3).init(jax.random.key(0), ONES)
    own = nnx.Linear(8, 3, rngs=nnx.Rngs(params=0)).kernel[...]
    with shared_keys(KEY) as requests:
        inside = nn.Dense(3).init(jax.random.key(0), ONES)
        nnx_inside = nnx.Linear(8, 3, rngs=nnx.Rngs(params=0)).kernel[...]
    jax.tree.map(np.testing.assert_array_equal, plain, inside)
    np.testing.assert_array_equal(own, nnx_inside)
    assert len(requests) == 0


@pytest.mark.parametrize("rngs", [True, nnx.Rngs(0), nnx.Rngs(carry=0)], ids=str)
def test_the_first_carry_of_a_cell_is_no_request(rngs):
    # For which NNX asks a stream, and Linen nobody.
    rnn = nnx.RNN(nnx.SimpleCell(8, 3, rngs=nnx.Rngs(0)), rngs=rngs)
    with shared_keys(KEY) as requests:
        rnn(ONES[None])
    assert len(requests) == 0


def test_keys_for_other_streams_are_no_requests():
    dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(0))
    plain, _ = run_nnx(dropout)

    @nnx.split_rngs(splits=3)
    @nnx.scan(in_axes=(0, None), out_axes=0)
    def scanned(dropout, x):
        return dropout(x)

    with shared_keys(KEY) as requests:
        forked = nnx.Rngs(0).fork()
        stacked = scanned(nnx.Dropout(RATE, rngs=forked), ONES)
    assert len(requests) == 1
    np.testing.assert_array_equal(stacked, np.stack([plain] * 3))


def test_a_random_function_of_a_stream_is_a_request():
    with shared_keys(KEY) as requests:
        noise = nnx.Rngs(0).noise.normal((3,))
    assert len(requests) == 1
    expected = jax.random.normal(jax.random.fold_in(KEY, 0), (3,))
    np.testing.assert_array_equal(noise, expected)


def test_the_draws_of_a_stream_are_counted_as_ever():
    dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(0))
    with shared_keys(KEY):
        dropout(ONES)
        dropout(ONES)
    assert int(dropout.rngs.count[...]) == 2


def test_flax_is_as_before_afterwards_even_after_an_error():
    before = flax.core.Scope.make_rng, nnx.RngStream.__call__
    with pytest.raises(ZeroDivisionError), shared_keys(KEY):
        assert flax.core.Scope.make_rng is not before[0]
        raise ZeroDivisionError
    assert (flax.core.Scope.make_rng, nnx.RngStream.__call__) == before
    masks = [
        nnx.Dropout(RATE, rngs=nnx.Rngs(seed))(ONES) for seed in (0, 1)
    ]  # their own again
    assert (np.asarray(masks[0]) != np.asarray(masks[1])).any()
