"""How much a function computes, of which of its inputs, and by what: read from its jaxpr."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

# How the names of such operations begin; see `reductions`.
_REDUCING = (
    "reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", "cholesky", "qr",
    "householder", "lu", "svd", "eig", "triangular_solve",
)  # fmt: skip


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of a function.

    Two for a multiply-add; loops by their length, of a conditional the most of its branches. A loop whose
    length is data counts once.

    Args:
      args: arrays or their shapes.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def used_inputs(function: Callable[..., Any], *args: Any) -> list[bool]:
    """For each array among the arguments of a function whether anything is computed from it."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    used = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    used |= {id(v) for v in jaxpr.outvars}
    return [id(v) in used for v in jaxpr.invars]


def reductions(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names of operations that mix the numbers of an array: sums, matrix products, sorts."""
    return _reductions(jax.make_jaxpr(function)(*args).jaxpr)


def _reductions(jaxpr: Any) -> set[str]:
    found = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        is_array = any(v.aval.shape for v in equation.invars)
        if is_array and name.startswith(_REDUCING) and name != "reduce_precision":
            found.add(name)
        for part in _inner(equation):
            found |= _reductions(part)
    return found


def _inner(equation: Any) -> list[Any]:
    """The jaxprs of loops, conditionals and calls."""
    return [
        part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
        for value in equation.params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(part, core.ClosedJaxpr | core.Jaxpr)
    ]


def _flops(jaxpr: Any) -> float:
    return sum(map(_flops_of, jaxpr.eqns))


def _flops_of(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    shapes = [v.aval.shape for v in equation.invars]
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(shapes[0][dim] for dim in contracted)
        )
    if name == "conv_general_dilated":
        kernel = shapes[1]
        out = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(out, 1)
    counts = [_flops(part) for part in _inner(equation)]
    if name == "cond":
        return max(counts, default=0.0)
    return sum(counts) * (params["length"] if name == "scan" else 1)
