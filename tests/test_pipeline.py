"""The pipeline engine: every schedule and option equals the plain model, and nothing hidden happens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_equivalence import (
    MODEL,
    RELATIVE_ERROR,
    assert_close,
    assert_same_as_plain,
    by_layer,
    loss_and_grads,
    make_batch,
    make_config,
    plain,
)

import jaxpar.step
from jaxpar.analysis import inspect_step
from jaxpar.config import DataConfig, ModelConfig
from jaxpar.mesh import MeshConfig
from jaxpar.nn import LSTM, Position, run_layers
from jaxpar.pipeline.engine import Pipeline, PipelineParams
from jaxpar.pipeline.gpipe import run_pipeline
from jaxpar.pipeline.schedule import make_schedule
from jaxpar.pipeline.ticks import make_plan
from jaxpar.state import init_state
from jaxpar.step import make_loss_and_grad, make_train_step

OPTIONS = [
    {"schedule": "gpipe", "head": "last"},
    {"schedule": "gpipe", "head": "sharded", "remat": True},
    {"schedule": "1f1b", "head": "last"},
    {"schedule": "1f1b", "head": "last", "remat": True},
    {"schedule": "1f1b", "head": "sharded", "remat": True},
    {"schedule": "interleaved", "num_groups": 2, "head": "last"},
    {"schedule": "interleaved", "num_groups": 2, "head": "sharded", "remat": True},
]


@pytest.mark.law
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_schedule_and_option_equals_plain(options, tied):
    model = dataclasses.replace(MODEL, tie_embedding=tied)
    assert_same_as_plain(make_config((1, 4, 2), (2, 2), model=model, **options))


@pytest.mark.law
@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (4, {"placement": (1, 4, 1, 1)}),
        (4, {"placement": "balanced", "head": "last"}),
        (2, {"schedule": "interleaved", "num_groups": 2, "placement": (1, 3, 2, 1)}),
    ],
)
def test_uneven_placements_equal_plain(stages, options):
    model = dataclasses.replace(MODEL, num_layers=7)
    assert_same_as_plain(make_config((2, stages, 1), (2, 4), model=model, **options))


@pytest.mark.law
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[6]])
def test_nan_in_every_buffer_leaks_nowhere(options, monkeypatch):
    poisoned = functools.partial(Pipeline, buffer_fill=float("nan"))
    monkeypatch.setattr(jaxpar.step, "Pipeline", poisoned)
    assert_same_as_plain(make_config((2, 4, 1), (2, 4), **options))


@pytest.mark.law
@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[6], {"schedule": "1f1b"}])
def test_bfloat16_pipelines_are_as_near_to_float32_as_bfloat16_is(options):
    """Rounding in another order is other rounding; its size is what can be compared."""

    def distance(tree, exact):
        return {name: np.linalg.norm(tree[name] - exact[name]) for name in exact}

    model = dataclasses.replace(MODEL, dtype="bfloat16")
    exact_loss, exact, exact_carry = plain()
    plain_loss, plain_grads, plain_carry = plain(model)
    loss, grads, carry = loss_and_grads(make_config((2, 4, 1), (2, 2), model=model, **options))
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-3 * exact_loss
    for ours, plain_one, exact_one in (
        (grads, plain_grads, exact),
        (carry, plain_carry, exact_carry),
    ):
        assert all(array.dtype == np.float32 for array in ours.values())
        allowed = distance(plain_one, exact_one)
        for name, error in distance(ours, exact_one).items():
            assert 0 < error <= 1.5 * allowed[name], name


@pytest.mark.law
def test_five_lengths_are_one_program_and_equal_plain():
    def train(config, lengths):
        mesh = config.mesh.build()
        state, step, losses = init_state(config, mesh), make_train_step(config, mesh), []
        for length in lengths:
            sizes = dataclasses.replace(config.data, seq_len=length)
            batch = make_batch(dataclasses.replace(config, data=sizes), mesh, seed=length)
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        return losses, by_layer(state.params, config), step.num_programs

    data = DataConfig(batch_size=16, seq_len=10)
    lengths = (10, 2, 6, 8, 4)
    expected_losses, expected, _ = train(make_config(data=data), lengths)
    losses, params, num_programs = train(make_config((2, 4, 1), (2, 5), data=data), lengths)
    assert num_programs == 1
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


@pytest.mark.parametrize("length", [3, 12])
def test_other_lengths_are_refused(length):
    config = make_config((2, 4, 1), (2, 4))
    mesh = config.mesh.build()
    sizes = dataclasses.replace(config.data, seq_len=length)
    batch = make_batch(dataclasses.replace(config, data=sizes), mesh)
    with pytest.raises(ValueError, match=f"{length} time steps is not made of 1 to 4 chunks of 2"):
        make_train_step(config, mesh)(init_state(config, mesh), batch)


# ---- the engine by itself, with other people's layers ----


class GRULayer(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.GRUCell(8, 8, rngs=rngs)

    def __call__(self, carry, x):
        def step(carry, x):
            return self.cell(carry, x)

        return jax.lax.scan(step, carry, x)


class TransformerLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, carry, x):
        x_BTW = x.swapaxes(0, 1)
        mask = jnp.tril(jnp.ones((x_BTW.shape[0], 1, x_BTW.shape[1], x_BTW.shape[1]), bool))
        x_BTW = x_BTW + self.attention(x_BTW, mask=mask)
        x_BTW = x_BTW + self.down(jax.nn.gelu(self.up(x_BTW)))
        return carry, x_BTW.swapaxes(0, 1)


def stack(kind, num_layers):
    """(one layer as a function, parameters of all)."""
    layers = [nnx.split(kind(nnx.Rngs(n)), nnx.Param, ...) for n in range(num_layers)]
    graphdef, _, rest = layers[0]

    def layer(params, carry, x, position):
        with jax.numpy_rank_promotion("allow"):  # Flax adds its biases so
            return nnx.merge(graphdef, params, rest)(carry, x)

    params = [nnx.to_pure_dict(params) for _, params, _ in layers]
    return layer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


def first(weights, x, position):
    return x * jnp.expand_dims(weights, (0, 1))


def last(weights, y, targets, position):
    """A sum whose terms have one sign: what cancels has no relative error to speak of."""
    return jnp.sum(jnp.square(jnp.sin(y * jnp.expand_dims(weights, (0, 1))) - targets))


@pytest.mark.law
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("kind", "num_chunks"), [(GRULayer, 2), (TransformerLayer, 1)])
def test_any_layers_and_what_is_outside_of_the_pipeline(kind, num_chunks, remat):
    layer, layers = stack(kind, 5)
    keys = jax.random.split(jax.random.key(0), 4)
    x, targets = (jax.random.normal(key, (4, 12, 8)) for key in keys[:2])
    params = PipelineParams(*(jax.random.normal(key, (8,)) for key in keys[2:]), None)
    params = PipelineParams(params.first, layers, params.layers)
    carry = jnp.zeros((5, 12, 8))
    ids = (0, 1, 2, 3, 4, -1)
    pipeline = Pipeline(
        layer=layer,
        first=first,
        last=last,
        mesh=MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)).build(),
        layer_ids=ids,
        chunk_len=4 // num_chunks,
        microbatch_rows=2,
        remat=remat,
    )
    plan = make_plan([make_schedule("1f1b", 2, 3, num_chunks)] * 2)

    def squashed(params):  # no larger, or residual layers amplify rounding errors beyond the bound
        return jax.tree.map(jnp.tanh, params)

    def ours(params):
        params = squashed(params)
        pad = functools.partial(jax.tree.map, lambda a: jnp.concatenate([a, jnp.zeros_like(a[:1])]))
        slotted = params._replace(layers=pad(params.layers))
        loss, after, _ = pipeline.loss(slotted, pad(carry), x, targets, plan)
        return loss**2, after[:5]

    def theirs(params):
        params = squashed(params)
        h = first(params.first, x, None)
        after, y = run_layers(
            layer,
            params.layers,
            carry,
            h,
            Position(0, 0, 0),
            np.arange(5),
            has_empty_slots=False,
        )
        return last(params.last, y, targets, None) ** 2, after

    (loss, after), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, expected_after), expected_grads = jax.value_and_grad(theirs, has_aux=True)(params)
    np.testing.assert_allclose(loss, expected, rtol=RELATIVE_ERROR)
    np.testing.assert_allclose(after, expected_after, rtol=RELATIVE_ERROR, atol=RELATIVE_ERROR)
    named = [
        {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(g)
        }
        for g in (grads, expected_grads)
    ]
    assert_close(*named)


def lstm_pipeline(num_stages, microbatches, num_chunks, kind="1f1b", groups=1, capacity=None):
    """A pipeline over floats, one row a microbatch; (loss function, x, targets, stats)."""
    lstm = LSTM(8, 8, num_stages * groups, rngs=nnx.Rngs(0))
    num_data = len(microbatches)
    pipeline = Pipeline(
        layer=lstm.layer(),
        first=first,
        last=last,
        mesh=MeshConfig(num_data, num_stages, devices=tuple(range(num_data * num_stages))).build(),
        layer_ids=lstm.layer_ids,
        chunk_len=1,
        microbatch_rows=1,
    )
    plan = make_plan(
        [make_schedule(kind, num_stages, m, num_chunks, groups) for m in microbatches], capacity
    )
    rows = num_data * max(microbatches)
    keys = jax.random.split(jax.random.key(0), 2)
    x, targets = (jax.random.normal(key, (num_chunks, rows, 8)) for key in keys)
    params = PipelineParams(jnp.ones(8), lstm.params, jnp.ones(8))

    def loss(params, x, targets):
        loss, _, stats = pipeline.loss(params, lstm.initial_carry(rows), x, targets, plan)
        return loss, stats

    return jax.jit(jax.value_and_grad(loss, has_aux=True)), lstm, params, x, targets


@pytest.mark.parametrize(
    ("kind", "num_chunks", "groups", "percent"),
    [("1f1b", 1, 1, 27.3), ("1f1b", 8, 1, 4.5), ("gpipe", 1, 1, 27.3), ("interleaved", 1, 2, 15.8)],
)
def test_idle_time_counted_by_the_loop_is_the_schedules_bubble(kind, num_chunks, groups, percent):
    run, _, params, x, targets = lstm_pipeline(4, [8], num_chunks, kind, groups)
    stats = jax.tree.map(np.asarray, run(params, x, targets)[0][1])
    forward, backward = 1.0, 2.0
    elapsed = forward * stats.forward_ticks + backward * stats.backward_ticks
    busy = forward * stats.forward_units + backward * stats.backward_units
    idle = 1 - np.sum(busy) / np.sum(elapsed)
    assert abs(idle - make_schedule(kind, 4, 8, num_chunks, groups).bubble) < 1e-6
    assert round(100 * idle, 1) == percent


@pytest.mark.law
def test_data_parallel_devices_may_have_different_numbers_of_microbatches():
    run, lstm, params, x, targets = lstm_pipeline(2, [3, 1], 2)
    # Rows 4 and 5 belong to no unit: what is not a number there must not be touched.
    (loss, stats), grads = run(params, x.at[:, 4:].set(jnp.nan), targets)
    np.testing.assert_array_equal(stats.forward_units, [[6, 6], [2, 2]])

    def plain(params):
        _, y = run_layers(
            lstm.layer(),
            params.layers,
            lstm.initial_carry(4),
            first(params.first, x[:, :4], None),
            Position(0, 0, 0),
            np.arange(2),
            has_empty_slots=False,
        )
        return last(params.last, y, targets[:, :4], None)

    expected, expected_grads = jax.value_and_grad(plain)(params)
    np.testing.assert_allclose(loss, expected, rtol=RELATIVE_ERROR)
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(actual - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)


@pytest.mark.law
def test_autodiff_through_the_forward_executor_equals_plain():
    lstm = LSTM(8, 8, 5, rngs=nnx.Rngs(0), layer_ids=(0, 1, 2, 3, 4, -1))
    mesh = MeshConfig(data=2, stage=2, tensor=2).build()
    x = jax.random.normal(jax.random.key(1), (4, 8, 8))
    carry = jax.tree.map(lambda a: a + 0.5, lstm.initial_carry(8))

    def loss(run):
        def f(params, carry, x):
            after, y = run(params, carry, x)
            return jnp.sum(jnp.sin(y)) + jnp.sum(after.h_BH[:5] ** 2), (after, y)

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(lstm.params, carry, x)

    def plain(params, carry, x):
        ids, at = np.asarray(lstm.layer_ids), Position(0, 0, 0)
        return run_layers(lstm.layer(), params, carry, x, at, ids, has_empty_slots=True)

    piped = functools.partial(
        run_pipeline,
        lstm.layer(),
        mesh=mesh,
        layer_ids=lstm.layer_ids,
        num_microbatches=2,
        num_chunks=2,
    )
    for actual, wanted in zip(
        jax.tree.leaves(loss(piped)), jax.tree.leaves(loss(plain)), strict=True
    ):
        assert np.linalg.norm(actual - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)
    with pytest.raises(ValueError, match="4 steps and 8 rows do not divide by num_chunks=3"):
        run_pipeline(lstm.layer(), lstm.params, carry, x, **piped.keywords | {"num_chunks": 3})


# ---- the compiled program ----

HLO_CASES = [
    ((2, 2, 2), {"head": "last"}),
    ((2, 2, 2), {"head": "sharded"}),
    ((2, 2, 2), {"head": "sharded", "tied": True}),
    ((1, 4, 2), {"head": "last", "tied": True}),
    ((4, 2, 1), {"head": "sharded", "remat": True}),
]


@pytest.mark.parametrize(("sizes", "options"), HLO_CASES)
def test_loops_of_the_compiled_step_hold_the_collectives_that_they_should(sizes, options):
    options = dict(options)
    tied = options.pop("tied", False)
    model = dataclasses.replace(MODEL, tie_embedding=tied, embed_size=16 if tied else 8)
    report = inspect_step(make_config(sizes, (2, 2), model=model, **options))
    looped = [c for c in report.collectives if c.in_loop]
    # Gradients are summed over data once, after the loop.
    assert not [c for c in looped if "data" in c.axes]
    assert bool(report.along("data")) == (sizes[0] > 1)
    permutes = [c for c in looped if c.op == "collective-permute"]
    assert [c.phase for c in permutes] == ["forward", "backward"]
    # XLA's permute waits for all devices: where only some stages go it would wait forever.
    assert not [c for c in permutes if c.conditional]
    of_the_head = [c for c in looped if "stage" in c.axes and c not in permutes]
    assert bool(of_the_head) == (options["head"] == "sharded")


def test_the_program_does_not_grow_with_layers_microbatches_and_chunks():
    def lines_of(num_layers, units):
        model = dataclasses.replace(MODEL, num_layers=num_layers)
        data = DataConfig(batch_size=units[0] * 2, seq_len=units[1])
        config = make_config((2, 4, 1), units, model=model, data=data)
        mesh = config.mesh.build()
        run = jax.jit(make_loss_and_grad(config, mesh))
        state = init_state(config, mesh)
        text = run.lower(state.params, state.carry, make_batch(config, mesh), state.step).as_text()
        return len(text.splitlines())

    assert lines_of(64, (32, 16)) == lines_of(8, (4, 4))


def test_memory_does_not_grow_with_microbatches():
    def temporary(num_microbatches):
        data = DataConfig(batch_size=8 * num_microbatches, seq_len=32)
        model = ModelConfig(num_layers=4, hidden_size=128, embed_size=128, vocab_size=96)
        config = make_config((1, 4, 1), (num_microbatches, 4), model=model, data=data)
        mesh = config.mesh.build()
        run = jax.jit(make_loss_and_grad(config, mesh))
        state = init_state(config, mesh)
        lowered = run.lower(state.params, state.carry, make_batch(config, mesh), state.step)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary(num_microbatches) for num_microbatches in (4, 8, 16, 32)]
    assert max(sizes) <= 1.02 * min(sizes), sizes


def test_plans_that_do_not_fit_are_refused():
    small, large = make_schedule("1f1b", 2, 2, 2), make_schedule("1f1b", 2, 8, 2)
    with pytest.raises(
        ValueError, match=r"num_ticks=.* is more than the .* of the compiled program"
    ):
        make_plan([large], capacity=small)
    with pytest.raises(ValueError, match="kind=gpipe of a schedule differs from 1f1b"):
        make_plan([small, make_schedule("gpipe", 2, 2, 2)], capacity=small)
    with pytest.raises(ValueError, match="num_chunks=1 and 2 in one batch"):
        make_plan([small, make_schedule("1f1b", 2, 2, 1)])
