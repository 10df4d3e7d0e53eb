r"""A user's program, traced with marks, and cut in front of every block.

    tokens --embed--> x0 --[block 0]--> x1 --[block 1]--> ... --[block 7]--> x8 --norm, head--> loss
       \--mask-------------^------------------^------------------^

What depends on what decides where an equation belongs:

    first     what depends on parameters and is needed in front of block 0: up to x0
    layer i   the equation of block i, and what stands between it and block i + 1: from x_i to x_(i+1)
    last      all that follows the last block

What depends on the batch alone, as a mask does, is in every part that needs it. What depends on parameters
outside of the blocks, as the embedding of a time step does, is part of each x. What x carries is found: it
may be several arrays, and others at each cut.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from jaxpar.base.checks import require
from jaxpar.base.types import Batch, Shapes, Tree
from jaxpar.model.adopt.marks import (
    Changes,
    block_p,
    has_marks,
    outer_p,
    tracing,
    without_changes,
)
from jaxpar.model.adopt.variables import Variables
from jaxpar.trace.jaxprs import (
    aval_of,
    cut,
    equations_for,
    inlined,
    is_call,
    is_float,
    program_of,
    reads_of,
)
from jaxpar.trace.source_lines import source_line_of_equation
from jaxpar.trace.varying import parts_of_scan

_CALL_ONCE = "call each block once, one after the other, in plain Python"


class Part(NamedTuple):
    """A part of a program: "first", a layer, or "last".

    Its inputs are parameters and keys of its own, keys of the rest, carries, x and the batch.

    Attributes:
      carries: the shapes of what a layer carries along time.
      keys: the places of keys among the inputs, of those that it reads.
    """

    closed: ClosedJaxpr
    carries: list[ShapedArray]
    keys: list[int]


class Program:
    """A function of a model and a batch, for batches of one shape.

    Attributes:
      xs: what each cut carries; the last one is given to `last`.
      out: the shapes that the function gives.
    """

    def __init__(
        self,
        model_name: str,
        run: Callable[..., tuple[Tree, Changes]],
        given: tuple[Shapes, Shapes, Batch],
        variables: Variables,
    ):
        """Traces it.

        Args:
          run: (parameters, keys, leaves of the batch) -> what the function gives, and what it changes.
          given: shapes of these.
          variables: of the model.
        Raises:
          ValueError: blocks are called in another way than one after the other.
        """
        self.variables, self.num = variables, len(variables.places)
        self._parts = dict[int | str, Part]()
        with tracing():
            closed, (self.out, changed) = jax.make_jaxpr(run, return_shape=True)(*given)
        closed = without_changes(f"the model {model_name}", closed, changed)
        closed = inlined(
            closed, is_call if variables.is_stacked else lambda e: is_call(e) and _has_calls(e)
        )
        self.params, self.keys, self.batch = cut(closed.jaxpr.invars, *map(len, given[:2]))
        if variables.is_stacked:
            closed, rows = _unrolled(closed, [*self.params, *self.keys], self.num)
            self.params, self.keys = (
                [row for v in own for row in rows.get(v, [v])] for own in (self.params, self.keys)
            )
            inputs = [*self.params, *self.keys, *self.batch]
            jaxpr = program_of(closed.jaxpr, inputs, closed.jaxpr.eqns, closed.jaxpr.outvars)
            closed = ClosedJaxpr(jaxpr, closed.consts)
        self.closed, self.outs = closed, closed.jaxpr.outvars
        self.eqns = equations_for(closed.jaxpr.eqns, self.outs)
        self.marks = _checked_marks(closed.jaxpr.eqns, self.eqns, self.num)
        self._find_stages()
        self.tail = set[int]()
        self.xs = [self._carried(number) for number in range(self.num)]
        self.first_outs = self.xs[0]
        if not self.xs[0]:
            self._carry_batch()
        if self.num > 1:
            self._find_tail()
        self.xs.append(self._carried(self.num))
        for number, x in enumerate(self.xs):
            self._check_floats(number, x)

    def _find_stages(self) -> None:
        """The last block that each equation depends on, and what depends on parameters outside of blocks."""
        owners = dict(zip(self.params, self.variables.owners, strict=True))
        self.of_params = {v for v, owner in owners.items() if owner < 0}
        self.stage, self.stages = dict[Var, int](), list[int]()
        for eqn in self.eqns:
            reads, is_block = reads_of([eqn]), eqn.primitive is block_p
            number = max((self.stage.get(v, -1) for v in reads), default=-1)
            number = eqn.params["number"] if is_block else number
            for v in reads:
                if owners.get(v, -1) not in (-1, number if is_block else -1):
                    name = self.variables.names[self.params.index(v)]
                    raise ValueError(
                        f"{name} is read outside of its block{_at(eqn)}, maybe on another device.\n"
                        f"Fix: read it in a method of the block, or move it out of the block."
                    )
            if not self.of_params.isdisjoint(reads):
                self.of_params.update(eqn.outvars)
            self.stage.update(dict.fromkeys(eqn.outvars, number))
            self.stages.append(number)

    def _in_layers(self, eqn: JaxprEqn, stage: int) -> bool:
        """Whether an equation of a stage belongs to a layer; after the last block, only the tail does."""
        is_after = stage == self.num - 1 and eqn.primitive is not block_p
        return stage >= 0 and (not is_after or id(eqn) in self.tail)

    def _carried(self, number: int) -> list[Var]:
        """What a cut in front of a block carries; for the number of blocks, what `last` is given."""
        pairs = list(zip(self.eqns, self.stages, strict=True))
        of_layers = [(eqn, stage) for eqn, stage in pairs if self._in_layers(eqn, stage)]
        made = {v for eqn, stage in of_layers if stage < number for v in eqn.outvars}
        # What `first` makes of parameters goes along to the last layer that needs it, so that every x has it,
        # if any layer but the first needs it.
        along = reads_of([eqn for eqn, stage in of_layers if stage > 0 or number == 0])
        along = [v for v in along if self.stage.get(v, -1) < 0 and v in self.of_params]
        later = [eqn for eqn, stage in pairs if stage >= number or not self._in_layers(eqn, stage)]
        return list(dict.fromkeys([*(v for v in reads_of(later, self.outs) if v in made), *along]))

    def _carry_batch(self) -> None:
        """Lets an array of the batch be x of blocks that are given the batch alone."""
        floats = [v for v in self.batch if is_float(v)]
        require(
            bool(floats),
            "block 0 receives only the batch, which has no floating-point arrays.\n"
            "Fix: keep the embedding out of the blocks, such as layers='net[1:]'.",
        )
        next_reads = self.marks[min(1, self.num - 1)].invars
        pairs = zip(self.marks[0].invars, next_reads, strict=False)
        found = (v for v, later in pairs if v in floats and v is not later)
        carried = next(found, max(floats, key=lambda v: aval_of(v).ndim))
        x = Var(carried.aval)
        for place, eqn in enumerate(self.eqns):
            if self.stages[place] == 0:
                reads = [x if v is carried else v for v in eqn.invars]
                self.eqns[place] = eqn.replace(invars=reads)
        self.marks = [eqn for eqn in self.eqns if eqn.primitive is block_p]
        self.xs[0], self.first_outs = [x], [carried]

    def _find_tail(self) -> None:
        """What follows the last block as it follows the one before, such as a residual connection."""
        there = {*self.xs[-2], *self.marks[-2].outvars}
        between = equations_for(self.eqns, self.xs[-1], there)
        between = [e for e in between if self.stage.get(e.outvars[0]) == self.num - 2]
        pairs = zip(self.eqns, self.stages, strict=True)
        after = [eqn for eqn, stage in pairs if stage == self.num - 1][1:]
        both = zip(between, after, strict=False)
        same = itertools.takewhile(lambda pair: pair[0].primitive is pair[1].primitive, both)
        self.tail = {id(eqn) for _, eqn in same}
        types = ([v.aval.str_short() for v in x] for x in (self._carried(self.num), self.xs[-1]))
        if next(types) != next(types):
            self.tail = set()

    def _check_floats(self, number: int, x: Sequence[Var]) -> None:
        for v in x:
            if not is_float(v):
                maker = next((eqn for eqn in self.eqns if v in eqn.outvars), None)
                to = f"block {number}" if number < self.num else "the part after the blocks"
                raise ValueError(
                    f"{v.aval.str_short()} goes to {to}{_at(maker)}, but only floating-point arrays can be "
                    f"passed between blocks.\n"
                    f"Fix: compute it in the block that needs it, or from the batch alone."
                )

    def part(self, number: int | str) -> Part:
        """A part by itself: "first", "last", or a layer by its number."""
        if number not in self._parts:
            self._parts[number] = self._make_part(number)
        return self._parts[number]

    def _make_part(self, number: int | str) -> Part:
        own = number if isinstance(number, int) else -1
        params = _of(own, self.params, self.variables.owners)
        keys = _of(own, self.keys, self.variables.key_owners)
        keys += _of(-1, self.keys, self.variables.key_owners) if own >= 0 else []
        eqns, carries, after = self.eqns, [], []
        if number == "first":
            x, outs = [], self.first_outs
        elif number == "last":
            x, outs = self.xs[-1], self.outs
        else:
            x, outs, mark = self.xs[own], self.xs[own + 1], self.marks[own]
            operands, starts = cut(mark.invars, len(mark.invars) - mark.params["num_carries"])
            carries = [Var(v.aval) for v in starts]
            new = mark.replace(invars=[*operands, *carries])
            eqns = [new if eqn is mark else eqn for eqn in eqns]
            after = new.outvars[len(new.outvars) - len(carries) :]
        eqns = equations_for(eqns, [*outs, *after], {*x})
        inputs = [*params, *keys, *carries, *x, *self.batch]
        reads = reads_of(eqns, outs)
        pairs = zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True)
        consts = {v: c for v, c in pairs if v in reads}
        jaxpr = program_of(self.closed.jaxpr, inputs, eqns, [*outs, *after])
        jaxpr = jaxpr.replace(constvars=[*consts])
        places = [len(params) + n for n, v in enumerate(keys) if v in reads]
        closed = ClosedJaxpr(jaxpr, [*consts.values()])
        return Part(closed, [*map(aval_of, carries)], places)


def _of(number: int, variables: Sequence[Var], owners: Sequence[int]) -> list[Var]:
    return [v for v, owner in zip(variables, owners, strict=True) if owner == number]


def _has_calls(eqn: JaxprEqn) -> bool:
    return has_marks(eqn, (block_p, outer_p))


def _unrolled(
    closed: ClosedJaxpr, given: Sequence[Var], num: int
) -> tuple[ClosedJaxpr, dict[Var, list[Var]]]:
    """A program with its loop over stacked blocks as `num` calls; and for each stacked input, its rows."""
    eqns, rows = list[JaxprEqn](), dict[Var, list[Var]]()
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        stacked = parts_of_scan(eqn, eqn.invars)[2] if eqn.primitive.name == "scan" else []
        if {*stacked}.isdisjoint(given) or eqn.params["length"] != num:
            eqns.append(eqn)
            continue
        body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        consts, carry, xs = parts_of_scan(eqn, eqn.invars)
        pairs = zip(xs, body.invars[len(body.invars) - len(xs) :], strict=True)
        rows = {v: [Var(own.aval) for _ in range(num)] for v, own in pairs}
        if not {*xs} <= {*given, *known}:
            raise ValueError(
                f"the loop over stacked blocks{_at(eqn)} also goes over other arrays.\n"
                f"Fix: pass them as attributes of the blocks, or as arguments that are equal for all blocks."
            )
        for v in known.keys() & rows.keys():
            known.update(zip(rows[v], known[v], strict=True))
        used_later = reads_of(closed.jaxpr.eqns, closed.jaxpr.outvars)
        if not used_later.keys().isdisjoint(eqn.outvars[len(carry) :]):
            raise ValueError(
                f"the loop over stacked blocks{_at(eqn)} returns an output of each block.\n"
                f"Fix: return only what the next block receives."
            )
        is_carry = [n < len(carry) for n in range(len(body.outvars))]
        body, used = dce_jaxpr(body, is_carry)
        for number in range(num):
            outs = [Var(v.aval) for v in carry] if number < num - 1 else eqn.outvars[: len(carry)]
            operands = [*consts, *carry, *(rows[v][number] for v in xs)]
            operands = [v for v, is_used in zip(operands, used, strict=True) if is_used]
            params = {"number": number, "jaxpr": body, "num_carries": 0}
            eqns.append(
                eqn.replace(primitive=block_p, invars=operands, outvars=outs, params=params)
            )
            carry = outs
    if not rows:
        raise ValueError(
            f"no nnx.scan runs over the {num} stacked blocks.\n"
            f"Fix: call them once, by nnx.scan; or name a list of blocks in layers, not one module."
        )
    jaxpr = closed.jaxpr.replace(eqns=eqns, constvars=[*known])
    return ClosedJaxpr(jaxpr, [*known.values()]), rows


def _checked_marks(
    all_eqns: Sequence[JaxprEqn], eqns: Sequence[JaxprEqn], num: int
) -> list[JaxprEqn]:
    """The calls of blocks, each once and in order.

    Raises:
      ValueError: they are not so.
    """
    for eqn in all_eqns:
        if eqn.primitive is not block_p and has_marks(eqn, (block_p,)):
            raise ValueError(
                f"a block is called within {eqn.primitive.name}{_at(eqn)}, a loop, branch or transformation "
                f"in the model.\nFix: {_CALL_ONCE}."
            )
    called = [eqn for eqn in all_eqns if eqn.primitive is block_p]
    numbers = [eqn.params["number"] for eqn in called]
    marks = [eqn for eqn in eqns if eqn.primitive is block_p]
    unused = {*range(num)} - {eqn.params["number"] for eqn in marks}
    if numbers == [*range(num)] and not unused:
        return marks
    wrong = f"the loss does not depend on blocks {sorted(unused)}"
    if numbers != [*range(num)]:
        wrong = f"blocks are called in the order {numbers}"
    if missing := {*range(num)} - {*numbers}:
        wrong = f"block {min(missing)} of {num} is never called"
    for place, number in reversed([*enumerate(numbers)]):
        if number in numbers[:place]:
            wrong = f"block {number} is called {numbers.count(number)} times{_at(called[place])}"
    raise ValueError(f"{wrong}.\nFix: {_CALL_ONCE}.")


def _at(eqn: JaxprEqn | None) -> str:
    line = source_line_of_equation(eqn) if eqn else ""
    return f" ({line})" if line else ""
