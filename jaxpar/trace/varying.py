"""Runs a traced program inside a `shard_map` with all values typed as differing over the same axes.

JAX's types say over which axes of a mesh an array differs between devices. The carry of a loop and the
outputs of branches may not change their type. Code that does not know of meshes, such as `nnx.RNN`,
`optax.ctc_loss` or a `lax.scan` that begins with `jnp.zeros`, breaks that rule. Such code is traced without
these types. The traced program is then run equation by equation, and each result is cast. `RULES` says how:
loops, branches, calls and functions with custom derivatives are built again from programs that run this way.
Outside of a `shard_map` nothing is cast.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.base.trees import vary_over
from jaxpar.base.types import Arrays, Atom, Cotangents, Function, Leaves, Tree, Value
from jaxpar.trace.jaxprs import aval_of, cut, is_float

RunProgram: TypeAlias = Callable[..., Leaves]
"""(program, *its arguments) -> its outputs, with the same axes and rules."""
Rule: TypeAlias = Callable[[JaxprEqn, Leaves, RunProgram], Sequence[jax.Array]]
"""(equation, values that it reads, a function that runs its programs) -> its outputs."""

_MISMATCH = "manual axis types do not match"  # how JAX reports a loop or branch that changes a type


def accepts_constants(function: Function) -> Function:
    """The same function of trees, whose loops may begin with constants and whose branches may return some.

    It runs as it is, unless JAX says that a loop or branch of it changes a type.
    """

    @functools.wraps(function)
    def run_either(*args: Arrays) -> Arrays:
        try:
            return function(*args)
        except TypeError as error:
            if _MISMATCH not in str(error):
                raise
        return all_varying(function)(*args)

    return run_either


def all_varying(function: Function) -> Function:
    """The same function of trees, with all values typed as differing over the axes of any argument.

    It may not read traced arrays that are not arguments.
    """
    return functools.partial(_retraced, function, run)


def _retraced(
    function: Function, run_traced: Callable[[ClosedJaxpr, Leaves], Leaves], *args: Arrays
) -> Arrays:
    """What a function returns, by its program. Leaves that are not arrays are fixed."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {n: jnp.asarray(leaf) for n, leaf in enumerate(leaves) if _is_array(leaf)}

    def of_arrays(*values: jax.Array) -> Arrays:
        given = dict(zip(arrays, values, strict=True))
        return function(*tree.unflatten(given.get(n, leaf) for n, leaf in enumerate(leaves)))

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays.values()]
    closed, out = jax.make_jaxpr(of_arrays, return_shape=True)(*shapes)
    return jax.tree.unflatten(jax.tree.structure(out), run_traced(closed, [*arrays.values()]))


def _is_array(leaf: Value) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def run(
    closed: ClosedJaxpr, args: Sequence[jax.Array], rules: Mapping[str, Rule] | None = None
) -> Leaves:
    """The outputs of a traced program, typed as differing over all axes that an argument differs over.

    Args:
      rules: by the name of a primitive, in place of those in `RULES` or in addition; also in programs within
        the program.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in args))
    table = RULES | dict(rules or {})

    def cast(a: Value) -> jax.Array:
        return vary_over(jnp.asarray(a), axes)

    def run_program(program: ClosedJaxpr | Jaxpr, *args: jax.Array) -> Leaves:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        consts = program.consts if isinstance(program, ClosedJaxpr) else ()
        names = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(names, map(cast, (*consts, *args)), strict=True))

        def read(v: Atom) -> jax.Array:
            return (
                cast(jnp.asarray(v.val, aval_of(v).dtype)) if isinstance(v, Literal) else values[v]
            )

        for eqn in jaxpr.eqns:
            rule = table.get(eqn.primitive.name, _bind)
            scope = str(eqn.source_info.name_stack)
            with jax.named_scope(scope) if scope else contextlib.nullcontext():
                outs = rule(eqn, [*map(read, eqn.invars)], run_program)
                values.update(zip(eqn.outvars, map(cast, outs), strict=True))
        return [*map(read, jaxpr.outvars)]

    return run_program(closed, *args)


def _bind(eqn: JaxprEqn, values: Leaves, run_program: RunProgram | None = None) -> Leaves:
    """The rule of an equation that runs as it is."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def call(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    """The rule of a plain call: its program, written out."""
    return run_program(_program(eqn), *values)


def _program(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    [program] = (v for v in eqn.params.values() if isinstance(v, ClosedJaxpr | Jaxpr))
    return program


def _remat(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(functools.partial(run_program, _program(eqn)), **options)(*values)


def parts_of_scan(eqn: JaxprEqn, values: Sequence[Value]) -> list[list[Value]]:
    """The constants of a scan, its first carry and its xs, of what it reads."""
    jaxpr = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    # JAX 0.12 has no numbers of these. In xs and ys there is a dim of time, which the body's do not have.
    pairs = zip(eqn.invars, jaxpr.invars, strict=True)
    num_xs = sum(aval_of(v).ndim != aval_of(own).ndim for v, own in pairs)
    pairs = zip(eqn.outvars, jaxpr.outvars, strict=True)
    num_carry = sum(aval_of(v).ndim == aval_of(own).ndim for v, own in pairs)
    return cut(values, len(values) - num_xs - num_carry, num_carry)


def _scan(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    consts, start, xs = parts_of_scan(eqn, values)

    def step(carry: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
        after, y = cut(run_program(_program(eqn), *consts, *carry, *x), len(start))
        return after, y

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, start, xs, **options)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    sizes = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, start = cut(values, *sizes)
    return lax.while_loop(
        lambda carry: run_program(eqn.params["cond_jaxpr"], *of_cond, *carry)[0],
        lambda carry: run_program(eqn.params["body_jaxpr"], *of_body, *carry),
        start,
    )


def _cond(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    index, *operands = values
    branches = [functools.partial(run_program, branch) for branch in eqn.params["branches"]]
    return lax.switch(index, branches, *operands)


def _custom_jvp(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    function = jax.custom_jvp(functools.partial(run_program, eqn.params["call_jaxpr"]))

    def derivative(primals: Leaves, tangents: Leaves) -> tuple[Leaves, Leaves]:
        return jax.jvp(lambda *args: _bind(eqn, [*args]), primals, tangents)

    function.defjvp(functools.partial(_retraced, derivative, _traced_by(run_program)))
    return function(*values)


def _traced_by(run_program: RunProgram) -> Callable[[ClosedJaxpr, Leaves], Leaves]:
    return lambda closed, args: run_program(closed, *args)


def _custom_vjp(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    function = jax.custom_vjp(functools.partial(run_program, eqn.params["call_jaxpr"]))
    # What the function closes over comes first, and has no gradient.
    given = [n for n, a in enumerate(values) if n >= eqn.params["num_consts"] and is_float(a)]
    made = [n for n, v in enumerate(eqn.outvars) if is_float(v)]
    backward_tree: list[Tree] = []

    def run_forward(args: Leaves) -> tuple[Leaves, Leaves]:
        def of_floats(*floats: jax.Array) -> tuple[Leaves, Leaves]:
            known = dict(zip(given, floats, strict=True))
            outs = _bind(eqn, [known.get(n, a) for n, a in enumerate(args)])
            return [outs[n] for n in made], outs

        _, vjp, outs = jax.vjp(of_floats, *(args[n] for n in given), has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        backward_tree[:] = [tree]
        return outs, leaves

    def run_backward(leaves: Leaves, d_outs: Cotangents) -> Cotangents:
        return jax.tree.unflatten(backward_tree[0], leaves)(d_outs)

    by_program = _traced_by(run_program)

    def forward(*args: jax.Array) -> Tree:
        return _retraced(run_forward, by_program, [*args])

    def backward(leaves: Leaves, d_outs: Cotangents) -> Cotangents:
        d_floats = _retraced(run_backward, by_program, leaves, [d_outs[n] for n in made])
        known = dict(zip(given, d_floats, strict=True))
        return tuple(known.get(n) for n in range(len(values)))

    function.defvjp(forward, backward)
    return function(*values)


RULES: dict[str, Rule] = {
    "closed_call": call,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "eval_jaxpr": call,
    "jit": call,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
}
