"""What a training step will cost: bytes sent, memory, FLOPs, ticks and time, before it is compiled.

All of it is read from the task's own model (`shape`, `unit`). `compiled_cost` replaces estimates by
the compiler's figures; `python -m jaxpar inspect --compare` shows both, and measures a few steps.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxpar.analysis.collectives import num_messages
from jaxpar.analysis.program import ProgramReport, inspect_step
from jaxpar.axes import STAGE, TENSOR
from jaxpar.config import Parallel, TrainConfig
from jaxpar.display import Printed, format_bytes
from jaxpar.planning.calibration import HERE, find_machine, measure_pieces
from jaxpar.planning.compiled import report_of
from jaxpar.planning.hardware import Hardware
from jaxpar.planning.memory import MemoryCost, estimate_memory
from jaxpar.planning.pieces import UPDATE, works_of
from jaxpar.planning.shape import StepShape
from jaxpar.planning.shares import make_stepper
from jaxpar.planning.traffic import PARAMETER, Traffic, predict_traffic, totals, traffic_of
from jaxpar.planning.unit import BACKWARD, BOTH, FIRST, FIRST_GRADIENT, FORWARD, LAST, WEIGHTS
from jaxpar.setup import Setup
from jaxpar.task import Settings, Task
from jaxpar.timing import quickest


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The time of a step, by what it is spent on; the parts follow each other.

    Attributes:
      layers: on the busiest stage, without its idle ticks.
      head: what comes before and after the layers, likewise.
      bubble: time that the busiest stage waits for the others.
      ticks: overhead of a pipeline's loop.
      sending: collectives, as if none overlapped with other work.
      update: the optimizer, bound by memory bandwidth.
    """

    layers: float
    head: float
    bubble: float
    ticks: float
    sending: float
    update: float

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(vars(self).values())


@dataclasses.dataclass(frozen=True, repr=False)
class Cost(Printed):
    """What a step costs each device; `print` it, or read its attributes.

    Attributes:
      settings: the task, `parallel` and `train` of the step.
      traffic: the collectives.
      memory: on the fullest device, as estimated, in bytes.
      num_ticks, bubble: of the schedule; 1 and 0 without one.
      seconds: predicted for the hardware; None if none was given.
      report: of the compiled step, whose collectives `traffic` then has; None if it was not compiled.
    """

    settings: Settings
    traffic: tuple[Traffic, ...]
    memory: MemoryCost
    num_ticks: int
    bubble: float
    seconds: Seconds | None
    report: ProgramReport | None = None

    @property
    def parallel(self) -> Parallel:
        """How the step is laid out on devices."""
        return self.settings.parallel

    @property
    def flops(self) -> float:
        """Of the matmuls of a step, on the busiest device; two for a multiply-add."""
        step = StepShape(*self.settings)
        flops = {key: work.flops for key, work in works_of(step).items() if key[0] != UPDATE}
        return float(np.sum([*_costs_of(step, flops).values()], 0).sum(0).max() * step.units)

    @property
    def memory_bytes(self) -> int:
        """Of a device: the compiler's number, or the estimate if the step was not compiled."""
        known = self.report and self.report.memory
        return known.total if known else self.memory.total

    @property
    def memory_text(self) -> str:
        """The same as text; an estimate begins with ~."""
        is_known = self.report is not None and self.report.memory is not None
        return "~" * (not is_known) + format_bytes(self.memory_bytes)

    @property
    def sent_bytes(self) -> float:
        """Sent by the busiest device in a step."""
        return sum(part.count * part.sent_bytes for part in self.traffic)


def predict_step(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    hardware: Hardware | None = None,
    *,
    quick: bool = False,
) -> Cost:
    """The cost of a task's training step, for batches of the full length.

    The compiler decides what is sent along `tensor`, and where it divides the batch itself, what is sent at
    all: in these cases the step is compiled, which takes some seconds.

    Args:
      task: resolved: none of its sizes is left to be found in data.
      parallel, train: without -1 in the mesh; None takes the task's own.
      hardware: what the time is predicted for; None leaves it out.
      quick: estimates what is sent along `tensor` from a small program; for ranking many layouts.
    Raises:
      ValueError: sizes do not fit each other, or the hardware has no FLOP/s for a dtype.
    """
    step = StepShape(task, parallel, train)
    is_asked = not step.model.facts.divides_by_hand or (step.tensor > 1 and not quick)
    report = report_of(*step.settings) if is_asked else None
    traffic = predict_traffic(step) if report is None else traffic_of(report)
    schedule = step.schedule if step.parallel.runs_in_units else None
    return Cost(
        settings=step.settings,
        traffic=traffic,
        memory=estimate_memory(step),
        num_ticks=step.num_ticks if schedule else 1,
        bubble=schedule.bubble if schedule else 0.0,
        seconds=hardware and _seconds(step, traffic, hardware),
        report=report,
    )


def compiled_cost(cost: Cost) -> Cost:
    """The same with the compiler's memory and collectives; this takes a few seconds, and nothing runs."""
    if cost.report is not None:
        return cost
    report = report_of(*cost.settings)
    return dataclasses.replace(cost, report=report, traffic=traffic_of(report))


def compare(
    cost: Cost, report: ProgramReport, measured_seconds: float | None = None
) -> "Comparison":
    """A prediction next to the report of the program that was compiled for the same step.

    Args:
      measured_seconds: of one step of that program, if it ran.
    """
    predicted, compiled = totals(cost.traffic), totals(traffic_of(report))
    return Comparison(cost, report, predicted, compiled, measured_seconds)


def compare_here(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> "Comparison":
    """A step predicted for the devices that JAX has, compiled for them, and measured on them, in this order.

    At least five steps are measured, for at least two seconds. The quickest counts, as it does for the pieces
    that the prediction is made of (see `calibrate`).

    Args:
      task: need not be resolved.
      parallel, train: None takes the task's own.
      mesh: that of `parallel`; None builds it.
    Raises:
      ValueError: as for `predict_step` and `find_machine`.
    """
    setup = Setup.of(task, parallel, train, mesh)
    machine = measure_pieces(find_machine(HERE), [StepShape(*setup.settings)])
    cost = predict_step(*setup.settings, machine)
    return compare(cost, inspect_step(setup), quickest(make_stepper(setup), 2.0, at_least=5))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """What was predicted, and what the compiler says; `print` shows them side by side.

    Attributes:
      predicted, compiled: (op, axes) -> payload bytes of all runs of such collectives in a step.
      measured_seconds: of a step; None if none ran.
    """

    cost: Cost
    report: ProgramReport
    predicted: dict[tuple[str, tuple[str, ...]], int]
    compiled: dict[tuple[str, tuple[str, ...]], int]
    measured_seconds: float | None = None

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds of a step, minus 1; None if either is unknown."""
        if self.cost.seconds is None or self.measured_seconds is None:
            return None
        return self.cost.seconds.total / self.measured_seconds - 1


# ---- FLOPs and time ----


def _costs_of(step: StepShape, of_work: dict[tuple[str, int], float]) -> dict[str, np.ndarray]:
    """What a unit costs in F, B and W of each group of layers on each stage, and around the layers.

    Args:
      of_work: cost of every piece, for one layer.
    Returns:
      float [groups, stages] each, by name.
    """
    layers_GSK, kinds = step.layers_GSK, range(len(step.rows))
    shape = step.parallel.num_groups, step.sizes[STAGE]

    def of_layers(name: str) -> np.ndarray:
        return layers_GSK[..., : len(kinds)] @ np.array(
            [of_work.get((name, k), 0.0) for k in kinds]
        )

    costs = {"F": of_layers(FORWARD), "B": of_layers(BACKWARD), "W": of_layers(WEIGHTS)}
    costs["both"] = of_layers(BOTH)
    if step.parallel.runs_in_units and step.parallel.pipeline.remat:
        costs["B"] = costs["B"] + costs["F"]
    first, gradient, head = (np.zeros(shape) for _ in range(3))
    first[0, 0], gradient[0, 0] = of_work[FIRST, -1], of_work.get((FIRST_GRADIENT, -1), 0.0)
    head[-1, slice(None) if step.shares_head else -1] = of_work[LAST, -1]
    return {**costs, "first": first, "gradient": gradient, "head": head}


def unit_seconds(step: StepShape, hardware: Hardware) -> dict[tuple[str, int], float]:
    """Of every piece, for one layer and one unit."""
    return {key: hardware.seconds(work) for key, work in works_of(step).items()}


def _seconds(step: StepShape, traffic: Sequence[Traffic], hardware: Hardware) -> Seconds:
    """From the times of pieces, in ticks that all stages take together; see `Hardware.seconds`."""
    of_work = unit_seconds(step, hardware)
    works, costs = works_of(step), _costs_of(step, of_work)
    in_units = step.parallel.runs_in_units
    # The time of a measured piece includes what it sends.
    known = {sample.kind for sample in hardware.samples}
    has_tensor = any(work.kind in known for (name, _), work in works.items() if name != UPDATE)
    has_gather = works[UPDATE, -1].kind in known and step.parallel.update != "replicated"
    sent = [
        part
        for part in traffic
        if not (has_tensor and part.axes == (TENSOR,))
        and not (has_gather and part.what.startswith(PARAMETER))
    ]
    return Seconds(
        **(_in_ticks(step, costs) if in_units else _at_once(costs)),
        ticks=hardware.tick_seconds * step.num_ticks if in_units else 0.0,
        sending=sum(sending_seconds(part, hardware, step.sizes) for part in sent),
        update=of_work[UPDATE, -1],
    )


def _at_once(costs: dict[str, np.ndarray]) -> dict[str, float]:
    layers = float(sum(costs[name].sum() for name in ("F", "B", "W", "both")))
    head = float(sum(costs[name].sum() for name in ("first", "gradient", "head")))
    return {"layers": layers, "head": head, "bubble": 0.0}


def _in_ticks(step: StepShape, costs: dict[str, np.ndarray]) -> dict[str, float]:
    """Seconds of the busiest stage: in layers, around them, and waiting for others."""
    schedule, stages = step.schedule, np.arange(step.sizes[STAGE])
    shape = schedule.num_ticks, len(stages)
    layers_2TS, outer_2TS = np.zeros((2, *shape)), np.zeros((2, *shape))
    around = {"F": ("first", "head"), "B": ("gradient",), "W": ()}
    for work in schedule.lanes:
        busy_TS, group_TS = work.busy_TS[: shape[0]], work.lane.group[: shape[0]]
        of_lane_TS = np.where(busy_TS, costs[work.letter][group_TS, stages], 0.0)
        layers_2TS[work.half] += of_lane_TS * work.num_units
        for name in around[work.letter]:
            if name == "head":
                # For the unit that leaves the last stage, on all stages that have a part of the head.
                done_T = busy_TS[:, -1] & (group_TS[:, -1] == schedule.num_groups - 1)
                outer_2TS[work.half] += done_T[:, None] * costs[name][-1]
            else:
                outer_2TS[work.half] += np.where(busy_TS, costs[name][group_TS, stages], 0.0)
    # Stages synchronize after each half of a tick; the head ends the first.
    times = step.parallel.num_segments
    elapsed = times * float((layers_2TS + outer_2TS).max(2).sum())
    busiest = int((layers_2TS + outer_2TS).sum((0, 1)).argmax())
    layers, head = (times * float(part[..., busiest].sum()) for part in (layers_2TS, outer_2TS))
    return {"layers": layers, "head": head, "bubble": max(elapsed - layers - head, 0.0)}


def sending_seconds(part: Traffic, hardware: Hardware, sizes: dict[str, int]) -> float:
    """Of all runs: what the busiest device sends, plus the latencies of a tree of the devices."""
    link = hardware.link(part.axes, sizes)
    messages = num_messages(part.op, math.prod(sizes[axis] for axis in part.axes))
    return part.count * link.time(part.sent_bytes, messages)
