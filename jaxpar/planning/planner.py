"""Which mesh, and how a step is cut on it: every layout of some devices, ranked by predicted time.

No device is needed. Thousands of layouts are ranked by estimates; the quickest on each of the best meshes are
then compiled, and dropped if by the compiler's own number they do not fit. What saves memory but costs time
(recomputing, FSDP, an optimizer on the host) is chosen where a layout does not fit without it, or where it is
quicker after all.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxpar.config import Parallel, PipelineConfig, TrainConfig, short_name
from jaxpar.display import Printed, format_bytes, format_seconds
from jaxpar.mesh import MeshConfig
from jaxpar.pipeline.placement import balance
from jaxpar.planning.calibration import HERE, find_machine, measure_pieces
from jaxpar.planning.cost import (
    Cost,
    Seconds,
    compiled_cost,
    predict_step,
    sending_seconds,
    unit_seconds,
)
from jaxpar.planning.hardware import Hardware
from jaxpar.planning.pieces import works_of
from jaxpar.planning.shape import ModelShapes, StepShape, shapes_of
from jaxpar.planning.traffic import FLOAT
from jaxpar.planning.unit import BACKWARD, FIRST, FORWARD, LAST, WEIGHTS, facts_of
from jaxpar.task import Task

# Cuts of the batch and of time that are tried differ by at least this factor.
_NEXT_CUT = 1.5
# In the end, this many of the best layouts are predicted from measured pieces.
_NUM_MEASURED = 4
# At most this many changes that may fit are compiled, to find three that do.
_MOST_TRIED = 6
# The best layout on each of this many meshes is compiled.
NUM_COMPILED = 3
# An estimate of memory may be too high by this factor: what exceeds the limit by no more is not ruled out.
_SLACK = 1.15
# With this many units per stage the bubble is at most 1/17: finer cuts have little to gain.
_UNITS_PER_STAGE = 16


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Printed):
    """What `plan` found; `print` it, or read its attributes.

    Attributes:
      hardware, num_devices: what it is for.
      costs: of the layouts that fit, the quickest first; those of the best, and of the best on a few more
        meshes, are of the compiled step.
      num_configs: how many were considered.
      smallest: of the layouts that do not fit, the one that needs the least memory; None if all fit.
    """

    hardware: Hardware
    num_devices: int
    costs: tuple[Cost, ...]
    num_configs: int
    smallest: Cost | None

    @property
    def best(self) -> Cost:
        """The cost of the quickest layout.

        Raises:
          ValueError: none fits.
        """
        if self.costs:
            return self.costs[0]
        assert self.smallest is not None
        raise ValueError(
            f"none of {self.num_configs:,} configs fits in {format_bytes(self.hardware.memory_bytes)} on "
            f"{self.num_devices} devices of {self.hardware.name}; the smallest, "
            f"{describe(self.smallest.parallel)}, needs {self.smallest.memory_text} on "
            f"each; use more devices, or a smaller model or batch"
        )

    @property
    def best_of_meshes(self) -> tuple[Cost, ...]:
        """The quickest layout on each mesh, the quickest first."""
        first: dict[MeshConfig, Cost] = {}
        for cost in self.costs:
            first.setdefault(cost.parallel.mesh, cost)
        return tuple(first.values())

    def explain(self) -> str:
        """In words: what limits the best, and what the best on another mesh would cost.

        Raises:
          ValueError: none fits.
        """
        best, *others = self.best_of_meshes or (self.best,)
        seconds, task = _seconds(best), best.settings.task
        counted = shapes_of(task, best.settings.train.num_steps).counted
        parts = _words(best, self.hardware)
        ordered = sorted(parts, key=lambda name: -getattr(seconds, name))
        shares = [
            f"{parts[name]} ({getattr(seconds, name) / seconds.total:.0%})" for name in ordered
        ]
        lines = [
            f"Use {describe(best.parallel)}: {format_seconds(seconds.total)} a step, "
            f"{counted / seconds.total:,.0f} {task.unit}/s, {best.memory_text} of "
            f"{format_bytes(self.hardware.memory_bytes)}.",
            f"What takes most of its time: {shares[0]}; then {shares[1]}.",
        ]
        if others:
            other = _seconds(others[0])
            more = {name: getattr(other, name) - getattr(seconds, name) for name in parts}
            worst, better = (pick(more, key=more.__getitem__) for pick in (max, min))
            theirs = _words(others[0], self.hardware)
            line = (
                f"The runner-up, {describe(others[0].parallel)}, would take "
                f"{format_seconds(other.total)}, {other.total / seconds.total - 1:+.0%}: "
                f"{format_seconds(more[worst])} more for {theirs[worst]}"
            )
            if more[better] < 0:
                line += f", {format_seconds(-more[better])} less for {theirs[better]}"
            lines.append(line + ".")
        too_large = self.num_configs - len(self.costs)
        if too_large:
            lines.append(f"{too_large:,} of {self.num_configs:,} configs do not fit in memory.")
        return "\n".join(lines)


def plan(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    num_devices: int | None = None,
    hardware: Hardware | str = HERE,
    *,
    num_compiled: int | None = None,
    tensor: Collection[int] | None = None,
) -> Ranking:
    """Every way to run a task's training step on some number of devices, ranked by predicted time.

    All mesh shapes, numbers of microbatches and of chunks of time, and heads are tried, with balanced
    placements and the zero-bubble 1F1B schedule; recomputation, FSDP and the places of the optimizer where
    memory requires them, or where they are quicker.

    Args:
      task, train: as for `predict_step`.
      parallel: its shares, and the devices that its mesh names, are kept; everything else is searched for.
      num_devices: all of them are used; None takes those that the mesh names, or all that JAX has.
      hardware: a machine, or its name for `find_machine`.
      num_compiled: the best layout on each of this many meshes is compiled; 0 relies on estimates of memory.
        None: 3.
      tensor: sizes of `tensor` to try; None tries all. If none is above 1, estimates need no compiling.
    Raises:
      ValueError: no mesh of this many devices fits the sizes of the model and the batch, or `num_devices` is
        not positive, or not that of the devices that the mesh names.
    """
    given = Parallel.of(parallel, task.parallel)
    train = train or task.train
    num_compiled = NUM_COMPILED if num_compiled is None else num_compiled
    named = given.mesh.devices
    if num_devices is None:
        num_devices = jax.device_count() if named is None else len(named)
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: must be positive; plan for 1 device or more")
    if named is not None and len(named) != num_devices:
        raise ValueError(
            f"num_devices={num_devices}, but the mesh names devices={named}; give only one of the two"
        )
    model = shapes_of(task, train.num_steps)
    hardware = find_machine(hardware) if isinstance(hardware, str) else hardware
    costs, refused = list[Cost](), None
    for cut in _cuts_of(model, given, num_devices):
        if tensor is not None and cut.mesh.tensor not in tensor:
            continue
        for saving in _SAVINGS:
            saved = _saved(cut, *saving)
            if saved is None:
                continue
            try:
                costs.append(predict_step(task, saved, train, hardware, quick=True))
            except ValueError as error:
                refused = refused or error
                break
            if costs[-1].memory_bytes <= hardware.memory_bytes and saving is not _SAVINGS[0]:
                break  # what follows is slower
    if not costs:
        reason = refused or (
            f"{len(model.facts.kind_of)} layers and batches of {model.batch_size} rows do not split over any"
        )
        raise ValueError(f"no mesh of {num_devices} devices fits: {reason}; use other devices")
    costs.sort(key=lambda cost: _seconds(cost).total)
    fitting, too_large = _compile_best(costs, hardware.memory_bytes, num_compiled)
    too_large.sort(key=lambda cost: (cost.report is None, cost.memory_bytes))
    return Ranking(hardware, num_devices, tuple(fitting), len(costs), next(iter(too_large), None))


def _compile_best(
    costs: list[Cost], memory_bytes: float, count: int
) -> tuple[list[Cost], list[Cost]]:
    """Costs that fit (on the quickest `count` meshes by the compiler), and those that do not.

    Args:
      costs: the quickest first.
    """
    limit = memory_bytes * (_SLACK if count else 1)  # of estimates
    compiled, fitting, too_large = set[MeshConfig](), list[Cost](), list[Cost]()
    for cost in costs:
        mesh, is_likely = cost.parallel.mesh, cost.report is not None or cost.memory.total <= limit
        if is_likely and mesh not in compiled and len(compiled) < count:
            cost = compiled_cost(cost)
            if cost.memory_bytes <= memory_bytes:
                compiled.add(mesh)
            else:  # estimates err alike for similar layouts
                limit = min(limit, memory_bytes * cost.memory.total / cost.memory_bytes)
        fits = is_likely and cost.memory_bytes <= memory_bytes
        (fitting if fits else too_large).append(cost)
    return fitting, too_large


def plan_here(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    memory_bytes: float | None = None,
    *,
    num_compiled: int | None = None,
) -> Ranking:
    """`plan` for the devices that JAX has; the pieces of the best layouts are measured on them, once.

    Args:
      task, parallel, train, num_compiled: as for `plan`.
      memory_bytes: of one device, to replace the machine's own figure.
    Raises:
      ValueError: as for `plan`, or there are several processes.
    """
    # Refuses what is not a model, before anything is measured.
    shapes_of(task, (train or task.train).num_steps)
    machine = find_machine(HERE, memory_bytes)
    while True:
        ranking = plan(task, parallel, train, hardware=machine, num_compiled=0)
        best = [StepShape(*cost.settings) for cost in ranking.costs[:_NUM_MEASURED]]
        measured = measure_pieces(machine, best)
        if measured is machine:
            break
        machine = measured
    if num_compiled == 0:
        return ranking
    return plan(task, parallel, train, hardware=machine, num_compiled=num_compiled)


def place(
    task: Task,
    parallel: Parallel | str | None,
    train: TrainConfig | None,
    hardware: Hardware,
    by: Literal["time", "memory"] = "time",
) -> tuple[int, ...]:
    """The placement of a task's layers by the time that each takes, or by the memory that stages need.

    Args:
      task, parallel, train: as for `predict_step`.
      hardware: the machine whose times count; `measure_pieces` gives it those of this one.
      by: "time" takes the placement with the shortest ticks of those that by estimate fit in memory (the most
        even one if none does), counting what is before the layers on the first stage and after them on the
        last; "memory" the one whose fullest stage needs the least.
    Returns:
      The number of layers on each stage, group by group.
    Raises:
      ValueError: as for `predict_step`, or `by` is neither.
    """
    if by not in ("time", "memory"):
        raise ValueError(f'by={by!r}: use "time" or "memory"')
    given = Parallel.of(parallel, task.parallel)
    kind_of = shapes_of(task, (train or task.train).num_steps).facts.kind_of
    num_layers, places = len(kind_of), given.mesh.stage * given.num_groups
    if given.mesh.stage == 1:
        return (num_layers,)
    step = StepShape(task, _change(given, placement="balanced"), train)
    if by == "memory":
        kept = facts_of(step.model, step.t, step.b, step.splits_weights).saved
        live = step.schedule.num_slots + 1
        return balance(
            [4 * FLOAT * step.weights_of(k) + live * sum(kept[k]) for k in kind_of], places
        )
    seconds = unit_seconds(step, hardware)
    first, last = seconds[FIRST, -1], 0.0 if step.shares_head else seconds[LAST, -1]
    forward, backward = (
        [sum(seconds.get((name, kind), 0.0) for name in names) for kind in kind_of]
        for names in ((FORWARD,), (BACKWARD, WEIGHTS))
    )

    def tick(placement: tuple[int, ...]) -> float:
        """Seconds of a tick: stages synchronize after its forward part, and after its backward part."""
        ends = np.cumsum((0, *placement))
        up, down = (np.diff(np.cumsum((0.0, *costs))[ends]) for costs in (forward, backward))
        return max(*up[1:-1], up[0] + first, up[-1] + last) + max(down)

    placements = [
        balance(
            forward,
            places,
            first_cost=first,
            last_cost=last,
            layer_bytes=[1.0] * num_layers,
            max_bytes=most,
        )
        for most in range(-(-num_layers // places), num_layers - places + 2)
    ]
    for placement in sorted(placements, key=tick):
        placed = _change(given, placement=placement)
        cost = predict_step(task, placed, train, hardware, quick=True)
        if cost.memory_bytes <= hardware.memory_bytes:
            return placement
    return placements[0]


def check_fits(
    task: Task, parallel: Parallel | str | None, train: TrainConfig | None, hardware: Hardware
) -> Cost:
    """The cost of a task's step, if by the compiler's number a device has the memory for it.

    Args:
      task, parallel, train: as for `predict_step`.
    Raises:
      ValueError: it does not; the message gives up to three changes that make it fit at least cost in time.
    """
    cost = compiled_cost(predict_step(task, parallel, train, hardware))
    if cost.memory_bytes <= hardware.memory_bytes:
        return cost
    changes = list(_changes(shapes_of(task, cost.settings.train.num_steps), cost.parallel))
    tried, fit_alone = list[tuple[str, Cost]](), set[str]()
    for parts in (*zip(changes), *itertools.combinations(changes, 2)):
        names, fields = [name for name, _ in parts], dict(field for _, field in parts)
        if fit_alone.intersection(names) or len(fields) < len(parts):
            continue  # one alone is enough, or both change the same field
        try:
            changed = _change(cost.parallel, **fields)
            other = predict_step(task, changed, train, hardware, quick=True)
        except ValueError:
            continue
        tried.append((" and ".join(names), other))
        if len(parts) == 1 and other.memory_bytes <= hardware.memory_bytes:
            fit_alone.add(*names)
    scale = cost.memory_bytes / cost.memory.total  # for estimates, which err alike
    likely = [each for each in tried if each[1].memory_bytes * scale <= hardware.memory_bytes]
    likely.sort(key=lambda each: _seconds(each[1]).total)
    smallest = sorted(tried, key=lambda each: each[1].memory_bytes)[:1]

    def fitting(changes: Sequence[tuple[str, Cost]]) -> Iterator[str]:
        for what, other in changes:
            other = compiled_cost(other)
            if other.memory_bytes <= hardware.memory_bytes:
                yield f"{what} ({other.memory_text}, {format_seconds(_seconds(other).total)} a step)"

    found = [*itertools.islice(fitting(likely[:_MOST_TRIED]), 3)] or [*fitting(smallest)]
    message = (
        f"a step needs {cost.memory_text} on a device, {hardware.name} has "
        f"{format_bytes(hardware.memory_bytes)}; "
    )
    if not found:
        least = compiled_cost(smallest[0][1]) if smallest else cost
        raise ValueError(
            message
            + f"of two changes none was found that makes it fit, the least is {least.memory_text}; "
            f"use more devices, or a smaller model or batch"
        )
    raise ValueError(message + "use " + ", or ".join(found))


def describe(parallel: Parallel) -> str:
    """A layout in one line: its mesh, its pipeline, and what it does to save memory."""
    pipeline, words = parallel.pipeline, [short_name(parallel.mesh)]
    if parallel.runs_in_units:
        words.append(f"M={pipeline.num_microbatches}")
    if parallel.mesh.stage > 1:
        head = "sharded" if pipeline.head == "auto" else pipeline.head
        words += [f"K={pipeline.num_chunks}", f"head={head}"]
        if not isinstance(pipeline.placement, str) and len(set(pipeline.placement)) > 1:
            words.append(f"placement={','.join(map(str, pipeline.placement))}")
    words += ["remat"] * (pipeline.remat and parallel.runs_in_units) + ["fsdp"] * parallel.fsdp
    return " ".join(words + [f"update={parallel.update}"] * (parallel.update != "replicated"))


# ---- what is tried ----


def _change(parallel: Parallel, **fields: Any) -> Parallel:
    """A copy with some fields changed, its own or its pipeline's."""
    own = {name: fields.pop(name) for name in _OWN_FIELDS & fields.keys()}
    if fields:
        own["pipeline"] = dataclasses.replace(parallel.pipeline, **fields)
    return dataclasses.replace(parallel, **own)


_OWN_FIELDS = frozenset(field.name for field in dataclasses.fields(Parallel))


def _cuts_of(model: ModelShapes, given: Parallel, num_devices: int) -> Iterator[Parallel]:
    """Meshes, and how the batch and time are cut on them; sizes may still not fit."""
    facts = model.facts
    heads = ("sharded", "last") if model.facts.can_share_head else ("last",)
    for mesh in _meshes(num_devices, given.mesh.devices):
        stages, rows = mesh.stage, model.batch_size // mesh.data
        if stages > max(len(facts.kind_of), 1) or model.batch_size % mesh.data:
            continue
        for M, K, head in itertools.product(
            _cuts(rows) if facts.divides_by_hand else [1],
            _cuts(facts.num_steps or 1) if stages > 1 else [1],
            heads if stages > 1 else ("auto",),
        ):
            if _UNITS_PER_STAGE * stages >= M * K:
                pipeline = PipelineConfig(num_microbatches=M, num_chunks=K, head=head)
                yield Parallel(mesh, pipeline, given.shares)


def _meshes(num_devices: int, devices: tuple[int, ...] | None) -> Iterator[MeshConfig]:
    for data in divisors(num_devices):
        for stage in divisors(num_devices // data):
            yield MeshConfig(data, stage, num_devices // data // stage, devices)


def divisors(n: int) -> list[int]:
    """The divisors of a positive integer, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _cuts(n: int) -> list[int]:
    """Divisors of n, each at least `_NEXT_CUT` times the one before."""
    cuts = [1]
    for divisor in divisors(n):
        if divisor >= _NEXT_CUT * cuts[-1]:
            cuts.append(divisor)
    return cuts


def _saved(parallel: Parallel, remat: bool, where: dict[str, Any]) -> Parallel | None:
    """The layout with these savings of memory; None if they would save nothing."""
    if (remat and not parallel.runs_in_units) or (
        parallel.mesh.data == 1 and where not in ({}, {"update": "host"})
    ):
        return None
    return _change(parallel, remat=remat, **where)


# From the most memory and the least time to the least memory and the most time.
_SAVINGS = tuple(
    itertools.product(
        (False, True), ({}, {"update": "sharded"}, {"fsdp": True}, {"update": "host"})
    )
)


def _changes(model: ModelShapes, parallel: Parallel) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Changes to a layout that may save memory, each with its option on the command line."""
    pipeline, mesh = parallel.pipeline, parallel.mesh
    if not pipeline.remat and parallel.runs_in_units:
        yield "--pipeline.remat", ("remat", True)
    for M in _cuts(model.batch_size // mesh.data):
        if pipeline.num_microbatches < M:
            yield f"--pipeline.num-microbatches {M}", ("num_microbatches", M)
    if mesh.stage > 1:
        for K in _cuts(model.facts.num_steps or 1):
            if pipeline.num_chunks < K:
                yield f"--pipeline.num-chunks {K}", ("num_chunks", K)
        if pipeline.head == "last" and model.facts.can_share_head:
            yield "--pipeline.head sharded", ("head", "sharded")
        if pipeline.schedule == "gpipe":
            yield "--pipeline.schedule 1f1b", ("schedule", "1f1b")
    if mesh.data > 1 and parallel.update == "replicated":
        yield "--update sharded", ("update", "sharded")
    if mesh.data > 1 and not parallel.fsdp:
        yield "--fsdp", ("fsdp", True)
    if parallel.update != "host":
        yield "--update host", ("update", "host")
    for other in _meshes(mesh.num_devices, mesh.devices):
        if other != mesh:
            yield f"--mesh {short_name(other)}", ("mesh", other)


# ---- words ----


def _seconds(cost: Cost) -> Seconds:
    assert cost.seconds is not None  # predicted for hardware
    return cost.seconds


def _words(cost: Cost, hardware: Hardware) -> dict[str, str]:
    """What each part of `Seconds` is spent on, in words."""
    step = StepShape(*cost.settings)
    works = {key: work for key, work in works_of(step).items() if key[1] >= 0}
    longest = max(works.values(), key=hardware.seconds, default=None)
    limit = {
        "flops": "the matmuls of the layers",
        "bytes": "the weights and activations of the layers, from memory and back",
        "turns": "the time steps of the layers, each too small to fill a device",
    }[hardware.limit(longest) if longest else "flops"]
    along: dict[tuple[str, ...], float] = {}
    for part in cost.traffic:
        seconds = sending_seconds(part, hardware, cost.parallel.mesh.sizes)
        along[part.axes] = along.get(part.axes, 0.0) + seconds
    axes = max(along, key=along.__getitem__, default=())
    return {
        "layers": limit,
        "head": "what is before and after the layers",
        "bubble": f"stages that wait for each other, idle in {cost.bubble:.0%} of their turns",
        "ticks": f"the loop over {cost.num_ticks} ticks itself",
        "sending": "sending" + f", mostly over {' and '.join(axes)}" * bool(axes),
        "update": "the optimizer",
    }
