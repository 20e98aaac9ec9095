"""Where the records of a run go: a terminal, a file of lines, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

from parity.training.settings import SettingsError
from shared.training import Record

Report = Callable[[Record], None]
_STATM = pathlib.Path("/proc/self/statm")


def resident_bytes() -> int:
    """Memory of this process; where the system does not say it, the most it had."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def line(record: Record) -> str:
    """A record for people."""
    speed = record.tokens_per_second
    parts = (
        f"step {record.step}",
        f"loss {record.loss:.6f}",
        f"cross entropy {record.cross_entropy:.6f}",
        f"gradient norm {record.gradient_norm:.4f}",
        f"learning rate {record.learning_rate:.3e}",
        "compiling" if speed is None else f"{speed:,.0f} tokens/s",
        f"{resident_bytes() / 1e6:,.0f} MB",
    )
    return "  ".join(parts)


def as_dict(record: Record) -> dict[str, Any]:
    """A record for JSON, in which a float32 stays what it was to the bit."""
    return record._asdict()


@contextlib.contextmanager
def json_lines(file: str, first: int) -> Iterator[Report]:
    """Appends records to a file of JSON objects, one a line.

    Of a file that is there the steps up to `first` stay: a run that was killed may have
    gone on after what it has saved, and its last line may be half of one.
    """
    path = pathlib.Path(file)
    kept = _lines_until(path, first)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(f"{text}\n" for text in kept), encoding="utf-8")
    part.replace(path)
    with path.open("a", encoding="utf-8") as stream:

        def report(record: Record) -> None:
            stream.write(json.dumps(as_dict(record), allow_nan=False) + "\n")
            stream.flush()

        yield report


def _lines_until(path: pathlib.Path, step: int) -> list[str]:
    if not step or not path.exists():
        return []
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("step", step + 1) <= step:
            kept.append(text)
    return kept


def require_tensorboard() -> None:
    """Raises SettingsError if the events of TensorBoard cannot be written."""
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            "TensorBoard's events need tensorboardX: pip install "
            "'parity-zoo[tensorboard]'."
        ) from error


@contextlib.contextmanager
def tensorboard(folder: str, first: int) -> Iterator[Report]:
    """Writes records as scalars into a folder of TensorBoard.

    Of a run that goes on it hides the events after `first` that are there already.
    """
    import tensorboardX

    purge = first + 1 if first else None
    with tensorboardX.SummaryWriter(folder, purge_step=purge) as writer:

        def report(record: Record) -> None:
            for name, value in as_dict(record).items():
                if name != "step" and value is not None:
                    writer.add_scalar(f"train/{name}", value, record.step)

        yield report
