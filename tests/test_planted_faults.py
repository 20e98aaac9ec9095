"""Each fault in the shared mathematics is found by the oracle, and only by it.

Both frontends call the same functions, so they go wrong together: that they agree says
nothing about the formulas, and the reference's numbers are what does. Every fault here
changes one thing, and has to move the numbers by ten tolerances; with some of them in
place Linen and NNX are seen to give the same bits still.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shared
from parity.trees import compare_bytes
from shared.layers import (
    decoder,
    decoder_layer,
    experts,
    gated_delta_net,
    grouped_query_attention,
    linear,
    sparse_moe,
)
from shared.ops import (
    attention,
    delta_rule_chunked,
    norm,
    routing,
)
from shared.ops import experts as expert_ops
from shared.plan import LayerPlan
from tests.planting import (
    MARGIN,
    TOLERANCES,
    change_rope,
    identity,
    jax_with,
    load,
    measure,
    planted,
)

# ------------------------------------------------------------------- norms and head


def norm_scales_by_w(x, weight, eps, *, zero_centered):
    """The norm of a module, always with w."""
    return norm.rms_norm(x, weight, eps)


def layer_norms_scale_by_w(patch):
    """The norms around mixer and feed-forward multiply by w, not by 1 + w."""
    patch.setattr(decoder_layer, "normalize", norm_scales_by_w)


def query_and_key_norms_scale_by_w(patch):
    """The norms of queries and keys multiply by w, not by 1 + w."""
    patch.setattr(grouped_query_attention, "normalize", norm_scales_by_w)


def final_norm_scales_by_w(patch):
    """The norm before the head multiplies by w, not by 1 + w."""
    patch.setattr(decoder, "normalize", norm_scales_by_w)


def final_norm_missing(patch):
    """The head sees the residual stream as it is."""
    patch.setattr(decoder, "normalize", lambda x, weight, eps, **options: x)


def gated_norm_scales_by_one_plus_w(patch):
    """The gated norm multiplies by 1 + w, as the other norms do."""
    original = norm.gated_rms_norm
    patch.setattr(
        gated_delta_net,
        "gated_rms_norm",
        lambda x, gate, weight, eps: original(x, gate, 1 + weight, eps),
    )


def gate_before_the_gated_norm(patch):
    """Norm of the gated value instead of gate on the normalised value."""
    patch.setattr(
        gated_delta_net,
        "gated_rms_norm",
        lambda x, gate, weight, eps: norm.rms_norm(x * jax.nn.silu(gate), weight, eps),
    )


# ------------------------------------------------------------------- full attention


def gate_after_the_output_projection(patch):
    """The gate multiplies what o_proj gives, not what it takes."""
    project = grouped_query_attention._project_queries
    apply = grouped_query_attention.apply

    def project_without_gate(weights, x, config):
        q, gate = project(weights, x, config)
        return q, jnp.full_like(gate, jnp.inf)

    def apply_then_gate(weights, x, context, cache, *, config, keys=None):
        y, cache = apply(weights, x, context, cache, config=config, keys=keys)
        _, gate = project(weights, x, config)
        gate = gate.reshape(*x.shape[:2], -1)[..., : x.shape[-1]]
        return y * jax.nn.sigmoid(gate), cache

    patch.setattr(grouped_query_attention, "_project_queries", project_without_gate)
    patch.setattr(grouped_query_attention, "apply", apply_then_gate)


def query_and_gate_as_two_halves(patch):
    """q_proj is cut into all queries and all gates, not head by head."""

    def project(weights, x, config):
        halves = jnp.split(linear.project(x, weights, "q_proj"), 2, axis=-1)
        shape = *x.shape[:2], config.num_heads, config.head_dim
        q, gate = (half.reshape(shape) for half in halves)
        return q, gate

    patch.setattr(grouped_query_attention, "_project_queries", project)


def key_heads_tiled_in_attention(patch):
    """Query head n reads key head n % K, not n // (N / K)."""
    original = attention.attend

    def attend(q, segment_ids, index, sources, **options):
        sources = [
            source._replace(
                keys=tile_heads(source.keys, q.shape[2]),
                values=tile_heads(source.values, q.shape[2]),
            )
            for source in sources
        ]
        return original(q, segment_ids, index, sources, **options)

    patch.setattr(attention, "attend", attend)


def scores_not_scaled(patch):
    """Scores are not divided by sqrt(H)."""
    original = attention.attend
    patch.setattr(
        attention,
        "attend",
        lambda *args, scale, window: original(*args, scale=1.0, window=window),
    )


def attention_sees_the_next_token(patch):
    """The causal mask is off by one: a query sees the key behind it."""
    original = attention._visible
    patch.setattr(
        attention,
        "_visible",
        lambda q_ids, q_index, *rest: original(q_ids, q_index + 1, *rest),
    )


def rope_missing(patch):
    """No rotary embedding."""
    patch.setattr(grouped_query_attention, "rotate", lambda x, positions, rope: x)


def rope_pairs_neighbours(patch):
    """Component 2j pairs with 2j + 1, not j with j + R / 2."""
    original = grouped_query_attention.rotate

    def interleaved(x, positions, rope):
        pairs = np.arange(rope.rotary_dim).reshape(-1, 2).T.ravel()
        order = np.concatenate([pairs, np.arange(rope.rotary_dim, x.shape[-1])])
        turned = original(x[..., order], positions, rope)
        return turned[..., np.argsort(order)]

    patch.setattr(grouped_query_attention, "rotate", interleaved)


def rope_over_the_whole_head(patch):
    """All components of a head are rotated, not the first quarter."""
    change_rope(
        patch, lambda x, rope: dataclasses.replace(rope, rotary_dim=x.shape[-1])
    )


def rope_exponent_counts_the_head(patch):
    """Frequencies are theta^(-2j / H), not theta^(-2j / R); H is 4 R here."""
    change_rope(
        patch, lambda x, rope: dataclasses.replace(rope, theta=rope.theta**0.25)
    )


# --------------------------------------------------------------- linear attention


def qkvz_split_flat(patch):
    """in_proj_qkvz is cut into all of q, k, v and z, not key head by key head."""
    original = gated_delta_net._project

    def project(weights, x, config):
        _, _, b, a = original(weights, x, config)
        qkvz = linear.project(x, weights, "in_proj_qkvz")
        qkv, z = jnp.split(qkvz, [config.conv_dim], axis=-1)
        return qkv, z.reshape(*b.shape, config.value_head_dim), b, a

    patch.setattr(gated_delta_net, "_project", project)


def ba_split_flat(patch):
    """in_proj_ba is cut into all of b and all of a, not key head by key head."""
    original = gated_delta_net._project

    def project(weights, x, config):
        qkv, z, _, _ = original(weights, x, config)
        b, a = jnp.split(linear.project(x, weights, "in_proj_ba"), 2, axis=-1)
        return qkv, z, b, a

    patch.setattr(gated_delta_net, "_project", project)


def key_heads_tiled_in_delta_rule(patch):
    """Value head h reads key head h % Hk, not h // (Hv / Hk)."""

    def change(q, k, v, *rest):
        heads = v.shape[2]
        return tile_heads(q, heads), tile_heads(k, heads), v, *rest

    change_delta_rule(patch, change)


def convolution_looks_one_token_too_far_back(patch):
    """The window ends at the previous token."""
    change_convolution(
        patch, output=lambda y: jnp.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    )


def convolution_kernel_flipped(patch):
    """The first tap multiplies the current token."""
    change_convolution(patch, weight=lambda w: w[::-1])


def silu_after_convolution_missing(patch):
    """Queries, keys and values are used as the convolution gives them."""
    patch.setattr(gated_delta_net, "jax", jax_with(silu=identity))


def query_and_key_not_of_unit_length(patch):
    """Queries and keys of the delta rule are not normalised."""
    patch.setattr(gated_delta_net, "l2_norm", identity)


def query_not_scaled(patch):
    """Queries of the delta rule are not divided by sqrt(Dk)."""
    change_delta_rule(patch, lambda q, *rest: (q * q.shape[-1] ** 0.5, *rest))


def beta_is_one(patch):
    """Every token is written with full strength."""

    def change(q, k, v, log_decay, beta, *rest):
        return q, k, v, log_decay, jnp.ones_like(beta), *rest

    change_delta_rule(patch, change)


def state_does_not_decay(patch):
    """The state keeps all it was ever told."""
    patch.setattr(gated_delta_net, "_log_decay", lambda weights, a: jnp.zeros_like(a))


def incoming_state_does_not_decay(patch):
    """A chunk reads, and passes on, the state before it without decay."""
    change_decays(patch, lambda since, between: (jnp.ones_like(since), between))


def state_reset_by_each_chunk(patch):
    """Every chunk begins with an empty state."""
    change_decays(patch, lambda since, between: (jnp.zeros_like(since), between))


def chunk_sees_its_future(patch):
    """No mask within a chunk: outputs read what later tokens write."""

    def change(since, between):
        seen = jnp.tri(between.shape[-1], dtype=bool)[None, None, None, None]
        return since, jnp.where(seen, between, 1)

    change_decays(patch, change)


# ------------------------------------------------------------------- feed-forward


def weights_of_experts_not_renormalised(patch):
    """The weights of the chosen experts do not sum to one."""
    original = routing.route
    patch.setattr(
        sparse_moe,
        "route",
        lambda *args, normalize, **options: original(*args, normalize=False, **options),
    )


def router_softmax_twice(patch):
    """The router's probabilities are taken for logits."""
    original = routing.route
    patch.setattr(
        sparse_moe,
        "route",
        lambda logits, *args, **options: original(
            jax.nn.softmax(logits), *args, **options
        ),
    )


def shared_expert_not_gated(patch):
    """The shared expert counts in full."""
    patch.setattr(sparse_moe, "jax", jax_with(sigmoid=jnp.ones_like))


def shared_expert_missing(patch):
    """Only the routed experts count."""
    original = sparse_moe.apply
    patch.setattr(
        sparse_moe,
        "apply",
        lambda *args, shared_expert, **options: original(
            *args, shared_expert=jnp.zeros_like, **options
        ),
    )


def silu_missing_in_experts(patch):
    """The gates of the routed experts are linear."""
    patch.setattr(expert_ops, "activate", lambda x, name: x)


def gate_and_up_swapped_in_experts(patch):
    """silu is applied to the up projection."""
    original = experts.apply

    def apply(weights, *args, **options):
        gate, up = weights["gate_proj"], weights["up_proj"]
        return original({**weights, "gate_proj": up, "up_proj": gate}, *args, **options)

    patch.setattr(experts, "apply", apply)


# -------------------------------------------------------------- plan and router loss


def remainder_dropped(patch):
    """The layers behind the last whole period are not run; their weights stay."""
    plan = shared.DecoderConfig.plan.func
    patch.setattr(
        shared.DecoderConfig, "plan", property(lambda self: without_last(plan(self)))
    )


def router_loss_of_remainder_dropped(patch):
    """The router loss is that of the scanned layers."""
    original = LayerPlan.gather
    patch.setattr(
        LayerPlan,
        "gather",
        lambda self, *args: original(without_last(self), *args),
    )


def router_loss_averaged_over_layers(patch):
    """A router loss per layer, and their mean, instead of one over all layers."""
    original = routing.load_balance_loss
    patch.setattr(
        decoder, "load_balance_loss", lambda stats: jnp.mean(jax.vmap(original)(stats))
    )


def router_loss_counts_only_the_best_expert(patch):
    """The router loss takes a token's first choice alone, as with one expert each."""
    original = routing.router_stats
    patch.setattr(
        sparse_moe,
        "router_stats",
        lambda logits, experts, real, **options: original(
            logits, experts[:, :1], real, **options
        ),
    )


# What a fault moves, and the section of a golden file with the reference's numbers: of
# five tokens, which compile soonest, or of more than a chunk of the delta rule has.
FAULTS = {
    ("logits", "fwd/5"): (
        layer_norms_scale_by_w,
        query_and_key_norms_scale_by_w,
        final_norm_scales_by_w,
        final_norm_missing,
        gated_norm_scales_by_one_plus_w,
        gate_before_the_gated_norm,
        gate_after_the_output_projection,
        query_and_gate_as_two_halves,
        key_heads_tiled_in_attention,
        scores_not_scaled,
        attention_sees_the_next_token,
        rope_missing,
        rope_pairs_neighbours,
        rope_over_the_whole_head,
        rope_exponent_counts_the_head,
        qkvz_split_flat,
        ba_split_flat,
        key_heads_tiled_in_delta_rule,
        convolution_looks_one_token_too_far_back,
        convolution_kernel_flipped,
        silu_after_convolution_missing,
        query_and_key_not_of_unit_length,
        query_not_scaled,
        beta_is_one,
        state_does_not_decay,
        chunk_sees_its_future,
        weights_of_experts_not_renormalised,
        router_softmax_twice,
        shared_expert_not_gated,
        shared_expert_missing,
        silu_missing_in_experts,
        gate_and_up_swapped_in_experts,
        remainder_dropped,
    ),
    ("logits", "fwd/65"): (
        incoming_state_does_not_decay,
        state_reset_by_each_chunk,
    ),
    ("aux_loss", "loss"): (
        router_loss_of_remainder_dropped,
        router_loss_averaged_over_layers,
        router_loss_counts_only_the_best_expert,
    ),
}
# One key head cannot be tiled wrongly; the other model has two.
NEEDS_TWO_KEY_HEADS = (key_heads_tiled_in_attention,)
MODELS = ("qwen3_next_6l", "qwen3_next_8l")
# Tracing is what costs. That two wrong copies agree is seen on a fault of each part, of
# all that a frontend calls; the others are measured in Linen.
IN_BOTH_FRONTENDS = (
    gate_after_the_output_projection,
    state_reset_by_each_chunk,
    shared_expert_missing,
    router_loss_averaged_over_layers,
)


# ------------------------------------------------------------------------- tools


def tile_heads(x, heads):
    """[B, T, K, ...] with its heads one after the other, again and again."""
    repeats = [1] * x.ndim
    repeats[2] = heads // x.shape[2]
    return jnp.tile(x, repeats)


def change_delta_rule(patch, change):
    original = gated_delta_net.gated_delta_rule
    patch.setattr(
        gated_delta_net,
        "gated_delta_rule",
        lambda *args, **options: original(*change(*args), **options),
    )


def change_decays(patch, change):
    """`change`: (decay since the chunk began, decay between places) -> the same."""
    original = delta_rule_chunked._decays
    patch.setattr(delta_rule_chunked, "_decays", lambda *args: change(*original(*args)))


def change_convolution(patch, weight=identity, output=identity):
    original = gated_delta_net.causal_conv1d

    def convolve(x, w, *rest):
        y, tail = original(x, weight(w), *rest)
        return output(y), tail

    patch.setattr(gated_delta_net, "causal_conv1d", convolve)


def without_last(plan):
    return dataclasses.replace(plan, groups=plan.groups[:-1])


@pytest.mark.parametrize(("what", "section"), FAULTS)
@pytest.mark.parametrize("name", MODELS)
def test_without_a_fault_the_oracle_passes_and_the_frontends_agree(name, what, section):
    results, distance = measure(load(name), section, what)
    assert compare_bytes(*results, finite=True).equal
    assert distance <= TOLERANCES[what]


@pytest.mark.parametrize(
    ("what", "section", "fault"),
    [
        pytest.param(*place, fault, id=fault.__name__)
        for place, faults in FAULTS.items()
        for fault in faults
    ],
)
def test_a_fault_fails_the_oracle(what, section, fault):
    model = load(MODELS[fault in NEEDS_TWO_KEY_HEADS])  # before the fault is there
    both = fault in IN_BOTH_FRONTENDS
    with planted(fault):
        results, distance = measure(model, section, what, both)
    if both:
        difference = compare_bytes(*results, finite=True)
        assert difference.equal, difference.differences
    assert MARGIN * TOLERANCES[what] <= distance < np.inf, fault.__doc__


def mask_after_exp(patch):
    """Decay within a chunk: exp of a difference of sums first, the mask after it.

    Forward the mask hides what overflows. Backward, 0 times infinity is not a number.
    """

    def decays(log_decay, *groups):
        total = jnp.cumsum(log_decay, axis=-1)
        lower = jnp.tri(log_decay.shape[-1], dtype=bool)[None, None, None, None]
        between = jnp.exp(total[..., :, None] - total[..., None, :])
        return jnp.exp(total), jnp.where(lower, between, 0)

    patch.setattr(delta_rule_chunked, "_decays", decays)


def strong_decay_gradient():
    """Outputs of the delta rule with decays down to exp(-40), gradient of their sum."""
    generator, (batch, time, heads, width) = np.random.default_rng(0), (1, 16, 2, 4)
    tokens = batch, time, heads
    q, k, v = jnp.asarray(generator.normal(0, 0.5, (3, *tokens, width)), jnp.float32)
    beta = jnp.full(tokens, 0.5)
    state = jnp.zeros((batch, heads, width, width))
    groups, real = jnp.zeros(tokens[:2], jnp.int32), jnp.ones(tokens[:2], bool)

    def total(log_decay):
        y, _ = delta_rule_chunked.gated_delta_rule_chunked(
            q, k, v, log_decay, beta, state, groups, real, chunk_size=8
        )
        return jnp.sum(y), y

    log_decay = jnp.asarray(generator.uniform(-40, 0, tokens), jnp.float32)
    gradient, y = jax.jit(jax.grad(total, has_aux=True))(log_decay)
    return y, gradient


def test_mask_after_exp_ruins_the_gradient_under_strong_decay():
    right, right_gradient = strong_decay_gradient()
    with planted(mask_after_exp):
        wrong, wrong_gradient = strong_decay_gradient()
    np.testing.assert_allclose(wrong, right, rtol=1e-4, atol=1e-5)
    assert np.isfinite(right_gradient).all()
    assert not np.isfinite(wrong_gradient).all()
