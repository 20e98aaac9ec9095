"""Memory and speed of conversion, on a checkpoint with a stacked leaf of 2 GB.

python benchmarks/convert.py [--folder=FOLDER] [--rounds=3] [--scale=1.0] [--json=FILE]

Writes some 35 GB into a new folder below FOLDER (default: the temporary one) and
removes them. Exit status 0: every claim holds; 1: one does not. README.md beside this
file tells what is measured and holds the numbers seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).parent
CONFIG = HERE / "configs" / "qwen3_next_7gb.json"
AT_LEAST = 0.6  # of the throughput of a plain loop
BLOCK = 32 * 2**20
CHUNK = 32 * 2**20  # of output in memory


class Direction(NamedTuple):
    """One conversion: flags, the folder it reads, and the one it writes."""

    name: str
    source: str
    target: str
    flags: tuple[str, ...] = ()
    devices: int = 1


DIRECTIONS = (
    Direction("Hugging Face, an expert a tensor, to zoo", "hf", "zoo"),
    Direction("zoo to Hugging Face", "zoo", "hf_again", ("--to=hf",)),
    Direction(
        "zoo to Hugging Face, experts fused",
        "zoo",
        "fused",
        ("--to=hf", "--experts=fused"),
    ),
    Direction("Hugging Face, experts fused, to zoo", "fused", "zoo_fused"),
    Direction(
        "zoo to zoo, param_scan_axis=1",
        "zoo",
        "zoo_1",
        ("--to=zoo", "--param_scan_axis=1"),
    ),
    Direction("zoo to MaxText", "zoo", "maxtext", ("--to=maxtext",)),
    Direction("the first, under 8 devices", "hf", "zoo_8", devices=8),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the expert width")
    parser.add_argument("--json")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _convert_here(options.child)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = _measure(pathlib.Path(folder), options)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


def _measure(folder: pathlib.Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    largest = _write_synthetic(folder / "hf", options.scale)
    limit = 3 * largest + CHUNK
    print(f"bound above the baseline: {limit / 2**20:,.0f} MiB")
    rows = []
    for direction in DIRECTIONS:
        rounds = [_round(folder, direction) for _ in range(options.rounds)]
        if direction.target not in {other.source for other in DIRECTIONS}:
            shutil.rmtree(folder / direction.target)
        speed = statistics.median(one["plain"] / one["seconds"] for one in rounds)
        memory = max(one["peak"] - one["baseline"] for one in rounds)
        row = {
            "name": direction.name,
            "speed": speed,
            "gigabytes_per_second": rounds[0]["bytes"] / 1e9 / rounds[0]["seconds"],
            "memory": memory,
            "baseline": rounds[0]["baseline"],
            "ok": memory <= limit and speed >= AT_LEAST,
        }
        rows.append(row)
        print(
            f"{direction.name}: {speed:.2f} x a plain loop "
            f"({row['gigabytes_per_second']:.2f} GB/s), "
            f"{memory / 2**20:,.0f} MiB above {row['baseline'] / 2**20:,.0f}: "
            f"{'ok' if row['ok'] else 'MISSED'}",
            flush=True,
        )
    return rows


def _round(folder: pathlib.Path, direction: Direction) -> dict[str, float]:
    """One conversion and, beside it, a plain loop over the same bytes."""
    source, target = folder / direction.source, folder / direction.target
    shutil.rmtree(target, ignore_errors=True)
    size, plain = _plain_loop(source, folder / "plain")
    command = [sys.executable, __file__, "--child", str(source), str(target)]
    environment = dict(os.environ)
    if direction.devices > 1:
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={direction.devices}"
        )
    done = subprocess.run(
        [*command, *(flag.replace("--", "", 1) for flag in direction.flags)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    return {"bytes": size, "plain": plain, **result}


def _plain_loop(source: pathlib.Path, target: pathlib.Path) -> tuple[int, float]:
    """Reads, digests, writes and syncs a folder's bytes; their number and seconds."""
    target.mkdir()
    start, size = time.perf_counter(), 0
    for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        found = hashlib.sha256()
        with path.open("rb") as reader, (target / str(number)).open("wb") as writer:
            while block := reader.read(BLOCK):
                found.update(block)
                writer.write(block)
                size += len(block)
            writer.flush()
            os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return size, seconds


def _convert_here(arguments: list[str]) -> int:
    """Converts in this process; prints seconds, and resident memory before and most."""
    import jax

    import parity.__main__

    jax.devices()
    baseline = _status("VmRSS")
    source, target, *flags = arguments
    start = time.perf_counter()
    argv = ["convert", source, target, *(f"--{flag}" for flag in flags)]
    status = parity.__main__.main(argv)
    result = {
        "seconds": time.perf_counter() - start,
        "baseline": baseline,
        "peak": _status("VmHWM"),
    }
    print(json.dumps(result))
    return status


def _status(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    [line] = [line for line in text.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def _write_synthetic(folder: pathlib.Path, scale: float) -> int:
    """Writes the checkpoint; returns the bytes of a layer's largest tensor in the zoo.

    It is that of all experts' gates; fused with `up` it would be twice that.
    """
    import ml_dtypes
    import numpy as np

    from shared.checkpoint import hf_config, hf_names
    from shared.stores.safetensors_writer import write_folder
    from shared.stores.store import Leaf, constant
    from shared.stores.views import part_of, reshaped

    data = json.loads(CONFIG.read_text())
    data["moe_intermediate_size"] = int(data["moe_intermediate_size"] * scale)
    config = hf_config.from_hf(data)
    noise = np.random.default_rng(0).integers(0, 2**16, 40_000_000, dtype=np.uint16)
    values = constant(noise.view(ml_dtypes.bfloat16))

    def leaf(number: int, shape: tuple[int, ...]) -> Leaf:
        size = int(np.prod(shape))
        start = number * 977 % (values.size - size)
        return reshaped(part_of(values, (slice(start, start + size),)), shape)

    tensors = hf_names.tensors(config, lambda name: False)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    write_folder(
        folder,
        {t.name: leaf(i, t.shape) for i, t in enumerate(tensors)},
        max_shard_bytes=2_000_000_000,
    )
    moe = config.moe
    assert moe is not None
    return 2 * moe.num_experts * moe.expert_size * config.hidden_size


if __name__ == "__main__":
    sys.exit(main())
