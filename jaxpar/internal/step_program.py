"""The program of a time step, and the operations that can be moved out of the loop over time.

Legend of shapes: D dims of blocks, each with a product of its own; K those that a product sums over, N those
that its weight adds.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.base.trees import vary_over
from jaxpar.base.types import Arrays, Atom, Carry, DType, Leaves, Params, Precision, Shapes
from jaxpar.trace.jaxprs import (
    aval_of,
    equations_for,
    function_of,
    inlined,
    is_float,
    programs_in,
    reads_of,
    varying_of,
)

# (weights, carry, x) -> (carry, y), of one time step.
Step = Callable[[Params, Carry, Arrays], tuple[Carry, Arrays]]


class StepProgram:
    """Equations of a step `(given, carry, x) -> (carry, y)`, by where they are to be run.

    What is computed of what is given alone is *fixed*. An equation that takes fixed floats besides others is
    *weighed*: their gradients are taken after the loop. One that has a program of its own, such as a loop, a
    branch or a function with a backward pass of its own, is not: those that it takes are *live*, and their
    gradients are added up in the loop.

    Attributes:
      given, carry, xs, outs: the variables of its arguments and results.
      early: equations of fixed values and of xs that make products of them, for all steps at once.
      late: the rest, which runs in the loop.
      crossing: variables that early equations make for late ones.
      fixed: variables that are fixed, and read by these equations or results.
      live: those of them whose gradients are added up in the loop.
      operands: by the id of a weighed equation, numbers of those that the gradients of its weights need.
      products: by their ids, the weighed equations that are products.
    """

    def __init__(self, jaxpr: Jaxpr, num_given: int, num_carry: int):
        self._jaxpr, self.outs, self.num_carry = jaxpr, jaxpr.outvars, num_carry
        invars = [*jaxpr.constvars, *jaxpr.invars]
        self.given, rest = invars[:num_given], invars[num_given:]
        self.carry, self.xs = rest[:num_carry], rest[num_carry:]
        fixed, soon = {*self.given}, {*self.xs}
        of_fixed, may_be_early, products = list[JaxprEqn](), list[JaxprEqn](), list[Var]()
        for eqn in jaxpr.eqns:
            reads = {v for v in eqn.invars if isinstance(v, Var)}
            if eqn.effects:
                continue
            if reads <= fixed:
                fixed |= {*eqn.outvars}
                of_fixed.append(eqn)
            elif reads <= fixed | soon and _is_plain(eqn):
                soon |= {*eqn.outvars}
                may_be_early.append(eqn)
                if eqn.primitive.name == "dot_general" and reads & fixed:
                    products += eqn.outvars
        self.early = equations_for(may_be_early, products, {*self.xs} | fixed)
        done = {id(eqn) for eqn in (*of_fixed, *self.early)}
        self.late = [eqn for eqn in jaxpr.eqns if id(eqn) not in done]
        made_early = {v for eqn in self.early for v in eqn.outvars}
        self.crossing = [v for v in reads_of(self.late, self.outs) if v in made_early]
        both = [*self.early, *self.late]
        self.fixed = [v for v in reads_of(both, self.outs) if v in fixed]
        self._of_fixed = equations_for(of_fixed, self.fixed)
        floats = {v for v in self.fixed if is_float(v)}
        whole = [eqn for eqn in both if not _is_plain(eqn)]
        self.live = [v for v in reads_of(whole, self.outs) if v in floats]
        self._weights = {
            id(eqn): [n for n, v in enumerate(eqn.invars) if isinstance(v, Var) and v in floats]
            for eqn in both
            if _is_plain(eqn) and any(is_float(v) for v in eqn.outvars)
        }

        of_late = reads_of(self.late, self.outs)
        self.early_floats = [v for v in reads_of(self.early) if v in {*self.xs} and is_float(v)]
        self.late_floats = [v for v in (*self.xs, *self.crossing) if v in of_late and is_float(v)]
        self.crossing_floats = [v for v in self.crossing if is_float(v)]
        self.operands = {id(eqn): self._find_operands(eqn) for eqn in self.weighed(both)}
        found = {id(eqn): Product.find(eqn, self.weights_of(eqn)) for eqn in self.weighed(both)}
        self.products = {number: product for number, product in found.items() if product}

    def make_fixed(self, given: Sequence[jax.Array]) -> Leaves:
        """The values that are fixed."""
        return function_of(self._jaxpr, self.given, self._of_fixed, self.fixed)(*given)

    def weights_of(self, eqn: JaxprEqn) -> list[int]:
        """Numbers of the operands for which an equation is weighed; none if it is not."""
        return self._weights.get(id(eqn), [])

    def weighed(self, eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """Those of the equations that are."""
        return [eqn for eqn in eqns if self.weights_of(eqn)]

    def apply(self, eqn: JaxprEqn, values: Leaves, *, over_time: bool = False) -> Leaves:
        """What an equation makes of the values of its operands.

        Args:
          over_time: at all steps; those that are not fixed have a leading dim of time then.
        """
        given = {v: a for v, a in zip(eqn.invars, values, strict=True) if isinstance(v, Var)}
        run = function_of(self._jaxpr, [*given], [eqn], eqn.outvars)
        if over_time:
            fixed = {*self.fixed}
            run = jax.vmap(run, in_axes=tuple(None if v in fixed else 0 for v in given))
        return run(*given.values())

    def gradients(self, eqn: JaxprEqn, operands: Arrays, weights: Leaves, dz: Leaves) -> Leaves:
        """Those of the weights of a weighed equation at all steps.

        Args:
          operands: [time, ...]; None for those that are not needed.
          weights: its fixed operands.
          dz: cotangents of its results of floats, [time, ...].
        """
        num_steps = dz[0].shape[0]
        values = [
            jnp.zeros((num_steps, *aval_of(v).shape), aval_of(v).dtype) if a is None else a
            for v, a in zip(eqn.invars, operands, strict=True)
        ]

        def of_weights(*weights):
            own = list(values)
            for n, w in zip(self.weights_of(eqn), weights, strict=True):
                own[n] = w
            return [a for a in self.apply(eqn, own, over_time=True) if is_float(a)]

        return [*jax.vjp(of_weights, *weights)[1]([*dz])]

    def _find_operands(self, eqn: JaxprEqn) -> Set[int]:
        numbers = self.weights_of(eqn)
        others = [n for n, v in enumerate(eqn.invars) if isinstance(v, Var) and n not in numbers]
        own = [eqn.invars[n] for n in numbers]
        results = [v for v in eqn.outvars if is_float(v)]

        def gradients(operands, weights, dz):
            values: list[jax.Array | None] = [None] * len(eqn.invars)
            for n, a in zip(others, operands, strict=True):
                values[n] = vary_over(a, varying_of(eqn.invars[n]))
            weights, dz = (
                [vary_over(a, varying_of(v)) for a, v in zip(arrays, names, strict=True)]
                for arrays, names in ((weights, own), (dz, results))
            )
            return self.gradients(eqn, values, weights, dz)

        def shapes(names, *over):
            return [jax.ShapeDtypeStruct((*over, *a.shape), a.dtype) for a in map(aval_of, names)]

        arguments = shapes([eqn.invars[n] for n in others], 2), shapes(own), shapes(results, 2)
        jaxpr = jax.make_jaxpr(gradients)(*arguments).jaxpr
        reads = reads_of(equations_for(jaxpr.eqns, jaxpr.outvars), jaxpr.outvars)
        return {n for n, v in zip(others, jaxpr.invars, strict=False) if v in reads}


def read_step(
    step: Step, params: Params, carry: Carry, x: Arrays
) -> tuple[StepProgram, Leaves, tuple[Shapes, Shapes]]:
    """The program of `step(params, carry, x)`, what is given to it, and the shapes of its results."""
    # What JAX has traced of the step itself before may be of other globals.
    closed, shapes = jax.make_jaxpr(lambda *args: step(*args), return_shape=True)(params, carry, x)
    whole = inlined(closed)
    given = [*whole.consts, *jax.tree.leaves(params)]
    return StepProgram(whole.jaxpr, len(given), len(jax.tree.leaves(carry))), given, shapes


def values_of(env: Mapping[Var, jax.Array], names: Sequence[Atom]) -> Leaves:
    """The values of variables and literals."""
    return [name.val if isinstance(name, Literal) else env[name] for name in names]


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether an equation is arithmetic."""
    return eqn.primitive.name == "custom_jvp_call" or not (eqn.effects or programs_in(eqn))


class Product(NamedTuple):
    """A dot_general with one fixed operand, as u w: [..., D, K] [D, K, N] -> [..., D, N].

    Attributes:
      weight: w.
      position: of u among the operands.
      u_order, w_order: of their dims, as above.
      out_order: of the dims of u w, which makes them those of the equation.
      num_sums, num_blocks: how many dims K and D are.
      precision, dtype: as of `lax.dot_general`.
    """

    weight: Var
    position: int
    u_order: tuple[int, ...]
    w_order: tuple[int, ...]
    out_order: tuple[int, ...]
    num_sums: int
    num_blocks: int
    precision: Precision
    dtype: DType

    @classmethod
    def find(cls, eqn: JaxprEqn, weights: Sequence[int]) -> "Product | None":
        """The equation as such a product; None if it is none."""
        if eqn.primitive.name != "dot_general" or len(weights) != 1:
            return None
        sums, blocks = eqn.params["dimension_numbers"]
        position, (other,) = 1 - weights[0], weights
        u, w = aval_of(eqn.invars[position]), aval_of(eqn.invars[other])
        weight = eqn.invars[other]
        assert isinstance(weight, Var)  # for literals are not weighed
        pairs = sorted(zip(sums[position], sums[other], strict=True))
        u_sums, w_sums = tuple(n for n, _ in pairs), tuple(n for _, n in pairs)
        u_blocks, w_blocks = blocks[position], blocks[other]
        u_free = tuple(n for n in range(u.ndim) if n not in u_sums + u_blocks)
        w_free = tuple(n for n in range(w.ndim) if n not in w_sums + w_blocks)
        ends = (0, *itertools.accumulate(map(len, (u_free, u_blocks, w_free))))
        of_u, of_blocks, of_w = itertools.starmap(range, itertools.pairwise(ends))
        return cls(
            weight,
            position,
            u_free + u_blocks + u_sums,
            w_blocks + w_sums + w_free,
            (*of_blocks, *of_w, *of_u) if position == 1 else (*of_blocks, *of_u, *of_w),
            len(pairs),
            len(u_blocks),
            eqn.params["precision"],
            eqn.params["preferred_element_type"],
        )
