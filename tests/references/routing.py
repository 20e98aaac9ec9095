"""Routing and its balance loss, one token after the other in float64."""

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


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.float64(logits)))


def route_by_groups(logits, k, bias, groups, groups_per_token, factor):
    """DeepSeek-V3 (arXiv:2412.19437, equations 12 to 16), for one token after another.

    Chosen by sigmoid plus bias among the experts of the groups with the best two;
    weighed by the sigmoid alone, over its sum, times a factor.
    """
    size = logits.shape[1] // groups
    experts, weights = [], []
    for row in logits:
        scores = sigmoid(row)
        choice = list(scores + bias)
        sums = []
        for group in range(groups):
            best = sorted(choice[group * size : (group + 1) * size])[-2:]
            sums.append(best[0] + best[1])
        allowed = chosen(sums, groups_per_token)
        for expert in range(len(choice)):
            if expert // size not in allowed:
                choice[expert] = -np.inf
        best = chosen(choice, k)
        experts.append(best)
        weights.append(factor * scores[best] / np.sum(scores[best]))
    return np.array(experts), np.array(weights)


def route_scaled(logits, k, scale):
    """Gemma 4: softmax, the best over their sum, each times a number of its own."""
    experts, weights = route(logits, k, normalize=True)
    for row, best in zip(weights, experts, strict=True):
        row *= scale[best]
    return experts, weights


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
