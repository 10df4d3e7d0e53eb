"""Finds the line of a program that mixes time steps, by the shapes for a shorter window."""

import itertools

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxpar.trace.jaxprs import aval_of
from jaxpar.trace.source_lines import source_line_of_equation


def line_across_time(window: ClosedJaxpr, chunk: ClosedJaxpr, num_chunks: int) -> str:
    """The first line that makes time steps of what has none, or mixes them; "" if shapes do not tell.

    Args:
      window: The program for a whole window, without calls; `chunk` the same for one of so many chunks.
    """
    pairs = itertools.zip_longest(window.jaxpr.eqns, chunk.jaxpr.eqns)
    for eqn, short in pairs:
        if eqn is None or short is None or eqn.primitive is not short.primitive:
            return ""
        if _is_across(eqn, short, num_chunks) and (line := source_line_of_equation(eqn)):
            return line
    return ""


def _is_across(eqn: JaxprEqn, short: JaxprEqn, num_chunks: int) -> bool:
    sizes = [
        [(a, b) for a, b in zip(aval_of(v).shape, aval_of(own).shape, strict=True) if a != b]
        for v, own in zip((*eqn.invars, *eqn.outvars), (*short.invars, *short.outvars), strict=True)
    ]
    reads, makes = sizes[: len(eqn.invars)], sizes[len(eqn.invars) :]
    is_cut = all(len(own) <= 1 and all(a == num_chunks * b for a, b in own) for own in sizes)
    return not is_cut or any(reads) != any(makes)
