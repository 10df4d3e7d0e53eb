"""What a training step will cost, from its config alone: bytes sent, memory, FLOPs, ticks and time.

Nothing is compiled and no device is needed. `python -m jaxpar inspect --compare` shows the prediction beside
the compiled program, and tests hold the one to the other: bytes of collectives exactly, memory within 5 % for
most programs (of 236, half are within 2 %, six of seven within 5 %, the worst 15 % off).

Legend: T time, B batch, t steps of a chunk, b rows of a microbatch, H hidden, V vocabulary; h = H / tensor.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from jaxpar.analysis.hardware import Hardware
from jaxpar.analysis.program import ProgramReport, make_table, to_text
from jaxpar.analysis.shape import WORD, StepShape
from jaxpar.analysis.traffic import Traffic, predict_traffic, totals
from jaxpar.axes import DATA, STAGE, TENSOR
from jaxpar.config import Config
from jaxpar.report import format_bytes


@dataclasses.dataclass(frozen=True)
class MemoryCost:
    """Bytes on the fullest device at its fullest moment.

    Attributes:
      parameters, optimizer, carried: of the state; with `update="host"` the optimizer is elsewhere.
      batch: the tokens, and the tables of the schedule.
      gradients: where they are added up.
      activations: what is kept of units under way (the live units of the schedule) for their backward pass,
        and what waits to be read.
      working: everything else: copies of a unit's and of a layer's arrays, logits, gathered weights, sums of
        gradients. How many copies XLA's CPU compiler makes was found by compiling.
      results: arrays that the program returns besides the state that it took.
    """

    parameters: int
    optimizer: int
    carried: int
    batch: int
    gradients: int
    activations: int
    working: int
    results: int

    @property
    def total(self) -> int:
        """What a device must have room for."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a step, by what it is spent on; they follow each other.

    Attributes:
      layers, head: matmuls, time loops and memory traffic of the busiest stage, without its idle ticks.
      bubble: that the busiest stage waits, in ticks with nothing to do for it.
      sending: collectives, as if none ran beside other work.
      update: of the optimizer, limited by memory.
    """

    layers: float
    head: float
    bubble: float
    sending: float
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step of a config costs each device; `print` it, or read it.

    Attributes:
      traffic: the collectives.
      memory: on the fullest device.
      flops: of the matmuls of a step, on the busiest device; two for a multiply-add.
      num_ticks, bubble: of the schedule; 1 and 0 without one.
      seconds: on the hardware; None without one.
    """

    config: Config
    traffic: tuple[Traffic, ...]
    memory: MemoryCost
    flops: int
    num_ticks: int
    bubble: float
    seconds: Seconds | None

    @property
    def sent_bytes(self) -> float:
        """By the busiest device, in all."""
        return sum(part.count * part.sent_bytes for part in self.traffic)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        if self.traffic:
            table = make_table("sent", "collective", "axes", ">bytes", ">runs", ">sent in all")
            for part in sorted(self.traffic, key=lambda part: -part.count * part.sent_bytes):
                table.add_row(
                    part.what,
                    part.op.removeprefix("collective-"),
                    " ".join(part.axes),
                    format_bytes(part.bytes),
                    f"{part.count:,}",
                    format_bytes(round(part.count * part.sent_bytes)),
                )
            yield table
            yield ""
        facts = Table.grid(padding=(0, 2))
        memory = ", ".join(
            f"{field.name} {format_bytes(getattr(self.memory, field.name))}"
            for field in dataclasses.fields(self.memory)
        )
        facts.add_row("FLOPs per device", f"{self.flops:,} in matmuls")
        facts.add_row("memory per device", f"{format_bytes(self.memory.total)}: {memory}")
        facts.add_row("ticks", f"{self.num_ticks}, bubble {self.bubble:.1%}")
        if seconds := self.seconds:
            parts = ", ".join(f"{k} {v * 1e3:.3g}" for k, v in dataclasses.asdict(seconds).items())
            facts.add_row("predicted time", f"{seconds.total * 1e3:.3g} ms: {parts}")
        yield facts

    def __str__(self) -> str:
        return to_text(self)


def predict_step(config: Config, hardware: Hardware | None = None) -> Cost:
    """The cost of a config's training step, for batches of the full length.

    Args:
      config: with `model.vocab_size` set, and no -1 in its mesh.
      hardware: what the time is predicted for; None leaves it away.
    Raises:
      ValueError: sizes do not fit each other, or the config has something that is not modelled (see
        `traffic.predict_traffic`), or a dtype that the hardware has no number for.
    """
    step = StepShape(config, on_cpu=hardware is None or hardware.platform == "cpu")
    traffic = predict_traffic(step)
    schedule = step.schedule if config.runs_in_units else None
    return Cost(
        config=config,
        traffic=traffic,
        memory=_memory(step),
        flops=_flops(step),
        num_ticks=schedule.num_ticks if schedule else 1,
        bubble=schedule.bubble if schedule else 0.0,
        seconds=hardware and _seconds(step, traffic, hardware),
    )


def compare(cost: Cost, report: ProgramReport) -> "Comparison":
    """A prediction beside the report of the program that was compiled for the same config."""
    compiled: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in report.collectives:
        compiled[collective.op, collective.axes] += (collective.count or 0) * collective.bytes
    return Comparison(cost, report, totals(cost.traffic), dict(compiled))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was predicted, and what the compiler says; `print` shows them side by side.

    Attributes:
      predicted, compiled: bytes of all runs of the collectives of a kind, by (op, axes).
    """

    cost: Cost
    report: ProgramReport
    predicted: dict[tuple[str, tuple[str, ...]], int]
    compiled: dict[tuple[str, tuple[str, ...]], int]

    @property
    def memory_error(self) -> float | None:
        """Predicted over compiled memory of a device, less 1; None if the compiler does not tell."""
        if self.report.memory is None:
            return None
        return self.cost.memory.total / self.report.memory.total - 1

    def __rich_console__(self, console: Console, options: Any) -> Iterator[RenderableType]:
        table = make_table("", "axes", ">predicted", ">compiled", ">difference")
        for op, axes in sorted({*self.predicted, *self.compiled}):
            predicted, compiled = (x.get((op, axes), 0) for x in (self.predicted, self.compiled))
            table.add_row(op, " ".join(axes), *_side_by_side(predicted, compiled, "bytes"))
        if self.report.memory is not None:
            predicted, compiled = self.cost.memory.total, self.report.memory.total
            table.add_row("memory per device", "", *_side_by_side(predicted, compiled, "bytes"))
        yield table

    def __str__(self) -> str:
        return to_text(self)


def _side_by_side(predicted: int, compiled: int, unit: str) -> tuple[str, str, str]:
    difference = "none" if predicted == compiled else f"{predicted - compiled:+,} {unit}"
    if compiled and predicted != compiled:
        difference += f" ({predicted / compiled - 1:+.1%})"
    return f"{predicted:,}", f"{compiled:,}", difference


# ---- memory ----


# Copies that XLA's CPU compiler makes (jax 0.10.1), found by least squares over 140 compiled programs: of a
# layer's kernel W [H, 4, h], alone on its stage, one of a group alone, or cut out of several; of a unit's
# activations X [t, b, h], and of those gathered over `tensor`; of logits; of the head's kernel.
_IN_UNITS = {
    "W alone": 3.0, "W of a group": 0.9, "W": 6.6, "X": 6.7, "gathered X": 0.5, "logits": 3.4, "head": 0.0,
}  # fmt: skip
_AT_ONCE = {
    "W alone": 0.3, "W": 2.2, "X": 13.7, "gathered X": 2.5, "logits": 4.8, "head": 0.8
}  # fmt: skip


def _memory(step: StepShape) -> MemoryCost:
    config = step.config
    host, updated = config.train.update == "host", step.param_bytes(step.updated)
    carried, activations = _carry_bytes(step), _activation_bytes(step)
    working = _working_bytes(step, activations)
    if host:  # what is computed may lie where results will
        working -= (0.9 if step.sizes[DATA] == 1 else 0.6) * updated
    return MemoryCost(
        parameters=step.param_bytes(step.stored),
        optimizer=0 if host else _moments(config) * updated,
        carried=carried,
        batch=2 * WORD * config.data.batch_size * config.data.seq_len // step.sizes[DATA]
        + (12 * WORD * step.schedule.num_ticks if config.runs_in_units else 0),
        gradients=step.gradient_bytes,
        activations=activations,
        working=round(working),
        results=2 * updated + carried if host else 0,
    )


def _working_bytes(step: StepShape, activations: int) -> float:
    """The most that is needed besides gradients and activations: in a layer, in the head, or after all."""
    config, sizes = step.config, step.sizes
    factors = _IN_UNITS if config.runs_in_units else _AT_ONCE
    x = WORD * step.t * step.b * step.width
    kernel = WORD * step.H * 4 * step.width
    head = step.params[-2].bytes(step.compute, sizes)
    [vocab] = step.params[-1].shard(step.compute, sizes)
    logits = WORD * step.head_chunks[0] * step.b * vocab
    alone = "W alone" if config.num_groups == 1 else "W of a group"
    in_layer = factors["W" if step.slots > 1 else alone] * kernel + factors["X"] * x
    in_layer += factors["gathered X"] * x * sizes[TENSOR] * (sizes[TENSOR] > 1)
    in_head = factors["logits"] * logits + factors["head"] * head
    gathered = (
        step.param_bytes(step.compute) if step.stored != step.compute and sizes[DATA] > 1 else 0
    )
    if not config.runs_in_units:
        # Gradients of the head, then of the layers, are made one after the other.
        in_layer += 2 * head + config.model.num_layers * 2 * kernel - step.gradient_bytes
        after = (0.8 + 0.2 * (sizes[DATA] > 1)) * step.gradient_bytes - activations
        return max(in_layer, in_head - step.gradient_bytes, after)
    unit = step.slots * _kept_bytes(step)
    in_layer += unit
    if config.num_groups > 1:  # weights and gradients of one group, cut out of all
        in_layer += 2 * 2 * step.slots * kernel
    widened = 0
    if step.widens_table and config.model.embed_size < step.H:
        widened = WORD * step.V * step.width
    summed = step.gradient_bytes - activations  # gradients once more, where activations were
    return max(max(in_layer, in_head) + widened, summed) + 0.9 * gathered


def _moments(config: Config) -> int:
    """Arrays of the size of the parameters that the optimizer keeps."""
    return {"adam": 2, "adamw": 2, "rmsprop": 1, "sgd": int(config.train.momentum > 0)}[
        config.train.optimizer
    ]


def _carry_bytes(step: StepShape) -> int:
    """h and c of the slots and rows of a device."""
    slots = len(step.config.layer_ids) // step.sizes[STAGE]
    rows = step.config.data.batch_size // step.sizes[DATA]
    return 2 * WORD * slots * rows * step.width


def _activation_bytes(step: StepShape) -> int:
    """What is kept for backward passes, and what waits to be read."""
    unit = _kept_bytes(step)
    if not step.config.runs_in_units:
        return step.config.model.num_layers * unit
    schedule, x = step.schedule, WORD * step.t * step.b * step.width
    if step.config.pipeline.remat:  # the input of the stage, and the state before it
        kept = x + step.slots * 2 * WORD * step.b * step.width
    else:
        kept = step.slots * unit
    waiting = schedule.num_forward_buffers + schedule.num_backward_buffers + 2
    return (schedule.num_slots + 1) * (kept + x) + waiting * x


def _kept_bytes(step: StepShape) -> int:
    """Residuals of one layer and unit, as of `nn.lstm.LSTMResiduals`: x, four gates, h, c; the last c.

    And the mask of dropout, a byte for each x.
    """
    mask = step.t if step.config.model.dropout > 0 else 0
    return step.b * step.width * (WORD * (7 * step.t + 1) + mask)


# ---- FLOPs and time ----


def _stage_layers(step: StepShape) -> list[int]:
    """On each stage, in all groups."""
    placement = step.config.placement
    return [sum(placement[stage :: step.sizes[STAGE]]) for stage in range(step.sizes[STAGE])]


def _head_stages(step: StepShape) -> list[bool]:
    """Whether each stage has work of the head."""
    last = step.sizes[STAGE] - 1
    return [step.shares_head or stage == last for stage in range(last + 1)]


def _flops(step: StepShape) -> int:
    """Of the matmuls on the busiest device: two forward and four backward in a layer, three in the head."""
    tokens = step.config.data.batch_size * step.config.data.seq_len // step.sizes[DATA]
    matmuls = 6 + 2 * (step.config.pipeline.remat and step.config.runs_in_units)
    layer = matmuls * 2 * tokens * step.H * 4 * step.width
    [vocab] = step.params[-1].shard(step.compute, step.sizes)
    head = 3 * 2 * tokens * step.H * vocab
    stages = zip(_stage_layers(step), _head_stages(step), strict=True)
    return max(layers * layer + has_head * head for layers, has_head in stages)


def _seconds(step: StepShape, traffic: Sequence[Traffic], hardware: Hardware) -> Seconds:
    """A roofline for each operation (Williams et al. 2009), over ticks that stages take together."""
    config, sizes = step.config, step.sizes
    if config.model.dtype not in hardware.flops_per_second:
        raise ValueError(
            f"{hardware.name} has no flops_per_second for dtype={config.model.dtype!r}, only for "
            f"{', '.join(hardware.flops_per_second)}"
        )
    peak = hardware.flops_per_second[config.model.dtype]

    def roofline(flops: float, num_bytes: float) -> float:
        return max(flops / peak, num_bytes / hardware.memory_bytes_per_second)

    x = WORD * step.t * step.b * step.width
    kernel = WORD * step.H * 4 * step.width
    whole_chunk = 2 * step.t * step.b * step.H * 4 * step.width
    recurrent = roofline(whole_chunk / step.t, kernel)
    in_time = step.t * max(hardware.loop_seconds, recurrent)
    # z is written and read, and seven arrays are kept; backward reads them, and adds to two kernels.
    forward = roofline(whole_chunk, kernel + 5 * x) + in_time + roofline(0, 12 * x)
    backward = in_time + roofline(3 * whole_chunk, 7 * kernel + 10 * x) + roofline(0, 16 * x)
    if config.pipeline.remat and config.runs_in_units:
        backward += forward
    steps, runs = step.head_chunks
    [vocab] = step.params[-1].shard(step.compute, sizes)
    logits = steps * step.b * vocab
    head = roofline(6 * logits * step.H, WORD * (5 * step.H * vocab + 8 * logits))
    updated = step.param_bytes(step.updated)
    return Seconds(
        **_busy_and_waiting(step, forward, backward, head, runs),
        sending=sum(_sending_seconds(part, hardware, sizes) for part in traffic),
        update=roofline(0, (4 + 2 * _moments(config)) * updated),
    )


def _busy_and_waiting(
    step: StepShape, forward: float, backward: float, head: float, head_runs: int
) -> dict[str, float]:
    """Of the busiest stage: seconds in layers, in the head, and waiting for others.

    Args:
      forward, backward: of one layer and unit.
      head: of one run.
    """
    if not step.config.runs_in_units:
        layers = step.config.model.num_layers * (forward + backward)
        return {"layers": layers, "head": head_runs * head, "bubble": 0.0}
    schedule, S = step.schedule, step.sizes[STAGE]
    placement = np.reshape(step.config.placement, (-1, S))  # [groups, stages]
    has_head = np.asarray(_head_stages(step))
    lanes = schedule.forward, schedule.backward
    counts_TS = [
        np.where(lane.unit >= 0, placement[lane.group, np.arange(S)], 0)[: schedule.num_ticks]
        for lane in lanes
    ]
    done_T = (schedule.forward.unit[:, -1] >= 0) & (
        schedule.forward.group[:, -1] == schedule.num_groups - 1
    )
    head_TS = done_T[: schedule.num_ticks, None] * has_head * head
    layers_TS = counts_TS[0] * forward + counts_TS[1] * backward
    # Stages meet after the forward part, which the head ends, and after the backward part.
    elapsed = (counts_TS[0] * forward + head_TS).max(1) + (counts_TS[1] * backward).max(1)
    busiest = int((layers_TS + head_TS).sum(0).argmax())
    layers, in_head = (float(part_TS[:, busiest].sum()) for part_TS in (layers_TS, head_TS))
    return {"layers": layers, "head": in_head, "bubble": float(elapsed.sum()) - layers - in_head}


def _sending_seconds(part: Traffic, hardware: Hardware, sizes: dict[str, int]) -> float:
    """All runs: what the busiest device sends, after as many messages as a tree of the devices is deep."""
    link = hardware.link(part.axes, sizes)
    devices = math.prod(sizes[axis] for axis in part.axes)
    depth = 1 if part.op == "collective-permute" else math.ceil(math.log2(devices))
    depth *= 2 if part.op == "all-reduce" else 1
    return part.count * (depth * link.seconds + part.sent_bytes / link.bytes_per_second)
