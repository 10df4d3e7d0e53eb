"""What a function computes and moves, from which inputs, by which operations: read from its jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxpar.trace.jaxprs import CHEAP, inlined, programs_in, reads_of

# How the names of factorizations begin, LAPACK's included; see `reductions`.
FACTORIZATIONS = ("cholesky", "qr", "householder", "lu", "svd", "eig", "triangular_solve")
_REDUCING = (
    "reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", *FACTORIZATIONS,
)  # fmt: skip

# Of what the compiler fuses into an operation that reads it, so that it is not materialized: what is computed
# once, however many operations read it.
_EXPENSIVE = {
    "cos", "div", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "random_bits", "rem",
    "rsqrt", "sin", "sqrt", "tanh", "threefry2x32",
}  # fmt: skip
# All of it; the others are computed for each operation that reads them.
_FUSED = CHEAP | _EXPENSIVE | {
    "ceil", "clamp", "floor", "iota", "is_finite", "random_unwrap", "random_wrap", "real", "round",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "slice", "split", "transpose", "xor",
}  # fmt: skip
# Operations whose results are their operands, as far as memory goes.
_SAME = {"optimization_barrier", "pcast", "pvary", "sharding_constraint", "stop_gradient"}
# Operations that write their result where the first operand lay: the number of what they write.
_IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
_PRODUCTS = ("dot_general", "conv_general_dilated")


class Amount(NamedTuple):
    """What a function does, by its shapes alone.

    Attributes:
      flops: as in `count_flops`.
      bytes: the least that is moved between device and memory: what matrix products and convolutions read and
        write, and whatever else is materialized. Loops count by their length.
      turns: loop iterations that run one after the other.
      product_turns: those of them with a matrix product inside.
    """

    flops: float = 0.0
    bytes: float = 0.0
    turns: float = 0.0
    product_turns: float = 0.0

    def scaled(self, times: float) -> "Amount":
        """So many times as much."""
        return Amount(*(times * number for number in self))

    def plus(self, other: "Amount") -> "Amount":
        """Both, one after the other."""
        return Amount(*map(sum, zip(self, other, strict=True)))


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of a function.

    A multiply-add counts as two; loops count by their length, a conditional by its largest branch. A loop
    whose length depends on data counts once.

    Args:
      args: arrays or their shapes.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def amount(function: Callable[..., Any], *args: Any) -> Amount:
    """What a function does.

    Args:
      args: arrays or their shapes.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return Amount(_flops(jaxpr), _moved(jaxpr), _turns(jaxpr), _turns(jaxpr, of_products=True))


def used_inputs(function: Callable[..., Any], *args: Any) -> list[bool]:
    """For each array among the arguments of a function, whether anything is computed from it."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    used = reads_of(jaxpr.eqns, jaxpr.outvars)
    return [v in used for v in jaxpr.invars]


def reductions(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names of operations that combine elements of an array: sums, matrix products, sorts."""
    return {
        name
        for equation in _equations(jax.make_jaxpr(function)(*args).jaxpr)
        if (name := equation.primitive.name).startswith(_REDUCING)
        and name != "reduce_precision"
        and any(v.aval.shape for v in equation.invars)
    }


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program, those of its loops, branches and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for part in programs_in(equation):
            yield from _equations(part)


def _inside(equation: Any, count: Callable[[Any], float]) -> float:
    """A count of what is in a loop, by its length, in the largest branch of a conditional, or in a call."""
    counts = [count(part) for part in programs_in(equation)]
    if equation.primitive.name == "cond":
        return max(counts)
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    return times * sum(counts)


def _flops(jaxpr: Any) -> float:
    return sum(map(_flops_of, jaxpr.eqns))


def _flops_of(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    shapes = [v.aval.shape for v in equation.invars]
    if name not in _PRODUCTS:
        return _inside(equation, _flops)
    made = 2.0 * math.prod(equation.outvars[0].aval.shape)
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return made * math.prod(shapes[0][dim] for dim in contracted)
    out = shapes[1][params["dimension_numbers"].rhs_spec[0]]
    return made * math.prod(shapes[1]) / max(out, 1)


def _moved(jaxpr: Any) -> float:
    whole = inlined(core.ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars))).jaxpr
    readers, held = Counter[Any](), {v for v in whole.outvars if isinstance(v, core.Var)}
    for equation in whole.eqns:
        reads = {v for v in equation.invars if isinstance(v, core.Var)}
        readers.update(reads)
        name = equation.primitive.name
        if name not in _FUSED and not name.startswith("reduce_"):
            held |= reads

    def is_written(name: str, v: Any) -> bool:
        return v in held or name not in _FUSED or (name in _EXPENSIVE and readers[v] > 1)

    def moved_by(equation: Any) -> float:
        name = equation.primitive.name
        if name in _SAME:
            return 0.0
        if programs_in(equation) and name not in _IN_PLACE and not name.startswith("reduce"):
            return _inside(equation, _moved)
        if name in _IN_PLACE:
            return 2.0 * _bytes(equation.invars[_IN_PLACE[name]])
        made = sum(_bytes(v) for v in equation.outvars if is_written(name, v))
        return made + sum(map(_bytes, equation.invars)) if name in _PRODUCTS else 2.0 * made

    return sum(map(moved_by, whole.eqns))


def _turns(jaxpr: Any, *, of_products: bool = False) -> float:
    def turns_of(equation: Any) -> float:
        inner = _inside(equation, lambda part: _turns(part, of_products=of_products))
        if equation.primitive.name != "scan" or inner:
            return inner
        inside = (e.primitive.name for part in programs_in(equation) for e in _equations(part))
        counts = not of_products or any(name in _PRODUCTS for name in inside)
        return float(equation.params["length"]) if counts else 0.0

    return sum(map(turns_of, jaxpr.eqns))


def _bytes(v: Any) -> float:
    try:
        return float(math.prod(v.aval.shape) * v.aval.dtype.itemsize)
    except (AttributeError, TypeError):  # a random key, or nothing
        return 0.0
