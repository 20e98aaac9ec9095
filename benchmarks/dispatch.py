"""The time a frontend adds to a jitted call, beside a plain jitted function.

python benchmarks/dispatch.py [--json=FILE] [--rounds=200] [--calls=20] [--extra]

Exit status 0: both frontends keep within the limit; 1: one does not. README.md beside
this file tells what is measured and holds the numbers seen.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

import shared
from parity import decoders
from parity.comparison import dispatch
from parity.comparison.dispatch import FLAT, USUAL, Timing, Way
from parity.reporting import report
from shared.presets import qwen3_next_tiny

LIMIT = 1.2
LAYERS = (3, 30)  # 54 and 506 leaves
# (side, way): over which of the plain functions the limit must hold.
CLAIMS = {
    ("linen", FLAT): "flat list",
    ("nnx", FLAT): "flat list",
    ("linen", USUAL): "flat dict",
    ("nnx", "dict of parameters"): "flat dict",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers there")
    parser.add_argument("--rounds", type=int, default=200, help="pairs a ratio")
    parser.add_argument("--calls", type=int, default=20, help="calls a pair and side")
    parser.add_argument(
        "--extra", action="store_true", help="also NNX modules as arguments (slow)"
    )
    options = parser.parse_args()
    _one_core()
    rows = [
        row
        for layers in LAYERS
        for row in _measure(layers, options.rounds, options.calls, options.extra)
    ]
    environment = report.environment()
    rich.console.Console().print(_table(rows), environment)
    if options.json:
        text = json.dumps({"environment": environment, "rows": rows}, indent=2)
        options.json.write_text(text + "\n")
    return 0 if all(row["ok"] is not False for row in rows) else 1


def _measure(layers: int, rounds: int, calls: int, extra: bool) -> list[dict[str, Any]]:
    config = qwen3_next_tiny(layers).replace(scan_layers=False)
    params = shared.init_params(jax.random.key(0), config)
    pair, tokens = decoders.make_pair(config, params), jnp.ones((1, 1), jnp.int32)
    leaves = len(jax.tree.leaves(params))
    plain = {way.name: way for way in dispatch.plain_ways(pair, tokens)}
    ways = dispatch.linen_ways(pair, tokens) + dispatch.nnx_ways(pair, tokens)
    # Whether a function compiles the same beside itself: the noise of a ratio.
    ways.append(Way("plain", "flat list, twice", plain["flat list"].call))
    rows = [
        _row(leaves, way, name, dispatch.measure(way, base, rounds=rounds, calls=calls))
        for way in ways
        for name, base in plain.items()
    ]
    slow = dispatch.nnx_module_ways(pair, tokens) if extra else []
    few = max(rounds // 10, 1), max(calls // 5, 1)
    for way in slow:
        base = plain["flat list"]
        timing = dispatch.measure(way, base, rounds=few[0], calls=few[1])
        rows.append(_row(leaves, way, "flat list", timing))
    return rows


def _row(leaves: int, way: Way, baseline: str, timing: Timing) -> dict[str, Any]:
    claimed = CLAIMS.get((way.side, way.name)) == baseline
    return {
        "leaves": leaves,
        "side": way.side,
        "way": way.name,
        "beside": baseline,
        "microseconds": timing.microseconds._asdict(),
        "baseline_microseconds": timing.baseline._asdict(),
        "ratio": timing.ratio._asdict(),
        "ok": timing.ratio.median <= LIMIT if claimed else None,
    }


def _table(rows: list[dict[str, Any]]) -> rich.table.Table:
    table = rich.table.Table(title="Microseconds a call; ratio: median [quartiles]")
    for name in ("leaves", "side", "way", "µs", "plain over", "µs", "ratio", "limit"):
        right = name in ("leaves", "µs", "ratio")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        ratio = row["ratio"]
        table.add_row(
            str(row["leaves"]),
            row["side"],
            row["way"],
            f"{row['microseconds']['median']:.1f}",
            row["beside"],
            f"{row['baseline_microseconds']['median']:.1f}",
            f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]",
            {None: "", True: f"≤ {LIMIT}", False: f"over {LIMIT}"}[row["ok"]],
        )
    return table


def _one_core() -> None:
    """One core for everything, before JAX starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


if __name__ == "__main__":
    raise SystemExit(main())
