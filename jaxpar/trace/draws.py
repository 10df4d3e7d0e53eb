"""Separates a program's random draws from the rest, so that each row can have its own keys."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from jaxpar.base.types import Index, Leaves
from jaxpar.trace import varying
from jaxpar.trace.jaxprs import (
    Condition,
    aval_of,
    equations_for,
    equations_in,
    inlined,
    is_plain_call,
    made_with,
    program_of,
    reads_of,
)

_DRAWS = ("random_bits", "random_gamma")


class Drawn(NamedTuple):
    """A program in two.

    Attributes:
      draw: keys -> what is drawn for a row, or for a time step of a row.
      rest: the inputs of the program, and what is drawn -> its outputs.
      sizes: of the dims that what is drawn begins with: rows; or rows and time steps, in either order.
    """

    draw: ClosedJaxpr
    rest: ClosedJaxpr
    sizes: tuple[int, ...]

    def values(self, keys_of: Callable[..., Leaves], firsts: Sequence[Index]) -> Leaves:
        """What is drawn for all rows, and time steps.

        Args:
          keys_of: (number of the row, ...) -> keys; numbers are in the order of `sizes`.
          firsts: the first numbers.
        """

        def draw(*places: Index) -> Leaves:
            return varying.run(self.draw, keys_of(*places))

        count, run = len(self.sizes), draw
        for dim in reversed(range(count)):
            run = jax.vmap(run, [0 if other == dim else None for other in range(count)])
        ranges = zip(firsts, self.sizes, strict=True)
        drawn = run(*(first + jnp.arange(size) for first, size in ranges))
        return [a.reshape(*self.sizes, *a.shape[2 * count :]) for a in drawn]


def draws_apart(
    whole: ClosedJaxpr,
    single: ClosedJaxpr,
    keys: Sequence[int],
    sizes: tuple[int, ...],
    calls: Condition,
) -> Drawn | None:
    """A program in two; None if what is drawn does not depend on keys alone, or has not these dims first.

    Args:
      single: the same for one row, or one time step of one row.
      keys: the places of keys among the inputs.
      sizes: rows; or rows and time steps, in either order.
      calls: equations to look into, besides plain calls.
    """
    first, second = (_split(closed, keys, calls) for closed in (whole, single))
    if first is None or second is None:
        return None
    (draw_all, border, rest), (draw, of_one, _) = first, second
    if _num_drawn(draw_all) != math.prod(sizes) * _num_drawn(draw):
        return None  # rows, or time steps, share what is drawn
    pairs = zip(border, of_one, strict=True)
    shapes = [(aval_of(v).shape, aval_of(own).shape) for v, own in pairs]
    ones = (1,) * len(sizes)
    fits = all(many == (*sizes, *one[len(sizes) :]) for many, one in shapes)
    fits = fits and all(one[: len(sizes)] == ones for _, one in shapes)
    return Drawn(draw, rest, sizes) if fits else None


def _num_drawn(closed: ClosedJaxpr) -> int:
    """How many numbers a program draws."""
    draws = (eqn for eqn in equations_in(closed.jaxpr) if eqn.primitive.name in _DRAWS)
    return sum(math.prod(aval_of(v).shape) for eqn in draws for v in eqn.outvars)


def _split(
    closed: ClosedJaxpr, keys: Sequence[int], calls: Condition
) -> tuple[ClosedJaxpr, list[Var], ClosedJaxpr] | None:
    """What is drawn, the variables between it and the rest, and the rest."""
    closed = inlined(closed, lambda eqn: calls(eqn) or is_plain_call(eqn))
    jaxpr = closed.jaxpr
    of_keys = [jaxpr.invars[n] for n in keys]
    others = made_with(jaxpr, {*jaxpr.invars} - {*of_keys})
    apart = made_with(jaxpr, of_keys) - others - {*of_keys}
    eqns = [eqn for eqn in jaxpr.eqns if apart.isdisjoint(eqn.outvars)]
    reads = reads_of(eqns, jaxpr.outvars)
    if not reads.keys().isdisjoint(of_keys):
        return None
    border = [v for v in reads if v in apart]
    draw = program_of(jaxpr, of_keys, equations_for(jaxpr.eqns, border), border)
    rest = program_of(jaxpr, [*jaxpr.invars, *border], eqns, jaxpr.outvars)
    return ClosedJaxpr(draw, closed.consts), border, ClosedJaxpr(rest, closed.consts)
