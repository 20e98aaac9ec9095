"""Flax's own layers, `nn.*` against `nnx.*`: equal to the bit, or different as known.

A row of the table says what the two are, how they are called, and what is known to
differ between them. One difference more or less fails the test: a release of Flax that
mends or breaks something is seen.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import parity
from parity import Args, Call, Integers, Steps
from parity.pairs import calls

BF16 = jnp.bfloat16
FLAX = tuple(int(part) for part in flax.__version__.split(".")[:3])
# Off by default in tests (tests/conftest.py), and here they make a difference.
OPTIMISED = "xla_backend_optimization_level=0" not in os.environ.get("XLA_FLAGS", "")
NORMAL = jax.nn.initializers.normal(0.1)

TRAIN = Call("train", linen={"deterministic": False}, nnx={"deterministic": False})
EVAL = Call("eval", linen={"deterministic": True}, nnx={"deterministic": True})
# NNX modules are put into a mode, Linen modules are told.
MODES = (
    Call("train", linen={"use_running_average": False}, mode="train"),
    Call("eval", linen={"use_running_average": True}, mode="eval"),
)


class Known(NamedTuple):
    """Something that is known to differ between the two APIs.

    Attributes:
      tier: of the report, that finds it.
      paths: where, as the report names them.
      what: kind of difference.
      why: as we understand it.
      before: the release of Flax that mended it.
    """

    tier: str
    paths: tuple[str, ...]
    what: str
    why: str
    before: tuple[int, ...] = (9999,)


class Case(NamedTuple):
    """A row of the table.

    Attributes:
      linen: the module.
      nnx: makes the module.
      inputs: for `parity.check`.
      options: for `parity.check`.
      programs: why the programs differ, "" where they are equal.
      rounding: why bits differ, as far as rounding explains, "" where they are equal.
      known: what else differs.
      first: what Linen is initialised with, if not with the inputs.
      zero: a leaf that stays zero.
    """

    linen: nn.Module
    nnx: Callable[[nnx.Rngs], nnx.Module]
    inputs: Any
    options: Mapping[str, Any] = {}
    programs: str = ""
    rounding: str = ""
    known: tuple[Known, ...] = ()
    first: Any = None
    zero: str = ""


RESHAPED = "nn adds axes of size one to statistics by broadcasting, nnx by reshaping"
SCALED = (
    "nnx.MultiHeadAttention without dropout calls jax.nn.dot_product_attention, which "
    "multiplies scores by 1/sqrt(d) where nn divides queries by sqrt(d)"
)
CAST = (
    "nnx casts inputs and parameters to bfloat16 first, nn computes in float32 and "
    "casts the result"
)
FUSED = "nn concatenates the gates' kernels at each call, nnx keeps them as one array"


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X = array(2, 4)
SEQUENCE = array(2, 6, 4)
IMAGE = array(2, 5, 6, 4)
IDS = Integers((2, 3), 7)
ATTENDED = array(2, 3, 4)
CARRY = array(2, 16)
MASK = array(2, 1, 3, 3, dtype=np.bool_)


# Models of a few layers, where a layer alone would say nothing.


class LinenTied(nn.Module):
    def setup(self):
        self.embed = nn.Embed(7, 4)

    def __call__(self, ids):
        return self.embed.attend(self.embed(ids))


class NNXTied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(self.embed(ids))


class LinenPooled(nn.Module):
    pool: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        return self.pool(nn.Dense(3, name="dense")(x))


class NNXPooled(nnx.Module):
    def __init__(self, pool, rngs):
        self.pool, self.dense = pool, nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.pool(self.dense(x))


class LinenLoRA(nn.Module):
    """What nnx.LoRA computes; Linen has no such layer."""

    @nn.compact
    def __call__(self, x):
        a = self.param("lora_a", nn.initializers.he_uniform(), (4, 2))
        b = self.param("lora_b", NORMAL, (2, 5))
        return x @ a @ b + nn.Dense(5, name="base_module")(x)


class LinenLoRALinear(nn.Module):
    """What nnx.LoRALinear computes."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 5))
        bias = self.param("bias", nn.initializers.zeros, (5,))
        y = x @ kernel + bias.reshape(1, -1)
        return y + LinenLoRAFactors(name="lora")(x)


class LinenLoRAFactors(nn.Module):
    @nn.compact
    def __call__(self, x):
        a = self.param("lora_a", nn.initializers.he_uniform(), (4, 2))
        return x @ a @ self.param("lora_b", NORMAL, (2, 5))


class LinenBlock(nn.Module):
    """A residual block that can be scanned over."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(4, name="dense")(nn.LayerNorm(name="norm")(x))
        y = nn.Dropout(self.rate, deterministic=False)(y)
        return x + nn.relu(y), None


class NNXBlock(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.dropout(self.dense(self.norm(x))))


class LinenScanned(nn.Module):
    rate: float = 0.0
    axis: int = 0
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False) if self.remat else LinenBlock
        stack = nn.scan(
            block,
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        return stack(self.rate, name="layers")(x, None)[0]


class NNXScanned(nnx.Module):
    def __init__(self, rngs, rate=0.0, remat=False):
        self.remat = remat

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NNXBlock(rngs, rate)

        self.layers = make(rngs)

    def __call__(self, x):
        def body(layer, x):
            return layer(x)

        step = nnx.remat(body, prevent_cse=False) if self.remat else body
        scan = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.layers, x)


class LinenRemat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(LinenBlock)(name="block")(x)[0]


class NNXRemat(nnx.Module):
    def __init__(self, rngs):
        self.block = NNXBlock(rngs)

    def __call__(self, x):
        return nnx.remat(lambda block, x: block(x))(self.block, x)


class LinenEnsemble(nn.Module):
    @nn.compact
    def __call__(self, x):
        members = nn.vmap(
            nn.Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=3,
        )
        return members(5, name="members")(x)


class NNXEnsemble(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(4, 5, rngs=rngs)

        self.members = make(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x)


def conv(
    features: int, size: tuple[int, ...], inputs: Any = IMAGE, **options: Any
) -> Case:
    """A convolution with the same options in both."""
    return Case(
        nn.Conv(features, size, **options),
        lambda rngs: nnx.Conv(4, features, size, **options, rngs=rngs),
        inputs,
    )


def transposed(size: tuple[int, ...], inputs: Any = IMAGE, **options: Any) -> Case:
    """A transposed convolution with the same options in both."""
    return Case(
        nn.ConvTranspose(3, size, **options),
        lambda rngs: nnx.ConvTranspose(4, 3, size, **options, rngs=rngs),
        inputs,
    )


def norm(name: str, inputs: Any = SEQUENCE, **options: Any) -> Case:
    """A norm over four features with the same options in both."""
    return Case(
        getattr(nn, name)(**options),
        lambda rngs: getattr(nnx, name)(4, **options, rngs=rngs),
        inputs,
        programs=RESHAPED,
    )


def attention(inputs: Any, call: Any = None, **options: Any) -> Case:
    """Attention with two heads and the same options in both."""
    return Case(
        nn.MultiHeadAttention(num_heads=2, **options),
        lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs, **options),
        inputs,
        {} if call is None else {"call": call},
    )


def fast_attention(inputs: Any, **options: Any) -> Case:
    """As above, where NNX has a faster way."""
    case = attention(inputs, **options)
    return case._replace(programs=SCALED, rounding=SCALED)


def decoding(**keywords: Any) -> Case:
    """Attention that decodes three tokens in turn into a cache of four."""

    def make(rngs):
        module = nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs)
        module.init_cache((2, 4, 4))
        return module

    return Case(
        nn.MultiHeadAttention(num_heads=2, decode=True),
        make,
        Steps([array(2, 1, 4)] * 3),
        {"call": Call(nnx=keywords)},
        programs=SCALED,
        first=array(2, 4, 4),
    )


def cell(name: str, carry: Any = CARRY, **fields: Any) -> Case:
    """A recurrent cell of 16 features over four inputs."""
    return Case(
        getattr(nn, name)(16),
        lambda rngs: getattr(nnx, name)(4, 16, rngs=rngs),
        (carry, X),
    )._replace(**fields)


def recurrent(name: str, inputs: Any = SEQUENCE, **options: Any) -> Case:
    """A cell, unrolled over time."""
    return Case(
        nn.RNN(getattr(nn, name)(16), **options),
        lambda rngs: nnx.RNN(getattr(nnx, name)(4, 16, rngs=rngs), **options),
        inputs,
    )


def started(*paths: str) -> Known:
    """Recurrent kernels of fused gates have other first values."""
    return Known(
        "init",
        paths,
        "distribution",
        "nnx draws the fused recurrent kernel as one orthogonal matrix, wider than "
        "high: each gate starts smaller than in nn, where it is orthogonal itself",
    )


def pooled(pool: str, **options: Any) -> Case:
    """A dense layer, pooled."""
    return Case(
        LinenPooled(functools.partial(getattr(nn.pooling, pool), **options)),
        lambda rngs: NNXPooled(functools.partial(getattr(nnx, pool), **options), rngs),
        IMAGE,
    )


def wrapped(name: str, call: Call, *known: Known) -> Case:
    """A norm of weights around a dense layer."""
    normalised = Known(
        "bits",
        ("state/params/layer_instance/kernel",),
        "value",
        "nnx writes the normalised kernel back into the layer, nn does not",
    )
    return Case(
        getattr(nn, name)(nn.Dense(32)),
        lambda rngs: getattr(nnx, name)(nnx.Linear(4, 32, rngs=rngs), rngs=rngs),
        X,
        {"call": call},
        programs="nnx gives back the kernel that it changes",
        known=(normalised, *known),
    )


CASES = {
    "dense": Case(nn.Dense(5), lambda rngs: nnx.Linear(4, 5, rngs=rngs), X),
    "dense without bias": Case(
        nn.Dense(5, use_bias=False),
        lambda rngs: nnx.Linear(4, 5, use_bias=False, rngs=rngs),
        X,
    ),
    "dense in bfloat16": Case(
        nn.Dense(5, dtype=BF16), lambda rngs: nnx.Linear(4, 5, dtype=BF16, rngs=rngs), X
    ),
    "dense with bfloat16 parameters": Case(
        nn.Dense(5, param_dtype=BF16, dtype=BF16),
        lambda rngs: nnx.Linear(4, 5, param_dtype=BF16, dtype=BF16, rngs=rngs),
        X,
    ),
    "dense over two axes": Case(
        nn.DenseGeneral((2, 5), axis=(-2, -1)),
        lambda rngs: nnx.LinearGeneral((6, 4), (2, 5), axis=(-2, -1), rngs=rngs),
        SEQUENCE,
    ),
    "dense, another one for each of a batch": Case(
        nn.DenseGeneral(5, axis=-1, batch_dims=0),
        lambda rngs: nnx.LinearGeneral(4, 5, batch_axis={0: 2}, rngs=rngs),
        SEQUENCE,
    ),
    "einsum": Case(
        nn.Einsum((4, 2, 3), "btd,dnh->btnh"),
        lambda rngs: nnx.Einsum("btd,dnh->btnh", (4, 2, 3), (2, 3), rngs=rngs),
        SEQUENCE,
    ),
    "einsum without bias": Case(
        nn.Einsum((4, 5), "...d,df->...f", use_bias=False),
        lambda rngs: nnx.Einsum("...d,df->...f", (4, 5), rngs=rngs),
        SEQUENCE,
    ),
    "conv": conv(3, (3, 2)),
    "conv 1d": conv(3, (3,), SEQUENCE),
    "conv 3d": conv(3, (2, 2, 2), array(2, 3, 3, 3, 4)),
    "conv VALID": conv(3, (3, 3), padding="VALID"),
    "conv CIRCULAR": conv(3, (3, 3), padding="CIRCULAR"),
    "conv CAUSAL": conv(3, (3,), SEQUENCE, padding="CAUSAL"),
    "conv REFLECT": conv(3, (3, 3), padding="REFLECT"),
    "conv with padding in numbers": conv(3, (3, 3), padding=((0, 2), (1, 0))),
    "conv with strides": conv(3, (3, 3), strides=(2, 1)),
    "conv with dilated kernel": conv(3, (3, 2), kernel_dilation=2),
    "conv with dilated input": conv(3, (3, 2), padding=1, input_dilation=2),
    "conv in groups": conv(6, (3, 3), feature_group_count=2),
    "conv for each channel": conv(8, (3, 3), feature_group_count=4),
    "conv without bias": conv(3, (3, 3), use_bias=False),
    "conv in bfloat16": conv(3, (3,), SEQUENCE, dtype=BF16),
    "transposed conv": transposed((3, 3)),
    "transposed conv 1d with strides": transposed((3,), SEQUENCE, strides=(2,)),
    "transposed conv VALID": transposed((3, 2), padding="VALID", strides=(2, 2)),
    "transposed conv CIRCULAR": transposed((3, 3), padding="CIRCULAR"),
    "transposed conv, kernel transposed": transposed(
        (3,), SEQUENCE, transpose_kernel=True, use_bias=False
    ),
    "embedding": Case(nn.Embed(7, 4), lambda rngs: nnx.Embed(7, 4, rngs=rngs), IDS),
    "embedding of one": Case(
        nn.Embed(1, 4), lambda rngs: nnx.Embed(1, 4, rngs=rngs), Integers((2, 3), 1)
    ),
    "embedding in bfloat16": Case(
        nn.Embed(7, 4, dtype=BF16),
        lambda rngs: nnx.Embed(7, 4, dtype=BF16, rngs=rngs),
        IDS,
    ),
    "embedding's two methods": Case(
        nn.Embed(7, 4),
        lambda rngs: nnx.Embed(7, 4, rngs=rngs),
        None,
        {"methods": {"__call__": IDS, "attend": SEQUENCE}},
    ),
    "tied embedding": Case(LinenTied(), NNXTied, IDS),
    "layer norm": norm("LayerNorm"),
    "layer norm without scale": norm("LayerNorm", use_scale=False),
    "layer norm without bias": norm("LayerNorm", use_bias=False),
    "layer norm, variance in two passes": norm("LayerNorm", use_fast_variance=False),
    "layer norm over two axes": Case(
        nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=-1),
        lambda rngs: nnx.LayerNorm(4, reduction_axes=(-2, -1), rngs=rngs),
        SEQUENCE,
        programs=RESHAPED,
    ),
    "layer norm with mask": norm(
        "LayerNorm", Args(SEQUENCE, mask=array(2, 6, 4, dtype=np.bool_))
    ),
    "layer norm in bfloat16": norm("LayerNorm", dtype=BF16)._replace(
        programs=CAST, rounding=CAST
    ),
    "layer norm of bfloat16": norm(
        "LayerNorm", array(2, 6, 4, dtype=BF16), dtype=BF16
    )._replace(programs=CAST, rounding=CAST),
    "RMS norm": norm("RMSNorm"),
    "RMS norm without scale": Case(
        nn.Sequential([nn.Dense(5), nn.RMSNorm(use_scale=False)]),
        lambda rngs: nnx.Sequential(
            nnx.Linear(4, 5, rngs=rngs), nnx.RMSNorm(5, use_scale=False, rngs=rngs)
        ),
        SEQUENCE,
        programs=RESHAPED,
    ),
    "group norm": norm("GroupNorm", num_groups=2),
    "group norm by size": norm("GroupNorm", num_groups=None, group_size=1),
    "instance norm": norm("InstanceNorm", IMAGE),
    "batch norm": norm("BatchNorm", momentum=0.8)._replace(options={"call": MODES}),
    "batch norm without scale and bias": norm(
        "BatchNorm", use_scale=False, use_bias=False
    )._replace(options={"call": MODES}),
    "batch norm in steps": norm("BatchNorm", Steps([SEQUENCE] * 3))._replace(
        options={"call": MODES[0]}
    ),
    "batch norm in bfloat16": norm("BatchNorm", dtype=BF16)._replace(
        options={"call": MODES}, programs=CAST, rounding=CAST
    ),
    "PReLU": Case(nn.PReLU(), lambda rngs: nnx.PReLU(), X),
    "attention": fast_attention(ATTENDED),
    "attention with mask": fast_attention(Args(ATTENDED, mask=MASK)),
    "attention to another sequence": fast_attention(
        Args(ATTENDED, SEQUENCE, mask=array(2, 1, 3, 6, dtype=np.bool_))
    ),
    "attention to keys and values": fast_attention((ATTENDED, SEQUENCE, SEQUENCE)),
    "attention without bias": fast_attention(ATTENDED, use_bias=False, qkv_features=6),
    "attention with normalised queries": fast_attention(ATTENDED, normalize_qk=True),
    "attention in bfloat16": fast_attention(ATTENDED, dtype=BF16),
    "attention that sows its weights": attention(
        ATTENDED, Call(linen={"sow_weights": True}, nnx={"sow_weights": True})
    ),
    "attention with dropout": attention(ATTENDED, [TRAIN, EVAL], dropout_rate=0.5),
    "attention with dropout in each head": attention(
        ATTENDED, TRAIN, dropout_rate=0.5, broadcast_dropout=False
    ),
    "attention decoding": decoding()._replace(rounding=SCALED),
    "attention decoding, causal once more": decoding(is_causal=True)._replace(
        options={"call": Call(nnx={"is_causal": True}, gradient=False)},
        rounding=SCALED if FLAX >= (0, 12, 12) else "",
        known=(
            Known(
                "bits",
                ("step_1/outputs", "step_2/outputs"),
                "value",
                "nnx.MultiHeadAttention saw the first cached token only; now it "
                "ignores is_causal while decoding",
                before=(0, 12, 12),
            ),
        ),
    ),
    "dropout": Case(
        nn.Sequential([nn.Dense(9), nn.Dropout(0.5, deterministic=False)]),
        lambda rngs: nnx.Sequential(
            nnx.Linear(4, 9, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        ),
        X,
    ),
    "dropout, one mask for all times": Case(
        nn.Sequential(
            [nn.Dense(9), nn.Dropout(0.5, broadcast_dims=(1,), deterministic=False)]
        ),
        lambda rngs: nnx.Sequential(
            nnx.Linear(4, 9, rngs=rngs),
            nnx.Dropout(0.5, broadcast_dims=(1,), rngs=rngs),
        ),
        SEQUENCE,
    ),
    "sequential": Case(
        nn.Sequential([nn.Dense(5), nn.gelu, nn.LayerNorm(), nn.Dense(3)]),
        lambda rngs: nnx.Sequential(
            nnx.Linear(4, 5, rngs=rngs),
            nnx.gelu,
            nnx.LayerNorm(5, rngs=rngs),
            nnx.Linear(5, 3, rngs=rngs),
        ),
        X,
        programs=RESHAPED,
    ),
    "LSTM cell": cell("LSTMCell", (CARRY, CARRY)),
    "optimized LSTM cell": cell(
        "OptimizedLSTMCell",
        (CARRY, CARRY),
        programs=FUSED,
        known=(started(*(f"params/h{gate}/kernel" for gate in "ifgo")),),
    ),
    "simple cell": cell("SimpleCell"),
    "GRU cell": cell(
        "GRUCell",
        known=(
            Known(
                "tree",
                ("params/hn/bias",),
                "missing",
                "nnx.GRUCell has no bias on its new gate's hidden part, nn.GRUCell has",
            ),
        ),
    ),
    "GRU cell, its additional bias left out": cell(
        "GRUCell",
        options={"rules": [{"linen": "params/hn/bias", "reason": "nnx lacks it"}]},
        programs=FUSED,
        rounding="gradients by the inputs are summed over gates in another order",
        known=(started(*(f"params/h{gate}/kernel" for gate in "rzn")),),
        zero="params/hn/bias",
    ),
    "LSTM": recurrent("LSTMCell"),
    "optimized LSTM": recurrent("OptimizedLSTMCell")._replace(
        programs=FUSED,
        rounding=FUSED if OPTIMISED else "",
        known=(started(*(f"params/cell/h{gate}/kernel" for gate in "ifgo")),),
    ),
    "simple RNN, carry and all": recurrent("SimpleCell", return_carry=True),
    "simple RNN, unrolled": recurrent("SimpleCell", unroll=2),
    "simple RNN backwards": recurrent("SimpleCell", reverse=True, keep_order=True),
    "LSTM of sequences of different length": recurrent(
        "LSTMCell",
        Args(SEQUENCE, seq_lengths=Integers((2,), 7, 1)),
        return_carry=True,
    ),
    "both directions": Case(
        nn.Bidirectional(nn.RNN(nn.SimpleCell(5)), nn.RNN(nn.SimpleCell(5))),
        lambda rngs: nnx.Bidirectional(
            nnx.RNN(nnx.SimpleCell(4, 5, rngs=rngs), rngs=rngs),
            nnx.RNN(nnx.SimpleCell(4, 5, rngs=rngs), rngs=rngs),
            rngs=rngs,
        ),
        SEQUENCE,
    ),
    "weight norm": wrapped("WeightNorm", Call()),
    "spectral norm": wrapped(
        "SpectralNorm",
        Call(linen={"update_stats": True}, nnx={"update_stats": True}),
        Known(
            "init",
            ("batch_stats/'layer_instance/kernel/u'",),
            "distribution",
            "nnx draws the first singular vector 100 times smaller; only its direction "
            "counts",
        ),
        Known(
            "init",
            ("params/layer_instance/kernel",),
            "distribution",
            "nn keeps the kernel that init has normalised",
        ),
    ),
    "LoRA": Case(
        LinenLoRA(),
        lambda rngs: nnx.LoRA(
            4,
            2,
            5,
            base_module=nnx.Linear(4, 5, rngs=rngs),
            b_initializer=NORMAL,
            rngs=rngs,
        ),
        X,
    ),
    "LoRA linear": Case(
        LinenLoRALinear(),
        lambda rngs: nnx.LoRALinear(4, 5, lora_rank=2, b_initializer=NORMAL, rngs=rngs),
        X,
    ),
    "max pool": pooled("max_pool", window_shape=(2, 2), strides=(2, 2)),
    "average pool": pooled("avg_pool", window_shape=(3, 3), padding="SAME"),
    "min pool": pooled("min_pool", window_shape=(2, 3)),
    "scan": Case(LinenScanned(), NNXScanned, X, programs=RESHAPED),
    "scan along axis 1": Case(
        LinenScanned(axis=1),
        NNXScanned,
        X,
        {
            # Square kernels: which axis is the stack's, no shape says.
            "rules": [
                {
                    "linen": "params/layers/(.*)",
                    "nnx": r"params/layers/\1",
                    "moveaxis": [1, 0],
                }
            ]
        },
        programs=RESHAPED,
    ),
    "scan with dropout": Case(
        LinenScanned(0.5), lambda rngs: NNXScanned(rngs, 0.5), X, programs=RESHAPED
    ),
    "scan over remat": Case(
        LinenScanned(remat=True),
        lambda rngs: NNXScanned(rngs, remat=True),
        X,
        programs=RESHAPED,
    ),
    "remat": Case(LinenRemat(), NNXRemat, X, programs=RESHAPED),
    "vmap": Case(LinenEnsemble(), NNXEnsemble, X),
}


def drawn(case: Case) -> Mapping[str, Any]:
    """Variables of Linen's; no bias is zero and no scale one, where faults could hide.

    Caches start empty, and statistics are positive as variances are.
    """
    call = calls.make_calls(*map(case.options.get, ("call", "methods")), case.inputs)[0]
    args = calls.abstract(call.inputs)[0] if case.first is None else Args(case.first)
    init = functools.partial(case.linen.init, method=call.methods[0], **call.linen)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(init, keys, *args.positional, **args.keywords)
    random = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> jax.Array:
        if path[0].key == "cache" or "/".join(k.key for k in path) == case.zero:
            return jnp.zeros(leaf.shape, leaf.dtype)
        values = random.standard_normal(leaf.shape)
        if path[0].key == "batch_stats":
            values = np.abs(values)
        return jnp.asarray(values).astype(leaf.dtype)

    shapes = {k: v for k, v in shapes.items() if k != "intermediates"}
    return jax.tree_util.tree_map_with_path(draw, shapes)


def differences(report: parity.Report, *tiers: str) -> set[tuple[str, str, str]]:
    """What differs, as tier, path and kind."""
    return {
        (tier.name, difference.path, difference.what)
        for tier in report.tiers
        for difference in tier.differences
        if tier.name in tiers
    }


def expected(case: Case, *tiers: str) -> set[tuple[str, str, str]]:
    """The same, as the table knows it."""
    return {
        (known.tier, path, known.what)
        for known in case.known
        for path in known.paths
        if known.tier in tiers and FLAX < known.before
    }


def check(linen: Any, case: Case, *tiers: str) -> parity.Report:
    return parity.check(
        linen, case.nnx, case.inputs, tiers=tiers, examples=1, **case.options
    )


@pytest.fixture(autouse=True)
def standard_promotion():
    """As Flax's layers want it in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_layer_is_the_same_in_both_apis(name):
    case = CASES[name]
    linen = case.linen, drawn(case)
    report = check(linen, case, "tree", "program", "bits", "tolerance")
    text = report.to_text()
    status = {tier.name: tier.status for tier in report.tiers}
    assert differences(report, "tree") == expected(case, "tree"), text
    if status["tree"] == "failed":
        return
    assert status["program"] == ("failed" if case.programs else "proved"), text
    if not case.rounding:
        assert differences(report, "bits") == expected(case, "bits"), text
        return
    kinds = {what for _, _, what in differences(report, "bits")}
    assert (kinds, status["tolerance"]) == ({"value"}, "proved"), text


@pytest.mark.parametrize("name", CASES)
def test_first_values_of_the_layer_have_the_same_distributions(name):
    case = CASES[name]
    linen: Any = case.linen
    if case.first is not None:
        linen = linen, linen.init(jax.random.key(0), jnp.zeros(case.first.shape))
    report = check(linen, case, "tree", "init")
    found = {d for d in differences(report, "init") if d[1] != "(first values)"}
    assert found == expected(case, "init"), report.to_text()
