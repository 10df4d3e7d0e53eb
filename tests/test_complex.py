"""Complex parameters, activations and states: on every mesh as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from lib import api
from lib import flax_models as models
from lib.adopted import MESHES, Adopted, assert_as_plain
from lib.any_model import Calm, assert_same, batch_of
from lib.laws import assert_close, on_devices
from lib.layers import Turn
from lib.models import WIDTH, Regression

from jaxpar import (
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    TrainConfig,
    fit,
    load_run,
)

pytestmark = pytest.mark.law


class ComplexEnds(Regression):
    """Complex parameters before and after the layers, and complex activations between."""

    def __init__(self, *, rngs):
        super().__init__((), rngs=rngs)
        self.layers = Stack([lambda rngs: Turn(rngs=rngs)] * 2, rngs=rngs)
        angle = jnp.linspace(0.0, 3.0, WIDTH)
        self.turn = nnx.Param(jax.lax.complex(jnp.cos(angle), jnp.sin(angle)))
        self.wide = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=jnp.complex64, rngs=rngs)

    def first(self, batch, at):
        return super().first(batch, at).astype(jnp.complex64) * self.turn[...][None, None]

    def last(self, y, batch, at):
        y = self.wide(y * self.turn[...][None, None])
        return super().last(jnp.sin(y.reshape(*y.shape[:2], WIDTH, 2).mean(-1).real), batch, at)


class Complex(Calm):
    def make_model(self, rngs):
        return ComplexEnds(rngs=rngs)


@pytest.mark.rows(1, "full")
@pytest.mark.parametrize(
    ("mesh", "units", "layout"),
    [((2, 1, 1), {}, {"fsdp": True}), ((1, 2, 1), {"head": "sharded"}, {})],
)
def test_gradients_equal_the_definition(mesh, units, layout):
    units = PipelineConfig(num_microbatches=2, **units)
    assert_same(Complex(), Parallel(on_devices(mesh), units, **layout))


def test_complex_parameters_lie_in_pools():
    units = PipelineConfig(num_microbatches=2)
    with api.all_is_large():
        assert_same(Complex(), Parallel(on_devices((2, 2, 2)), units, fsdp=True))


# ---- Flax models ----


@pytest.fixture
def as_jax_by_default():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


FLAX = {
    "lrus": Adopted(models.LRUs, where="rnns"),
    "text": Adopted(models.ComplexText),
}


@pytest.mark.rows(1, "full")
@pytest.mark.usefixtures("as_jax_by_default")
@pytest.mark.parametrize(
    ("model", "mesh"), [("lrus", "chunks"), ("lrus", "zero-bubble"), ("text", "pp4")]
)
def test_flax_models_as_they_stand_have_the_gradients_of_plain_flax(model, mesh):
    assert_as_plain(FLAX[model], MESHES[mesh])


# ---- updates ----

SIZE = 4


class Kernel(nnx.Module):
    def __init__(self, rngs):
        key = rngs.params()
        self.kernel = nnx.Param(jax.random.normal(key, (SIZE, SIZE), jnp.complex64) / SIZE)

    def __call__(self, carry, z_BI, at):
        return carry, z_BI + z_BI @ self.kernel[...]


class Fits(nnx.Module):
    """Rows of complex numbers, which are to become `TARGET`."""

    time_major = False

    def __init__(self, rngs):
        self.layers = Stack([Kernel] * 2, rngs=rngs)
        self.offset = nnx.Param(jnp.full(SIZE, 0.1 + 0.1j, jnp.complex64))

    def first(self, batch, at):
        return batch["x"].astype(jnp.complex64) + self.offset[...][None]

    def last(self, z_BI, batch, at):
        return Sums(jnp.sum(losses(z_BI) * batch["weight"]), jnp.sum(batch["weight"]))

    def predict(self, z_BI, batch, at):
        return {"z": z_BI}


TARGET = jnp.asarray([1 + 2j, -3 - 1j, 2j, 1], jnp.complex64)


def losses(z_BI):
    apart = z_BI - TARGET[None]
    return jnp.sum(jnp.square(apart.real) + jnp.square(apart.imag), -1)


@dataclasses.dataclass(frozen=True)
class Fitting(Task):
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        return Fits(rngs)

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).uniform(-0.5, 0.5, (16, SIZE)).astype(np.float32)
        return ArrayBatches({"x": x}, 8, seed)


class OwnOptimizer(Fitting):
    def make_optimizer(self, num_steps):
        return optax.adam(0.05)


def config_of(name, **options):
    constant = {"warmup_steps": 0, "lr_schedule": "constant"}
    return OptimizerConfig(name, learning_rate=0.05, **constant, **options)


CONFIGS = {
    "adam": config_of("adam"),
    "adamw": config_of("adamw", weight_decay=0.1),
    "sgd": config_of("sgd", momentum=0.9),
    "sgd with decay": config_of("sgd", weight_decay=0.1),
    "rmsprop": config_of("rmsprop"),
}
OPTAX = {
    "adam": optax.adam(0.05),
    "adamw": optax.adamw(0.05, weight_decay=0.1),
    "sgd": optax.sgd(0.05, momentum=0.9),
    "sgd with decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.05)),
    "rmsprop": optax.rmsprop(0.05),
}
TWO = PipelineConfig(num_microbatches=2)
LAYOUTS = {
    "dp1": Parallel("dp1"),
    "pp2": Parallel("pp2", TWO),
    "sharded": Parallel("dp2", update="sharded"),
    "host": Parallel("dp2", update="host"),
    "fsdp": Parallel("dp2pp2", TWO, fsdp=True),
}
CLIP_NORM, NUM_STEPS = 0.5, 3


def trained(task, parallel):
    """Parameters before and after steps on one batch, by name."""
    train = TrainConfig(num_steps=NUM_STEPS, clip_norm=CLIP_NORM)
    found = api.updates(task, parallel, train, [batch_of(task)] * NUM_STEPS)
    return found.weights, found.trained


def trained_plainly(task, params, optimizer, *, along_slope):
    """Parameters after the same steps by optax alone.

    Args:
      along_slope: whether the optimizer is given the slopes, the conjugates of JAX's gradients.
    """
    x_BI = jnp.asarray(batch_of(task)["x"], jnp.complex64)

    def mean_loss(params):
        z_BI = x_BI + params["offset"][None]
        for number in range(2):
            z_BI = z_BI + z_BI @ params[f"layers.{number}.kernel"]
        return jnp.mean(losses(z_BI))

    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for _ in range(NUM_STEPS):
        grads = jax.grad(mean_loss)(params)
        norm = np.sqrt(sum(np.sum(np.abs(grad) ** 2) for grad in grads.values()))
        assert norm > CLIP_NORM
        grads = {name: grad * (CLIP_NORM / norm) for name, grad in grads.items()}
        if along_slope:
            grads = jax.tree.map(jnp.conj, grads)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.rows(2, "full")
@pytest.mark.usefixtures("as_jax_by_default")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("adam", "dp1"),
        ("adam", "fsdp"),
        ("adamw", "host"),
        ("sgd", "pp2"),
        ("sgd with decay", "fsdp"),
        ("rmsprop", "sharded"),
    ],
)
def test_updates_equal_those_of_optax_along_the_slope(name, layout):
    task = Fitting(CONFIGS[name])
    before, after = trained(task, LAYOUTS[layout])
    assert_close(after, trained_plainly(task, before, OPTAX[name], along_slope=True))


@pytest.mark.usefixtures("as_jax_by_default")
@pytest.mark.parametrize("layout", ["fsdp", "host"])
def test_an_optimizer_of_ones_own_is_given_the_gradients_of_jax(layout):
    task = OwnOptimizer()
    before, after = trained(task, LAYOUTS[layout])
    assert_close(after, trained_plainly(task, before, optax.adam(0.05), along_slope=False))


# ---- runs ----


def fit_into(folder, parallel, num_steps, **options):
    train = TrainConfig(num_steps=num_steps, log_every=1, out_dir=str(folder))
    task = Fitting(CONFIGS["adam"])
    return fit(task, parallel, train, quiet=True, **options).history["train/loss"]


def test_a_run_goes_down_the_slope_and_its_weights_can_be_used_again(tmp_path):
    losses = fit_into(tmp_path / "run", "dp2", 60)
    assert losses[-1] < 0.2 * losses[0]
    losses = fit_into(tmp_path / "run", "pp2", 120, resume=True)  # on another mesh
    assert losses[-1] < 0.05 * losses[0]

    run = load_run(tmp_path / "run")
    file = tmp_path / "weights.safetensors"
    run.export(file, dtype="bfloat16")  # which complex numbers don't have
    tensors = safetensors.numpy.load_file(file)
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(np.complex64)}

    begun = fit_into(tmp_path / "begun", "pp2", 1, start=str(file))
    assert begun[0] == pytest.approx(losses[-1], rel=0.5)
    predicted = run.predict("test", quiet=True)["z"]
    np.testing.assert_allclose(predicted, np.broadcast_to(TARGET, predicted.shape), atol=1.0)
