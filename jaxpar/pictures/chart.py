"""Work as blocks in time, a row a device: what schedules, measured steps and parallelisms are drawn with.

A `Chart` is what is to be seen; `figures.draw_chart` draws it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpar.pipeline.lanes import Block

ROW = 26  # pixels of a row
LETTER = 6.4  # pixels that letters 11 pixels high take
IDLE = "#e4e8ec"  # the color of waiting
FEET = {"F": 0.0, "B": 0.45, "W": 0.2, "H": 0.0}  # how dark the band along the bottom of a block is


class Key(NamedTuple):
    """An entry of a legend: colors side by side, and what they mean."""

    colors: Sequence[str]
    text: str


class Row(NamedTuple):
    """What is done beside a name.

    Attributes:
      top: where the row is, in heights of a row.
      spans: begin and end of the time that there is; without a block it is idle.
    """

    name: str
    top: float
    spans: Sequence[tuple[float, float]]
    blocks: Sequence[Block]


class Chart(NamedTuple):
    """Rows above an axis of time.

    Attributes:
      title: of few words.
      rows: from top to bottom.
      colors: of each unit of the blocks.
      unit: what the axis counts.
      width: pixels of the whole time.
      legend: below the axis.
      caption: lines below the legend.
      marks: places on the axis, and what is written there; without any they are at round numbers.
      heads: lines of text, by where they are in heights of a row; what has a colon is bold before it.
      row: pixels of the height of a row.
      moves: time goes by, again and again, where pictures move.
    """

    title: str
    rows: Sequence[Row]
    colors: Mapping[int, str]
    unit: str
    width: float
    legend: Sequence[Key]
    caption: str
    marks: Sequence[tuple[float, str]] = ()
    heads: Sequence[tuple[float, str]] = ()
    row: float = ROW
    moves: bool = False

    @property
    def left(self) -> float:
        """Pixels before time begins."""
        return LETTER * max(len(row.name) for row in self.rows) + 8

    @property
    def scale(self) -> float:
        """Pixels of a unit of time."""
        return self.width / max(end for row in self.rows for _, end in row.spans)

    def fits(self, block: Block) -> bool:
        """Whether there is room for a block's label."""
        return block.label != "" and LETTER * len(block.label) + 4 < block.cost * self.scale

    def marks_with_room(self) -> Iterator[tuple[float, str]]:
        """The marks whose labels do not touch the one before."""
        free = -math.inf
        for place, label in self.marks:
            half = (LETTER * len(label) / 2 + 3) / self.scale
            if place - half >= free:
                yield place, label
                free = place + half
