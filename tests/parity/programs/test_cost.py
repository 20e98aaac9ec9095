"""Operations and bytes, against counts made by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parity.programs import cost

SQUARE = jax.ShapeDtypeStruct((16, 16), jnp.float32)
MATMUL = 2 * 16**3


def flops(function, *args):
    return cost.count(function, *args).flops


def repeated(x, length):
    return jax.lax.scan(lambda c, _: (c @ c, None), x, length=length)[0]


@pytest.mark.parametrize("length", [2, 8])
def test_a_scan_counts_its_body_as_often_as_it_runs(length):
    once = cost.count(lambda x: x @ x, SQUARE)
    many = cost.count(functools.partial(repeated, length=length), SQUARE)
    assert many.flops == length * once.flops == length * MATMUL
    assert many.bytes == length * once.bytes
    assert not many.unbounded


def test_scans_in_scans_multiply():
    def nested(x):
        return jax.lax.scan(lambda c, _: (repeated(c, 3), None), x, length=5)[0]

    assert flops(nested, SQUARE) == 3 * 5 * MATMUL


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.named_call])
def test_what_is_called_counts(wrap):
    assert flops(wrap(lambda x: x @ x), SQUARE) == MATMUL


def test_custom_derivatives_count_what_runs():
    @jax.custom_vjp
    def matmul(x):
        return x @ x

    matmul.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x + x @ g,))

    @jax.custom_jvp
    def other(x):
        return x @ x

    other.defjvp(lambda x, t: (x[0] @ x[0], t[0] @ x[0] + x[0] @ t[0]))
    assert flops(matmul, SQUARE) == flops(other, SQUARE) == MATMUL
    backward = jax.grad(lambda x: matmul(x)[0, 0])
    # One product forward, two backward and their sum; the rest is a row of zeros.
    assert 3 * MATMUL < flops(backward, SQUARE) < 3 * MATMUL + 6 * 16**2


def test_a_branch_counts_as_the_dearest():
    def branch(take, x):
        return jax.lax.cond(take, lambda x: x @ x @ x, lambda x: x @ x, x)

    take = jax.ShapeDtypeStruct((), jnp.bool_)
    assert 2 * MATMUL <= flops(branch, take, SQUARE) <= 2 * MATMUL + 2


def test_a_loop_of_unknown_length_says_so():
    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x @ x, x)

    found = cost.count(until, SQUARE)
    assert found.unbounded
    assert MATMUL <= found.flops <= MATMUL + 4
    assert cost.count(jax.jit(lambda x: until(x) + 1), SQUARE).unbounded


def test_an_mlp_by_hand():
    batch, width, hidden = 4, 8, 32

    def mlp(x, w, b, v):
        return jnp.maximum(x @ w + b[None], 0.0) @ v

    shapes = (batch, width), (width, hidden), (hidden,), (hidden, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # Two products, the bias, the maximum.
    expected = 2 * (2 * batch * width * hidden) + 2 * batch * hidden
    assert flops(mlp, *args) == expected


def test_a_batched_product():
    lhs = jax.ShapeDtypeStruct((3, 5, 7), jnp.float32)
    rhs = jax.ShapeDtypeStruct((3, 7, 11), jnp.float32)
    assert flops(jnp.matmul, lhs, rhs) == 2 * 3 * 5 * 7 * 11


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_by_hand(groups, stride):
    def conv(x, kernel):
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    x = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 5, 4 // groups, 6), jnp.float32)
    positions = 2 * (8 // stride) ** 2
    assert flops(conv, x, kernel) == 2 * positions * 6 * (3 * 5 * 4 // groups)


def test_a_ragged_product_meets_one_group_a_row():
    rows = jax.ShapeDtypeStruct((12, 8), jnp.float32)
    matrices = jax.ShapeDtypeStruct((3, 8, 5), jnp.float32)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert flops(jax.lax.ragged_dot, rows, matrices, sizes) == 2 * 12 * 8 * 5

    def loss(rows, matrices, sizes):
        return jax.lax.ragged_dot(rows, matrices, sizes).sum()

    gradient = flops(jax.grad(loss, (0, 1)), rows, matrices, sizes)
    # The gradient of each of the two factors is one such product; the sum is 12 x 5.
    assert 2 * 960 <= gradient <= 3 * 960 + 12 * 5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 2.0 + 1.0, 2 * 256),
        (lambda x: x.T.reshape(-1)[::2], 0),
        (lambda x: x.sum(), 256),
        (lambda x: jnp.cumsum(x, 0), 256),
        (lambda x: jax.lax.sort(x), 256 * 4),
        (lambda x: jnp.exp(x).astype(jnp.bfloat16), 256),
    ],
    ids=["elementwise", "moves", "sum", "cumsum", "sort", "convert"],
)
def test_other_operations(function, expected):
    assert flops(function, SQUARE) == expected


def test_bytes_are_those_of_operands_and_results():
    found = cost.count(lambda x, y: x + y, SQUARE, SQUARE)
    assert found.bytes == 3 * 16 * 16 * 4
    half = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    assert cost.count(lambda x, y: x + y, half, half).bytes == 3 * 16 * 16 * 2


def test_arrays_do_as_well_as_shapes():
    x = np.ones((16, 16), np.float32)
    assert cost.count(lambda x: x @ x, x) == cost.count(lambda x: x @ x, SQUARE)
