"""Models of bfloat16 and float16: they train on every mesh, and what is added up is float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import make_settings, more

import jaxpar
from jaxpar import (
    LayerContext,
    OptimizerConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
    make_train_step,
)
from jaxpar.nn import named_param

WORDS, WIDTH = 32, 16


class Cell(nnx.Module):
    carry_dims = ("batch", "hidden")

    def __init__(self, dtype, rngs):
        def draw():
            kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 4
            return named_param(kernel.astype(dtype), ("input", "hidden"))

        self.w_x, self.w_h, self.dtype = draw(), draw(), dtype

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH), self.dtype)

    def __call__(self, h, x, at: LayerContext):
        def step(h, x):
            h = jnp.tanh(x @ self.w_x[...] + h @ self.w_h[...])
            return h, h

        return jax.lax.scan(step, h, x)


class Net(nnx.Module):
    """All of it in one type, the sums too."""

    def __init__(self, dtype, rngs):
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(WORDS, WIDTH, **options)
        self.out = nnx.Linear(WIDTH, WORDS, use_bias=False, **options)
        self.layers = Stack([lambda rngs: Cell(dtype, rngs)] * 4, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"])

    def last(self, y, batch, at):
        scores = jax.nn.log_softmax(self.out(y))
        weight = batch["weight"].astype(y.dtype)
        nll = -jnp.take_along_axis(scores, batch["y"][..., None], -1)[..., 0]
        return Sums(jnp.sum(nll * weight), jnp.sum(weight), {"weight again": jnp.sum(weight)})


@dataclasses.dataclass(frozen=True)
class Low(jaxpar.Task):
    dtype: str = "bfloat16"
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)

    def make_model(self, rngs):
        return Net(jnp.dtype(self.dtype), rngs)

    def make_batches(self, split, seed=None):
        ids = (np.arange(1001) * 7 % WORDS).astype(np.int32)
        arrays = {"x": ids[:-1], "y": ids[1:]}
        return Weighed(arrays, batch_size=8, seq_len=8, seed=seed)


TOTAL = 487  # the weight of a batch: bfloat16 counts to 256, and then in steps of 2


class Weighed(SeriesBatches):
    def batch(self, step, rows=slice(None)):
        weight = np.random.default_rng(0).multinomial(TOTAL, np.full(64, 1 / 64)).reshape(8, 8)
        return {**super().batch(step, rows), "weight": weight[rows].astype(np.float32)}


def losses(settings, num_steps=4):
    task, parallel, _ = settings
    state, step = init_state(task, parallel), make_train_step(task, parallel)
    batches, found = task.make_batches("train", 0), []
    for number in range(num_steps):
        batch = batches.batch(number)
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
        numbers = (metrics.loss, metrics.grad_norm, *metrics.sums.by_name.values())
        assert {a.dtype for a in numbers} == {jnp.dtype("float32")}
    _, sums = api.eval_step(task, parallel)(state, batch)
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {jnp.dtype(task.dtype)}
    return found, [*metrics.sums.by_name.values(), *sums.by_name.values()]


@functools.cache
def on_one_device(task):
    return losses(make_settings(task=task))[0]


# A rounding to bfloat16 is up to 2^-9 of a number, to float16 2^-12: of the loss of each block, which the
# model gives in this type, and of parameters, about as much in each step.
TOLERANCES = {"bfloat16": 2**-7, "float16": 2**-10}


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "options"),
    [
        ((2, 1, 1), (1, 1), {}),
        ((2, 2, 1), (2, 2), {"zero_bubble": True}),
        more((1, 1, 2), (1, 1), {}),
        more((1, 1, 1), (2, 1), {}),
        more((1, 2, 1), (2, 2), {"head": "sharded"}),
        more((1, 2, 1), (2, 2), {"schedule": "interleaved", "num_groups": 2}),
        more((1, 2, 1), (2, 2), {"remat": True}),
        more((2, 2, 2), (2, 2), {"zero_bubble": False}),
        more((2, 1, 1), (1, 1), {"layout": {"update": "sharded"}}),
        more((2, 1, 1), (1, 1), {"layout": {"update": "host"}}),
        more((2, 2, 1), (2, 2), {"layout": {"fsdp": True}}),
        more((2, 1, 1), (2, 1), {"layout": {"shares": (1, 3)}}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", more("float16")])
def test_models_of_few_digits_train_on_every_mesh(dtype, mesh, units, options):
    task = Low(dtype)
    found, sums = losses(make_settings(mesh, units, task, **options))
    np.testing.assert_allclose(found, on_one_device(task), rtol=TOLERANCES[dtype])
    if np.prod(mesh[:1] + units) > 1:  # what a block counts is exact
        np.testing.assert_array_equal(sums[1:3] + sums[4:], [TOTAL] * 4)


class Counted(Net):
    def __init__(self, number, rngs):
        super().__init__(jnp.dtype("float32"), rngs)
        self.number = number

    def last(self, y, batch, at):
        number = self.number() if callable(self.number) else self.number
        return Sums(number, number, {"n": number})


@dataclasses.dataclass(frozen=True)
class Counting(Low):
    number: object = 3

    def make_model(self, rngs):
        return Counted(self.number, rngs)


@pytest.mark.parametrize(
    "number",
    [
        3, 0.5, np.float64(2), np.int64(4),
        *(functools.partial(jnp.ones, (), dtype) for dtype in ("bfloat16", "float16", "int8", "bool")),
    ],
)  # fmt: skip
def test_numbers_of_any_type_become_float32(number):
    task = Counting(number=number)
    batch = task.make_batches("train", 0).batch(0)
    _, found = api.eval_step(task, "dp1")(init_state(task, "dp1"), batch)
    assert {a.dtype for a in found.by_name.values()} == {jnp.dtype("float32")}
    expected = number() if callable(number) else number
    assert {float(a) for a in found.by_name.values()} == {float(expected)}


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_optimizers_keep_float32_for_parameters_of_few_digits(name):
    config = OptimizerConfig(
        name, 1e-3, momentum=0.9 * (name == "sgd"), lr_schedule="constant", warmup_steps=0
    )
    optimizer = Low(optimizer=config).make_optimizer(5000)
    params = {"w": jnp.ones((), jnp.bfloat16)}
    state = optimizer.init(params)

    def step(state, _):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update({"w": jnp.ones((), jnp.bfloat16)}, state, params)[1], None

    after, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=5000))(state)
    floats = [a for a in jax.tree.leaves(after) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert {a.dtype for a in floats} == {jnp.dtype("float32")}
    if name.startswith("adam"):
        np.testing.assert_allclose(floats[-1], 1 - 0.999**5000, rtol=1e-4)
