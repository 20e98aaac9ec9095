"""From axis names to mesh axes: against Linen's own rules, and with clear errors."""

import functools

import jax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

import shared
import zoo_linen
from parity import decoders
from shared import sharding
from shared.sharding import AXIS_RULES, ShardingError, partition_spec
from shared.trees import flatten

MESH_AXES = ("x", "y", "z")
names_ = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.tuples(*(st.sampled_from((name, None)) for name in names))
)
axes_ = st.one_of(
    st.none(),
    st.sampled_from(MESH_AXES),
    st.lists(st.sampled_from(MESH_AXES), min_size=1, unique=True).map(tuple),
)
rules_ = st.lists(st.tuples(st.sampled_from("abcd"), axes_), max_size=8).map(
    lambda rules: (*rules, *((name, None) for name in "abcd"))
)


@given(names_, rules_)
def test_rules_are_read_as_linen_reads_them(names, rules):
    ours = partition_spec(names, rules, MESH_AXES)
    theirs = nn.logical_to_mesh_axes(names, rules)
    as_tuples = lambda spec: [sharding.as_tuple(entry) for entry in spec]
    assert as_tuples(ours) == as_tuples(theirs)


@pytest.mark.parametrize(
    ("names", "rules", "expected"),
    [
        (
            ("embed", "mlp"),
            (("embed", "x"), ("mlp", "y"), ("embed", "z")),
            PartitionSpec("x", "y"),
        ),
        (("a", "b"), (("a", "x"), ("b", "x")), PartitionSpec("x", None)),
        (("a", "b"), (("b", "x"), ("a", "x")), PartitionSpec(None, "x")),
        (("a", "b"), (("a", "x"), ("b", "x"), ("b", "y")), PartitionSpec("x", "y")),
        (("a",), (("a", None), ("a", "x")), PartitionSpec(None)),
        (("a",), (("a", ("gone", "x")),), PartitionSpec("x")),
        (("a",), (("a", "gone"), ("a", "x")), PartitionSpec("x")),
    ],
)
def test_the_first_rule_that_fits_wins_and_no_mesh_axis_is_used_twice(
    names, rules, expected
):
    """Flax's NNX has the last rule of a name win, and one mesh axis in two dimensions.

    AI-Hypercomputer/maxtext, PR 4205. The first two cases are the reported ones.
    """
    assert partition_spec(names, rules, MESH_AXES) == expected


@pytest.mark.parametrize("name", shared.presets())
def test_every_axis_of_every_preset_has_a_rule(name):
    config = shared.preset(name)
    for _, axes in flatten(shared.logical_axes(config)):
        spec = partition_spec(axes, AXIS_RULES, sharding.MESH_AXES)
        used = [axis for entry in spec for axis in sharding.as_tuple(entry)]
        assert len(used) == len(set(used))


def test_an_axis_without_a_rule_is_named():
    with pytest.raises(ShardingError, match=r"'heads' of \('embed', 'heads'\)"):
        partition_spec(("embed", "heads"), (("embed", "fsdp"),), ("fsdp",))


def test_a_name_for_two_dimensions_is_refused():
    with pytest.raises(ShardingError, match="one name twice"):
        partition_spec(("embed", "embed"), (("embed", "fsdp"),), ("fsdp",))


def test_dimensions_that_do_not_divide_are_named():
    config = shared.preset("qwen3-next-tiny")
    mesh = AbstractMesh((5,), ("fsdp",))
    shapes, axes = shared.abstract_params(config), shared.logical_axes(config)
    with pytest.raises(ShardingError) as error:
        sharding.tree_shardings(shapes, axes, mesh)
    said = str(error.value)
    assert f"embed_tokens: embed of {config.hidden_size} over fsdp of 5" in said
    assert said.count("over fsdp of 5") == sharding.MOST_SHOWN and "more" in said


def test_shardings_are_those_of_linens_partitioning():
    """The frontends' own way to the same place (`nn.logical_to_mesh_sharding`)."""
    config = shared.preset("qwen3-next-tiny")
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    shapes = shared.abstract_params(config)
    ours = sharding.tree_shardings(shapes, shared.logical_axes(config), mesh)
    boxed = zoo_linen.partitioning.box(shapes, config)
    rules = [
        (name, tuple(a for a in sharding.as_tuple(axes) if a in mesh.axis_names))
        for name, axes in AXIS_RULES
    ]
    theirs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)
    for path, spec in flatten(theirs):
        mine = dict(flatten(ours))[path].spec
        for one, other in zip(mine, spec, strict=True):
            assert sharding.as_tuple(one) == sharding.as_tuple(other), path


def test_names_on_nnx_variables_stand_where_linens_do():
    """Rules are read by one function for both, not by each of Flax's (PR 4205)."""
    config, axes = shared.preset("qwen3-next-tiny"), ("fsdp", "expert", "tensor")
    pair = decoders.abstract_pair(config)
    boxed = zoo_linen.partitioning.box(pair.params, config)
    linen = dict(flatten(nn.get_partition_spec(boxed)))
    variables = nnx.to_flat_state(nnx.state(pair.nnx, nnx.Param))
    named = {path: v.get_metadata()["out_sharding"] for path, v in variables}
    for rules in (AXIS_RULES, (("embed", "tensor"), ("embed", "fsdp"), *AXIS_RULES)):
        place = functools.partial(partition_spec, rules=rules, mesh_axes=axes)
        ours, theirs = (
            {path: place(names) for path, names in tree.items()}
            for tree in (named, linen)
        )
        assert ours == theirs


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"fsdp": 3}, "fsdp=3 does not make up the 1 devices"),
        ({"fsdp": -1, "data": -1}, "does not make up"),
        ({"rows": 1}, "no axis 'rows'"),
        ({"data": 0}, "does not make up"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_told(sizes, words):
    with pytest.raises(ShardingError, match=words):
        sharding.make_mesh(sizes, jax.devices()[:1])


def test_a_mesh_has_its_axes_in_one_order():
    mesh = sharding.make_mesh({"tensor": 1, "data": -1}, jax.devices()[:1])
    assert mesh.axis_names == ("data", "tensor")


def test_without_a_mesh_rules_change_no_program():
    config = shared.preset("qwen3-next-tiny")
    tokens = jax.ShapeDtypeStruct((2, 8), "int32")
    texts = set()
    for rules in ((), AXIS_RULES):
        pair = decoders.abstract_pair(config.replace(axis_rules=rules))
        apply = zoo_linen.as_function(pair.linen)
        lowered = jax.jit(lambda *args, apply=apply: apply(*args).logits).lower(
            shared.abstract_params(config), tokens
        )
        texts.add(lowered.as_text())
    assert len(texts) == 1
