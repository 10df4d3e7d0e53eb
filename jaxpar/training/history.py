"""The numbers of a run by its steps, from the lines of its metrics: as columns, and as curves."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpar.base.display import Shown

_BARS = "▁▂▃▄▅▆▇█"


def columns_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of equal lengths, a row for each step of which there are numbers.

    Args:
      lines: of metrics.jsonl; those of skipped steps are left out.
    Returns:
      `step`, and numbers named as trackers have them, after their split: `train/loss`, `valid/loss`; NaN
      where a step has none.
    """
    rows = dict[int, dict[str, Any]]()
    for line in lines:
        if line["split"] != "skipped":
            rows.setdefault(line["step"], {}).update(
                (f"{line['split']}/{name}", math.nan if number is None else number)
                for name, number in line.items()
                if name not in ("split", "step")
            )
    names = dict.fromkeys(name for row in rows.values() for name in row)
    ordered = dict(sorted(rows.items()))
    columns = {name: [row.get(name, math.nan) for row in ordered.values()] for name in names}
    return {"step": [*ordered], **columns}


@dataclasses.dataclass
class Curves(Shown):
    """Losses against the step; a notebook shows them as a picture.

    Attributes:
      num_steps: of the whole run.
      points: of "train" and "valid", (step, loss) in their order, of those that are finite.
    """

    num_steps: int
    points: dict[str, list[tuple[int, float]]] = dataclasses.field(
        default_factory=lambda: {"train": [], "valid": []}
    )

    def add(self, *lines: Mapping[str, Any]) -> "Curves":
        """These curves, with lines of metrics, of any split."""
        for line in lines:
            if line["split"] in self.points and math.isfinite(line["loss"]):
                self.points[line["split"]].append((line["step"], line["loss"]))
        return self


def thinned(points: Sequence[Any], most: int) -> list[Any]:
    """Some of them, evenly spread, the last among them."""
    every = max(-(-len(points) // most), 1)
    return [*points[(len(points) - 1) % every :: every]]


def sparkline(points: Sequence[tuple[int, float]], width: int) -> str:
    """Losses as bars of text, the lowest and the highest as high as can be."""
    losses = [loss for _, loss in thinned(points, width)]
    low, high = min(losses, default=0.0), max(losses, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((loss - low) * scale)] for loss in losses)
