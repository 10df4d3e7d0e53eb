"""Layers with a matrix for each head: chunks of time against their formulas, step by step, in float64."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.any_model import Calm, assert_same
from lib.drawn import FAR_APART
from lib.laws import more, on_devices
from lib.models import MAKERS, WIDTH, Regression

from jaxpar import LayerContext, Parallel, PipelineConfig, Stack
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM
from jaxpar.nn import MLSTM, GatedDeltaNet, MLSTMCarry
from recipes.awd import AWD

# Sums in another order: float64 has 53 bits; float32 24, bfloat16 8, and some tens of roundings add up.
ROUNDING = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 2e-2}


# ---- the formulas ----


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def read(c, q):
    return jnp.einsum("bnkv,bnk->bnv", c, q)


def mlstm_step(state, q, k, v, log_i, log_f):
    c, n, m = state
    after = jax.lax.stop_gradient(jnp.maximum(log_f + m, log_i))
    f, i = jnp.exp(log_f + jax.lax.stop_gradient(m) - after), jnp.exp(log_i - after)
    c = f[..., None, None] * c + i[..., None, None] * outer(k, v)
    n = f[..., None] * n + i[..., None] * k
    divisor = jnp.maximum(jnp.abs(jnp.sum(n * q, -1)), jnp.exp(-after))
    return MLSTMCarry(c, n, after), read(c, q) / divisor[..., None]


def delta_step(s, q, k, v, log_a, b):
    s = jnp.exp(log_a)[..., None, None] * s
    s = s + outer(k, b[..., None] * (v - read(s, k)))
    return s, read(s, q)


def step_by_step(step):
    """A function of the arguments of `api.mlstm` or `api.gated_delta`."""

    def run(*arguments):
        *xs, carry, resets, initial = arguments

        def one(state, inputs):
            *x, is_new = inputs

            def choose(old, new):
                return jnp.where(jnp.expand_dims(is_new, range(1, old.ndim)), new, old)

            return step(jax.tree.map(choose, state, initial), *x)

        return jax.lax.scan(one, carry, (*xs, resets))

    return run


class Memory(NamedTuple):
    """One of the two: in chunks, step by step, its layer, and what it is given.

    Attributes:
      gates: of two arrays of any numbers, as the layers make them.
    """

    chunked: object
    step: object
    layer: object
    gates: object


def mlstm_gates(a, b):
    return a, nnx.log_sigmoid(b)


def delta_gates(a, b):
    return -3 * nnx.softplus(a), 2 * nnx.sigmoid(b)


MEMORIES = {
    "mlstm": Memory(api.mlstm, mlstm_step, MLSTM, mlstm_gates),
    "gated_delta": Memory(
        api.gated_delta,
        delta_step,
        functools.partial(GatedDeltaNet, negative_eigenvalues=True),
        delta_gates,
    ),
}


def normal_states(rng, name, *shape):
    """States as steps before may have left them, of heads of D units: [*shape, D, D]."""
    *rows, size = shape
    c, n, m = (rng.normal(size=(*rows, *own)) for own in ((size, size), (size,), ()))
    return MLSTMCarry(c, n, m) if name == "mlstm" else c


def draw(name, steps, rows=2, heads=3, size=4, *, gates=None, reset=0.2, seed=0):
    """The arguments of a memory; keys have the length 1."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, steps, rows, heads, size))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    drawn = rng.normal(size=(2, steps, rows, heads)) if gates is None else gates(rng)
    carry, initial = (normal_states(rng, name, rows, heads, size) for _ in range(2))
    gates = MEMORIES[name].gates(*map(jnp.asarray, drawn))
    return q, k, v, *gates, carry, rng.random((steps, rows)) < reset, initial


def in_float64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def assert_close(actual, expected, bound):
    """Each array as a whole."""
    pairs = zip(*map(jax.tree.leaves_with_path, (actual, expected)), strict=True)
    for (path, ours), (_, theirs) in pairs:
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert ours.shape == theirs.shape
        error, scale = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
        assert error <= bound * scale, f"{path}: error {error:.1e} of {scale:.1e}"


def with_gradients(function, arguments, cotangents=None):
    """What it gives of arguments (*xs, carry, resets, initial), and their cotangents but for the resets'."""
    *before, resets, initial = arguments

    @jax.jit
    def both(before, initial, resets, cotangents):
        out, vjp = jax.vjp(lambda own, new: function(*own, resets, new), before, initial)
        if cotangents is None:
            rng = np.random.default_rng(1)
            cotangents = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), out)
        return out, vjp(cotangents)

    return both(before, initial, resets, cotangents)


# ---- chunks of time ----


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(
    ("steps", "chunk", "reset"),
    [
        (13, 5, 0.2), more(1, 64, 0.0), more(12, 4, 0.0), more(12, 4, 1.0), more(9, 1, 0.2), more(7, 64, 0.5),
        more(70, 64, 0.02),
    ],
)  # fmt: skip
def test_chunks_and_their_gradients_equal_steps(name, steps, chunk, reset):
    memory = MEMORIES[name]
    with jax.enable_x64(True):
        arguments = draw(name, steps, reset=reset)
        expected = with_gradients(step_by_step(memory.step), arguments)
        actual = with_gradients(functools.partial(memory.chunked, chunk=chunk), arguments)
        assert_close(actual, expected, ROUNDING["float64"])
        if reset == 0.0:  # the same, where the batch says nothing of resets
            *before, _, initial = arguments
            run = functools.partial(memory.chunked, chunk=chunk)
            assert_close(run(*before), run(*before, arguments[-2], initial), ROUNDING["float64"])


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("name", MEMORIES)
def test_gates_that_are_wide_open_or_shut_stay_finite_and_right(name):
    def extreme(rng):
        return rng.choice([-50.0, 50.0, 0.0], size=(2, 70, 2, 3))

    q, k, *rest = draw(name, 70, gates=extreme, reset=0.0)
    arguments = abs(q), abs(k), *rest  # no divisor of an mLSTM is a difference
    arguments = jax.tree.map(
        lambda a: jnp.asarray(a, a.dtype if a.dtype == bool else "float32"), arguments
    )
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: a if a.dtype == bool else a.astype("float64"), arguments)
        expected, _ = with_gradients(step_by_step(MEMORIES[name].step), exact)
    (after, y), grads = with_gradients(MEMORIES[name].chunked, arguments)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves((after, y, grads)))
    assert_close((after, y), expected, ROUNDING["float32"])


# ---- the layers ----


def layer_by_steps(name, layer, x, resets):
    """The formulas of a layer from the beginning of a sequence, in the dtype of x."""
    w, w_g = (p[...].astype(x.dtype) for p in (layer.w, layer.w_g))
    z, (a, b) = jnp.einsum("tbi,icnd->ctbnd", x, w), jnp.einsum("tbi,icn->ctbn", x, w_g)
    if name == "mlstm":
        z = z + layer.b[...].astype(x.dtype)[:, None, None]
        gates = layer.b_g[...].astype(x.dtype)[:, None, None]
        q, k, v, o = z
        k, a, b = k / k.shape[-1] ** 0.5, a + gates[0], nnx.log_sigmoid(b + gates[1])
    else:
        q, k = (each / jnp.sqrt(jnp.sum(each**2, -1, keepdims=True) + 1e-6) for each in z[:2])
        v, rate = z[2], jnp.exp(layer.decay[...].astype(x.dtype))
        a = -rate[None, None] * nnx.softplus(a + layer.b[...].astype(x.dtype)[None, None])
        b = nnx.sigmoid(b) * (2 if layer.negative_eigenvalues else 1)
    start = jax.tree.map(lambda s: s.astype(x.dtype), layer.initial_carry(x.shape[1]))
    after, y = step_by_step(MEMORIES[name].step)(q, k, v, a, b, start, resets, start)
    y = nnx.sigmoid(o) * y if name == "mlstm" else y
    return after, y.reshape(*y.shape[:2], -1)


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("dtype", ["float32", more("bfloat16")])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_layer_and_its_gradients_equal_its_formulas(name, dtype):
    layer, rng = MEMORIES[name].layer(32, inputs=24, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    if name == "mlstm":  # no divisor is a small difference
        layer.b[...] = layer.b[...].at[:2].set(3.0)
    x, dy = rng.normal(size=(70, 3, 24)), rng.normal(size=(70, 3, 32))
    x, resets = np.asarray(jnp.asarray(x, dtype), np.float32), rng.random((70, 3)) < 0.03
    graphdef, params = nnx.split(layer)

    def loss(run, params, x, dy):
        after, y = run(nnx.merge(graphdef, params), x)
        return jnp.sum(y.astype(dy.dtype) * dy), (after, y)

    def by_steps(layer, x):
        return layer_by_steps(name, layer, x, resets)

    def ours(layer, x):
        at = LayerContext(0, 0, 0, batch={"resets": jnp.asarray(resets)})
        return layer(layer.initial_carry(3), x.astype(dtype), at)

    def gradients(run, dtype):
        both = jax.value_and_grad(functools.partial(loss, run), (0, 1), has_aux=True)
        (_, out), grads = jax.jit(both)(params, jnp.asarray(x, dtype), jnp.asarray(dy, dtype))
        return out, grads

    with jax.enable_x64(True):
        expected = gradients(by_steps, "float64")
    actual = gradients(ours, "float32")
    assert actual[0][1].dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(actual[0][0])} == {jnp.dtype("float32")}
    (after, y), grads = (jax.tree.map(jnp.asarray, each) for each in actual)
    if name == "mlstm":  # whose state is the same, however it is scaled
        after, theirs = (
            (
                own.c_BNKV * np.exp(own.m_BN)[..., None, None],
                own.n_BNK * np.exp(own.m_BN)[..., None],
            )
            for own in map(in_float64, (after, expected[0][0]))
        )
    else:
        theirs = expected[0][0]
    y_of_steps, grads_of_steps = expected[0][1], expected[1]
    if dtype == "bfloat16":  # a gradient of a few numbers may be a difference of larger ones
        grads, grads_of_steps = (
            np.concatenate([np.ravel(a) for a in jax.tree.leaves(own)])
            for own in (grads, grads_of_steps)
        )
    expected = theirs, y_of_steps, grads_of_steps
    assert_close((after, y, grads), expected, ROUNDING[dtype])


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("name", MEMORIES)
def test_windows_after_one_another_are_one_window(name):
    """Also windows of one step, as in sampling."""
    layer = MEMORIES[name].layer(8, num_heads=2, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(80, 2, 8)), jnp.float32)
    at = LayerContext(0, 0, 0)
    run = nnx.jit(lambda layer, carry, x: layer(carry, x, at))
    expected = run(layer, layer.initial_carry(2), x)
    carry, ys = layer.initial_carry(2), []
    for first, last in [(0, 66), *((n, n + 1) for n in range(66, 80))]:
        carry, y = run(layer, carry, x[first:last])
        ys.append(y)
    assert_close((carry, jnp.concatenate(ys)), expected, ROUNDING["float32"])


@pytest.mark.parametrize("kind", [MLSTM, GatedDeltaNet])
def test_heads_that_do_not_divide_the_width_are_refused(kind):
    with pytest.raises(ValueError, match=r"num_heads=4 does not divide width=6"):
        kind(6, rngs=nnx.Rngs(0))


def test_options_of_other_layers_are_refused():
    with pytest.raises(ValueError, match=r"forget_bias=0\.5: layer='mlstm' has no forget bias"):
        LM(layer="mlstm", forget_bias=0.5)
    with pytest.raises(
        ValueError, match=r"drop_connect=0\.5: layer='gated_delta' has no recurrent"
    ):
        AWD(hidden_size=1152, layer="gated_delta", forget_bias=1.0)
    with pytest.raises(
        ValueError, match=r"tar=1\.0: the state of layer='mlstm' has no last output"
    ):
        AWD(hidden_size=1152, layer="mlstm", forget_bias=1.0, drop_connect=0.0, tar=1.0)


# ---- other programs ----

TORCH_SIDE = """
import importlib.util, pathlib, sys
import numpy as np
import torch
from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd

# Plain PyTorch; to import the package itself takes Triton.
package = pathlib.Path(importlib.util.find_spec("fla").origin).parent
path = package / "ops" / "gated_delta_rule" / "naive.py"
spec = importlib.util.spec_from_file_location("naive", path)
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

name, source, target = sys.argv[1:]
given = {key: torch.from_numpy(a) for key, a in np.load(source).items()}
dy, xs = given.pop("dy"), [given[key].requires_grad_() for key in ("q", "k", "v", "a", "b")]
if name == "mlstm":  # [B, N, T, D]; it divides k itself, and takes the logistic function of the forget gate
    y, state = mlstm_chunkwise__native_autograd(
        *(x.transpose(1, 2) for x in xs), return_last_states=True, eps=0.0, chunk_size=32
    )
    y, after = y.transpose(1, 2), {"c": state[0], "n": state[1], "m": state[2].reshape(state[0].shape[:2])}
else:
    q, k, v, log_a, b = xs
    y, state = naive.naive_recurrent_gated_delta_rule(
        q, k, v, b, log_a, scale=1.0, output_final_state=True
    )
    after = {"c": state}
(y * dy).sum().backward()
found = {"y": y, **after} | {f"d{key}": x.grad for key, x in zip("qkvab", xs)}
np.savez(target, **{key: a.detach().numpy() for key, a in found.items()})
"""


@pytest.fixture(scope="module")
def torch_python():
    """A Python with them; JAXPAR_MEMORIES_PYTHON names it."""
    python = os.environ.get("JAXPAR_MEMORIES_PYTHON", sys.executable)
    modules = "torch, mlstm_kernels, importlib.util as i; assert i.find_spec('fla')"
    if subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode:
        pytest.skip(
            f"{python} has no torch, mlstm-kernels and flash-linear-attention; name one that has in "
            f"JAXPAR_MEMORIES_PYTHON"
        )
    return python


@pytest.mark.law
@pytest.mark.parametrize("name", MEMORIES)
def test_the_programs_of_the_papers_authors_give_the_same(torch_python, name, tmp_path):
    """And the same gradients, in float32."""
    rng, T, B, N, D = np.random.default_rng(0), 128, 2, 3, 8
    q, k, v, dy = rng.normal(size=(4, T, B, N, D)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a, b = rng.normal(size=(2, T, B, N)).astype(np.float32)
    if name == "gated_delta":
        a, b = (np.asarray(gate) for gate in delta_gates(jnp.asarray(a), jnp.asarray(b)))
    layer = MEMORIES[name].layer(N * D, num_heads=N, rngs=nnx.Rngs(0))

    def ours(q, k, v, a, b):
        gates = (a, nnx.log_sigmoid(b)) if name == "mlstm" else (a, b)
        k = k * D**-0.5 if name == "mlstm" else k
        return MEMORIES[name].chunked(q, k, v, *gates, layer.initial_carry(B))

    @jax.jit
    def both(arguments, dy):
        y, vjp, after = jax.vjp(lambda *own: ours(*own)[::-1], *arguments, has_aux=True)
        return y, vjp(dy), after

    y, grads, after = both((q, k, v, a, b), dy)
    arrays = {key: np.swapaxes(x, 0, 1) for key, x in zip("qkvab", (q, k, v, a, b), strict=True)}
    np.savez(tmp_path / "given.npz", dy=np.swapaxes(dy, 0, 1), **arrays)
    files = [str(tmp_path / file) for file in ("given.npz", "found.npz")]
    subprocess.run([torch_python, "-c", TORCH_SIDE, name, *files], check=True)
    with np.load(files[1]) as file:
        theirs = dict(file)
    expected = {
        key: np.swapaxes(theirs.pop(key), 0, 1) for key in ("y", "dq", "dk", "dv", "da", "db")
    }
    actual = {"y": y, **dict(zip(("dq", "dk", "dv", "da", "db"), grads, strict=True))}
    assert_close(actual, expected, FAR_APART)
    after = dict(zip("cnm", after, strict=True)) if name == "mlstm" else {"c": after}
    if name == "mlstm":  # they divide q by sqrt(D), not k, and their state is scaled otherwise
        theirs |= {key: theirs[key] / D**0.5 for key in "cn"}
        for state in (after, theirs):
            state["c"], state["n"] = (
                np.asarray(state[key], np.float64)
                * np.exp(np.float64(state["m"])).reshape(B, N, *[1] * dims)
                for key, dims in (("c", 2), ("n", 1))
            )
            del state["m"]
    assert_close(after, theirs, ROUNDING["float32"])


# ---- memory, and what is sent ----


@functools.cache
def temporary_bytes(name, steps):
    """Of the gradients of a layer over a window of so many steps."""
    layer = MEMORIES[name].layer(32, num_heads=2, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        layer = nnx.merge(graphdef, params)
        return jnp.sum(layer(layer.initial_carry(1), x, LayerContext(0, 0, 0))[1])

    x = jax.ShapeDtypeStruct((steps, 1, 32), "float32")
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.more
@pytest.mark.parametrize("name", [*MEMORIES])
def test_memory_grows_with_inputs_and_outputs_alone(name):
    """What is kept of a step: vectors and gates of its heads with their cotangents, and y; no matrices.

    A state before each chunk is a quarter of x here. Step by step, each step's alone would be 16 times x; all
    is less than that (11 to 15, by layer and version of JAX).
    """
    few, many = (temporary_bytes(name, steps) for steps in (8_192, 65_536))
    of_x = (65_536 - 8_192) * 32 * 4
    assert many - few < 16 * of_x


# ---- on meshes ----


@dataclasses.dataclass(frozen=True)
class Memories(Calm):
    """A model of such layers of four heads, and others."""

    kinds: tuple[str, ...] = ("mlstm", "gated_delta")

    def make_model(self, rngs):
        model = Regression((), rngs=rngs)
        makers = {
            name: functools.partial(memory.layer, WIDTH, dropout=0.2)
            for name, memory in MEMORIES.items()
        }
        makers = [makers.get(kind, MAKERS.get(kind)) for kind in self.kinds]
        model.layers = Stack(
            [lambda rngs, make=make: make(rngs=rngs) for make in makers], rngs=rngs
        )
        return model


@pytest.mark.full
@pytest.mark.law
def test_they_are_the_same_on_devices():
    """Where sequences begin within windows, too."""
    pipeline = PipelineConfig(num_microbatches=2, num_chunks=4)
    assert_same(Memories(), Parallel(on_devices((2, 2, 2)), pipeline), FAR_APART)


@pytest.mark.more
@pytest.mark.parametrize("layer", ["mlstm", more("gated_delta")])
def test_nothing_is_sent_over_tensor_within_the_loop_over_chunks(layer):
    """A window has eight chunks: in their loop, each collective would run as often."""
    task = LM(1, 16, 16, vocab_size=384, batch_size=2, seq_len=512, layer=layer, dropout=0.0)
    found = inspect_step(task, Parallel(on_devices((1, 1, 4)))).collectives
    runs = [each.count for each in found if each.axes == ("tensor",)]
    assert 0 < max(runs) < 8


# ---- what they cost ----


@pytest.mark.more
@pytest.mark.parametrize("steps", [8, more(128)])
def test_flops_are_those_of_products_of_steps_with_steps_and_with_states(steps):
    """Of chunks of any length."""
    task = LM(1, 32, 32, vocab_size=384, batch_size=2, seq_len=steps, layer="mlstm", dropout=0.0)
    [(forward, weights)] = api.layer_flops(task)
    rows, chunk = steps * 2, min(steps, 64)
    projections = rows * 32 * (4 * 32 + 2 * 4 + 2 * 32)  # with those of the block around it
    # q k^T and its product with v; q with C and n, and C of k and v, of four heads of eight.
    within, states = 2 * rows * 4 * chunk * 8, rows * 4 * (2 * 8 * 8 + 8)
    assert forward == 2 * (projections + within + states)
    assert weights == 2 * projections  # out of the loop over chunks
