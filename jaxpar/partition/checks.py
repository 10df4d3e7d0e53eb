"""Checks of a task's model against a layout; nothing is traced for these checks."""

import math

import jax

from jaxpar.base.axes import BATCH, DATA
from jaxpar.base.checks import check_divides, require
from jaxpar.base.trees import uneven
from jaxpar.config import Parallel
from jaxpar.model.facts import ModelFacts


def check_fit(facts: ModelFacts, parallel: Parallel) -> None:
    """Checks sizes and options of both against each other.

    Raises:
      ValueError: they do not fit.
    """
    task, stages = facts.task, parallel.mesh.stage
    if parallel.num_chunks > 1 and facts.why_whole:
        raise ValueError(
            f"num_chunks={parallel.num_chunks} splits windows over time, but {facts.why_whole}.\n"
            f"Fix: use num_chunks=1, and more microbatches."
        )
    parallel.check(facts.batch_size, facts.num_steps)
    if task.axes:
        _check_own_axes(facts, parallel)
    task.check(parallel)
    if task.variable_length and (steps := uneven(facts.batch)):
        raise ValueError(
            f"batches of task {task.name} may have any length (variable_length), but {steps}.\n"
            f"Fix: give arrays of one length in each batch."
        )
    if parallel.num_segments > 1 and task.variable_length:
        raise ValueError(
            f"remat_keeps='carries' needs batches of one length, but those of task {task.name} vary.\n"
            f"Fix: use remat_keeps='device' or 'host'."
        )
    if parallel.runs_in_units and not facts.divides_by_hand:
        raise ValueError(
            f"the rules of task {task.name} split the batch over {task.rules.axes_of(BATCH)}, but pipelines "
            f"need {DATA!r}.\nFix: use stage=1, num_microbatches=1 and equal shares, or other rules."
        )
    if parallel.num_chunks > 1 and facts.whole_window:
        raise ValueError(
            f"layer {facts.whole_window[0]} reads the whole window at once, but "
            f"num_chunks={parallel.num_chunks} splits it.\nFix: use num_chunks=1, and more microbatches."
        )
    for name, size in facts.rows_together.items():
        groups = {**row_parts(facts, parallel), f"rows_together of layer {name}": size}
        check_divides("batch_size", facts.batch_size, groups)
    if parallel.mesh.tensor > 1 and facts.platform != "cpu" and facts.cut_model is not None:
        require(
            not facts.cut_model.calls_kernel,
            f"the model {facts.cut_model.name} calls a kernel, which XLA cannot divide over "
            f"tensor={parallel.mesh.tensor}.\n"
            f"Fix: use tensor=1, or code without a kernel, such as implementation='xla'.",
        )
    if stages > 1 and not facts.kind_of:
        raise ValueError(
            f"stage={stages}: the model of task {task.name} has no layers in its stack.\n"
            f"Fix: use stage=1, and only data and tensor parallelism."
        )


def row_parts(facts: ModelFacts, parallel: Parallel) -> dict[str, int]:
    """The number of parts into which the rows of a batch are split, by what splits them."""
    sizes = parallel.mesh.sizes
    shares = "sum of shares", sum(parallel.group_shares)
    name, groups = (DATA, sizes[DATA]) if parallel.has_equal_shares else shares
    own = {axis: sizes[axis] for axis in facts.row_axes}
    return {name: groups, "num_microbatches": parallel.pipeline.num_microbatches, **own}


def _check_own_axes(facts: ModelFacts, parallel: Parallel) -> None:
    """Raises a ValueError where a task's own axes split rows or time, and cannot."""
    sizes = parallel.mesh.sizes
    rows, times = ({axis: sizes[axis] for axis in a} for a in (facts.row_axes, facts.time_axes))
    check_divides("batch_size", facts.batch_size, row_parts(facts, parallel))
    if math.prod(rows.values()) > 1 and not parallel.has_equal_shares:
        raise ValueError(
            f"shares={parallel.shares}: the rules split rows over {', '.join(rows)} as well.\n"
            f"Fix: use equal shares."
        )
    if not times or math.prod(times.values()) == 1:
        return
    if facts.why_whole:
        raise ValueError(
            f"the rules split time over {', '.join(times)}, but {facts.why_whole}.\n"
            f"Fix: don't split time."
        )
    check_divides("seq_len", facts.num_steps or 1, times)
    if parallel.num_chunks > 1 or facts.task.variable_length:
        raise ValueError(
            f"the rules split time over {', '.join(times)}, but num_chunks={parallel.num_chunks} also splits "
            f"it, or batches vary in length.\nFix: use num_chunks=1, and batches of one length."
        )
    for name, (_, (_, carry, _, _)) in zip(facts.kinds, facts.traces.layers, strict=True):
        if jax.tree.leaves(carry):
            raise ValueError(
                f"the rules split time over {', '.join(times)}, but layer {name} carries state from step "
                f"to step.\nFix: use layers without state, or don't split time."
            )
