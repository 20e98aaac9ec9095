"""The trees of modules as checkpoints hold them: names, and where each stands on disk.

A leaf has a text in the mapping (`params/layers/0/kernel`) and a path in a checkpoint
(`layers`, `0`, `kernel`, `value`): all keys are text there, and a box (an
`nnx.Variable`, an `nn.Partitioned`) is a level `value`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from parity.mapping.leaves import (
    Leaf,
    NNXLeaves,
    linen_leaves,
    nnx_leaves,
    path_text,
    token,
)
from parity.pairs import calls
from parity.pairs.calls import CheckError
from shared.stores import Path

BOX = "value"


@dataclasses.dataclass(frozen=True)
class Tree:
    """What a module, or a checkpoint that stands for one, holds.

    Attributes:
      leaves: in the mapping's naming; of NNX without RNG state.
      nnx: of an NNX module, the same with aliases and RNG state; None: it is Linen.
      places: by text, the path in a checkpoint, boxes included, without collection.
    """

    leaves: tuple[Leaf, ...]
    nnx: NNXLeaves | None
    places: Mapping[str, Path]

    def place(self, text: str, *, boxed: bool = True) -> Path:
        """Where a leaf stands below its collection.

        Args:
          text: of the leaf.
          boxed: whether boxes are a level of their own.
        """
        if boxed:
            return self.places[text]
        return unboxed_place(self.leaf(text))

    def leaf(self, text: str) -> Leaf:
        """A leaf by its text."""
        return self._by_text[text]

    @functools.cached_property
    def _by_text(self) -> dict[str, Leaf]:
        return {leaf.text: leaf for leaf in self.leaves}


def unboxed_place(leaf: Leaf) -> Path:
    """Where a leaf stands below its collection in a checkpoint without boxes."""
    return tuple(map(str, leaf.path))


def boxed_place(leaf: Leaf) -> Path:
    """Where a leaf stands below its collection if all of it is in a box."""
    return (*unboxed_place(leaf), BOX)


def name_of(path: Iterable[Any]) -> str:
    """One text for paths that differ in the types of their keys only."""
    return "/".join(map(str, path))


def linen_tree(linen: Any, inputs: Any, call: Any = None) -> Tree:
    """The tree of a Linen module; nothing is computed.

    Args:
      linen: a module, a class, or (module, variables).
      inputs: of the call that initialises it, as for `parity.check`.
      call: how it is called, as for `parity.check`.

    Raises:
      CheckError: it is no Linen module, or cannot be initialised.
    """
    variables = linen_variables(linen, inputs, call)
    leaves = linen_leaves(variables)
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(variables)[0]]
    places = {
        leaf.text: tuple(str(token(key)) for key in path[1:])
        for leaf, path in zip(leaves, keys, strict=True)
    }
    return Tree(leaves, None, places)


def linen_variables(linen: Any, inputs: Any, call: Any = None) -> dict[str, Any]:
    """A Linen module's variables: its own, or what `init` would give, abstract.

    Raises:
      CheckError: it is no Linen module, or cannot be initialised.
    """
    if isinstance(linen, tuple) and len(linen) == 2:
        return _without_sown(linen[1])
    module = linen
    if isinstance(linen, type) and issubclass(linen, nn.Module):
        module = _raising(linen, "linen: making the module")
    if not isinstance(module, nn.Module):
        raise CheckError(
            "The Linen side must be a flax.linen.Module, such a class, or (module, "
            f"variables). Got {type(linen).__name__}."
        )
    if inputs is None:
        raise CheckError(
            "A Linen module has a tree only once it is called: give --inputs "
            "(pkg.mod:name), or (module, variables)."
        )
    first = calls.make_calls(call, None, inputs)[0]
    run = functools.partial(_init, module, first)
    args = calls.abstract(first.inputs)[0]
    shapes = functools.partial(jax.eval_shape, run, jax.random.key(0), args)
    return _without_sown(_raising(shapes, f"linen: init by call {first.name!r}"))


def _init(module: nn.Module, call: calls.Call, key: Any, args: calls.Args) -> Any:
    keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    return module.init(
        keys,
        *args.positional,
        method=call.methods[0],
        **args.keywords,
        **call.linen,
    )


def _without_sown(variables: Mapping[str, Any]) -> dict[str, Any]:
    leaves = linen_leaves(variables)
    sown = {x.collection for x in leaves if x.path and isinstance(x.path[-1], int)}
    return {k: v for k, v in variables.items() if k == "params" or k not in sown}


def nnx_tree(module: Any) -> Tree:
    """The tree of an NNX module.

    Args:
      module: a module, concrete or abstract, or what makes one and may take `rngs`: it
        is then only traced.

    Raises:
      CheckError: it is no NNX module.
    """
    module = abstract_nnx(module)
    leaves = nnx_leaves(module)
    return Tree(leaves.leaves, leaves, _nnx_places(module, leaves))


def abstract_nnx(module: Any) -> nnx.Module:
    """An NNX module as it is, or what `module` makes, abstract.

    Raises:
      CheckError: it is no NNX module.
    """
    # No array is made, so axis names need no mesh.
    with nnx.use_eager_sharding(False):
        return _made(module, lambda: nnx.eval_shape(lambda: _build(module)))


def made_nnx(module: Any) -> nnx.Module:
    """An NNX module as it is, or what `module` makes.

    Raises:
      CheckError: it is no NNX module.
    """
    return _made(module, lambda: _build(module))


def _made(module: Any, make: Callable[[], Any]) -> nnx.Module:
    if isinstance(module, nnx.Module):
        return module
    linen = isinstance(module, type) and issubclass(module, nn.Module)
    made = None
    if callable(module) and not isinstance(module, nn.Module) and not linen:
        made = _raising(make, "nnx: making the module")
    if not isinstance(made, nnx.Module):
        got = module if isinstance(module, type) else type(made or module)
        raise CheckError(
            "The NNX side must be a flax.nnx.Module or a function that makes one. Got "
            f"{got.__name__}."
        )
    return made


def _build(make: Callable[..., Any]) -> Any:
    given: set[str] = set()
    takes: Any = make
    while isinstance(takes, functools.partial):
        given |= takes.keywords.keys()
        takes = takes.func
    # A class of NNX has a metaclass that hides what its constructor takes.
    takes = takes.__init__ if isinstance(takes, type) else takes  # type: ignore[misc]
    if "rngs" in inspect.signature(takes).parameters.keys() - given:
        return make(rngs=nnx.Rngs(0))
    return make()


def _raising(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except CheckError:
        raise
    except Exception as error:
        raise CheckError(f"{what} raises {type(error).__name__}: {error}") from error


def _nnx_places(module: nnx.Module, leaves: NNXLeaves) -> dict[str, Path]:
    state = nnx.state(module, graph=True)
    nodes = {
        path
        for path, node in nnx.to_flat_state(state)
        if isinstance(node, nnx.Variable)
    }
    return {leaf.text: _boxed(leaf, nodes) for leaf in (*leaves.leaves, *leaves.rng)}


def _boxed(leaf: Leaf, nodes: set[tuple[Any, ...]]) -> Path:
    """The path of a leaf with a level `value` where its Variable is."""
    for length in range(len(leaf.path), 0, -1):
        if leaf.path[:length] in nodes:
            inner = leaf.path[length:]
            return tuple(map(str, (*leaf.path[:length], BOX, *inner)))
    return tuple(map(str, leaf.path))


_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def parse_text(text: str) -> tuple[str, tuple[Any, ...]]:
    """Collection and path of a leaf's text: the inverse of `Leaf.text`."""
    tokens: list[Any] = []
    rest = text
    while rest:
        quoted = _QUOTED.match(rest)
        if quoted:
            tokens.append(ast.literal_eval(quoted[0]))
            rest = rest[quoted.end() + 1 :]
            continue
        part, _, rest = rest.partition("/")
        if part.startswith("(") and part.endswith(")"):
            tokens.append(tuple(part[1:-1].split(",")))
        else:
            tokens.append(int(part) if part.isdecimal() else part)
    return str(tokens[0]), tuple(tokens[1:])


def as_tuple(key: Any) -> Any:
    """The tuple that a key of a checkpoint is the text of, else the key."""
    if isinstance(key, str) and key.startswith("(") and key.endswith(")"):
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(key)
    return key


def with_text(text: str, shape: tuple[int, ...], dtype: Any) -> Leaf:
    """A leaf that has this text."""
    collection, path = parse_text(text)
    return Leaf(collection, path, shape, dtype)


def text_of(collection: str, path: Iterable[Any]) -> str:
    """The text of a leaf."""
    return path_text((collection, *path))
