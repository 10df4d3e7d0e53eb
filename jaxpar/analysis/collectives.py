"""The collectives of a compiled program: what is exchanged, along which mesh axes, how often, and by whom."""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from jaxpar.analysis import hlo
from jaxpar.analysis.hlo import Groups, Instruction, Module, Visit
from jaxpar.trace.source_lines import frames_of

# How often the busiest of n devices sends (n-1)/n of a payload, by the usual ring algorithms: NCCL's bus
# bandwidth factors, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
_ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
_ROUNDS |= {"ragged-all-to-all": 1}
_ROUNDS |= {"collective-permute": 0, "collective-broadcast": 0}  # 0: all of it

# Parts of an `op_name` that say how the program is built, not which module it is from.
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|shard_map|scan|checkpoint|rematted_computation"
    r"|remat\d*|jit|core_call|custom_[jv]{2}p_call\w*|.*->.*|.*<locals>.*|"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program; combined ones count as one, with several arrays.

    Attributes:
      op: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
        "collective-broadcast" or "ragged-all-to-all".
      axes: the mesh axes along which the devices that exchange differ.
      group_size: how many devices exchange with each other; 2 for a permute, whose devices send in pairs.
      shapes, dtypes: of the payload's arrays.
      elements, bytes: of the payload of one device and one run: the whole array that an all-reduce
        sums, an all-gather makes, a reduce-scatter or an all-to-all takes, a permute or a broadcast
        sends; of a ragged-all-to-all its buffer, an upper bound.
      sent_bytes: what the busiest device sends in one run, by a ring of n devices: an all-reduce
        2 (n-1)/n of the payload; an all-gather, a reduce-scatter and an all-to-all (n-1)/n; a permute and
        a broadcast all of it (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
      trip_counts: of the loops around it, outermost first; None where that depends on data.
      conditional: whether it is in a branch; it is counted as if the branch were always taken.
      phase: "backward" if it comes from a transpose, or a module of that name; "forward"; or, in a program
        that differentiates, "neither", such as the optimizer's.
      module: the named scopes (`jax.named_scope`) that it comes from, such as "pipeline/forward/lstm".
      source: the line of Python, such as "lstm.py:84".
      op_name: as XLA records it.
      beside: what computes between its start and its end, in the program's order: the named scopes that it is
        from, or else its opcode; None if it is synchronous, and everything waits for it.

    Example:
      report = jaxpar.inspect_step(task, "dp2")
      print([(each.op, each.axes, each.sent_bytes) for each in report.collectives])
    """

    op: str
    axes: tuple[str, ...]
    group_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    elements: int
    bytes: int
    sent_bytes: int
    trip_counts: tuple[int | None, ...]
    conditional: bool
    phase: str
    module: str
    source: str
    op_name: str
    beside: tuple[str, ...] | None

    @property
    def waits(self) -> bool:
        """Whether no computation overlaps with it."""
        return not self.beside

    @property
    def count(self) -> int | None:
        """Number of runs; None if the length of a loop around it depends on data."""
        return None if None in self.trip_counts else math.prod(n or 0 for n in self.trip_counts)

    @property
    def in_loop(self) -> bool:
        """Whether a loop is around it."""
        return bool(self.trip_counts)


def find_collectives(
    text: str, mesh: Mesh | None = None, order: Sequence[int] | None = None
) -> tuple[Collective, ...]:
    """The collectives of a compiled program, in its order, without those in groups of one device.

    Args:
      text: its HLO module, as `compiled.as_text()` gives it.
      mesh: whose axes are named; None if the program runs on one device.
      order: for each partition of the program, the place of its device in `mesh.devices.flat`; None if
        they are in the same order.
    Raises:
      ValueError: the text is not an HLO module, or the program does not run on the mesh.

    Example:
      mesh = jaxpar.MeshConfig(data=2, devices=(0, 1)).build()
      rows = jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(mesh, jax.P("data")))
      text = jax.jit(jnp.sum).lower(rows).compile().as_text()
      print(jaxpar.analysis.find_collectives(text, mesh))
    """
    module = Module(text)
    if module.num_partitions == 1:
        return ()
    if mesh is None or mesh.size != module.num_partitions:
        raise ValueError(
            f"mesh={mesh and dict(mesh.shape)}: the program runs on {module.num_partitions} devices\n"
            f"Fix: give the mesh that it was compiled for."
        )
    places = np.arange(mesh.size) if order is None else np.asarray(order)
    found = []
    for visit in module.visits():
        op = _operation(module, visit)
        groups = hlo.groups(visit.instruction, mesh.size) if op else ()
        joined = [places[[*group]].tolist() for group in groups if len(set(group)) > 1]
        if op and joined:
            found.append(_collective(text, module, visit, op, mesh, joined))
    return tuple(found)


def sent_bytes(op: str, num_bytes: float, size: int) -> int:
    """What the busiest of `size` devices sends of a payload; see `Collective`."""
    rounds = _ROUNDS[op]
    return math.ceil(num_bytes * (rounds * (size - 1) / size if rounds else 1))


def num_messages(op: str, size: int) -> int:
    """How many messages a tree of `size` devices sends one after the other: up, down, or both."""
    if op == "collective-permute":
        return 1
    depth = math.ceil(math.log2(size))
    return 2 * depth if op == "all-reduce" else depth


def _operation(module: Module, visit: Visit) -> str | None:
    instruction, op = visit.instruction, visit.instruction.opcode.removesuffix("-start")
    fused = [each for around in visit.callers[-1:] for each in module.fused(around)]
    if op == "send":  # a permute that XLA split, to overlap it with other work
        return "collective-permute" if "_source_target_pairs" in instruction.attributes else None
    is_chained = fused and "chain_id=" in instruction.attributes
    if is_chained and "AsyncCollectiveStart" not in fused[-1].attributes:
        return None  # another part of a transfer that is counted where it starts
    if op == "all-reduce" and _is_scattered(fused):
        return "reduce-scatter"  # as the TPU's compiler writes it
    return op if op in _ROUNDS else None


def _is_scattered(fused: Sequence[Instruction]) -> bool:
    """Whether a fusion returns slices of arrays alone, each device its own."""
    if not fused:
        return False
    opcodes = {each.name: each.opcode for each in fused}
    is_tuple = fused[-1].opcode == "tuple"
    returned = fused[-1].operands if is_tuple else [fused[-1].name]
    return all(opcodes[name] == "dynamic-slice" for name in returned)


def _collective(
    text: str, module: Module, visit: Visit, op: str, mesh: Mesh, joined: Groups
) -> Collective:
    """A collective among groups of places in the mesh."""
    instruction, size, paths = visit.instruction, max(map(len, joined)), _paths(visit)
    dtypes, shapes = zip(*_payload(instruction, size), strict=True)
    elements = [math.prod(dims) for dims in shapes]
    num_bytes = sum(n * hlo.bits(dtype) for n, dtype in zip(elements, dtypes, strict=True)) // 8
    outward = (instruction, *reversed(visit.callers))
    # It may be all that an asynchronous computation, or a fusion, has in it.
    beside = next((module.beside[x.name] for x in outward[:2] if x.name in module.beside), None)
    return Collective(
        op=op,
        axes=_axes(mesh, joined),
        group_size=size,
        shapes=shapes,
        dtypes=dtypes,
        elements=sum(elements),
        bytes=num_bytes,
        sent_bytes=sent_bytes(op, num_bytes, size),
        trip_counts=visit.trip_counts,
        conditional=visit.conditional,
        phase=_phase(paths, differentiates="jvp(" in text),
        module=", ".join(dict.fromkeys(filter(None, map(_scopes, paths)))),
        source=next(filter(None, (_source(text, each) for each in outward)), ""),
        op_name=instruction.op_name,
        beside=None if beside is None else tuple(_scopes(x.op_name) or x.opcode for x in beside),
    )


def _source(text: str, instruction: Instruction) -> str:
    """The line of Python that an instruction comes from, such as lstm.py:84; "" if it is unknown."""
    frame = int(hlo.attribute(instruction, "stack_frame_id=") or 0)
    found = next(frames_of(text, frame), None)
    return f"{Path(found[0]).name}:{found[1]}" if found else ""


def _axes(mesh: Mesh, joined: Groups) -> tuple[str, ...]:
    """The axes along which the members of any group differ."""
    coordinates = np.array(np.unravel_index(np.arange(mesh.size), mesh.devices.shape))
    joins = np.any([np.ptp(coordinates[:, group], axis=1) > 0 for group in joined], axis=0)
    return tuple(itertools.compress(mesh.axis_names, joins))


def _payload(instruction: Instruction, size: int) -> list[tuple[str, tuple[int, ...]]]:
    shape, opcode = instruction.shape, instruction.opcode
    if opcode == "send":
        shape = hlo.elements_of_tuple(shape)[0]  # (what is sent, context, token)
    elif opcode.endswith("-start") and (opcode != "all-reduce-start" or shape.startswith("((")):
        # (operands, results, context...); of an all-reduce, until JAX 0.12, the results alone.
        shape = hlo.elements_of_tuple(shape)[1]
    payload = hlo.arrays(shape)
    if opcode.startswith("reduce-scatter"):  # its input is larger than its output
        dim = int(hlo.attribute(instruction, " dimensions={"))
        payload = [(dtype, (*d[:dim], d[dim] * size, *d[dim + 1 :])) for dtype, d in payload]
    return payload


def _paths(visit: Visit) -> list[str]:
    """The `op_name`s that a collective has, one for each that was combined into it.

    XLA leaves them out, or shortens them, where it inserts collectives of its own into a loop or branch;
    then that of the loop says more.
    """
    path = visit.instruction.op_name
    for caller in visit.callers:
        if caller.op_name.startswith(path):
            path = caller.op_name
    before, _, names = path.partition("/(")
    combined = names[:-1].split(":") if names.endswith(")") else []
    return [f"{before}/{name}" for name in combined] or [path]


def _phase(paths: list[str], *, differentiates: bool) -> str:
    if any("transpose(" in path or "backward" in _scopes(path).split("/") for path in paths):
        return "backward"
    if not differentiates or any("jvp(" in path for path in paths):
        return "forward"
    return "neither"


def _scopes(path: str) -> str:
    """The named scopes of an `op_name`: jit(step)/transpose(jvp(lstm))/while/body/mul is from lstm."""
    scopes = []
    for part in path.split("/")[:-1]:
        while found := re.fullmatch(r"(\w+)\((.*)\)", part):
            part = "" if found[1] == "jit" else found[2]
        if not _STRUCTURE.fullmatch(part) and part not in scopes[-1:]:
            scopes.append(part)
    return "/".join(scopes)
