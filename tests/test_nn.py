"""Layers against independent ones, and dropout against its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar import RULES, LayerContext, Stack
from jaxpar.nn import (
    LSTM,
    GateParams,
    LSTMCarry,
    dot_general,
    dropout,
    extend,
    linear_recurrence,
    lstm_layer,
    named_param,
)
from jaxpar.pipeline import make_slots

# float32 sums in another order.
RELATIVE_ERROR = 1e-5
# bfloat16 has 8 bits: 2^-9 a rounding, a few of them a step.
BFLOAT16_ERROR = 2e-2
T, B = 5, 3


def assert_close(actual, expected, bound=RELATIVE_ERROR):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


def lstms(width, num_layers, seed=1, **options):
    """Layers of one width in a stack."""
    return Stack([lambda rngs: LSTM(width, rngs=rngs, **options)] * num_layers, rngs=nnx.Rngs(seed))


def run(stack, carry, x):
    """The stack as a function of arrays: carry, an `LSTMCarry` [layers, B, H], and inputs [T, B, H]."""

    def is_variable(leaf):
        return isinstance(leaf, nnx.Variable)

    variables = stack.initial_carry(x.shape[1])["lstm"]
    given = jax.tree.map(lambda v, a: v.replace(a), variables, carry, is_leaf=is_variable)
    after, y = stack({"lstm": given}, x, LayerContext(0, 0, 0))
    return jax.tree.map(lambda v: v[...], after["lstm"], is_leaf=is_variable), y


def random_inputs(inputs, hidden, num_layers, num_steps=T, num_rows=B):
    keys = jax.random.split(jax.random.key(7), 3)
    shape = (num_layers, num_rows, hidden)
    carry = LSTMCarry(jax.random.normal(keys[1], shape), jax.random.normal(keys[2], shape))
    return jax.random.normal(keys[0], (num_steps, num_rows, inputs)), carry


def loss_of(after, y):
    """Depends on every output in its own way."""
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(y * weights) + jnp.sum(after.h_BH**2) + jnp.sum(after.c_BH**3)


def flax_lstm(stack, inputs, hidden):
    """The same weights in Flax's own layers, whose gates stand in the order i, f, g, o too."""
    layers = []
    for number in range(len(stack)):
        size = inputs if number == 0 else hidden
        cell = nnx.OptimizedLSTMCell(size, hidden, rngs=nnx.Rngs(0))
        ours = stack.layer(number)
        cell.dense_i.kernel[...] = ours.w_x[:size].reshape(size, -1)
        cell.dense_h.kernel[...] = ours.w_h[...].reshape(hidden, -1)
        cell.dense_h.bias[...] = ours.b[...].reshape(-1)
        layers.append(nnx.RNN(cell, time_major=True, return_carry=True, rngs=nnx.Rngs(0)))
    return nnx.List(layers)


SIZES = [(8, 8, 1, T, B), (8, 8, 3, T, B), (4, 8, 2, T, B), (7, 7, 2, 1, 1), (3, 5, 2, T, 1)]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(("inputs", "hidden", "layers", "num_steps", "num_rows"), SIZES)
def test_lstm_and_its_gradients_equal_flax(inputs, hidden, layers, num_steps, num_rows):
    stack = lstms(hidden, layers)
    x, carry = random_inputs(inputs, hidden, layers, num_steps, num_rows)
    graphdef, params = nnx.split(stack)
    flax_graphdef, flax_params, rest = nnx.split(flax_lstm(stack, inputs, hidden), nnx.Param, ...)

    def ours(params, x):
        after, y = run(nnx.merge(graphdef, params), carry, extend(x, hidden))
        return loss_of(after, y), (after, y)

    def theirs(params, x):
        states = []
        for number, layer in enumerate(nnx.merge(flax_graphdef, params, rest)):
            state, x = layer(x, initial_carry=(carry.c_BH[number], carry.h_BH[number]))
            states.append(state)
        after = LSTMCarry(jnp.stack([h for _, h in states]), jnp.stack([c for c, _ in states]))
        return loss_of(after, x), (after, x)

    (loss, out), (grads, dx) = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(params, x)
    with jax.numpy_rank_promotion("allow"):  # Flax adds its bias so
        both = jax.jit(jax.value_and_grad(theirs, (0, 1), has_aux=True))
        (expected_loss, expected_out), (expected_grads, expected_dx) = both(flax_params, x)
    jax.tree.map(assert_close, (loss, out, dx), (expected_loss, expected_out, expected_dx))
    grads = grads["lstm"]
    for number, layer in nnx.to_pure_dict(expected_grads).items():
        size = inputs if number == 0 else hidden
        d_x, d_h = layer["cell"]["dense_i"]["kernel"], layer["cell"]["dense_h"]
        got_x = grads["w_x"][...][number]
        assert_close(got_x[:size], d_x.reshape(size, 4, hidden))
        assert not np.any(got_x[size:])
        assert_close(grads["w_h"][...][number], d_h["kernel"].reshape(hidden, 4, hidden))
        assert_close(grads["b"][...][number], d_h["bias"].reshape(4, hidden))


@pytest.mark.full
def test_two_windows_equal_one():
    stack = lstms(8, 3)
    x, carry = random_inputs(8, 8, 3, num_steps=6)
    after, y = run(stack, carry, x)
    middle, first = run(stack, carry, x[:2])
    end, second = run(stack, middle, x[2:])
    jax.tree.map(assert_close, (end, jnp.concatenate([first, second])), (after, y))


def test_empty_slots_change_nothing():
    full, slotted = lstms(8, 3), lstms(8, 3)
    slotted.place(make_slots((1, 2)))
    assert slotted.slots.layers == (0, -1, 1, 2)
    x, _ = random_inputs(8, 8, 3)
    outputs = [
        stack(stack.initial_carry(B), x, LayerContext(0, 0, 0))[1] for stack in (full, slotted)
    ]
    np.testing.assert_array_equal(*outputs)
    for name, weights in nnx.state(full.lstm).items():
        placed = getattr(slotted.lstm, name)
        np.testing.assert_array_equal(placed[jnp.array([0, 2, 3])], weights[...])
        assert not np.any(placed[1])


def test_a_layer_is_born_the_same_among_however_many():
    few, many = (nnx.state(lstms(8, count, seed=3)) for count in (2, 5))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), few, many)


def test_forget_bias_is_the_second_gates():
    bias = lstms(4, 2, forget_bias=1.5).lstm.b[...]
    np.testing.assert_array_equal(bias, np.broadcast_to([[0], [1.5], [0], [0]], (2, 4, 4)))


@pytest.mark.full
def test_bfloat16_is_near_float32_and_keeps_its_parameters_float32():
    stack = lstms(16, 2)
    x, carry = random_inputs(16, 16, 2)
    graphdef, params = nnx.split(stack)

    def loss(params, x):
        after, y = run(nnx.merge(graphdef, params), carry, x)
        assert after.c_BH.dtype == jnp.float32
        return loss_of(after, y.astype(jnp.float32)), y

    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(params, x)
    (_, y16), grads16 = jax.value_and_grad(loss, has_aux=True)(params, x.astype(jnp.bfloat16))
    assert y16.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(grads16)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: assert_close(a, b, BFLOAT16_ERROR), (y16, grads16), (y, grads))


LAYER = ((2,), (0,)), ((), ())


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "dims"),
    [
        ((3, 5, 8), (8, 6), LAYER),
        ((3, 5, 8), (8, 2, 4), LAYER),  # into heads
        ((3, 5, 2, 4), (2, 4, 6), (((2, 3), (0, 1)), ((), ()))),  # out of heads
        ((8,), (8, 6), (((0,), (0,)), ((), ()))),
        # What is no layer.
        ((3, 5, 8), (6, 8), (((2,), (1,)), ((), ()))),
        ((5, 2, 4), (6, 2, 4), (((2,), (2,)), ((1,), (1,)))),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_general_is_that_of_lax(x_shape, kernel_shape, dims, dtype):
    keys = jax.random.split(jax.random.key(1), 3)
    x, kernel = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys, (x_shape, kernel_shape), strict=False)
    )
    expected, vjp = jax.vjp(lambda *args: jax.lax.dot_general(*args, dims), x, kernel)
    y, own_vjp = jax.vjp(lambda *args: dot_general(*args, dims, out_sharding=None), x, kernel)
    dy = jax.random.normal(keys[2], y.shape).astype(dtype)
    for own, other in zip((y, *own_vjp(dy)), (expected, *vjp(dy)), strict=True):
        assert own.dtype == other.dtype == dtype
        assert_close(own, other, 1e-6 if dtype == "float32" else BFLOAT16_ERROR)


def test_a_layer_of_flax_takes_the_product_of_ours():
    layer, own = (
        nnx.Linear(8, 6, rngs=nnx.Rngs(0), **how) for how in ({}, {"dot_general": dot_general})
    )
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))

    def gradient(layer):
        graphdef, state = nnx.split(layer)
        return jax.grad(lambda state: jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x))))(state)

    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), gradient(own), gradient(layer))
    assert "custom_vjp_call" in str(jax.make_jaxpr(own)(x))


@pytest.mark.parametrize(
    "slots",
    [
        make_slots((1, 1)),
        make_slots((1, 3)),
        dataclasses.replace(make_slots((3,)), rows=((0, 0, 2),)),
        make_slots((3,), kind_of=(0, 1, 0)),
    ],
)
def test_slots_that_do_not_hold_each_layer_once_are_refused(slots):
    with pytest.raises(AssertionError):
        lstms(8, 3).place(slots)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="width 9 are wider than width=8"):
        extend(jnp.zeros((T, B, 9)), 8)
    with pytest.raises(
        ValueError,
        match=r"do not fit an array of shape \(2, 3\)\nFix: give a name or None for each",
    ):
        named_param(jnp.zeros((2, 3)), ("hidden",))
    with pytest.raises(ValueError, match="dim 'hiden' has no rule"):
        RULES.spec(named_param(jnp.zeros(2), ("hiden",)).out_sharding)


def mask(key, at, shape=(6, 8, 32), rate=0.25):
    return np.asarray(dropout(jnp.ones(shape), rate, at._replace(key=key)))


@pytest.mark.law
def test_a_blocks_dropout_mask_is_part_of_the_wholes():
    key = jax.random.key(5)
    whole = mask(key, LayerContext(3, 0, 0))
    block = mask(key, LayerContext(3, 2, 4), shape=(3, 4, 32))
    np.testing.assert_array_equal(block, whole[2:5, 4:8])


def test_dropout_has_its_rate_keeps_the_mean_and_differs_by_layer_and_step():
    whole = mask(jax.random.key(5), LayerContext(3, 0, 0), shape=(16, 16, 256))
    assert set(np.unique(whole)) == {0.0, np.float32(1 / 0.75)}
    # 65,536 draws: a standard deviation of 0.0017.
    assert abs(np.mean(whole == 0) - 0.25) < 0.01
    for other in (
        mask(jax.random.key(5), LayerContext(4, 0, 0), shape=(16, 16, 256)),
        mask(jax.random.key(6), LayerContext(3, 0, 0), shape=(16, 16, 256)),
    ):
        agree = np.mean((other == 0) == (whole == 0))
        assert abs(agree - (0.25**2 + 0.75**2)) < 0.01


def test_no_key_or_no_rate_means_no_dropout():
    x = jnp.ones((2, 2, 4))
    assert dropout(x, 0.5, LayerContext(0, 0, 0)) is x
    assert dropout(x, 0.0, LayerContext(0, 0, 0, jax.random.key(0))) is x


def test_residuals_hold_no_weights():
    """What a layer saves for its backward pass is activations; its weights are taken again."""
    lstm = LSTM(8, rngs=nnx.Rngs(1))
    params = GateParams(lstm.w_x[...], lstm.w_h[...], lstm.b[...])
    x, carry = random_inputs(8, 8, 1)
    carry = jax.tree.map(lambda a: a[0], carry)
    _, vjp = jax.vjp(lambda params: lstm_layer(params, carry, x), params)
    weights = {id(leaf) for leaf in jax.tree.leaves(params)}
    shapes = [leaf.shape for leaf in jax.tree.leaves(vjp) if id(leaf) not in weights]
    assert isinstance(params, GateParams)
    assert not {leaf.shape for leaf in params} & set(shapes)


def test_linear_recurrences_in_parallel_equal_those_step_by_step():
    """And their gradients, which are linear recurrences backward in time."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.random((13, B, 8)), jnp.float32) for _ in range(2))
    h, d_last, dy = (
        jnp.asarray(rng.random(shape), jnp.float32) for shape in ((B, 8), (B, 8), a.shape)
    )
    found = []
    for one_by_one in (False, True):
        outputs, vjp = jax.vjp(functools.partial(linear_recurrence, one_by_one=one_by_one), a, b, h)
        found.append((outputs, vjp((d_last, dy))))
    jax.tree.map(assert_close, *found)
