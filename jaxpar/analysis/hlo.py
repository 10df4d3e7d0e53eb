"""The text of a compiled HLO module as data: its instructions, how often they run, which devices they join.

The text is what `compiled.as_text()` gives. Its grammar has no specification but XLA's own parser and
printer (`hlo_parser.cc`, `replica_group.cc`, `mesh_and_axis.cc` in openxla/xla).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Groups = Sequence[Sequence[int]]

_INSTRUCTION = re.compile(r"  (ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*)")
# The attributes that name what an instruction calls; `to_apply` of others is what they reduce or sort by.
_CALLS = {"while": ("condition", "body"), "call": ("calls", "to_apply")}
_OTHER_CALLS = ("calls", "branch_computations", "true_computation", "false_computation")
# What computes nothing: names of arrays and of their parts, what starts or ends something, a transfer.
_IDLE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|partition-id|opt-barrier|send|recv"
    r"|all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all|fusion-done|(?!fusion).*-(start|update|done)"
    r"|AllocateBuffer|AssumeGatherIndicesInBound|ConcatBitcast|GatherScatterIndicesBitpacked"
)
# Whether a loop counts up or down, and what to add to its end if that is included.
_COUNTS = {"LT": (1, 0), "LE": (1, 1), "GT": (-1, 0), "GE": (-1, -1)}


class Instruction(NamedTuple):
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # by name; of a constant its value, of a parameter its number
    attributes: str

    @property
    def op_name(self) -> str:
        """Where it comes from in the traced program, such as jit(f)/jvp(lstm)/while/body/dot_general."""
        return self.attributes.partition('op_name="')[2].partition('"')[0]


Callers = tuple[Instruction, ...]


class Visit(NamedTuple):
    """An instruction at one of the places where the program runs it.

    Attributes:
      callers: the whiles, conditionals and calls around it, outermost first.
      trip_counts: of the loops around it, outermost first; None where that depends on data.
      conditional: whether it is in a branch.
    """

    instruction: Instruction
    callers: Callers = ()
    trip_counts: tuple[int | None, ...] = ()
    conditional: bool = False


class Module:
    """An HLO module.

    Attributes:
      num_partitions: devices that run it.
      computations: name -> instructions, in the order in which they run where that is decided.
      beside: by name, each instruction that starts what another one ends, such as a transfer -> what
        computes between the two.
    """

    def __init__(self, text: str):
        """Reads the text.

        Raises:
          ValueError: it is not the text of an HLO module.
        """
        self.computations, self.beside = (dict[str, list[Instruction]]() for _ in range(2))
        self._entry, self._named = "", dict[str, Instruction]()
        self._roots = dict[str, str]()  # computation -> its result
        found = re.match(r"HloModule .*?(?:num_partitions=(\d+)|$)", text, re.MULTILINE)
        if found is None or "replica_count=" in found[0]:
            raise ValueError(
                f"text={text[:60]!r}... is not an HLO module of one replica\n"
                f"Fix: give what jax.jit(...).lower(...).compile().as_text() returns."
            )
        self.num_partitions = int(found[1] or 1)
        section, name = list[Instruction](), ""
        running: dict[str, list[Instruction]] = {}  # what is started and not ended, as in `beside`
        for line in text.splitlines()[1:]:
            if found := _INSTRUCTION.match(line):
                root, own_name, shape, opcode, operands, attributes = found.groups()
                names = re.sub(r"/\*.*?\*/|%", "", operands).split(", ")
                instruction = Instruction(own_name, shape, opcode, tuple(names), attributes)
                section.append(instruction)
                self._named[own_name] = instruction
                if root:
                    self._roots[name] = own_name
                starts, ends = self._starts_and_ends(instruction)
                running = {key: others for key, others in running.items() if key not in ends}
                for others in running.values() if self._computes(instruction) else ():
                    others.append(instruction)
                if starts:
                    self.beside[own_name] = running[starts] = []
            elif line.endswith("{"):
                name = line.removeprefix("ENTRY ").split(maxsplit=1)[0].lstrip("%")
                section, running = self.computations.setdefault(name, []), {}
                if line.startswith("ENTRY"):
                    self._entry = name

    def visits(self) -> Iterator[Visit]:
        """Every instruction, once for each place that it is called from, in the program's order."""
        yield from self._visits(self._entry, Visit(Instruction("", "", "", (), "")))

    def _visits(self, computation: str, at: Visit) -> Iterator[Visit]:
        for instruction in self.computations[computation]:
            yield at._replace(instruction=instruction)
            opcode, trip_counts = instruction.opcode, at.trip_counts
            trips = self._trip_count(instruction, at.callers) if opcode == "while" else None
            for attribute in _CALLS.get(opcode, _OTHER_CALLS):
                if opcode == "while":  # its condition runs once more than its body
                    runs = None if trips is None else trips + (attribute == "condition")
                    trip_counts = (*at.trip_counts, runs)
                callers, in_branch = (*at.callers, instruction), opcode == "conditional"
                inside = Visit(instruction, callers, trip_counts, at.conditional or in_branch)
                for called in _names(instruction, attribute):
                    yield from self._visits(called, inside)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of a fusion; empty for other instructions."""
        called = _names(instruction, "calls") if instruction.opcode.startswith("fusion") else []
        return [each for name in called for each in self.computations[name]]

    def _starts_and_ends(self, instruction: Instruction) -> tuple[str, Sequence[str]]:
        """What an instruction starts and what it ends, by name; mostly nothing.

        The TPU's compiler also makes chains of fusions: `AsyncCollectiveStart` is in the first one and
        `AsyncCollectiveDone` in the last; those between do a part of the transfer beside a matmul. All of
        them repeat the collective, with the chain's id, by which it goes here.
        """
        name, opcode = instruction.name, instruction.opcode
        inside = " ".join(each.attributes for each in self.fused(instruction))
        if found := re.search(r'(chain_id="\d+").*"AsyncCollective(Start|Done)"', inside):
            return (found[1], ()) if found[2] == "Start" else ("", (found[1],))
        starts = name if opcode.endswith(("-start", "send")) else ""
        return starts, instruction.operands if opcode.endswith("-done") else ()

    def _computes(self, instruction: Instruction) -> bool:
        """Whether it computes or moves an array: no view of one, no transfer, no single number."""
        inside = self.fused(instruction) or [instruction]
        kinds = {attribute(each, 'custom_call_target="') or each.opcode for each in inside}
        is_array = any(math.prod(dims) > 1 for _, dims in arrays(instruction.shape))
        return (is_array or "reduce" in kinds) and not all(map(_IDLE.fullmatch, kinds))

    def _trip_count(self, loop: Instruction, callers: Callers) -> int | None:
        """How often a `while` runs its body; None if that depends on data.

        XLA's CPU and GPU compilers have written it down. Otherwise the condition compares an element of the
        loop's state with a constant, and the body adds a constant to it.
        """
        if known := attribute(loop, '"known_trip_count":{"n":"'):
            return int(known)
        [condition], [body] = (_names(loop, each) for each in _CALLS["while"])
        inside = (*callers, loop)
        match self._value(self._roots[condition], inside):
            case [direction, ["state", place], ["constant", end]] if direction in _COUNTS:
                up, inclusive = _COUNTS[direction]
                at_first = self._value(loop.operands[0], callers, place)
                match at_first, self._value(self._roots[body], inside, place):
                    case ["constant", start], ["add", state, ["constant", step]]:
                        known = state == ("state", place) and step * up > 0
                        return len(range(start, end + inclusive, step)) if known else None
        return None

    def _value(self, name: str, callers: Callers, place: int | None = None) -> tuple[Any, ...]:
        """What a value is, or the element of it at a place: behind copies, tuples and fusions.

        Args:
          callers: those of the instruction `name`.
        Returns:
          ("constant", its whole number); ("state", its place in that of the innermost loop); ("add", two
          values); (the direction of a comparison, two values); or the opcode of what else makes it.
        """
        each, around = self._named[name], callers[-1].opcode if callers else ""
        match each.opcode:
            case "copy" | "copy-start" | "copy-done" | "bitcast":
                return self._value(each.operands[0], callers, place)
            case "fusion" | "call":
                [called] = _names(each, "calls", "to_apply")
                return self._value(self._roots[called], (*callers, each), place)
            case "parameter" if around in ("fusion", "call"):
                return self._value(callers[-1].operands[int(each.operands[0])], callers[:-1], place)
            case "get-tuple-element" if place is None:
                return self._value(each.operands[0], callers, int(attribute(each, "index=")))
            case "tuple" if place is not None:
                return self._value(each.operands[place], callers)
            case "parameter" if around == "while":
                return "state", place
            case "constant" if re.fullmatch(r"-?\d+", each.operands[0]):
                return "constant", int(each.operands[0])
            case "add" | "compare":
                operands = (self._value(operand, callers) for operand in each.operands)
                return attribute(each, "direction=") or "add", *operands
        return (each.opcode,)


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array in the text of a shape: f32[8,4]{1,0}, or a tuple of them."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    return [(dtype, tuple(_numbers(dims))) for dtype, dims in found]


def elements_of_tuple(shape: str) -> list[str]:
    """The outermost elements of the text of a tuple's shape."""
    without_layouts = re.sub(r"\{[^{}]*\}", "", shape)
    return re.findall(r"\([^()]*\)|\w+\[[^\]]*\]", without_layouts[1:-1])


def bits(dtype: str) -> int:
    """Bits of an element: 32 for f32, 16 for bf16, 8 for pred; 0 for a token."""
    return (_numbers(dtype) or [8 * (dtype == "pred")])[0]


def groups(instruction: Instruction, num_partitions: int) -> Groups:
    """The groups of partitions that a collective joins, in any of the notations; for a permute, its pairs.

    - `source_target_pairs={{0,1},{1,0}}`, and `replica_groups={{0,1},{2,3}}`
    - no `use_global_device_ids` where there could be one: all, as groups are then of replicas, and there is
      only one
    - `[2,4]<=[4,2]T(1,0)`: iota over the second dims, transposed, reshaped to [groups, members]
    - `mesh['a'=2,'b'=4] {'b'}`: along those axes; maybe with `device_ids=([2,4]T(1,0))`, an iota likewise
      or plain numbers, and with parts of axes, `'b':(1)2` for the outer half of b

    Raises:
      ValueError: it is in none of these.
    """
    attributes = instruction.attributes
    reduces_or_gathers = re.match("all-(reduce|gather)|reduce-scatter", instruction.opcode)
    if reduces_or_gathers and "use_global_device_ids=true" not in attributes:
        return [range(num_partitions)]
    if found := re.search(r'(?:_pairs|replica_groups)="?\{((?:\{[\d, ]*\},? ?)*)\}', attributes):
        return [_numbers(group) for group in re.findall(r"\{([^}]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?),? ", attributes + " "):
        shape, order = _numbers(found[1]), _iota(found[2])
        return order.reshape(shape).tolist()
    notation = r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? *\{(.*?)\}"
    found = re.search(notation, attributes)
    if found is None:  # not reached: no JAX has written others so far
        groups = attributes[:300]
        raise ValueError(f"unknown groups of a collective: {groups}\nFix: use another JAX.")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    ids = _iota(found[2]) if found[2] else np.arange(math.prod(sizes.values()))
    coordinates = np.indices((*sizes.values(),)).reshape(len(sizes), -1)
    for axis, outer, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]):
        # A joined axis, or part of one, makes no difference to the group of a device.
        own, size = coordinates[[*sizes].index(axis)], int(part or sizes[axis])
        stride = sizes[axis] // (size * int(outer or 1))
        own -= own // stride % size * stride
    joined: dict[tuple[int, ...], list[int]] = {}
    for place, number in zip(coordinates.T.tolist(), ids.tolist(), strict=True):
        joined.setdefault(tuple(place), []).append(number)
    return [*joined.values()]


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0 to 7 as [4, 2], its dims transposed, flat. Or plain numbers."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, _, order = text.partition("T")
    sizes = _numbers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_numbers(order)).ravel() if order else ids.ravel()


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def attribute(instruction: Instruction, before: str) -> str:
    """The word that follows a text in the attributes; "" if the text is not in them."""
    return re.split(r"\W", instruction.attributes.partition(before)[2], maxsplit=1)[0]


def _names(instruction: Instruction, *attributes: str) -> list[str]:
    """The computations that some attributes name."""
    pattern = rf"\b(?:{'|'.join(attributes)})=(\{{[^}}]*\}}|[^\s,]+)"
    return re.findall(r"[\w.\-]+", " ".join(re.findall(pattern, instruction.attributes)))
