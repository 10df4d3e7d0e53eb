"""Collectives over axes of one's own, where a function is looked at outside of any mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Traced = TypeVar("Traced")


def bound(axes: Sequence[str], trace: Callable[[], Traced]) -> Traced:
    """What a function that traces others returns, while these axes have a meaning: size 1.

    Args:
      trace: makes programs or shapes of its own (`jax.make_jaxpr`, `jax.eval_shape`), no arrays.
    """
    if not axes:
        return trace()
    found = list[Traced]()

    def run(x: jax.Array) -> jax.Array:
        found.append(trace())
        return x

    for axis in axes:
        run = jax.vmap(run, axis_name=axis, axis_size=1)
    shape = (1,) * len(axes)
    jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32))
    return found[0]


def in_bound(axes_of: Callable[[Any], Sequence[str]]) -> Callable[[Any], Any]:
    """A decorator of methods that trace: they run `bound` by the axes of their object."""

    def decorate(method: Callable[..., Traced]) -> Callable[..., Traced]:
        @functools.wraps(method)
        def run(owner: Any, *args: Any, **options: Any) -> Traced:
            return bound(axes_of(owner), lambda: method(owner, *args, **options))

        return run

    return decorate
