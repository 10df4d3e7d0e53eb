"""Parts of traced programs: which equations a result needs, what is computed of what, a part by itself."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from jax.extend.core import Jaxpr, Var


def made_of(jaxpr: Jaxpr, known: Iterable[Var]) -> set[Var]:
    """What is computed of known variables and constants, and of nothing else that is given."""
    known, made = {*known, *jaxpr.constvars}, set[Var]()
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if isinstance(v, Var)]
        if reads and not eqn.effects and all(v in known or v in made for v in reads):
            made |= {*eqn.outvars}
    return made


def made_with(jaxpr: Jaxpr, given: Iterable[Var]) -> set[Var]:
    """These variables and all that depends on them, or has an effect."""
    found = {*given}
    for eqn in jaxpr.eqns:
        if eqn.effects or any(v in found for v in eqn.invars if isinstance(v, Var)):
            found |= {*eqn.outvars}
    return found


def equations_for(
    eqns: Sequence[Any], outs: Sequence[Any], there: Set[Var] = frozenset()
) -> list[Any]:
    """Those of the equations that outputs need, in order, but for those whose results are there."""
    want, found = {v for v in outs if isinstance(v, Var)} - there, []
    for eqn in reversed(eqns):
        if any(v in want for v in eqn.outvars):
            found.append(eqn)
            want |= {v for v in eqn.invars if isinstance(v, Var)} - there
    return found[::-1]


def reads_of(eqns: Sequence[Any], outs: Sequence[Any] = ()) -> dict[Var, None]:
    """All that equations read, and outputs, in order."""
    reads = (v for eqn in eqns for v in eqn.invars)
    return dict.fromkeys(v for v in (*reads, *outs) if isinstance(v, Var))


def program_of(
    jaxpr: Jaxpr, invars: Sequence[Var], eqns: Sequence[Any], outvars: Sequence[Any]
) -> Jaxpr:
    """Some equations of a program, with inputs and outputs of their own."""
    return jaxpr.replace(
        invars=list(invars),
        eqns=list(eqns),
        outvars=list(outvars),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
