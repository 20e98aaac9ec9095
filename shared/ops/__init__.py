"""Functions of arrays: no parameters, no config."""
