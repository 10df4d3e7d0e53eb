"""What one device computes: plain JAX and Flax, one layer and one time step after the other.

Nothing of jaxpar is used but the layers' own `__call__` and the context that they are given.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import LayerContext, Sums, lm
from lib.law import language
from lib.law.blocks import FlaxTask
from lib.law.language import LanguageTask
from lib.law.layers import Frame
from lib.law.training import CONFIGS, PLAIN_OPTIMIZERS

# ---- what is compared ----


def gradients(task, weights, batch):
    """Loss, metrics, gradients of what is trained, and what each layer carries on."""
    model = model_of(task)
    (loss, (metrics, carry)), grads = model.run(
        *model.split(weights), batch, model.start(), step_key(0)
    )
    return float(loss), metrics, grads, carry_by_layer(carry)


def updates(task, weights, batches, clip_norm, error):
    """The losses of a step for each batch, the weights after them, and how far apart these may be.

    The last: by how much an array changes if each gradient has another error of this relative size. A rule
    that divides by small numbers makes more of it.
    """
    model, numbers = model_of(task), np.random.default_rng(0)
    optimizer = PLAIN_OPTIMIZERS[task.optimizer_name]()
    if clip_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)

    def run(change):
        trained, others = model.split(weights)
        carry, losses = model.start(), []
        with jax.numpy_dtype_promotion("standard"):
            state = optimizer.init(trained)
        for number, batch in enumerate(batches):
            (loss, (_, carry)), grads = model.run(trained, others, batch, carry, step_key(number))
            if task.optimizer_name in CONFIGS:  # as they promise
                grads = jax.tree.map(jnp.conj, grads)
            with jax.numpy_dtype_promotion("standard"):
                changes, state = optimizer.update(change(grads), state, trained)
                trained = optax.apply_updates(trained, changes)
            losses.append(float(loss))
        return losses, {**others, **trained}

    losses, trained = run(lambda grads: grads)
    _, nearby = run(lambda grads: with_error(grads, error, numbers))
    apart = {name: np.linalg.norm(nearby[name] - own) for name, own in trained.items()}
    return losses, trained, apart


def with_error(arrays, error, numbers):
    """Each array with an error of this size, relative to its norm, in a random direction."""

    def of(array):
        direction = numbers.normal(size=array.shape)
        size = error * np.linalg.norm(array) / np.linalg.norm(direction)
        return array + jnp.asarray(size * direction, array.dtype)

    return {name: of(array) for name, array in arrays.items()}


def initial_weights(task):
    """Of a Flax model, as its maker draws them."""
    flat = nnx.to_flat_state(nnx.state(task.make_model(nnx.Rngs(0)), nnx.Param))
    return {name_of(path): leaf[...] for path, leaf in flat}


def predictions(task, weights, batch):
    """Outputs by name, [rows, ...]."""
    return model_of(task).predict(weights, batch)


def step_key(number):
    return jax.random.fold_in(jax.random.key(0), number)


def model_of(task):
    if isinstance(task, FlaxTask):
        return FlaxForm(task)
    ends = language.Ends if isinstance(task, LanguageTask) else FrameEnds
    return LayerForm(task, ends(task))


# ---- modules and their arrays by name ----


def name_of(path):
    return ".".join(map(str, path))


def with_arrays(module, arrays, prefix=""):
    """The module with other values, which are by path behind the prefix."""
    graphdef, state = nnx.split(module)
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        name = prefix + name_of(path)
        flat.append((path, leaf.replace(jnp.asarray(arrays.get(name, leaf[...])))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def trained_of(module, frozen):
    """The names of the parameters that are trained."""
    state = nnx.state(module, nnx.All(nnx.Param, nnx.Not(frozen)))
    return {name_of(path) for path, _ in nnx.to_flat_state(state)}


def carry_by_layer(carries):
    return {
        f"layers.{number}{jax.tree_util.keystr(path)}": leaf
        for number, carry in enumerate(carries)
        for path, leaf in jax.tree.leaves_with_path(carry)
    }


class Form:
    """A model and its loss.

    Attributes:
      trained: the names of what is trained.
      run: (trained, others, batch, carry, key) -> (loss, (metrics, carry)), gradients.
    """

    def split(self, weights):
        """What is trained, and the others."""
        parts = {}, {}
        for name, array in weights.items():
            parts[name not in self.trained][name] = jnp.asarray(array)
        return parts

    def start(self):
        """What layers carry before the first batch."""
        return []


# ---- Flax ----


class FlaxForm(Form):
    """The user's model as it stands."""

    def __init__(self, task):
        self.task, self.model = task, task.make_model(nnx.Rngs(0))
        self.trained = trained_of(self.model, task.frozen)

        def loss_of(trained, others, batch, carry, key):
            model = with_arrays(self.model, {**others, **trained})
            loss, weight, metrics = task.loss(model, batch)
            return loss / weight, ({name: own / weight for name, own in metrics.items()}, carry)

        self.run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))

    def predict(self, weights, batch):
        """Outputs by name."""

        @jax.jit
        def run(weights, batch):
            return self.task.predict(with_arrays(self.model, weights), batch)

        return run(weights, batch)


# ---- the layer form, and the language model ----


class FrameEnds:
    """What a model in the layer form has around its layers.

    Attributes:
      trained: the names of what is trained.
    """

    def __init__(self, task):
        self.task, self.frame = task, Frame(task.how, task.dtype, rngs=nnx.Rngs(0))
        self.trained = trained_of(self.frame, task.frozen)

    def layers(self):
        """(layer, whether it reads the whole window) of each."""
        return [
            (make(nnx.Rngs(0), self.task.rate), piece.is_whole)
            for piece in self.task.pieces
            for make in piece.makers
        ]

    def first(self, arrays, batch, at):
        """What goes into the first layer."""
        return with_arrays(self.frame, arrays).first(batch, at)

    def last(self, arrays, y, batch, at):
        """Sums of the loss."""
        return with_arrays(self.frame, arrays).last(y, batch, at)

    def predict(self, arrays, y, batch, at):
        """Outputs by name."""
        return with_arrays(self.frame, arrays).predict(y, batch, at)


class LayerForm(Form):
    """Each layer by itself, between ends."""

    def __init__(self, task, ends):
        self.task, self.ends = task, ends
        self.layers, self.is_whole = zip(*ends.layers(), strict=True)
        layers = nnx.Dict({str(number): layer for number, layer in enumerate(self.layers)})
        self.trained = ends.trained | trained_of(nnx.Dict(layers=layers), task.frozen)

        def loss_of(trained, others, batch, carries, key):
            arrays, batch = {**others, **trained}, as_block(batch)
            y, after, sums, at = self._through(arrays, batch, carries, key)
            loss, metrics = mean_of([*sums, ends.last(arrays, y, batch, at)])
            return loss, (metrics, after)

        self.run = self._compiled(jax.value_and_grad(loss_of, has_aux=True))

    def start(self):
        """What layers carry before the first batch."""
        rows = self.task.batch_size
        return [
            layer.initial_carry(rows) if hasattr(layer, "initial_carry") else ()
            for layer in self.layers
        ]

    def predict(self, weights, batch):
        """Outputs by name."""

        def run(weights, batch, carries):
            batch = as_block(batch)
            y, *_, at = self._through(weights, batch, carries, None)
            return self.ends.predict(weights, y, batch, at)

        outputs = self._compiled(run)(weights, batch, self.start())
        return {name: jnp.swapaxes(own, 0, 1) for name, own in outputs.items()}

    def _through(self, arrays, batch, carries, key):
        """What comes out of the last layer, what layers carry on, their sums, and the place of `last`."""
        depth, at = len(self.layers), LayerContext(0, 0, 0, key, batch, time_major=True)
        x = self.ends.first(arrays, batch, at._replace(layer=depth + 1))
        after, sums = [], []
        for number, carry in enumerate(carries):
            layer = with_arrays(self.layers[number], arrays, f"layers.{number}.")
            run = in_groups if getattr(layer, "rows_together", None) else call
            if not self.is_whole[number]:
                run = functools.partial(step_by_step, run)
            carry, x, own = run(layer, carry, x, at._replace(layer=number))
            after.append(carry)
            sums.append(own)
        return x, after, sums, at._replace(layer=depth)

    def _compiled(self, function):
        axes = self.task.axes
        if axes:  # which layers may use by their names: of size 1
            mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.devices()[:1])
            function = jax.shard_map(
                function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
        return jax.jit(function)


def mean_of(sums):
    """The loss and the metrics of a step."""
    loss, weight = sum(each.loss for each in sums), sum(each.weight for each in sums)
    names = {name for each in sums for name in each.metrics}
    metrics = {name: sum(each.metrics.get(name, 0.0) for each in sums) / weight for name in names}
    return loss / weight, metrics


def as_block(batch):
    """[rows, time, ...] as [time, rows, ...]."""
    if isinstance(batch, lm.Batch):
        batch = {name: own for name, own in batch._asdict().items() if own is not None}
    return {
        name: own if name == "static" or jnp.ndim(own) < 2 else jnp.swapaxes(own, 0, 1)
        for name, own in batch.items()
    }


def part_of(batch, cut, cut_rows):
    """A part of a block.

    Args:
      cut: of an array [time, rows, ...].
      cut_rows: of an array [rows, ...].
    """

    def of(a):
        return cut(a) if jnp.ndim(a) > 1 else cut_rows(a) if jnp.ndim(a) else a

    return {
        name: jax.tree.map(cut_rows, own) if name == "static" else of(own)
        for name, own in batch.items()
    }


def call(layer, carry, x, at):
    carry, x, *sums = layer(carry, x, at)
    [sums] = sums or [Sums(0.0, 0.0)]
    return carry, x, jax.tree.map(jnp.float32, sums)


def step_by_step(run, layer, carry, x, at):
    """The layer for one time step, and the next."""

    def step(carry, time):
        def here(a):
            return lax.dynamic_slice_in_dim(a, time, 1, 0)

        own = at._replace(time=time, batch=part_of(at.batch, here, lambda a: a))
        carry, y, sums = run(layer, carry, jax.tree.map(here, x), own)
        return carry, (jax.tree.map(lambda a: a[0], y), sums)

    times = jnp.arange(len(jax.tree.leaves(x)[0]), dtype=jnp.int32)
    carry, (y, sums) = lax.scan(step, carry, times)
    return carry, y, jax.tree.map(lambda a: a.sum(0), sums)


def in_groups(layer, carry, x, at):
    """The layer for as many rows as it mixes, and the next."""
    size, parts = layer.rows_together, []
    for begin in range(0, jax.tree.leaves(x)[0].shape[1], size):

        def rows(a, begin=begin):
            return a[begin : begin + size]

        def here(a, begin=begin):
            return a[:, begin : begin + size]

        own = at._replace(row=begin, batch=part_of(at.batch, here, rows))
        parts.append(call(layer, jax.tree.map(rows, carry), jax.tree.map(here, x), own))
    carries, outputs, sums = zip(*parts, strict=True)
    carry = jax.tree.map(lambda *a: jnp.concatenate(a, 0), *carries)
    y = jax.tree.map(lambda *a: jnp.concatenate(a, 1), *outputs)
    return carry, y, jax.tree.map(lambda *a: sum(a), *sums)
