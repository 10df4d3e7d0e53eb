"""A layer in three parts: forward, backward of its inputs (B), backward of its weights (W).

Autodiff gives one backward function. Its jaxpr is cut once: what the cotangents of inputs and carry need is
B; the rest, which only the gradients of weights need, is W. What crosses from the one to the other (for an
LSTM: x, h_{t-1} and dz) must be kept until W runs; most of it was saved for B anyway.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Var

from jaxpar.base.at import LayerContext
from jaxpar.base.trees import shape_of, vary_like
from jaxpar.base.types import Activations, Arrays, Carry, Cotangents, Function, Leaves, Params
from jaxpar.internal.residuals import Residuals, Source
from jaxpar.trace.jaxprs import cut, equations_for, function_of, is_cheap, made_of, reads_of

# One layer: (its parameters, what of them is frozen, its carry, inputs, where they lie) -> (carry, outputs).
# Inputs and outputs are trees of floats of the same shapes and dtypes; so is the carry before and after.
PlainLayer = Callable[[Params, Params, Carry, Activations, LayerContext], tuple[Carry, Activations]]

# Weights, trained and frozen, and the arrays that are computed of them alone, such as transposes.
Prepared = tuple[tuple[Params, Params], Leaves]


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
      saved_and_room: the saved, and what of `later` lies after them.
    """

    def __init__(self, layer: PlainLayer, *arguments: Arrays, splits: bool):
        """Traces the layer and its backward pass; nothing is computed.

        Args:
          arguments: of the layer.
          splits: whether W is to be separate, where it can be.
        """
        self._layer = layer
        self._residuals, given = _trace(layer, *arguments)
        self.saved = [shape_of(v.aval) for v in self._residuals.kept]
        self._cut = self._find_cut(*given) if splits else None
        self.has_weights = self._cut is not None
        self.needed, self.later = self._cut[:2] if self._cut else ([], [])
        self.places = _places(self.saved, self.needed, self.later)
        behind = zip(self.later, self.places, strict=True)
        self.saved_and_room = [*self.saved, *(a for a, n in behind if n >= len(self.saved))]

    @property
    def program(self) -> Jaxpr:
        """Of the layer and what its backward pass keeps."""
        return self._residuals.program

    def forward(
        self, params: Params, frozen: Params, carry: Carry, x: Activations, at: LayerContext
    ) -> tuple[Carry, Activations, Leaves]:
        """The carry, the outputs, and what is saved."""
        residuals, arguments = _trace(self._layer, params, frozen, carry, x, at)
        kept = [shape_of(v.aval) for v in residuals.kept]
        assert kept == self.saved, "it traces in one way only"
        (carry, y), saved = residuals.run(*arguments)
        return carry, y, saved

    def prepare(self, params: Params, frozen: Params) -> Prepared:
        """The weights as B and W take them: with what can be computed of them alone, such as transposes."""
        weights = params, frozen
        return weights, [] if self._cut is None else self._cut.prepare(weights)

    def backward(
        self, prepared: Prepared, saved: Leaves, d_carry: Cotangents, dy: Cotangents
    ) -> tuple[Cotangents, Cotangents, Cotangents, Leaves]:
        """B: gradients of the weights (nothing, if W is apart), cotangents of carry and inputs, `later`."""
        if self._cut is None:
            d_weights, d_carry, dx = self._whole(prepared[0], saved, (d_carry, dy))
            return d_weights, d_carry, dx, []
        return (), *self._cut.inputs(prepared, saved, (d_carry, dy))

    def weights(self, prepared: Prepared, needed: Leaves, later: Leaves) -> Cotangents:
        """W: gradients of the weights."""
        assert self._cut is not None
        return self._cut.weights(prepared, needed, later)

    def _whole(self, weights: Params, saved: Leaves, cotangents: Cotangents) -> Cotangents:
        """Gradients of the weights, cotangents of the carry and of the inputs."""
        kept = {Source("kept", n): value for n, value in enumerate(saved)}
        return self._residuals.vjp(weights, kept)(cotangents)

    def _find_cut(self, weights: Params, *arguments: Arrays) -> "_Cut | None":
        found = []

        def trace(weights, *arguments):
            (carry, y), saved = self._residuals.run(weights, *arguments)
            saved = vary_like(saved, y)  # as the loop over layers has them
            found.append(_cut(self._whole, (weights, saved, (carry, y))))

        jax.eval_shape(trace, weights, *arguments)
        return found[0]


def _trace(
    layer: PlainLayer,
    params: Params,
    frozen: Params,
    carry: Carry,
    x: Activations,
    at: LayerContext,
) -> tuple[Residuals, tuple[Arrays, ...]]:
    """A layer's forward pass, and the arguments to run it with."""

    # Where a block lies is traced as well: autodiff saves less of what it knows.
    def forward(weights, carry, x, *where):
        params, frozen = weights
        # In a loop all are of one type, whatever they are before it.
        carry, x, where = vary_like((carry, x, where), (params, carry, x))
        here = at._replace(**dict(zip(("layer", "time", "row", "batch"), where, strict=True)))
        # Weak types are made strong, or what is saved would depend on where the arrays come from.
        carry, x = jax.tree.map(lambda a: lax.convert_element_type(a, a.dtype), (carry, x))

        def run(params, carry, x):
            return layer(params, frozen, carry, x, here)

        return *jax.vjp(run, params, carry, x), ()

    # Python's whole numbers would be int64 with JAX_ENABLE_X64, those of a loop are int32.
    place = (jnp.asarray(number, jnp.int32) for number in (at.layer, at.time, at.row))
    arguments = (params, frozen), carry, x, *place, at.batch
    return Residuals(forward, *arguments), arguments


class _Cut(NamedTuple):
    """A backward pass in two functions, by what crosses from the first to the second.

    Attributes:
      needed, later: as of `SplitLayer`.
      prepare: weights -> what depends on them alone.
      inputs: ((weights, prepared), saved, cotangents) -> cotangents of the carry and of the inputs, `later`.
      weights: ((weights, prepared), needed, later) -> gradients of the weights.
    """

    needed: list[int]
    later: list[jax.ShapeDtypeStruct]
    prepare: Callable[..., Leaves]
    inputs: Callable[..., tuple[Cotangents, Cotangents, Leaves]]
    weights: Function


def _cut(whole: Function, arguments: tuple[Params, Leaves, Cotangents]) -> _Cut | None:
    """The two parts of a backward pass, (weights, saved, cotangents) -> d_weights, d_carry, dx.

    None if they cannot be apart.
    """

    def both(*arguments):
        d_weights, d_carry, dx = whole(*arguments)
        return d_weights, (d_carry, dx)

    closed, shape = jax.make_jaxpr(both, return_shape=True)(*arguments)
    jaxpr, (of_weights, of_inputs) = closed.jaxpr, map(jax.tree.structure, shape)
    w_outs, b_outs = cut(jaxpr.outvars, of_weights.num_leaves)
    weights, rest = cut(jaxpr.invars, len(jax.tree.leaves(arguments[0])))
    saved = rest[: len(arguments[1])]
    ready = made_of(jaxpr, weights)
    b_eqns = equations_for(jaxpr.eqns, b_outs, ready)
    b_made = {v for eqn in b_eqns for v in eqn.outvars}
    # Simple arithmetic on what is saved is done again, not kept.
    again = made_of(jaxpr, (*weights, *saved), is_cheap)
    w_eqns = equations_for(jaxpr.eqns, w_outs, ready | (b_made - again))
    if any(v in b_made for v in w_outs if isinstance(v, Var)) or any(
        eqn.primitive.name in ("scan", "while") for eqn in w_eqns
    ):
        return None
    given = {v for eqn in w_eqns for v in eqn.outvars} | {*weights, *saved, *jaxpr.constvars}
    crossing = reads_of(w_eqns, w_outs)
    prepared = [v for v in dict.fromkeys((*reads_of(b_eqns, b_outs), *crossing)) if v in ready]
    needed = [n for n, v in enumerate(saved) if v in crossing]
    later = [v for v in crossing if v not in given and v not in ready]

    def function(invars, eqns, outs):
        run = function_of(jaxpr, invars, eqns, outs, closed.consts)
        return lambda *arguments: run(*jax.tree.leaves(arguments))

    own = [*weights, *prepared]
    prepare = function(weights, equations_for(jaxpr.eqns, prepared), prepared)
    run_b = function([*own, *rest], b_eqns, [*b_outs, *later])
    run_w = function([*own, *(saved[n] for n in needed), *later], w_eqns, w_outs)

    def inputs(*arguments):
        out, later = cut(run_b(*arguments), len(b_outs))
        return *jax.tree.unflatten(of_inputs, out), later

    def gradients(*arguments):
        return jax.tree.unflatten(of_weights, run_w(*arguments))

    return _Cut(needed, [shape_of(v.aval) for v in later], prepare, inputs, gradients)


def _places(
    saved: Sequence[jax.ShapeDtypeStruct],
    needed: Sequence[int],
    later: Sequence[jax.ShapeDtypeStruct],
) -> list[int]:
    """For each of `later` the number of a saved leaf like it that W does not need, or a new one."""
    free = [n for n in range(len(saved)) if n not in needed]
    places, num_leaves = [], len(saved)
    for leaf in later:
        fits = [n for n in free if (saved[n].shape, saved[n].dtype) == (leaf.shape, leaf.dtype)]
        places.append(fits[0] if fits else num_leaves)
        free = [n for n in free if n != places[-1]]
        num_leaves += not fits
    return places
