"""A user's model in the form that jaxpar runs: `first`, a stack of blocks, and `last`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.keys import new_key
from jaxpar.base.types import Activations, Batch, Carry, LayerOutput, Leaves, Outputs, Tree
from jaxpar.model.adopt.cut_model import CutModel
from jaxpar.model.adopt.running import Place, run_part
from jaxpar.model.adopt.variables import Holder, find_in
from jaxpar.model.model import Model, Sums, describe_value
from jaxpar.model.stack import NoPart, Stack
from jaxpar.model.tracing import Maker
from jaxpar.pipeline.placement import make_slots
from jaxpar.sharding import array_of


def adopted(model: CutModel, seed: int | jax.Array) -> Model:
    """The model in jaxpar's form, drawn of a seed or a key; the values are those of the user's model."""
    key = new_key(seed) if isinstance(seed, int) else seed
    with nnx.use_eager_sharding(False):
        return _class_of(model.name, predicts=model.predicts)(model, key)


@functools.cache
def _class_of(name: str, *, predicts: bool) -> Any:
    """A class with the name of the user's."""
    return type(name, (_Predicting if predicts else _Adopted,), {})


class Block(nnx.Module):
    """A block as a layer of a stack: its parameters, and how it is run."""

    def __init__(self, model: CutModel, kind: int, own: Holder):
        self.model, self.kind, self.own = model, kind, own

    def initial_carry(self, rows: int) -> Carry:
        """Zeros."""
        carries = self.model.carries[self.model.first_of[self.kind]]
        return tuple(jnp.zeros((rows, *own.shape[1:]), own.dtype) for own in carries)

    def __call__(self, carry: Carry, x: Activations, at: LayerContext) -> LayerOutput:
        """The block, and what stands between it and the next one."""
        number = self.model.first_of[self.kind]
        params = _values(self.own, self.model.variables.own(number))
        place = Place(self.model, "loss", number, params, {})
        x, after = run_part(place, [*carry], x, at)
        return after, x


class Blocks(Stack):
    """A stack of blocks."""

    def __init__(self, model: CutModel, key: jax.Array):
        self.model, self.unroll, self._source = model, 4, _Key(key)
        self.kind_of, self.kinds = model.kinds, model.kind_names
        self.slots = make_slots((len(model.kinds),), kind_of=model.kinds)
        self._draw()

    def maker(self, number: int) -> Maker:
        """What draws one block."""
        model = self.model

        def make(rngs: nnx.Rngs) -> Block:
            return Block(model, model.kinds[number], model.variables.block(number, rngs.params()))

        return make

    def draw_kind(self, kind: int, rows: Sequence[int]) -> Block:
        """As of `Stack`."""
        first, name = self.model.first_of[kind], self.kinds[kind]
        own = self.model.variables.stacked(name, first, rows, self._source.key)
        return Block(self.model, kind, own)


class _Key(NoPart):
    """What the blocks are drawn of."""

    def __init__(self, key: jax.Array):
        self.key = key


class _Adopted(Model):
    """A model of the user's."""

    def __init__(self, model: CutModel, key: jax.Array):
        self.model, self.time_major = model, model.time_major  # pyright: ignore[reportAttributeAccessIssue]
        self.outer, self.layers = model.variables.outer(key), Blocks(model, key)

    def first(self, batch: Batch, at: LayerContext) -> Activations:
        """What stands before the first block."""
        return run_part(self._place("loss", "first"), [], (), at._replace(batch=batch))[0]

    def last(self, y: Activations, batch: Batch, at: LayerContext) -> Sums:
        """What follows the last block, up to the loss."""
        return as_sums(run_part(self._place("loss", "last"), [], y, at._replace(batch=batch)))

    def _place(self, what: str, part: str) -> Place:
        model = self.model
        modules = {name: find_in(self.outer, name) for name in model.variables.held_modules}
        return Place(model, what, part, _values(self.outer, model.variables.own(-1)), modules)


class _Predicting(_Adopted):
    """A model of the user's that predicts."""

    def predict(self, y: Activations, batch: Batch, at: LayerContext) -> Outputs:
        """What the model's own call returns, or `predict` of the task."""
        out = run_part(self._place("predict", "last"), [], y, at._replace(batch=batch))
        out = out if isinstance(out, dict) else {"output": out}
        if not at.time_major:
            return out
        return jax.tree.map(lambda a: a.swapaxes(0, 1) if jnp.ndim(a) > 1 else a, out)


def _values(holder: Holder, own: dict[str, Tree]) -> Leaves:
    """The values of parameters; zeros for those that are shapes alone, which the part does not use."""
    values = (array_of(find_in(holder, name)) for name in own)
    is_shape = jax.ShapeDtypeStruct
    return [jnp.zeros(a.shape, a.dtype) if isinstance(a, is_shape) else a for a in values]


def as_sums(out: Tree) -> Sums:
    """What the user's loss returned.

    Raises:
      ValueError: it is neither `Sums` nor a pair.
    """
    if isinstance(out, Sums):
        return out
    if not isinstance(out, tuple) or len(out) != 2 or isinstance(out[1], dict):
        own = "a single number" if getattr(out, "shape", None) == () else describe_value(out)
        raise ValueError(
            f"the loss returns {own}; a mean of means would depend on the mesh.\n"
            f"Fix: return jaxpar.mean(losses, mask), or (sum of the losses, number of items)."
        )
    return Sums(*out)
