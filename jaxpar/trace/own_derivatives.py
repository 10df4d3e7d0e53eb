"""Functions with a derivative of their own: `jax.custom_vjp`, `jax.custom_jvp`, `linear_call`."""

import functools
import types
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.linear_util import WrappedFun

from jaxpar.base.types import Cotangents, Leaves, Value
from jaxpar.trace.jaxprs import aval_of, is_float


class OwnDerivative(NamedTuple):
    """The parameters of a primitive that calls a function with a derivative of its own.

    Attributes:
      fixed: the numbers of operands at the front that have no gradient.
      program: what computes the function.
      rules: what JAX calls for the derivative.
    """

    fixed: tuple[str, ...]
    program: str
    rules: tuple[str, ...]


OWN_DERIVATIVES = {
    "custom_jvp_call": OwnDerivative(("num_consts",), "call_jaxpr", ("jvp_jaxpr_fun",)),
    "custom_vjp_call": OwnDerivative(
        ("num_consts",), "call_jaxpr", ("fwd_jaxpr_thunk", "bwd", "out_trees")
    ),
    "linear_call": OwnDerivative(("num_callee_consts", "num_res"), "callee", ("transpose_thunk",)),
}


def operands_with_gradient(eqn: JaxprEqn) -> list[int]:
    """The numbers of the operands of such an equation that have a gradient."""
    own = OWN_DERIVATIVES[eqn.primitive.name]
    num_fixed = sum(eqn.params[name] for name in own.fixed)
    return [n for n, v in enumerate(eqn.invars) if n >= num_fixed and is_float(v)]


def results_with_gradient(eqn: JaxprEqn) -> list[int]:
    """The numbers of the results that have a gradient."""
    return [n for n, v in enumerate(eqn.outvars) if is_float(v)]


def gradient_of(eqn: JaxprEqn) -> ClosedJaxpr:
    """The program of what such an equation gives, and of the gradients of its operands.

    It takes all operands, and then the gradients of the results.
    """
    avals = [*map(aval_of, eqn.invars)]
    floats, results = operands_with_gradient(eqn), results_with_gradient(eqn)

    def gradients(operands: Leaves, d_results: Cotangents) -> tuple[Leaves, Leaves]:
        def run(*values: jax.Array) -> tuple[Leaves, Leaves]:
            known = dict(zip(floats, values, strict=True))
            given = [known.get(n, a) for n, a in enumerate(operands)]
            outs = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
            return [outs[n] for n in results], outs

        _, vjp, outs = jax.vjp(run, *(operands[n] for n in floats), has_aux=True)
        return outs, [*vjp(d_results)]

    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    d_results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(aval_of, eqn.outvars)]
    return jax.make_jaxpr(gradients)(operands, [d_results[n] for n in results])


def files_of_rules(eqn: JaxprEqn) -> set[str]:
    """The source files of the functions that make the derivative of such an equation."""
    files, seen = set[str](), set[int]()

    def look(value: Value) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            files.add(value.__code__.co_filename)
            for cell in value.__closure__ or ():
                try:
                    look(cell.cell_contents)
                except ValueError:  # an empty cell
                    continue
        elif isinstance(value, types.MethodType):
            look(value.__func__)
        elif isinstance(value, functools.partial):
            look((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, WrappedFun):
            look((value.f, value.transforms))
        elif isinstance(value, tuple | list):
            for part in value:
                look(part)

    for name in OWN_DERIVATIVES[eqn.primitive.name].rules:
        look(eqn.params[name])
    return files
