"""Gated delta rule, one head and one token after the other in float64."""

import numpy as np


def gated_delta_rule(q, k, v, log_decay, beta, state, groups, real):
    batch, time, key_heads, _ = q.shape
    value_heads, value_width = v.shape[2:]
    o = np.zeros((batch, time, value_heads, value_width))
    final = np.zeros(state.shape)
    for b in range(batch):
        for h in range(value_heads):
            key_head = h // (value_heads // key_heads)
            memory = np.float64(state[b, h])
            group = 0
            for t in range(time):
                if not real[b, t]:
                    continue
                if groups[b, t] != group:
                    group = groups[b, t]
                    memory = np.zeros(memory.shape)
                query = np.float64(q[b, t, key_head])
                key = np.float64(k[b, t, key_head])
                memory = np.exp(np.float64(log_decay[b, t, h])) * memory
                error = np.float64(v[b, t, h]) - key @ memory
                memory = memory + np.outer(key, np.float64(beta[b, t, h]) * error)
                o[b, t, h] = query @ memory
            final[b, h] = memory
    return o, final
