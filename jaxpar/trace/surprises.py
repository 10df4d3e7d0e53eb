"""Warnings before a run about operations that lose precision without an error.

docs/help/surprises.md explains each.
"""

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.base.trees import shape_of
from jaxpar.base.types import Atom, Function, Shapes
from jaxpar.trace.jaxprs import aval_of, inlined, is_call, made_of, programs_in
from jaxpar.trace.source_lines import source_line_of_equation

_log = logging.getLogger(__name__)

# `decay * mean + (1 - decay) * new` is rounded to the digits of its type at every step, so it stops within
# eps / 2 / (1 - decay) of its value: a tenth of it where 1 - decay is so many eps.
_DECAY_EPS = 5
# What moves numbers, so that a state stays what it is.
_MOVES = {
    "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "gather", "reshape", "slice", "squeeze",
    "sharding_constraint", "split", "transpose",
}  # fmt: skip


def tell_of_model(what: str, program: Jaxpr) -> None:
    """Warns of what a part of a model does, with its line; once in a process."""
    for path in _paths(program):
        for does, text in _OF_MODELS:
            if does(path[-1]):  # JAX keeps programs of calls, with the lines of the first one
                place = next(filter(None, map(source_line_of_equation, path)), "")
                _tell(text.format(dtype=aval_of(path[-1].outvars[0]).dtype), place, what)


def tell_of_optimizer(make: Function, update: Function, params: Shapes, state: Shapes) -> None:
    """Warns of what an optimizer does with numbers of fewer than 32 bits; once in a process.

    Args:
      make: where it is from.
      update: of it, for shapes of these.
    """
    leaves = jax.tree.leaves_with_path(state)
    low = [leaf.dtype for leaf in jax.tree.leaves((params, state)) if _is_low(leaf)]
    if not low:
        return
    shapes = jax.tree.map(shape_of, (params, state, params))  # in one memory
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
        traced = jax.make_jaxpr(lambda *args: update(*args))(*shapes)
    program, num_params = inlined(traced, is_call).jaxpr, len(jax.tree.leaves(params))
    names = [jax.tree_util.keystr(path) for path, leaf in leaves if _is_low(leaf)]
    found = (
        (_decays(program, program.invars[num_params : num_params + len(leaves)]), _MEAN),
        (any("hyperparams" in name for name in names), _HYPERPARAMS),
        (_adds_norms(program), _NORM),
    )
    code = inspect.unwrap(make).__code__
    place = f"{make.__qualname__} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    for does, text in found:
        if does:
            _tell(text.format(dtype=low[0]), place)


@functools.cache
def told_at(text: str) -> set[str]:
    """The places that were told of, in this process."""
    return set()


def _tell(text: str, place: str, what: str = "") -> None:
    """Warns; of a part without a place only if nothing has the same text."""
    told = told_at(text)
    if place not in told and (place or not told) and jax.process_index() == 0:
        _log.warning("%s %s", place or what, text)
    told.add(place)


def _paths(program: Jaxpr) -> Iterator[tuple[JaxprEqn, ...]]:
    """Each equation, after the loops and calls that it is in."""
    for eqn in program.eqns:
        yield (eqn,)
        for part in programs_in(eqn):
            yield from ((eqn, *path) for path in _paths(part))


def _is_low(v: Any) -> bool:
    """Whether a variable, or an array's shape, is of floats with fewer than 32 bits."""
    dtype = getattr(v, "aval", v).dtype
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _eps(eqn: JaxprEqn) -> float:
    return float(jnp.finfo(aval_of(eqn.outvars[0]).dtype).eps)


def _draws(eqn: JaxprEqn) -> bool:
    """Floats of random bits."""
    return eqn.primitive.name == "bitcast_convert_type" and _is_low(eqn.outvars[0])


def _looks_up(eqn: JaxprEqn) -> bool:
    """Rows of a table, for more ids than ones that can be added up in its type; not for a range of places."""
    if eqn.primitive.name != "gather" or not _is_low(eqn.outvars[0]):
        return False
    table, (*ids, _) = (aval_of(v).shape for v in eqn.invars)
    is_row = len(table) == 2 and tuple(eqn.params["slice_sizes"]) == (1, table[1])
    return is_row and math.prod(ids) > max(2 / _eps(eqn), *ids)


def _selects_carry(eqn: JaxprEqn) -> bool:
    """The last real step of each row, as `nnx.RNN` finds it."""
    frames = (
        getattr(eqn.source_info.traceback, "frames", ()) if eqn.primitive.name == "gather" else ()
    )
    return any(frame.function_name == "_select_last_carry" for frame in frames)


def _decays(program: Jaxpr, state: Sequence[Var]) -> bool:
    """Multiplies a state by a factor that is too near to 1 for its type."""
    of_state = {*state} | made_of(program, state, lambda eqn: eqn.primitive.name in _MOVES)
    for eqn in program.eqns:
        given = [v if isinstance(v, Var) and v in of_state else None for v in eqn.invars]
        for inner in programs_in(eqn):  # of a choice: all but the index
            pairs = zip(reversed(inner.invars), reversed(given), strict=False)
            if _decays(inner, [v for v, outer in pairs if outer]):
                return True
        if any(given) and eqn.primitive.name == "mul" and _is_low(eqn.outvars[0]):
            factors = [float(v.val) for v in eqn.invars if isinstance(v, Literal)]
            if any(1 - _DECAY_EPS * _eps(eqn) < factor <= 1 for factor in factors):
                return True
    return False


def _adds_norms(program: Jaxpr) -> bool:
    """Adds up sums over arrays."""
    sums = set[Atom]()
    for eqn in program.eqns:
        name, given = eqn.primitive.name, [v for v in eqn.invars if isinstance(v, Var)]
        is_of_sums = {*given} <= sums and not aval_of(eqn.outvars[0]).shape
        if any(map(_adds_norms, programs_in(eqn))):
            return True
        if name == "add" and len(given) == 2 and is_of_sums and _is_low(eqn.outvars[0]):
            return True
        if name == "reduce_sum" or (is_of_sums and name in ("add", "convert_element_type", "copy")):
            sums |= {*eqn.outvars}
    return False


_OF_MODELS: tuple[tuple[Callable[[JaxprEqn], bool], str], ...] = (
    (
        _draws,
        "draws random numbers in {dtype}: few different ones, whose mean is off. "
        "Fix: draw them in float32, and convert them",
    ),
    (
        _looks_up,
        "looks up rows in {dtype}: the gradients of a frequent id stop adding up. "
        "Fix: look up in float32 (nnx.Embed without dtype), and convert what it returns",
    ),
    (
        _selects_carry,
        "takes the last state of nnx.RNN by seq_lengths: for a row of length 0 it is that after its padding. "
        "Fix: use jnp.where(lengths[:, None] > 0, state, 0), or give each row a step",
    ),
)
_LESS = "Fix: keep parameters in float32 and compute in {dtype}, or use a jaxpar.OptimizerConfig"
_MEAN = f"keeps a mean over steps in {{dtype}}, which stops far from its value. {_LESS}"
_HYPERPARAMS = f"rounds its hyperparameters to {{dtype}}, a decay of 0.999 as well. {_LESS}"
_NORM = (
    "adds up a norm of all arrays in {dtype}, which is too small, or infinite. "
    "Fix: set TrainConfig.clip_norm instead, or convert gradients to float32 before it"
)
