"""The network as it was: Linen."""

import flax.linen as nn
import jax


class MLP(nn.Module):
    """Two dense layers."""

    hidden: int = 32
    out: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Gives logits."""
        x = nn.LayerNorm(name="norm")(x)
        x = nn.gelu(nn.Dense(self.hidden, name="up")(x))
        return nn.Dense(self.out, name="down")(x)


def make() -> MLP:
    """The module to check."""
    return MLP()
