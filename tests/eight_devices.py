"""Runs a script that has eight virtual devices, and reads what it wrote."""

import pathlib
import subprocess
import sys

import numpy as np


def results_of(script, folder):
    """Arrays by case and name, from the .npz file that a script writes."""
    file = folder / "results.npz"
    done = subprocess.run(
        [sys.executable, pathlib.Path(script.__file__), file],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    with np.load(file) as arrays:
        for key in arrays:
            case, name = key.split("|")
            found.setdefault(case, {})[name] = arrays[key]
    return found
