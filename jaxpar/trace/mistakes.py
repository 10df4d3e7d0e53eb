"""What a part of a model cannot do where it is traced, in words: with its name, its line, and what to use."""

import itertools
import re
from collections.abc import Iterable

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.ref import AbstractRef

from jaxpar.base.axes import MESH_AXES, TENSOR
from jaxpar.trace.source_lines import source_line_of_equation, source_line_of_error

# Where Python asks for the values of a traced array: what JAX raises, a part of its text, what was done, and
# what to use.
_BRANCHES = (
    "decides in Python (`if`, `while`, `and`, `or`) by an array",
    "jnp.where or jax.lax.cond",
)
_TO_PYTHON = (
    "makes a number of Python of an array, or a size",
    "the array itself, x.astype(int), or x.shape",
)
_NEEDS_VALUES = (
    (jax.errors.TracerBoolConversionError, "", *_BRANCHES),
    (ValueError, "truth value of an array", *_BRANCHES),
    (jax.errors.TracerIntegerConversionError, "", "counts in Python by an array, as in range(n) or parts[n]",
     "jax.lax.fori_loop for a loop, and jnp.stack(parts)[n] for one of a list"),
    (jax.errors.TracerArrayConversionError, "", "gives an array to NumPy",
     "the function of jax.numpy: jnp, not np"),
    (jax.errors.NonConcreteBooleanIndexError, "", "takes as many elements as a mask has, as in x[mask]",
     "jnp.where(mask, x, 0)"),
    (IndexError, "static", "cuts an array where another one says, as in x[:n]",
     "jax.lax.dynamic_slice for a known size, or jnp.where"),
    (TypeError, "scalar arrays can be converted to", *_TO_PYTHON),
    (jax.errors.ConcretizationTypeError, "", *_TO_PYTHON),
)  # fmt: skip
_UNBOUND_AXIS = re.compile(r"unbound axis name: (\w+)")
_NO_MESH = re.compile(r"context mesh|mesh context|mesh in context|shard_map")

_OWN_AXIS = "an axis of your own (docs/build/custom-axes.md)"
_LAY_OUT = 'at.layout(x, "batch", None, "hidden")'


def why_refused(what: str, error: Exception, *, has_key: bool) -> str | None:
    """The mistake that an error of tracing tells; None if it is none of those known.

    Args:
      what: the part of the model.
      error: as it was caught.
      has_key: False if the same went well with an `at.key`.
    """
    where, text = _at(what, source_line_of_error(error)), " ".join(str(error).split())
    for kind, part, does, use in _NEEDS_VALUES:
        if isinstance(error, kind) and part in text:
            return f"{where} {does}, but traced arrays have no values\nFix: use {use}."
    if axis := _UNBOUND_AXIS.search(text):
        return _uses_axis(where, axis[1])
    if _NO_MESH.search(text):
        return _has_mesh(where, "by shard_map or a PartitionSpec")
    if not has_key and isinstance(error, TypeError | AttributeError):
        return (
            f"{where} needs at.key, which is None in evaluation and predictions "
            f"({type(error).__name__}: {text})\n"
            f"Fix: use jaxpar.nn.dropout(x, rate, at), or at.draw(...) only if at.key is not None."
        )
    return None


def check_no_refs(what: str, program: Jaxpr) -> None:
    """Raises a ValueError for a Ref that a program reads or writes, and that was there before it."""
    for v in program.constvars:
        if isinstance(v.aval, AbstractRef):
            users = (source_line_of_equation(eqn) for eqn in program.eqns if v in eqn.invars)
            raise ValueError(has_ref(_at(what, next(users, "")), "a Ref from outside"))


def has_ref(where: str, ref: str) -> str:
    """Of a part of a model that has a Ref."""
    return (
        f"{where} has {ref}: with remat it is read again after it was written, so gradients are wrong\n"
        f"Fix: keep numbers that change in a layer's carry, and others in a plain nnx.Variable."
    )


def check_equations(what: str, eqns: Iterable[JaxprEqn]) -> None:
    """Raises a ValueError for an equation that a part of a model cannot have on every mesh."""
    for eqn in eqns:
        name, given = eqn.primitive.name, eqn.params
        if name not in ("ppermute", "shard_map", "sharding_constraint"):
            continue
        where = _at(what, source_line_of_equation(eqn))
        if name == "ppermute":
            raise ValueError(
                f"{where} uses ppermute, which would exchange with another stage\n"
                f"Fix: use all_gather or all_to_all, which send no more than a ring of them."
            )
        specs = [*given.get("in_specs", ()), *given.get("out_specs", ())]
        parts = itertools.chain(*specs, getattr(given.get("sharding"), "spec", ()))
        axes = {axis for part in parts for axis in (part if isinstance(part, tuple) else [part])}
        over = ", ".join(sorted(map(repr, axes - {None})))
        raise ValueError(_has_mesh(where, f"{name} over {over or 'no axis'}"))


def _at(what: str, source_line: str) -> str:
    return f"{what} ({source_line})" if source_line else what


def _uses_axis(where: str, axis: str) -> str:
    """Of a collective along an axis that is not there."""
    if axis not in MESH_AXES:
        return (
            f"{where} uses a collective along {axis!r}, an axis that the task does not name\n"
            f'Fix: write axes = ("{axis}",) in the task (docs/build/custom-axes.md).'
        )
    lay_out = f", lay x out by {_LAY_OUT}" * (axis == TENSOR)
    return (
        f"{where} uses a collective along {axis!r}, where jaxpar alone exchanges\n"
        f"Fix: leave it out{lay_out}, or use {_OWN_AXIS}."
    )


def _has_mesh(where: str, how: str) -> str:
    return (
        f"{where} asks for a mesh of its own ({how}), but it must run on any\n"
        f"Fix: use {_LAY_OUT} by the names of dims, or collectives along {_OWN_AXIS}."
    )
