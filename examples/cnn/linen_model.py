"""A small residual network for images, as it was written for Linen."""

import functools

import flax.linen as nn
import jax


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9
        )
        y = conv(kernel_size=(3, 3), strides=self.strides)(x)
        y = nn.relu(norm()(y))
        y = conv(kernel_size=(3, 3))(y)
        y = norm()(y)
        if x.shape != y.shape:
            x = conv(kernel_size=(1, 1), strides=self.strides)(x)
            x = norm()(x)
        return nn.relu(x + y)


class CNN(nn.Module):
    """Images (batch, height, width, channels) to class scores."""

    features: tuple[int, ...] = (4, 8)
    classes: int = 5
    dropout: float = 0.25

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(self.features[0], (3, 3), use_bias=False)(images)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        for i, features in enumerate(self.features):
            x = ResidualBlock(features, strides=1 if i == 0 else 2)(x, train)
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.classes)(x)


def make() -> CNN:
    """The network."""
    return CNN()
