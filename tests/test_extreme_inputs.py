"""Outputs and gradients of every layer are finite, whatever the sizes of its inputs are over time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import LayerContext, nn
from jaxpar.nn import linear_recurrence

WIDTH, STEPS = 8, 70  # more than a block of 64 steps

LAYERS = {
    "lstm": nn.LSTM,
    "lstm, heads": functools.partial(nn.LSTM, num_heads=2),
    "gru": nn.GRU,
    "slstm": nn.SLSTM,
    "mlstm": nn.MLSTM,
    "mingru": nn.MinGRU,
    "rglru": nn.RGLRU,
    "gated_delta": nn.GatedDeltaNet,
    "gated_delta, negative": functools.partial(nn.GatedDeltaNet, negative_eigenvalues=True),
    "block": lambda width, rngs: nn.GatedBlock(nn.MLSTM(width, rngs=rngs), rngs=rngs),
    "block, one head": lambda width, rngs: nn.GatedBlock(nn.RGLRU(width, rngs=rngs), rngs=rngs),
    "flax": lambda width, rngs: nn.Recurrent(nnx.GRUCell(width, width, rngs=rngs)),
    "bidirectional": lambda width, rngs: nn.Bidirectional(
        nn.MLSTM(width, rngs=rngs), nn.SLSTM(width, rngs=rngs)
    ),
}

# The inputs of all units at each step.
INPUTS = {
    "zeros": [0.0],
    "large": [1e3],
    "negative": [-1e3],
    "zeros after large": [1e3] * 20 + [0.0] * 50,
    "zeros after negative": [-1e3] * 20 + [0.0] * 50,
    "large after zeros": [0.0] * 50 + [1e3] * 20,
    "in turn": [1e3, 0.0, -1e3, 0.0, 1e-3],
}


@functools.cache
def run_and_differentiate(name, dtype):
    """Outputs, the state after them, and gradients of the state before, the inputs and the parameters."""

    @jax.jit
    def run(key, x_TBW):
        graphdef, params = nnx.split(LAYERS[name](WIDTH, rngs=nnx.Rngs(key)))

        def apply(params, carry, x_TBW):
            return nnx.merge(graphdef, params)(carry, x_TBW, LayerContext(0, 0, 0))

        carry = nnx.merge(graphdef, params).initial_carry(x_TBW.shape[1])
        (after, y_TBW), vjp = jax.vjp(apply, params, carry, x_TBW.astype(dtype))
        return y_TBW, after, vjp((jax.tree.map(jnp.ones_like, after), jnp.ones_like(y_TBW)))

    return run


# A cell of Flax takes one dtype.
SHORT = [name for name in LAYERS if name != "flax" and "," not in name]


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in LAYERS),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.more) for name in SHORT),
    ],
)
def test_outputs_and_gradients_are_finite(name, dtype):
    """A row for each kind of inputs: the same in all units, and with a sign for each."""
    x_TB = np.stack([np.resize(steps, STEPS) for steps in INPUTS.values()], 1)
    sign_W = np.resize([1.0, -1.0, -1.0], WIDTH)
    x_TBW = np.concatenate([x_TB[..., None] * np.ones(WIDTH), x_TB[..., None] * sign_W], 1)
    for seed in range(4):
        found = run_and_differentiate(name, dtype)(jax.random.key(seed), x_TBW)
        wrong = [
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree.leaves_with_path(found)
            if not jnp.isfinite(leaf).all()
        ]
        assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.rows(1)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_linear_recurrence_of_extremes_is_finite(one_by_one):
    a = jnp.resize(jnp.asarray([0, 1, 1e-30, 1 - 2**-24]), (STEPS, 2, 3))
    b = jnp.resize(jnp.asarray([1e3, 0, -1e3, 0, 0]), (STEPS, 2, 3))
    run = functools.partial(linear_recurrence, one_by_one=one_by_one)
    found, vjp = jax.vjp(run, a, b, jnp.zeros((2, 3)))
    for leaf in jax.tree.leaves((found, vjp(jax.tree.map(jnp.ones_like, found)))):
        assert np.isfinite(leaf).all()
