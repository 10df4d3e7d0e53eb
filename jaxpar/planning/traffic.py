"""What a training step sends: every collective, by its axes, before the step is compiled.

Along `data` and `stage` the model's shapes determine what the engine exchanges; tests compare it with the
compiled program, to the byte. Along `tensor` the compiler decides, from the whole program. To rank layouts, a
small program of the same kind is compiled once, and what it sends is scaled by the sizes and the number of
units: that is exact for LSTMs and transformers, and off by up to a fifth for layers that the compiler does
not always treat alike (convolutions before dense layers; a Flax GRU with an update that is split).

Legend: t time steps of a chunk, b rows of a microbatch.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxpar.analysis.collectives import Collective, sent_bytes
from jaxpar.analysis.program import ProgramReport
from jaxpar.axes import DATA, MESH_AXES, STAGE, TENSOR
from jaxpar.config import Parallel, PipelineConfig, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.pipeline.engine import FORWARD, HEAD
from jaxpar.planning.compiled import report_of
from jaxpar.planning.shape import StepShape, least_factor, shapes_of
from jaxpar.planning.unit import facts_of, is_split
from jaxpar.sharding import split_over_data
from jaxpar.task import Task

PARAMETER = "parameter"  # how `Traffic.what` begins where a parameter is gathered
FLOAT = 4  # bytes of a float32, in which gradients and sums are accumulated


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A collective, or several of one kind.

    Attributes:
      op, axes, bytes, sent_bytes: of one run, as in `collectives.Collective`.
      count: runs in a step.
      what: what is sent, in words.
    """

    op: str
    axes: tuple[str, ...]
    bytes: float
    sent_bytes: float
    count: float
    what: str


def predict_traffic(step: StepShape) -> tuple[Traffic, ...]:
    """The collectives of a training step of full length, without those of an update on the host."""
    found = tuple(_Sender(step).all())
    return (*found, *_along_tensor(step)) if step.tensor > 1 else found


def traffic_of(report: ProgramReport) -> tuple[Traffic, ...]:
    """The collectives of a compiled step."""
    return tuple(
        Traffic(c.op, c.axes, c.bytes, c.sent_bytes, c.count or 0, c.module or c.source)
        for c in report.collectives
    )


def totals(traffic: Sequence[Traffic]) -> dict[tuple[str, tuple[str, ...]], int]:
    """(op, axes) -> bytes of all runs."""
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for part in traffic:
        sums[part.op, part.axes] += round(part.count * part.bytes)
    return {key: size for key, size in sums.items() if size}


class _Sender:
    """What the engine and the update exchange along `data` and `stage`, in the step's order."""

    def __init__(self, step: StepShape):
        self.step, self.parallel, self.sizes = step, step.parallel, step.sizes
        self.facts = facts_of(step.model, step.t, step.b, step.splits_weights)

    def all(self) -> Iterator[Traffic]:
        yield from self.gather_parameters()
        if self.parallel.runs_in_units:
            yield from self.exchange()
        yield from self.gradients()
        yield from self.norms()

    def send(
        self, op: str, axes: tuple[str, ...], size: float, count: float, what: str
    ) -> Iterator[Traffic]:
        """One kind of collective of `size` bytes, if there is anyone to send to.

        What goes along `tensor` as well comes from `_along_tensor`.
        """
        real = tuple(axis for axis in MESH_AXES if axis in axes and self.sizes[axis] > 1)
        if real and size and count and TENSOR not in real:
            devices = math.prod(self.sizes[axis] for axis in real)
            yield Traffic(op, real, size, sent_bytes(op, size, devices), count, what)

    def gather_parameters(self) -> Iterator[Traffic]:
        """Gathers of those that are stored split over `data`, before the step or after it."""
        step, arrays = self.step, self.step.params
        if self.parallel.fsdp:
            arrays = (*arrays, *step.frozen)
        elif self.parallel.update != "sharded":
            return
        for array in arrays:
            computed = step.part(array, step.rules)
            if step.part(array, split_over_data(step.rules)) != computed:
                size = computed.elements * array.itemsize
                yield from self.send("all-gather", (DATA,), size, 1, f"{PARAMETER} {array.name}")

    def exchange(self) -> Iterator[Traffic]:
        """What stages send at every tick, and for every unit if they share the head."""
        step, ticks = self.step, self.step.num_ticks
        x = whole = self.facts.x
        if step.tensor > 1 and is_split(step).x:
            x /= step.tensor
        yield from self.send("collective-permute", (STAGE,), x, ticks, "activations, one stage up")
        yield from self.send("collective-permute", (STAGE,), x, ticks, "cotangents, one stage down")
        if self.parallel.pipeline.remat and self.parallel.num_segments == 1:
            # The compiler splits the plan's list of units to recompute, one for each tick, over the stages.
            numbers, what = 4 * ticks, "units of the schedule"
            yield from self.send("collective-permute", (STAGE,), numbers, 2, what)
            yield from self.send("all-reduce", (STAGE,), 2 * numbers, 1, what)
        if step.shares_head:
            as_float = x / step.model.x_itemsize * FLOAT
            yield from self.send(
                "all-reduce", (STAGE,), as_float, ticks, "inputs of the shared head"
            )
            for (_, op), size in self.facts.shared_head.items():
                if size == whole / step.model.x_itemsize * FLOAT:  # dy, which is split as y is
                    size = as_float
                yield from self.send(op, (STAGE,), size, step.units, "the shared head")

    def gradients(self) -> Iterator[Traffic]:
        """Sums of gradients over `data`, and over the stages if all of them have the parameter."""
        step, model = self.step, self.step.model
        everywhere = (DATA, STAGE) if self.parallel.runs_in_units else (DATA,)
        of_last = (DATA,) if step.shares_head else everywhere
        layers = [array for array in step.params if array.kind is not None]
        outer = [array for array in step.params if array.kind is None]
        parts = [(everywhere, outer), ((DATA,), layers)]
        if self.parallel.runs_in_units:
            first, last = ([step.params[n] for n in own] for own in (model.first, model.last))
            parts = [(everywhere, first), ((DATA,), layers), (of_last, last)]
        for axes, arrays in parts:
            for array in arrays:
                size = step.part(array, step.rules).elements * FLOAT
                yield from self.send("all-reduce", axes, size, 1, f"gradient {array.name}")
        yield from self.send("all-reduce", of_last, FLOAT * model.num_sums, 1, "sums of the loss")

    def norms(self) -> Iterator[Traffic]:
        """Of the gradients: one sum for each split dim, one after the other."""
        step, asked = self.step, [(self.step.params, FLOAT, "norm of gradients")]
        if step.model.checks_update and self.parallel.update != "host":
            asked += [((*step.params, *step.opt_state), 1, "whether the update is finite")]
        for arrays, size, what in asked:
            dims = Counter(
                axes for array in arrays for axes in step.part(array, step.opt_rules).axes
            )
            for axes, count in dims.items():
                yield from self.send("all-reduce", axes, size, count, what)


# ---- along `tensor` ----


def _along_tensor(step: StepShape) -> Iterator[Traffic]:
    """What the compiler sends in a small program of the same kind, scaled to the units of this step."""
    small = _small_step(step)
    report, in_units = report_of(*small.settings, memory=False), step.parallel.runs_in_units
    layers, own_layers = (
        sum(each.unit_rows) * each.parallel.num_groups or 1 for each in (step, small)
    )
    t, t_own, deep = step.t or 1, small.t or 1, layers / own_layers
    rows, units = step.b / small.b, step.units / small.units
    for c in report.collectives:
        if TENSOR not in c.axes:
            continue
        count, size = float(c.count or 0), float(c.bytes)
        if c.trip_counts or (not in_units and _has_dim(c, small.b, small.b * t_own)):
            in_time = t_own > 1 and t_own in c.trip_counts
            count *= units * (t / t_own if in_time else 1)
            size *= rows * (1 if in_time else t / t_own)
            scopes = c.module.split("/")
            count *= 1 if HEAD in scopes else deep
            count *= 2 if FORWARD in scopes and step.parallel.pipeline.remat and in_units else 1
        elif _has_dim(c, step.model.batch_size):  # the carry of all layers
            size *= deep / step.sizes[DATA]
        axes = tuple(axis for axis in MESH_AXES if axis in c.axes and step.sizes[axis] > 1)
        devices = math.prod(step.sizes[axis] for axis in axes)
        if count and devices > 1:
            yield Traffic(
                c.op, axes, size, sent_bytes(c.op, size, devices), count, c.module or c.source
            )


def _has_dim(c: Collective, *sizes: int) -> bool:
    """Whether what is sent has a dim of one of these sizes, such as the rows of a batch."""
    return any({*sizes} & {*shape} for shape in c.shapes)


def _small_step(step: StepShape) -> StepShape:
    """One with the fewest devices that give the same kind of program."""
    in_units, stages = step.parallel.runs_in_units, min(step.sizes[STAGE], 2)
    head = "sharded" if step.shares_head else "last" if stages > 1 else "auto"
    sizes = stages, least_factor(step.tensor), in_units, head
    return _make_small(step.settings.task, step.train, *sizes)


@functools.lru_cache(maxsize=64)
def _make_small(
    task: Task, train: TrainConfig, stages: int, tensor: int, in_units: bool, head: Any
) -> StepShape:
    facts = shapes_of(task, train.num_steps).facts
    pipeline = PipelineConfig(
        num_microbatches=least_factor(facts.batch_size) if in_units else 1,
        num_chunks=least_factor(facts.num_steps or 1) if stages > 1 else 1,
        head=head,
    )
    # Nothing is asked about the update: without it there is less to compile.
    parallel = Parallel(MeshConfig(stage=stages, tensor=tensor), pipeline, update="host")
    return StepShape(task, parallel, train)
