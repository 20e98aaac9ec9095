"""Latent attention (arXiv:2405.04434, section 2.1), token by token in float64.

Every head of every token gets its own key and value, made of that token's latent:
nothing is absorbed, nothing is cached.
"""

import math

import numpy as np

from tests.references import rope


def rms_norm(x, weight, eps):
    return x / math.sqrt(np.mean(x**2) + eps) * weight


def turn(x, position, frequencies, interleaved, magnitude):
    """One head of one token."""
    positions = [np.full((1, 1), position)] * len(frequencies)
    turned = rope.rotate(
        x[None, None, None], positions, frequencies, interleaved, magnitude
    )
    return turned[0, 0, 0]


def attend(
    w,
    x,
    positions,
    segment_ids,
    *,
    heads,
    nope,
    latent_width,
    eps,
    scale,
    frequencies,
    interleaved,
    magnitude=1.0,
):
    """The layer's output [B, T, D], and each token's latent and rotated key."""
    batch, length, _ = x.shape
    rotary = len(frequencies), interleaved, magnitude
    y, joint = np.zeros_like(x), np.zeros((batch, length, latent_width + 2 * rotary[0]))
    for b in range(batch):
        queries, keys, values = [], [], []
        for t in range(length):
            own_turn = lambda part, p=positions[b, t]: turn(
                part, p, frequencies, interleaved, magnitude
            )
            q = project(w, "q_proj", x[b, t], w.get("q_a_layernorm"), eps)
            q = q.reshape(heads, -1)
            q = [np.concatenate([h[:nope], own_turn(h[nope:])]) for h in q]
            both = x[b, t] @ w["kv_a_proj_with_mqa"] + w.get(
                "kv_a_proj_with_mqa_bias", 0
            )
            latent = rms_norm(both[:latent_width], w["kv_a_layernorm"], eps)
            key = own_turn(both[latent_width:])
            joint[b, t] = np.concatenate([latent, key])
            made = (latent @ w["kv_b_proj"]).reshape(heads, -1)
            queries.append(q)
            keys.append([np.concatenate([h[:nope], key]) for h in made])
            values.append([h[nope:] for h in made])
        for t in range(length):
            seen = [
                s
                for s in range(t + 1)
                if segment_ids[b, s] == segment_ids[b, t] and segment_ids[b, t] > 0
            ]
            out = [
                weighted(
                    [scale * (queries[t][n] @ keys[s][n]) for s in seen],
                    [values[s][n] for s in seen],
                    len(values[t][n]),
                )
                for n in range(heads)
            ]
            y[b, t] = np.concatenate(out) @ w["o_proj"] + w.get("o_proj_bias", 0)
    return y, joint


def project(w, name, x, norm, eps):
    """To queries: at once, or through a latent that is normalised."""
    if norm is None:
        return x @ w[name]
    latent = x @ w["q_a_proj"] + w.get("q_a_proj_bias", 0)
    return rms_norm(latent, norm, eps) @ w["q_b_proj"]


def weighted(scores, values, width):
    """The softmax-weighted sum; zeros where nothing is seen."""
    total = np.zeros(width)
    powers = [math.exp(score - max(scores)) for score in scores]
    for power, value in zip(powers, values, strict=True):
        total += power / sum(powers) * value
    return total
