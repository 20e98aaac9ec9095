"""Writes the reference's numbers for a checkpoint, for `parity check --expect`.

parity golden FOLDER OUT.npz [flags]

Runs the Hugging Face model in float32 on the CPU (pip install 'parity-zoo[hf]').
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
from absl import flags

import shared
from parity.cli import UsageError


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_list(
        "lengths", ["5", "65"], "Lengths of the plain rows.", flag_values=values
    )
    flags.DEFINE_integer("batch", 2, "Rows.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of the random tokens.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Writes one golden file."""
    if len(arguments) != 2:
        raise UsageError("Give a checkpoint folder and the file to write.")
    folder, out = (pathlib.Path(argument) for argument in arguments)
    config = shared.DecoderConfig.from_hf(folder)
    if not all(length.isdigit() and int(length) for length in options["lengths"]):
        raise UsageError(
            f"lengths must be positive numbers. Got {','.join(options['lengths'])}."
        )
    lengths = [int(length) for length in options["lengths"]]
    random = np.random.default_rng(options["seed"])
    batch = options["batch"]
    golden: dict[str, np.ndarray] = {}
    reference = _Reference(folder)
    for length in lengths:
        tokens = random.integers(0, config.vocab_size, (batch, length))
        golden[f"fwd/{length}/input_ids"] = tokens.astype(np.int32)
        golden[f"fwd/{length}/logits"] = reference.logits(tokens)
    longest = golden[f"fwd/{max(lengths)}/input_ids"]
    golden |= reference.loss(longest, has_experts=config.moe is not None)
    _write(out, golden)
    console.print(f"{out}: {len(golden)} arrays", markup=False)
    return 0


class _Reference:
    """The Hugging Face model of a folder."""

    def __init__(self, folder: pathlib.Path):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise UsageError(
                "The reference needs torch and transformers: "
                "pip install 'parity-zoo[hf]'."
            ) from error
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, T, V] of plain rows."""
        with self.torch.no_grad():
            output = self.model(input_ids=self.torch.from_numpy(tokens))
        return output.logits.numpy()

    def loss(self, tokens: np.ndarray, *, has_experts: bool) -> dict[str, Any]:
        """Losses with the tokens as labels."""
        ids = self.torch.from_numpy(tokens.astype(np.int64))
        extra = {"output_router_logits": True} if has_experts else {}
        with self.torch.no_grad():
            output = self.model(input_ids=ids, labels=ids, **extra)
        total = float(output.loss)
        result = {"input_ids": tokens, "labels": tokens, "total": np.float32(total)}
        aux = getattr(output, "aux_loss", None)
        if aux is not None:
            weight = self.model.config.router_aux_loss_coef
            result["aux"] = np.float32(float(aux))
            result["ce"] = np.float32(total - weight * float(aux))
        return {f"loss/{name}": np.asarray(value) for name, value in result.items()}


def _write(out: pathlib.Path, golden: dict[str, np.ndarray]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial.npz")
    try:
        np.savez_compressed(partial, **golden)  # type: ignore[arg-type]
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
