"""Memory of a training step on TPUs that are not there, beside MaxText.

python benchmarks/memory.py [--maxtext-python=PYTHON] [--cases=small,80b]
  [--dtypes=float32,bfloat16] [--json=FILE]

Needs libtpu (pip install "parity-zoo[tpu]"). A compilation takes 10 to 30 minutes of a
core. Exit status 0: every claim holds; 1: one does not. RESULTS.md beside this file
holds the bytes seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from sides import Claim, compare, report

AHEAD_OF_TIME = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Case(NamedTuple):
    """One model on one slice.

    Attributes:
      ours: arguments of `parity memory`.
      theirs: of MaxText's `train_compile`.
      most: GB of temporary memory claimed, by dtype of the weights.
    """

    ours: list[str]
    theirs: dict[str, Any]
    most: dict[str, float]


CASES = {
    "small": Case(
        [
            *("qwen3-next-80b-a3b", "--topology=v5p:2x2x1", "--layers=12"),
            *("--experts=32", "--vocab_size=8192", "--batch=2", "--length=4096"),
        ],
        {
            "model_name": "qwen3-next-80b-a3b",
            "override_model_config": True,
            "compile_topology": "v5p-8",
            "base_num_decoder_layers": 12,
            "num_experts": 32,
            "vocab_size": 8192,
            "per_device_batch_size": 2,
            "max_target_length": 4096,
        },
        {"float32": 7.0, "bfloat16": 7.0},
    ),
    "80b": Case(
        [
            *("qwen3-next-80b-a3b", "--topology=v5p:4x4x8", "--batch=1"),
            *("--length=2048", "--expert_chunks=4"),
        ],
        {
            "model_name": "qwen3-next-80b-a3b",
            "compile_topology": "v5p-256",
            "per_device_batch_size": 1,
            "max_target_length": 2048,
        },
        {"float32": 9.3, "bfloat16": 8.0},
    ),
}
# Of the published table.
THEIR_FLAGS = {
    "compile_topology_num_slices": 1,
    "run_name": "memory",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "steps": 3,
    "dtype": "bfloat16",
    "attention": "flash",
    "remat_policy": "full",
    "sparse_matmul": True,
    "megablox": False,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--maxtext-python", help="a Python with MaxText")
    parser.add_argument("--cases", default="small", help=", ".join(CASES))
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the weights")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers there")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if set(cases) - set(CASES):
        parser.error(f"--cases takes {', '.join(CASES)}. Got {options.cases}.")
    claims = (
        claim
        for case in cases
        for dtype in options.dtypes.split(",")
        for claim in _measured(case, dtype, options.maxtext_python)
    )
    return report(claims, options.json)


def _measured(name: str, dtype: str, python: str | None) -> Iterator[Claim]:
    case = CASES[name]
    our = _ours(case, dtype)
    label = f"{name}, {dtype} weights: temporary beside the aim; bytes"
    yield compare(label, our["temporary"], case.most[dtype] * 1e9, at_most=1)
    if python is None:
        return
    their = _theirs(case, dtype, python)
    limits = {
        "arguments": {"at_least": 0.99, "at_most": 1.01},
        "temporary": {"at_most": 1.0},
    }
    for kind, limit in limits.items():
        label = f"{name}, {dtype} weights: {kind} beside MaxText; bytes"
        yield compare(label, our[kind], their[kind], **limit)


def _ours(case: Case, dtype: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "memory.json"
        flags = [*case.ours, f"--param_dtype={dtype}", f"--json={file}"]
        command = [sys.executable, "-m", "parity", "memory", *flags]
        subprocess.run(command, env={**os.environ, **AHEAD_OF_TIME}, check=True)
        rows = json.loads(file.read_text())["steps"]
    return max((row["bytes"] for row in rows), key=lambda found: found["temporary"])


def _theirs(case: Case, dtype: str, python: str) -> dict[str, int]:
    """From what MaxText's own ahead-of-time compilation prints."""
    code = "import maxtext; print(maxtext.__path__[0])"
    found = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    )
    base = pathlib.Path(found.stdout.split()[-1]) / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        given = THEIR_FLAGS | case.theirs | {"weight_dtype": dtype}
        given["base_output_directory"] = folder
        flags = [f"{name}={value}" for name, value in given.items()]
        module = "maxtext.trainers.pre_train.train_compile"
        run = subprocess.run(
            [python, "-m", module, str(base), *flags],
            env={**os.environ, **AHEAD_OF_TIME},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    seen = {
        kind: re.search(rf"{kind}_size_in_bytes=(\d+)", run.stdout)
        for kind in ("argument", "temp")
    }
    if run.returncode or not all(seen.values()):
        raise RuntimeError(f"MaxText gave no figures:\n{run.stdout[-3000:]}")
    argument, temp = (int(match.group(1)) for match in seen.values())
    return {"arguments": argument, "temporary": temp}


if __name__ == "__main__":
    if importlib.util.find_spec("libtpu") is None:
        sys.exit('This needs libtpu: pip install "parity-zoo[tpu]".')
    raise SystemExit(main())
