"""Rotary embedding, one pair of components at a time in float64."""

import math

import numpy as np


def frequency(j, rotary_dim, theta):
    return theta ** (-2.0 * j / rotary_dim)


def yarn_frequency(j, rotary_dim, theta, factor, length, beta_fast, beta_slow):
    """As `_compute_yarn_parameters` of transformers has it, for one pair.

    A pair turns `length * frequency / (2 pi)` times; solved for the number of the pair,
    that says where the ramp begins and ends.
    """

    def pair(turns):
        return rotary_dim / 2 * math.log(length / (turns * 2 * math.pi), theta)

    begin, end = math.floor(pair(beta_fast)), math.ceil(pair(beta_slow))
    begin, end = max(begin, 0), min(end, rotary_dim - 1)
    slow = min(max((j - begin) / (end - begin), 0.0), 1.0)
    plain = frequency(j, rotary_dim, theta)
    return plain / factor * slow + plain * (1 - slow)


def mrope_axis(j, sections):
    """0, 1 or 2: the axis of positions that pair `j` follows, as in Qwen3.5."""
    if j % 3 == 1 and j < 3 * sections[1]:
        return 1
    if j % 3 == 2 and j < 3 * sections[2]:
        return 2
    return 0


def rotate(x, positions, frequencies, interleaved=False, magnitude=1.0):
    """`positions[j]` [B, T] are those of pair `j`, which turns by `frequencies[j]`."""
    y = np.array(x, np.float64)
    batch, length, heads, _ = y.shape
    half = len(frequencies)
    for b, t, n, j in np.ndindex(batch, length, heads, half):
        angle = int(positions[j][b, t]) * frequencies[j]
        first, second = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        u, v = float(x[b, t, n, first]), float(x[b, t, n, second])
        y[b, t, n, j] = magnitude * (u * math.cos(angle) - v * math.sin(angle))
        y[b, t, n, j + half] = magnitude * (v * math.cos(angle) + u * math.sin(angle))
    return y


def apply_rope(x, positions, rotary_dim, theta):
    half = rotary_dim // 2
    frequencies = [frequency(j, rotary_dim, theta) for j in range(half)]
    return rotate(x, [positions] * half, frequencies)
