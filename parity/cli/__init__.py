"""One module a command: `define_flags`, and `run`, which gives the exit status."""
