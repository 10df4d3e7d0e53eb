"""Sequences that begin within a window: packed they are what they are one by one.

The oracle takes each of them by itself, from its initial state, in NumPy float64 (a textbook LSTM), or as a
plain model in JAX without stack, step and engine.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from lib import api
from lib.float64 import RELATIVE_ERRORS, assert_close, backward, draw, forward
from lib.laws import on_devices

import jaxpar
from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    init_state,
    make_train_step,
    value_and_grad,
)
from jaxpar.nn import LSTM, GateParams, LSTMCarry, lstm_layer

# ---- the layer ----


def pieces_of(resets_TB):
    """(row, first step, end) of what lies between resets; what begins a row goes on from its carry."""
    T, B = resets_TB.shape
    for row in range(B):
        bounds = sorted({0, T, *np.flatnonzero(resets_TB[:, row])})
        yield from ((row, a, b) for a, b in itertools.pairwise(bounds))


def one_by_one(arguments, cotangents, resets_TB, initial):
    """State, outputs, and gradients of weights, carry, inputs and initial state, piece by piece."""
    params, carry, x = jax.tree.map(np.float64, arguments)
    d_carry, dy = jax.tree.map(np.float64, cotangents)
    y, dx = np.zeros_like(dy), np.zeros_like(x)
    after, d_before, d_initial = (jax.tree.map(np.zeros_like, carry) for _ in range(3))
    d_params = jax.tree.map(np.zeros_like, params)
    for row, a, b in pieces_of(resets_TB):
        goes_on, goes_off = not resets_TB[a, row], b == len(x)
        here = slice(row, row + 1)
        start = tuple(s[here] for s in (carry if goes_on else initial))
        end, y[a:b, here], steps = forward(params, start, x[a:b, here])
        d_end = tuple(d[here] * goes_off for d in d_carry)
        d_own, d_start, dx[a:b, here] = backward(params, steps, d_end, dy[a:b, here])
        d_params = jax.tree.map(np.add, d_params, d_own)
        for total, d in zip(d_before if goes_on else d_initial, d_start, strict=True):
            total[here] += d
        if goes_off:
            for whole, part in zip(after, end, strict=True):
                whole[here] = part
    return after, y, d_params, d_before, dx, d_initial


@settings(max_examples=6)
@given(
    T=st.integers(1, 7),
    B=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    learned=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_a_layer_with_resets_equals_its_sequences_one_by_one(T, B, share, learned, dtype, seed):
    arguments, cotangents = draw(T, B, 9, 9, seed)
    rng = np.random.default_rng(seed)
    resets_TB = rng.random((T, B)) < share
    initial = tuple(rng.normal(size=(2, B, 9)).astype(np.float32) * learned)
    expected = one_by_one(arguments, cotangents, resets_TB, initial)

    def run(params, carry, x, initial):
        return lstm_layer(params, carry, x.astype(dtype), resets_TB, initial)

    params, carry, x = GateParams(*arguments[0]), LSTMCarry(*arguments[1]), arguments[2]
    start = LSTMCarry(*initial) if learned else None
    (after, y), vjp = jax.vjp(run, params, carry, jnp.asarray(x), start)
    d_params, d_carry, dx, d_start = vjp((LSTMCarry(*cotangents[0]), cotangents[1].astype(y.dtype)))
    actual = (tuple(after), y, tuple(d_params), tuple(d_carry), dx, tuple(d_start or ()))
    expected = expected if learned else (*expected[:-1], ())
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(ours, theirs, RELATIVE_ERRORS[dtype])


# ---- a model of such layers, on meshes and schedules ----

FEATURES, WIDTH = 3, 8


class Leaky(nnx.Module):
    """A layer of a user's own; the state that it begins from is learned, and no parameter itself."""

    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5)
        self.start = nnx.Param(jnp.linspace(-1.0, 1.0, WIDTH))

    def initial_carry(self, rows):
        return jnp.broadcast_to(jnp.tanh(self.start[...]), (rows, WIDTH))

    def __call__(self, h, x_TBW, at):
        initial = self.initial_carry(x_TBW.shape[1])

        def step(h, inputs):
            x, is_new = inputs
            h = jnp.tanh(x + jnp.where(is_new[:, None], initial, h) @ self.w[...])
            return h, h

        return jax.lax.scan(step, h, (x_TBW, at.resets))


class Probe(nnx.Module):
    """Returns its inputs; the gradient of its parameter is that of each time step and row of the batch."""

    def __init__(self, *, rngs):
        self.place_TB = nnx.Param(jnp.zeros((8, 8)))

    def __call__(self, carry, x_TBW, at):
        own_TB = jax.lax.dynamic_slice(self.place_TB[...], (at.time, at.row), x_TBW.shape[:2])
        return carry, x_TBW + own_TB[..., None]


def learned_lstm(rngs):
    """Its initial state is drawn, or the first step would begin from zeros like any other."""
    layer = LSTM(WIDTH, rngs=rngs, learn_initial=True)
    layer.h_0[...], layer.c_0[...] = jax.random.normal(rngs.params(), (2, WIDTH))
    return layer


MAKERS = {
    "lstm": lambda rngs: LSTM(WIDTH, rngs=rngs),
    "learned": learned_lstm,
    "leaky": lambda rngs: Leaky(rngs=rngs),
    "probe": lambda rngs: Probe(rngs=rngs),
}


class Foretell(nnx.Module):
    def __init__(self, kinds, *, rngs):
        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(WIDTH, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack([MAKERS[kind] for kind in kinds], rngs=rngs)

    def first(self, batch, at):
        return self.inputs(batch["x"])

    def last(self, y, batch, at):
        error = jnp.square(self.outputs(y) - batch["y"]).sum(-1) * batch["weight"]
        return Sums(loss=jnp.sum(error), weight=jnp.sum(batch["weight"]))


class StartsSay(api.PackedBatches):
    """That an epoch begins `starts` alone says; resets say what else begins."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        batch["resets"][:, 0] &= not batch["starts"]
        return batch


@dataclasses.dataclass(frozen=True)
class Packed(jaxpar.Task):
    """Sequences of random lengths; each step is foretold from those before it in its sequence."""

    kinds: tuple[str, ...] = ("learned", "learned", "leaky", "lstm")
    batch_size: int = 8
    seq_len: int = 8
    optimizer: OptimizerConfig = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)

    def make_model(self, rngs):
        return Foretell(self.kinds, rngs=rngs)

    def sequences(self):
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 2 * self.seq_len, 4 * self.batch_size)
        x, y = rng.normal(size=(2, lengths.sum(), FEATURES)).astype(np.float32)
        return {"x": x, "y": y, "place": np.arange(len(x), dtype=np.int32)}, lengths

    def make_batches(self, split, seed=None):
        return StartsSay(*self.sequences(), self.batch_size, self.seq_len, seed)


def run_plainly(kind, params, x_TW, first):
    """One layer over one sequence, from its initial state; what is before `first` is of other windows."""
    zeros = jnp.zeros(WIDTH)
    if kind == "leaky":
        state = jnp.tanh(params["start"])
    else:
        state = (params["h_0"], params["c_0"]) if kind == "learned" else (zeros, zeros)

    def step(state, inputs):
        x, t = inputs
        is_cut = (t == first) & (t > 0)
        state = jax.tree.map(lambda a: jnp.where(is_cut, jax.lax.stop_gradient(a), a), state)
        if kind == "leaky":
            state = jnp.tanh(x + state @ params["w"])
            return state, state
        h, c = state
        z = jnp.einsum("i,igh->gh", x, params["w_x"]) + jnp.einsum("i,igh->gh", h, params["w_h"])
        i, f, g, o = z + params["b"]
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, state, (x_TW, jnp.arange(len(x_TW))))[1]


@functools.partial(jax.jit, static_argnums=0)
def loss_of_sequences(task, params, x_STF, y_STF, weight_ST, first_S):
    """The sum of the losses of sequences, each by itself; of weight 0 is what is not of this window."""

    def of_sequence(x_TF, y_TF, weight_T, first):
        x_TW = x_TF @ params["inputs.kernel"]
        for number, kind in enumerate(task.kinds):
            prefix = f"layers.{number}."
            own = {n.removeprefix(prefix): a for n, a in params.items() if n.startswith(prefix)}
            x_TW = run_plainly(kind, own, x_TW, first)
        error_T = jnp.square(x_TW @ params["outputs.kernel"] - y_TF).sum(-1)
        return jnp.sum(error_T * weight_T)

    return jnp.sum(jax.vmap(of_sequence)(x_STF, y_STF, weight_ST, first_S))


def of_window(task, batch):
    """The sequences of a window, from their beginnings up to its end; [sequences, longest, ...]."""
    arrays, lengths = task.sequences()
    ends = np.cumsum(lengths)
    of_step = np.repeat(np.arange(len(lengths)), lengths)
    places = np.asarray(batch["place"])[np.asarray(batch["weight"]) > 0]
    shape = len(lengths), 2 * task.seq_len  # the longest that there may be
    x, y = np.zeros((2, *shape, FEATURES), np.float32)
    weight, first = np.zeros(shape, np.float32), np.zeros(len(lengths), np.int32)
    for n in np.unique(of_step[places]):
        begin, own = ends[n] - lengths[n], places[of_step[places] == n]
        x[n, : lengths[n]], y[n, : lengths[n]] = (
            arrays[name][begin : ends[n]] for name in ("x", "y")
        )
        first[n] = own.min() - begin
        weight[n, first[n] : own.max() + 1 - begin] = 1
        assert weight[n].sum() == len(own)
    return x, y, weight, first


def grads_of(task, parallel, state, grads):
    """By the names of the user's model."""
    return api.params_of(task, parallel, dataclasses.replace(state, params=grads))


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERRORS["float32"] * scale, (
            f"{name}: error {error:.1e} of {scale:.1e}"
        )


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize("kinds", [Packed.kinds, ("learned",) * 4])
def test_packed_sequences_equal_those_one_by_one(kinds):
    """Loss and gradients of the first windows of an epoch, each with the state that those before left."""
    task = Packed(kinds)
    parallel = Parallel(on_devices((2, 2, 2)), PipelineConfig(num_microbatches=2, num_chunks=2))
    state, step = init_state(task, parallel), value_and_grad(task, parallel)
    params, plain = api.params_of(task, parallel, state), jax.value_and_grad(loss_of_sequences, 1)
    batches = task.make_batches("train", 0)
    for number in range(2):
        batch = batches.batch(number)
        sequences = of_window(task, batch)
        expected, expected_grads = plain(task, params, *sequences)
        (loss, (state, sums)), grads = step(state, batch)
        weight = sequences[2].sum()
        assert float(sums.weight) == weight
        assert_same({"loss": loss}, {"loss": expected / weight})
        expected_grads = {name: grad / weight for name, grad in expected_grads.items()}
        assert_same(grads_of(task, parallel, state, grads), expected_grads)
    assert step.num_programs == 1


@pytest.mark.full
def test_learned_initial_states_leave_the_gradients_of_weights_apart():
    """So that zero-bubble schedules can move them."""
    [(_, weights)] = api.layer_flops(Packed(("learned",) * 4))
    assert weights > 0


@pytest.mark.full
def test_one_program_trains_on_packed_lines_and_evaluates_them(text):
    """Of any lengths, beside a pipeline's chunks; and every line counts once."""
    task = jaxpar.lm.LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), packed=True, batch_size=4, seq_len=8,
        dropout=0.0,
    )  # fmt: skip
    parallel = Parallel(on_devices((2, 2, 1)), PipelineConfig(num_chunks=2))
    task = task.resolve()
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    batches, losses = task.make_batches("train", 0), []
    for number in range(batches.num_windows + 2):
        state, metrics = step(state, batches.batch(number))
        losses.append(float(metrics.loss))
    assert step.num_programs == 1
    assert losses[-1] < 0.9 * losses[0]
    sums = api.epoch_sums(task, parallel, state, task.make_batches("valid"))
    assert sums["weight"] == len(task.read_text().valid) - 1


def test_where_a_sequence_begins_nothing_comes_through_that_is_not_finite():
    """Neither forward nor backward, nor into the gradients of the weights."""
    arguments, cotangents = draw(6, 2, 4, 4, 0)
    resets = jnp.zeros((6, 2), bool).at[3].set(True)
    bad = arguments[2].copy()
    bad[1] = np.inf  # the state before the reset is not finite

    def run(params, x):
        _, y = lstm_layer(params, LSTMCarry(*arguments[1]), x, resets)
        return jnp.sum((y * cotangents[1])[3:]), y

    params = GateParams(*arguments[0])
    (_, y), (_, dx) = jax.value_and_grad(run, (0, 1), has_aux=True)(params, jnp.asarray(bad))
    (_, good), _ = jax.value_and_grad(run, (0, 1), has_aux=True)(params, jnp.asarray(arguments[2]))
    assert not np.isfinite(y[1:3]).all()
    np.testing.assert_array_equal(y[3:], good[3:])
    assert np.isfinite(dx[3:]).all()


@pytest.mark.full
@pytest.mark.law
def test_an_evaluation_of_packed_sequences_is_that_of_each_by_itself():
    """Also of those that go on in other windows."""
    task = Packed(kinds=("learned", "leaky"))
    parallel = Parallel(on_devices((1, 2, 1)), PipelineConfig(num_chunks=2))
    state = init_state(task, parallel)
    sums = api.epoch_sums(task, parallel, state, task.make_batches("valid"))
    arrays, lengths = task.sequences()
    everything = {"place": np.arange(len(arrays["x"])), "weight": np.ones(len(arrays["x"]))}
    params = api.params_of(task, parallel, state)
    expected = loss_of_sequences(task, params, *of_window(task, everything))
    assert sums["weight"] == lengths.sum() > task.batch_size * task.seq_len
    assert sums["loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.full
def test_what_is_not_finite_is_traced_to_its_own_sequence():
    task = Packed(kinds=("probe", "learned", "probe", "leaky", "probe"))
    parallel = Parallel(on_devices((1, 2, 1)), PipelineConfig(num_chunks=2, zero_bubble=False))
    batch = task.make_batches("train", 0).batch(1)
    row, first = next(map(tuple, np.argwhere(batch["resets"] & (np.arange(8) > 1))))
    later = np.flatnonzero(batch["resets"][row, first + 1 :])
    end = first + 1 + later[0] if later.size else task.seq_len
    batch["x"][row, first] = np.nan
    state = init_state(task, parallel)
    found = api.origin(task, parallel, state, batch)
    assert found == ("the output of first", (row,), first)
    _, grads = value_and_grad(task, parallel)(state, batch)
    grads = grads_of(task, parallel, state, grads)
    for number in (0, 2, 4):
        places = np.argwhere(~np.isfinite(grads[f"layers.{number}.place_TB"]))
        assert len(places)
        assert all(b == row and first <= t < end for t, b in places)
