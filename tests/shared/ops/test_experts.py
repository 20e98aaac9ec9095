import functools
from typing import NamedTuple

import hypothesis
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from shared.ops import experts as ops
from tests.references import experts as reference

TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 11, 3, 5, 8, 6

# So few that groups are small on average, and more: two forms on a CPU.
each_size = pytest.mark.parametrize("tokens", [6, TOKENS])
each_activation = pytest.mark.parametrize("activation", reference.ACTIVATIONS)

# Share of the largest value. A sum runs over 8 + 6 terms and up to 11 tokens; the worst
# errors seen are 1e-15 and 2e-7. In bfloat16, rounding of inputs of `down_proj` and of
# each expert's output: some units of 2^-9.
TOLERANCE = {np.float64: 1e-14, np.float32: 2e-6, jnp.bfloat16: 2e-2}
# 1 + tanh and 1 - tanh^2 lose digits where they are nearly 0.
FACTOR = {"silu": 1, "gelu_tanh": 4}


class Inputs(NamedTuple):
    x: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    gate_proj: np.ndarray
    up_proj: np.ndarray
    down_proj: np.ndarray
    real: np.ndarray


FLOATS = 0, 2, 3, 4, 5


def draw_inputs(seed, *, tokens=TOKENS, experts=EXPERTS, choices=CHOICES):
    generator = np.random.default_rng(seed)
    return Inputs(
        x=generator.normal(size=(tokens, WIDTH)),
        experts=np.stack(
            [generator.permutation(experts)[:choices] for _ in range(tokens)]
        ).astype(np.int32),
        weights=generator.dirichlet(np.ones(choices), tokens),
        gate_proj=generator.normal(size=(experts, WIDTH, HIDDEN)),
        up_proj=generator.normal(size=(experts, WIDTH, HIDDEN)),
        down_proj=generator.normal(size=(experts, HIDDEN, WIDTH)),
        real=np.ones(tokens, bool),
    )


expert_mlp = functools.partial(ops.expert_mlp, activation="silu")


@functools.partial(jax.jit, static_argnames="activation")
@functools.partial(jax.grad, argnums=FLOATS, has_aux=True)
def gradients(
    x, experts, weights, gate_proj, up_proj, down_proj, real, d_y, activation="silu"
):
    y = ops.expert_mlp(
        x,
        experts,
        weights,
        gate_proj,
        up_proj,
        down_proj,
        real,
        activation=activation,
    )
    return jnp.sum(y.astype(d_y.dtype) * d_y), y


def run(inputs, dtype=np.float64, d_y=None, activation="silu"):
    """Output and gradients of a random weighted sum of it."""
    d_y = output_weights(inputs) if d_y is None else d_y
    with jax.enable_x64(dtype == np.float64):
        wide = np.float32 if dtype == jnp.bfloat16 else dtype
        inputs = Inputs(*(x.astype(wide) if x.dtype == float else x for x in inputs))
        if dtype == jnp.bfloat16:  # router weights stay float32
            cast = {n: jnp.asarray(getattr(inputs, n), dtype) for n in low}
            inputs = inputs._replace(**cast)
        slopes, y = gradients(*inputs, d_y.astype(wide), activation=activation)
        assert y.dtype == slopes[0].dtype == slopes[2].dtype == dtype
        return jax.tree.map(np.asarray, (y, slopes))


low = "x", "gate_proj", "up_proj", "down_proj"


def output_weights(inputs):
    return np.random.default_rng(7).normal(size=inputs.x.shape)


def assert_close(actual, expected, tolerance):
    actual = np.asarray(actual, np.float64)
    assert np.all(np.isfinite(actual))
    error = np.max(np.abs(actual - expected), initial=0)
    assert error <= tolerance * np.max(np.abs(expected), initial=1e-300)


def assert_matches_the_loop(inputs, dtype=np.float64, activation="silu"):
    y, slopes = run(inputs, dtype, activation=activation)
    d_y = output_weights(inputs)
    tolerance = TOLERANCE[dtype] * FACTOR[activation]
    assert_close(y, reference.expert_mlp(*inputs, activation), tolerance)
    expected = reference.expert_mlp_gradients(*inputs, d_y, activation)
    for actual, exact in zip(slopes, expected, strict=True):
        assert_close(actual, exact, tolerance)


@each_activation
def test_the_gradients_of_the_loop_match_finite_differences(activation):
    inputs = draw_inputs(0, tokens=4)
    d_y = output_weights(inputs)
    slopes = reference.expert_mlp_gradients(*inputs, d_y, activation)
    for slope, field in zip(slopes, FLOATS, strict=True):
        x = inputs[field]
        for place in np.random.default_rng(0).integers(x.size, size=8):
            shift = np.zeros(x.size)
            shift[place] = 1e-5  # curvature gives 1e-10, rounding 1e-10
            shift = shift.reshape(x.shape)
            name = Inputs._fields[field]
            higher, lower = ({name: x + sign * shift} for sign in (1, -1))
            up = reference.expert_mlp(*inputs._replace(**higher), activation)
            down = reference.expert_mlp(*inputs._replace(**lower), activation)
            rise = np.sum((up - down) * d_y) / 2e-5
            np.testing.assert_allclose(slope.reshape(-1)[place], rise, 1e-6, 1e-7)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, jnp.bfloat16])
@each_size
@each_activation
def test_output_and_gradients_match_the_loop(dtype, tokens, activation):
    inputs = draw_inputs(1, tokens=tokens)
    if dtype == jnp.bfloat16:
        rounded = {n: np.asarray(jnp.bfloat16(getattr(inputs, n)), float) for n in low}
        inputs = inputs._replace(**rounded)
    assert_matches_the_loop(inputs, dtype, activation)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    st.sampled_from([6, TOKENS]),
    st.lists(st.permutations(range(EXPERTS)), min_size=TOKENS, max_size=TOKENS),
    st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS),
    st.integers(0, 2**32 - 1),
)
def test_any_routing_matches_the_loop(tokens, orders, real, seed):
    experts = np.int32([order[:CHOICES] for order in orders])[:tokens]
    inputs = draw_inputs(seed, tokens=tokens)
    inputs = inputs._replace(experts=experts, real=np.array(real)[:tokens])
    assert_matches_the_loop(inputs)


@pytest.mark.parametrize("favourite", [0, 2, EXPERTS - 1])
@each_size
def test_no_token_is_dropped_when_all_choose_the_same(favourite, tokens):
    """More rows than a block has, and experts without any."""
    inputs = draw_inputs(2, tokens=tokens)
    same = np.full((tokens, CHOICES), favourite, np.int32)
    assert_matches_the_loop(inputs._replace(experts=same))


@pytest.mark.parametrize("tokens, experts, choices", [(1, 64, 10), (300, 4, 1)])
def test_few_tokens_and_many(tokens, experts, choices):
    inputs = draw_inputs(3, tokens=tokens, experts=experts, choices=choices)
    assert_matches_the_loop(inputs)


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
@each_size
def test_padding_is_not_computed_and_gets_no_gradient(value, tokens):
    inputs = draw_inputs(4, tokens=tokens)
    real = np.arange(tokens) % 3 != 1
    inputs = inputs._replace(real=real)
    place = real[:, None]
    other = inputs._replace(
        x=np.where(place, inputs.x, value),
        weights=np.where(place, inputs.weights, value),
        experts=np.where(place, inputs.experts, np.int32(10**6)),
    )
    actual, expected = run(other), run(inputs)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    y, (d_x, d_weights, *_) = actual
    assert (
        not np.any(y[~real]) and not np.any(d_x[~real]) and not np.any(d_weights[~real])
    )
    d_y = np.where(place, output_weights(inputs), np.nan)
    jax.tree.map(np.testing.assert_array_equal, run(inputs, d_y=d_y), expected)


@each_size
def test_only_padding_gives_zeros(tokens):
    inputs = draw_inputs(5, tokens=tokens)
    y, slopes = run(inputs._replace(real=np.zeros(tokens, bool)))
    assert not np.any(y) and not any(np.any(slope) for slope in slopes)


@each_size
def test_broken_weights_of_an_unused_expert_do_not_matter(tokens):
    inputs = draw_inputs(6, tokens=tokens)
    inputs.experts[:] = [0, 1, 3]
    broken = [np.array(x) for x in inputs[3:6]]
    for x in broken:
        x[[2, 4]] = np.nan
    actual = run(
        inputs._replace(gate_proj=broken[0], up_proj=broken[1], down_proj=broken[2])
    )
    jax.tree.map(np.testing.assert_array_equal, actual, run(inputs))


@each_size
def test_it_runs_in_a_scan_under_rematerialisation(tokens):
    inputs = draw_inputs(7, tokens=tokens)
    floats = [np.float32(inputs[i]) for i in FLOATS]
    d_y = np.float32(output_weights(inputs))

    def once(x, weights, *projections):
        chosen, real = jnp.asarray(inputs.experts), jnp.asarray(inputs.real)
        return expert_mlp(x, chosen, weights, *projections, real)

    def scanned(x, weights, *projections):
        def layer(x, projections):
            return jax.checkpoint(once)(x, weights, *projections), None

        stacked = [jnp.stack([p, p]) for p in projections]
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0] * d_y)

    def written_out(x, weights, *projections):
        x = once(x, weights, *projections)
        return jnp.sum(once(x, weights, *projections) * d_y)

    actual = jax.jit(jax.grad(scanned, argnums=range(5)))(*floats)
    expected = jax.jit(jax.grad(written_out, argnums=range(5)))(*floats)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, np.float64(other), TOLERANCE[np.float32])


# --- the forms of the grouped product and of the MLP ---------------------------------


SIZES = [[4, 0, 9, 1, 6], [0, 0, 20, 0, 0], [20, 0, 0, 0, 0], [0, 0, 0, 0, 20], [4] * 5]


@functools.cache
def compiled(form, activation=None):
    return jax.jit(
        functools.partial(form, activation=activation) if activation else form
    )


@pytest.mark.parametrize("form", ["blocked", "ragged"])
@pytest.mark.parametrize("sizes", [*SIZES, [3, 0, 2, 0, 1], [0] * 5])
def test_both_forms_of_the_product_match_the_loop(form, sizes):
    generator = np.random.default_rng(0)
    rows, gradient = generator.normal(size=(20, 7)), generator.normal(size=(20, 4))
    weights = generator.normal(size=(5, 7, 4))
    group = np.repeat(np.arange(5), sizes)
    used = len(group)
    gradient[used:] = 0

    with jax.enable_x64(True):
        sizes = np.int32(sizes)
        multiply = compiled(getattr(ops, f"{form}_matmul"))
        y = np.asarray(multiply(rows, weights, sizes))
        backward = compiled(getattr(ops, f"{form}_gradients"))
        d_rows, d_weights = map(np.asarray, backward(rows, weights, sizes, gradient))

    d_exact = np.zeros(weights.shape)
    for i, g in enumerate(group):
        d_exact[g] += np.outer(rows[i], gradient[i])
        assert_close(y[i], rows[i] @ weights[g], 1e-14)
        assert_close(d_rows[i], weights[g] @ gradient[i], 1e-14)
    assert_close(d_weights, d_exact, 1e-14)


@pytest.mark.parametrize(
    "form", [ops.mlp_of_small_groups, ops.mlp_by_group, ops.mlp_by_matrix]
)
@pytest.mark.parametrize("sizes", [*SIZES, [3, 0, 2, 0, 1], [0] * 5])
@each_activation
def test_every_form_of_the_mlp_matches_the_loop(form, sizes, activation):
    generator = np.random.default_rng(0)
    rows, scale = generator.normal(size=(20, 7)), generator.normal(size=(20, 1))
    gate, up = generator.normal(size=(2, 5, 7, 4))
    down = generator.normal(size=(5, 4, 7))
    with jax.enable_x64(True):
        args = rows, scale, gate, up, down, np.int32(sizes)
        y = np.asarray(compiled(form, activation)(*args))
    # Some rows have nothing but values of gelu that are nearly 0 (see FACTOR).
    tolerance = {"silu": 1e-13, "gelu_tanh": 1e-11}[activation]
    for i, g in enumerate(np.repeat(np.arange(5), sizes)):
        opened, _ = reference.ACTIVATIONS[activation](rows[i] @ gate[g])
        hidden = opened * (rows[i] @ up[g]) * scale[i]
        assert_close(y[i], hidden @ down[g], tolerance)


def test_only_small_groups_on_a_cpu_are_multiplied_by_group(monkeypatch):
    seen = []
    by_group = ops.mlp_by_group
    monkeypatch.setattr(
        ops, "mlp_by_group", lambda *a, **b: seen.append(a) or by_group(*a, **b)
    )
    for tokens, platform, expected in ((4, "cpu", 1), (5, "cpu", 0), (3, "tpu", 1)):
        # 2 choices among 2 experts: groups of `tokens` rows, traced once a shape.
        inputs = abstract_inputs(tokens, 2, 2, WIDTH, HIDDEN, jnp.float32)[:-1]
        lowered = jax.jit(lambda *args: expert_mlp(*args)).trace(*inputs)
        text = lowered.lower(lowering_platforms=(platform,)).as_text()
        assert len(seen) == expected
        assert ("ragged_dot" in text) == (platform == "tpu")
        seen.clear()


def test_both_forms_of_the_mlp_round_bfloat16_alike():
    generator = np.random.default_rng(1)
    shapes = (20, 7), (5, 7, 4), (5, 7, 4), (5, 4, 7)
    rows, *stacks = (
        jnp.asarray(generator.normal(size=s), jnp.bfloat16) for s in shapes
    )
    scale = jnp.asarray(generator.normal(size=(20, 1)), jnp.float32)
    args = rows, scale, *stacks, jnp.asarray(SIZES[0], jnp.int32)
    by_group = compiled(ops.mlp_by_group, "silu")
    by_matrix = compiled(ops.mlp_by_matrix, "silu")
    assert by_group(*args).dtype == jnp.bfloat16
    np.testing.assert_array_equal(by_group(*args), by_matrix(*args))


@pytest.mark.parametrize("form", ["blocked", "ragged"])
def test_both_forms_sum_bfloat16_in_float32(form):
    """1 + 512 / 512: in bfloat16 the small terms vanish beside the 1."""
    rows = jnp.full((513, 1), 2.0**-9, jnp.bfloat16).at[0].set(1)
    ones = jnp.ones((1, 513, 2), jnp.bfloat16)
    multiply = compiled(getattr(ops, f"{form}_matmul"))
    y = multiply(rows.T, ones, jnp.array([1]))
    assert y.dtype == jnp.bfloat16 and np.all(y == 2)
    backward = compiled(getattr(ops, f"{form}_gradients"))
    one = jnp.ones((1, 1, 2), jnp.bfloat16)
    _, d_weights = backward(
        rows, one, jnp.array([513]), jnp.ones((513, 2), jnp.bfloat16)
    )
    assert d_weights.dtype == jnp.bfloat16 and np.all(d_weights == 2)


# --- memory and work -----------------------------------------------------------------


def abstract_inputs(tokens, experts, choices, width, hidden, dtype):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    return (
        array(tokens, width),
        array(tokens, choices, dtype=jnp.int32),
        array(tokens, choices, dtype=jnp.float32),
        array(experts, width, hidden),
        array(experts, width, hidden),
        array(experts, hidden, width),
        array(tokens, dtype=jnp.bool_),
        array(tokens, width, dtype=jnp.float32),
    )


def nbytes(x):
    return x.size * x.dtype.itemsize


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_memory_does_not_grow_with_tokens_times_experts(dtype):
    tokens, experts, choices, width, hidden = 256, 64, 4, 64, 32
    inputs = abstract_inputs(tokens, experts, choices, width, hidden, dtype)
    rows = tokens * choices
    forward = jax.jit(expert_mlp).lower(*inputs[:-1]).compile().memory_analysis()
    # Six arrays of rows: in, out, permuted at `width`; gate, up, product at `hidden`.
    assert forward.temp_size_in_bytes < 6 * 4 * rows * width
    assert forward.temp_size_in_bytes < 4 * tokens * experts * hidden

    backward = gradients.lower(*inputs).compile().memory_analysis()
    # As many again, and one of the three weight gradients before it is handed over.
    bound = 12 * 4 * rows * width + nbytes(inputs[3])
    assert backward.temp_size_in_bytes < bound


def test_no_array_is_as_large_as_tokens_times_experts():
    tokens, experts, choices, width, hidden = 4096, 64, 2, 16, 8
    inputs = abstract_inputs(tokens, experts, choices, width, hidden, jnp.float32)
    for size in array_sizes(
        jax.make_jaxpr(gradients)(*inputs).jaxpr, skip="ragged_dot"
    ):
        assert size <= (choices * tokens + 64) * width < tokens * experts


def array_sizes(jaxpr, skip):
    for equation in jaxpr.eqns:
        if not equation.primitive.name.startswith(skip):
            yield from (x.aval.size for x in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from array_sizes(inner, skip)


def test_a_decoding_step_holds_no_weights():
    """One token, 10 of 512 experts: less than one matrix more than its arguments."""
    inputs = abstract_inputs(1, 512, 10, 64, 32, jnp.float32)[:-1]
    memory = jax.jit(expert_mlp).lower(*inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10 * 4 * 64 * 32 < nbytes(inputs[3]) / 50
