"""What stands in traced programs, and which programs are compiled."""

import contextlib
import math

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def programs_in(equation):
    """The programs of a loop, a conditional or a call."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, Jaxpr):
                found.append(part)
    return found


def equations_in(program):
    """All equations of a program, and of those within it."""
    for equation in program.eqns:
        yield equation
        for part in programs_in(equation):
            yield from equations_in(part)


def flops_of(program):
    """Of all matrix products, also of those in loops of a known length."""
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            [product] = equation.outvars
            total += 2 * product.aval.size * math.prod(shape[dim] for dim in contracted)
        turns = equation.params.get("length", 1)
        total += turns * sum(map(flops_of, programs_in(equation)))
    return total


@contextlib.contextmanager
def compiled():
    """The names of programs that are compiled meanwhile: a list that grows."""
    events = []

    def note(name, *_, fun_name="", **__):
        if name == "/jax/core/compile/backend_compile_duration":
            events.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
