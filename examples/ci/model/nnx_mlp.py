"""The network as it is to be: NNX."""

import jax
from flax import nnx


class MLP(nnx.Module):
    """Two dense layers."""

    def __init__(self, width: int, hidden: int = 32, out: int = 10, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Gives logits."""
        return self.down(nnx.gelu(self.up(self.norm(x))))


def make(rngs: nnx.Rngs) -> MLP:
    """The module to check."""
    return MLP(16, rngs=rngs)
