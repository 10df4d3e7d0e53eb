"""FSDP by layer: parameters are gathered over `data` where they are used, and gradients scattered."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxpar.base.axes import DATA, TENSOR
from jaxpar.base.trees import in_float32
from jaxpar.base.types import Function, Specs
from jaxpar.partition.partition import Partition
from jaxpar.sharding import Axes, axes_of_spec, to_spec


def gathering(partition: Partition, run: Function, specs: Sequence[Specs]) -> Function:
    """A function of (parameters, frozen ones, others) that takes a device's parts of the first two.

    Each of its passes gathers them: the backward pass computes again whatever is of parameters alone.

    Args:
      specs: what splits them, over `data` and `tensor`.
    """

    def of(a: jax.Array, spec: Any) -> jax.Array:
        return _gathered(partition, a, axes_of_spec(spec))

    return lambda *given: run(*jax.tree.map(of, given[:2], tuple(specs)), *given[2:])


def _gathered(partition: Partition, part: jax.Array, split: Sequence[Axes]) -> jax.Array:
    """The array of a device's part, inside a `shard_map` over `data`."""
    dim = next((n for n, axes in enumerate(split) if DATA in axes), None)
    if dim is None:
        return part
    of_tensor = to_spec([tuple(axis for axis in axes if axis == TENSOR) for axes in split])

    def on_tensor(run: Function, a: jax.Array) -> jax.Array:
        if partition.parallel.mesh.tensor > 1:  # or the compiler would gather over it as well
            run = jax.shard_map(run, axis_names={TENSOR}, in_specs=of_tensor, out_specs=of_tensor)
        return run(a)

    def gather(a: jax.Array) -> jax.Array:
        if partition.facts.platform == "tpu":
            a = _as_stored(a)
        return lax.all_gather(a, DATA, axis=dim, tiled=True)

    def scatter(d: jax.Array) -> jax.Array:
        return lax.psum_scatter(d, DATA, scatter_dimension=dim, tiled=True)

    @jax.custom_vjp
    def whole(a: jax.Array) -> jax.Array:
        return on_tensor(gather, a)

    def backward(_: None, d: jax.Array) -> tuple[jax.Array]:
        # In float32, before they are rounded; and XLA's CPU compiler aborts on a sum of bfloat16.
        return (on_tensor(scatter, in_float32(d)).astype(part.dtype),)

    whole.defvjp(lambda a: (whole(a), None), backward)
    return whole(part)


def _as_stored(a: jax.Array) -> jax.Array:
    """A layer's part, in the layout and precision of the stack that it is cut from.

    Else a TPU copies the whole stack before the loop: as a product reads it, and rounded to bfloat16. The
    factor is 1. The compiler doesn't know that, and rounds after it.
    """
    a = with_layout_constraint(a, Layout(tuple(range(a.ndim))))
    return a * (lax.axis_index(DATA) >= 0).astype(a.dtype) if a.dtype == "float32" else a
