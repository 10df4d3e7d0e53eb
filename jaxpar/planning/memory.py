"""How much memory a training step needs on a device: a quick estimate, for ranking thousands of layouts.

The state is exact, and so is what is kept of the units in flight. Temporaries, within a piece of work or in a
step that is not cut into units, are estimated from what is alive at each operation (`work.Amount.live`):
compilers pack buffers and fuse operations in their own ways. For a single layout there is the compiler's own
number (`compiled.report_of`).

Legend: t time steps of a chunk, b rows of a microbatch.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from jaxpar.axes import BATCH, DATA, STAGE
from jaxpar.planning.compiled import copies_in_branches
from jaxpar.planning.shape import StepShape
from jaxpar.planning.traffic import FLOAT
from jaxpar.planning.unit import BACKWARD, FORWARD, LAST, WEIGHTS, Facts, facts_of, is_split


@dataclasses.dataclass(frozen=True)
class MemoryCost:
    """Bytes on the fullest device at its fullest moment.

    Attributes:
      parameters, optimizer, carried: the state; with `update="host"` the optimizer's part is on the host.
      batch: the device's rows.
      gradients: the arrays in which they are accumulated.
      activations: what is kept of units in flight (the schedule's live units) for their backward pass, and
        what waits to be read.
      working: temporaries within a piece of work, or between gradients and new parameters.
      results: with `update="host"`, what the program returns besides the state that it was given.
    """

    parameters: int
    optimizer: int
    carried: int
    batch: int
    gradients: int
    activations: int
    working: int
    results: int

    @property
    def total(self) -> int:
        """Bytes that a device must have room for."""
        return sum(vars(self).values())


def estimate_memory(step: StepShape) -> MemoryCost:
    """The memory of a training step on one device."""
    on_host, in_units = step.parallel.update == "host", step.parallel.runs_in_units
    gradients = sum(step.part(array, step.rules).elements for array in step.params) * FLOAT
    activations, working = _of_units(step) if in_units else (_of_whole(step), 0.0)
    computed = sum(step.part(a, step.rules).elements * a.itemsize for a in step.params)
    gathered = computed - step.bytes_of(step.params, step.param_rules)
    # Afterwards gradients are summed and clipped; what was kept is freed by then.
    after = gradients - activations
    carried = step.bytes_of(step.carry, step.carry_rules)
    results = 2 * step.bytes_of(step.params, step.opt_rules) + carried if on_host else 0
    if on_host and in_units and step.sizes[DATA] == 1:
        results -= gradients  # what is returned unsummed lies where it was accumulated
    return MemoryCost(
        parameters=step.bytes_of((*step.params, *step.frozen), step.param_rules),
        optimizer=0 if on_host else step.bytes_of(step.opt_state, step.opt_rules),
        carried=carried,
        batch=_batch_bytes(step),
        gradients=gradients,
        activations=round(activations),
        working=round(max(working + gathered, after)),
        results=results,
    )


def _of_whole(step: StepShape) -> float:
    """Bytes of a step that is not cut into units at its fullest moment, besides gradients."""
    facts = facts_of(step.model, step.t, step.b, splits=False)
    most = max(facts.whole) - FLOAT * sum(math.prod(array.shape) for array in step.params)
    whole, own = (_saved(step, each) for each in (facts.saved, _split_saved(step, facts)))
    return max(most, 0.0) * (own / whole if whole else 1.0)


def _saved(step: StepShape, saved: Sequence[Sequence[float]]) -> float:
    """Bytes that all layers of a stage keep of a unit."""
    return sum(rows * sum(sizes) for rows, sizes in zip(step.unit_rows, saved, strict=True))


def _split_saved(step: StepShape, facts: Facts) -> Sequence[Sequence[float]]:
    """Bytes per device of each array that a layer keeps, for every kind."""
    if step.tensor == 1 or not facts.saved:
        return facts.saved
    return [
        [size / (step.tensor if cut else 1) for size, cut in zip(*each, strict=True)]
        for each in zip(facts.saved, is_split(step).saved, strict=True)
    ]


def _of_units(step: StepShape) -> tuple[float, float]:
    """Bytes kept of all units in flight; and what one needs besides, less the buffers that it can reuse."""
    facts = facts_of(step.model, step.t, step.b, step.splits_weights)
    n, x, schedule, pipeline = step.tensor, facts.x, step.schedule, step.parallel.pipeline
    if n > 1 and is_split(step).x:
        x /= n
    of_unit = kept = _saved(step, _split_saved(step, facts))
    carried = sum(rows * size for rows, size in zip(step.unit_rows, facts.carry, strict=True)) / n
    if pipeline.remat and step.parallel.num_segments == 1:
        # The input of the stage and the state before it.
        kept = x + carried if pipeline.remat_keeps == "device" else 0.0
    waiting = schedule.num_forward_buffers + schedule.num_backward_buffers + 2
    activations = (
        (schedule.num_slots + 1) * (kept + x) + waiting * x + step.parallel.num_groups * carried
    )
    pieces = {key: max(each.live) / n for key, each in facts.amounts.items()}
    gradients = [
        sum(step.part(a, step.rules).elements for a in step.params if a.kind == kind) * FLOAT
        for kind in range(len(step.rows))
    ]
    if step.shares_head:
        pieces[LAST, -1] /= step.sizes[STAGE]
    for (name, kind), most in pieces.items():
        if name == FORWARD:  # what it keeps exists once per layer, and once where it is made
            most = max(most - sum(facts.saved[kind]) / n, 0.0)
        is_last = name == (WEIGHTS if (WEIGHTS, kind) in pieces else BACKWARD)
        if is_last and len(step.rows) > 1 and copies_in_branches():
            # A branch for each kind adds to its own gradients, and copies those of the others.
            most += sum(gradients) - gradients[kind]
        waits = name == LAST and pipeline.remat  # for the second forward pass
        if kind >= 0 or waits:
            # Read from its slot into an array of its own, unless there is only one layer.
            pieces[name, kind] = most + of_unit if sum(step.unit_rows) > 1 else max(most, of_unit)
    return activations, max(pieces.values())


def _batch_bytes(step: StepShape) -> int:
    sizes, facts = step.sizes, step.model.facts
    parts = math.prod(sizes[axis] for axis in step.rules.axes_of(BATCH))
    arrays = jax.tree.leaves(facts.batch)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
    return whole // (parts if step.parallel.has_equal_shares else 1)
