"""A tagger of words with bidirectional LSTMs, as it was written for Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Tagger(nn.Module):
    """Sentences (batch, time) of word ids and their lengths to scores of tags."""

    words: int = 17
    tags: int = 5
    features: int = 6
    hidden: int = 4
    layers: int = 2
    dropout: float = 0.2

    @nn.compact
    def __call__(
        self, sentences: jax.Array, lengths: jax.Array, train: bool = False
    ) -> jax.Array:
        x = nn.Embed(self.words, self.features)(sentences)
        for _ in range(self.layers):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.Bidirectional(
                nn.RNN(nn.LSTMCell(self.hidden)),
                nn.RNN(nn.LSTMCell(self.hidden)),
            )(x, seq_lengths=lengths)
        scores = nn.Dense(self.tags)(x)
        is_word = jnp.arange(sentences.shape[1]) < lengths[:, None]
        return jnp.where(is_word[..., None], scores, 0.0)


def make() -> Tagger:
    """The tagger."""
    return Tagger()
