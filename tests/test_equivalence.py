"""The law: any mesh, schedule and microbatching gives the losses and gradients of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxpar.config import OptimizerConfig, Parallel, PipelineConfig, TrainConfig
from jaxpar.data.batches import put_batch
from jaxpar.mesh import MeshConfig
from jaxpar.setup import Setup
from jaxpar.sharding import is_variable
from jaxpar.state import audit, init_state
from jaxpar.step import (
    batch_sharding,
    make_eval_step,
    make_loss_and_grad,
    make_train_step,
    value_and_grad,
)
from jaxpar.task import Settings
from jaxpar.tasks.lm.streams import Batch
from jaxpar.tasks.lm.task import LM
from jaxpar.training.by_layer import in_stacks
from recipes.awd import AWD, late

pytestmark = pytest.mark.law

# A row that goes the same ways as others.
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

MESHES = [
    (1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4),
]  # fmt: skip
UNITS = [(1, 1), (2, 1), (1, 4), (2, 4)]  # microbatches, chunks of time

SGD = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=0)
MODEL = LM(
    num_layers=8,
    hidden_size=16,
    embed_size=16,
    vocab_size=96,
    dropout=0.3,
    batch_size=16,
    seq_len=8,
    optimizer=SGD,
)


def awd(task=MODEL, **options):
    """The recipe with the sizes of a task, and with this alone of what it adds, but for held masks."""
    rates = dict.fromkeys(("input_dropout", "output_dropout"), task.dropout)
    off = dict.fromkeys(("word_dropout", "drop_connect", "ar", "tar"), 0.0) | {"window_mean": 0}
    return AWD(**vars(task) | rates | off | options)


def on_devices(sizes):
    """A mesh of the first devices, as many as it needs."""
    return MeshConfig(*sizes, devices=tuple(range(int(np.prod(sizes)))))


def make_settings(mesh=(1, 1, 1), units=(1, 1), task=MODEL, *, train=None, layout=None, **pipeline):
    """A task on a mesh; `layout` are fields of `Parallel`, such as shares."""
    pipeline = PipelineConfig(num_microbatches=units[0], num_chunks=units[1], **pipeline)
    parallel = Parallel(on_devices(mesh), pipeline, **(layout or {}))
    return Settings(task, parallel, train or TrainConfig())


def make_batch(settings, mesh, seed=0, starts=False, length=None):
    """Random tokens, some targets ignored."""
    task, rng = settings.task, np.random.default_rng(seed)
    shape = (task.batch_size, length or task.seq_len)
    inputs, targets = rng.integers(0, task.vocab_size, (2, *shape), dtype=np.int32)
    targets[rng.random(shape) < 0.1] = -1
    batch = Batch(inputs, targets, starts)
    if task.reads_lines:
        batch = batch._replace(lengths=np.full(shape[0], shape[1], np.int32))
    if getattr(task, "window_mean", 0):
        targets[:, :3] = -1
        batch = late(batch)._replace(padding=3, rate=0.5)
    return put_batch(batch, batch_sharding(Setup.of(task, settings.parallel, mesh=mesh)))


def by_layer(tree, settings):
    """Plain arrays, with the rows of stacked layers put into the layers' order."""
    layout = Setup.of(settings.task, settings.parallel).layout

    def unstack(variable):
        array, kind = np.asarray(variable.get_value()), variable.get_metadata("kind", None)
        if kind is None:
            return array
        rows = layout.slots.rows[layout.facts.kinds.index(kind)]
        return array[[rows.index(layer) for layer in sorted(rows) if layer >= 0]]

    leaves = jax.tree.leaves_with_path(in_stacks(tree, layout), is_leaf=is_variable)
    return {jax.tree_util.keystr(path): unstack(leaf) for path, leaf in leaves}


def nonzero_carry(state):
    """A carry as a window before might have left it: the same for every layer on every mesh."""

    def fill(path, variable):
        rows = np.linspace(-0.5, 0.5, int(np.prod(variable.shape[1:])), dtype=np.float32)
        if "n_BH" in jax.tree_util.keystr(path):  # an sLSTM's sum of weights, which it divides by
            rows += 1
        value = np.broadcast_to(rows.reshape(variable.shape[1:]), variable.shape)
        return variable.replace(jax.device_put(value, variable.get_value().sharding))

    return jax.tree.map_with_path(fill, state.carry, is_leaf=is_variable)


def loss_and_grads(settings):
    mesh = settings.parallel.mesh.build()
    state = init_state(settings.task, settings.parallel, mesh=mesh)
    audit(state)
    state = dataclasses.replace(state, carry=nonzero_carry(state))
    run = jax.jit(make_loss_and_grad(Setup.of(settings.task, settings.parallel, mesh=mesh)))
    (loss, (carry, _)), grads = run(state, make_batch(settings, mesh))
    return float(loss), by_layer(grads, settings), by_layer(carry, settings)


@functools.cache
def plain(task=MODEL):
    """What one device computes: the oracle."""
    return loss_and_grads(make_settings(task=task))


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def assert_same_as_plain(settings):
    loss, grads, carry = loss_and_grads(settings)
    expected_loss, expected_grads, expected_carry = plain(settings.task)
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    assert_close(grads, expected_grads)
    assert_close(carry, expected_carry)


# Microbatches and chunks are what moves between stages; without stages they change nothing.
LAYOUTS = [(mesh, UNITS[-1]) for mesh in MESHES] + [((2, 2, 2), units) for units in UNITS[:-1]]
LAYOUTS += [
    slow(mesh, units)
    for mesh in MESHES
    for number, units in enumerate(UNITS[:-1])
    if mesh[1] > 1 and (mesh, units) not in LAYOUTS
]


@pytest.mark.parametrize(("mesh", "units"), LAYOUTS)
def test_loss_and_gradients_equal_plain(mesh, units):
    assert_same_as_plain(make_settings(mesh, units))


@pytest.mark.parametrize("placement", [(2, 3, 2), (1, 5, 1), slow("balanced")])
def test_uneven_placement_equals_plain(placement):
    task = dataclasses.replace(MODEL, num_layers=7)
    assert_same_as_plain(make_settings((2, 3, 1), (2, 2), task=task, placement=placement))


@pytest.mark.parametrize("sizes", [slow({"embed_size": 8}), {"tie_embedding": True}])
def test_model_variants_equal_plain(sizes):
    assert_same_as_plain(make_settings((2, 2, 2), (2, 2), task=dataclasses.replace(MODEL, **sizes)))


@pytest.mark.parametrize("zero_bubble", [True, slow(False)])
def test_a_pipeline_equals_plain_with_numbers_of_64_bits(zero_bubble):
    """JAX_ENABLE_X64 makes Python's whole numbers int64, beside the int32 of ticks and units."""
    task = awd(num_layers=2, window_mean=6)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # strict is of these tests
        assert_same_as_plain(make_settings((1, 2, 1), (2, 4), task, zero_bubble=zero_bubble))


@functools.cache
def train_two_steps(settings):
    mesh = settings.parallel.mesh.build()
    state, losses = init_state(settings.task, settings.parallel, mesh=mesh), []
    step = make_train_step(*settings, mesh)
    for number in range(2):
        batch = make_batch(settings, mesh, seed=number, starts=number == 0)
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    audit(state)
    return losses, by_layer(state.params, settings)


@pytest.mark.parametrize("optimizer", ["adam", slow("sgd")])
@pytest.mark.parametrize(
    ("mesh_sizes", "storage"),
    [
        ((2, 2, 2), {}),
        ((8, 1, 1), {}),
        ((2, 2, 2), {"fsdp": True}),
        ((4, 2, 1), {"update": "sharded"}),
    ],
)
def test_parameters_agree_after_two_steps(optimizer, mesh_sizes, storage):
    # Adam moves every weight by about its rate, also where the gradient is nothing but rounding.
    rate = {"sgd": 0.1, "adam": 1e-3}[optimizer]
    config = OptimizerConfig(name=optimizer, learning_rate=rate, warmup_steps=0)
    task = dataclasses.replace(MODEL, optimizer=config)

    expected_losses, expected = train_two_steps(make_settings(task=task))
    losses, params = train_two_steps(make_settings(mesh_sizes, (2, 2), task, layout=storage))
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


def test_windows_carry_their_state_on_every_mesh():
    def perplexity_sums(settings):
        mesh = settings.parallel.mesh.build()
        state, sums = init_state(settings.task, settings.parallel, mesh=mesh), []
        step = make_eval_step(settings.task, settings.parallel, mesh=mesh)
        for number in range(3):
            batch = make_batch(settings, mesh, seed=number, starts=number == 0)
            carry, result = step(state, batch)
            state = dataclasses.replace(state, carry=carry)
            sums.append((float(result.loss), float(result.weight)))
        return sums

    expected = perplexity_sums(make_settings())
    assert len(set(expected)) == 3
    for mesh, units in [((2, 2, 2), (2, 4)), ((8, 1, 1), (1, 1)), ((1, 4, 2), (1, 2))]:
        np.testing.assert_allclose(
            perplexity_sums(make_settings(mesh, units)), expected, rtol=RELATIVE_ERROR
        )


def test_dropout_masks_are_new_at_every_step_and_the_same_on_every_mesh():
    def gradients(settings):
        mesh = settings.parallel.mesh.build()
        state = init_state(settings.task, settings.parallel, mesh=mesh)
        run = value_and_grad(*settings, mesh)
        batch = make_batch(settings, mesh)
        states = [dataclasses.replace(state, step=state.step + step) for step in (0, 1)]
        return [by_layer(run(each, batch)[1], settings) for each in states]

    first, second = gradients(make_settings())
    for name in first:
        if "head" not in name and "bias" not in name:  # the head's hardly depend on its input yet
            assert np.linalg.norm(first[name] - second[name]) > 0.1 * np.linalg.norm(first[name])
    for actual, expected in zip(
        gradients(make_settings((2, 2, 2), (2, 2))), (first, second), strict=True
    ):
        assert_close(actual, expected)
