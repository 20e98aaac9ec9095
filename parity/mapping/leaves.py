"""The leaves of a Linen tree and of an NNX module, named in one way.

A leaf's text is its collection and its path, `params/layers/0/kernel`, and no two
leaves of one tree share it: an int stands as `0`, a text of digits as `'0'`, a text
with a slash in it as `'Dense_0/kernel/scale'`, a tuple as `(kernel,sigma)`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from jaxtyping import Array

# An int, a text, or a tuple of them: Flax's own type for it says less.
Token = Any
Path = tuple[Token, ...]

RNG_POLICY = (
    "RNG state (nnx.RngState: the keys and counts of streams) is no part of the "
    "correspondence: Linen keeps none in its tree. It is told by type, never by name."
)

# A word that can neither be taken for an int nor for several tokens.
_PLAIN = re.compile(r"(?!\d+$)[^/'\"(),]+")


class Leaf(NamedTuple):
    """One array of a tree.

    Attributes:
      collection: Linen's word for what it is: "params", "batch_stats", ...
      path: inside the collection; int and text tokens are kept apart.
      shape: of the array.
      dtype: of the array.
      axes: its axis names, None where it has none.
    """

    collection: str
    path: Path
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[Any, ...] | None = None

    @property
    def text(self) -> str:
        """Collection and path as people and rules write them."""
        return path_text((self.collection, *self.path))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class NNXLeaves:
    """What an NNX module holds.

    Attributes:
      leaves: without RNG state, in the order the module declares them if it is known.
      aliases: of a leaf that several paths lead to, the other texts.
      collections: by text, the other collections a leaf may stand in: those of its
        Variable's base types. A `LoRAParam` is a `Param`, too.
      arrays: texts of the leaves that are arrays outside any Variable.
      rng: RNG state, set aside.
    """

    leaves: tuple[Leaf, ...]
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    collections: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    arrays: frozenset[str] = frozenset()
    rng: tuple[Leaf, ...] = ()

    def only(self, collections: Iterable[str]) -> NNXLeaves:
        """The leaves that stand, or may stand, in one of these collections."""
        wanted = set(collections)
        kept = tuple(
            leaf
            for leaf in self.leaves
            if wanted & {leaf.collection, *self.collections.get(leaf.text, ())}
        )
        return dataclasses.replace(self, leaves=kept)


def path_text(path: Iterable[Token]) -> str:
    """The text of a path; different paths have different texts."""
    return "/".join(map(_token_text, path))


def linen_leaves(variables: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """The leaves of Linen variables: a nested dict of collections, boxed or not.

    Args:
      variables: as `init` returns them; arrays or `jax.ShapeDtypeStruct`.
    """
    return tuple(
        _leaf(str(path[0]), path[1:], value, axes)
        for path, value, axes in _linen_items(variables)
    )


def nnx_leaves(module: Any) -> NNXLeaves:
    """The leaves of an NNX module, concrete or abstract (`nnx.eval_shape`)."""
    leaves, rng, collections, arrays = [], [], {}, set()
    aliases, found = _aliases(module), {}
    for path, node in _in_order(module, _nodes(module)):
        for leaf in _node_leaves(path, node):
            if isinstance(node, nnx.RngState):
                rng.append(leaf)
                continue
            leaves.append(leaf)
            if not isinstance(node, nnx.Variable):
                arrays.add(leaf.text)
                continue
            others = _collections(type(node))[1:]
            if others:
                collections[leaf.text] = others
            rest = leaf.path[len(path) :]
            texts = tuple(
                path_text((leaf.collection, *alias, *rest)) for alias in aliases(path)
            )
            if texts:
                found[leaf.text] = texts
    return NNXLeaves(tuple(leaves), found, collections, frozenset(arrays), tuple(rng))


def declared_leaves(build: Callable[[], Any]) -> NNXLeaves:
    """The leaves of the module that `build` makes, without making it.

    Unlike a module that `nnx.eval_shape` returns, they are in the order of declaration.
    """
    found: list[NNXLeaves] = []

    def record() -> Any:
        module = build()
        found.append(nnx_leaves(module))
        return module

    nnx.eval_shape(record)
    return found[-1]


def read_linen(variables: Mapping[str, Any]) -> dict[str, Array]:
    """Every leaf by its text; boxes opened."""
    return {path_text(path): value for path, value, _ in _linen_items(variables)}


def write_linen(
    variables: Mapping[str, Any], values: Mapping[str, Array]
) -> Mapping[str, Any]:
    """The same tree, boxes and all, with the given leaves in it; others stay.

    Raises:
      ValueError: a text names no leaf.
    """
    _refuse_unknown(values, [path_text(path) for path, *_ in _linen_items(variables)])
    entries, treedef = jax.tree_util.tree_flatten_with_path(variables, is_leaf=_is_box)
    nodes = []
    for keys, node in entries:
        inner, inner_def = jax.tree_util.tree_flatten_with_path(node)
        leaves = [
            values.get(path_text(_tokens((*keys, *_unboxed(node, rest)))), value)
            for rest, value in inner
        ]
        nodes.append(jax.tree_util.tree_unflatten(inner_def, leaves))
    return jax.tree_util.tree_unflatten(treedef, nodes)


def read_nnx(module: Any) -> dict[str, Array]:
    """Every leaf but RNG state by its text.

    Args:
      module: an NNX module, or the `nnx.State` that `nnx.split` made of it.
    """
    return {
        text: value
        for path, node in _state_items(module)
        for text, value in _values(path, node)
    }


def write_nnx(state: nnx.State, values: Mapping[str, Array]) -> nnx.State:
    """A new state with the given leaves in it; others, and all metadata, stay.

    Works under `jax.jit`: nothing that was given is changed. The result is safe to
    merge and then to mutate.

    Args:
      state: as `nnx.split` or `nnx.state` returns it.
      values: new arrays by text.

    Raises:
      ValueError: a text names no leaf.
    """
    _refuse_unknown(values, read_nnx(state))
    entries = []
    for path, node in nnx.to_flat_state(state):
        if isinstance(node, nnx.RngState):
            entries.append((path, node.copy()))
            continue
        texts = [text for text, _ in _values(path, node)]
        inner, treedef = jax.tree_util.tree_flatten(_value(node))
        leaves = [values.get(t, x) for t, x in zip(texts, inner, strict=True)]
        value = jax.tree_util.tree_unflatten(treedef, leaves)
        fresh = node.copy(value) if isinstance(node, nnx.Variable) else value
        entries.append((path, fresh))
    return nnx.from_flat_state(entries)


def _token_text(token: Token) -> str:
    if isinstance(token, tuple):
        return f"({','.join(map(_token_text, token))})"
    if isinstance(token, int):
        return str(token)
    return token if _PLAIN.fullmatch(token) else repr(token)


def _refuse_unknown(values: Mapping[str, Any], known: Iterable[str]) -> None:
    have = set(known)
    unknown = [text for text in values if text not in have]
    if unknown:
        raise ValueError(
            f"No leaf is called {', '.join(unknown)}. There are: "
            f"{', '.join(sorted(have)) or 'none'}."
        )


def _linen_items(tree: Any) -> Iterator[tuple[Path, Any, tuple[Any, ...] | None]]:
    entries, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)
    for keys, node in entries:
        for rest, value in jax.tree_util.tree_flatten_with_path(node)[0]:
            yield _tokens((*keys, *_unboxed(node, rest))), value, _box_axes(node)


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def _unboxed(node: Any, keys: Sequence[Any]) -> Sequence[Any]:
    # The first key of a box's content is its field `value`, or of a box in it again.
    while _is_box(node):
        node, keys = node.value, keys[1:]
    return keys


def _box_axes(node: Any) -> tuple[Any, ...] | None:
    if not _is_box(node):
        return None
    names = getattr(node, "names", None)
    if names is None:
        names = getattr(node, "metadata", {}).get("out_sharding")
    return None if names is None else tuple(names)


def _tokens(keys: Iterable[Any]) -> Path:
    return tuple(map(token, keys))


def token(key: Any) -> Token:
    """The token that a key of a pytree's path stands for."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    raise TypeError(f"A path holds {key!r}, which has neither key, index nor name.")


def _nodes(module: Any) -> list[tuple[Path, Any]]:
    """Variables and bare arrays by the path under which `nnx.split` files them."""
    nodes = list(_state_items(module, rng=True))
    known = {path for path, _ in nodes}
    # A bare array in an abstract module is none to `nnx.state`, which leaves it out.
    nodes += [
        (path, node)
        for path, node in nnx.iter_graph(module, graph=True)
        if isinstance(node, jax.ShapeDtypeStruct | jax.core.Tracer)
        and path not in known
    ]
    return nodes


def _state_items(module: Any, *, rng: bool = False) -> Iterator[tuple[Path, Any]]:
    state = module if isinstance(module, nnx.State) else nnx.state(module, graph=True)
    for path, node in nnx.to_flat_state(state):
        if rng or not isinstance(node, nnx.RngState):
            yield path, node


def _node_leaves(path: Path, node: Any) -> Iterator[Leaf]:
    collection, axes = "params", None
    if isinstance(node, nnx.Variable):
        collection = _collections(type(node))[0]
        names = node.get_metadata().get("out_sharding")
        axes = None if names is None else tuple(names)
    for keys, value in jax.tree_util.tree_flatten_with_path(_value(node))[0]:
        yield _leaf(collection, (*path, *_tokens(keys)), value, axes)


def _values(path: Path, node: Any) -> Iterator[tuple[str, Any]]:
    collection = "params"
    if isinstance(node, nnx.Variable):
        collection = _collections(type(node))[0]
    for keys, value in jax.tree_util.tree_flatten_with_path(_value(node))[0]:
        yield path_text((collection, *path, *_tokens(keys))), value


def _value(node: Any) -> Any:
    return node.get_value() if isinstance(node, nnx.Variable) else node


def _leaf(collection: str, path: Path, value: Any, axes: Any) -> Leaf:
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    return Leaf(collection, path, tuple(value.shape), value.dtype, axes)


def _collections(kind: type[nnx.Variable]) -> tuple[str, ...]:
    """The collection of a Variable type, then those of its base types."""
    # Looked up, not registered: what is read must not change Flax.
    names = {t: name for name, t in nnx.variablelib.VariableTypeCache.items()}
    bases = [
        base
        for base in kind.__mro__
        if issubclass(base, nnx.Variable) and base is not nnx.Variable
    ]
    return tuple(names.get(base, base.__name__) for base in bases or [kind])


def _aliases(module: Any) -> Any:
    """A function from a path to all other paths that lead to the same node."""
    groups = nnx.find_duplicates(module) if not isinstance(module, nnx.State) else []
    swaps = [(a, b) for group in groups for a in group for b in group if a != b]
    # A module that holds a way to itself has endless paths; one round is enough.
    swaps = [(a, b) for a, b in swaps if b[: len(a)] != a]

    def others(path: Path) -> tuple[Path, ...]:
        seen, new = {path}, [path]
        while new:
            here = new.pop()
            for old, other in swaps:
                there = (*other, *here[len(old) :])
                if here[: len(old)] == old and there not in seen:
                    seen.add(there)
                    new.append(there)
        return tuple(sorted(seen - {path}, key=path_text))

    return others


def _in_order(module: Any, nodes: list[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """In the order of declaration; a merged module has forgotten it, and is sorted."""
    if isinstance(module, nnx.State):
        return nodes
    return sorted(nodes, key=lambda item: _position(module, item[0]))


def _position(node: Any, path: Path) -> list[tuple[int, Any]]:
    positions: list[tuple[int, Any]] = []
    for token in path:
        children = _children(node)
        names = list(children)
        if token in children and names != sorted(names, key=str):
            positions.append((names.index(token), natural(token)))
        else:
            positions.append((0, natural(token)))
        node = children.get(token)
    return positions


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, Mapping):
        return node
    if isinstance(node, list | tuple | nnx.List):
        return dict(enumerate(node))
    names = getattr(node, "__dict__", {})
    return {k: v for k, v in names.items() if not k.startswith("_pytree__")}


def natural(token: Token) -> list[tuple[bool, int, str]]:
    """A sort key by which 2 comes before 10."""
    parts = re.split(r"(\d+)", str(token))
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]
