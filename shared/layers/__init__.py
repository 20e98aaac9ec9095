"""Each layer as specs of its parameters, an empty cache and a pure `apply`."""
