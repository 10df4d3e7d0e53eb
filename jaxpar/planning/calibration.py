"""Measures a machine: matmuls, a copy, loops and ticks, each collective, and the pieces of a training step.

Everything is measured on all devices at once, as they are in a step: simulated devices share cores, those
of one board share power. Of several runs the quickest counts: what disturbs a machine only ever adds.
"""

import dataclasses
import functools
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from jaxpar.at import At
from jaxpar.axes import STAGE
from jaxpar.files import cache_folder
from jaxpar.hosts.doctor import host_memory
from jaxpar.mesh import MeshConfig
from jaxpar.nn.dropout import dropout
from jaxpar.nn.linear import matmul
from jaxpar.nn.lstm import LSTMCarry, LSTMParams, lstm_layer
from jaxpar.optimizer import OptimizerConfig, clip_scale, update
from jaxpar.pipeline.engine import Pipeline, PipelineParams
from jaxpar.pipeline.layers import SlotArrays, SplitLayers
from jaxpar.pipeline.placement import make_slots
from jaxpar.pipeline.schedule import make_schedule
from jaxpar.pipeline.ticks import make_idle, make_plan
from jaxpar.planning import pieces
from jaxpar.planning.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.timing import quickest
from jaxpar.trees import add

HERE = "here"

_log = logging.getLogger(__name__)

# Those that a step uses, by their names in HLO.
COLLECTIVES = ("all-reduce", "all-gather", "collective-permute")

# Units [t, b, H] of so many layers, heads [rows, H, V], and numbers of elements that `calibrate` measures on
# a CPU, the most telling first; b and rows, H and V are larger on accelerators. Other sizes are interpolated.
_LAYERS = (
    (8, 16, 256, 2), (8, 16, 512, 1), (16, 32, 192, 2), (8, 8, 384, 4), (8, 64, 256, 2), (16, 4, 256, 1),
    (4, 16, 1024, 2), (32, 32, 256, 4), (4, 64, 640, 1), (8, 16, 96, 8),
)  # fmt: skip
_HEADS = ((128, 256, 2688), (256, 256, 10_000), (128, 640, 10_000), (128, 96, 384))
_DROPOUTS, _UPDATES = (2**15, 2**18), (2**18, 2**22)
_LARGER = 4

# What disturbs a machine does so for a second or two: pieces are measured again when all have had their turn.
_ROUNDS = 2


def calibrate(num_seconds: float = 50.0) -> Hardware:
    """Measures the devices that JAX has, all of one kind, and keeps the result for `find_machine("here")`.

    Links are all called near; with one device they are those of its memory. Memory is what the device says,
    or on a CPU what the machine has.

    Args:
      num_seconds: in all, compiling included. Pieces of a step of usual sizes come last, as many as there is
        time for.
    Raises:
      ValueError: `num_seconds` is not positive, or there are several processes.
    """
    if not 0 < num_seconds < float("inf"):
        raise ValueError(f"num_seconds={num_seconds}: must be positive and finite; 50 are usual")
    end = time.perf_counter() + num_seconds
    bench = _Bench(part=num_seconds / 200)
    machine = _describe(bench)
    works = itertools.chain.from_iterable(itertools.repeat([*_usual_works(bench.on_cpu)], _ROUNDS))
    in_time = itertools.takewhile(lambda _: time.perf_counter() < end, works)
    return _keep(machine, bench.samples(machine, in_time))


def measure_pieces(machine: Hardware, works: Iterable[Work]) -> Hardware:
    """The machine with samples of these pieces of a step too, measured here, where there are none yet.

    Args:
      machine: `find_machine("here")`, which knows of them from now on.
      works: `cost.pieces_of` a step.
    Raises:
      ValueError: there are several processes.
    """
    known = {(sample.kind, sample.sizes) for sample in machine.samples}
    new = [work for work in dict.fromkeys(works) if (work.kind, work.sizes) not in known]
    if not new:
        return machine
    return _keep(machine, _Bench(part=0.25).samples(machine, new * _ROUNDS))


def find_machine(name: str, memory_bytes: float | None = None) -> Hardware:
    """One of `MACHINES`; what a file of that name describes; or "here", the devices that JAX has.

    Those are measured once, in a minute, and kept in the user's cache folder; `calibrate` does it again.

    Args:
      memory_bytes: of a device, if it is not what the machine says.
    Raises:
      ValueError: there is none of these, or `memory_bytes` is no size.
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
    """The file that `calibrate` keeps these devices in."""
    name = f"{_name_here()} jax {jax.__version__}"
    return cache_folder() / "machines" / (re.sub(r"[^\w.]+", "-", name) + ".json")


def _kept_here() -> Path | None:
    try:
        return path if (path := path_here()).is_file() else None
    except OSError:  # there is no home, or it cannot be read
        return None


def _keep(machine: Hardware, samples: Sequence[Sample]) -> Hardware:
    """The machine with the samples too; in the file its memory stays what was measured."""
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
    """Number and kind of the devices, and of a CPU the cores that this process has."""
    devices = jax.devices()
    name = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu" and hasattr(os, "sched_getaffinity"):
        name += f" on {len(os.sched_getaffinity(0))} cores"
    return name


class _Bench:
    """Runs functions on all devices at once, for a part of a second each."""

    def __init__(self, part: float):
        self.part, self.devices = part, jax.devices()
        if jax.process_count() > 1:
            raise ValueError(
                f"machine {HERE!r} is measured by one process, there are {jax.process_count()}; name "
                f"another: {', '.join(MACHINES)}, or a file"
            )
        self.least: dict[Any, float] = {}
        self.on_cpu, n = self.devices[0].platform == "cpu", len(self.devices)
        self.mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=self.devices)

    def seconds(self, function: Callable[..., Any], *args: Any, changed: Any = None) -> float:
        """Of a function of arrays, a copy of them on every device.

        Args:
          function: (changed, *args) -> (changed, results) if there is something that it changes, as a step
            changes its state: in place, and the next call goes on with it. Else (*args) -> results.
        """

        def on_device(changed, args):
            changed, args = jax.tree.map(lambda a: a[0], (changed, args))
            out = function(*args) if changed is None else function(changed, *args)
            return jax.tree.map(lambda a: a[None], (None, out) if changed is None else out)

        spread = jax.jit(
            jax.shard_map(
                on_device, mesh=self.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
            ),
            donate_argnums=0,
        )
        n, layout = len(self.devices), NamedSharding(self.mesh, P("x"))
        changed, args = jax.tree.map(
            lambda a: jax.device_put(np.broadcast_to(a, (n, *np.shape(a))), layout), (changed, args)
        )

        def run():
            nonlocal changed
            changed, results = spread(changed, args)
            return changed, results

        return quickest(run, self.part)

    def samples(self, machine: Hardware, works: Iterable[Work]) -> list[Sample]:
        """How slow each piece of work is; of one that comes again the quickest run counts."""
        measure: dict[str, Callable[..., float]] = {
            pieces.FORWARD: self.forward,
            pieces.BACKWARD: self.backward,
            pieces.HEAD: self.head,
            pieces.DROPOUT: self.dropout,
        }
        found = {}
        for work in works:
            run = measure.get(work.kind) or functools.partial(self.update, work.kind)
            seconds = run(*work.sizes)
            if work.kind != pieces.BACKWARD:  # that is a difference of two quickest ones
                seconds = self.quickest(work, seconds)
            found[work] = Sample(work.kind, work.sizes, seconds / machine.roofline(work))
        return list(found.values())

    def quickest(self, key: Any, seconds: float) -> float:
        """The least of all seconds of this key."""
        self.least[key] = min(seconds, self.least.get(key, seconds))
        return self.least[key]

    def forward(self, *sizes: int) -> float:
        """Of a layer [t, b, H], one of so many."""
        return self.quickest(sizes, self.stage(*sizes, backward=False))

    def backward(self, *sizes: int) -> float:
        """Of a layer: that is both less forward, and at least as much."""
        forward = self.least[sizes] if sizes in self.least else self.forward(*sizes)
        both = self.quickest((sizes, "both"), self.stage(*sizes, backward=True))
        return max(both - forward, forward)

    def stage(self, t: int, b: int, H: int, layers: int, *, backward: bool) -> float:
        """A layer of those of a pipeline's stage, forward, and backward as well if so asked."""
        shapes = (H, 4, H), (H, 4, H), (4, H)
        params = LSTMParams(*(_random(layers, *shape) for shape in shapes))
        carry = LSTMCarry(_random(layers, b, H), _random(layers, b, H))
        order = jnp.arange(layers)
        at, slots = At(0, 0, 0), SlotArrays(order, jnp.zeros_like(order), order)

        def run(grads, params, carry, x):
            stack = (params,), ((),), (carry,)
            split = SplitLayers((_run_lstm,), *stack, x, at, has_empty_slots=False)
            after, y, saved = split.forward(*stack, x, at, slots)
            if not backward:
                return grads, (after, y, saved)
            weights = ((params, ()),)
            [grads], *rest = split.backward(weights, saved, after, y, (grads,), slots)
            return grads, (y, rest)

        return self.seconds(run, params, carry, _random(t, b, H), changed=params) / layers

    def head(self, rows: int, H: int, V: int) -> float:
        is_target_RV = jnp.zeros((rows, 1), jnp.int32) == jnp.arange(V)[None]

        def loss(
            kernel, bias, y
        ):  # as the language model has it, which picks targets by a masked sum
            logits_RV = matmul(y, kernel) + bias[None]
            max_R = lax.stop_gradient(jnp.max(logits_RV, axis=1))
            target_R = jnp.sum(jnp.where(is_target_RV, logits_RV, 0.0), axis=1)
            sum_R = jnp.sum(jnp.exp(logits_RV - max_R[:, None]), axis=1)
            return jnp.sum(jnp.log(sum_R) + (max_R - target_R))

        def run(totals, kernel, bias, y):
            value, (*grads, dy) = jax.value_and_grad(loss, (0, 1, 2))(kernel, bias, y)
            return add(totals, tuple(grads)), (value, dy)

        kernel, bias = _random(H, V), _random(V)
        return self.seconds(run, kernel, bias, _random(rows, H), changed=(kernel, bias))

    def dropout(self, elements: int) -> float:
        key = jax.random.key_data(jax.random.key(0))

        def run(key, x):
            return dropout(x, 0.5, At(0, 0, 0, jax.random.wrap_key_data(key)))

        return self.seconds(run, key, _random(8, 8, elements // 64))

    def update(self, kind: str, elements: int) -> float:
        words: list[Any] = kind.split()
        name, *how = words
        momentum, clip_norm = (float(word in how) / 2 for word in (pieces.MOMENTUM, pieces.CLIPPED))
        made = OptimizerConfig(name, momentum=momentum).make(num_steps=100)
        params = _random(elements)

        def run(state, grads):
            params, opt_state = state
            norm = optax.tree.norm(grads)
            scale = clip_scale(norm, clip_norm)
            return update(made, params, grads, opt_state, jnp.isfinite(norm), scale), None

        return self.seconds(run, params, changed=(params, jax.device_get(made.init(params))))

    def host_rate(self) -> float:
        """Bytes a second from the host's memory to the devices, to all of them at once."""
        numbers, layout = (
            np.ones((len(self.devices), 2**24), np.float32),
            NamedSharding(self.mesh, P("x")),
        )
        return numbers[0].nbytes / quickest(lambda: jax.device_put(numbers, layout), self.part)

    def tick(self) -> float:
        """Of a pipeline over all devices, up to eight, with nothing to do: its slope over idle ticks."""
        S, M, H = min(len(self.devices), 8), 64, 8
        pipeline = Pipeline(
            layers=(_run_lstm,),
            first=lambda params, frozen, at: params * at.batch,
            last=lambda kernel, frozen, y, at: (lax.psum(jnp.sum((y @ kernel) ** 2), STAGE),),
            mesh=MeshConfig(stage=S, devices=tuple(range(S))).build(),
            slots=make_slots((1,) * S),
            chunk_len=1,
            microbatch_rows=1,
            head="sharded",
            last_specs=(P(None, STAGE), P()),
        )
        weights = LSTMParams(_random(S, H, 4, H), _random(S, H, 4, H), _random(S, 4, H))
        params = PipelineParams(_random(1, 1, H), (weights,), _random(H, 8 * S))
        carry, batch = (LSTMCarry(_random(S, M, H), _random(S, M, H)),), _random(1, M, H)
        plan = make_plan([make_schedule("1f1b", S, M)])

        @jax.jit
        def run(params, plan):
            return jax.grad(lambda params: pipeline.sums(params, carry, batch, plan)[0][0])(params)

        def seconds(num_ticks: int) -> float:
            idle = make_idle(plan, num_ticks)
            return quickest(lambda: run(params, idle), self.part)

        return max(seconds(M) - seconds(0), 0.0) / M

    def link(self, op: str) -> Link:
        """Of a collective among all devices: seconds of a small one, and bytes a second of a large one."""
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

        elements = 2**18 if self.on_cpu else 2**24
        small, large = seconds(8, 100), seconds(elements, 4)
        payload = pieces.WORD * elements * (n if op == "all-gather" else 1)
        rate = sent_bytes(op, payload, n) / max(large - small, 1e-9)
        return Link(rate, small / num_messages(op, n))


def _describe(bench: _Bench) -> Hardware:
    """The machine but for the pieces of a step."""
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
            min(link.bytes_per_second for link in links), max(link.seconds for link in links)
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


def _usual_works(on_cpu: bool) -> Iterator[Work]:
    """Pieces of all kinds by turns, so that whenever time is over there is something of each."""
    larger = 1 if on_cpu else _LARGER
    layers = [(t, b * larger, H * larger, n) for t, b, H, n in _LAYERS]
    kinds = (
        [
            work(t, b, H, H, n)
            for t, b, H, n in layers
            for work in (pieces.layer_forward, pieces.layer_backward)
        ],
        [pieces.head(rows * larger, H * larger, V) for rows, H, V in _HEADS],
        [
            pieces.update(n * larger**2, OptimizerConfig(name), clip_norm=1.0)
            for n in _UPDATES
            for name in ("adam", "sgd")
        ],
        [pieces.dropout(n * larger**2) for n in _DROPOUTS],
    )
    for turn in itertools.zip_longest(*kinds):
        yield from filter(None, turn)


def _run_lstm(params: LSTMParams, frozen: Any, carry: LSTMCarry, x_TBH: jax.Array, at: At):
    """A `pipeline.layers.Layer`."""
    return lstm_layer(params, carry, x_TBH)


def _random(*shape: int) -> jax.Array:
    """Numbers of the size of weights and activations; zeros would be multiplied faster."""
    return jnp.asarray(np.random.default_rng(0).uniform(-0.1, 0.1, shape), jnp.float32)


def _memory_bytes(devices: list[Any]) -> float:
    """Of one device; simulated ones share what the machine has. Infinity if nobody knows."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return float(limit)
    memory = host_memory()
    return memory[1] / len(devices) if memory else float("inf")
