"""One module a command: `define_flags`, and `run`, which gives the exit status."""


class UsageError(ValueError):
    """A command line that asks for nothing we can do."""
