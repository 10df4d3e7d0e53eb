"""The recurrent layers against textbook loops in NumPy float64, resets and learned initial states included.

A textbook is the formula of a step, written out once more; its gradients are slopes of a complex step, which
nothing cancels in (Squire and Trapp 1998), in random directions.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lib.drawn import RELATIVE_ERRORS

from jaxpar import LayerContext
from jaxpar.nn import (
    GRU,
    RGLRU,
    SLSTM,
    Bidirectional,
    GateParams,
    MinGRU,
    SLSTMCarry,
    gru_layer,
)  # fmt: skip

# A row that goes the same ways as others.
more = functools.partial(pytest.param, marks=pytest.mark.more)

MORE_WIDTH = {
    "float32": 0,
    "bfloat16": 8,
}  # a gradient of few numbers may be a difference of larger ones


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def project(x, w):
    if w.ndim == 4:  # blocks of heads
        z = np.einsum("bnj,njgh->gbnh", x.reshape(len(x), len(w), -1), w)
        return z.reshape(len(z), *x.shape)
    return np.einsum("bi,igh->gbh", x, w)


def gru(w, h, x):
    zx, zh, b = project(x, w["w_x"]), project(h, w["w_h"]), w["b"][:, None]
    r, z = sigmoid(zx[0] + zh[0] + b[0]), sigmoid(zx[1] + zh[1] + b[1])
    n = np.tanh(zx[2] + b[2] + r * (zh[2] + b[3]))
    return (1 - z) * n + z * h


def min_gru(w, h, x):
    z, n = project(x, w["w"]) + w["b"][:, None]
    return (1 - sigmoid(z)) * h + sigmoid(z) * n


def rg_lru(w, h, x):
    r, i = sigmoid(project(x, w["w"]) + w["b"][:, None])
    a = np.exp(-8 * np.log(1 + np.exp(w["decay"])) * r)
    return a * h + np.sqrt(1 - a**2) * i * x


def slstm(w, state, x):
    """Without what keeps its numbers small."""
    h, c, n = state
    i, f, z, o = project(x, w["w_x"]) + project(h, w["w_h"]) + w["b"][:, None]
    c, n = sigmoid(f) * c + np.exp(i) * np.tanh(z), sigmoid(f) * n + np.exp(i)
    return np.stack([sigmoid(o) * c / n, c, n])


TEXTBOOKS = {"gru": gru, "mingru": min_gru, "rglru": rg_lru, "slstm": slstm}
HEADS = {"num_heads": 2}
LAYERS = {"gru": GRU, "mingru": MinGRU, "rglru": RGLRU, "slstm": SLSTM}


def textbook(name, weights, start, initial, x, resets):
    """The state after the last step, and the outputs."""
    state, outputs = start, []
    for x_t, is_new in zip(x, resets, strict=True):
        mask = is_new[:, None]
        state = np.where(mask, initial, state)
        state = TEXTBOOKS[name](weights, state, x_t)
        outputs.append(state[0] if state.ndim == 3 else state)
    return state, np.stack(outputs)


def learned(kind):
    """The layer with an initial state of its own."""

    class Learned(kind):
        def __init__(self, width, **options):
            rngs = options["rngs"]
            super().__init__(width, **options)
            shape = (3, width) if kind is SLSTM else (width,)
            draw = jax.random.normal(rngs.params(), shape)
            self.start = nnx.Param(jnp.abs(draw) + 0.5 if kind is SLSTM else draw)

        def initial_carry(self, rows):
            start = self.start[...]
            wide = jnp.broadcast_to(start[..., None, :], (*start.shape[:-1], rows, self.width))
            return SLSTMCarry(*wide, jnp.zeros_like(wide[0])) if kind is SLSTM else wide

    return Learned


def to_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def assert_close(actual, expected, bound):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 20))


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("dtype", ["float32", more("bfloat16")])
@pytest.mark.parametrize(
    ("name", "heads"),
    [*((name, {}) for name in LAYERS), *((name, HEADS) for name in ("gru", "slstm"))],
)
@settings(max_examples=2)
@given(sizes=SIZES, seed=st.integers(0, 999), with_resets=st.booleans())
@example(sizes=(9, 4, 7), seed=0, with_resets=True)
def test_layers_and_their_gradients_equal_textbooks(name, heads, dtype, sizes, seed, with_resets):
    T, B, H = sizes
    H = (H + MORE_WIDTH[dtype]) * heads.get("num_heads", 1)
    rng = np.random.default_rng(seed)
    layer = learned(LAYERS[name])(H, rngs=nnx.Rngs(seed), **heads)
    graphdef, params = nnx.split(layer)
    x, dy = (rng.normal(size=(T, B, H)).astype(np.float32) for _ in range(2))
    resets = rng.random((T, B)) < 0.3 if with_resets else np.zeros((T, B), bool)
    batch = {"resets": jnp.asarray(resets)} if with_resets else {}

    def ours(params, x):
        layer = nnx.merge(graphdef, params)
        at = LayerContext(0, 0, 0, batch=batch)
        after, y = layer(layer.initial_carry(B), x.astype(dtype), at)
        return jnp.sum(y.astype(jnp.float32) * dy), (after, y)

    both = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))
    (_, (after, y)), (grads, dx) = both(params, jnp.asarray(x))
    weights = {path[0]: np.asarray(v, np.float64) for path, v in nnx.to_flat_state(params)}

    def loss(weights, x):
        start = weights["start"]
        start = np.broadcast_to(start[..., None, :], (*start.shape[:-1], B, H))
        state, outputs = textbook(name, weights, start, start, x, resets)
        return np.sum(outputs * dy), state, outputs

    _, state, outputs = loss(weights, x.astype(np.float64))
    bound = RELATIVE_ERRORS[dtype]
    assert y.dtype == dtype
    assert_close(y, outputs, bound)
    if name == "slstm":
        scale = np.exp(to_float64(after.m_BH))
        after = np.stack([after.h_BH, after.c_BH * scale, after.n_BH * scale])
    assert_close(after, state, bound)

    def slope(weights, x):
        return loss(weights, x)[0].imag / 1e-30

    flat = {path[0]: np.asarray(v) for path, v in nnx.to_flat_state(grads)}
    for number, (key, grad) in enumerate([*flat.items(), ("x", np.asarray(dx))]):
        direction = np.random.default_rng(number).normal(size=grad.shape)
        step = 1e-30j * direction
        moved = weights if key == "x" else {**weights, key: weights[key] + step}
        expected = slope(moved, x + step if key == "x" else x.astype(np.complex128))
        assert abs(np.sum(grad * direction) - expected) <= bound * np.linalg.norm(
            grad
        ) * np.linalg.norm(direction), key


def from_torch(tensors, layer):
    """The weights of a layer of `torch.nn.GRU`."""
    weight_ih, weight_hh, bias_ih, bias_hh = (
        tensors[f"{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    H = weight_hh.shape[1]
    b_x, b_h = bias_ih.reshape(3, H), bias_hh.reshape(3, H)
    b_4H = np.stack([b_x[0] + b_h[0], b_x[1] + b_h[1], b_x[2], b_h[2]])
    w_x, w_h = weight_ih.T.reshape(-1, 3, H), weight_hh.T.reshape(H, 3, H)
    return GateParams(*map(jnp.asarray, (w_x, w_h, b_4H)))


def to_torch(params, layer):
    """The other way round; where PyTorch adds two biases, the second is zero."""
    w_x, w_h, b = (np.asarray(a) for a in params)
    H = w_h.shape[0]
    tensors = {
        "weight_ih": w_x.reshape(-1, 3 * H).T,
        "weight_hh": w_h.reshape(-1, 3 * H).T,
        "bias_ih": b[:3].ravel(),
        "bias_hh": np.concatenate([np.zeros_like(b[:2]), b[3:]]).ravel(),
    }
    return {f"{name}_l{layer}": tensor for name, tensor in tensors.items()}


@pytest.mark.law
def test_gru_and_its_gradients_equal_torch():
    """By `torch_gru.npz`, which `torch_gru.py` wrote with PyTorch."""
    with np.load(Path(__file__).with_name("torch_gru.npz")) as file:
        arrays = {name: file[name] for name in file.files}
    tensors = {n.split("/")[1]: a for n, a in arrays.items() if n.startswith("weights/")}
    params = [from_torch(tensors, layer) for layer in range(2)]

    def ours(params, h_0, x):
        h_n = []
        for layer, h in zip(params, h_0, strict=True):
            h, x = gru_layer(layer, h, x)
            h_n.append(h)
        return jnp.stack(h_n), x

    (h_n, y), vjp = jax.vjp(ours, params, *map(jnp.asarray, (arrays["h_0"], arrays["x"])))
    grads, dh_0, dx = vjp((jnp.asarray(arrays["dh_n"]), jnp.asarray(arrays["dy"])))
    found = {"y": y, "h_n": h_n, "dh_0": dh_0, "dx": dx}
    for name, array in found.items():
        assert_close(array, arrays[name], RELATIVE_ERRORS["float32"])
    for layer, (weights, grad) in enumerate(zip(params, grads, strict=True)):
        # Of two biases that are added each has the gradient of the sum.
        for name, array in to_torch(grad, layer).items():
            theirs = arrays[f"gradients/{name}"]
            own = slice(2 * theirs.shape[0] // 3, None) if "bias_hh" in name else slice(None)
            assert_close(array[own], theirs[own], RELATIVE_ERRORS["float32"])
        back = to_torch(weights, layer)
        assert {name for name in tensors if name.endswith(str(layer))} == back.keys()
        summed = back[f"bias_ih_l{layer}"] + back[f"bias_hh_l{layer}"]
        theirs = tensors[f"bias_ih_l{layer}"] + tensors[f"bias_hh_l{layer}"]
        np.testing.assert_allclose(summed, theirs, rtol=1e-6)
        for name in (f"weight_ih_l{layer}", f"weight_hh_l{layer}"):
            np.testing.assert_array_equal(back[name], tensors[name])


@pytest.mark.law
def test_both_directions_read_every_sequence_by_itself():
    rng, cut = np.random.default_rng(0), 4
    layer = Bidirectional(*(learned(GRU)(5, rngs=nnx.Rngs(seed)) for seed in (0, 1)), merge=join)
    x = jnp.asarray(rng.normal(size=(9, 2, 5)), jnp.float32)
    resets = jnp.zeros((9, 2), bool).at[cut].set(True)
    after, y = layer(layer.initial_carry(2), x, LayerContext(0, 0, 0, batch={"resets": resets}))
    ends = []
    for first, last in ((0, cut), (cut, 9)):
        at, part = LayerContext(0, 0, 0), x[first:last]
        end, forward = layer.first(layer.first.initial_carry(2), part, at)
        _, backward = layer.second(layer.second.initial_carry(2), part[::-1], at)
        bound = RELATIVE_ERRORS["float32"]
        assert_close(y[first:last], jnp.concatenate([forward, backward[::-1]], -1), bound)
        ends.append(end)
    assert_close(after, ends[-1], bound)


def join(a, b):
    return jnp.concatenate([a, b], -1)
