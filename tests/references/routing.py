"""Softmax routing and its balance loss, one token after the other in float64."""

import numpy as np


def softmax(logits):
    powers = np.exp(np.float64(logits) - np.max(np.float64(logits)))
    return powers / np.sum(powers)


def chosen(probabilities, k):
    """The k largest, the lower index first among equals."""
    return sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:k]


def route(logits, k, normalize):
    experts, weights = [], []
    for row in logits:
        probabilities = softmax(row)
        best = chosen(probabilities, k)
        weight = probabilities[best]
        experts.append(best)
        weights.append(weight / np.sum(weight) if normalize else weight)
    return np.array(experts), np.array(weights)


def load_balance_loss(logits_of_layers, real_of_layers, k):
    """One loss over the real rows of all layers together."""
    experts = logits_of_layers[0].shape[1]
    counts, sums, rows = np.zeros(experts), np.zeros(experts), 0
    for logits, real in zip(logits_of_layers, real_of_layers, strict=True):
        for row, is_real in zip(logits, real, strict=True):
            if not is_real:
                continue
            probabilities = softmax(row)
            for expert in chosen(probabilities, k):
                counts[expert] += 1
            sums += probabilities
            rows += 1
    if rows == 0:
        return 0.0
    return experts * np.sum((counts / rows) * (sums / rows))
