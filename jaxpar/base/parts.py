"""Names that have a meaning in jaxpar: parts of a batch, and numbers of a run.

A user's arrays and metrics must not have them by chance: `check_parts` and `check_metrics` look.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from jaxpar.base.checks import require, require_instance

SPLITS = ("train", "valid", "test")  # of the data
STARTS = "starts"  # the part that tells whether the recurrent state is reset
RESETS = "resets"  # in which rows and at which time steps it does within a window
LENGTHS = "lengths"  # how many steps of each row are real; those after them are padding
RATE = "rate"  # what the learning rate of its step is multiplied by
WEIGHT = "weight"  # how much each place counts; 0 is padding
STATIC = "static"  # arrays [rows, ...] without time: one, or a dict of them


class Part(NamedTuple):
    """What a part of a batch must be.

    Attributes:
      dims: how many it may have.
      is_whole: whether its numbers are whole ones or bools; else any numbers will do.
    """

    dims: tuple[int, ...]
    is_whole: bool
    meaning: str


PARTS = {
    STARTS: Part((0,), True, "one bool: whether the recurrent state is reset before the batch"),
    RESETS: Part((2,), False, "numbers [rows, time], not 0 where a new sequence begins"),
    RATE: Part((0,), False, "one number: factor of the step's learning rate"),
    WEIGHT: Part(
        (1, 2), False, "numbers [rows] or [rows, time]: the weight of each row or time step"
    ),
    LENGTHS: Part((1,), True, "whole numbers [rows]: time steps of each row before its padding"),
}
LOSS = "loss"
# Names in the lines of a run's metrics, besides what is counted in a second.
NUMBERS = (
    "split", "step", LOSS, "weight", "grad_norm", "learning_rate", "seconds", "mfu", "skipped",
)  # fmt: skip


def check_part(name: str, dims: int, dtype: DTypeLike, what: str) -> None:
    """Checks an array of a batch whose name means something to jaxpar.

    Args:
      dims: how many it has.
      what: the array in words, such as "batch['rate'] of task Own".
    Raises:
      ValueError: it is something else under that name.
    """
    part, kind = PARTS[name], np.dtype(dtype).kind
    if dims not in part.dims or kind in "OSUMmc" or (part.is_whole and kind not in "biu"):
        raise ValueError(
            f"{what} is {np.dtype(dtype)} with {dims} dims, but {name!r} means {part.meaning}.\n"
            f"Fix: rename your array."
        )


def check_parts(batch: object, of: str) -> None:
    """Checks all parts of a batch whose names mean something to jaxpar.

    Args:
      of: whose batch it is, such as "of task Own".
    Raises:
      ValueError: as of `check_part`.
    """
    for name in PARTS:
        if (leaf := part_of(batch, name)) is not None:
            dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
            check_part(name, np.ndim(leaf), dtype, f"batch[{name!r}] {of}")


def check_keys(tree: object, what: str) -> None:
    """Checks that JAX can sort the names of arrays: it has no order for numbers and texts together.

    Args:
      tree: dicts, lists and tuples of arrays.
      what: the tree in words, such as "the batch of task Own".
    Raises:
      ValueError: a dict has a text as a name, and something else as another one.
    """
    if isinstance(tree, Mapping):
        others = [key for key in tree if not isinstance(key, str)]
        if others and len(others) < len(tree):
            raise ValueError(
                f"{what} has an array named {others[0]!r}, of type {type(others[0]).__name__}, "
                f"but other names are texts.\n"
                f"Fix: use a text, such as {str(others[0])!r}."
            )
        for value in tree.values():
            check_keys(value, what)
    elif isinstance(tree, tuple | list):
        for value in tree:
            check_keys(value, what)


def check_batches(batches: Any, task: str) -> None:
    """Checks the numbers of batches, which a user may have made.

    Args:
      task: name of the task that makes them.
    Raises:
      ValueError: these are no batches, or a number of them is not whole.
    """
    name = type(batches).__name__
    require(
        hasattr(batches, "batch"),
        f"make_batches of task {task} returns a {name}.\n"
        f"Fix: return batches, such as jaxpar.ArrayBatches(arrays, batch_size, seed).",
    )
    for member in ("batch_size", "num_windows"):
        number = getattr(batches, member, None)
        if number is not None:
            require_instance(f"{name}.{member}", number, int | np.integer, "a whole number")


def check_metrics(names: Iterable[str], unit: str, what: str) -> None:
    """Checks names of metrics, which stand beside a run's own numbers; a space counts as an underscore there.

    Args:
      unit: of the task.
      what: gives them, such as "`last` of Model".
    Raises:
      ValueError: one of them is a number of jaxpar's own, or two are the same.
    """
    taken = {*NUMBERS, f"{unit}_per_second"}
    for name in names:
        if (plain := str(name).replace(" ", "_")) in taken:
            raise ValueError(
                f"{what} gives a metric {name!r}, but another number of a run has that name.\n"
                f"Fix: rename it; {', '.join(NUMBERS)} and {unit}_per_second are taken."
            )
        taken.add(plain)


def check_split(split: str) -> None:
    """Raises a ValueError if a split is none of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}.\nFix: use one of {', '.join(SPLITS)}.")


def part_of(batch: object, name: str, default: object = None) -> Any:
    """A field or key of a batch, if it has it."""
    if isinstance(batch, Mapping):
        return batch.get(name, default)
    return getattr(batch, name, default)


def with_part(batch: Any, name: str, value: object) -> Any:
    """The batch with another value of a field or key that it has."""
    if isinstance(batch, Mapping):
        return {**batch, name: value}
    if hasattr(batch, "_replace"):
        return batch._replace(**{name: value})
    return dataclasses.replace(batch, **{name: value})


def starts_of(batch: object) -> Any:
    """Whether the recurrent state is reset before this batch: its `starts`, or True."""
    return part_of(batch, STARTS, True)
