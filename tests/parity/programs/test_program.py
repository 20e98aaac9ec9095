"""The canonical program: what means the same is equal, and nothing else is.

Mutations are made in the parsed module: every attribute, every operand, every use of
every operation in the programs below, one at a time. None may keep the digest, and no
rewrite that keeps the meaning may change it. What two values have in common is decided
here, by `same`, not by the code under test.
"""

import contextlib
import functools
import inspect
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.experimental import checkify, io_callback, pallas
from jaxlib.mlir import ir

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from parity.programs import program

F4 = jax.ShapeDtypeStruct((4,), jnp.float32)
F44 = jax.ShapeDtypeStruct((4, 4), jnp.float32)
I4 = jax.ShapeDtypeStruct((4,), jnp.int32)
BOOL = jax.ShapeDtypeStruct((), jnp.bool_)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def digest(function, *args, **kw):
    return program.lower(function, *args, **kw).digest


def swish(x):
    return x * jax.nn.sigmoid(x)


# What means the same.


def test_helpers_may_be_shared_or_written_out():
    def plain(x):
        y = swish(x) @ x
        return jnp.where(y > 0, swish(y), 0.0)

    def nested(x):
        helper = jax.jit(lambda x: jax.jit(swish)(x))
        y = jax.jit(lambda x: helper(x) @ x)(x)
        return jnp.where(y > 0, helper(y), 0.0)

    assert digest(plain, F44) == digest(nested, F44) == digest(jax.jit(plain), F44)


def test_an_axis_of_size_one_may_be_added_by_broadcast_or_reshape():
    def by_broadcast(x, y):
        return y * jax.lax.broadcast_in_dim(x, (1, 4), (1,))

    def by_reshape(x, y):
        return y * x.reshape(1, 4)

    def repeated(x, y):
        return y * jax.lax.broadcast_in_dim(x, (4, 4), (1,))

    assert digest(by_broadcast, F4, F44) == digest(by_reshape, F4, F44)
    assert digest(repeated, F4, F44) != digest(by_reshape, F4, F44)


def test_helpers_in_the_bodies_of_loops_and_branches():
    def steps(helper):
        def body(c, x):
            branch = jax.lax.cond(c[0] > 0, helper, lambda c: c, c)
            return helper(branch) + x, branch.sum()

        return lambda c, xs: jax.lax.scan(body, c, xs)

    # Traced apart, so that no cached trace is shared.
    def written_out(x):
        return x * jax.nn.sigmoid(x)

    assert digest(steps(written_out), F4, F44) == digest(steps(jax.jit(swish)), F4, F44)


def test_names_do_not_matter():
    def one(x):
        return jax.jit(lambda a: a + 1.0)(x)

    def another_name(y):
        def inner_name(b):
            return b + 1.0

        return jax.jit(inner_name)(y)

    assert digest(one, F4) == digest(another_name, F4)


def test_arguments_and_results_go_by_path():
    def left(args):
        a, b = args["a"], args["b"]
        return {"difference": a - b, "product": a * b}

    class Pair:
        def __init__(self, *values):
            self.values = values

    key = jax.tree_util.DictKey
    jax.tree_util.register_pytree_with_keys(
        Pair,
        lambda p: (((key("b"), p.values[0]), (key("a"), p.values[1])), None),
        lambda _, values: Pair(*values),
    )

    def right(args):
        b, a = args.values
        return {"product": a * b, "difference": a - b}

    assert digest(left, {"a": F4, "b": F4}) == digest(right, Pair(F4, F4))
    assert digest(left, {"a": F4, "b": F4}) != digest(
        lambda x: {"difference": x["b"] - x["a"], "product": x["a"] * x["b"]},
        {"a": F4, "b": F4},
    )


def test_dead_code_is_gone_but_unused_arguments_count():
    def lean(x, y):
        return jnp.sin(x)

    def fat(x, y):
        jax.lax.sort(y)
        jax.lax.scan(lambda c, _: (c * y, None), x, length=3)
        return jnp.sin(x)

    assert digest(lean, F4, F4) == digest(fat, F4, F4)
    assert digest(lean, F4, F4) != digest(lean, F4, F44)
    assert digest(lean, F4, F4) != digest(lambda x: jnp.sin(x), F4)


def test_dead_carries_of_loops_are_gone():
    def lean(x, xs):
        return jax.lax.scan(lambda c, x: (jnp.sin(c) + x, None), x, xs)[0]

    def fat(x, xs):
        def body(carry, x):
            c, dead, other = carry
            return (jnp.sin(c) + x, dead * c, other + dead), dead

        return jax.lax.scan(body, (x, x, x), xs)[0][0]

    assert digest(lean, F4, F44) == digest(fat, F4, F44)


def test_carries_of_loops_have_no_order():
    def loop(order):
        def run(x, y):
            def body(_, carry):
                a, b, c, d = (carry[order.index(i)] for i in range(4))
                new = (jnp.sin(a) + b, b * a, c + a, d + b)
                return tuple(new[i] for i in order)

            zeros = jnp.zeros(4)
            start = (x, y, zeros, zeros)
            out = jax.lax.fori_loop(0, 3, body, tuple(start[i] for i in order))
            return [out[order.index(i)] for i in range(4)]

        return run

    digests = {
        digest(loop(order), F4, F4) for order in itertools.permutations(range(4))
    }
    assert len(digests) == 1


def test_effects_are_kept_in_their_order():
    def effects(*values):
        def run(x):
            for value in values:
                io_callback(shown, None, x * value)
            return x

        return run

    once = program.lower(effects(2.0), F4)
    two, other = digest(effects(2.0, 3.0), F4), digest(effects(3.0, 2.0), F4)
    assert len({once.digest, two, other}) == 3
    assert once.digest != digest(lambda x: x, F4)
    assert program.counts(once)["stablehlo.custom_call"] == 1
    assert len(once.results) == 1


def test_ordered_effects_bring_tokens():
    def run(x):
        return io_callback(lambda x: x, F4, x, ordered=True)

    found = program.lower(run, F4)
    assert [path for path, _ in found.arguments] == ["(token 0)", "0"]


def shown(_):
    """A Python function that a program calls."""


def plus_one(x):
    return x + 1.0


class Holder:
    def __init__(self, scale):
        self.scale = scale

    def call(self, x):
        return x * self.scale


def pure(function, again=False):
    def run(x):
        y = jax.pure_callback(function, F4, x)
        return jax.pure_callback(function, F4, y) if again else y

    return run


def io(function):
    return lambda x: io_callback(function, F4, x)


def printed(text, *static):
    def run(x):
        jax.debug.print(text, x, *static)
        return x

    return run


def in_a_loop(function):
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, x: pure(function)(x), x)


@pytest.mark.parametrize("program_of", [pure, io, in_a_loop])
def test_a_python_callback_is_the_same_object(program_of):
    same = [program.lower(program_of(plus_one), F4) for _ in range(2)]
    # Copies: alike in all but their identity. Each is dropped after its lowering, so
    # that another may get its address.
    others = [
        digest(program_of(types.FunctionType(plus_one.__code__, globals())), F4)
        for _ in range(8)
    ]
    assert same[0].digest == same[1].digest
    assert len({same[0].digest, *others}) == 9
    other = program.lower(program_of(lambda x: x * 2.0), F4)
    found = program.first_difference(same[0], other)
    assert found.what == "operation stablehlo.custom_call"
    assert "plus_one" in found.left
    assert "<lambda>" in found.right


def test_a_callback_called_through_a_helper():
    def helped(x):
        helper = jax.jit(pure(plus_one))
        return helper(helper(x))

    assert digest(helped, F4) == digest(pure(plus_one, again=True), F4)
    assert digest(helped, F4) != digest(pure(plus_one), F4)
    methods = [Holder(scale).call for scale in (2.0, 3.0)]
    assert digest(pure(methods[0]), F4) != digest(pure(methods[1]), F4)


def test_what_is_passed_to_a_callback_counts():
    def passed(*args, **kw):
        return lambda x: jax.pure_callback(plus_one, F4, *args, x, **kw)

    assert digest(passed(), F4) != digest(
        lambda x: jax.pure_callback(plus_one, F4, x=x), F4
    )


def test_what_is_printed_counts():
    found = [digest(printed("a {}"), F4) for _ in range(2)]
    assert found[0] == found[1]
    assert digest(jax.jit(printed("a {}")), F4) == found[0]
    others = [
        digest(printed("b {}"), F4),
        digest(printed("a {} {}", "text"), F4),
        digest(printed("a {} {}", "other text"), F4),
        digest(lambda x: x, F4),
    ]
    assert len({found[0], *others}) == 5
    with np.printoptions(precision=2):
        # Traced anew: JAX keeps the options of the first trace.
        assert digest(printed("a {}"), F4) != found[0]


def test_callbacks_that_cannot_be_compared_are_refused():
    def several(x):
        return pure(plus_one)(pure(lambda x: x)(x))

    def debugged(x):
        jax.debug.callback(shown, x)
        return x

    def checked(x):
        checkify.check(x.sum() > 0, "positive")
        return pure(plus_one)(x)

    for function in (several, debugged, checked):
        with pytest.raises(program.ProgramError, match="Python callbacks have no"):
            program.lower(function, F4)
    with pytest.raises(program.ProgramError, match="cannot be lowered for tpu"):
        program.lower(pure(plus_one), F4, platform="tpu")
    # A module alone does not say what it calls.
    module = program.lower(pure(plus_one), F4).lowered.compiler_ir("stablehlo")
    with pytest.raises(program.ProgramError, match="calls Python"):
        program.canonical(module, ["x"], ["y"])


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("stablehlo.custom_call @CustomSPMDPartitioning(%0)", "CustomSPMDPart"),
        ("stablehlo.custom_call @xla_buffer_python_cpu_callback(%0)", "xla_buffer"),
        ("stablehlo.custom_call @a_kernel(%0)", None),
    ],
)
def test_other_calls_of_python_are_refused(operation, message):
    """JAX writes custom partitioning so on several devices, or calls with buffers."""
    text = f"""
    func.func public @main(%0: tensor<4xf32>) -> tensor<4xf32> {{
      %1 = {operation} : (tensor<4xf32>) -> tensor<4xf32>
      return %1 : tensor<4xf32>
    }}"""
    with program.lower(plus_one, F4).lowered.compiler_ir("stablehlo").context:
        module = ir.Module.parse(text)
    if message is None:
        assert program.canonical(module, ["x"], ["y"]).digest
        return
    with pytest.raises(program.ProgramError, match=message):
        program.canonical(module, ["x"], ["y"], python="some other function")


@pytest.mark.parametrize(("host", "kind"), [("true", 2), ("false", 1)])
def test_transfers_to_the_host_are_refused(host, kind):
    """So JAX calls Python on a TPU."""
    text = f"""
    func.func public @main(%0: tensor<4xf32>, %t: !stablehlo.token)
        -> !stablehlo.token {{
      %1 = "stablehlo.send"(%0, %t) <{{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = {kind}>,
        is_host_transfer = {host}
      }}> : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
      return %1 : !stablehlo.token
    }}"""
    with program.lower(plus_one, F4).lowered.compiler_ir("stablehlo").context:
        module = ir.Module.parse(text)
    expected = (
        pytest.raises(program.ProgramError, match=r"stablehlo\.send calls Python")
        if host == "true"
        else contextlib.nullcontext()
    )
    with expected:
        program.canonical(module, ["x", "t"], ["t"], python="some function")


def test_abstract_and_real_arguments_and_keys():
    def draw(key, x):
        return jax.random.normal(key, x.shape) + x

    real = digest(draw, jax.random.key(7), jnp.ones(4))
    assert real == digest(draw, KEY, F4)
    assert digest(draw, KEY, F4, platform="tpu") == digest(
        jax.jit(draw), KEY, F4, platform="tpu"
    )


def test_a_kernel_for_a_tpu_may_be_called_from_elsewhere():
    tile = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def times(factor):
        def kernel(x, y):
            y[...] = x[...] * factor

        return pallas.pallas_call(kernel, out_shape=tile)

    def doubled(slope):  # anew, or JAX would not trace it again
        twice = jax.custom_vjp(lambda x: times(2.0)(x))
        twice.defvjp(lambda x: (twice(x), None), lambda _, g: (times(slope)(g),))
        return lambda x: twice(x).sum()

    def here(x, slope=2.0):
        return jax.grad(doubled(slope))(x)

    def there(x):
        return jax.grad(doubled(2.0))(x)

    on_tpu = functools.partial(digest, platform="tpu")
    assert on_tpu(here, tile) == on_tpu(there, tile)
    assert on_tpu(here, tile) != on_tpu(functools.partial(here, slope=3.0), tile)


# What does not.

LAST_BIT = np.nextafter(np.float32(0.1), np.float32(1))


def nan(payload):
    return np.uint32([0x7FC00000 + payload]).view(np.float32)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_constants_differ_in_any_bit(dtype):
    values = np.arange(64, dtype=np.uint16) * 1021
    bits = values.astype(np.uint32) << 16 if dtype == jnp.float32 else values
    x = jax.ShapeDtypeStruct((), dtype)
    digests = {
        digest(lambda x, value=value: x * value, x) for value in bits.view(dtype)
    }
    assert len(digests) == len(values)


@pytest.mark.parametrize(
    "pair",
    [(0.0, -0.0), (0.1, LAST_BIT), (nan(0), nan(1)), (np.inf, -np.inf)],
    ids=["zeros", "last bit", "nan", "infinity"],
)
def test_constants_that_look_alike(pair):
    scalars = [digest(lambda x, c=c: x + np.float32(c), F4) for c in pair]
    arrays = [
        digest(lambda x, c=c: x + np.array([1, 2, 3, c], np.float32), F4) for c in pair
    ]
    assert len({*scalars, *arrays}) == 4


@pytest.mark.parametrize("pair", [(0.0, -0.0), (0.1, LAST_BIT), (nan(0), nan(1))])
@pytest.mark.parametrize("shape", [(), (3,), (2, 70)])
@pytest.mark.parametrize("part", ["real", "imag"])
def test_complex_constants_differ_in_any_bit(pair, shape, part):
    def added(value, last):
        flat = np.full(math.prod(shape), 1.0 + 2.0j, np.complex64)
        getattr(flat, part)[last:] = value
        return lambda x: x + flat.reshape(shape)

    x = jax.ShapeDtypeStruct(shape, jnp.complex64)
    # One entry of several, or all, which MLIR writes down once.
    starts = (0, 1) if shape else (0,)
    digests = [digest(added(value, s), x) for value in pair for s in starts]
    assert len(set(digests)) == len(digests)
    assert digest(added(pair[0], starts[0]), x) == digests[0]


def test_complex_constants_that_cannot_be_read_are_refused():
    def composed(x):
        norm = jax.lax.composite(lambda x, **_: x, "my.norm")
        return norm(x, by=np.array([1.0 + 2.0j]))

    with pytest.raises(program.ProgramError, match="Complex elements"):
        program.lower(composed, F4)


@pytest.mark.parametrize("size", [1001, 70_000])
@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_big_constants_differ_in_one_entry(size, as_array):
    table = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    other = table.copy()
    other[size // 2] = np.nextafter(other[size // 2], np.float32(9))
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    tables = [as_array(t) for t in (table, table.copy(), other)]
    digests = [digest(lambda x, t=t: x + t, x) for t in tables]
    assert digests[0] == digests[1] != digests[2]


def test_how_often_something_is_computed_counts():
    def twice(x):
        return jnp.sin(x) + jnp.sin(x)

    def once(x):
        y = jnp.sin(x)
        return y + y

    assert digest(twice, F4) != digest(once, F4)


def test_donation_and_shardings_count():
    def add(x, y):
        return {"sum": x + y, "difference": x - y}

    paths = ["x", "y"], ["difference", "sum"]

    def lowered(**kw):
        # A new function each time: on one device, JAX takes shardings for equal.
        jitted = jax.jit(lambda x, y: add(x, y), keep_unused=True, **kw)
        return program.canonical(jitted.lower(F4, F4).compiler_ir("stablehlo"), *paths)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    other = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("other",))

    def sharded(mesh, *spec):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    digests = [
        lowered().digest,
        lowered(donate_argnums=0).digest,
        lowered(donate_argnums=1).digest,
        lowered(in_shardings=sharded(mesh, "data")).digest,
        lowered(in_shardings=sharded(other, "other")).digest,
        lowered(in_shardings=sharded(mesh)).digest,
        lowered(out_shardings=sharded(mesh, "data")).digest,
    ]
    assert len(set(digests)) == len(digests)


# Programs that hold one of each.


def mlp(params, x):
    def loss(params):
        y = jax.nn.silu(x @ params["up"])
        with jax.default_matmul_precision("highest"):
            y = jnp.matmul(y, params["down"])
        return jnp.mean(jnp.square(jnp.where(y > 0.5, y, -y)))

    return jax.value_and_grad(loss)(params)


def loops(c, xs, take):
    @jax.checkpoint
    def body(c, x):
        c = jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c) * 0.5, c)
        return jax.lax.cond(take, lambda c: c + x, lambda c: c - x, c), None

    def total(c):
        return jax.lax.scan(body, c, xs, reverse=True)[0].sum()

    until = jax.lax.while_loop(lambda c: c[0] < 9.0, lambda c: c * 2.0, c)
    return jax.value_and_grad(total)(c), until


def images(x, kernel):
    y = jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 2),
        ((1, 0), (2, 1)),
        rhs_dilation=(1, 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    pooled = jax.lax.reduce_window(
        y, -np.inf, jax.lax.max, (1, 2, 1, 1), (1, 1, 1, 1), "VALID"
    )
    mean = pooled.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(pooled - mean).mean((0, 1, 2), keepdims=True)
    return (pooled - mean) * jax.lax.rsqrt(variance + 1e-5)


def moves(x, i):
    order = jnp.argsort(x[0])
    values, places = jax.lax.top_k(x, 2)
    y = x.at[i].add(x[::-1] * 2.0)[order]
    y = jax.lax.dynamic_update_slice(y, values, (i[0], i[1]))
    ramp = jax.lax.broadcasted_iota(jnp.int32, (4, 2), 1)
    return y.T, jnp.cumsum(x, 1), jnp.pad(places + ramp, ((0, 1), (1, 0)))


def randoms(key, x):
    keep = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0.0)


def kinds(x, i):
    z = jax.lax.complex(x, -x)
    half = x.astype(jnp.bfloat16) * jnp.bfloat16(1.1)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) ^ i
    return jnp.fft.fft(z), half.astype(jnp.float32), bits, i % 3, x >= 2.0


def algebra(x):
    return jnp.linalg.cholesky(x @ x.T), jnp.linalg.qr(x)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1.0, 1.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * 0.5 * x,))


def hints(x):
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(unroll="no"):
        y = jax.lax.scan(lambda c, _: (clipped(c) + 1.0, None), x, length=1)[0]
    norm = jax.lax.composite(lambda x: x / (x.sum() + 1e-6), "my.norm", version=1)
    g = jax.grad(lambda x: clipped(x * 3.0).sum())(x)
    return norm(y), jax.lax.optimization_barrier(g)


def placed(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    y = jax.lax.with_sharding_constraint(jnp.sin(x), spec)
    jax.ffi.ffi_call("tests.log", (), has_side_effect=True)(y, level=np.int32(3))
    return y


BASES = {
    "mlp": (mlp, {"down": F44, "up": F44}, F44),
    "loops": (loops, F4, F44, BOOL),
    "images": (
        images,
        jax.ShapeDtypeStruct((1, 5, 6, 2), jnp.float32),
        jax.ShapeDtypeStruct((2, 2, 1, 4), jnp.float32),
    ),
    "moves": (moves, F44, I4),
    "randoms": (randoms, KEY, F4),
    "kinds": (kinds, F4, I4),
    "algebra": (algebra, F44),
    "hints": (hints, F4),
    "placed": (placed, F4),
}


class Base:
    """A lowered program that can be parsed anew, to be changed."""

    def __init__(self, module, arguments, results):
        self.context = module.context
        self.text = module.operation.get_asm(enable_debug_info=True)
        self.paths = arguments, results

    def parsed(self, text=None):
        with self.context:
            return ir.Module.parse(text or self.text)

    def digest(self, module):
        return program.canonical(module, *self.paths).digest


@functools.cache
def base(name):
    function, *args = BASES[name]
    found = program.lower(function, *args)
    module = found.lowered.compiler_ir("stablehlo")
    main = next(op for op in walk(module) if symbol(op) == "main")
    signature = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    counts = len(signature.inputs), len(signature.results)
    return Base(module, *([f"{i:03}" for i in range(n)] for n in counts))


def walk(module):
    """Every operation of a module, in the order written."""
    waiting = [module.operation]
    while waiting:
        op = waiting.pop()
        yield op
        blocks = [block for region in op.regions for block in region.blocks]
        inner = [o.operation for block in blocks for o in block.operations]
        waiting.extend(reversed(inner))


def symbol(op):
    named = "sym_name" in op.attributes
    return ir.StringAttr(op.attributes["sym_name"]).value if named else ""


def same(a, b):
    """Whether two values are surely equal: computed alike from equal ones."""
    if a == b:
        return True
    if any(isinstance(value, ir.BlockArgument) for value in (a, b)):
        return False
    one, other = a.owner, b.owner
    one, other = getattr(one, "operation", one), getattr(other, "operation", other)
    return (
        one.name == other.name
        and not len(one.regions) + len(other.regions)
        and str(a.type) == str(b.type)
        and ir.OpResult(a).result_number == ir.OpResult(b).result_number
        and sorted((n, str(one.attributes[n])) for n in one.attributes)
        == sorted((n, str(other.attributes[n])) for n in other.attributes)
        and len(one.operands) == len(other.operands)
        and all(map(same, one.operands, other.operands))
    )


# Another value of the kind.

ENUMS = {
    "comparison_direction": ("EQ", "LT"),
    "comparison_type": ("FLOAT", "TOTALORDER"),
    "precision": ("DEFAULT", "HIGH"),
    "rng_algorithm": ("THREE_FRY", "PHILOX"),
    "transpose": ("TRANSPOSE", "NO_TRANSPOSE"),
    "fft_type": ("FFT", "IFFT"),
}


def parsed(*texts):
    for text in texts:
        try:
            yield ir.Attribute.parse(text)
        except (ir.MLIRError, ValueError):
            continue


def others(attribute):
    """Attributes of the same kind that are not this one."""
    text = str(attribute)
    for kind, values in ENUMS.items():
        if text.startswith(f"#stablehlo<{kind} "):
            yield from parsed(*(f"#stablehlo<{kind} {value}>" for value in values))
    if isinstance(attribute, ir.BoolAttr):
        yield ir.BoolAttr.get(not attribute.value)
    elif isinstance(attribute, ir.IntegerAttr):
        yield ir.IntegerAttr.get(attribute.type, attribute.value + 1)
    elif isinstance(attribute, ir.StringAttr):
        yield ir.StringAttr.get(attribute.value + "x")
    elif isinstance(attribute, ir.ArrayAttr):
        items = list(attribute)
        yield ir.ArrayAttr.get([*items, ir.UnitAttr.get()])
        for i, item in enumerate(items):
            for other in others(item):
                yield ir.ArrayAttr.get([*items[:i], other, *items[i + 1 :]])
    elif isinstance(attribute, ir.DictAttr):
        items = {attribute[i].name: attribute[i].attr for i in range(len(attribute))}
        yield ir.DictAttr.get(items | {"new": ir.UnitAttr.get()})
        for name, item in items.items():
            for other in others(item):
                yield ir.DictAttr.get(items | {name: other})
    elif isinstance(attribute, ir.DenseElementsAttr):
        yield from flipped(attribute)
    elif isinstance(attribute, ir.DenseI64ArrayAttr):
        items = list(attribute)
        yield ir.DenseI64ArrayAttr.get([*items, 1])
        yield from (
            ir.DenseI64ArrayAttr.get([*items[:i], item + 1, *items[i + 1 :]])
            for i, item in enumerate(items)
        )
    elif isinstance(attribute, ir.DenseBoolArrayAttr):
        yield ir.DenseBoolArrayAttr.get([not item for item in attribute])
    elif text.startswith("#"):
        # Dimension numbers: each digit another one, two letters exchanged.
        for i, letter in enumerate(text):
            if letter.isdigit():
                digit = (int(letter) + 1) % 10
                yield from parsed(text[:i] + str(digit) + text[i + 1 :])
        yield from parsed(text.translate(str.maketrans("bfio", "fboi")))


def flipped(attribute):
    """The elements with the last bit of the last one flipped."""
    try:
        values = np.array(attribute)
    except (TypeError, ValueError, BufferError, RuntimeError):
        yield from parsed(str(attribute).replace("1", "2", 1))
        return
    if values.dtype == bool:
        yield ir.DenseElementsAttr.get(~values, type=attribute.type)
        return
    if values.dtype.kind in "iuf" and values.size:
        raw = np.ascontiguousarray(values).view(np.uint8).copy().reshape(-1)
        raw[raw.size - values.dtype.itemsize] ^= 1
        yield ir.DenseElementsAttr.get(
            raw.view(values.dtype).reshape(values.shape), type=attribute.type
        )


# Mutations: of an operation, one after the other; each is undone before the next.

STRUCTURE = {"sym_name", "sym_visibility", "function_type", "callee"}
SIGNATURE = {"arg_attrs", "res_attrs"}


def attributes_changed(op):
    for name in sorted(set(op.attributes) - STRUCTURE - SIGNATURE):
        value = op.attributes[name]
        for i, other in enumerate(others(value)):
            if other != value:
                op.attributes[name] = other
                yield f"{name} {i}"
                op.attributes[name] = value
    if op.name != "sdy.mesh":
        op.attributes["test.mark"] = ir.StringAttr.get("x")
        yield "a new attribute"
        del op.attributes["test.mark"]


def operands_swapped(op):
    for i, j in itertools.combinations(range(len(op.operands)), 2):
        a, b = op.operands[i], op.operands[j]
        if a.type == b.type and not same(a, b):
            op.operands[i], op.operands[j] = b, a
            yield f"operands {i} and {j}"
            op.operands[i], op.operands[j] = a, b


def left_out(op):
    """An operand stands for the result."""
    if op.name == "sdy.mesh" or len(op.results) != 1:
        return
    result = op.results[0]
    uses = [(use.owner, use.operand_number) for use in result.uses]
    like = [operand for operand in op.operands if operand.type == result.type]
    if uses and like:
        result.replace_all_uses_with(like[0])
        yield "left out"
        for owner, number in uses:
            owner.operands[number] = result


def live(module):
    """What is needed: it has an effect, or its user or what it stands in is live."""
    ops = list(walk(module))
    callers = {}
    for op in ops:
        for name in set(op.attributes) & {"callee", "decomposition"}:
            callers.setdefault(str(op.attributes[name]), []).append(op)

    @functools.cache
    def needed(op):
        if op.name == "func.func":
            calls = callers.get(f"@{symbol(op)}", ())
            return symbol(op) == "main" or any(map(needed, calls))
        if op.parent is None or op.name == "sdy.mesh":
            return True
        if not needed(op.parent.operation):
            return False
        owners = {use.owner.operation for result in op.results for use in result.uses}
        effect = "has_side_effect" in op.attributes
        return op.name.endswith(".return") or effect or any(map(needed, owners))

    return [op for op in ops if needed(op)]


@pytest.mark.parametrize("change", [attributes_changed, operands_swapped, left_out])
@pytest.mark.parametrize("name", BASES)
def test_no_mutation_is_missed(name, change):
    found = base(name)
    tried, missed = 0, []
    with found.context, ir.Location.unknown():
        module = found.parsed()
        expected = found.digest(module)
        for op in live(module):
            for what in change(op):
                tried += 1
                if found.digest(module) == expected:
                    missed.append(f"{what} of {str(op)[:300]}")
        assert found.digest(module) == expected
    assert not missed, f"{len(missed)} of {tried}:\n" + "\n".join(missed)
    assert tried or change is not attributes_changed


# Rewrites that keep the meaning.


def renamed(module, choose):
    for op in list(walk(module)):
        if op.name == "func.func" and symbol(op) != "main":
            new = f"z{choose(9)}_{symbol(op)}"
            ir.SymbolTable.replace_all_symbol_uses(symbol(op), new, module.operation)
            ir.SymbolTable.set_symbol_name(op, new)


def reordered(module, choose):
    """Neighbours that do not need each other change places."""
    for op in list(walk(module)):
        before = previous(op)
        plain = not len(op.regions) and not op.name.endswith("return")
        if before is None or not plain or "has_side_effect" in op.attributes:
            continue
        needs = [v.owner for v in op.operands if isinstance(v, ir.OpResult)]
        if all(owner.operation != before for owner in needs) and choose(2):
            op.move_before(before)


def previous(op):
    if op.parent is None or op.parent.name in ("builtin.module",):
        return None
    before = None
    for region in op.parent.regions:
        for block in region.blocks:
            for other in block.operations:
                if other.operation == op:
                    return before
                before = other.operation
            before = None
    return None


def fattened(module, choose):
    """Copies that nobody uses."""
    for op in list(walk(module)):
        if op.name.startswith("stablehlo.") and not op.name.endswith("return"):
            effect = "has_side_effect" in op.attributes
            if len(op.results) and not effect and choose(2):
                op.clone(ip=ir.InsertionPoint(op))


def constants_copied(module, choose):
    for op in list(walk(module)):
        for i, value in enumerate(op.operands):
            owner = value.owner
            if isinstance(value, ir.OpResult) and choose(2):
                if owner.operation.name == "stablehlo.constant":
                    copy = owner.operation.clone(ip=ir.InsertionPoint(op))
                    op.operands[i] = copy.operation.results[0]


REWRITES = [renamed, reordered, fattened, constants_copied]


@pytest.mark.parametrize("name", BASES)
@given(data=st.data())
@settings(max_examples=5)
def test_rewrites_that_keep_the_meaning_keep_the_digest(name, data):
    found = base(name)
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    with found.context, ir.Location.unknown():
        module = found.parsed()
        for rewrite in data.draw(st.permutations(REWRITES)):
            rewrite(module, lambda n: int(random.integers(n)))
            assert module.operation.verify()
        # Printed without locations.
        again = found.parsed(module.operation.get_asm(enable_debug_info=False))
        assert found.digest(module) == found.digest(again)
        assert found.digest(module) == found.digest(found.parsed())


# Drawn programs: a list of steps, each of earlier values, all of them returned.

UNARY = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "floor": jnp.floor,
    "sort": jnp.sort,
    "cumsum": jnp.cumsum,
    "twice": lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, length=2)[0],
    "thrice": lambda x: jax.lax.scan(lambda c, _: (c * x, None), x, length=3)[0],
    "reversed": lambda x: x[::-1],
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "remat": lambda x: jax.grad(lambda y: jax.checkpoint(jnp.sin)(y).sum())(x),
}
BINARY = {
    "add": jnp.add,
    "subtract": jnp.subtract,
    "multiply": jnp.multiply,
    "maximum": jnp.maximum,
    "less": lambda x, y: jnp.where(x < y, x, y),
    "at most": lambda x, y: jnp.where(x <= y, x, y),
    "cond": lambda x, y: jax.lax.cond(x[0] > y[0], jnp.sin, jnp.cos, y),
    "outer": lambda x, y: jnp.matmul(x[:, None], y[None], precision="highest")[0],
    "outer, default": lambda x, y: jnp.matmul(x[:, None], y[None])[0],
}
INPUTS = 2
CONSTANTS = [0.0, -0.0, 1.0, 0.1, float(LAST_BIT), np.inf]


@st.composite
def steps(draw):
    """(operation, operands, constant) a step; each step is new."""
    found: list = []
    for i in range(draw(st.integers(2, 6))):
        value = st.integers(0, INPUTS + i - 1)
        name = draw(st.sampled_from([*UNARY, *BINARY, "constant"]))
        operands = (draw(value), draw(value)) if name in BINARY else (draw(value),)
        number = draw(st.integers(0, len(CONSTANTS) - 1)) if name == "constant" else 0
        found.append((name, operands, number))
    return found


def as_function(steps, helpers=False):
    def run(x, y):
        values = [x, y]
        for name, operands, number in steps:
            args = [values[i] for i in operands]
            if name == "constant":
                values.append(args[0] * np.float32(CONSTANTS[number]))
                continue
            function = UNARY.get(name) or BINARY[name]
            # A name of its own: no cached trace is shared.
            helper = jax.jit(lambda *args, function=function: function(*args))
            values.append((helper if helpers else function)(*args))
        return values[INPUTS:]

    return run


def expression(steps, i):
    """A value as a nested tuple: equal if computed alike."""
    if i < INPUTS:
        return i
    name, operands, number = steps[i - INPUTS]
    return (name, tuple(expression(steps, j) for j in operands), number)


@st.composite
def mutated(draw, steps):
    """One step changed: its operation, its operands or its constant."""
    i = draw(st.integers(0, len(steps) - 1))
    name, operands, number = steps[i]
    kinds = ["name"] + ["swap"] * (name in BINARY) + ["number"] * (name == "constant")
    kind = draw(st.sampled_from(kinds))
    if kind == "name":
        pool = BINARY if name in BINARY else [*UNARY, "constant"]
        name = draw(st.sampled_from([other for other in pool if other != name]))
    elif kind == "swap":
        operands = operands[::-1]
    else:
        number = (number + draw(st.integers(1, len(CONSTANTS) - 1))) % len(CONSTANTS)
    return [*steps[:i], (name, operands, number), *steps[i + 1 :]]


@given(data=st.data())
@settings(max_examples=40)
def test_drawn_programs_differ_as_their_steps_do(data):
    left = data.draw(steps())
    right = data.draw(mutated(left))
    ends = range(INPUTS, INPUTS + len(left))
    assume(any(expression(left, i) != expression(right, i) for i in ends))
    found = [program.lower(as_function(s), F4, F4) for s in (left, right)]
    assert found[0].digest != found[1].digest
    assert program.first_difference(*found) is not None
    assert found[0].digest == digest(as_function(left, helpers=True), F4, F4)


# What is said of a difference.


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def normed(x, scale):
    variance = jnp.square(x).mean()
    root = jax.lax.rsqrt(variance + 1e-6)
    return jax.nn.silu(x * root) * scale


def normed_otherwise(x, scale):
    variance = jnp.square(x).mean()
    root = jax.lax.rsqrt(variance + 1e-5)
    return jax.nn.silu(x * root) * scale


def test_another_epsilon_is_found_at_its_line():
    found = [program.lower(f, F4, F4) for f in (normed, normed_otherwise)]
    difference = program.first_difference(*found)
    assert difference.what == "operation stablehlo.add"
    assert "1.000000e-06" in difference.left or "9.99999997E-7" in difference.left
    for place, function in zip(
        difference.locations, (normed, normed_otherwise), strict=True
    ):
        line = line_of(function, "rsqrt")
        assert place == f"{__file__}:{line} ({function.__name__})"


def test_another_activation_is_found():
    def attend(activation, swap=False):
        def run(q, k):
            q, k = (k, q) if swap else (q, k)
            return activation(jnp.matmul(q, k.T))

        return run

    silu = program.lower(attend(jax.nn.silu), F44, F44)
    tanh = program.lower(attend(jnp.tanh), F44, F44)
    equal, lines = program.compare(silu, tanh, memory=True)
    assert not equal
    assert "stablehlo.tanh: linen 0, nnx 1" in lines
    assert any(line.startswith("FLOPs: linen") for line in lines)
    assert any(line.startswith("temporary bytes: linen") for line in lines)
    assert any(__file__ in line for line in lines)
    swapped = program.first_difference(
        silu, program.lower(attend(jax.nn.silu, swap=True), F44, F44)
    )
    assert swapped.what == "operation stablehlo.transpose"


def test_arguments_and_results_that_differ_are_named():
    def run(args):
        return {"out": args["a"] + 1.0}

    left = program.lower(run, {"a": F4})
    more = program.first_difference(left, program.lower(run, {"a": F4, "b": F4}))
    assert more[:3] == ("argument 0/b", "absent", "tensor<4xf32>")
    other = program.first_difference(left, program.lower(run, {"a": F44}))
    assert other[:3] == ("argument 0/a", "tensor<4xf32>", "tensor<4x4xf32>")
    result = program.first_difference(
        left, program.lower(lambda args: {"else": args["a"] + 1.0}, {"a": F4})
    )
    assert result[:2] == ("result else", "absent")
    assert program.first_difference(left, left) is None
    assert program.compare(left, left) == (True, ())


def test_what_cannot_be_read_is_refused():
    found = program.lower(lambda x: x + 1.0, F4)
    module = found.lowered.compiler_ir("stablehlo")
    with pytest.raises(program.ProgramError, match="1 arguments, but 2 paths"):
        program.canonical(module, ["a", "b"], ["c"])
    with module.context:
        empty = ir.Module.parse("module {}")
        with pytest.raises(program.ProgramError, match="@main"):
            program.canonical(empty, [], [])


# The zoo.


def decoder_programs(config, gradient, platform):
    params, pair = shared.abstract_params(config), decoders.abstract_pair(config)
    tokens = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    for apply in (zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx)):
        if gradient:
            function = decoders.measured(config, apply)
            args = params, decoders.Example(tokens, tokens, tokens)
        else:
            function, args = apply, (params, tokens)
        yield program.lower(function, *args, platform=platform)


TINY = shared.preset("qwen3-next-tiny")
# The longest lowerings of all tests: each is made once where it can go wrong.
ZOO = [
    ("forward", "cpu", TINY, False),
    ("forward", "tpu", TINY, False),
    ("forward, unscanned", "cpu", TINY.replace(scan_layers=False), False),
    ("gradient", "tpu", TINY, True),
]


@pytest.mark.parametrize(
    ("platform", "config", "gradient"),
    [case[1:] for case in ZOO],
    ids=[f"{name}-{platform}" for name, platform, *_ in ZOO],
)
def test_both_frontends_of_the_zoo_are_one_program(platform, config, gradient):
    left, right = decoder_programs(config, gradient, platform)
    assert program.compare(left, right) == (True, ())
    assert len(left.operations) > 1000
