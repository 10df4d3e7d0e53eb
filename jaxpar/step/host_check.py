"""Whether an optimizer updates pieces of arrays as it updates whole arrays, tried on random numbers.

With `update="host"` each device's piece of a parameter is updated separately. The result must not depend on
the shape of an array, on the place of a number in it, or on other numbers of it.
"""

from typing import Any

import jax
import numpy as np

from jaxpar.base.types import Arrays, Function, Tree
from jaxpar.sharding import shardings
from jaxpar.step.per_layer import without_empty_rows
from jaxpar.step.resolved import Resolved
from jaxpar.step.trial import normal

NUM_STEPS = 2  # the second one reads what the first has put into the state
# Two programs may round in another way, in bfloat16 by a percent; relative to the largest number of an array.
TOLERANCE = 2e-2


def updates_pieces_alike(setup: Resolved, params: Tree, opt_rules: Any) -> bool:
    """Whether the updates of whole random parameters are those of the first and the last device's pieces.

    Args:
      params: shapes of the parameters, as a state has them.
      opt_rules: what the optimizer state is laid out by.
    """
    leaves, structure = jax.tree.flatten(params)
    places = jax.tree.leaves(shardings(params, setup.mesh, opt_rules))
    ends = []
    for device in (setup.mesh.devices.flat[0], setup.mesh.devices.flat[-1]):
        pairs = zip(places, leaves, strict=True)
        ends.append([place.devices_indices_map(leaf.shape)[device] for place, leaf in pairs])
    rng = np.random.default_rng(0)
    optimize: Function = setup.optimizer.update  # with the loss, as of `given_loss`

    def draw() -> Arrays:
        whole = jax.tree.unflatten(structure, [normal(rng, leaf) for leaf in leaves])
        whole = without_empty_rows(whole, setup.partition.rows_of)
        return [*map(np.asarray, jax.tree.leaves(whole))]

    def run(params: list[jax.Array], grads: list[jax.Array], loss: jax.Array) -> Tree:
        given, gradients = (jax.tree.unflatten(structure, own) for own in (params, grads))
        state, updates = setup.optimizer.init(given), None
        for _ in range(NUM_STEPS):
            updates, state = optimize(gradients, state, given, loss)
        return jax.tree.leaves(updates)

    with (
        jax.default_device(jax.local_devices(backend="cpu")[0]),
        jax.numpy_dtype_promotion("standard"),
    ):
        arrays, loss, update = (draw(), draw()), np.float32(1), jax.jit(run)
        whole = update(*arrays, loss)
        for indices in ends:
            pieces = ([a[at] for a, at in zip(own, indices, strict=True)] for own in arrays)
            updates_of_pieces = update(*pieces, loss)
            for updates, piece, at in zip(whole, updates_of_pieces, indices, strict=True):
                if not _near(np.asarray(updates)[at], np.asarray(piece)):
                    return False
    return True


def _near(one: np.ndarray, other: np.ndarray) -> bool:
    scale = np.max(np.abs(one), initial=0)
    return bool(np.all(np.abs(one - other) <= TOLERANCE * scale))
