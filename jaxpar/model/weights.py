"""Weights in storage, before they are read: the argument of a task's `take_weights`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rows:
    """What tensors are read from: an array [rows, ...], of which each is a row.

    Attributes:
      read: (numbers of rows, and for each further dim a slice or numbers, which one of them may have) ->
        values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Sequence[int], tuple[Any, ...]], np.ndarray]

    @classmethod
    def of_one(cls, shape: tuple[int, ...], dtype: Any, make: Callable[[], np.ndarray]) -> "Rows":
        """The one tensor that a function makes, or opens, whenever it is read."""
        return cls((1, *shape), np.dtype(dtype), lambda _, index: make()[None][:, *index])


class Tensor(NamedTuple):
    """A tensor that can be read."""

    rows: Rows
    row: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.rows.shape[1:]

    @property
    def dtype(self) -> np.dtype:
        """Of its numbers, as they are stored."""
        return self.rows.dtype

    def each_row(self) -> list["Tensor"]:
        """Each of its rows as a tensor."""

        def read(rows: Sequence[int], index: tuple[Any, ...]) -> np.ndarray:
            return self.rows.read([self.row], (rows, *index))[0]

        rows = Rows(self.shape, self.dtype, read)
        return [Tensor(rows, number) for number in range(self.shape[0])]

    def whole(self) -> np.ndarray:
        """All of it."""
        return self.rows.read([self.row], (slice(None),) * len(self.shape))[0]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights where they lie, before they are read.

    Attributes:
      source: what they are of, in words.
      tensors: by their names.
      texts: that came with them, such as a file's metadata, by their names.
      rows: for a tensor, of no layer, of which rows are taken, by its name: the dim that they are along, and
        for each row of the model the one that it takes, -1 for none.
      note: what is to be said of that.
    """

    source: str
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, str]
    rows: Mapping[str, tuple[int, np.ndarray]] = dataclasses.field(default_factory=dict)
    note: str = ""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """What a tensor gives."""
        shape = list(self.tensors[name].shape)
        if name in self.rows:
            dim, chosen = self.rows[name]
            shape[dim] = len(chosen)
        return tuple(shape)
