"""Each fault in what sets a family apart is found by the oracle, and only by it.

As in `test_planted_faults`: a fault changes one thing in the mathematics that both
frontends call, and has to move the numbers by ten tolerances; with some of them in
place Linen and NNX are seen to give the same bits still.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo_linen
import zoo_nnx
from parity.trees import compare_bytes
from shared.layers import (
    decoder,
    decoder_layer,
    gated_delta_net,
    grouped_query_attention,
    latent_attention,
    mlp,
    norm,
    rotary,
    sparse_moe,
)
from shared.ops import attention, routing
from shared.ops.norm import rms_norm, unit_rms_norm
from tests.planting import (
    MARGIN,
    TOLERANCES,
    change_rope,
    jax_with,
    load,
    measure,
    planted,
)

# ------------------------------------------------------------------- of any family


def normalize_the_other_way(x, weight, eps, *, zero_centered):
    """The norm of a model, with 1 + w for w and the other way round."""
    return norm.normalize(x, weight, eps, zero_centered=not zero_centered)


def layer_norms_of_the_other_form(patch):
    """The norms of a layer multiply by w instead of 1 + w, or by 1 + w instead of w."""
    patch.setattr(decoder_layer, "normalize", normalize_the_other_way)


def query_and_key_norms_of_the_other_form(patch):
    """The same for the norms of queries and keys."""
    patch.setattr(grouped_query_attention, "normalize", normalize_the_other_way)


def output_norms_missing(patch):
    """What mixer and feed-forward give is added as it is."""
    skip_norms(patch, "post_attention_layernorm", "post_feedforward_layernorm")


def embedding_not_scaled(patch):
    """The embedding is not multiplied by the root of its width."""
    change_config(patch, decoder, "embed", scale_embeddings=False)


def scores_scaled_by_the_head_width(patch):
    """Scores are divided by the root of the head's width, whatever the config says."""
    change_config(patch, grouped_query_attention, "_attend", scale=None)


def change_window(patch, change):
    """`change`: number of tokens that a sliding layer sees -> another."""
    original = attention.attend

    def attend(*args, window, **options):
        window = None if window is None else change(window)
        return original(*args, window=window, **options)

    patch.setattr(attention, "attend", attend)


def window_one_token_longer(patch):
    """A sliding layer sees as many tokens as the window is long, and itself."""
    change_window(patch, lambda window: window + 1)


def window_one_token_shorter(patch):
    """A sliding layer sees one token less than the window is long, itself included."""
    change_window(patch, lambda window: window - 1)


def sliding_theta_in_global_layers(patch):
    """Global layers rotate by the frequencies of sliding ones."""
    change_rope(
        patch, lambda x, rope: dataclasses.replace(rope, theta=min(rope.theta, 1e4))
    )


def silu_in_the_feed_forward(patch):
    """The feed-forward's gate goes through silu, not gelu."""
    change_config(patch, mlp, "apply", activation="silu")


def weights_of_experts_not_renormalised(patch):
    """The weights of the chosen experts do not sum to one."""
    change_routing(patch, normalize=False)


def shared_expert_missing(patch):
    """Only the routed experts count."""
    patch.setattr(sparse_moe, "_shared", lambda weights, x, expert: jnp.zeros_like(x))


# -------------------------------------------------------------------------- Qwen3.5


def attention_not_gated(patch):
    """The output of attention does not pass its gate."""
    patch.setattr(grouped_query_attention, "jax", jax_with(sigmoid=jnp.ones_like))


def projection_grouped_by_key_head(patch):
    """in_proj_qkv is read key head by key head, as Qwen3-Next has it."""

    def regroup(weights, x, config):
        heads, width = config.num_key_heads, config.key_head_dim
        qkv, *rest = project(weights, x, config)
        grouped = qkv.reshape(*qkv.shape[:2], heads, -1)
        parts = jnp.split(grouped, [width, 2 * width], axis=-1)
        flat = (part.reshape(*qkv.shape[:2], -1) for part in parts)
        return jnp.concatenate(list(flat), axis=-1), *rest

    project = gated_delta_net._project
    patch.setattr(gated_delta_net, "_project", regroup)


def keys_before_queries(patch):
    """in_proj_qkv is read as keys, queries, values."""
    original = gated_delta_net._split_heads

    def split(mixed, config):
        q, k, v = original(mixed, config)
        return k, q, v

    patch.setattr(gated_delta_net, "_split_heads", split)


def exchange_projections(patch, one, other):
    change_weights(
        patch,
        gated_delta_net,
        "apply",
        lambda weights: {one: weights[other], other: weights[one]},
    )


def decay_and_strength_swapped(patch):
    """in_proj_a says how strongly a token is written, in_proj_b how much is kept."""
    exchange_projections(patch, "in_proj_a", "in_proj_b")


def values_and_gate_swapped(patch):
    """in_proj_z is the values' and what in_proj_qkv ends with the gate's."""
    original = gated_delta_net._project

    def project(weights, x, config):
        qkv, z, b, a = original(weights, x, config)
        qk, v = jnp.split(qkv, [2 * config.key_dim], axis=-1)
        values = z.reshape(*x.shape[:2], -1)
        return jnp.concatenate([qk, values], axis=-1), v.reshape(z.shape), b, a

    patch.setattr(gated_delta_net, "_project", project)


def decay_without_its_bias(patch):
    """dt_bias is not added."""
    change_weights(
        patch,
        gated_delta_net,
        "_log_decay",
        lambda weights: {"dt_bias": jnp.zeros_like(weights["dt_bias"])},
    )


def decay_rate_not_exponentiated(patch):
    """A_log is taken for the rate itself; its size, so that nothing grows."""
    change_weights(
        patch,
        gated_delta_net,
        "_log_decay",
        lambda weights: {"A_log": jnp.log(jnp.abs(weights["A_log"]))},
    )


def sections_one_after_the_other(patch):
    """The frequencies of time, of height and of width are three blocks."""

    def axes(rope):
        return tuple(int(axis) for axis in np.repeat(range(3), rope.sections))

    patch.setattr(rotary, "_axes", axes)


def all_frequencies_follow_time(patch):
    """Height and width of a token make no difference."""
    patch.setattr(rotary, "_axes", lambda rope: (0,) * sum(rope.sections))


def height_and_width_swapped(patch):
    """The frequencies of height follow width, and the other way round."""
    original = rotary._axes
    patch.setattr(
        rotary, "_axes", lambda rope: tuple(-axis % 3 for axis in original(rope))
    )


def shared_expert_not_gated(patch):
    """The shared expert counts in full."""
    patch.setattr(sparse_moe, "jax", jax_with(sigmoid=jnp.ones_like))


# -------------------------------------------------------------------------- Gemma 4


def value_norm_missing(patch):
    """Values are used as they are projected."""
    patch.setattr(grouped_query_attention, "unit_rms_norm", lambda x, eps: x)


def change_values(patch, change):
    """`change`: (values before their norm, weights, config) -> others."""
    original = grouped_query_attention._project_keys

    def project_keys(weights, x, config):
        k, v = original(weights, x, config)
        return k, change(v, weights, config)

    patch.setattr(grouped_query_attention, "_project_keys", project_keys)


def values_taken_behind_the_key_norm(patch):
    """Where keys are values, these are the keys after k_norm."""

    def change(v, weights, config):
        if not config.keys_are_values:
            return v
        return rms_norm(v, weights["k_norm"], config.norm_eps)

    change_values(patch, change)


def proportional_rotary_as_partial(patch):
    """Global layers rotate the first quarter of a head, as a head of that width."""

    def change(x, rope):
        if rope.turning_pairs is None:
            return rope
        width = 2 * rope.turning_pairs
        return dataclasses.replace(rope, rotary_dim=width, turning_pairs=None)

    change_rope(patch, change)


def layer_scalar_missing(patch):
    """The residual stream is not multiplied by layer_scalar."""
    change_weights(
        patch,
        decoder_layer,
        "apply",
        lambda weights: {"layer_scalar": jnp.ones_like(weights["layer_scalar"])},
    )


def layer_scalar_before_the_residual(patch):
    """layer_scalar multiplies what the feed-forward adds, not the whole stream."""
    name = "post_feedforward_layernorm"
    change_weights(
        patch,
        decoder_layer,
        "apply",
        lambda weights: {
            name: weights[name] * weights["layer_scalar"],
            "layer_scalar": jnp.ones_like(weights["layer_scalar"]),
        },
    )


def soft_cap_missing(patch):
    """Logits are not capped."""
    patch.setattr(decoder, "_cap", lambda logits, cap: logits)


def scale_per_expert_missing(patch):
    """per_expert_scale is not used."""
    change_routing(patch, per_expert_scale=None)


def experts_chosen_by_scaled_weights(patch):
    """per_expert_scale counts in the choice of experts."""

    def change(routed, logits, options):
        scores = jax.nn.softmax(logits) * options["per_expert_scale"][None]
        weights, experts = jax.lax.top_k(scores, routed.experts.shape[1])
        return routing.Routing(experts, weights)

    change_routed(patch, change)


def router_sees_the_normalised_stream(patch):
    """The router sees what the experts see, not the residual stream."""
    original = sparse_moe.apply
    patch.setattr(
        sparse_moe,
        "apply",
        lambda *args, router_input, **options: original(*args, **options),
    )


def experts_behind_the_norm_of_the_dense_branch(patch):
    """Experts and dense feed-forward see the same normalised stream."""
    original = decoder_layer._norm
    names = {"pre_feedforward_layernorm_2": "pre_feedforward_layernorm"}
    patch.setattr(
        decoder_layer,
        "_norm",
        lambda x, weights, name, config: original(
            x, weights, names.get(name, name), config
        ),
    )


def inputs_of_the_layer_before(patch):
    """A layer gets the per-layer input of the one before it, the first of the last."""
    original = decoder._layer_inputs
    patch.setattr(
        decoder, "_layer_inputs", lambda *args: jnp.roll(original(*args), 1, axis=0)
    )


def second_embedding_not_scaled(patch):
    """Rows of the second embedding are not multiplied by the root of their width."""
    original = decoder._rows

    def rows(table, tokens, context, config, scale):
        first = table.shape[-1] == config.hidden_size
        return original(table, tokens, context, config, scale if first else None)

    patch.setattr(decoder, "_rows", rows)


def layer_input_behind_the_layer_scalar(patch):
    """layer_scalar does not multiply what the layer's own input adds."""
    original = decoder_layer._layer_input

    def layer_input(weights, x, context, config):
        scalar = jnp.broadcast_to(weights["layer_scalar"], x.shape)
        return original(weights, x, context, config) / scalar

    patch.setattr(decoder_layer, "_layer_input", layer_input)


def keys_borrowed_of_the_first_lender(patch):
    """Keys are those of the first layer with the same mixer, not of the last."""
    original = decoder_layer.pass_keys_on

    def pass_keys_on(lent, aux, kind):
        passed, rest = original(lent, aux, kind)
        if aux.lent is None:
            return passed, rest
        before = lent[kind.mixer]
        first = ~jnp.any(before.keys)  # there is none yet: zeros
        kept = jax.tree.map(functools.partial(jnp.where, first), aux.lent, before)
        return {**lent, kind.mixer: kept}, rest

    for importer in (zoo_linen.stack, zoo_nnx.stack):
        patch.setattr(importer, "pass_keys_on", pass_keys_on)


def feed_forwards_of_one_width(patch):
    """Layers that borrow keys use no more of their feed-forward than others have."""
    width = load("gemma4_ple_kvshare").config.mlp.intermediate_size
    change_weights(
        patch,
        mlp,
        "apply",
        lambda weights: {
            "gate_proj": weights["gate_proj"][:, :width],
            "up_proj": weights["up_proj"][:, :width],
            "down_proj": weights["down_proj"][:width],
        },
    )


# -------------------------------------------------------------------------- Gemma 3


def positions_not_divided(patch):
    """The linear scaling of the rotation of global layers is left out."""
    change_rope(patch, lambda x, rope: dataclasses.replace(rope, scaling=None))


def positions_divided_in_every_layer(patch):
    """The linear scaling of global layers holds for sliding ones, too."""
    scaling = load("gemma3_text").config.attention.rope.scaling
    change_rope(patch, lambda x, rope: dataclasses.replace(rope, scaling=scaling))


def global_theta_in_sliding_layers(patch):
    """Sliding layers rotate by the frequencies of global ones."""
    change_rope(
        patch, lambda x, rope: dataclasses.replace(rope, theta=max(rope.theta, 1e6))
    )


# ---------------------------------------------------------------------- DeepSeek-V3


def rotary_halves(patch):
    """Component j pairs with j + R / 2, not 2 j with 2 j + 1."""
    change_rope(
        patch,
        lambda x, rope: dataclasses.replace(rope, interleaved=False),
        latent_attention,
    )


def change_rotary_key(patch, change):
    """`change`: (rotation, [B, T, 1, R] key, positions, config) -> another key."""
    original = latent_attention.rotate

    def rotate(x, positions, rope):
        if x.shape[2] > 1:  # queries, of every head
            return original(x, positions, rope)
        return change(original, x, positions, rope)

    patch.setattr(latent_attention, "rotate", rotate)


def rotary_key_not_rotated(patch):
    """The key that all heads share has no position."""
    change_rotary_key(patch, lambda rotate, x, positions, rope: x)


def rotary_key_normalised(patch):
    """The key that all heads share is at unit root mean square, as the latent is."""
    change_rotary_key(
        patch,
        lambda rotate, x, positions, rope: rotate(
            unit_rms_norm(x, 1e-6), positions, rope
        ),
    )


def skip_latent_norm(patch, dimensions):
    patch.setattr(
        latent_attention,
        "rms_norm",
        lambda x, weight, eps: x if x.ndim == dimensions else rms_norm(x, weight, eps),
    )


def latent_norm_of_queries_missing(patch):
    """q_a_layernorm is left out; that latent is [B, T, C]."""
    skip_latent_norm(patch, 3)


def latent_norm_of_keys_missing(patch):
    """kv_a_layernorm is left out; that latent is [B, T, 1, C]."""
    skip_latent_norm(patch, 4)


def scores_scaled_by_the_part_without_positions(patch):
    """Scores are divided by the root of nope_head_dim, not of the whole width."""
    patch.setattr(latent_attention, "_scale", lambda config: config.nope_head_dim**-0.5)


def rotary_part_of_queries_first(patch):
    """A query has its rotated components before the others."""
    original = latent_attention._queries

    def queries(weights, x, context, config):
        weight = weights["q_b_proj"]
        by_head = weight.reshape(-1, config.num_heads, config.head_dim)
        rolled = jnp.roll(by_head, -config.rope.rotary_dim, axis=-1)
        weights = {**weights, "q_b_proj": rolled.reshape(weight.shape)}
        return original(weights, x, context, config)

    patch.setattr(latent_attention, "_queries", queries)


def keys_and_values_as_two_blocks(patch):
    """kv_b_proj is cut into all keys and all values, not head by head."""
    original = latent_attention._attend_to_heads

    def attend(weights, q, joint, context, cache, config):
        weight, heads = weights["kv_b_proj"], config.num_heads
        blocks = jnp.split(weight, [heads * config.nope_head_dim], axis=-1)
        by_head = [block.reshape(len(weight), heads, -1) for block in blocks]
        mixed = jnp.concatenate(by_head, axis=-1).reshape(weight.shape)
        weights = {**weights, "kv_b_proj": mixed}
        return original(weights, q, joint, context, cache, config)

    patch.setattr(latent_attention, "_attend_to_heads", attend)


def bias_in_the_weights(patch):
    """Experts are weighed by the scores with the bias that is for choosing only."""

    def change(routed, logits, options):
        biased = jax.nn.sigmoid(logits) + options["correction_bias"][None]
        weights = jnp.take_along_axis(biased, routed.experts, axis=-1)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return routed._replace(weights=weights * options["scaling_factor"])

    change_routed(patch, change)


def bias_missing_in_the_choice(patch):
    """Experts are chosen by their scores alone."""
    change_routing(patch, correction_bias=None)


def groups_ignored(patch):
    """Experts are chosen from all groups."""
    change_routing(patch, num_groups=1, groups_per_token=1)


def groups_judged_by_their_best_expert(patch):
    """A group's score is its best expert's, not the sum of its two best."""

    def in_best_groups(choice, groups, kept):
        grouped = choice.reshape(len(choice), groups, -1)
        best = jnp.max(grouped, axis=-1)
        least = jax.lax.top_k(best, kept)[0][:, -1:]
        allowed = (best >= least)[:, :, None]
        return jnp.where(allowed, grouped, -jnp.inf).reshape(choice.shape)

    patch.setattr(routing, "_in_best_groups", in_best_groups)


def scores_by_softmax(patch):
    """The router's scores are a softmax, not sigmoids."""
    change_routing(patch, scores="softmax")


def scaling_factor_missing(patch):
    """The experts' weights sum to one, not to routed_scaling_factor."""
    change_routing(patch, scaling_factor=1.0)


# Family: golden case and section: faults. Windows are 16 tokens long.
FAULTS = {
    "qwen3_5": {
        ("qwen3_5_dense_8l", "fwd/5"): (
            layer_norms_of_the_other_form,
            query_and_key_norms_of_the_other_form,
            attention_not_gated,
            projection_grouped_by_key_head,
            keys_before_queries,
            decay_and_strength_swapped,
            values_and_gate_swapped,
            decay_without_its_bias,
            decay_rate_not_exponentiated,
        ),
        ("qwen3_5_dense_8l", "mrope"): (
            sections_one_after_the_other,
            all_frequencies_follow_time,
            height_and_width_swapped,
        ),
        ("qwen3_5_moe_8l", "fwd/5"): (
            weights_of_experts_not_renormalised,
            shared_expert_not_gated,
        ),
    },
    "gemma4": {
        ("gemma4_dense", "fwd/5"): (
            layer_norms_of_the_other_form,
            query_and_key_norms_of_the_other_form,
            output_norms_missing,
            value_norm_missing,
            values_taken_behind_the_key_norm,
            scores_scaled_by_the_head_width,
            proportional_rotary_as_partial,
            sliding_theta_in_global_layers,
            silu_in_the_feed_forward,
            embedding_not_scaled,
            layer_scalar_missing,
            layer_scalar_before_the_residual,
            soft_cap_missing,
        ),
        ("gemma4_dense", "fwd/65"): (
            window_one_token_longer,
            window_one_token_shorter,
        ),
        # The size of a token's weights is no matter here: a norm follows the experts.
        ("gemma4_moe", "fwd/5"): (
            scale_per_expert_missing,
            experts_chosen_by_scaled_weights,
            router_sees_the_normalised_stream,
            experts_behind_the_norm_of_the_dense_branch,
        ),
        ("gemma4_ple_kvshare", "fwd/5"): (
            inputs_of_the_layer_before,
            second_embedding_not_scaled,
            layer_input_behind_the_layer_scalar,
            keys_borrowed_of_the_first_lender,
            feed_forwards_of_one_width,
        ),
    },
    "gemma3": {
        ("gemma3_text", "fwd/5"): (
            layer_norms_of_the_other_form,
            query_and_key_norms_of_the_other_form,
            output_norms_missing,
            scores_scaled_by_the_head_width,
            positions_not_divided,
            positions_divided_in_every_layer,
            global_theta_in_sliding_layers,
            embedding_not_scaled,
        ),
        ("gemma3_text", "fwd/65"): (
            sliding_theta_in_global_layers,
            window_one_token_longer,
            window_one_token_shorter,
        ),
    },
    "deepseek_v3": {
        ("deepseek_v3", "fwd/5"): (
            layer_norms_of_the_other_form,
            rotary_halves,
            rotary_key_not_rotated,
            rotary_key_normalised,
            latent_norm_of_queries_missing,
            latent_norm_of_keys_missing,
            scores_scaled_by_the_part_without_positions,
            rotary_part_of_queries_first,
            keys_and_values_as_two_blocks,
            bias_in_the_weights,
            bias_missing_in_the_choice,
            groups_ignored,
            groups_judged_by_their_best_expert,
            scores_by_softmax,
            scaling_factor_missing,
            weights_of_experts_not_renormalised,
            shared_expert_missing,
        ),
    },
}
# Tracing is what costs. That two wrong copies agree is seen on some of each family, one
# in what frontends patch themselves among them; the others are measured in Linen.
IN_BOTH_FRONTENDS = (
    ("qwen3_5_dense_8l", decay_and_strength_swapped),
    ("qwen3_5_dense_8l", height_and_width_swapped),
    ("qwen3_5_moe_8l", shared_expert_not_gated),
    ("gemma4_dense", layer_scalar_before_the_residual),
    ("gemma4_moe", router_sees_the_normalised_stream),
    ("gemma4_ple_kvshare", keys_borrowed_of_the_first_lender),
    ("gemma3_text", positions_not_divided),
    ("gemma3_text", output_norms_missing),
    ("deepseek_v3", rotary_halves),
    ("deepseek_v3", groups_ignored),
)
PLACES = [place for faults in FAULTS.values() for place in faults]
PLANTED = [
    pytest.param(*place, fault, id=f"{place[0]}-{fault.__name__}")
    for family in FAULTS.values()
    for place, faults in family.items()
    for fault in faults
]


# ------------------------------------------------------------------------- tools


def change_config(patch, module, name, **changes):
    """`module.name` is called with its config, the last argument, changed."""
    original = getattr(module, name)

    def changed(*args, **options):
        if "config" in options:
            config = dataclasses.replace(options.pop("config"), **changes)
            return original(*args, config=config, **options)
        *args, config = args
        return original(*args, dataclasses.replace(config, **changes), **options)

    patch.setattr(module, name, changed)


def change_weights(patch, module, name, change):
    """`change`: weights that `module.name` is called with -> those that differ."""
    original = getattr(module, name)
    patch.setattr(
        module,
        name,
        lambda weights, *args, **options: original(
            {**weights, **change(weights)}, *args, **options
        ),
    )


def change_routing(patch, **changes):
    original = sparse_moe.route
    patch.setattr(
        sparse_moe,
        "route",
        lambda *args, **options: original(*args, **{**options, **changes}),
    )


def change_routed(patch, change):
    """`change`: (routing, logits, options of `route`) -> another routing."""
    original = sparse_moe.route

    def route(logits, k, **options):
        return change(original(logits, k, **options), logits, options)

    patch.setattr(sparse_moe, "route", route)


def skip_norms(patch, *names):
    original = decoder_layer._norm
    patch.setattr(
        decoder_layer,
        "_norm",
        lambda x, weights, name, config: (
            x if name in names else original(x, weights, name, config)
        ),
    )


@pytest.mark.parametrize("family", FAULTS)
def test_at_least_ten_faults_of_each_family_are_planted(family):
    faults = [fault for some in FAULTS[family].values() for fault in some]
    assert len(set(faults)) >= 10
    assert all(fault.__doc__ for fault in faults)


@pytest.mark.parametrize(("case", "section"), PLACES)
def test_without_a_fault_the_oracle_passes_and_the_frontends_agree(case, section):
    results, distance = measure(load(case), section)
    assert compare_bytes(*results, finite=True).equal
    assert distance <= TOLERANCES["logits"]


@pytest.mark.parametrize(("case", "section", "fault"), PLANTED)
def test_a_fault_fails_the_oracle(case, section, fault):
    model = load(case)  # before the fault is there
    both = (case, fault) in IN_BOTH_FRONTENDS
    with planted(fault):
        results, distance = measure(model, section, both=both)
    if both:
        difference = compare_bytes(*results, finite=True)
        assert difference.equal, difference.differences
    assert MARGIN * TOLERANCES["logits"] <= distance < np.inf, fault.__doc__
