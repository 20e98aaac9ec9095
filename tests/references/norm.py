"""Normalisations, row by row in float64."""

import math

import numpy as np


def rms_norm(x, weight, eps):
    return _by_row(x, lambda row: _scaled(row, eps) * np.asarray(weight, np.float64))


def zero_centered_rms_norm(x, weight, eps):
    return rms_norm(x, 1.0 + np.asarray(weight, np.float64), eps)


def gated_rms_norm(x, gate, weight, eps):
    y = rms_norm(x, weight, eps)
    for place in np.ndindex(y.shape):
        z = float(gate[place])
        y[place] *= z / (1.0 + math.exp(-z))
    return y


def l2_norm(x, eps):
    return _by_row(x, lambda row: row / math.sqrt(sum(v * v for v in row) + eps))


def _scaled(row, eps):
    return row / math.sqrt(sum(v * v for v in row) / len(row) + eps)


def _by_row(x, function):
    x = np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        y[place] = function(x[place])
    return y
