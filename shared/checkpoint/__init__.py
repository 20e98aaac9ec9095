"""Parameter trees from foreign checkpoints and back."""

import importlib
from types import ModuleType

from shared.checkpoint.hf import hf_tensors, load_hf, save_hf
from shared.checkpoint.native import load, open_checkpoint, save
from shared.stores import CheckpointError

__all__ = [
    "CheckpointError",
    "hf_tensors",
    "load",
    "load_hf",
    "open_checkpoint",
    "save",
    "save_hf",
]

# Imported when first asked for: models need none of them, and training brings orbax.
_MODULES = ("adapters", "convert", "maxtext", "scheme", "source", "training", "vllm")


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
