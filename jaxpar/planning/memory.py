"""How much memory a training step needs on a device: a quick estimate, to rank thousands of layouts by.

What is stored is exact, and so is what is kept of the units under way. What comes and goes within a piece of
work is estimated from what is alive at each of its operations (`work.Amount.live`): compilers pack buffers,
and fuse operations, in ways of their own. For a single layout there is the compiler's own number
(`compiled.report_of`).

Legend: t time steps of a chunk, b rows of a microbatch.
"""

import dataclasses
import math

import jax

from jaxpar.axes import BATCH, STAGE
from jaxpar.planning.shape import StepShape
from jaxpar.planning.traffic import FLOAT
from jaxpar.planning.unit import FORWARD, LAST, Facts, facts_of, is_split


@dataclasses.dataclass(frozen=True)
class MemoryCost:
    """Bytes on the fullest device at its fullest moment.

    Attributes:
      parameters, optimizer, carried: of the state; with `update="host"` the optimizer is elsewhere.
      batch: of the device's rows.
      gradients: where they are added up.
      activations: what is kept of units under way (the live units of the schedule) for their backward pass,
        and what waits to be read.
      working: within a piece of work, or between gradients and new parameters.
      results: with `update="host"`, what the program returns besides the state that it took.
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
        """What a device must have room for."""
        return sum(vars(self).values())


def estimate_memory(step: StepShape) -> MemoryCost:
    """Of a training step, on one device."""
    parallel, facts = step.parallel, facts_of(step.model, step.t, step.b, step.splits_weights)
    on_host = parallel.update == "host"
    activations, kept = kept_bytes(step)
    gradients = sum(step.part(array, step.rules).elements for array in step.params) * FLOAT
    carried = step.bytes_of(step.carry, step.carry_rules)
    return MemoryCost(
        parameters=step.bytes_of((*step.params, *step.frozen), step.param_rules),
        optimizer=0 if on_host else step.bytes_of(step.opt_state, step.opt_rules),
        carried=carried,
        batch=_batch_bytes(step),
        gradients=gradients,
        activations=round(activations),
        working=round(_working_bytes(step, facts, kept, gradients, activations)),
        results=2 * step.bytes_of(step.params, step.opt_rules) + carried if on_host else 0,
    )


def kept_bytes(step: StepShape) -> tuple[float, float]:
    """What a device keeps of all units under way, and of one unit."""
    model, parallel = step.model, step.parallel
    facts = facts_of(model, step.t, step.b, step.splits_weights)
    n, x, layers = step.tensor, facts.x, list(facts.saved)
    if n > 1:
        split = is_split(step)
        x /= n if split.x else 1
        layers = [
            [size / (n if cut else 1) for size, cut in zip(*each, strict=True)]
            for each in zip(facts.saved, split.saved, strict=True)
        ]
    of_unit = sum(rows * sum(saved) for rows, saved in zip(step.unit_rows, layers, strict=True))
    if not parallel.runs_in_units:
        return of_unit + facts.first_saved, 0.0
    schedule = step.schedule
    carried = sum(rows * size for rows, size in zip(step.unit_rows, facts.carry, strict=True)) / n
    kept = of_unit  # of all units of a segment
    if parallel.pipeline.remat and parallel.num_segments == 1:
        # The input of the stage and the state before it.
        kept = x + carried if parallel.pipeline.remat_keeps == "device" else 0.0
    waiting = schedule.num_forward_buffers + schedule.num_backward_buffers + 2
    total = (schedule.num_slots + 1) * (kept + x) + waiting * x + parallel.num_groups * carried
    return total, of_unit


def _working_bytes(
    step: StepShape, facts: Facts, kept: float, gradients: int, activations: float
) -> float:
    """At the fullest moment, beside what is kept; and without what its room can be lent from."""
    n, live = step.tensor, {key: max(each.live) for key, each in facts.amounts.items()}
    pieces = {key: most / n for key, most in live.items()}
    if step.shares_head:
        pieces[LAST, -1] /= step.sizes[STAGE]
    for (name, kind), most in pieces.items():
        if name == FORWARD:  # what it keeps is there once for each layer, and once where it is made
            most = max(most - sum(facts.saved[kind]) / n, 0.0)
        waits = name == LAST and step.parallel.pipeline.remat  # for the second forward
        if kind >= 0 or waits:
            # Read from its slot into an array of its own, unless one layer is all there is.
            pieces[name, kind] = most + kept if sum(step.unit_rows) > 1 else max(most, kept)
    computed = sum(step.part(a, step.rules).elements * a.itemsize for a in step.params)
    gathered = computed - step.bytes_of(step.params, step.param_rules)
    inside = max(pieces.values()) + gathered
    # Afterwards gradients are summed and clipped, and what was kept is gone.
    after = gradients - activations
    return max(inside, after)


def _batch_bytes(step: StepShape) -> int:
    sizes, layout = step.sizes, step.model.layout
    parts = math.prod(sizes[axis] for axis in step.rules.axes_of(BATCH))
    arrays = jax.tree.leaves(layout.batch)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in arrays)
    return whole // (parts if step.parallel.has_equal_shares else 1)
