"""The same tagger, ported to NNX."""

import jax
import jax.numpy as jnp
from flax import nnx


class Tagger(nnx.Module):
    """Sentences (batch, time) of word ids and their lengths to scores of tags."""

    def __init__(
        self,
        words: int = 17,
        tags: int = 5,
        features: int = 6,
        hidden: int = 4,
        layers: int = 2,
        dropout: float = 0.2,
        cell: type[nnx.RNNCellBase] = nnx.LSTMCell,
        *,
        rngs: nnx.Rngs,
    ):
        def lstm(in_features: int) -> nnx.RNN:
            return nnx.RNN(cell(in_features, hidden, rngs=rngs))

        self.words = nnx.Embed(words, features, rngs=rngs)
        widths = [features, *[2 * hidden] * (layers - 1)]
        self.layers = nnx.List(nnx.Bidirectional(lstm(w), lstm(w)) for w in widths)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.tags = nnx.Embed(tags, 2 * hidden, rngs=rngs)
        self.tag_bias = nnx.Param(jnp.zeros(tags))

    def __call__(self, sentences: jax.Array, lengths: jax.Array) -> jax.Array:
        x = self.words(sentences)
        for layer in self.layers:
            x = layer(self.dropout(x), seq_lengths=lengths)
        scores = self.tags.attend(x) + self.tag_bias[...]
        is_word = jnp.arange(sentences.shape[1]) < lengths[:, None]
        return jnp.where(is_word[..., None], scores, 0.0)


def make(rngs: nnx.Rngs) -> Tagger:
    """The tagger."""
    return Tagger(rngs=rngs)


def make_fused(rngs: nnx.Rngs) -> Tagger:
    """The tagger with cells that compute all gates in one product."""
    return Tagger(cell=nnx.OptimizedLSTMCell, rngs=rngs)
