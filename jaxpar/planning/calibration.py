"""Measures a machine: matmuls, a copy, loops and ticks, each collective, and the pieces of a training step.

Everything runs on all devices at once, as in a step: simulated devices share cores, those on one board
share power. The quickest of several runs counts: disturbances only ever add time.
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.analysis.collectives import num_messages, sent_bytes
from jaxpar.axes import STAGE
from jaxpar.files import cache_folder
from jaxpar.memory import host_memory
from jaxpar.mesh import MeshConfig
from jaxpar.optimizer import HostOptimizer, clip_scale, update
from jaxpar.pipeline.engine import Pipeline, PipelineParams
from jaxpar.pipeline.placement import make_slots
from jaxpar.pipeline.schedule import make_schedule
from jaxpar.pipeline.ticks import make_idle, make_plan
from jaxpar.planning.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.planning.pieces import UPDATE, keeps_in_slots, works_of
from jaxpar.planning.shape import StepShape
from jaxpar.planning.traffic import FLOAT
from jaxpar.planning.unit import BOTH, LAST, Unit
from jaxpar.setup import Setup
from jaxpar.sharding import constrain, shardings
from jaxpar.state import abstract_state
from jaxpar.timing import quickest

HERE = "here"
FORMAT = 4  # of the cached file; one in another format is not used

_log = logging.getLogger(__name__)

# The collectives that a step uses, by their names in HLO.
COLLECTIVES = ("all-reduce", "all-gather", "collective-permute")

# A disturbance lasts a second or two, so pieces are measured again once all have had their turn.
_ROUNDS = 2


def calibrate() -> Hardware:
    """Measures the devices that JAX has, all of one kind, and keeps the result for `find_machine("here")`.

    All links count as near; a single device's has the speed of its memory. Memory is what the device reports;
    CPU devices share the host's. The pieces of a step are measured on demand (`measure_pieces`).

    Raises:
      ValueError: there are several processes.
    """
    return _keep(_describe(_Bench()), ())


def measure_pieces(machine: Hardware, steps: Iterable[StepShape]) -> Hardware:
    """The machine with samples of the pieces of these steps added; those that it lacks are measured here.

    Args:
      machine: from `find_machine("here")`; new samples are stored in its file.
      steps: each for as many devices as JAX has.
    Raises:
      ValueError: there are several processes.
    """
    known = {(sample.kind, sample.sizes) for sample in machine.samples}
    new: dict[Work, tuple[StepShape, str, int]] = {}
    for step in steps:
        for (name, kind), work in works_of(step).items():
            if (work.kind, work.sizes) not in known:
                new.setdefault(work, (step, name, kind))
    if not new:
        return machine
    bench = _Bench()
    runs = {work: bench.run_of(*piece) for work, piece in new.items()}
    least = dict.fromkeys(runs, float("inf"))
    for work in [*runs] * _ROUNDS:
        _, name, _ = new[work]
        before = bench.use_caches if name == UPDATE else None  # as the layers do before it
        taken = quickest(functools.partial(bench.in_a_row, runs[work]), bench.part, before=before)
        least[work] = min(least[work], taken / bench.times)
    samples = [
        Sample(work.kind, work.sizes, seconds / _rows_of(work) / machine.roofline(work))
        for work, seconds in least.items()
    ]
    return _keep(machine, samples)


def _rows_of(work: Work) -> int:
    """Number of layers measured at once; a `Work` describes one."""
    return work.sizes[-1] if len(work.sizes) == 4 else 1


def find_machine(name: str, memory_bytes: float | None = None) -> Hardware:
    """The machine of that name: one of `MACHINES`, a file of `Hardware.save`, or "here", the devices of JAX.

    The last are measured once, in some seconds, and kept in the user's cache folder; `calibrate` measures
    them again.

    Args:
      memory_bytes: of one device, to replace the machine's own figure.
    Raises:
      ValueError: there is no such machine, or `memory_bytes` is not positive and finite.
    """
    if memory_bytes is not None:
        if not 0 < memory_bytes < float("inf"):
            raise ValueError(
                f"memory_bytes={memory_bytes}: must be positive and finite, such as 16e9"
            )
        return dataclasses.replace(find_machine(name), memory_bytes=memory_bytes)
    if name in MACHINES:
        return MACHINES[name]
    if name == HERE:
        return calibrate() if (path := _kept_here()) is None else Hardware.load(path)
    if Path(name).is_file():
        return Hardware.load(name)
    raise ValueError(
        f"unknown machine {name!r}; use {HERE} (measured), {', '.join(MACHINES)}, or a file that "
        f"calibrate().save() wrote"
    )


def path_here() -> Path:
    """The file in which `calibrate` stores what it measured of these devices."""
    name = f"{_name_here()} jax {jax.__version__} format {FORMAT}"
    return cache_folder() / "machines" / (re.sub(r"[^\w.]+", "-", name) + ".json")


def _kept_here() -> Path | None:
    try:
        return path if (path := path_here()).is_file() else None
    except OSError:  # no home folder, or it cannot be read
        return None


def _keep(machine: Hardware, samples: Sequence[Sample]) -> Hardware:
    """The machine with the samples added, and saved; the file keeps the memory that was measured."""
    machine = dataclasses.replace(machine, samples=(*machine.samples, *samples))
    real = dataclasses.replace(machine, memory_bytes=_memory_bytes(jax.devices()))
    try:
        real.save(path_here())
    except OSError as error:
        _log.warning(
            "what was measured here cannot be kept, and will be measured anew: %s; set XDG_CACHE_HOME to a "
            "folder that can be written",
            error,
        )
    return machine


def _name_here() -> str:
    """Number and kind of the devices; for a CPU also the cores that this process may use."""
    devices = jax.devices()
    name = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu" and hasattr(os, "sched_getaffinity"):
        name += f" on {len(os.sched_getaffinity(0))} cores"
    return name


class _Bench:
    """Runs functions on all devices at once, for a fraction of a second each."""

    part = 0.25

    def __init__(self):
        self.devices = jax.devices()
        if jax.process_count() > 1:
            raise ValueError(
                f"machine {HERE!r} is measured by one process, there are {jax.process_count()}; name "
                f"another: {', '.join(MACHINES)}, or a file"
            )
        self.on_cpu, n = self.devices[0].platform == "cpu", len(self.devices)
        self.times = 1 if self.on_cpu else 8
        self.mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=self.devices)

    def seconds(self, function: Callable[..., Any], *args: Any) -> float:
        """Time of one call of a function, with a copy of its arguments on every device."""

        def on_device(*args):
            return jax.tree.map(lambda a: a[None], function(*jax.tree.map(lambda a: a[0], args)))

        spread = jax.jit(
            jax.shard_map(
                on_device, mesh=self.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
            )
        )
        n, layout = len(self.devices), NamedSharding(self.mesh, P("x"))
        args = jax.tree.map(
            lambda a: jax.device_put(np.broadcast_to(a, (n, *np.shape(a))), layout), args
        )
        return quickest(lambda: spread(*args), self.part)

    def in_a_row(self, run: Callable[[], Any]) -> Any:
        """Calls a function `times` times: a GPU in a step finds its next piece already launched."""
        for _ in range(self.times - 1):
            run()
        return run()

    def use_caches(self) -> jax.Array:
        """Evicts what the devices' caches held, by writing 32 MiB on each."""
        return jnp.add(self._others, 1)

    @functools.cached_property
    def _others(self) -> jax.Array:
        numbers = np.ones((len(self.devices), 2**23), np.float32)
        return jax.device_put(numbers, NamedSharding(self.mesh, P("x")))

    def run_of(self, step: StepShape, name: str, kind: int) -> Callable[[], Any]:
        """A function that runs one piece of a step, with the shapes and on the devices that it has there."""
        if name == UPDATE:
            return _update_of(step)
        shares = step.shares_head and name == LAST
        stages, mesh = step.sizes[STAGE] if shares else 1, step.parallel.mesh
        num_devices = mesh.num_devices if mesh.devices else len(self.devices)
        same = num_devices // (stages * step.tensor)
        mesh = dataclasses.replace(mesh, data=same, stage=stages).build()
        unit = Unit(
            *(step.model, step.t, step.b * step.row_parts),
            splits=step.splits_weights,
            mesh=mesh,
            rules=step.rules,
            shares_head=shares,
        )
        rows = step.unit_rows[kind] if kind >= 0 else 0
        if name == BOTH:
            piece = unit.at_once(kind, rows)
        elif kind >= 0 and keeps_in_slots(step):
            piece = unit.in_slots(kind, rows, step.schedule.num_slots)[name]
        else:
            piece = unit.pieces(*(kind, rows) if kind >= 0 else ())[name]
        run, shapes = unit.spread(piece)
        compiled = jax.jit(run, donate_argnums=0).lower(*shapes).compile()
        values = [unit.real_block() if tree is unit.block else _fill(tree) for tree in shapes]
        changed, *args = jax.tree.map(jax.device_put, tuple(values), compiled.input_shardings[0])

        def again():
            nonlocal changed
            changed, results = compiled(changed, *args)
            return changed, results

        return again

    def host_rate(self) -> float:
        """Bytes per second from the host's memory to a device, while all of them receive."""
        numbers, layout = (
            np.ones((len(self.devices), 2**24), np.float32),
            NamedSharding(self.mesh, P("x")),
        )
        return numbers[0].nbytes / quickest(lambda: jax.device_put(numbers, layout), self.part)

    def tick(self) -> float:
        """Seconds per idle tick of a pipeline over up to eight devices: the slope of time over ticks."""
        S, M, H = min(len(self.devices), 8), 64, 8
        pipeline = Pipeline(
            layers=(lambda weights, frozen, carry, x, at: (carry, x * weights),),
            first=lambda params, frozen, at: params * at.batch,
            last=lambda kernel, frozen, y, at: (lax.psum(jnp.sum((y @ kernel) ** 2), STAGE),),
            mesh=MeshConfig(stage=S, devices=tuple(range(S))).build(),
            slots=make_slots((1,) * S),
            chunk_len=1,
            microbatch_rows=1,
            head="sharded",
            last_specs=(P(None, STAGE), P()),
        )
        params = PipelineParams(_random(1, 1, H), (_random(S, 1, 1, H),), _random(H, 8 * S))
        carry, batch = (_random(S, M, H),), _random(1, M, H)
        plan = make_plan([make_schedule("1f1b", S, M)])

        @jax.jit
        def run(params, plan):
            return jax.grad(lambda params: pipeline.sums(params, carry, batch, plan)[0][0])(params)

        def seconds(num_ticks: int) -> float:
            idle = make_idle(plan, num_ticks)
            return quickest(lambda: run(params, idle), self.part)

        return max(seconds(M) - seconds(0), 0.0) / M

    def link(self, op: str) -> Link:
        """A collective among all devices: the latency of a small one, and bytes per second of larger ones."""
        n = len(self.devices)
        once = {
            "all-reduce": lambda x: lax.psum(x, "x") / n,
            "all-gather": lambda x: lax.all_gather(x, "x")[0],
            "collective-permute": lambda x: lax.ppermute(
                x, "x", [(k, (k + 1) % n) for k in range(n)]
            ),
        }[op]

        def seconds(elements: int, turns: int) -> float:
            def run(x):
                return lax.fori_loop(0, turns, lambda _, x: once(x), x)

            return self.seconds(run, _random(elements)) / turns

        messages, points = num_messages(op, n), []
        latency = seconds(8, 100) / messages
        for power in (10, 14, 18) if self.on_cpu else (14, 19, 24):
            payload = FLOAT * 2**power * (n if op == "all-gather" else 1)
            sent = sent_bytes(op, payload, n)
            taken = seconds(2**power, 2 ** max(22 - power, 2)) - latency * messages
            points.append((float(sent), sent / max(taken, 1e-9)))
        return Link(points[-1][1], latency, tuple(points))


def _describe(bench: _Bench) -> Hardware:
    """Everything about the machine except the pieces of a step."""
    size = 512 if bench.on_cpu else 8192

    def matmul_rate(dtype: Any) -> float:
        x = _random(size, size).astype(dtype)
        return 2 * size**3 / bench.seconds(jnp.matmul, x, x)

    numbers = _random(2**22 if bench.on_cpu else 2**28)
    memory_rate = 2 * numbers.nbytes / bench.seconds(lambda x: x + 1, numbers)
    turns = 1000
    loop = bench.seconds(
        lambda x: lax.fori_loop(0, turns, lambda _, x: jnp.sin(x @ x), x), _random(8, 8)
    )
    near = Link(memory_rate, 0.0)
    if len(bench.devices) > 1:
        links = [bench.link(op) for op in COLLECTIVES]
        near = Link(
            min(link.bytes_per_second for link in links),
            max(link.seconds for link in links),
            min(links, key=lambda link: link.bytes_per_second).sizes,
        )
    return Hardware(
        name=_name_here(),
        flops_per_second={str(jnp.dtype(d)): matmul_rate(d) for d in (jnp.float32, jnp.bfloat16)},
        memory_bytes=_memory_bytes(bench.devices),
        memory_bytes_per_second=memory_rate,
        host_bytes_per_second=memory_rate if bench.on_cpu else bench.host_rate(),
        near=near,
        far=near,
        devices_per_host=len(bench.devices),
        loop_seconds=loop / turns,
        tick_seconds=max(bench.tick() - 2 * near.seconds, 0.0),
        platform=bench.devices[0].platform,
        source=f"measured by calibrate() with jax {jax.__version__}",
    )


def _update_of(step: StepShape) -> Callable[[], Any]:
    """A function that updates parameters as a step does once its gradients are summed."""
    setup = Setup.of(*step.settings)
    mesh, optimizer, train = setup.mesh, setup.optimizer, setup.train
    target = abstract_state(setup)
    computed = shardings(target.params, mesh, step.rules)
    grads = jax.tree.map(jax.device_put, _fill(target.params), computed)
    params = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), _fill(target.params), target.params
    )

    def prepare(params, grads):
        grads, params = (constrain(tree, mesh, step.opt_rules) for tree in (grads, params))
        norm = optax.tree.norm(grads)
        return params, grads, jnp.isfinite(norm), clip_scale(norm, train.clip_norm)

    if setup.parallel.update == "host":
        host, split = HostOptimizer(optimizer), jax.jit(prepare)
        opt_state = host.init(split(params, grads)[0], target.opt_state)
        gather = jax.jit(lambda a: a, out_shardings=jax.tree.map(lambda a: a.sharding, params))

        def on_host():
            nonlocal params, opt_state
            own, cut, applies, scale = split(params, grads)
            own, opt_state = host.update(own, cut, opt_state, applies, scale)
            params = gather(own)
            return params, opt_state

        return on_host

    def whole(params, opt_state, grads):
        params, grads, applies, scale = prepare(params, grads)
        params, opt_state = update(optimizer, params, grads, opt_state, applies, scale)
        return constrain(params, mesh, step.param_rules), opt_state

    where = jax.tree.map(lambda a: a.sharding, (target.params, target.opt_state))
    run = jax.jit(whole, donate_argnums=(0, 1), out_shardings=where)
    opt_state = jax.jit(optimizer.init, out_shardings=where[1])(params)

    def on_devices():
        nonlocal params, opt_state
        params, opt_state = run(params, opt_state, grads)
        return params, opt_state

    return on_devices


def _fill(shapes: Any) -> Any:
    """Arrays of these shapes: floats as large as weights and activations are, zeros for integers."""
    draw = np.random.default_rng(0)

    def fill(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return draw.uniform(-0.1, 0.1, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, shapes)


def _random(*shape: int) -> jax.Array:
    """Float32 numbers as large as weights and activations are; zeros would multiply faster."""
    return jnp.asarray(np.random.default_rng(0).uniform(-0.1, 0.1, shape), jnp.float32)


def _memory_bytes(devices: list[Any]) -> float:
    """Memory of one device; simulated ones share the machine's. Infinity if it is unknown."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    memory = host_memory()
    return memory[1] / len(devices) if memory else float("inf")
