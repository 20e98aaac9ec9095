"""Converts a checkpoint of a model of the zoo from any format into another.

parity convert SOURCE DESTINATION [--to=FORMAT] [flags]

The source is found out: a Hugging Face folder, a checkpoint of ours (it has a
manifest), a tree of MaxText or of the zoo without a manifest (orbax, npz, safetensors,
msgpack; then --config says which model it is of). The destination is one of
  zoo      orbax's tree with a manifest, which both frontends and stock orbax read
  hf       config.json and safetensors
  maxtext  orbax's tree in MaxText's layout
  vllm     safetensors with the names and fused weights of vLLM's layers
Names, shapes and dtypes are checked before anything is written, a few MiB are in memory
at a time, and what was written is read back. Optimizer state comes along where the
destination has a place for it. A run that was killed goes on when it is started again.
Exit status 0: written; 2: bad input.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import rich.console
from absl import flags

from parity.cli import UsageError, check_files, define_step, say
from parity.cli.progress import progress
from parity.zoo import resolve
from shared.checkpoint.convert import (
    TARGETS,
    Plan,
    Target,
    check_destination,
    convert,
    plan_conversion,
)
from shared.checkpoint.maxtext import MaxTextLayout
from shared.checkpoint.sharded import Processes, jax_processes
from shared.checkpoint.source import FORMATS, Source, describe, open_source

_LAYOUT = ("scan_layers", "scan_period", "param_scan_axis", "vocab_padding")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    define_step(values)

    def choice(name: str, choices: Sequence[str], text: str) -> None:
        flags.DEFINE_enum(name, None, list(choices), text, flag_values=values)

    def number(name: str, text: str, least: int = 0) -> None:
        flags.DEFINE_integer(name, None, text, lower_bound=least, flag_values=values)

    def switch(name: str, text: str) -> None:
        flags.DEFINE_bool(name, None, text, flag_values=values)

    choice(
        "to",
        TARGETS,
        "Format of the destination. Default: zoo; of a checkpoint of ours, hf.",
    )
    choice("from", FORMATS, "Format of the source, where it is not found out.")
    flags.DEFINE_string(
        "config",
        None,
        "A preset, or a folder with config.json, for a source that does not say it.",
        flag_values=values,
    )
    switch("scan_layers", "zoo: layers stacked, or one by one. Default: as before.")
    number("scan_period", "zoo: layers in a period. Default: found.", 1)
    number("param_scan_axis", "zoo, maxtext: where the stack axes stand: 0 or 1.")
    number("vocab_padding", "zoo, maxtext: rows of zeros behind the vocabulary.")
    switch("from_scan_layers", "Of a source whose shapes do not tell.")
    number("from_scan_period", "Of a source whose shapes do not tell.", 1)
    number("from_param_scan_axis", "Of a source whose shapes do not tell.")
    number("from_vocab_padding", "Of a source without a manifest.")
    choice(
        "maxtext_layout",
        ("scanned", "unscanned", "flat"),
        "maxtext: today's layout, layers one by one, or its older layout with a block "
        "for each layer of a period. Default: scanned.",
    )
    choice(
        "experts",
        ("fused", "separate"),
        "hf: all experts of a layer in one tensor, or a tensor for each. Default: as "
        "the first source had them.",
    )
    choice(
        "spelling",
        ("published", "transformers"),
        "hf: of config.json. Default: as the first source had it.",
    )
    number("shard_bytes", "hf, vllm: data in one file. Default: 5 GB.", 1)
    choice(
        "cast",
        ("float32", "bfloat16", "float16"),
        "Cast parameters, but for those that stay at least float32. Default: nothing.",
    )
    flags.DEFINE_bool(
        "carry",
        False,
        "zoo, hf: keep tensors that are no part of the decoder (mtp, vision).",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "dry_run",
        False,
        "Check, say what would be written, and write nothing.",
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "Write what was done there.", flag_values=values)
    flags.DEFINE_string(
        "coordinator",
        None,
        "Address of the first of several processes that convert together "
        "(jax.distributed); each gets --processes and its own --process.",
        flag_values=values,
    )
    number("processes", "How many convert together.", 2)
    number("process", "Which of them this is, from 0.")


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Converts one checkpoint."""
    if len(arguments) != 2:
        raise UsageError(f"Give a source and a destination. Got {len(arguments)}.")
    check_files(options, ["json"])
    processes = _join(options)
    source = _open(arguments[0], options)
    target = _target(source, options)
    plan = plan_conversion(source, target)
    say(console, f"source: {describe(source)}: {source.path}")
    for note in plan.notes:
        say(console, note)
    what = f"{len(plan.leaves):,} leaves, {plan.nbytes:,} bytes"
    if options["dry_run"]:
        check_destination(plan, arguments[1])
        say(console, f"would write {target.format}: {what}: {arguments[1]}")
        digests: Mapping[str, str] = {}
    else:
        with progress(2 * plan.nbytes, "written and read back") as advance:
            digests = convert(plan, arguments[1], advance, processes)
        say(console, f"wrote {target.format}: {what}: {arguments[1]}")
    if options["json"] and not options["process"]:
        data = _as_dict(plan, digests)
        pathlib.Path(options["json"]).write_text(json.dumps(data, indent=2) + "\n")
    return 0


def _join(options: Mapping[str, Any]) -> Processes | None:
    """Joins the other processes, if there are any."""
    given = [options[name] for name in ("coordinator", "processes", "process")]
    if given == [None, None, None]:
        return None
    if None in given:
        raise UsageError("Give --coordinator, --processes and --process together.")
    if options["process"] >= options["processes"]:
        raise UsageError(
            f"--process={options['process']} is none of 0 to "
            f"{options['processes'] - 1}: --processes={options['processes']}."
        )
    jax.distributed.initialize(
        options["coordinator"], options["processes"], options["process"]
    )
    return jax_processes()


def _open(path: str, options: Mapping[str, Any]) -> Source:
    config = None
    if options["config"] is not None:
        config, _ = resolve(options["config"], {})
    layout = {name: options[f"from_{name}"] for name in _LAYOUT[:3]}
    return open_source(
        path,
        format=options["from"],
        config=config,
        step=options["step"],
        vocab_padding=options["from_vocab_padding"],
        **layout,
    )


def _target(source: Source, options: Mapping[str, Any]) -> Target:
    default = "hf" if source.format == "zoo" and source.manifest else "zoo"
    name = options["to"] or default
    _check_meant(name, options)
    layout = {name: options[name] for name in _LAYOUT if options[name] is not None}
    axis = options["param_scan_axis"]
    experts, spelling = options["experts"], options["spelling"]
    return Target(
        format=name,
        layout=layout,
        maxtext=MaxTextLayout(
            options["maxtext_layout"] or "scanned", 1 if axis is None else axis
        ),
        fused_experts=None if experts is None else experts == "fused",
        hub_style=None if spelling is None else spelling == "published",
        max_shard_bytes=options["shard_bytes"] or Target.max_shard_bytes,
        param_dtype=options["cast"],
        carry=options["carry"],
    )


_MEANT_FOR = {
    "scan_layers": ("zoo",),
    "scan_period": ("zoo",),
    "param_scan_axis": ("zoo", "maxtext"),
    "vocab_padding": ("zoo", "maxtext"),
    "maxtext_layout": ("maxtext",),
    "experts": ("hf",),
    "spelling": ("hf",),
    "shard_bytes": ("hf", "vllm"),
    "carry": ("hf", "zoo"),
}


def _check_meant(target: str, options: Mapping[str, Any]) -> None:
    for flag, targets in _MEANT_FOR.items():
        given = options[flag] is not None and (flag != "carry" or options[flag])
        if given and target not in targets:
            raise UsageError(
                f"--{flag} is for --to={' or '.join(targets)}. Got --to={target}."
            )
    unscanned = options["maxtext_layout"] == "unscanned"
    if unscanned and options["param_scan_axis"] is not None:
        raise UsageError("--maxtext_layout=unscanned has no --param_scan_axis.")


def _as_dict(plan: Plan, digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "source": plan.source.path,
        "from": plan.source.format,
        "to": plan.target.format,
        "notes": [*plan.source.notes, *plan.notes],
        "bytes": plan.nbytes,
        "leaves": [
            {
                "path": text,
                "dtype": leaf.type_name,
                "shape": leaf.shape,
                "sha256": digests.get(text),
            }
            for path, leaf in plan.leaves.items()
            for text in ["/".join(map(str, path))]
        ],
    }
