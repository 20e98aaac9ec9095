"""The same Transformer, ported to NNX."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

PAD = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a translator."""

    vocabulary: int = 13
    features: int = 8
    heads: int = 2
    hidden: int = 12
    layers: int = 1
    max_length: int = 6
    dropout: float = 0.1


class Mlp(nnx.Module):
    """Two dense layers."""

    def __init__(self, features: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class EncoderLayer(nnx.Module):
    """Self-attention and an MLP, each normalised first."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.attention_norm = nnx.LayerNorm(c.features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            c.heads, c.features, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(c.features, rngs=rngs)
        self.mlp = Mlp(c.features, c.hidden, rngs=rngs)
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the source, and an MLP."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        c = config
        self.self_norm = nnx.LayerNorm(c.features, rngs=rngs)
        self.self_attention = nnx.MultiHeadAttention(c.heads, c.features, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(c.features, rngs=rngs)
        self.cross_attention = nnx.MultiHeadAttention(
            c.heads, c.features, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(c.features, rngs=rngs)
        self.mlp = Mlp(c.features, c.hidden, rngs=rngs)
        self.dropout = nnx.Dropout(c.dropout, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        mask: jax.Array | None,
        memory_mask: jax.Array,
        decode: bool,
    ) -> jax.Array:
        y = self.self_attention(self.self_norm(x), mask=mask, decode=decode)
        x = x + self.dropout(y)
        y = self.cross_attention(self.cross_norm(x), memory, mask=memory_mask)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Encoder(nnx.Module):
    """Source tokens to one vector each."""

    def __init__(self, config: Config, embed: nnx.Embed, *, rngs: nnx.Rngs):
        self.embed = embed
        self.positions = make_positions(config, rngs)
        self.layers = nnx.List(
            EncoderLayer(config, rngs=rngs) for _ in range(config.layers)
        )
        self.final_norm = nnx.LayerNorm(config.features, rngs=rngs)

    def __call__(self, source: jax.Array) -> jax.Array:
        x = self.embed(source) + self.positions[: source.shape[1]]
        mask = nnx.make_attention_mask(source != PAD, source != PAD)
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_norm(x)


class Decoder(nnx.Module):
    """Target tokens and encoded source to scores of the next token."""

    def __init__(self, config: Config, embed: nnx.Embed, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = embed
        self.positions = make_positions(config, rngs)
        self.next_position = nnx.Cache(jnp.zeros((), jnp.int32))
        self.layers = nnx.List(
            DecoderLayer(config, rngs=rngs) for _ in range(config.layers)
        )
        self.final_norm = nnx.LayerNorm(config.features, rngs=rngs)

    def init_cache(self, batch_size: int) -> None:
        """Empties the cache, to begin another translation."""
        self.next_position[...] = jnp.zeros((), jnp.int32)
        for layer in self.layers:
            layer.self_attention.init_cache(
                (batch_size, self.config.max_length, self.config.features)
            )

    def __call__(
        self, target: jax.Array, memory: jax.Array, source: jax.Array
    ) -> jax.Array:
        x = self.embed(target) + self.positions[: target.shape[1]]
        mask = nnx.combine_masks(
            nnx.make_attention_mask(target != PAD, target != PAD),
            nnx.make_causal_mask(target),
        )
        return self._scores(x, target, memory, source, mask, decode=False)

    def step(self, token: jax.Array, memory: jax.Array, source: jax.Array) -> jax.Array:
        """Scores after one more token."""
        start = self.next_position[...]
        here = jax.lax.dynamic_slice_in_dim(self.positions[...], start, token.shape[1])
        self.next_position[...] = start + token.shape[1]
        x = self.embed(token) + here
        return self._scores(x, token, memory, source, None, decode=True)

    def _scores(
        self,
        x: jax.Array,
        target: jax.Array,
        memory: jax.Array,
        source: jax.Array,
        mask: jax.Array | None,
        decode: bool,
    ) -> jax.Array:
        memory_mask = nnx.make_attention_mask(target != PAD, source != PAD)
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask, decode)
        return self.embed.attend(self.final_norm(x))


class Translator(nnx.Module):
    """Source and target tokens to scores of each next target token."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        embed = nnx.Embed(config.vocabulary, config.features, rngs=rngs)
        self.encoder = Encoder(config, embed, rngs=rngs)
        self.decoder = Decoder(config, embed, rngs=rngs)

    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        return self.decoder(target, self.encode(source), source)

    def encode(self, source: jax.Array) -> jax.Array:
        """The source, ready for the decoder."""
        return self.encoder(source)

    def decode_next(
        self, token: jax.Array, memory: jax.Array, source: jax.Array
    ) -> jax.Array:
        """Scores after one more token; those before are in the cache."""
        return self.decoder.step(token, memory, source)


def make_positions(config: Config, rngs: nnx.Rngs) -> nnx.Param:
    """Learned vectors for the places of a sequence."""
    shape = config.max_length, config.features
    return nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape))


def make(rngs: nnx.Rngs, batch_size: int = 2) -> Translator:
    """The model with an empty cache."""
    model = Translator(Config(), rngs=rngs)
    model.decoder.init_cache(batch_size)
    return model
