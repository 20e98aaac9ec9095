"""Which leaf of a Linen tree is which leaf of an NNX module."""
