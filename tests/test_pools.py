"""Layers of unequal shapes in pools: a device has room for those of its stage, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import safetensors.numpy
from flax import nnx
from lib.any_model import Calm, assert_same
from lib.checkpoints import with_parameters
from lib.laws import assert_close, more, on_devices
from lib.models import WIDTH, Regression, draw

from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Start,
    TrainConfig,
    fit,
    init_state,
    load_run,
    make_train_step,
    show,
)
from jaxpar.analysis import inspect_step
from jaxpar.base.axes import STAGE
from jaxpar.base.trees import device_bytes
from jaxpar.data.batches import place_batch
from jaxpar.partition.by_layer import by_layer, from_layers
from jaxpar.step.optimizer_numbers import first_numbers
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state, audit
from jaxpar.step.step import batch_sharding, make_loss_and_grad
from jaxpar.training.checkpoint import Checkpoints
from jaxpar.training.nonfinite import find_origin
from jaxpar.training.summary import describe_outer_modules
from jaxpar.training.weights import find_weights

TRAIN = TrainConfig(num_steps=9, clip_norm=0.5)
KINDS = ("gru", "wide 60", "wide 20", "gru")
ALIKE = ("gru", "gru", "gru", "gru")


class Foretelling(Regression):
    """Each end has an array of its own, which is not called and so not in parts over stages."""

    def __init__(self, kinds, *, rngs):
        super().__init__(kinds, rngs=rngs)
        self.mix = nnx.Param(draw(rngs, WIDTH, 80))
        self.unmix = nnx.Param(draw(rngs, WIDTH, 90))

    def first(self, batch, at):
        x = super().first(batch, at)
        return x + jnp.tanh(x @ self.mix[...]) @ self.mix[...].T

    def last(self, y, batch, at):
        return super().last(self.last_of(y), batch, at)

    def last_of(self, y):
        return y + jnp.tanh(y @ self.unmix[...]) @ self.unmix[...].T

    def predict(self, y, batch, at):
        return {"y": self.outputs(self.last_of(y))}


@dataclasses.dataclass(frozen=True)
class Unequal(Calm):
    """Of this file alone: what is made of a task is kept."""

    kinds: tuple[str, ...] = KINDS
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=0.01, warmup_steps=0)

    def make_model(self, rngs):
        return Foretelling(self.kinds, rngs=rngs)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few numbers are worth it here, and rows are short."""
    monkeypatch.setattr("jaxpar.partition.partition.FEW", 0)
    monkeypatch.setattr("jaxpar.partition.pool.COLUMNS", 8)


def parallel_of(mesh, layout=None, **pipeline):
    units = PipelineConfig(num_microbatches=2, **{"num_chunks": 2, **pipeline})
    return Parallel(on_devices(mesh), units, **(layout or {}))


def setup_of(task, parallel):
    setup = Setup.of(task, parallel, TRAIN)
    assert (setup.storage.pools is None) == (parallel.mesh.stage == 1)
    return setup


def batch_of(setup, step):
    return place_batch(setup.task.make_batches("train", 0), step, batch_sharding(setup))


def trained(setup, num_steps=2, state=None, first=0):
    state, step = init_state(setup) if state is None else state, make_train_step(setup)
    for number in range(first, first + num_steps):
        state, metrics = step(state, batch_of(setup, number))
    return state, float(metrics.loss)


def arrays_of(state, setup):
    return {name: np.asarray(array) for name, array in by_layer(state, setup.storage).items()}


ONE = parallel_of((1, 1, 1), num_chunks=1)

# ---- the law ----

LAW = [
    ((1, 2, 1), KINDS, {}, {}, None),
    ((2, 2, 2), KINDS[:3], {"zero_bubble": False}, {"fsdp": True}, "up"),
    # Layers of one kind stay in a stack; the ends alone are in pools.
    ((2, 2, 1), ALIKE, {"zero_bubble": True}, {"fsdp": True}, None),
]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "kinds", "pipeline", "layout", "frozen"), LAW)
def test_layers_in_pools_equal_their_definition(mesh, kinds, pipeline, layout, frozen):
    task = Unequal(kinds, batch_size=8, freeze=frozen)
    parallel = parallel_of(mesh, layout, **pipeline)
    setup_of(task, parallel)
    assert_same(task, parallel)


@pytest.mark.law
@pytest.mark.parametrize(("mesh", "kinds"), [((1, 2, 1), KINDS), more((2, 2, 2), ALIKE)])
def test_rows_as_long_as_those_of_the_largest_array_equal_their_definition(
    mesh, kinds, monkeypatch
):
    monkeypatch.setattr("jaxpar.partition.pool.MOST_FILLED", 100)
    task, parallel = Unequal(kinds, batch_size=16), parallel_of(mesh)  # a task of this test alone
    [plane, *_] = next(
        pool for pool in setup_of(task, parallel).storage.pools if pool.planes
    ).planes
    assert plane.columns > 8
    assert_same(task, parallel)


@pytest.mark.full
def test_rows_without_a_layer_have_no_gradient(monkeypatch):
    """In stacks: a group of layers may have none of a kind, though no slot of the stage is empty."""
    monkeypatch.setattr("jaxpar.partition.partition.FEW", 2**18)
    task = Unequal(("gru", "wide 60", "wide 20", "gru"), batch_size=8)
    setup = Setup.of(task, parallel_of((1, 2, 1), schedule="v", placement="even"), TRAIN)
    assert setup.storage.pools is None
    assert not setup.partition.slots.has_empty_slots
    (_, _), grads = jax.jit(make_loss_and_grad(setup))(init_state(setup), batch_of(setup, 0))
    norm = optax.tree.norm(by_layer(grads, setup.storage))
    np.testing.assert_allclose(optax.tree.norm(grads), norm, rtol=1e-6)


UPDATES = [
    ((1, 2, 1), {"name": "adamw", "weight_decay": 0.1}, {}),
    ((2, 2, 1), {"name": "rmsprop"}, {"update": "host"}),
    ((1, 4, 1), {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}, {}),
    ((2, 2, 2), {"name": "adam"}, {"update": "sharded"}),
]


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "optimizer", "layout"), UPDATES)
def test_updates_of_whole_planes_equal_those_of_single_arrays(mesh, optimizer, layout):
    optimizer = OptimizerConfig(learning_rate=0.01, warmup_steps=0, **optimizer)
    task = Unequal(optimizer=optimizer, batch_size=8)
    setup, one = setup_of(task, parallel_of(mesh, layout)), setup_of(task, ONE)
    (state, loss), (expected, expected_loss) = trained(setup), trained(one)
    audit(state)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(arrays_of(state.params, setup), arrays_of(expected.params, one))
    # What no layer lies in is zero: the planes are those that the arrays alone give.
    again = from_layers(abstract_state(setup), setup.storage, by_layer(state, setup.storage))
    for ours, theirs in ((state.params, again.params), (state.opt_state, again.opt_state)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-2)),
}


@dataclasses.dataclass(frozen=True)
class OwnOptimizer(Unequal):
    name_of_optimizer: str = "muon"

    def make_optimizer(self, num_steps):
        return OPTIMIZERS[self.name_of_optimizer]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("mesh", [(1, 2, 1), more((2, 2, 2))])
@pytest.mark.parametrize("name", ["muon", "adamw", "factored", "lamb"])
def test_own_optimizers_see_each_layer_s_arrays_in_pools(name, mesh):
    task = OwnOptimizer(name_of_optimizer=name, batch_size=8)
    setup, one = setup_of(task, parallel_of(mesh)), setup_of(task, ONE)
    (state, loss), (expected, expected_loss) = trained(setup), trained(one)
    audit(state)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(arrays_of(state.params, setup), arrays_of(expected.params, one))
    again = from_layers(abstract_state(setup), setup.storage, by_layer(state, setup.storage))
    for ours, theirs in ((state.params, again.params), (state.opt_state, again.opt_state)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


# ---- named arrays ----


@dataclasses.dataclass(frozen=True)
class Injected(Unequal):
    def make_optimizer(self, num_steps):
        return optax.inject_hyperparams(optax.adam)(0.5)


def test_numbers_that_an_optimizer_is_given_are_known_beside_pools():
    numbers = first_numbers(setup_of(Injected(), parallel_of((1, 2, 1))))
    assert numbers["hyperparams/learning_rate"] == 0.5


@pytest.mark.more
@pytest.mark.parametrize("kinds", [KINDS, more(ALIKE)])
def test_a_run_goes_on_with_another_placement_and_mesh(kinds, tmp_path):
    task = Unequal(kinds, batch_size=8)
    before = setup_of(task, parallel_of((1, 2, 1), placement=(2, 2)))
    state, _ = trained(before)
    expected = arrays_of(state, before)
    with Checkpoints(tmp_path, before) as checkpoints:
        checkpoints.save(state)
    losses = {}
    for after in (
        setup_of(task, parallel_of((1, 4, 1), {"update": "host"}, schedule="gpipe")),
        setup_of(task, ONE),
    ):
        restored = Checkpoints(tmp_path, after).restore()
        audit(restored)
        found = arrays_of(restored, after)
        assert found.keys() == expected.keys()
        assert {"params/layers/gru/w_x", "params/mix", "params/unmix"} < found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        losses[after.parallel.mesh] = trained(after, 1, restored, first=2)[1]
    np.testing.assert_allclose([*losses.values()], losses[ONE.mesh], rtol=1e-5)


@pytest.mark.full
def test_what_sees_names_sees_the_model_s(tmp_path):
    task, parallel = Unequal(batch_size=8), parallel_of((1, 2, 1))
    fit(task, parallel, TrainConfig(num_steps=2, out_dir=str(tmp_path / "run")), quiet=True)
    setup_of(task, parallel)
    pooled, one = (load_run(tmp_path / "run", mesh) for mesh in ("pp2", "dp1"))
    assert pooled.setup.storage.pools is not None
    names = set(one.params["layers"])
    assert set(pooled.params["layers"]) == names
    assert "wide0" in names
    for layer in range(len(KINDS)):
        same = [
            jax.tree.leaves(nnx.state(run.model().layers.layer(layer))) for run in (pooled, one)
        ]
        jax.tree.map(np.testing.assert_array_equal, *same)
    # Predictions and a validation.
    found, expected = (run.predict("valid")["y"] for run in (pooled, one))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(pooled.evaluate().loss, one.evaluate().loss, rtol=1e-5)
    # Out into a file and in again.
    files = [run.export(tmp_path / f"{n}.safetensors")[0] for n, run in enumerate((pooled, one))]
    tensors = [safetensors.numpy.load_file(file) for file in files]
    assert "layers.1.up.kernel" in tensors[0]
    jax.tree.map(np.testing.assert_array_equal, *tensors)
    setup = setup_of(dataclasses.replace(task, seq_len=4), parallel)
    started = find_weights(setup, Start(str(files[0]))).state()
    expected = arrays_of(pooled.state.params, pooled.setup)
    found = arrays_of(started.params, setup)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.full
def test_the_origin_of_a_nan_has_the_layer_s_name():
    setup = setup_of(Unequal(batch_size=8), parallel_of((1, 2, 1)))
    state = init_state(setup)
    arrays = arrays_of(state.params, setup)
    arrays["layers/wide0/up/kernel"] = arrays["layers/wide0/up/kernel"] * np.float32(np.nan)
    state = with_parameters(state, setup.storage, arrays)
    origin = find_origin(setup, state, batch_of(setup, 0))
    assert origin.place == "the output of layer 1 (wide0)"


def test_the_table_names_the_parameters_and_counts_them_as_one_device_does():
    def rows(mesh):
        table = str(show(abstract_state(setup_of(Unequal(batch_size=8), parallel_of(mesh)))))
        return [line.split() for line in table.splitlines()]

    plain, pooled = rows((1, 1, 1)), rows((1, 2, 1))
    shapes = [{row[0]: row[1] for row in own if "." in (row or [""])[0]} for own in (plain, pooled)]
    assert shapes[0] == shapes[1]
    assert "layers.wide1.up.kernel" in shapes[0]
    assert not any("@" in " ".join(row) for row in pooled)
    counts = [row[0] for own in (plain, pooled) for row in own if row[1:2] == ["parameters,"]]
    assert counts[0] == counts[1]


# ---- bytes ----


@pytest.mark.full
def test_a_device_has_room_for_its_own_stage():
    task = Unequal(("wide 20", "wide 60", "wide 50", "wide 20"), batch_size=8)
    parallel = parallel_of((1, 4, 1), placement="even")
    setup = setup_of(task, parallel)
    assert setup.storage.pools is not None
    of_stage, model = [], nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0)))
    for number, ends in enumerate(
        [(model.mix, model.inputs), (), (), (model.unmix, model.outputs)]
    ):
        layer = nnx.state(model.layers.maker(number)(nnx.Rngs(0)), nnx.Param)
        of_stage.append(4 * sum(a.size for a in jax.tree.leaves((layer, jax.tree.leaves(ends)))))
    stacks = setup.storage.pools[0].stack_bytes
    assert stacks >= sum(of_stage[1:]) > 2 * max(of_stage)
    state = abstract_state(setup)
    assert set(state.params) == {"@pool", "scale"}
    own = device_bytes(state.params["@pool"])
    assert max(of_stage) <= own <= 1.05 * max(of_stage)
    assert device_bytes(state.opt_state) == 2 * device_bytes(state.params) + 8  # two counts
    real = init_state(setup)
    assert device_bytes(real) == device_bytes(state)
    [(what, text)] = setup.storage.describe()
    assert what == "storage"
    assert text.startswith("layers in pools, ")
    assert dict(describe_outer_modules(setup.storage)) == {
        "each stage": "stores all of scale",
        "stage 0": "stores inputs, mix",
        "stage 3": "stores outputs, unmix",
    }


@pytest.mark.more
@pytest.mark.parametrize(
    ("kinds", "zero_bubble"),
    [(ALIKE, True), more(("wide 20", "wide 60", "gru", "wide 50"), True), more(KINDS, False)],
)
def test_nothing_of_a_pool_is_sent_over_stages(kinds, zero_bubble):
    task = Unequal(kinds, batch_size=16)
    parallel = parallel_of((2, 2, 1), zero_bubble=zero_bubble)
    setup_of(task, parallel)
    report = inspect_step(task, parallel)
    assert max(c.bytes for c in report.along(STAGE) if not c.in_loop) < 2000


@pytest.mark.parametrize("mesh", [(1, 1, 4), (1, 2, 4)])
def test_a_size_that_does_not_split_is_told_where_layers_have_what_is_not_trained(mesh):
    message = r"parameter layers\.wide\.\w+\.kernel: dim 'inner' has size 50, .* over tensor=4"
    with pytest.raises(ValueError, match=message):
        init_state(Unequal(("wide 50", "gru"), batch_size=8), parallel_of(mesh))


# ---- what a model draws ----


class Drawing(Foretelling):
    """Each step, some of what both ends read is zero."""

    def draw(self, key):
        model = nnx.clone(self)
        model.scale[...] *= jax.random.bernoulli(key, 0.7, (WIDTH,)).astype(jnp.float32)
        return model


@dataclasses.dataclass(frozen=True)
class Draws(Unequal):
    def make_model(self, rngs):
        return Drawing(self.kinds, rngs=rngs)


def test_a_model_in_pools_draws_as_on_one_device():
    task = Draws(ALIKE, batch_size=8)
    one, stages = (
        trained(setup_of(task, parallel), 1)[1]
        for parallel in (ONE, parallel_of((1, 2, 1), num_chunks=1))
    )
    np.testing.assert_allclose(stages, one, rtol=1e-5)


# ---- the choice ----


@dataclasses.dataclass(frozen=True)
class Averaged(Unequal):
    def evaluated_params(self, params, opt_state):
        return params


@pytest.mark.full
def test_where_stacks_stay_the_table_says_so():
    setup = Setup.of(Averaged(batch_size=8), parallel_of((1, 2, 1)))
    assert setup.storage.pools is None
    assert "wide0" in abstract_state(setup).params["layers"]
    [(_, text)] = setup.storage.describe()
    assert text == "layers in stacks by kind, not in pools"


def test_layers_of_one_kind_stay_in_a_stack_and_only_ends_are_in_pools():
    setup = setup_of(Unequal(ALIKE, batch_size=8), parallel_of((1, 4, 1), placement="even"))
    state, model = (
        abstract_state(setup),
        nnx.eval_shape(lambda: Foretelling(ALIKE, rngs=nnx.Rngs(0))),
    )
    assert set(state.params) == {"layers", "@pool", "scale"}
    assert setup.storage.describe() == []
    assert dict(describe_outer_modules(setup.storage)) == {
        "each stage": "stores all of scale",
        "stage 0": "stores inputs, mix",
        "stage 3": "stores outputs, unmix",
    }
    of_ends = [
        4 * sum(a.size for a in jax.tree.leaves(both))
        for both in ((model.mix, model.inputs), (model.unmix, model.outputs))
    ]
    own = device_bytes(state.params["@pool"])
    assert max(of_ends) <= own <= 1.05 * max(of_ends)
    assert device_bytes(state.opt_state) == 2 * device_bytes(state.params) + 8
    whole = Setup.of(Averaged(ALIKE, batch_size=8), setup.parallel)
    assert whole.storage.pools is None
