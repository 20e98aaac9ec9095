"""Floating-point operations and bytes of a function, loops multiplied out.

XLA's own cost analysis counts the body of a loop once. Here the jaxpr is walked: a scan
counts its body as often as it runs, a branch counts as its most expensive case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

# They move or name data. Everything else that is not below counts one a result.
_MOVES = frozenset(
    """
    bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy copy_p
    create_token device_put dynamic_slice dynamic_update_slice empty expand_dims gather
    iota layout_constraint mesh_cast name optimization_barrier pad pcast pvary
    random_unwrap random_wrap reduce_precision reshape reshard rev scatter
    sharding_constraint slice split squeeze stop_gradient transpose
    """.split()
)
# One an operand's element: each is read once and combined.
_FOLDS = frozenset(
    """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max
    reduce_min reduce_or reduce_prod reduce_sum reduce_xor
    """.split()
)
_SCATTERS = frozenset(
    "scatter-add scatter-mul scatter-min scatter-max scatter-sub scatter_add".split()
)
# Their jaxpr combines two numbers and is part of the operation.
_ELEMENTWISE_JAXPR = _FOLDS | _SCATTERS | {"scatter", "reduce_window", "sort"}


class Cost(NamedTuple):
    """What a function costs.

    Attributes:
      flops: floating-point and other arithmetic operations; a multiply-add counts two.
      bytes: operands and results of every operation: an upper bound, since a compiler
        that fuses reads and writes less.
      unbounded: a loop whose length is not known was counted once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    unbounded: bool = False

    def plus(self, other: Cost) -> Cost:
        """Both, one after the other."""
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.unbounded or other.unbounded,
        )

    def times(self, count: float) -> Cost:
        """The same several times."""
        return Cost(self.flops * count, self.bytes * count, self.unbounded)


def count(function: Callable[..., Any], *args: Any) -> Cost:
    """The cost of a function of positional arguments, arrays or abstract."""
    return count_jaxpr(jax.make_jaxpr(function)(*args))


def count_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Cost:
    """The cost of a jaxpr."""
    total = Cost()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total = total.plus(count_equation(equation))
    return total


def equations(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Any]:
    """Every equation, those of inner jaxprs behind the one they belong to."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in inner_jaxprs(equation.params):
            yield from equations(inner)


def inner_jaxprs(params: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


def count_equation(equation: Any) -> Cost:
    """The cost of one equation, with what it runs inside."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return count_jaxpr(params["jaxpr"]).times(params["length"])
    if name == "while":
        once = count_jaxpr(params["cond_jaxpr"]).plus(count_jaxpr(params["body_jaxpr"]))
        return once._replace(unbounded=True)
    if name == "cond":
        branches = [count_jaxpr(branch) for branch in params["branches"]]
        dearest = max(branches, key=lambda cost: (cost.flops, cost.bytes))
        return dearest._replace(unbounded=any(cost.unbounded for cost in branches))
    inner = list(inner_jaxprs(params))
    if inner and name not in _ELEMENTWISE_JAXPR:
        total = Cost()
        for jaxpr in inner:
            total = total.plus(count_jaxpr(jaxpr))
        # Each device runs the body on its share.
        return total.times(params["mesh"].size if name == "shard_map" else 1)
    return Cost(_flops(name, equation), _bytes(equation))


def _flops(name: str, equation: Any) -> float:
    if name in _MATMULS:
        return float(_MATMULS[name](equation))
    if name in _MOVES:
        return 0.0
    if name in _FOLDS:
        return float(_size(equation.invars[0]))
    if name in _SCATTERS:
        return float(_size(equation.invars[2]))
    if name in ("sort", "top_k", "approx_top_k"):
        # Comparisons of a merge sort.
        axis = equation.params.get("dimension", -1)
        length = equation.invars[0].aval.shape[axis]
        return float(_size(equation.invars[0])) * math.ceil(math.log2(max(length, 2)))
    if name.startswith("reduce_window"):
        window = math.prod(equation.params["window_dimensions"])
        return float(_size(equation.outvars[0]) * window)
    return float(_size(equation.outvars[0])) if equation.outvars else 0.0


def _dot_general(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * math.prod(shape[i] for i in contracted)


def _ragged_dot(equation: Any) -> int:
    """Each row meets the matrix of its group only."""
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    lhs = equation.invars[0].aval.shape
    if numbers is None:
        return 2 * _size(equation.outvars[0]) * lhs[-1]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    work = 2 * _size(equation.outvars[0]) * math.prod(lhs[i] for i in contracted)
    # The groups share out the contracted rows; every group has a result of its own.
    groups = equation.invars[2].aval.shape[-1]
    return work // groups if ragged in contracted else work


def _convolution(equation: Any) -> int:
    """Padding and the zeros of a dilation count as if they were numbers."""
    kernel = equation.invars[1].aval.shape
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(equation.outvars[0]) * math.prod(kernel) // features


_MATMULS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _bytes(equation: Any) -> float:
    variables = [*equation.invars, *equation.outvars]
    return float(sum(_size(v) * _itemsize(v) for v in variables))


def _itemsize(variable: Any) -> float:
    return getattr(getattr(variable.aval, "dtype", None), "itemsize", 0)
