"""What every stage has to do, to hold and to send: a row for its parts, equal neighbouring layers in one.

FLOPs, and bytes kept and sent, are estimates; the weights are exact.
"""

import dataclasses
import itertools

from rich.table import Table

from jaxpar.base.axes import TENSOR
from jaxpar.base.console import make_table
from jaxpar.base.display import format_bytes, format_count, format_number
from jaxpar.base.stage_names import FIRST, LAST
from jaxpar.base.trees import whole_bytes
from jaxpar.layout import Layout, Outer


@dataclasses.dataclass(frozen=True)
class StageRow:
    """Equal parts of a model that stand beside each other on a stage.

    Attributes:
      stage: None is all of them.
      part: `first`, `last`, layers by their numbers, or "" for none.
      number: of parts.
      forward, backward: FLOPs of the matrix products of one of them for a unit.
      weight_bytes: of one of them.
      kept_bytes: that all of them keep of a unit until its backward pass.
      sent_bytes: of a unit, from the last of them to the next stage; cotangents that come back are as large.
    """

    stage: int | None
    part: str
    number: int = 1
    forward: float = 0.0
    backward: float = 0.0
    weight_bytes: int = 0
    kept_bytes: float = 0.0
    sent_bytes: float = 0.0


def stage_rows(layout: Layout) -> list[StageRow]:
    """The parts of a model in the order of the data, of a layout with stages."""
    facts, parallel, route = layout.facts, layout.parallel, layout.route
    unit = layout.microbatch_rows * (layout.chunk_len or 1)
    num_units = facts.batch_size * (facts.num_steps or 1) // unit
    (first_bytes, last_bytes), x_bytes = _outer_bytes(layout), whole_bytes(facts.passed)
    costs, begin = facts.costs, 0

    def of_layers(stage: int, begin: int, number: int) -> StageRow:
        kind = facts.kind_of[begin]
        forward, backward = costs.layers[begin]
        weights = sum(whole_bytes(state[kind]) for state in layout.of_row)
        kept = number * whole_bytes(layout.split_layers[kind].saved_and_room)
        kept *= not parallel.pipeline.remat
        part = f"{begin}-{begin + number - 1}" if number > 1 else str(begin)
        passes = forward / num_units, backward / num_units
        return StageRow(stage, part, number, *passes, weights, kept / num_units)

    def of_end(stage: int | None, part: str, weights: int) -> StageRow:
        forward, backward = costs.first if part == FIRST else costs.last
        return StageRow(stage, part, 1, forward / num_units, backward / num_units, weights)

    rows = [of_end(None, FIRST, first_bytes)] * layout.shares_first
    places = [*zip(route.stages, layout.placement, strict=True)]
    for place, (stage, number) in enumerate(places):
        own = [of_end(stage, FIRST, first_bytes)] * (place == 0 and not layout.shares_first)
        for _, equal in itertools.groupby(range(begin, begin + number), facts.kind_of.__getitem__):
            numbers = [*equal]
            own.append(of_layers(stage, numbers[0], len(numbers)))
        if place == len(places) - 1 and layout.head == LAST:
            own.append(of_end(stage, LAST, last_bytes))
        own = own or [StageRow(stage, "")]
        if parallel.pipeline.remat:  # what comes to the place is kept instead
            own[0] = dataclasses.replace(own[0], kept_bytes=x_bytes / num_units)
        if place + 1 < len(places) and places[place + 1][0] != stage:
            own[-1] = dataclasses.replace(own[-1], sent_bytes=x_bytes / num_units)
        rows += own
        begin += number
    return rows + [of_end(None, LAST, last_bytes)] * (layout.head != LAST)


def stage_table(layout: Layout) -> tuple[Table, str]:
    """These rows as a table, and what its numbers are of."""
    names = "stage", "part", ">forward", ">backward", ">weights", ">kept", ">sent"
    table = make_table(*names)
    for row in stage_rows(layout):
        times = f"{row.number} x " * (row.number > 1)
        table.add_row(
            "all" if row.stage is None else str(row.stage),
            row.part,
            *(
                times + format_number(flops) if flops else ""
                for flops in (row.forward, row.backward)
            ),
            times + format_bytes(row.weight_bytes) if row.weight_bytes else "",
            *(format_bytes(size) if size else "" for size in (row.kept_bytes, row.sent_bytes)),
        )
    unit = format_count(layout.microbatch_rows, "row")
    if layout.chunk_len:
        unit += f" x {format_count(layout.chunk_len, 'step')}"
    whole = ", before tensor splits them" * (layout.parallel.mesh.sizes[TENSOR] > 1)
    return table, f"estimated for a unit of {unit}{whole}: FLOPs of products, bytes kept and sent"


def _outer_bytes(layout: Layout) -> list[int]:
    """Of the variables that `first` uses, and `last`."""
    outer = Outer(layout, layout.abstract_model())
    return [
        sum(
            whole_bytes([leaves[n] for n in numbers])
            for leaves, numbers in zip(outer.leaves, used, strict=True)
        )
        for used in (outer.first, outer.last)
    ]
