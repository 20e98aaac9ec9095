"""Rule files: what they may say, what they must not, and what they do to arrays."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.mapping.correspondence import match
from parity.mapping.leaves import Leaf, NNXLeaves
from parity.mapping.rules import RuleError, Rules


def leaf(text, *shape):
    collection, *path = text.split("/")
    path = tuple(int(t) if t.isdigit() else t for t in path)
    return Leaf(collection, path, tuple(shape), np.dtype("float32"))


def run(linen, nnx, rules):
    return match(linen, NNXLeaves(tuple(nnx)), rules)


def only(found):
    [difference] = found.differences
    return difference


# Files


def test_a_file_is_read(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        r"""
        [[rule]]
        linen = 'params/Dense_(?P<i>\d+)/(kernel|bias)'
        nnx = 'params/layers/\g<i>/\2'

        [[rule]]
        linen = ['params/(q)', 'params/(k)']
        nnx = 'params/qk'
        axis = -1

        [[ignore]]
        linen = 'cache/.*'
        reason = 'made anew at each call'
        """
    )
    rules = Rules.read(path)
    assert rules.rules[0].targets("params/Dense_11/bias") == ("params/layers/11/bias",)
    assert rules.rules[0].targets("params/Dense_11/bias/x") is None
    assert rules.rules[1].axis == -1
    assert rules.ignored[0].reason == "made anew at each call"
    assert Rules.of(str(path)) == Rules.of(path) == rules


def test_an_empty_file_is_no_rules():
    assert Rules.parse("") == Rules() == Rules.of(None) == Rules.of([])


GOOD = {"linen": "params/(.*)", "nnx": r"params/\1"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({**GOOD, "transposed": [1, 0]}, ["'transposed'", "transpose"]),
        ({"linen": "params/x"}, ["`nnx` is missing"]),
        ({"nnx": "params/x"}, ["`linen` is missing"]),
        ({**GOOD, "linen": "params/(.*"}, ["'params/(.*'", "regular expression"]),
        ({**GOOD, "nnx": r"params/\2"}, [r"\2", "has 1"]),
        ({**GOOD, "nnx": r"params/\0"}, [r"\0"]),
        ({**GOOD, "nnx": r"params/\g<name>"}, ["<name>", "none"]),
        ({**GOOD, "nnx": r"params/\d"}, ["backslash"]),
        ({**GOOD, "linen": 3}, ["linen = 3", "text"]),
        ({**GOOD, "linen": []}, ["linen = []"]),
        ({**GOOD, "linen": ["a/(.)", "b"], "axis": 0}, ["'b' has 0"]),
        ({**GOOD, "linen": ["a/(.)", "b/(.)"]}, ["`axis`", "`linen` has 2"]),
        ({**GOOD, "axis": 0}, ["`axis`"]),
        ({"linen": ["a", "b"], "nnx": ["c", "d"], "axis": 0}, ["both", "lists"]),
        ({"linen": ["a", "b"], "nnx": "c", "axis": "last"}, ["'last'"]),
        ({"linen": ["a", "b"], "nnx": "c", "axis": True}, ["True"]),
        ({**GOOD, "transpose": [1, 1]}, ["[1, 1]", "0 to 1"]),
        ({**GOOD, "transpose": "10"}, ["'10'", "list"]),
        ({**GOOD, "moveaxis": [1]}, ["[from, to]"]),
        ({**GOOD, "moveaxis": [0, 1], "transpose": [1, 0]}, ["not both"]),
        ({**GOOD, "reshape": [-1, -1]}, ["[-1, -1]", "one of which"]),
        ({**GOOD, "reshape": [-2]}, ["[-2]"]),
        ({"linen": "x", "reason": ""}, ["`reason`"]),
        ({"linen": "x", "nnx": "y", "reason": "z"}, ["either"]),
        ({"reason": "z"}, ["either"]),
        ({"linen": ["x"], "reason": "z"}, ["one pattern"]),
        ({"nnx": "(", "reason": "z"}, ["regular expression"]),
    ],
)
def test_a_wrong_rule_is_refused_with_file_number_and_reason(entry, words):
    with pytest.raises(RuleError) as caught:
        Rules.of([entry], "my.toml")
    kind = "ignore 1" if "reason" in entry else "rule 1"
    for word in ["my.toml", kind, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["[[rule]", "[[rules]]\nx = 1", "rule = 3", "rule = [3]", "[rule]\nlinen = 'x'"],
)
def test_what_is_no_rule_file_is_refused(text, tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(RuleError, match="rules.toml"):
        Rules.read(path)


def test_an_ignore_without_reason_is_refused():
    with pytest.raises(RuleError, match="reason"):
        Rules.parse("[[ignore]]\nlinen = 'x'")


# Rules against trees


def test_an_unused_rule_is_a_difference_with_near_leaves():
    leaves = [leaf("params/Dense_0/kernel", 3)]
    rules = [{"linen": "params/Dense_0/kernal", "nnx": "params/x"}]
    difference = only(run(leaves, leaves, rules))
    assert difference.what == "rule" and "unused" in difference.detail
    assert "params/Dense_0/kernel" in difference.detail
    ignored = [{"nnx": "params/Dense_1/.*", "reason": "old"}]
    assert "unused" in only(run(leaves, leaves, ignored)).detail


def test_two_sources_for_one_target_are_a_difference_with_both():
    linen = [leaf("params/a", 3), leaf("params/b", 3)]
    rules = [{"linen": "params/(a|b)", "nnx": "params/c"}]
    difference = only(run(linen, [leaf("params/c", 3)], rules))
    assert (difference.path, difference.what) == ("params/c", "two sources")
    assert "params/a" in difference.detail and "params/b" in difference.detail
    # A rule that sends one leaf where another is by its own name.
    rules = [{"linen": "params/a", "nnx": "params/b"}]
    assert only(run(linen, [leaf("params/b", 3)], rules)).what == "two sources"


def test_two_rules_for_one_leaf_are_a_difference():
    linen, nnx = [leaf("params/a", 3)], [leaf("params/b", 3)]
    rules = [
        {"linen": "params/a", "nnx": "params/b"},
        {"linen": "params/.*", "nnx": "params/b"},
    ]
    found = run(linen, nnx, rules)
    assert any("rule 1 and rule 2" in d.detail for d in found.differences)
    assert not found.usable


def test_a_rule_to_nowhere_says_where_it_went():
    found = run(
        [leaf("params/a", 3)],
        [leaf("params/bb", 3)],
        [{"linen": "params/a", "nnx": "params/b"}],
    )
    assert [d.what for d in found.differences] == ["missing", "missing"]
    assert "rule 1 sends it to params/b, which nnx lacks" in found.differences[0].detail
    assert "params/bb" in found.differences[0].detail


def test_ignored_leaves_are_counted_with_the_reason():
    linen = [leaf("params/a", 3), leaf("params/old/x", 3), leaf("params/old/y", 3)]
    nnx = [leaf("params/a", 3), leaf("params/new", 3)]
    rules = [
        {"linen": "params/old/.*", "reason": "never read"},
        {"nnx": "params/new", "reason": "zero"},
    ]
    found = run(linen, nnx, rules)
    assert found.usable and not found.differences
    assert found.ignored == {
        "linen": ("params/old/x", "params/old/y"),
        "nnx": ("params/new",),
    }
    assert any("2 in linen" in r and "never read" in r for r in found.describe())
    values = {x.text: np.zeros(3) for x in linen}
    assert set(found.to_nnx(values)) == {"params/a"}


def test_a_part_that_is_missing_is_named():
    linen = [leaf("params/l0/q", 3), leaf("params/l0/k", 3), leaf("params/l1/q", 3)]
    nnx = [leaf("params/l0/qk", 6), leaf("params/l1/qk", 6)]
    rules = [
        {
            "linen": ["params/(.*)/q", "params/(.*)/k"],
            "nnx": r"params/\1/qk",
            "axis": 0,
        }
    ]
    found = run(linen, nnx, rules)
    assert [d.what for d in found.differences] == ["rule", "missing"]
    assert "not exactly one for params/(.*)/k" in found.differences[0].detail
    assert [entry.nnx for entry in found.entries] == [("params/l0/qk",)]


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"transpose": [1, 0, 2]}, "3 axes"),
        ({"moveaxis": [0, 2]}, "no axis 2"),
        ({"reshape": [5, -1]}, "(3, 4)"),
        ({"reshape": [0, -1]}, "(3, 4)"),
        ({"reshape": [13]}, "12 entries"),
        ({"transpose": [1, 0]}, "(4, 3)"),
    ],
)
def test_layouts_that_do_not_fit_are_shape_differences(extra, word):
    leaves = [leaf("params/a", 3, 4)]
    rule = {"linen": "params/a", "nnx": "params/a", **extra}
    difference = only(run(leaves, leaves, [rule]))
    assert difference.what == "shape" and word in difference.detail
    assert "rule 1" in difference.detail


def test_parts_that_do_not_fit_are_shape_differences():
    rule = {"linen": "params/a", "nnx": ["params/b", "params/c"], "axis": 1}
    linen = [leaf("params/a", 3, 4)]
    for sizes, word in ((((3, 2), (3, 3)), "2 + 3 = 5"), (((3,), (3, 2)), "ndim")):
        nnx = [leaf(f"params/{n}", *s) for n, s in zip("bc", sizes, strict=True)]
        difference = only(run(linen, nnx, [rule]))
        assert difference.what == "shape" and word in difference.detail


# Values

RANDOM = np.random.default_rng(0)


def bits(shape):
    """Any bits at all: NaN with payloads, negative zeros, subnormals."""
    return RANDOM.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)


@st.composite
def one_rule(draw, number):
    """A rule, Linen's arrays, and what NumPy says NNX's are."""
    kind = draw(st.sampled_from(["turn", "move", "shape", "join", "cut", "name"]))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)))
    x, ndim = bits(shape), len(shape)
    source, target = f"params/m_{number}/a", f"params/n/{number}/a"
    rule = {"linen": source, "nnx": target}
    one = {source: x}
    match kind:
        case "name":
            return rule, one, {target: x}
        case "turn":
            order = draw(st.permutations(range(ndim)))
            return {**rule, "transpose": order}, one, {target: np.transpose(x, order)}
        case "move":
            ends = [draw(st.integers(-ndim, ndim - 1)) for _ in range(2)]
            return {**rule, "moveaxis": ends}, one, {target: np.moveaxis(x, *ends)}
        case "shape":
            new = [shape[0], -1]
            return {**rule, "reshape": new}, one, {target: x.reshape(new)}
    axis = draw(st.integers(-ndim, ndim - 1))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    pieces = []
    for size in sizes:
        piece = list(shape)
        piece[axis] = size
        pieces.append(bits(piece))
    names = [f"{source}{i}" for i in range(len(sizes))]
    whole, order = np.concatenate(pieces, axis), draw(st.permutations(range(ndim)))
    if kind == "join":
        rule = {"linen": names, "nnx": target, "axis": axis, "transpose": order}
        parts = dict(zip(names, pieces, strict=True))
        return rule, parts, {target: np.transpose(whole, order)}
    rule = {"linen": source, "nnx": names, "axis": axis, "transpose": order}
    before = np.transpose(whole, np.argsort(order))
    return rule, {source: before}, dict(zip(names, pieces, strict=True))


def same_bytes(left, right):
    assert left.keys() == right.keys()
    for name in left:
        a, b = np.asarray(left[name]), np.asarray(right[name])
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.tobytes() == b.tobytes(), name


def cases(data):
    rules, linen, nnx = [], {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        rule, ours, theirs = data.draw(one_rule(number))
        rules.append(rule)
        linen |= ours
        nnx |= theirs
    leaves = [[leaf(t, *x.shape) for t, x in side.items()] for side in (linen, nnx)]
    found = run(*leaves, rules)
    assert not found.differences
    return found, linen, nnx


@given(st.data())
@settings(max_examples=100)
def test_layouts_are_numpys_and_come_back_to_the_bit(data):
    found, linen, nnx = cases(data)
    same_bytes(found.to_nnx(linen), nnx)
    same_bytes(found.to_linen(nnx), linen)


@given(st.data())
@settings(max_examples=5)
def test_layouts_come_back_to_the_bit_under_jit(data):
    found, linen, nnx = cases(data)
    same_bytes(jax.jit(found.to_nnx)(linen), nnx)
    same_bytes(jax.jit(lambda x: found.to_linen(found.to_nnx(x)))(linen), linen)


def test_float64_of_numpy_stays_float64():
    rule = {"linen": ["params/a", "params/b"], "nnx": "params/c", "axis": 0}
    parts = [leaf("params/a", 1), leaf("params/b", 1)]
    found = run(parts, [leaf("params/c", 2)], [rule])
    third = np.float64([1 / 3])
    joined = found.to_nnx({"params/a": third, "params/b": third})["params/c"]
    assert joined.dtype == np.float64 and joined[0] == 1 / 3
