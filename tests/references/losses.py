"""Next-token loss, one pair of neighbours after the other in float64."""

import numpy as np


def next_token_loss(logits, labels, segment_ids=None):
    """The mean surprisal, the number of pairs, and the gradient to the logits."""
    batch, time, _ = logits.shape
    gradient = np.zeros(logits.shape)
    total, count = 0.0, 0
    for b in range(batch):
        for t in range(time - 1):
            label = labels[b, t + 1]
            if label == -100:
                continue
            if segment_ids is not None:
                here, there = segment_ids[b, t], segment_ids[b, t + 1]
                if here == 0 or there == 0 or here != there:
                    continue
            scores = np.float64(logits[b, t])
            scores = scores - np.max(scores)
            probabilities = np.exp(scores) / np.sum(np.exp(scores))
            total += np.log(np.sum(np.exp(scores))) - scores[label]
            gradient[b, t] = probabilities
            gradient[b, t, label] -= 1
            count += 1
    if count == 0:
        return 0.0, 0, gradient
    return total / count, count, gradient / count
