"""The pipeline engine by itself, with any layers; and what a compiled step of it is like.

That every schedule and option gives what one device gives is the law (`test_law.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.law import draw
from lib.law.check import check
from lib.law.options import plain_case
from lib.laws import (
    MODEL,
    RELATIVE_ERROR,
    assert_close,
    assert_same_as_plain,
    loss_and_grads,
    make_batch,
    make_settings,
    more,
    plain,
)

from jaxpar import (
    LayerContext,
    MeshConfig,
    PipelineConfig,
    init_state,
    make_train_step,
    value_and_grad,
)
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM
from jaxpar.nn import GateParams, LSTMCarry, lstm_layer
from jaxpar.pipeline import Pipeline, PipelineParams, make_schedule, make_slots, make_table

# ---- whole steps ----


@pytest.mark.law
def test_a_v_whose_gradients_of_weights_come_with_those_of_inputs_equals_plain():
    assert_same_as_plain(
        make_settings((1, 4, 2), (2, 2), schedule="v", head="last", zero_bubble=False)
    )


@pytest.mark.more
@pytest.mark.law
def test_an_evaluation_on_stages_without_layers_equals_that_of_one_device():
    """It has tables and buffers of its own."""
    task, found = dataclasses.replace(MODEL, num_layers=3), []
    options = {"placement": "first | | 0-2 |", "remat": True}
    for settings in (make_settings((1, 4, 1), (2, 2), task, **options), make_settings(task=task)):
        batch = make_batch(settings, starts=True)
        sums, _ = api.evaluation(task, settings.parallel, init_state(*settings), batch)
        found.append((sums["loss"], sums["weight"]))
    np.testing.assert_allclose(*found, rtol=RELATIVE_ERROR)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    "options",
    [
        {"head": "last", "remat": "device"},
        {"schedule": "interleaved", "head": "sharded", "remat": "device"},
        {"schedule": "v"},
        more({"schedule": "gpipe", "head": "last"}),
        more({"head": "last", "unroll": "yes"}),
        more({"schedule": "interleaved", "head": "last"}),
    ],
    ids=str,
)
def test_nan_in_every_buffer_leaks_nowhere(options):
    units = {"mesh": "dp2pp2", "microbatches": "2", "chunks": "4"}
    case = plain_case() | units | {"result": "gradients", "pattern": "a", "layer": "lstm"}
    if options.get("schedule") != "gpipe":
        case |= {"pattern": "abab"}
    case |= options
    assert draw.fits(case)
    with api.buffers_hold_nan():
        check(case)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    "options",
    [
        {"head": "last", "remat": True},
        more({"schedule": "interleaved", "num_groups": 2, "head": "sharded", "remat": True}),
        {},
    ],
    ids=str,
)
def test_bfloat16_pipelines_are_as_near_to_float32_as_bfloat16_is(options):
    """Rounding in another order is other rounding; its size is what can be compared."""

    def distance(tree, exact):
        return {name: np.linalg.norm(tree[name] - exact[name]) for name in exact}

    task = dataclasses.replace(MODEL, dtype="bfloat16")
    exact_loss, exact, exact_carry = plain()
    plain_loss, plain_grads, plain_carry = plain(task)
    loss, grads, carry = loss_and_grads(make_settings((2, 4, 1), (2, 2), task, **options))
    assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-3 * exact_loss
    for ours, plain_one, exact_one in (
        (grads, plain_grads, exact),
        (carry, plain_carry, exact_carry),
    ):
        assert all(array.dtype == np.float32 for array in ours.values())
        allowed = distance(plain_one, exact_one)
        for name, error in distance(ours, exact_one).items():
            assert 0 < error <= 1.5 * allowed[name], name


def train_at_lengths(lengths, *where, **options):
    """Losses and parameters of a step at each length, and the number of programs."""
    task = dataclasses.replace(MODEL, batch_size=16, seq_len=10, num_buckets=5, bucket_multiple=2)
    settings = make_settings(*where, task=task, **options)
    state, step, losses = init_state(*settings), make_train_step(*settings), []
    for length in lengths:
        batch = jax.device_put(make_batch(settings, seed=length, length=length))
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses, api.params_of(task, settings.parallel, state), step.num_programs


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "units", "lengths", "programs", "options"),
    [
        ((2, 4, 1), (2, 5), (10, 2, 6, 8, 4), 1, {}),
        more((1, 4, 1), (2, 5), (10, 2, 6), 1, {"zero_bubble": True}),
        more((1, 2, 1), (2, 5), (10, 2, 6), 1, {"schedule": "v"}),
        ((2, 1, 1), (2, 1), (10, 4), 2, {}),
    ],
)
def test_all_lengths_are_one_program_on_stages_and_equal_plain(
    mesh, units, lengths, programs, options
):
    losses, params, num_programs = train_at_lengths(lengths, mesh, units, **options)
    assert num_programs == programs
    expected_losses, expected, _ = train_at_lengths(lengths)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE_ERROR)
    assert_close(params, expected)


@pytest.mark.more
@pytest.mark.parametrize(
    ("length", "num_buckets", "message"),
    [
        (3, 4, r"3 time steps, expected 8 or less that divide by 2 \(num_chunks=4\)"),
        (12, 4, "12 time steps, those of task LM have 8 at most"),
        (12, 0, r"12 time steps, those of task LM have 8( at most)?\.\nFix: change the length"),
        (4, 0, r"4 time steps, those of task LM have 8( at most)?\.\nFix: change the length"),
    ],
)
def test_other_lengths_are_refused(length, num_buckets, message):
    task = dataclasses.replace(MODEL, num_buckets=num_buckets, bucket_multiple=2)
    settings = make_settings((2, 4, 1), (2, 4), task)
    batch = make_batch(settings, length=length)
    with pytest.raises(ValueError, match=message):
        make_train_step(*settings)(init_state(*settings), batch)


@pytest.mark.full
def test_layers_of_several_groups_are_not_written_out():
    settings = make_settings((1, 2, 1), (2, 2), schedule="interleaved", num_groups=2, unroll=True)
    message = r"unroll=True: .* got 1 kinds in 2 groups\.\nFix: use unroll=False"
    with pytest.raises(ValueError, match=message):
        value_and_grad(*settings)(init_state(*settings), make_batch(settings))


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


def stack(kind, numbers):
    """(one layer as a function, parameters of all)."""
    layers = [nnx.split(kind(nnx.Rngs(n)), nnx.Param, ...) for n in numbers]
    graphdef, _, rest = layers[0]

    def layer(params, frozen, carry, x, at):
        with jax.numpy_rank_promotion("allow"):  # Flax adds its biases so
            return nnx.merge(graphdef, params, rest)(carry, x)

    params = [nnx.to_pure_dict(params) for _, params, _ in layers]
    return layer, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


def lstm(params, frozen, carry, x, at):
    return lstm_layer(params, carry, x)


def lstms(num_layers):
    """Parameters of LSTM layers, stacked."""
    keys = jax.random.split(jax.random.key(5), 2)
    w_x, w_h = (jax.random.normal(key, (num_layers, 8, 4, 8)) / 8**0.5 for key in keys)
    return GateParams(w_x, w_h, jnp.zeros((num_layers, 4, 8)).at[:, 1].set(1.0))


def lstm_carry(num_layers, rows):
    return LSTMCarry(*(jnp.zeros((num_layers, rows, 8)),) * 2)


def into_rows(tree, rows):
    """Stacked layers in the rows of a placement, zeros in empty ones."""
    order = sorted(layer for layer in rows if layer >= 0)
    places = np.array([order.index(layer) if layer >= 0 else -1 for layer in rows])
    return jax.tree.map(lambda a: jnp.concatenate([a, jnp.zeros_like(a[:1])])[places], tree)


def from_rows(tree, rows):
    """The layers of such rows, in their order."""
    places = np.array([rows.index(layer) for layer in sorted(rows) if layer >= 0])
    return jax.tree.map(lambda a: a[places], tree)


def one_by_one(layers, kind_of, params, carry, x, batch):
    """All layers in plain Python; params and carry by kind, stacked in the order of the layers."""
    carry = list(carry)
    for number, kind in enumerate(kind_of):
        row = kind_of[:number].count(kind)
        own, before = jax.tree.map(lambda a, row=row: a[row], (params[kind], carry[kind]))
        after, x = layers[kind](own, (), before, x, LayerContext(number, 0, 0, batch=batch))
        carry[kind] = jax.tree.map(lambda a, b, row=row: a.at[row].set(b), carry[kind], after)
    return tuple(carry), x


def first(weights, frozen, at):
    return at.batch["x"] * jnp.expand_dims(weights, (0, 1))


def last(weights, frozen, y, at):
    """A sum whose terms have one sign: what cancels has no relative error to speak of."""
    weights = jnp.expand_dims(weights, (0, 1))
    return (jnp.sum(jnp.square(jnp.sin(y * weights) - at.batch["targets"])),)


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(
    ("kinds", "kind_of", "how"),
    [
        ((TransformerLayer,), (0, 0, 0, 0, 0), "apart"),
        ((TransformerLayer, GRULayer), (1, 0, 1, 1, 0), "remat"),
        # W of the first alone is apart.
        ((TransformerLayer, GRULayer), (1, 0, 1, 1, 0), "apart"),
    ],
)
def test_any_layers_and_what_is_outside_of_the_pipeline(kinds, kind_of, how):
    numbers = [[n for n, k in enumerate(kind_of) if k == kind] for kind in range(len(kinds))]
    stacks = [stack(kind, own) for kind, own in zip(kinds, numbers, strict=True)]
    layers, weights = zip(*stacks, strict=True)
    keys = jax.random.split(jax.random.key(0), 4)
    batch = {
        name: jax.random.normal(key, (4, 12, 8))
        for name, key in zip(("x", "targets"), keys[:2], strict=True)
    }
    ends = [jax.random.normal(key, (8,)) for key in keys[2:]]
    params = PipelineParams(ends[0], weights, ends[1])
    carry = tuple(jnp.zeros((len(own), 12, 8)) for own in numbers)
    slots = make_slots((3, 2), kind_of=kind_of)
    assert slots.has_empty_slots
    pipeline = Pipeline(
        layers=layers,
        first=first,
        last=last,
        mesh=MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)).build(),
        slots=slots,
        chunk_len=4,
        microbatch_rows=2,
        config=PipelineConfig(remat=how == "remat"),
    )
    table = make_table([make_schedule("1f1b", 2, 3, zero_bubble=how == "apart")] * 2)

    def squashed(params):  # no larger, or residual layers amplify rounding errors beyond the bound
        return jax.tree.map(jnp.tanh, params)

    def ours(params):
        params = squashed(params)
        slotted, start = (
            tuple(map(into_rows, tree, slots.rows)) for tree in (params.layers, carry)
        )
        (loss,), after, _ = pipeline.sums(params._replace(layers=slotted), start, batch, table)
        return loss**2, tuple(map(from_rows, after, slots.rows))

    def theirs(params):
        params, at = squashed(params), LayerContext(0, 0, 0, batch=batch)
        x = first(params.first, (), at)
        after, y = one_by_one(layers, kind_of, params.layers, carry, x, batch)
        return last(params.last, (), y, at)[0] ** 2, after

    (loss, after), grads = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, expected_after), expected_grads = jax.jit(jax.value_and_grad(theirs, has_aux=True))(
        params
    )
    np.testing.assert_allclose(loss, expected, rtol=RELATIVE_ERROR)
    for actual, wanted in zip(after, expected_after, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=RELATIVE_ERROR, atol=RELATIVE_ERROR)
    named = [
        {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree.leaves_with_path(g)
        }
        for g in (grads, expected_grads)
    ]
    assert_close(*named)


def lstm_pipeline(num_stages, microbatches, num_chunks, kind="1f1b", groups=1, apart=False):
    """A pipeline over floats, one row a microbatch; (loss function, params, batch)."""
    num_data, num_layers = len(microbatches), num_stages * groups
    schedules = [
        make_schedule(kind, num_stages, number, num_chunks, groups, zero_bubble=apart)
        for number in microbatches
    ]
    table = make_table(schedules)
    pipeline = Pipeline(
        layers=(lstm,),
        first=first,
        last=last,
        mesh=MeshConfig(num_data, num_stages, devices=tuple(range(num_data * num_stages))).build(),
        slots=make_slots((1,) * num_layers, table.route.stages),
        chunk_len=1,
        microbatch_rows=1,
    )
    rows = num_data * max(microbatches)
    keys = jax.random.split(jax.random.key(0), 2)
    x, targets = (jax.random.normal(key, (num_chunks, rows, 8)) for key in keys)
    layers = into_rows(lstms(num_layers), pipeline.slots.rows[0])
    params = PipelineParams(jnp.ones(8), (layers,), jnp.ones(8))

    def loss(params, batch):
        carry = (lstm_carry(num_layers, rows),)
        (loss,), _, ran = pipeline.sums(params, carry, batch, table)
        return loss, ran

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return run, params, {"x": x, "targets": targets}


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "num_chunks", "groups", "apart", "percent"),
    [
        ("1f1b", 1, 1, False, 27.3),
        ("1f1b", 8, 1, False, 4.5),
        ("gpipe", 1, 1, False, 27.3),
        ("interleaved", 1, 2, False, 15.8),
        ("1f1b", 4, 1, True, 3.0),
        ("interleaved", 1, 2, True, 5.9),
        ("interleaved", 8, 2, True, 0.8),
        ("v", 8, 2, True, 2.0),
    ],
)
def test_idle_time_counted_by_the_loop_is_the_schedules_bubble(
    kind, num_chunks, groups, apart, percent
):
    run, params, batch = lstm_pipeline(4, [8], num_chunks, kind, groups, apart)
    forward, beside, backward, after = np.moveaxis(np.asarray(run(params, batch)[0][1])[0], 1, 0)
    front, back = forward + beside, (1 if apart else 2) * backward + after
    elapsed = 4 * (front.max(1) + back.max(1)).sum()  # [ticks, stages]
    idle = 1 - (front + back).sum() / elapsed
    schedule = make_schedule(kind, 4, 8, num_chunks, groups, zero_bubble=apart)
    assert abs(idle - schedule.bubble) < 1e-6
    assert round(100 * idle, 1) == percent
    units = groups * 8 * num_chunks * (3 if apart else 2)
    assert (forward + backward + beside + after).sum(0).tolist() == [units] * 4


@pytest.mark.law
def test_data_parallel_devices_may_have_different_numbers_of_microbatches():
    run, params, batch = lstm_pipeline(2, [3, 1], 2)
    # Rows 4 and 5 belong to no unit: what is not a number there must not be touched.
    poisoned = {**batch, "x": batch["x"].at[:, 4:].set(jnp.nan)}
    (loss, ran), grads = run(params, poisoned)
    np.testing.assert_array_equal(ran[:, :, 0].sum(1), [[6, 6], [2, 2]])

    def plain(params):
        real = jax.tree.map(lambda a: a[:, :4], batch)
        at = LayerContext(0, 0, 0, batch=real)
        x, carry = first(params.first, (), at), (lstm_carry(2, 4),)
        _, y = one_by_one((lstm,), [0] * 2, params.layers, carry, x, real)
        return last(params.last, (), y, at)[0]

    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(loss, expected, rtol=RELATIVE_ERROR)
    for actual, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.linalg.norm(actual - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)


@pytest.mark.full
@pytest.mark.law
def test_autodiff_through_the_forward_loop_equals_plain():
    slots = make_slots((3, 2))
    pipeline = Pipeline(
        layers=(lstm,),
        first=first,
        last=last,
        mesh=MeshConfig(data=2, stage=2, tensor=2).build(),
        slots=slots,
        chunk_len=2,
        microbatch_rows=2,
    )
    table = make_table([make_schedule("gpipe", 2, 2, 2, backward=False)] * 2)
    keys = jax.random.split(jax.random.key(1), 4)
    x, targets = (jax.random.normal(key, (4, 8, 8)) for key in keys[:2])
    ends = [jax.random.normal(key, (8,)) for key in keys[2:]]
    params = PipelineParams(ends[0], (lstms(5),), ends[1])
    carry = jax.tree.map(lambda a: a + 0.5, lstm_carry(5, 8))

    def piped(params, carry, batch):
        [rows] = slots.rows
        params = params._replace(layers=(into_rows(params.layers[0], rows),))
        (loss,), (after,), _ = pipeline.forward(params, (into_rows(carry, rows),), batch, table)
        return loss, from_rows(after, rows)

    def plain(params, carry, batch):
        at = LayerContext(0, 0, 0, batch=batch)
        x = first(params.first, (), at)
        (after,), y = one_by_one((lstm,), [0] * 5, params.layers, (carry,), x, batch)
        return last(params.last, (), y, at)[0], after

    def results(run):
        def loss(params, carry, x):
            loss, after = run(params, carry, {"x": x, "targets": targets})
            return loss + jnp.sum(after.h_BH**2), after

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(params, carry, x)

    actual, expected = jax.tree.leaves(results(piped)), jax.tree.leaves(results(plain))
    for ours, wanted in zip(actual, expected, strict=True):
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(ours - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)


# ---- the compiled program ----

HLO_CASES = [
    ((2, 2, 2), {"head": "last"}),
    ((2, 2, 2), {"head": "sharded"}),
    ((2, 2, 2), {"head": "sharded", "tied": True}),
    ((1, 4, 2), {"head": "last", "tied": True}),
    ((4, 2, 1), {"head": "sharded", "remat": True}),
]


@pytest.mark.more
@pytest.mark.parametrize(("sizes", "options"), HLO_CASES)
def test_loops_of_the_compiled_step_hold_the_collectives_that_they_should(sizes, options):
    options = dict(options)
    tied = options.pop("tied", False)
    task = dataclasses.replace(MODEL, tie_embedding=tied, embed_size=16 if tied else 8)
    report = inspect_step(*make_settings(sizes, (2, 2), task, **options))
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


def lowered(settings):
    """Loss and gradients of a step, as a program that is not compiled yet."""
    return value_and_grad(*settings).lower(init_state(*settings), make_batch(settings))


def test_the_program_does_not_grow_with_layers_microbatches_and_chunks():
    def lines_of(num_layers, units):
        sizes = {"num_layers": num_layers, "batch_size": units[0] * 2, "seq_len": units[1]}
        sizes |= {"vocab_size": 9600}  # so many that no stage has all of the table
        task = dataclasses.replace(MODEL, dropout=0.0, **sizes)
        settings = make_settings((2, 4, 1), units, task)
        return len(lowered(settings).as_text().splitlines())

    assert lines_of(64, (32, 16)) == lines_of(8, (4, 4))


@pytest.mark.full
def test_memory_does_not_grow_with_microbatches():
    def temporary(num_microbatches):
        task = LM(
            num_layers=4,
            hidden_size=128,
            embed_size=128,
            vocab_size=96,
            dropout=0.0,
            batch_size=8 * num_microbatches,
            seq_len=32,
        )
        settings = make_settings((1, 4, 1), (num_microbatches, 4), task)
        return lowered(settings).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary(num_microbatches) for num_microbatches in (4, 32)]
    assert max(sizes) <= 1.02 * min(sizes), sizes


def make_pipeline(num_stages=2, **changes):
    """Six LSTM layers on two stages: 16 rows in two microbatches of 8, 16 steps in four chunks of 4."""
    options = {
        "layers": (lstm,),
        "mesh": MeshConfig(stage=num_stages, devices=tuple(range(num_stages))).build(),
        "slots": make_slots((3, 3)),
        "chunk_len": 4,
        "microbatch_rows": 8,
    }
    return Pipeline(first=first, last=last, **{**options, **changes})


def run_pipeline(pipeline, schedules=(), *, num_layers=6, rows=16, num_steps=16, **more):
    """The loss of random inputs, and its gradients."""
    table = make_table(schedules or [make_schedule("1f1b", 2, 2, 4)])
    keys = jax.random.split(jax.random.key(1), 2)
    x, targets = (jax.random.normal(key, (num_steps, rows, 8)) for key in keys)
    params = PipelineParams(jnp.ones(8), (lstms(num_layers),), jnp.ones(8))
    carry = (lstm_carry(num_layers, more.pop("carry_rows", rows)),)

    def loss(params):
        return pipeline.sums(params, carry, {"x": x, "targets": targets, **more}, table)[0][0]

    return jax.jit(jax.value_and_grad(loss))(params)


MISTAKES = [
    ({"chunk_len": 8}, {}, r"time steps of a batch: expected \[32\], got \[16\]\.\nFix: change chunk_len=8,"),
    ({"microbatch_rows": 16}, {}, "dim 1 of a carry: expected 32, got 16"),
    ({"microbatch_rows": 4}, {}, "dim 1 of a carry: expected 8, got 16"),
    (
        {}, {"schedules": [make_schedule("1f1b", 4, 2, 4)]},
        r"data, stage of the table: expected \(1, 2\), got \(1, 4\)\.\nFix: make a schedule",
    ),
    (
        {}, {"schedules": [make_schedule("interleaved", 2, 2, 4, 3)]},
        "groups in slots: expected 6, got 2.\nFix: make slots of a placement with stages=table.route.stages",
    ),
    (  # those of six stages
        {"slots": make_slots((1,) * 6)}, {"schedules": [make_schedule("interleaved", 2, 2, 4, 3)]},
        r"layers in slots: expected \(0, 2, 4, 1, 3, 5\), got \(0, 1, 2, 3, 4, 5\)",
    ),
    (
        {"slots": make_slots((1,) * 6, (0, 1) * 3), "num_stages": 6},
        {"schedules": [make_schedule("1f1b", 6, 2, 4)]},
        r"layers in slots: expected \(0, 1, 2, 3, 4, 5\), got \(0, 2, 4, 1, 3, 5\)",
    ),
    (
        {}, {"schedules": [make_schedule("1f1b", 2, 2, 4)] * 2},
        r"data, stage of the table: expected \(1, 2\), got \(2, 2\)",
    ),
    (
        {}, {"schedules": [make_schedule("1f1b", 2, 2, 3)]},
        r"time steps of a batch: expected \[12\], got \[16\]",
    ),
    ({}, {"num_steps": 1}, r"time steps of a batch: expected \[16\], got \[\]"),
    ({"chunk_len": None}, {}, r"time steps of a batch: expected \[0\], got \[16\]\.\nFix: change chunk_len"),
    ({}, {"rows": 20, "carry_rows": 16}, "rows of a batch: expected 16, got 20.\nFix: change microbatch"),
    ({}, {"label": jnp.ones(8)}, "rows of a batch: expected 16, got 8"),
    ({}, {"carry_rows": 8}, "dim 1 of a carry: expected 16, got 8"),
    ({}, {"num_layers": 5}, "rows of a stack: expected 6, got 5.\nFix: stack layers as slots.rows"),
    ({"layers": (lstm, lstm)}, {}, "kinds of layers in slots: expected 2, got 1.\nFix: pass kind_of"),
    (
        {}, {"schedules": [make_schedule("1f1b", 2, 2, 4, backward=False)]},
        "the table has no backward pass.\nFix: make its schedules with backward=True",
    ),
]  # fmt: skip


@pytest.mark.rows(3)
@pytest.mark.parametrize(("pipeline", "run", "message"), MISTAKES)
def test_what_would_give_another_number_without_a_word_is_refused(pipeline, run, message):
    with pytest.raises(ValueError, match=message):
        run_pipeline(make_pipeline(**pipeline), **run)


@pytest.mark.full
def test_what_the_mistakes_are_made_of_is_right():
    loss, grads = run_pipeline(make_pipeline())
    whole = make_pipeline(chunk_len=16, microbatch_rows=16)
    expected = run_pipeline(whole, [make_schedule("1f1b", 2, 1)])
    for ours, wanted in zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - wanted) <= RELATIVE_ERROR * np.linalg.norm(wanted)


def test_plans_that_do_not_fit_are_refused():
    small, large = make_schedule("1f1b", 2, 2, 2), make_schedule("1f1b", 2, 8, 2)
    with pytest.raises(AssertionError):
        make_table([large], capacity=small)
    with pytest.raises(AssertionError):
        make_table([small, make_schedule("gpipe", 2, 2, 2)], capacity=small)
    with pytest.raises(AssertionError):
        make_table([small, make_schedule("1f1b", 2, 2, 1)])
