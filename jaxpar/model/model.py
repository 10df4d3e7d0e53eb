"""The protocol of a model: `first`, a stack of layers, and `last`.

    batch --first--> x --layer 0--> x --layer 1--> ... --last--> sums of loss, weight and metrics

A *layer* is a module `(carry, x, at) -> (carry, y)`. It takes its state, its inputs, and their place in the
computation (`LayerContext`). `Layer` and `Model` describe what each may define in addition.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.checks import require
from jaxpar.base.parts import check_keys
from jaxpar.base.trees import has_time
from jaxpar.base.types import Activations, Batch, Carry, Dims, Module, Number, Outputs, Tree, Value

# Variables that a call changes: a layer is run many times, in an order that the schedule decides.
_CHANGING = (nnx.RngState, nnx.BatchStat, nnx.Cache, nnx.Intermediate)


class Sums(NamedTuple):
    """Sums over a block, to be added over blocks: the loss of a step is `loss / weight`.

    Attributes:
      loss: float32 scalar, what is differentiated.
      weight: how much the block counts, such as its number of targets; float32 scalar. Compute it from the
        batch alone where you can: then its total is known before the backward pass.
      metrics: further sums by name; what is reported is `metrics / weight`. Names of other numbers of a run
        (`base.parts.NUMBERS`) are taken.

    Example:
      errors = jnp.array([0.5, 1.5])
      sums = jaxpar.Sums(jnp.sum(errors), jnp.float32(errors.size), {"worst": jnp.max(errors)})
    """

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array] = {}  # noqa: RUF012 - never changed

    @property
    def by_name(self) -> dict[str, Number]:
        """All of them."""
        return {"loss": self.loss, "weight": self.weight, **self.metrics}

    def with_names(self, names: Iterable[str]) -> "Sums":
        """With metrics of these names, 0 where there was none."""
        nothing = {name: jnp.zeros((), jnp.float32) for name in names}
        return self._replace(metrics={**nothing, **self.metrics})


def mean(losses: jax.Array, mask: jax.Array | None = None, **metrics: jax.Array) -> Sums:
    """The mean of losses, as sums that add up on every mesh: `jaxpar.mean(losses, batch["weight"])`.

    Args:
      losses: of items, an array of any shape.
      mask: how much each item counts; its dims are the first ones of the losses. None: each item counts once.
      metrics: further numbers of items, whose means are reported by these names.
    Raises:
      ValueError: the dims of the mask are not the first ones of the losses.

    Example:
      sums = jaxpar.mean(jnp.array([1.0, 3.0, 5.0]), mask=jnp.array([1.0, 1.0, 0.0]))
      print(sums.loss / sums.weight)  # 2.0
    """
    mask = jnp.ones((), jnp.float32) if mask is None else jnp.asarray(mask)
    require(
        mask.shape == jnp.shape(losses)[: mask.ndim],
        f"mask has shape {list(mask.shape)} for losses {list(jnp.shape(losses))}.\n"
        f"Fix: give a number for each item, or for each of its first dims.",
    )
    weight = mask.reshape(*mask.shape, *[1] * (jnp.ndim(losses) - mask.ndim))
    weight = jnp.broadcast_to(weight, jnp.shape(losses)).astype(jnp.float32)
    items = (jnp.asarray(own).astype(jnp.float32) for own in (losses, *metrics.values()))
    loss, *others = (jnp.sum(own * weight) for own in items)
    return Sums(loss, jnp.sum(weight), dict(zip(metrics, others, strict=True)))


def mean_loss(sums: Sums) -> jax.Array:
    """The loss of a step; where nothing counts, the sum."""
    return sums.loss / jnp.where(sums.weight == 0, 1.0, sums.weight)


def checked_sums(sums: Value, what: str) -> Sums:
    """What `last` of a model, or a layer, returned as sums, all of them as float32.

    Raises:
      ValueError: it is not a `Sums`, or has something that is not a single real number.
    """
    if not isinstance(sums, Sums) or not isinstance(sums.metrics, Mapping):
        raise ValueError(
            f"{what} returns {describe_value(sums)}.\n"
            "Fix: return jaxpar.Sums(loss, weight, metrics), of sums over the block, not means."
        )
    for key in sums.metrics:
        fact = f"{what} names a metric {key!r}, a {type(key).__name__}."
        require(isinstance(key, str), f"{fact}\nFix: use a string, such as {str(key)!r}.")
    for key, number in sums.by_name.items():
        if not isinstance(number, float | int | np.generic | jax.Array) or jnp.ndim(number):
            raise ValueError(
                f"{what} returns {describe_value(number)} as {key!r} of its Sums.\nFix: use jnp.sum({key})."
            )
        require(
            not jnp.iscomplexobj(number),
            f"{what} returns {jnp.result_type(number)} as {key!r} of its Sums.\n"
            f"Fix: use jnp.real({key}), or jnp.abs({key}).",
        )

    # Sums of fewer digits would not count far: of bfloat16, ones add up to 256.
    return jax.tree.map(lambda number: jnp.asarray(number).astype(jnp.float32), sums)


def checked_outputs(outputs: Outputs, model: str) -> dict[str, jax.Array]:
    """What `predict` of a model of this class name returned.

    Raises:
      ValueError: it is not arrays by name.
    """
    is_dict = isinstance(outputs, Mapping) and len(outputs) > 0
    found = [*outputs.values()] if is_dict else [outputs]
    wrong = [a for a in found if not (is_dict and isinstance(a, np.ndarray | jax.Array))]
    if wrong:
        raise ValueError(
            f"`predict` of {model} returns {describe_value(wrong[0])}{' in its dict' * is_dict}.\n"
            f"Fix: return a dict of arrays by name."
        )
    check_keys(outputs, f"`predict` of {model}")
    return {name: jnp.asarray(own) for name, own in outputs.items()}


def describe_value(value: Value) -> str:
    """What a function of the user's returned: "a list", "an array of shape [3]", "nothing"."""
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array of shape {list(value.shape)}"
    if isinstance(value, Sums):
        return f"a Sums whose metrics are a {type(value.metrics).__name__}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def check_variables(what: str, state: nnx.State) -> None:
    """Raises a ValueError for variables that calls change, going by their type, such as `nnx.BatchStat`."""
    for path, leaf in nnx.to_flat_state(state):
        if isinstance(leaf, _CHANGING):
            raise ValueError(
                f"{what} has {'.'.join(map(str, path))}, a {type(leaf).__name__}, which calls would change.\n"
                f"Fix: use jaxpar.nn.dropout(x, rate, at), or a norm over features, such as nnx.LayerNorm."
            )


class Layer(nnx.Module):
    """Protocol of a layer in a `Stack`. Derive from it, or write what you need in any `nnx.Module`.

    Attributes:
      kind_name: layers of one name, structure and shapes are one kind, whose parameters are stacked under it;
        None is the name of the class.
      carry_dims: names of the dims of each array of the carry, a tree as that, such as ("batch", "hidden"),
        so that rules can split it; None names the rows alone.
      whole_window: whether it reads all time steps at once, as attention does: chunks of time are refused.
      rows_together: how many neighbouring rows of the batch it may mix, as a norm by their statistics does:
        it is called for so many at a time, whatever the mesh and the microbatches. None: each row stands
        alone, and calls have any number of them.

    Example:
      class Residual(jaxpar.Layer):
        def __init__(self, size, rngs):
          self.inner = jaxpar.nn.Linear(size, size, dims=("input", "hidden"), rngs=rngs)

        def initial_carry(self, rows):
          return ()  # no state

        def __call__(self, carry, x, at):
          return carry, x + jnp.tanh(self.inner(x))

      layer = Residual(16, rngs)
    """

    kind_name: ClassVar[str | None] = None
    carry_dims: ClassVar[Dims] = None
    whole_window: ClassVar[bool] = False
    rows_together: ClassVar[int | None] = None

    def initial_carry(self, rows: int) -> Carry:
        """Initial recurrent state of a sequence: a tree of float arrays [rows, ...]; () for none."""
        return ()

    def __call__(self, carry: Carry, x: Activations, at: LayerContext) -> tuple[Any, ...]:
        """The layer over a block of time: (carry, y), or (carry, y, sums) if it adds to the loss.

        Args:
          carry: the state before the block, as `initial_carry`.
          x: a tree of float arrays, [time, rows, ...], or without time [rows, ...].
          at: where the block lies; `at.batch` is its part of the batch, whatever the layer.
        Returns:
          the state after the block, and y, which the next layer takes; maybe a `Sums` over the block's rows,
          of weight 0, which is added to those of `last`.
        """
        raise NotImplementedError


class Model(nnx.Module):
    """Protocol of a model. Derive from it, or write the methods you need in any `nnx.Module`.

    Attributes:
      layers: a `Stack`.
      time_major: blocks come as [time, rows, ...] (arrays [rows] of a batch as they are), and time can be cut
        into chunks. False is for a model without time: blocks come as [rows, ...].

    Example:
      class Regressor(jaxpar.Model):
        def __init__(self, rngs):
          self.layers = jaxpar.Stack([lambda rngs: jaxpar.nn.GRU(16, rngs=rngs)] * 4, rngs=rngs)
          self.out = jaxpar.nn.Linear(16, 1, dims=("hidden", None), rngs=rngs)

        def first(self, batch, at):
          return batch["x"]  # [time, rows, 16]

        def last(self, y, batch, at):
          return jaxpar.mean((self.out(y) - batch["y"]) ** 2)

      model = Regressor(rngs)
    """

    time_major: ClassVar[bool] = True
    layers: nnx.Module

    def first(self, batch: Batch, at: LayerContext) -> Activations:
        """Before the layers: a block of the batch -> x, a tree of float arrays."""
        raise NotImplementedError

    def last(self, y: Activations, batch: Batch, at: LayerContext) -> Sums:
        """After the layers: sums over the block."""
        raise NotImplementedError

    def predict(self, y: Activations, batch: Batch, at: LayerContext) -> dict[str, jax.Array]:
        """Optional: what is predicted for each row, by name; for `LoadedRun.predict`.

        Returns:
          arrays [time, rows, ...], or [rows, ...] without time.
        """
        raise NotImplementedError

    def draw(self, key: jax.Array) -> "Model":
        """Optional: the model with what is drawn once a step, of its parameters alone: dropped weights, say.

        Args:
          key: of the step; it is not called in evaluation.
        """
        raise NotImplementedError

    def prepare(self, sizes: Mapping[str, int]) -> "Model":
        """Optional: the model as a step that runs in units uses it.

        For work on its parameters that is needed once a step, not once a unit. What it makes of trained
        parameters must be an `nnx.Param`, or it would have no gradient.

        Args:
          sizes: of the mesh's axes.
        """
        raise NotImplementedError

    def last_part(self, y: Activations, batch: Batch, at: LayerContext) -> Sums:
        """Optional: `last` on every stage of a pipeline at once (head="sharded").

        Each stage has its part of the parameters whose dims the rules map to `stage`, and combines what the
        parts give by collectives over `stage`. Without it, what `last` calls can be split (`outer_modules`).

        Args:
          y: all of it, in float32.
        """
        raise NotImplementedError

    def predict_part(self, y: Activations, batch: Batch, at: LayerContext) -> dict[str, jax.Array]:
        """Optional: `predict` on every stage at once, as `last_part`; all give the same.

        Without it the last stage has the whole parameters of `predict` while it runs.
        """
        raise NotImplementedError


def overrides(model: Module, name: str) -> bool:
    """Whether a model has an optional method: not that of `Model`."""
    method = getattr(model, name, None)
    return method is not None and getattr(method, "__func__", None) is not getattr(
        Model, name, None
    )


def run_layer(
    name: str, layer: Module, carry: Carry, x: Activations, at: LayerContext
) -> tuple[Any, ...]:
    """What a layer of a kind of this name returns for a block; checked.

    One that mixes rows is called for each group of them.

    Raises:
      ValueError: it returns something else than two things, or three of which the last are sums.
    """

    def run(carry: Carry, x: Activations, at: LayerContext) -> tuple[Any, ...]:
        out = layer(carry, x, at)
        if not isinstance(out, tuple) or len(out) not in (2, 3):
            raise ValueError(
                f"layer {name} returns {describe_value(out)}.\nFix: return (carry, y) or (carry, y, sums), "
                "or wrap a module that returns y alone: jaxpar.nn.Stateless(module)."
            )
        return (*out[:2], *(checked_sums(sums, f"layer {name}") for sums in out[2:]))

    time, size = int(at.time_major), getattr(layer, "rows_together", None)
    if size is None:
        return run(carry, x, at)

    def groups(dim: int, a: Value) -> Value:  # [..., rows, ...] -> [groups, ..., size, ...]
        if not jnp.ndim(a):
            return a
        return jnp.moveaxis(a.reshape(*a.shape[:dim], -1, size, *a.shape[dim + 1 :]), dim, 0)

    def rows(tree: Tree, dim: int) -> Tree:  # and back
        def of(a: jax.Array) -> jax.Array:
            a = jnp.moveaxis(a, 0, dim)
            return a.reshape(*a.shape[:dim], -1, *a.shape[dim + 2 :])

        return jax.tree.map(of, tree)

    def of_group(carry: Carry, x: Activations, batch: Batch, row: Value) -> tuple[Any, ...]:
        after, y, *sums = run(carry, x, at._replace(batch=batch, row=row))
        for what, tree, dim in (("the carry that it returns", after, 0), ("its output", y, time)):
            for leaf in jax.tree.leaves(tree):
                require(
                    leaf.shape[dim : dim + 1] == (size,),
                    f"layer {name} is called for {size} rows (rows_together), but {what} has the shape "
                    f"{list(leaf.shape)}.\nFix: let dim {dim} be these rows, or set time_major = False in a "
                    f"model without time.",
                )
        return after, y, *sums

    first_rows = at.row + jnp.arange(0, jax.tree.leaves(x)[0].shape[time], size)
    has_rows = jax.tree.map(lambda a: 0 if jnp.ndim(a) else None, at.batch)
    after, y, *sums = jax.vmap(of_group, (0, 0, has_rows, 0))(
        jax.tree.map(functools.partial(groups, 0), carry),
        jax.tree.map(lambda a: groups(min(time, jnp.ndim(a) - 1), a), x),
        jax.tree.map(lambda timed, a: groups(time * timed, a), has_time(at.batch), at.batch),
        first_rows,
    )
    sums = jax.tree.map(functools.partial(jnp.sum, axis=0), sums)
    return rows(after, 0), rows(y, time), *sums
