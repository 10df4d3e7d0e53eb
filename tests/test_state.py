"""The state: born sharded, the same on every mesh, and audited."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from flax import nnx
from test_equivalence import MESHES, by_layer, make_batch, make_config

from jaxpar.analysis import inspect_step
from jaxpar.analysis.hlo import arrays
from jaxpar.config import ModelConfig, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.optimizer import clip, learning_rate
from jaxpar.sharding import RULES, Rules, annotated, shardings
from jaxpar.state import (
    _initial_state,
    abstract_state,
    audit,
    init_state,
)
from jaxpar.step import make_train_step

# (2, 2, 2): stages split layers, tensor shards split units and the embedding, both the vocabulary.
SHARDS = {
    "embedding.table": ((96, 16), (96, 8)),
    "head.kernel": ((16, 96), (16, 24)),
    "head.bias": ((96,), (24,)),
    "lstm.w_x": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "lstm.w_h": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "lstm.b": ((8, 4, 16), (4, 4, 8)),
}


def shard_bytes(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.law
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_same_seed_gives_the_same_values_on_every_mesh(mesh):
    one, other = make_config(), make_config(mesh)
    expected = by_layer(init_state(one).params, one)
    actual = by_layer(init_state(other).params, other)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_every_parameter_of_a_compiled_step_is_split_over_the_axes_that_it_names():
    config = make_config((2, 2, 2), (2, 2))
    mesh = config.mesh.build()
    step, state = make_train_step(config, mesh), init_state(config, mesh)
    batch = make_batch(config, mesh)
    [inputs, *_], _ = step.lower(state, batch).compile().input_shardings
    after, _ = step(state, batch)
    for given, done in ((inputs.params, after.params), (inputs.opt_state, after.opt_state)):
        for (name, layout), (_, variable) in zip(annotated(given), annotated(done), strict=True):
            shape, shard = next(v for key, v in SHARDS.items() if name.endswith(key))
            assert variable.shape == shape
            assert layout.get_value().shard_shape(shape) == shard, name
            assert variable.get_value().addressable_shards[0].data.shape == shard, name
    assert {name for name, _ in annotated(after.params)} == set(SHARDS)


def test_initialisation_needs_the_memory_of_its_shards():
    model = ModelConfig(num_layers=8, hidden_size=256, embed_size=256, vocab_size=3072)
    config = make_config((2, 2, 2), model=model)
    mesh = config.mesh.build()
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    compiled = jax.jit(lambda: _initial_state(config), out_shardings=target).lower().compile()
    memory, state = compiled.memory_analysis(), compiled()
    # XLA counts a table of pointers to the arrays too.
    assert abs(memory.output_size_in_bytes - shard_bytes(state)) <= 8 * len(jax.tree.leaves(state))
    # Random bits are drawn shard by shard: no array of the program, at any point, is larger than a shard.
    largest = max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state))
    assert max(math.prod(dims) for _, dims in arrays(compiled.as_text())) == largest
    # Threefry's two words, the bits and the values.
    assert memory.temp_size_in_bytes < 4.1 * 4 * largest


def test_what_each_update_mode_holds_on_eight_devices():
    def held(**train):
        """Bytes per device of parameters and moments, and of the compiled step's arguments."""
        config = make_config((8, 1, 1), train=TrainConfig(optimizer="adam", **train))
        mesh = config.mesh.build()
        state, batch = init_state(config, mesh), make_batch(config, mesh)
        audit(state)
        moments = [v for _, v in annotated(state.opt_state)]
        compiled = make_train_step(config, mesh).lower(state, batch).compile()
        arguments = compiled.memory_analysis().argument_size_in_bytes
        return shard_bytes(state.params), shard_bytes(moments), arguments

    params, moments, arguments = held()
    assert held(update="sharded") == (params, moments / 8, arguments - moments * 7 / 8)
    assert held(fsdp=True) == (
        params / 8, moments / 8, arguments - params * 7 / 8 - moments * 7 / 8
    )  # fmt: skip
    # No optimizer state, nor its two counts, on any device.
    assert held(update="host") == (params, moments / 8, arguments - moments - 8)


def test_host_update_keeps_state_in_host_memory():
    config = make_config((2, 1, 2), train=TrainConfig(optimizer="adamw", update="host"))
    mesh = config.mesh.build()
    state = init_state(config, mesh)
    after, _ = make_train_step(config, mesh)(state, make_batch(config, mesh))
    for leaf in jax.tree.leaves(after.opt_state):
        assert leaf.sharding.memory_kind == "pinned_host"
    audit(after)
    on_device = jax.device_put(after.opt_state, shardings(after.opt_state, mesh, after.opt_rules))
    with pytest.raises(ValueError, match="declared in pinned_host memory, but lies in device"):
        audit(dataclasses.replace(after, opt_state=on_device))


def test_a_split_update_compiles_to_an_eighth_of_the_moments_on_eight_devices():
    def argument_bytes(optimizer, update="replicated"):
        train = TrainConfig(optimizer=optimizer, update=update)
        return inspect_step(make_config((8, 1, 1), train=train)).memory.arguments

    without = argument_bytes("sgd") + 4  # Adam counts its steps too
    whole, part = (argument_bytes("adam", u) - without for u in ("replicated", "sharded"))
    assert whole == 8 * part > 0


def test_audit_names_what_is_not_so_sharded():
    config = make_config((2, 2, 2))
    mesh = config.mesh.build()
    state = init_state(config, mesh)
    audit(state)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = state.params
    params["lstm"]["w_h"] = params["lstm"]["w_h"].replace(
        jax.device_put(params["lstm"]["w_h"][...], whole)
    )
    with pytest.raises(
        ValueError, match=r"1 arrays are annotated but not so sharded(.|\n)*lstm\.w_h"
    ):
        audit(dataclasses.replace(state, params=params))


def test_sizes_that_do_not_split_are_refused_with_their_parameter():
    model = ModelConfig(num_layers=4, hidden_size=16, embed_size=16, vocab_size=90)
    config = make_config((1, 2, 2), model=model)
    with pytest.raises(
        ValueError,
        match=r"parameter head\.bias: dim 'vocab' has size 90, which does not split over "
        r"stage=2 x tensor=2 = 4; use 88 or 92",
    ):
        init_state(config)


def test_a_plain_flax_module_is_sharded_by_its_own_metadata():
    mesh = MeshConfig(data=2, tensor=4).build()

    def make():
        kernel_init = nnx.with_partitioning(
            nnx.initializers.lecun_normal(), ("input", "hidden"), eager_sharding=False
        )
        return nnx.state(nnx.Linear(8, 16, kernel_init=kernel_init, rngs=nnx.Rngs(0)))

    state = jax.jit(make, out_shardings=shardings(nnx.eval_shape(make), mesh, RULES))()
    assert state["kernel"].addressable_shards[0].data.shape == (8, 4)
    assert state["bias"].addressable_shards[0].data.shape == (16,)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"hiden": "tensor"}, "unknown dim name 'hiden'"),
        ({"hidden": "tensr"}, "unknown mesh axis 'tensr'"),
        ({"hidden": ("data", "data")}, "names an axis twice"),
    ],
)
def test_bad_rules_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        Rules.make(table)


def test_one_axis_cannot_split_two_dims_of_an_array():
    rules = RULES.replace({"input": "tensor"})
    with pytest.raises(ValueError, match=r"split two dims of one array.*over the axis 'tensor'"):
        rules.spec(("input", "hidden"))


def test_learning_rate_warms_up_and_falls():
    rate = learning_rate(TrainConfig(learning_rate=0.5, num_steps=110, warmup_steps=10))
    values = [float(rate(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(values, [0.05, 0.275, 0.5, 0.25, 0.0], atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.4, 0.4, 0.4, 0.4, 0.4]),
        ("linear", [0.4, 0.4, 0.4, 0.2, 0.0]),
        ("cosine", [0.4, 0.4, 0.4, 0.2, 0.0]),
        ("exponential", [0.4, 0.4, 0.4, 0.4 * 0.9, 0.4 * 0.9**2]),
    ],
)
def test_learning_rate_is_held_and_then_falls(schedule, expected):
    config = TrainConfig(
        lr_schedule=schedule, learning_rate=0.4, num_steps=110, warmup_steps=0, hold_steps=10,
        lr_decay=0.9, lr_decay_every=50,
    )  # fmt: skip
    values = [float(learning_rate(config)(step)) for step in (0, 9, 10, 60, 110)]
    np.testing.assert_allclose(values, expected, atol=1e-7)


def test_gradients_are_clipped_by_their_global_norm():
    grads = {"a": np.array([3.0, 4.0], np.float32)}
    clipped = clip(grads, TrainConfig(clip_norm=0.5))
    np.testing.assert_allclose(clipped["a"], [0.3, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(clip(grads, TrainConfig(clip_norm=0.0))["a"], grads["a"])
