"""Runs a traced program inside a `shard_map`; its loops may begin with constants.

JAX's types say over which axes of a mesh an array differs between devices. The carry of a loop and the
outputs of branches may not change their type. Code that does not know of meshes, such as `nnx.RNN`,
`optax.ctc_loss` or a `lax.scan` that begins with `jnp.zeros`, breaks that rule. Such code is traced without
these types. The traced program is then run equation by equation. Where arrays of different types meet, they
are cast to the same type. `RULES` says how: loops, branches, calls and functions with custom derivatives are
built again from programs that run this way. Outside of a `shard_map` nothing is cast.

JAX's own derivatives may break the rule as well: that of `erf` multiplies by constants. Where one does, the
derivative of that operation is traced without types and run in the same way. Which do is found by trying.
"""

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import DATA, MESH_AXES
from jaxpar.base.trees import vary_like, vary_over
from jaxpar.base.types import Arrays, Atom, Cotangents, Function, Leaves, Tree, Value
from jaxpar.trace.jaxprs import aval_of, cut, equations_in, is_float

RunProgram: TypeAlias = Callable[..., Leaves]
"""(program, *its arguments) -> its outputs, by the same rules."""
Rule: TypeAlias = Callable[[JaxprEqn, Leaves, RunProgram], Sequence[jax.Array]]
"""(equation, values that it reads, a function that runs its programs) -> its outputs."""

_COLLECTIVES = os.path.join("jax", "_src", "lax", "parallel.py")
# How JAX reports arrays of different types: in a loop or branch, in an operation, and in `jax.random.gamma`.
_MISMATCHES = (
    "manual axis types do not match",
    "requires varying manual axes to match",
    "requires all arguments to have matching type",
)


# How JAX reports a kernel of Pallas whose outputs have no type.
_NO_TYPE = "on `jax.ShapeDtypeStruct` must not be `None`"


def is_mismatch(error: Exception) -> bool:
    """Whether JAX says that arrays, or the states of a loop, differ over other axes of a mesh."""
    return any(text in str(error) for text in _MISMATCHES)


class _NeedsTypesError(Exception):
    pass


def on_any_mesh(what: str, function: Function, *, casts_derivatives: bool = False) -> Function:
    """A part of a model as a function of trees for a `shard_map`: loops of it may begin with constants.

    It runs as it is, unless JAX says that types do not match. It may not read traced arrays that are not
    arguments.

    Args:
      what: the part, for messages.
      casts_derivatives: for a part whose derivative JAX cannot trace here: it never runs as it is. JAX may
        trace the derivative after the call, as that of a loop over layers. Then the call sees no error.
    Raises:
      ValueError: when called: types do not match in any way that it can be run; a kernel of Pallas does not
        say the type of its outputs; or a collective is over an axis of `jax.vmap`, for which JAX has no such
        types.
    """
    traced = functools.partial(_run_traced, function)
    typed = functools.partial(traced, casts_derivatives=True, keeps_types=True)
    untyped = functools.partial(traced, casts_derivatives=True)
    ways: list[Function] = [function, traced, typed, untyped]
    if casts_derivatives:
        # Types last: JAX says only later that they do not match in a custom derivative.
        ways = [untyped, typed]

    def run_on_mesh(*args: Arrays) -> Arrays:
        with _without_vmap_axes(what):
            mismatch = Exception()
            for way in ways:
                try:
                    return way(*args)
                except _NeedsTypesError:
                    continue
                except (TypeError, ValueError) as error:
                    if _NO_TYPE in str(error):
                        raise _untyped_kernel(what).with_traceback(error.__traceback__) from None
                    if not is_mismatch(error):
                        raise
                    mismatch = error
            raise ValueError(_mixes(what, mismatch)).with_traceback(mismatch.__traceback__)

    return run_on_mesh


def _run_traced(
    function: Function,
    *args: Arrays,
    casts_derivatives: bool = False,
    keeps_types: bool = False,
) -> Arrays:
    """What a function returns, by its program.

    Raises:
      _NeedsTypesError: without types: its program has collectives over a task's own axes.
    """

    def run_program(closed: ClosedJaxpr, args: Leaves) -> Leaves:
        if not keeps_types and any(map(_own_axes, equations_in(closed.jaxpr))):
            raise _NeedsTypesError
        return run(closed, args, _casting() if casts_derivatives else None)

    return retraced(function, run_program, *args, keeps_types=keeps_types)


def _own_axes(eqn: JaxprEqn) -> set[str]:
    """The axes of a collective that are none of jaxpar's."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = named if isinstance(named, tuple) else (named,)
    return {axis for axis in axes if isinstance(axis, str)} - {*MESH_AXES}


def _mixes(what: str, mismatch: Exception) -> str:
    where = "a loop or a branch" if _MISMATCHES[0] in str(mismatch) else "an operation"
    return (
        f"{what} has {where} that mixes constants with arrays that differ between devices\n"
        f"Fix: create these constants from an array that the layer receives, such as jnp.zeros_like(x[0])."
    )


def _untyped_kernel(what: str) -> ValueError:
    return ValueError(
        f"{what} calls a Pallas kernel that does not say over which axes of the mesh its outputs differ\n"
        f"Fix: in its out_shape, use jax.ShapeDtypeStruct(shape, dtype, "
        f"manual_axis_type=jax.typeof(x).manual_axis_type), where x is an input."
    )


@contextlib.contextmanager
def _without_vmap_axes(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if error.args or not any(f.filename.endswith(_COLLECTIVES) for f in frames):
            raise
        refused = ValueError(
            f"{what} has a collective over an axis of jax.vmap, which JAX does not take on a mesh\n"
            f"Fix: compute it over the dim itself, such as x.mean(axis, keepdims=True)."
        )
        raise refused.with_traceback(error.__traceback__) from None


def check_on_mesh(what: str, function: Function, *args: Arrays) -> None:
    """Traces a part of a model inside a `shard_map`, as one whose arguments differ over `data`.

    Raises:
      ValueError: as of `on_any_mesh`.
    """

    def traced(*args: Arrays) -> tuple[()]:
        varying = jax.tree.map(lambda a: vary_over(a, frozenset([DATA])), args)
        on_any_mesh(what, function)(*varying)
        return ()

    specs = {"in_specs": P(), "out_specs": P(), "axis_names": {DATA}}
    jax.eval_shape(jax.shard_map(traced, mesh=AbstractMesh((1,), (DATA,)), **specs), *args)


def retraced(
    function: Function,
    run_traced: Callable[[ClosedJaxpr, Leaves], Leaves],
    *args: Arrays,
    keeps_types: bool = False,
) -> Arrays:
    """What a function returns, by its program. Leaves that are not arrays are fixed.

    Args:
      run_traced: runs the program: (program, arrays) -> its outputs.
      keeps_types: whether it is traced with the types of its arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    arrays = {n: jnp.asarray(leaf) for n, leaf in enumerate(leaves) if _is_array(leaf)}

    def of_arrays(*values: jax.Array) -> Arrays:
        given = dict(zip(arrays, values, strict=True))
        return function(*tree.unflatten(given.get(n, leaf) for n, leaf in enumerate(leaves)))

    shapes = [*arrays.values()]
    if not keeps_types:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes]
    closed, out = jax.make_jaxpr(of_arrays, return_shape=True)(*shapes)
    return jax.tree.unflatten(jax.tree.structure(out), run_traced(closed, [*arrays.values()]))


def _is_array(leaf: Value) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def run(
    closed: ClosedJaxpr, args: Sequence[jax.Array], rules: Mapping[str, Rule] | None = None
) -> Leaves:
    """The outputs of a traced program for arguments that may differ between devices.

    Args:
      rules: by the name of a primitive, in place of those in `RULES` or in addition; also in programs within
        the program. That of `OTHERS` is for all that have none.
    """
    table = RULES | dict(rules or {})
    otherwise = table.get(OTHERS, _as_it_is)

    def run_program(program: ClosedJaxpr | Jaxpr, *args: jax.Array) -> Leaves:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        consts = program.consts if isinstance(program, ClosedJaxpr) else ()
        names = (*jaxpr.constvars, *jaxpr.invars)
        values = dict(zip(names, map(jnp.asarray, (*consts, *args)), strict=True))

        def read(v: Atom) -> jax.Array:
            return jnp.asarray(v.val, aval_of(v).dtype) if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            rule = table.get(eqn.primitive.name, otherwise)
            scope = str(eqn.source_info.name_stack)
            with jax.named_scope(scope) if scope else contextlib.nullcontext():
                outs = rule(eqn, [*map(read, eqn.invars)], run_program)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [*map(read, jaxpr.outvars)]

    return run_program(closed, *args)


def _as_it_is(eqn: JaxprEqn, values: Leaves, _run_program: RunProgram) -> Leaves:
    return _bind(eqn, vary_like(values, values))


def _casting() -> dict[str, Rule]:
    """Rules for a program whose derivatives are cast, too."""
    known = dict[Any, bool]()  # of operations that are the same but for their values

    def is_typed(eqn: JaxprEqn, values: Leaves) -> bool:
        about = eqn.primitive, tuple(eqn.params.items()), tuple(map(jax.typeof, values))
        if about not in known:
            known[about] = _has_typed_derivative(eqn, values)
        return known[about]

    def run_eqn(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
        values = vary_like(values, values)
        if is_typed(eqn, values):
            return _bind(eqn, values)
        return _with_cast_derivative(eqn, values, run_program)

    return {OTHERS: run_eqn}


def _has_typed_derivative(eqn: JaxprEqn, values: Leaves) -> bool:
    """Whether JAX can differentiate an operation here; True if it has no derivative anywhere."""
    floats = [n for n, v in enumerate(eqn.invars) if is_float(v)]

    def differentiate(moving: Sequence[int]) -> Arrays:
        run = _of_some(eqn, values, moving)
        outs, vjp = jax.vjp(run, *(values[n] for n in moving))
        return vjp([jnp.zeros_like(a) for a in outs])

    # JAX may have no derivative by one of them, such as the first value of a reduction: also try each alone.
    for moving in (floats, *([n] for n in floats)):
        try:
            jax.eval_shape(functools.partial(differentiate, moving))
            return True
        except Exception as error:  # whatever JAX's rule raises, such as NotImplementedError
            if is_mismatch(error):
                return False
    return True


def _of_some(eqn: JaxprEqn, values: Leaves, moving: Sequence[int]) -> Function:
    """An operation as a function of some of its values, for the floats that it returns."""

    def run(*given: jax.Array) -> Leaves:
        known = dict(zip(moving, given, strict=True))
        outs = _bind(eqn, [known.get(n, a) for n, a in enumerate(values)])
        return [a for a in outs if is_float(a)]

    return run


def _bind(eqn: JaxprEqn, values: Leaves) -> Leaves:
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _pvary(eqn: JaxprEqn, values: Leaves, _run_program: RunProgram) -> Leaves:
    return [vary_over(a, frozenset(eqn.params["axes"])) for a in values]


def call(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    """The rule of a plain call: its program, written out."""
    return run_program(_program(eqn), *values)


def _program(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr:
    [program] = (v for v in eqn.params.values() if isinstance(v, ClosedJaxpr | Jaxpr))
    return program


def _remat(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    options = {name: eqn.params[name] for name in ("policy", "prevent_cse")}
    return jax.checkpoint(functools.partial(run_program, _program(eqn)), **options)(*values)


def _linear_call(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    sizes = eqn.params["num_callee_consts"], eqn.params["num_res"]
    consts, residuals, linear = cut(vary_like(values, values), *sizes)
    transpose, consts_of_transpose = eqn.params["transpose_thunk"]()

    def forward(given: tuple[Leaves, Leaves], linear: Leaves) -> Leaves:
        return vary_like(run_program(eqn.params["callee"], *given[0], *given[1], *linear), values)

    def backward(given: tuple[Leaves, Leaves], d_outs: Leaves) -> Leaves:
        return vary_like(run_program(transpose, *consts_of_transpose, *given[1], *d_outs), values)

    return linear_call(forward, backward, (consts, residuals), linear)


def _linear_solve(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    *consts, b = cut(vary_like(values, values), *lengths)
    of_matvec, _, of_solve, of_transpose = consts

    def product(b: Leaves) -> Leaves:
        return vary_like(run_program(programs.matvec, *of_matvec, *b), values)

    num_others = len(eqn.outvars) - len(b)  # what the solver tells besides the solution

    def solver(program: ClosedJaxpr | Jaxpr, consts: Leaves) -> Function:
        def solve(_: Function, b: Leaves) -> Leaves | tuple[Leaves, Leaves]:
            found, others = cut(vary_like(run_program(program, *consts, *b), values), len(b))
            return (found, others) if num_others else found

        return solve

    can_transpose = programs.transpose_solve is not None
    transpose = solver(programs.transpose_solve, of_transpose) if can_transpose else None
    solve = solver(programs.solve, of_solve)
    found = lax.custom_linear_solve(product, b, solve, transpose, has_aux=num_others > 0)
    return [*found[0], *found[1]] if num_others else found


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
        return vary_like(after, values), y

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, vary_like(start, values), xs, **options)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    sizes = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    of_cond, of_body, start = cut(values, *sizes)

    def goes_on(carry: Leaves) -> jax.Array:  # of several loops that `jax.vmap` runs as one, each
        return run_program(eqn.params["cond_jaxpr"], *of_cond, *carry)[0]

    def step(carry: Leaves) -> Leaves:
        after, runs = run_program(eqn.params["body_jaxpr"], *of_body, *carry), goes_on(carry)
        if runs.ndim:
            shapes = ((*runs.shape, *[1] * (a.ndim - runs.ndim)) for a in after)
            after = [
                jnp.where(runs.reshape(shape), *each)
                for shape, *each in zip(shapes, after, carry, strict=True)
            ]
        return vary_like(after, values)

    return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step, vary_like(start, values))


def _cond(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    index, *operands = values

    def branch(program: ClosedJaxpr, *operands: jax.Array) -> Leaves:
        return vary_like(run_program(program, *operands), values)

    branches = [functools.partial(branch, program) for program in eqn.params["branches"]]
    return lax.switch(index, branches, *operands)


class _Custom:
    """A function with a custom derivative, which is traced without types as well; of floats alone.

    Or an operation, with its own derivative.

    Attributes:
      given, made: the numbers of what it reads and returns that has a gradient. What a function closes over
        comes first, and has none.
    """

    def __init__(self, eqn: JaxprEqn, values: Leaves, run_program: RunProgram):
        self.eqn, self._run_program = eqn, run_program
        # Not the values: JAX keeps the functions of a derivative, and they would keep the trace.
        types = map(jax.typeof, values)
        self._axes = frozenset[str]().union(*(own.manual_axis_type.varying for own in types))
        floats = (n for n, v in enumerate(eqn.invars) if is_float(v))
        self.given = [n for n in floats if n >= eqn.params.get("num_consts", 0)]
        self.made = [n for n, v in enumerate(eqn.outvars) if is_float(v)]

    def run(self, *args: jax.Array) -> Leaves:
        """All that it returns, without its derivative."""
        if "call_jaxpr" not in self.eqn.params:
            return _bind(self.eqn, self._varying(args))
        return self._varying(self._run_program(self.eqn.params["call_jaxpr"], *args))

    def floats(self, *args: jax.Array) -> Leaves:
        """What it returns that has a gradient."""
        outs = self.run(*args)
        return [outs[n] for n in self.made]

    def of_floats(self, args: Leaves) -> tuple[Function, Leaves]:
        """The same as JAX differentiates it: a function of what has a gradient, and that."""
        return _of_some(self.eqn, args, self.given), [args[n] for n in self.given]

    def retraced(self, function: Function, *args: Arrays) -> Arrays:
        """What a function of its derivative returns."""
        outs = retraced(function, lambda closed, given: self._run_program(closed, *given), *args)
        return self._varying(outs)

    def call(self, function: Function, values: Leaves) -> Leaves:
        """All that it returns, with the derivative that a function of the same has."""
        args = self._varying(values)
        floats = dict(zip(self.made, function(*args), strict=True))
        if len(floats) == len(self.eqn.outvars):
            return [*floats.values()]
        return [floats.get(n, a) for n, a in enumerate(self.run(*args))]

    def _varying(self, tree: Arrays) -> Arrays:
        return jax.tree.map(lambda leaf: vary_over(leaf, self._axes), tree)


def _custom_jvp(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    custom = _Custom(eqn, values, run_program)
    function = jax.custom_jvp(custom.floats)

    def derivative(args: Leaves, d_floats: Leaves) -> tuple[Leaves, Leaves]:
        run, floats = custom.of_floats(args)
        return jax.jvp(run, floats, d_floats)

    @function.defjvp
    def rule(args: Sequence[jax.Array], d_args: Cotangents) -> tuple[Leaves, Leaves]:
        return custom.retraced(derivative, [*args], [d_args[n] for n in custom.given])

    return custom.call(function, values)


def _with_cast_derivative(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    """The rule of an operation whose derivative JAX cannot trace here."""
    custom = _Custom(eqn, values, run_program)
    function = jax.custom_jvp(custom.floats)

    def rule(args: Sequence[jax.Array], d_args: Cotangents) -> tuple[Leaves, Leaves]:
        moving = [n for n in custom.given if not isinstance(d_args[n], SymbolicZero)]

        def derivative(args: Leaves, d_moving: Leaves) -> tuple[Leaves, Leaves]:
            run = _of_some(eqn, args, moving)
            return jax.jvp(run, [args[n] for n in moving], d_moving)

        return custom.retraced(derivative, [*args], [d_args[n] for n in moving])

    function.defjvp(rule, symbolic_zeros=True)
    return custom.call(function, values)


def _custom_vjp(eqn: JaxprEqn, values: Leaves, run_program: RunProgram) -> Leaves:
    custom = _Custom(eqn, values, run_program)
    function, of_vjp = jax.custom_vjp(custom.floats), list[Tree]()
    num_values = len(values)

    def run_forward(args: Leaves) -> tuple[Leaves, Leaves]:
        run, floats = custom.of_floats(args)
        outs, vjp = jax.vjp(run, *floats)
        leaves, tree = jax.tree.flatten(vjp)
        of_vjp[:] = [tree]
        return outs, leaves

    def run_backward(leaves: Leaves, d_outs: Cotangents) -> Cotangents:
        return jax.tree.unflatten(of_vjp[0], leaves)(d_outs)

    def forward(*args: jax.Array) -> tuple[Leaves, Leaves]:
        return custom.retraced(run_forward, [*args])

    def backward(leaves: Leaves, d_outs: Cotangents) -> Cotangents:
        d_floats = custom.retraced(run_backward, leaves, d_outs)
        known = dict(zip(custom.given, d_floats, strict=True))
        return tuple(known.get(n) for n in range(num_values))

    function.defvjp(forward, backward)
    return custom.call(function, values)


OTHERS = ""  # in place of the name of a primitive
RULES: dict[str, Rule] = {
    "closed_call": call,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "eval_jaxpr": call,
    "jit": call,
    "linear_call": _linear_call,
    "pvary": _pvary,
    "remat2": _remat,
    "scan": _scan,
    "while": _while,
}
