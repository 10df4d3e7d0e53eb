"""A forward pass and its backward pass as two programs that exchange as little as possible.

JAX keeps what its rules of differentiation name, such as both factors of every product. Where they follow by
simple arithmetic from fewer arrays, those are kept, and the arithmetic is done again: of a GRU or a GELU less
than half as many. What follows from weights alone (a cast kernel) or from nothing (the zeros of a relu) is
always made again.
"""

import math
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Var

from jaxpar.base.types import Arrays, Atom, Function, Leaves, Params
from jaxpar.trace.jaxprs import (
    Condition,
    cut,
    equations_for,
    function_of,
    inlined,
    is_cheap,
    made_with,
    reads_of,
    varying_of,
)


class Source(NamedTuple):
    """Where a value is: among weights, arguments, results or what is kept; and its number there."""

    of: str
    number: int


@jax.tree_util.register_static
class Residuals:
    """A forward pass, traced once, and how the residuals of its backward pass are made again.

    Attributes:
      program: of the forward pass.
      kept: the variables that are kept.
      kept_for_vjp: numbers of those that are kept for the backward pass alone.
      sources: where the values are that the backward pass takes, apart from weights.
      used: where those are that it takes, or what follows.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Arrays, Function, Arrays]],
        weights: Params,
        *arguments: Arrays,
        free: Iterable[int] = (),
        results: Iterable[int] = (),
    ):
        """Traces it; nothing is computed.

        Args:
          forward: gives of (weights, *arguments) the results, the function of its backward pass as `jax.vjp`
            does, and a tree of values that are wanted afterwards, too.
          weights: what will be there for the backward pass, with all that follows from it.
          free: numbers of the arguments' arrays that will be there as well.
          results: numbers of the results' arrays that will.
        """
        structures = tuple[Any, ...]()

        def run(*args: Arrays) -> Leaves:
            # Not the trees: JAX keeps those of results, and that of a backward pass holds its program.
            nonlocal structures
            trees = forward(*args)
            structures = tuple(map(jax.tree.structure, trees))
            return jax.tree.leaves(trees)

        closed = jax.make_jaxpr(run)(weights, *arguments)
        whole = inlined(closed)
        self.program, self._consts = jaxpr, _ = whole.jaxpr, whole.consts
        self._structures = structures
        sizes = [structure.num_leaves for structure in structures[:2]]
        self._outs, leaves, self._wanted = cut(jaxpr.outvars, *sizes)
        own, given = cut(jaxpr.invars, len(jax.tree.leaves(weights)))
        there = {v: Source("weight", n) for n, v in enumerate(own)}
        there |= {given[n]: Source("argument", n) for n in free}
        for n in results:
            if isinstance(v := self._outs[n], Var):
                there.setdefault(v, Source("result", n))
        must = [v for v in dict.fromkeys(self._wanted) if v not in there]
        others = made_with(jaxpr, (*given, *jaxpr.constvars))
        alone = {v for eqn in jaxpr.eqns for v in eqn.outvars if v not in others}
        varying = {varying_of(v) for v in self._outs if isinstance(v, Var)}

        def again(eqn):  # among values of one type, that of what is kept
            names = "pcast", "pvary"
            is_plain = is_cheap(eqn) and eqn.primitive.name not in names
            return is_plain and varying == {varying_of(v) for v in eqn.outvars}

        self.kept = must + _least_kept(jaxpr, leaves, {*there, *must, *alone}, again)
        there |= {v: Source("kept", n) for n, v in enumerate(self.kept)}
        self.kept_for_vjp = {n for n, v in enumerate(self.kept) if v not in {*self._wanted}}
        self._there = there
        eqns = equations_for(jaxpr.eqns, leaves, {*there})
        reads = [v for v in reads_of(eqns, leaves) if v in there]
        self._remake = function_of(jaxpr, reads, eqns, leaves)
        self._reads = [there[v] for v in reads]
        self.sources = [source for source in self._reads if source.of != "weight"]
        wanted = (there[v] for v in self._wanted)
        used = dict.fromkeys((*self.sources, *wanted))
        self.used = [source for source in used if source.of != "weight"]

    def run(self, weights: Params, *arguments: Arrays) -> tuple[Arrays, Leaves]:
        """The results, and what is kept."""
        jaxpr, outs = self.program, [*self._outs, *self.kept]
        eqns = equations_for(jaxpr.eqns, outs, effects=True)
        run = function_of(jaxpr, jaxpr.invars, eqns, outs, self._consts)
        out, kept = cut(run(*jax.tree.leaves((weights, arguments))), len(self._outs))
        return jax.tree.unflatten(self._structures[0], out), kept

    def values(self, arguments: Arrays, results: Arrays, kept: Leaves) -> Leaves:
        """Those that are used, in their order; of arrays."""
        groups = {"argument": arguments, "result": results, "kept": kept}
        return [groups[source.of][source.number] for source in self.used]

    def vjp(self, weights: Params, values: dict[Source, jax.Array]) -> Function:
        """The function of the backward pass."""
        values = _weights(weights) | values
        leaves = self._remake(*(values[source] for source in self._reads))
        return jax.tree.unflatten(self._structures[1], leaves)

    def wanted(self, weights: Params, values: dict[Source, jax.Array]) -> Arrays:
        """The tree of values that are wanted."""
        values = _weights(weights) | values
        leaves = [values[self._there[v]] for v in self._wanted]
        return jax.tree.unflatten(self._structures[2], leaves)


def _weights(weights: Params) -> dict[Source, jax.Array]:
    return {Source("weight", n): leaf for n, leaf in enumerate(jax.tree.leaves(weights))}


def _least_kept(
    jaxpr: Jaxpr, wanted: Iterable[Atom], there: Container[Var], by: Condition
) -> list[Var]:
    """Variables to keep, of few bytes, so that what is wanted can be made of them and of what is there.

    Those that are wanted, or what they are made of by such equations: whichever is less, for each group of
    them that have what they are made of in common.
    """
    made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def sources_of(name):
        seen, rest = set[Var](), [name]
        while rest:
            v = rest.pop()
            if not isinstance(v, Var) or v in seen or v in there:
                continue
            seen.add(v)
            eqn = made_by.get(v)
            if eqn is None or not by(eqn):
                yield v
            else:
                rest += eqn.invars

    def num_bytes(names):
        return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in names)

    groups = list[list[dict[Var, None]]]()  # wanted, and their sources
    for v in dict.fromkeys(v for v in wanted if isinstance(v, Var) and v not in there):
        joined = [{v: None}, dict.fromkeys(sources_of(v))]
        others = list[list[dict[Var, None]]]()
        for group in groups:
            if group[1].keys() & joined[1].keys():
                joined = [{**old, **new} for old, new in zip(group, joined, strict=True)]
            else:
                others.append(group)
        groups = [*others, joined]
    return [v for group in groups for v in min(group, key=num_bytes)]
