"""Programs that differ in numbers alone are one, which is given its numbers."""

import jax
import numpy as np
import optax
import pytest

from jaxpar.trace.numbers import with_numbers

OPTIMIZERS = {
    "adamw": lambda n: optax.adamw(optax.cosine_decay_schedule(n, 7), b1=1 - n, weight_decay=n),
    "lion": lambda n: optax.chain(optax.clip(n), optax.lion(n, b2=1 - n)),
    "adafactor": lambda n: optax.adafactor(n),
    "noise": lambda n: optax.chain(optax.add_noise(n, n, 3), optax.sgd(n, momentum=1 - n)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_given_numbers_is_the_same_one(name):
    """With those of another one it is that other one."""
    params = {
        "w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(3, np.float32),
    }
    one, two = map(OPTIMIZERS[name], (0.01, 0.03))

    def moved(update, *numbers):
        @jax.jit
        def step(grads, state, *numbers):
            with jax.numpy_dtype_promotion("standard"):
                return update(*numbers, grads, state, params)

        state = one.init(params)
        for _ in range(3):
            updates, state = step(params, state, *numbers)
        return updates

    _, run = with_numbers(one.update, params, one.init(params), params)
    numbers, _ = with_numbers(two.update, params, one.init(params), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        moved(run, numbers), moved(two.update),
    )  # fmt: skip
