"""Training that was saved and resumed is the training that went on, bit for bit.

Either frontend goes on with what the other has saved, in this process or a new one.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import shared
import zoo_linen
import zoo_nnx
from shared.checkpoint.training import Manager
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from shared.stores import path_text
from shared.stores.tree import named_nodes

# Two blocks, each of a sparse linear layer and a dense full one.
KINDS = (LayerKind("linear_attention", "moe"), LayerKind("full_attention", "dense"))
CONFIG = qwen3_next_tiny(4).replace(layers=KINDS * 2, dropout_rate=0.2)
TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(4, 2, 9))
SAVED, LAST = 2, 4


def with_promotion(optimizer):
    """Optax's schedules divide counts, which these tests forbid everything else."""

    def update(*args):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args)

    return optax.GradientTransformation(optimizer.init, update)


OPTIMIZER = with_promotion(
    optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, LAST), weight_decay=0.1
        ),
    )
)
LINEN = zoo_linen.Decoder(CONFIG)


def loss_of(output, tokens):
    return shared.decoder_loss(output, tokens, CONFIG).total


# Each frontend as its users write it.


def linen_loss(params, apply, tokens, key):
    output = apply(
        {"params": params}, tokens, deterministic=False, rngs={"dropout": key}
    )
    return loss_of(output, tokens)


@jax.jit
def linen_step(state, tokens, key):
    loss, gradients = jax.value_and_grad(linen_loss)(
        state.params, state.apply_fn, tokens, key
    )
    return state.apply_gradients(grads=gradients), loss


class Linen:
    def __init__(self, params):
        self.state = TrainState.create(
            apply_fn=LINEN.apply, params=params, tx=OPTIMIZER
        )

    def step(self, tokens, key):
        self.state, loss = linen_step(self.state, tokens, key)
        return loss

    def tree(self):
        state = self.state
        return {
            "params": state.params,
            "opt_state": state.opt_state,
            "step": state.step,
        }

    def load(self, tree):
        self.state = self.state.replace(**tree)


def nnx_loss(model, tokens, key):
    rngs = nnx.Rngs(dropout=key)
    return loss_of(model(tokens, deterministic=False, rngs=rngs), tokens)


@nnx.jit
def nnx_step(model, optimizer, tokens, key):
    loss, gradients = nnx.value_and_grad(nnx_loss)(model, tokens, key)
    optimizer.update(model, gradients)
    return loss


class NNX:
    def __init__(self, params):
        self.model = zoo_nnx.from_params(CONFIG, params)
        self.optimizer = nnx.Optimizer(self.model, OPTIMIZER, wrt=nnx.Param)

    def step(self, tokens, key):
        return nnx_step(self.model, self.optimizer, tokens, key)

    def tree(self):
        return zoo_nnx.training_state(self.model, self.optimizer)

    def load(self, tree):
        zoo_nnx.load_training_state(self.model, self.optimizer, tree)


FRONTENDS = {"linen": Linen, "nnx": NNX}
frontends = pytest.mark.parametrize("frontend", FRONTENDS)


@functools.cache
def first_params():
    return shared.init_params(jax.random.key(0), CONFIG)


def train(trainer, rng, first, last):
    """Losses of the steps from `first` to `last`."""
    losses = [
        trainer.step(jnp.asarray(TOKENS[step]), jax.random.fold_in(rng, step))
        for step in range(first, last)
    ]
    return [np.asarray(loss).tobytes() for loss in losses]


def entries(tree):
    """Bytes, dtype and shape by path."""
    leaves = {}
    for path, leaf in named_nodes(tree)[0]:
        if jax.tree.leaves(leaf):
            leaf = np.asarray(leaf)
            leaves[path_text(path)] = (str(leaf.dtype), leaf.shape, leaf.tobytes())
    return leaves


@functools.cache
def uninterrupted(frontend):
    """Losses of all steps, and the last state."""
    trainer = FRONTENDS[frontend](first_params())
    losses = train(trainer, jax.random.key(7), 0, LAST)
    return losses, entries(trainer.tree())


def resume(frontend, folder):
    """The same of a new trainer that goes on with what is in a folder."""
    outline = shared.abstract_params(CONFIG)
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), outline)
    trainer = FRONTENDS[frontend](zeros)
    with Manager(folder, CONFIG) as manager:
        tree = manager.restore(trainer.tree() | {"rng": jax.random.key(0)})
    rng = tree.pop("rng")
    trainer.load(tree)
    losses = train(trainer, rng, int(tree["step"]), LAST)
    return losses, entries(trainer.tree())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each frontend, saved after two steps."""
    folder = tmp_path_factory.mktemp("resume")
    for name, frontend in FRONTENDS.items():
        rng = jax.random.key(7)
        trainer = frontend(first_params())
        losses = train(trainer, rng, 0, SAVED)
        assert losses == uninterrupted(name)[0][:SAVED]
        with Manager(folder / name, CONFIG) as manager:
            manager.save(SAVED, trainer.tree() | {"rng": rng})
    return folder


def test_the_frontends_train_alike():
    losses, state = uninterrupted("linen")
    assert (losses, state) == uninterrupted("nnx")
    assert len(set(losses)) == LAST
    assert state["step"] == ("int32", (), np.int32(LAST).tobytes())
    # Every parameter has moved, or the same state would prove little.
    before = entries({"params": first_params()})
    assert not [path for path in before if state[path] == before[path]]


@pytest.mark.parametrize("resumer", FRONTENDS)
@pytest.mark.parametrize("saver", FRONTENDS)
def test_a_resumed_run_is_the_uninterrupted_one(saver, resumer, runs):
    losses, state = uninterrupted(resumer)
    assert resume(resumer, runs / saver) == (losses[SAVED:], state)


def test_without_the_optimizer_state_or_the_key_it_would_be_another(runs):
    """So the test above sees both."""
    with Manager(runs / "linen", CONFIG) as manager:
        tree = manager.restore(
            Linen(first_params()).tree() | {"rng": jax.random.key(0)}
        )
    rng = tree.pop("rng")
    losses, _ = uninterrupted("linen")
    fresh = OPTIMIZER.init(tree["params"])
    for changes, key in (({}, jax.random.key(8)), ({"opt_state": fresh}, rng)):
        trainer = Linen(first_params())
        trainer.load(tree | changes)
        assert train(trainer, key, SAVED, LAST) != losses[SAVED:]


def test_a_resumed_step_compiles_nothing(runs):
    uninterrupted("linen")
    before = linen_step._cache_size()
    resume("linen", runs / "nnx")
    assert linen_step._cache_size() == before


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_both_frontends_save_the_same_files(runs):
    """But for the path in orbax's own note that it was done."""
    linen, nnx = (files(runs / name / str(SAVED) / "default") for name in FRONTENDS)
    assert len(linen) > 3 * len(first_params())
    assert linen.keys() == nnx.keys()
    different = [name for name in linen if linen[name] != nnx[name]]
    assert different == ["commit_success.txt"]


PROGRAM = """
import importlib.util, json, pathlib, sys
spec = importlib.util.spec_from_file_location("resumed", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
losses, state = module.resume("nnx", pathlib.Path(sys.argv[2]))
print(json.dumps([losses, state], default=bytes.hex))
"""


def test_a_new_process_goes_on(runs):
    command = [sys.executable, "-c", PROGRAM, __file__, str(runs / "linen")]
    strict = {
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    done = subprocess.run(
        command,
        cwd=pathlib.Path(shared.__file__).parent.parent,
        env={**os.environ, **strict},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses, state = uninterrupted("nnx")
    expected = json.dumps([losses[SAVED:], state], default=bytes.hex)
    assert json.loads(done.stdout) == json.loads(expected)


# Every way to the parameters of one checkpoint.


def stock(folder):
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(manager.latest_step())["params"]


def managed(get):
    def read(folder):
        with Manager(folder, CONFIG) as manager:
            return get(manager)

    return read


def target():
    return Linen(first_params()).tree() | {"rng": jax.random.key(0)}


ENTRIES = {
    "latest": managed(lambda manager: manager.restore(target())["params"]),
    "step": managed(lambda manager: manager.restore(target(), SAVED)["params"]),
    "unverified": managed(
        lambda manager: manager.restore(target(), verify=False)["params"]
    ),
    "abstract": managed(
        lambda manager: manager.restore(jax.eval_shape(target))["params"]
    ),
    "parameters": managed(lambda manager: manager.restore_params()[1]),
    "parameters of a step": managed(lambda manager: manager.restore_params(SAVED)[1]),
    "load": lambda folder: shared.checkpoint.load(folder)[1],
    "load a step": lambda folder: shared.checkpoint.load(folder / str(SAVED))[1],
    "stock orbax": stock,
}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("entry", ENTRIES)
@frontends
def test_every_way_gives_the_same_parameters(frontend, entry, runs):
    params = ENTRIES[entry](runs / frontend)
    assert entries(params) == entries(stock(runs / "linen"))
    assert entries(FRONTENDS[frontend](params).tree()["params"]) == entries(params)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@frontends
def test_parameters_go_through_a_checkpoint_of_their_own(frontend, runs, tmp_path):
    params = FRONTENDS[frontend](stock(runs / frontend)).tree()["params"]
    shared.checkpoint.save(tmp_path / "x", CONFIG, params)
    loaded = shared.checkpoint.load(tmp_path / "x")[1]
    assert entries(loaded) == entries(stock(runs / "linen"))


# NNX's own state.


def test_the_training_state_of_nnx_is_that_of_plain_optax():
    trainer = NNX(first_params())
    tree = trainer.tree()
    plain = OPTIMIZER.init(first_params())
    assert jax.tree.structure(tree["opt_state"]) == jax.tree.structure(plain)
    assert entries(tree["opt_state"]) == entries(plain)
    assert jax.tree.structure(tree["params"]) == jax.tree.structure(first_params())
    assert all(type(leaf) is type(jnp.zeros(1)) for leaf in jax.tree.leaves(tree))


def test_a_state_of_another_model_is_refused_and_nothing_changes():
    trainer = NNX(first_params())
    before = entries(trainer.tree())
    tree = trainer.tree()
    wrong = {
        "params": tree["params"] | {"norm": jnp.zeros(3)},
        "opt_state": tree["opt_state"][:1],
        "more": 1,
    }
    with pytest.raises(ValueError) as error:
        trainer.load(wrong)
    for line in (
        "params/norm must be float32 (32,), got float32 (3,)",
        "missing: opt_state/1/0/mu/norm",
        "missing: step",
    ):
        assert line in str(error.value)
    assert entries(trainer.tree()) == before


def test_dropout_streams_of_a_model_are_saved_and_restored(tmp_path):
    def make(seed):
        rngs = nnx.Rngs(dropout=jax.random.key(seed, impl="rbg"))
        model = zoo_nnx.from_params(CONFIG, first_params(), rngs=rngs)
        model.train()
        return model

    def tree(model):
        streams = nnx.to_pure_dict(nnx.state(model, nnx.RngState))
        return {"params": zoo_nnx.to_params(model), "rngs": streams}

    model = make(3)
    model.rngs.dropout()
    with Manager(tmp_path, CONFIG) as manager:
        manager.save(1, tree(model))
        other = make(4)
        restored = manager.restore(tree(other))
    state = nnx.state(other, nnx.RngState)
    nnx.replace_by_pure_dict(state, restored["rngs"])
    nnx.update(other, state)
    keys = [m.rngs.dropout.key.get_value() for m in (model, other)]
    assert jax.random.key_impl(keys[0]) == jax.random.key_impl(keys[1])
    data = [np.asarray(jax.random.key_data(key)) for key in keys]
    np.testing.assert_array_equal(*data)
    assert other.rngs.dropout.count[...] == 1
    draws = [jax.random.key_data(m.rngs.dropout()) for m in (model, other)]
    np.testing.assert_array_equal(*draws)
