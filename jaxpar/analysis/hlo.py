"""The text of a compiled HLO module as data: its instructions, how often they run, which devices they join.

The text is what `compiled.as_text()` gives. Its grammar has no specification but XLA's own parser and
printer (`hlo_parser.cc`, `replica_group.cc`, `mesh_and_axis.cc` in openxla/xla).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

Groups = Sequence[Sequence[int]]

# What computes nothing: names for arrays and parts of them, and what starts or ends something. A
# collective is no work that another could hide behind.
_IDLE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|partition-id|opt-barrier|send|recv"
    r"|all-\w+|reduce-scatter|collective-\w+|ragged-all-to-all|(?!fusion)[\w-]+-(start|update|done)|fusion-done"
)
# Custom calls that are neither.
_VIEWS = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # by name; of a constant its value, of a parameter its number
    attributes: str

    @functools.cached_property
    def op_name(self) -> str:
        """Where it comes from in the traced program, such as jit(f)/jvp(lstm)/while/body/dot_general."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction at one of the places where the program runs it.

    Attributes:
      callers: the whiles, conditionals and calls around it, outermost first.
      trip_counts: of the loops around it, outermost first; None where that depends on data.
      conditional: whether it is in a branch.
    """

    instruction: Instruction
    callers: tuple[Instruction, ...] = ()
    trip_counts: tuple[int | None, ...] = ()
    conditional: bool = False


class Module:
    """An HLO module.

    Attributes:
      num_partitions: devices that run it.
      computations: name -> instructions, in the order in which they run where that is decided.
    """

    def __init__(self, text: str):
        """Reads the text.

        Raises:
          ValueError: it is not the text of an HLO module.
        """
        self.computations: dict[str, list[Instruction]] = {}
        self._entry, self._tables = "", {}
        self._roots: dict[str, str] = {}  # computation -> the instruction that is its result
        self._named: dict[str, Instruction] = {}
        self._homes: dict[str, list[Instruction]] = {}  # instruction -> those of its computation
        found = re.match(r"HloModule .*?(?:num_partitions=(\d+)|$)", text, re.MULTILINE)
        if found is None or "replica_count=" in found[0]:
            raise ValueError(
                f"this is not an HLO module of one replica: {text[:60]!r}; give what "
                f"`jax.jit(...).lower(...).compile().as_text()` says"
            )
        self.num_partitions = int(found[1] or 1)
        table: list[str] = []
        name, section = "", list[Instruction]()
        for line in text.splitlines()[1:]:
            if line.startswith("  "):
                if instruction := _instruction(line):
                    section.append(instruction)
                    self._named[instruction.name] = instruction
                    self._homes[instruction.name] = section
                    if line.startswith("  ROOT "):
                        self._roots[name] = instruction.name
            elif line.endswith("{"):
                name = line.removeprefix("ENTRY ").split(maxsplit=1)[0].lstrip("%")
                section = self.computations[name] = []
                if line.startswith("ENTRY"):
                    self._entry = name
            elif line.isalpha():  # FileNames, FunctionNames, FileLocations, StackFrames
                table = self._tables[line] = [""]  # rows are numbered from 1
            elif line[:1].isdigit():
                table.append(line.partition(" ")[2])

    def visits(self) -> Iterator[Visit]:
        """Every instruction, once for each place that it is called from, in the program's order."""
        yield from self._visits(self._entry, Visit(Instruction("", "", "", (), "")))

    def _visits(self, computation: str, at: Visit) -> Iterator[Visit]:
        for instruction in self.computations[computation]:
            visit = dataclasses.replace(at, instruction=instruction)
            yield visit
            inside = dataclasses.replace(visit, callers=(*at.callers, instruction))
            if instruction.opcode == "while":
                trips = self._trip_count(instruction, at.callers)
                # The condition runs once more than the body.
                for name, count in (("condition", trips and trips + 1), ("body", trips)):
                    loop = dataclasses.replace(inside, trip_counts=(*at.trip_counts, count))
                    for called in _names(instruction, name):
                        yield from self._visits(called, loop)
            elif instruction.opcode == "conditional":
                branch = dataclasses.replace(inside, conditional=True)
                attributes = ("branch_computations", "true_computation", "false_computation")
                for called in _names(instruction, *attributes):
                    yield from self._visits(called, branch)
            elif not instruction.opcode.endswith(
                ("-update", "-done")
            ):  # they name what was started
                # `to_apply` of others is what they reduce or sort by.
                attributes = ("calls", "to_apply") if instruction.opcode == "call" else ("calls",)
                for called in _names(instruction, *attributes):
                    yield from self._visits(called, inside)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of a fusion; empty for other instructions."""
        is_fusion = instruction.opcode in ("fusion", "fusion-start")
        called = _names(instruction, "calls") if is_fusion else []
        return [each for name in called for each in self.computations[name]]

    def slices(self, instruction: Instruction) -> bool:
        """Whether it is a fusion whose result is a slice."""
        called = _names(instruction, "calls") if instruction.opcode == "fusion" else []
        return any(self._named[self._roots[name]].opcode == "dynamic-slice" for name in called)

    def is_start(self, instruction: Instruction) -> bool:
        """Whether an instruction only starts what another one ends, such as a transfer."""
        return instruction.opcode.endswith(("-start", "send")) or bool(
            self._chains(instruction, "Start")
        )

    def until_done(self, start: Instruction) -> Iterator[Instruction]:
        """The instructions that run between what starts something and what ends it.

        An end names its start, and so does what the two have between them (`async-update`). The TPU's compiler
        also makes chains of fusions: `AsyncCollectiveStart` is in the first and `AsyncCollectiveDone` in the last;
        those between do a part of the transfer beside a matmul. All repeat the collective, with the `chain_id`.
        """
        section, chains = self._homes[start.name], self._chains(start, "Start")
        names = {start.name}
        for each in section[section.index(start) + 1 :]:
            if names.intersection(each.operands):
                names.add(each.name)
                if each.opcode.endswith("-done"):
                    return
            if chains & self._chains(each, "Done"):
                return
            yield each

    def _chains(self, fusion: Instruction, part: str) -> set[str]:
        """The chain of asynchronous fusions that a fusion is the start or the end of; mostly none."""
        attributes = " ".join(each.attributes for each in self.fused(fusion))
        is_part = f'"AsyncCollective{part}"' in attributes
        return set(re.findall(r'chain_id="\d+"', attributes)) if is_part else set()

    def works(self, instruction: Instruction) -> bool:
        """Whether an instruction computes or moves an array: no view of one, no transfer, no single number."""
        if instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            return target is None or target[1] not in _VIEWS
        inside = self.fused(instruction) or [instruction]
        sizes = [math.prod(dims) for _, dims in arrays(instruction.shape)]
        return any(not _IDLE.fullmatch(each.opcode) for each in inside) and (
            max(sizes, default=0) > 1 or any(each.opcode == "reduce" for each in inside)
        )

    def _trip_count(self, loop: Instruction, callers: tuple[Instruction, ...]) -> int | None:
        """How often a `while` runs its body; None if that depends on data.

        XLA's CPU and GPU compilers have written it down. Otherwise the condition compares an element of the
        loop's state with a constant, and the body adds a constant to it.
        """
        if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(found[1])
        inside = (*callers, loop)
        [condition] = _names(loop, "condition")
        test, around, _ = self._origin(self._roots[condition], inside)
        direction = re.search(r"direction=(\w+)", test.attributes)
        if test.opcode != "compare" or direction is None:
            return None
        counter, of_loop, index = self._origin(test.operands[0], around)
        end = self._number(test.operands[1], around)
        if counter.opcode != "parameter" or of_loop != inside or index is None:
            return None
        start, step = self._number(loop.operands[0], callers, index), self._step(inside, index)
        if None in (start, end) or not step or (step > 0) != direction[1].startswith("L"):
            return None
        assert start is not None
        assert end is not None
        inclusive = direction[1] in ("LE", "GE")
        return len(range(start, end + inclusive * (1 if step > 0 else -1), step))

    def _step(self, callers: tuple[Instruction, ...], index: int) -> int | None:
        """What a turn of the innermost loop adds to an element of its state; None if that is not constant."""
        [body] = _names(callers[-1], "body")
        end, around, place = self._origin(self._roots[body], callers, index)
        if end.opcode == "parameter":
            return 0 if (around, place) == (callers, index) else None
        if end.opcode == "add":
            for one, other in (end.operands, end.operands[::-1]):
                element, of_loop, place = self._origin(one, around)
                if (element.opcode, of_loop, place) == ("parameter", callers, index):
                    return self._number(other, around)
        return None

    def _number(
        self, name: str, callers: tuple[Instruction, ...], index: int | None = None
    ) -> int | None:
        """The whole number that a value is, or an element of it, whatever the data; None if it is none."""
        origin, around, index = self._origin(name, callers, index)
        if origin.opcode == "constant" and re.fullmatch(r"-?\d+", origin.operands[0]):
            return int(origin.operands[0])
        is_state = origin.opcode == "parameter" and index is not None
        if is_state and around and around[-1].opcode == "while" and self._step(around, index) == 0:
            return self._number(around[-1].operands[0], around[:-1], index)
        return None

    def _origin(
        self, name: str, callers: tuple[Instruction, ...], index: int | None = None
    ) -> tuple[Instruction, tuple[Instruction, ...], int | None]:
        """What makes a value, or an element of it if it is a tuple: behind copies, tuples and fusions.

        Args:
          callers: those of the instruction `name`.
        Returns:
          The instruction, its callers, and which element of it; a loop's state is the parameter of its body.
        """
        each, outer = self._named[name], callers[-1] if callers else None
        if each.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            return self._origin(each.operands[0], callers, index)
        if each.opcode in ("fusion", "call"):
            [called] = _names(each, "calls", "to_apply")
            return self._origin(self._roots[called], (*callers, each), index)
        if each.opcode == "parameter" and outer and outer.opcode in ("fusion", "call"):
            return self._origin(outer.operands[int(each.operands[0])], callers[:-1], index)
        if each.opcode == "get-tuple-element" and index is None:
            place = int(each.attributes.partition("index=")[2].partition(",")[0])
            return self._origin(each.operands[0], callers, place)
        if each.opcode == "tuple" and index is not None:
            return self._origin(each.operands[index], callers)
        return each, callers, index

    def source(self, instruction: Instruction) -> str:
        """The line of Python that an instruction comes from, such as lstm.py:84; "" if it is unknown."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if not found or not int(found[1]):
            return ""
        location = self._row("StackFrames", int(found[1]))["file_location_id"]
        place = self._row("FileLocations", location)
        file = self._tables["FileNames"][place["file_name_id"]].strip('"')
        return f"{file.rpartition('/')[2]}:{place['line']}"

    def _row(self, table: str, number: int) -> dict[str, int]:
        return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", self._tables[table][number])}


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array in the text of a shape: f32[8,4]{1,0}, or a tuple of them."""
    return [
        (dtype, tuple(int(n) for n in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    ]


def elements_of_tuple(shape: str) -> list[str]:
    """The outermost elements of the text of a tuple's shape."""
    without_layouts = re.sub(r"\{[^{}]*\}", "", shape)
    return re.findall(r"\([^()]*\)|\w+\[[^\]]*\]", without_layouts[1:-1])


def bits(dtype: str) -> int:
    """Bits of an element: 32 for f32, 16 for bf16, 8 for pred; 0 for a token."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8 * (dtype == "pred")


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
        return [tuple(range(num_partitions))]
    if found := re.search(r'(?:_pairs|replica_groups)="?\{((?:\{[\d, ]*\},? ?)*)\}', attributes):
        return [tuple(_numbers(group)) for group in re.findall(r"\{([^}]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?),? ", attributes + " "):
        shape, order = _numbers(found[1]), _iota(found[2])
        return [tuple(group) for group in order.reshape(shape).tolist()]
    found = re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? *\{(.*?)\}", attributes
    )
    if found is None:
        raise ValueError(f"cannot read the groups of a collective: {attributes[:300]}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    ids = _iota(found[2]) if found[2] else np.arange(math.prod(sizes.values()))
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])
    shape, joined = [], []
    for name, size in sizes.items():
        own = [(int(outer or 1), int(n or size)) for axis, outer, n in parts if axis == name]
        ends = {end for outer, n in own for end in (outer, outer * n)}
        for start, end in itertools.pairwise(sorted({1, *ends, size})):
            if any(outer <= start < outer * n for outer, n in own):
                joined.append(len(shape))
            shape.append(end // start)
    ids = np.moveaxis(ids.reshape(shape), joined, range(-len(joined), 0))
    members = math.prod(shape[dim] for dim in joined)
    return [tuple(group) for group in ids.reshape(-1, members).tolist()]


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


def _instruction(line: str) -> Instruction | None:
    name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[end:].strip().partition("(")
    operands = rest[end:].strip()[len(opcode) :]
    end_of_operands = _closing(operands)
    names = re.sub(r"/\*.*?\*/|%", "", operands[1 : end_of_operands - 1]).split(", ")
    attributes = operands[end_of_operands:]
    return Instruction(name.lstrip("%"), rest[:end], opcode, tuple(names), attributes)


def _closing(text: str) -> int:
    """The position after the parenthesis that closes the one that `text` begins with."""
    depth = 0
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _names(instruction: Instruction, *attributes: str) -> list[str]:
    """The computations that some attributes name."""
    pattern = rf"\b(?:{'|'.join(attributes)})=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))"
    found = re.findall(pattern, instruction.attributes)
    return [name for names in found for name in re.findall(r"[\w.\-]+", " ".join(names))]
