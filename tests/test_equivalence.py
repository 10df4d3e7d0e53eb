"""The law: any mesh, schedule and microbatching gives the losses and gradients of one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxpar.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from jaxpar.data.streams import Batch
from jaxpar.mesh import MeshConfig
from jaxpar.sharding import is_variable
from jaxpar.state import audit, init_state
from jaxpar.step import batch_sharding, make_eval_step, make_loss_and_grad, make_train_step

pytestmark = pytest.mark.law

# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

MESHES = [
    (1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4),
]  # fmt: skip
UNITS = [(1, 1), (2, 1), (1, 4), (2, 4)]  # microbatches, chunks of time

MODEL = ModelConfig(num_layers=8, hidden_size=16, embed_size=16, vocab_size=96, dropout=0.3)
DATA = DataConfig(batch_size=16, seq_len=8)


def make_config(mesh=(1, 1, 1), units=(1, 1), model=MODEL, data=DATA, train=None, **pipeline):
    num_devices = int(np.prod(mesh))
    devices = None if num_devices == jax.device_count() else tuple(range(num_devices))
    return Config(
        mesh=MeshConfig(*mesh, devices=devices),
        model=model,
        pipeline=PipelineConfig(num_microbatches=units[0], num_chunks=units[1], **pipeline),
        data=data,
        train=train or TrainConfig(learning_rate=0.1, optimizer="sgd", warmup_steps=0),
    )


def make_batch(config, mesh, seed=0, starts=False):
    """Random tokens, some targets ignored."""
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.seq_len)
    inputs, targets = rng.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
    targets[rng.random(shape) < 0.1] = -1
    place = functools.partial(jax.device_put, device=batch_sharding(mesh, config))
    return Batch(place(inputs), place(targets), starts)


def by_layer(tree, config):
    """Plain arrays, with the slots of stacked layers put into the layers' order."""
    layer_ids = np.array(config.layer_ids)
    order = [int(np.flatnonzero(layer_ids == n)[0]) for n in range(config.model.num_layers)]

    def unstack(path, variable):
        array = np.asarray(variable[...])
        return array[order] if variable.out_sharding[0] == "layers" else array

    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
    return {jax.tree_util.keystr(path): unstack(path, leaf) for path, leaf in leaves}


def nonzero_carry(state):
    """A carry as a window before might have left it: the same for every layer on every mesh."""

    def fill(variable):
        rows = np.linspace(-0.5, 0.5, variable.shape[1] * variable.shape[2], dtype=np.float32)
        value = np.broadcast_to(rows.reshape(variable.shape[1:]), variable.shape)
        return variable.replace(jax.device_put(value, variable.get_value().sharding))

    return jax.tree.map(fill, state.carry, is_leaf=is_variable)


def loss_and_grads(config):
    mesh = config.mesh.build()
    state = init_state(config, mesh)
    audit(state)
    run = jax.jit(make_loss_and_grad(config, mesh))
    (loss, carry), grads = run(
        state.params, nonzero_carry(state), make_batch(config, mesh), state.step
    )
    return float(loss), by_layer(grads, config), by_layer(carry, config)


@functools.cache
def plain(model=MODEL, data=DATA):
    """What one device computes: the oracle."""
    return loss_and_grads(make_config(model=model, data=data))


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"


def assert_same_as_plain(config):
    loss, grads, carry = loss_and_grads(config)
    whole = dataclasses.replace(config.data, shares=None)
    expected_loss, expected_grads, expected_carry = plain(config.model, whole)
    assert abs(loss - expected_loss) <= RELATIVE_ERROR * expected_loss
    assert_close(grads, expected_grads)
    assert_close(carry, expected_carry)


# Microbatches and chunks are what moves between stages; without stages they change nothing.
LAYOUTS = [(mesh, units) for mesh in MESHES for units in (UNITS if mesh[1] > 1 else UNITS[-1:])]


@pytest.mark.parametrize(("mesh", "units"), LAYOUTS)
def test_loss_and_gradients_equal_plain(mesh, units):
    assert_same_as_plain(make_config(mesh, units))


@pytest.mark.parametrize("placement", [(2, 3, 2), (1, 5, 1), "balanced"])
def test_uneven_placement_equals_plain(placement):
    model = dataclasses.replace(MODEL, num_layers=7)
    assert_same_as_plain(make_config((2, 3, 1), (2, 2), model=model, placement=placement))


@pytest.mark.parametrize("sizes", [{"embed_size": 8}, {"tie_embedding": True}])
def test_model_variants_equal_plain(sizes):
    assert_same_as_plain(make_config((2, 2, 2), (2, 2), model=dataclasses.replace(MODEL, **sizes)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
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
    train = TrainConfig(learning_rate=rate, optimizer=optimizer, warmup_steps=0)

    def train_two_steps(config):
        mesh = config.mesh.build()
        state, losses = init_state(config, mesh), []
        step = make_train_step(config, mesh)
        for number in range(2):
            batch = make_batch(config, mesh, seed=number, starts=number == 0)
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        audit(state)
        return losses, by_layer(state.params, config)

    expected_losses, expected = train_two_steps(make_config(train=train))
    losses, params = train_two_steps(
        make_config(mesh_sizes, (2, 2), train=dataclasses.replace(train, **storage))
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


def test_windows_carry_their_state_on_every_mesh():
    def perplexity_sums(config):
        mesh = config.mesh.build()
        state, sums = init_state(config, mesh), []
        step, carry = make_eval_step(config, mesh), state.carry
        for number in range(3):
            batch = make_batch(config, mesh, seed=number, starts=number == 0)
            carry, result = step((state.params, carry), batch)
            sums.append((float(result.nll), float(result.num_targets)))
        return sums

    expected = perplexity_sums(make_config())
    assert len(set(expected)) == 3
    for mesh, units in [((2, 2, 2), (2, 4)), ((8, 1, 1), (1, 1)), ((1, 4, 2), (1, 2))]:
        np.testing.assert_allclose(
            perplexity_sums(make_config(mesh, units)), expected, rtol=RELATIVE_ERROR
        )


def test_dropout_masks_are_new_at_every_step_and_the_same_on_every_mesh():
    def gradients(config):
        mesh = config.mesh.build()
        state = init_state(config, mesh)
        run = jax.jit(make_loss_and_grad(config, mesh))
        batch = make_batch(config, mesh)
        return [by_layer(run(state.params, state.carry, batch, step)[1], config) for step in (0, 1)]

    first, second = gradients(make_config())
    for name in first:
        if "head" not in name and "bias" not in name:  # the head's hardly depend on its input yet
            assert np.linalg.norm(first[name] - second[name]) > 0.1 * np.linalg.norm(first[name])
    for actual, expected in zip(
        gradients(make_config((2, 2, 2), (2, 2))), (first, second), strict=True
    ):
        assert_close(actual, expected)
