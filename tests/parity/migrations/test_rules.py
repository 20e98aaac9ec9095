"""Rules: names and layouts, for the model and for what follows it; read backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from parity import migration
from parity.diff import diff
from parity.mapping.rules import Rules
from parity.pairs import checking
from shared.stores import open_store
from tests.parity.migrations.checking import assert_same, digests, read
from tests.parity.migrations.models import filled, normal, restore, save_standard

# Rules.


def renamed(tmp_path, rules, **options):
    tree = {
        "params": {
            "encoder": {"Dense_0": {"kernel": jnp.arange(6.0).reshape(2, 3)}},
            "other": {"kernel": jnp.ones(2)},
        }
    }
    tx = optax.adam(1e-3)
    opt_state = jax.tree.map(lambda x: x + 1, tx.init(tree["params"]))
    source = save_standard({**tree, "opt_state": opt_state}, tmp_path / "x")
    return migration.plan(source, to="nnx", rules=rules, **options)


RENAME = {"linen": "params/encoder/Dense_0/kernel", "nnx": "params/enc/fc/kernel"}


def test_a16_a_rule_renames_the_leaf_and_its_moments(tmp_path):
    plan = renamed(tmp_path, [RENAME])
    want = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    name = ("enc", "fc", "kernel", "value")
    assert np.array_equal(read(plan, "model", *name), want)
    for tree in ("mu", "nu"):
        moment = read(plan, "opt_state", 0, tree, *name)
        assert np.array_equal(moment, np.ones((2, 3)))
    assert not any("encoder" in map(str, path) for path in plan.leaves)


def test_a16_an_unused_rule_is_an_error(tmp_path):
    plan = renamed(tmp_path, [{"linen": "params/encodr/.*", "nnx": "params/x"}])
    [difference] = plan.differences
    assert (difference.what, "unused" in difference.detail) == ("rule", True)


def test_a16_two_sources_for_one_target_are_an_error(tmp_path):
    plan = renamed(tmp_path, [{**RENAME, "nnx": "params/other/kernel"}])
    assert {d.what for d in plan.differences} & {"two sources"}
    text = str(plan.differences[0])
    assert "params/encoder/Dense_0/kernel" in text
    assert "params/other/kernel" in text


def test_a16_one_place_by_two_collections_is_an_error(tmp_path):
    tree = {"params": {"a": jnp.ones(2)}, "batch_stats": {"a": jnp.ones(2)}}
    plan = migration.plan(save_standard(tree, tmp_path / "x"), to="nnx")
    [difference] = plan.differences
    assert difference.what == "two sources"
    assert "params/a" in difference.detail
    assert "batch_stats/a" in difference.detail


FUSED = {
    "linen": ["params/q/kernel", "params/k/kernel", "params/v/kernel"],
    "nnx": "params/qkv/kernel",
    "axis": -1,
}
TURNED = {"linen": "params/o/kernel", "nnx": "params/out/weight", "transpose": [1, 0]}


@pytest.fixture
def attention(tmp_path):
    """Parameters with Adam's state, and their NNX arrays by hand."""
    shapes = {"q": (4, 6), "k": (4, 2), "v": (4, 2), "o": (6, 4)}
    params = {
        name: {"kernel": jnp.asarray(normal(shape, i))}
        for i, (name, shape) in enumerate(shapes.items())
    }
    opt_state = optax.adam(1e-3).init(params)
    leaves, treedef = jax.tree.flatten(opt_state)
    opt_state = treedef.unflatten([filled(x, i) for i, x in enumerate(leaves)])
    tree = {"params": params, "opt_state": opt_state}

    def by_hand(tree):
        qkv = np.concatenate([tree[n]["kernel"] for n in "qkv"], -1)
        return {"qkv": qkv, "out": np.asarray(tree["o"]["kernel"]).T}

    return save_standard(tree, tmp_path / "x"), tree, by_hand


def test_other_layouts_are_carried_with_the_moments_and_back(attention, tmp_path):
    source, tree, by_hand = attention
    plan = migration.plan(source, to="nnx", rules=[FUSED, TURNED])
    assert plan.ok, plan.differences
    names = {"qkv": ("qkv", "kernel", "value"), "out": ("out", "weight", "value")}
    roots = {
        ("model",): tree["params"],
        ("opt_state", 0, "mu"): tree["opt_state"][0].mu,
        ("opt_state", 0, "nu"): tree["opt_state"][0].nu,
    }
    for root, theirs in roots.items():
        for name, want in by_hand(theirs).items():
            assert np.array_equal(read(plan, *root, *names[name]), want)
    assert len(plan.layout_changes) == 6
    plan.write(tmp_path / "nnx")
    back = migration.plan(tmp_path / "nnx", to="linen")
    assert back.ok, back.differences
    back.write(tmp_path / "back")
    assert diff(open_store(source), open_store(tmp_path / "back")).equal


def test_a_rule_is_read_backwards_where_that_is_possible(tmp_path):
    tree = {"out": {"weight": jnp.arange(6.0).reshape(2, 3)}, "convs": {}}
    tree["convs"] = {i: {"kernel": jnp.full(2, float(i))} for i in range(12)}
    tree["bn"] = {"mean": jnp.zeros(2)}
    source = save_standard(tree, tmp_path / "x")
    rules = [
        TURNED,
        {"linen": r"params/Conv_(\d+)/(kernel|bias)", "nnx": r"params/convs/\1/\2"},
        {
            "linen": r"batch_stats/bn/(?P<what>mean|var)",
            "nnx": r"batch_stats/bn/\g<what>",
        },
    ]
    plan = migration.plan(source, to="linen", rules=rules)
    assert plan.ok, plan.differences
    want = np.arange(6.0).reshape(2, 3).T
    assert np.array_equal(read(plan, "params", "o", "kernel"), want)
    for i in range(12):
        assert read(plan, "params", f"Conv_{i}", "kernel")[0] == i
    assert ("batch_stats", "bn", "mean") in plan.leaves
    assert any("1 in batch_stats" in line for line in plan.describe())


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (FUSED, "give --linen and --inputs"),
        (TURNED | {"reshape": [3, 2]}, "give --linen and --inputs"),
        (
            {"linen": "params/o/.*", "nnx": "params/out/weight"},
            "cannot be read backwards",
        ),
        ({"linen": r"params/(o)/k", "nnx": "params/out/weight"}, "cannot be read back"),
    ],
)
def test_what_a_rule_does_not_tell_backwards_is_asked_for(rule, words, tmp_path):
    tree = {"out": {"weight": jnp.ones((2, 3))}, "qkv": {"kernel": jnp.ones((2, 6))}}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="linen", rules=[rule])
    assert not plan.ok
    assert words in " ".join(d.detail for d in plan.differences)


def batch_norms(tmp_path):
    """An NNX checkpoint of somebody else: two blocks, each with a BatchNorm."""
    norm = {n: np.full(2, i, np.float32) for i, n in enumerate(STATISTICS + SCALES)}
    return save_standard(
        {"blocks": {i: {"bn": norm} for i in range(2)}}, tmp_path / "x"
    )


STATISTICS, SCALES = ["mean", "var"], ["bias", "scale"]
BY_GROUP = {
    "linen": r"(batch_stats|params)/blocks_(\d+)/BatchNorm_0/(bias|mean|scale|var)",
    "nnx": r"\1/blocks/\2/bn/\3",
}


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.BatchNorm(use_running_average=True)(x)

        for i in range(2):
            x = Block(name=f"blocks_{i}")(x)
        return x


class NNXBlocks(nnx.Module):
    def __init__(self, rngs):
        norm = lambda: nnx.BatchNorm(2, use_running_average=True, rngs=rngs)
        self.blocks = nnx.List([nnx.Dict(bn=norm()) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block.bn(x)
        return x


def assert_in_their_collections(plan):
    assert plan.ok, plan.differences
    want = {
        (collection, f"blocks_{i}", "BatchNorm_0", name)
        for collection, names in (("batch_stats", STATISTICS), ("params", SCALES))
        for i in range(2)
        for name in names
    }
    assert {*plan.leaves} == want
    for path in want:
        value = (STATISTICS + SCALES).index(path[-1])
        assert np.array_equal(read(plan, *path), np.full(2, value)), path


def test_a_draft_is_read_backwards_without_any_module(tmp_path):
    inputs = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    draft = checking.suggest(LinenBlocks(), NNXBlocks, inputs)
    rules = Rules.parse(draft)
    assert len(rules.rules) == 2
    plan = migration.plan(batch_norms(tmp_path), to="linen", rules=rules)
    assert_in_their_collections(plan)


def test_a_group_over_collections_is_read_backwards_where_they_are_known(tmp_path):
    source = batch_norms(tmp_path)
    plan = migration.plan(source, to="linen", rules=[BY_GROUP], nnx=NNXBlocks)
    assert_in_their_collections(plan)
    plan.write(tmp_path / "linen")
    there = migration.plan(tmp_path / "linen", to="nnx", rules=[BY_GROUP])
    there.write(tmp_path / "nnx")
    back = migration.plan(tmp_path / "nnx", to="linen", rules=[BY_GROUP])
    assert_in_their_collections(back)


def test_a_group_over_collections_that_nothing_tells_is_asked_about(tmp_path):
    plan = migration.plan(batch_norms(tmp_path), to="linen", rules=[BY_GROUP])
    texts = [str(difference) for difference in plan.differences]
    assert len(texts) == 8, texts
    assert "may put it in any of batch_stats, params" in texts[0]
    assert "write a rule for each collection" in texts[0]


def test_a_rule_that_cannot_be_read_backwards_is_told_once(tmp_path):
    source = save_standard({"out": {"weight": jnp.ones((2, 3))}}, tmp_path / "x")
    rule = {"linen": "params/o/.*", "nnx": "params/out/weight"}
    plan = migration.plan(source, to="linen", rules=[rule])
    [difference] = plan.differences
    assert "cannot be read backwards" in difference.detail


def test_what_cannot_follow_its_parameter_is_an_error(attention, tmp_path):
    """Adafactor's rows have another shape than a parameter that is turned."""
    _, tree, _ = attention
    rows = {name: {"kernel": x["kernel"][0]} for name, x in tree["params"].items()}
    source = save_standard(
        {"params": tree["params"], "opt_state": {"v_row": rows}}, tmp_path / "rows"
    )
    plan = migration.plan(source, to="nnx", rules=[TURNED])
    [difference] = plan.differences
    assert difference.what == "shape"
    assert "opt_state/v_row/o/kernel" in difference.detail
    ignore = {"linen": "opt_state/v_row/o/kernel", "reason": "starts anew"}
    assert migration.plan(source, to="nnx", rules=[TURNED, ignore]).ok


def test_a_part_of_a_fused_moment_that_is_masked_is_an_error(attention, tmp_path):
    _, tree, _ = attention
    mask = {name: {"kernel": name != "k"} for name in tree["params"]}
    tx = optax.masked(optax.trace(0.9), mask)
    masked = {"params": tree["params"], "opt_state": tx.init(tree["params"])}
    source = save_standard(masked, tmp_path / "masked")
    plan = migration.plan(source, to="nnx", rules=[FUSED])
    [difference] = plan.differences
    assert difference.what == "missing"
    assert "of 3 parts only 2" in difference.detail


# What the two APIs lay out in different ways.


class LinenText(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.WeightNorm(nn.Dense(3, name="dense"), name="norm")(x)
        return nn.RNN(nn.OptimizedLSTMCell(4, name="cell"), name="rnn")(x[None])


class NNXText(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.WeightNorm(nnx.Linear(2, 3, rngs=rngs), rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=rngs), rngs=rngs)


TEXT_RULES = [
    {"linen": r"params/dense/(.*)", "nnx": r"params/norm/layer_instance/\1"},
    {"linen": r"params/cell/(.*)", "nnx": r"params/rnn/cell/\1"},
]


def test_known_differences_of_the_apis_and_their_moments(tmp_path):
    """Gates of an LSTM, one by one or fused; a key that holds slashes."""
    x = jnp.ones((5, 2))
    params = LinenText().init(jax.random.key(0), x)["params"]
    leaves, treedef = jax.tree.flatten(
        {"p": params, "o": optax.adam(1e-3).init(params)}
    )
    tree = treedef.unflatten([filled(leaf, i) for i, leaf in enumerate(leaves)])
    params, opt_state = tree["p"], tree["o"]
    source = save_standard({"params": params, "opt_state": opt_state}, tmp_path / "x")
    plan = migration.plan(
        source, to="nnx", nnx=NNXText, linen=LinenText(), inputs=x, rules=TEXT_RULES
    )
    assert plan.ok, plan.differences
    gates = ["hi", "hf", "hg", "ho"]  # NNX's order
    where = {("model",): params, ("opt_state", 0, "mu"): opt_state[0].mu}
    for root, theirs in where.items():
        want = np.concatenate([theirs["cell"][g]["kernel"] for g in gates], -1)
        got = read(plan, *root, "rnn", "cell", "dense_h", "kernel", "value")
        assert np.array_equal(got, want)
        scale = [p for p in plan.leaves if p[: len(root)] == root and "scales" in p]
        want = theirs["norm"]["dense/kernel/scale"]
        assert np.array_equal(read(plan, *scale[0]), want)
    plan.write(tmp_path / "nnx")
    modules = {"linen": LinenText(), "inputs": x, "rules": TEXT_RULES}
    for options in (modules, {**modules, "nnx": NNXText}, {}):
        back = migration.plan(tmp_path / "nnx", to="linen", **options)
        assert back.ok, back.differences
        assert digests(back.store) == digests(source)
    back = migration.plan(tmp_path / "nnx", to="linen", **modules)
    back.write(tmp_path / "back")
    tree = {"params": params, "opt_state": opt_state}
    assert_same(restore(tmp_path / "back", tree), tree)
