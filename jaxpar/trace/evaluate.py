"""Traced programs run by NumPy, operation by operation: for small arrays, compiling would take longer."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxpar.base.types import ArrayLike, Atom, Value
from jaxpar.trace.jaxprs import aval_of, function_of, reads_of

_CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call"}


def evaluate(program: ClosedJaxpr, args: Sequence[ArrayLike]) -> list[ArrayLike]:
    """What a program makes of arrays: without its prints, and with zeros for its random bits.

    JAX runs what is not in the tables below; random bits within a loop are as they are.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, map(_array, program.consts), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atoms: Sequence[Atom]) -> list[ArrayLike]:
        return [_array(v) if isinstance(v, Literal) else values[v] for v in atoms]

    for eqn in jaxpr.eqns:
        if eqn.outvars:  # others print
            made = _run(eqn, read(eqn.invars))
            if made is None:
                reads = [*reads_of([eqn])]
                made = map(_array, function_of(jaxpr, reads, [eqn], eqn.outvars)(*read(reads)))
            values.update(zip(eqn.outvars, made, strict=True))
    return read(jaxpr.outvars)


def _run(eqn: JaxprEqn, inputs: Sequence[ArrayLike]) -> list[ArrayLike] | None:
    """What an equation makes of arrays; None if JAX is to run it."""
    name, params, aval = eqn.primitive.name, eqn.params, aval_of(eqn.outvars[0])
    if name in _CALLS:
        return evaluate(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], inputs)
    if name == "cond":
        return evaluate(params["branches"][int(inputs[0])], inputs[1:])
    if _is_key(aval):
        return None
    if name in _OF_NUMBERS:
        return [np.asarray(_OF_NUMBERS[name](*inputs), aval.dtype)]
    if name in _OF_SHAPES:
        return [np.asarray(_OF_SHAPES[name](inputs[0], aval, params), aval.dtype)]
    return None


def _is_key(a: ArrayLike | ShapedArray) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.extended)


def _array(a: ArrayLike | Literal) -> ArrayLike:
    """An array, or a constant of a program, as NumPy has it; random keys as they are."""
    if isinstance(a, Literal):
        return np.asarray(a.val, aval_of(a).dtype)
    return a if _is_key(a) else np.asarray(a)


def _broadcast(x: np.ndarray, aval: ShapedArray, params: Mapping[str, Value]) -> np.ndarray:
    dims = [1] * len(aval.shape)
    for dim, size in zip(params["broadcast_dimensions"], np.shape(x), strict=True):
        dims[dim] = size
    return np.broadcast_to(np.reshape(x, dims), aval.shape)


def _reduction(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x, _, params: function(x, axis=tuple(params["axes"]))


def _slice(x: np.ndarray, _: ShapedArray, params: Mapping[str, Value]) -> np.ndarray:
    steps = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]


def _reshape(x: np.ndarray, aval: ShapedArray, _: Mapping[str, Value]) -> np.ndarray:
    return np.reshape(x, aval.shape)


_OF_NUMBERS: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs, "add": np.add, "and": np.bitwise_and, "convert_element_type": np.asarray,
    "div": np.divide, "eq": np.equal, "exp": np.exp, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "lt": np.less, "max": np.maximum,
    "min": np.minimum, "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.invert,
    "or": np.bitwise_or, "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(which, cases), "shift_right_logical": np.right_shift,
    "sign": np.sign, "sqrt": np.sqrt, "square": np.square, "sub": np.subtract,
}  # fmt: skip
# Of the first argument, the type of the result, and parameters.
_OF_SHAPES: dict[str, Callable[..., np.ndarray]] = {
    "bitcast_convert_type": lambda x, aval, _: x.view(aval.dtype),
    "broadcast_in_dim": _broadcast, "expand_dims": _reshape, "reshape": _reshape, "squeeze": _reshape,
    "integer_pow": lambda x, _, params: np.asarray(x) ** params["y"],
    "random_bits": lambda _, aval, __: np.zeros(aval.shape),
    "reduce_and": _reduction(np.all), "reduce_max": _reduction(np.max),
    "reduce_or": _reduction(np.any), "reduce_sum": _reduction(np.sum),
    "slice": _slice, "transpose": lambda x, _, params: np.transpose(x, params["permutation"]),
}  # fmt: skip
