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


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
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
      computations: name -> instructions.
    """

    def __init__(self, text: str):
        """Reads the text.

        Raises:
          ValueError: it is not the text of an HLO module.
        """
        self.computations: dict[str, list[Instruction]] = {}
        self._entry, self._tables = "", {}
        found = re.match(r"HloModule .*?(?:num_partitions=(\d+)|$)", text, re.MULTILINE)
        if found is None or "replica_count=" in found[0]:
            raise ValueError(
                f"this is not an HLO module of one replica: {text[:60]!r}; give what "
                f"`jax.jit(...).lower(...).compile().as_text()` says"
            )
        self.num_partitions = int(found[1] or 1)
        section: list[Instruction] | list[str] = []
        for line in text.splitlines()[1:]:
            if line.startswith("  "):
                if instruction := _instruction(line):
                    section.append(instruction)  # pyright: ignore[reportArgumentType]
            elif line.endswith("{"):
                name = line.removeprefix("ENTRY ").split(maxsplit=1)[0].lstrip("%")
                section = self.computations[name] = []
                if line.startswith("ENTRY"):
                    self._entry = name
            elif line.isalpha():  # FileNames, FunctionNames, FileLocations, StackFrames
                section = self._tables[line] = [""]  # rows are numbered from 1
            elif line[:1].isdigit():
                section.append(line.partition(" ")[2])  # pyright: ignore[reportArgumentType]

    def visits(self) -> Iterator[Visit]:
        """Every instruction, once for each place that it is called from, in the program's order."""
        yield from self._visits(self._entry, Visit(Instruction("", "", "", "")))

    def _visits(self, computation: str, at: Visit) -> Iterator[Visit]:
        for instruction in self.computations[computation]:
            visit = dataclasses.replace(at, instruction=instruction)
            yield visit
            inside = dataclasses.replace(visit, callers=(*at.callers, instruction))
            if instruction.opcode == "while":
                trips = trip_count(instruction)
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
            else:  # `to_apply` of others is what they reduce or sort by
                attributes = ("calls", "to_apply") if instruction.opcode == "call" else ("calls",)
                for called in _names(instruction, *attributes):
                    yield from self._visits(called, inside)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """The instructions of a fusion; empty for other instructions."""
        called = _names(instruction, "calls") if instruction.opcode == "fusion" else []
        return [each for name in called for each in self.computations[name]]

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


def trip_count(loop: Instruction) -> int | None:
    """How often a `while` runs its body; None if XLA did not know it when it compiled."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    return int(found[1]) if found else None


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dims) of every array in the text of a shape: f32[8,4]{1,0}, or a tuple of them."""
    return [
        (dtype, tuple(int(n) for n in re.findall(r"\d+", dims)))
        for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape)
    ]


def elements_of_tuple(shape: str) -> list[str]:
    """The outermost elements of the text of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for position, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if depth == (char == ",") and char in ",)":
            parts.append(shape[start:position])
            start = position + 1
    return parts


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
    return Instruction(name.lstrip("%"), rest[:end], opcode, operands[_closing(operands) :])


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
