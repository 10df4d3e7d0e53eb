"""What a batch may say besides what its model reads: parts with names, as fields or keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

SPLITS = ("train", "valid", "test")  # of the data
STARTS = "starts"  # the part that says whether carried state begins anew
RESETS = "resets"  # in which rows and at which time steps it does within a window
LENGTHS = "lengths"  # how many steps of each row are real; those after them are padding
RATE = "rate"  # what the learning rate of its step is multiplied by
WEIGHT = "weight"  # how much each place counts; 0 is padding


def check_split(split: str) -> None:
    """Raises a ValueError if a split is none of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; use one of {', '.join(SPLITS)}")


def part_of(batch: Any, name: str, default: Any = None) -> Any:
    """A field or key of a batch, if it has it."""
    if isinstance(batch, Mapping):
        return batch.get(name, default)
    return getattr(batch, name, default)


def with_part(batch: Any, name: str, value: Any) -> Any:
    """The batch with another value of a field or key that it has."""
    if isinstance(batch, Mapping):
        return {**batch, name: value}
    if hasattr(batch, "_replace"):
        return batch._replace(**{name: value})
    return dataclasses.replace(batch, **{name: value})


def starts_of(batch: Any) -> Any:
    """Whether carried state begins anew with this batch: its `starts`, or True."""
    return part_of(batch, STARTS, True)
