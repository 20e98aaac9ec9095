"""Says what memory a training step needs on accelerators, without having any.

parity memory TARGET --topology=v5p:2x2x1 [--mesh=fsdp=4] [flags]

TARGET is a preset (see `parity models`) or a folder with a checkpoint, of which only
the config is read. The step (AdamW, chunked loss, gradients of every parameter) is
compiled ahead of time by libtpu (pip install "parity-zoo[tpu]") for each --block_form
and --param_dtype; that takes minutes. Both frontends are lowered: where the two are one
program, as they should be, it is compiled once. Bytes are those of one device, by the
compiler's own account; which buffers are alive at the fullest point is read from the
compiled program, and adds up to a sum near the compiler's. The bound is arithmetic:
what no step with rematerialised layers can do without.
Exit status 0: done; 1: over --max_temp, or the frontends' programs differ; 2: bad
input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import pathlib
import resource
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

import shared
from parity import zoo
from parity.cli import UsageError, check_files, say
from parity.cli.shardings import read_mesh, read_rules
from parity.memory import live, scheduled
from parity.memory.bound import bound
from parity.memory.job import Job, compile_step, lower, make_mesh
from parity.programs.program import of_lowered
from parity.programs.topology import topology
from parity.training.settings import FRONTENDS
from shared import training
from shared.config import BLOCK_FORMS, FLOAT_DTYPES
from shared.sharding import AXIS_RULES

VERSIONS = ("jax", "jaxlib", "libtpu", "flax", "optax")
KIBIBYTE = 1024


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    texts = {
        "topology": "Of the devices: v5p:2x2x1 has 4, v5p:4x4x8 has 128.",
        "rules": "JSON file with rules for logical axes. Default: ours.",
        "remat_policy": "What layers keep for the backward pass.",
        "json": "Write the figures there.",
    }
    defaults = {"remat_policy": "full"}
    for name, text in texts.items():
        flags.DEFINE_string(name, defaults.get(name), text, flag_values=values)
    flags.DEFINE_list(
        "mesh", [], "Sizes of the mesh axes. Default: all of fsdp.", flag_values=values
    )
    flags.DEFINE_multi_enum(
        "param_dtype",
        ["float32"],
        FLOAT_DTYPES,
        "Of parameters and optimizer state; may be given several times.",
        flag_values=values,
    )
    flags.DEFINE_multi_enum(
        "block_form",
        ["nested"],
        BLOCK_FORMS,
        "How the layers of a block run; may be given several times.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "dtype", "bfloat16", FLOAT_DTYPES, "Of activations.", flag_values=values
    )
    flags.DEFINE_enum(
        "frontend", "both", ("both", *FRONTENDS), "Which.", flag_values=values
    )
    numbers = {
        "batch": (1, "Rows of the batch on each device."),
        "length": (2048, "Tokens of a row."),
        "layers": (None, "So many of the first layers only."),
        "experts": (None, "So many experts in each layer."),
        "vocab_size": (None, "Tokens that there are."),
        "expert_chunks": (1, "In how many parts a device gathers experts."),
        "loss_chunk_size": (
            training.StepOptions().loss_chunk_size,
            "Tokens of a row whose logits are held at once.",
        ),
        "buffers": (8, "So many of the largest live buffers are listed."),
    }
    for name, (default, text) in numbers.items():
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)
    flags.DEFINE_bool(
        "scan_layers", True, "Whether layers are stacked.", flag_values=values
    )
    flags.DEFINE_float(
        "max_temp",
        None,
        "GB: status 1 where temporary memory is above that.",
        lower_bound=0.0,
        flag_values=values,
    )


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Compiles, and prints the table."""
    if len(arguments) != 1:
        raise UsageError("parity memory takes one TARGET: a preset or a folder.")
    if not options["topology"]:
        raise UsageError("--topology is missing: such as --topology=v5p:2x2x1.")
    check_files(options, ["json"])
    config = read_config(arguments[0], options)
    sizes = read_mesh(options["mesh"]) if options["mesh"] else {}
    mesh = make_mesh(sizes, topology(options["topology"]))
    job = Job(
        config,
        mesh,
        batch=options["batch"] * mesh.size,
        length=options["length"],
        options=training.StepOptions(loss_chunk_size=options["loss_chunk_size"]),
    )
    rows = []
    for form, dtype in itertools.product(options["block_form"], options["param_dtype"]):
        changed = config.replace(block_form=form, param_dtype=dtype)
        variant = dataclasses.replace(job, config=changed)
        for row in measure(variant, options["frontend"], options["buffers"]):
            print_row(row, console)
            rows.append(row)
    versions = dict(_versions())
    say(console, ", ".join(f"{name} {version}" for name, version in versions.items()))
    if options["json"]:
        result = {
            "target": arguments[0],
            "topology": options["topology"],
            "mesh": dict(mesh.shape),
            "batch_per_device": options["batch"],
            "length": options["length"],
            "versions": versions,
            "steps": rows,
        }
        pathlib.Path(options["json"]).write_text(json.dumps(result, indent=2) + "\n")
    return judge(rows, options["max_temp"], console)


def read_config(target: str, options: Mapping[str, Any]) -> shared.DecoderConfig:
    """The config of the target, cut down as the flags say.

    Raises:
      UsageError: there are not so many layers, or there are no experts to change.
    """
    config, _ = zoo.resolve(target, {"scan_layers": options["scan_layers"]})
    layers = options["layers"]
    if layers is not None and layers > config.num_layers:
        raise UsageError(f"--layers={layers}: {target} has {config.num_layers} layers.")
    if options["experts"] is not None:
        if config.moe is None:
            raise UsageError(
                f"--experts={options['experts']}: {target} has no experts."
            )
        moe = dataclasses.replace(config.moe, num_experts=options["experts"])
        config = config.replace(moe=moe)
    if options["vocab_size"] is not None:
        config = config.replace(
            vocab_size=options["vocab_size"], bos_token_id=None, eos_token_id=None
        )
    rules = AXIS_RULES if options["rules"] is None else read_rules(options["rules"])
    return config.replace(
        layers=config.layers[:layers],
        axis_rules=rules,
        dtype=options["dtype"],
        remat_policy=options["remat_policy"],
        expert_chunks=options["expert_chunks"],
    )


def measure(job: Job, frontend: str, buffers: int) -> list[dict[str, Any]]:
    """What the step of each frontend needs; two that are one program are one row."""
    chosen = FRONTENDS if frontend == "both" else (frontend,)
    lowered = {name: lower(job, name) for name in chosen}
    programs: dict[str, list[str]] = {}
    for name, program in lowered.items():
        programs.setdefault(of_lowered(program).digest, []).append(name)
    least = bound(job)
    rows = []
    for digest, names in programs.items():
        found = compile_step(lowered[names[0]])
        fullest = live.peak(scheduled.read(found.text))
        rows.append(
            {
                "frontends": names,
                "block_form": job.config.block_form,
                "param_dtype": str(job.config.param_dtype),
                "bytes": found.memory._asdict(),
                "bound": {**least._asdict(), "total": least.total},
                "live": fullest.total,
                "buffers": [_described(b) for b in fullest.buffers[:buffers]],
                "digest": digest,
                "compile_seconds": round(found.seconds, 1),
                "compile_peak_bytes": _peak_of_process(),
            }
        )
    return rows


def _versions() -> Iterator[tuple[str, str]]:
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _described(buffer: live.Buffer) -> dict[str, Any]:
    return {
        "bytes": buffer.leaf.size,
        "shape": buffer.leaf.text,
        "operation": buffer.opcode,
        "from": buffer.op_name,
        "parameter": buffer.parameter,
    }


def _peak_of_process() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE


def print_row(row: Mapping[str, Any], console: rich.console.Console) -> None:
    """One step: its bytes, and what they are for."""
    gigabytes = {name: f"{size / 1e9:,.3f} GB" for name, size in row["bytes"].items()}
    least = row["bound"]
    say(
        console,
        f"{_named(row)}: arguments {gigabytes['arguments']}, temporary "
        f"{gigabytes['temporary']}, code {gigabytes['code']}; compiled in "
        f"{row['compile_seconds']:.0f} s, program {row['digest'][:12]}",
    )
    say(
        console,
        f"  bound of temporary {least['total'] / 1e9:,.3f} GB: gradients "
        f"{least['gradients'] / 1e9:,.3f}, experts of a layer "
        f"{least['matrices'] / 1e9:,.3f}, streams {least['streams'] / 1e9:,.3f}",
    )
    table = rich.table.Table(title=f"alive at {row['live'] / 1e9:,.3f} GB")
    table.add_column("MB", justify="right", no_wrap=True)
    table.add_column("array", no_wrap=True)
    table.add_column("operation, parameter")
    for buffer in row["buffers"]:
        origin = buffer["from"].split("/")[-3:]
        said = [buffer["operation"], "/".join(origin), buffer["parameter"]]
        table.add_row(
            f"{buffer['bytes'] / 1e6:,.1f}",
            buffer["shape"],
            " ".join(filter(None, said)),
        )
    console.print(table)


def _named(row: Mapping[str, Any]) -> str:
    frontends = " = ".join(row["frontends"])
    return f"{frontends}, {row['block_form']}, {row['param_dtype']} parameters"


def judge(
    rows: Sequence[Mapping[str, Any]],
    max_temp: float | None,
    console: rich.console.Console,
) -> int:
    """The exit status, with its reason printed."""
    status = 0
    variants = [(row["block_form"], row["param_dtype"]) for row in rows]
    for form, dtype in sorted({v for v in variants if variants.count(v) > 1}):
        named = f"With {form} blocks and {dtype} parameters"
        say(console, f"{named} the frontends' programs differ.")
        status = 1
    for row in rows:
        temporary = row["bytes"]["temporary"]
        if max_temp is not None and temporary > max_temp * 1e9:
            say(
                console,
                f"{_named(row)}: temporary {temporary / 1e9:.3f} GB is above "
                f"--max_temp={max_temp}.",
            )
            status = 1
    return status
