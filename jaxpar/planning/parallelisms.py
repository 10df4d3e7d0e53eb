"""One step under four kinds of parallelism: storage and communication per device, and time.

Bytes sent and memory are those of the compiled programs. Where none can be compiled, they are not known.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh

from jaxpar.analysis.program import ProgramReport
from jaxpar.base.axes import DATA, STAGE, TENSOR
from jaxpar.base.checks import require
from jaxpar.base.display import Printed, format_count
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.base.trees import device_bytes, placed
from jaxpar.config import Parallel, PipelineConfig, TrainConfig
from jaxpar.model.task import Task
from jaxpar.partition.storage import Storage
from jaxpar.pipeline.lanes import Block
from jaxpar.planning.compiled import compile_step, setup_of
from jaxpar.planning.cost import Step, StepCost, estimate
from jaxpar.planning.counts import Counts, counts_of
from jaxpar.planning.machine import Machine, find_machine
from jaxpar.planning.search import cuts
from jaxpar.sharding import shardings
from jaxpar.training.summary import outer_modules_by_stage

# What a device does in a block, by `Block.unit`.
WORK = ("forward", "backward", "gradients of weights, where apart")
WORK += ("before and after the layers", "sending", "update")
_AROUND, _SENDING, _UPDATE = 3, 4, 5
# A pass of a step that is not cut is told in at most so many turns of computing and sending.
_MOST_TURNS = 8
# With so many units per stage the pipeline is full most of the time, and a picture of it still clear.
_UNITS_PER_STAGE = 2


class Parallelism(NamedTuple):
    """A way to share a step.

    Attributes:
      name: such as "tensor parallelism".
      cost: of the step: its time is estimated, its bytes and memory are those of `cost.program`.
      unknown: why there is no program, and bytes and memory are not known; "" if there is one.
      holds: all that each device has of the weights, and its rows of the batch.
      weight_bytes: that each device has of the weights, room for layers of other stages included.
      blocks: what each stage does when, in seconds; `unit` is a number of `WORK`. Without stages all devices
        do the same.
    """

    name: str
    cost: StepCost
    unknown: str
    holds: tuple[str, ...]
    weight_bytes: int
    blocks: tuple[Block, ...]

    def blocks_of(self, device: int) -> list[Block]:
        """What a device does."""
        own = device if self.cost.parallel.mesh.stage > 1 else 0
        return [block for block in self.blocks if block.stage == own]

    def idle_of(self, device: int) -> float:
        """Estimated share of the step in which a device neither computes nor sends."""
        busy = sum(block.cost for block in self.blocks_of(device))
        return max(1 - busy / self.cost.seconds, 0.0)


@dataclass(frozen=True, repr=False, eq=False)
class Parallelisms(Printed):
    """A step of one task under four kinds of parallelism. Print it, or read its attributes.

    Attributes:
      task: whose step it is, with its sizes.
      machine: what it is for.
      num_devices: that share the step; those of axes of one's own, times as many again.
      drawn: those that are possible.
      left_out: why the others are not, by name.

    Example:
      pair = jaxpar.Parallel(jaxpar.MeshConfig(data=2, devices=(0, 1)))
      shown = jaxpar.planning.compare_parallelisms(task, pair)
      print([each.name for each in shown.drawn], shown.left_out)
    """

    task: Task
    machine: Machine
    num_devices: int
    drawn: tuple[Parallelism, ...]
    left_out: Mapping[str, str]


def compare_parallelisms(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    machine: Machine | str | None = None,
) -> Parallelisms:
    """Compares data, tensor, model and pipeline parallelism for a task's training step.

    Each of the four is compiled for the machine, from shapes; nothing is run. Model parallelism is layers on
    devices, through which the batch goes in one piece.

    Args:
      task, train: as `fit` takes them.
      parallel: its mesh says how many devices, by default all; its pipeline how the last of the four cuts the
        batch and time, and places layers. One of a single unit is replaced by the one of up to two units a
        stage with the least estimated time.
      machine: or its text, as of `find_machine`; None: the devices that JAX has.
    Raises:
      ValueError: there is one device, no such machine, or no way at all.

    Example:
      pair = jaxpar.Parallel(jaxpar.MeshConfig(data=2, devices=(0, 1)))
      print(jaxpar.planning.compare_parallelisms(task, pair))
    """
    machine = find_machine(machine)
    given, train = Parallel.of(parallel, task.parallel), train or task.train
    given = given.resolve(machine.num_devices)
    mesh, counts = given.mesh, counts_of(task, train.num_steps, machine.platform)
    n = mesh.data * mesh.stage * mesh.tensor
    fact = "mesh: a step cannot be split over one device"
    require(n != 1, f"{fact}\nFix: use two or more devices, such as --simulate 4.")
    cut = given.pipeline
    has_groups = cut.num_groups > 1 or cut.schedule == "v"
    placement = "balanced" if has_groups else cut.placement
    ways = {
        "data parallelism": (DATA, PipelineConfig()),
        "tensor parallelism": (TENSOR, PipelineConfig()),
        "model parallelism": (STAGE, PipelineConfig("gpipe", placement=placement, head=cut.head)),
        "pipeline parallelism": (STAGE, cut),
    }
    one = replace(mesh, data=1, stage=1, tensor=1, devices=None)
    costs, left_out, drawn = dict[str, StepCost](), dict[str, str](), list[Parallelism]()
    for name, (axis, pipeline) in ways.items():
        shape, speeds = replace(one, **{axis: n}), given.speeds if axis == STAGE else None
        layout = replace(given, mesh=shape, pipeline=pipeline, shares=None, speeds=speeds)
        try:
            costs[name] = _estimate(name, axis, counts, layout, train, machine)
        except ValueError as error:
            left_out[name] = str(error)
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        programs = [_compiling(executor, cost) for cost in costs.values()]
    for (name, cost), program in zip(costs.items(), programs, strict=True):
        try:
            unknown = program if isinstance(program, str) else ""
            if not isinstance(program, str):
                cost = cost.known(program.result())
                unknown = cost.refusal and f"the compiler says {cost.refusal}"
            drawn.append(_parallelism(name, ways[name][0], cost, unknown))
        except ValueError as error:
            left_out[name] = str(error)
    if not drawn:
        why, _, _ = [*left_out.values()][-1].partition("\n")
        fact = f"no way to split the step over {n} devices: {why}"
        raise ValueError(f"{fact}\nFix: use another number of devices.")
    return Parallelisms(counts.facts.task, machine, n, tuple(drawn), left_out)


def _compiling(executor: ThreadPoolExecutor, cost: StepCost) -> Future[ProgramReport | str] | str:
    """The program of a step, as soon as it is there; or why there is none."""
    try:
        return executor.submit(compile_step, setup_of(cost), cost.machine, runs=False)
    except ValueError as error:  # no compiler, or too few devices
        return str(error)


def _estimate(
    name: str, axis: str, counts: Counts, parallel: Parallel, train: TrainConfig, machine: Machine
) -> StepCost:
    """The cost of a parallelism; of several pipelines, of the one with the least time.

    Raises:
      ValueError: it is not possible, or makes no difference.
    """
    facts, n = counts.facts, parallel.mesh.sizes[axis]
    if axis == STAGE and len(facts.kind_of) < n:
        count = format_count(len(facts.kind_of), "layer")
        raise ValueError(f"{count} for {n} devices\nFix: use {n} layers or more, or fewer devices.")
    tried, rows = [parallel.pipeline], facts.batch_size
    steps = 1 if facts.why_whole else facts.num_steps or 1
    if name.startswith("pipeline") and parallel.num_units == 1:
        tried = [
            replace(parallel.pipeline, num_microbatches=M, num_chunks=K)
            for M, K in itertools.product(cuts(rows), cuts(steps))
            if 1 < M * K <= _UNITS_PER_STAGE * n
        ]
    costs = list[StepCost]()
    refused = ValueError(
        f"batch_size={rows}: neither rows nor time steps can be split into units\nFix: use more rows."
    )
    for pipeline in tried:
        try:
            costs.append(estimate(counts, replace(parallel, pipeline=pipeline), train, machine))
        except ValueError as error:
            refused = error
    if not costs:
        raise refused
    if axis == TENSOR:
        step, arrays = Step(counts, parallel, train), (*counts.params, *counts.frozen)
        if not any(TENSOR in sum(step.axes_of(each), ()) for each in arrays):
            raise ValueError(
                f"tensor={n} splits no parameter\n"
                f"Fix: name dims of weights by jaxpar.nn.named_param, as the layers of jaxpar.nn do."
            )
    return min(costs, key=lambda cost: cost.seconds)


def _parallelism(name: str, axis: str, cost: StepCost, unknown: str) -> Parallelism:
    (_, parallel, train), counts = cost.settings, cost.counts
    step, n = Step(counts, parallel, train), parallel.mesh.sizes[axis]
    storage = Storage(step.partition)
    stored, whole = storage.stored, counts.facts.model_size[1]
    mesh = AbstractMesh(tuple(step.sizes.values()), tuple(step.sizes))
    weight_bytes = device_bytes(placed(stored, shardings(stored, mesh, step.partition.param_rules)))
    share = f"{100 * weight_bytes / whole:.3g}% of all weights"
    share = "all weights" if weight_bytes == whole else share
    holds = [share] * n
    if axis == DATA:
        rows = counts.facts.batch_size // n
        holds = [f"{share}, rows {d * rows}-{(d + 1) * rows - 1}" for d in range(n)]
    elif axis == STAGE:
        holds = _places(storage)
    return Parallelism(name, cost, unknown, tuple(holds), weight_bytes, tuple(_blocks(step, cost)))


def _places(storage: Storage) -> list[str]:
    """What is on each stage, such as "first, layers 0-1, 1/4 of embedding, all of head"."""
    partition = storage.partition
    ends = not partition.shares_first, partition.head == "last"
    places = str(NamedPlacement(partition.placement, *ends)).split("|")
    words = [re.sub(r"\d+-", r"layers \g<0>", place.strip()) for place in places]
    words = [re.sub(r"(^|, )(?=\d+(,|$))", r"\1layer ", place) for place in words]
    on = [*zip(partition.route.stages, words, strict=True)]
    stages = range(partition.parallel.mesh.stage)
    layers = ["; ".join(w for s, w in on if s == d) for d in stages]
    pairs = zip(layers, outer_modules_by_stage(storage), strict=True)
    return [", ".join(filter(None, (own, *more))) for own, more in pairs]


def _blocks(step: Step, cost: StepCost) -> Iterator[Block]:
    """A step of the length of `StepCost.estimated_seconds`.

    Stages run in lockstep. What layers and ticks send is spread evenly over them, with nothing beside it.
    What is sent once, such as gradients, follows at the end.
    """
    machine, program = cost.machine, cost.program
    costs, around_T2S = step.work(machine)
    schedule, is_cut = step.schedule, step.partition.runs_in_units
    halves = np.argwhere((schedule.work_at(*costs) + around_T2S).max(2) > 0).tolist()
    halves *= step.parallel.num_segments
    once = sum(each.seconds(machine, step.sizes) for each in step.sent_once())
    if program:
        once = sum(cost.seconds_of(c) for c in program.collectives if c.waits and not c.in_loop)
    whole, turns = cost.waiting, 1
    if not is_cut and whole > once:
        turns = min(max(len(step.counts.facts.kind_of), 1), _MOST_TURNS)
    sending = (whole - once) / (len(halves) * turns)
    tick_seconds = machine.tick_seconds * step.num_ticks * is_cut / len(halves)
    begin, stages = 0.0, range(schedule.num_stages)
    for (tick, half), turn in itertools.product(halves, range(turns)):
        ends = [begin] * len(stages)
        for stage in stages:
            work = [
                (kind, costs[kind][each.lane.group[tick, stage], stage] / turns)
                for each in schedule.lanes
                if each.half == half and each.busy_TS[tick, stage]
                for kind in ["FBW".index(each.letter)]
            ]
            work.append((_AROUND, around_T2S[tick, half, stage] * (turn == turns - 1)))
            for kind, seconds in work:
                if seconds:
                    yield Block(stage, ends[stage], float(seconds), "", "F", kind)
                    ends[stage] += float(seconds)
        busy, begin = [end > begin for end in ends], max(ends)
        for stage in itertools.compress(stages, busy if sending else ()):
            yield Block(stage, begin, sending, "", "F", _SENDING)
        begin += sending + tick_seconds
    for kind, seconds in ((_SENDING, once), (_UPDATE, step.seconds(machine)["update"])):
        if seconds:
            yield from (Block(stage, begin, seconds, "", "F", kind) for stage in stages)
        begin += seconds
