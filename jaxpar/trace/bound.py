"""Traces collectives over a task's axes outside of any mesh."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

Arguments = ParamSpec("Arguments")
Traced = TypeVar("Traced")


def bound(axes: Sequence[str] | Mapping[str, int], trace: Callable[[], Traced]) -> Traced:
    """Calls a function that traces others, while these axes exist.

    Args:
      axes: their sizes by name; those that are only named have size 1.
      trace: A function that makes programs or shapes (`jax.make_jaxpr`, `jax.eval_shape`), and no arrays.
    """
    if not axes:
        return trace()
    found = list[Traced]()

    def run(x: jax.Array) -> jax.Array:
        found.append(trace())
        return x

    sizes = axes if isinstance(axes, Mapping) else dict.fromkeys(axes, 1)
    for axis, size in sizes.items():
        run = jax.vmap(run, axis_name=axis, axis_size=size)
    shape = (*sizes.values(),)[::-1]  # the last axis is the outermost
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
