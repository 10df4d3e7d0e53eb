"""Checks that a function is the same program when it is traced again.

One that reads NumPy's random numbers, a clock or a counter is not: JAX keeps the numbers of one trace for all
steps, and each process, mesh and compilation has others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpar.base.types import Atom, Value
from jaxpar.trace.jaxprs import made_with, parts_of_program
from jaxpar.trace.source_lines import source_line_of_equation

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Difference(NamedTuple):
    """How a program differs from another one of the same function.

    Attributes:
      source_line: the user's line that computes with something else, or "".
      outputs: the numbers of the outputs that depend on it.
    """

    source_line: str
    outputs: list[int]


def difference(one: ClosedJaxpr, other: ClosedJaxpr) -> Difference | None:
    """How two programs differ; None if they are the same."""
    unlike, outputs = _unlike(one, other)
    if not unlike and not outputs:
        return None
    made = made_with(one.jaxpr, unlike)
    outputs |= {n for n, v in enumerate(one.jaxpr.outvars) if isinstance(v, Var) and v in made}
    uses = (eqn for eqn in one.jaxpr.eqns if not unlike.isdisjoint(_variables(eqn)))
    lines = (source_line_of_equation(eqn) for eqn in uses)
    return Difference(next(filter(None, lines), ""), sorted(outputs))


def same_value(one: Value, other: Value) -> bool:
    """Whether two constants are the same, as far as they are numbers, texts or arrays of them."""
    if one is other or type(one).__qualname__ != type(other).__qualname__:
        return one is other
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, ClosedJaxpr | Jaxpr):
        return not any(_unlike(one, other))
    if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if isinstance(one, np.ndarray | jax.Array) and not isinstance(one, Tracer):
        a, b = np.asarray(one), np.asarray(other)
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    return not isinstance(one, _PLAIN) or repr(one) == repr(other)


def _unlike(one: ClosedJaxpr | Jaxpr, other: ClosedJaxpr | Jaxpr) -> tuple[set[Var], set[int]]:
    """What differs by itself between two programs, closed or not: variables of the first, and outputs."""
    (a, of_a), (b, of_b) = map(parts_of_program, (one, other))
    sizes = [tuple(map(len, (p.constvars, p.invars, p.eqns, p.outvars))) for p in (a, b)]
    if sizes[0] != sizes[1]:
        return set(), {*range(len(a.outvars))}
    unlike = {v for v, *both in zip(a.constvars, of_a, of_b, strict=False) if not same_value(*both)}
    names = dict(zip([*b.constvars, *b.invars], [*a.constvars, *a.invars], strict=True))

    def is_same(v: Atom, w: Atom) -> bool:
        if isinstance(v, Literal) or isinstance(w, Literal):
            return same_value(getattr(v, "val", None), getattr(w, "val", None))
        return names.get(w) is v

    for mine, its in zip(a.eqns, b.eqns, strict=True):
        sizes = [(len(e.invars), [v.aval.str_short() for v in e.outvars]) for e in (mine, its)]
        if mine.primitive.name != its.primitive.name or sizes[0] != sizes[1]:
            return unlike | {*mine.outvars}, {*range(len(a.outvars))}
        params = (same_value(value, its.params.get(name)) for name, value in mine.params.items())
        if not (all(map(is_same, mine.invars, its.invars)) and all(params)):
            unlike |= {*mine.outvars}
        names.update(zip(its.outvars, mine.outvars, strict=True))
    outs = enumerate(zip(a.outvars, b.outvars, strict=True))
    return unlike, {n for n, both in outs if not is_same(*both)}


def _variables(eqn: JaxprEqn) -> set[Var]:
    return {*eqn.outvars, *(v for v in eqn.invars if isinstance(v, Var))}
