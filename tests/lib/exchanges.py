"""Which collectives of a compiled program XLA's CPU runtime may run in another order on each device."""

import re

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=(%[\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")


def pairs_without_order(text):
    """Pairs of names: one with collectives inside, and what has collectives and doesn't wait for it.

    Args:
      text: of a compiled and scheduled program.
    """
    computations = _computations(text)
    has_collectives = {}

    def is_one_of_many(name):
        if name not in has_collectives:
            has_collectives[name] = any(
                _is_collective(opcode) or any(map(is_one_of_many, called))
                for _, opcode, _, called in computations[name]
            )
        return has_collectives[name]

    pairs = []
    for instructions in computations.values():
        waits_for, branches = {}, []
        for name, opcode, operands, called in instructions:
            waits = {name}.union(*(waits_for.get(operand, ()) for operand in operands))
            waits_for[name] = waits
            is_branch = any(map(is_one_of_many, called))
            if is_branch or _is_collective(opcode):
                pairs += [(branch, name) for branch in branches if branch not in waits]
            if is_branch:
                branches.append(name)
    return pairs


def _is_collective(opcode):
    return opcode.removesuffix("-start") in COLLECTIVES


def _computations(text):
    """Of each computation its instructions: name, opcode, operands, and the computations that it calls."""
    computations, current = {}, None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[1], [])
        elif current is not None and (found := _INSTRUCTION.match(line)):
            name, opcode, rest = found.groups()
            end = _end_of_operands(rest)
            attributes = rest[end:].split("metadata=")[0]
            called = [n for each in _CALLED.findall(attributes) for n in _NAME.findall(str(each))]
            before = _CONTROL.search(attributes)
            operands = _NAME.findall(rest[:end]) + (_NAME.findall(before[1]) if before else [])
            current.append((name, opcode, operands, called))
    return computations


def _end_of_operands(rest):
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    raise AssertionError(f"no end of the operands: {rest}")
