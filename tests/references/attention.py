"""Grouped-query attention and its gradients, query by query in float64.

Keys and values [B, S, K, ...] stand in one array here, whatever source they came from.
"""

import math

import numpy as np


def attend(q, segment_ids, index, keys, values, key_ids, key_index, scale, window=None):
    batch, length, heads, _ = q.shape
    y = np.zeros((batch, length, heads, values.shape[-1]))
    for b, t, n in np.ndindex(batch, length, heads):
        k = n // (heads // keys.shape[2])
        seen = _seen(b, t, segment_ids, index, key_ids, key_index, window)
        for s, weight in _softmax(q[b, t, n], keys[b, :, k], seen, scale):
            y[b, t, n] += weight * np.float64(values[b, s, k])
    return y


def attend_gradients(
    q, segment_ids, index, keys, values, key_ids, key_index, y_grad, scale, window=None
):
    """The gradients of `sum(y * y_grad)` for `q`, `keys` and `values`."""
    batch, length, heads, _ = q.shape
    q_grad, keys_grad, values_grad = (np.zeros(x.shape) for x in (q, keys, values))
    for b, t, n in np.ndindex(batch, length, heads):
        k = n // (heads // keys.shape[2])
        seen = _seen(b, t, segment_ids, index, key_ids, key_index, window)
        softmax = _softmax(q[b, t, n], keys[b, :, k], seen, scale)
        upward = np.float64(y_grad[b, t, n])
        weight_grad = {s: upward @ np.float64(values[b, s, k]) for s in seen}
        mean = sum(weight * weight_grad[s] for s, weight in softmax)
        for s, weight in softmax:
            score_grad = weight * (weight_grad[s] - mean)
            values_grad[b, s, k] += weight * upward
            q_grad[b, t, n] += scale * score_grad * np.float64(keys[b, s, k])
            keys_grad[b, s, k] += scale * score_grad * np.float64(q[b, t, n])
    return q_grad, keys_grad, values_grad


def _seen(b, t, segment_ids, index, key_ids, key_index, window):
    seen = []
    for s in range(key_ids.shape[1]):
        behind = int(index[b, t]) - int(key_index[b, s])
        if (
            segment_ids[b, t] > 0
            and segment_ids[b, t] == key_ids[b, s]
            and behind >= 0
            and (window is None or behind < window)
        ):
            seen.append(s)
    return seen


def _softmax(query, keys, seen, scale):
    if not seen:
        return []
    scores = [scale * (np.float64(query) @ np.float64(keys[s])) for s in seen]
    powers = [math.exp(score - max(scores)) for score in scores]
    return [(s, power / sum(powers)) for s, power in zip(seen, powers, strict=True)]


def attend_whole_rows(q, segment_ids, keys, values, y_grad, scale, window=None):
    """The outputs, and the gradients of `sum(y * y_grad)`, of tokens among themselves.

    The same by whole matrices, for long rows; a window counts places.
    """
    q, keys, values, y_grad = (np.float64(x) for x in (q, keys, values, y_grad))
    group = q.shape[2] // keys.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (keys, values))
    place = np.arange(q.shape[1])
    behind = place[:, None] - place[None]
    seen = (behind >= 0) & (behind < (window or len(place)))
    seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
    seen &= (segment_ids > 0)[:, :, None]
    scores = np.where(seen[:, None], scale * np.einsum("btnh,bsnh->bnts", q, k), -1e300)
    powers = np.exp(scores - scores.max(-1, keepdims=True)) * seen[:, None]
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)
    weight_grad = np.einsum("btnv,bsnv->bnts", y_grad, v)
    mean = (weights * weight_grad).sum(-1, keepdims=True)
    score_grad = scale * weights * (weight_grad - mean)

    def by_key_head(x):
        return x.reshape(*keys.shape[:3], group, -1).sum(3)

    return (
        np.einsum("bnts,bsnv->btnv", weights, v),
        np.einsum("bnts,bsnh->btnh", score_grad, k),
        by_key_head(np.einsum("bnts,btnh->bsnh", score_grad, q)),
        by_key_head(np.einsum("bnts,btnv->bsnv", weights, y_grad)),
    )
