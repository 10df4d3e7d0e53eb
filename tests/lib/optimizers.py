"""Optimizers to draw from. Some read the shape of an array, or the place of a number in it."""

import jax
import jax.numpy as jnp
import optax

RATE = 0.5


def changed(change):
    """SGD after a change of each gradient, (array) -> array of the same shape."""
    own = optax.stateless(lambda updates, _: jax.tree.map(change, updates))
    return optax.chain(own, optax.sgd(RATE))


def by_place(g):
    place = jnp.arange(g.size, dtype=jnp.float32).reshape(g.shape)
    return g * (1 + place / g.size).astype(g.dtype)


def by_size(g):
    return g * jnp.minimum(1.0, 1e-3 / jnp.maximum(jnp.abs(g), 1e-9))


# Each number is updated by itself.
ALONE = {
    "sgd": lambda: optax.sgd(RATE),
    "momentum": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(RATE, 0.0, 4)),
    "clipped by value": lambda: changed(by_size),  # optax.clip takes no complex numbers
}
# What an array is, or where a number is in it, decides on the update.
READ_SHAPE_OR_PLACE = {
    "fan-in": lambda: changed(lambda g: g / g.shape[0]),
    "mask by size": lambda: changed(lambda g: g if g.size < 200 else 0 * g),
    "iota": lambda: changed(by_place),
    "flip": lambda: changed(lambda g: jnp.flip(g, 0)),
    "roll": lambda: changed(lambda g: jnp.roll(g, 1, 0)),
    "first number": lambda: changed(lambda g: g + 0.1 * g.reshape(-1)[0]),
    "root mean square": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(1.0)),
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(RATE)),
}
OPTIMIZERS = ALONE | READ_SHAPE_OR_PLACE
# Those that do so in some later step.
READ_SHAPE_OR_PLACE_LATER = {
    "fan-in later": lambda: optax.chain(
        optax.stateless(lambda updates, _: jax.tree.map(lambda g: g / g.shape[0], updates)),
        optax.sgd(optax.linear_schedule(0.0, RATE, 5, transition_begin=3)),
    ),
    "place in every fourth step": lambda: optax.MultiSteps(
        changed(by_place), 4
    ).gradient_transformation(),
}
