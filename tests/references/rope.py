"""Partial rotary embedding, one pair of components at a time in float64."""

import math

import numpy as np


def frequency(j, rotary_dim, theta):
    return theta ** (-2.0 * j / rotary_dim)


def apply_rope(x, positions, rotary_dim, theta):
    y = np.array(x, np.float64)
    batch, length, heads, _ = y.shape
    half = rotary_dim // 2
    for b, t, n, j in np.ndindex(batch, length, heads, half):
        angle = int(positions[b, t]) * frequency(j, rotary_dim, theta)
        u, v = float(x[b, t, n, j]), float(x[b, t, n, j + half])
        y[b, t, n, j] = u * math.cos(angle) - v * math.sin(angle)
        y[b, t, n, j + half] = v * math.cos(angle) + u * math.sin(angle)
    return y
