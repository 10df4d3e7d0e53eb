"""All layouts of some devices, ranked by estimates.

What saves memory but costs time (recomputing, FSDP, an optimizer on the host) is chosen where a layout does
not fit without it; an update that is split over `data` also where it is quicker.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxpar.base.types import Value
from jaxpar.config import Parallel, PipelineConfig, TrainConfig
from jaxpar.mesh import MeshConfig, short_name
from jaxpar.model.task import Task
from jaxpar.planning.cost import StepCost, estimate
from jaxpar.planning.counts import Counts, counts_of
from jaxpar.planning.machine import Machine

# Cuts of the batch and of time that are tried differ by at least this factor.
_NEXT_CUT = 1.5
# With this many units per stage the bubble is at most 1/17: finer cuts have little to gain.
_UNITS_PER_STAGE = 16
# From the most memory and the least time to the least memory and the most time.
_PLACES = (
    {},
    {"update": "sharded"},
    {"fsdp": True},
    {"update": "host"},
    {"fsdp": True, "update": "host"},
)
_SAVINGS = tuple(itertools.product((False, True), _PLACES))


def rank(
    task: Task, given: Parallel, train: TrainConfig, machine: Machine, *, tensor: Sequence[int] = ()
) -> list[StepCost]:
    """The cost of every layout by arithmetic, the quickest first; of those that do not fit, too.

    All mesh shapes, numbers of microbatches and of chunks of time, and heads are tried, with balanced
    placements and the zero-bubble 1F1B schedule.

    Args:
      given: its shares, its speeds and the devices that its mesh names are kept; everything else is searched
        for.
      tensor: sizes of `tensor` to try; none tries all.
    Raises:
      ValueError: no mesh of this many devices fits the sizes of the model and the batch.
    """
    counts = counts_of(task, train.num_steps, machine.platform)
    found, refused = list[StepCost](), None
    for cut in _cuts_of(counts, given, machine.num_devices):
        if tensor and cut.mesh.tensor not in tensor:
            continue
        for remat, where in (each for each in _SAVINGS if _saves(cut, *each)):
            pipeline = dataclasses.replace(cut.pipeline, remat=remat)
            parallel = dataclasses.replace(cut, pipeline=pipeline, **where)
            try:
                found.append(estimate(counts, parallel, train, machine))
            except ValueError as error:
                refused = refused or error
                break
            if found[-1].fits and (remat or where or cut.mesh.data == 1):
                break
    if not found:
        layers, rows = len(counts.facts.kind_of), counts.facts.batch_size
        reason = refused or f"{layers} layers and batches of {rows} rows do not split over any"
        fact = f"no mesh of {machine.num_devices} devices fits: {reason}"
        raise ValueError(f"{fact}\nFix: use another number of devices, or another batch size.")
    return sorted(found, key=lambda cost: cost.seconds)


def describe(parallel: Parallel) -> str:
    """A layout in one line: its mesh, its pipeline, and what it does to save memory.

    Example:
      parallel = jaxpar.Parallel(jaxpar.MeshConfig(data=2, stage=2), fsdp=True)
      print(jaxpar.planning.describe(parallel))
    """
    pipeline, words = parallel.pipeline, [short_name(parallel.mesh)]
    if parallel.runs_in_units:
        words.append(f"M={pipeline.num_microbatches}")
    if parallel.mesh.stage > 1:
        words.append(f"K={pipeline.num_chunks}")
        words += [f"head={pipeline.head}"] * (pipeline.head != "auto")
        if named := pipeline.named_placement:
            words.append(f"placement={str(named)!r}")
        elif not isinstance(pipeline.placement, str) and len(set(pipeline.placement)) > 1:
            words.append(f"placement={','.join(map(str, pipeline.placement))}")
    words += ["remat"] * (pipeline.remat and parallel.runs_in_units) + ["fsdp"] * parallel.fsdp
    return " ".join(words + [f"update={parallel.update}"] * (parallel.update != "replicated"))


def divisors(n: int) -> list[int]:
    """The divisors of a positive integer, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _cuts_of(counts: Counts, given: Parallel, num_devices: int) -> Iterator[Parallel]:
    """Meshes, and how the batch and time are cut on them; sizes may still not fit."""
    facts = counts.facts
    heads = ("sharded", "last") if facts.has_last_part else ("auto",)
    for mesh in _meshes(num_devices, given.mesh):
        stages, rows = mesh.stage, facts.batch_size // mesh.data
        if stages > max(len(facts.kind_of), 1) or facts.batch_size % mesh.data:
            continue
        for M, K, head in itertools.product(
            cuts(rows) if facts.divides_by_hand else [1],
            cuts(facts.num_steps or 1) if stages > 1 and not facts.why_whole else [1],
            heads if stages > 1 else ("auto",),
        ):
            if _UNITS_PER_STAGE * stages >= M * K:
                pipeline = PipelineConfig(num_microbatches=M, num_chunks=K, head=head)
                yield Parallel(mesh, pipeline, given.shares, given.speeds)


def _meshes(num_devices: int, given: MeshConfig) -> Iterator[MeshConfig]:
    """All meshes of so many devices with the given axes of one's own."""
    count, rest = divmod(num_devices, math.prod(size for _, size in given.axes))
    for data in divisors(count) if not rest else ():
        for stage in divisors(count // data):
            yield MeshConfig(data, stage, count // data // stage, given.devices, given.axes)


def cuts(n: int) -> list[int]:
    """Divisors of n, each at least `_NEXT_CUT` times the one before."""
    cuts = [1]
    for divisor in divisors(n):
        if divisor >= _NEXT_CUT * cuts[-1]:
            cuts.append(divisor)
    return cuts


def _saves(parallel: Parallel, remat: bool, where: dict[str, Value]) -> bool:
    """Whether these savings of memory would save some."""
    is_useful = where in ({}, {"update": "host"}) or parallel.mesh.data > 1
    return is_useful and (parallel.runs_in_units or not remat)
