"""Layers that pass on arrays of unequal shapes: the law, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib.any_model import assert_same
from lib.laws import more, on_devices
from lib.layers import Join, Map
from lib.models import FEATURES, SGD, Regress

import jaxpar
from jaxpar import ArrayBatches, LayerContext, Parallel, PipelineConfig, Stack, Sums, init_state, nn
from jaxpar.base.at import anywhere
from jaxpar.base.padding import Padding
from jaxpar.model.facts import ModelFacts
from jaxpar.step.setup import Setup
from jaxpar.step.step import check_program, make_loss_and_grad
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


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [
        ((1, 1, 1), {}),
        ((2, 2, 2), {"num_microbatches": 2, "num_chunks": 2, "schedule": "v"}),
    ],
)  # fmt: skip
def test_layers_of_any_width_equal_the_plain_model(sizes, pipeline):
    assert_same(Tapered(), laid_out(sizes, **pipeline))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [((1, 4, 1), {"num_microbatches": 4}), more((2, 2, 1), {}), more((2, 4, 1), {"remat": True})],
)
def test_a_pyramid_of_convolutions_equals_the_plain_model(sizes, pipeline):
    assert_same(Pyramid(), laid_out(sizes, **pipeline))


@pytest.mark.full
def test_no_part_of_a_block_is_exchanged_within_a_unit():
    setup = Setup.of(Tapered(), laid_out((1, 2, 2), num_chunks=2))
    state, batch = init_state(setup), Tapered().make_batches("train", 0).batch(0)
    program = jax.jit(make_loss_and_grad(setup)).lower(state, batch).compile()
    check_program(program)  # raises where units would wait for each other
    width = ModelFacts.of(Tapered()).traces.padding.width
    assert width == 16
    assert f"f32[4,16,{width}]" in program.as_text()


def test_blocks_come_back_as_what_they_were():
    shapes = [
        {"a": jnp.ones((2, 3, 4, 5)), "b": jnp.ones((2, 3), jnp.bfloat16)},
        jnp.ones((2, 3, 7), jnp.bfloat16),
    ]
    padding = Padding(shapes, {"time": 2, "rows": 3})
    assert (padding.width, padding.dtype) == (21, jnp.float32)
    for rows in (3, 1):  # blocks of fewer rows as well
        x = jax.tree.map(
            lambda a, rows=rows: jax.random.normal(jax.random.key(0), (2, rows, *a.shape[2:]), a.dtype),
            shapes[0],
        )  # fmt: skip
        block = padding.pad(x, anywhere)
        assert block.shape == (2, rows, 21)
        back = padding.unpad(block, shapes[0], anywhere)
        jax.tree.map(np.testing.assert_array_equal, back, x)
    assert Padding([shapes[1]] * 2, {"time": 2, "rows": 3}).pad(shapes[1], anywhere) is shapes[1]


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
        _ = ModelFacts.of(WithLayers(makers=layers)).traces
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
    layers = ModelFacts.of(task).model.layers
    assert [getattr(layers, kind).w_x.shape[1::2] for kind in layers.kinds] == [
        (8, 12), (12, 12), (12, 8),
    ]  # fmt: skip
    published = AWD(vocab_size=10_000)
    count = sum(a.size for a in jax.tree.leaves(ModelFacts.of(published).params))
    # 24.2 million in the paper, with a second bias of each gate, which PyTorch has.
    biases = 4 * (1150 + 1150 + 400)
    assert count + biases == 24_221_600
