"""Two sides of a benchmark, measured in turn, and what is claimed of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the table.

    Attributes:
      name: what is measured.
      one: seconds or bytes, as the name says.
      other: the same of what it stands beside.
      ratio: of the two.
      limit: that the ratio must keep, as text; "" claims nothing.
      ok: whether it does.
    """

    name: str
    one: float
    other: float
    ratio: float
    limit: str
    ok: bool


def compare(
    name: str,
    one: float,
    other: float,
    *,
    at_least: float = 0.0,
    at_most: float = float("inf"),
) -> Claim:
    """The claim that `one` is so many times `other`; without limits a mere figure."""
    limits = [f">= {at_least}"] * bool(at_least)
    limits += [f"<= {at_most}"] * (at_most < float("inf"))
    return Claim(
        name,
        one,
        other,
        one / other,
        " and ".join(limits),
        at_least <= one / other <= at_most,
    )


def chosen(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    parts: Iterable[str],
    peers: Iterable[str],
) -> list[str]:
    """The parts of --parts, by default all; a peer is one only where its Python is."""
    wanted = options.parts.split(",") if options.parts else list(parts)
    if set(wanted) - set(parts):
        parser.error(f"--parts takes {', '.join(parts)}. Got {options.parts}.")
    for peer in peers:
        if peer in wanted and not getattr(options, f"{peer}_python"):
            if options.parts:
                parser.error(f"--parts={peer} needs --{peer}-python.")
            print(f"No --{peer}-python: not beside it.")
            wanted.remove(peer)
    return wanted


def report(claims: Iterable[Claim], file: pathlib.Path | None) -> int:
    """Prints and writes the rows as they come; 0 where every claim holds."""
    rows = []
    for claim in claims:
        rows.append(claim)
        print(_row(claim), flush=True)
        if file:
            text = json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
            file.write_text(text + "\n")
    return 0 if all(row.ok for row in rows) else 1


def _row(claim: Claim) -> str:
    verdict = f"{claim.limit}: {'holds' if claim.ok else 'FAILS'}" * bool(claim.limit)
    figures = f"{claim.one:12.6g} {claim.other:12.6g}"
    return f"{claim.name:72} {figures} {claim.ratio:6.2f} {verdict}".rstrip()


class Side:
    """A process that answers a line with CPU and wall seconds."""

    def __init__(self, command: list[str], environment: dict[str, str], pinned: bool):
        core = {max(os.sched_getaffinity(0))}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=(lambda: os.sched_setaffinity(0, core)) if pinned else None,
        )
        self.versions = self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait()

    def ask(self, line: str) -> tuple[float, float]:
        """CPU and wall seconds of what the line asks for."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        cpu, wall = self._answer().split()
        return float(cpu), float(wall)

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended: see what it wrote above.")
        return line.strip()


def alternate(
    sides: list[Side], questions: list[str], rounds: int
) -> list[list[tuple[float, float]]]:
    """Of each side, the medians for each question, in turn; a first round warms up."""
    seen: list[list[list[tuple[float, float]]]] = [
        [[] for _ in questions] for _ in sides
    ]
    for turn in range(rounds + 1):
        for number, question in enumerate(questions):
            for side, answers in zip(sides, seen, strict=True):
                answer = side.ask(question)
                if turn:
                    answers[number].append(answer)
    return [
        [tuple(map(statistics.median, zip(*runs, strict=True))) for runs in answers]
        for answers in seen
    ]


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds of a call, until its results are there."""
    import jax

    start = time.process_time(), time.perf_counter()
    result = run()
    jax.block_until_ready(result if not hasattr(result, "as_text") else 0)
    return time.process_time() - start[0], time.perf_counter() - start[1]
