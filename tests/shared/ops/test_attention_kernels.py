"""Kernels for attention against float64, and where which of them is chosen."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from parity.programs import program, topology
from shared.config import LayerKind
from shared.layers.self_attention import attend_to_own
from shared.ops import attention_kernels
from shared.ops.attention import Keys
from shared.ops.experts import grouped_matmul
from shared.presets import qwen3_next_tiny
from shared.sharding import AXIS_RULES
from tests.references import attention as reference

B, T, N, K, H = 2, 256, 4, 2, 64
SCALE = 0.125
# Sums of up to 256 products of normal numbers, twice rounded to the type.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}
ON_TPU = "tpu_custom_call"
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def draw(dtype="float32", length=T, value_width=H):
    """Rows of sequences and padding, and a gradient of what comes out."""
    random = np.random.default_rng(0)
    shapes = [(N, H), (K, H), (K, value_width), (N, value_width)]
    arrays = [
        jnp.asarray(random.normal(size=(B, length, *shape)), dtype) for shape in shapes
    ]
    ids = np.ones((B, length), np.int32)
    ids[0, :30] = ids[1, 110:] = 0
    ids[0, 90:] = 2
    return *arrays, ids


def with_gradients(attend, q, keys, values, y_grad, ids):
    """What `attend` gives, and the gradients of queries, keys and values."""
    index = jnp.cumsum(ids > 0, axis=1, dtype=jnp.int32) - 1

    def function(q, keys, values):
        return attend(q, ids, Keys(keys, values, ids, index))

    y, transpose = jax.vjp(function, q, keys, values)
    return y, *transpose(y_grad)


def by_kernel(name, window, q, ids, own):
    context = shared.Context.create(ids.shape, segment_ids=ids, attention_kernel=name)
    return attend_to_own(q, context, own, scale=SCALE, window=window)


def run(name, window, *arrays):
    attend = functools.partial(by_kernel, name, window)
    return jax.jit(functools.partial(with_gradients, attend))(*arrays)


def lowered(name, *arrays, platform="tpu"):
    """The program of a platform, which this machine need not be."""
    attend = functools.partial(by_kernel, name, None)
    function = functools.partial(with_gradients, attend)
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def assert_near(found, arrays, window, tolerance):
    *heads, y_grad, ids = (np.asarray(x) for x in arrays)
    q, keys, values = heads
    expected = reference.attend_whole_rows(q, ids, keys, values, y_grad, SCALE, window)
    for name, ours, theirs in zip("yqkv", found, expected, strict=True):
        ours = np.asarray(ours, np.float64)
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=tolerance * largest, err_msg=name
        )


@pytest.mark.parametrize(
    ("dtype", "window", "value_width"), [("float32", 100, 128), ("bfloat16", None, H)]
)
def test_splash_attention_is_attention(monkeypatch, dtype, window, value_width):
    monkeypatch.setattr(attention_kernels, "LONGEST_BLOCK", 128)  # several blocks
    arrays = draw(dtype, value_width=value_width)
    found = run("splash_interpreted", window, *arrays)
    assert_near(found, arrays, window, TOLERANCE[dtype])
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    padding = arrays[-1] == 0
    assert not any(np.any(np.float32(x)[padding]) for x in found)


@pytest.mark.parametrize("window", [None, 100])
def test_dot_product_attention_is_attention(window):
    arrays = draw()
    assert_near(
        run("dot_product", window, *arrays), arrays, window, TOLERANCE["float32"]
    )


@pytest.mark.gpu
def test_attention_of_cudnn_is_attention():
    arrays = draw("bfloat16")
    assert_near(run("cudnn", 100, *arrays), arrays, 100, TOLERANCE["bfloat16"])


def test_whole_rows_of_the_reference_are_its_loops():
    q, keys, values, y_grad, ids = (np.float64(x[:, 22:50]) for x in draw())
    index = np.cumsum(ids > 0, axis=1) - 1
    loops = q, ids, index, keys, values, ids, index
    found = reference.attend_whole_rows(q, ids, keys, values, y_grad, SCALE, 5)
    np.testing.assert_allclose(found[0], reference.attend(*loops, SCALE, 5), atol=1e-14)
    for ours, theirs in zip(
        found[1:],
        reference.attend_gradients(*loops, y_grad, SCALE, 5),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-13)


def test_by_itself_a_cpu_computes_what_the_reference_does_to_the_bit():
    arrays = draw(length=128)
    for ours, theirs in zip(
        run("auto", 100, *arrays), run("reference", 100, *arrays), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "platform", "kernels"),
    [
        ("auto", "tpu", 4),  # forward, forward again, gradients of queries and of keys
        ("splash", "tpu", 3),
        ("auto", "cpu", 0),
        ("auto", "cuda", 0),
        ("reference", "tpu", 0),
        ("dot_product", "tpu", 0),
    ],
)
def test_the_kernel_is_chosen_for_the_platform_of_the_program(name, platform, kernels):
    text = lowered(name, *draw(), platform=platform)
    assert text.count(f"@{ON_TPU}") == kernels


@pytest.mark.parametrize(
    "arrays",
    [draw(length=200), draw("float16"), tuple(x[..., :40] for x in draw()[:4])],
    ids=["length", "type", "width"],
)
def test_what_the_kernel_cannot_the_reference_does(arrays):
    arrays = (*arrays[:4], draw(length=arrays[0].shape[1])[-1])
    assert ON_TPU not in lowered("splash", *arrays)


def test_with_64_bit_types_the_reference_is_used():
    with jax.enable_x64(True):
        assert ON_TPU not in lowered("splash", *draw())


@pytest.mark.skipif(not HAS_LIBTPU, reason='needs libtpu: pip install -e ".[tpu]"')
def test_the_kernels_compile_for_a_tpu():
    device, *_ = topology.topology("v5p:2x2x1")
    *arrays, ids = draw("bfloat16", length=128)
    rows = jnp.ones((200, 128), jnp.bfloat16)
    weights = jnp.ones((3, 128, 256), jnp.bfloat16)
    sizes = jnp.asarray([0, 150, 30], jnp.int32)

    def both(arrays, rows, weights):
        attend = functools.partial(by_kernel, "auto", 100)
        product = functools.partial(grouped_matmul, group_sizes=sizes)
        y, transpose = jax.vjp(product, rows, weights)
        return with_gradients(attend, *arrays, ids), y, transpose(y)

    text = topology.compile_for(device, both, arrays, rows, weights).as_text()
    calls = text.count(f'custom_call_target="{ON_TPU}"')
    assert calls == 4 + 3  # see the tests of what is chosen


# Layers that have kernels for both of their halves, scanned and rematerialised.
TINY = qwen3_next_tiny(2)
WIDE = {"hidden_size": 128}
SMALL = TINY.replace(
    layers=(LayerKind("full_attention", "moe"),) * 2,
    attention=dataclasses.replace(TINY.attention, head_dim=H, **WIDE),
    moe=dataclasses.replace(TINY.moe, expert_size=128, **WIDE),
    delta_net=None,
    mlp=None,
    remat_policy="full",
    **WIDE,
)


def functions_of(config):
    pair = decoders.abstract_pair(config)
    return zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx)


def test_with_kernels_the_frontends_are_one_program_on_a_tpu():
    given = shared.abstract_params(SMALL), jnp.ones((1, 128), jnp.int32)
    linen, nnx = (
        program.lower(function, *given, platform="tpu")
        for function in functions_of(SMALL)
    )
    assert linen.digest == nnx.digest
    kernels = [line for line in linen.text().splitlines() if ON_TPU in line]
    assert ["splash_mha_fwd" in line for line in kernels] == [True] + 3 * [False]


def test_a_cache_is_attended_to_by_the_reference():
    config = SMALL.replace(attention_kernel="splash")
    function, _ = functions_of(config)
    cache = shared.init_cache(config, 1, 256)
    given = shared.abstract_params(config), jnp.ones((1, 128), jnp.int32)
    traced = jax.jit(function).trace(*given, cache=cache)
    assert "splash" not in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("axes", "rules", "kernel"),
    [
        ({"fsdp": 2}, AXIS_RULES, True),
        ({"context": 2}, AXIS_RULES, False),
        ({"fsdp": 2}, (), False),
        ({"fsdp": 1}, (), True),
    ],
)
def test_on_a_mesh_a_kernel_is_used_where_rows_are_whole(axes, rules, kernel):
    config = SMALL.replace(axis_rules=rules)
    function, _ = functions_of(config)
    given = shared.abstract_params(config), jnp.ones((2, 128), jnp.int32)
    mesh = jax.sharding.AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = str(jax.make_jaxpr(function)(*given))
    assert ("splash" in text) == kernel
    assert ("gmm" in text) == (kernel or "context" in axes)
