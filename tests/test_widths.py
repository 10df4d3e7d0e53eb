"""Layers that pass on arrays of unequal shapes, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law import plain
from lib.law.check import assert_near
from lib.laws import more, on_devices
from lib.layers import Join, Map
from lib.models import FEATURES, SGD, Regress

import jaxpar
from jaxpar import (
    ArrayBatches,
    LayerContext,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    init_state,
    nn,
    value_and_grad,
)
from recipes.awd import AWD


class Taper(nnx.Module):
    """From 12 units to 4, by a dict of arrays."""

    def __init__(self, *, rngs):
        self.inputs = nnx.Linear(FEATURES, 12, use_bias=False, rngs=rngs)
        self.outputs = nnx.Linear(4, FEATURES, use_bias=False, rngs=rngs)
        self.layers = Stack(
            [
                lambda rngs: nn.LSTM(8, inputs=12, rngs=rngs, dropout=0.2),
                lambda rngs: nn.LSTM(8, rngs=rngs, dropout=0.2),
                lambda rngs: nn.LSTM(8, rngs=rngs, dropout=0.2),
                lambda rngs: Map(8, 14, rngs=rngs),
                lambda rngs: Join(rngs=rngs),
                lambda rngs: nn.MinGRU(4, inputs=16, rngs=rngs),
            ],
            rngs=rngs,
        )

    def first(self, batch, at: LayerContext):
        return self.inputs(batch["x"])

    def last(self, y, batch, at: LayerContext):
        error = self.outputs(y) - batch["y"]
        return Sums(jnp.sum(jnp.square(error)), jnp.float32(error.size))


@dataclasses.dataclass(frozen=True)
class Tapered(Regress):
    def make_model(self, rngs):
        return Taper(rngs=rngs)


class Conv(nnx.Module):
    def __init__(self, inputs, outputs, stride, *, rngs):
        strides = (stride, stride)
        self.conv = nnx.Conv(inputs, outputs, (3, 3), strides=strides, use_bias=False, rngs=rngs)

    def __call__(self, carry, x, at: LayerContext):
        return carry, jnp.tanh(self.conv(x))


class Cone(nnx.Module):
    time_major = False

    def __init__(self, *, rngs):
        self.stem = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)
        self.layers = Stack(
            [
                lambda rngs: Conv(8, 8, 1, rngs=rngs),
                lambda rngs: Conv(8, 16, 2, rngs=rngs),
                lambda rngs: Conv(16, 32, 2, rngs=rngs),
                lambda rngs: Conv(32, 64, 1, rngs=rngs),
            ],
            rngs=rngs,
        )

    def first(self, batch, at: LayerContext):
        return self.stem(batch["image"])

    def last(self, y, batch, at: LayerContext):
        logits = self.head(y.mean((1, 2)))
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
        return Sums(jnp.sum(nll), jnp.float32(len(nll)))


@dataclasses.dataclass(frozen=True)
class Pyramid(jaxpar.Task):
    """Convolutions from 16 x 16 x 8 to 4 x 4 x 64."""

    batch_size: int = 8
    optimizer: jaxpar.OptimizerConfig = SGD

    def make_model(self, rngs):
        return Cone(rngs=rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(0)
        images = rng.normal(size=(32, 16, 16, 1)).astype(np.float32)
        labels = rng.integers(0, 3, 32).astype(np.int32)
        return ArrayBatches({"image": images, "label": labels}, self.batch_size, seed)


def laid_out(sizes, **pipeline):
    return Parallel(on_devices(sizes), PipelineConfig(**pipeline))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [((1, 4, 1), {"num_microbatches": 4}), more((2, 2, 1), {}), more((2, 4, 1), {"remat": True})],
)
def test_a_pyramid_of_convolutions_equals_the_plain_model(sizes, pipeline):
    batch = Pyramid().make_batches("train", 0).batch(0)
    found = api.gradients(Pyramid(), laid_out(sizes, **pipeline), batch)
    model, at = Pyramid().make_model(nnx.Rngs(0)), LayerContext(0, 0, 0, time_major=False)

    @jax.value_and_grad
    def one_device(weights):
        own = plain.with_arrays(model, weights)
        x = own.first(batch, at)
        for number in range(len(model.layers)):
            layer = plain.with_arrays(model.layers.layer(number), weights, f"layers.{number}.")
            _, x = layer((), x, at)
        sums = own.last(x, batch, at)
        return sums.loss / sums.weight

    loss, grads = one_device(found.weights)
    assert_near({"loss": found.loss}, {"loss": loss}, 1e-5)
    assert_near(found.grads, grads, 1e-5)


@pytest.mark.full
def test_no_part_of_a_block_is_exchanged_within_a_unit():
    task, parallel = Tapered(), laid_out((1, 2, 2), num_chunks=2)
    state, batch = init_state(task, parallel), task.make_batches("train", 0).batch(0)
    step = value_and_grad(task, parallel)
    step(state, batch)  # which would raise where units waited for each other
    assert "f32[4,16,16]" in step.lower(state, batch).compile().as_text()


class Odd(Taper):
    def __init__(self, makers, *, rngs):
        super().__init__(rngs=rngs)
        self.layers = Stack(makers, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class WithLayers(Regress):
    makers: tuple = ()

    def make_model(self, rngs):
        return Odd(self.makers, rngs=rngs)


class Every(nnx.Module):
    """Every second step, or all without the last two features."""

    def __init__(self, *, in_time, rngs):
        self.in_time = in_time

    def __call__(self, carry, x, at: LayerContext):
        return carry, x[::2] if self.in_time else x[..., 2:]


def refused(*layers):
    with pytest.raises(ValueError, match=r"Fix: (make|let)") as found:
        init_state(WithLayers(makers=layers), "dp1")
    return str(found.value)


def test_layers_of_one_kind_take_the_same():
    every = functools.partial(Every, in_time=False)
    assert refused(lambda rngs: every(rngs=rngs), lambda rngs: every(rngs=rngs)) == (
        "the input of layer 1 (every) is float32[8, 16, 10], that of layer 0 float32[8, 16, 12]\n"
        "Fix: make them the same, or give layers that are meant to differ a kind_name each."
    )


def test_time_and_rows_stay():
    assert refused(lambda rngs: Every(in_time=True, rngs=rngs)) == (
        "layer 0 returns float32[4, 16, 12], but layers have unequal shapes\n"
        "Fix: let the first dims of each array be [time, rows], here [8, 16]."
    )


def test_awd_has_its_published_widths():
    task = AWD(num_layers=3, hidden_size=12, embed_size=8, vocab_size=20, batch_size=4, seq_len=6)
    layers = nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0))).layers
    assert [getattr(layers, kind).w_x.shape[1::2] for kind in layers.kinds] == [
        (8, 12), (12, 12), (12, 8),
    ]  # fmt: skip
    published = AWD(vocab_size=10_000)
    params = nnx.state(nnx.eval_shape(lambda: published.make_model(nnx.Rngs(0))), nnx.Param)
    count = sum(a.size for a in jax.tree.leaves(params))
    # 24.2 million in the paper, with a second bias of each gate, which PyTorch has.
    biases = 4 * (1150 + 1150 + 400)
    assert count + biases == 24_221_600
