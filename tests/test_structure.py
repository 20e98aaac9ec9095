"""How the decoders run their layers: every layer once, in order, in both frontends.

Programs are looked at as jaxprs or lowered text where that says enough: nothing is
compiled for those.
"""

import functools
from collections import Counter

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from parity.trees import compare_bytes, compare_structure
from shared.layers import (
    decoder,
    decoder_layer,
    experts,
    gated_delta_net,
    grouped_query_attention,
    mlp,
    sparse_moe,
)
from shared.layers.decoder_layer import LayerAux
from shared.trees import flatten

L = shared.LayerKind("linear_attention", "moe")
F = shared.LayerKind("full_attention", "moe")
L_DENSE = shared.LayerKind("linear_attention", "dense")
F_DENSE = shared.LayerKind("full_attention", "dense")

TINY = shared.preset("qwen3-next-tiny")  # L L L F, and L L as the remainder
# Two blocks and a remainder, of which each run compiles fast.
NESTED = TINY.replace(layers=(L_DENSE, L_DENSE, F) * 2 + (L_DENSE,))
FRONTENDS = ("linen", "nnx")
LOOP_ATOL = 1e-5  # the same operations in float32, in programs cut up differently
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 5)), jnp.int32)


@functools.cache
def weights(config):
    """Random parameters; vectors too, which start out equal in all layers."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(generator.normal(0, 0.2, x.shape), x.dtype),
        shared.abstract_params(config),
    )


@functools.cache
def decoder_apply(config, frontend):
    """The frontend's decoder as a function of parameters and tokens."""
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    build = lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
    return zoo_nnx.as_function(nnx.eval_shape(build))


@functools.cache
def forward(config, frontend):
    """Jitted, for values."""
    apply = decoder_apply(config, frontend)

    def forward(params, tokens):
        output = apply(params, tokens)
        return drop_none(
            logits=output.logits,
            aux_loss=output.aux_loss,
            router_logits=output.router_logits,
        )

    return jax.jit(forward)


def drop_none(**results):
    return {name: x for name, x in results.items() if x is not None}


def total_loss(apply, config, params, tokens):
    return shared.decoder_loss(apply(params, tokens), tokens, config).total


# --------------------------------------------------------------- all layers, in order


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_remainder_counts(frontend):
    run, params = forward(TINY, frontend), weights(TINY)
    perturbed = {
        **params,
        "layers_remainder": jax.tree.map(
            lambda x: x + jnp.full_like(x, 0.1), params["layers_remainder"]
        ),
    }
    logits, moved = (run(p, TOKENS)["logits"] for p in (params, perturbed))
    assert np.abs(logits - moved).max() > 1e-2


@pytest.mark.parametrize(
    "name,groups",
    [
        ("qwen3-next-tiny", {"layers", "layers_remainder"}),
        ("qwen3-next-8l-tiny", {"layers"}),
    ],
)
def test_only_layers_beyond_whole_periods_are_a_remainder(name, groups):
    pair = decoders.abstract_pair(shared.preset(name))
    outer = set(decoder.outer_specs(pair.config))
    assert set(pair.params) - outer == groups
    assert set(zoo_nnx.to_params(pair.nnx)) - outer == groups


@functools.partial(jax.jit, static_argnames=("config", "kind"))
def run_one_layer(params, x, context, config, kind):
    """One layer by the shared functions alone."""

    def own(params, specs):
        return {name: params[name] for name in specs}

    def mix(x, context, cache):
        name = decoder_layer.mixer_name(kind)
        part = decoder_layer.mixer_part(config, kind)
        full = kind.mixer == "full_attention"
        layer = grouped_query_attention if full else gated_delta_net
        return layer.apply(params[name], x, context, cache, config=part)

    def mixture(x, context):
        part = params["mlp"]
        moe = config.moe
        return sparse_moe.apply(
            own(part, sparse_moe.param_specs(config.moe)),
            x,
            context,
            experts=functools.partial(experts.apply, part["experts"], config=moe),
            shared_expert=functools.partial(
                mlp.apply, part["shared_expert"], config=moe.shared_expert
            ),
            config=moe,
        )

    dense = functools.partial(mlp.apply, params["mlp"], config=config.mlp)
    x, _, aux = decoder_layer.apply(
        own(params, decoder_layer.own_specs(config, kind)),
        x,
        context,
        None,
        modules={
            decoder_layer.mixer_name(kind): mix,
            "mlp": dense if kind.feed_forward == "dense" else mixture,
        },
        config=config,
        kind=kind,
    )
    return x, aux.router


def run_in_a_loop(config, params, tokens, leave_out=()):
    """The decoder as a plain loop over its layers: no plan, no scan, no Flax."""
    context = shared.Context.create(tokens.shape)
    outer = {name: params[name] for name in decoder.outer_specs(config)}
    x, routers = decoder.embed(outer, tokens, context, config), []
    layers = config.plan.unstack(params, config.param_scan_axis)
    for i, (kind, layer) in enumerate(zip(config.layers, layers, strict=True)):
        if i in leave_out:
            continue
        # Equal layers of all models share one compiled function.
        alone = config.replace(layers=(kind,), scan_layers=False, scan_period=None)
        x, router = run_one_layer(layer, x, context, alone, kind)
        routers += [] if router is None else [router]
    _, logits = decoder.head(outer, x, config)
    if not routers:
        return {"logits": logits}
    experts_of_all = jax.tree.map(lambda *leaves: jnp.stack(leaves), *routers)
    return {
        "logits": logits,
        "aux_loss": decoder.load_balance_loss(experts_of_all.stats),
        "router_logits": experts_of_all.logits,
    }


def assert_equals_loop(config, params=None):
    params = weights(config) if params is None else params
    expected = run_in_a_loop(config, params, TOKENS)
    results = [forward(config, name)(params, TOKENS) for name in FRONTENDS]
    assert compare_bytes(*results, finite=True).equal
    assert set(results[0]) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(results[0][name], value, rtol=0, atol=LOOP_ATOL)


@pytest.mark.parametrize("config", [TINY, NESTED], ids=["one block", "two blocks"])
def test_the_nested_model_equals_a_loop_over_its_layers(config):
    assert_equals_loop(config)


def test_the_loop_notices_each_layer():
    params = weights(TINY)
    whole = run_in_a_loop(TINY, params, TOKENS)["logits"]
    for i in range(TINY.num_layers):
        without = run_in_a_loop(TINY, params, TOKENS, leave_out=(i,))["logits"]
        assert np.abs(whole - without).max() > 100 * LOOP_ATOL


@pytest.mark.parametrize(
    "kinds,group_names",
    [
        ("FLLFLL", {"layers": ["global_layer", "local_layers_after"]}),
        ("LFLLLFLLL", {"layers": ["local_layers", "global_layer", "local_layers_after"],
                       "layers_remainder": ["local_layers"]}),
        ("LLFLLFF", {"layers": ["local_layers", "global_layer"],
                     "layers_remainder": ["global_layer"]}),
    ],
)  # fmt: skip
def test_the_full_layer_stands_anywhere_in_the_period(kinds, group_names):
    by_letter = {"L": L_DENSE, "F": F_DENSE}
    config = TINY.replace(layers=tuple(by_letter[kind] for kind in kinds))
    found = {
        group.name: [run.name for run in group.runs] for group in config.plan.groups
    }
    assert found == group_names
    assert_equals_loop(config)


def test_a_dense_prefix_stands_before_the_blocks():
    config = shared.preset("qwen3-next-dense-prefix-tiny")
    assert [group.name for group in config.plan.groups][:2] == ["prefix", "layers"]
    assert_equals_loop(config)


def test_a_dense_prefix_gives_the_numbers_of_the_unscanned_model():
    config = TINY.replace(layers=(L_DENSE,) + (L, F_DENSE) * 2)
    assert [group.name for group in config.plan.groups] == ["prefix", "layers"]
    assert_equals_loop(config)

    unscanned, params = config.replace(scan_layers=False), weights(config)
    layers = config.plan.unstack(params, config.param_scan_axis)
    outer = {name: params[name] for name in decoder.outer_specs(config)}
    flat = {**outer, **unscanned.plan.stack(layers)}
    assert_equals_loop(unscanned, flat)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_period_that_the_layers_contradict_is_refused(scan_layers):
    with pytest.raises(shared.PlanError) as error:
        TINY.replace(scan_period=3, scan_layers=scan_layers)
    assert (
        "scan_period=3 contradicts the layers: layer 3 is full_attention+moe, but "
        "layer 0, at the same place of the first period, is linear_attention+moe"
    ) in str(error.value)


# ------------------------------------------------- against a decoder by nnx.scan


def stacked(number, axis_name, make, rngs):
    """`number` modules as one, the usual way in NNX."""
    names = {nnx.PARTITION_NAME: axis_name}
    make = nnx.vmap(make, transform_metadata=names)
    return nnx.split_rngs(splits=number)(make)(rngs)


def scan_modules(modules, x, axis_name, run):
    """Runs stacked modules one after the other, the usual way in NNX."""
    return nnx.scan(
        run,
        in_axes=(0, nnx.Carry),
        out_axes=(nnx.Carry, 0),
        transform_metadata={nnx.PARTITION_NAME: axis_name},
    )(modules, x)


class LocalLayers(nnx.Module):
    def __init__(self, config, number, *, rngs):
        make = lambda rngs: zoo_nnx.DecoderLayer(config, L_DENSE, rngs=rngs)
        self.local_layers = stacked(number, "layers", make, rngs)

    def __call__(self, x, context):
        def run(layer, x):
            x, _, _ = layer(x, context)
            return x, None

        x, _ = scan_modules(self.local_layers, x, "layers", run)
        return x


class HybridBlock(LocalLayers):
    def __init__(self, config, number, *, rngs):
        super().__init__(config, number, rngs=rngs)
        self.global_layer = zoo_nnx.DecoderLayer(config, F, rngs=rngs)

    def __call__(self, x, context):
        x, _, aux = self.global_layer(super().__call__(x, context), context)
        return x, aux.router


class ScannedDecoder(nnx.Module):
    """`NESTED`, written by hand with nothing but NNX's own transforms."""

    def __init__(self, config, *, rngs):
        self.config = config
        for name, spec in decoder.outer_specs(config).items():
            value = jnp.zeros(spec.shape)
            param = nnx.Param(value, out_sharding=spec.axes, eager_sharding=False)
            setattr(self, name, param)
        make = lambda rngs: HybridBlock(config, 2, rngs=rngs)
        self.layers = stacked(2, "blocks", make, rngs)
        self.layers_remainder = LocalLayers(config, 1, rngs=rngs)

    def __call__(self, tokens, *, deterministic=True):
        config, context = self.config, shared.Context.create(tokens.shape)
        assert deterministic  # `as_function` says so; nothing here is random
        outer = {name: getattr(self, name)[...] for name in decoder.outer_specs(config)}
        x = decoder.embed(outer, tokens, context, config)
        x, router = scan_modules(
            self.layers, x, "blocks", lambda block, x: block(x, context)
        )
        x = self.layers_remainder(x, context)
        _, logits = decoder.head(outer, x, config)
        loss = decoder.load_balance_loss(router.stats)
        return shared.DecoderOutput(logits, None, loss, router.logits, None)


def abstract(build):
    return nnx.eval_shape(lambda: build(NESTED, rngs=nnx.Rngs(0)))


def test_a_decoder_by_nnx_scan_has_the_same_tree():
    trees = []
    for build in (ScannedDecoder, zoo_nnx.Decoder):
        state = nnx.state(abstract(build), nnx.Param)
        names = {
            path: tuple(variable.get_metadata()["out_sharding"])
            for path, variable in nnx.to_flat_state(state)
        }
        trees.append((nnx.to_pure_dict(state), names))
    (by_hand, hand_axes), (ours, our_axes) = trees
    assert compare_structure(by_hand, ours, axes=(hand_axes, our_axes)).equal


# The optimisations that users have. Without them, as in the other tests, jax 0.12
# rounds one gradient of the two programs apart; where both are equal either way,
# compiling without them is faster.
XLA_OPTIONS = (
    {}
    if jax.__version_info__ < (0, 11)
    else {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    }
)


def test_a_decoder_by_nnx_scan_gives_the_same_numbers_and_gradients():
    results = []
    for build in (ScannedDecoder, zoo_nnx.Decoder):
        apply = zoo_nnx.as_function(abstract(build))

        @functools.partial(jax.jit, compiler_options=XLA_OPTIONS)
        def run(params, tokens, apply=apply):
            def loss(params):
                output = apply(params, tokens)
                return shared.decoder_loss(output, tokens, NESTED).total, output

            gradients, output = jax.grad(loss, has_aux=True)(params)
            return {
                "logits": output.logits,
                "aux_loss": output.aux_loss,
                "router_logits": output.router_logits,
                "gradients": gradients,
            }

        results.append(run(weights(NESTED), TOKENS))
    compared = compare_bytes(*results, names=("by hand", "ours"), finite=True)
    assert compared.equal, compared.differences


# --------------------------------------------------------------- the programs' shape


def equations(jaxpr, inside=()):
    """Every equation with the names of those it stands in."""
    for equation in jaxpr.eqns:
        yield equation, inside
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner, (*inside, equation.primitive.name))


REMAT = ("checkpoint", "remat", "remat2")


# Of such a size that nothing made from tokens has the shape of a weight.
ABSTRACT_TOKENS = jax.ShapeDtypeStruct((3, 7), jnp.int32)


def forward_jaxpr(apply, config):
    params = shared.abstract_params(config)
    return jax.make_jaxpr(apply)(params, ABSTRACT_TOKENS).jaxpr


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    "policy,scan_layers",
    [("none", True), ("full", True), ("dots_saveable", True), ("full", False)],
)
def test_each_layer_is_rematerialised_once(frontend, policy, scan_layers):
    config = NESTED.replace(remat_policy=policy, scan_layers=scan_layers)
    apply = decoder_apply(config, frontend)
    found = [
        inside
        for equation, inside in equations(forward_jaxpr(apply, config))
        if equation.primitive.name in REMAT
    ]
    runs = len(list(config.plan.runs()))
    assert len(found) == (0 if policy == "none" else runs)
    assert not any(set(REMAT) & set(inside) for inside in found)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_flat_block_is_rematerialised_as_a_whole_without_inner_loops(frontend):
    nested = NESTED.replace(remat_policy="full")
    expected = {
        "nested": (3, 2),  # two runs in a loop over blocks, and the remainder
        "flat": (2, 1),
    }
    for form, (remats, loops_of_two) in expected.items():
        config = nested.replace(block_form=form)
        found = equations(forward_jaxpr(decoder_apply(config, frontend), config))
        steps = [equation for equation, _ in found]
        assert sum(step.primitive.name in REMAT for step in steps) == remats
        scans = [step for step in steps if step.primitive.name == "scan"]
        trips = [s.params["length"] // s.params["unroll"] for s in scans]
        assert trips.count(2) == loops_of_two


def weight_shapes(config):
    """Shapes of all matrices of the layers: of one layer, of a run, of all blocks."""
    shapes = set()
    params = shared.abstract_params(config)
    for place in config.plan.places():
        node = params
        for name in place.path:
            node = node[name]
        for _, leaf in flatten(node):
            if leaf.ndim - len(place.slot) >= 2:
                shapes |= {leaf.shape[i:] for i in range(len(place.slot) + 1)}
    return shapes


def weights_through_scans(jaxpr, config):
    """What scans carry or return that has the shape of a layer's matrices."""
    forbidden = weight_shapes(config)
    return [
        var.aval.shape
        for equation, _ in equations(jaxpr)
        if equation.primitive.name in ("scan", "while")
        for var in equation.outvars
        if var.aval.shape in forbidden
    ]


def saving_jaxpr(apply, config):
    """The forward part of a gradient: its results are what the backward part needs."""
    loss = functools.partial(total_loss, apply, config)

    def save(params, tokens):
        return jax.vjp(lambda params: loss(params, tokens), params)

    return forward_jaxpr(save, config)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_no_scan_carries_or_returns_weights(frontend, policy):
    config = NESTED.replace(remat_policy=policy)
    apply = decoder_apply(config, frontend)
    assert weights_through_scans(forward_jaxpr(apply, config), config) == []
    assert weights_through_scans(saving_jaxpr(apply, config), config) == []


def test_weights_that_go_through_a_scan_are_seen():
    shape = next(s for s in weight_shapes(NESTED) if len(s) == 2 and s[0] == s[1])

    # JAX itself takes out what a step gives on as it is, so the step changes it.
    def carries(carry, _):
        x, kernel = carry
        return (x @ kernel, kernel * 1), None

    def returns(x, kernel):
        return x @ kernel, kernel * 1

    def run(x, kernel):
        (x, _), _ = jax.lax.scan(carries, (x, kernel), length=1)
        return jax.lax.scan(returns, x, jnp.stack([kernel, kernel]))

    jaxpr = jax.make_jaxpr(run)(jnp.zeros((3, shape[0])), jnp.zeros(shape)).jaxpr
    assert weights_through_scans(jaxpr, NESTED) == [shape, (2, *shape)]


KEEP = "skip-simplify-while-loops_trip-count-one"


def kept_loops(function, config):
    """How many loops around a full layer have the mark in the lowered text."""
    params = shared.abstract_params(config)
    text = jax.jit(function).lower(params, ABSTRACT_TOKENS).as_text()
    loops = [
        line for line in text.splitlines() if "stablehlo.while" in line and KEEP in line
    ]
    # Loops inside the layer are marked as well; only that around it has this weight.
    spec = grouped_query_attention.param_specs(config.attention)["q_proj"]
    weight = "tensor<{}x{}xf32>".format(*spec.shape)
    return sum(weight in loop for loop in loops)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("policy", "loops"), [("none", 0), ("full", 1)])
def test_the_loop_around_a_rematerialised_full_layer_is_marked_to_be_kept(
    frontend, policy, loops
):
    config = NESTED.replace(remat_policy=policy)
    apply = decoder_apply(config, frontend)
    assert kept_loops(apply, config) == loops
    gradient = jax.grad(functools.partial(total_loss, apply, config))
    assert kept_loops(gradient, config) == 2 * loops  # forward and backward part


# --------------------------------------------------------------- calling it again

CALLS = Counter()


class CountingNNXLayer(nnx.Module):
    """Counts how often it is traced, and how often each layer runs."""

    def __init__(self, config, kind, *, rngs):
        self.kind = kind
        self.weight = nnx.Param(jnp.full((config.hidden_size,), 0.5))
        self.runs = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x, context, cache=None):
        CALLS["nnx"] += 1
        self.runs[...] = self.runs[...] + 1
        return x * self.weight[...][None, None], cache, LayerAux(None, None)


class CountingLinenLayer(nn.Module):
    """The same."""

    config: shared.DecoderConfig
    kind: shared.LayerKind

    @nn.compact
    def __call__(self, x, context, cache=None):
        CALLS["linen"] += 1
        shape = (self.config.hidden_size,)
        weight = self.param("weight", nn.initializers.constant(0.5), shape)
        return x * weight[None, None], cache, LayerAux(None, None)


def test_a_second_eager_call_of_an_nnx_decoder_traces_nothing():
    model = zoo_nnx.Decoder(NESTED, layer=CountingNNXLayer, rngs=nnx.Rngs(0))
    first = model(TOKENS)
    traced = CALLS["nnx"]
    assert traced > 0
    second = model(TOKENS)
    third = model(TOKENS[::-1])
    assert CALLS["nnx"] == traced
    for other in (second, third):
        chex.assert_trees_all_equal_shapes_and_dtypes(first, other)
    for count in jax.tree.leaves(nnx.state(model, nnx.BatchStat)):
        np.testing.assert_array_equal(count, jnp.full_like(count, 3))


def test_a_second_jitted_call_of_a_linen_decoder_traces_nothing():
    model = zoo_linen.Decoder(NESTED, layer=CountingLinenLayer)
    variables = model.init(jax.random.key(0), TOKENS)
    chex.clear_trace_counter()
    run = jax.jit(chex.assert_max_traces(lambda *args: model.apply(*args), n=1))
    first, traced = run(variables, TOKENS), CALLS["linen"]
    second = run(variables, TOKENS[::-1])
    assert CALLS["linen"] == traced > 0
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("hidden", [False, True])
def test_two_calls_give_results_of_one_structure(frontend, hidden):
    """Aux too: nothing a first call leaves behind shows in the second."""
    params = shared.abstract_params(NESTED)
    apply = functools.partial(
        decoder_apply(NESTED, frontend), output_hidden_states=hidden
    )
    first, second = (jax.eval_shape(apply, params, TOKENS) for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)

    sparse = sum(kind.feed_forward == "moe" for kind in NESTED.layers)
    assert first.router_logits.shape == (sparse, *TOKENS.shape, TINY.moe.num_experts)
    assert (first.hidden_states is not None) == hidden
    if hidden:
        shape = (NESTED.num_layers, *TOKENS.shape, NESTED.hidden_size)
        assert first.hidden_states.layers.shape == shape


def test_a_jitted_nnx_model_is_traced_once():
    model = zoo_nnx.Decoder(NESTED, layer=CountingNNXLayer, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda model, tokens: model(tokens))
    first, traced = run(model, TOKENS), CALLS["nnx"]
    second = run(model, TOKENS)
    assert CALLS["nnx"] == traced
    chex.assert_trees_all_equal_shapes_and_dtypes(first, second)
