"""How far a long command is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.progress
import rich.text

_EVERY = 10.0  # seconds between lines where there is no terminal
_UNIT = 1 if sys.platform == "darwin" else 1024  # of `ru_maxrss`


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Shows bytes, rate and resident memory on standard error while it is entered.

    Args:
      total: bytes in all.
      what: is being done.

    Yields:
      What is to be told of bytes as they are done.
    """
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console, total, what).advance
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        _Memory(),
    )
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Memory(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(f"{peak_bytes() / 2**20:.0f} MiB")


class _Lines:
    def __init__(self, console: rich.console.Console, total: int, what: str):
        self._console, self._total, self._what = console, total, what
        self._done, self._start = 0, time.monotonic()
        self._next = self._start + _EVERY

    def advance(self, count: int) -> None:
        """Adds bytes, and prints a line if it is time."""
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        rate = self._done / (now - self._start) / 2**20
        self._console.print(
            f"{self._what}: {self._done:,} of {self._total:,} bytes, {rate:.0f} MiB/s, "
            f"{peak_bytes() / 2**20:.0f} MiB resident",
            highlight=False,
            soft_wrap=True,
        )


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
