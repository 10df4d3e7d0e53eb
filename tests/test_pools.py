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
from lib import api
from lib.any_model import Calm, assert_same
from lib.law.check import assert_near
from lib.laws import more, on_devices
from lib.models import WIDTH, Regression, draw

from jaxpar import (
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    fit,
    init_state,
    load_run,
    make_train_step,
    show,
)
from jaxpar.analysis import inspect_step

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
def small():
    """Few numbers are worth it here, and rows are short."""
    with api.little_is_in_pools():
        yield


def parallel_of(mesh, layout=None, **pipeline):
    units = PipelineConfig(num_microbatches=2, **{"num_chunks": 2, **pipeline})
    return Parallel(on_devices(mesh), units, **(layout or {}))


def batches_of(task, number=2):
    return [task.make_batches("train", 0).batch(step) for step in range(number)]


def trained(task, parallel, state=None, steps=(0, 1)):
    """The state after some steps, and the metrics of the last one."""
    state = init_state(task, parallel, TRAIN) if state is None else state
    step = make_train_step(task, parallel, TRAIN)
    for number in steps:
        state, metrics = step(state, task.make_batches("train", 0).batch(number))
    return state, metrics


def assert_trained_as_on_one_device(task, parallel):
    assert "stage 0" in api.summary(task, parallel)
    (state, metrics), (expected, of_one) = trained(task, parallel), trained(task, ONE)
    api.audit(state)
    np.testing.assert_allclose(metrics.loss, of_one.loss, rtol=1e-5)
    found, wanted = api.params_of(task, parallel, state), api.params_of(task, ONE, expected)
    assert_near(found, wanted, 1e-5)
    # What no layer lies in is zero: the planes are those that the arrays alone give.
    before = jax.tree.leaves(jax.device_get((state.params, state.opt_state)))
    again = api.with_arrays(task, parallel, state, {})
    after = jax.tree.leaves((again.params, again.opt_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)


ONE = parallel_of((1, 1, 1), num_chunks=1)

# ---- losses, gradients and updates ----


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "kinds"), [((1, 2, 1), KINDS), more((2, 2, 2), ALIKE)])
def test_rows_as_long_as_those_of_the_largest_array_equal_their_definition(mesh, kinds):
    task, parallel = Unequal(kinds, batch_size=16), parallel_of(mesh)
    in_short_rows = api.device_bytes(api.abstract_state(task, parallel).params)
    task = Unequal(kinds, batch_size=16, seq_len=4)  # what is made of a task is kept
    with api.little_is_in_pools(most_filled=100):
        assert api.device_bytes(api.abstract_state(task, parallel).params) > in_short_rows
        assert_same(task, parallel)


@pytest.mark.full
def test_rows_without_a_layer_have_no_gradient():
    """In stacks: a group of layers may have none of a kind, though no slot of the stage is empty."""
    task = Averaged(("gru", "wide 60", "wide 20", "gru"), batch_size=8)
    parallel = parallel_of((1, 2, 1), schedule="v", placement="even")
    assert "layers in stacks" in api.summary(task, parallel)["storage"]
    (_, found), (_, expected) = (trained(task, own, steps=(0,)) for own in (parallel, ONE))
    np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=1e-5)


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
    assert_trained_as_on_one_device(task, parallel_of(mesh, layout))


@dataclasses.dataclass(frozen=True)
class Factored(Unequal):
    def make_optimizer(self, num_steps):
        return optax.adafactor(1e-2, min_dim_size_to_factor=4)


@pytest.mark.full
@pytest.mark.law
def test_own_optimizers_see_each_layer_s_arrays_in_pools():
    assert_trained_as_on_one_device(Factored(batch_size=8), parallel_of((1, 2, 1)))


# ---- named arrays ----


@dataclasses.dataclass(frozen=True)
class Injected(Unequal):
    rate: float = 0.5

    def make_optimizer(self, num_steps):
        return optax.inject_hyperparams(optax.adam)(self.rate)


@pytest.mark.full
def test_numbers_that_an_optimizer_is_given_are_known_beside_pools(tmp_path):
    parallel = parallel_of((1, 2, 1))
    api.save(tmp_path, Injected(), parallel, init_state(Injected(), parallel))
    state = api.restored(tmp_path, Injected(rate=0.25), parallel)
    assert state.opt_state.hyperparams["learning_rate"] == 0.25


@pytest.mark.more
@pytest.mark.parametrize("kinds", [KINDS, more(ALIKE)])
def test_a_run_goes_on_with_another_placement_and_mesh(kinds, tmp_path):
    task, before = Unequal(kinds, batch_size=8), parallel_of((1, 2, 1), placement=(2, 2))
    state, _ = trained(task, before)
    expected = api.stored(task, before, state)
    assert {"params/layers/gru/w_x", "params/mix", "params/unmix"} < expected.keys()
    api.save(tmp_path, task, before, state)
    losses = []
    for after in (parallel_of((1, 4, 1), {"update": "host"}, schedule="gpipe"), ONE):
        restored = api.restored(tmp_path, task, after)
        api.audit(restored)
        found = api.stored(task, after, restored)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        losses.append(trained(task, after, restored, (2,))[1].loss)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.full
def test_what_sees_names_sees_the_model_s(tmp_path):
    task, parallel = Unequal(batch_size=8), parallel_of((1, 2, 1))
    fit(task, parallel, TrainConfig(num_steps=2, out_dir=str(tmp_path / "run")), quiet=True)
    assert "layers in pools" in api.summary(task, parallel)["storage"]
    pooled, one = (load_run(tmp_path / "run", mesh) for mesh in ("pp2", "dp1"))
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
    task = dataclasses.replace(
        task, seq_len=4, optimizer=OptimizerConfig("sgd", 1e-30, warmup_steps=0)
    )
    train = TrainConfig(num_steps=1, out_dir=str(tmp_path / "started"))
    started = fit(task, parallel, train, start=files[0], quiet=True)
    leaves = [jax.tree.leaves(nnx.state(run.model())) for run in (started, pooled)]
    jax.tree.map(np.testing.assert_array_equal, *leaves)


@pytest.mark.full
def test_the_origin_of_a_nan_has_the_layer_s_name():
    task, parallel = Unequal(batch_size=8), parallel_of((1, 2, 1))
    state, name = init_state(task, parallel), "params/layers/wide0/up/kernel"
    bad = np.full_like(api.stored(task, parallel, state)[name], np.nan)
    state = api.with_arrays(task, parallel, state, {name: bad})
    [batch] = batches_of(task, 1)
    assert api.origin(task, parallel, state, batch)[0] == "the output of layer 1 (wide0)"


def test_the_table_names_the_parameters_and_counts_them_as_one_device_does():
    def rows(mesh):
        table = str(show(api.abstract_state(Unequal(batch_size=8), parallel_of(mesh))))
        return [line.split() for line in table.splitlines()]

    plain, pooled = rows((1, 1, 1)), rows((1, 2, 1))
    shapes = [{row[0]: row[1] for row in own if "." in (row or [""])[0]} for own in (plain, pooled)]
    assert shapes[0] == shapes[1]
    assert "layers.wide1.up.kernel" in shapes[0]
    assert not any("@" in " ".join(row) for row in pooled)
    counts = [row[0] for own in (plain, pooled) for row in own if row[1:2] == ["parameters,"]]
    assert counts[0] == counts[1]


# ---- bytes ----

OF_ENDS = {
    "each stage": "stores all of scale",
    "stage 0": "stores inputs, mix",
    "stage 3": "stores outputs, unmix",
}


@pytest.mark.full
def test_a_device_has_room_for_its_own_stage():
    task = Unequal(("wide 20", "wide 60", "wide 50", "wide 20"), batch_size=8)
    parallel = parallel_of((1, 4, 1), placement="even")
    of_stage, model = [], nnx.eval_shape(lambda: task.make_model(nnx.Rngs(0)))
    for number, ends in enumerate(
        [(model.mix, model.inputs), (), (), (model.unmix, model.outputs)]
    ):
        layer = nnx.state(model.layers.maker(number)(nnx.Rngs(0)), nnx.Param)
        of_stage.append(4 * sum(a.size for a in jax.tree.leaves((layer, jax.tree.leaves(ends)))))
    stacks = api.device_bytes(
        api.abstract_state(Averaged(task.kinds, batch_size=8), parallel).params
    )
    assert stacks >= sum(of_stage[1:]) > 2 * max(of_stage)
    state = api.abstract_state(task, parallel)
    own = api.device_bytes(state.params) - api.device_bytes(state.params["scale"])
    assert max(of_stage) <= own <= 1.05 * max(of_stage)
    assert api.device_bytes(state.opt_state) == 2 * api.device_bytes(state.params) + 8  # two counts
    assert api.device_bytes(init_state(task, parallel)) == api.device_bytes(state)
    summary = api.summary(task, parallel)
    assert summary["storage"].startswith("layers in pools, ")
    assert summary | OF_ENDS == summary


@pytest.mark.more
@pytest.mark.parametrize(
    ("kinds", "zero_bubble"),
    [(ALIKE, True), more(("wide 20", "wide 60", "gru", "wide 50"), True), more(KINDS, False)],
)
def test_nothing_of_a_pool_is_sent_over_stages(kinds, zero_bubble):
    task = Unequal(kinds, batch_size=16)
    parallel = parallel_of((2, 2, 1), zero_bubble=zero_bubble)
    report = inspect_step(task, parallel)
    assert max(c.bytes for c in report.along("stage") if not c.in_loop) < 2000


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
        trained(task, parallel, steps=(0,))[1].loss
        for parallel in (ONE, parallel_of((1, 2, 1), num_chunks=1))
    )
    np.testing.assert_allclose(stages, one, rtol=1e-5)


# ---- the choice ----


@dataclasses.dataclass(frozen=True)
class Averaged(Unequal):
    def evaluated_params(self, params, opt_state):
        return params


def test_where_stacks_stay_the_table_says_so():
    task, parallel = Averaged(batch_size=8), parallel_of((1, 2, 1))
    assert "wide0" in api.abstract_state(task, parallel).params["layers"]
    assert api.summary(task, parallel)["storage"] == "layers in stacks by kind, not in pools"


def test_layers_of_one_kind_stay_in_a_stack_and_only_ends_are_in_pools():
    task, parallel = Unequal(ALIKE, batch_size=8), parallel_of((1, 4, 1), placement="even")
    state = api.abstract_state(task, parallel)
    summary = api.summary(task, parallel)
    assert "storage" not in summary
    assert summary | OF_ENDS == summary
    model = nnx.eval_shape(lambda: Foretelling(ALIKE, rngs=nnx.Rngs(0)))
    of_ends = [
        4 * sum(a.size for a in jax.tree.leaves(both))
        for both in ((model.mix, model.inputs), (model.unmix, model.outputs))
    ]
    others = api.device_bytes((state.params["layers"], state.params["scale"]))
    own = api.device_bytes(state.params) - others
    assert max(of_ends) <= own <= 1.05 * max(of_ends)
    assert api.device_bytes(state.opt_state) == 2 * api.device_bytes(state.params) + 8
