"""Parameter trees from foreign checkpoints and back."""

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
