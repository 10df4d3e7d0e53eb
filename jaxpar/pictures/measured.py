"""A measured step as a picture: the predicted and the measured times of each stage."""

from rich.table import Table

from jaxpar.analysis.measured import PARTS, WEIGHTS, MeasuredStep, Span
from jaxpar.base.console import make_table
from jaxpar.base.display import format_count, show
from jaxpar.pictures.chart import Chart, Key, Row
from jaxpar.pictures.picture import Drawing
from jaxpar.pictures.timeline import legend_of, unit_colors
from jaxpar.pipeline.lanes import Block, Schedule
from jaxpar.pipeline.loop import BACKWARD, FORWARD, HEAD

WIDTH = 820  # of the time axis, in pixels
REST = "#8c959f"  # the colour of work that is not a unit of a microbatch


@show.register
def show_measured(step: MeasuredStep) -> Drawing:
    """Two rows per stage, in ms; a table of the stages; the prediction, and what measuring costs."""
    caption = _caption(step)
    return Drawing(_chart(step, caption), _table(step), f"\n{caption}")


def _table(step: MeasuredStep) -> Table:
    parts = PARTS if step.schedule.weights else PARTS[:-1]
    table = make_table("stage", *(f">{name}, ms" for name in (*parts, "idle")), ">idle")
    for stage, busy in enumerate(step.busy_seconds):
        idle = step.loop_seconds - busy
        cells = [*(sum(step.seconds_of(stage, part)) for part in parts), idle]
        share = f"{idle / step.loop_seconds:.1%}"
        table.add_row(str(stage), *(f"{1000 * seconds:.2f}" for seconds in cells), share)
    return table


def _caption(step: MeasuredStep) -> str:
    named = zip(("forward", "backward", "W", "head"), step.unit_seconds, strict=True)
    most = ((1000 * seconds_S.max(), name) for name, seconds_S in named if seconds_S.any())
    units = ", ".join(f"{ms:.2f} ms {name}" for ms, name in most)
    traced, plain = 1000 * step.traced_seconds, 1000 * step.plain_seconds
    cost = f"With the profiler a step takes {traced:.1f} ms, without it {plain:.1f} ms."
    devices, cores = format_count(step.num_devices, "device"), format_count(step.num_cores, "core")
    share = f"{devices} on {cores}"
    if step.num_devices > step.num_cores:
        waits = 1 - step.num_cores / step.num_devices
        share = f"{devices} share {cores}, so each waits at least {waits:.0%} of the time, also within units"
    return (
        f"{_title(step)} from the median unit of each stage, at most {units}.\n"
        f"Idle time by cause: {step.bubble - step.late:.1%} the schedule (with measured unit times), "
        f"{step.late:.1%} waiting for data or a core.\n"
        f"The pipeline takes {1000 * step.loop_seconds:.1f} ms (predicted "
        f"{1000 * step.predicted_seconds:.1f} ms) of a step of {1000 * step.step_seconds:.1f} ms. {cost}\n"
        f"{share}."
    )


def _title(step: MeasuredStep) -> str:
    return f"{step.schedule.title}: idle {step.bubble:.1%}, predicted {step.predicted_bubble:.1%}"


def _chart(step: MeasuredStep, caption: str) -> Chart:
    schedule, costs = step.schedule, [1000 * seconds_S for seconds_S in step.unit_seconds]
    end, blocks = float(schedule.half_times(costs)[-1]), schedule.blocks(costs)
    units = [b._replace(label="H", unit=-1) if b.letter == "H" else b for b in blocks]
    rows, loop_end = [], 1000 * step.loop_seconds
    for stage in range(schedule.num_stages):
        top = 2.3 * stage
        predicted = [block for block in units if block.stage == stage]
        measured = [_block(span, schedule) for span in step.spans if span.stage == stage]
        rows.append(Row(f"stage {stage} predicted", top, [(0, end)], predicted))
        rows.append(Row("measured", top + 1, [(0, loop_end)], measured))
    return Chart(
        title=_title(step),
        rows=rows,
        colors={**unit_colors(schedule), -1: REST},
        unit="ms",
        width=WIDTH,
        legend=[*legend_of(schedule), Key((REST,), "H: what follows the layers, and the loss")],
        caption=caption,
    )


def _block(span: Span, schedule: Schedule) -> Block:
    times = 1000 * span.start, 1000 * span.seconds
    if span.part == HEAD:
        return Block(span.stage, *times, "H", "H", -1)
    letter, lane = {FORWARD: ("F", schedule.forward), BACKWARD: ("B", schedule.backward)}.get(
        span.part
    ) or ("W", schedule.weights[int(span.part.removeprefix(WEIGHTS))])
    unit, group = (int(a[span.tick, span.stage]) for a in (lane.unit, lane.group))
    return Block(span.stage, *times, schedule.label(letter, unit, group), letter, unit)
