"""What a training step will cost, from its sizes alone: bytes sent, memory, FLOPs, ticks and time.

Nothing is compiled and no device is needed. `python -m jaxpar inspect --compare` shows the prediction beside
the compiled program, and tests hold the one to the other: bytes of collectives exactly, memory within 5 %
(see `memory`), the time of a step on this machine within a tenth.

Legend: T time, B batch, t steps of a chunk, b rows of a microbatch, H hidden, V vocabulary; h = H / tensor.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from jaxpar.analysis.collectives import num_messages
from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.axes import DATA, STAGE
from jaxpar.display import format_bytes
from jaxpar.parallel import Parallel
from jaxpar.pictures.picture import Tables, make_table
from jaxpar.planning import pieces
from jaxpar.planning.calibration import HERE, find_machine, measure_pieces
from jaxpar.planning.hardware import Hardware, Work
from jaxpar.planning.memory import MemoryCost, kept_bytes, step_memory
from jaxpar.planning.pieces import WORD
from jaxpar.planning.shape import StepShape, check_known
from jaxpar.planning.shares import make_stepper
from jaxpar.planning.traffic import Traffic, predict_traffic, totals
from jaxpar.task import Task
from jaxpar.timing import quickest
from jaxpar.training.settings import Settings, TrainConfig


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of a step, by what it is spent on; they follow each other.

    Attributes:
      layers, head: matmuls, time loops and memory traffic of the busiest stage, without its idle ticks.
      bubble: that the busiest stage waits, in ticks with nothing to do for it.
      ticks: what a pipeline's loop needs besides.
      sending: collectives, as if none ran beside other work.
      update: of the optimizer, limited by memory.
    """

    layers: float
    head: float
    bubble: float
    ticks: float
    sending: float
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Cost(Tables):
    """What a step costs each device; `print` it, or read it.

    Attributes:
      settings: task, parallel and train that the step is made from.
      traffic: the collectives.
      memory: on the fullest device.
      flops: of the matmuls of a step, on the busiest device; two for a multiply-add.
      num_ticks, bubble: of the schedule; 1 and 0 without one.
      seconds: on the hardware; None without one.
    """

    settings: Settings
    traffic: tuple[Traffic, ...]
    memory: MemoryCost
    flops: int
    num_ticks: int
    bubble: float
    seconds: Seconds | None

    @property
    def parallel(self) -> Parallel:
        """How the step lies on devices."""
        return self.settings.parallel

    @property
    def sent_bytes(self) -> float:
        """By the busiest device, in all."""
        return sum(part.count * part.sent_bytes for part in self.traffic)

    def parts(self) -> Iterator[Table | str]:
        """See `Tables`."""
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

    __repr__ = Tables.__repr__


def predict_step(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    hardware: Hardware | None = None,
) -> Cost:
    """The cost of a task's training step, for batches of the full length.

    Args:
      task: one that knows its sizes: it has `lstm_sizes`, and its vocabulary is known.
      parallel, train: with no -1 in the mesh; None takes the task's own.
      hardware: what the time is predicted for; None leaves it away.
    Raises:
      ValueError: the task does not know its cost, sizes do not fit each other, something is not modelled
        (see `traffic.predict_traffic`), or the hardware has no number for a dtype.
    """
    step = StepShape(task, parallel, train, on_cpu=hardware is None or hardware.platform == "cpu")
    traffic = predict_traffic(step)
    schedule = step.schedule if step.parallel.runs_in_units else None
    return Cost(
        settings=step.settings,
        traffic=traffic,
        memory=step_memory(step),
        flops=_flops(step),
        num_ticks=schedule.num_ticks if schedule else 1,
        bubble=schedule.bubble if schedule else 0.0,
        seconds=hardware and _seconds(step, traffic, hardware),
    )


def compare(
    cost: Cost, report: ProgramReport, measured_seconds: float | None = None
) -> "Comparison":
    """A prediction beside the report of the program that was compiled for the same step.

    Args:
      measured_seconds: of a step of that program, if it ran.
    """
    compiled: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in report.collectives:
        compiled[collective.op, collective.axes] += (collective.count or 0) * collective.bytes
    return Comparison(cost, report, totals(cost.traffic), dict(compiled), measured_seconds)


def compare_here(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> "Comparison":
    """Predicted for the devices that JAX has, compiled for them, and measured on them, in this order.

    Of the measured steps, five at least, for two seconds at least, the quickest counts, as of what the
    prediction is made of (see `calibrate`).

    Args:
      task: it need not be resolved.
      parallel, train: None takes the task's own.
      mesh: of `parallel`; None builds it.
    Raises:
      ValueError: as of `predict_step` and `find_machine`.
    """
    check_known(task)
    parallel = Parallel.of(parallel, task.parallel)
    parallel = parallel.resolve() if mesh is None else parallel
    mesh = parallel.mesh.build() if mesh is None else mesh
    task = task.resolve(parallel, mesh)
    settings = predict_step(task, parallel, train).settings  # refuses what is not modelled
    works = pieces_of(*settings, on_cpu=mesh.devices.flat[0].platform == "cpu").values()
    cost = predict_step(*settings, measure_pieces(find_machine(HERE), works))
    report = inspect_step(*settings, mesh)
    return compare(cost, report, quickest(make_stepper(*settings, mesh), 2.0, at_least=5))


@dataclasses.dataclass(frozen=True)
class Comparison(Tables):
    """What was predicted, and what the compiler says; `print` shows them side by side.

    Attributes:
      predicted, compiled: bytes of all runs of the collectives of a kind, by (op, axes).
      measured_seconds: of a step; None if none ran.
    """

    cost: Cost
    report: ProgramReport
    predicted: dict[tuple[str, tuple[str, ...]], int]
    compiled: dict[tuple[str, tuple[str, ...]], int]
    measured_seconds: float | None = None

    @property
    def memory_error(self) -> float | None:
        """Predicted over compiled memory of a device, less 1; None if the compiler does not tell."""
        if self.report.memory is None:
            return None
        return self.cost.memory.total / self.report.memory.total - 1

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds of a step, less 1; None if one of them is not known."""
        if self.cost.seconds is None or self.measured_seconds is None:
            return None
        return self.cost.seconds.total / self.measured_seconds - 1

    def parts(self) -> Iterator[Table | str]:
        """See `Tables`."""
        table = make_table("", "axes", ">predicted", ">compiled", ">measured", ">difference")
        for op, axes in sorted({*self.predicted, *self.compiled}):
            sums = (side.get((op, axes), 0) for side in (self.predicted, self.compiled))
            table.add_row(op, " ".join(axes), *_bytes_side_by_side(*sums))
        if self.report.memory is not None:
            memory = self.cost.memory.total, self.report.memory.total
            table.add_row("memory per device", "", *_bytes_side_by_side(*memory))
        if self.time_error is not None and self.cost.seconds and self.measured_seconds:
            predicted, measured = self.cost.seconds.total * 1e3, self.measured_seconds * 1e3
            row = f"{predicted:.4g} ms", "", f"{measured:.4g} ms", f"{self.time_error:+.1%}"
            table.add_row("step", "", *row)
        yield table

    __repr__ = Tables.__repr__


def _bytes_side_by_side(predicted: int, compiled: int) -> tuple[str, str, str, str]:
    difference = "none" if predicted == compiled else f"{predicted - compiled:+,} bytes"
    if compiled and predicted != compiled:
        difference += f" ({predicted / compiled - 1:+.1%})"
    return f"{predicted:,}", f"{compiled:,}", "", difference


# ---- FLOPs and time ----


def _stage_layers(step: StepShape) -> list[int]:
    """On each stage, in all groups."""
    stages = step.sizes[STAGE]
    return [sum(step.placement[stage::stages]) for stage in range(stages)]


def _head_stages(step: StepShape) -> list[bool]:
    """Whether each stage has work of the head."""
    last = step.sizes[STAGE] - 1
    return [step.shares_head or stage == last for stage in range(last + 1)]


def _flops(step: StepShape) -> int:
    """Of the matmuls on the busiest device: two forward and four backward in a layer, three in the head."""
    tokens = step.model.tokens // step.sizes[DATA]
    matmuls = 6 + 2 * (step.parallel.pipeline.remat and step.parallel.runs_in_units)
    layer = matmuls * 2 * tokens * step.H * 4 * step.width
    head = 3 * 2 * tokens * step.H * step.vocab
    stages = zip(_stage_layers(step), _head_stages(step), strict=True)
    return max(layers * layer + has_head * head for layers, has_head in stages)


def pieces_of(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    *,
    on_cpu: bool | None = None,
) -> dict[str, Work]:
    """What `calibrate` measures of a step: a layer over a unit, the head over one, the update.

    Args:
      task, parallel, train: as of `predict_step`.
      on_cpu: how large a head is computed at once depends on it; None asks what JAX runs on.
    Raises:
      ValueError: sizes do not fit each other, or the task does not know its cost.
    """
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    step = StepShape(task, parallel, train, on_cpu=on_cpu)
    layer = step.t, step.b, step.H, step.width, step.slots
    elements = step.param_bytes(split=step.splits_update) // WORD
    works = {
        "forward": pieces.layer_forward(*layer),
        "backward": pieces.layer_backward(*layer),
        "head": pieces.head(step.head_chunks[0] * step.b, step.H, step.vocab),
        "update": pieces.update(elements, step.optimizer, step.train.clip_norm),
    }
    if step.model.dropout > 0:
        works["dropout"] = pieces.dropout(step.t * step.b * step.width)
    return works


def _seconds(step: StepShape, traffic: Sequence[Traffic], hardware: Hardware) -> Seconds:
    """Pieces, over ticks that stages take together; see `Hardware.seconds`."""
    works = pieces_of(*step.settings, on_cpu=step.on_cpu)
    num_ticks = step.schedule.num_ticks if step.parallel.runs_in_units else 0
    return Seconds(
        **_busy_and_waiting(step, *_unit_seconds(step, works, hardware)),
        ticks=hardware.tick_seconds * num_ticks,
        sending=sum(sending_seconds(part, hardware, step.sizes) for part in traffic),
        update=_update_seconds(step, works["update"], hardware),
    )


def _unit_seconds(
    step: StepShape, works: Mapping[str, Work], hardware: Hardware
) -> tuple[float, float, float]:
    """Of a unit: forward and backward of a layer, and the head; without units, of the whole step."""
    seconds = {name: hardware.seconds(work, step.model.dtype) for name, work in works.items()}
    dropout = seconds.get("dropout", 0.0)  # before every layer, and before the head
    forward, backward = seconds["forward"] + dropout, seconds["backward"]
    head = step.head_chunks[1] * seconds["head"] / step.units + dropout
    if step.parallel.runs_in_units:
        again = forward if step.parallel.pipeline.remat else 0.0
        ring = hardware.seconds(pieces.copy(kept_bytes(step)))  # into the slots, and out of them
        forward, backward = forward + ring, backward + again + ring
    return forward, backward, head


def stage_seconds(
    task: Task, parallel: Parallel, train: TrainConfig | None, hardware: Hardware
) -> dict[str, float]:
    """What `placement.balance_ticks` takes; the embedding is on the first stage, a head on the last."""
    step = StepShape(task, parallel, train, on_cpu=hardware.platform == "cpu")
    works = pieces_of(*step.settings, on_cpu=step.on_cpu)
    forward, backward, head = _unit_seconds(step, works, hardware)
    return {
        "forward": forward,
        "backward": backward,
        "first_cost": hardware.seconds(pieces.copy(WORD * step.t * step.b * step.width)),
        "head_cost": 0.0 if step.shares_head else head,
    }


def _update_seconds(step: StepShape, work: Work, hardware: Hardware) -> float:
    """Of the optimizer; on the host, whose memory is taken to be no faster than the way to it."""
    if step.parallel.update != "host":
        return hardware.seconds(work)
    moved = 2 * step.param_bytes(split=True)  # gradients to the host, parameters back
    return (work.bytes + moved) / hardware.host_bytes_per_second


def _busy_and_waiting(
    step: StepShape, forward: float, backward: float, head: float
) -> dict[str, float]:
    """Of the busiest stage: seconds in layers, in the head, and waiting for others.

    Args:
      forward, backward: of one layer and unit.
      head: of one unit.
    """
    if not step.parallel.runs_in_units:
        layers = step.model.num_layers * (forward + backward)
        return {"layers": layers, "head": head, "bubble": 0.0}
    schedule, S = step.schedule, step.sizes[STAGE]
    placement = np.reshape(step.placement, (-1, S))  # [groups, stages]
    has_head = np.asarray(_head_stages(step))
    # W has one of the two matmuls of a backward unit.
    costs = {"F": forward, "B": backward, "W": 0.0}
    if schedule.weights:
        costs |= {"B": backward / 2, "W": backward / 2}
    half_2TS = np.zeros((2, schedule.num_ticks, S))
    for work in schedule.lanes:
        layers_of = np.where(work.busy_TS, placement[work.lane.group, np.arange(S)], 0)
        half_2TS[work.half] += costs[work.letter] * work.num_units * layers_of[: schedule.num_ticks]
    done_T = (schedule.forward.unit[:, -1] >= 0) & (
        schedule.forward.group[:, -1] == schedule.num_groups - 1
    )
    head_TS = done_T[: schedule.num_ticks, None] * has_head * head
    layers_TS = half_2TS.sum(0)
    # Stages meet after the first half of a tick, which the head ends, and after the second.
    elapsed = (half_2TS[0] + head_TS).max(1) + half_2TS[1].max(1)
    busiest = int((layers_TS + head_TS).sum(0).argmax())
    layers, in_head = (float(part_TS[:, busiest].sum()) for part_TS in (layers_TS, head_TS))
    return {
        "layers": layers,
        "head": in_head,
        "bubble": max(float(elapsed.sum()) - layers - in_head, 0.0),
    }


def sending_seconds(part: Traffic, hardware: Hardware, sizes: dict[str, int]) -> float:
    """All runs: what the busiest device sends, after as many messages as a tree of the devices is deep."""
    link = hardware.link(part.axes, sizes)
    latency = link.seconds * num_messages(part.op, math.prod(sizes[axis] for axis in part.axes))
    return part.count * (latency + part.sent_bytes / link.bytes_per_second)
