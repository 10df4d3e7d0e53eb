"""Padding is inert: what is computed for the real steps of sequences depends neither on what pads them nor
on how much of it there is."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.awd import awd
from lib.laws import MODEL, more, on_devices, state_with_carry
from lib.models import SGD
from lib.references import FOLDER

import jaxpar
from jaxpar import (
    LayerContext,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
    init_state,
    make_predict_step,
    nn,
)
from jaxpar.lm import IGNORE
from recipes.awd import Window

WIDTH, ROWS, REAL, LONG = 8, 4, 7, 70  # a matrix memory takes 64 steps at once
LENGTHS = np.array([5, 3, 0, 7], np.int32)  # of each row; the longest fills the shortest window
# Relative to the largest number: products of other shapes are added up in another order.
ROUNDING = 1e-5

# ---- layers ----


def xlstm(number):
    """A block of the example: with an mLSTM, or with an sLSTM (the fourth)."""
    task = api.task_class(f"{FOLDER}/xlstm.py:XLSTM")
    task = task(num_layers=4, hidden_size=WIDTH, embed_size=WIDTH, num_heads=2, vocab_size=9)
    return lambda rngs: task.make_model(rngs).layers.layer(number)


def cell(make):
    return lambda rngs: nn.Recurrent(make(WIDTH, WIDTH, rngs=rngs))


def own(make, **options):
    return lambda rngs: make(WIDTH, rngs=rngs, dropout=0.2, **options)


def both(*makers):
    return lambda rngs: nn.Bidirectional(*(make(rngs) for make in makers))


ONE_WAY = {
    "lstm": own(nn.LSTM),
    "lstm with a learned start": own(nn.LSTM, learn_initial=True),
    "lstm of heads": own(nn.LSTM, num_heads=2),
    "gru": own(nn.GRU),
    "slstm": own(nn.SLSTM),
    "mlstm": own(nn.MLSTM, num_heads=2),
    "gated_delta": own(nn.GatedDeltaNet, num_heads=2),
    "mingru": own(nn.MinGRU),
    "rglru": own(nn.RGLRU),
    "Flax's LSTM": cell(nnx.OptimizedLSTMCell),
    "Flax's GRU": cell(nnx.GRUCell),
    "Flax's simple cell": cell(nnx.SimpleCell),
    "stateless": lambda rngs: nn.Stateless(nnx.LayerNorm(WIDTH, rngs=rngs)),
    "mLSTM block": xlstm(0),
    "sLSTM block": xlstm(3),
}
WITH_STATE = [name for name in ONE_WAY if name != "stateless"]
IN_TURN = dict(zip(WITH_STATE, (*WITH_STATE[1:], WITH_STATE[0]), strict=True))
LAYERS = {
    **ONE_WAY,
    **{
        f"{name}, both ways": both(ONE_WAY[name], ONE_WAY[second])
        for name, second in IN_TURN.items()
    },
    "both ways, twice": both(own(nn.GRU), both(own(nn.LSTM), own(nn.MinGRU))),
}
QUICK = ("lstm, both ways", "gated_delta")


def real(length):
    """Which steps are real, [time, rows]."""
    return np.arange(length)[:, None] < LENGTHS


def padded(a, length, by):
    """Steps [REAL, rows, ...] as a window of so many, whose padding is random times a number."""
    noise = np.random.default_rng(length).normal(size=(length, *a.shape[1:])) * by
    whole = np.concatenate([a, a[:1].repeat(length - REAL, 0)])
    is_real = np.expand_dims(real(length), (*range(2, a.ndim),))
    return np.where(is_real, whole, noise.astype(a.dtype))


@functools.cache
def steps(resets):
    """Inputs of a layer, what its outputs are multiplied by, and where sequences begin."""
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, REAL, ROWS, WIDTH)).astype(np.float32)
    begins = (rng.random((REAL, ROWS)) < 0.4) & real(REAL)
    return x, dy, begins if resets else None


@functools.cache
def compiled(name):
    """(layer's state, inputs, batch) -> outputs, and the gradients of a sum that only real steps are in."""
    graphdef, state = nnx.split(LAYERS[name](nnx.Rngs(0)))

    def of_loss(given, dy, batch):
        layer, at = nnx.merge(graphdef, given[0]), LayerContext(0, 0, 0, jax.random.key(0), batch)
        start = layer.initial_carry(ROWS) if hasattr(layer, "initial_carry") else ()
        y = layer(start, given[1], at)[1]
        return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(of_loss, has_aux=True)), state


def run(name, length, by, *, resets):
    """Outputs of real steps, and the gradients of parameters and of real inputs."""
    x, dy, begins = steps(resets)
    batch = {"lengths": LENGTHS, "x": padded(x, length, by)}
    if resets:
        batch["resets"] = padded(begins, length, 0)
    of_loss, state = compiled(name)
    (_, y), (d_state, dx) = of_loss((state, batch["x"]), padded(dy, length, 0), batch)
    is_real = real(length)
    return np.asarray(y)[is_real], (d_state, np.asarray(dx)[is_real])


def assert_near(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=0, atol=ROUNDING * np.nanmax(np.abs(b), initial=1e-30)
        )


@pytest.mark.rows(1)
@pytest.mark.parametrize("resets", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", [name if name in QUICK else more(name) for name in LAYERS])
def test_what_a_layer_gives_for_real_steps_is_independent_of_padding(name, resets):
    y, grads = run(name, REAL, 0.0, resets=resets)
    for length, by in ((REAL, 30.0), (LONG, 3.0)):
        assert_near(run(name, length, by, resets=resets), (y, grads))
    assert_near(run(name, LONG, np.nan, resets=resets)[0], y)


# ---- batches ----

LONGEST, FEATURES = 8, 3
LENGTHS_S = [3, 5, 8, 2, 7, 1, 6]  # of sequences


def make_batches(kind, length=LONGEST, seed=None, rows=2):
    """Batches of a class that pads time."""
    x = np.random.default_rng(0).normal(size=(sum(LENGTHS_S), FEATURES)).astype(np.float32)
    if kind == "packed":
        return api.PackedBatches({"x": x}, LENGTHS_S, rows, length, seed)
    if kind == "series":
        return SeriesBatches({"x": x}, rows, length, seed, warmup=3 if seed is None else 0)
    edges = (4, length) if kind == "buckets" else (length,)
    return api.BucketedBatches({"x": x}, LENGTHS_S, rows, edges, seed)


def repadded(batches, by, *names):
    """The same batches with other numbers, of about this size, in place of padding."""
    batch_of = batches.batch

    def other(a, is_padding):
        noise = by * np.sin(1 + np.arange(a.shape[1], dtype=np.float32))[None]
        dims = (*range(2, a.ndim),)
        return np.where(np.expand_dims(is_padding, dims), np.expand_dims(noise, dims), a)

    def batch(step, rows=slice(None)):
        batch = batch_of(step, rows)
        is_padding = np.arange(batch["weight"].shape[1]) >= batch["lengths"][:, None]
        return {**batch, **{name: other(batch[name], is_padding) for name in names}}

    batches.batch = batch
    return batches


class Model(nnx.Module):
    def __init__(self, kinds, *, rngs):
        def stacked(kind):
            return lambda rngs: LAYERS[kind](rngs)

        self.inputs = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.layers = Stack([stacked(kind) for kind in kinds], rngs=rngs)

    def first(self, batch, at):
        return self.inputs(batch["x"])

    def last(self, y, batch, at):
        total = jnp.sum(jnp.square(y).mean(-1) * batch["weight"])
        return Sums(
            total, jnp.sum(batch["weight"]), {"first": jnp.sum(y[..., 0] * batch["weight"])}
        )

    def predict(self, y, batch, at):
        return {"y": y}


@dataclasses.dataclass(frozen=True)
class Tag(Task):
    """A number for each step, of sequences in batches of a class."""

    kind: str = "one bucket"
    length: int = LONGEST
    by: float = 0.0
    kinds: tuple[str, ...] = ("gru, both ways", "mlstm")
    batch_size: int = 4
    optimizer: OptimizerConfig = SGD

    @property
    def variable_length(self):
        return self.kind == "buckets"

    def make_model(self, rngs):
        return Model(self.kinds, rngs=rngs)

    def make_batches(self, split, seed=None):
        return repadded(make_batches(self.kind, self.length, seed, self.batch_size), self.by, "x")

    def example_batch(self):
        batches = self.make_batches("test")
        return batches.batch(batches.num_windows - 1)  # the longest


def everything(task):
    """Sums and predictions of all batches, and of one of them loss and gradients."""
    state, batches = init_state(task, ONE), task.make_batches("test")
    loss, grads, _ = of_step(task, ONE, state, task.example_batch())
    return {
        "sums": api.epoch_sums(task, ONE, state, batches),
        "found": api.epoch_predictions(task, ONE, state, batches),
        "loss": loss,
        "grads": grads,
    }


def of_step(task, parallel, state, batch):
    """Loss, gradients, and the carry after it."""
    found = api.gradients(task, parallel, batch, state)
    return found.loss, found.grads, found.carry


ONE = Parallel(on_devices((1, 1, 1)))


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize("kind", ["buckets", more("one bucket"), more("packed"), more("series")])
def test_runs_are_independent_of_what_pads_sequences(kind):
    expected = everything(Tag(kind))
    assert_near(everything(Tag(kind, by=30.0)), expected)
    if kind != "series":  # whose windows are what a layer that looks ahead reads
        more = everything(Tag(kind, 2 * LONGEST, by=30.0))
        same = ("found", "sums") if kind == "packed" else expected.keys()
        assert_near({name: more[name] for name in same}, {name: expected[name] for name in same})


@pytest.mark.parametrize("kind", ["buckets", "one bucket", "packed", "series"])
def test_batches_say_where_padding_begins(kind):
    for seed in (None, 3):
        batches = make_batches(kind, seed=seed, rows=3)
        for step in range(2 * batches.num_windows):
            batch = batches.batch(step)
            is_real = np.arange(batch["weight"].shape[1]) < batch["lengths"][:, None]
            assert batch["lengths"].dtype == np.int32
            np.testing.assert_array_equal(
                batches.batch(step, slice(1, 3))["lengths"], batch["lengths"][1:]
            )
            if kind == "series" and seed is None:  # which first reads steps that do not count
                is_real &= (
                    step % batches.num_windows * LONGEST + np.arange(LONGEST) >= batches.warmup
                )
            np.testing.assert_array_equal(batch["weight"], is_real)


def test_at_tells_how_many_steps_of_a_block_are_real():
    lengths = np.array([0, 3, 8, 6])
    for time, expected in ((0, [0, 3, 4, 4]), (4, [0, 0, 4, 2])):
        block = {"x": np.zeros((4, 4, 2)), "level": np.zeros((1, 4)), "lengths": lengths}
        found = LayerContext(0, time, 0, batch=block).lengths
        assert found.tolist() == expected
        assert found.dtype == np.int32
    block = {"x": np.zeros((4, 9, 2)), "lengths": lengths}
    assert LayerContext(0, 0, 0, batch=block, time_major=False).lengths.tolist() == lengths.tolist()
    assert LayerContext(0, 0, 0, batch={"x": np.zeros((4, 4))}).lengths is None


class Marked(nnx.Module):
    """Multiplies each real step by how many are real up to it, in its chunk and in all before."""

    def initial_carry(self, rows):
        return jnp.zeros((rows, 1))

    def __call__(self, carry, x, at):
        here = jnp.minimum(jnp.arange(1, len(x) + 1)[:, None], at.lengths[None])
        y = x * (carry[None] + here[..., None].astype(jnp.float32))
        return carry + at.lengths[:, None].astype(jnp.float32), nn.mask_padding(y, at)


LAYERS["marked"] = lambda rngs: Marked()


@pytest.mark.full
@pytest.mark.law
def test_chunks_of_time_know_their_own_lengths():
    task = Tag(kinds=("marked", "gru"))
    pipeline = PipelineConfig(num_microbatches=2, num_chunks=2)
    layouts, batch = (Parallel(on_devices((2, 2, 1)), pipeline), ONE), task.example_batch()
    found = [of_step(task, each, init_state(task, each), batch) for each in layouts]
    assert_near(*found)
    np.testing.assert_array_equal(found[0][2]["layers.0"][:, 0], batch["lengths"])


# ---- what is shipped, and pads ----


def other_tokens(batches, by):
    """The same text in lines, with other tokens in place of padding."""
    batch_of = batches.batch

    def batch(step, rows=slice(None)):
        batch = batch_of(step, rows)
        other = (np.arange(batch.inputs_BT.shape[1]) + by) % 9
        is_padding = batch.targets_BT == IGNORE
        return batch._replace(
            inputs_BT=np.where(is_padding, other, batch.inputs_BT).astype(np.int32)
        )

    batches.batch = batch
    return batches


@pytest.mark.more
@pytest.mark.parametrize("more", [{"packed": True}, more({"num_buckets": 2})])
def test_lines_of_a_text_are_independent_of_padding(text, more):
    task = jaxpar.lm.LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(text), batch_size=4, seq_len=8, layer="mlstm",
        num_heads=2, **more,
    ).resolve()  # fmt: skip
    state, found = init_state(task, ONE), []
    for by, wider in ((0, task), (5, task), (0, dataclasses.replace(task, seq_len=16))):
        batches = other_tokens(wider.make_batches("valid"), by)
        batch = other_tokens(wider.make_batches("train"), by).batch(0)
        of_epoch = (
            api.epoch_predictions(wider, ONE, state, batches),
            api.epoch_sums(wider, ONE, state, batches),
        )
        found.append((of_epoch, of_step(wider, ONE, state, batch)))
    assert_near(found[1], found[0])
    assert_near(found[2][0], found[0][0])


def late_batch(task, padding, token):
    """A window of the recipe's whose text begins after so many steps, and what is carried into it."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, 96, (2, task.batch_size, 5), dtype=np.int32)
    before = np.full((task.batch_size, padding), token, np.int32)
    arrays = (
        np.concatenate([fill, a], 1)
        for fill, a in ((before, inputs), (before * 0 + IGNORE, targets))
    )
    return Window(*arrays, starts=False, padding=padding, rate=1.0)


@pytest.mark.more
@pytest.mark.parametrize(
    ("layer", "mesh", "chunks"),
    [("lstm", (1, 1, 1), 1), more("gru", (1, 2, 1), 2), more("slstm", (1, 1, 1), 1)],
)
def test_windows_that_begin_late_are_independent_of_padding(layer, mesh, chunks):
    rates = {"ar": 1.0, "tar": 1.0, "drop_connect": 0.3, "word_dropout": 0.1, "window_mean": 5}
    model = dataclasses.replace(MODEL, num_layers=2, batch_size=4, layer=layer)
    found = []
    for length, token in ((8, 0), (8, 7), (16, 3)):
        task = awd(dataclasses.replace(model, seq_len=length), **rates)
        parallel = Parallel(on_devices(mesh), PipelineConfig(num_chunks=chunks))
        batch = late_batch(task, length - 5, token)
        found.append(of_step(task, parallel, state_with_carry(task, parallel), batch))
    for other in found[1:]:
        assert_near(other, found[0])
    begun_anew, *_ = of_step(task, parallel, init_state(task, parallel), batch)
    assert abs(begun_anew - found[0][0]) > 1e-3  # what is carried is read


@pytest.mark.full
def test_translations_are_independent_of_what_fills_sentences_up():
    """Also of what is learned of the token that does."""
    make = api.task_class(f"{FOLDER}/translation.py:Translate")
    options = {"width": 8, "num_encoders": 2, "num_decoders": 2, "batch_size": 4, "optimizer": SGD}
    found = []
    for filled, max_tokens in ((0.0, 11), (30.0, 11), (30.0, 19)):
        task = make(max_tokens=max_tokens, **options)
        short = {
            name: a[:5] for name, a in make(max_tokens=11, **options).sentences("test").items()
        }
        width = max_tokens + 1
        arrays = {name: np.pad(a, ((0, 0), (0, width - a.shape[1]))) for name, a in short.items()}
        batches = jaxpar.ArrayBatches(arrays, task.batch_size)
        state = init_state(task, ONE)
        table = state.params["embed"]["embedding"]
        table[...] = table[...].at[0].set(filled)
        given = api.epoch_predictions(task, ONE, state, batches)
        given = {name: a[:, 0] for name, a in given.items()}
        sums = api.epoch_sums(task, ONE, state, batches)
        loss, grads, _ = of_step(task, ONE, state, batches.batch(0))
        found.append((given, sums, loss, grads))
    for other in found[1:]:
        assert_near(other, found[0])


@pytest.mark.full
def test_a_forecast_is_independent_of_what_follows_a_stream():
    make = api.task_class(f"{FOLDER}/forecaster.py:Forecast")
    task = make(num_layers=2, width=8, batch_size=4, seq_len=24)
    state, valid = init_state(task, ONE), task.make_batches("valid")
    expected = api.epoch_sums(task, ONE, state, valid)
    other = repadded(valid, 30.0, "seen", "next")
    assert_near(api.epoch_sums(task, ONE, state, other), expected)


# ---- the check before a run ----


class Own(nnx.Module):
    """A layer that a user might write; it reads later steps as a test says."""

    def __init__(self, call):
        self.call = call

    def __call__(self, carry, x, at):
        return carry, self.call(x, at)


def attend(x, is_read_TB):
    """Of each step to all steps of its row that are read."""
    scores = jnp.einsum("tbw,sbw->tsb", x, x)
    weights = nnx.softmax(jnp.where(is_read_TB[None], scores, -1e9), 1)
    return jnp.einsum("tsb,sbw->tbw", weights, x)


def real_TB(x, at):
    return jnp.arange(len(x))[:, None] < at.lengths[None]


def around(x):
    """Of each step, and the ones before and after it."""
    return x + jnp.pad(x[1:], ((0, 1), (0, 0), (0, 0))) + jnp.pad(x[:-1], ((1, 0), (0, 0), (0, 0)))


def summed(y, weight):
    return Sums(jnp.sum(jnp.square(y).sum(-1) * weight), jnp.sum(weight))


def without(at):
    return at._replace(batch={name: a for name, a in at.batch.items() if name != "lengths"})


def of_rows(y):
    """The mean of each row over time, as a prediction of every step."""
    return {"y": jnp.broadcast_to(y.mean(0, keepdims=True), y.shape)}


class Blind(nn.Bidirectional):
    """As if the batch did not say where sequences end."""

    def __call__(self, carry, x, at):
        return super().__call__(carry, x, without(at))


class Pooled(Own):
    rows_together = 4


INERT = {
    "attention": ("layer", lambda x, at: attend(x, real_TB(x, at))),
    "a convolution": ("layer", lambda x, at: around(nn.mask_padding(x, at))),
    "both ways": (
        "made",
        lambda rngs: nn.Bidirectional(nn.GRU(WIDTH, rngs=rngs), nn.MinGRU(WIDTH, rngs=rngs)),
    ),
    "a norm of rows": ("together", lambda x, at: x - nn.mask_padding(x, at).mean(1, keepdims=True)),
    "a mean over time": (
        "first",
        lambda x, at: (
            x
            - nn.mask_padding(x, at).sum(0, keepdims=True)
            / (1 + at.lengths).astype(jnp.float32)[None, :, None]
        ),
    ),
    "the loss": ("last", lambda y, batch, at: summed(y, batch["weight"])),
    "the last step": (
        "last",
        lambda y, batch, at: summed(
            y[at.lengths - 1, jnp.arange(y.shape[1])][None], batch["weight"][:1]
        ),
    ),
    "a prediction": ("predict", lambda y, batch, at: of_rows(nn.mask_padding(y, at))),
}
READING = {
    "attention": ("layer", lambda x, at: attend(x, jnp.ones(x.shape[:2], bool)), "layer own .*its output"),
    "a convolution": ("layer", lambda x, at: around(x), "layer own .*its output"),
    "both ways": ("made", lambda rngs: Blind(*(nn.GRU(WIDTH, rngs=rngs) for _ in "ab")), "layer blind .*put"),
    "a norm of rows": ("together", lambda x, at: x - x.mean(1, keepdims=True), "layer pooled .*its output"),
    "a mean over time": ("first", lambda x, at: x - x.mean(0, keepdims=True), "`first` .*its output"),
    "the loss": ("last", lambda y, batch, at: summed(y, 0 * batch["weight"] + 1), "`last` .*its loss"),
    "the last step": ("last", lambda y, batch, at: summed(y[-1:], batch["weight"][:1]), "`last` .*its loss"),
    "a prediction": ("predict", lambda y, batch, at: of_rows(y), "`predict` .*its output 'y'"),
}  # fmt: skip


class Changed(Model):
    """A model in which one part is a test's."""

    def __init__(self, part, call, *, rngs):
        super().__init__((), rngs=rngs)
        makers = {
            "layer": lambda rngs: Own(call),
            "together": lambda rngs: Pooled(call),
            "made": call,
        }
        make = makers.get(part, lambda rngs: nn.GRU(WIDTH, rngs=rngs))
        self.layers, self.part, self.call = Stack([make], rngs=rngs), part, call

    def first(self, batch, at):
        x = super().first(batch, at)
        return self.call(x, at) if self.part == "first" else x

    def last(self, y, batch, at):
        return (self.call if self.part == "last" else super().last)(y, batch, at)

    def predict(self, y, batch, at):
        return (self.call if self.part == "predict" else super().predict)(y, batch, at)


def check(part, call, task=Tag):
    class Changing(task):
        def make_model(self, rngs):
            return Changed(part, call, rngs=rngs)

    (make_predict_step if part == "predict" else api.check_before_run)(Changing(), ONE)


@pytest.mark.parametrize(
    "name", [name if name == "a convolution" else more(name) for name in INERT]
)
def test_parts_that_leave_padding_out_are_accepted(name):
    check(*INERT[name])


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", READING)
def test_parts_that_read_padding_are_refused_before_a_run(name):
    part, call, message = READING[name]
    with pytest.raises(ValueError, match=rf"{message}.*\nFix: mask steps from at.lengths on"):
        check(part, call)


class Late(jaxpar.ArrayBatches):
    """Batches of a user's, in which one row is padded, and not among the first."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        is_real = np.arange(LONGEST) < batch["lengths"][:, None]
        return {**batch, "weight": is_real.astype(np.float32)}


class OfLate(Tag):
    example_batch = Task.example_batch

    def make_batches(self, split, seed=None):
        x = np.random.default_rng(0).normal(size=(16, LONGEST, FEATURES)).astype(np.float32)
        return Late({"x": x, "lengths": np.array([8] * 7 + [3] + [8] * 8)}, 8)


def test_padding_is_found_in_later_rows_of_a_batch():
    with pytest.raises(
        ValueError, match="layer own gives real steps other numbers when padding changes"
    ):
        check("layer", lambda x, at: around(x), OfLate)


# ---- rows that only fill a batch ----


def summed_losses(kind):
    """`last` or a loss that counts rows by their weights, by their lengths, or not at all."""

    def last(y, batch):
        losses = (y - batch["y"]) ** 2
        if kind == "metric":  # which is right, while the loss is not
            weight = batch["weight"]
            return Sums(losses.sum(), jnp.float32(losses.size), {"error": (losses * weight).sum()})
        weight = {"weight": batch["weight"], "ignored": jnp.ones_like(batch["weight"])}[kind]
        return Sums((losses * weight).sum(), weight.sum())

    return last


class Halves(nnx.Module):
    def __init__(self, rngs, kind):
        self.blocks = nnx.List([nnx.Linear(1, 1, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x[:, 0]


class InLayers(nnx.Module):
    time_major = False

    def __init__(self, rngs, kind):
        self.kind = kind
        self.layers = Stack([lambda rngs: nn.Stateless(nnx.Linear(1, 1, rngs=rngs))] * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        return summed_losses(self.kind)(y[:, 0], batch)


def rows_of(split, seed):
    size = 12 if split == "train" else 9  # batches of 4
    x = np.linspace(0, 1, size, dtype=np.float32)[:, None]
    return jaxpar.ArrayBatches({"x": x, "y": x[:, 0]}, 4, seed)


def adopted(kind):
    def loss(model, batch):
        return summed_losses(kind)(model(batch["x"]), batch)

    return jaxpar.adopt(
        functools.partial(Halves, kind=kind), loss, batches=rows_of, layers="blocks"
    )


@dataclasses.dataclass(frozen=True)
class OfLayers(Task):
    kind: str = "weight"
    optimizer: OptimizerConfig = OptimizerConfig()

    def make_model(self, rngs):
        return InLayers(rngs, self.kind)

    def make_batches(self, split, seed=None):
        return rows_of(split, seed)


def sums_of_rows(task):
    return api.epoch_sums(task, "dp1", init_state(task, "dp1"), task.make_batches("valid"))


@pytest.mark.parametrize("make", [adopted, OfLayers])
@pytest.mark.parametrize("kind", ["ignored", "metric"])
def test_a_loss_that_counts_rows_which_fill_a_batch_is_refused_before_a_run(make, kind, tmp_path):
    message = r"does not read batch\['weight'\]: 3 of 4 weights in a batch are 0\.\n.*\nFix: return"
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match=message):
        jaxpar.fit(make(kind), "dp1", TrainConfig(num_steps=1, out_dir=str(folder)), quiet=True)
    assert not list(folder.glob("checkpoints/*"))
    with pytest.raises(ValueError, match=message):
        sums_of_rows(make(kind))


@pytest.mark.parametrize("make", [adopted, OfLayers])
def test_a_loss_that_reads_weights_counts_every_row_once(make):
    assert sums_of_rows(make("weight"))["weight"] == 9
