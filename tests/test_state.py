"""The state: born sharded, the same on every mesh, and audited."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from lib.laws import (
    MESHES,
    RELATIVE_ERROR,
    assert_close,
    by_layer,
    make_batch,
    make_settings,
    more,
    with_optimizer,
)
from lib.laws import WITHOUT_MASKS as MODEL
from lib.models import Regress

from jaxpar import (
    RULES,
    MeshConfig,
    OptimizerConfig,
    Rules,
    TrainConfig,
    init_state,
    make_train_step,
    named,
)
from jaxpar.analysis import inspect_step
from jaxpar.analysis.hlo import arrays
from jaxpar.data.batches import place_batch
from jaxpar.lm import LM
from jaxpar.model.optimizer import learning_rate, make_optimizer
from jaxpar.nn import named_param
from jaxpar.sharding import annotated, is_variable, named_leaves, shardings, split_over_data
from jaxpar.step.optimizer import clip_scale, given_loss, update
from jaxpar.step.setup import Setup
from jaxpar.step.state import _initial_state, abstract_state, audit
from jaxpar.step.step import batch_sharding, make_loss_and_grad

# (2, 2, 2): stages split layers, tensor shards split units and the embedding, both the vocabulary.
SHARDS = {
    "embedding.table": ((96, 16), (96, 8)),
    "head.kernel": ((16, 96), (16, 24)),
    "head.bias": ((96,), (24,)),
    "layers.lstm.w_x": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "layers.lstm.w_h": ((8, 16, 4, 16), (4, 16, 4, 8)),
    "layers.lstm.b": ((8, 4, 16), (4, 4, 8)),
}


def started(settings):
    """Mesh, train step, state and batch."""
    task, parallel, train = settings
    mesh = parallel.mesh.build()
    step = make_train_step(task, parallel, train, mesh)
    return mesh, step, init_state(task, parallel, mesh=mesh), make_batch(settings, mesh)


def shard_bytes(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_same_seed_gives_the_same_values_on_every_mesh(mesh):
    one, other = make_settings(), make_settings(mesh)
    expected = by_layer(init_state(one.task, one.parallel).params, one)
    actual = by_layer(init_state(other.task, other.parallel).params, other)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.full
def test_every_parameter_of_a_compiled_step_is_split_over_the_axes_that_it_names():
    _, step, state, batch = started(make_settings((2, 2, 2), (2, 2), with_optimizer("adam")))
    [inputs, *_], _ = step.lower(state, batch).compile().input_shardings
    after, _ = step(state, batch)
    for given, done in ((inputs.params, after.params), (inputs.opt_state, after.opt_state)):
        for (name, layout), (_, variable) in zip(annotated(given), annotated(done), strict=True):
            shape, shard = next(v for key, v in SHARDS.items() if name.endswith(key))
            assert variable.shape == shape
            assert layout.get_value().shard_shape(shape) == shard, name
            assert variable.get_value().addressable_shards[0].data.shape == shard, name
    assert {name for name, _ in annotated(after.params)} == set(SHARDS)


@pytest.mark.full
def test_initialisation_needs_the_memory_of_its_shards():
    task = LM(num_layers=8, hidden_size=256, embed_size=256, vocab_size=3072)
    _, parallel, _ = make_settings((2, 2, 2))
    setup = Setup.of(task, parallel)
    target = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(setup))
    make = jax.jit(
        lambda: _initial_state(setup, *setup.facts.split(setup.storage.make(0))[1:]),
        out_shardings=target,
    )
    compiled = make.lower().compile()
    memory, state = compiled.memory_analysis(), compiled()
    # XLA counts a table of pointers to the arrays too.
    assert abs(memory.output_size_in_bytes - shard_bytes(state)) <= 8 * len(jax.tree.leaves(state))
    # Random bits are drawn shard by shard: no array of the program, at any point, is larger than a shard.
    largest = max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state))
    assert max(math.prod(dims) for _, dims in arrays(compiled.as_text())) == largest
    # Threefry's two words, the bits and the values.
    assert memory.temp_size_in_bytes < 4.1 * 4 * largest


@pytest.mark.full
def test_what_each_update_mode_holds_on_eight_devices():
    def held(**layout):
        """Bytes per device of parameters and moments, and of the compiled step's arguments."""
        settings = make_settings((8, 1, 1), task=with_optimizer("adam"), layout=layout)
        _, step, state, batch = started(settings)
        audit(state)
        moments = [v for _, v in annotated(state.opt_state)]
        compiled = step.lower(state, batch).compile()
        arguments = compiled.memory_analysis().argument_size_in_bytes
        return shard_bytes(state.params), shard_bytes(moments), arguments

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
    mesh, step, state, batch = started(settings)
    after, _ = step(state, batch)
    for leaf in jax.tree.leaves(after.opt_state):
        assert leaf.sharding.memory_kind == "pinned_host"
    audit(after)
    on_device = jax.device_put(after.opt_state, shardings(after.opt_state, mesh, after.opt_rules))
    with pytest.raises(ValueError, match=r"declared .*pinned_host.*, but placed on .*device"):
        audit(dataclasses.replace(after, opt_state=on_device))


@pytest.mark.full
def test_a_split_update_compiles_to_an_eighth_of_the_moments_on_eight_devices():
    def settings(update):
        return make_settings((8, 1, 1), task=with_optimizer("adam"), layout={"update": update})

    whole, part = (
        inspect_step(*settings(update)).memory.arguments for update in ("replicated", "sharded")
    )
    moments = 2 * shard_bytes(init_state(*settings("replicated")[:2]).params)
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


@functools.cache
def trained(settings, num_steps=2):
    """Losses and state after some steps."""
    mesh, step, state, _ = started(settings)
    losses = []
    for number in range(num_steps):
        batch = make_batch(settings, mesh, seed=number, starts=number == 0)
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    audit(state)
    return losses, state


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("layout", [more({}), {"update": "sharded"}, {"fsdp": True}])
def test_an_optimizer_whose_state_has_other_shapes_than_parameters_trains_as_on_one_device(layout):
    one = make_settings(task=with_type(OtherOptimizer))
    other = make_settings((2, 2, 2), (2, 2), one.task, layout=layout)
    (expected_losses, expected), (losses, state) = trained(one), trained(other)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(by_layer(state.params, other), by_layer(expected.params, one))
    kept = {name: leaf.get_value() for name, leaf in annotated(state.opt_state)}
    rows, bias = kept["0.v_row.layers.lstm.w_x"], kept["0.v_row.head.bias"]
    assert (rows.shape, bias.shape) == ((8, 16, 4), (1,))
    # Those of layers are split over `stage`, all where a layout says so and it divides over `data`.
    parts = 2 * (2 if layout else 1)
    assert math.prod(rows.sharding.shard_shape(rows.shape)) == rows.size // parts
    assert bias.sharding.is_fully_replicated


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


@functools.cache
@functools.cache
def trained_on_its_own_batches(settings):
    task, parallel, train = settings
    mesh = parallel.mesh.build()
    state, step = (
        init_state(task, parallel, mesh=mesh),
        make_train_step(task, parallel, train, mesh),
    )
    batches, where = (
        task.make_batches("train", 0),
        batch_sharding(Setup.of(task, parallel, mesh=mesh)),
    )
    for number in range(2):
        state, _ = step(state, place_batch(batches, number, where))
    audit(state)
    return state


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("layout", "splits_params"),
    [more({}, None), ({"update": "sharded"}, False), ({"fsdp": True}, True)],
)
def test_any_dim_is_split_over_data_whatever_its_name(layout, splits_params):
    kinds = ("block", "gru", "dense") * 2
    momentum = OptimizerConfig(name="sgd", learning_rate=0.05, momentum=0.9, warmup_steps=0)
    task = Regress(kinds, optimizer=momentum)
    settings = make_settings((2, 2, 2), (2, 1), task, layout=layout)

    state = trained_on_its_own_batches(settings)
    for tree, is_split in (
        (state.params, splits_params),
        (state.opt_state, splits_params is not None),
    ):
        shards = {name: leaf.get_value() for name, leaf in named_leaves(tree) if is_variable(leaf)}
        for wanted, (shape, whole, part) in OWN_DIMS.items():
            [array] = [shards[name] for name in shards if name.split("trace.")[-1] == wanted]
            assert array.shape == shape, wanted
            assert array.addressable_shards[0].data.shape == (part if is_split else whole), wanted
    plainly = make_settings(task=task)
    expected = trained_on_its_own_batches(plainly)
    assert_close(by_layer(state.params, settings), by_layer(expected.params, plainly))


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
    assert split_over_data(RULES).spec(dims, shape, sizes) == spec
    assert RULES.spec(dims, shape, sizes) == RULES.spec(dims)


class FrozenEmbedding(LM):
    """Its table is given, not learned."""

    frozen: ClassVar = nnx.PathContains("embedding")


@functools.cache
def freeze_by_hand(settings, num_steps=2):
    """Losses and parameters of plain steps whose gradient of the table is zero."""
    task, parallel, train = settings
    mesh, optimizer = parallel.mesh.build(), task.make_optimizer(train.num_steps)
    state, losses = init_state(task, parallel, mesh=mesh), []
    run = jax.jit(make_loss_and_grad(Setup.of(task, parallel, mesh=mesh)))
    for number in range(num_steps):
        batch = make_batch(settings, mesh, seed=number, starts=number == 0)
        (loss, (carry, _)), grads = run(state, batch)
        grads["embedding"] = jax.tree.map(jnp.zeros_like, grads["embedding"])
        old = state.params, grads, state.opt_state
        params, opt_state = update(given_loss(optimizer, "it").update, *old, jnp.array(True))
        state = dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state, carry=carry
        )
        losses.append(float(loss))
    return losses, by_layer(state.params, settings)


FROZEN = [
    more((1, 1, 1), (1, 1), {}),
    ((1, 1, 1), (2, 1), {}),  # in units
    more((2, 2, 2), (2, 2), {"head": "last"}),
    ((2, 2, 2), (2, 2), {"head": "sharded", "remat": True}),
]


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("sizes", [{"tie_embedding": True}, more({"embed_size": 8})])
@pytest.mark.parametrize(("mesh", "units", "pipeline"), FROZEN)
def test_what_is_frozen_has_no_gradient_and_no_optimizer_state_and_stays(
    mesh, units, pipeline, sizes
):
    """A tied table is what the head is made of as well."""
    model = with_optimizer("adam", dataclasses.replace(MODEL, **sizes), learning_rate=1e-3)
    unclipped = TrainConfig(clip_norm=0)  # the norm is of what has a gradient
    task = with_type(FrozenEmbedding, model)
    settings = make_settings(mesh, units, task, train=unclipped, **pipeline)

    *_, state, batch = started(settings)
    [(name, table)] = named_leaves(state.frozen)
    assert name == "embedding.table"
    before = np.asarray(table.get_value())
    run = jax.jit(make_loss_and_grad(Setup.of(task, settings.parallel)))
    _, grads = run(state, batch)
    for tree in (state.params, state.opt_state, grads):
        names = [name for name, _ in named_leaves(tree)]
        assert names
        assert not [name for name in names if "embedding" in name]

    losses, state = trained(settings)
    np.testing.assert_array_equal(state.frozen["embedding"]["table"][...], before)
    expected_losses, expected = freeze_by_hand(make_settings(task=model, train=unclipped))
    learned = dict(expected)
    np.testing.assert_array_equal(learned.pop("['embedding']['table']"), before)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(by_layer(state.params, settings), learned)


def test_audit_names_what_is_not_so_sharded():
    task, parallel, _ = make_settings((2, 2, 2))
    mesh = parallel.mesh.build()
    state = init_state(task, parallel, mesh=mesh)
    audit(state)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    lstm = state.params["layers"]["lstm"]
    lstm["w_h"] = lstm["w_h"].replace(jax.device_put(lstm["w_h"][...], whole))
    with pytest.raises(
        ValueError, match=r"1 arrays are not sharded as annotated:(.|\n)*layers\.lstm\.w_h"
    ):
        audit(state)


def test_sizes_that_do_not_split_are_refused_with_their_parameter():
    task = LM(num_layers=4, hidden_size=16, embed_size=16, vocab_size=90)
    _, parallel, _ = make_settings((1, 2, 2))
    with pytest.raises(
        ValueError,
        match=r"parameter head\.bias: dim 'vocab' has size 90, which does not split over "
        r"stage=2 x tensor=2\nFix: use 88 or 92, head='last' \(--pipeline\.head last\), or another mesh",
    ):
        init_state(task, parallel)


def test_a_plain_flax_module_is_sharded_by_its_own_metadata():
    mesh = MeshConfig(data=2, tensor=4).build()

    def make():
        kernel_init = named(nnx.initializers.lecun_normal(), ("input", "hidden"))
        return nnx.state(nnx.Linear(8, 16, kernel_init=kernel_init, rngs=nnx.Rngs(0)))

    state = jax.jit(make, out_shardings=shardings(nnx.eval_shape(make), mesh, RULES))()
    assert state["kernel"].addressable_shards[0].data.shape == (8, 4)
    assert state["bias"].addressable_shards[0].data.shape == (16,)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"hidden": ("data", "data")}, "names an axis twice"),
    ],
)
def test_bad_rules_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        Rules.make(table)


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
    mesh, tree = (
        MeshConfig(tensor=2, devices=(0, 1)).build(),
        {"w": named_param(np.ones(4), (name,))},
    )
    with pytest.raises(ValueError, match=message):
        shardings(tree, mesh, RULES)
    rules = RULES.replace({name: "tensor"})
    assert shardings(tree, mesh, rules)["w"].get_value().shard_shape((4,)) == (2,)


def test_one_axis_cannot_split_two_dims_of_an_array():
    rules = RULES.replace({"input": "tensor"})
    with pytest.raises(ValueError, match=r"split two dims of .* over the axis 'tensor'"):
        rules.spec(("input", "hidden"))


def test_learning_rate_warms_up_and_falls():
    rate = learning_rate(OptimizerConfig(learning_rate=0.5, warmup_steps=10), 110)
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
    config = OptimizerConfig(
        lr_schedule=schedule, learning_rate=0.4, warmup_steps=0, hold_steps=10,
        lr_decay=0.9, lr_decay_every=50,
    )  # fmt: skip
    values = [float(learning_rate(config, 110)(step)) for step in (0, 9, 10, 60, 110)]
    np.testing.assert_allclose(values, expected, atol=1e-7)


def test_gradients_are_clipped_by_their_global_norm():
    params = {"a": np.zeros(2, np.float32)}
    grads = {"a": np.array([3.0, 4.0], np.float32)}
    sgd = make_optimizer(OptimizerConfig("sgd", 1.0, "constant", warmup_steps=0), 1)

    def moved(clip_norm):
        scale = clip_scale(jnp.float32(5), clip_norm or None)
        optimize = given_loss(sgd, "it").update
        return -update(optimize, params, grads, sgd.init(params), jnp.bool_(True), scale)[0]["a"]

    np.testing.assert_allclose(moved(0.5), [0.3, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(moved(6.0), grads["a"])
    np.testing.assert_array_equal(moved(0.0), grads["a"])
