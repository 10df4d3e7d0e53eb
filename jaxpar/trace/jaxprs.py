"""Parts of traced programs: needed equations, dependencies, and a part alone."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpar.base.jax_private import NamedAxisEffect
from jaxpar.base.types import ArrayLike, Arrays, Atom, Function, Value

Item = TypeVar("Item")
Equations = Sequence[JaxprEqn]
Condition = Callable[[JaxprEqn], bool]

# Done again, where that keeps less.
CHEAP = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "convert_element_type", "copy", "eq", "expand_dims",
    "ge", "gt", "integer_pow", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or",
    "pcast", "pvary", "reshape", "reshard", "select_n", "sign", "square", "squeeze", "stop_gradient", "sub",
}  # fmt: skip


def parts_of_program(program: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, Sequence[ArrayLike]]:
    """The program alone, and the constants that come with it."""
    is_closed = isinstance(program, ClosedJaxpr)
    return (program.jaxpr, program.consts) if is_closed else (program, ())


def programs_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs of a loop, a conditional or a call."""
    return [
        part.jaxpr if isinstance(part, ClosedJaxpr) else part
        for value in eqn.params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(part, ClosedJaxpr | Jaxpr)
    ]


def equations_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations of a program, and of those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for part in programs_in(eqn):
            yield from equations_in(part)


def repeated_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program that are within its loops and branches."""
    for eqn in jaxpr.eqns:
        inside = equations_in if eqn.primitive.name in ("scan", "while", "cond") else repeated_in
        for part in programs_in(eqn):
            yield from inside(part)


def has_effect(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than to compute its results, such as printing."""
    return any(not isinstance(each, NamedAxisEffect) for each in eqn.effects)


def made_of(jaxpr: Jaxpr, known: Iterable[Var], by: Condition = lambda eqn: True) -> set[Var]:
    """What such equations compute of known variables and constants, and of nothing else that is given."""
    known, made = {*known, *jaxpr.constvars}, set[Var]()
    for eqn in jaxpr.eqns:
        reads = [v for v in eqn.invars if isinstance(v, Var)]
        is_known = all(v in known or v in made for v in reads)
        if reads and is_known and not has_effect(eqn) and by(eqn):
            made |= {*eqn.outvars}
    return made


def aval_of(v: Atom | jax.Array) -> ShapedArray:
    """The shape, dtype and axes of a variable, a literal or an array."""
    return v.aval  # pyright: ignore[reportReturnType]  # nothing else is in these programs


def is_float(a: Value) -> bool:
    """Whether an array, its shape, or a variable of a program has a gradient."""
    return jnp.issubdtype(getattr(a, "aval", a).dtype, jnp.inexact)


def varying_of(v: Atom) -> frozenset[str]:
    """The axes of a `shard_map` that a variable is typed as differing over."""
    return aval_of(v).manual_axis_type.varying


def made_with(jaxpr: Jaxpr, given: Iterable[Var]) -> set[Var]:
    """These variables and all that depends on them, or has an effect."""
    found = {*given}
    for eqn in jaxpr.eqns:
        if has_effect(eqn) or any(v in found for v in eqn.invars if isinstance(v, Var)):
            found |= {*eqn.outvars}
    return found


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a program with its own arguments."""
    return eqn.primitive.name in ("jit", "pjit", "checkpoint", "remat2")


def is_plain_call(eqn: JaxprEqn) -> bool:
    """Whether it is a function that was jitted without shardings."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    unspecified = all(type(each).__name__ == "UnspecifiedValue" for each in shardings)
    return eqn.primitive.name in ("jit", "pjit") and unspecified


def inlined(closed: ClosedJaxpr, calls: Condition = is_plain_call) -> ClosedJaxpr:
    """The same program with the programs of such equations written out."""
    jaxpr, eqns = closed.jaxpr, list[JaxprEqn]()
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def add(part: Jaxpr, names: dict[Var, Atom], caller: JaxprEqn | None) -> list[Atom]:
        def named(atoms):
            return [names.get(v, v) if isinstance(v, Var) else v for v in atoms]

        for eqn in part.eqns:
            info = eqn.source_info
            if caller is not None:
                stack = caller.source_info.name_stack + info.name_stack
                info = info.replace(name_stack=stack)
            reads = named(eqn.invars)
            if not calls(eqn):
                # What is called twice makes other variables each time.
                makes = eqn.outvars if caller is None else [type(v)(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=reads, outvars=makes, source_info=info))
            else:
                [called] = programs_in(eqn)
                values = getattr(eqn.params["jaxpr"], "consts", ())
                consts.update(zip(called.constvars, values, strict=True))
                own = dict(zip(called.invars, reads, strict=True))
                makes = add(called, own, eqn.replace(source_info=info))
            names.update(zip(eqn.outvars, makes, strict=True))
        return named(part.outvars)

    outvars = add(jaxpr, {}, None)
    program = program_of(jaxpr, jaxpr.invars, eqns, outvars).replace(constvars=[*consts])
    return ClosedJaxpr(program, [*consts.values()])


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether an equation is simple arithmetic, element by element, on arrays no larger than its result."""
    largest = max((math.prod(aval_of(v).shape) for v in eqn.invars), default=0)
    outs = [math.prod(aval_of(v).shape) for v in eqn.outvars]
    return eqn.primitive.name in CHEAP and len(outs) == 1 and outs[0] >= largest


def equations_for(
    eqns: Equations, outs: Sequence[Atom], there: Set[Var] = frozenset(), *, effects: bool = False
) -> list[JaxprEqn]:
    """Those of the equations that outputs need, in order, but for those whose results are there.

    Args:
      effects: with those that have an effect, such as printing.
    """
    want, found = {v for v in outs if isinstance(v, Var)} - there, []
    for eqn in reversed(eqns):
        if any(v in want for v in eqn.outvars) or (effects and has_effect(eqn)):
            found.append(eqn)
            want |= {v for v in eqn.invars if isinstance(v, Var)} - there
    return found[::-1]


def reads_of(eqns: Equations, outs: Sequence[Atom] = ()) -> dict[Var, None]:
    """All that equations read, and outputs, in order."""
    reads = (v for eqn in eqns for v in eqn.invars)
    return dict.fromkeys(v for v in (*reads, *outs) if isinstance(v, Var))


def program_of(
    jaxpr: Jaxpr, invars: Sequence[Var], eqns: Equations, outvars: Sequence[Atom]
) -> Jaxpr:
    """Some equations of a program, with inputs and outputs of their own."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(invars=[*invars], eqns=[*eqns], outvars=[*outvars], debug_info=debug_info)


def function_of(
    jaxpr: Jaxpr,
    invars: Sequence[Var],
    eqns: Equations,
    outvars: Sequence[Atom],
    consts: Arrays = (),
) -> Callable[..., list[jax.Array]]:
    """The same as a function of arrays.

    Args:
      consts: of the whole program; none if these equations read none.
    """
    program = program_of(jaxpr, invars, eqns, outvars)
    if not consts:
        program = program.replace(constvars=[])
    return jaxpr_as_fun(ClosedJaxpr(program, consts))


def pruned(function: Function, *args: Arrays) -> Callable[..., list[jax.Array]]:
    """A function of arrays like these, as a list of arrays, without all that its results don't need.

    Calls and loops are looked into; what has an effect, such as printing, is left out.
    """
    whole = inlined(jax.make_jaxpr(function)(*args), is_call)
    jaxpr, _ = dce_jaxpr(whole.jaxpr, [True] * len(whole.jaxpr.outvars), instantiate=True)
    eqns = equations_for(jaxpr.eqns, jaxpr.outvars)
    return function_of(jaxpr, jaxpr.invars, eqns, jaxpr.outvars, whole.consts)


def cut(values: Sequence[Item], *sizes: int) -> list[list[Item]]:
    """Values in parts of these sizes, and a last one of what is left."""
    ends = 0, *itertools.accumulate(sizes), len(values)
    return [[*values[start:end]] for start, end in itertools.pairwise(ends)]
