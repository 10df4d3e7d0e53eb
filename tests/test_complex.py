"""Complex parameters, activations and states: on every mesh as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from lib import flax_models as models
from lib.adopted import MESHES, Adopted, assert_as_plain
from lib.any_model import Calm, assert_same, batch_of
from lib.laws import assert_close, by_layer, on_devices
from lib.layers import LRU, FromComplex, ToComplex, Turn
from lib.models import MAKERS, WIDTH, Regression

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
    init_state,
    load_run,
    make_train_step,
)
from jaxpar.model.task import Settings
from jaxpar.step.setup import Setup

pytestmark = pytest.mark.law

LAYERS = {
    **MAKERS,
    "lru": lambda rngs: LRU(rngs=rngs),
    "turn": lambda rngs: Turn(rngs=rngs),
    "to complex": lambda rngs: ToComplex(rngs=rngs),
    "from complex": lambda rngs: FromComplex(rngs=rngs),
}


class Model(Regression):
    def __init__(self, kinds, *, rngs):
        super().__init__(("dense",), rngs=rngs)
        self.layers = Stack([LAYERS[kind] for kind in kinds], rngs=rngs)


class ComplexEnds(Model):
    """Complex parameters before and after the layers, and complex activations between."""

    def __init__(self, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        angle = jnp.linspace(0.0, 3.0, WIDTH)
        self.turn = nnx.Param(jax.lax.complex(jnp.cos(angle), jnp.sin(angle)))
        self.wide = nnx.Linear(WIDTH, 2 * WIDTH, param_dtype=jnp.complex64, rngs=rngs)

    def first(self, batch, at):
        return super().first(batch, at).astype(jnp.complex64) * self.turn[...][None, None]

    def last(self, y, batch, at):
        y = self.wide(y * self.turn[...][None, None])
        return super().last(jnp.sin(y.reshape(*y.shape[:2], WIDTH, 2).mean(-1).real), batch, at)


@dataclasses.dataclass(frozen=True)
class Complex(Calm):
    kinds: tuple[str, ...] = ("lru", "lru")
    has_complex_ends: bool = False

    def make_model(self, rngs):
        return (ComplexEnds if self.has_complex_ends else Model)(self.kinds, rngs=rngs)


LRUS, MIXED = ("lru", "lru"), ("lru", "wide 20")
BETWEEN = "to complex", "from complex"
TURNS = "turn", "turn"
DP, PP, TP, ALL = (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)


LARGE = {
    "jaxpar.partition.partition.LITTLE": 1e-9,
    "jaxpar.partition.partition.FEW": 0,
    "jaxpar.partition.pool.COLUMNS": 8,
}


@pytest.mark.parametrize(
    ("kinds", "mesh", "units", "layout"),
    [
        (LRUS, DP, {}, {}),
        (LRUS, TP, {}, {}),
        (LRUS, DP, {}, {"fsdp": True}),
        (LRUS, DP, {"num_microbatches": 2}, {"shares": (3, 1)}),
        (LRUS, (1, 1, 1), {"num_microbatches": 2, "num_chunks": 2}, {}),
        (LRUS, PP, {"num_microbatches": 2, "num_chunks": 2, "remat": True}, {}),
        (LRUS, PP, {"num_chunks": 4, "remat": True, "remat_keeps": "carries"}, {}),
        (LRUS, PP, {"num_chunks": 2, "remat": True, "remat_keeps": "host"}, {}),
        (LRUS, PP, {"num_microbatches": 2, "zero_bubble": False, "unroll": True}, {}),
        (LRUS, ALL, {"num_microbatches": 2, "num_chunks": 2}, {"fsdp": True}),
        (MIXED, PP, {"num_microbatches": 2}, {}),
        (BETWEEN, PP, {"num_microbatches": 2}, {}),
        (TURNS, DP, {"num_microbatches": 2}, {"fsdp": True}),
        (TURNS, PP, {"num_microbatches": 2, "head": "sharded"}, {}),
    ],
)
def test_gradients_equal_the_definition(kinds, mesh, units, layout):
    task = Complex(kinds, has_complex_ends=kinds == TURNS)
    assert_same(task, Parallel(on_devices(mesh), PipelineConfig(**units), **layout))


@pytest.mark.parametrize("kinds", [LRUS, BETWEEN])
def test_complex_parameters_lie_in_pools(kinds, monkeypatch):
    for name, value in LARGE.items():
        monkeypatch.setattr(name, value)
    units = PipelineConfig(num_microbatches=2)
    assert_same(Complex(kinds), Parallel(on_devices(ALL), units, fsdp=True))


# ---- Flax models ----


@pytest.fixture
def as_jax_by_default():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


FLAX = {
    "lrus": Adopted(models.LRUs, where="rnns"),
    "text": Adopted(models.ComplexText),
}


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
    setup = Setup.of(task, parallel, train)
    state, step = init_state(setup), make_train_step(setup)
    before = by_layer(state.params, Settings(task, parallel, train))
    for _ in range(NUM_STEPS):
        state, _ = step(state, batch_of(task))
    return before, by_layer(state.params, Settings(task, parallel, train))


def trained_plainly(task, params, optimizer, *, along_slope):
    """Parameters after the same steps by optax alone.

    Args:
      along_slope: whether the optimizer is given the slopes, the conjugates of JAX's gradients.
    """
    kernels, offset = (f"['{name}']" for name in ("layers", "offset"))
    [kernels] = (name for name in params if name.startswith(kernels))
    [offset] = (name for name in params if name.startswith(offset))
    x_BI = jnp.asarray(batch_of(task)["x"], jnp.complex64)

    def mean_loss(params):
        z_BI = x_BI + params[offset][None]
        for kernel in params[kernels]:
            z_BI = z_BI + z_BI @ kernel
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
