"""A function and its backward pass as two programs; as little as possible goes from the one to the other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var

from jaxpar.trace.jaxprs import equations_for, function_of, least_kept, reads_of


class Source(NamedTuple):
    """Where a value is: among arguments, results, what is fixed or kept; and its number there."""

    of: str
    number: int


@jax.tree_util.register_static
class Tape:
    """A function of arrays, and its backward pass.

    Attributes:
      sources: where the values are that the backward pass takes.
      used: where those are that it or what follows takes, apart from what is fixed.
      kept_for_vjp: numbers of those that are kept for the backward pass alone.
    """

    def __init__(
        self,
        function: Callable[..., tuple[list[Any], Any, Any]],
        arguments: Sequence[Any],
        fixed: Sequence[Any],
        *,
        free: Iterable[int],
        busy: Iterable[int] = (),
    ):
        """Traces the function.

        Args:
          function: gives results, the function of its backward pass as `jax.vjp` does, and a tree of values
            that are wanted afterwards, too.
          fixed: values that it closes over, and that will be there.
          free: numbers of the arguments that will be there.
          busy: those of the results that will not.
        """
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        jaxpr, (outs, self._vjp, self._wanted) = closed.jaxpr, map(jax.tree.structure, shapes)
        ends = outs.num_leaves, outs.num_leaves + self._vjp.num_leaves
        self._outs, leaves = jaxpr.outvars[: ends[0]], jaxpr.outvars[ends[0] : ends[1]]
        self._extra = jaxpr.outvars[ends[1] :]
        where = {id(value): number for number, value in enumerate(fixed)}
        assert all(id(const) in where for const in closed.consts), "what is closed over is fixed"
        self._fixed = [where[id(const)] for const in closed.consts]
        self._jaxpr = jaxpr
        there = {v: Source("fixed", n) for v, n in zip(jaxpr.constvars, self._fixed, strict=True)}
        there |= {jaxpr.invars[n]: Source("argument", n) for n in free}
        results = [n for n in range(ends[0]) if n not in {*busy}]
        for n in results:
            if isinstance(v := self._outs[n], Var):
                there.setdefault(v, Source("result", n))
        must = [v for v in dict.fromkeys(self._extra) if v not in there]
        self.kept = must + least_kept(jaxpr, leaves, {*there, *must})
        there |= {v: Source("kept", n) for n, v in enumerate(self.kept)}
        self.kept_for_vjp = {n for n, v in enumerate(self.kept) if v not in {*self._extra}}
        self._there = there
        needed = equations_for(jaxpr.eqns, leaves, {*there})
        reads = [v for v in reads_of(needed, leaves) if v in there]
        self._remake = function_of(jaxpr, reads, needed, leaves)
        self.sources = [there[v] for v in reads]
        used = dict.fromkeys([*self.sources, *(there[v] for v in self._extra)])
        self.used = [source for source in used if source.of != "fixed"]

    def run(self, arguments: Sequence[Any], fixed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results, and what is to be kept."""
        jaxpr, outs = self._jaxpr, [*self._outs, *self.kept]
        invars, eqns = [*jaxpr.constvars, *jaxpr.invars], equations_for(jaxpr.eqns, outs)
        consts = [fixed[n] for n in self._fixed]
        found = function_of(jaxpr, invars, eqns, outs)(*consts, *arguments)
        return found[: len(self._outs)], found[len(self._outs) :]

    def values(
        self, arguments: Sequence[Any], results: Sequence[Any], kept: Sequence[Any]
    ) -> list[Any]:
        """Those that are used, in their order."""
        groups = {"argument": arguments, "result": results, "kept": kept}
        return [groups[source.of][source.number] for source in self.used]

    def by_source(self, values: Sequence[Any], fixed: Sequence[Any]) -> dict[Source, Any]:
        """All that is there for the backward pass; `values` as `values` gives them."""
        there = {Source("fixed", n): value for n, value in enumerate(fixed)}
        return there | dict(zip(self.used, values, strict=True))

    def vjp(self, values: dict[Source, Any]) -> Any:
        """The function of the backward pass."""
        leaves = self._remake(*(values[source] for source in self.sources))
        return jax.tree.unflatten(self._vjp, leaves)

    def wanted(self, values: dict[Source, Any]) -> Any:
        """The tree of values that are wanted."""
        return jax.tree.unflatten(self._wanted, [values[self._there[v]] for v in self._extra])
