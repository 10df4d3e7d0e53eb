"""Counts what a function computes and moves, from its jaxpr."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.base.types import Arrays, Atom, Function
from jaxpar.trace.jaxprs import (
    CHEAP,
    aval_of,
    equations_for,
    equations_in,
    inlined,
    programs_in,
    reads_of,
)

# How the names of factorizations begin, LAPACK's included; see `reductions`.
FACTORIZATIONS = ("cholesky", "qr", "householder", "lu", "svd", "eig", "triangular_solve")
_REDUCING = (
    "reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", *FACTORIZATIONS,
)  # fmt: skip

# What the compiler fuses into an operation that reads it, so that it is not materialized.
_FUSED = CHEAP | {
    "ceil", "clamp", "cos", "div", "erf", "exp", "exp2", "expm1", "floor", "iota", "is_finite", "log",
    "log1p", "logistic", "pow", "random_bits", "random_unwrap", "random_wrap", "real", "rem", "round",
    "rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sin", "slice", "split", "sqrt",
    "tanh", "threefry2x32", "transpose", "xor",
}  # fmt: skip
# Operations whose results are their operands, as far as memory goes.
_SAME = {"optimization_barrier", "pcast", "pvary", "sharding_constraint", "stop_gradient"}
# Operations that write their result where the first operand lay: the number of what they write.
_IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
_PRODUCTS = ("dot_general", "conv_general_dilated")


class Amount(NamedTuple):
    """What a function does, by its shapes alone.

    Attributes:
      flops: floating-point operations of matrix products and convolutions; a multiply-add counts as two, of
        complex numbers as eight.
      bytes: the least that is moved between device and memory: what matrix products and convolutions read and
        write, and whatever else is materialized.
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


def amount(function: Function, *args: Arrays) -> Amount:
    """What a function does.

    Loops count by their length, a conditional by its largest branch. A loop whose length depends on data
    counts once.

    Args:
      args: arrays or their shapes.
    """
    return _amount(_traced(function, args))


def _traced(function: Function, args: Sequence[Arrays]) -> core.Jaxpr:
    """The program of a function, traced now: JAX knows a function that it has traced, not what that reads."""
    return jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr


def used_inputs(function: Function, *args: Arrays) -> list[bool]:
    """For each array among the arguments of a function, whether anything is computed from it."""
    jaxpr = _traced(function, args)
    used = reads_of(jaxpr.eqns, jaxpr.outvars)
    return [v in used for v in jaxpr.invars]


def moving_inputs(function: Function, inputs: Arrays, *others: Arrays) -> list[bool]:
    """For each float array of `inputs`, whether a small change of it may change what a function returns.

    It may not where JAX knows that the derivative is zero: behind `stop_gradient`, `argmax`, `round` or a
    comparison. In a function of its own, such as one under `jax.jit`, all inputs count as one.

    Args:
      function: (inputs, *others) -> arrays.
    """
    leaves, structure = jax.tree.flatten(inputs)
    moves = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def change(changes: Arrays, leaves: Arrays, *others: Arrays) -> Arrays:
        def run(floats: Arrays) -> Arrays:
            given = iter(floats)
            whole = [next(given) if moved else a for moved, a in zip(moves, leaves, strict=True)]
            return function(jax.tree.unflatten(structure, whole), *others)

        return jax.jvp(run, (list(itertools.compress(leaves, moves)),), (changes,))[1]

    floats = list(itertools.compress(leaves, moves))
    jaxpr = _traced(change, (floats, leaves, *others))
    needed = reads_of(equations_for(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
    return [v in needed for v in jaxpr.invars[: len(floats)]]


def reductions(program: core.Jaxpr) -> dict[str, float]:
    """The bytes read by operations that combine elements of an array: sums, matrix products, sorts.

    What is in a loop counts once.

    Returns:
      of all operations of a name.
    """
    found: dict[str, float] = {}
    for equation in equations_in(program):
        name = equation.primitive.name
        if not name.startswith(_REDUCING) or name == "reduce_precision":
            continue
        if any(aval_of(v).shape for v in equation.invars):
            found[name] = found.get(name, 0.0) + sum(map(_bytes, equation.invars))
    return found


def draws(program: core.Jaxpr) -> bool:
    """Whether a program draws random numbers."""
    return any(eqn.primitive.name == "random_bits" for eqn in equations_in(program))


def _amount(jaxpr: core.Jaxpr) -> Amount:
    whole = inlined(core.ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars))).jaxpr
    held = {v for v in whole.outvars if isinstance(v, core.Var)}
    for equation in whole.eqns:
        name = equation.primitive.name
        if name not in _FUSED and not name.startswith("reduce_"):
            held |= {v for v in equation.invars if isinstance(v, core.Var)}

    def amount_of(equation: core.JaxprEqn) -> Amount:
        name = equation.primitive.name
        if name in _SAME:
            return Amount()
        if name in _IN_PLACE:
            return Amount(bytes=2.0 * _bytes(equation.invars[_IN_PLACE[name]]))
        if not name.startswith("reduce") and (parts := programs_in(equation)):
            return _inside(equation, [*map(_amount, parts)])
        made = sum(_bytes(v) for v in equation.outvars if v in held or name not in _FUSED)
        if name in _PRODUCTS:
            return Amount(_flops_of(equation), made + sum(map(_bytes, equation.invars)))
        return Amount(bytes=2.0 * made)

    return functools.reduce(Amount.plus, map(amount_of, whole.eqns), Amount())


def _inside(eqn: core.JaxprEqn, parts: list[Amount]) -> Amount:
    """Of what is in a loop, by its length, in the largest branch of a conditional, or in a call."""
    if eqn.primitive.name == "cond":
        return Amount(*map(max, zip(*parts, strict=True)))
    whole = functools.reduce(Amount.plus, parts)
    if eqn.primitive.name != "scan":
        return whole
    # Of nested loops the inner ones take the turns.
    turns = whole.turns or 1.0
    product_turns = whole.product_turns or float(whole.flops > 0)
    return whole._replace(turns=turns, product_turns=product_turns).scaled(eqn.params["length"])


def _flops_of(product: core.JaxprEqn) -> float:
    params, shapes = product.params, [aval_of(v).shape for v in product.invars]
    out = aval_of(product.outvars[0])
    made = (8.0 if jnp.iscomplexobj(out) else 2.0) * math.prod(out.shape)
    if product.primitive.name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return made * math.prod(shapes[0][dim] for dim in contracted)
    num_features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
    return made * math.prod(shapes[1]) / max(num_features, 1)


def _bytes(v: Atom) -> float:
    return float(math.prod(aval_of(v).shape) * aval_of(v).dtype.itemsize)
