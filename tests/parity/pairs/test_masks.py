"""Both frontends get the same random keys, and so drop the same entries."""

from __future__ import annotations

import itertools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import transforms

from parity.pairs.masks import set_keys, shared_keys, stream_names

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
    split: bool = True

    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda module, x, _: (module(x), None),
            split_rngs={"dropout": self.split},
            length=3,
        )
        return body(LinenDropped(), x, None)[0]


def stack(rngs, split):
    """Three of them, with keys of their own or with one key."""
    return nnx.vmap(NNXDropped)(rngs.split(3) if split else rngs.broadcast(3))


class NNXScanned(nnx.Module):
    def __init__(self, rngs, split=True):
        self.layers = stack(rngs, split)

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
    split: bool = True

    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            LinenDropped, split_rngs={"dropout": self.split}, in_axes=None, axis_size=3
        )
        return mapped()(x)


class NNXMapped(nnx.Module):
    def __init__(self, rngs, split=True):
        self.layers = stack(rngs, split)

    def __call__(self, x):
        apply = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
        return apply(self.layers, x)


class LinenJitted(nn.Module):
    """Under `jit`, and called twice."""

    @nn.jit
    def dropped(self, x):
        return self.dropout(x)

    def setup(self):
        self.dropout = nn.Dropout(RATE, deterministic=False)

    def __call__(self, x):
        return self.dropped(x) + 3 * self.dropped(jnp.ones_like(x))


class LinenJittedLayers(nn.Module):
    """Two of one class under `jit`: the second finds what was traced for the first."""

    @nn.compact
    def __call__(self, x):
        layer = nn.jit(LinenDropped)
        return layer()(layer()(x))


class LinenLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenDropped()(LinenDropped()(x))


class NNXJitted(NNXShared):
    @nnx.jit
    def dropped(self, x):
        return self.dropout(x)

    def __call__(self, x):
        return self.dropped(x) + 3 * self.dropped(jnp.ones_like(x))


class NNXKept(NNXJitted):
    """As under `jit`, what `remat` has traced is kept."""

    @nnx.remat
    def dropped(self, x):
        return self.dropout(x)


class NNXJittedLayer(NNXDropped):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class NNXJittedLayers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([NNXJittedLayer(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PAIRS = {
    "two of them": (LinenDropped, NNXDropped, 2),
    "one called twice": (LinenShared, NNXShared, 2),
    "scanned": (LinenScanned, NNXScanned, 2),
    "remat": (LinenRemat, NNXRemat, 2),
    "vmapped": (LinenMapped, NNXMapped, 2),
    "jit in both": (LinenJitted, NNXJitted, 2),
    "jit in linen": (LinenJitted, NNXShared, 2),
    "jit in nnx": (LinenShared, NNXJitted, 2),
    "remat of a method": (LinenShared, NNXKept, 2),
    "layers under jit in both": (LinenJittedLayers, NNXJittedLayers, 4),
    "layers under jit in nnx": (LinenLayers, NNXJittedLayers, 4),
}


def run_linen(module, key=KEY):
    @jax.jit
    def run(key):
        with shared_keys(key) as requests:
            seen.append(requests)
            return module.apply({}, ONES, rngs={"dropout": key})

    seen = []
    return run(key), len(seen[0])


def run_nnx(module, key=KEY):
    graphdef, state = nnx.split(module)

    @jax.jit
    def run(key):
        model = fresh(graphdef, state, key)
        with shared_keys(key) as requests:
            seen.append(requests)
            return model(ONES)

    seen = []
    return run(key), len(seen[0])


def fresh(graphdef, state, key):
    model = nnx.merge(graphdef, jax.tree.map(lambda x: x, state), copy=True)
    set_keys(model, key)
    return model


def gradients(linen, nnx_module):
    """Of both, by inputs: transforms trace once more for these."""
    graphdef, state = nnx.split(nnx_module)

    def left(x):
        with shared_keys(KEY):
            return jnp.sum(linen.apply({}, x, rngs={"dropout": KEY}) ** 2)

    def right(x):
        with shared_keys(KEY):
            return jnp.sum(fresh(graphdef, state, KEY)(x) ** 2)

    return jax.jit(jax.grad(left))(ONES), jax.jit(jax.grad(right))(ONES)


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


SPLIT = list(itertools.product(["scan", "vmap"], [True, False], [True, False]))


@pytest.mark.parametrize(("transform", "left", "right"), SPLIT)
def test_masks_are_shared_along_an_axis_where_keys_are_not_split(
    transform, left, right
):
    linen, make = {
        "scan": (LinenScanned, NNXScanned),
        "vmap": (LinenMapped, NNXMapped),
    }[transform]
    ours, _ = run_linen(linen(split=left))
    theirs, _ = run_nnx(make(nnx.Rngs(0), split=right))
    assert np.array_equal(ours, theirs) == (left == right)
    if transform == "vmap":
        assert np.array_equal(theirs[0], theirs[1]) == (not right)


def test_keys_split_by_nnx_in_the_call_are_those_that_linen_splits():
    class Mapped(NNXDropped):
        def __call__(self, x):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0, None))
            def dropped(layer, x):
                return NNXDropped.__call__(layer, x)

            return dropped(self, x)

    left, _ = run_linen(LinenMapped())
    right, asked = run_nnx(Mapped(nnx.Rngs(0)))
    np.testing.assert_array_equal(left, right)
    assert asked == 2


@pytest.mark.parametrize("name", [name for name in PAIRS if "jit" in name])
def test_what_jit_has_traced_is_asked_again(name):
    linen, make, count = PAIRS[name]
    module = make(nnx.Rngs(0))
    for _ in range(2):
        assert run_linen(linen())[1] == count
        assert run_nnx(module)[1] == count


def test_jit_makes_no_request_of_its_own():
    class Doubled(nn.Module):
        @nn.jit
        def __call__(self, x):
            return 2 * x

    assert run_linen(Doubled())[1] == 0


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
    dropped, _ = run_nnx(nnx.Dropout(RATE, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(dropped, expected(KEY, 0))


def expected(base, number):
    key = jax.random.fold_in(base, number)
    kept = jax.random.bernoulli(key, 1 - RATE, ONES.shape)
    return jnp.where(kept, ONES / (1 - RATE), 0)


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


@pytest.mark.parametrize("graph", [True, False])
def test_keys_for_other_streams_are_no_requests(graph):
    @nnx.scan(in_axes=(0, None), out_axes=0)
    def scanned(dropout, x):
        return dropout(x)

    dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(0))
    set_keys(dropout, KEY)
    with shared_keys(KEY) as requests:
        dropout.rngs = dropout.rngs.fork()
        dropout = nnx.clone(dropout)
        split = nnx.split_rngs(dropout, splits=3, graph=graph, graph_updates=graph)
        stacked = scanned(dropout if graph else split, ONES)
    assert len(requests) == 1
    masks = [expected(base, 0) for base in jax.random.split(KEY, 3)]
    np.testing.assert_array_equal(stacked, np.stack(masks))


def test_a_random_function_of_a_stream_is_a_request():
    rngs = nnx.Rngs(0)
    set_keys(rngs, KEY)
    with shared_keys(KEY) as requests:
        noise = rngs.noise.normal((3,))
    assert len(requests) == 1
    draw = jax.random.normal(jax.random.fold_in(KEY, 0), (3,))
    np.testing.assert_array_equal(noise, draw)


def test_a_stream_made_in_the_call_keeps_its_seed():
    # Masks are the same in every call then, as no Linen module's are.
    with shared_keys(KEY):
        own = nnx.Dropout(RATE)(ONES, rngs=nnx.Rngs(dropout=7))
    np.testing.assert_array_equal(own, expected(jax.random.key(7), 0))


def test_keys_in_a_stack_of_stacks_are_splits_of_splits():
    model = nnx.Rngs(noise=0).split((3, 2))
    set_keys(model, KEY)
    splits = [jax.random.split(key, 2) for key in jax.random.split(KEY, 3)]
    assert_same_keys(model.noise.key[...], jnp.stack(splits))


def test_keys_that_are_one_key_along_an_axis_stay_so():
    pair = jax.random.split(jax.random.key(0), 2)
    stream = nnx.RngStream(jnp.stack([pair] * 3), tag="noise")
    set_keys(stream, KEY)
    own = jax.random.split(KEY, 2)
    assert_same_keys(stream.key[...], jnp.stack([own] * 3))


def test_keys_of_streams_for_first_values_stay():
    model = nnx.Rngs(params=1, carry=2, dropout=3)
    set_keys(model, KEY)
    for stream, key in [("params", 1), ("carry", 2), ("dropout", 3)]:
        own = jax.random.key(key)
        given = KEY if stream == "dropout" else own
        assert_same_keys(model[stream].key[...], given)


def assert_same_keys(left, right):
    np.testing.assert_array_equal(*map(jax.random.key_data, (left, right)))


def test_keys_of_an_abstract_module_are_set():
    module = nnx.eval_shape(lambda: NNXScanned(nnx.Rngs(0)))
    set_keys(module, KEY)
    keys = nnx.state(module, nnx.RngKey)
    assert {x.shape for x in jax.tree.leaves(keys)} == {(3,)}
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(keys))


class LinenNoise(nn.Module):
    """A stream of the user's own."""

    @nn.compact
    def __call__(self, x):
        def noise(module, x, _):
            return x + jax.random.normal(module.make_rng("noise"), x.shape), None

        return nn.scan(noise, split_rngs={"noise": True}, length=3)(self, x, None)[0]


class NNXNoise(nnx.Module):
    def __init__(self, rngs):
        self.rngs = rngs.split(3)

    def __call__(self, x):
        scan = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(lambda rngs, x: x + jax.random.normal(rngs.noise(), x.shape))(
            self.rngs, x
        )


@pytest.mark.parametrize("rngs", [{"noise": 0}, {"default": 0}], ids=str)
def test_streams_of_other_names_are_split_where_they_are_given(rngs):
    @jax.jit
    def run(key):
        with shared_keys(key) as requests:
            seen.append(requests)
            return LinenNoise().apply({}, ONES, rngs={"dropout": key, "noise": key})

    seen = []
    right, asked = run_nnx(NNXNoise(nnx.Rngs(**rngs)))
    np.testing.assert_array_equal(run(KEY), right)
    assert asked == len(seen[0]) == 1
    assert seen[0].streams == {"noise"}


def test_a_stream_that_was_not_given_is_answered_all_the_same():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.random.normal(self.make_rng("noise"), x.shape)

    noise, asked = run_linen(Noise())
    draw = jax.random.normal(jax.random.fold_in(KEY, 0), ONES.shape)
    np.testing.assert_array_equal(noise, draw)
    assert asked == 1


def test_names_of_streams_are_those_of_the_module():
    class Streams(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.dropout = nnx.Dropout(RATE, rngs=rngs)
            self.rngs = rngs

    named = nnx.Rngs(1, params=0, noise=0, dropout=0, carry=0)
    assert stream_names(Streams(named)) == ("dropout", "noise")
    assert stream_names(Streams(nnx.Rngs(0))) == ()
    assert stream_names(nnx.Linear(2, 3, rngs=named)) == ()


def test_the_draws_of_a_stream_are_counted_as_ever():
    dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(0))
    with shared_keys(KEY):
        dropout(ONES)
        dropout(ONES)
    assert int(dropout.rngs.count[...]) == 2


def test_flax_is_as_before_afterwards_even_after_an_error():
    def patched():
        return flax.core.Scope.make_rng, nnx.RngStream.__call__, transforms.fork_rngs

    before = patched()
    with pytest.raises(ZeroDivisionError), shared_keys(KEY):
        assert flax.core.Scope.make_rng is not before[0]
        raise ZeroDivisionError
    assert patched() == before
    masks = [
        nnx.Dropout(RATE, rngs=nnx.Rngs(seed))(ONES) for seed in (0, 1)
    ]  # their own again
    assert (np.asarray(masks[0]) != np.asarray(masks[1])).any()
