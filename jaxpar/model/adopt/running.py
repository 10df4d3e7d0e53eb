"""Runs a part of a user's program on a block of rows and time steps.

Random numbers: keys of random streams are inputs of a program. What depends on keys alone, such as the mask
of a dropout, is drawn for each row by itself. Its key is of the seed, the step, the layer and the row, and in
a model cut along time of the time step. So masks are the same on any mesh, with any microbatches. Where rows
are not the first dim of what is drawn, the whole part runs row by row, by `jax.vmap`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxpar.base.at import LayerContext
from jaxpar.base.checks import require
from jaxpar.base.keys import new_key
from jaxpar.base.trees import has_time
from jaxpar.base.types import Batch, Index, Leaves, Module, Tree
from jaxpar.model.adopt.cut_model import CutModel, sizes_of
from jaxpar.model.adopt.marks import block_p, outer_p
from jaxpar.model.adopt.program import Part
from jaxpar.trace import varying
from jaxpar.trace.draws import Drawn
from jaxpar.trace.jaxprs import aval_of, cut


class Place(NamedTuple):
    """Which part of which program runs, and on what.

    Attributes:
      what: "loss" or "predict".
      part: "first", "last", or the number of a layer.
      params: of the part, in the order of their names.
      modules: outside of the blocks by name, which are called as they are.
    """

    model: CutModel
    what: str
    part: int | str
    params: Leaves
    modules: Mapping[str, Module]

    @property
    def words(self) -> str:
        """What it is called."""
        ends = {"first": "the part before the blocks", "last": "the part after the blocks"}
        return f"{ends.get(str(self.part), f'block {self.part}')} of the model {self.model.name}"

    @property
    def number(self) -> int:
        """The block that it is of; -1 of none."""
        return self.part if isinstance(self.part, int) else -1


def run_part(place: Place, carry: Leaves, x: Sequence[jax.Array], at: LayerContext) -> Tree:
    """What a part gives: the next x and the carry after it; or what the user's code returns."""
    trains, model = at.key is not None, place.model

    def swapped(a: jax.Array, timed: bool = True) -> jax.Array:
        is_swapped = at.time_major and timed and jnp.ndim(a) > 1
        return a.swapaxes(0, 1) if is_swapped else jnp.asarray(a)

    batch, x = jax.tree.map(swapped, at.batch, has_time(at.batch)), [*map(swapped, x)]
    program = model.program(place.what, batch, trains=trains)
    part = program.part(place.part)
    before = program.xs[-1 if place.part == "last" else place.number] if x else []
    require(
        [aval_of(v).shape for v in before] == [a.shape for a in x],
        f"the input of {place.words} has other shapes for {sizes_of(batch)[0]} rows "
        f"than for a batch.\nFix: give arrays between blocks a first dim of rows, or none.",
    )
    others = [*carry, *x, *jax.tree.leaves(batch)]
    require(
        trains or not part.keys,
        f"{place.words} draws random numbers in evaluation.\n"
        f"Fix: draw only in training, as nnx.Dropout does by its attribute deterministic.",
    )
    if not part.keys:
        out = _run(place, part.closed, others, _keys(place, at))
    elif drawn := model.drawn(place.what, place.part, batch):
        out = _run_drawn(place, part, drawn, others, at)
    else:
        out = _run_by_rows(place, carry, x, batch, at)
    if place.part == "last":
        return jax.tree.unflatten(jax.tree.structure(program.out), out)
    out, after = cut(out, len(out) - len(part.carries))
    return tuple(map(swapped, out)), tuple(after)


def _run(place: Place, closed: ClosedJaxpr, others: Leaves, keys: Leaves) -> Leaves:
    """A program of parameters, keys, and other inputs."""
    modules = (
        place.modules
    )  # not all of it: JAX may keep the function below, and the parameters with it

    def call_module(
        eqn: JaxprEqn, values: Leaves, run_program: varying.RunProgram
    ) -> Sequence[jax.Array]:
        module, call = modules.get(eqn.params["name"]), eqn.params["call"]
        if module is None:
            return varying.call(eqn, values, run_program)
        return [call(module, values[len(values) - len(call.places) :])]

    rules = {block_p.name: varying.call, outer_p.name: call_module}
    return varying.run(closed, [*place.params, *keys, *others], rules)


def _keys(place: Place, at: LayerContext, *places: Index) -> Leaves:
    """The keys that a part is given, for a row and maybe a time step.

    What is outside of the blocks has the same keys in all parts: what two of them compute is the same.
    """
    owners, keys = place.model.variables.key_owners, list[jax.Array]()
    key = new_key(0) if at.key is None else at.key
    for number in (place.number, -1) if place.number >= 0 else (-1,):
        layer = at.layer if number >= 0 else len(place.model.variables.places)
        own = functools.reduce(jax.random.fold_in, (layer, *places), key)
        keys += [jax.random.fold_in(own, n) for n in range(owners.count(number))]
    return keys


def _run_drawn(place: Place, part: Part, drawn: Drawn, others: Leaves, at: LayerContext) -> Leaves:
    """A part with what is drawn for it, row by row."""

    def keys_of(*places: Index) -> Leaves:
        keys = _keys(place, at, *places)
        return [keys[n - len(place.params)] for n in part.keys]

    values = drawn.values(keys_of, (at.row, at.time)[: len(drawn.sizes)])
    return _run(place, drawn.rest, [*others, *values], _keys(place, at))


def _run_by_rows(place: Place, carry: Leaves, x: Leaves, batch: Batch, at: LayerContext) -> Leaves:
    """Each row by itself, with keys of its own."""
    model, is_last = place.model, place.part == "last"
    has_rows = model.x_rows[-1 if is_last else place.number] if x else []
    leaves, tree = jax.tree.flatten(batch)
    dims = [0 if jnp.ndim(a) else None for a in leaves]
    dims_of_x = [0 if has else None for has in has_rows]

    def one(carry: Leaves, x: Leaves, leaves: Leaves, row: Index) -> Leaves:
        leaves = [a if dim is None else a[None] for a, dim in zip(leaves, dims, strict=True)]
        x = [a if dim is None else a[None] for a, dim in zip(x, dims_of_x, strict=True)]
        batch = jax.tree.unflatten(tree, leaves)
        part = model.program(place.what, batch, trains=True).part(place.part)
        out = _run(
            place, part.closed, [*(a[None] for a in carry), *x, *leaves], _keys(place, at, row)
        )
        if is_last:
            return out
        after = [*model.x_rows[place.number + 1], *[True] * len(carry)]
        return [a[0] if has else a for a, has in zip(out, after, strict=True)]

    rows = at.row + jnp.arange(sizes_of(batch)[0])
    if is_last:
        each = jax.vmap(one, (0, dims_of_x, dims, 0))(carry, x, leaves, rows)
        return [jnp.sum(a, axis=0) for a in each]
    of_x = [0 if has else None for has in model.x_rows[place.number + 1]]
    return jax.vmap(one, (0, dims_of_x, dims, 0), [*of_x, *[0] * len(carry)])(
        carry, x, leaves, rows
    )
