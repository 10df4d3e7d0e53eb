"""The summary printed before a run: devices, layers, the balance between stages, data, and the optimizer."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from jaxpar.base.axes import LAYERS, STAGE, TENSOR
from jaxpar.base.display import format_count
from jaxpar.base.parts import PARTS
from jaxpar.base.stage_names import NamedPlacement
from jaxpar.data.batches import Batches
from jaxpar.data.order import DrawnBatches
from jaxpar.data.sequences import SequenceBatches
from jaxpar.model.outer import owner
from jaxpar.partition.partition import Partition
from jaxpar.partition.storage import Storage
from jaxpar.pipeline.placement import balanced, tick_cost
from jaxpar.sharding import annotated, dims_of, named_leaves, user_name
from jaxpar.step.setup import Setup

# A placement is worth a warning if its ticks take so much longer than those of the best one.
TOLERATED_IMBALANCE = 1.1

_MOST_ARRAYS = 4  # of a batch, that are named
# Functions of optax that only put others together; the parts are in their closures.
_OF_PARTS = ("chain", "with_extra_args_support", "inject_hyperparams")

Rows = Iterator[tuple[str, str]]  # of a table: a name, and its value in words


def summarize(setup: Setup) -> Rows:
    """Devices, mesh, layers, data, the task's own facts, the batch, the optimizer, and clipping."""
    parallel = setup.parallel
    yield from _describe_mesh(setup)
    yield from _describe_layers(setup.partition)
    yield from describe_outer_modules(setup.storage)
    yield from setup.storage.describe()
    yield from describe_balance(setup.partition)
    yield from _describe_tensor(setup.storage)
    yield from _describe_data(setup)
    if not parallel.has_equal_shares:
        yield "shares", " : ".join(map(str, parallel.group_shares))
    if parallel.speeds:
        yield "speeds", " : ".join(f"{speed:g}" for speed in parallel.speeds)
    steps = format_count(setup.train.num_steps, "step")
    yield "optimizer", f"{_describe_optimizer(setup)}, {steps}"
    yield "clipping", _describe_clipping(setup)


def _describe_mesh(setup: Setup) -> Rows:
    """Devices and mesh; if the user did not choose it, also the reason for its size."""
    asked, mesh = setup.asked.mesh, setup.mesh
    device, found = mesh.devices.flat[0], jax.device_count()
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    why = "data parallelism on all devices"
    if leaves_some := mesh.size < found and asked.devices is None:
        devices += f", the first of {found}"
        why = f"{setup.facts.batch_size} rows do not divide by more devices"
    if asked.data == -1 and (leaves_some or mesh.size > asked.num_devices == 1):
        shape += f" ({why}; change it with --mesh)"
    yield "devices", devices
    yield "mesh", shape


def _describe_layers(partition: Partition) -> Rows:
    parallel, facts = partition.parallel, partition.facts
    if facts.cut_model is not None:
        yield "blocks", facts.cut_model.describe()
    stages = parallel.mesh.stage
    M, K = parallel.pipeline.num_microbatches, parallel.num_chunks
    counts = [f"{facts.kind_of.count(n)} {name}" for n, name in enumerate(facts.kinds)]
    layers = ", ".join(counts) if len(counts) > 1 else str(len(facts.kind_of))
    units = [format_count(M, "microbatch", "es")] * (stages > 1 or M > 1)
    if stages > 1:
        has_last = partition.head == "last"
        layers += f" ({NamedPlacement(partition.placement, not partition.shares_first, has_last)})"
        units.append(format_count(K, "time chunk"))
    parts = [layers] * bool(facts.kinds) + [" x ".join(units)] * bool(units)
    if parts:
        yield "layers", "; ".join(parts)


def describe_outer_modules(storage: Storage) -> Rows:
    """The modules outside the layers that stages store, in part or whole, with the reason."""
    partition = storage.partition
    if partition.parallel.mesh.stage == 1:
        return
    (shared, whole, alone), outer = _outer_modules(storage), partition.facts.outer_modules
    parts = [shared] * bool(shared)
    for name, stored in whole.items():
        why = partition.why_whole(outer[stored]) if stored in outer else ""
        parts.append(f"all of {name}" + f" ({why})" * bool(why))
    if parts:
        yield "each stage", f"stores {'; '.join(parts)}"
    for stage, own in alone.items():
        if own:
            yield f"stage {stage}", f"stores {', '.join(own)}"


def outer_modules_by_stage(storage: Storage) -> list[list[str]]:
    """The modules outside of the layers that each stage stores."""
    parts, whole, alone = _outer_modules(storage)
    shared = [parts, f"all of {', '.join(whole)}" * bool(whole)]
    return [
        [f"all of {', '.join(own)}" * bool(own), *shared]
        for own in (alone.get(stage, ()) for stage in range(storage.partition.parallel.mesh.stage))
    ]


def _outer_modules(storage: Storage) -> tuple[str, dict[str, str], dict[int, list[str]]]:
    """The modules outside of the layers: in parts on all stages, whole on all stages, on one stage alone.

    Those that are whole come with the names that they are stored by.
    """
    partition, parts, whole = storage.partition, dict[str, str](), dict[str, str]()
    alone = {stage: dict[str, None]() for stage in partition.outer_stages}
    for number, state in enumerate((storage.params, storage.frozen)):
        stages = dict[str, int]()
        for stage, names in zip(
            partition.outer_stages, storage.packed_names(number)[-2:], strict=False
        ):
            stages |= dict.fromkeys(names, stage)
        for path, variable in named_leaves(state, "/"):
            name, dims = _module(user_name(path, variable, "/")), dims_of(variable)
            if path in stages:
                alone[stages[path]][name] = None
            elif LAYERS not in dims:
                split = any(STAGE in partition.rules.axes_of(dim) for dim in dims if dim)
                (parts if split else whole)[name] = owner(path)
    in_parts = f"1/{partition.parallel.mesh.stage} of {', '.join(parts)}" * bool(parts)
    return in_parts, whole, {stage: [*names] for stage, names in alone.items()}


def _module(name: str) -> str:
    """head for head/kernel, or head.kernel; what is in no module keeps its name."""
    return re.sub(r"[/.][^/.]*$", "", name)


def describe_balance(partition: Partition) -> Rows:
    """The estimated work of each stage, as a fraction, and the gain of a better placement.

    Work is the FLOPs of matrix products. If speeds are given, it is the time that they take.
    """
    costs = partition.costs
    if partition.parallel.mesh.stage == 1:
        return
    work_P = costs.of_places(partition.placement).sum(axis=0)
    work_S = np.bincount(partition.route.stages, work_P) / work_P.sum()
    head = sum(costs.last) * len(costs.layers) / float(np.sum(costs.layers))
    line = ", ".join(f"stage {stage}: ~{share:.0%}" for stage, share in enumerate(work_S))
    line += f"; the output head counts as ~{head:.1f} layers" * (head >= 0.05)
    yield "time" if costs.speeds else "work", line
    num_layers, num_stages = len(costs.layers), len(work_S)
    if num_layers < num_stages and partition.parallel.pipeline.named_placement is None:
        fact = f"{format_count(num_layers, 'layer')} for {num_stages} stages"
        yield "warning", f"{fact}: {(work_S == 0).sum()} of them have no work; use fewer stages"
    best = balanced(costs, len(partition.placement))
    takes, least = (tick_cost(costs, placement) for placement in (partition.placement, best))
    if takes > TOLERATED_IMBALANCE * least:
        fact = f"placement={partition.placement}: stages have unequal work and wait for each other"
        gain = f"steps are up to ~{takes / least:.2f} times as fast with placement={best}"
        yield "warning", f"{fact}; {gain}"


def _describe_tensor(storage: Storage) -> Rows:
    """A warning if `tensor` splits no parameter, so that its devices do the same work."""
    size = storage.partition.parallel.mesh.tensor
    dims = {dim for _, variable in annotated(storage.params) for dim in dims_of(variable) if dim}
    if size > 1 and not any(TENSOR in storage.partition.rules.axes_of(dim) for dim in dims):
        fact = f"tensor={size} splits no parameter, so {size} devices repeat the same work"
        is_own = storage.facts.cut_model is None
        cure = "name dims of weights (jaxpar.nn.named_param)"
        cure = cure if is_own else "choose dims by jaxpar.suggest_rules"
        yield "warning", f"{fact}; {cure}, or use tensor=1"


# ---- data ----


def _describe_data(setup: Setup) -> Rows:
    """Data and batch, in the task's own words if it has some, and its other lines."""
    batches = setup.task.make_batches("train", 0)
    data, batch, lines = _data_of(setup, batches), _batch_of(setup), []
    for name, text in setup.task.describe():
        if name == "data":
            data = text
        elif name == "batch":
            batch = text
        else:
            lines.append((name, text))
    yield "data", data
    yield from lines
    yield "batch", batch + _microbatches_of(setup)
    if isinstance(batches, SequenceBatches):
        yield "batches", batches.to_text()


def _data_of(setup: Setup, batches: Batches) -> str:
    """How much there is to train on, the class that reads it, and the user's arrays in a batch."""
    kind = type(batches).__name__
    if isinstance(batches, DrawnBatches):
        unit = "rows" if batches.index_dims == 1 else "steps"
        amount = f"{batches.length:,} {unit} to train on ({kind})"
    elif batches.num_windows is None:
        amount = f"a stream ({kind})"
    else:
        amount = f"{batches.num_windows:,} batches to train on ({kind})"
    arrays = []
    for name, array in named_leaves(setup.facts.batch):
        if name in PARTS:
            continue  # such as weight and starts, which jaxpar adds
        shape = list(array.shape[1:])
        arrays.append(f"{name} {array.dtype}{shape or ''}".lstrip())
    if len(arrays) > _MOST_ARRAYS:
        arrays[_MOST_ARRAYS:] = [f"and {len(arrays) - _MOST_ARRAYS} more"]
    return f"{amount}: {', '.join(arrays)}"


def _batch_of(setup: Setup) -> str:
    """Rows of a batch, and their time steps."""
    facts = setup.facts
    batch = format_count(facts.batch_size, "row")
    if not facts.time_major or facts.num_steps is None:
        return batch
    steps = format_count(facts.num_steps, "step")
    return f"{batch} x {steps}{' or fewer' if setup.task.variable_length else ''}"


def _microbatches_of(setup: Setup) -> str:
    num_microbatches = setup.parallel.pipeline.num_microbatches
    if num_microbatches == 1:
        return ""
    rows = format_count(setup.facts.batch_size // num_microbatches, "row")
    return f", in {num_microbatches} microbatches of {rows}"


# ---- the optimizer ----


def _describe_optimizer(setup: Setup) -> str:
    """Name and main numbers; of a user's own optimizer what can be told."""
    config = setup.task.config_of_optimizer
    if config is not None:
        return str(config)
    update = setup.task.make_optimizer(setup.train.num_steps).update
    makers = [name for name in _makers_of(update) if name != "identity"]
    return f"your own ({', '.join(makers)})" if makers else "your own"


def _makers_of(update: Callable[..., Any]) -> list[str]:
    """The functions that made an optimizer, in the order in which they change a gradient.

    optax.chain(optax.scale_by_adam(), optax.scale(-1e-3))   ->   scale_by_adam, scale
    """
    name = getattr(update, "__qualname__", type(update).__name__).partition(".")[0]
    is_of_optax = getattr(update, "__module__", "").partition(".")[0] == "optax"
    if not is_of_optax or name not in _OF_PARTS:
        return [name]
    makers = []
    for cell in update.__closure__ or ():
        parts = cell.cell_contents
        if isinstance(parts, optax.GradientTransformation):
            parts = [parts.update]
        elif not isinstance(parts, tuple):
            parts = [parts]
        for part in parts:
            if callable(part):
                makers += _makers_of(part)
    return makers


def _describe_clipping(setup: Setup) -> str:
    limit = setup.settings.clip_norm
    if limit is not None:
        return f"gradients are clipped to norm {limit:g}"
    if setup.task.has_own_optimizer:
        return "gradients are not clipped before your optimizer"
    return "gradients are not clipped"
