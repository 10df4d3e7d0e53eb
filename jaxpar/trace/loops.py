"""Runs a traced program with its loops one after the other, as they stand in it.

A compiler orders what depends on each other, and nothing else. So each loop sets a number, `turns`, and what
comes next needs that number:

    x, turns = lax.scan(...)
    y = after(turns, y)
"""

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpar.base.trees import vary_over
from jaxpar.base.types import Arrays, Atom, Function, Leaves, Tree
from jaxpar.trace.jaxprs import (
    cut,
    equations_in,
    function_of,
    is_plain_call,
    parts_of_program,
    programs_in,
    reads_of,
    varying_of,
)
from jaxpar.trace.varying import parts_of_scan, retraced

_LOOPS = ("scan", "while")
_CALLS = ("checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "closed_call")


def after(turns: jax.Array, values: Tree) -> Arrays:
    """The values, but only after the branches or loops that had so many turns.

    A compiler keeps this order: it can't know that a count is never below 0.
    """
    never = turns < 0
    return jax.tree.map(lambda a: jnp.where(never, jnp.zeros_like(a), a), values)


def loops_in_order(function: Function, *args: Tree) -> Tree:
    """What a function gives, with its loops one after the other, as they stand in it.

    It is not to be differentiated: functions with a backward pass of their own are written out.
    """

    def run(closed: ClosedJaxpr, arrays: Leaves) -> Leaves:
        made = (v for eqn in equations_in(closed.jaxpr) for v in eqn.outvars)
        axes = frozenset[str]().union(*map(varying_of, made))
        outs, turns = _run(closed, arrays, vary_over(jnp.int32(0), axes))
        return after(turns, outs)

    return retraced(function, run, *args, keeps_types=True)


def has_several_loops(jaxpr: Jaxpr) -> bool:
    """Whether loops stand beside each other in a program, or in one within it."""
    eqns = [eqn for eqn in jaxpr.eqns if _has_loops(eqn)]
    return len(eqns) > 1 or any(map(has_several_loops, itertools.chain(*map(programs_in, eqns))))


def _after(turns: jax.Array, values: Leaves) -> Leaves:
    """The values, of which those wait that differ over as many axes as the turns. Keys do not."""
    axes = jax.typeof(turns).manual_axis_type.varying

    def waits(a: jax.Array) -> bool:
        has_axes = axes <= jax.typeof(a).manual_axis_type.varying
        return has_axes and not jnp.issubdtype(a.dtype, jax.dtypes.extended)

    return [after(turns, a) if waits(a) else a for a in values]


def _run(program: ClosedJaxpr | Jaxpr, args: Leaves, turns: jax.Array) -> tuple[Leaves, jax.Array]:
    """The results of a program, and the turns after it: 1 if a loop had one, here or before.

    It is no count: XLA knows what loops of known lengths count, and would not wait for it.
    """
    jaxpr, consts = parts_of_program(program)
    names = *jaxpr.constvars, *jaxpr.invars
    env = dict[Var, Any](zip(names, (*consts, *args), strict=True))

    def read(names: Iterable[Atom]) -> Leaves:
        return [v.val if isinstance(v, Literal) else env[v] for v in names]

    is_read = reads_of(jaxpr.eqns, jaxpr.outvars)
    for has_loops, group in itertools.groupby(jaxpr.eqns, _has_loops):
        eqns = [*group]
        if has_loops:
            for eqn in eqns:
                outs, turns = _run_loops(eqn, read(eqn.invars), turns)
                env.update(zip(eqn.outvars, outs, strict=True))
        else:
            made = [v for eqn in eqns for v in eqn.outvars if v in is_read]
            given = [v for v in reads_of(eqns) if v in env]
            outs = function_of(jaxpr, given, eqns, made)(*_after(turns, read(given)))
            env.update(zip(made, outs, strict=True))
    return read(jaxpr.outvars), turns


def _has_loops(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop, a branch or a call with loops in it, and can be written out."""
    name = eqn.primitive.name
    is_known = name in (*_LOOPS, "cond", *_CALLS) or is_plain_call(eqn)
    parts = (each for part in programs_in(eqn) for each in equations_in(part))
    return is_known and (name in _LOOPS or any(each.primitive.name in _LOOPS for each in parts))


def _run_loops(eqn: JaxprEqn, values: Leaves, turns: jax.Array) -> tuple[Leaves, jax.Array]:
    """As `_run`, of an equation with loops, which needs the turns of the one before."""
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            given, carry, xs = parts_of_scan(eqn, values)

            def step(state, x):
                turns, carry = state
                outs, turns = _run(params["jaxpr"], [*given, *carry, *x], turns)
                carry, y = cut(outs, len(carry))
                return (turns | 1, carry), y

            how = {name: params[name] for name in ("length", "reverse", "unroll")}
            (turns, carry), ys = lax.scan(step, (turns, carry), xs, **how)
            return [*carry, *ys], turns
        case "while":
            sizes = params["cond_nconsts"], params["body_nconsts"]
            of_condition, given, carry = cut(values, *sizes)
            goes_on = jaxpr_as_fun(params["cond_jaxpr"])

            def turn(state):
                turns, carry = state
                carry, turns = _run(params["body_jaxpr"], [*given, *carry], turns)
                return turns | 1, carry

            turns, carry = lax.while_loop(
                lambda state: goes_on(*of_condition, *state[1])[0], turn, (turns, carry)
            )
            return carry, turns
        case "cond":
            number, *operands = values
            branches = [
                lambda *args, p=part: _run(p, [*args[:-1]], args[-1]) for part in params["branches"]
            ]
            return lax.switch(number, branches, *operands, turns)
    [program] = (part for part in params.values() if isinstance(part, ClosedJaxpr | Jaxpr))
    return _run(program, values, turns)
