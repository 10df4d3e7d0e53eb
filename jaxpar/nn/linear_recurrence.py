"""Linear recurrences, h_t = a_t h_{t-1} + b_t for each unit.

Legend of the dim suffixes: T time, B batch, H hidden.

Two steps after one another are one of their kind, (a, b) then (a', b') is (a' a, a' b + b'): a parallel
prefix scan finds all h_t (Blelloch 1990; for networks Martin and Cundy 2018). CPUs take the steps one by
one, in a third to a fifth of the time. Their cotangents are a linear recurrence backward in time, with the
same a.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpar.base.at import LayerContext
from jaxpar.base.trees import vary_like
from jaxpar.base.types import Arrays, Carry
from jaxpar.internal.products import sum_of_outer_products, transposable
from jaxpar.nn.hidden import Recurrence


def linear_recurrence(
    a_TBH: jax.Array,
    b_TBH: jax.Array,
    carry_BH: jax.Array,
    resets_TB: jax.Array | None = None,
    initial_BH: jax.Array | None = None,
    *,
    one_by_one: bool,
) -> tuple[jax.Array, jax.Array]:
    """The states h_t, and the last of them. All of it is float32.

    Args:
      carry_BH: h before the first step.
      resets_TB: where a sequence begins, from `initial_BH` (None: zeros); None is nowhere.
      one_by_one: whether the steps are taken one after the other; else by a prefix scan.

    Example:
      decay, inputs = jnp.full((5, 2, 16), 0.9), jnp.ones((5, 2, 16))
      states, last = jaxpar.nn.linear_recurrence(decay, inputs, jnp.zeros((2, 16)), one_by_one=False)
    """
    if resets_TB is not None:
        is_new = resets_TB[..., None]
        if initial_BH is not None:
            b_TBH = jnp.where(is_new, b_TBH + a_TBH * initial_BH[None], b_TBH)
        a_TBH = jnp.where(is_new, 0.0, a_TBH)
    arguments = a_TBH, b_TBH, carry_BH
    h_TBH: Arrays = _recurrence(*vary_like(arguments, arguments), one_by_one)
    return h_TBH[-1], h_TBH


class LinearRecurrence(Recurrence):
    """A layer that is a linear recurrence with two gates of its inputs; its `factors` say which.

    Attributes:
      w: [I, 2, H].
      b: [2, H].
    """

    kernels = ("w",)
    w: nnx.Param
    num_gates = num_biases = 2

    def factors(self, gates_TB2H: jax.Array, x_TBH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the state is multiplied by, and what is added to it, by x W + b; float32 [T, B, H]."""
        raise NotImplementedError

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """See `linear_recurrence`."""
        given = x_TBH, self.w[...]
        gates_TB2H = _project(*vary_like(given, given)) + self.b[...][None, None]
        factors = self.factors(gates_TB2H, x_TBH)
        carry, h_TBH = linear_recurrence(*factors, carry, at.resets, initial, one_by_one=at.on_cpu)
        return carry, h_TBH.astype(x_TBH.dtype)


@jax.custom_vjp
def _project(x_TBI: jax.Array, w_IGH: jax.Array) -> jax.Array:
    """x W: float32 [T, B, G, H]."""
    w_IGH = w_IGH.astype(x_TBI.dtype)
    return jnp.einsum("tbi,igh->tbgh", x_TBI, w_IGH, preferred_element_type=jnp.float32)


def _project_bwd(saved, dz_TBGH: jax.Array):
    x_TBI, w_IGH = saved
    dz_TBGH = dz_TBGH.astype(x_TBI.dtype)
    w = transposable(w_IGH.astype(x_TBI.dtype))
    dx = jnp.einsum("tbgh,igh->tbi", dz_TBGH, w, preferred_element_type=jnp.float32)
    return dx.astype(x_TBI.dtype), sum_of_outer_products(x_TBI, dz_TBGH)


_project.defvjp(lambda x_TBI, w_IGH: (_project(x_TBI, w_IGH), (x_TBI, w_IGH)), _project_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _recurrence(a_TBH: jax.Array, b_TBH: jax.Array, carry_BH: jax.Array, one_by_one: bool):
    return _scan(a_TBH, b_TBH.at[0].add(a_TBH[0] * carry_BH), one_by_one)


def _forward(a_TBH: jax.Array, b_TBH: jax.Array, carry_BH: jax.Array, one_by_one: bool):
    h_TBH = _recurrence(a_TBH, b_TBH, carry_BH, one_by_one)
    return h_TBH, (a_TBH, h_TBH, carry_BH)


def _backward(one_by_one: bool, saved, dh_TBH: jax.Array):
    a_TBH, h_TBH, carry_BH = saved
    after_TBH = jnp.concatenate([a_TBH[1:], jnp.ones_like(a_TBH[:1])])
    db_TBH = _scan(after_TBH, dh_TBH, one_by_one, reverse=True)
    before_TBH = jnp.concatenate([carry_BH[None], h_TBH[:-1]])
    return db_TBH * before_TBH, db_TBH, a_TBH[0] * db_TBH[0]


_recurrence.defvjp(_forward, _backward)


def _scan(a_TBH: jax.Array, b_TBH: jax.Array, one_by_one: bool, reverse: bool = False) -> jax.Array:
    """The states h_t, from a state of zeros."""

    def step(h_BH, inputs):
        a_BH, b_BH = inputs
        h_BH = a_BH * h_BH + b_BH
        return h_BH, h_BH

    def both(first, second):
        (a, b), (a_next, b_next) = first, second
        return a_next * a, a_next * b + b_next

    if one_by_one:
        return lax.scan(step, jnp.zeros_like(a_TBH[0]), (a_TBH, b_TBH), reverse=reverse)[1]
    return lax.associative_scan(both, (a_TBH, b_TBH), reverse=reverse)[1]
