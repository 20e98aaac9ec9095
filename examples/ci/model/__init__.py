"""One network, in both Flax APIs."""
