"""The cycles that a TPU's compiler estimates for a step. Transfers are not in them."""

import dataclasses
import math

from jaxpar.analysis import hlo
from jaxpar.analysis.collectives import _scopes
from jaxpar.analysis.program import _with_units
from jaxpar.pipeline.tables import TickTable


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an instruction runs, as a collective says it."""

    module: str
    trip_counts: tuple[int | None, ...]
    conditional: bool


def count_cycles(text: str, table: TickTable | None) -> int:
    """The cycles of all instructions of a program times their runs; 0 for a program of a GPU.

    Args:
      table: of the ticks, if the program is a pipeline: it tells how often each part of a tick runs.
    """
    total = 0
    for visit in hlo.Module(text).visits():
        if visit.callers and visit.callers[-1].opcode == "fusion":
            continue  # the fusion has them
        cycles = int(hlo.attribute(visit.instruction, '"estimated_cycles":"') or 0)
        total += cycles * _runs(visit, table) if cycles else 0
    return total


def _runs(visit: hlo.Visit, table: TickTable | None) -> int:
    """How often an instruction runs. A loop of unknown length is that of the ticks."""
    trips = visit.trip_counts
    if table is not None and trips[:1] == (None,):
        # The nearest caller that names a part of a tick tells.
        for each in (visit.instruction, *reversed(visit.callers)):
            place = _Place(_scopes(each.op_name), trips, visit.conditional)
            if (known := _with_units(place, table).trip_counts)[:1] != (None,):
                trips = known
                break
    ticks = 1 if table is None else int(table.num_ticks)
    return math.prod(ticks if turns is None else turns for turns in trips)
