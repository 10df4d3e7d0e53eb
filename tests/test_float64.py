"""The layer, and the whole model, against a textbook LSTM in NumPy float64.

A relative error is that of a whole array, in the Euclidean norm: |actual - expected| / |expected|.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpar.config import Parallel
from jaxpar.mesh import MeshConfig
from jaxpar.nn import GateParams, LSTMCarry, lstm_layer
from jaxpar.setup import Setup
from jaxpar.sharding import is_variable, named_leaves
from jaxpar.state import init_state
from jaxpar.step import make_loss_and_grad
from jaxpar.tasks.lm.streams import IGNORE, Batch
from jaxpar.tasks.lm.task import LM

# The promise: bfloat16 has 8 bits, float32 24, and the roundings of some tens of operations add up.
RELATIVE_ERRORS = {"float32": 1e-5, "bfloat16": 2e-2}
# Added to all widths. An array of one number, or two, may be a difference of larger ones: bfloat16 is not
# promised to keep 2 % of that, nor could any order of its sums.
MORE_WIDTH = {"float32": 0, "bfloat16": 8}


def assert_close(actual, expected, bound):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


# ---- the textbook ----


class Step(NamedTuple):
    """What one time step leaves behind; gates i, f, g, o."""

    x: np.ndarray
    h_before: np.ndarray
    c_before: np.ndarray
    i: np.ndarray
    f: np.ndarray
    g: np.ndarray
    o: np.ndarray
    c: np.ndarray


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def forward(params, carry, x):
    """State after the last step, outputs, steps."""
    (w_x, w_h, b), (h, c) = params, carry
    outputs, steps = [], []
    for x_t in x:
        z = np.einsum("bi,igh->gbh", x_t, w_x) + np.einsum("bj,jgh->gbh", h, w_h) + b[:, None]
        i, f, g, o = sigmoid(z[0]), sigmoid(z[1]), np.tanh(z[2]), sigmoid(z[3])
        c_next = f * c + i * g
        steps.append(Step(x_t, h, c, i, f, g, o, c_next))
        h, c = o * np.tanh(c_next), c_next
        outputs.append(h)
    return (h, c), np.stack(outputs), steps


def backward(params, steps, d_carry, dy):
    """Gradients of the weights, of the state before the first step, and of the inputs."""
    w_x, w_h, b = params
    d_w_x, d_w_h, d_b, dx = np.zeros_like(w_x), np.zeros_like(w_h), np.zeros_like(b), []
    dh, dc = d_carry
    for s, dy_t in zip(reversed(steps), reversed(dy), strict=True):
        dh, tanh_c = dh + dy_t, np.tanh(s.c)
        dc = dc + dh * s.o * (1 - tanh_c**2)
        dz = np.stack(
            [
                dc * s.g * s.i * (1 - s.i),
                dc * s.c_before * s.f * (1 - s.f),
                dc * s.i * (1 - s.g**2),
                dh * tanh_c * s.o * (1 - s.o),
            ]
        )
        d_w_x += np.einsum("bi,gbh->igh", s.x, dz)
        d_w_h += np.einsum("bj,gbh->jgh", s.h_before, dz)
        d_b += dz.sum(1)
        dx.append(np.einsum("gbh,igh->bi", dz, w_x))
        dh, dc = np.einsum("gbh,jgh->bj", dz, w_h), dc * s.f
    return (d_w_x, d_w_h, d_b), (dh, dc), np.stack(dx[::-1])


def draw(T, B, I, H, seed):  # noqa: E741
    """Weights, state and inputs as a trained layer may have them, and cotangents of state and outputs."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = (
        normal(I, 4, H) / np.float32(I**0.5),
        normal(H, 4, H) / np.float32(H**0.5),
        normal(4, H),
    )
    arguments = params, (normal(B, H), normal(B, H)), normal(T, B, I)
    return arguments, ((normal(B, H), normal(B, H)), normal(T, B, H))


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def test_the_textbooks_gradients_are_the_slopes_of_its_loss():
    """By a step into the complex plane, which nothing cancels in (Squire and Trapp 1998)."""
    arguments, (d_carry, dy) = in_float64(draw(4, 3, 5, 2, seed=0))
    *_, steps = forward(*arguments)
    grads = jax.tree.leaves(backward(arguments[0], steps, d_carry, dy))
    leaves, structure = jax.tree.flatten(arguments)
    rng = np.random.default_rng(1)
    for number, grad in enumerate(grads):
        direction, moved = rng.normal(size=grad.shape), list(leaves)
        moved[number] = leaves[number] + 1e-30j * direction
        (h, c), y, _ = forward(*jax.tree.unflatten(structure, moved))
        loss = np.sum(h * d_carry[0]) + np.sum(c * d_carry[1]) + np.sum(y * dy)
        np.testing.assert_allclose(loss.imag / 1e-30, np.sum(grad * direction), rtol=1e-12)


# ---- the layer ----

SIZES = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 20), st.integers(1, 20))


@pytest.mark.law
@pytest.mark.parametrize("dtype", RELATIVE_ERRORS)
@settings(max_examples=8)
@given(sizes=SIZES, seed=st.integers(0, 999))
@example(sizes=(1, 1, 3, 7), seed=0)  # one step of one row; widths that no vector register likes
def test_layer_and_gradients(dtype, sizes, seed):
    T, B, I, H = sizes  # noqa: E741
    arguments, cotangents = draw(T, B, I + MORE_WIDTH[dtype], H + MORE_WIDTH[dtype], seed)
    carry, y, steps = forward(*in_float64(arguments))
    grads = backward(in_float64(arguments[0]), steps, *in_float64(cotangents))

    @jax.jit
    def ours(params, carry, x, d_carry, dy):
        x, dy = x.astype(dtype), dy.astype(dtype)
        out, vjp = jax.vjp(lstm_layer, GateParams(*params), LSTMCarry(*carry), x)
        return out, vjp((LSTMCarry(*d_carry), dy))

    actual = ours(*arguments, *cotangents)
    close = functools.partial(assert_close, bound=RELATIVE_ERRORS[dtype])
    expected = ((carry, y), grads)
    jax.tree.map(close, jax.tree.leaves(actual), jax.tree.leaves(expected))


# ---- the model ----


def model_in_float64(params, carry, inputs_BT, targets_BT):
    """The mean loss and its gradients; `params` and they as {name: array}."""
    num_layers, H, _, _ = params["w_x"].shape
    table, kernel = params["table"], params["kernel"]
    weights = [tuple(params[name][n] for name in ("w_x", "w_h", "b")) for n in range(num_layers)]
    y, tapes, width = table[inputs_BT.T], [], table.shape[1]
    y = np.pad(y, ((0, 0), (0, 0), (0, H - width)))
    for layer, state in zip(weights, zip(*carry, strict=True), strict=True):
        _, y, steps = forward(layer, state, y)
        tapes.append(steps)
    logits = y @ kernel + params["bias"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    is_target = (
        np.arange(p.shape[-1]) == targets_BT.T[..., None]
    )  # nowhere where it is to be ignored
    loss = -np.log(p[is_target]).sum() / is_target.sum()
    d_logits = (p * is_target.any(-1, keepdims=True) - is_target) / is_target.sum()
    grads = {"kernel": np.einsum("tbh,tbv->hv", y, d_logits), "bias": d_logits.sum((0, 1))}
    dy, of_layers = d_logits @ kernel.T, []
    for layer, steps in zip(reversed(weights), reversed(tapes), strict=True):
        d_layer, _, dy = backward(layer, steps, np.zeros((2, *dy.shape[1:])), dy)
        of_layers.insert(0, d_layer)
    grads |= dict(
        zip(("w_x", "w_h", "b"), map(np.stack, zip(*of_layers, strict=True)), strict=True)
    )
    grads["table"] = np.zeros_like(table)
    np.add.at(grads["table"], inputs_BT.T, dy[..., :width])
    return loss, grads


@st.composite
def models(draw):
    hidden_size = draw(st.integers(1, 20))
    return LM(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=hidden_size,
        embed_size=draw(st.integers(1, hidden_size)),
        vocab_size=draw(st.integers(2, 40)),
        dropout=0.0,
    )


@pytest.mark.law
@pytest.mark.parametrize("dtype", RELATIVE_ERRORS)
@settings(max_examples=3)
@given(task=models(), rows=st.integers(1, 5), seq_len=st.integers(1, 9), seed=st.integers(0, 999))
@example(task=LM(2, 13, 7, 30, dropout=0.0), rows=1, seq_len=1, seed=0)
def test_model_and_gradients(dtype, task, rows, seq_len, seed):
    widths = ("hidden_size", "embed_size", "vocab_size")
    wider = {name: getattr(task, name) + MORE_WIDTH[dtype] for name in widths}
    task = dataclasses.replace(task, dtype=dtype, batch_size=rows, seq_len=seq_len, **wider)
    parallel = Parallel(MeshConfig(devices=(0,)))
    mesh, rng = parallel.mesh.build(), np.random.default_rng(seed)
    state = init_state(task, parallel, mesh=mesh, seed=seed)

    def fill(variable):
        return variable.replace(jnp.asarray(rng.uniform(-1, 1, variable.shape), jnp.float32))

    carry = jax.tree.map(fill, state.carry, is_leaf=is_variable)
    inputs, targets = rng.integers(0, task.vocab_size, (2, rows, seq_len), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    targets[0, 0] = 1
    run = jax.jit(make_loss_and_grad(Setup.of(task, parallel, mesh=mesh)))
    given_state = dataclasses.replace(state, carry=carry)
    (loss, _), grads = run(given_state, Batch(inputs, targets, False))

    def by_name(tree):
        return {
            name.split(".")[-1]: np.asarray(variable.get_value(), np.float64)
            for name, variable in named_leaves(tree)
        }

    before = in_float64([part.get_value() for part in carry["lstm"]])
    expected = model_in_float64(by_name(state.params), before, inputs, targets)
    close = functools.partial(assert_close, bound=RELATIVE_ERRORS[dtype])
    jax.tree.map(close, (loss, by_name(grads)), expected)
