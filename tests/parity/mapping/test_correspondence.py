"""Which leaf is which: every known difference between the two APIs, and every fault."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen import spmd
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.mapping.correspondence import match
from parity.mapping.leaves import (
    Leaf,
    NNXLeaves,
    linen_leaves,
    nnx_leaves,
    path_text,
    read_linen,
    read_nnx,
    write_linen,
    write_nnx,
)

X = jax.ShapeDtypeStruct((2, 4), jnp.float32)


def shapes(module, *args, **kw):
    """Linen's variables, without values."""
    return jax.eval_shape(
        lambda key, *args: module.init({"params": key, "dropout": key}, *args, **kw),
        jax.random.key(0),
        *args,
    )


def linear(rngs, *sizes, **kw):
    return nnx.Linear(*(sizes or (4, 4)), rngs=rngs, **kw)


def abstract(kind, *args, **kw):
    return nnx.eval_shape(lambda: kind(*args, rngs=nnx.Rngs(0, dropout=1), **kw))


def attributes(**build):
    """An NNX module with attributes made by functions of rngs, in this order."""

    class Made(nnx.Module):
        def __init__(self, rngs):
            for name, function in build.items():
                setattr(self, name, nnx.data(function(rngs)))

    return nnx.eval_shape(lambda: Made(nnx.Rngs(0)))


def corresponding(variables, module, rules=None):
    return match(linen_leaves(variables), nnx_leaves(module), rules)


def pairs(found):
    return {
        (entry.linen[0] if len(entry.linen) == 1 else entry.linen): entry.nnx[0]
        for entry in found.entries
    }


def problems(found):
    return [(d.path, d.what) for d in found.differences]


def leaf(text, *shape, dtype=np.float32, axes=None):
    collection, *path = text.split("/")
    path = tuple(int(t) if t.isdigit() else t for t in path)
    return Leaf(collection, path, shape, np.dtype(dtype), axes)


def by_hand(linen, nnx_, rules=None):
    return match(linen, NNXLeaves(tuple(nnx_)), rules)


# Leaves


def test_int_and_text_tokens_have_different_texts():
    assert path_text(("params", "d", 0)) == "params/d/0"
    assert path_text(("params", "d", "0")) == "params/d/'0'"
    paths = [("a", "b"), ("a/b",), (("a", "b"),), (("a/b",),), ("(a,b)",), ("a,b",)]
    paths += [("a", 0), ("a", "0"), ("'0'",), ("a'", "b"), ("",), ("a", ("0",), (0,))]
    assert len({path_text(path) for path in paths}) == len(paths)


def test_a_dict_with_digits_and_a_list_are_both_found_again():
    module = attributes(
        d=lambda _: {str(i): nnx.Param(jnp.zeros(1)) for i in range(2)},
        l=lambda _: nnx.List([nnx.Param(jnp.ones(2)) for _ in range(2)]),
    )
    assert {x.text: x.path for x in nnx_leaves(module).leaves} == {
        "params/l/0": ("l", 0),
        "params/l/1": ("l", 1),
        "params/d/'0'": ("d", "0"),
        "params/d/'1'": ("d", "1"),
    }
    _, state = nnx.split(module)
    new = write_nnx(
        state, {"params/d/'0'": jnp.full(1, 3.0), "params/l/1": jnp.full(2, 4.0)}
    )
    assert new["d"]["0"][...].tolist() == [3]
    assert new["l"][1][...].tolist() == [4, 4]


@pytest.mark.parametrize("box", [nn.Partitioned, spmd.LogicallyPartitioned])
def test_boxes_are_opened_and_keep_their_names(box):
    variables = freeze({"params": {"w": box(jnp.zeros((2, 3)), ("embed", None))}})
    [found] = linen_leaves(variables)
    assert (found.text, found.shape, found.axes) == (
        "params/w",
        (2, 3),
        ("embed", None),
    )
    new = write_linen(variables, {"params/w": jnp.ones((2, 3))})
    assert isinstance(new["params"]["w"], box)
    assert read_linen(new)["params/w"].sum() == 6


def test_sown_values_are_leaves_by_number():
    class SowsNNX(nnx.Module):
        def __init__(self):
            self.h = nnx.Intermediate((jnp.zeros((2, 4)), jnp.zeros(4)))

    sown = {"intermediates": {"h": (np.zeros((2, 4), "f"), np.zeros(4, "f"))}}
    found = corresponding(sown, SowsNNX())
    assert pairs(found) == {
        "intermediates/h/0": "intermediates/h/0",
        "intermediates/h/1": "intermediates/h/1",
    }
    assert found.usable


def test_rng_state_is_told_by_type_and_not_by_name():
    class MyKey(nnx.RngKey):
        pass

    module = attributes(
        key=lambda _: nnx.Param(jnp.zeros(2)),
        count=lambda _: nnx.BatchStat(jnp.zeros(2)),
        rngs=lambda _: {"default": nnx.Param(jnp.zeros(2))},
        weight=lambda rngs: MyKey(rngs.params()),
        drop=lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    )
    found = nnx_leaves(module)
    assert {x.text for x in found.leaves} == {
        "params/key",
        "batch_stats/count",
        "params/rngs/default",
    }
    assert {x.path for x in found.rng} == {
        ("weight",),
        ("drop", "rngs", "count"),
        ("drop", "rngs", "key"),
    }
    variables = {
        "params": {"key": np.zeros(2), "rngs": {"default": np.zeros(2)}},
        "batch_stats": {"count": np.zeros(2)},
    }
    variables = jax.tree.map(np.float32, variables)
    matched = corresponding(variables, module)
    assert matched.usable
    assert "3 RNG leaves set aside" in matched.describe()[-1]
    assert "by type, never by name" in matched.describe()[-1]


def test_values_go_through_jit_into_a_split_module_and_back():
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)

    @jax.jit
    def train(leaves, x):
        merged = nnx.merge(graphdef, write_nnx(state, leaves))
        merged(x)
        return read_nnx(merged)

    new = {"batch_stats/mean": jnp.full(3, 10.0)}
    after = train(new, jnp.zeros((2, 3)))
    np.testing.assert_allclose(after["batch_stats/mean"], 9.9, rtol=1e-6)
    assert read_nnx(state)["batch_stats/mean"].tolist() == [0, 0, 0]
    assert read_nnx(module)["batch_stats/mean"].tolist() == [0, 0, 0]


def test_an_unknown_text_is_refused_by_name():
    state = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="params/w.*There are: params/bias"):
        write_nnx(state, {"params/w": jnp.zeros(2)})
    with pytest.raises(ValueError, match="params/w"):
        write_linen({"params": {"b": np.zeros(2)}}, {"params/w": jnp.zeros(2)})


def test_modules_that_point_at_each_other_end():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent, self.w = parent, nnx.Param(jnp.zeros(3))

    class Parent(nnx.Module):
        def __init__(self):
            self.child = Child(self)

    found = nnx_leaves(Parent())
    assert [x.text for x in found.leaves] == ["params/child/w"]


@pytest.mark.parametrize("pytree", [True, False])
def test_lists_have_the_same_paths_in_both_kinds_of_module(pytree):
    if pytree:
        module = attributes(layers=lambda r: nnx.List([linear(r), linear(r)]))
    else:

        class Plain(nnx.Module, pytree=False):
            def __init__(self, rngs):
                self.layers = [linear(rngs), linear(rngs)]

        module = Plain(nnx.Rngs(0))
    assert {x.path for x in nnx_leaves(module).leaves} == {
        ("layers", i, name) for i in range(2) for name in ("kernel", "bias")
    }


# Known differences


def test_layers_are_matched_by_number():
    class Twelve(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(i + 1) for i in range(12)]

        def __call__(self, x):
            return [layer(x) for layer in self.layers]

    module = attributes(
        layers=lambda r: nnx.List([linear(r, 4, i + 1) for i in range(12)])
    )
    found = corresponding(shapes(Twelve(), X), module)
    assert found.usable and not found.differences
    assert pairs(found) == {
        f"params/layers_{i}/{name}": f"params/layers/{i}/{name}"
        for i in range(12)
        for name in ("kernel", "bias")
    }
    assert found.describe() == ("24 known: index in the name",)


def test_dicts_and_trailing_underscores():
    module = attributes(
        d=lambda r: {"a": linear(r), "0": linear(r)}, if_=lambda r: linear(r)
    )

    class Setup(nn.Module):
        def setup(self):
            self.d = {"a": nn.Dense(4), "0": nn.Dense(4)}

        def __call__(self, x):
            return self.d["0"](self.d["a"](x))

    variables = shapes(Setup(), X)
    variables["params"]["if"] = variables["params"]["d_a"]
    found = corresponding(variables, module)
    assert not found.differences
    assert pairs(found)["params/d_0/kernel"] == "params/d/'0'/kernel"
    assert pairs(found)["params/d_a/kernel"] == "params/d/a/kernel"
    assert pairs(found)["params/if/kernel"] == "params/if_/kernel"
    assert "2 known: trailing underscore" in found.describe()


def test_what_may_be_two_things_is_neither():
    linen = [leaf("params/d_0/w", 3)]
    nnx_ = [leaf("params/d/0/w", 3), Leaf("params", ("d", "0", "w"), (3,), "float32")]
    found = by_hand(linen, nnx_)
    assert problems(found) == [("params/d_0/w", "ambiguous")]
    assert "params/d/0/w, params/d/'0'/w" in found.differences[0].detail
    assert not found.usable
    rules = [{"linen": "params/d_0/w", "nnx": "params/d/'0'/w"}]
    assert pairs(by_hand(linen, nnx_, rules)) == {"params/d_0/w": "params/d/'0'/w"}
    # The other way round: two of Linen's for one of NNX's.
    found = by_hand(
        [leaf("params/a_b/w", 3), leaf("params/a/b_w", 3)], [leaf("params/a/b/w", 3)]
    )
    assert {what for _, what in problems(found)} == {"ambiguous"}


GATES = {"i": ["ii", "if", "ig", "io"], "h": ["hi", "hf", "hg", "ho"]}


@pytest.mark.parametrize("linen_kind", [nn.LSTMCell, nn.OptimizedLSTMCell])
@pytest.mark.parametrize("nnx_kind", [nnx.LSTMCell, nnx.OptimizedLSTMCell])
def test_lstm_cells_give_the_same_bytes(linen_kind, nnx_kind):
    cell, x = linen_kind(5), jnp.ones((2, 3))
    carry = cell.initialize_carry(jax.random.key(0), x.shape)
    variables = jax.jit(cell.init)(jax.random.key(1), carry, x)
    # Zero biases would hide a wrong order.
    leaves = {
        text: value if "kernel" in text else jnp.arange(5.0) + len(text) + i
        for i, (text, value) in enumerate(read_linen(variables).items())
    }
    module = nnx_kind(3, 5, rngs=nnx.Rngs(0))
    found = corresponding(variables, module)
    assert not found.differences and found.elements == 3 * 20 + 5 * 20 + 20
    graphdef, state = nnx.split(module)

    @jax.jit
    def both(leaves):
        merged = nnx.merge(graphdef, write_nnx(state, found.to_nnx(leaves)))
        return merged(carry, x), cell.apply(write_linen(variables, leaves), carry, x)

    ours, theirs = both(leaves)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    fused = found.to_nnx(leaves)
    if nnx_kind is nnx.OptimizedLSTMCell:
        for side in "ih":
            expected = [leaves[f"params/{gate}/kernel"] for gate in GATES[side]]
            assert (fused[f"params/dense_{side}/kernel"] == np.hstack(expected)).all()
    back = found.to_linen(fused)
    assert all((back[text] == leaves[text]).all() for text in leaves)


def test_gru_cells_differ_in_one_bias_and_it_is_named():
    cell = nn.GRUCell(5)
    carry = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    variables = shapes(cell, carry, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    module = abstract(nnx.GRUCell, 3, 5)
    found = corresponding(variables, module)
    assert problems(found) == [("params/hn/bias", "missing")]
    assert "equal only while it is zero" in found.differences[0].detail
    assert ("params/ir/kernel", "params/iz/kernel", "params/in/kernel") in pairs(found)
    rules = [{"linen": ".*/hn/bias", "reason": "held at zero"}]
    found = corresponding(variables, module, rules)
    assert found.usable and found.ignored["linen"] == ("params/hn/bias",)
    assert any(
        "held at zero" in line and "1 in linen" in line for line in found.describe()
    )


def test_simple_cells():
    carry = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    variables = shapes(nn.SimpleCell(5), carry, X)
    found = corresponding(variables, abstract(nnx.SimpleCell, 4, 5))
    assert not found.differences
    assert pairs(found)["params/h/kernel"] == "params/dense_h/kernel"


def test_a_renamed_cell_in_a_list_still_has_its_gates_fused():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(4))(x)

    module = attributes(
        cells=lambda r: nnx.List([nnx.OptimizedLSTMCell(4, 4, rngs=r) for _ in "ab"])
    )
    variables = shapes(Two(), jax.ShapeDtypeStruct((2, 3, 4), jnp.float32))
    rules = [
        {"linen": r"params/OptimizedLSTMCell_(\d)/(.*)", "nnx": r"params/cells/\1/\2"}
    ]
    found = corresponding(variables, module, rules)
    assert not found.differences
    assert found.describe() == ("6 rule 1, gates of an LSTM cell, fused in NNX",)


def test_norm_wrappers():
    class Wrapped(nn.Module):
        def setup(self):
            self.weight = nn.WeightNorm(nn.Dense(4))
            self.spectral = nn.SpectralNorm(nn.Dense(4))

        def __call__(self, x):
            return self.spectral(self.weight(x), update_stats=True)

    def module():
        return attributes(
            weight=lambda r: nnx.WeightNorm(linear(r), rngs=r),
            spectral=lambda r: nnx.SpectralNorm(linear(r), rngs=r),
        )

    found = corresponding(shapes(Wrapped(), X), module())
    assert not found.differences
    assert pairs(found)["params/weight/'layer_instance/kernel/scale'"] == (
        "params/weight/scales/(kernel)"
    )
    assert pairs(found)["batch_stats/spectral/'layer_instance/kernel/u'"] == (
        "batch_stats/spectral/batch_stats/(kernel,u)"
    )


def test_arrays_that_are_no_variables_are_leaves():
    class Bare(nnx.Module):
        def __init__(self):
            self.table = jnp.ones(3)

    for module in (Bare(), nnx.eval_shape(Bare)):
        found = nnx_leaves(module)
        assert [x.text for x in found.leaves] == ["params/table"]
        assert found.arrays == {"params/table"}
    state = nnx.split(Bare())[1]
    new = write_nnx(state, {"params/table": jnp.zeros(3)})
    assert read_nnx(new)["params/table"].sum() == 0


def test_collections_and_variable_types():
    class Stats(nnx.Variable):
        pass

    module = attributes(
        norm=lambda r: nnx.BatchNorm(4, rngs=r),
        mine=lambda _: Stats(jnp.zeros(3)),
        lora=lambda r: nnx.LoRA(4, 2, 4, rngs=r),
    )
    variables = {
        "params": {"norm": {"scale": (4,), "bias": (4,)}},
        "batch_stats": {"norm": {"mean": (4,), "var": (4,)}},
        "Stats": {"mine": (3,)},
    }
    lora = {"lora": {"lora_a": (4, 2), "lora_b": (2, 4)}}
    as_params = {**variables, "params": {**variables["params"], **lora}}
    own = {**variables, "LoRAParam": lora}
    for tree, collection in ((as_params, "params"), (own, "LoRAParam")):
        tree = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            tree,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        found = corresponding(tree, module)
        assert not found.differences
        assert pairs(found)[f"{collection}/lora/lora_a"] == "LoRAParam/lora/lora_a"
    assert "Stats" not in nnx.variablelib.VariableTypeCache


def test_one_path_in_two_collections_is_two_leaves():
    linen = [leaf("params/x", 3), leaf("cache/x", 3)]
    nnx_ = [leaf("params/x", 3), leaf("cache/y", 3)]
    found = by_hand(linen, nnx_, [{"linen": "cache/x", "nnx": "cache/y"}])
    assert pairs(found) == {"params/x": "params/x", "cache/x": "cache/y"}


def test_another_collection_is_a_difference_with_both_names():
    found = by_hand([leaf("params/bn/mean", 3)], [leaf("batch_stats/bn/mean", 3)])
    assert problems(found) == [("params/bn/mean", "collection")]
    assert "linen keeps it in params, nnx in batch_stats" in found.differences[0].detail


class Tied(nnx.Module):
    def __init__(self, rngs, tied=True):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.attend = self.embed if tied else nnx.Embed(8, 4, rngs=rngs)


@pytest.mark.parametrize("name", ["attend", "embed"])
def test_a_tied_leaf_matches_under_either_name(name):
    variables = {"params": {name: {"embedding": np.zeros((8, 4), np.float32)}}}
    module = Tied(nnx.Rngs(0))
    found = corresponding(variables, module)
    assert found.usable and found.comparison.leaves == 1
    # The one under which `nnx.split` files it: the first of the alphabet.
    assert pairs(found) == {f"params/{name}/embedding": "params/attend/embedding"}
    assert set(read_nnx(module)) == {"params/attend/embedding"}
    graphdef, state = nnx.split(module)
    new = found.to_nnx({f"params/{name}/embedding": jnp.ones((8, 4))})
    merged = nnx.merge(graphdef, write_nnx(state, new))
    assert merged.embed is merged.attend and merged.embed.embedding[...].sum() == 32


def test_a_pair_tied_on_one_side_only_differs():
    both = {"embedding": np.zeros((8, 4), np.float32)}
    tied, untied = (
        {"params": {"embed": both}},
        {"params": {"embed": both, "attend": both}},
    )
    found = corresponding(tied, Tied(nnx.Rngs(0), tied=False))
    assert problems(found) == [("params/attend/embedding", "missing")]
    found = corresponding(untied, Tied(nnx.Rngs(0)))
    assert problems(found) == [("params/attend/embedding", "two sources")]
    assert "tied with params/embed/embedding" in found.differences[0].detail


# Axis names


def named(*axes):
    return nn.with_partitioning(nn.initializers.ones, axes)


def test_axis_names_are_compared_where_either_side_has_them():
    def module(names):
        with nnx.use_eager_sharding(False):
            return attributes(
                fc=lambda r: linear(
                    r,
                    kernel_metadata={"out_sharding": names},
                    bias_metadata={"out_sharding": ("mlp",)},
                )
            )

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(
                4, name="fc", kernel_init=named("embed", "mlp"), bias_init=named("mlp")
            )(x)

    variables = shapes(Net(), X)
    assert not corresponding(variables, module(("embed", "mlp"))).differences
    found = corresponding(variables, module(("mlp", "embed")))
    assert problems(found) == [("params/fc/kernel", "axes")]
    assert found.usable
    found = corresponding(variables, module(None))
    assert problems(found) == [("params/fc/kernel", "axes")]
    assert "linen ('embed', 'mlp'), nnx None" in found.differences[0].detail
    # A side that declares nothing at all has lost nothing.
    bare = corresponding(nn.unbox(variables), module(("embed", "mlp")))
    assert not bare.differences


def test_names_that_are_fewer_than_axes_are_reported_with_all_three():
    linen = [leaf("params/w", 3, 4, 5, axes=("embed", "mlp"))]
    found = by_hand(linen, [leaf("params/w", 3, 4, 5)])
    assert problems(found) == [("params/w", "axes")]
    for part in ("('embed', 'mlp')", "ndim 3", "(3, 4, 5)"):
        assert part in found.differences[0].detail


def test_axis_names_follow_the_layout():
    linen = [leaf("params/w", 3, 4, axes=("embed", "mlp"))]
    rules = [{"linen": "params/w", "nnx": "params/w", "transpose": [1, 0]}]
    for axes, what in ((("mlp", "embed"), []), (("embed", "mlp"), ["axes"])):
        found = by_hand(linen, [leaf("params/w", 4, 3, axes=axes)], rules)
        assert [w for _, w in problems(found)] == what


# Stacks


class Block(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(2 * self.width, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(self.width, name="down")(y), None


class Scanned(nn.Module):
    axis: int
    length: int = 3

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            Block,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.length,
        )
        return nn.Dense(4, name="head")(scan(name="layers")(x, None)[0])


class BlockNNX(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.up, self.down = linear(rngs, 4, 8), linear(rngs, 8, 4)


def scanned_nnx(axis, length=3):
    axes = nnx.StateAxes({nnx.Param: axis, ...: 0})
    stack = nnx.vmap(BlockNNX, in_axes=0, out_axes=axes)
    return attributes(layers=lambda r: stack(r.split(length)), head=linear)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 1), (1, 0), (0, -1)])
def test_the_stack_axis_is_found_for_the_whole_stack(left, right):
    variables = shapes(Scanned(left), X)
    found = corresponding(variables, scanned_nnx(right))
    assert found.usable and not found.differences
    random = np.random.default_rng(0)
    leaves = {
        x.text: random.random(x.shape, np.float32) for x in linen_leaves(variables)
    }
    moved = found.to_nnx(leaves)
    for text, value in leaves.items():
        if "layers" in text:
            value = np.moveaxis(value, left, right)
        assert np.array_equal(moved[text], value)


def test_a_square_leaf_moves_with_its_stack():
    linen = [leaf("params/layers/w", 3, 3), leaf("params/layers/v", 3, 5)]
    nnx_ = [leaf("params/layers/w", 3, 3), leaf("params/layers/v", 5, 3)]
    found = by_hand(linen, nnx_)
    # v alone is no stack: it may be a transposed matrix.
    assert problems(found) == [("params/layers/", "ambiguous")]
    rules = [
        {"linen": "params/layers/(.*)", "nnx": r"params/layers/\1", "moveaxis": [0, 1]}
    ]
    assert not by_hand(linen, nnx_, rules).differences
    # Two leaves that can only have moved are a stack, and w is in it.
    linen.append(leaf("params/layers/u", 3, 6))
    nnx_.append(leaf("params/layers/u", 6, 3))
    found = by_hand(linen, nnx_)
    assert not found.differences
    assert all(entry.steps for entry in found.entries)


def test_a_stack_axis_that_shapes_do_not_tell_asks_for_a_rule():
    linen = [leaf("params/layers/w", 3, 4, 4), leaf("params/layers/b", 3, 4)]
    nnx_ = [leaf("params/layers/w", 4, 3, 4), leaf("params/layers/b", 4, 3)]
    found = by_hand(linen, nnx_)
    assert problems(found) == [("params/layers/", "ambiguous")]
    assert "linen = 'params/layers/(.*)'" in found.differences[0].detail
    assert "moveaxis" in found.differences[0].detail


# Faults


def test_a_renamed_leaf_is_named_on_both_sides_with_the_rule_to_write():
    linen = [leaf("params/enc/kernel", 3, 4), leaf("params/enc/bias", 4)]
    nnx_ = [leaf("params/encoder/kernel", 3, 4), leaf("params/enc/bias", 4)]
    found = by_hand(linen, nnx_)
    assert problems(found) == [
        ("params/enc/kernel", "missing"),
        ("params/encoder/kernel", "missing"),
    ]
    detail = found.differences[0].detail
    assert "only in linen, (3, 4) float32" in detail
    assert "params/encoder/kernel (3, 4) float32" in detail
    assert "linen = 'params/enc/kernel' and nnx = 'params/encoder/kernel'" in detail
    assert not found.usable


def test_shapes_and_dtypes_differ_with_both_values_and_advice():
    found = by_hand([leaf("params/w", 3, 4)], [leaf("params/w", 4, 3)])
    assert problems(found) == [("params/w", "shape")]
    assert "linen (3, 4), nnx (4, 3)" in found.differences[0].detail
    assert "transpose = [1, 0]" in found.differences[0].detail
    found = by_hand([leaf("params/w", 3, 4)], [leaf("params/w", 12)])
    assert problems(found) == [("params/w", "shape")]
    assert "reshape = [12]" in found.differences[0].detail
    found = by_hand([leaf("params/w", 3)], [leaf("params/w", 4)])
    assert "no rule can help" in found.differences[0].detail
    found = by_hand([leaf("params/w", 3)], [leaf("params/w", 3, dtype=np.int32)])
    assert problems(found) == [("params/w", "dtype")]
    assert found.usable and found.differences[0].detail == "linen float32, nnx int32"


TEXTS = st.sampled_from(
    [f"params/{a}/{b}" for a in ("d", "d_0", "d/0", "e") for b in ("w", "w_", "0/w")]
    + ["params/d_0_w", "params/ii/kernel", "cache/d/w", "batch_stats/d/w"]
)
TREES = st.dictionaries(TEXTS, st.sampled_from([(2, 3), (3, 2), (3,)]), max_size=8)


@given(TREES, TREES)
@settings(max_examples=100)
def test_without_a_difference_every_leaf_is_in_exactly_one_entry(left, right):
    linen, nnx_ = (
        [leaf(t, *shape) for t, shape in side.items()] for side in (left, right)
    )
    found = by_hand(linen, nnx_)
    for side in ("linen", "nnx"):
        texts = [text for entry in found.entries for text in getattr(entry, side)]
        assert len(texts) == len(set(texts))
        have = {x.text for x in (linen if side == "linen" else nnx_)}
        assert set(texts) <= have
        if not found.differences:
            assert set(texts) == have
    # The shapes of what corresponds are those of the leaves.
    values = {x.text: np.zeros(x.shape) for x in linen}
    mapped = {t: values[t] for entry in found.entries for t in entry.linen}
    shapes = {x.text: x.shape for x in nnx_}
    assert all(x.shape == shapes[t] for t, x in found.to_nnx(mapped).items())


@given(TREES)
def test_a_tree_corresponds_to_itself(tree):
    leaves = [leaf(t, *shape) for t, shape in tree.items()]
    found = by_hand(leaves, leaves)
    assert not found.differences
    assert all(e.linen == e.nnx and e.origin == "same" for e in found.entries)


def test_nothing_against_nothing_is_no_correspondence():
    found = by_hand([], [])
    assert not found.usable and not found.comparison.equal
    assert not by_hand([leaf("params/w", 0)], [leaf("params/w", 0)]).comparison.equal


def test_a_part_of_the_leaves_can_be_taken_but_no_part_of_an_entry():
    carry = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    variables = shapes(nn.OptimizedLSTMCell(5), (carry, carry), X)
    found = corresponding(variables, abstract(nnx.OptimizedLSTMCell, 4, 5))
    assert found.to_nnx({}) == {}
    with pytest.raises(ValueError, match="without params/if/kernel.*cannot be"):
        kernel = np.zeros((4, 5))
        found.to_nnx({f"params/{g}/kernel": kernel for g in ("ii", "ig", "io")})
    with pytest.raises(ValueError, match="No leaf corresponds to params/x"):
        found.to_linen({"params/x": np.zeros(3)})
