"""Traces collectives over a task's axes outside of any mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

Arguments = ParamSpec("Arguments")
Traced = TypeVar("Traced")


def bound(axes: Sequence[str], trace: Callable[[], Traced]) -> Traced:
    """Calls a function that traces others, while these axes exist with size 1.

    Args:
      trace: A function that makes programs or shapes (`jax.make_jaxpr`, `jax.eval_shape`), and no arrays.
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


def in_bound(
    axes_of: Callable[[Any], Sequence[str]],
) -> Callable[[Callable[Arguments, Traced]], Callable[Arguments, Traced]]:
    """A decorator of methods that trace: they run `bound` by the axes of their object."""

    def decorate(method: Callable[Arguments, Traced]) -> Callable[Arguments, Traced]:
        @functools.wraps(method)
        def run(*args: Arguments.args, **options: Arguments.kwargs) -> Traced:
            return bound(axes_of(args[0]), lambda: method(*args, **options))

        return run

    return decorate
