"""The state: born sharded, the same on every mesh, and audited."""

import dataclasses
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from lib import api
from lib.laws import MESHES, RELATIVE_ERROR, make_settings, more, with_optimizer
from lib.laws import WITHOUT_MASKS as MODEL
from lib.models import Regress

from jaxpar import (
    RULES,
    OptimizerConfig,
    Rules,
    TrainConfig,
    init_state,
    make_train_step,
    value_and_grad,
)
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM, Batch

# (2, 2, 2): stages split layers, tensor shards split units and the embedding, both the vocabulary.
SHARDS = {
    "embedding.table": ((96, 16), (96, 8)),
    "head.kernel": ((16, 96), (16, 24)),
    "head.bias": ((96,), (24,)),
    "layers.lstm.w_x": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "layers.lstm.w_h": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "layers.lstm.b": ((8, 4, 16), (4, 4, 8)),
}


def batch_of(task, seed=0, starts=True):
    """Random tokens."""
    tokens = np.random.default_rng(seed).integers(0, task.vocab_size, (2, 16, 8), dtype=np.int32)
    return Batch(*tokens, starts)


def started(settings):
    """Train step, state and batch."""
    task, parallel, train = settings
    return make_train_step(task, parallel, train), init_state(task, parallel), batch_of(task)


def variables(tree):
    """Of a state or a part of it, by their names."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def named_variables(tree):
    """Those whose dims have names."""
    found = variables(tree)
    return {
        name: leaf
        for name, leaf in found.items()
        if isinstance(leaf, nnx.Variable) and leaf.get_metadata("out_sharding", None)
    }


def shard_shape(variable):
    return variable[...].addressable_shards[0].data.shape


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_same_seed_gives_the_same_values_on_every_mesh(mesh):
    one, other = make_settings(), make_settings(mesh)
    expected, actual = (
        api.params_of(own.task, own.parallel, init_state(own.task, own.parallel))
        for own in (one, other)
    )
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.full
def test_every_parameter_of_a_compiled_step_is_split_over_the_axes_that_it_names():
    step, state, batch = started(make_settings((2, 2, 2), (2, 2), with_optimizer("adam")))
    [inputs, *_], _ = step.lower(state, batch).compile().input_shardings
    after, _ = step(state, batch)
    for given, done in ((inputs.params, after.params), (inputs.opt_state, after.opt_state)):
        layouts = named_variables(given)
        for name, variable in named_variables(done).items():
            shape, shard = next(v for key, v in SHARDS.items() if name.endswith(key))
            assert variable.shape == shape
            assert layouts[name].get_value().shard_shape(shape) == shard, name
            assert shard_shape(variable) == shard, name
    assert {*named_variables(after.params)} == {*SHARDS}


@pytest.mark.full
def test_initialisation_needs_the_memory_of_its_shards():
    task = LM(num_layers=8, hidden_size=256, embed_size=256, vocab_size=3072)
    _, parallel, _ = make_settings((2, 2, 2))
    compiled, state = api.compiled_init(task, parallel), init_state(task, parallel)
    memory = compiled.memory_analysis()
    # XLA counts a table of pointers to the arrays too.
    assert abs(memory.output_size_in_bytes - api.device_bytes(state)) <= 8 * len(
        jax.tree.leaves(state)
    )
    # Random bits are drawn shard by shard: no array of the program, at any point, is larger than a shard.
    largest = max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state))
    shapes = re.findall(r"[a-z]\w*\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) == largest
    # Threefry's two words, the bits and the values.
    assert memory.temp_size_in_bytes < 4.1 * 4 * largest


@pytest.mark.full
def test_what_each_update_mode_holds_on_eight_devices():
    def held(**layout):
        """Bytes per device of parameters and moments, and of the compiled step's arguments."""
        settings = make_settings((8, 1, 1), task=with_optimizer("adam"), layout=layout)
        step, state, batch = started(settings)
        api.audit(state)
        moments = api.device_bytes(named_variables(state.opt_state))
        compiled = step.lower(state, batch).compile()
        arguments = compiled.memory_analysis().argument_size_in_bytes
        return api.device_bytes(state.params), moments, arguments

    params, moments, arguments = held()
    assert held(update="sharded") == (params, moments / 8, arguments - moments * 7 / 8)
    *split, found = held(fsdp=True)
    assert split == [params / 8, moments / 8]
    # It is given the numbers of its loop over layers, too.
    assert 0 < found - (arguments - params * 7 / 8 - moments * 7 / 8) < 256
    # No optimizer state, its two counts and its settings, on any device.
    *split, found = held(update="host")
    assert split == [params, moments / 8]
    assert 0 < arguments - moments - 8 - found < 256


def test_host_update_keeps_state_in_host_memory():
    settings = make_settings((2, 1, 2), task=with_optimizer("adamw"), layout={"update": "host"})
    step, state, batch = started(settings)
    after, _ = step(state, batch)
    for leaf in jax.tree.leaves(after.opt_state):
        assert leaf.sharding.memory_kind == "pinned_host"
    api.audit(after)
    on_device = jax.tree.map(
        lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("device")), after.opt_state
    )
    with pytest.raises(ValueError, match=r"declared .*pinned_host.*, but placed on .*device"):
        api.audit(dataclasses.replace(after, opt_state=on_device))


@pytest.mark.full
def test_a_split_update_compiles_to_an_eighth_of_the_moments_on_eight_devices():
    def settings(update):
        return make_settings((8, 1, 1), task=with_optimizer("adam"), layout={"update": update})

    whole, part = (
        inspect_step(*settings(update)).memory.arguments for update in ("replicated", "sharded")
    )
    moments = 2 * api.device_bytes(init_state(*settings("replicated")[:2]).params)
    assert whole - part == moments * 7 / 8 > 0


class OtherOptimizer(LM):
    """The model with an optimizer of optax that is no option: it factors matrices, as Adafactor does."""

    optimizer_of_optax: ClassVar = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=9), optax.scale(-1e-2)
    )

    def make_optimizer(self, num_steps):
        return self.optimizer_of_optax


def with_type(task_type, task=MODEL):
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return task_type(**values)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("layout", [more({}), {"update": "sharded"}, {"fsdp": True}])
def test_an_optimizer_whose_state_has_other_shapes_than_parameters_trains_as_on_one_device(layout):
    task = with_type(OtherOptimizer)
    one, other = make_settings(task=task), make_settings((2, 2, 2), (2, 2), task, layout=layout)
    batches = [batch_of(task, seed, starts=seed == 0) for seed in range(2)]
    expected, found = (api.updates(*settings, batches) for settings in (one, other))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=RELATIVE_ERROR)
    assert_near(found.trained, expected.trained)
    step, state, batch = started(other)
    state, _ = step(state, batch)
    kept = variables(state.opt_state)
    rows, bias = kept["0.v_row.layers.lstm.w_x"][...], kept["0.v_row.head.bias"][...]
    assert (rows.shape, bias.shape) == ((8, 16, 4), (1,))
    # Those of layers are split over `stage`, all where a layout says so and it divides over `data`.
    parts = 2 * (2 if layout else 1)
    assert math.prod(rows.sharding.shard_shape(rows.shape)) == rows.size // parts
    assert bias.sharding.is_fully_replicated


def assert_near(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = np.linalg.norm(actual[name] - value)
        assert error <= RELATIVE_ERROR * np.linalg.norm(value), name


class _Sums(OtherOptimizer):
    optimizer_of_optax = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


class _Lists(OtherOptimizer):
    optimizer_of_optax = optax.sm3(1e-2)


@pytest.mark.parametrize(
    ("task_type", "update", "message"),
    [
        (OtherOptimizer, "host", r"task OtherOptimizer looks at more than one number .*reduce_sum"),
        (
            _Sums,
            "host",
            r"more than one number at once \(.*reduce_sum\)\nFix: use update='sharded', or",
        ),
        (
            _Lists,
            "sharded",
            r"keeps 0\.mu\.embedding\.table, a list\nFix: use one that",
        ),
    ],
)
def test_optimizers_that_would_be_wrong_in_parts_are_refused(task_type, update, message):
    """On the host each device's part of a parameter is updated alone."""
    settings = make_settings((2, 1, 1), task=with_type(task_type), layout={"update": update})
    with pytest.raises(ValueError, match=message):
        init_state(settings.task, settings.parallel)


# (2, 2, 2): what `fsdp` and a split update leave of each array on a device. Over `data`, the first dim that
# is whole and divides is split too, whether it has a name or not.
OWN_DIMS = {
    "inputs.kernel": ((3, 16), (3, 16), (3, 8)),
    "outputs.kernel": ((16, 3), (16, 3), (8, 3)),
    "scale": ((16,), (16,), (8,)),
    "layers.block.qkv": ((2, 16, 3, 2, 8), (1, 16, 3, 1, 8), (1, 8, 3, 1, 8)),
    "layers.block.up.kernel": ((2, 16, 32), (1, 16, 16), (1, 8, 16)),
    "layers.block.down.kernel": ((2, 32, 16), (1, 16, 16), (1, 16, 8)),
    "layers.gru.w_x": ((2, 16, 3, 16), (1, 16, 3, 8), (1, 8, 3, 8)),
    "layers.dense.kernel": ((2, 16, 16), (1, 16, 16), (1, 8, 16)),
    "layers.dense.bias": ((2, 16), (1, 16), (1, 8)),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("layout", "splits_params", "splits_state"),
    [
        more({}, False, False),
        ({"update": "sharded"}, False, True),
        ({"fsdp": True}, True, True),
    ],
)
def test_any_dim_is_split_over_data_whatever_its_name(layout, splits_params, splits_state):
    kinds = ("block", "gru", "dense") * 2
    momentum = OptimizerConfig(name="sgd", learning_rate=0.05, momentum=0.9, warmup_steps=0)
    task = Regress(kinds, optimizer=momentum)
    _, parallel, train = make_settings((2, 2, 2), (2, 1), task, layout=layout)
    state, step = init_state(task, parallel), make_train_step(task, parallel, train)
    state, _ = step(state, task.make_batches("train", 0).batch(0))
    api.audit(state)
    for tree, is_split in ((state.params, splits_params), (state.opt_state, splits_state)):
        found = {name.split("trace.")[-1]: own for name, own in variables(tree).items()}
        for name, (shape, whole, part) in OWN_DIMS.items():
            assert found[name].shape == shape, name
            assert shard_shape(found[name]) == (part if is_split else whole), name


@pytest.mark.parametrize(
    ("dims", "shape", "spec"),
    [
        ((None, None), (6, 8), P(None, "data")),
        ((None, "input"), (8, 16), P("data", None)),
        (("input", None), (8, 6), P("data", None)),
        (("hidden", None), (16, 12), P("tensor", "data")),
        (("hidden", None), (16, 6), P(("tensor", "data"), None)),  # 16 over 2 x 4
        (("hidden", None), (12, 6), P("tensor", None)),  # 12 does not divide by 2 x 4
        (("hidden",), (12,), P("tensor")),
        (("layers", None), (16, 6), P("stage", None)),  # layers are split over stages alone
        (("batch", None), (8, 16), P("data", None)),
        ((None,), (1,), P(None)),
        ((), (), P()),
    ],
)
def test_the_first_dim_that_divides_and_is_whole_is_split_over_data_too(dims, shape, spec):
    sizes = {"data": 4, "stage": 2, "tensor": 2}
    over_data = dataclasses.replace(RULES, over="data")
    assert over_data.spec(dims, shape, sizes) == spec
    assert RULES.spec(dims, shape, sizes) == RULES.spec(dims)


class FrozenEmbedding(LM):
    """Its table is given, not learned."""

    frozen: ClassVar = nnx.PathContains("embedding")


@pytest.mark.parametrize(
    ("mesh", "units", "pipeline"),
    [more((1, 1, 1), (2, 1), {}), ((2, 2, 2), (2, 2), {"head": "sharded", "remat": True})],
)
def test_what_is_frozen_has_no_gradient_and_no_optimizer_state_and_stays(mesh, units, pipeline):
    """A tied table is what the head is made of as well."""
    model = with_optimizer("adam", dataclasses.replace(MODEL, tie_embedding=True))
    task = with_type(FrozenEmbedding, model)
    settings = make_settings(mesh, units, task, **pipeline)
    step, state, batch = started(settings)
    [(name, table)] = variables(state.frozen).items()
    assert name == "embedding.table"
    before = np.asarray(table[...])
    _, grads = value_and_grad(task, settings.parallel)(state, batch)
    for tree in (state.params, state.opt_state, grads):
        names = [*variables(tree)]
        assert names
        assert not [name for name in names if "embedding" in name]
    after, _ = step(state, batch)
    np.testing.assert_array_equal(after.frozen["embedding"]["table"][...], before)


def test_audit_names_what_is_not_so_sharded():
    task, parallel, _ = make_settings((2, 2, 2))
    state = init_state(task, parallel)
    api.audit(state)
    whole = jax.sharding.NamedSharding(parallel.mesh.build(), P())
    lstm = state.params["layers"]["lstm"]
    lstm["w_h"] = lstm["w_h"].replace(jax.device_put(lstm["w_h"][...], whole))
    with pytest.raises(
        ValueError, match=r"1 arrays are not sharded as annotated:(.|\n)*layers\.lstm\.w_h"
    ):
        api.audit(state)


def test_sizes_that_do_not_split_are_refused_with_their_parameter():
    task = LM(num_layers=4, hidden_size=16, embed_size=16, vocab_size=90)
    _, parallel, _ = make_settings((1, 2, 2))
    with pytest.raises(
        ValueError,
        match=r"parameter head\.bias: dim 'vocab' has size 90, which does not split over "
        r"stage=2 x tensor=2\nFix: use 88 or 92, head='last' \(--pipeline\.head last\), or another mesh",
    ):
        init_state(task, parallel)


def test_a_rule_with_an_axis_twice_is_refused():
    with pytest.raises(ValueError, match="names an axis twice"):
        Rules.make({"hidden": ("data", "data")})


def test_a_table_has_one_rule_for_a_dim():
    with pytest.raises(ValueError, match="rules has 2 rules for 'hidden'\nFix: keep one"):
        Rules((("hidden", ("tensor",)), ("hidden", ())))


@pytest.mark.parametrize("name", ["hiden", "experts"])
def test_a_dim_without_a_rule_is_refused_before_anything_is_sharded(name):
    """Else it would be whole on every device, and nobody would know."""
    message = rf"dim '{name}' has no rule; .*hidden.*\n.*{{'{name}': None}}"
    with pytest.raises(ValueError, match=message):
        RULES.axes_of(name)
    with pytest.raises(ValueError, match=message):
        RULES.spec(("input", name))
    assert RULES.replace({name: "tensor"}).spec(("input", name)) == P(None, "tensor")


def test_one_axis_cannot_split_two_dims_of_an_array():
    rules = RULES.replace({"input": "tensor"})
    with pytest.raises(ValueError, match=r"split two dims of .* over the axis 'tensor'"):
        rules.spec(("input", "hidden"))


def rates(num_steps, steps, **options):
    """The learning rate at some steps, by what plain SGD makes of a gradient of 1."""
    optimizer = OptimizerConfig("sgd", **options)
    sgd, one = LM(optimizer=optimizer).make_optimizer(num_steps), jnp.ones(())

    def step(state, _):
        update, state = sgd.update(one, state, one)
        return state, -update

    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        _, found = jax.lax.scan(step, sgd.init(one), length=num_steps + 1)
    return found[np.array(steps)]


def test_learning_rate_warms_up_and_falls():
    found = rates(110, (0, 5, 10, 60, 110), learning_rate=0.5, warmup_steps=10)
    np.testing.assert_allclose(found, [0.05, 0.275, 0.5, 0.25, 0.0], atol=1e-7)


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
    found = rates(
        110, (0, 9, 10, 60, 110), lr_schedule=schedule, learning_rate=0.4, warmup_steps=0,
        hold_steps=10, lr_decay=0.9, lr_decay_every=50,
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_gradients_are_clipped_by_their_global_norm():
    sgd = OptimizerConfig("sgd", 1.0, "constant", warmup_steps=0)
    task = dataclasses.replace(MODEL, optimizer=sgd)

    def moved(clip_norm):
        """All that a step subtracts from the parameters, and its norm."""
        settings = make_settings(task=task, train=TrainConfig(clip_norm=clip_norm))
        found = api.updates(*settings, [batch_of(task)])
        move = np.concatenate(
            [(found.weights[name] - own).ravel() for name, own in found.trained.items()]
        )
        return move, np.linalg.norm(move)

    move, norm = moved(0.0)
    clipped, _ = moved(float(norm) / 2)
    np.testing.assert_allclose(clipped, move / 2, atol=1e-6)
    np.testing.assert_array_equal(moved(2 * float(norm))[0], move)
