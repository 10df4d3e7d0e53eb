"""Pictures of what a program does, and of what a step will cost: tables of bytes, memory and time."""

import dataclasses
import re
from collections.abc import Sequence

from rich.table import Table

from jaxpar.analysis.collectives import Collective
from jaxpar.analysis.program import ProgramReport, Total
from jaxpar.display import format_bytes, format_seconds, format_shape, show
from jaxpar.pictures.picture import Picture
from jaxpar.planning.cost import Comparison, Cost
from jaxpar.planning.planner import Ranking, describe
from jaxpar.planning.traffic import Traffic
from jaxpar.tables import FittingTable

NUM_MESHES = 12  # of a ranking


@show.register
def show_report(report: ProgramReport) -> Picture:
    """Collectives, totals, FLOPs and memory."""
    parts: list[Table | str] = ["no collectives"]
    if report.collectives:
        note = "\nbytes: of one run; sent: in all runs, by the busiest device of a ring"
        note += "; if: in a branch" * any(c.conditional for c in report.collectives)
        if any(c.beside is not None for c in report.collectives):
            note += "\nbeside: what computes between its start and its end; waits: nothing does"
        parts = [_collectives_table(report.collectives), note, "", _totals_table(report.totals), ""]
    facts = Table.grid(padding=(0, 2))
    if report.flops is not None:
        facts.add_row("FLOPs per device", f"{report.flops:,.0f}, the body of every loop once")
    if report.memory:
        facts.add_row("memory per device", str(report.memory))
    return Picture(*parts, facts, *report.notes)


@show.register
def show_cost(cost: Cost) -> Picture:
    """What is sent, FLOPs, memory, ticks and time."""
    sent = [_traffic_table(cost.traffic), ""] if cost.traffic else []
    facts = Table.grid(padding=(0, 2))
    memory = ", ".join(f"{k} {format_bytes(v)}" for k, v in dataclasses.asdict(cost.memory).items())
    facts.add_row("FLOPs per device", f"{cost.flops:,.0f} in matmuls")
    if cost.report and cost.report.memory:
        facts.add_row("memory per device", str(cost.report.memory))
    facts.add_row("memory, estimated", f"{format_bytes(cost.memory.total)}: {memory}")
    facts.add_row("ticks", f"{cost.num_ticks}, stages idle in {cost.bubble:.1%} of their turns")
    if seconds := cost.seconds:
        parts = ", ".join(f"{k} {v * 1e3:.3g}" for k, v in dataclasses.asdict(seconds).items())
        facts.add_row("predicted time", f"{seconds.total * 1e3:.3g} ms: {parts}")
    return Picture(*sent, facts)


@show.register
def show_comparison(comparison: Comparison) -> Picture:
    """What was predicted, compiled and measured, side by side."""
    cost, memory = comparison.cost, comparison.report.memory
    table = FittingTable("", "axes", ">predicted", ">compiled", ">measured", ">difference")
    for op, axes in sorted({*comparison.predicted, *comparison.compiled}):
        sums = (side.get((op, axes), 0) for side in (comparison.predicted, comparison.compiled))
        table.add_row(op, " ".join(axes), *_bytes_side_by_side(*sums))
    if memory is not None:
        table.add_row(
            "memory per device", "", *_bytes_side_by_side(cost.memory.total, memory.total)
        )
    if comparison.time_error is not None and cost.seconds and comparison.measured_seconds:
        predicted, measured = cost.seconds.total * 1e3, comparison.measured_seconds * 1e3
        row = f"{predicted:.4g} ms", "", f"{measured:.4g} ms", f"{comparison.time_error:+.1%}"
        table.add_row("step", "", *row)
    return Picture(table)


@show.register
def show_ranking(ranking: Ranking) -> Picture:
    """The best layout of each mesh, and why the first is the first."""
    columns = ("layers", "head", "bubble", "ticks", "sending", "update")
    best = ranking.best_of_meshes
    table = FittingTable("config", ">step", *(f">{name}" for name in columns), ">memory")
    for cost in best[:NUM_MESHES]:
        seconds = cost.seconds
        assert seconds is not None  # it is ranked by them
        shares = (f"{getattr(seconds, name) / seconds.total:.0%}" for name in columns)
        words = describe(cost.parallel), format_seconds(seconds.total)
        table.add_row(*words, *shares, cost.memory_text)
    is_estimated = any(cost.report is None for cost in best[:NUM_MESHES])
    return Picture(
        f"{ranking.num_devices} devices of {ranking.hardware.name}; {ranking.num_configs:,} configs, "
        f"the best of each mesh:\n",
        table,
        *["~: estimated, not compiled"] * is_estimated,
        f"\n{ranking.explain()}",
    )


def _collectives_table(collectives: Sequence[Collective]) -> Table:
    columns = (
        "collective",
        "axes",
        "payload",
        ">bytes",
        ">runs",
        "in loops",
        ">sent",
        "pass",
        "module",
    )
    overlap = any(c.beside is not None for c in collectives)
    table = FittingTable(*columns, *["beside"] * overlap)
    for c in sorted(collectives, key=lambda c: -(c.count or 1) * c.sent_bytes):
        dims = format_shape(c.shapes[0])
        more = f" +{len(c.shapes) - 1}" if len(c.shapes) > 1 else ""
        loops = "x".join("?" if trips is None else str(trips) for trips in c.trip_counts)
        table.add_row(
            c.op.removeprefix("collective-"),
            " ".join(c.axes),
            f"{c.dtypes[0]} {dims}{more}",
            format_bytes(c.bytes),
            "?" if c.count is None else f"{c.count:,}",
            loops + " if" * c.conditional,
            "?" if c.count is None else format_bytes(c.count * c.sent_bytes),
            c.phase if c.phase != "neither" else "",
            re.sub(rf"^{c.phase}(/|$)", "", c.module) or c.source,
            *[_beside(c)] * overlap,
        )
    return table


def _beside(collective: Collective) -> str:
    """The first parts of the program that compute beside a transfer, and how many more do."""
    parts = [*dict.fromkeys(word.partition("/")[0] for word in collective.beside or ())]
    more = f" +{len(parts) - 2}" if len(parts) > 2 else ""
    return " ".join(parts[:2]) + more or "waits"


def _totals_table(totals: Sequence[Total]) -> Table:
    table = FittingTable("axes", ">collectives", ">runs", ">payload in all", ">sent by a device")
    for total in totals:
        table.add_row(
            " ".join(total.axes),
            str(total.collectives),
            f"{total.count:,}" + f" + {total.unknown} x ?" * bool(total.unknown),
            format_bytes(total.bytes),
            format_bytes(total.sent_bytes),
        )
    return table


def _traffic_table(traffic: Sequence[Traffic]) -> Table:
    table = FittingTable("sent", "collective", "axes", ">bytes", ">runs", ">sent in all")
    for part in sorted(traffic, key=lambda part: -part.count * part.sent_bytes):
        table.add_row(
            part.what,
            part.op.removeprefix("collective-"),
            " ".join(part.axes),
            format_bytes(round(part.bytes)),
            f"{part.count:,.0f}",
            format_bytes(round(part.count * part.sent_bytes)),
        )
    return table


def _bytes_side_by_side(predicted: int, compiled: int) -> tuple[str, str, str, str]:
    difference = "none" if predicted == compiled else f"{predicted - compiled:+,} bytes"
    if compiled and predicted != compiled:
        difference += f" ({predicted / compiled - 1:+.1%})"
    return f"{predicted:,}", f"{compiled:,}", "", difference
