"""What a part of a model cannot do where it is traced, in words: with its name, its line, and what to use."""

import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax

from jaxpar.base.axes import MESH_AXES, TENSOR
from jaxpar.trace.places import place_of_equation, place_of_error

_BRANCHES = (
    "decides in Python (`if`, `while`, `and`, `or`) by an array",
    "jnp.where(condition, a, b), or jax.lax.cond where only one of both is to be computed",
)
_COUNTS = (
    "counts in Python by an array, as in range(n) or parts[n]",
    "jax.lax.fori_loop for a loop, and jnp.stack(parts)[n] for one of a list",
)
_TO_NUMPY = "gives an array to NumPy", "the function of jax.numpy: jnp, not np"
_TO_PYTHON = (
    "makes a number of Python of an array: by float, int or .item(), or as a size",
    "the array itself, in another type by x.astype(int), and for sizes those in x.shape",
)
_BY_MASK = "takes as many elements as a mask has, as in x[mask]", "jnp.where(mask, x, 0)"
_CUTS = (
    "cuts an array where another one says, as in x[:n]",
    "jax.lax.dynamic_slice for a part of a known size, or jnp.where for one of another",
)
# What JAX raises where Python asks for the values of a traced array, and a part of its text; what was done,
# and what to use.
_NEEDS_VALUES = (
    (jax.errors.TracerBoolConversionError, "", *_BRANCHES),
    (ValueError, "truth value of an array", *_BRANCHES),
    (jax.errors.TracerIntegerConversionError, "", *_COUNTS),
    (jax.errors.TracerArrayConversionError, "", *_TO_NUMPY),
    (jax.errors.NonConcreteBooleanIndexError, "", *_BY_MASK),
    (IndexError, "static", *_CUTS),
    (TypeError, "scalar arrays can be converted to", *_TO_PYTHON),
    (jax.errors.ConcretizationTypeError, "", *_TO_PYTHON),
)
_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")
_NO_MESH = re.compile(r"context mesh|mesh context|mesh in context|shard_map")

_PAGE = '(docs/models.md, "Axes of your own")'
_OWN_AXIS = f'an axis of your own, which the task names: axes = ("context",) {_PAGE}'
_LAY_OUT = 'at.layout(x, "batch", None, "hidden")'


def why_refused(what: str, error: Exception, *, has_key: bool) -> str | None:
    """The mistake that an error of tracing tells; None if it is none of those known.

    Args:
      what: the part of the model.
      error: as it was caught.
      has_key: False if the same went well with an `at.key`.
    """
    where, text = _at(what, place_of_error(error)), " ".join(str(error).split())
    for kind, part, does, use in _NEEDS_VALUES:
        if isinstance(error, kind) and part in text:
            return (
                f"{where} {does}; while it is traced, once for all batches, arrays have no values, "
                f"at.layer, at.time and at.row among them; use {use}"
            )
    if axis := _UNBOUND_AXIS.search(text):
        return _uses_axis(where, axis[1])
    if _NO_MESH.search(text):
        return _has_mesh(where, "by shard_map or a PartitionSpec")
    if not has_key and isinstance(error, TypeError | AttributeError):
        return (
            f"{where} needs at.key, and that is None where nothing is drawn, in evaluation and in "
            f"predictions ({type(error).__name__}: {text}); use jaxpar.nn.dropout(x, rate, at), or "
            f"at.draw(jax.random.normal, x.shape) only if at.key is not None"
        )
    return None


def check_equations(what: str, eqns: Iterable[Any]) -> None:
    """Raises a ValueError for an equation that a part of a model cannot have on every mesh."""
    for eqn in eqns:
        name, given = eqn.primitive.name, eqn.params
        if name not in ("ppermute", "shard_map", "sharding_constraint"):
            continue
        where = _at(what, place_of_equation(eqn))
        if name == "ppermute":
            raise ValueError(
                f"{where} uses ppermute: stages run it in branches, where it would exchange with another "
                f"stage and give other numbers without an error; use all_gather or all_to_all, which send no "
                f"more than a ring of them"
            )
        specs = [*given.get("in_specs", ()), *given.get("out_specs", ())]
        parts = itertools.chain(*specs, getattr(given.get("sharding"), "spec", ()))
        axes = {axis for part in parts for axis in (part if isinstance(part, tuple) else [part])}
        over = ", ".join(sorted(map(repr, axes - {None})))
        raise ValueError(_has_mesh(where, f"{name} over {over or 'no axis'}"))


def _at(what: str, place: str) -> str:
    return f"{what} ({place})" if place else what


def _uses_axis(where: str, axis: str) -> str:
    """Of a collective along an axis that is not there."""
    if axis not in MESH_AXES:
        return (
            f"{where} uses a collective along {axis!r}, an axis that the task does not name; write "
            f'axes = ("{axis}",) in the task {_PAGE}'
        )
    who = "compiler" if axis == TENSOR else "engine"
    lay_out = f", lay x out by {_LAY_OUT}" * (axis == TENSOR)
    return (
        f"{where} uses a collective along {axis!r}, where the {who} alone exchanges: leave it "
        f"out{lay_out}, or use {_OWN_AXIS}"
    )


def _has_mesh(where: str, how: str) -> str:
    return (
        f"{where} asks for a mesh of its own ({how}), and it must run on any, where the engine has "
        f"divided the work already; use {_LAY_OUT} to lay x out by the names of its dims, and for exchanges "
        f"collectives along {_OWN_AXIS}"
    )
