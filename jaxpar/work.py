"""What a function computes and keeps alive, from which inputs, by which operations: read from its jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

# How the names of such operations begin, LAPACK's and all; see `reductions`.
FACTORIZATIONS = ("cholesky", "qr", "householder", "lu", "svd", "eig", "triangular_solve")
_REDUCING = (
    "reduce", "dot_general", "conv_general", "cum", "arg", "sort", "top_k", "fft", *FACTORIZATIONS,
)  # fmt: skip

_COLLECTIVES = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute",
}  # fmt: skip

# Those whose results are never written down where one other operation alone reads them: the compiler makes
# one of both.
_FUSED = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy",
        "cos", "div", "eq", "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "iota",
        "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
        "pcast", "pow", "pvary", "random_bits", "random_unwrap", "random_wrap", "real", "rem", "reshape",
        "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
        "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh",
        "threefry2x32", "transpose", "xor",
    }
)  # fmt: skip
# Results that lie where an operand lay.
_IN_PLACE = ("dynamic_update_slice", "scatter", "scatter-add", "optimization_barrier")


class Amount(NamedTuple):
    """What a function does and holds, by its shapes alone.

    Attributes:
      flops: as of `count_flops`.
      bytes: the least that is moved between device and memory: what matrix products and convolutions read and
        write, and what else is materialized. Loops by their length.
      turns: iterations of loops, of all that follow each other.
      live: bytes of what is alive besides arguments, at every operation, loops' insides included.
    """

    flops: float
    bytes: float
    turns: float
    live: tuple[float, ...]


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of the matrix products and convolutions of a function.

    Two for a multiply-add; loops by their length, of a conditional the most of its branches. A loop whose
    length is data counts once.

    Args:
      args: arrays or their shapes.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def amount(function: Callable[..., Any], *args: Any) -> Amount:
    """What a function does and holds.

    Args:
      args: arrays or their shapes.
    """
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return Amount(_flops(jaxpr), _moved(jaxpr), _turns(jaxpr), tuple(_live(jaxpr)) or (0.0,))


def collectives_of(function: Callable[..., Any], *args: Any) -> Iterator[tuple[str, float]]:
    """What a function of a `shard_map` exchanges: operation and bytes, as of `analysis.Collective`."""
    return _collectives(jax.make_jaxpr(function)(*args).jaxpr)


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


def _collectives(jaxpr: Any, times: int = 1) -> Iterator[tuple[str, float]]:
    for equation in jaxpr.eqns:
        if (op := _COLLECTIVES.get(equation.primitive.name)) is not None:
            whole = equation.outvars if op == "all-gather" else equation.invars
            yield op, times * sum(map(_bytes, whole))
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        for part in _inner(equation):
            yield from _collectives(part, times * length)


def _moved(jaxpr: Any) -> float:
    return sum(
        _moved_by(eqn, inside) for eqn, inside in zip(jaxpr.eqns, _inside(jaxpr), strict=True)
    )


def _moved_by(equation: Any, results: Sequence[float]) -> float:
    name, params = equation.primitive.name, equation.params
    read = sum(_bytes(v) for v in equation.invars)
    if name in ("dot_general", "conv_general_dilated"):
        return read + sum(results)
    if name in ("dynamic_update_slice", "scatter", "scatter-add"):
        return 2.0 * _bytes(equation.invars[1 if name == "dynamic_update_slice" else 2])
    counts = [_moved(part) for part in _inner(equation)]
    if not counts:
        return 2.0 * sum(results)
    if name == "cond":
        return max(counts)
    return sum(counts) * (params["length"] if name == "scan" else 1)


def _turns(jaxpr: Any) -> float:
    turns = 0.0
    for equation in jaxpr.eqns:
        inner = [_turns(part) for part in _inner(equation)]
        length = equation.params["length"] if equation.primitive.name == "scan" else 1
        turns += length * max(sum(inner), 1.0) if equation.primitive.name == "scan" else sum(inner)
    return turns


def _live(jaxpr: Any) -> list[float]:
    """Bytes alive at every operation, without the arguments of the jaxpr."""
    given = {*jaxpr.invars, *jaxpr.constvars}
    last = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, core.Var)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, core.Var)}
    sizes, alive, found = dict[Any, float](), 0.0, list[float]()
    for number, (equation, results) in enumerate(zip(jaxpr.eqns, _inside(jaxpr), strict=True)):
        ends = {v for v in equation.invars if isinstance(v, core.Var) and last[v] == number}
        dying = sum(sizes.get(v, 0.0) for v in ends)
        made = 0.0
        for v, size in zip(equation.outvars, results, strict=True):
            sizes[v] = size
            made += size
        name = equation.primitive.name
        reuses = name in _FUSED or name in _IN_PLACE or name in ("scan", "while", "cond")
        inner = [max(_live(part), default=0.0) for part in _inner(equation)]
        if name in ("pjit", "jit", "closed_call", "custom_vjp_call", "custom_jvp_call", "remat2"):
            inner = [max(most - made, 0.0) for most in inner]  # its results are made inside
        room = made - min(dying, made) if reuses else made
        if name in _IN_PLACE and not ends - given:
            room = made if any(v in given for v in equation.invars[:1]) else room
        found.append(alive + room + max(inner, default=0.0))
        alive += made - dying
        for v in equation.outvars:
            if v not in last:
                alive -= sizes.pop(v, 0.0)
    return found


def _inside(jaxpr: Any) -> list[list[float]]:
    """For each operation the bytes of its results that are written down."""
    reads = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, core.Var))
    reads.update(v for v in jaxpr.outvars if isinstance(v, core.Var))
    kept = {v for v in jaxpr.outvars if isinstance(v, core.Var)}
    for equation in jaxpr.eqns:  # what anything else than a fused operation reads
        name = equation.primitive.name
        if name not in _FUSED and not name.startswith("reduce_"):
            kept.update(v for v in equation.invars if isinstance(v, core.Var))
    return [
        [
            0.0 if eqn.primitive.name in _FUSED and v not in kept and reads[v] <= 1 else _bytes(v)
            for v in eqn.outvars
        ]
        for eqn in jaxpr.eqns
    ]


def _bytes(v: Any) -> float:
    try:
        return float(math.prod(v.aval.shape) * v.aval.dtype.itemsize)
    except (AttributeError, TypeError):  # a random key, or nothing
        return 0.0
