"""The layer, and the whole model, against a textbook LSTM in NumPy float64.

A relative error is that of a whole array, in the Euclidean norm: |actual - expected| / |expected|.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lib import api
from lib.float64 import RELATIVE_ERRORS, assert_close, backward, draw, forward

from jaxpar import MeshConfig, Parallel, init_state
from jaxpar.lm import IGNORE, LM, Batch
from jaxpar.nn import GateParams, LSTMCarry, lstm_layer

# Added to all widths. An array of one number, or two, may be a difference of larger ones: bfloat16 is not
# promised to keep 2 % of that, nor could any order of its sums.
MORE_WIDTH = {"float32": 0, "bfloat16": 8}


# ---- the textbook ----


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


@pytest.mark.more
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
    """The mean loss and its gradients; `params` and they as {name: array}, `carry` of each layer."""
    table, kernel = params["embedding.table"], params["head.kernel"]
    weights = [
        tuple(params[f"layers.{n}.{name}"] for name in ("w_x", "w_h", "b"))
        for n in range(len(carry))
    ]
    y, tapes, width = table[inputs_BT.T], [], table.shape[1]
    y = np.pad(y, ((0, 0), (0, 0), (0, len(kernel) - width)))
    for layer, state in zip(weights, carry, strict=True):
        _, y, steps = forward(layer, state, y)
        tapes.append(steps)
    logits = y @ kernel + params["head.bias"]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    is_target = (
        np.arange(p.shape[-1]) == targets_BT.T[..., None]
    )  # nowhere where it is to be ignored
    loss = -np.log(p[is_target]).sum() / is_target.sum()
    d_logits = (p * is_target.any(-1, keepdims=True) - is_target) / is_target.sum()
    grads = {
        "head.kernel": np.einsum("tbh,tbv->hv", y, d_logits),
        "head.bias": d_logits.sum((0, 1)),
    }
    dy = d_logits @ kernel.T
    for n, steps in reversed([*enumerate(tapes)]):
        d_layer, _, dy = backward(weights[n], steps, np.zeros((2, *dy.shape[1:])), dy)
        grads |= {f"layers.{n}.{k}": d for k, d in zip(("w_x", "w_h", "b"), d_layer, strict=True)}
    grads["embedding.table"] = np.zeros_like(table)
    np.add.at(grads["embedding.table"], inputs_BT.T, dy[..., :width])
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


@pytest.mark.more
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
    rng = np.random.default_rng(seed)
    state = init_state(task, parallel, seed=seed)
    carry = {  # (h, c) of all layers
        name: rng.uniform(-1, 1, array.shape).astype(np.float32)
        for name, array in api.stored(task, parallel, state).items()
        if name.startswith("carry/")
    }
    state = api.with_arrays(task, parallel, state, carry)
    inputs, targets = rng.integers(0, task.vocab_size, (2, rows, seq_len), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = IGNORE
    targets[0, 0] = 1
    found = api.gradients(task, parallel, Batch(inputs, targets, False), state)
    before = zip(carry["carry/lstm/h_BH"], carry["carry/lstm/c_BH"], strict=True)
    expected = model_in_float64(*in_float64((found.weights, [*before])), inputs, targets)
    close = functools.partial(assert_close, bound=RELATIVE_ERRORS[dtype])
    jax.tree.map(close, (found.loss, found.grads), expected)
