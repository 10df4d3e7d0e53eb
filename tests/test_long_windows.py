"""Long windows: what is kept of them is little, wherever it lies, and the gradients are exact."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import SGD, assert_close, assert_same_as_plain, make_settings, more, on_devices

import jaxpar
from jaxpar import (
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
)
from jaxpar.nn import LSTM


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("keeps", "head"), [("carries", "sharded"), more("host", "last")])
def test_what_is_kept_and_where_changes_no_number(keeps, head):
    settings = make_settings((2, 2, 1), (2, 4), remat=True, remat_keeps=keeps, head=head)
    with api.buffers_hold_nan():
        assert_same_as_plain(settings)


# ---- windows of many steps ----

HIDDEN, FEATURES = 64, 3


class Foretell(nnx.Module):
    def __init__(self, *, rngs):
        self.inputs = nnx.Linear(FEATURES, HIDDEN, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(HIDDEN, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack([lambda rngs: LSTM(HIDDEN, rngs=rngs)] * 2, rngs=rngs)

    def first(self, batch, at):
        return self.inputs(batch["x"])

    def last(self, y, batch, at):
        error = jnp.square(self.outputs(y) - batch["y"]).sum(-1)
        return Sums(loss=jnp.sum(error), weight=jnp.sum(batch["weight"]))


@dataclasses.dataclass(frozen=True)
class Long(jaxpar.Task):
    """A random walk in one window."""

    seq_len: int = 65_536
    optimizer: jaxpar.OptimizerConfig = SGD

    def make_model(self, rngs):
        return Foretell(rngs=rngs)

    def make_batches(self, split, seed=None):
        steps = np.random.default_rng(0).normal(size=(self.seq_len + 1, FEATURES))
        walk = np.tanh(steps.cumsum(0) / 100).astype(np.float32)
        return SeriesBatches({"x": walk[:-1], "y": walk[1:]}, 1, self.seq_len)


def long_window(num_steps, mesh=(1, 1, 1), *, remat=True, chunk_len=64, **options):
    """A task with a window of so many steps, and how devices share it."""
    pipeline = PipelineConfig(num_chunks=num_steps // chunk_len, remat=remat, **options)
    return Long(num_steps), Parallel(on_devices(mesh), pipeline)


@functools.cache
def in_float64(num_steps):
    """Loss and gradients of the textbook's formulas, differentiated by JAX."""
    task, one = Long(num_steps), Parallel(on_devices((1, 1, 1)))
    params = api.params_of(task, one, init_state(task, one))
    batch = task.make_batches("train").batch(0)
    with jax.enable_x64(True):
        params, x, y = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64), (params, batch["x"][0], batch["y"][0])
        )

        def layer(params, state, x_H):
            (h, c), (w_x, w_h, b) = state, params
            i, f, g, o = jnp.einsum("i,igh->gh", x_H, w_x) + jnp.einsum("i,igh->gh", h, w_h) + b
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return jax.nn.sigmoid(o) * jnp.tanh(c), c

        def loss(params):
            layers = [
                [params[f"layers.{n}.{name}"] for name in ("w_x", "w_h", "b")] for n in (0, 1)
            ]

            def step(states, inputs):
                x, y = inputs
                (below, above), out = states, x @ params["inputs.kernel"]
                below = layer(layers[0], below, out)
                above = layer(layers[1], above, below[0])
                return (below, above), jnp.square(above[0] @ params["outputs.kernel"] - y)

            @jax.checkpoint  # or it would take a gigabyte
            def part(states, inputs):
                return jax.lax.scan(step, states, inputs)

            zeros = jnp.zeros(HIDDEN)
            parts = jax.tree.map(lambda a: a.reshape(-1, 256, FEATURES), (x, y))
            _, errors = jax.lax.scan(part, ((zeros, zeros), (zeros, zeros)), parts)
            return jnp.sum(errors) / num_steps

        value, grads = jax.jit(jax.value_and_grad(loss))(params)
        return float(value), jax.tree.map(np.asarray, grads)


@pytest.mark.more
@pytest.mark.parametrize(
    ("num_steps", "mesh", "options"),
    [
        (2_048, (1, 2, 1), {"remat_keeps": "carries"}),
        more(65_536, (1, 1, 1), {}),
        more(65_536, (1, 1, 1), {"remat_keeps": "carries"}),
        more(65_536, (1, 2, 1), {"schedule": "gpipe"}),
        more(65_536, (1, 2, 1), {"remat_keeps": "carries"}),
    ],
)
def test_gradients_over_many_steps_equal_a_plain_float64_program(num_steps, mesh, options):
    task, parallel = long_window(num_steps, mesh, **options)
    found = api.gradients(task, parallel, task.make_batches("train").batch(0))
    expected_loss, expected = in_float64(num_steps)
    assert found.loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(found.grads, expected)


def temporary_bytes(num_steps, **options):
    compiled = api.lowered_step(*long_window(num_steps, **options)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_grows_by_what_is_kept_alone():
    """Of 57,344 steps more: residuals without remat; inputs and carries with it; else a few carries."""
    short, long, word = 8_192, 65_536, 4
    grows = {
        keeps: temporary_bytes(long, **options) - temporary_bytes(short, **options)
        for keeps, options in {
            "residuals": {"remat": False},
            "device": {},
            "carries": {"remat_keeps": "carries"},
        }.items()
    }
    batch = (long - short) * (2 * FEATURES + 1) * word  # as the model sees it, time before rows
    inputs = (long - short) * HIDDEN * word
    carries = (long - short) // 64 * 2 * 2 * HIDDEN * word  # h and c of two layers, by chunk
    assert grows["device"] <= 1.05 * (batch + inputs + carries)
    assert grows["carries"] <= 0.5 * grows["device"]
    assert grows["residuals"] >= 10 * grows["device"]


def test_on_gpus_inputs_and_carries_go_to_the_host_and_come_back():
    """Read from the program for CUDA; CPUs have no other memory."""
    with api.host_memory_is_apart():
        text = api.gradients_on("cuda", *long_window(256, (1, 2, 1), remat_keeps="host"))
    moves = re.findall(r'annotate_device_placement.*_xla_buffer_placement = "(\w+)"', text)
    # An input, h and c: the room for them, each one that is written, each that is read.
    assert {place: moves.count(place) for place in set(moves)} == {"pinned_host": 6, "device": 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat_keeps": "host"}, "remat_keeps='host' needs remat"),
        (
            {"remat": True, "remat_keeps": "carries", "num_chunks": 7},
            "num_chunks=7 with remat_keeps",
        ),
    ],
)
def test_what_cannot_be_kept_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        PipelineConfig(**options)


def test_segments_are_for_batches_of_one_length():
    task = jaxpar.lm.LM(num_buckets=2, bucket_multiple=8, vocab_size=96)
    pipeline = PipelineConfig(num_chunks=4, remat=True, remat_keeps="carries")
    with pytest.raises(ValueError, match="needs batches of one length, but those of task LM"):
        init_state(task, Parallel(on_devices((1, 1, 1)), pipeline))
