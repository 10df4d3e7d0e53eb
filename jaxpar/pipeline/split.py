"""A layer in three parts: forward, backward of its inputs (B), backward of its weights (W).

Autodiff gives one backward function. Its jaxpr is cut once: what the cotangents of inputs and carry need is
B; the rest, which only the gradients of weights need, is W. What crosses from the one to the other (for an
LSTM: x, h_{t-1} and dz) must be kept until W runs; most of it was saved for B anyway.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun

from jaxpar.at import At
from jaxpar.jaxprs import (
    equations_for,
    inlined,
    is_cheap,
    least_kept,
    made_of,
    made_with,
    program_of,
    reads_of,
    varying_of,
)
from jaxpar.trees import shape_of, vary_like

# One layer: (its parameters, what of them is frozen, its carry, inputs, where they lie) -> (carry, outputs).
# Inputs and outputs are trees of floats of the same shapes and dtypes; so is the carry before and after.
Layer = Callable[[Any, Any, Any, Any, At], tuple[Any, Any]]


class SplitLayer:
    """One layer as forward and backward.

    Attributes:
      saved: shapes and dtypes of what forward saves for backward. Weights are not among it, nor what is
        computed of them alone (a cast kernel) or of nothing (the zeros of a relu), nor what follows from less
        by simple arithmetic (of a GELU's factors all but its input and a tanh): that is computed again.
      has_weights: whether W is separate. It is not where that was not asked for, where its part of the
        program would be a loop, or where gradients of weights come out of what B needs (such as a scan that
        adds them up): then B gives them at once.
      needed: numbers of the saved that W needs.
      later: shapes and dtypes of what B hands to W in addition; `places` say where it lies among the saved,
        each replacing one of the same shape that W does not need, or after them.
    """

    def __init__(
        self, layer: Layer, params: Any, frozen: Any, carry: Any, x: Any, at: At, *, splits: bool
    ):
        """Traces the layer and its backward pass; nothing is computed."""
        self._layer = layer
        self._cut: _Cut | None = None
        traced = _Forward(layer, params, frozen, carry, x, at)
        self._vjp, self._remake = traced.vjp, traced.remake
        self.saved = [shape_of(v.aval) for v in traced.kept]

        def trace_cut(params, frozen, *rest):
            after, y, saved = traced.run(params, frozen, *rest)
            saved = vary_like(saved, y)  # as the loop over layers has them
            self._cut = _cut(self._whole, ((params, frozen), saved, (after, y)))

        if splits:
            jax.eval_shape(trace_cut, *traced.arguments)
        self.has_weights = self._cut is not None
        self.needed = [] if self._cut is None else self._cut.needed
        later = [] if self._cut is None else self._cut.later
        self.later = [shape_of(v.aval) for v in later]
        self.places = _places(self.saved, self.needed, self.later)

    def forward(self, params: Any, frozen: Any, carry: Any, x: Any, at: At):
        """The carry, the outputs, and what is saved."""
        traced = _Forward(self._layer, params, frozen, carry, x, at)
        assert [shape_of(v.aval) for v in traced.kept] == self.saved, "it traces in one way only"
        return traced.run(*traced.arguments)

    def prepare(self, params: Any, frozen: Any) -> Any:
        """The weights as B and W take them: with what can be computed of them alone, such as transposes."""
        weights = params, frozen
        return weights, [] if self._cut is None else self._cut.prepare(weights)

    def backward(self, prepared: Any, saved: list[jax.Array], d_carry: Any, dy: Any):
        """B: gradients of the weights (nothing, if W is apart), cotangents of carry and inputs, `later`."""
        if self._cut is None:
            d_weights, d_carry, dx = self._whole(prepared[0], saved, (d_carry, dy))
            return d_weights, d_carry, dx, []
        saved = saved[: len(self.saved)]  # beyond them is room for `later`
        return (), *self._cut.inputs(prepared, saved, (d_carry, dy))

    def weights(self, prepared: Any, needed: list[jax.Array], later: list[jax.Array]) -> Any:
        """W: gradients of the weights."""
        assert self._cut is not None
        return self._cut.weights(prepared, needed, later)

    def is_longer(self, other: "SplitLayer", times: int) -> bool:
        """Whether W of this layer takes what W of another takes, so many in a row along the first dim."""

        def sizes(part: SplitLayer, times: int):
            leaves = [part.saved[n] for n in part.needed] + part.later
            # A number of a whole block has no dim to join.
            return [
                ((a.shape[0] * times, *a.shape[1:]) if a.shape else None, a.dtype) for a in leaves
            ]

        own = sizes(self, 1)
        return self.has_weights and own == sizes(other, times) and all(shape for shape, _ in own)

    def _whole(self, weights: Any, saved: list[jax.Array], cotangents: tuple[Any, Any]):
        """Gradients of the weights, cotangents of the carry and of the inputs."""
        leaves = self._remake(*jax.tree.leaves((weights, saved)))
        return jax.tree.unflatten(self._vjp, leaves)(cotangents)


class _Forward:
    """A layer's forward pass, traced.

    Attributes:
      arguments: of `run`.
      vjp: structure of its backward pass, whose leaves are the residuals.
      kept: variables that residuals can be made of again, together with the weights.
      remake: a function of weights and of what is kept that does so.
    """

    def __init__(self, layer: Layer, params: Any, frozen: Any, carry: Any, x: Any, at: At):
        """Traces it."""
        self.vjp: Any = None

        # Where a block lies is traced as well: autodiff saves less of what it knows.
        def trace(params, frozen, carry, x, *where):
            # In a loop all are of one type, whatever they are before it.
            carry, x, where = vary_like((carry, x, where), (params, carry, x))
            here = at._replace(**dict(zip(("layer", "time", "row", "batch"), where, strict=True)))
            # Weak types are made strong, or what is saved would depend on where the arrays come from.
            carry, x = jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), (carry, x))

            def run(params, carry, x):
                return layer(params, frozen, carry, x, here)

            out, vjp = jax.vjp(run, params, carry, x)
            leaves, self.vjp = jax.tree.flatten(vjp)
            return out, leaves

        self.arguments = params, frozen, carry, x, at.layer, at.time, at.row, at.batch
        traced, shapes = jax.make_jaxpr(trace, return_shape=True)(*self.arguments)
        whole = inlined(traced)
        self._jaxpr, self._consts = whole.jaxpr, whole.consts
        self._out = jax.tree.structure(shapes[0])
        num = self._out.num_leaves
        self._outs, residuals = self._jaxpr.outvars[:num], self._jaxpr.outvars[num:]
        self.kept, self.remake = self._choose(residuals, len(jax.tree.leaves((params, frozen))))

    def _choose(self, residuals: list[Any], num_weights: int) -> tuple[list[Var], Any]:
        jaxpr, weights = self._jaxpr, self._jaxpr.invars[:num_weights]
        others = made_with(jaxpr, (*jaxpr.invars[num_weights:], *jaxpr.constvars))
        alone = {*weights, *(v for eqn in jaxpr.eqns for v in eqn.outvars if v not in others)}
        varying = {varying_of(v) for v in self._outs if isinstance(v, Var)}

        def again(eqn):  # among values of one type, that of what is kept
            names = "pcast", "pvary"
            is_plain = is_cheap(eqn) and eqn.primitive.name not in names
            return is_plain and varying == {varying_of(v) for v in eqn.outvars}

        kept = least_kept(jaxpr, residuals, alone, again)
        eqns = equations_for(jaxpr.eqns, residuals, {*kept})
        program = program_of(jaxpr, [*weights, *kept], eqns, residuals).replace(constvars=[])
        return kept, jaxpr_as_fun(ClosedJaxpr(program, ()))

    def run(self, *arguments: Any) -> tuple[Any, Any, list[jax.Array]]:
        """Carry, outputs, and what is kept."""
        jaxpr, outs = self._jaxpr, [*self._outs, *self.kept]
        program = program_of(jaxpr, jaxpr.invars, jaxpr.eqns, outs)
        found = jaxpr_as_fun(ClosedJaxpr(program, self._consts))(*jax.tree.leaves(arguments))
        num = len(self._outs)
        return *jax.tree.unflatten(self._out, found[:num]), found[num:]


class _Cut:
    """A backward pass in two functions, by what crosses from the first to the second."""

    def __init__(self, closed: ClosedJaxpr, shape: Any, counts: tuple[int, int]):
        """Cuts.

        Args:
          closed: (weights, saved, cotangents), flat -> gradients of weights; cotangents of carry and inputs.
          shape: of its results.
          counts: of weights and of saved among the arguments.
        """
        self._consts, jaxpr = closed.consts, closed.jaxpr
        self._d_weights, self._d_inputs = map(jax.tree.structure, shape)
        num = self._d_weights.num_leaves
        w_outs, b_outs = jaxpr.outvars[:num], jaxpr.outvars[num:]
        weights, saved = jaxpr.invars[: counts[0]], jaxpr.invars[counts[0] : sum(counts)]
        ready = made_of(jaxpr, weights)
        b_eqns = equations_for(jaxpr.eqns, b_outs, ready)
        b_made = {v for eqn in b_eqns for v in eqn.outvars}
        # Simple arithmetic on what is saved is done again, not kept.
        again = made_of(jaxpr, (*weights, *saved), is_cheap)
        w_eqns = equations_for(jaxpr.eqns, w_outs, ready | (b_made - again))
        given = {v for eqn in w_eqns for v in eqn.outvars} | {*weights, *saved, *jaxpr.constvars}
        crossing = reads_of(w_eqns, w_outs)
        prepared = [v for v in dict.fromkeys((*reads_of(b_eqns, b_outs), *crossing)) if v in ready]
        self.needed = [n for n, v in enumerate(saved) if v in crossing]
        self.later = [v for v in crossing if v not in given and v not in ready]
        self.is_apart = not any(v in b_made for v in w_outs if isinstance(v, Var)) and not any(
            eqn.primitive.name in ("scan", "while") for eqn in w_eqns
        )
        self._prepare = program_of(jaxpr, weights, equations_for(jaxpr.eqns, prepared), prepared)
        self._b = program_of(
            jaxpr,
            [*weights, *prepared, *jaxpr.invars[counts[0] :]],
            b_eqns,
            [*b_outs, *self.later],
        )
        needed = [saved[n] for n in self.needed]
        self._w = program_of(jaxpr, [*weights, *prepared, *needed, *self.later], w_eqns, w_outs)

    def prepare(self, weights: Any) -> list[jax.Array]:
        """What depends on weights alone."""
        return self._run(self._prepare, weights)

    def inputs(
        self, prepared: Any, saved: Any, cotangents: Any
    ) -> tuple[Any, Any, list[jax.Array]]:
        """Cotangents of the carry and of the inputs, and what W needs of this."""
        out = self._run(self._b, (prepared, saved, cotangents))
        num = self._d_inputs.num_leaves
        return *jax.tree.unflatten(self._d_inputs, out[:num]), out[num:]

    def weights(self, prepared: Any, needed: Any, later: Any) -> Any:
        """Gradients of the weights."""
        return jax.tree.unflatten(self._d_weights, self._run(self._w, (prepared, needed, later)))

    def _run(self, jaxpr: Jaxpr, arguments: Any) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self._consts))(*jax.tree.leaves(arguments))


def _cut(
    whole: Callable[..., tuple[Any, Any, Any]], arguments: tuple[Any, Any, Any]
) -> _Cut | None:
    """The two parts of a backward pass; None if they cannot be apart."""

    def both(*arguments):
        d_weights, d_carry, dx = whole(*arguments)
        return d_weights, (d_carry, dx)

    closed, shape = jax.make_jaxpr(both, return_shape=True)(*arguments)
    weights, saved, _ = (len(jax.tree.leaves(part)) for part in arguments)
    cut = _Cut(closed, shape, (weights, saved))
    return cut if cut.is_apart else None


def _places(saved: Sequence[Any], needed: Sequence[int], later: Sequence[Any]) -> list[int]:
    """For each of `later` the number of a saved leaf like it that W does not need, or a new one."""
    free = [n for n in range(len(saved)) if n not in needed]
    places, num_leaves = [], len(saved)
    for leaf in later:
        fits = [n for n in free if (saved[n].shape, saved[n].dtype) == (leaf.shape, leaf.dtype)]
        places.append(fits[0] if fits else num_leaves)
        free = [n for n in free if n != places[-1]]
        num_leaves += not fits
    return places
