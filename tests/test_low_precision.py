"""Models of bfloat16 and float16: they train on every mesh, and what is added up is float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from lib.laws import make_settings, more

import jaxpar
from jaxpar import (
    LayerContext,
    MeshConfig,
    OptimizerConfig,
    SeriesBatches,
    Stack,
    Sums,
    init_state,
    make_train_step,
)
from jaxpar.base.trees import vary_over
from jaxpar.data.batches import place_batch
from jaxpar.model.model import checked_sums
from jaxpar.model.optimizer import make_optimizer
from jaxpar.nn import named_param
from jaxpar.step.functions import make_eval_step
from jaxpar.step.optimizer import global_norm
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding

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
    setup, batches = Setup.of(*settings), settings.task.make_batches("train", 0)
    state, step = init_state(setup), make_train_step(setup)
    found = []
    for number in range(num_steps):
        batch = place_batch(batches, number, batch_sharding(setup))
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
        numbers = (metrics.loss, metrics.grad_norm, *metrics.sums.by_name.values())
        assert {a.dtype for a in numbers} == {jnp.dtype("float32")}
    _, sums = make_eval_step(setup)(state, batch)
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {jnp.dtype(settings.task.dtype)}
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


@pytest.mark.parametrize("number", [3, 0.5, np.float64(2), np.int64(4)])
def test_plain_numbers_become_float32(number):
    found = checked_sums(Sums(number, number, {"n": number}), "`last`")
    assert {a.dtype for a in found.by_name.values()} == {jnp.dtype("float32")}
    assert float(found.loss) == float(number)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool"])
def test_numbers_of_few_digits_become_float32(dtype):
    test_plain_numbers_become_float32(jnp.ones((), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_norm_of_gradients_has_more_digits(dtype):
    many = [jnp.ones(1, dtype)] * 1000
    np.testing.assert_allclose(global_norm(many), 1000**0.5, rtol=1e-6)
    large = jnp.full(4, 300, dtype)  # whose square is more than float16 has
    np.testing.assert_allclose(global_norm(large), 600, rtol=1e-6)


def test_gradients_are_summed_over_devices_in_float32():
    mesh = MeshConfig(data=8).build()
    x = jnp.ones(8, jnp.bfloat16).at[0].set(256)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    def products(w, x):
        return vary_over(w, frozenset(["data"])) * x

    gradient = jax.jit(jax.grad(lambda w: jnp.sum(products(w, x).astype(jnp.float32))))
    found = gradient(jnp.bfloat16(1))
    assert (found, found.dtype) == (264, jnp.bfloat16)  # 263, rounded once; one by one it stays 256


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "sgd"])
def test_optimizers_keep_float32_for_parameters_of_few_digits(name):
    config = OptimizerConfig(
        name, 1e-3, momentum=0.9 * (name == "sgd"), lr_schedule="constant", warmup_steps=0
    )
    optimizer = make_optimizer(config, 5000)
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
