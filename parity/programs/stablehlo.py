"""A StableHLO module read with JAX's MLIR bindings, calls written out, as a graph.

Each function is read once (`_Body`, `_Statement`) and put into the graph wherever it is
called. `parity.programs.program` says what the canonical form keeps.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir

from parity.programs import mosaic
from parity.programs.listing import (
    Listing,
    Node,
    Operation,
    Scope,
    Value,
    digest,
    mark,
    sort_carries,
)
from parity.programs.locations import innermost

# Longer attributes are listed by their hash.
LONGEST_TEXT = 200
# No function of JAX's calls itself.
DEEPEST_CALL = 500

_ALIAS = "tf.aliasing_output"
# Hints to the compiler; those of a call hold for all that the function does.
_HINTS = "mhlo.frontend_attributes"
_CONSTANT = "stablehlo.constant"
_DIMENSIONS = "broadcast_dimensions"
_UNSAID = {"jax.result_info", "jax.arg_info"}
_FUNCTION = {"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs"}
_PURE_DIALECTS = {"stablehlo", "chlo", "mhlo"}
_PURE = {"sdy.sharding_constraint", "sdy.manual_computation", "sdy.reshard"}
# Kept even if nobody uses the result: they speak to the outside or have a state.
_EFFECTS = {
    "stablehlo.all_gather",
    "stablehlo.all_reduce",
    "stablehlo.all_to_all",
    "stablehlo.collective_broadcast",
    "stablehlo.collective_permute",
    "stablehlo.infeed",
    "stablehlo.outfeed",
    "stablehlo.recv",
    "stablehlo.reduce_scatter",
    "stablehlo.rng",
    "stablehlo.send",
}
# Each calls a Python function of this process, by an index that means nothing outside.
_PYTHON = {
    f"xla_ffi{partitioned}_python_{device}_callback"
    for partitioned in ("", "_partitioned")
    for device in ("cpu", "gpu")
}
_INDEX = {"backend_config", "mhlo.backend_config"}


class ProgramError(ValueError):
    """A module that has no canonical form here."""


class Canonical(NamedTuple):
    """A module in canonical form.

    Attributes:
      module: its attributes.
      arguments: path, and type with attributes, ordered by path.
      operations: the listing, the carries of loops as written.
      results: path, and value with type and attributes, ordered by path.
      digest: of all of it, the carries of loops sorted.
    """

    module: str
    arguments: tuple[tuple[str, str], ...]
    operations: tuple[Operation, ...]
    results: tuple[tuple[str, str], ...]
    digest: str


def canonical(
    module: ir.Module,
    arguments: Sequence[str],
    results: Sequence[str],
    python: str = "",
) -> Canonical:
    """The canonical form of a module whose @main has these paths, in its order.

    `python` names the only Python function that it calls.
    """
    with module.context:
        return _Reader(module, python).main(arguments, results)


def lines(form: Any) -> list[str]:
    """A canonical form, or a `Program`, as text."""
    return [
        f"module {form.module}",
        *(f"%arg{i} = {path} : {x}" for i, (path, x) in enumerate(form.arguments)),
        *(operation.text for operation in form.operations),
        *(f"return {path} = {x}" for path, x in form.results),
    ]


class _Statement(NamedTuple):
    name: str
    attributes: dict[str, str]
    hints: dict[str, str]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    types: tuple[str, ...]
    regions: tuple[_Body, ...]
    callee: str
    effect: bool
    place: Any


class _Body(NamedTuple):
    arguments: tuple[Any, ...]
    types: tuple[str, ...]
    statements: tuple[_Statement, ...]
    outputs: tuple[Any, ...]
    terminator: str


class _Caller(NamedTuple):
    """Where a function is called: the places, innermost first, and the call's hints."""

    places: tuple[Any, ...] = ()
    hints: dict[str, str] = {}

    def at(self, place: Any) -> tuple[Any, ...]:
        return (place, *self.places)


class _Reader:
    """One module: its functions, read when they are needed."""

    def __init__(self, module: ir.Module, python: str):
        self._python = python
        # A clone, since what is no function is renamed in it.
        self._module = module.operation.clone().operation
        _name_by_content(self._module)
        self._functions = {
            ir.StringAttr(op.attributes["sym_name"]).value: op.operation
            for op in self._module.regions[0].blocks[0].operations
            if op.operation.name == "func.func"
        }
        self._bodies: dict[str, _Body] = {}
        self._digests: dict[str, str] = {}

    def main(self, arguments: Sequence[str], results: Sequence[str]) -> Canonical:
        """The canonical form of the whole module."""
        if "main" not in self._functions:
            raise ProgramError(
                "The module must have a function @main. "
                f"Got {', '.join(self._functions) or 'none'}."
            )
        body, function = self._body("main"), self._functions["main"]
        arguments = _with_tokens("arguments", arguments, body.arguments)
        results = _with_tokens("results", results, body.outputs)
        takes, gives = _by_path(arguments), _by_path(results)
        scope = self._graph(body, takes, gives)
        kept = self._signature(function, "arg_attrs", len(takes), results)
        of = self._signature(function, "res_attrs", len(gives), results)

        def form(listing: Listing) -> Canonical:
            have = ((arguments[i], f"{body.types[i]}{kept[i]}") for i in takes)
            values = zip(gives, scope.outputs, strict=True)
            given = (
                (results[i], f"{listing.name(value)} : {value.type}{of[i]}")
                for i, value in values
            )
            said = self._attributes(function, _FUNCTION)
            head = _braces(self._attributes(self._module, {"sym_name"}) | said)
            head += body.terminator.removeprefix("func.return")
            return Canonical(head, tuple(have), listing.operations, tuple(given), "")

        # A small difference may sort carries differently: people read them as written.
        written = form(Listing(scope, innermost))
        sort_carries(scope)
        hashed = digest("\n".join(lines(form(Listing(scope)))))
        return written._replace(digest=hashed)

    def _graph(self, body: _Body, takes: list[int], gives: list[int]) -> Scope:
        """A function as a marked graph, arguments and results in the order given."""
        scope = Scope(0, tuple(body.types[i] for i in takes))
        env = {body.arguments[i]: Value(scope, k) for k, i in enumerate(takes)}
        outputs = self._expand(body, scope, env, _Caller())
        scope.outputs = tuple(outputs[i] for i in gives)
        mark(scope)
        return scope

    # Reading.

    def _body(self, name: str) -> _Body:
        if name not in self._bodies:
            region = self._functions[name].regions[0]
            if not list(region.blocks):
                raise ProgramError(f"@{name} is called, but the module has no body.")
            self._bodies[name] = self._read(region, f"@{name}")
        return self._bodies[name]

    def _read(self, region: ir.Region, where: str) -> _Body:
        blocks = list(region.blocks)
        if not blocks:
            return _Body((), (), (), (), "")
        if len(blocks) != 1:
            raise ProgramError(
                f"A region of {where} has {len(blocks)} blocks, but the canonical form "
                "knows structured control flow only: give it the module as JAX lowers "
                "it, before any compiler pass."
            )
        arguments = tuple(blocks[0].arguments)
        types = tuple(str(value.type) for value in arguments)
        *statements, last = (self._statement(op) for op in blocks[0].operations)
        end = f"{last.name}{_braces(last.attributes | last.hints)}"
        return _Body(arguments, types, tuple(statements), last.operands, end)

    def _statement(self, view: Any) -> _Statement:
        op = view.operation
        results = tuple(op.results)
        call = op.name == "func.call"
        name, unread = op.name, {_HINTS, "callee"} if call else {_HINTS}
        if _adds_axes_only(op):
            name, unread = "stablehlo.reshape", unread | {_DIMENSIONS}
        said = {}
        if _calls_python(op, self._python):
            said, unread = {"python": self._python}, unread | _INDEX
        return _Statement(
            name,
            self._attributes(op, unread) | said,
            self._hints(op),
            tuple(op.operands),
            results,
            tuple(str(value.type) for value in results),
            tuple(self._read(region, op.name) for region in op.regions),
            ir.FlatSymbolRefAttr(op.attributes["callee"]).value if call else "",
            _has_effect(op),
            op.location,
        )

    def _attributes(self, op: ir.Operation, without: set[str]) -> dict[str, str]:
        names = set(op.attributes) - without - _UNSAID
        return {name: self._attribute(op, name) for name in names}

    def _attribute(self, op: ir.Operation, name: str) -> str:
        try:
            attribute = op.attributes[name]
        except TypeError:  # JAX's bindings have no class for complex elements
            return _shortened(_printed(op, name))
        if name == "backend_config" and _calls(op, mosaic.TARGET):
            return _shortened(mosaic.listed(ir.StringAttr(attribute).value))
        return self._text(attribute)

    def _hints(self, op: ir.Operation) -> dict[str, str]:
        if _HINTS not in op.attributes:
            return {}
        return self._entries(ir.DictAttr(op.attributes[_HINTS]), ())

    def _text(self, attribute: ir.Attribute) -> str:
        """An attribute in full; functions by what they compute."""
        _check_readable(attribute)
        if isinstance(attribute, ir.FlatSymbolRefAttr):
            return self._reference(attribute.value)
        if isinstance(attribute, ir.ArrayAttr):
            return "[" + ", ".join(self._text(item) for item in attribute) + "]"
        if isinstance(attribute, ir.DictAttr):
            return _braces(self._entries(attribute, ()))
        text = str(attribute)
        if isinstance(attribute, ir.DenseResourceElementsAttr):
            raise ProgramError(
                f"The constant {text[:LONGEST_TEXT]} is kept beside the module, where "
                "its bytes cannot be read: give it to the function as an argument."
            )
        if not isinstance(attribute, ir.StringAttr) and "@" in text:
            # An attribute of some other dialect may name functions.
            named = sorted(name for name in self._functions if f"@{name}" in text)
            text += "".join(f" {self._reference(name)}" for name in named)
        return _shortened(text)

    def _entries(self, entries: ir.DictAttr, without: Container[str]) -> dict[str, str]:
        items = [entries[i] for i in range(len(entries))]
        return {
            item.name: self._text(item.attr)
            for item in items
            if item.name not in without
        }

    def _reference(self, name: str) -> str:
        """What a symbol stands for: a function by the digest of its listing."""
        if name not in self._functions:
            return f"@{name}"
        if name not in self._digests:
            body, function = self._body(name), self._functions[name]
            order = [list(range(len(x))) for x in (body.arguments, body.outputs)]
            scope = self._graph(body, *order)
            sort_carries(scope)
            listing = Listing(scope)
            said = _FUNCTION - {"arg_attrs", "res_attrs"}
            text = [_braces(self._attributes(function, said)), body.terminator]
            text += [*body.types, *(line.text for line in listing.operations)]
            text += [f"{listing.name(value)} : {value.type}" for value in scope.outputs]
            self._digests[name] = digest("\n".join(text))
        return f"@{self._digests[name]}"

    def _signature(
        self,
        function: ir.Operation,
        which: str,
        count: int,
        results: Sequence[str] = (),
    ) -> list[str]:
        """What a function says of each argument or result, "" if nothing.

        An argument that a result of @main takes over names that result by its path.
        """
        if which not in function.attributes:
            return [""] * count
        texts = []
        for entries in map(ir.DictAttr, ir.ArrayAttr(function.attributes[which])):
            said = self._entries(entries, _UNSAID)
            if results and _ALIAS in said:
                said[_ALIAS] = results[ir.IntegerAttr(entries[_ALIAS]).value]
            texts.append(f" {_braces(said)}" if said else "")
        return texts

    # Writing calls out.

    def _expand(
        self,
        body: _Body,
        scope: Scope,
        env: dict[Any, Value],
        caller: _Caller,
    ) -> tuple[Value, ...]:
        """Puts the statements of a body into a scope and gives its outputs."""
        for statement in body.statements:
            operands = tuple(env[value] for value in statement.operands)
            if statement.callee:
                values = self._call(statement, operands, scope, caller)
            else:
                values = self._node(statement, operands, scope, env, caller)
            env.update(zip(statement.results, values, strict=True))
        return tuple(env[value] for value in body.outputs)

    def _node(
        self,
        statement: _Statement,
        operands: tuple[Value, ...],
        scope: Scope,
        env: dict[Any, Value],
        caller: _Caller,
    ) -> tuple[Value, ...]:
        hints = {} if statement.name == _CONSTANT else caller.hints
        says = statement.attributes | hints | statement.hints
        node = Node(
            statement.name,
            _constant(says) if statement.name == _CONSTANT else _braces(says),
            operands,
            statement.types,
            scope,
            caller.at(statement.place),
        )
        for body in statement.regions:
            self._region(node, body, env, caller)
        return node.place(statement.effect)

    def _region(
        self, node: Node, body: _Body, env: dict[Any, Value], caller: _Caller
    ) -> None:
        inner = Scope(node.scope.depth + 1, body.types, node)
        env.update((value, Value(inner, i)) for i, value in enumerate(body.arguments))
        inner.outputs = self._expand(body, inner, env, caller)
        inner.terminator = body.terminator
        node.regions.append(inner)

    def _call(
        self,
        statement: _Statement,
        operands: tuple[Value, ...],
        scope: Scope,
        caller: _Caller,
    ) -> tuple[Value, ...]:
        name = statement.callee
        inner = _Caller(caller.at(statement.place), caller.hints | statement.hints)
        if len(inner.places) > DEEPEST_CALL:
            raise ProgramError(f"@{name} calls itself, so that it has no listing.")
        body, function = self._body(name), self._functions[name]
        says = _braces(statement.attributes) + _braces(
            self._attributes(function, _FUNCTION)
        )
        says += body.terminator.removeprefix("func.return")
        if says:
            # More than a call: it stays, with the function as its region.
            types = statement.types
            node = Node("func.call", says, operands, types, scope, inner.places)
            self._region(node, body, {}, inner)
            return node.place(False)

        def said(what: str, values: tuple[Value, ...], which: str) -> list[Value]:
            texts = self._signature(function, which, len(values))
            return [
                _annotated(what, value, text.strip(), inner.places, scope)
                for value, text in zip(values, texts, strict=True)
            ]

        arguments = said("func.argument", operands, "arg_attrs")
        env = dict(zip(body.arguments, arguments, strict=True))
        outputs = self._expand(body, scope, env, inner)
        return tuple(said("func.result", outputs, "res_attrs"))


def _check_readable(attribute: ir.Attribute) -> None:
    """JAX's bindings end the process at complex elements in a list or dictionary."""
    if isinstance(attribute, ir.ArrayAttr | ir.DictAttr):
        text = str(attribute)
        if "complex<" in text:
            raise ProgramError(
                "Complex elements inside of another attribute cannot be read: "
                f"{text[:LONGEST_TEXT]}"
            )


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:20]}... sha256 {digest(text)}"


def _printed(op: ir.Operation, name: str) -> str:
    """An attribute of a constant, cut out of the operation as MLIR prints it."""
    text = ""
    if op.name == _CONSTANT:
        alone = op.clone().operation
        for other in set(alone.attributes) - {name}:
            del alone.attributes[other]
        text = str(alone.get_asm(print_generic_op_form=True, enable_debug_info=False))
    before, after = f'"{_CONSTANT}"() <{{{name} = ', "}> : () -> "
    start, end = text.find(before), text.rfind(after)
    if start < 0 or end < 0:
        raise ProgramError(f"JAX's bindings cannot read {name} of {op.name}.")
    return text[start + len(before) : end]


def _braces(attributes: dict[str, str]) -> str:
    parts = [f"{name} = {text}" for name, text in sorted(attributes.items())]
    return "{" + ", ".join(parts) + "}" if parts else ""


def _constant(attributes: dict[str, str]) -> str:
    return attributes["value"] if len(attributes) == 1 else _braces(attributes)


def _annotated(
    what: str, value: Value, text: str, places: tuple[Any, ...], scope: Scope
) -> Value:
    """A value about which a signature says something, such as a sharding."""
    if not text:
        return value
    return Node(what, text, (value,), (value.type,), scope, places).place(False)[0]


def _adds_axes_only(op: ir.Operation) -> bool:
    """Whether a broadcast repeats nothing: then it is a reshape by another name."""
    if op.name != "stablehlo.broadcast_in_dim":
        return False
    before, after = (ir.RankedTensorType(x.type) for x in (op.operands[0], op.result))
    dimensions = list(ir.DenseI64ArrayAttr(op.attributes[_DIMENSIONS]))
    shape = dict(enumerate(after.shape))
    return (
        before.has_static_shape
        and math.prod(before.shape) == math.prod(after.shape) > 0
        and dimensions == sorted(set(dimensions))
        and [shape.get(axis) for axis in dimensions] == before.shape
    )


def _has_effect(op: ir.Operation) -> bool:
    if op.name == "stablehlo.custom_call":
        return _is_true(op, "has_side_effect")
    if op.name in _EFFECTS:
        return True
    return op.name.partition(".")[0] not in _PURE_DIALECTS and op.name not in _PURE


def _calls(op: ir.Operation, target: str) -> bool:
    if op.name != "stablehlo.custom_call":
        return False
    return bool(ir.StringAttr(op.attributes["call_target_name"]).value == target)


def _calls_python(op: ir.Operation, python: str) -> bool:
    """Whether it calls the Python function of that name; refuses any other."""
    if op.name in ("stablehlo.send", "stablehlo.recv"):
        what = op.name if _is_true(op, "is_host_transfer") else ""
    elif op.name == "stablehlo.custom_call":
        what = ir.StringAttr(op.attributes["call_target_name"]).value
        if python and what in _PYTHON:
            return True
    else:
        return False
    if "python" in what or what in ("CustomSPMDPartitioning", op.name):
        raise ProgramError(
            f"Python callbacks have no canonical form, and {what} calls Python."
        )
    return False


def _is_true(op: ir.Operation, name: str) -> bool:
    return name in op.attributes and ir.BoolAttr(op.attributes[name]).value


def _name_by_content(module: ir.Operation) -> None:
    """Renames meshes, so that what refers to one says what it is."""
    for view in list(module.regions[0].blocks[0].operations):
        op = view.operation
        if op.name == "func.func":
            continue
        if "sym_name" not in op.attributes or len(op.regions):
            raise ProgramError(f"The module holds {op.name}, which is not known here.")
        names = sorted(set(op.attributes) - {"sym_name"})
        text = ", ".join(f"{name} = {op.attributes[name]}" for name in names)
        old = ir.StringAttr(op.attributes["sym_name"]).value
        new = f"{op.name}.{digest(text)[:16]}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, module)


def _with_tokens(
    what: str, paths: Sequence[str], values: Sequence[Any]
) -> tuple[str, ...]:
    """The paths, behind the tokens that ordered effects put in front."""
    more = len(values) - len(paths)
    front = [str(value.type) for value in values[: max(more, 0)]]
    if more < 0 or any(not text.startswith("!stablehlo.token") for text in front):
        raise ProgramError(
            f"@main has {len(values)} {what}, but {len(paths)} paths were given "
            f"({', '.join(paths)}). Keep unused arguments (jax.jit(keep_unused=True)) "
            "and constants in the program (jax_use_simplified_jaxpr_constants off)."
        )
    return (*(f"(token {i})" for i in range(more)), *paths)


def _by_path(paths: Sequence[str]) -> list[int]:
    return sorted(range(len(paths)), key=lambda i: (paths[i], i))
