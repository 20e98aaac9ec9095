"""Expert MLPs, one token and one choice after the other in float64."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x), sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def gelu_tanh(x):
    """As in arXiv:1606.08415, section 2; tanh(u) is 2 sigmoid(2 u) - 1."""
    root = np.sqrt(2 / np.pi)
    share = sigmoid(2 * root * (x + 0.044715 * x**3))
    slope = 2 * root * (1 + 3 * 0.044715 * x**2)
    return x * share, share + x * share * (1 - share) * slope


# Value and slope.
ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def expert_mlp(
    x, experts, weights, gate_proj, up_proj, down_proj, real, activation="silu"
):
    y = np.zeros(x.shape)
    for n in range(x.shape[0]):
        if not real[n]:
            continue
        for a in range(experts.shape[1]):
            expert = experts[n, a]
            gate = np.float64(x[n]) @ np.float64(gate_proj[expert])
            up = np.float64(x[n]) @ np.float64(up_proj[expert])
            hidden = ACTIVATIONS[activation](gate)[0] * up
            y[n] += np.float64(weights[n, a]) * (hidden @ np.float64(down_proj[expert]))
    return y


def expert_mlp_gradients(
    x,
    experts,
    weights,
    gate_proj,
    up_proj,
    down_proj,
    real,
    gradient,
    activation="silu",
):
    """Gradients to x, weights and the three projections, by the chain rule."""
    x, weights = np.float64(x), np.float64(weights)
    gate_proj, up_proj = np.float64(gate_proj), np.float64(up_proj)
    down_proj = np.float64(down_proj)
    d_x, d_weights = np.zeros(x.shape), np.zeros(weights.shape)
    d_gate, d_up = np.zeros(gate_proj.shape), np.zeros(up_proj.shape)
    d_down = np.zeros(down_proj.shape)
    for n in range(x.shape[0]):
        if not real[n]:
            continue
        for a in range(experts.shape[1]):
            e = experts[n, a]
            gate, up = x[n] @ gate_proj[e], x[n] @ up_proj[e]
            opened, slope = ACTIVATIONS[activation](gate)
            d_weights[n, a] = (opened * up) @ down_proj[e] @ gradient[n]
            d_down[e] += np.outer(opened * up, weights[n, a] * gradient[n])
            d_hidden = down_proj[e] @ (weights[n, a] * gradient[n])
            d_gate[e] += np.outer(x[n], d_hidden * up * slope)
            d_up[e] += np.outer(x[n], d_hidden * opened)
            d_x[n] += gate_proj[e] @ (d_hidden * up * slope)
            d_x[n] += up_proj[e] @ (d_hidden * opened)
    return d_x, d_weights, d_gate, d_up, d_down
