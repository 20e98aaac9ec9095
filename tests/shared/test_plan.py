import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.plan import PlanError, layer_slots, make_plan, node_at, run_path


@dataclasses.dataclass(frozen=True)
class Sort:
    """All that a plan asks of a kind: equality, a name, whether it is global."""

    name: str
    is_global: bool = False

    def __str__(self):
        return self.name


L, F, D = Sort("linear"), Sort("full", is_global=True), Sort("dense")


@st.composite
def kind_lists(draw, largest=14):
    """A prefix, a repeated period and a part of it behind, or no order at all."""
    kinds = st.lists(st.sampled_from((L, L, F, D)), max_size=5)
    prefix, period = draw(kinds), draw(kinds)
    whole = prefix + period * draw(st.integers(0, 4))
    whole += period[: draw(st.integers(0, 4))] if draw(st.booleans()) else draw(kinds)
    return tuple(whole[:largest]) or (draw(st.sampled_from((L, F))),)


@st.composite
def plan_arguments(draw):
    """Kinds, with the period found, given, or not scanned at all.

    The plan is made in the test: its checked signatures look at random entries of a
    list, and Hypothesis wants no other randomness in a strategy.
    """
    kinds = draw(kind_lists())
    fitting = [p for p in range(1, len(kinds) + 3) if fits(kinds, p)]
    period = draw(st.sampled_from((None, *fitting)))
    scan_layers = draw(st.sampled_from((True, True, True, False)))
    return kinds, {"period": period, "scan_layers": scan_layers}


def fits(kinds, period):
    return all(kind == kinds[i % period] for i, kind in enumerate(kinds))


def names(plan):
    return [
        (group.name, group.repeats, [(run.name, run.length) for run in group.runs])
        for group in plan.groups
    ]


@given(plan_arguments())
def test_every_layer_has_one_place_and_layers_run_in_order(drawn):
    kinds, plan = drawn[0], make_plan(drawn[0], **drawn[1])
    run = [
        run.kind
        for group in plan.groups
        for _ in range(group.repeats or 1)
        for run in group.runs
        for _ in range(run.length)
    ]
    assert tuple(run) == kinds
    places = plan.places()
    assert tuple(place.kind for place in places) == kinds
    assert len({(place.path, place.slot) for place in places}) == len(kinds)
    assert plan.num_layers == len(kinds)
    covered = [i for pair in plan.runs() for i, _ in layer_slots(*pair)]
    assert sorted(covered) == list(range(len(kinds)))


@given(plan_arguments())
def test_a_run_holds_equal_layers_at_the_places_it_names(drawn):
    plan = make_plan(drawn[0], **drawn[1])
    indices = plan.indices()
    for index, place in enumerate(plan.places()):
        assert node_at(indices, place.path)[place.slot] == index
    for group, run in plan.runs():
        assert (group.repeats is not None) + run.stacked == node_at(
            indices, run_path(group, run)
        ).ndim
        assert run.stacked or run.length == 1


def layer_tree(index, kind):
    """Leaves of each rank that say which layer they are from."""
    matrix = index + np.arange(6, dtype=np.float32).reshape(3, 2) / 8
    tree = {"scalar": matrix[0, 0], "vector": matrix[:, 0], "inner": {"matrix": matrix}}
    return {**tree, "own": matrix[0]} if kind.is_global else tree


@settings(max_examples=25)
@given(plan_arguments(), st.sampled_from((0, 1)))
def test_unstack_is_the_inverse_of_stack(drawn, axis):
    kinds, plan = drawn[0], make_plan(drawn[0], **drawn[1])
    layers = [layer_tree(i, kind) for i, kind in enumerate(kinds)]
    tree = plan.stack(layers, axis)
    for before, after in zip(layers, plan.unstack(tree, axis), strict=True):
        assert jax.tree.structure(before) == jax.tree.structure(after)
        jax.tree.map(np.testing.assert_array_equal, before, after)

    again = plan.stack(plan.unstack(tree, axis), axis)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, again, tree)


@given(plan_arguments(), st.sampled_from((0, 1)))
def test_stack_axes_stand_at_the_axis_asked_for(drawn, axis):
    kinds, plan = drawn[0], make_plan(drawn[0], **drawn[1])
    layers = [layer_tree(i, kind) for i, kind in enumerate(kinds)]
    tree = jax.eval_shape(lambda: plan.stack(layers, axis))
    for group, run in plan.runs():
        node = node_at(tree, run_path(group, run))
        sizes = () if group.repeats is None else (group.repeats,)
        sizes += (run.length,) if run.stacked else ()
        assert node["scalar"].shape == sizes
        assert node["vector"].shape == ((3, *sizes) if axis else (*sizes, 3))
        expected = (3, *sizes, 2) if axis else (*sizes, 3, 2)
        assert node["inner"]["matrix"].shape == expected


@settings(max_examples=25)
@given(plan_arguments(), st.sampled_from((0, 1)), st.booleans())
def test_build_gives_what_stack_gives(drawn, axis, traced):
    kinds, plan = drawn[0], make_plan(drawn[0], **drawn[1])

    def make(index, kind):
        del kind
        return {"matrix": index * jnp.ones((3, 2), jnp.int32)}

    stacked = plan.stack([make(i, kind) for i, kind in enumerate(kinds)], axis)
    built = plan.build(make, axis, traced=traced)
    assert jax.tree.structure(built) == jax.tree.structure(stacked)
    jax.tree.map(np.testing.assert_array_equal, built, stacked)


@settings(max_examples=25)
@given(plan_arguments())
def test_gather_gives_the_layers_in_order(drawn):
    kinds, plan = drawn[0], make_plan(drawn[0], **drawn[1])
    layers = [
        {"index": np.int32(i)} | ({} if kind.is_global else {"local": np.int32(i)})
        for i, kind in enumerate(kinds)
    ]
    tree = plan.stack(layers)
    everyone = plan.gather(tree, lambda layer: layer["index"])
    np.testing.assert_array_equal(everyone, np.arange(len(kinds)))

    local = [i for i, kind in enumerate(kinds) if not kind.is_global]
    gathered = plan.gather(tree, lambda layer: layer.get("local"))
    if local:
        np.testing.assert_array_equal(gathered, local)
    else:
        assert gathered is None


@given(st.lists(st.sampled_from((L, F, D)), min_size=1, max_size=5), st.integers(2, 5))
def test_a_list_that_repeats_is_one_group_of_its_shortest_period(period, repeats):
    (group,) = make_plan(period * repeats).groups
    shortest = min(p for p in range(1, len(period) + 1) if fits(period * repeats, p))
    assert (group.name, group.period) == ("layers", shortest)
    assert group.num_layers == len(period) * repeats


@given(kind_lists(), st.integers(1, 6))
def test_an_explicit_period_is_taken_or_refused(kinds, period):
    if fits(kinds, period):
        plan = make_plan(kinds, period=period)
        scanned = [group for group in plan.groups if group.name == "layers"]
        repeats = len(kinds) // period
        assert [group.repeats for group in scanned] == [repeats][: bool(repeats)]
        rest = [g.num_layers for g in plan.groups if g.name == "layers_remainder"]
        assert rest == [len(kinds) % period][: bool(len(kinds) % period)]
        return
    wrong = next(i for i, kind in enumerate(kinds) if kind != kinds[i % period])
    with pytest.raises(PlanError) as error:
        make_plan(kinds, period=period)
    message = str(error.value)
    assert f"scan_period={period}" in message
    assert f"layer {wrong} is {kinds[wrong]}" in message
    assert f"layer {wrong % period}," in message
    assert f"is {kinds[wrong % period]}" in message


def test_a_contradicted_period_is_refused_even_without_scanning():
    with pytest.raises(PlanError, match="layer 3 is full, but layer 1"):
        make_plan((L, L, L, F), period=2, scan_layers=False)


@pytest.mark.parametrize("period", [0, -1])
def test_a_period_has_at_least_one_layer(period):
    with pytest.raises(PlanError, match=f"at least 1. Got {period}"):
        make_plan((L, F), period=period)


def test_fewer_layers_than_an_explicit_period_are_all_remainder():
    plan = make_plan((L, L), period=4)
    assert names(plan) == [("layers_remainder", None, [("local_layers", 2)])]
    assert [place.slot for place in plan.places()] == [(0,), (1,)]


@pytest.mark.parametrize(
    "kinds,expected",
    [
        # The full layer first, in the middle, last; without and with a remainder.
        ((F, L, L) * 2, [("layers", 2, [("global_layer", 1),
                                        ("local_layers_after", 2)])]),
        ((L, F, L) * 2, [("layers", 2, [("local_layers", 1), ("global_layer", 1),
                                        ("local_layers_after", 1)])]),
        ((L, L, F) * 2, [("layers", 2, [("local_layers", 2), ("global_layer", 1)])]),
        ((F, L, L) * 2 + (F,), [("layers", 2, [("global_layer", 1),
                                               ("local_layers_after", 2)]),
                                ("layers_remainder", None, [("global_layer", 1)])]),
        ((L, L, F) * 2 + (L,), [("layers", 2, [("local_layers", 2),
                                               ("global_layer", 1)]),
                                ("layers_remainder", None, [("local_layers", 1)])]),
        # One period, and a part of it.
        ((L, L, L, F, L, L), [("layers", 1, [("local_layers", 3), ("global_layer", 1)]),
                              ("layers_remainder", None, [("local_layers", 2)])]),
        # A dense prefix.
        ((D,) + (L, L, F) * 3, [("prefix", None, [("local_layers", 1)]),
                                ("layers", 3, [("local_layers", 2),
                                               ("global_layer", 1)])]),
        # One kind only.
        ((L,) * 4, [("layers", 4, [("local_layers", 1)])]),
        ((F,) * 3, [("layers", 3, [("global_layer", 1)])]),
        # Two sorts of local layers: runs have numbers.
        ((L, D, F) * 2, [("layers", 2, [("run_0", 1), ("run_1", 1), ("run_2", 1)])]),
        ((F, F, L) * 2, [("layers", 2, [("run_0", 2), ("run_1", 1)])]),
        # Nothing stands twice.
        ((L, F, D, L, D, F), [(f"layers_{i}", None, [(None, 1)]) for i in range(6)]),
    ],
)  # fmt: skip
def test_groups_and_runs_have_their_names(kinds, expected):
    assert names(make_plan(kinds)) == expected


def test_without_scanning_each_layer_stands_by_itself():
    plan = make_plan((L, L, F) * 2, scan_layers=False)
    assert [(place.path, place.slot) for place in plan.places()] == [
        ((f"layers_{i}",), ()) for i in range(6)
    ]


def test_the_description_has_a_line_for_each_group():
    plan = make_plan((D,) + (L, L, F) * 2 + (L,))
    assert plan.describe() == textwrap.dedent(
        """\
        prefix (layers 0-0): [local_layers: 1 x dense]
        layers (layers 1-6): 2 x [local_layers: 2 x linear, global_layer: 1 x full]
        layers_remainder (layers 7-7): [local_layers: 1 x linear]"""
    )


@given(plan_arguments())
def test_the_description_names_every_group_and_where_it_ends(drawn):
    plan = make_plan(drawn[0], **drawn[1])
    lines = plan.describe().split("\n")
    for group, line in zip(plan.groups, lines, strict=True):
        last = group.start + group.num_layers - 1
        assert line.startswith(f"{group.name} (layers {group.start}-{last}): ")


def test_a_scalar_of_a_layer_cannot_be_sliced_at_axis_one():
    plan = make_plan((L, L))
    with pytest.raises(ValueError, match="param_scan_axis=0"):
        plan.build(lambda index, kind: {"scale": jnp.float32(1)}, axis=1)


@dataclasses.dataclass(frozen=True)
class Sectioned(Sort):
    section: str = "shared"


def test_sections_are_grouped_by_themselves():
    """Gemma 4 E2B in small: three periods, and two of layers of another section."""
    local, full = Sectioned("linear"), Sectioned("full", is_global=True)
    plan = make_plan((L, L, F) * 3 + (local, local, full) * 2 + (local,))
    assert names(plan) == [
        ("layers", 3, [("local_layers", 2), ("global_layer", 1)]),
        ("layers_shared", 2, [("local_layers", 2), ("global_layer", 1)]),
        ("layers_shared_remainder", None, [("local_layers", 1)]),
    ]
    assert [place.kind for place in plan.places()][9:12] == [local, local, full]
    with pytest.raises(PlanError, match="stand apart: layer 2"):
        make_plan((L, local, L))
    with pytest.raises(PlanError, match="layer 12 is linear, but layer 9"):
        make_plan((L, L, F) * 3 + (full, local, local, local), period=3)


def test_unscanned_layers_keep_their_numbers_across_sections():
    plan = make_plan((L, F, Sectioned("linear")), scan_layers=False)
    assert [group.name for group in plan.groups] == ["layers_0", "layers_1", "layers_2"]
    assert plan.num_layers == 3
