"""An encoder-decoder Transformer with one embedding for all, as written for Linen."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

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


class Mlp(nn.Module):
    """Two dense layers."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.hidden)(x))
        return nn.Dense(x.shape[-1])(y)


class EncoderLayer(nn.Module):
    """Self-attention and an MLP, each normalised first."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        c = self.config
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(c.heads)(y, mask=mask)
        x = x + nn.Dropout(c.dropout, deterministic=not train)(y)
        y = Mlp(c.hidden)(nn.LayerNorm()(x))
        return x + nn.Dropout(c.dropout, deterministic=not train)(y)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the source, and an MLP."""

    config: Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        mask: jax.Array | None,
        memory_mask: jax.Array,
        train: bool,
        decode: bool,
    ) -> jax.Array:
        c = self.config
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(c.heads, decode=decode)(y, mask=mask)
        x = x + nn.Dropout(c.dropout, deterministic=not train)(y)
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(c.heads)(y, memory, mask=memory_mask)
        x = x + nn.Dropout(c.dropout, deterministic=not train)(y)
        y = Mlp(c.hidden)(nn.LayerNorm()(x))
        return x + nn.Dropout(c.dropout, deterministic=not train)(y)


class Encoder(nn.Module):
    """Source tokens to one vector each."""

    config: Config
    embed: nn.Module

    @nn.compact
    def __call__(self, source: jax.Array, train: bool) -> jax.Array:
        c = self.config
        shape = c.max_length, c.features
        positions = self.param("positions", nn.initializers.normal(0.1), shape)
        x = self.embed(source) + positions[: source.shape[1]]
        mask = nn.make_attention_mask(source != PAD, source != PAD)
        for _ in range(c.layers):
            x = EncoderLayer(c)(x, mask, train)
        return nn.LayerNorm()(x)


class Decoder(nn.Module):
    """Target tokens and encoded source to scores of the next token."""

    config: Config
    embed: nn.Module

    @nn.compact
    def __call__(
        self,
        target: jax.Array,
        memory: jax.Array,
        source: jax.Array,
        train: bool,
        decode: bool,
    ) -> jax.Array:
        c = self.config
        x = self.embed(target) + self._positions(target.shape[1], decode)
        mask = None
        if not decode:
            mask = nn.combine_masks(
                nn.make_attention_mask(target != PAD, target != PAD),
                nn.make_causal_mask(target),
            )
        memory_mask = nn.make_attention_mask(target != PAD, source != PAD)
        for _ in range(c.layers):
            x = DecoderLayer(c)(x, memory, mask, memory_mask, train, decode)
        return self.embed.attend(nn.LayerNorm()(x))

    def _positions(self, length: int, decode: bool) -> jax.Array:
        shape = self.config.max_length, self.config.features
        positions = self.param("positions", nn.initializers.normal(0.1), shape)
        if not decode:
            return positions[:length]
        initialised = self.has_variable("cache", "position")
        position = self.variable("cache", "position", jnp.zeros, (), jnp.int32)
        start = position.value
        if initialised:
            position.value = start + length
        return jax.lax.dynamic_slice_in_dim(positions, start, length)


class Translator(nn.Module):
    """Source and target tokens to scores of each next target token."""

    config: Config = Config()

    def setup(self) -> None:
        """Makes the parts; the embedding is shared by all."""
        c = self.config
        self.shared_embedding = nn.Embed(c.vocabulary, c.features)
        self.encoder = Encoder(c, self.shared_embedding)
        self.decoder = Decoder(c, self.shared_embedding)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        train: bool = False,
        decode: bool = False,
    ) -> jax.Array:
        memory = self.encode(source, train)
        return self.decoder(target, memory, source, train, decode)

    def encode(self, source: jax.Array, train: bool = False) -> jax.Array:
        """The source, ready for the decoder."""
        return self.encoder(source, train)

    def step(self, token: jax.Array, memory: jax.Array, source: jax.Array) -> jax.Array:
        """Scores after one more token; those before are in the cache."""
        return self.decoder(token, memory, source, train=False, decode=True)


def make(batch_size: int = 2) -> tuple[Translator, dict]:
    """The model and its variables; the cache is as long as the longest target."""
    model = Translator()
    tokens = jnp.ones((batch_size, model.config.max_length), jnp.int32)
    init = jax.jit(model.init, static_argnames="decode")
    return model, init(jax.random.key(0), tokens, tokens, decode=True)
