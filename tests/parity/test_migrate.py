"""Checkpoints of users from Linen to NNX and back: every leaf, to the bit, or nothing.

What is expected comes from Flax, optax and orbax themselves: they wrote the sources,
and they read the results into trees of their own.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from parity import migration
from parity.diff import diff
from parity.mapping.rules import RuleError
from parity.pairs.calls import CheckError
from shared.checkpoint.manifest import find_manifest
from shared.stores import CheckpointError, Leaf, digest, from_tree, open_store
from tests.parity.checkpoints import write_npz, write_safetensors
from tests.parity.migrations.checking import (
    assert_refused,
    assert_same,
    content,
    digest_of,
    digests,
    read,
)
from tests.parity.migrations.models import (
    BY_HAND,
    CNN,
    LAYERS,
    LIST,
    SAVERS,
    USERS,
    LinenList,
    NNXList,
    NNXPair,
    NNXTiny,
    expected_model,
    nnx_state,
    normal,
    restore,
    save_standard,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A user's checkpoint as orbax or Flax wrote it, migrated once or twice."""
    folder = tmp_path_factory.mktemp("migrate")

    @functools.cache
    def write(name, how, *ways, **options):
        user = USERS[name]
        if not ways:
            return SAVERS[how](user.state, folder / f"{name}-{how}")
        *before, to = ways
        source = write(name, how, *before)
        target = folder / "-".join((name, how, *ways, *options.values()))
        known = {"nnx": user.nnx} if to == "nnx" else {}
        plan = migration.plan(source, to=to, rules=user.rules, **known, **options)
        plan.write(target)
        return target

    return write


# The three users.

ALL = [(name, how) for name in USERS for how in SAVERS]


@pytest.mark.parametrize(("name", "how"), ALL)
def test_to_nnx_and_back_is_the_identity(name, how, saved):
    source = saved(name, how)
    before = content(source)
    back = saved(name, how, "nnx", "linen")
    found = diff(open_store(source), open_store(back))
    assert found.equal, found.differences
    assert found.leaves == len(jax.tree.leaves(USERS[name].state))
    assert digests(source) == digests(back) == digests(from_tree(USERS[name].state))
    assert content(source) == before


@pytest.mark.parametrize(("name", "how"), ALL)
def test_stock_orbax_restores_what_came_back_into_the_train_state(name, how, saved):
    state = USERS[name].state
    if how == "msgpack" and name == "cnn":  # as which it was saved
        state = state.replace(dropout_key=jax.random.key_data(state.dropout_key))
    assert_same(restore(saved(name, how, "nnx", "linen"), state), state)


@pytest.mark.parametrize("name", USERS)
def test_with_the_linen_module_the_way_back_is_the_same(name, saved):
    user = USERS[name]
    source = saved(name, "standard", "nnx")
    known = migration.plan(
        source, to="linen", linen=user.linen, inputs=user.inputs, rules=user.rules
    )
    guessed = migration.plan(source, to="linen", rules=user.rules)
    assert known.ok, known.differences
    assert known.leaves.keys() == guessed.leaves.keys()
    assert known.empty == guessed.empty
    assert digests(known.store) == digests(guessed.store)


@pytest.mark.parametrize(("name", "how"), ALL)
def test_stock_orbax_restores_the_result_into_nnx_and_optax(name, how, saved):
    """As a user of NNX with plain optax does."""
    user = USERS[name]
    like = {
        "model": nnx_state(user),
        "opt_state": optimizer_in_nnx(user),
        "step": user.state.step,
    }
    more = {}
    if name == "cnn":
        key = user.state.dropout_key
        more["dropout_key"] = jax.random.key_data(key) if how == "msgpack" else key
    found = restore(saved(name, how, "nnx"), {**like, **more})
    assert_same(found["model"], expected_model(name))
    assert_same(found["opt_state"], optimizer_in_nnx(user, BY_HAND[name]))
    assert_same({k: found[k] for k in ("step", *more)}, {"step": like["step"], **more})


def optimizer_in_nnx(user, by_hand=None):
    """What optax makes of the NNX parameters; with the values of the Linen state."""
    abstract = jax.eval_shape(user.tx.init, nnx_state(user, None, nnx.Param))
    if by_hand is None:
        return abstract
    is_params = lambda x: isinstance(x, dict | nnx.State)
    theirs = jax.tree.leaves(user.state.opt_state, is_leaf=is_params)
    ours, treedef = jax.tree.flatten(abstract, is_leaf=is_params)
    for i, (mine, x) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(mine, nnx.State):
            nnx.replace_by_pure_dict(mine, by_hand(x))
        else:
            ours[i] = x
    return treedef.unflatten(ours)


@pytest.mark.parametrize("name", USERS)
def test_stock_orbax_restores_the_result_into_an_nnx_optimizer(name, saved):
    user = USERS[name]
    target = saved(name, "standard", "nnx", optimizer="nnx")
    build = lambda: nnx.Optimizer(user.nnx(nnx.Rngs(0)), user.tx, wrt=nnx.Param)
    state = nnx.state(nnx.eval_shape(build))
    like = {"model": nnx_state(user), "optimizer": state}
    if name == "cnn":
        like["dropout_key"] = user.state.dropout_key
    found = restore(target, like)
    assert_same(found["model"], expected_model(name))
    flat = {
        "/".join(map(str, p)): v.get_value()
        for p, v in nnx.to_flat_state(found["optimizer"])
    }
    at = {
        "cnn": "opt_state/1/0/mu",
        "list": "opt_state/0/mu",
        "stack": "opt_state/0/trace",
    }[name]
    mine = {k.removeprefix(at + "/"): v for k, v in flat.items() if k.startswith(at)}
    [theirs] = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(
            user.state.opt_state, is_leaf=lambda x: isinstance(x, dict)
        )
        if path[-1].name == at.rpartition("/")[2]
    ]
    wanted = nnx.traversals.flatten_mapping(BY_HAND[name](theirs))
    wanted = {"/".join(map(str, path)): x for path, x in wanted.items()}
    assert mine.keys() == wanted.keys()
    for path, x in wanted.items():
        assert np.array_equal(mine[path], x), path
    assert int(flat["step"]) == int(user.state.step)


@pytest.mark.parametrize(("name", "how"), ALL)
def test_the_nnx_model_gives_the_linen_models_outputs_to_the_bit(name, how, saved):
    user = USERS[name]
    with nnx.use_eager_sharding(False):
        model = user.nnx(nnx.Rngs(3))
    loaded = migration.load_into(model, saved(name, how, "nnx"))
    assert loaded.leaves == len(jax.tree.leaves(user.variables))
    assert loaded.random == (
        ("drop/rngs/count", "drop/rngs/key") if name == "cnn" else ()
    )
    outputs = user.nnx_outputs(model)
    assert outputs.std() > 0
    assert outputs.tobytes() == user.linen_outputs.tobytes()


@pytest.mark.parametrize("name", USERS)
def test_the_result_is_what_nnx_itself_saves(name, saved, tmp_path):
    """A21: the paths on the disk are the same, whichever frontend wrote them."""
    user = USERS[name]
    with nnx.use_eager_sharding(False):
        model = user.nnx(nnx.Rngs(0))
    migration.load_into(model, saved(name, "standard", "nnx"))
    state = nnx.state(model, nnx.Not(nnx.RngState))
    theirs = open_store(save_standard({"model": state}, tmp_path / "theirs"))
    ours = open_store(saved(name, "standard", "nnx"))
    inside = {p: leaf for p, leaf in ours.leaves.items() if p[0] == "model"}
    assert inside.keys() == theirs.leaves.keys()
    for path, leaf in inside.items():
        assert digest(leaf, "ours") == digest(theirs.leaves[path], "theirs"), path


@pytest.mark.parametrize("name", USERS)
def test_without_a_module_names_are_those_of_rules_else_the_same(name, saved):
    user = USERS[name]
    plan = migration.plan(saved(name, "standard"), to="nnx", rules=user.rules)
    assert plan.ok, plan.differences
    paths = {"/".join(map(str, path)) for path in plan.leaves}
    expected = {
        "cnn": "model/head/kernel/value",
        "list": "model/layers_10/kernel/value",
    }
    assert expected.get(name, "model/stack/dense/kernel/value") in paths
    assert any("no NNX module was given" in line for line in plan.describe())


def test_the_plan_says_what_is_done(saved):
    plan = migration.plan(
        saved("cnn", "manager"), to="nnx", nnx=CNN.nnx, rules=CNN.rules
    )
    text = "\n".join(plan.describe())
    for words in (
        "from orbax, step 10, 24 leaves",
        "step 10, the latest of 2",
        "parameters at params",
        "model: 2 rule 1",
        "model: 6 same",
        "with its parameters: opt_state/1/0/mu (6 leaves)",
        "as it is: dropout_key, opt_state/1/0/count, opt_state/1/2/count, step",
        "2 leaves of RNG state of the NNX module are not in the source",
        "to nnx: 24 leaves, 680 bytes",
    ):
        assert words in text
    assert plan.empty == {("opt_state", 0): "None", ("opt_state", 1, 1): "None"}


# Differences, listed together, and nothing is written.


@pytest.mark.parametrize(("model", "word"), [(16, "only in nnx"), (8, "only in linen")])
def test_e01_another_number_of_layers_is_refused(model, word, tmp_path):
    """Orbax's PyTreeRestore keeps initial values where 4 of 16 layers are missing."""
    variables = LinenList().init(jax.random.key(0), LIST.x)
    source = save_standard(variables, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=functools.partial(NNXList, count=model))
    assert len(plan.differences) == 4
    names = [f"layers_{i}" if model == 8 else f"layers/{i}" for i in range(8, 16)]
    wanted = names[4:] if model == 16 else names[:4]
    assert_refused(plan, tmp_path / "nnx", word, *(f"{name}/kernel" for name in wanted))
    migration.plan(source, to="nnx", nnx=NNXList).write(tmp_path / "good")
    fresh = NNXList(nnx.Rngs(0), count=model)
    before = np.asarray(fresh.layers[0].kernel[...])
    with pytest.raises(CheckpointError) as error:
        migration.load_into(fresh, tmp_path / "good")
    assert len(error.value.problems) == 4
    assert np.array_equal(fresh.layers[0].kernel[...], before)


def test_e01_the_source_is_compared_with_its_own_module(tmp_path):
    variables = LinenList().init(jax.random.key(0), LIST.x)
    source = save_standard(variables, tmp_path / "x")
    for count in (8, 16):
        plan = migration.plan(
            source,
            to="nnx",
            linen=LinenList(count=count),
            inputs=LIST.inputs,
            nnx=NNXList,
        )
        words = ["layers_12/kernel", "only in linen"]
        if count == 16:
            assert_refused(plan, tmp_path / "nnx", *words)
        else:  # what the module lacks has a place in NNX all the same
            assert plan.ok


def test_e03_another_dtype_is_refused_or_cast_when_asked(tmp_path):
    class Half(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(
                2, 3, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs
            )

    kernel = normal((2, 3), 0)
    source = save_standard({"params": {"fc": {"kernel": kernel}}}, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=Half)
    assert_refused(plan, tmp_path / "nnx", "float32", "bfloat16")
    cast = migration.plan(source, to="nnx", nnx=Half, cast=True)
    line = "cast float32 to bfloat16: 1 leaves, which keep not all their bits"
    assert line in cast.describe()
    got = read(cast, "fc", "kernel", "value")
    want = kernel.astype(jnp.bfloat16)
    assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
    migration.plan(source, to="nnx").write(tmp_path / "exact")
    with pytest.raises(CheckpointError, match="float32, the model has bfloat16"):
        migration.load_into(Half(nnx.Rngs(0)), tmp_path / "exact")


def test_e03_integers_are_never_cast(tmp_path):
    kernel = np.ones((2, 3), np.int32)
    source = save_standard({"params": {"fc": {"kernel": kernel}}}, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXTiny, cast=True)
    assert_refused(plan, tmp_path / "nnx", "int32 is not rounded to float32")


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    """Missing, too much, of another shape and dtype."""
    params = {
        "layers_0": {"kernel": np.ones((3, 4), np.float32)},
        "layers_1": {
            "bias": np.ones(3, np.float16),
            "kernel": np.ones((3, 3), np.float32),
        },
        "more": {"kernel": np.ones((3, 3), np.float32)},
    }
    source = save_standard({"params": params}, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXPair)
    kinds = {(d.path, d.what) for d in plan.differences}
    assert kinds == {
        ("params/layers_0/kernel", "shape"),
        ("params/layers_1/bias", "dtype"),
        ("params/layers/0/bias", "missing"),
        ("params/more/kernel", "missing"),
    }
    assert_refused(plan, tmp_path / "nnx", "(3, 4)", "(3, 3)", "float16", "float32")


def test_b12_an_older_layout_of_the_tree_is_never_loaded_in_part(tmp_path):
    """Flat layer_0 ... layer_3 for a model of nested local and global layers."""

    class Nested(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(2, 2, rngs=rngs)
            block = {"local": nnx.Linear(2, 2, rngs=rngs)}
            self.layers = nnx.List([nnx.Dict(block)])

    dense = lambda: {
        "kernel": np.ones((2, 2), np.float32),
        "bias": np.ones(2, np.float32),
    }
    old = {"embed": dense(), "layer_0": dense(), "layer_1": dense()}
    source = save_standard({"params": old}, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=Nested)
    assert_refused(
        plan,
        tmp_path / "nnx",
        "params/layer_1/kernel: missing: only in linen",
        "params/layers/0/local/kernel",
        "[[rule]]",
    )
    model = Nested(nnx.Rngs(0))
    kernel = np.asarray(model.embed.kernel[...])
    with pytest.raises(CheckpointError, match="missing: layers/0/local/kernel"):
        migration.load_into(model, source)
    assert np.array_equal(model.embed.kernel[...], kernel)


def test_b18_a_padded_vocabulary_is_a_difference_and_not_cut(tmp_path):
    class Padded(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 4, rngs=rngs)

    tree = {"params": {"embed": {"embedding": np.ones((30, 4), np.float32)}}}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=Padded)
    assert_refused(plan, tmp_path / "nnx", "(30, 4)", "(32, 4)")


def test_b19_a_manifest_that_says_otherwise_is_an_error(saved):
    with pytest.raises(CheckpointError, match="is a nnx checkpoint already") as error:
        migration.plan(saved("list", "standard", "nnx"), to="nnx")
    assert "--to=linen" in str(error.value)


def test_b24_every_way_in_gives_the_same_arrays(saved, tmp_path):
    """Latest step, a step, a step's folder, other formats, only the parameters."""
    manager = saved("list", "manager")
    params = jax.tree.map(np.asarray, LIST.state.params)
    sources = {
        "latest": (manager, {}),
        "step": (manager, {"step": 9}),
        "folder": (manager / "10", {}),
        "item": (manager / "10" / "default", {}),
        "standard": (saved("list", "standard"), {}),
        "msgpack": (saved("list", "msgpack"), {}),
        "params": (save_standard({"params": params}, tmp_path / "p"), {}),
        "bare": (save_standard(params, tmp_path / "bare"), {}),
        "npz": (write_npz({"params": params}, tmp_path / "p.npz"), {}),
        "safetensors": (write_safetensors({"params": params}, tmp_path / "p.st"), {}),
        "tree": (from_tree(LIST.state), {}),
        "given": (manager, {"params": "params"}),
    }
    want = {
        f"layers/{i}/kernel/value": digest_of(params[f"layers_{i}"]["kernel"])
        for i in range(LAYERS)
    }
    for name, (source, options) in sources.items():
        plan = migration.plan(source, to="nnx", nnx=NNXList, **options)
        found = {
            path.removeprefix("model/"): x
            for path, x in digests(plan.store).items()
            if not path.startswith(("opt_state", "step"))
        }
        assert found == want, name


# Memory.


class Watched:
    """A large leaf of which the parts that are asked for are counted."""

    def __init__(self, shape):
        self.shape, self.largest, self.total = shape, 0, 0

    @contextlib.contextmanager
    def open(self):
        yield self.read

    def read(self, part):
        shape = tuple(s.stop - s.start for s in part)
        self.largest = max(self.largest, 4 * int(np.prod(shape)))
        self.total += 4 * int(np.prod(shape))
        rows = np.arange(part[0].start, part[0].stop, dtype=np.float32)
        columns = np.arange(part[1].start, part[1].stop, dtype=np.float32)
        return rows[:, None] * 10_000 + columns


def test_b21_b22_a_leaf_is_never_in_memory_as_a_whole(tmp_path):
    """Turned and joined, it is read in parts, each of them once."""
    shape = (2_000, 4_000)  # 32 MB
    watched = Watched(shape)
    leaves = {
        ("params", name, "kernel"): Leaf(shape, np.dtype(np.float32), watched.open)
        for name in ("a", "b")
    }
    store = from_tree({"x": 0})
    store = type(store)("a large one", "tree", leaves)
    rule = {
        "linen": ["params/a/kernel", "params/b/kernel"],
        "nnx": "params/ab/kernel",
        "axis": 0,
    }
    plan = migration.plan(store, to="nnx", rules=[rule])
    assert plan.ok, plan.differences
    [leaf] = plan.leaves.values()
    assert leaf.shape == (4_000, 4_000)
    digest(leaf, "ab")
    assert watched.largest <= 8 * 2**20
    assert watched.total == leaf.nbytes


# Loading.


@pytest.mark.parametrize("name", USERS)
def test_linen_variables_and_train_states_are_loaded(name, saved):
    user = USERS[name]
    back = saved(name, "standard", "nnx", "linen")
    assert_same(migration.load_variables(back, user.abstract), user.state)
    shapes = jax.eval_shape(lambda: user.variables)
    assert_same(migration.load_variables(back, shapes), user.variables)


def test_loading_linen_variables_is_strict(saved, tmp_path):
    back = saved("cnn", "standard", "nnx", "linen")
    params = {"params": CNN.state.params}
    with pytest.raises(CheckpointError, match="unexpected: batch_stats/norm/mean"):
        migration.load_variables(back, params)
    more = {**CNN.variables, "params": {**CNN.state.params, "x": jnp.ones(2)}}
    with pytest.raises(CheckpointError, match="missing: params/x"):
        migration.load_variables(back, more)
    bare = save_standard(CNN.state.params, tmp_path / "bare")
    assert_same(migration.load_variables(bare, CNN.state.params), CNN.state.params)


def test_a_state_is_loaded_without_its_module(saved):
    state = nnx_state(LIST)
    loaded = migration.load_into(state, saved("list", "standard", "nnx"))
    assert_same(loaded.state, expected_model("list"))


def test_an_optimizer_of_another_kind_is_called_an_optimizer(saved):
    source = saved("list", "standard", "nnx")
    model = NNXList(nnx.Rngs(0))
    for tx in (optax.sgd(0.1, momentum=0.9), optax.adam(1e-3)):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        with pytest.raises(CheckpointError) as error:
            migration.load_into(optimizer, source)
        assert "is not the optimizer's: give the optimizer" in str(error.value)
        assert "model" not in str(error.value)


def test_what_was_loaded_prints_in_a_line(saved):
    model = CNN.nnx(nnx.Rngs(0))
    loaded = migration.load_into(model, saved("cnn", "standard", "nnx"))
    text = "Loaded(8 leaves; random: drop/rngs/count, drop/rngs/key; skipped: none)"
    assert repr(loaded) == str(loaded) == text


def test_a_step_that_does_not_fit_its_type_is_refused(tmp_path):
    tx = optax.sgd(0.1)
    model = NNXTiny(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    source = save_standard({"optimizer": {"step": np.int32(-1)}}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is -1, and uint32"):
        migration.load_into(optimizer, source)


# Bad input.


def test_bad_input_is_named(saved, tmp_path):
    source = saved("list", "standard")
    with pytest.raises(ValueError, match="to must be linen or nnx. Got 'torch'"):
        migration.plan(source, to="torch")
    with pytest.raises(CheckError, match="The NNX side must be a flax.nnx.Module"):
        migration.plan(source, to="nnx", nnx=LinenList())
    with pytest.raises(CheckError, match="The Linen side must be"):
        migration.plan(source, to="nnx", linen=NNXList(nnx.Rngs(0)), inputs=LIST.inputs)
    with pytest.raises(CheckError, match="give --inputs"):
        migration.plan(source, to="nnx", linen=LinenList())
    with pytest.raises(CheckError, match="making the module raises TypeError"):
        migration.plan(source, to="nnx", nnx=functools.partial(NNXList, wrong=1))
    with pytest.raises(RuleError, match="is no regular expression"):
        migration.plan(source, to="nnx", rules=[{"linen": "(", "nnx": "x"}])
    with pytest.raises(CheckpointError, match="There is no"):
        migration.plan(tmp_path / "nothing", to="nnx")


def test_an_existing_target_and_the_source_are_refused(saved, tmp_path):
    source = saved("list", "standard")
    plan = migration.plan(source, to="nnx", nnx=NNXList)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="exists. It has file"):
        plan.write(tmp_path / "full")
    for target in (source, source / "inside"):
        with pytest.raises(CheckpointError, match="never touched"):
            plan.write(target)
    steps = migration.plan(saved("list", "manager"), to="nnx", nnx=NNXList)
    with pytest.raises(CheckpointError, match="never touched"):
        steps.write(saved("list", "manager") / "nnx")
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_the_manifest_says_where_it_came_from(saved):
    source = saved("cnn", "manager")
    target = saved("cnn", "manager", "nnx")
    manifest = find_manifest(target)
    assert manifest.tree == "nnx"
    assert manifest.source.startswith(str(source))
    assert manifest.origin["step"] == 10
    assert manifest.writer.startswith("parity-zoo")
    assert {path: x.sha256 for path, x in manifest.leaves.items()} == digests(target)
