"""Pairs as users have them, in both APIs, with train states of made-up values."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

LAYERS = 12
WIDTH = 4


# (a) Batch statistics, dropout, an optimizer of several parts, a key.


class LinenCNN(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(3, (2, 2), name="conv")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        x = nn.relu(x)
        x = nn.Dropout(0.5, deterministic=not train, name="drop")(x)
        return nn.Dense(5)(x.mean((1, 2)))


class NNXCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 3, (2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(3, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x).mean((1, 2)))


CNN_RULES = [{"linen": r"params/Dense_0/(kernel|bias)", "nnx": r"params/head/\1"}]


class CNNState(TrainState):
    batch_stats: dict
    dropout_key: jax.Array


# (b) More layers than ten, in a list.


class LinenList(nn.Module):
    count: int = LAYERS

    def setup(self):
        self.layers = [nn.Dense(WIDTH, use_bias=False) for _ in range(self.count)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class NNXList(nnx.Module):
    def __init__(self, rngs, count=LAYERS):
        self.layers = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(count)]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# (c) Boxes with axis names, and a scanned stack.

_INIT = nn.initializers.normal(0.5)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = nn.with_partitioning(_INIT, ("embed", "mlp"))
        return nn.relu(nn.Dense(WIDTH, kernel_init=kernel, name="dense")(x)), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(
            WIDTH,
            kernel_init=nn.with_partitioning(_INIT, (None, "embed")),
            name="first",
        )(x)
        stack = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return stack(name="stack")(x, None)[0]


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(_INIT, ("embed", "mlp"))
        self.dense = nnx.Linear(WIDTH, WIDTH, kernel_init=kernel, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.dense(x))


class NNXStack(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(_INIT, (None, "embed"))
        self.first = nnx.Linear(2, WIDTH, kernel_init=kernel, rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def make(rngs):
            return NNXBlock(rngs)

        self.stack = make(rngs)

    def __call__(self, x):
        graphdef, state = nnx.split(self.stack)

        def step(x, state):
            return nnx.merge(graphdef, state)(x), None

        return jax.lax.scan(step, self.first(x), state)[0]


def make_stack(rngs):
    """Without a mesh."""
    with nnx.use_eager_sharding(False):
        return NNXStack(rngs)


# Two layers, for one matter at a time.


class LinenPair(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(3) for _ in range(2)]

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


class NNXPair(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])


TINY = {"fc": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}}


class LinenTiny(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, use_bias=False, name="fc")(x)


class NNXTiny(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(2, 3, use_bias=False, rngs=rngs)


class User:
    """A pair with a train state, as a team has it.

    Attributes:
      linen: the Linen module.
      nnx: what makes the NNX module.
      rules: what corresponds to what, where names do not say it.
      tx: the optimizer.
      inputs: of both.
    """

    def __init__(self, linen, nnx, rules, tx, shape, state=TrainState):
        self.linen, self.nnx, self.rules, self.tx = linen, nnx, rules, tx
        self.inputs = jax.ShapeDtypeStruct(shape, jnp.float32)
        self._state = state

    @functools.cached_property
    def x(self):
        return jnp.asarray(normal(self.inputs.shape, 99))

    @functools.cached_property
    def abstract(self):
        """The train state's shapes."""
        return jax.eval_shape(self._made, jax.random.key(0))

    def _made(self, key):
        x = jnp.zeros(self.inputs.shape, self.inputs.dtype)
        variables = dict(self.linen.init(key, x))
        more = {}
        if self._state is CNNState:
            more = {"batch_stats": variables["batch_stats"], "dropout_key": key}
        state = self._state.create(
            apply_fn=None, params=variables["params"], tx=self.tx, **more
        )
        return state.replace(step=jnp.int32(0))

    @functools.cached_property
    def state(self):
        """A train state of which every leaf has values of its own."""
        leaves, treedef = jax.tree.flatten(self.abstract)
        return treedef.unflatten([filled(x, i) for i, x in enumerate(leaves)])

    @functools.cached_property
    def variables(self):
        """What the Linen module is applied to."""
        stats = getattr(self.state, "batch_stats", None)
        more = {} if stats is None else {"batch_stats": stats}
        return {"params": self.state.params, **more}

    @functools.cached_property
    def linen_outputs(self):
        return np.asarray(jax.jit(self.linen.apply)(nn.unbox(self.variables), self.x))

    def nnx_outputs(self, model):
        graphdef, state = nnx.split(model)
        run = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
        return np.asarray(run(state, self.x))


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(leaf, seed):
    """Values for a leaf; variances are positive."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(1234)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.full(leaf.shape, 100 + seed, leaf.dtype)
    return jnp.asarray(np.abs(normal(leaf.shape, seed)) + 0.1, leaf.dtype)


def adamw():
    schedule = optax.linear_schedule(1e-3, 0, 100)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


CNN = User(LinenCNN(), NNXCNN, CNN_RULES, adamw(), (2, 4, 4, 2), CNNState)
LIST = User(LinenList(), NNXList, None, optax.adam(1e-3, mu_dtype="bfloat16"), (3, 4))
STACK = User(LinenStack(), make_stack, None, optax.sgd(0.1, momentum=0.9), (3, 2))
USERS = {"cnn": CNN, "list": LIST, "stack": STACK}


# Written by orbax and Flax themselves.


def save_standard(tree, path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def save_manager(tree, path):
    """Two steps: the latest is the one that counts."""
    args = orbax.checkpoint.args.StandardSave
    with orbax.checkpoint.CheckpointManager(path) as manager:
        manager.save(9, args=args(jax.tree.map(lambda x: x, tree)))
        manager.save(10, args=args(tree))
        manager.wait_until_finished()
    return path


def save_msgpack(tree, path):
    """Flax's msgpack has no typed keys: users keep their data."""

    def plain(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    path.write_bytes(flax.serialization.to_bytes(jax.tree.map(plain, tree)))
    return path


SAVERS = {
    "standard": save_standard,
    "manager": save_manager,
    "msgpack": save_msgpack,
}


def restore(path, like):
    """What stock orbax reads, into a tree of shapes."""
    shapes = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, like)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, shapes)


# What must come of the values, by hand.


def cnn_in_nnx(params):
    """By hand: a tree of the CNN's parameters in NNX's names."""
    return {k if k != "Dense_0" else "head": v for k, v in params.items()}


def list_in_nnx(params):
    return {"layers": {i: params[f"layers_{i}"] for i in range(LAYERS)}}


BY_HAND = {"cnn": cnn_in_nnx, "list": list_in_nnx, "stack": nn.unbox}


def nnx_state(user, values=None, *kinds):
    """The state of the user's NNX module without RNG, abstract or with values."""
    module = nnx.eval_shape(lambda: user.nnx(nnx.Rngs(0)))
    state = nnx.state(module, *(kinds or [nnx.Not(nnx.RngState)]))
    if values is not None:
        nnx.replace_by_pure_dict(state, values)
    return state


def expected_model(name):
    user = USERS[name]
    values = BY_HAND[name](user.state.params)
    if name == "cnn":
        stats = user.state.batch_stats["norm"]
        values = {**values, "norm": {**values["norm"], **stats}}
    return nnx_state(user, values)
