"""What a run will do, before it begins: on which devices, with which parameters, how well balanced."""

import jax
import numpy as np

from jaxpar.base.axes import LAYERS, STAGE, TENSOR
from jaxpar.base.display import format_count
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.model.outer import owner
from jaxpar.partition.partition import Partition
from jaxpar.partition.storage import Storage
from jaxpar.pipeline.placement import balanced, tick_cost
from jaxpar.sharding import annotated, dims_of, named_leaves
from jaxpar.step.setup import Setup

# A placement whose ticks take so much longer than those of the best one is worth a warning.
TOLERATED_IMBALANCE = 1.1


def summarize(setup: Setup) -> list[tuple[str, str]]:
    """Devices, mesh, layers, what the task tells, optimizer: (what, in words)."""
    task, parallel, train = setup.settings
    optimizer = task.config_of_optimizer
    rows = [
        *_describe_mesh(setup),
        *_describe_layers(setup.partition),
        *describe_ends(setup.storage),
        *setup.storage.describe(),
        *describe_balance(setup.partition),
        *_describe_tensor(setup.storage),
        *task.describe(),
    ]
    if not parallel.has_equal_shares:
        rows.append(("shares", " : ".join(map(str, parallel.group_shares))))
    if parallel.speeds:
        rows.append(("speeds", " : ".join(f"{speed:g}" for speed in parallel.speeds)))
    steps = format_count(train.num_steps, "step")
    rows.append(
        ("training", steps) if optimizer is None else ("optimizer", f"{optimizer}, {steps}")
    )
    return rows


def _describe_mesh(setup: Setup) -> list[tuple[str, str]]:
    """Devices and mesh; where nobody chose that, why it is so."""
    asked, mesh = setup.asked.mesh, setup.mesh
    device, found = mesh.devices.flat[0], jax.device_count()
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    leaves_some = mesh.size < found and asked.devices is None
    if leaves_some:
        devices += f", the first of {found}"
    if asked.data == -1 and (leaves_some or mesh.size > asked.num_devices == 1):
        why = "all devices share the batch"
        if leaves_some:
            why = f"the most that {setup.facts.batch_size} rows divide by"
        shape += f" ({why}; --mesh changes it)"
    return [("devices", devices), ("mesh", shape)]


def _describe_layers(partition: Partition) -> list[tuple[str, str]]:
    parallel, facts = partition.parallel, partition.facts
    stages = parallel.mesh.stage
    M, K = parallel.pipeline.num_microbatches, parallel.num_chunks
    named = NamedPlacement(
        partition.placement, not partition.shares_first, partition.head == "last"
    )
    counts = [f"{facts.kind_of.count(n)} {name}" for n, name in enumerate(facts.kinds)]
    what = ", ".join(counts) if len(counts) > 1 else str(len(facts.kind_of))
    units = [format_count(M, "microbatch", "es")] * (stages > 1 or M > 1)
    units += [f"{format_count(K, 'chunk')} of time"] * (stages > 1)
    what += f" ({named})" * (stages > 1)
    parts = [what] * bool(facts.kinds) + [" x ".join(units)] * bool(units)
    return [("layers", "; ".join(parts))] * bool(parts)


def describe_ends(storage: Storage) -> list[tuple[str, str]]:
    """What of the model outside of its layers a stage has a part of, what it has whole, and why."""
    if storage.partition.parallel.mesh.stage == 1:
        return []
    (parts, whole, alone), ends = _ends(storage), storage.partition.facts.ends
    told = [parts] * bool(parts)
    told += [f"{', '.join(own)} on stage {stage} alone" for stage, own in alone.items() if own]
    for name in whole:
        why = storage.partition.why_whole(ends[name]) if name in ends else ""
        told.append(f"all of {name}" + f" ({why})" * bool(why))
    return [("on a stage", "; ".join(told))] * bool(told)


def ends_by_stage(storage: Storage) -> list[list[str]]:
    """What each stage has of the model outside of its layers."""
    parts, whole, alone = _ends(storage)
    shared = [parts, f"all of {', '.join(whole)}" * bool(whole)]
    return [
        [f"all of {', '.join(own)}" * bool(own), *shared]
        for own in (alone.get(stage, ()) for stage in range(storage.partition.parallel.mesh.stage))
    ]


def _ends(storage: Storage) -> tuple[str, list[str], dict[int, list[str]]]:
    """What of the model is outside of its layers: in parts on all stages, whole on all, on one alone."""
    stages, parts, whole = (
        storage.partition.parallel.mesh.stage,
        dict[str, None](),
        dict[str, None](),
    )
    variables, alone = [], {stage: dict[str, None]() for stage in storage.partition.outer_stages}
    for number, state in enumerate((storage.params, storage.frozen)):
        pooled = storage.packed_names(number)[-2:]
        for stage, names in zip(storage.partition.outer_stages, pooled, strict=False):
            alone[stage] |= dict.fromkeys(owner(name) or name for name in names)
        rest = {name for names in pooled for name in names}
        variables += [each for each in named_leaves(state, "/") if each[0] not in rest]
    for path, variable in variables:
        name, dims = owner(path) or path, dims_of(variable)
        if LAYERS not in dims:
            split = any(STAGE in storage.partition.rules.axes_of(dim) for dim in dims if dim)
            (parts if split else whole)[name] = None
    in_parts = f"1/{stages} of {', '.join(parts)}" * bool(parts)
    return in_parts, [*whole], {stage: [*names] for stage, names in alone.items()}


def describe_balance(partition: Partition) -> list[tuple[str, str]]:
    """The estimated share of the work that each stage has, and what a better placement would gain.

    Work is the FLOPs of matrix products. Where speeds are given it is the share of the time.
    """
    costs, stages = partition.costs, partition.parallel.mesh.stage
    if stages == 1:
        return []
    work_P = costs.of_places(partition.placement).sum(axis=0)
    work_S = np.bincount(partition.route.stages, work_P) / work_P.sum()
    layer = float(np.sum(costs.layers)) / len(costs.layers)
    head = sum(costs.last) / layer
    line = ", ".join(f"stage {stage}: ~{share:.0%}" for stage, share in enumerate(work_S))
    line += f"; the head is that of ~{head:.1f} layers" * (head >= 0.05)
    lines = [("time" if costs.speeds else "work", line)]
    best = balanced(costs, len(partition.placement))
    takes, least = (tick_cost(costs, placement) for placement in (partition.placement, best))
    if takes > TOLERATED_IMBALANCE * least:
        warning = f"placement={partition.placement}: stages wait for each other; a step with "
        warning += f"placement={best} would be up to ~{takes / least:.2f} times as fast"
        lines.append(("warning", warning))
    return lines


def _describe_tensor(storage: Storage) -> list[tuple[str, str]]:
    """A warning if `tensor` splits nothing: what its devices do is the same then."""
    size = storage.partition.parallel.mesh.tensor
    dims = {dim for _, variable in annotated(storage.params) for dim in dims_of(variable) if dim}
    if size == 1 or any(TENSOR in storage.partition.rules.axes_of(dim) for dim in dims):
        return []
    warning = f"tensor={size} splits no parameter, so {size} devices do the same work; name dims of weights"
    return [("warning", f"{warning} (jaxpar.nn.named_param), or use tensor=1")]
