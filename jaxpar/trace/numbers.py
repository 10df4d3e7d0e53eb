"""Turns the constants of a traced function into arguments, so that new numbers need no new program.

An optimizer is Python code that computes with Python's numbers: rates, decays, the steps of a schedule. In
its traced program they are constants. Here they are read from that program, and given to it again:

    program      b = mul a 0.9               numbers      [0.9, 0.001]
                 c = mul b 0.001             program      b = mul a n[0]; c = mul b n[1]

Those within loops and conditionals stay constants.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.lax import mul_p

from jaxpar.base.types import Arrays, Atom, Function, Tree
from jaxpar.trace.jaxprs import aval_of, inlined, is_float, program_of


def with_numbers(function: Function, *args: Tree) -> tuple[Arrays, Callable[..., Arrays]]:
    """The numbers that a function computes with; and the function, of such numbers and of its arguments.

    Args:
      args: arrays like those that it will be given, or their shapes.
    """
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integer counts and floats
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    closed = inlined(closed)
    found = dict[Var, Any]()

    def lifted(eqn: JaxprEqn) -> JaxprEqn:
        reads = [*eqn.invars]
        for n, atom in enumerate(eqn.invars):
            if _is_number(eqn, atom):
                name, number = Var(aval_of(atom)), getattr(atom, "val")  # noqa: B009
                if n == 1 and eqn.primitive.name == "div" and is_float(name):
                    # As XLA does with a constant, so that bits stay the same.
                    number, eqn = (
                        1 / np.asarray(number, aval_of(name).dtype),
                        eqn.replace(primitive=mul_p),
                    )
                found[name], reads[n] = number, name
        return eqn.replace(invars=reads)

    jaxpr = closed.jaxpr
    eqns = [*map(lifted, jaxpr.eqns)]
    invars = [*found, *jaxpr.constvars, *jaxpr.invars]
    program = program_of(jaxpr, invars, eqns, jaxpr.outvars).replace(constvars=[])
    of_kind = dict[str, list[Var]]()  # one array of each dtype is sent, not one for each number
    for name in found:
        of_kind.setdefault(str(aval_of(name).dtype), []).append(name)
    numbers = {kind: np.array([found[v] for v in own], kind) for kind, own in of_kind.items()}

    def run(numbers: tuple[dict[str, jax.Array], Arrays], *args: Tree) -> Arrays:
        by_kind, consts = numbers
        known = {v: by_kind[k][n] for k, own in of_kind.items() for n, v in enumerate(own)}
        values = [*(known[v] for v in found), *consts, *jax.tree.leaves(args)]
        return jax.tree.unflatten(jax.tree.structure(shape), jaxpr_as_fun(whole)(*values))

    whole = ClosedJaxpr(program, [])
    return (numbers, [*closed.consts]), run


def _is_number(eqn: JaxprEqn, atom: Atom) -> bool:
    """Whether an equation computes with a literal: with a float, or for a single number with an integer."""
    if not isinstance(atom, Literal) or aval_of(atom).shape:
        return False
    is_scalar = all(not aval_of(v).shape for v in eqn.outvars)
    dtype = aval_of(atom).dtype
    return jnp.issubdtype(dtype, jnp.inexact) or (is_scalar and jnp.issubdtype(dtype, jnp.integer))
