"""What the ways to save memory add to the work of a step: Qwen3-Next 80B on 128 TPUs.

python benchmarks/work.py [--json=FILE]

Operations are counted in the jaxpr, loops multiplied out, grouped products by the rows
that are routed; nothing is compiled, but libtpu has to know the devices
(pip install "parity-zoo[tpu]"). Exit status 0: the claim holds; 1: it does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from sides import Claim, compare, report

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROWS, LENGTH = 128, 2048
MOST = 1.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers there")
    return report(_growth(), parser.parse_args().json)


def _growth() -> Iterator[Claim]:
    """Spans of the delta rule, and experts in parts, beside neither."""
    plain = _operations(span_size=LENGTH, expert_chunks=1)
    for span_size, chunks in ((512, 1), (512, 4)):
        name = f"spans of {span_size} tokens, experts in {chunks}, beside neither; FLOP"
        count = _operations(span_size=span_size, expert_chunks=chunks)
        yield compare(name, count, plain, at_most=MOST)


def _operations(span_size: int, expert_chunks: int) -> float:
    """Of a whole step, with the forms of kernels whose operations can be counted."""
    import shared
    from parity.memory.job import Job, make_mesh, trace
    from parity.programs import cost
    from parity.programs.topology import topology
    from shared import sharding

    config = shared.preset("qwen3-next-80b-a3b")
    config = config.replace(
        delta_net=dataclasses.replace(config.delta_net, span_size=span_size),
        expert_chunks=expert_chunks,
        axis_rules=sharding.AXIS_RULES,
        remat_policy="full",
        dtype="bfloat16",
        attention_kernel="reference",
        expert_kernel="ragged_dot",
    )
    job = Job(config, make_mesh({}, topology("v5p:4x4x8")), ROWS, LENGTH)
    jaxpr = trace(job, "linen").jaxpr
    grouped = _grouped(jaxpr)
    # A part of the experts is given as many rows as all have; it multiplies its own.
    return cost.count_jaxpr(jaxpr).flops - grouped + grouped / expert_chunks


def _grouped(jaxpr: Any) -> float:
    """Operations of the grouped products."""
    from parity.programs import cost

    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name.startswith("ragged_dot"):
            total += cost.count_equation(equation).flops
            continue
        times = params["length"] if name == "scan" else 1
        times *= params["mesh"].size if name == "shard_map" else 1
        total += times * sum(_grouped(inner) for inner in cost.inner_jaxprs(params))
    return total


if __name__ == "__main__":
    raise SystemExit(main())
