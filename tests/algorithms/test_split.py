"""A layer's backward pass in two parts, of its inputs and of its weights, and what is kept for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.cells import ROWS, B, W, layer_of

from jaxpar import LayerContext, nn
from jaxpar.internal.split import SplitLayer

# float32 sums in another order.
RELATIVE_ERROR = 1e-5
AT = LayerContext(0, 0, 0)


def test_w_of_an_lstm_waits_in_the_place_of_its_gates_and_has_no_loop():
    def lstm(params, frozen, carry, x, at):
        return nn.lstm_layer(params, carry, x)

    w_x, w_h = np.random.default_rng(0).normal(size=(2, 8, 4, 8)).astype(np.float32)
    params = nn.GateParams(w_x, w_h, jnp.zeros((4, 8)))
    carry, x = nn.LSTMCarry(*(jnp.zeros((3, 8)),) * 2), jnp.ones((5, 3, 8))
    part = SplitLayer(lstm, params, (), carry, x, AT, splits=True)
    assert part.has_weights
    assert [part.saved[n].shape for n in part.needed] == [(5, 3, 8), (5, 3, 8)]  # x and h before
    assert [leaf.shape for leaf in part.later] == [(5, 3, 4, 8)]  # dz
    assert [part.saved[n].shape for n in part.places] == [(5, 3, 4, 8)]
    assert not set(part.places) & set(part.needed)


def half_a_layer(params, frozen, carry, x, at):
    y = jax.nn.relu(x.astype(jnp.bfloat16) @ params.astype(jnp.bfloat16)).astype(jnp.float32)
    return carry, y * frozen**2


@pytest.mark.more
@pytest.mark.parametrize("splits", [False, True])
def test_what_depends_on_weights_alone_is_computed_again_and_not_kept(splits):
    draw, shapes = np.random.default_rng(0), ((8, 8), (1, 1, 8), (5, 3, 8), (5, 3, 8))
    # Whole numbers, whose sums are exact.
    params, frozen, x, dy = (jnp.float32(draw.integers(-2, 3, shape)) for shape in shapes)
    part = SplitLayer(half_a_layer, params, frozen, (), x, AT, splits=splits)
    kept = [(leaf.shape, str(leaf.dtype)) for leaf in part.saved]
    assert kept == [((5, 3, 8), "bfloat16"), ((5, 3, 8), "bool")]  # x, and where the relu is open
    _, y, saved = part.forward(params, frozen, (), x, AT)
    prepared = part.prepare(params, frozen)
    d_params, _, dx, later = part.backward(prepared, saved, (), dy)
    if splits:
        d_params = part.weights(prepared, [saved[n] for n in part.needed], later)
    plain, vjp = jax.vjp(lambda params, x: half_a_layer(params, frozen, (), x, AT)[1], params, x)
    jax.tree.map(np.testing.assert_array_equal, (y, d_params, dx), (plain, *vjp(dy)))


def two_gelus(params, frozen, carry, x, at):
    gelu = jax.jit(lambda u: 0.5 * u * (1 + jnp.tanh(u * (1 + u**2))))  # one function, called twice
    h = gelu(x @ params[0])
    return carry, x + gelu(h @ params[1])


@pytest.mark.law  # with the newest JAX, too, whose derivatives have other operations
@pytest.mark.parametrize("splits", [False, True])
def test_what_follows_by_simple_arithmetic_is_done_again_and_not_kept(splits):
    draw = np.random.default_rng(0)
    params = [jnp.float32(draw.normal(size=(8, 8)) / 3) for _ in range(2)]
    x, dy = (jnp.float32(draw.normal(size=(5, 3, 8))) for _ in range(2))
    part = SplitLayer(two_gelus, params, (), (), x, AT, splits=splits)
    # x, and of each GELU its input and the tanh: JAX itself keeps four factors of every one.
    assert [leaf.shape for leaf in part.saved] == [(5, 3, 8)] * 5
    plain, vjp = jax.vjp(lambda params, x: two_gelus(params, (), (), x, AT)[1], params, x)
    assert sum(leaf.shape == (5, 3, 8) for leaf in jax.tree.leaves(vjp)) > 8
    _, y, saved = part.forward(params, (), (), x, AT)
    prepared = part.prepare(params, ())
    d_params, _, dx, later = part.backward(prepared, saved, (), dy)
    if splits:
        assert [leaf.shape for leaf in part.later] == [(5, 3, 8)] * 2  # cotangents of both products
        d_params = part.weights(prepared, [saved[n] for n in part.needed], later)
    for ours, wanted in zip(
        jax.tree.leaves((y, d_params, dx)), jax.tree.leaves((plain, *vjp(dy))), strict=True
    ):
        assert np.linalg.norm(ours - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)


def test_what_a_layer_prints_is_printed(capsys):
    def layer(params, frozen, carry, x, at):
        jax.debug.print("largest {}", jnp.max(x))
        return carry, x * params[None, None]

    params, x = jnp.ones(8), jnp.full((5, 3, 8), 7.0)
    part = SplitLayer(layer, params, (), (), x, AT, splits=True)
    jax.jit(lambda x: part.forward(params, (), (), x, AT)[1])(x)
    jax.effects_barrier()
    assert capsys.readouterr().out == "largest 7.0\n"


def test_where_b_makes_gradients_of_weights_they_are_not_apart():
    """Those of a scan are added up in its backward loop."""

    def loop(params, frozen, carry, x, at):
        def step(h, x):
            h = jnp.tanh(h @ params + x)
            return h, h

        return jax.lax.scan(step, carry, x)

    part = SplitLayer(loop, jnp.eye(8), (), jnp.zeros((3, 8)), jnp.ones((5, 3, 8)), AT, splits=True)
    assert not part.has_weights


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_weights_are_taken_after_the_loop(name):
    """No array of a weight's shape, which has no dim of rows, is carried by the backward loop."""
    layer, num_steps = layer_of(name), 6
    graphdef, params = nnx.split(layer)
    x = jnp.ones((num_steps, B, W))
    at = AT._replace(batch={"resets": jnp.zeros((num_steps, B), bool)})

    def run(params, frozen, carry, x, at):
        return nnx.merge(graphdef, params)(carry, x, at)

    with jax.numpy_rank_promotion("allow"):
        part = SplitLayer(run, params, {}, layer.initial_carry(B), x, at, splits=True)
    assert part.has_weights == (name != "stays")
    first_dims = {leaf.shape[0] for leaf in part.saved}
    assert first_dims <= {num_steps, B}, "what is saved is no weight"
