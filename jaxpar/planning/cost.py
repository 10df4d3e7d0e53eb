"""What a training step will cost, from its config alone: bytes sent, memory, FLOPs, ticks and time.

Nothing is compiled and no device is needed. `python -m jaxpar inspect --compare` shows the prediction beside
the compiled program, and tests hold the one to the other: bytes of collectives exactly, memory within 5 %
(see `memory`), the time of a step on this machine within a tenth.

Legend: T time, B batch, t steps of a chunk, b rows of a microbatch, H hidden, V vocabulary; h = H / tensor.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from jaxpar.analysis.collectives import num_messages
from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.axes import DATA, STAGE
from jaxpar.config import Config
from jaxpar.display import format_bytes
from jaxpar.pictures.picture import Tables, make_table
from jaxpar.planning import pieces
from jaxpar.planning.calibration import HERE, find_machine, measure_pieces
from jaxpar.planning.hardware import Hardware, Work
from jaxpar.planning.memory import MemoryCost, kept_bytes, step_memory
from jaxpar.planning.pieces import WORD
from jaxpar.planning.shape import StepShape
from jaxpar.planning.shares import make_stepper
from jaxpar.planning.traffic import Traffic, predict_traffic, totals


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
        memory=step_memory(step),
        flops=_flops(step),
        num_ticks=schedule.num_ticks if schedule else 1,
        bubble=schedule.bubble if schedule else 0.0,
        seconds=hardware and _seconds(step, traffic, hardware),
    )


def compare(
    cost: Cost, report: ProgramReport, measured_seconds: float | None = None
) -> "Comparison":
    """A prediction beside the report of the program that was compiled for the same config.

    Args:
      measured_seconds: of a step of that program, if it ran.
    """
    compiled: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for collective in report.collectives:
        compiled[collective.op, collective.axes] += (collective.count or 0) * collective.bytes
    return Comparison(cost, report, totals(cost.traffic), dict(compiled), measured_seconds)


def compare_here(config: Config, mesh: Mesh) -> "Comparison":
    """Predicted for the devices that JAX has, compiled for them, and measured on them, in this order.

    Of the measured steps, five at least, for two seconds at least, the quickest counts, as of what the
    prediction is made of (see `calibrate`).

    Args:
      config: with `model.vocab_size` set.
      mesh: of the config.
    Raises:
      ValueError: as of `predict_step` and `find_machine`.
      OSError: the user's cache folder cannot be written.
    """
    predict_step(config)  # refuses what is not modelled, before anything is measured
    works = pieces_of(config, on_cpu=mesh.devices.flat[0].platform == "cpu").values()
    cost = predict_step(config, measure_pieces(find_machine(HERE), works))
    report = inspect_step(config, mesh)
    step, seconds = make_stepper(config, mesh), list[float]()
    step()  # compiles
    while len(seconds) < 5 or sum(seconds) < 2:
        seconds.append(step())
    return compare(cost, report, min(seconds))


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


def pieces_of(config: Config, *, on_cpu: bool = True) -> dict[str, Work]:
    """What `calibrate` measures of a config's step: a layer over a unit, the head over one, the update.

    Raises:
      ValueError: `config.model.vocab_size` is None, or sizes do not fit each other.
    """
    step = StepShape(config, on_cpu=on_cpu)
    t, b, H = step.t, step.b, step.H
    [vocab] = step.params[-1].shard(step.compute, step.sizes)
    works = {
        "forward": pieces.layer_forward(t, b, H, step.width, step.slots),
        "backward": pieces.layer_backward(t, b, H, step.width, step.slots),
        "head": pieces.head(step.head_chunks[0] * b, H, vocab),
        "update": pieces.update(step.param_bytes(step.updated) // WORD, config.train),
    }
    if config.model.dropout > 0:
        works["dropout"] = pieces.dropout(t * b * step.width)
    return works


def _seconds(step: StepShape, traffic: Sequence[Traffic], hardware: Hardware) -> Seconds:
    """Pieces, over ticks that stages take together; see `Hardware.seconds`."""
    num_ticks = step.schedule.num_ticks if step.config.runs_in_units else 0
    return Seconds(
        **_busy_and_waiting(step, *_unit_seconds(step, hardware)),
        ticks=hardware.tick_seconds * num_ticks,
        sending=sum(sending_seconds(part, hardware, step.sizes) for part in traffic),
        update=_update_seconds(step, hardware),
    )


def _unit_seconds(step: StepShape, hardware: Hardware) -> tuple[float, float, float]:
    """Of a unit: forward and backward of a layer, and the head; without units, of the whole step."""
    config = step.config
    seconds = {
        name: hardware.seconds(work, config.model.dtype)
        for name, work in pieces_of(config, on_cpu=step.on_cpu).items()
    }
    dropout = seconds.get("dropout", 0.0)  # before every layer, and before the head
    forward, backward = seconds["forward"] + dropout, seconds["backward"]
    head = step.head_chunks[1] * seconds["head"] / step.units + dropout
    if config.runs_in_units:
        again = forward if config.pipeline.remat else 0.0
        ring = hardware.seconds(pieces.copy(kept_bytes(step)))  # into the slots, and out of them
        forward, backward = forward + ring, backward + again + ring
    return forward, backward, head


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Of a unit: forward and backward of a layer, and what the first and the last stage have besides."""

    forward: float
    backward: float
    first_cost: float
    head_cost: float


def stage_seconds(config: Config, hardware: Hardware) -> StageSeconds:
    """What `placement.balance_ticks` takes; the embedding is on the first stage, a head on the last.

    Raises:
      ValueError: as of `predict_step`.
    """
    step = StepShape(config, on_cpu=hardware.platform == "cpu")
    forward, backward, head = _unit_seconds(step, hardware)
    embedding = hardware.seconds(pieces.copy(WORD * step.t * step.b * step.width))
    return StageSeconds(forward, backward, embedding, 0.0 if step.shares_head else head)


def _update_seconds(step: StepShape, hardware: Hardware) -> float:
    """Of the optimizer; on the host, whose memory is taken to be no faster than the way to it."""
    elements = step.param_bytes(step.updated) // WORD
    work = pieces.update(elements, step.config.train)
    if step.config.train.update != "host":
        return hardware.seconds(work)
    moved = 2 * WORD * elements  # gradients to the host, parameters back
    return (work.bytes + moved) / hardware.host_bytes_per_second


def _busy_and_waiting(
    step: StepShape, forward: float, backward: float, head: float
) -> dict[str, float]:
    """Of the busiest stage: seconds in layers, in the head, and waiting for others.

    Args:
      forward, backward: of one layer and unit.
      head: of one unit.
    """
    if not step.config.runs_in_units:
        layers = step.config.model.num_layers * (forward + backward)
        return {"layers": layers, "head": head, "bubble": 0.0}
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
