"""Drafted rule files: pairs as people write them, and the draft read back."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from parity.mapping.correspondence import match
from parity.mapping.leaves import declared_leaves, linen_leaves, nnx_leaves
from parity.mapping.rules import Rules
from parity.mapping.suggest import suggest


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (4, 8, 8):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=True)(x)
        x = nn.Dense(16)(x.mean((1, 2)))
        return nn.Dense(3)(x)


class CNNNNX(nnx.Module):
    def __init__(self, rngs):
        # Declared so that the alphabet has another order.
        self.stem = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.stem_norm = nnx.BatchNorm(4, rngs=rngs)
        self.second = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.second_norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.last_norm = nnx.BatchNorm(8, rngs=rngs)
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y)
        y = nn.Dense(16)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(y))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, y)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(y, memory)
        y = nn.Dense(16)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(y))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(11, 8)
        x, y = embed(source), embed(target)
        for _ in range(2):
            x = Encoder()(x)
        x = nn.LayerNorm()(x)
        for _ in range(2):
            y = Decoder()(y, x)
        return nn.Dense(11)(nn.LayerNorm()(y))


class EncoderNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)


class DecoderNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.self_attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(8, rngs=rngs)
        self.cross_attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)


class TransformerNNX(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.encoder = nnx.List([EncoderNNX(rngs) for _ in range(2)])
        self.encoder_norm = nnx.LayerNorm(8, rngs=rngs)
        self.decoder = nnx.List([DecoderNNX(rngs) for _ in range(2)])
        self.decoder_norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 11, rngs=rngs)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(5))(nn.Embed(7, 4)(x))
        x = nn.RNN(nn.OptimizedLSTMCell(6))(x)
        x = nn.RNN(nn.LSTMCell(6))(x)
        return nn.Dense(2)(x)


class RecurrentNNX(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.gru = nnx.RNN(nnx.GRUCell(4, 5, rngs=rngs), rngs=rngs)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(5, 6, rngs=rngs), rngs=rngs)
        self.split = nnx.RNN(nnx.LSTMCell(6, 6, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(6, 2, rngs=rngs)


TOKENS = jax.ShapeDtypeStruct((2, 4), jnp.int32)
IMAGE = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)


def sides(linen, nnx_kind, *inputs):
    variables = jax.eval_shape(linen.init, jax.random.key(0), *inputs)
    return linen_leaves(variables), declared_leaves(lambda: nnx_kind(nnx.Rngs(0)))


def read_back(linen, module, text):
    return match(linen, module, Rules.parse(text))


def test_a_cnn_is_paired_in_order_of_declaration():
    linen, module = sides(CNN(), CNNNNX, IMAGE)
    text = suggest(linen, module)
    found = read_back(linen, module, text)
    assert found.usable and not found.differences
    pairs = {entry.linen[0]: entry.nnx[0] for entry in found.entries}
    for i, name in enumerate(["stem", "second", "last"]):
        assert pairs[f"params/Conv_{i}/kernel"] == f"params/{name}/kernel"
        assert pairs[f"batch_stats/BatchNorm_{i}/var"] == f"batch_stats/{name}_norm/var"
    # Both have eight features: the draft says that it went by order.
    assert "guess, by order: BatchNorm_1, BatchNorm_2" in text
    # A rule for each collection, so that it is known backwards where a leaf belongs.
    assert "linen = 'params/BatchNorm_0/(bias|scale)'" in text
    assert "linen = 'batch_stats/BatchNorm_0/(mean|var)'" in text


def test_a_transformer_has_one_rule_for_all_layers():
    linen, module = sides(Transformer(), TransformerNNX, TOKENS, TOKENS)
    text = suggest(linen, module)
    found = read_back(linen, module, text)
    assert found.usable and not found.differences
    pairs = {entry.linen[0]: entry.nnx[0] for entry in found.entries}
    attention = "MultiHeadDotProductAttention"
    for i in range(2):
        for j, name in enumerate(["self_attention", "cross_attention"]):
            query = pairs[f"params/Decoder_{i}/{attention}_{j}/query/kernel"]
            assert query == f"params/decoder/{i}/{name}/query/kernel"
        assert pairs[f"params/Encoder_{i}/Dense_0/kernel"] == (
            f"params/encoder/{i}/up/kernel"
        )
    assert rf"'params/Encoder_(\d+)/{attention}_0/(key|out|query|value)/" in text
    assert text.count("[[rule]]") < 20


def test_a_recurrent_model_says_what_a_gru_cannot_have():
    linen, module = sides(Recurrent(), RecurrentNNX, TOKENS)
    text = suggest(linen, module)
    found = read_back(linen, module, text)
    [difference] = found.differences
    assert difference.path == "params/GRUCell_0/hn/bias"
    # What the reviewer does: take the comment signs off the ignore it drafted.
    draft = text.partition("# [[ignore]]")
    lines = [line.removeprefix("# ") for line in draft[2].splitlines()]
    accepted = draft[0] + "[[ignore]]" + "\n".join(lines)
    assert read_back(linen, module, accepted).usable


def test_nothing_is_suggested_for_what_corresponds_by_itself():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="head")(x)

    class NetNNX(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(8, 3, rngs=rngs)

    x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    text = suggest(*sides(Net(), NetNNX, x))
    assert "no rule is needed" in text and Rules.parse(text) == Rules()


class Fused(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(8, 24, rngs=rngs)
        self.table = nnx.Param(jnp.zeros((8, 5)))
        self.other = nnx.Linear(8, 7, rngs=rngs)


class Separate(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.param("embedding", nn.initializers.zeros, (5, 8))
        nn.Dense(7, name="other")(x)
        return [nn.Dense(8, name=name)(x) for name in ("q", "k", "v")]


def test_other_layouts_are_guessed_and_called_guesses():
    x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    linen, module = sides(Separate(), Fused, x)
    text = suggest(linen, module)
    found = read_back(linen, module, text)
    assert found.usable and not found.differences
    assert text.count("# guess") == 3
    assert "transpose = [1, 0]" in text and "axis = 1" in text
    names = ", ".join(f"'params/{name}/kernel'" for name in "qkv")
    assert f"linen = [{names}]" in text


@pytest.mark.parametrize(
    ("linen", "kind", "inputs"),
    [
        (CNN(), CNNNNX, (IMAGE,)),
        (Transformer(), TransformerNNX, (TOKENS, TOKENS)),
        (Recurrent(), CNNNNX, (TOKENS,)),
        (CNN(), RecurrentNNX, (IMAGE,)),
    ],
)
def test_a_draft_is_always_a_rule_file(linen, kind, inputs):
    leaves, _ = sides(linen, kind, *inputs)
    # Without the order of declaration, and of models that have nothing in common.
    module = nnx_leaves(nnx.eval_shape(lambda: kind(nnx.Rngs(0))))
    found = read_back(leaves, module, suggest(leaves, module))
    assert not [d for d in found.differences if d.what == "rule"]
