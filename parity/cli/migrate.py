"""Takes a checkpoint of anyone's from Linen to NNX or back, every leaf accounted for.

parity migrate SRC DST --to=nnx|linen [flags]

SRC is what `parity diff` compares: an orbax folder (a tree, a checkpoint, a manager's
folder with its steps), a Flax msgpack, an npz or safetensors. It may hold a train
state, variables, parameters, an `nnx.State` or a pure dict. Without --write the plan is
printed and nothing is written. With it, DST is written leaf by leaf as an orbax folder
with a manifest, read back, compared, and only then gets its name; a run that was killed
is gone on with by the next one. SRC is never touched.
A module (--nnx, or --linen and --inputs) is only traced. With the target's module all
leaves must be there, of its shapes and dtypes; without, names are those of --rules,
else the same.
Exit status 0: it can be, or was, written, and --check proved it; 1: it cannot, or the
check failed; 2: bad input.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from absl import flags

from parity.cli import UsageError, check_files, define_step, factories, say
from parity.cli.progress import progress
from parity.mapping.leaves import natural
from parity.mapping.rules import Rules
from parity.migration.plans import CHOICES, Plan, plan
from parity.migration.proving import prove
from parity.reporting.report import Report
from parity.trees import Difference
from shared.stores import path_text

_SHOWN = 50


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    text = lambda name, help: flags.DEFINE_string(name, None, help, flag_values=values)
    choice = lambda name, default, help: flags.DEFINE_enum(
        name, default, CHOICES[name], help, flag_values=values
    )
    choice("to", None, "Whose tree to write.")
    text("nnx", "The NNX module, pkg.mod:name.")
    text("linen", "The Linen module, pkg.mod:name.")
    text("inputs", "Inputs of the call that initialises it, pkg.mod:name.")
    text(
        "calls",
        "parity.Call or a list of them, pkg.mod:name, where that call needs it.",
    )
    text("rules", "Rule file (TOML) where names say too little; see `parity suggest`.")
    define_step(values)
    text(
        "params",
        "Path of the parameters in SRC, such as state/params; / is all of it. Default: "
        "found out and printed.",
    )
    flags.DEFINE_list(
        "collections",
        [],
        "Further collections that stand beside params in SRC.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "boxes",
        None,
        "Whether a last level `value` in SRC is a box, not a parameter's name. "
        "Default: found out and printed.",
        flag_values=values,
    )
    choice(
        "form",
        "state",
        "Of an NNX tree: as nnx.State is saved (a level `value`), or a pure dict.",
    )
    choice(
        "optimizer",
        "optax",
        "How an NNX tree keeps optimizer state: as optax does, with empty states, or "
        "as nnx.Optimizer does, without.",
    )
    flags.DEFINE_bool(
        "cast",
        False,
        "Whether to round floats to the dtypes of the target's module.",
        flag_values=values,
    )
    flags.DEFINE_bool("write", False, "Write DST.", flag_values=values)
    text(
        "check",
        "Also prove that the result is the model: pkg.mod:name of a function that "
        "gives (linen, nnx, inputs), as `parity check` takes them.",
    )
    flags.DEFINE_bool("list", False, "Print where each leaf goes.", flag_values=values)
    text("json", "Write the plan and the result there.")


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Plans a migration, writes and proves it, as asked."""
    if len(arguments) != 2:
        raise UsageError(f"Give SRC and DST. Got {len(arguments)} arguments.")
    if options["to"] is None:
        raise UsageError("Give --to=nnx or --to=linen: whose tree DST is to be.")
    check_files(options, ["json"])
    source, target = arguments
    planned = _plan(source, options)
    planned.check_target(target)
    _print(console, planned, options["list"])
    result: dict[str, Any] = _as_dict(planned)
    report = None
    if planned.ok and options["write"]:
        manifest = _write(planned, target)
        result["written"] = target
        say(console, f"written: {len(manifest.leaves):,} leaves, read back: {target}")
    if planned.ok and options["check"]:
        report = _prove(planned, target if options["write"] else None, options)
        report.print(console)
        console.print(report.verdict, style="bold")
        result["check"] = json.loads(report.to_json())
    ok = planned.ok and (report is None or report.ok)
    result["ok"] = ok
    if options["json"]:
        text = json.dumps(result, indent=2) + "\n"
        pathlib.Path(options["json"]).write_text(text, encoding="utf-8")
    if not planned.ok:
        if any(d.what in ("missing", "ambiguous") for d in planned.differences):
            say(console, _suggest(options))
        say(console, f"NOT POSSIBLE: {len(planned.differences):,} differences, above")
    elif options["write"] and not ok:
        say(console, f"the check failed; {target} was written and stays")
    elif not options["write"]:
        say(console, "nothing was written: --write writes it")
    return 0 if ok else 1


def _plan(source: str, options: Mapping[str, Any]) -> Plan:
    if options["inputs"] is not None and options["linen"] is None:
        raise UsageError("--inputs is for --linen: give both.")
    sys.path.insert(0, os.getcwd())
    made = {
        name: None if options[name] is None else factories.make(name, options[name])
        for name in ("linen", "inputs", "calls")
    }
    if made["linen"] is not None and made["inputs"] is None:
        if not isinstance(made["linen"], tuple):
            raise UsageError(
                f"--linen={options['linen']} needs --inputs=pkg.mod:name, what the "
                "module is called with: an array, a jax.ShapeDtypeStruct, or a tuple "
                "of these; or let --linen be a function that gives (module, variables)."
            )
    nnx = None if options["nnx"] is None else factories.load("nnx", options["nnx"])
    planned = plan(
        source,
        to=options["to"],
        step=options["step"],
        nnx=nnx,
        linen=made["linen"],
        inputs=made["inputs"],
        call=made["calls"],
        rules=options["rules"],
        params=options["params"],
        collection_names=options["collections"],
        form=options["form"],
        optimizer=options["optimizer"],
        boxes=options["boxes"],
        cast=options["cast"],
    )
    if options["step"] is not None and planned.source.store.step is None:
        raise UsageError(f"--step={options['step']}: {source} has no steps.")
    return planned


def _print(console: rich.console.Console, planned: Plan, every: bool) -> None:
    for line in planned.describe():
        say(console, line)
    moves = planned.moves if every else planned.layout_changes[:_SHOWN]
    for move in moves:
        say(console, f"  {move}")
    if not every and len(planned.layout_changes) > _SHOWN:
        more = len(planned.layout_changes) - _SHOWN
        say(console, f"  and {more:,} more changes of layout: --list prints them")
    families = _families(planned.differences)
    for *others, last in families[:_SHOWN]:
        so = f"; and so {len(others):,} more, from {others[0].path}" if others else ""
        say(console, f"{last}{so}")
    if len(families) > _SHOWN:
        rest = sum(map(len, families[_SHOWN:]))
        say(console, f"and {rest:,} more differences: --json has all")


def _families(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Differences that are the same but for numbers stand together."""
    found: dict[str, list[Difference]] = {}
    for difference in differences:
        key = re.sub(r"\d+", "#", str(difference))
        found.setdefault(key, []).append(difference)
    by_number = lambda difference: natural(difference.path)
    return [sorted(family, key=by_number) for family in found.values()]


def _suggest(options: Mapping[str, Any]) -> str:
    given = [f"--{name}={options[name] or 'pkg.mod:name'}" for name in factories.PAIR]
    return f"`parity suggest {' '.join(given)}` drafts a rule file"


def _write(planned: Plan, target: str) -> Any:
    source = planned.source.store
    total = 2 * planned.nbytes
    if planned.has_manifest:
        total += sum(leaf.nbytes for leaf in source.leaves.values())
    with progress(total, "migrate") as advance:
        return planned.write(target, advance)


def _prove(planned: Plan, target: str | None, options: Mapping[str, Any]) -> Report:
    made = factories.make("check", options["check"])
    if not isinstance(made, tuple) or len(made) != 3:
        raise UsageError(
            f"--check={options['check']} must give (linen, nnx, inputs). Got "
            f"{type(made).__name__}."
        )
    call = options["calls"] and factories.make("calls", options["calls"])
    return prove(
        planned, *made, target=target, rules=Rules.of(options["rules"]), call=call
    )


def _as_dict(planned: Plan) -> dict[str, Any]:
    return {
        "source": planned.source.store.path,
        "format": planned.source.store.format,
        "step": planned.source.store.step,
        "to": planned.options.to,
        "ok": planned.ok,
        "written": None,
        "bytes": planned.nbytes,
        "params": path_text(planned.source.params),
        "describe": list(planned.describe()),
        "moves": [
            {
                "sources": [path_text(path) for path in move.sources],
                "targets": [path_text(path) for path in move.targets],
                "steps": [str(step) for step in move.steps],
                "why": move.why,
                "cast": move.cast,
            }
            for move in planned.moves
        ],
        "leaves": {
            path_text(path): {"dtype": leaf.type_name, "shape": list(leaf.shape)}
            for path, leaf in planned.leaves.items()
        },
        "followers": [path_text(x.prefix) for x in planned.followers],
        "carried": [path_text(path) for path in planned.carried],
        "ignored": [path_text(path) for path in planned.ignored],
        "differences": [
            {"path": d.path, "what": d.what, "detail": d.detail}
            for d in planned.differences
        ],
    }
