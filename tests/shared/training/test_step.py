"""A step of training: its loss and gradients, its optimizer, and both frontends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity.programs import program
from parity.trees import compare_bytes
from shared import training
from shared.presets import qwen3_next_tiny
from shared.trees import flatten

CONFIG = qwen3_next_tiny(2, dense_layers=(0, 1)).replace(tie_word_embeddings=True)
MIXED = qwen3_next_tiny(2)
B, T = 4, 11


@functools.cache
def params_of(config):
    return jax.jit(shared.init_params, static_argnums=1)(jax.random.key(0), config)


@functools.cache
def function_of(config, frontend="linen"):
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    return zoo_nnx.as_function(zoo_nnx.from_params(config, params_of(config)))


def batch_of(config, ragged=True):
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.vocab_size, (B, T), dtype=np.int32)
    if not ragged:
        return {"tokens": tokens}
    segment_ids = np.ones((B, T), np.int32)
    segment_ids[0, 4:] = 0  # so that rows count different numbers of tokens
    segment_ids[1, 6:] = 2
    labels = np.where(random.random((B, T)) < 0.2, -100, tokens)
    return {"tokens": tokens, "segment_ids": segment_ids, "labels": labels}


@functools.cache
def program_of(config, **options):
    function, chosen = function_of(config), training.StepOptions(**options)
    return jax.jit(lambda p, b: training.gradients(function, p, b, chosen))


@functools.cache
def gradients(config, **options):
    run = program_of(config, **options)
    return jax.device_get(run(params_of(config), batch_of(config)))


def assert_near(ours, theirs, tolerance=2e-6):
    for (path, a), (_, b) in zip(flatten(ours), flatten(theirs), strict=True):
        scale = max(np.abs(b).max(), 1e-3)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=path)


def test_the_loss_in_chunks_is_the_loss_of_all_logits():
    """Against `decoder_loss` of logits, which has the reference's numbers."""
    config, batch = CONFIG, batch_of(CONFIG)
    function = function_of(config)

    def loss(params):
        output = function(params, batch["tokens"], segment_ids=batch["segment_ids"])
        loss = shared.decoder_loss(
            output, batch["labels"], config, batch["segment_ids"], z_loss_coef=0.1
        )
        return loss.total, (loss, output.logits)

    (total, (parts, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        params_of(config)
    )
    for size in (1, 4, 64):
        metrics, ours = gradients(config, loss_chunk_size=size, z_loss_coef=0.1)
        np.testing.assert_allclose(metrics.loss, total, rtol=1e-6)
        np.testing.assert_allclose(metrics.z_loss, parts.z_loss, rtol=1e-6)
        assert metrics.tokens == parts.tokens
        assert_near(ours, grads)
    # And the z-loss against its formula.
    labels, ids = (
        np.pad(batch[n][:, 1:], ((0, 0), (0, 1))) for n in ("labels", "segment_ids")
    )
    counted = (labels != -100) & (ids == batch["segment_ids"]) & (ids > 0)
    counted[:, -1] = False
    squares = np.square(np.log(np.exp(np.float64(logits)).sum(-1)))
    np.testing.assert_allclose(parts.z_loss, squares[counted].mean(), rtol=1e-5)


def test_logits_are_never_all_there():
    config = CONFIG.replace(vocab_size=4096)
    function = function_of(config)
    tokens = {"tokens": jax.ShapeDtypeStruct((2, 256), jnp.int32)}

    def temporary(size):
        options = training.StepOptions(loss_chunk_size=size)
        run = jax.jit(lambda p, b: training.gradients(function, p, b, options))
        lowered = run.lower(shared.abstract_params(config), tokens)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(256) - temporary(16) > 2 * 256 * 4096 * 4


@pytest.mark.parametrize("steps", [2, 4])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(steps):
    """Although the parts count different numbers of tokens."""
    options = {"loss_chunk_size": 64, "z_loss_coef": 0.1}
    whole, wanted = gradients(CONFIG, **options)
    parts, ours = gradients(CONFIG, accumulation_steps=steps, **options)
    for name in ("loss", "cross_entropy", "z_loss", "tokens", "gradient_norm"):
        np.testing.assert_allclose(
            getattr(parts, name), getattr(whole, name), rtol=2e-6, err_msg=name
        )
    assert_near(ours, wanted)


def test_the_router_loss_of_parts_is_their_mean():
    metrics, _ = gradients(MIXED, accumulation_steps=2)
    run, batch = program_of(MIXED), batch_of(MIXED)
    halves = [
        run(params_of(MIXED), {n: x[part] for n, x in batch.items()})[0]
        for part in (slice(0, 2), slice(2, 4))
    ]
    mean = np.mean([half.router_loss for half in halves])
    np.testing.assert_allclose(metrics.router_loss, mean, rtol=1e-6)
    cross_entropy = sum(h.cross_entropy * h.tokens for h in halves) / metrics.tokens
    total = cross_entropy + MIXED.router_aux_loss_coef * mean
    np.testing.assert_allclose(metrics.loss, total, rtol=1e-6)


def test_rows_that_do_not_divide_are_told():
    with pytest.raises(ValueError, match="accumulation_steps=3 does not divide the 4"):
        gradients(CONFIG, accumulation_steps=3)


def test_frontends_train_alike_to_the_bit():
    """Dropout, clipping and parts of a batch included.

    Without parts it is one program. With them jax 0.12 leaves constants of the one in
    the loop over parts that it takes out of the other's.
    """
    config = MIXED.replace(dropout_rate=0.1)
    whole = training.StepOptions(loss_chunk_size=4)
    options = dataclasses.replace(whole, accumulation_steps=2)
    optimizer = training.make_optimizer(
        training.OptimizerConfig(learning_rate=1e-2, warmup_steps=2), config
    )
    batch, results, programs = batch_of(config), [], []
    for frontend in ("linen", "nnx"):
        step = jax.jit(
            functools.partial(
                training.train_step,
                function_of(config, frontend),
                optimizer,
                options=options,
            )
        )
        state = training.init_state(params_of(config), optimizer)
        key = jax.random.key(1)
        once = functools.partial(step.__wrapped__, options=whole)
        with_key = lambda *args, once=once: once(*args[:2], dropout_key=args[2])
        programs.append(program.lower(with_key, state, batch, key))
        told = []
        for _ in range(3):
            state, metrics = step(state, batch, dropout_key=key)
            told.append(metrics)
        results.append({"params": state["params"], "loss": [m.loss for m in told]})
        assert int(state["step"]) == 3
        assert told[2].loss < told[0].loss
    assert program.compare(*programs)[0]
    losses = [np.stack(result.pop("loss")) for result in results]
    np.testing.assert_array_equal(*losses)
    assert compare_bytes(*results, finite=True).equal


def test_a_step_is_adamw_behind_clipping():
    """One leaf of each sort against the formulas in float64."""
    options = training.OptimizerConfig(
        learning_rate=3e-3, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.2, clip_norm=0.1
    )
    optimizer = training.make_optimizer(options, CONFIG)
    function = function_of(CONFIG)
    step = jax.jit(functools.partial(training.train_step, function, optimizer))
    params, state = params_of(CONFIG), training.init_state(params_of(CONFIG), optimizer)
    m = {path: 0.0 for path, _ in flatten(params)}
    v = dict(m)
    expected = {path: np.float64(leaf) for path, leaf in flatten(params)}
    for t in (1, 2):
        metrics, grads = program_of(CONFIG)(state["params"], batch_of(CONFIG))
        state, _ = step(state, batch_of(CONFIG))
        scale = min(1.0, 0.1 / float(metrics.gradient_norm))
        for path, gradient in flatten(grads):
            g = np.float64(gradient) * scale
            m[path] = 0.8 * m[path] + 0.2 * g
            v[path] = 0.9 * v[path] + 0.1 * g * g
            direction = (m[path] / (1 - 0.8**t)) / (
                np.sqrt(v[path] / (1 - 0.9**t)) + 1e-6
            )
            name = path[-1]
            decayed = name not in ("A_log", "dt_bias") and "norm" not in name
            direction += 0.2 * decayed * expected[path]
            expected[path] = expected[path] - 3e-3 * direction
    for path, leaf in flatten(state["params"]):
        np.testing.assert_allclose(leaf, expected[path], rtol=0, atol=2e-5)


def test_the_learning_rate_rises_and_falls():
    options = training.OptimizerConfig(
        learning_rate=1.0, warmup_steps=10, decay_steps=110, final_learning_rate=0.1
    )
    rate = training.learning_rate(options)
    expected = {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, rtol=1e-6)
    assert float(training.learning_rate(training.OptimizerConfig())(7)) == np.float32(
        3e-4
    )


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes_stay(param_dtype):
    config = MIXED.replace(param_dtype=param_dtype, dtype="bfloat16")
    optimizer = training.make_optimizer(training.OptimizerConfig(), config)
    state = jax.eval_shape(
        lambda p: training.init_state(p, optimizer), shared.abstract_params(config)
    )
    function = zoo_linen.as_function(zoo_linen.Decoder(config))
    step = functools.partial(training.train_step, function, optimizer)
    tokens = {"tokens": jax.ShapeDtypeStruct((2, 8), jnp.int32)}
    new, metrics = jax.eval_shape(step, state, tokens)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert metrics.loss.dtype == np.float32


def test_what_no_gradient_reaches_is_not_moved_by_weight_decay():
    config = shared.preset("deepseek-v3-tiny")
    optimizer = training.make_optimizer(training.OptimizerConfig(), config)
    params = params_of(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    update = jax.jit(functools.partial(training.optimizer.update, optimizer))
    new, _ = update(zeros, optimizer.init(params), params)
    moved = {
        path[-1]
        for (path, old), (_, leaf) in zip(flatten(params), flatten(new), strict=True)
        if not np.array_equal(old, leaf)
    }
    assert "e_score_correction_bias" not in moved and "norm" not in moved
    assert {"q_b_proj", "gate_proj", "lm_head"} <= moved


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"b2": 1.0},
        {"clip_norm": 0.0},
        {"weight_decay": -0.1},
        {"warmup_steps": 5, "decay_steps": 5},
    ],
)
def test_bad_options_are_told_by_name(options):
    with pytest.raises(shared.ConfigError, match=list(options)[-1]):
        training.OptimizerConfig(**options)


def test_the_clip_can_be_left_out():
    optimizer = training.make_optimizer(
        training.OptimizerConfig(clip_norm=None), CONFIG
    )
    assert isinstance(optimizer, optax.GradientTransformation)
    assert len(optimizer.init(params_of(CONFIG))) == 3
