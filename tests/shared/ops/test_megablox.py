"""The grouped matmul for TPUs, interpreted, against float64; where it is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shared
from shared.config import MoEConfig
from shared.layers import experts as layer
from shared.ops import experts, megablox
from shared.ops.routing import Routing
from shared.sharding import AXIS_RULES, make_mesh
from tests.references import experts as reference

ROWS, WIDTH, INNER, GROUPS = 300, 128, 256, 5
ON_TPU = "@tpu_custom_call"
# Sums of up to 300 products of normal numbers, and rounding to the type.
TOLERANCE = {"float32": 2e-6, "bfloat16": 0.01}
# Groups within a tile and over several, none, and rows of no group behind the last.
SIZES = [
    [130, 0, 45, 125, 0],
    [0, 128, 0, 128, 44],
    [0, 0, 7, 0, 100],
    [300, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
]


def draw(dtype="float32", width=WIDTH, rows=ROWS):
    random = np.random.default_rng(0)
    shapes = (rows, width), (GROUPS, width, INNER), (rows, INNER)
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def with_gradients(kernel, rows, weights, gradient, sizes):
    def multiply(rows, weights):
        return experts.grouped_matmul(rows, weights, sizes, kernel)

    y, transpose = jax.vjp(multiply, rows, weights)
    return y, *transpose(gradient)


interpreted = jax.jit(functools.partial(megablox.matmul, interpret=True))


@functools.cache
def compiled(kernel):
    return jax.jit(functools.partial(with_gradients, kernel))


def lowered(kernel, platform, arrays):
    sizes = jnp.zeros(GROUPS, jnp.int32)
    traced = jax.jit(functools.partial(with_gradients, kernel)).trace(*arrays, sizes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_meet_the_matrix_of_their_group(dtype, sizes):
    arrays = draw(dtype)
    found = compiled("megablox_interpreted")(*arrays, jnp.asarray(sizes, jnp.int32))
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    y, d_rows, d_weights = (np.asarray(x, np.float64) for x in found)
    rows, weights, gradient = (np.asarray(x, np.float64) for x in arrays)

    def assert_near(ours, theirs):
        largest = np.abs(theirs).max(initial=1e-300)
        atol = TOLERANCE[dtype] * largest
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)

    end = 0
    for group, size in enumerate(sizes):
        own = slice(end, end + size)
        assert_near(y[own], rows[own] @ weights[group])
        assert_near(d_rows[own], gradient[own] @ weights[group].T)
        assert_near(d_weights[group], rows[own].T @ gradient[own])
        end += size


def test_a_few_rows_fill_no_tile():
    rows, weights, _ = draw(rows=3)
    sizes = jnp.asarray([0, 2, 0, 1, 0], jnp.int32)
    y = interpreted(rows, weights, sizes)
    rows, weights = np.float64(rows), np.float64(weights)
    np.testing.assert_allclose(y[:2], rows[:2] @ weights[1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(y[2], rows[2] @ weights[3], rtol=0, atol=1e-4)


def test_sums_of_bfloat16_are_in_float32():
    """1 + 511 / 512: in bfloat16 the small terms vanish beside the 1."""
    rows = jnp.full((1, 512), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    ones = jnp.ones((1, 512, 128), jnp.bfloat16)
    y = interpreted(rows, ones, jnp.asarray([1], jnp.int32))
    assert np.all(y == jnp.bfloat16(2))


@pytest.mark.parametrize(
    ("kernel", "platform", "found"),
    [
        ("auto", "tpu", 3),  # products, gradients of rows and of weights
        ("auto", "cpu", 0),
        ("auto", "cuda", 0),
        ("reference", "tpu", 0),
        ("ragged_dot", "tpu", 0),
        ("megablox", "tpu", 3),
    ],
)
def test_the_kernel_is_chosen_for_the_platform_of_the_program(kernel, platform, found):
    text = lowered(kernel, platform, draw())
    assert text.count(ON_TPU) == found
    assert ("ragged_dot" in text) == (platform != "cpu" and not found)


@pytest.mark.parametrize("arrays", [draw("float16"), draw(width=96)])
def test_what_the_kernel_cannot_the_reference_does(arrays):
    text = lowered("megablox", "tpu", arrays)
    assert ON_TPU not in text and "ragged_dot" in text
    assert "ragged_dot" not in lowered("megablox", "cpu", arrays)


def test_what_rows_of_no_group_give_goes_nowhere():
    """Interpreted, it is NaN. Two chunks of experts, and tokens that are padding."""
    random = np.random.default_rng(0)
    config = MoEConfig(WIDTH, 4, 2, INNER, 0)
    names = "gate_proj", "up_proj", "down_proj"
    specs = layer.param_specs(config)
    weights = {n: np.float32(random.normal(size=specs[n].shape)) / 10 for n in names}
    x, wanted = np.float32(random.normal(size=(2, 1, 20, WIDTH)))
    chosen = np.int32([random.permutation(4)[:2] for _ in range(20)])
    shares = np.float32(random.dirichlet(np.ones(2), 20))
    ids = np.ones((1, 20), np.int32)
    ids[0, 3:9] = 0
    context = shared.Context.create(
        ids.shape,
        segment_ids=ids,
        axis_rules=AXIS_RULES,
        expert_chunks=2,
        expert_kernel="megablox_interpreted",
    )

    @jax.jit
    def run(x, shares, weights):
        def apply(x, shares, weights):
            routing = Routing(jnp.asarray(chosen), shares)
            return layer.apply(weights, x, routing, context, config=config)

        y, transpose = jax.vjp(apply, x, shares, weights)
        return y, *transpose(jnp.asarray(wanted))

    with jax.set_mesh(make_mesh({"fsdp": 1}, jax.devices()[:1])):
        y, d_x, d_shares, d_weights = run(x, shares, weights)

    loop = x[0], chosen, shares, *(weights[n] for n in names), ids[0] > 0
    found = d_x[0], d_shares, *(d_weights[n] for n in names)
    np.testing.assert_allclose(y[0], reference.expert_mlp(*loop), rtol=0, atol=1e-5)
    expected = reference.expert_mlp_gradients(*loop, np.float64(wanted[0]))
    for ours, theirs in zip(found, expected, strict=True):
        atol = 1e-5 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)
