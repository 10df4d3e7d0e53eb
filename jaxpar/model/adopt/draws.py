"""What a part of a program draws at random, apart from the rest of it."""

from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Var

from jaxpar.model.adopt.marks import block_p
from jaxpar.model.adopt.program import Part, Program
from jaxpar.trace.jaxprs import (
    aval_of,
    equations_for,
    inlined,
    is_plain_call,
    made_with,
    program_of,
    reads_of,
)


class Drawn(NamedTuple):
    """A part in two programs.

    Attributes:
      draw: keys -> what is drawn for a row, or a time step of a row.
      rest: the inputs of the part, and what is drawn -> its outputs.
    """

    draw: ClosedJaxpr
    rest: ClosedJaxpr


def draws_apart(program: Program, one: Program, number: int | str, dims: int) -> Drawn | None:
    """A part in two programs; None if what is drawn has not rows first, and time steps.

    Args:
      program: of the batch; `one` of a batch of one row, or one time step of one row.
      dims: that are one there, 1 or 2.
    """
    whole, single = (_split(each.part(number)) for each in (program, one))
    if whole is None or single is None:
        return None
    (_, border, rest), (draw, of_one, _) = whole, single
    shapes = [(aval_of(v).shape, aval_of(own).shape) for v, own in zip(border, of_one, strict=True)]
    fits = all(b[:dims] == (1,) * dims and a[dims:] == b[dims:] for a, b in shapes)
    sizes = {a[:dims] for a, _ in shapes}
    return Drawn(draw, rest) if fits and len(sizes) == 1 else None


def _split(part: Part) -> tuple[ClosedJaxpr, list[Var], ClosedJaxpr] | None:
    """What is drawn, the variables between it and the rest, and the rest."""
    closed = inlined(part.closed, lambda eqn: eqn.primitive is block_p or is_plain_call(eqn))
    jaxpr = closed.jaxpr
    keys = [jaxpr.invars[n] for n in part.keys]
    others = made_with(jaxpr, {*jaxpr.invars} - {*keys})
    apart = made_with(jaxpr, keys) - others - {*keys}
    rest = [eqn for eqn in jaxpr.eqns if apart.isdisjoint(eqn.outvars)]
    reads = reads_of(rest, jaxpr.outvars)
    border = [v for v in reads if v in apart]
    if not reads.keys().isdisjoint(keys):
        return None
    draw = program_of(jaxpr, keys, equations_for(jaxpr.eqns, border), border)
    rest = program_of(jaxpr, [*jaxpr.invars, *border], rest, jaxpr.outvars)
    return ClosedJaxpr(draw, closed.consts), border, ClosedJaxpr(rest, closed.consts)
