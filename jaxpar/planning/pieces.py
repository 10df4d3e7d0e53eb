"""The pieces that a training step is made of, as a machine sees them: FLOPs, bytes, loop iterations."""

import functools
import hashlib
import math

import jax

from jaxpar.axes import DATA, STAGE, TENSOR
from jaxpar.planning.hardware import Work
from jaxpar.planning.shape import Array, ModelShapes, StepShape, part_of
from jaxpar.planning.unit import BACKWARD, BOTH, FORWARD, facts_of

UPDATE = "update"


@functools.lru_cache(maxsize=8)  # a prediction asks three times
def works_of(step: StepShape) -> dict[tuple[str, int], Work]:
    """One device's part of every piece: a layer on a unit, what is around the layers, and the update.

    Returns:
      (name, number of the kind of layers, or -1 outside of layers) -> work. Its sizes are the time steps and
      rows of the unit, the devices that a layer is split over, and the layers of the kind on a stage; of the
      update, the bytes of a device's parameters and the size of `data`.
    """
    facts = facts_of(step.model, step.t, step.b, step.splits_weights)
    params = [array for array in step.params if array.kind is None]
    works = {}
    for (name, kind), amount in facts.amounts.items():
        at_once = kind >= 0 and not step.parallel.runs_in_units
        name = BOTH if at_once else name
        kept = sum(facts.saved[kind]) if keeps_in_slots(step) and name in (FORWARD, BACKWARD) else 0
        own = [array for array in step.params if array.kind == kind] if kind >= 0 else params
        # Where a layer's devices also split the batch, `b` already has the rows of one.
        part = _part_of_work(step, own) if step.row_parts == 1 else 1.0
        rows = step.unit_rows[kind] if kind >= 0 else 1
        parts = step.tensor * (step.sizes[STAGE] if kind < 0 and step.shares_head else 1)
        known = works.get((name, kind), Work("", (), 0, 0))
        works[name, kind] = Work(
            kind=f"{name}{' in slots' * (kept > 0)} "
            f"{step.model.facts.kinds[kind] if kind >= 0 else ''} {_family(step.model)}",
            sizes=(step.t or 1, max(step.b, 1), parts, max(rows, 1)),
            flops=known.flops + amount.flops * part,
            bytes=known.bytes + max(amount.bytes * part, 1.0) + 2 * kept / step.tensor,
            turns=known.turns + round(amount.turns),
        )
    works[UPDATE, -1] = _update(step)
    return works


def keeps_in_slots(step: StepShape) -> bool:
    """Whether what a layer keeps goes into a slot after F, and comes from it before B."""
    return step.parallel.runs_in_units and not step.parallel.pipeline.remat


def _part_of_work(step: StepShape, params: list[Array]) -> float:
    """The share of a piece that a device computes, by its share of the weights along `tensor` and `stage`."""
    whole = sum(math.prod(array.shape) for array in params)
    sizes = tuple(
        (axis, size if axis in (STAGE, TENSOR) else 1) for axis, size in step.sizes.items()
    )
    own = 0
    for array in params:
        part = part_of(array, step.rules, sizes)
        of_layers = step.sizes[STAGE] if array.kind is not None else 1
        own += part.elements * of_layers
    return own / whole if whole else 1.0


def _update(step: StepShape) -> Work:
    """From gradients to new parameters: norm, clipping, the optimizer, and the bytes that these move."""
    kept = step.bytes_of(step.opt_state, step.opt_rules)
    own = step.bytes_of(step.params, step.opt_rules)
    passes = 4 + 2 * (step.train.clip_norm > 0)
    how = f"{step.parallel.update}{' fsdp' * step.parallel.fsdp}{' clipped' * (step.train.clip_norm > 0)}"
    return Work(
        kind=f"{UPDATE} {how} {_digest([array.name for array in step.opt_state])}",
        sizes=(max(own, 1), step.sizes[DATA]),
        flops=0,
        bytes=passes * own + 2 * kept,
    )


@functools.lru_cache(maxsize=64)
def _family(model: ModelShapes) -> str:
    """A digest that tells apart models whose pieces differ."""
    x = jax.tree.map(
        lambda leaf: (leaf.shape[2 if model.facts.time_major else 1 :], str(leaf.dtype)),
        model.facts.traces.x,
    )
    return _digest((type(model.task).__qualname__, model.params, model.facts.kinds, x))


def _digest(known: object) -> str:
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]
