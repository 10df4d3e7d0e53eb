"""A pipeline's step as it ran, beside its schedule: when each stage worked, and when it waited.

The profiler writes down when each operation of the program that trains began and ended. The loop over ticks
runs a unit in a branch of a conditional, and nothing in the other: its n-th run is tick n.
"""

import bisect
import dataclasses
import math
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.box
from jax.sharding import Mesh
from rich.table import Table

from jaxpar.analysis.hlo import Module
from jaxpar.config import Config, RunConfig
from jaxpar.data.streams import Batch
from jaxpar.pictures.blocks import (
    IDLE,
    LEFT,
    Block,
    Legend,
    block_svg,
    legend_html,
    svg_file,
)
from jaxpar.pictures.picture import Tables, color_of
from jaxpar.pictures.timeline import blocks_of, unit_color
from jaxpar.pipeline.engine import BACKWARD, FORWARD, HEAD
from jaxpar.pipeline.schedule import Schedule
from jaxpar.state import init_state
from jaxpar.step import batch_sharding, make_train_step, step_schedule
from jaxpar.training.profiler import Operation, read_trace, trace

WIDTH, ROW, GAP = 820, 20, 8  # pixels: of the time axis, of a row, between stages
REST = "#8c959f"  # the colour of work that is no unit of a microbatch
_PARTS = (FORWARD, HEAD, BACKWARD)
_BRANCH = re.compile(rf"/while/body/(?:closed_call/)?({'|'.join(_PARTS)})/cond$")


class Span(NamedTuple):
    """A piece of work.

    Attributes:
      part: `FORWARD`, `HEAD` or `BACKWARD`.
      start, seconds: since the loop began; how long.
    """

    stage: int
    tick: int
    part: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class MeasuredStep(Tables):
    """When the stages of a pipeline worked in one step, and when they waited.

    Attributes:
      schedule: that the step follows.
      spans: of the first data-parallel group, stage by stage.
      loop_seconds: from the first to the last tick.
      step_seconds: of the whole step, from the first operation of its stages to the last.
      traced_seconds, plain_seconds: median step as seen from outside, with the profiler on and off.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    loop_seconds: float
    step_seconds: float
    traced_seconds: float
    plain_seconds: float

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """In the loop, of each stage."""
        return tuple(
            sum(sum(self._seconds(s, part)) for part in _PARTS)
            for s in range(self.schedule.num_stages)
        )

    @property
    def bubble(self) -> float:
        """Share of the loop's stage-time in which a stage waits, or moves data."""
        return 1 - sum(self.busy_seconds) / (self.loop_seconds * self.schedule.num_stages)

    @property
    def unit_seconds(self) -> tuple[float, float]:
        """A forward and a backward unit, where they take longest: the median of the slowest stage."""
        stages = range(self.schedule.num_stages)
        forward = max(statistics.median(self._seconds(s, FORWARD)) for s in stages)
        backward = max(
            statistics.median(self._seconds(s, BACKWARD))
            + statistics.median(self._seconds(s, HEAD) or [0.0])
            for s in stages
        )
        return forward, backward

    @property
    def predicted_bubble(self) -> float:
        """What the schedule has, with units that take `unit_seconds` on every stage."""
        return self.schedule.bubble_at(*self.unit_seconds)

    def _seconds(self, stage: int, part: str) -> list[float]:
        """Of each unit; it may be in two pieces, the embedding and the layers."""
        seconds: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if (span.stage, span.part) == (stage, part):
                seconds[span.tick] += span.seconds
        return list(seconds.values())

    def parts(self) -> Iterator[Table | str]:
        """A row a stage, then what is predicted, and what measuring costs."""
        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("stage")
        for name in (*_PARTS, "idle"):
            table.add_column(f"{name}, ms", justify="right")
        table.add_column("idle", justify="right")
        for s, busy in enumerate(self.busy_seconds):
            idle = self.loop_seconds - busy
            cells = [*(sum(self._seconds(s, part)) for part in _PARTS), idle]
            share = f"{idle / self.loop_seconds:.1%}"
            table.add_row(str(s), *(f"{1000 * seconds:.2f}" for seconds in cells), share)
        yield table
        yield f"\n{self._caption()}"

    def _caption(self) -> str:
        forward, backward = (1000 * seconds for seconds in self.unit_seconds)
        cost = self.traced_seconds / self.plain_seconds - 1
        return (
            f"{self.schedule.kind}: idle {self.bubble:.1%}, predicted {self.predicted_bubble:.1%} with "
            f"{forward:.2f} ms a forward and {backward:.2f} ms a backward unit.\n"
            f"The loop takes {1000 * self.loop_seconds:.1f} ms of a step of "
            f"{1000 * self.step_seconds:.1f} ms; the profiler makes a step {cost:+.0%} longer, "
            f"{1000 * self.traced_seconds:.1f} ms for {1000 * self.plain_seconds:.1f} ms."
        )

    def to_html(self) -> str:
        """The stages in time, each below what is predicted of it; then the table."""
        drawing, width, height = self._draw()
        svg = (
            f'<svg role="img" aria-label="a measured step" width="{width:.0f}" height="{height:.0f}">'
            f"{drawing}</svg>"
        )
        return svg + legend_html(self._legend()) + super().to_html()

    def to_svg(self) -> str:
        """The picture as a file of SVG."""
        return svg_file(*self._draw(), self._legend(), *self._caption().split("\n"))

    _repr_svg_ = to_svg
    # A dataclass would make one of its own.
    __repr__ = Tables.__repr__

    def rows(self) -> list[tuple[str, float, list[Block]]]:
        """Name, end and units of each row, in ms: of a stage what is predicted, then what was."""
        predicted = blocks_of(self.schedule, *(1000 * seconds for seconds in self.unit_seconds))
        end = max(block.start + block.cost for block in predicted)
        rows = []
        for stage in range(self.schedule.num_stages):
            units = [block for block in predicted if block.stage == stage and block.label]
            spans = [self._block(span) for span in self.spans if span.stage == stage]
            rows.append((f"stage {stage} predicted", end, units))
            rows.append(("measured", 1000 * self.loop_seconds, spans))
        return rows

    def _block(self, span: Span) -> Block:
        lane = self.schedule.backward if span.part == BACKWARD else self.schedule.forward
        start, cost = 1000 * span.start, 1000 * span.seconds
        is_forward = span.part != BACKWARD
        if span.part == HEAD:
            return Block(span.tick, span.stage, start, cost, is_forward, "H", REST)
        unit, group = (int(a[span.tick, span.stage]) for a in (lane.unit, lane.group))
        label = self.schedule.label("F" if is_forward else "B", unit, group)
        color = unit_color(self.schedule, unit)
        return Block(span.tick, span.stage, start, cost, is_forward, label, color)

    def _draw(self) -> tuple[str, float, float]:
        rows, left = self.rows(), LEFT + 62
        last = max(end for _, end, _ in rows)
        scale = WIDTH / last
        bottom = 4 + (2 * ROW + GAP) * self.schedule.num_stages
        parts = []
        for i, (name, end, blocks) in enumerate(rows):
            y = 4 + (2 * ROW + GAP) * (i // 2) + ROW * (i % 2)
            parts.append(
                f'<text x="{left - 8}" y="{y + 14}" text-anchor="end" class="{"dim" * (i % 2)}">{name}</text>'
                f'<rect x="{left}" y="{y + 1}" width="{end * scale:.1f}" height="{ROW - 2}" '
                f'style="fill:{IDLE}"/>'
            )
            for block in blocks:
                x, width = left + block.start * scale, block.cost * scale
                fits = width > 6.6 * len(block.label) + 4
                parts.append(block_svg(block, x, y, width, ROW, labelled=fits))
        for ms in _round_steps(last):
            x = left + ms * scale
            parts.append(
                f'<path class="tick" d="M{x:.1f} {bottom}v5"/><text class="dim" x="{x:.1f}" '
                f'y="{bottom + 17}" text-anchor="middle">{ms:g}</text>'
            )
        parts.append(
            f'<text class="dim" x="{left - 8}" y="{bottom + 17}" text-anchor="end">ms</text>'
        )
        return "".join(parts), left + WIDTH + 16, bottom + 22

    def _legend(self) -> Legend:
        s = self.schedule
        legend: list[Any] = [
            ((color_of(m),), f"microbatch {m}") for m in range(min(s.num_microbatches, 7))
        ]
        if s.num_microbatches > 7:
            legend.append(((), "and so on, from the first colour again"))
        if s.num_chunks > 1:
            legend.append(((), "paler: later chunks of time"))
        return [
            *legend,
            ((), "dark foot: backward"),
            ((REST,), "the head: softmax and loss"),
            ((IDLE,), "idle"),
        ]


def measure_step(
    config: RunConfig, mesh: Mesh | None = None, *, num_steps: int = 5
) -> MeasuredStep:
    """Runs the training step of a pipeline on random tokens, and reads from the profiler who worked when.

    It is the same program that trains; what the profiler costs is measured and said. Simulated devices that
    are more than the machine has cores take turns on them, and so wait where real ones would not.

    Args:
      config: with `vocab_size`; nothing is trained or written.
      mesh: of `config.mesh`; None builds it.
      num_steps: with the profiler on, and off; the one in the middle by length is shown.
    Raises:
      ValueError: there is no pipeline to measure, or no way to measure it here.
    """
    mesh = config.mesh.build() if mesh is None else mesh
    _check(config, mesh, num_steps)
    assert isinstance(config, Config)
    step = make_train_step(config, mesh)
    state = init_state(config, mesh)
    shape = (config.data.batch_size, config.data.seq_len + 1)
    tokens_BT = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size or 0)
    rows_BT = (tokens_BT[:, :-1], tokens_BT[:, 1:])
    batch = Batch(*jax.device_put(rows_BT, batch_sharding(mesh, config)), starts=True)
    compiled, plan = step.lower(state, batch).compile(), step.full_plan
    assert plan is not None

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = compiled(state, batch, plan)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    run()
    plain = statistics.median(run() for _ in range(num_steps))
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            traced = statistics.median(run() for _ in range(num_steps))
        traces = _steps(read_trace(folder), _find_branches(compiled.as_text()))
    schedule = step_schedule(config, config.shares[0])
    busy = {FORWARD: schedule.forward.unit >= 0, BACKWARD: schedule.backward.unit >= 0}
    # Every stage has its part of a split head, and else the last stage all of it.
    has_head_S = np.arange(schedule.num_stages) >= (
        0 if config.pipeline.head == "sharded" else schedule.num_stages - 1
    )
    busy[HEAD] = (np.asarray(plan.head)[0, : schedule.num_ticks, :1] >= 0) & has_head_S
    stages = [device.id for device in mesh.devices[0, :, 0]]
    measured = [_measure(found, stages, busy) for found in traces]
    middle = sorted(measured, key=lambda m: m[1])[len(measured) // 2]
    return MeasuredStep(schedule, *middle, traced, plain)


def _check(config: RunConfig, mesh: Mesh, num_steps: int) -> None:
    if not isinstance(config, Config) or config.mesh.stage == 1:
        raise ValueError("there is no pipeline to measure; give a mesh with stages, such as pp4")
    platform = mesh.devices.flat[0].platform
    if platform != "cpu":
        raise ValueError(
            f"on {platform} the profiler does not tell where a unit begins; use simulated devices, or look "
            f"at the trace of train --profile"
        )
    if config.train.update == "host":
        raise ValueError("update='host' is not one program; measure it with update='replicated'")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be 1 or more")


@dataclasses.dataclass
class _Branch:
    """The runs of a conditional on a device: when each began, and all that ran in them; seconds."""

    part: str
    begun: list[float] = dataclasses.field(default_factory=list)
    inside: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def runs(self) -> Iterator[tuple[float, float]]:
        """Begin and end, in order. An event of the conditional itself may end before what is in it."""
        begun = sorted(self.begun)
        ends = list(begun)
        for start, end in self.inside:
            run = bisect.bisect_right(begun, start) - 1
            ends[run] = max(ends[run], end)
        return zip(begun, ends, strict=True)


class _Trace:
    """What the devices did in one step.

    Attributes:
      ran: device -> all that ran, in seconds.
      branches: device -> conditional -> its runs.
    """

    def __init__(self) -> None:
        self.ran: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.branches: dict[int, dict[str, _Branch]] = defaultdict(dict)


def _find_branches(text: str) -> dict[str, tuple[str, str]]:
    """Instruction -> conditional of the loop over ticks that it is, or is in; and its part of a tick."""
    found = {}
    for visit in Module(text).visits():
        for around in (*visit.callers, visit.instruction):
            branch = _BRANCH.search(around.op_name)
            if around.opcode == "conditional" and branch is not None:
                found[visit.instruction.name] = (around.name, branch[1])
    return found


def _steps(
    operations: Iterable[Operation], branches: Mapping[str, tuple[str, str]]
) -> list[_Trace]:
    """What ran, step by step."""
    traces: dict[int, _Trace] = defaultdict(_Trace)
    for run, device, _, name, start, end in operations:
        found, times = traces[run], (start, end)
        found.ran[device].append(times)
        if name in branches:
            conditional, part = branches[name]
            branch = found.branches[device].setdefault(conditional, _Branch(part))
            branch.inside.append(times)
            if name == conditional:
                branch.begun.append(times[0])
    return list(traces.values())


def _measure(
    found: _Trace, stages: Sequence[int], busy: Mapping[str, np.ndarray]
) -> tuple[tuple[Span, ...], float, float]:
    """Spans, and the seconds of the loop and of the step.

    Args:
      stages: their devices.
      busy: part -> whether it has work, [ticks, stages].
    """
    runs = []
    for stage, device in enumerate(stages):
        for name, branch in found.branches[device].items():
            num_ticks = len(busy[branch.part])
            if len(branch.begun) != num_ticks:
                raise RuntimeError(
                    f"{name} ran {len(branch.begun)} times on stage {stage}, in {num_ticks} ticks: this "
                    f"version of XLA makes something else of the loop"
                )
            runs += [(stage, n, branch.part, *times) for n, times in enumerate(branch.runs())]
    start, end = min(run[3] for run in runs), max(run[4] for run in runs)
    spans = tuple(
        Span(stage, tick, part, begin - start, stop - begin)
        for stage, tick, part, begin, stop in runs
        if busy[part][tick, stage]
    )
    ran = [times for device in stages for times in found.ran[device]]
    return spans, end - start, max(stop for _, stop in ran) - min(ran)[0]


def _round_steps(last: float) -> list[float]:
    """Round numbers from 0 to `last`, about ten."""
    power = 10.0 ** math.floor(math.log10(last / 10))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= last / 10)
    return [n * step for n in range(int(last / step) + 1)]
