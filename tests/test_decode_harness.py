"""Decoding of every layout of layers, through the engine and layer by layer.

A model family adds rows to `CASES`. What is called equal is equal to the bit, unless a
tolerance stands beside it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shared
import zoo_linen
import zoo_nnx
from parity.trees import compare_bytes, compare_structure
from shared import generation
from shared.cache import GatedDeltaNetCache, KVCache
from shared.config import LayerKind
from shared.context import Context
from shared.generation import Engine, Request
from shared.layers import decoder
from shared.presets import hybrid_layers, preset, qwen3_next_tiny


class Case(NamedTuple):
    """A model that decodes.

    Attributes:
      name: of the case.
      config: makes the config.
      seed: of the prompt. Best and second-best tokens must be far apart; else take
        another.
    """

    name: str
    config: Callable[[], shared.DecoderConfig]
    seed: int = 0


def unscanned():
    """One period of layers, which is a layer of each sort."""
    config = preset("qwen3-next-8l-tiny")
    return config.replace(layers=config.layers[:4], scan_layers=False)


CASES = (
    Case("unscanned", unscanned),
    Case("scanned", lambda: preset("qwen3-next-8l-tiny")),
    Case("scanned_remainder", lambda: preset("qwen3-next-tiny")),
    Case("gemma_4_experts", lambda: preset("gemma-4-moe-tiny")),
    Case("gemma_4_borrowed_keys", lambda: preset("gemma-4-e-tiny"), seed=1),
    Case("deepseek_v3", lambda: preset("deepseek-v3-tiny")),
)
FRONTENDS = ("linen", "nnx")
PROMPT, STEPS, MAX_LENGTH = 5, 5, 32  # a prompt of 5 is filled up to 16
WHOLE = 15  # length of plain forward passes

# float32 rounding, in programs of other shapes; of logits and log-probabilities near 1,
# and of caches relative to the largest number of a leaf.
ATOL = 1e-4
# A choice between tokens that are nearer proves nothing.
LEAST_GAP = 100 * ATOL

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_frontend = pytest.mark.parametrize("frontend", FRONTENDS)


@functools.cache
def weights(config):
    """Random parameters, large enough that an answer depends on all of its prompt."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(0, 0.2, leaf.shape), leaf.dtype),
        shared.abstract_params(config),
    )


@functools.cache
def model_of(frontend, config):
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    build = lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
    return zoo_nnx.as_function(nnx.eval_shape(build))


def prompt_of(case):
    random = np.random.default_rng(case.seed)
    vocab_size = case.config().vocab_size
    return random.integers(0, vocab_size, PROMPT, dtype=np.int32)


@functools.partial(jax.jit, static_argnames="model")
def logits_of(model, params, tokens):
    return model(params, tokens).logits


def forward(case, tokens):
    """Logits of a plain forward pass: no cache, no padding."""
    config = case.config()
    with jax.default_matmul_precision("highest"):
        logits = logits_of(model_of("linen", config), weights(config), tokens)
    return np.asarray(logits)


class Served(NamedTuple):
    """What came out of the engine.

    Attributes:
      tokens: the answer.
      log_probs: of each token.
      caches: of the prompt, and of all slots in the end.
    """

    tokens: list[int]
    log_probs: list[float]
    caches: dict


@functools.cache
def served(case, frontend):
    config = case.config()
    with jax.default_matmul_precision("highest"):
        engine = Engine(
            model_of(frontend, config),
            weights(config),
            slots=2,
            max_length=MAX_LENGTH,
            stop_tokens=(),
        )
        prefix = engine.prefill(Request(prompt_of(case), STEPS))
        engine.insert(prefix, 0)
        tokens = [int(prefix.first.token[0])]
        log_probs = [float(prefix.first.log_prob[0])]
        for _ in range(STEPS - 1):
            (token,) = engine.generate()
            assert token.row == 0
            tokens.append(token.token)
            log_probs.append(token.log_prob)
        assert token.reason == "length"
        assert engine.generate() == []
    return Served(tokens, log_probs, named(prefix=prefix.cache, slots=engine.cache))


def named(**caches):
    """Layer caches as nested dicts, for comparison."""
    as_dict = lambda cache: (
        cache._asdict()
        if isinstance(cache, tuple)
        else {key: as_dict(value) for key, value in cache.items()}
    )
    return as_dict(caches)


@functools.cache
def teacher_forced(case):
    """Logits [STEPS, V] after each prefix of prompt and answer.

    A row a prefix, filled up with tokens that it cannot see.
    """
    whole = np.array([*prompt_of(case), *served(case, "linen").tokens], np.int32)
    rows = np.empty((STEPS, WHOLE), np.int32)
    for step, row in enumerate(rows):
        row[: PROMPT + step], row[PROMPT + step :] = whole[: PROMPT + step], 7 * step
    logits = forward(case, rows)
    return logits[np.arange(STEPS), PROMPT - 1 + np.arange(STEPS)]


def assert_far_from_ties(logits):
    second, best = np.sort(logits, axis=-1)[:, -2:].T
    assert (best - second).min() > LEAST_GAP, "Too near a tie: take another seed."


# Through the engine.


@every_frontend
@every_case
def test_served_tokens_are_the_arg_max_of_a_forward_over_the_growing_prefix(
    case, frontend
):
    answer, logits = served(case, frontend), teacher_forced(case)
    assert_far_from_ties(logits)
    assert answer.tokens == np.argmax(logits, axis=-1).tolist()
    log_probs = jax.nn.log_softmax(logits)[np.arange(STEPS), answer.tokens]
    np.testing.assert_allclose(answer.log_probs, log_probs, rtol=0, atol=ATOL)
    # Another first token of the prompt gives other logits: the past is seen.
    changed = np.array([[*prompt_of(case), *answer.tokens, *[0] * 5]] * STEPS, np.int32)
    changed[:, 0] += 1
    at_end = forward(case, changed)[0, PROMPT + STEPS - 2]
    assert np.max(np.abs(at_end - logits[-1])) > LEAST_GAP


@every_case
def test_both_frontends_serve_the_same_tokens_log_probs_and_caches(case):
    linen, other = (served(case, frontend) for frontend in FRONTENDS)
    assert linen.tokens == other.tokens
    assert linen.log_probs == other.log_probs
    compared = compare_bytes(linen.caches, other.caches, finite=True)
    assert compared.equal, compared.differences


# One model, built once, that reads and decodes in turns.


@functools.cache
def caller(frontend, config):
    """Calls one built module, jitted."""
    if frontend == "linen":
        module = zoo_linen.Decoder(config)
        run = jax.jit(lambda params, *args: call(bound(module, params), *args))
        return functools.partial(run, weights(config))
    model = zoo_nnx.from_params(config, weights(config))
    return functools.partial(nnx.jit(call), model)


def bound(module, params):
    return lambda *args, **options: module.apply({"params": params}, *args, **options)


def call(model, tokens, cache):
    output = model(tokens, cache=cache)
    return output.logits, output.cache


@functools.cache
def switched(frontend):
    """Rows of tokens, read and decoded in turns: their logits, and the caches."""
    config = SWITCHING.config()
    run = caller(frontend, config)
    first, other = switching_tokens()
    rows = {"first": first, "other": other, "again": first}
    logits = {name: [] for name in rows}
    caches = dict.fromkeys(rows, shared.init_cache(config, 1, MAX_LENGTH))

    def go_on(name, count):
        seen = len(logits[name])
        tokens = jnp.asarray(rows[name][seen : seen + count])[None]
        out, caches[name] = run(tokens, caches[name])
        logits[name] += [*np.asarray(out[0])]

    with jax.default_matmul_precision("highest"):
        go_on("first", PROMPT)  # reads
        for _ in range(3):
            go_on("first", 1)  # decodes
        go_on("other", PROMPT)  # reads another
        for _ in range(2):
            go_on("other", 1)
            go_on("first", 1)
        go_on("other", PROMPT)  # reads on behind decoded tokens
        go_on("other", 1)
        go_on("again", PROMPT)
        go_on("first", PROMPT)
        go_on("again", PROMPT)
    return {name: np.stack(rows) for name, rows in logits.items()}, named(**caches)


def switching_tokens():
    random = np.random.default_rng(1)
    vocab_size = SWITCHING.config().vocab_size
    return random.integers(0, vocab_size, (2, WHOLE), dtype=np.int32)


SWITCHING = CASES[2]


@every_frontend
def test_one_built_model_switches_between_reading_and_decoding(frontend):
    """What a module was built or last called for must not stick to it."""
    logits, _ = switched(frontend)
    rows = np.zeros((STEPS, WHOLE), np.int32)
    rows[:2] = switching_tokens()
    first, other, *_ = forward(SWITCHING, rows)
    assert [len(rows) for rows in logits.values()] == [15, 13, 10]
    for name, whole in (("first", first), ("again", first), ("other", other)):
        mine = logits[name]
        np.testing.assert_allclose(mine, whole[: len(mine)], rtol=0, atol=ATOL)
    # The same call on an empty cache gives the same bits, whatever came between.
    assert np.array_equal(logits["again"][:PROMPT], logits["first"][:PROMPT])


def test_both_frontends_switch_alike_to_the_bit():
    for linen, other in zip(
        *(switched(frontend) for frontend in FRONTENDS), strict=True
    ):
        compared = compare_bytes(linen, other, finite=True)
        assert compared.equal, compared.differences


def test_one_tree_whatever_batch_and_length_a_model_starts_with():
    config = SWITCHING.config()
    specs = shared.abstract_params(config)
    build = lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))  # needs no inputs
    trees = [zoo_nnx.to_params(nnx.eval_shape(build))]
    init = functools.partial(zoo_linen.Decoder(config).init, jax.random.key(0))
    for shape in ((2, 9), (1, 5), (3, 1)):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        variables = jax.eval_shape(init, tokens)
        assert set(variables) == {"params"}
        trees.append(variables["params"])
    for tree in trees:
        compared = compare_structure(tree, specs)
        assert compared.equal, compared.differences


# A flat list of layer caches: each entry reaches its own layer and comes back on it.

WIDTH, SEEN = 3, 3  # inputs that a convolution remembers, and tokens before the call


def dense(num_layers):
    return qwen3_next_tiny(num_layers).replace(
        layers=hybrid_layers(num_layers, dense_layers=tuple(range(num_layers)))
    )


def dense_prefix():
    linear, full = (LayerKind(f"{m}_attention", "dense") for m in ("linear", "full"))
    return qwen3_next_tiny(5).replace(layers=(linear, *(linear, full) * 2))


LISTS = {
    "8": (functools.partial(dense, 8), ("layers",)),
    "6_remainder": (functools.partial(dense, 6), ("layers", "layers_remainder")),
    "5_prefix": (dense_prefix, ("prefix", "layers")),
}

decode = jax.jit(generation.decode, static_argnames="model")
prefill = jax.jit(generation.prefill, static_argnames="model")


def sentinels(config):
    """One entry a layer, of two rows of SEEN tokens, filled with the layer's number."""
    filled = []
    for i, entry in enumerate(
        shared.to_layer_list(config, shared.init_cache(config, 2, MAX_LENGTH))
    ):
        fields = {
            name: jnp.full_like(leaf, (i + 1) / 16)
            for name, leaf in entry._asdict().items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        fields["position"] = jnp.full_like(entry.position, SEEN)
        if isinstance(entry, KVCache):
            seen = jnp.arange(MAX_LENGTH)[None] < SEEN
            fields["segment_ids"] = jnp.broadcast_to(
                seen.astype(jnp.int32), entry.segment_ids.shape
            )
        else:
            fields["segment_id"] = jnp.ones_like(entry.segment_id)
        filled.append(entry._replace(**fields))
    return filled


@functools.partial(jax.jit, static_argnames="config")
def one_layer(config, params, x, context, entry):
    """A single layer by itself: no plan, no scan."""
    layer = zoo_linen.DecoderLayer(config, *config.layers)
    x, entry, _ = layer.apply({"params": params}, x, context, entry)
    return x, entry


def layer_by_layer(config, tokens, segment_ids, entries):
    """The residual stream through the layers in a plain loop; the entries after it."""
    params, alone = weights(config), lambda kind: config.replace(layers=(kind,))
    positions = SEEN + np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    context = Context.create(tokens.shape, positions=positions, segment_ids=segment_ids)
    x = decoder.embed(params, jnp.asarray(tokens), context, config)
    layers = config.plan.unstack({g.name: params[g.name] for g in config.plan.groups})
    after = []
    for i, (kind, weight) in enumerate(zip(config.layers, layers, strict=True)):
        at = context.at_layer(jnp.int32(i))
        x, entry = one_layer(alone(kind), weight, x, at, entries[i])
        after.append(entry)
    return decoder.head(params, x, config)[1], after


@every_frontend
@pytest.mark.parametrize(
    ("name", "count"), [("8", 1), ("6_remainder", 2), ("5_prefix", 1)]
)
def test_each_entry_of_a_list_comes_back_on_its_own_layer(name, count, frontend):
    """One row gets `count` tokens, the other rests."""
    make, groups = LISTS[name]
    config = make()
    assert tuple(group.name for group in config.plan.groups) == groups
    model, given = model_of(frontend, config), sentinels(config)
    tokens = np.array([[5, 9], [11, 3]], np.int32)[:, :count]
    if count == 1:
        active = np.array([True, False])
        step = decode(model, weights(config), tokens[:, 0], given, active=active)
    else:
        lengths = np.array([count, 0], np.int32)
        step = prefill(model, weights(config), tokens, given, lengths=lengths)

    assert isinstance(step.cache, list)
    for i, (entry, new) in enumerate(zip(given, step.cache, strict=True)):
        assert type(entry) is type(new), i
        assert_row_is_kept(entry, new, 1)
        assert_row_goes_on(entry, new, 0, count)

    segment_ids = np.array([[1] * count, [0] * count], np.int32)
    logits, after = layer_by_layer(config, tokens, segment_ids, given)
    np.testing.assert_allclose(step.logits[0], logits[0, -1], rtol=0, atol=ATOL)
    np.testing.assert_array_equal(step.logits[1], 0)
    for i, (new, expected) in enumerate(zip(step.cache, after, strict=True)):
        for field, leaf in expected._asdict().items():
            leaf, mine = np.asarray(leaf, np.float64), getattr(new, field)
            scale = max(np.max(np.abs(leaf)), 1e-3)
            np.testing.assert_allclose(
                mine, leaf, rtol=0, atol=ATOL * scale, err_msg=f"layer {i} {field}"
            )


def assert_row_is_kept(entry, new, row):
    for field, leaf in entry._asdict().items():
        assert np.array_equal(leaf[row], getattr(new, field)[row]), field


def assert_row_goes_on(entry, new, row, count):
    """What the tokens do not replace is the entry's own, to the bit."""
    assert new.position[row] == SEEN + count
    if isinstance(entry, GatedDeltaNetCache):
        np.testing.assert_array_equal(
            new.conv_tail[row, : WIDTH - count], entry.conv_tail[row, count:]
        )
        written = slice(WIDTH - count, None)
        for field, at in (("conv_tail", written), ("state", slice(None))):
            old, held = getattr(entry, field)[row, at], getattr(new, field)[row, at]
            assert not np.any(held == old)
        return
    places = np.arange(MAX_LENGTH)
    new_places = (places >= SEEN) & (places < SEEN + count)
    for field in ("keys", "values"):
        old, held = getattr(entry, field)[row], getattr(new, field)[row]
        np.testing.assert_array_equal(held[~new_places], old[~new_places])
        assert not np.any(held[new_places] == old[new_places])
    np.testing.assert_array_equal(new.segment_ids[row], places < SEEN + count)
