"""Reports on compiled programs, the training step or any other: collectives, FLOPs and memory."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.base.display import Printed, format_bytes
from jaxpar.base.trees import device_bytes
from jaxpar.base.types import Arrays, Function, Json, Value
from jaxpar.config import Parallel, TrainConfig
from jaxpar.model.task import Task
from jaxpar.pipeline.loop import BACKWARD, ENTER, FORWARD, HEAD, LEAVE, scope_of_weights
from jaxpar.pipeline.tables import TickTable
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, abstract_state
from jaxpar.step.step import abstract_batch

_WIDE = (
    "\nsent: on CPUs, XLA sends bfloat16 and float16 as float32; TPUs and GPUs send half as many bytes "
    "for them"
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by XLA's buffer assignment.

    Attributes:
      arguments, outputs: of the program.
      aliased: outputs that reuse the memory of (donated) arguments.
      temporary: everything else, at its peak; without what lies in a TPU's memory on the chip.
      code: the program itself, where it lies in the device's memory.
      purposes: what the arguments of a training step are, such as "parameters"; empty for other programs.

    Example:
      memory = jaxpar.inspect_step(task, "dp2").memory
      print(memory.temporary, memory.total)
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int = 0
    purposes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes that a device must have room for."""
        return self.arguments + self.outputs - self.aliased + self.temporary + self.code

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the total; the arguments by purpose, if known."""
        return {
            **(self.purposes or {"arguments": self.arguments}),
            "new outputs": self.outputs - self.aliased,
            "temporary": self.temporary,
            "program code": self.code,
        }

    def __str__(self) -> str:
        """Its sum and its parts."""
        parts = (f"{name} {format_bytes(size)}" for name, size in self.parts.items() if size)
        return f"{format_bytes(self.total)}: {', '.join(parts)}"


@dataclass(frozen=True)
class Total:
    """Sums over all runs of the collectives along the same axes.

    Attributes:
      collectives: how many instructions.
      count: how many runs.
      bytes, sent_bytes: payload, and what the busiest device sends; see `Collective`.
      unknown: collectives whose number of runs depends on data. They are not in count and bytes.
    """

    axes: tuple[str, ...]
    collectives: int
    count: int
    bytes: int
    sent_bytes: int
    unknown: int


@dataclass(frozen=True, repr=False)
class ProgramReport(Printed):
    """Inspection report of a compiled program, per device. Print it, or read its attributes.

    Attributes:
      collectives: in the program's order.
      flops: floating-point operations by XLA's count, which counts the body of every loop once, however
        often it runs; None where XLA does not count.
      memory: None where XLA does not report it.
      notes: where a program for CPUs sends more than others do.

    Example:
      report = jaxpar.inspect_step(task, "dp2")
      print(report)
    """

    collectives: tuple[Collective, ...]
    flops: float | None
    memory: Memory | None
    notes: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[Total, ...]:
        """Sums for each set of axes that collectives run along, the most bytes sent first."""
        totals = []
        for axes in dict.fromkeys(c.axes for c in self.collectives):
            along = [(c, c.count or 0) for c in self.collectives if c.axes == axes]
            rows = [(1, n, n * c.bytes, n * c.sent_bytes, c.count is None) for c, n in along]
            totals.append(Total(axes, *map(sum, zip(*rows, strict=True))))
        return tuple(sorted(totals, key=lambda total: -total.sent_bytes))

    def along(self, *axes: str) -> tuple[Collective, ...]:
        """The collectives that join devices along any of the axes."""
        return tuple(c for c in self.collectives if set(axes) & set(c.axes))

    def to_dict(self) -> Json:
        """Everything in dicts, lists, numbers and strings, as `json.dumps` takes them."""
        names = "count", "in_loop", "waits"
        collectives = [asdict(c) | {n: getattr(c, n) for n in names} for c in self.collectives]
        totals = [*map(asdict, self.totals)]
        return {**asdict(self), "collectives": collectives, "totals": totals}


def inspect_step(
    task: Task | Setup,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    mesh: Mesh | None = None,
) -> ProgramReport:
    """Reports the communication, FLOPs and memory of a task's compiled training step. Makes no arrays.

    The length of a pipeline's loop over ticks is an input of the program. It is filled in for a batch of full
    length: what runs at every tick counts once per tick, what a unit needs once for every unit of the busiest
    device.

    Args:
      task, parallel, train: as `fit` takes them. With `update="host"`, the optimizer is not part of the
        program.
      mesh: that of `parallel`; None builds it.
    Raises:
      ValueError: sizes do not fit the mesh.

    Example:
      report = jaxpar.inspect_step(task, "dp2")
      print(report.memory.total, [each.op for each in report.collectives])
    """
    setup = Setup.of(task, parallel, train, mesh)
    return inspect_lowered(setup, lower_step(setup))


def lower_step(setup: Setup) -> jax.stages.Lowered:
    """The program of a setup's training step, not compiled yet, for shapes."""
    return setup.train_step().lower(abstract_state(setup), abstract_batch(setup))


def inspect_lowered(setup: Setup, lowered: jax.stages.Lowered) -> ProgramReport:
    """The report of the program of a setup's training step, which is compiled now; see `inspect_step`."""
    report, table = inspect_compiled(lowered.compile(), setup.mesh), setup.train_step().full_table
    memory = report.memory and _with_purposes(report.memory, abstract_state(setup))
    collectives = report.collectives
    if table is not None:
        collectives = tuple(_with_units(each, table) for each in collectives)
    return replace(report, memory=memory, collectives=collectives)


def inspect_function(
    function: Function, *args: Arrays, mesh: Mesh | None = None, **kwargs: Value
) -> ProgramReport:
    """Reports the communication, FLOPs and memory of your own function, compiled for these arguments.

    Args:
      function: jitted, or to be jitted.
      args, kwargs: arrays, or `jax.ShapeDtypeStruct`s with a sharding.
      mesh: as for `inspect_compiled`.
    Raises:
      ValueError: the mesh cannot be inferred from the arguments and results.

    Example:
      mesh = jaxpar.MeshConfig(data=2, devices=(0, 1)).build()
      rows = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, jax.P("data")))
      print(jaxpar.analysis.inspect_function(jnp.sum, rows))
    """
    jitted: Value = function
    if not hasattr(function, "lower"):  # what JAX has traced of it before may be of other globals
        jitted = jax.jit(lambda *args, **kwargs: function(*args, **kwargs))
    return inspect_compiled(jitted.lower(*args, **kwargs).compile(), mesh)


def inspect_compiled(compiled: jax.stages.Compiled, mesh: Mesh | None = None) -> ProgramReport:
    """Reports the communication, FLOPs and memory of `jax.jit(...).lower(...).compile()`.

    Args:
      mesh: whose axes are named; None takes that of the program's arguments and results.
    Raises:
      ValueError: they are on no mesh, or on several; or the program was not compiled for the mesh.

    Example:
      mesh = jaxpar.MeshConfig(data=2, devices=(0, 1)).build()
      rows = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, jax.P("data")))
      print(jaxpar.analysis.inspect_compiled(jax.jit(jnp.sum).lower(rows).compile()))
    """
    # Of partition 0, 1, ... What is compiled for a machine that is not there has none.
    devices = getattr(compiled.runtime_executable(), "local_devices", list)()
    mesh = mesh or _mesh_of(compiled)
    places, order = [] if mesh is None else mesh.devices.ravel().tolist(), None
    # Other processes' devices are not among them; then JAX compiles for the mesh's order.
    if places and len(devices) == len(places):
        if set(devices) != set(places):
            fact = f"mesh has the devices {places}, the program was compiled for {devices}"
            raise ValueError(f"{fact}\nFix: give the mesh that it was compiled for.")
        order = [*map(places.index, devices)]
    costs: Value = compiled.cost_analysis() or {}
    stats: Value = compiled.memory_analysis()
    text = compiled.as_text() or ""
    collectives = find_collectives(text, mesh, order)
    is_cpu = bool(places) and places[0].platform == "cpu"
    has_narrow = re.search(r"\bb?f16\[", text)
    sends_wide = has_narrow and any("f32" in each.dtypes for each in collectives)
    notes = (_WIDE,) if is_cpu and sends_wide else ()
    return ProgramReport(collectives, costs.get("flops"), stats and _memory(stats), notes)


def _memory(stats: Value) -> Memory:
    """Of what XLA says; where JAX has it (since 0.11), temporary memory is from the compiler's own total.

    That total is of all buffers in the device's main memory, and not of the program. `temp_size_in_bytes`
    also counts what is in a TPU's memory on the chip.
    """
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, code = stats.alias_size_in_bytes, stats.generated_code_size_in_bytes
    known, total = arguments + outputs - aliased, getattr(stats, "total_allocation_bytes", 0)
    temporary = max(total - known, 0) if total else stats.temp_size_in_bytes
    return Memory(arguments, outputs, aliased, temporary, code)


def _with_purposes(memory: Memory, state: TrainState) -> Memory:
    """The memory of a step with what its arguments are for; the rest are its batch and its schedule."""
    purposes = {
        "parameters": device_bytes(state.params),
        "frozen parameters": device_bytes(state.frozen),
        "optimizer state": 0 if state.opt_memory else device_bytes(state.opt_state),
        "recurrent state": device_bytes(state.carry),
    }
    purposes["batch and schedule"] = memory.arguments - sum(purposes.values())
    return replace(memory, purposes=purposes)


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh | None:
    """The mesh of a program's arguments and results; None if they are on none, or on several."""
    found = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = {x.mesh for x in found if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh)}
    return meshes.pop() if len(meshes) == 1 else None


def busy_of(table: TickTable) -> dict[str, np.ndarray]:
    """For every part of a tick, whether it has work: bool [data, ticks, stage]; the head [data, ticks, 1]."""
    return {
        FORWARD: np.asarray(table.forward.unit) >= 0,
        HEAD: np.asarray(table.head.unit)[..., None] >= 0,
        BACKWARD: np.asarray(table.backward.unit) >= 0,
        **{scope_of_weights(n): unit >= 0 for n, unit in enumerate(table.weight_units)},
    }


def _with_units(collective: Collective, table: TickTable) -> Collective:
    """A collective of the loop over ticks with the loop's length, by the part of a tick that it is in."""
    units = busy_of(table)
    ends = {ENTER: table.enter, LEAVE: table.leave}
    units |= {name: np.asarray(lane.unit)[..., None] >= 0 for name, lane in ends.items()}
    parts = [x for x in re.findall(r"[^/, ]+", collective.module) if x in units]
    if not parts or collective.trip_counts[:1] != (None,):
        return collective
    runs_T = np.arange(table.forward.unit.shape[1]) < table.num_ticks
    # For one device, since W takes other lanes on each stage: the last of the group with the most units.
    group = units[FORWARD].sum((1, 2)).argmax()
    # A unit's work is in a branch, or in a loop of one turn or none (`Loop._if_runs`).
    is_turn = collective.trip_counts[1:2] == (None,)
    in_branch = collective.conditional or is_turn
    part = next((part for part in parts if part in ends), parts[0])
    busy_T = units[part][group, :, -1] if in_branch else np.bool_(True)
    trips = int((busy_T & runs_T).sum()), *collective.trip_counts[1 + is_turn :]
    return replace(collective, trip_counts=trips, conditional=in_branch)
