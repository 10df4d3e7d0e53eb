"""A pipeline's step as it ran, next to its schedule: when each stage worked, and when it waited.

The profiler records when each operation of the training program began and ended. The loop over ticks runs a
unit in one branch of a conditional, and nothing in the other, or in a loop of one turn or none
(`Loop._if_runs`): the n-th run of either is tick n.
"""

import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxpar.analysis.hlo import Module
from jaxpar.analysis.program import busy_of
from jaxpar.base.axes import STAGE
from jaxpar.base.display import Printed
from jaxpar.base.memory import num_cores
from jaxpar.base.timing import seconds_of
from jaxpar.base.types import Arrays
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.batches import put_batch
from jaxpar.model.task import Task
from jaxpar.pipeline.lanes import Schedule, idle_lane
from jaxpar.pipeline.loop import BACKWARD, FORWARD, HEAD
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding
from jaxpar.training.profiler import Operation, read_trace, trace

WEIGHTS = "weights"
PARTS = (FORWARD, HEAD, BACKWARD, WEIGHTS)  # of a tick
_BRANCH = re.compile(rf"/while/body/(?:closed_call/)?((?:{'|'.join(PARTS)})\d*)/(?:cond|while)$")


class Span(NamedTuple):
    """A piece of work.

    Attributes:
      part: `FORWARD`, `HEAD` or `BACKWARD`; or `WEIGHTS`, followed by the number of its lane.
      start: seconds since the loop began.
      seconds: how long it took.

    Example:
      measured = jaxpar.measure_step(task, "pp2", num_steps=1)
      print([(span.stage, span.part, span.seconds) for span in measured.spans[:3]])
    """

    stage: int
    tick: int
    part: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True, repr=False)
class MeasuredStep(Printed):
    """When the stages of a pipeline worked in one step, and when they waited.

    Attributes:
      schedule: the one that the step follows, with the head as a lane of its own.
      spans: of the first data-parallel group, stage by stage.
      loop_seconds: from the first to the last tick.
      step_seconds: of the whole step, from the first operation of its stages to the last.
      traced_seconds, plain_seconds: of the quickest step as seen from outside, with the profiler on and off.
      num_devices, num_cores: of the mesh, and of this machine. Simulated devices that are more share them.

    Example:
      measured = jaxpar.measure_step(task, "pp2", num_steps=1)
      print(measured.bubble, measured.predicted_bubble)
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    loop_seconds: float
    step_seconds: float
    traced_seconds: float
    plain_seconds: float
    num_devices: int
    num_cores: int

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each stage works within the loop."""
        return tuple(sum(self.seconds_of(s, "")) for s in range(self.schedule.num_stages))

    @property
    def bubble(self) -> float:
        """Share of the loop's stage-time in which a stage waits, or moves data."""
        return 1 - sum(self.busy_seconds) / (self.loop_seconds * self.schedule.num_stages)

    @property
    def unit_seconds(self) -> tuple[np.ndarray, ...]:
        """Of F, B, W and the head of a unit, the median on each stage, [stages]; 0 where there is none."""
        stages = range(self.schedule.num_stages)
        return tuple(
            np.asarray([median(self.seconds_of(s, part) or [0.0]) for s in stages])
            for part in (FORWARD, BACKWARD, WEIGHTS, HEAD)
        )

    @property
    def predicted_bubble(self) -> float:
        """The bubble of the schedule if all units of a stage take its `unit_seconds`."""
        return self.schedule.bubble_at(*self.unit_seconds)

    @property
    def predicted_seconds(self) -> float:
        """Of the loop, likewise."""
        return float(self.schedule.half_times(self.unit_seconds)[-1])

    @property
    def late(self) -> float:
        """The part of `bubble` that is not the schedule's: stages with a unit to run wait for data or a core.

        For the rest they wait as in `Schedule.bubble_at`, with every unit as long as it took.
        """
        work_T2S = np.zeros((self.schedule.num_ticks, 2, self.schedule.num_stages))
        for span in self.spans:
            half = int(span.part not in (FORWARD, f"{WEIGHTS}0"))
            work_T2S[span.tick, half, span.stage] += span.seconds
        return 1 - float(work_T2S.max(axis=2).sum()) / self.loop_seconds

    def seconds_of(self, stage: int, part: str) -> list[float]:
        """Of each unit of a stage, in the parts whose names begin so.

        It may run in two pieces, the embedding and the layers.
        """
        seconds: dict[tuple[int, str], float] = defaultdict(float)
        for span in self.spans:
            if span.stage == stage and span.part.startswith(part):
                seconds[span.tick, span.part] += span.seconds
        return list(seconds.values())


def measure_step(
    task: Task | Setup,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
    *,
    num_steps: int = 5,
) -> MeasuredStep:
    """Runs a pipeline's training step on an example batch, and measures when each stage works.

    It is the same program that trains; the profiler's own cost is measured and reported. Where there are more
    simulated devices than cores, they take turns, and so wait where real ones would not; the picture says so.

    Args:
      task, parallel, train: as `fit` takes them; nothing is trained or written.
      mesh: that of `parallel`; None builds it.
      num_steps: with the profiler off, then as many with it on; of these the quickest is shown, since what
        disturbs a machine only ever adds.
    Raises:
      RuntimeError: this version of XLA compiles the loop over ticks in another way.
      ValueError: there is no pipeline to measure, or no way to measure it here; or `num_steps` is below 1.

    Example:
      measured = jaxpar.measure_step(task, "pp2", num_steps=1)
      print(measured.bubble)
    """
    setup = Setup.of(task, parallel, train, mesh)
    parallel, mesh = setup.parallel, setup.mesh
    _check(parallel, mesh, num_steps)
    step, state = setup.train_step(), setup.init_state()
    batch = put_batch(setup.task.example_batch(), batch_sharding(setup))
    text, table = step.lower(state, batch).compile().as_text(), step.full_table
    assert table is not None

    def run() -> Arrays:
        nonlocal state
        state, metrics = step.run(state, batch)
        return state, metrics

    seconds_of(run)
    plain = min(seconds_of(run) for _ in range(num_steps))
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            traced = min(seconds_of(run) for _ in range(num_steps))
        operations = read_trace(folder)
    ticks, num_stages = slice(int(table.num_ticks)), mesh.shape[STAGE]
    # Every stage has its part of a sharded head; otherwise the last stage has all of it.
    first = 0 if setup.partition.head == "sharded" else num_stages - 1
    busy = {part: busy[0, ticks] for part, busy in busy_of(table).items()}
    busy[HEAD] = busy[HEAD] & (np.arange(num_stages) >= first)
    branches = _find_branches(text)
    by_stage = np.moveaxis(mesh.devices, mesh.axis_names.index(STAGE), 0).reshape(num_stages, -1)
    stages = [device.id for device in by_stage[:, 0]]
    own = [each for each in operations if each.device in stages]
    steps = ([op for op in own if op.run == run] for run in dict.fromkeys(op.run for op in own))
    measured = [_measure(each, branches, stages, busy) for each in steps]
    quickest = min(measured, key=lambda each: each[1])
    schedule = step_schedule(parallel, parallel.group_shares[0])
    if not any(part.startswith(WEIGHTS) for _, part in branches.values()):
        # No layer has its W apart from B: then there is nothing in their lanes.
        schedule = dataclasses.replace(schedule, weights=())
    unit_TS = np.where(busy[HEAD], np.asarray(table.head.unit)[0, ticks, None], -1)
    head = idle_lane(len(unit_TS), num_stages)._replace(unit=unit_TS)
    schedule = dataclasses.replace(schedule, head=head)
    return MeasuredStep(schedule, *quickest, traced, plain, mesh.size, num_cores())


def _check(parallel: Parallel, mesh: Mesh, num_steps: int) -> None:
    platform, on_host = mesh.devices.flat[0].platform, parallel.update == "host"
    mistakes = {
        "mesh: no pipeline to measure\nFix: give a mesh with stages, such as pp4.": mesh.shape[
            STAGE
        ]
        == 1,
        f"devices: on {platform} the profiler does not show where a unit begins\n"
        f"Fix: use simulated devices, or look at the trace of train --profile.": platform != "cpu",
        "remat_keeps='carries' runs several loops over ticks\n"
        "Fix: measure it with remat_keeps='device'.": parallel.num_segments > 1,
        "update='host' is not one program\nFix: measure it with update='replicated'.": on_host,
        f"num_steps={num_steps} is too small\nFix: use 1 or more.": num_steps < 1,
    }
    if made := [mistake for mistake, is_made in mistakes.items() if is_made]:
        raise ValueError(made[0])


def _find_branches(text: str) -> dict[str, tuple[str, str]]:
    """Instruction -> the branch of the loop over ticks that it is, or is in, and its part of a tick."""
    return {
        visit.instruction.name: (around.name, branch[1])
        for visit in Module(text).visits()
        for around in (*visit.callers, visit.instruction)
        if around.opcode in ("conditional", "while") and (branch := _BRANCH.search(around.op_name))
    }


def _measure(
    operations: Sequence[Operation],
    branches: Mapping[str, tuple[str, str]],
    stages: Sequence[int],
    busy: Mapping[str, np.ndarray],
) -> tuple[tuple[Span, ...], float, float]:
    """The spans of a step, and the seconds of its loop and of the whole step.

    Args:
      operations: those of the step on the devices of `stages`.
      branches: as `_find_branches` returns them.
      stages: the id of a device of each.
      busy: part -> whether it has work, bool [ticks, stages].
    """
    inside = defaultdict(list)  # (stage, conditional, part) -> what ran in it
    for op in operations:
        if op.name in branches:
            inside[stages.index(op.device), *branches[op.name]].append(op)
    spans, start = [], min(op.start for events in inside.values() for op in events)
    end = start
    for (stage, conditional, part), events in inside.items():
        begun = np.sort([op.start for op in events if op.name == conditional])
        if len(begun) != len(busy[part]):  # not reached: XLA has kept this loop so far
            raise RuntimeError(
                f"{conditional} ran {len(begun)} times on stage {stage}, in {len(busy[part])} ticks\n"
                f"Fix: use another JAX, whose XLA keeps the loop."
            )
        # An event of the conditional itself may end before what is in it.
        ends = begun.copy()
        tick_of = np.searchsorted(begun, [op.start for op in events], side="right") - 1
        np.maximum.at(ends, tick_of, [op.end for op in events])
        end = max(end, float(ends[-1]))
        times = zip((begun - start).tolist(), (ends - begun).tolist(), busy[part], strict=True)
        for tick, (begin, seconds, works) in enumerate(times):
            if works[stage]:
                spans.append(Span(stage, tick, part, begin, seconds))
    step_seconds = max(op.end for op in operations) - min(op.start for op in operations)
    return tuple(spans), end - start, step_seconds
