"""A loop over time steps whose weight gradients, and products of its inputs, are taken outside of it.

Autodiff of a scan adds a part to every weight's gradient at every step. Here the step's program is read once
(`step_program`) and run in three parts: what is computed of weights alone, before the loop; products of
weights and inputs, as the input projection, for all steps at once before the loop; and the rest.

An equation z = f(u, w) with a weight w is differentiated in two places. The backward loop finds the cotangent
of u, and hands out that of z; that of w follows the loop, from u and dz of all steps at once: of a product it
is one product, with time among the dims that it sums over.
"""

import functools
from collections import ChainMap
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jaxpar.base.trees import add, check_floats, check_same, vary_like, wide
from jaxpar.base.types import Arrays, Carry, Cotangents, DType, Leaves, Params, Value
from jaxpar.internal.in_place_scan import scan_in_place
from jaxpar.internal.products import contract, sum_of_outer_products, transposable
from jaxpar.internal.residuals import Residuals, Source
from jaxpar.internal.step_program import Product, Step, StepProgram, read_step, values_of
from jaxpar.trace.jaxprs import Equations, aval_of, cut, is_float

Name = TypeVar("Name", bound=Hashable)
Item = TypeVar("Item")
Values = dict[Var, jax.Array]
# What is given, values that are used, their positions and parts, and the residuals of both parts of the loop.
Saved = tuple[Leaves, Leaves, "_Static", Residuals, Residuals]


def hoisted_scan(
    step: Step, params: Params, carry: Carry, xs: Arrays, *, unroll: int = 1
) -> tuple[Carry, Arrays]:
    """`lax.scan` of `step(params, carry, x) -> (carry, y)`; differentiable once, in reverse.

    Args:
      params: the weights, which the step takes every time. What it closes over counts as weights, too.
      unroll: how many steps a turn of the loop takes at most: with gradients, as many as divide their number.
    Returns:
      the carry after the last step, and the outputs.
    Raises:
      ValueError: a step returns a carry of another structure, shape or dtype than it takes, or numbers that
        are not floating-point.

    Example:
      def step(w, h, x):
        h = jnp.tanh(x + h @ w)
        return h, h

      h, outputs = jaxpar.nn.hoisted_scan(step, jnp.eye(8), jnp.zeros((2, 8)), jnp.ones((5, 2, 8)))
    """
    # A gradient has the type of what it is of: over which axes parts are added is told before.
    params, carry, xs = vary_like((params, carry, xs), (params, carry, xs))
    # Strong types, or what is kept would depend on where the arrays come from.
    carry = jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), carry)
    first = jax.tree.map(lambda a: a[0], xs)
    program, given, (after_shape, y_shape) = read_step(step, params, carry, first)
    check_same("the carry that a step returns", after_shape, "the one that it takes", carry)
    check_floats("the carry of a step", after_shape)
    check_floats("the output of a step", y_shape)
    found: Arrays = _scan(program, unroll, given, jax.tree.leaves(carry), jax.tree.leaves(xs))
    after, ys = found
    after = jax.tree.unflatten(jax.tree.structure(carry), after)
    return after, jax.tree.unflatten(jax.tree.structure(y_shape), ys)


class _Fixed(NamedTuple):
    """What is fixed of a program.

    Attributes:
      values: of `program.fixed`.
      weights: of `program.products`, as they and their backward passes take them.
    """

    values: Leaves
    weights: list[tuple[jax.Array, jax.Array]]

    @classmethod
    def of(cls, program: StepProgram, given: Sequence[jax.Array]) -> "_Fixed":
        """Made of what is given."""
        fixed = cls(program.make_fixed(given), [])
        env = fixed.env(program)
        for product in program.products.values():
            w, first = _in_order(env[product.weight], product.w_order), product.num_blocks
            n = first + product.num_sums
            # Transposed here, or it would be at every step.
            order = (*range(first), *range(n, w.ndim), *range(first, n))
            back = transposable(w.transpose(order))
            fixed.weights.append((w, back))
        return fixed

    def env(self, program: StepProgram) -> Values:
        """The values by their variables."""
        return _env(program.fixed, self.values)


def _run(
    program: StepProgram,
    eqns: Equations,
    fixed: _Fixed,
    env: Values,
    live: Values,
    taps: Sequence[Leaves] | None = None,
    *,
    over_time: bool = False,
) -> Values:
    """Evaluates equations.

    Args:
      env: what is known besides what is fixed.
      live: by variable, fixed values for equations that are not weighed.
      taps: of every equation that is weighed, for each result zeros whose cotangent is to be the result's.
      over_time: for all steps at once.
    Returns:
      all that is known then.
    """
    env, rest = {**fixed.env(program), **env}, iter(taps or ())
    weights = _env([*program.products], fixed.weights)
    for eqn in eqns:
        is_weighed = len(program.weights_of(eqn)) > 0
        values = values_of(env if is_weighed else ChainMap(live, env), eqn.invars)
        if product := program.products.get(id(eqn)):
            u = _in_order(values[product.position], product.u_order, over_time=over_time)
            z: Arrays = _multiply(product, u.dtype, u, *weights[id(eqn)])
            outs = [_in_order(z, product.out_order, over_time=over_time)]
        else:
            outs = program.apply(eqn, values, over_time=over_time)
        if is_weighed and taps is not None:
            outs = [_tap(z, tap) for z, tap in zip(outs, next(rest), strict=True)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return env


def _in_order(a: jax.Array, order: Sequence[int], *, over_time: bool = False) -> jax.Array:
    """Its dims in this order; the first is time, if it is over time."""
    order = (0, *(n + 1 for n in order)) if over_time else tuple(order)
    return a if order == tuple(range(a.ndim)) else a.transpose(order)


def _inverse(order: Sequence[int]) -> list[int]:
    """The order that undoes it."""
    return sorted(range(len(order)), key=order.__getitem__)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(product: Product, dtype: DType, u: jax.Array, w: jax.Array, back: jax.Array):
    """u w; w and `back`, which is w transposed, have no gradients here."""
    sums, blocks = product.num_sums, product.num_blocks
    return contract(u, w, sums, product.precision, out=product.dtype, num_blocks=blocks)


def _multiply_fwd(product: Product, dtype: DType, u: jax.Array, w: jax.Array, back: jax.Array):
    return _multiply(product, dtype, u, w, back), back


def _multiply_bwd(product: Product, dtype: DType, back: jax.Array, dz: jax.Array):
    """A product of narrow factors is one backward, too: of dz rounded to them."""
    blocks, dz = product.num_blocks, dz.astype(dtype)
    sums = back.ndim - product.num_sums - blocks
    du = contract(dz, back, sums, product.precision, out=wide(dtype), num_blocks=blocks)
    return du.astype(dtype), None, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


_tap = jax.custom_vjp(lambda z, tap: z)  # the cotangent of `tap` is that of z
_tap.defvjp(lambda z, tap: (z, None), lambda _, dz: (dz, dz))


# ---- the loop ----


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(program: StepProgram, unroll: int, given: Leaves, carry: Leaves, xs: Leaves):
    """Without gradients there is nothing to take out."""
    fixed = _Fixed.of(program, given)

    def step(carry, inputs):
        known = _env([*program.carry, *program.xs], [*carry, *inputs])
        known = _run(program, [*program.early, *program.late], fixed, known, {})
        outs = _outs(program, known, {})
        return outs[: len(carry)], outs[len(carry) :]

    return lax.scan(step, carry, xs, unroll=unroll)


@jax.tree_util.register_static
class _Static:
    """A value that is no array."""

    def __init__(self, value: Value):
        self.value = value


def _forward(program: StepProgram, unroll: int, given: Leaves, carry: Leaves, xs: Leaves):
    """The loop, and what its backward pass needs."""
    fixed = _Fixed.of(program, given)
    taps = functools.partial(_taps, program, reference=(given, carry, xs))

    def early(fixed, *xs):
        x_env = _env(program.xs, xs)

        def run(floats, taps):
            known = x_env | _env(program.early_floats, floats)
            env = _run(program, program.early, fixed, known, {}, taps, over_time=True)
            others = values_of(env, program.crossing), _operands(program, program.early, env)
            return values_of(env, program.crossing_floats), others

        floats = values_of(x_env, program.early_floats)
        early_taps = taps(program.early, len(xs[0]))
        _, vjp, (crossing, operands) = jax.vjp(run, floats, early_taps, has_aux=True)
        return crossing, vjp, operands

    num_xs, num_crossing = len(xs), len(program.crossing)
    of_early = Residuals(early, fixed, *xs, free=range(num_xs), results=range(num_crossing))
    crossing, early_kept = of_early.run(fixed, *xs)

    def late(fixed, *values):
        carry, inputs = values[: program.num_carry], values[program.num_carry :]
        inputs_env = _env([*program.xs, *program.crossing], inputs)

        def run(carry, floats, live, taps):
            live_env = _env(program.live, live)
            known = inputs_env | _env(program.late_floats, floats) | _env(program.carry, carry)
            env = _run(program, program.late, fixed, known, live_env, taps)
            return _outs(program, env, live_env), _operands(program, program.late, env)

        floats = values_of(inputs_env, program.late_floats)
        live = values_of(fixed.env(program), program.live)
        return jax.vjp(run, [*carry], floats, live, taps(program.late), has_aux=True)

    first = [*carry, *(a[0] for a in (*xs, *crossing))]
    n, num_outs = program.num_carry, len(program.outs) - program.num_carry
    free, results = range(n, len(first)), range(n, n + num_outs)
    of_late = Residuals(late, fixed, *first, free=free, results=results)

    def step(carry, inputs):
        outs, kept = of_late.run(fixed, *carry, *inputs)
        return outs[:n], [*outs[n:], *kept]

    # What crosses into the loop is read by nothing else, but for backward passes that take it.
    donated = {*range(num_xs, num_xs + num_crossing)}
    donated -= {source.number - n for source in of_late.used if source.of == "argument"}
    donated -= {num_xs + source.number for source in of_early.used if source.of == "result"}
    divisible = {num_outs + number for number in of_late.kept_for_vjp}
    after, ys, parts = scan_in_place(
        step, carry, [*xs, *crossing], donated=donated, divisible=divisible, unroll=unroll
    )
    ys, kept = ys[:num_outs], ys[num_outs:]
    parts = {Source("kept", number - num_outs): part for number, part in parts.items()}
    values = [
        *of_early.values(xs, crossing, early_kept),
        *of_late.values([None] * n + [*xs, *crossing], [None] * n + [*ys], kept),
    ]
    once = {id(value): value for value in values}
    places = [[*once].index(id(value)) for value in values]
    return (after, ys), (given, [*once.values()], _Static((places, parts)), of_early, of_late)


def _backward(program: StepProgram, unroll: int, saved: Saved, cotangents: tuple[Leaves, Leaves]):
    """Gradients of what is given, of the carry before the first step, and of the inputs."""
    given, once, static, of_early, of_late = saved
    d_after, d_ys = cotangents
    places, parts = static.value
    fixed, found = _Fixed.of(program, given), [once[place] for place in places]
    env = fixed.env(program)
    early_found, late_found = cut(found, len(of_early.used))
    early_values, values = _env(of_early.used, early_found), _env(of_late.used, late_found)
    arrays = {id(values[source]): values[source] for source in of_late.sources}
    early_operands = of_early.wanted(fixed, early_values)
    late_operands = of_late.wanted(fixed, values)
    afterwards = {id(a) for a in (*early_values.values(), *jax.tree.leaves(late_operands))}
    donated = {len(d_ys) + n for n, number in enumerate(arrays) if number not in afterwards}
    numbers: list[int] = []

    def step(carry, inputs):
        d_carry, d_live = carry
        dy, read = inputs[: len(d_ys)], _env([*arrays], inputs[len(d_ys) :])
        here = {source: read[id(values[source])] for source in of_late.sources}
        here |= {source: here[source][:, part] for source, part in parts.items() if source in here}
        d_carry, d_floats, d_live_here, d_taps = of_late.vjp(fixed, here)([*d_carry, *dy])
        # What is added up, such as a product and a bias, has one cotangent.
        leaves = jax.tree.leaves((d_floats, d_taps))
        unique = {id(leaf): leaf for leaf in leaves}
        numbers[:] = [[*unique].index(id(leaf)) for leaf in leaves]
        return (d_carry, add(d_live, d_live_here)), [*unique.values()]

    start = (d_after, [jnp.zeros_like(env[v]) for v in program.live])
    inputs = [*d_ys, *arrays.values()]
    (d_carry, d_live), found, _ = scan_in_place(
        step, start, inputs, donated=donated, reverse=True, unroll=unroll
    )
    found = [found[number] for number in numbers]
    d_late, late_dz = cut(found, len(program.late_floats))
    d_env = _env(program.late_floats, d_late)
    d_crossing = [d_env[v] for v in program.crossing_floats]
    d_early, early_dz = of_early.vjp(fixed, early_values)(d_crossing)
    for v, dx in zip(program.early_floats, d_early, strict=True):
        d_env[v] = d_env[v] + dx if v in d_env else dx

    d_fixed = {v: jnp.zeros_like(a) for v, a in env.items() if is_float(a)}
    d_fixed |= _env(program.live, d_live)
    for eqns, operands, dz in (
        (program.early, early_operands, jax.tree.leaves(early_dz)),
        (program.late, late_operands, late_dz),
    ):
        rest = iter(dz)
        for eqn, own in zip(program.weighed(eqns), operands, strict=True):
            dz_own = [next(rest) for v in eqn.outvars if is_float(v)]
            for weight, dw in _weight_gradients(program, eqn, env, own, dz_own):
                d_fixed[weight] += dw
    d_given = _gradients_of_given(program, given, d_fixed)
    if program.live:
        # The loop makes gradients of weights: they come with all that it makes, none is left for later.
        d_given, d_carry = lax.optimization_barrier((d_given, d_carry))
    return d_given, d_carry, [d_env.get(v) for v in program.xs]


_scan.defvjp(_forward, _backward)


def _weight_gradients(
    program: StepProgram, eqn: JaxprEqn, env: Values, operands: Leaves, dz: Leaves
) -> list[tuple[Var, jax.Array]]:
    """Of an equation at all steps: its fixed operands and their gradients."""
    if id(eqn) not in program.products:
        weights = [v for n in program.weights_of(eqn) if isinstance(v := eqn.invars[n], Var)]
        grads = program.gradients(eqn, operands, [env[w] for w in weights], dz)
        return [*zip(weights, grads, strict=True)]
    product = program.products[id(eqn)]
    w, u = env[product.weight], operands[product.position]
    u = _in_order(u, product.u_order, over_time=True)
    dz_TN = _in_order(dz[0], _inverse(product.out_order), over_time=True).astype(u.dtype)
    rest, blocks = u.shape[: u.ndim - product.num_sums], product.num_blocks
    u = u.reshape(*rest, -1)
    dw = sum_of_outer_products(u, dz_TN, precision=product.precision, num_blocks=blocks)
    dw = dw.reshape([w.shape[n] for n in product.w_order])
    return [(product.weight, _in_order(dw, _inverse(product.w_order)).astype(w.dtype))]


def _gradients_of_given(program: StepProgram, given: Leaves, d_fixed: Values) -> Cotangents:
    """By the gradients of what is fixed; None for what is not of floats."""
    floats = [n for n, value in enumerate(given) if is_float(value)]

    def make(values):
        whole = dict(zip(floats, values, strict=True))
        made = program.make_fixed([whole.get(n, value) for n, value in enumerate(given)])
        return [a for a in made if is_float(a)]

    _, vjp = jax.vjp(make, [given[n] for n in floats])
    grads = dict(zip(floats, vjp([*d_fixed.values()])[0], strict=True))
    return [grads.get(n) for n in range(len(given))]


def _env(names: Sequence[Name], values: Sequence[Item]) -> dict[Name, Item]:
    return dict(zip(names, values, strict=True))


def _outs(program: StepProgram, env: Values, live: Values) -> Leaves:
    """The step's results; those that are constants as arrays."""
    values = values_of({**env, **live}, program.outs)
    return [jnp.asarray(a, aval_of(v).dtype) for a, v in zip(values, program.outs, strict=True)]


def _operands(program: StepProgram, eqns: Equations, env: Values) -> Arrays:
    """Of every weighed equation, those that its weights' gradients need; None for the others."""
    return [
        [
            env[v] if isinstance(v, Var) and n in program.operands[id(eqn)] else None
            for n, v in enumerate(eqn.invars)
        ]
        for eqn in program.weighed(eqns)
    ]


def _taps(program: StepProgram, eqns: Equations, *over: int, reference: Arrays) -> list[Leaves]:
    """Zeros like the results of every weighed equation, over time if the number of steps is given."""
    results = [[*map(aval_of, eqn.outvars)] for eqn in program.weighed(eqns)]
    taps = [
        [jnp.zeros((*over, *a.shape), a.dtype) if is_float(a) else None for a in own]
        for own in results
    ]
    return vary_like(taps, reference)
