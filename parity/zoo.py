"""The check of the zoo itself: a preset or a checkpoint folder, tier by tier."""

from __future__ import annotations

import logging
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import shared
from parity import decoders, decoding, oracle
from parity.decoders import Pair
from parity.reporting.report import Report, Tier
from shared.checkpoint.native import PARAMS
from shared.checkpoint.scheme import check_tensors, zoo_scheme
from shared.checkpoint.source import open_source
from shared.stores import path_text
from shared.stores.orbax import is_orbax
from shared.trees import flatten

_progress = logging.getLogger("parity.tiers")
TIERS = ("tree", "init", "program", "bits", "decode", "oracle")
WEIGHTLESS = {"tree", "program"}
MOST_BYTES = 4 * 2**30  # of parameters, for the tiers that hold both models


class TargetError(ValueError):
    """A target, or a request, that cannot be checked; the message says why."""


def check_target(
    target: str,
    tiers: Sequence[str] | None = None,
    *,
    expect: str | None = None,
    seed: int = 0,
    scan_layers: bool = True,
    scan_period: int | None = None,
    examples: int = 2,
    draw: int | None = None,
    platforms: Sequence[str | None] = (None,),
) -> Report:
    """Checks a preset or a checkpoint folder.

    Args:
      target: name of a preset, or a folder with a Hugging Face checkpoint or one of
        ours.
      tiers: of `TIERS`; None: all, with the oracle if `expect` is given.
      expect: golden file for the oracle.
      seed: of first values and inputs.
      scan_layers: whether layers are stacked and scanned.
      scan_period: layers in a period; None finds it.
      examples: inputs for the bits tier.
      draw: so many inputs are drawn by Hypothesis instead, which looks for the
        smallest that differs.
      platforms: for which the program tier lowers; None: this machine's.

    Raises:
      ValueError: the target, the tiers or the golden file are no good.
    """
    chosen = _choose_tiers(tiers, expect)
    golden = None if expect is None else oracle.read_golden(expect)
    layout: dict[str, Any] = {"scan_layers": scan_layers, "scan_period": scan_period}
    config, folder = resolve(target, layout)
    if set(chosen) - WEIGHTLESS:
        _check_size(target, config)
    of_pair = [tier for tier in chosen if tier in ("bits", "decode", "oracle")]
    params: Mapping[str, Any] | None = None
    # First: what is wrong with a checkpoint is said before anything compiles.
    if folder is not None and of_pair:
        _progress.info("reading %s", folder)
        config, params = load(folder, **layout)
    elif folder is not None:
        check_names(folder)

    results: list[Tier] = []
    pair = decoders.abstract_pair(config)
    if "tree" in chosen:
        _progress.info("tier tree")
        results.append(decoders.check_tree(pair))
    if "init" in chosen:
        _progress.info("tier init: first values from both")
        tier, values = decoders.check_init_of(config, seed)
        results.append(tier)
        params = values if params is None else params
        del values
    # A tree that does not fit the other frontend cannot be run in both.
    if not all(decoders.fits(tier.compared) for tier in results):
        return Report(target, tuple(results))
    if of_pair:
        if params is None:
            params = decoders.first_values(config, seed)
        pair = decoders.make_pair(config, params)
    sides = decoders.make_sides(pair)
    if "program" in chosen:
        _progress.info("tier program: tracing and lowering")
        results.append(decoders.check_program(pair, platforms, sides))
    if of_pair:
        results += check_pair(
            pair,
            of_pair,
            examples=_inputs(target, config, seed, examples, draw),
            golden=golden,
            golden_name=expect or "",
            seed=seed,
            sides=sides,
        ).tiers
    return Report(target, tuple(results))


def check_pair(
    pair: Pair,
    tiers: Sequence[str] = ("tree", "bits"),
    *,
    examples: Iterable[decoders.Example] | decoders.Drawn | None = None,
    golden: Mapping[str, np.ndarray] | None = None,
    golden_name: str = "golden",
    seed: int = 0,
    sides: decoders.Sides | None = None,
) -> Report:
    """Checks two decoders that exist already.

    Args:
      pair: the two, over arrays that should be the same.
      tiers: of "tree", "program", "bits", "decode" and "oracle".
      examples: inputs for the bits tier; None draws some.
      golden: the reference's numbers, for the oracle tier.
      golden_name: what to call them.
      seed: of the prompts for the decode tier, and of examples that are not given.
      sides: of the pair, if they are there already.
    """
    results: list[Tier] = []
    compiled = "bits" in tiers
    sides = sides or decoders.make_sides(pair)
    if "tree" in tiers:
        results.append(decoders.check_tree(pair))
    if "program" in tiers:
        results.append(decoders.check_program(pair, sides=sides))
    if "bits" in tiers:
        _progress.info("tier bits: compiling and running both")
        if examples is None:
            examples = decoders.draw_examples(pair.config, seed)
        if not isinstance(examples, decoders.Drawn):
            examples = list(examples)
            compiled = examples[-1].tokens.shape == (decoders.ROWS, decoders.LENGTH)
        results.append(decoders.check_bits(pair, examples, sides))
    if "decode" in tiers:
        _progress.info("tier decode: compiling and running both")
        # Where the bits tier has compiled a function for this shape, it serves again.
        plain = sides[0].run if compiled else None
        results.append(decoding.check_decode(pair, seed, sides, plain))
    if "oracle" in tiers:
        _progress.info("tier oracle: compiling and running")
        assert golden is not None
        apply = sides[0].apply
        results.append(
            oracle.check_oracle(pair.config, pair.params, apply, golden, golden_name)
        )
    return Report("pair", tuple(results))


def _inputs(
    target: str, config: shared.DecoderConfig, seed: int, count: int, draw: int | None
) -> Iterable[decoders.Example] | decoders.Drawn:
    if draw is None:
        return decoders.draw_examples(config, seed, count)
    command = ["parity", "check", target, f"--draw={draw}", f"--seed={seed}"]
    return decoders.Drawn(seed, draw, f"again: {shlex.join(command)}")


def parameter_bytes(config: shared.DecoderConfig) -> int:
    """Bytes of all parameters of a model."""
    leaves = (leaf for _, leaf in flatten(shared.abstract_params(config)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _choose_tiers(tiers: Sequence[str] | None, expect: str | None) -> tuple[str, ...]:
    if tiers is None:
        return TIERS if expect is not None else TIERS[:-1]
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers:
        raise TargetError(
            f"tiers must be some of {', '.join(TIERS)}. "
            f"Got {', '.join(tiers) or 'none'}."
        )
    if "oracle" in tiers and expect is None:
        raise TargetError(
            "The oracle tier needs the reference's numbers: give --expect=golden.npz "
            "(`parity golden FOLDER OUT.npz` writes it)."
        )
    if expect is not None and "oracle" not in tiers:
        raise TargetError(
            f"--expect={expect} is for the oracle tier, but the tiers asked for are "
            f"{', '.join(tiers)}: add oracle, or leave --expect out."
        )
    return tuple(tier for tier in TIERS if tier in tiers)


def resolve(
    target: str, layout: Mapping[str, Any]
) -> tuple[shared.DecoderConfig, pathlib.Path | None]:
    """The config of a preset or a checkpoint folder, and the folder if it is one.

    Args:
      target: name or folder.
      layout: fields of the config to set.

    Raises:
      TargetError: it is neither.
    """
    if target in shared.presets():
        return shared.preset(target).replace(**layout), None
    folder = pathlib.Path(target)
    if not folder.is_dir():
        raise TargetError(
            f"{target!r} is neither a preset ({', '.join(shared.presets())}) nor a "
            "folder."
        )
    if _is_hugging_face(folder):
        config = shared.DecoderConfig.from_hf(folder)
    else:
        config = shared.checkpoint.open_checkpoint(folder)[1].decoder_config()
    return config.replace(**layout), folder


def load(
    folder: pathlib.Path, **layout: Any
) -> tuple[shared.DecoderConfig, dict[str, Any]]:
    """Config and parameters of a folder of Hugging Face's, or of a checkpoint of ours.

    Args:
      folder: of either.
      **layout: fields of the config to set.

    Raises:
      CheckpointError: it is neither, or it is damaged.
    """
    if _is_hugging_face(folder):
        return shared.checkpoint.load_hf(folder, **layout)
    return shared.checkpoint.load(folder, **layout)


def check_names(folder: pathlib.Path) -> None:
    """Compares names and shapes of a checkpoint with its config.

    Nothing but headers is read, and a tied head beside its embedding.

    Args:
      folder: as for `load`.

    Raises:
      CheckpointError: lists everything that does not fit.
    """
    if _is_hugging_face(folder):
        open_source(folder, format="hf")
        return
    store, manifest = shared.checkpoint.open_checkpoint(folder)
    params = store.under(PARAMS).leaves
    shapes = {path_text(path): leaf.shape for path, leaf in params.items()}
    check_tensors(shapes, zoo_scheme(manifest.decoder_config()))


def _is_hugging_face(folder: pathlib.Path) -> bool:
    if (folder / "config.json").is_file():
        return True
    return not ((folder / "manifest.json").is_file() or is_orbax(folder))


def _check_size(target: str, config: shared.DecoderConfig) -> None:
    size = parameter_bytes(config)
    if size > MOST_BYTES:
        raise TargetError(
            f"{target} has {size / 2**30:.1f} GiB of parameters; the tiers init, bits, "
            "decode and oracle hold both models and take at most "
            f"{MOST_BYTES / 2**30:.0f} GiB. Use --tiers=tree,program, which need no "
            "weights."
        )
