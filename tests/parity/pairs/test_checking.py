"""The check of any pair: what careless checks let pass is found, and by which tier.

Most pairs here are one function of a scalar parameter and the inputs, on both sides.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import strategies as st

import parity
from parity import Args, Call, CheckError, Integers, Oracle, Steps
from parity.pairs.outputs import default_loss
from parity.reporting import gate

BITS = ("tree", "bits")
ROUNDED = ("tree", "bits", "tolerance")
X = jax.ShapeDtypeStruct((3,), jnp.float32)
ONES = jnp.ones(3)
Named = collections.namedtuple("Named", "first second")


class Linen(nn.Module):
    """`function` of a parameter and the inputs."""

    function: Callable[..., Any]

    @nn.compact
    def __call__(self, *args, **keywords):
        scale = self.param("scale", nn.initializers.constant(1.5), ())
        return self.function(scale, *args, **keywords)


class NNX(nnx.Module):
    """The same."""

    def __init__(self, function):
        self.function = function
        self.scale = nnx.Param(jnp.asarray(1.5))

    def __call__(self, *args, **keywords):
        return self.function(self.scale[...], *args, **keywords)


def scaled(scale, x):
    return scale * x


def check(left, right, inputs=X, **options):
    """The report on two functions."""
    options.setdefault("tiers", BITS)
    options.setdefault("examples", 1)
    return parity.check(Linen(left), lambda: NNX(right), inputs, **options)


def differences(report, tier="bits"):
    return {(d.path, d.what) for d in report.tier(tier).differences}


def tier_names(report):
    return [tier.name for tier in report.tiers]


def test_one_function_on_both_sides_is_proved_by_every_tier():
    report = check(
        scaled,
        scaled,
        tiers=gate.PAIR_TIERS,
        oracle=Oracle(lambda values, x: values["params/scale"] * x),
    )
    assert report.ok
    assert report.verdict == "proved"
    statuses = {tier.name: tier.status for tier in report.tiers}
    assert statuses == dict.fromkeys(
        ["tree", "init", "program", "bits", "oracle"], "proved"
    )
    # Outputs, loss, a gradient by the parameter and one by the input; and all of it
    # once more, with other values.
    assert report.tier("bits").compared.leaves == 8


# Traps


def test_float32_against_bfloat16_fails():
    report = check(
        scaled, lambda s, x: scaled(s, x).astype(jnp.bfloat16), tiers=ROUNDED
    )
    assert not report.ok
    assert ("outputs", "dtype") in differences(report)
    assert "tolerance" not in tier_names(report)  # no rounding gives another dtype


def test_nan_against_nan_fails_unless_it_is_allowed():
    def broken(scale, x):
        return scale * x / jnp.zeros_like(x) * 0.0

    call = Call(gradient=False)
    report = check(broken, broken, call=call)
    assert differences(report) == {("outputs", "not finite")}
    assert not report.ok
    assert check(broken, broken, call=call, finite=False).ok


@pytest.mark.parametrize(
    "outputs", [(), {}, None, jnp.zeros((0, 3)), {"a": jnp.zeros((2, 0))}], ids=str
)
def test_outputs_of_nothing_prove_nothing(outputs):
    def nothing(scale, x):
        return outputs

    report = check(nothing, nothing)
    assert not report.ok
    assert "0 elements" in str(report.tier("bits").differences[0])


def test_a_leaf_of_no_entries_is_compared_beside_others():
    def left(scale, x):
        return scale * x, jnp.zeros((0, 3))

    def right(scale, x):
        return scale * x, jnp.zeros((0, 4))

    assert check(left, left).ok
    assert differences(check(left, right)) == {("outputs/1", "shape")}


def test_shapes_that_broadcast_are_not_equal():
    report = check(lambda s, x: (s * x)[None], scaled)
    assert ("outputs", "shape") in differences(report)
    detail = report.tier("bits").differences[-1].detail
    assert "(1, 3)" in detail and "(3,)" in detail


def test_minus_zero_is_not_zero():
    report = check(lambda s, x: 0.0 * x, lambda s, x: -0.0 * x, ONES)
    assert ("outputs", "value") in differences(report)


@pytest.mark.parametrize(
    "left, right, missing",
    [
        (lambda s, x: {"logits": s * x}, lambda s, x: {"logit": s * x}, "logits logit"),
        (lambda s, x: (s * x, x), lambda s, x: {"a": s * x, "b": x}, "0 1 a b"),
        (lambda s, x: Named(s * x, x), lambda s, x: (s * x, x), "first second 0 1"),
        (lambda s, x: (s * x, x), lambda s, x: (s * x,), "1"),
    ],
    ids=["keys", "tuple and dict", "named tuple", "one less"],
)
def test_outputs_of_other_names_are_missing(left, right, missing):
    report = check(left, right, call=Call(gradient=False))
    expected = {(f"outputs/{name}", "missing") for name in missing.split()}
    assert differences(report) == expected


# Choices: the index of the largest score


SCORES = jnp.asarray([[1.0, 0.0, 0.0], [1.0, 2.0**-24, 2.0**-24]])


def first_of_left_sums(scale, x):
    return jnp.argmax(scale / scale * ((x[:, 0] + x[:, 1]) + x[:, 2]))


def first_of_right_sums(scale, x):
    return jnp.argmax(scale / scale * (x[:, 0] + (x[:, 1] + x[:, 2])))


def test_a_near_tie_is_inconclusive():
    # The second score is 1 or one step more, as its parts are added.
    report = check(
        first_of_left_sums,
        first_of_right_sums,
        SCORES,
        tiers=ROUNDED,
        fail_on="tolerance",
    )
    assert report.tier("bits").status == "failed"
    assert report.tier("tolerance").status == "inconclusive"
    assert "near-tie" in report.tier("tolerance").differences[0].detail
    assert not report.ok
    assert report.verdict == "INCONCLUSIVE"


def test_a_flip_that_no_rounding_explains_fails():
    def shifted(scale, x):
        return first_of_left_sums(scale, x.at[1].add(0.01))

    scores = jnp.asarray([[1.0, 0.0, 0.0], [0.99, 0.0, 0.0]])
    report = check(
        first_of_left_sums, shifted, scores, tiers=ROUNDED, fail_on="tolerance"
    )
    assert report.tier("tolerance").status == "failed"
    assert report.verdict == "NOT EQUAL"


# Rounding


def test_a_sum_in_another_order_passes_the_tolerance_and_fails_bits():
    report = check(
        lambda s, x: s * ((x[0] + x[1]) + x[2]),
        lambda s, x: s * (x[0] + (x[1] + x[2])),
        jax.ShapeDtypeStruct((3, 64), jnp.float32),
        tiers=ROUNDED,
    )
    assert report.tier("bits").status == "failed"
    assert report.tier("tolerance").status == "proved"
    assert "confirmed in float64" in report.tier("tolerance").note
    assert not report.ok


def normalised(scale, x, epsilon):
    return scale * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon)


def test_an_epsilon_that_float32_hardly_shows_is_another_function():
    report = check(
        functools.partial(normalised, epsilon=1e-6),
        functools.partial(normalised, epsilon=1.1e-6),
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        tiers=ROUNDED,
        fail_on="tolerance",
    )
    bits, tolerance = report.tier("bits"), report.tier("tolerance")
    outputs = next(d for d in bits.differences if d.path == "outputs")
    assert outputs.absolute < 1e-6
    assert tolerance.status == "failed"
    assert any("another function" in d.detail for d in tolerance.differences)


def test_an_offset_beyond_the_noise_fails_the_tolerance():
    report = check(scaled, lambda s, x: s * x + 1e-4, tiers=ROUNDED)
    assert ("outputs", "value") in differences(report, "tolerance")


def test_where_a_dtype_is_fixed_float64_is_not_asked():
    def fixed(scale, x):
        return scale * x + jnp.full(3, 1e-7, jnp.float32)

    report = check(fixed, lambda s, x: fixed(s, x) * (1 + 2.0**-23), tiers=ROUNDED)
    assert report.tier("tolerance").status == "proved"
    assert "not confirmed" in report.tier("tolerance").note


def in_bfloat16(scale, x, order):
    x = x.astype(jnp.bfloat16)
    parts = [x[i] for i in order]
    return scale * ((parts[0] + parts[1]) + parts[2]).astype(jnp.float32)


def test_a_sum_in_bfloat16_in_another_order_passes_the_tolerance():
    report = check(
        functools.partial(in_bfloat16, order=(0, 1, 2)),
        functools.partial(in_bfloat16, order=(2, 1, 0)),
        jax.ShapeDtypeStruct((3, 64), jnp.float32),
        tiers=ROUNDED,
    )
    assert report.tier("bits").status == "failed"
    assert report.tier("tolerance").status == "proved"


def test_bfloat16_on_one_side_only_fails_the_tolerance():
    report = check(
        lambda s, x: s * ((x[0] + x[1]) + x[2]),
        functools.partial(in_bfloat16, order=(0, 1, 2)),
        jax.ShapeDtypeStruct((3, 64), jnp.float32),
        tiers=ROUNDED,
    )
    assert ("outputs", "value") in differences(report, "tolerance")


# Gradients


def test_a_gradient_that_is_stopped_is_found_though_outputs_are_equal():
    report = check(
        lambda s, x, shift: s * x + shift,
        lambda s, x, shift: s * x + jax.lax.stop_gradient(shift),
        Args(X, shift=X),
    )
    assert differences(report) == {("input_gradient/shift", "value")}


def test_a_gradient_by_a_parameter_has_its_name():
    report = check(scaled, lambda s, x: jax.lax.stop_gradient(s) * x)
    assert differences(report) == {("gradient/params/scale", "value")}


def test_a_loss_of_the_users_is_the_one_that_is_differentiated():
    def right(scale, x):
        return {"y": scale * x, "unused": jax.lax.stop_gradient(scale) * x}

    def left(scale, x):
        return {"y": scale * x, "unused": scale * x}

    assert not check(left, right).ok
    assert check(left, right, loss=lambda outputs: jnp.sum(outputs["y"])).ok


def test_without_a_gradient_outputs_are_compared_alone():
    report = check(
        scaled,
        lambda s, x: jax.lax.stop_gradient(s) * x,
        call=Call(gradient=False),
    )
    assert report.ok
    assert report.tier("bits").compared.leaves == 2  # with given and with other values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_every_entry_of_the_outputs_counts_in_the_loss(dtype):
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 3)) + 1j * random.standard_normal((2, 3))
    x = x if dtype == "complex64" else x.real
    given = jnp.asarray(x).astype(dtype)
    numbers = np.asarray(given.astype("complex64")).ravel()
    if dtype == "complex64":
        numbers = np.concatenate([numbers.real, numbers.imag])
    numbers = np.tile(numbers.real, 2)
    expected = np.sum(numbers * np.cos(np.arange(numbers.size)))
    outputs = {"a": given, "b": (given, jnp.arange(3))}
    np.testing.assert_allclose(default_loss(outputs), expected, rtol=1e-5)


# Calls and methods


class LinenCodec(nn.Module):
    def setup(self):
        self.dense = nn.Dense(3)

    def encode(self, x):
        return self.dense(x)

    def decode(self, x, train=False):
        return self.dense(x) * (2.0 if train else 1.0)

    __call__ = encode


class NNXCodec(nnx.Module):
    def __init__(self, rngs, factor=2.0):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.deterministic = True
        self.factor = factor

    def embed(self, x):
        return self.dense(x)

    def decode(self, x, train=False):
        train = train or not self.deterministic
        return self.dense(x) * (self.factor if train else 1.0)

    __call__ = embed


def test_methods_are_compared_with_inputs_of_their_own():
    report = parity.check(
        LinenCodec(),
        NNXCodec,
        None,
        methods={"__call__": X, "decode": jax.ShapeDtypeStruct((4, 3), jnp.float32)},
        tiers=BITS,
        examples=1,
    )
    assert report.ok
    assert "call, decode" in report.tier("bits").note


def test_calls_name_methods_modes_and_keywords():
    calls = [
        Call("encoded", ("encode", "embed")),
        Call("trained", "decode", linen={"train": True}, mode="train"),
        Call("told", "decode", linen={"train": True}, nnx={"train": True}),
        Call("evaluated", "decode", mode="eval"),
    ]
    assert parity.check(
        LinenCodec(), NNXCodec, X, call=calls, tiers=BITS, examples=1
    ).ok
    report = parity.check(
        LinenCodec(),
        functools.partial(NNXCodec, factor=3.0),
        X,
        call=[without_gradient(call) for call in calls],
        tiers=BITS,
        examples=1,
    )
    assert differences(report) == {
        ("trained/outputs", "value"),
        ("told/outputs", "value"),
    }


def without_gradient(call):
    return Call(call.name, call.method, call.linen, call.nnx, call.mode, gradient=False)


def test_constant_keywords_for_both_are_a_mapping():
    report = parity.check(
        LinenCodec(),
        NNXCodec,
        X,
        call={"train": True},
        methods=["decode"],
        tiers=BITS,
        examples=1,
    )
    assert report.ok


# State


class LinenTotal(nn.Module):
    """Adds what it has seen so far."""

    @nn.compact
    def __call__(self, x):
        total = self.variable("cache", "total", jnp.zeros, (3,))
        if not self.is_initializing():
            total.value = total.value + x
        return 1.0 * total.value


class NNXTotal(nnx.Module):
    def __init__(self, stale=False):
        self.total = nnx.Cache(jnp.zeros(3))
        self.stale = stale

    def __call__(self, x):
        total = self.total[...] + x
        if not self.stale:
            self.total[...] = total
        return total


def test_state_goes_from_step_to_step():
    assert parity.check(LinenTotal(), NNXTotal, Steps([X] * 3), tiers=BITS).ok


def test_a_stale_cache_is_found_in_its_state_and_in_the_next_step():
    report = parity.check(
        LinenTotal(),
        lambda: NNXTotal(stale=True),
        Steps([X] * 2),
        tiers=BITS,
        examples=1,
    )
    assert differences(report) == {
        ("step_0/state/cache/total", "value"),
        ("step_1/state/cache/total", "value"),
        ("step_1/outputs", "value"),
        ("step_1/loss", "value"),
    }


def test_a_parameter_that_a_call_changes_is_found():
    class Decaying(NNX):
        def __call__(self, x):
            y = super().__call__(x)
            self.scale[...] = 0.9 * self.scale[...]
            return y

    report = parity.check(
        Linen(scaled), lambda: Decaying(scaled), X, tiers=BITS, examples=1
    )
    assert differences(report) == {("state/params/scale", "value")}
    assert not report.ok


def test_the_users_module_is_left_as_it_was():
    module = NNXTotal()
    parity.check(LinenTotal(), module, Steps([X] * 2), tiers=BITS)
    np.testing.assert_array_equal(module.total[...], np.zeros(3))


# Random keys


class LinenNoise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3, name="dense")(x))


class NNXNoise(nnx.Module):
    def __init__(self, rngs, more=False):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.rngs = rngs
        self.more = more

    def __call__(self, x):
        y = self.dropout(self.dense(x))
        if self.more:
            self.rngs.noise()
        return y


def test_dropout_is_compared_with_the_same_masks():
    assert parity.check(LinenNoise(), NNXNoise, X, tiers=BITS).ok


def test_one_more_request_for_a_key_is_named_with_both_numbers():
    report = parity.check(
        LinenNoise(), lambda rngs: NNXNoise(rngs, more=True), X, tiers=BITS, examples=1
    )
    assert differences(report) == {("(random keys)", "count")}
    assert "linen asks for 1, nnx for 2" in report.tier("bits").differences[0].detail
    assert not report.ok


# Examples


def test_the_smallest_example_that_differs_is_shown_with_the_command():
    whole = st.integers(0, 100).map(lambda n: np.full((2,), n, np.float32))
    report = check(
        lambda s, x: s * x,
        lambda s, x: s * jnp.where(x > 3, x + 1, x),
        whole,
        examples=20,
        replay="parity check --linen m:l --seed 7",
        seed=7,
    )
    details = " ".join(report.tier("bits").details)
    assert "smallest example that differs: array([4., 4.]" in details
    assert "again: parity check --linen m:l --seed 7" in details
    assert report.tier("bits").examples == 1


def test_a_strategy_that_finds_nothing_counts_its_examples():
    whole = st.integers(0, 100).map(lambda n: np.full((2,), n, np.float32))
    report = check(scaled, scaled, whole, examples=5)
    assert report.ok
    assert 1 <= report.tier("bits").examples <= 5


def test_examples_of_a_list_are_all_compared():
    report = check(
        scaled, lambda s, x: s * jnp.where(x > 5, x + 1, x), [ONES, 9 * ONES]
    )
    assert report.tier("bits").examples == 2
    assert ("outputs", "value") in differences(report)


def test_integers_are_drawn_below_their_limit():
    def looked_up(scale, ids):
        return scale * jnp.where((ids >= 2) & (ids < 5), 1.0, jnp.nan)

    assert check(looked_up, looked_up, Integers((50,), 5, 2)).ok


# Abstract modules


def test_modules_of_shapes_are_compared_by_tree_and_program():
    report = parity.check(
        Linen(scaled), nnx.eval_shape(lambda: NNX(scaled)), X, tiers=("tree", "program")
    )
    assert report.tier("program").status == "proved"
    every = parity.check(Linen(scaled), nnx.eval_shape(lambda: NNX(scaled)), X)
    statuses = {tier.name: tier.status for tier in every.tiers}
    assert statuses == {
        "tree": "proved",
        "init": "skipped",
        "program": "proved",
        "bits": "skipped",
    }
    assert every.ok


def test_values_that_do_not_fit_stop_the_check_at_the_tree():
    report = parity.check(nn.Dense(3), nnx.Linear(3, 4, rngs=nnx.Rngs(0)), X)
    assert {d[1] for d in differences(report, "tree")} == {"shape"}
    assert report.tier("bits").status == "skipped"
    assert not report.ok


# First values


def dense(**left):
    def make(**right):
        return (
            nn.Dense(32, **left),
            lambda rngs: nnx.Linear(32, 32, **right, rngs=rngs),
            jax.ShapeDtypeStruct((2, 32), jnp.float32),
        )

    return make


def test_ten_times_the_spread_at_the_start_is_named():
    pair = dense(kernel_init=jax.nn.initializers.normal(0.1))(
        kernel_init=jax.nn.initializers.normal(1.0)
    )
    report = parity.check(*pair, tiers=("tree", "init"), fail_on="init")
    odd = {d for d in differences(report, "init") if d[1] == "distribution"}
    assert odd == {("params/kernel", "distribution")}
    assert not report.ok


def test_another_constant_at_the_start_is_named():
    pair = dense()(bias_init=jax.nn.initializers.ones)
    report = parity.check(*pair, tiers=("tree", "init"))
    odd = [d for d in report.tier("init").differences if d.what == "distribution"]
    assert [str(d) for d in odd] == ["params/bias: distribution: 0 in linen, 1 in nnx"]


def test_other_first_bytes_fail_the_verdict_only_if_asked_to():
    pair = dense()()
    report = parity.check(*pair, tiers=("tree", "init", "bits"), examples=1)
    assert report.tier("init").status == "failed"
    assert report.ok
    asked = parity.check(
        *pair, tiers=("tree", "init", "bits"), examples=1, fail_on="init"
    )
    assert not asked.ok


# The oracle


def test_an_oracle_that_agrees_proves_and_says_how_near_it_is():
    oracle = Oracle(lambda values, x: values["params/scale"] * np.float64(x))
    report = check(scaled, scaled, tiers=(*BITS, "oracle"), oracle=oracle)
    assert report.tier("oracle").status == "proved"
    assert "of the tolerance" in report.tier("oracle").note


@pytest.mark.parametrize(
    "reference, what",
    [
        (lambda values, x: 1.001 * values["params/scale"] * x, "value"),
        (lambda values, x: (values["params/scale"] * x)[None], "shape"),
        (lambda values, x: np.full_like(x, np.nan), "value"),
    ],
    ids=["value", "shape", "nan"],
)
def test_an_oracle_that_differs_fails_though_the_frontends_agree(reference, what):
    report = check(scaled, scaled, tiers=(*BITS, "oracle"), oracle=Oracle(reference))
    assert report.tier("bits").status == "proved"
    assert differences(report, "oracle") == {("outputs", what)}
    assert not report.ok


# Repeating


def test_a_frontend_that_does_not_repeat_itself_is_never_called_equal():
    count = itertools.count()

    def drifting(scale, x):
        # Zero at first, when the two are compared.
        drift = jax.experimental.io_callback(
            lambda: np.float32(next(count) > 1), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return scale * x + drift

    report = check(scaled, drifting, call=Call(gradient=False))
    assert not report.tier("bits").differences
    assert report.tier("bits").status == "inconclusive"
    assert not report.ok
    assert report.deterministic is False
    assert "not deterministic" in report.to_text()


# What cannot be checked


def make():
    return NNX(scaled)


def raising(scale, x):
    raise ZeroDivisionError("the model's own")


def make_raising():
    raise ZeroDivisionError("the factory's own")


@pytest.mark.parametrize(
    "linen, module, options, message",
    [
        (nn.Dense, make, {}, "linen: making the module raises .*features"),
        (NNX, make, {}, "linen.Module.* Got .*NNX.*are the two sides swapped"),
        (Linen(scaled), nn.Dense, {}, "nnx.Module.* Got .*Dense.*sides swapped"),
        (Linen(scaled), make, {"inputs": []}, "list of inputs for call is empty"),
        (Linen(scaled), make, {"inputs": "x"}, "Inputs are arrays. Got 'x'"),
        (Linen(scaled), make, {"call": 3}, "Calls must be .*Got int: 3"),
        (Linen(scaled), (3, make), {}, r"\(module, state\). Got a pair .*int: 3"),
        (make, make, {}, "must be a flax.linen.Module"),
        (Linen(scaled), nn.Dense(3), {}, "must be a flax.nnx.Module.* Got Dense"),
        (Linen(scaled), lambda: 3, {}, "must be a flax.nnx.Module.* Got int: 3"),
        (Linen(scaled), make_raising, {}, "ZeroDivisionError: the factory's own"),
        (Linen(raising), make, {}, "linen: .*ZeroDivisionError: the model's own"),
        (Linen(scaled), lambda: NNX(raising), {}, "nnx: .*the model's own"),
        (Linen(scaled), make, {"inputs": None}, "No inputs for call"),
        (Linen(scaled), make, {"tiers": ("tree", "bit")}, "Got tree, bit"),
        (Linen(scaled), make, {"tiers": ()}, "Got none"),
        (Linen(scaled), make, {"tiers": ("tree", "oracle")}, "needs a reference"),
        (Linen(scaled), make, {"call": []}, "nothing to call"),
        (Linen(scaled), make, {"call": [Call(), Call()]}, "Twice: call"),
        (Linen(scaled), make, {"call": Call(), "methods": ["f"]}, "either calls or"),
        (Linen(scaled), make, {"methods": ["decode"]}, "decode"),
        (
            (Linen(scaled), {"params": {"scale": jnp.ones(())}}),
            make,
            {"variables": {}},
            "Variables came twice",
        ),
        (
            Linen(scaled),
            make,
            {"inputs": jax.ShapeDtypeStruct((2,), jnp.int32)},
            r"Cannot draw int32\[2\].*parity.Integers",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_checked_is_said_with_the_way_out(
    linen, module, options, message
):
    options = {"inputs": X, "tiers": BITS, **options}
    with pytest.raises(CheckError, match=f"(?s){message}"):
        parity.check(linen, module, **options)


def test_a_function_without_a_gradient_says_how_to_go_without():
    @jax.custom_vjp
    def undifferentiable(x):
        return x

    def no_gradient(x):
        raise NotImplementedError("no gradient here")

    undifferentiable.defvjp(no_gradient, no_gradient)

    def function(scale, x):
        return scale * undifferentiable(x)

    with pytest.raises(CheckError, match=r"(?s)no gradient here.*Call\(gradient=False"):
        check(function, function)
    assert check(function, function, call=Call(gradient=False)).ok


def test_assert_parity_raises_with_the_report():
    with pytest.raises(AssertionError, match="(?s)NOT EQUAL.*outputs"):
        parity.assert_parity(
            Linen(scaled), lambda: NNX(lambda s, x: s + x), X, tiers=BITS, examples=1
        )
    assert parity.assert_parity(Linen(scaled), make, X, tiers=BITS, examples=1).ok
