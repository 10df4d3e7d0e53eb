"""A scan that writes its outputs over its inputs.

XLA gives every output of a scan memory of its own, and fills all of it before the loop: memory to be had,
to be written twice, and cold. What nobody reads after its step is memory at hand.

Legend of shapes: T time, B rows, N parts of a row.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from jaxpar.base.types import Carry, Index, Leaves


def scan_in_place(
    step: Callable[[Carry, Leaves], tuple[Carry, Leaves]],
    carry: Carry,
    xs: Sequence[jax.Array],
    *,
    donated: Collection[int],
    divisible: Collection[int] = (),
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Carry, Leaves, dict[int, int]]:
    """`lax.scan` of `step(carry, xs) -> (carry, ys)`, whose outputs take the memory of inputs where they fit.

    Args:
      donated: numbers of the xs that nothing reads afterwards.
      divisible: numbers of the ys that may share an array [T, B, N, ...] with others.
      unroll: how many steps a turn of the loop takes at most; it takes as many as divide their number.
    Returns:
      the last carry; the ys, some of them as the array that they are a part [:, :, n] of; and n, by the
      numbers of these.
    """
    ys_shapes = jax.eval_shape(step, carry, [a[0] for a in xs])[1]
    places = _assign(ys_shapes, {n: xs[n] for n in donated}, divisible)
    own = defaultdict[int, list[int]](list)
    for number, place in places.items():
        own[place.buffer].append(number)
    buffers = {n: xs[n].reshape(places[ys[0]].shape) for n, ys in own.items()}

    # The next rows are read of what has been written. So XLA sees that nothing is overwritten that is still
    # to be read; else it would copy the whole buffer at every step.
    def in_place(state, inputs):
        (carry, buffers, rows), (t, t_next, here) = state, inputs
        here = here | {n: a.reshape(size, *xs[n].shape[1:]) for n, a in rows.items()}
        made = [[] for _ in range(size)]
        for k in reversed(range(size)) if reverse else range(size):
            carry, made[k] = step(carry, [here[n][k] for n in range(len(xs))])
        ys = [jnp.stack(of_steps) for of_steps in zip(*made, strict=True)]
        buffers = {n: _write(buffer, t, [ys[y] for y in own[n]]) for n, buffer in buffers.items()}
        rows = {n: _rows(buffer, t_next, size) for n, buffer in buffers.items()}
        return (carry, buffers, rows), [y for n, y in enumerate(ys) if n not in places]

    length = len(xs[0])
    size = max(n for n in range(1, unroll + 1) if length % n == 0)
    turns = np.arange(0, length, size)
    following = np.clip(turns - size if reverse else turns + size, 0, length - size)
    others = {n: a.reshape(-1, size, *a.shape[1:]) for n, a in enumerate(xs) if n not in buffers}
    first = turns[-1 if reverse else 0]
    state = carry, buffers, {n: _rows(buffer, first, size) for n, buffer in buffers.items()}
    inputs = jnp.asarray(turns), jnp.asarray(following), others
    (carry, buffers, _), rest = lax.scan(in_place, state, inputs, reverse=reverse)
    rest = [y.reshape(length, *y.shape[2:]) for y in rest]
    found = dict(zip((n for n in range(len(ys_shapes)) if n not in places), rest, strict=True))
    for n, place in places.items():
        found[n] = buffers[place.buffer] if n in divisible else buffers[place.buffer][:, :, 0]
    parts = {n: place.part for n, place in places.items() if n in divisible}
    return carry, [found[n] for n in range(len(ys_shapes))], parts


def _rows(buffer: jax.Array, t: Index, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(buffer, t, size, allow_negative_indices=False)


def _write(buffer: jax.Array, t: Index, parts: Leaves) -> jax.Array:
    """The buffer with these parts, each of several steps, from step t on."""
    rows, start = jnp.stack(parts, axis=2), (t, *[0] * (buffer.ndim - 1))
    return lax.dynamic_update_slice(buffer, rows, start, allow_negative_indices=False)


class _Place(NamedTuple):
    """A part of an input, which is seen as [T, B, N, ...] for it."""

    buffer: int
    shape: tuple[int, ...]
    part: int


def _assign(
    ys: Sequence[jax.ShapeDtypeStruct], buffers: dict[int, jax.Array], divisible: Collection[int]
) -> dict[int, _Place]:
    """Where outputs go, by number."""
    places = dict[int, _Place]()
    for number, buffer in buffers.items():
        fitting = defaultdict[tuple[int, ...], list[int]](list)
        for n, y in enumerate(ys):
            shape = None if n in places else _shape_for(buffer, y)
            if shape and (shape[2] == 1 or n in divisible):
                fitting[shape].append(n)
        if fitting:
            shape = max(fitting, key=lambda shape: min(len(fitting[shape]) / shape[2], 1))
            for part, n in enumerate(fitting[shape][: shape[2]]):
                places[n] = _Place(number, shape, part)
    return places


def _shape_for(buffer: jax.Array, y: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    """The shape of a buffer [T, B, ...] as a whole number of parts like y [B, ...]; None if it is not.

    A row that devices may share is not cut otherwise than it is.
    """
    if y.ndim < 2 or buffer.ndim < 3 or buffer.dtype != y.dtype or buffer.shape[1] != y.shape[0]:
        return None
    num_parts, left = divmod(math.prod(buffer.shape[2:]), max(math.prod(y.shape[1:]), 1))
    if left or not num_parts:
        return None
    shape = (*buffer.shape[:2], num_parts, *y.shape[1:])
    mesh = jax.typeof(buffer).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    is_shared = any(size > 1 and kind == AxisType.Auto for size, kind in axes)
    as_it_is = buffer.shape, (*buffer.shape[:2], 1, *buffer.shape[2:])
    return None if is_shared and shape not in as_it_is else shape
