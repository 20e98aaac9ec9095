"""The same residual network, ported to NNX."""

import functools

import jax
from flax import nnx


class ResidualBlock(nnx.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    def __init__(
        self, in_features: int, features: int, strides: int = 1, *, rngs: nnx.Rngs
    ):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, features, momentum=0.9, rngs=rngs)
        self.conv1 = conv(in_features, features, (3, 3), strides=strides)
        self.norm1 = norm()
        self.conv2 = conv(features, features, (3, 3))
        self.norm2 = norm()
        self.projects = strides != 1 or in_features != features
        if self.projects:
            self.shortcut = conv(in_features, features, (1, 1), strides=strides)
            self.shortcut_norm = norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.projects:
            x = self.shortcut_norm(self.shortcut(x))
        return nnx.relu(x + y)


class CNN(nnx.Module):
    """Images (batch, height, width, channels) to class scores."""

    def __init__(
        self,
        features: tuple[int, ...] = (4, 8),
        classes: int = 5,
        dropout: float = 0.25,
        channels: int = 3,
        *,
        rngs: nnx.Rngs,
    ):
        first = features[0]
        self.stem = nnx.Conv(channels, first, (3, 3), use_bias=False, rngs=rngs)
        self.stem_norm = nnx.BatchNorm(first, momentum=0.9, rngs=rngs)
        widths = zip((first, *features), features, strict=False)
        self.blocks = nnx.List(
            ResidualBlock(before, after, 1 if i == 0 else 2, rngs=rngs)
            for i, (before, after) in enumerate(widths)
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(features[-1], classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        x = self.dropout(x.mean(axis=(1, 2)))
        return self.head(x)


def make(rngs: nnx.Rngs) -> CNN:
    """The network."""
    return CNN(rngs=rngs)
