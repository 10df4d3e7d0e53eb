"""What a step costs, by arithmetic: counts, the table of ticks and a machine's few numbers.

Nothing is compiled or measured, so thousands of layouts take seconds. FLOPs are exact, and so are bytes
over `data` and `stage`, but for what the compiler moves where it divides the batch itself. Along `tensor`
it decides by the whole program; here a layer costs what split matrices must exchange (Shoeybi et al.
2019, arXiv:1909.08053, section 3): cotangents of inputs added for matrices split by columns, outputs
added for those split by rows, inputs gathered where they are states that are split; and in a loop over
time, where a product reads the state that its own columns make, a gather and a sum of that state at each
step; nothing for blocks on the diagonal of a matrix (heads). Memory is what must be there: the state,
gradients, what is kept of the units in flight; temporaries within a unit come on top.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.analysis.collectives import Collective, num_messages, sent_bytes
from jaxpar.analysis.program import ProgramReport
from jaxpar.base.axes import BATCH, DATA, INPUT, LAYERS, STAGE, TENSOR
from jaxpar.base.display import Printed, format_bytes, format_seconds
from jaxpar.config import Parallel, TrainConfig
from jaxpar.ends import owner
from jaxpar.forward import step_schedule
from jaxpar.layout import Layout
from jaxpar.pipeline.placement import UP
from jaxpar.planning.counts import Array, Counts, Kind, Part, counts_of, part_of
from jaxpar.planning.machine import Machine, find_machine
from jaxpar.setup import Setup
from jaxpar.sharding import Rules, off_stages, split_over_data
from jaxpar.task import Settings, Task
from jaxpar.trace.counts import Amount

FLOAT = 4  # bytes of a float32, in which gradients and sums are accumulated
LEAST_BYTES = 1000  # of a collective that is counted: sums of the loss and norms are not


class Sent(NamedTuple):
    """A collective, or several of one kind.

    Attributes:
      what: is sent, in words.
      op, axes, bytes: of one run, as in `analysis.Collective`.
      runs: in a step.
    """

    what: str
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
    """What a step costs each device; `print` it, or read its attributes.

    Attributes:
      counts: of the task.
      settings: the task, `parallel` and `train` of the step.
      machine: what it is for.
      sent: the collectives of 1 kB and more.
      held: bytes that the fullest device must have room for, by what they are for, without temporaries
        within a unit: parameters, optimizer (with `update="host"` it is on the host), carried state, batch,
        gradients, activations (what is kept of units in flight, and what waits to be read).
      num_ticks: of the schedule.
      bubble: the share of stage-time in which a stage waits.
      parts: seconds, by what they are spent on, one after the other: layers (on the busiest stage), head
        (what comes before and after them), bubble (that stage waits for others), ticks (of the loop
        itself), sending (as if nothing else ran meanwhile), update (the optimizer).
      program: as compiled for the machine; None if it was not.
      refusal: of the compiler, in its own words.
      measured: seconds of a step in each round; () if none ran.
    """

    counts: Counts
    settings: Settings
    machine: Machine
    sent: tuple[Sent, ...]
    held: Mapping[str, int]
    num_ticks: int
    bubble: float
    parts: Mapping[str, float]
    program: ProgramReport | None = None
    refusal: str = ""
    measured: tuple[float, ...] = ()

    @property
    def parallel(self) -> Parallel:
        """How devices share the step."""
        return self.settings.parallel

    @property
    def layout(self) -> Layout:
        """Of the task's model on these devices."""
        return Layout(self.counts.facts, self.parallel)

    @property
    def estimated_seconds(self) -> float:
        """Of a step, by arithmetic; of a compiled program, with the transfers that it waits for."""
        return sum(self.parts.values()) - self.parts["sending"] + self.waiting

    @property
    def waiting(self) -> float:
        """Estimated seconds of transfers with nothing beside them; of all, if it was not compiled."""
        if self.program is None:
            return self.parts["sending"]
        return sum(self.seconds_of(each) for each in self.program.collectives if each.waits)

    def seconds_of(self, collective: Collective) -> float:
        """Estimated seconds of all runs of a collective of the program."""
        sent = Sent("", collective.op, collective.axes, collective.bytes, collective.count or 0)
        return sent.seconds(self.machine, self.parallel.mesh.sizes)

    @property
    def seconds(self) -> float:
        """Of a step: the median of what was measured, or else estimated."""
        return statistics.median(self.measured) if self.measured else self.estimated_seconds

    @property
    def memory_bytes(self) -> int:
        """Of a device: the compiler's number, or the sum of `held`."""
        known = self.program and self.program.memory
        return known.total if known else sum(self.held.values())

    @property
    def fits(self) -> bool:
        """Whether a device has room for it, and the compiler takes it."""
        return not self.refusal and self.memory_bytes <= self.machine.memory_bytes

    @property
    def seconds_text(self) -> str:
        """Of a step; an estimate begins with ~."""
        return "~" * (not self.measured) + format_seconds(self.seconds)

    @property
    def memory_text(self) -> str:
        """Of a device; an estimate begins with ~."""
        known = self.program and self.program.memory
        return "~" * (not known) + format_bytes(self.memory_bytes)

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
    """The cost of a task's training step by arithmetic, for batches of the full length.

    Args:
      task, parallel, train: as `fit` takes them.
      machine: or its text, as of `find_machine`; None: the devices that JAX has.
    Raises:
      ValueError: sizes do not fit each other, or there is no such machine.
    """
    machine = find_machine(machine)
    parallel, train = Parallel.of(parallel, task.parallel), train or task.train
    if -1 in parallel.mesh.sizes.values() and machine.is_here:
        parallel = Setup.of(task, parallel, train).parallel
    elif -1 in parallel.mesh.sizes.values():
        parallel = parallel.resolve(machine.num_devices)
    return estimate(counts_of(task, train.num_steps, machine.platform), parallel, train, machine)


def estimate(counts: Counts, parallel: Parallel, train: TrainConfig, machine: Machine) -> StepCost:
    """The same, of counts; `parallel` has no -1 left."""
    step = Step(counts, parallel, train)
    sent, schedule = tuple(step.sent()), step.schedule
    sending = sum(each.seconds(machine, step.sizes) for each in sent)
    return StepCost(
        counts=counts,
        settings=Settings(counts.facts.task, parallel, train),
        machine=machine,
        sent=sent,
        held=step.held(),
        num_ticks=step.num_ticks,
        bubble=schedule.bubble if parallel.runs_in_units else 0.0,
        parts={**step.seconds(machine), "sending": sending},
    )


class Step:
    """The arithmetic of a step.

    Attributes:
      layout: of the model.
      schedule: that of the data-parallel group with the most to do; of a step that runs as a whole one unit.
      units: that the busiest device runs in a step; `unit` what one takes.
      layers_GSK: layers of each kind on each stage, group by group.
      rows: of the stack of each kind.
      kinds: of each kind, one layer on one unit.
    """

    def __init__(self, counts: Counts, parallel: Parallel, train: TrainConfig):
        """Looks at the sizes.

        Raises:
          ValueError: they do not fit each other.
        """
        self.counts, self.parallel, self.train = counts, parallel, train
        self.layout, facts = Layout(counts.facts, parallel), counts.facts
        self.sizes, share = parallel.mesh.sizes, max(parallel.group_shares)
        self.shares_first = self.layout.shares_first
        self.shares_head = self.sizes[STAGE] > 1 and self.layout.head == "sharded"
        self.schedule = step_schedule(parallel, share)
        self.num_ticks = self.schedule.num_ticks * parallel.num_segments
        self.units = share * parallel.pipeline.num_microbatches * parallel.num_chunks
        rows = self.layout.microbatch_rows
        if not facts.divides_by_hand:
            axes = self.layout.rules.axes_of(BATCH)
            rows = facts.batch_size // math.prod(self.sizes[axis] for axis in axes)
        self.unit = counts.unit(self.layout.chunk_len, rows)
        self.rows = tuple(map(len, self.layout.slots.rows))
        ends, kind_of = np.cumsum((0, *self.layout.placement)), np.asarray(facts.kind_of, int)
        placed = [
            np.bincount(kind_of[start:end], minlength=len(facts.kinds))
            for start, end in itertools.pairwise(ends)
        ]
        route = self.schedule.route
        self.layers_GSK = np.zeros((route.num_groups, route.num_stages, len(facts.kinds)), int)
        self.layers_GSK[list(route.groups), list(route.stages)] = placed
        self.kinds = [self._kind(number) for number in range(len(self.rows))]
        for array in (*counts.params, *counts.frozen):
            self.part(array, self.layout.param_rules)  # raises if it does not split
        of_layers = [
            sum(array.kind is not None for array in arrays)
            for arrays in (counts.params, counts.opt_state)
        ]
        copies = of_layers[1] // max(of_layers[0], 1)
        self.params, self.frozen = self._stored(counts.params, 0), self._stored(counts.frozen, 1)
        self.opt_state = self._stored(counts.opt_state, 0, copies)

    def _stored(self, arrays: Sequence[Array], number: int, copies: int = 1) -> tuple[Array, ...]:
        """Arrays as a state has them: instead of what lies in a pool so many times its planes."""
        pools = self.layout.pools
        if pools is None:
            return tuple(arrays)
        planes = []
        for plane in pools[number].planes:
            shape, itemsize = pools[number].shape_of(plane), np.dtype(plane.dtype).itemsize
            planes.append(Array(f"pool.{plane.name}", plane.dims, shape, itemsize, None))
        names = {name for kind in self.layout.pooled_names(number) for name in kind}
        rest = (a for a in arrays if not names.intersection(_endings(a.path)))
        return (*rest, *planes * copies)

    def part(self, array: Array, rules: Rules) -> Part:
        """A device's part of an array."""
        rows = 0 if array.kind is None else self.rows[array.kind]
        return part_of(array, rows, rules, tuple(self.sizes.items()))

    def bytes_of(self, arrays: Sequence[Array], rules: Rules) -> int:
        """Of a device's parts."""
        return sum(self.part(array, rules).elements * array.itemsize for array in arrays)

    @property
    def last(self) -> list[Array]:
        """The parameters that are used after the layers."""
        return [self.counts.params[n] for n in self.counts.last]

    def of_kind(self, number: int) -> list[Array]:
        """The parameters of the layers of a kind."""
        return [array for array in self.counts.params if array.kind == number]

    # ---- work ----

    def _share_of(self, arrays: Sequence[Array]) -> float:
        """Of the work with these weights, what a device does: its share of them over `tensor` and `stage`."""
        whole = sum(math.prod(array.shape) for array in arrays)
        if not whole or not self.counts.facts.divides_by_hand:
            return 1.0  # where the devices of a layer split the batch, its rows are those of one
        own = 0
        for array in arrays:
            stages = self.sizes[STAGE] if array.kind is None else 1
            sizes = tuple({**self.sizes, DATA: 1, STAGE: stages}.items())
            own += part_of(array, math.prod(array.shape[:1]), self.layout.rules, sizes).elements
        return own / whole

    def _kind(self, number: int) -> Kind:
        """What is kept goes into a slot after F, and comes from it before B."""
        whole, own = self.unit.kinds[number], self._share_of(self.of_kind(number))
        forward, backward, weights = (amount.scaled(own) for amount in whole[:3])
        if not self.schedule.weights:
            backward, weights = backward.plus(weights), Amount()
        if self.parallel.runs_in_units:
            is_again = self.parallel.pipeline.remat
            slot = Amount() if is_again else Amount(bytes=2 * whole.kept * own)
            backward = backward.plus(forward if is_again else slot)
            forward = forward.plus(slot)
        return Kind(forward, backward, weights, whole.kept * own)

    @property
    def around(self) -> tuple[Amount, Amount, Amount]:
        """Before the layers, the gradient of that, and after them."""
        unit = self.unit
        return unit.first, unit.first_gradient, unit.last.scaled(self._share_of(self.last))

    def work(self, machine: Machine) -> tuple[list[np.ndarray], np.ndarray]:
        """Seconds of a unit's F, B and W, each [groups, stages]; and of `around`, [ticks, 2, stages]."""

        def seconds_of(amount: Amount) -> float:
            return machine.seconds(amount, self.counts.dtype)

        works = zip(*(kind[:3] for kind in self.kinds), strict=True)
        costs = [self.layers_GSK @ np.asarray([*map(seconds_of, work)]) for work in works]
        costs = costs or [np.zeros(self.layers_GSK.shape[:2])] * 3
        speed_S = np.asarray(self.parallel.speeds or (1.0,) * self.sizes[STAGE])
        first, gradient, last = map(seconds_of, self.around)
        around_T2S = np.zeros((len(self.schedule.forward.unit), 2, len(speed_S)))
        route = self.schedule.route
        for lane, half, place, on_all, work in (
            (self.schedule.forward, 0, 0, self.shares_first, first),
            (self.schedule.backward, 1, 0, self.shares_first, gradient),
            (self.schedule.forward, 0, -1, self.shares_head, last),
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
        ticks = self.num_ticks if self.parallel.runs_in_units else 0
        return {
            "layers": float(layers_S[busiest]),
            "head": float(busy_S[busiest] - layers_S[busiest]),
            "bubble": float(halves_T2S.max(2).sum() - busy_S[busiest]),
            "ticks": machine.tick_seconds * ticks,
            "update": self._update_seconds(machine),
        }

    def _update_seconds(self, machine: Machine) -> float:
        """From gradients to new parameters: norm, clipping, the optimizer, and the bytes that these move."""
        rules = self.layout.opt_rules
        own, kept = (self.bytes_of(arrays, rules) for arrays in (self.params, self.opt_state))
        moved = (4 + 2 * (self.train.clip_norm > 0)) * own + 2 * kept
        if self.parallel.update == "host":  # gradients go there, parameters come back
            return (2 * own + moved) / machine.host_bytes_per_second
        return moved / machine.memory_bytes_per_second

    # ---- memory ----

    def held(self) -> dict[str, int]:
        """`StepCost.held`."""
        layout, counts, on_host = self.layout, self.counts, self.parallel.update == "host"
        parts = math.prod(self.sizes[axis] for axis in layout.rules.axes_of(BATCH))
        gradients = sum(self.part(array, layout.rules).elements for array in self.params)
        parameters = self.bytes_of((*self.params, *self.frozen), layout.param_rules)
        if on_host:  # before and after
            parameters += 2 * self.bytes_of(self.params, layout.opt_rules)
        return {
            "parameters": parameters,
            "optimizer": 0 if on_host else self.bytes_of(self.opt_state, layout.opt_rules),
            "carried": self.bytes_of(counts.carry, layout.carry_rules),
            "batch": round(counts.batch_bytes / (parts if self.parallel.has_equal_shares else 1)),
            "gradients": gradients * FLOAT,
            "activations": round(self._kept()),
        }

    def _kept(self) -> float:
        """Bytes of what is kept of the units in flight, and of their inputs."""
        pipeline, places = self.parallel.pipeline, self.sizes[STAGE] * self.parallel.num_groups
        pairs = zip(self.rows, self.kinds, strict=True)  # of a stage, empty slots included
        kept = self.x_bytes + sum(rows / places * kind.kept for rows, kind in pairs)
        if not self.parallel.runs_in_units:
            return kept
        if pipeline.remat and self.parallel.num_segments == 1:
            kept = self.x_bytes * (1 + (pipeline.remat_keeps == "device"))
        return self.schedule.num_slots * kept

    @functools.cached_property
    def x_bytes(self) -> float:
        """A device's part of what goes from layer to layer: split where it is a state that is split."""
        is_split = not self.counts.facts.padding.width and any(
            array.shape[-1] == self.counts.width
            and TENSOR in self.part(array, self.layout.carry_rules).axes[-1]
            for array in self.counts.carry
        )
        return self.unit.x / (self.sizes[TENSOR] if is_split else 1)

    # ---- what is sent ----

    def sent(self) -> Iterator[Sent]:
        """The collectives of 1 kB and more."""
        yield from self.sent_once()
        yield from self._counted(self._over_stages(), self._over_tensor(), self._over_own_axes())

    def sent_once(self) -> Iterator[Sent]:
        """Those of them that run once a step, for parameters and their gradients."""
        return self._counted(self._parameters())

    def _counted(self, *parts: Iterator[Sent]) -> Iterator[Sent]:
        for each in itertools.chain(*parts):
            axes = tuple(a for a, size in self.sizes.items() if a in each.axes and size > 1)
            if axes and each.bytes >= LEAST_BYTES and each.runs:
                yield each._replace(axes=axes)

    def _parameters(self) -> Iterator[Sent]:
        """What is stored or updated in parts over `data` is gathered once a step; gradients are summed."""
        rules, counts = self.layout.rules, self.counts
        is_split = self.parallel.fsdp or self.parallel.update == "sharded"
        for array in (*self.params, *(self.frozen if self.parallel.fsdp else ())):
            computed = self.part(array, rules)
            if is_split and self.part(array, split_over_data(rules)) != computed:
                size = computed.elements * array.itemsize
                yield Sent(f"parameter {array.name}", "all-gather", (DATA,), size, 1)
        in_units, own_last = self.parallel.runs_in_units, self.counts.facts.has_last_part
        ends = (
            (counts.first, self.shares_first, self.layout.parts[0]),
            (counts.last, self.shares_head, None if own_last else self.layout.parts[1]),
        )
        for array in self.params:
            if array.dims[:1] == (LAYERS,) or not in_units:
                yield self._gradient(array, rules, DATA)
        pooled = {name for kind in self.layout.pooled_names(0) for name in kind}
        for numbers, on_all, names in ends if in_units else ():
            for array in (counts.params[n] for n in numbers):
                if array.path in pooled:
                    continue
                in_parts = on_all and (names is None or owner(array.path) in names)
                axes = (DATA,) if on_all else (DATA, STAGE)
                yield self._gradient(array, rules if in_parts else off_stages(rules), *axes)

    def _gradient(self, array: Array, rules: Rules, *axes: str) -> Sent:
        """That of a parameter, summed over axes, and over those of one's own that do not split it."""
        part = self.part(array, rules)
        axes = (*axes, *(a for a in self.layout.task.axes if a not in sum(part.axes, ())))
        return Sent(f"gradient {array.name}", "all-reduce", axes, part.elements * FLOAT, 1)

    def _of_parts(self, place: int) -> Iterator[Sent]:
        """What modules in parts give and take, before the layers (place 0) or after them (-1)."""
        facts, counts = self.counts.facts, self.counts
        share = self.unit.x / (facts.x_numbers * np.dtype(counts.dtype).itemsize)  # of the batch
        for name in sorted(self.layout.parts[place]):
            arrays = [a for a in (*counts.params, *counts.frozen) if owner(a.path) == name]
            axes = [self.part(array, self.layout.rules).axes for array in arrays]
            is_split = any(TENSOR in each for own in axes for each in own)
            made, again, inputs = counts.summed[place][name]
            outputs = (made + again * (place == 0)) / (self.sizes[TENSOR] if is_split else 1)
            for what, number in (
                (f"outputs of {name}", outputs),
                (f"cotangents in {name}", inputs),
            ):
                yield Sent(what, "all-reduce", (STAGE,), number * share * FLOAT, self.units)

    def _over_stages(self) -> Iterator[Sent]:
        x, ticks = self.x_bytes, self.num_ticks
        for what, lane in (
            ("activations", self.schedule.forward),
            ("cotangents", self.schedule.backward),
        ):
            for step in filter(None, sorted(lane.arrival, reverse=True)):
                name = f"{what}, one stage {'up' if step == UP else 'down'}"
                yield Sent(name, "collective-permute", (STAGE,), x, ticks)
        as_float = x / np.dtype(self.counts.dtype).itemsize * FLOAT
        if self.shares_first:
            yield from self._of_parts(0)
            yield Sent("cotangents of x", "all-reduce", (STAGE,), as_float, self.units)
        if self.shares_head:
            yield Sent("inputs of the shared head", "all-reduce", (STAGE,), as_float, ticks)
            if self.counts.facts.has_last_part:
                yield Sent("their cotangents", "all-reduce", (STAGE,), as_float, self.units)
            else:
                yield from self._of_parts(-1)

    def _over_tensor(self) -> Iterator[Sent]:
        """What split matrices exchange; see above."""
        again = 1 + (self.parallel.runs_in_units and self.parallel.pipeline.remat)
        x, along = self.unit.x, (TENSOR,)
        for number, name in enumerate(self.counts.facts.kinds):
            runs = self.units * float(self.layers_GSK.sum(0)[:, number].max())
            by_row, by_column, by_block = self._split_matrices(self.of_kind(number))
            turns = 0 if by_block else self.unit.kinds[number].forward.product_turns
            yield Sent(f"outputs in {name}", "all-reduce", along, x, by_row * runs * again)
            if not by_column:
                continue
            yield Sent(f"cotangents in {name}", "all-reduce", along, x, max(by_row, 1) * runs)
            if self.x_bytes < x:  # for F, and for W, of h as well
                times = 1 + again + (turns > 0)
                yield Sent(f"inputs in {name}", "all-gather", along, x, times * runs)
            state = x / self.unit.steps
            yield Sent(f"state of {name}", "all-gather", along, state, turns * runs * again)
            yield Sent(f"its cotangent in {name}", "all-reduce", along, state, turns * runs)
        if any(self._split_matrices(self.last)):
            yield Sent("inputs of the head", "all-gather", along, x, self.units)
            yield Sent("their cotangents", "all-reduce", along, x, self.units)

    def _over_own_axes(self) -> Iterator[Sent]:
        """The collectives in layers, which were traced on one device: it has the part of an array alone."""
        again = 1 + (self.parallel.runs_in_units and self.parallel.pipeline.remat)
        for number, name in enumerate(self.counts.facts.kinds):
            layers = self.units * float(self.layers_GSK.sum(0)[:, number].max())
            forward, backward = self.unit.kinds[number].sent
            for what, sent, times in (("in", forward, again), ("backward in", backward, 1)):
                for op, axes, of in sent:
                    runs = sent[op, axes, "runs"]
                    if of == "runs" and runs:
                        size = math.prod(self.sizes[axis] for axis in axes)
                        whole = size if op in ("all-gather", "reduce-scatter") else 1
                        each = sent[op, axes, "bytes"] / runs * whole
                        yield Sent(f"{op} {what} {name}", op, axes, each, runs * layers * times)

    def _split_matrices(self, arrays: Sequence[Array]) -> tuple[int, int, int]:
        """How many `tensor` splits by rows, by columns, and by blocks: before the dim of their inputs."""
        by_row = by_column = by_block = 0
        for array in arrays:
            own = slice(array.kind is not None, None)
            dims = array.dims[own]
            split = [TENSOR in axes for axes in self.part(array, self.layout.rules).axes[own]]
            if len(split) < 2 or not any(split):
                continue
            if split[-1]:
                by_column += 1
            elif INPUT in dims and any(split[: dims.index(INPUT)]):
                by_block += 1
            else:
                by_row += 1
        return by_row, by_column, by_block


def _endings(path: str) -> set[str]:
    """a/b/c, b/c and c of a/b/c: the name of an optimizer's array ends with that of its parameter."""
    parts = path.split("/")
    return {"/".join(parts[n:]) for n in range(len(parts))}
