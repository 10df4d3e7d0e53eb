"""The initial values of a user's model: one program, split by the variables of each block.

So no device draws all blocks, and the values are those of the plain model of the same seed. Blocks whose
programs differ in numbers alone, such as the counts of a random stream, are drawn by one program. So compile
time does not grow with the number of blocks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Var

from jaxpar.base.types import ArrayLike, Atom, Leaves, Module
from jaxpar.model.tracing import Maker, made, module_of
from jaxpar.sharding import named_leaves
from jaxpar.trace.counts import FACTORIZATIONS
from jaxpar.trace.described import Descriptions
from jaxpar.trace.jaxprs import (
    equations_for,
    equations_in,
    function_of,
    made_with,
    program_of,
    reads_of,
)


class _Block(NamedTuple):
    """How a block is drawn.

    Attributes:
      draw: a function of a key and numbers.
      numbers: these.
      description: equal for blocks that are drawn by one function.
      factorizes: whether LAPACK draws it.
    """

    draw: Callable[..., Leaves]
    numbers: list[np.ndarray]
    description: int
    factorizes: bool


class Drawing:
    """The program of `make_model`, in parts."""

    def __init__(self, what: str, make: Maker):
        """Traces it.

        Args:
          what: the model is, in messages.
        Raises:
          ValueError: `make_model` makes something else when it is called again.
        """
        model, self._closed = module_of(what, lambda key: _with_data(made(make, key)))
        self._parts = nnx.split(model)
        jaxpr = self._closed.jaxpr
        names = [name for name, _ in named_leaves(self._parts[1])]
        self._outs_by_name = dict(zip(names, jaxpr.outvars, strict=True))
        self._drawn = made_with(jaxpr, jaxpr.invars)
        # Numbers that are known without the key, such as counts.
        made_here = (v for eqn in jaxpr.eqns for v in eqn.outvars)
        self._known = {v for v in made_here if v not in self._drawn and not v.aval.shape}
        self._blocks, self._descriptions = dict[tuple[str, ...], _Block](), Descriptions()

    @property
    def model(self) -> Module:
        """Of shapes; another one each time."""
        return nnx.merge(*self._parts)

    def constants(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """The values of variables that are made without drawing.

        Raises:
          ValueError: one is drawn.
        """
        outs = self._outs(names)
        for name, v in zip(names, outs, strict=True):
            if isinstance(v, Var) and v in self._drawn:
                raise ValueError(
                    f"{name} is random but not an nnx.Param, so it would become a constant.\n"
                    f"Fix: write nnx.Param(...), and exclude it from training with `frozen`."
                )
        return dict(zip(names, self._values(outs), strict=True))

    def block(self, names: Sequence[str], key: jax.Array) -> Leaves:
        """The values of these variables."""
        found = self._of(names)
        return found.draw(key, *found.numbers)

    def stacked(self, blocks: Sequence[Sequence[str]], key: jax.Array) -> Leaves:
        """Those of several blocks that have variables of the same shapes, stacked."""
        found = [self._of(names) for names in blocks]
        if len({each.description for each in found}) > 1:
            drawn = (self.block(names, key) for names in blocks)
            return [jnp.stack(rows) for rows in zip(*drawn, strict=True)]
        numbers = [np.stack(own) for own in zip(*(each.numbers for each in found), strict=True)]
        if not numbers:
            return [jnp.stack([a] * len(blocks)) for a in self.block(blocks[0], key)]

        def draw(own: Sequence[ArrayLike]) -> Leaves:
            return found[0].draw(key, *own)

        # LAPACK's draw one by one: see `model.stack`.
        return jax.lax.map(draw, numbers) if found[0].factorizes else jax.vmap(draw)(numbers)

    def _outs(self, names: Sequence[str]) -> list[Atom]:
        return [self._outs_by_name[name] for name in names]

    def _values(self, outs: Sequence[Atom]) -> list[np.ndarray]:
        jaxpr = self._closed.jaxpr
        with jax.ensure_compile_time_eval():
            eqns = equations_for(jaxpr.eqns, outs)
            return [*map(np.asarray, function_of(jaxpr, [], eqns, outs, self._closed.consts)())]

    def _of(self, names: Sequence[str]) -> _Block:
        if (key := tuple(names)) not in self._blocks:
            jaxpr, outs = self._closed.jaxpr, self._outs(names)
            eqns = equations_for(jaxpr.eqns, outs, self._known)
            reads = reads_of(eqns, outs)
            numbers = [v for v in reads if v in self._known]
            inputs = [*jaxpr.invars, *numbers]
            pairs = zip(jaxpr.constvars, self._closed.consts, strict=True)
            consts = {v: const for v, const in pairs if v in reads}
            program = program_of(jaxpr, inputs, eqns, outs).replace(constvars=[*consts])
            closed = ClosedJaxpr(program, [*consts.values()])
            description = self._descriptions.of_program(closed, is_differentiated=False)
            primitives = (eqn.primitive.name for eqn in equations_in(program))
            factorizes = any(name.startswith(FACTORIZATIONS) for name in primitives)
            draw = function_of(jaxpr, inputs, eqns, outs, self._closed.consts)
            self._blocks[key] = _Block(draw, self._values(numbers), description, factorizes)
        return self._blocks[key]


def _with_data(model: Module) -> Module:
    """A model with its plain arrays as leaves: Flax takes an attribute that is an array as static."""
    for _, node in [*nnx.iter_graph(model)]:
        for name, value in [*vars(node).items()] if isinstance(node, nnx.Pytree) else ():
            is_node = isinstance(value, nnx.Pytree | nnx.Variable)
            leaves = [] if is_node or name.startswith("_pytree__") else jax.tree.leaves(value)
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
                setattr(node, name, nnx.data(jax.tree.map(jnp.asarray, value)))
    return model
