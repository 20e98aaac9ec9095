"""Causal depthwise convolution, one token after the other in float64."""

import numpy as np


def causal_conv1d(x, weight, tail, groups, real):
    batch, length, channels = x.shape
    width = weight.shape[0]
    y = np.zeros((batch, length, channels))
    new_tail = np.zeros((batch, width - 1, channels))
    for b in range(batch):
        # What has been seen, oldest first: (sequence, input); None where padding stood.
        seen = [(0, np.float64(tail[b, i])) for i in range(width - 1)]
        current, started = 0, False
        for t in range(length):
            if not real[b, t]:
                if started:
                    seen.append((None, np.zeros(channels)))
                continue
            current, started = int(groups[b, t]), True
            seen.append((current, np.float64(x[b, t])))
            for j in range(width):
                group, value = seen[len(seen) - width + j]
                if group == current:
                    y[b, t] += np.float64(weight[j]) * value
        while seen and seen[-1][0] is None:
            seen.pop()
        for i in range(width - 1):
            group, value = seen[len(seen) - (width - 1) + i]
            if group == current:
                new_tail[b, i] = value
    return y, new_tail
