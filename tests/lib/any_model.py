"""The law for any model: a step on a mesh, and the same from the definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar import LayerContext, Parallel, TrainConfig, init_state
from jaxpar.data.batches import place_batch
from jaxpar.model.stack import wrap_like
from jaxpar.model.task import Settings
from jaxpar.step.setup import Setup
from jaxpar.step.state import audit
from jaxpar.step.step import (
    batch_sharding,
    check_program,
    make_loss_and_grad,
)
from lib.exchanges import pairs_without_order
from lib.laws import assert_close, by_layer
from lib.models import Regress


def batch_of(task):
    return task.make_batches("train", 0).batch(1)  # the carry of a window before counts


@functools.lru_cache(maxsize=8)
def plainly(task):
    """Loss, metrics, gradients and carry on one device, from the definition.

    A layer that mixes rows is called for as many of them as it says, the next and the next.
    """
    settings = Settings(task, Parallel("dp1"), TrainConfig())
    graphdef, state = jax.jit(
        lambda: nnx.split(Setup.of(task, settings.parallel).storage.make(0))
    )()
    key, block = jax.random.fold_in(jax.random.key(0), 0), batch_of(task)
    time = int(getattr(nnx.merge(graphdef, state), "time_major", True))
    block = {
        name: jnp.swapaxes(a, 0, 1) if time and name != "static" and np.ndim(a) > 1 else a
        for name, a in block.items()
    }

    def rows(tree, begin, number, time=time):
        def of(a):
            dim = time if jnp.ndim(a) > 1 else 0
            return jax.lax.slice_in_dim(a, begin, begin + number, axis=dim) if jnp.ndim(a) else a

        return jax.tree.map(of, tree)

    def rows_of_block(block, begin, number):
        return {
            name: rows(a, begin, number, time * (name != "static")) for name, a in block.items()
        }

    def joined(dim, *parts):
        return jax.tree.map(lambda *a: jnp.concatenate(a, dim), *parts)

    def layers(stack, x, at):
        carries, found, size = stack.initial_carry(task.batch_size), [], task.batch_size
        after = {name: [] for name in stack.kinds}
        for layer_number, kind in enumerate(map(stack.kinds.__getitem__, stack.kind_of)):
            layer = stack.layer(layer_number)
            carry = layer.initial_carry(size) if hasattr(layer, "initial_carry") else ()
            number, parts = getattr(layer, "rows_together", None) or size, []
            for begin in range(0, size, number):
                own = at._replace(
                    layer=layer_number, row=begin, batch=rows_of_block(at.batch, begin, number)
                )
                before = jax.tree.map(lambda a, b=begin, n=number: a[b : b + n], carry)
                parts.append(layer(before, rows(x, begin, number), own))
            after[kind].append(joined(0, *(part[0] for part in parts)))
            x = joined(time, *(part[1] for part in parts))
            found += [part[2] for part in parts if len(part) > 2]
        stacked = {name: jax.tree.map(lambda *a: jnp.stack(a), *own) for name, own in after.items()}
        return {name: wrap_like(stacked[name], carries[name]) for name in stacked}, x, found

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(state):
        model = nnx.merge(graphdef, state)
        at, last = LayerContext(0, 0, 0, key, block, time_major=bool(time)), len(model.layers)
        carry, y, found = layers(model.layers, model.first(block, at._replace(layer=last + 1)), at)
        found.append(model.last(y, block, at._replace(layer=last)))
        names = {name: 0.0 for own in found for name in own.metrics}
        found = [jax.tree.map(jnp.float32, own.with_names(names)) for own in found]
        sums = jax.tree.map(lambda *a: sum(a), *found)
        return sums.loss / sums.weight, (carry, sums)

    if task.axes:  # which layers may use by their names: of size 1
        mesh = jax.make_mesh((1,) * len(task.axes), task.axes, devices=jax.devices()[:1])
        loss = jax.shard_map(loss, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (value, (carry, sums)), grads = jax.jit(loss)(state)
    return float(value), sums, by_layer(grads, settings), by_layer(carry, settings)


def assert_same(task, parallel):
    """Of a step: loss, sums, gradients, and the state that layers carry on."""
    settings = Settings(task, parallel, TrainConfig())
    setup = Setup.of(task, parallel)
    state = init_state(setup)
    audit(state)
    batch = place_batch(task.make_batches("train", 0), 1, batch_sharding(setup))
    batch = jax.tree.map(jnp.asarray, batch)
    program = jax.jit(make_loss_and_grad(setup)).lower(state, batch).compile()
    if parallel.mesh.stage > 1 or not parallel.has_equal_shares:
        check_program(program)  # else it might wait forever
        assert pairs_without_order(program.as_text()) == []
    (loss, (carry, sums)), grads = program(state, batch)
    expected_loss, expected_sums, expected_grads, expected_carry = plainly(task)
    assert_close({"loss": np.float32(loss)}, {"loss": np.float32(expected_loss)})
    for ours, theirs in zip(jax.tree.leaves(sums), jax.tree.leaves(expected_sums), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    trained = by_layer(state.params, settings).keys()
    assert_close(by_layer(grads, settings), {name: expected_grads[name] for name in trained})
    assert_close(by_layer(carry, settings), expected_carry)


@dataclasses.dataclass(frozen=True)
class Calm(Regress):
    """Its inputs saturate no gate: the slope of one that is would be a difference of rounded numbers."""

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches.arrays |= {"x": batches.arrays["x"] / 10}
        return batches
