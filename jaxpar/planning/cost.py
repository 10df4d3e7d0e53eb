"""Estimates the cost of a step, from counts, the table of ticks and a machine's data sheet.

Nothing is compiled or measured, so thousands of layouts take seconds; the order of layouts is what counts.
FLOPs are exact. Bytes that are sent are sums over each axis of the mesh. Along `tensor` each pair of split
matrices exchanges activations once forward and once backward (Shoeybi et al. 2019, arXiv:1909.08053, section
3). A recurrent layer without heads exchanges its state at each time step as well. What layers send over axes
of one's own is not counted.
"""

import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.analysis.collectives import Collective, num_messages, sent_bytes
from jaxpar.analysis.program import ProgramReport
from jaxpar.base.axes import BATCH, DATA, HEADS, STAGE, TENSOR
from jaxpar.base.display import Printed, format_bytes, format_seconds
from jaxpar.config import Parallel, TrainConfig
from jaxpar.model.task import Settings, Task
from jaxpar.partition.partition import Partition
from jaxpar.partition.storage import Storage
from jaxpar.planning.counts import Array, Counts, Kind, counts_of
from jaxpar.planning.machine import Machine, find_machine
from jaxpar.sharding import Rules, axes_of_spec, check_split
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.trace.counts import Amount

FLOAT = 4  # bytes of a float32: gradients and sums are accumulated in it, or in a wider type
LEAST_BYTES = 1000  # of a collective that is counted: sums of the loss and norms are not
# A step may need less memory than arithmetic says: compilers compute again some of what layers keep. The
# least of the steps in benchmarks/machines was 0.85, of a transformer with FSDP.
LEAST_SHARE = 0.8


class Sent(NamedTuple):
    """A collective, or several of one kind.

    Attributes:
      op, axes, bytes: of one run, as in `analysis.Collective`.
      runs: in a step.
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    runs: float

    def seconds(self, machine: Machine, sizes: Mapping[str, int]) -> float:
        """Of all runs: what the busiest device sends, plus the latencies of a tree of the devices."""
        devices = math.prod(sizes[axis] for axis in self.axes)
        link, own = machine.link(self.axes, sizes), sent_bytes(self.op, self.bytes, devices)
        once = num_messages(self.op, devices) * link.seconds + own / link.bytes_per_second
        return self.runs * once


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class StepCost(Printed):
    """Cost of a step per device. Print it, or read its attributes.

    Attributes:
      counts: of the task.
      settings: the task, `parallel` and `train` of the step.
      machine: what it is for.
      sent: the collectives of 1 kB and more.
      estimated_bytes: of a device: parameters, optimizer, gradients, and what layers keep. Steps of
        benchmarks/machines needed 0.85 to 2.9 times as much. It decides what is worth compiling.
      parts: seconds, by what they are spent on, one after the other: layers (on the busiest stage), head
        (what comes before and after them), bubble (that stage waits for others), ticks (of the loop
        itself), sending (as if nothing else ran meanwhile), update (the optimizer).
      program: as compiled for the machine; None if it was not.
      refusal: of the compiler, in its own words.
      measured: seconds of a step in each round; () if none ran.

    Example:
      cost = jaxpar.planning.estimate_step(task, "dp2tp2", machine="v5e:2x2")
      print(cost.parts["sending"], sum(cost.parts.values()))
    """

    counts: Counts
    settings: Settings
    machine: Machine
    sent: tuple[Sent, ...]
    estimated_bytes: float
    parts: Mapping[str, float]
    program: ProgramReport | None = None
    refusal: str = ""
    measured: tuple[float, ...] = ()

    @property
    def parallel(self) -> Parallel:
        """Layout of the step."""
        return self.settings.parallel

    @property
    def estimated_seconds(self) -> float:
        """Estimated seconds of a step; for a compiled program, with the transfers that it waits for."""
        return sum(self.parts.values()) - self.parts["sending"] + self.waiting

    @property
    def waiting(self) -> float:
        """Estimated seconds of transfers that no computation overlaps; all transfers if not compiled."""
        if self.program is None:
            return self.parts["sending"]
        return sum(self.seconds_of(each) for each in self.program.collectives if each.waits)

    def seconds_of(self, collective: Collective) -> float:
        """Estimated seconds of all runs of a collective of the program."""
        sent = Sent(collective.op, collective.axes, collective.bytes, collective.count or 0)
        return sent.seconds(self.machine, self.parallel.mesh.sizes)

    @property
    def seconds(self) -> float:
        """Of a step: the median of what was measured, or else estimated."""
        return statistics.median(self.measured) if self.measured else self.estimated_seconds

    @property
    def memory_bytes(self) -> int | None:
        """Of a device, by the compiler; None if it was not compiled."""
        known = self.program and self.program.memory
        return known.total if known else None

    @property
    def fits(self) -> bool:
        """Whether the compiler takes it and a device has room for it; if not compiled, whether it may."""
        least = LEAST_SHARE * self.estimated_bytes
        needed = least if self.memory_bytes is None else self.memory_bytes
        return not self.refusal and needed <= self.machine.memory_bytes

    @property
    def seconds_text(self) -> str:
        """Of a step; an estimate begins with ~."""
        return "~" * (not self.measured) + format_seconds(self.seconds)

    @property
    def memory_text(self) -> str:
        """Of a device; "" if it was not compiled."""
        return "" if self.memory_bytes is None else format_bytes(self.memory_bytes)

    @property
    def needs_text(self) -> str:
        """Memory of a device; an estimate begins with "about"."""
        return self.memory_text or f"about {format_bytes(self.estimated_bytes)}"

    def known(self, found: ProgramReport | str) -> "StepCost":
        """With what the compiler says: what the program does, or why it is refused."""
        key = "refusal" if isinstance(found, str) else "program"
        return dataclasses.replace(self, **{key: found})


def estimate_step(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    machine: Machine | str | None = None,
) -> StepCost:
    """Estimates the cost of a task's training step, for batches of the full length.

    Args:
      task, parallel, train: as `fit` takes them.
      machine: or its text, as of `find_machine`; None: the devices that JAX has.
    Raises:
      ValueError: sizes do not fit each other, or there is no such machine.

    Example:
      print(jaxpar.planning.estimate_step(task, "dp2pp2", machine="v5e:2x2"))
    """
    machine = find_machine(machine)
    parallel, train = Parallel.of(parallel, task.parallel), train or task.train
    if -1 in parallel.mesh.sizes.values():
        is_here, count = machine.is_here, machine.num_devices
        parallel = Setup.of(task, parallel, train).parallel if is_here else parallel.resolve(count)
    return estimate(counts_of(task, train.num_steps, machine.platform), parallel, train, machine)


def estimate(counts: Counts, parallel: Parallel, train: TrainConfig, machine: Machine) -> StepCost:
    """The same, of counts; `parallel` has no -1 left."""
    step = Step(counts, parallel, train)
    sent = step.sent()
    sending = sum(each.seconds(machine, step.sizes) for each in sent)
    return StepCost(
        counts=counts,
        settings=Settings(counts.facts.task, parallel, train),
        machine=machine,
        sent=sent,
        estimated_bytes=step.memory_bytes(),
        parts={**step.seconds(machine), "sending": sending},
    )


class Step:
    """The arithmetic of a step.

    Attributes:
      partition: of the model.
      schedule: that of the data-parallel group with the most to do; of a step that runs as a whole one unit.
      units: that the busiest device runs in a step; `unit` what one takes.
      layers_GSK: layers of each kind on each stage, group by group.
      rows: of the stack of each kind.
      kinds: of each kind, one layer on one unit.
      split_matrices: of each kind, the matrices that `tensor` splits.
    """

    def __init__(self, counts: Counts, parallel: Parallel, train: TrainConfig):
        """Looks at the sizes.

        Raises:
          ValueError: they do not fit each other.
        """
        self.counts, self.parallel = counts, parallel
        self.clip_norm = Settings(counts.facts.task, parallel, train).clip_norm
        self.partition, facts = Partition(counts.facts, parallel), counts.facts
        self.sizes, share = parallel.mesh.sizes, max(parallel.group_shares)
        self.shares_first = self.partition.shares_first
        self.shares_head = self.sizes[STAGE] > 1 and self.partition.head == "sharded"
        self.schedule = step_schedule(parallel, share)
        self.num_ticks = self.schedule.num_ticks * parallel.num_segments
        self.units = share * parallel.pipeline.num_microbatches * parallel.num_chunks
        rows = self.partition.microbatch_rows
        if not facts.divides_by_hand:
            axes = self.partition.rules.axes_of(BATCH)
            rows = facts.batch_size // math.prod(self.sizes[axis] for axis in axes)
        self.unit = counts.unit(self.partition.chunk_len, rows)
        self.rows = tuple(map(len, self.partition.slots.rows))
        self.bytes_of((*counts.params, *counts.frozen), self.partition.param_rules)  # or it raises
        route, placement = self.schedule.route, self.partition.placement
        self.layers_GSK = np.zeros((route.num_groups, route.num_stages, len(facts.kinds)), int)
        places = np.repeat(route.groups, placement), np.repeat(route.stages, placement)
        np.add.at(self.layers_GSK, (*places, np.asarray(facts.kind_of, int)), 1)
        self.kinds = [self._kind(number) for number in range(len(self.rows))]
        self.split_matrices = [self._split_matrices(number) for number in range(len(self.rows))]

    # ---- what a device has of the variables ----

    def bytes_of(self, arrays: Sequence[Array], rules: Rules) -> int:
        """Of a device's parts of variables.

        Raises:
          ValueError: a dim does not divide by the axes that split it.
        """
        return sum(self._elements(array, rules) * array.itemsize for array in arrays)

    def _elements(self, array: Array, rules: Rules) -> int:
        return _part_of(array, self._shape(array), rules, tuple(self.sizes.items()))

    def _shape(self, array: Array) -> tuple[int, ...]:
        return array.shape if array.kind is None else (self.rows[array.kind], *array.shape[1:])

    def axes_of(self, array: Array) -> list[tuple[str, ...]]:
        """The axes that split each dim of a variable, of those with several devices."""
        split = self.partition.step_split(array.dims, self._shape(array))
        return [tuple(axis for axis in axes if self.sizes[axis] > 1) for axes in split]

    def _share_of(self, arrays: Sequence[Array]) -> float:
        """Of the work of a stage with these weights, what a device does: its share of them."""
        if not arrays or not self.counts.facts.divides_by_hand:
            return 1.0  # where the devices of a layer split the batch, its rows are those of one
        whole = own = 0
        for array in arrays:
            rows = math.prod(array.shape[:1]) if array.kind is None else self.rows[array.kind]
            stages = 1 if array.kind is None else self.sizes[STAGE]
            whole += rows * math.prod(array.shape[1:])
            own += self._elements(array, self.partition.rules) * stages
        return own / whole

    # ---- work ----

    def of_kind(self, number: int) -> list[Array]:
        """The parameters of the layers of a kind."""
        return [array for array in self.counts.params if array.kind == number]

    def _kind(self, number: int) -> Kind:
        """What is kept goes into a slot after F, and comes from it before B."""
        whole, own = self.unit.kinds[number], self._share_of(self.of_kind(number))
        forward, backward, weights = (amount.scaled(own) for amount in whole[:3])
        if not self.schedule.weights:
            backward, weights = backward.plus(weights), Amount()
        if self.partition.runs_in_units:
            is_again = self.parallel.pipeline.remat
            slot = Amount() if is_again else Amount(bytes=2 * whole.kept * own)
            backward = backward.plus(forward if is_again else slot)
            forward = forward.plus(slot)
        return Kind(forward, backward, weights, whole.kept * own)

    def work(self, machine: Machine) -> tuple[list[np.ndarray], np.ndarray]:
        """Seconds of a unit's F, B and W, each [groups, stages]; and around the layers, [ticks, 2, stages].

        The gradient of what is before the layers counts as twice its forward pass.
        """

        def seconds_of(amount: Amount) -> float:
            return machine.seconds(amount, self.counts.dtype)

        works = zip(*(kind[:3] for kind in self.kinds), strict=True)
        costs = [self.layers_GSK @ np.asarray([*map(seconds_of, work)]) for work in works]
        costs = costs or [np.zeros(self.layers_GSK.shape[:2])] * 3
        speed_S = np.asarray(self.parallel.speeds or (1.0,) * self.sizes[STAGE])
        first, names = seconds_of(self.unit.first), self.counts.facts.reads[1]
        head = self._share_of([array for array in self.counts.params if array.name in names])
        around_T2S = np.zeros((len(self.schedule.forward.unit), 2, len(speed_S)))
        route = self.schedule.route
        for lane, half, place, on_all, work in (
            (self.schedule.forward, 0, 0, self.shares_first, first),
            (self.schedule.backward, 1, 0, self.shares_first, 2 * first),
            (self.schedule.forward, 0, -1, self.shares_head, seconds_of(self.unit.last) * head),
        ):
            group, stage = route.groups[place], route.stages[place]
            is_there_T = (lane.unit[:, stage] >= 0) & (lane.group[:, stage] == group)
            where = slice(None) if on_all else [stage]
            around_T2S[:, half, where] += is_there_T[:, None] * work / speed_S[where]
        return [cost_GS / speed_S for cost_GS in costs], around_T2S

    def seconds(self, machine: Machine) -> dict[str, float]:
        """`StepCost.parts`, without what is sent."""
        costs, around_T2S = self.work(machine)
        layers_S = np.sum(costs, axis=(0, 1)) * self.units
        halves_T2S = (self.schedule.work_at(*costs) + around_T2S) * self.parallel.num_segments
        busy_S = halves_T2S.sum((0, 1))
        busiest = int(busy_S.argmax())
        return {
            "layers": float(layers_S[busiest]),
            "head": float(busy_S[busiest] - layers_S[busiest]),
            "bubble": float(halves_T2S.max(2).sum() - busy_S[busiest]),
            "ticks": machine.tick_seconds * self.num_ticks * self.partition.runs_in_units,
            "update": self._update_seconds(machine),
        }

    def _update_seconds(self, machine: Machine) -> float:
        """From gradients to new parameters: norm, clipping, the optimizer, and the bytes that these move."""
        own = self.bytes_of(self.counts.params, self.partition.opt_rules)
        copies = 4 + 2 * self.counts.opt_copies
        if self.clip_norm is not None:
            copies += 2
        moved = copies * own
        if self.parallel.update == "host":  # gradients go there, parameters come back
            return (2 * own + moved) / machine.host_bytes_per_second
        return moved / machine.memory_bytes_per_second

    def memory_bytes(self) -> float:
        """`StepCost.estimated_bytes`: what is kept is that of units in flight."""
        partition, counts, pipeline = self.partition, self.counts, self.parallel.pipeline
        found = self.bytes_of((*counts.params, *counts.frozen), partition.param_rules)
        found += self.bytes_of(counts.params, partition.step_rules)
        if self.parallel.update != "host":
            found += counts.opt_copies * self.bytes_of(counts.params, partition.opt_rules)
        places = self.sizes[STAGE] * self.parallel.num_groups
        pairs = zip(self.rows, self.kinds, strict=True)  # of a stage, empty slots included
        kept = self.unit.x + sum(rows / places * kind.kept for rows, kind in pairs)
        if not self.partition.runs_in_units:
            return found + kept
        if pipeline.remat and self.parallel.num_segments == 1:
            kept = self.unit.x * (1 + (pipeline.remat_keeps == "device"))
        return found + self.schedule.num_slots * kept

    # ---- what is sent ----

    def sent(self) -> tuple[Sent, ...]:
        """The collectives of 1 kB and more."""
        in_units = *self._where_used(), *self._over_stages(), *self._over_tensor()
        found = (*self.sent_once(), *in_units)
        return tuple(each for each in found if each.runs and each.bytes >= LEAST_BYTES)

    def sent_once(self) -> Iterator[Sent]:
        """Those that run once a step: gradients are summed, and what is updated in parts is gathered."""
        sums, rules, parallel = Counter[tuple[str, ...]](), self.partition.step_rules, self.parallel
        apart = {name for kind in Storage(self.partition).packed_names(0) for name in kind}
        for array in self.counts.params:
            own = set(sum(self.axes_of(array), ()))
            over = {DATA, *self.partition.task.axes} - own
            if array.kind is None and array.name not in apart and self.partition.runs_in_units:
                over |= {STAGE} - own
            axes = tuple(axis for axis, size in self.sizes.items() if axis in over and size > 1)
            sums[axes] += self._elements(array, rules) * max(array.itemsize, FLOAT)
        yield from (Sent("all-reduce", axes, size, 1) for axes, size in sums.items() if axes)
        is_split = parallel.fsdp or parallel.update == "sharded"
        if self.sizes[DATA] > 1 and is_split and not self.partition.gathers_layers:
            frozen = self.counts.frozen if parallel.fsdp else ()
            whole = self.bytes_of((*self.counts.params, *frozen), rules)
            yield Sent("all-gather", (DATA,), whole, 1)

    def _where_used(self) -> Iterator[Sent]:
        """What FSDP gathers for each pass of a unit through a layer, and scatters of its gradients.

        Of what is before and after the layers, one pass reads it.
        """
        if not self.partition.gathers_layers:
            return
        for array in (*self.counts.params, *self.counts.frozen):
            runs, passes = sum(array.name in own for own in self.counts.facts.reads), 1
            if array.kind is not None:
                runs, passes = self.rows[array.kind], 2 + self.parallel.pipeline.remat
            if DATA in sum(self.axes_of(array), ()):
                layers = 1 if array.kind is None else runs
                one = self._elements(array, self.partition.rules) / layers
                yield Sent("all-gather", (DATA,), one * array.itemsize, passes * runs * self.units)
                if array in self.counts.params:
                    size = one * max(array.itemsize, FLOAT)
                    yield Sent("reduce-scatter", (DATA,), size, runs * self.units)

    def _over_stages(self) -> Iterator[Sent]:
        """What goes from stage to stage in a tick, and what all of them exchange for shared ends."""
        if self.sizes[STAGE] == 1:
            return
        x, along = self._x_of_a_device(), (STAGE,)
        lanes = self.schedule.forward, self.schedule.backward
        ways = sum(step != 0 for lane in lanes for step in lane.arrival)
        yield Sent("collective-permute", along, x, ways * self.num_ticks)
        shared = 2 * self.units * self.shares_first
        shared += (self.num_ticks + self.units) * self.shares_head
        if self.counts.facts.platform != "tpu":  # whose compiler sums x as it is, not in float32
            itemsize = np.dtype(self.counts.dtype).itemsize
            x *= max(itemsize, FLOAT) / itemsize
        yield Sent("all-reduce", along, x, shared)

    def _x_of_a_device(self) -> float:
        """Bytes that go from stage to stage: of layers with a split state, a device has its own units."""
        is_split = all(map(self._exchanges_state, range(len(self.unit.kinds))))
        return self.unit.x / (self.sizes[TENSOR] if is_split else 1)

    def _split_matrices(self, number: int) -> list[Array]:
        arrays = [each for each in self.of_kind(number) if len(each.dims) > 2]
        return [each for each in arrays if any(TENSOR in axes for axes in self.axes_of(each))]

    def _exchanges_state(self, number: int) -> bool:
        """Whether layers of a kind have a recurrent state without heads, of which each device has a part."""
        split, turns = self.split_matrices[number], self.unit.kinds[number].forward.product_turns
        return bool(split and turns) and not any(HEADS in each.dims for each in split)

    def _over_tensor(self) -> Iterator[Sent]:
        """What layers with split matrices exchange: x for each pair of them, and a recurrent state."""
        again = 1 + (self.partition.runs_in_units and self.parallel.pipeline.remat)
        for number, kind in enumerate(self.unit.kinds):
            runs = self.units * float(self.layers_GSK.sum(0)[:, number].max())
            pairs = math.ceil(len(self.split_matrices[number]) / 2)
            yield Sent("all-reduce", (TENSOR,), self.unit.x, (1 + again) * pairs * runs)
            if self._exchanges_state(number):
                state, turns = self.unit.x / self.unit.steps, kind.forward.product_turns
                yield Sent("all-gather", (TENSOR,), state, again * turns * runs)
                yield Sent("all-reduce", (TENSOR,), state, turns * runs)


@functools.lru_cache(maxsize=1 << 16)
def _part_of(
    array: Array, shape: tuple[int, ...], rules: Rules, sizes: tuple[tuple[str, int], ...]
) -> int:
    """How many numbers of a variable a device of a mesh has.

    Args:
      shape: with the rows of its stack, if it is in one.
      sizes: of the mesh's axes.
    Raises:
      ValueError: a dim does not divide by the axes that split it.
    """
    on = dict(sizes)
    spec = rules.spec(array.dims, shape, on)
    check_split(f"parameter {array.name}", array.dims, shape, spec, on)
    return math.prod(shape) // math.prod(on[axis] for axes in axes_of_spec(spec) for axis in axes)
