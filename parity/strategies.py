"""Hypothesis strategies for the inputs of a parity check.

Structure is free and numbers cost a compilation: draw configs for comparisons under
`jax.eval_shape`; for values, compile a few configs and draw seeds, tokens and segments.
Sizes are small and pairwise different where they may be, so that no two dimensions can
be mixed up unseen.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

import shared

Part = TypeVar("Part")

LOCAL_MIXERS = ("linear_attention", "sliding_attention")
MIXERS = (*LOCAL_MIXERS, "full_attention")
FEED_FORWARDS = ("moe", "dense", "dense_and_moe")

# What breaks careless comparisons: both zeros, the smallest and the largest subnormal
# and normal numbers of float32, neighbours of 1, and scores that saturate a softmax.
SPECIAL_FLOATS = tuple(
    float(np.float32(value))
    for value in (
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.1754942e-38,
        1.1754944e-38,
        -1.1754944e-38,
        1.0,
        1.0000001,
        0.99999994,
        -1.0,
        88.0,
        -104.0,
        1e4,
        -1e4,
        1e30,
        -1e30,
    )
)


def _make(part: Callable[..., Part], *args: Any, **fields: Any) -> Part:
    """Calls `part`, leaving Python's random state as it is.

    Type checkers look at a random item of a tuple; Hypothesis would take it for a draw.
    """
    state = random.getstate()
    try:
        return part(*args, **fields)
    finally:
        random.setstate(state)


def layer_kinds() -> st.SearchStrategy[shared.LayerKind]:
    """Any kind of layer."""
    return st.builds(
        functools.partial(_make, shared.LayerKind),
        st.sampled_from(MIXERS),
        st.sampled_from(FEED_FORWARDS),
    )


@st.composite
def layers(
    draw: st.DrawFn, max_layers: int = 9, max_period: int = 4
) -> tuple[tuple[shared.LayerKind, ...], int | None]:
    """Kinds of layers in order, and an explicit period they do not contradict, or None.

    Regular lists with the full layer anywhere in the period, their remainder, a prefix
    of other layers, and lists without any order. Simple ones come first.

    Args:
      draw: given by Hypothesis.
      max_layers: at most so many layers.
      max_period: at most so many layers in a period.
    """
    form = draw(st.sampled_from(("hybrid", "periodic", "prefix", "irregular")))
    count = draw(st.integers(1, max_layers))
    if form == "irregular":
        kinds = draw(st.lists(layer_kinds(), min_size=count, max_size=count))
        return tuple(kinds), None
    period = draw(st.integers(1, max_period))
    if form == "hybrid":
        feed_forward = draw(st.sampled_from(FEED_FORWARDS))
        full = draw(st.integers(0, period - 1))
        local = draw(st.sampled_from(LOCAL_MIXERS))
        unit = [
            _make(
                shared.LayerKind,
                "full_attention" if position == full else local,
                feed_forward,
            )
            for position in range(period)
        ]
    else:
        unit = draw(st.lists(layer_kinds(), min_size=period, max_size=period))
    prefix: list[shared.LayerKind] = []
    if form == "prefix":
        prefix = draw(st.lists(layer_kinds(), min_size=1, max_size=min(2, count)))
    kinds = prefix + [unit[i % period] for i in range(count - len(prefix))]
    explicit = form != "prefix" and draw(st.booleans())
    return tuple(kinds), period if explicit else None


@st.composite
def decoder_configs(
    draw: st.DrawFn,
    *,
    max_layers: int = 9,
    scan_layers: bool | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> shared.DecoderConfig:
    """Small configs that are valid, of every form a decoder can take.

    Args:
      draw: given by Hypothesis.
      max_layers: at most so many layers.
      scan_layers: None draws it.
      dtypes: from which `param_dtype` and `dtype` are drawn.
    """
    kinds, period = draw(layers(max_layers))
    latent = draw(st.booleans())
    if period is None:
        kinds = draw(_with_borrowers(kinds, latent))
    mixers = {kind.mixer for kind in kinds}
    feed_forwards = {kind.feed_forward for kind in kinds}
    hidden = draw(st.sampled_from((20, 16, 24)))
    attention = None
    if "full_attention" in mixers:
        attention = draw((_latent_attention if latent else _attention)(hidden))
    sliding = None
    if "sliding_attention" in mixers:
        sliding = draw(_attention(hidden, st.integers(1, 5)))
    delta_net = draw(_delta_net(hidden)) if "linear_attention" in mixers else None
    moe = draw(_moe(hidden)) if feed_forwards - {"dense"} else None
    fields = {
        "zero_centered_norms": draw(st.booleans()),
        "output_norms": draw(st.booleans()),
        "layer_scalar": draw(st.booleans()),
        "scale_embeddings": draw(st.booleans()),
        "logit_softcap": draw(st.sampled_from((None, 30.0))),
        "layer_inputs": draw(
            st.sampled_from((None, _make(shared.LayerInputConfig, 17, 3)))
        ),
        "borrower_mlp": draw(
            st.sampled_from((None, _make(shared.MLPConfig, hidden, 26)))
        ),
        "vocab_size": draw(st.integers(13, 31)),
        "tie_word_embeddings": draw(st.booleans()),
        "scan_layers": draw(st.booleans()) if scan_layers is None else scan_layers,
        "param_scan_axis": draw(st.integers(0, 1)),
        "remat_policy": draw(st.sampled_from(("none", "full", "dots_saveable"))),
        "param_dtype": draw(st.sampled_from(tuple(dtypes))),
        "dtype": draw(st.sampled_from(tuple(dtypes))),
    }
    mlp = _make(shared.MLPConfig, hidden, 13) if feed_forwards - {"moe"} else None
    return _make(
        shared.DecoderConfig,
        family="qwen3_next",
        hidden_size=hidden,
        layers=kinds,
        attention=attention,
        sliding_attention=sliding,
        delta_net=delta_net,
        mlp=mlp,
        moe=moe,
        max_position_embeddings=64,
        scan_period=period,
        **fields,
    )


@st.composite
def _with_borrowers(
    draw: st.DrawFn, kinds: tuple[shared.LayerKind, ...], latent: bool
) -> tuple[shared.LayerKind, ...]:
    """The last layers, none or as many as may, attend to keys of those before them."""
    lenders = LOCAL_MIXERS[1:] if latent else MIXERS[1:]
    most, own = 0, len(kinds)
    while own > 1 and kinds[own - 1].mixer in lenders:
        own -= 1
        before = {kind.mixer for kind in kinds[:own]}
        if {kind.mixer for kind in kinds[own:]} <= before:
            most = len(kinds) - own
    count = draw(st.sampled_from((0, most)))
    borrow = [
        _make(shared.LayerKind, k.mixer, k.feed_forward, True)
        for k in kinds[len(kinds) - count :]
    ]
    return (*kinds[: len(kinds) - count], *borrow)


@st.composite
def _latent_attention(draw: st.DrawFn, hidden: int) -> shared.LatentAttentionConfig:
    return _make(
        shared.LatentAttentionConfig,
        hidden_size=hidden,
        num_heads=draw(st.integers(1, 3)),
        q_lora_rank=draw(st.sampled_from((None, 5))),
        kv_lora_rank=draw(st.sampled_from((7, 4))),
        nope_head_dim=6,
        value_head_dim=draw(st.sampled_from((5, 6))),
        rope=_make(shared.RopeConfig, 1e4, 4, interleaved=draw(st.booleans())),
        use_bias=draw(st.booleans()),
    )


@st.composite
def _attention(
    draw: st.DrawFn, hidden: int, windows: st.SearchStrategy[int] | None = None
) -> shared.AttentionConfig:
    kv_heads = draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from((6, 10)))
    return _make(
        shared.AttentionConfig,
        hidden_size=hidden,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_make(shared.RopeConfig, 1e4, draw(st.sampled_from((4, 0, 2, head_dim)))),
        use_bias=draw(st.booleans()),
        window=None if windows is None else draw(windows),
        gated=draw(st.booleans()),
        zero_centered_norms=draw(st.booleans()),
        value_norm=draw(st.booleans()),
        keys_are_values=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 1.0))),
    )


@st.composite
def _delta_net(draw: st.DrawFn, hidden: int) -> shared.GatedDeltaNetConfig:
    key_heads = draw(st.integers(1, 3))
    return _make(
        shared.GatedDeltaNetConfig,
        hidden_size=hidden,
        num_key_heads=key_heads,
        num_value_heads=key_heads * draw(st.integers(1, 3)),
        key_head_dim=draw(st.sampled_from((5, 8))),
        value_head_dim=draw(st.sampled_from((7, 8))),
        conv_width=draw(st.sampled_from((4, 1, 2))),
        chunk_size=draw(st.sampled_from((4, 16))),
        span_size=draw(st.sampled_from((8, 512))),
        grouped_projections=draw(st.booleans()),
    )


@st.composite
def _moe(draw: st.DrawFn, hidden: int) -> shared.MoEConfig:
    experts = draw(st.integers(1, 5))
    return _make(
        shared.MoEConfig,
        hidden_size=hidden,
        num_experts=experts,
        experts_per_token=draw(st.integers(1, experts)),
        expert_size=draw(st.sampled_from((9, 12))),
        shared_expert_size=draw(st.sampled_from((11, 12, 0))),
        normalize_weights=draw(st.booleans()),
        shared_expert_gated=draw(st.booleans()),
        scores=draw(st.sampled_from(("softmax", "sigmoid"))),
        correction_bias=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from((1.0, 2.5))),
        per_expert_scale=draw(st.booleans()),
        norm_router_input=draw(st.booleans()),
    )


def seeds() -> st.SearchStrategy[int]:
    """Seeds that `jax.random.key` and `numpy.random.default_rng` take."""
    return st.integers(0, 2**31 - 1)


@st.composite
def tokens(draw: st.DrawFn, vocab: int, batch: int, length: int) -> np.ndarray:
    """Token ids [batch, length], int32; some draw from few ids, so that ids repeat.

    Args:
      draw: given by Hypothesis.
      vocab: ids are below it.
      batch: rows.
      length: tokens a row.
    """
    few = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=3))
    ids = draw(st.sampled_from((st.integers(0, vocab - 1), st.sampled_from(few))))
    rows = st.lists(ids, min_size=length, max_size=length)
    drawn = draw(st.lists(rows, min_size=batch, max_size=batch))
    return np.array(drawn, np.int32).reshape(batch, length)


@st.composite
def segment_ids(draw: st.DrawFn, batch: int, length: int) -> np.ndarray:
    """Segment ids [batch, length], int32: each row one sequence, padded or packed.

    A row has at least one real token. Packed rows may have padding between and around
    their sequences.

    Args:
      draw: given by Hypothesis.
      batch: rows.
      length: tokens a row.
    """
    return np.stack([draw(_segment_row(length)) for _ in range(batch)])


@st.composite
def splits(draw: st.DrawFn, length: int, most: int = 3) -> tuple[int, ...]:
    """Where to cut a row of `length` tokens into calls; ascending, no empty parts.

    Args:
      draw: given by Hypothesis.
      length: tokens in the row.
      most: cuts at most.
    """
    if length < 2:
        return ()
    cuts = draw(st.sets(st.integers(1, length - 1), max_size=most))
    return tuple(sorted(cuts))


@st.composite
def _segment_row(draw: st.DrawFn, length: int) -> np.ndarray:
    row = np.ones(length, np.int32)
    form = draw(st.sampled_from(("one", "left", "right", "packed", "gaps")))
    if form == "one" or length < 2:
        return row
    cut = draw(st.integers(1, length - 1))
    if form == "left":
        row[:cut] = 0
    elif form == "right":
        row[cut:] = 0
    else:
        cuts = sorted({cut, *draw(st.lists(st.integers(1, length - 1), max_size=3))})
        row[:] = 1 + np.searchsorted(cuts, np.arange(length), side="right")
        if form == "gaps":
            hole = draw(st.integers(0, length - 1))
            row[hole : draw(st.integers(hole, length - 1))] = 0
    return row


@st.composite
def floats(
    draw: st.DrawFn, *shape: int, most: float = float(np.finfo(np.float32).max)
) -> np.ndarray:
    """Finite float32 numbers, for router logits: subnormal, -0.0, huge, and tied.

    Args:
      draw: given by Hypothesis.
      *shape: of the array.
      most: largest absolute value.
    """
    special = [value for value in SPECIAL_FLOATS if abs(value) <= most]
    most = float(np.float32(most))
    # Hypothesis refuses to draw subnormals where a library has set flush-to-zero.
    plain = st.floats(-most, most, width=32, allow_subnormal=False)
    number = st.sampled_from(special) | plain
    pool = draw(st.lists(number, min_size=1, max_size=4))
    entry = draw(st.sampled_from((number, st.sampled_from(pool))))
    size = int(np.prod(shape))
    values = draw(st.lists(entry, min_size=size, max_size=size))
    return np.array(values, np.float32).reshape(shape)
