"""Heads: recurrent matrices of blocks, each of which is a layer's of its own, and waits for no device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.laws import MODEL, more, on_devices

from jaxpar import LayerContext, Parallel, PipelineConfig, init_state, inspect_step
from jaxpar.lm import LM
from jaxpar.nn import GRU, LSTM, SLSTM, MinGRU

T, B, H, N = 6, 3, 8, 4
LAYERS = {"lstm": LSTM, "gru": GRU, "slstm": SLSTM}


def dense(blocks_NDGD):
    """The whole matrix, [H, G, H], of blocks on its diagonal."""
    heads, size, gates, _ = blocks_NDGD.shape
    whole = jnp.zeros((heads, size, gates, heads, size), blocks_NDGD.dtype)
    for head in range(heads):
        whole = whole.at[head, :, :, head].set(blocks_NDGD[head])
    return whole.reshape(heads * size, gates, heads * size)


def results(layer, w_h, x, carry, resets):
    """(outputs, carry) of a layer with another recurrent matrix, and the cotangents of all that it takes."""
    graphdef, state = nnx.split(layer)

    def run(w_h, rest, x, carry):
        model = nnx.merge(graphdef, rest)
        model.w_h[...] = w_h
        batch = {"resets": jnp.asarray(resets)}
        after, y = model(carry, x, LayerContext(0, 0, 0, batch=batch))
        return y, after

    out, vjp = jax.vjp(run, w_h, state, x, carry)
    weights = jax.tree.map(
        lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), out
    )
    d_w_h, d_rest, *rest = vjp(weights)
    return out, d_w_h, [d_rest["w_x"], d_rest["b"]], rest


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("name", LAYERS)
def test_heads_are_a_matrix_of_blocks(name):
    draw = np.random.default_rng(0).normal
    layer = LAYERS[name](H, num_heads=N, inputs=5, rngs=nnx.Rngs(0))
    one = LAYERS[name](H, inputs=5, rngs=nnx.Rngs(0))
    one.w_x[...], one.b[...] = layer.w_x[...], layer.b[...]
    x, resets = jnp.asarray(draw(size=(T, B, 5)), jnp.float32), np.zeros((T, B), np.float32)
    resets[2, 1] = resets[4, 0] = 1
    carry = jax.tree.map(
        lambda a: abs(jnp.asarray(draw(size=a.shape), jnp.float32)), one.initial_carry(B)
    )
    w_h = layer.w_h[...]
    assert w_h.shape == (N, H // N, len(layer.w_x[0]), H // N)
    out, d_w_h, d_own, d_rest = results(layer, w_h, x, carry, resets)
    expected, d_dense, *d_others = results(one, dense(w_h), x, carry, resets)
    of_blocks = jnp.stack([d_dense.reshape(N, H // N, -1, N, H // N)[n, :, :, n] for n in range(N)])
    pairs = ((out, expected), (d_w_h, of_blocks), ([d_own, d_rest], d_others))
    for actual, wanted in pairs:
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_one_head_has_the_matrix_that_it_had():
    layer = LSTM(H, rngs=nnx.Rngs(0))
    assert layer.w_h.shape == (H, 4, H)
    program = jax.make_jaxpr(lambda x: layer(layer.initial_carry(B), x, LayerContext(0, 0, 0)))
    assert "reshape" not in str(program(jnp.ones((T, B, H))))


@pytest.mark.more
@pytest.mark.parametrize("mesh", [(1, 2, 2), more((1, 1, 2)), more((2, 2, 2))])
@pytest.mark.parametrize("layer", ["lstm", more("gru"), more("slstm")])
def test_no_time_step_waits_for_another_device(mesh, layer):
    """Loops over time have 7 turns here, or the 7 steps of a chunk."""
    task = dataclasses.replace(MODEL, layer=layer, seq_len=7 * mesh[1])
    for num_heads, waits in ((1, True), (4, False)):
        task = dataclasses.replace(task, num_heads=num_heads)
        parallel = Parallel(on_devices(mesh), PipelineConfig(num_chunks=mesh[1]))
        report = inspect_step(task, parallel)
        over_time = [c for c in report.along("tensor") if 7 in c.trip_counts]
        assert bool(over_time) == waits, over_time


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="width=8 does not divide by num_heads=3"):
        LSTM(8, num_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="MinGRU has no recurrent matrix to split"):
        MinGRU(8, num_heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads=2: layer='rglru' has no recurrent matrix"):
        LM(layer="rglru", num_heads=2)
    with pytest.raises(ValueError, match=r"num_heads=2 .*tensor=4"):
        init_state(dataclasses.replace(MODEL, num_heads=2), "tp4")
