"""The distribution of the next token, one row and one token after the other in float64.

A row is a dict with the settings of `Sampling` and its logits and seen ids.
"""

import math


def distribution(
    logits, seen, temperature, top_k, top_p, min_p, repetition_penalty
) -> tuple[list[float], float]:
    """The probability of each token, and how far the nearest decision was from a tie.

    The distance is in probability; float32 may decide otherwise when it is tiny.
    """
    scores = []
    for logit, was_seen in zip(logits, seen, strict=True):
        score = float(logit)
        if was_seen and score > 0:
            score = score / repetition_penalty
        elif was_seen:
            score = score * repetition_penalty
        scores.append(score)

    # Most probable first, equal ones by id.
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if temperature == 0:
        return [float(token == order[0]) for token in range(len(scores))], 1.0
    best = scores[order[0]]
    weights = [math.exp((score - best) / temperature) for score in scores]
    distance = 1.0

    kept = []
    for place, token in enumerate(order):
        if top_k == 0 or place < top_k or scores[token] == scores[order[top_k - 1]]:
            kept.append(token)

    if top_p < 1:
        total = sum(weights[token] for token in kept)
        mass, nucleus = 0.0, []
        for token in kept:
            if mass < top_p * total:
                nucleus.append(token)
            mass += weights[token]
            distance = min(distance, abs(mass / total - top_p))
        kept = nucleus

    for token in list(kept):
        ratio = weights[token] / weights[order[0]]
        if ratio < min_p:
            kept.remove(token)
        if min_p > 0 and token != order[0] and ratio < 1:
            distance = min(distance, abs(ratio - min_p))

    total = sum(weights[token] for token in kept)
    probabilities = [0.0] * len(scores)
    for token in kept:
        probabilities[token] = weights[token] / total
    return probabilities, distance


def log_softmax(logits) -> list[float]:
    best = max(float(logit) for logit in logits)
    total = math.log(sum(math.exp(float(logit) - best) for logit in logits))
    return [float(logit) - best - total for logit in logits]


def mark_seen(seen, tokens, real) -> list[list[bool]]:
    seen = [[bool(was_seen) for was_seen in row] for row in seen]
    for row, (row_tokens, row_real) in enumerate(zip(tokens, real, strict=True)):
        for token, is_real in zip(row_tokens, row_real, strict=True):
            if is_real and 0 <= token < len(seen[row]):
                seen[row][token] = True
    return seen
