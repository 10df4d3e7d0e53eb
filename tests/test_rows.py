"""Rows that mix are found before a run, and named: on another mesh they would give another loss."""

import dataclasses
import re
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import more, on_devices
from lib.models import MAKERS, WIDTH, Regress, Regression

from jaxpar import (
    ArrayBatches,
    IteratorBatches,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    TrainConfig,
    fit,
    init_state,
    make_predict_step,
    make_train_step,
    value_and_grad,
)
from jaxpar.lm import LM
from jaxpar.nn import GRU, Bidirectional, Stateless
from recipes.awd import AWD

pytestmark = pytest.mark.fresh

ONE = Parallel(on_devices((1, 1, 1)))


class Layer(nnx.Module):
    """What a test gives, as a layer with a carry [rows, WIDTH]."""

    def __init__(self, call, *, rngs):
        self.function, self.w = call, nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def initial_carry(self, rows):
        return jnp.zeros((rows, WIDTH))

    def __call__(self, carry, x, at):
        return self.function(carry, self.w(x), at)


def plain_first(model, batch):
    return model.inputs(batch["x"])


def plain_last(model, y, batch):
    weight = batch["weight"]
    error = jnp.mean(jnp.square(model.outputs(y) - batch["y"]), -1)
    return Sums(jnp.sum(error * weight), jnp.sum(weight), {"mae": jnp.sum(jnp.abs(error) * weight)})


class Model(nnx.Module):
    def __init__(self, make, first, last, rngs):
        self.inputs, self.outputs = nnx.Linear(3, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 3, rngs=rngs)
        self.layers = Stack([make] * 2, rngs=rngs)
        self.before, self.after = first, last

    def first(self, batch, at):
        return self.before(self, batch)

    def last(self, y, batch, at):
        return self.after(self, y, batch)


def task_of(layer=None, make=None, first=plain_first, last=plain_last, **options):
    """A task whose layers are a function (carry, x, at), or what is made of `make`."""
    layer = layer or (lambda carry, x, at: (carry + x[-1], x))

    class Own(Regress):
        def make_model(self, rngs):
            return Model(make or (lambda rngs: Layer(layer, rngs=rngs)), first, last, rngs)

    return Own(**options)


def batch_norm(x):
    return (x - x.mean((0, 1), keepdims=True)) / (x.std((0, 1), keepdims=True) + 1e-5)


def step_on(task, mesh, make_step, **units):
    parallel = Parallel(on_devices(mesh), PipelineConfig(**units))
    batch = task.make_batches("train", 0).batch(0)
    return make_step(task, parallel)(init_state(task, parallel), batch)


def loss_of_evaluation(task, mesh):
    """Which checks no rows."""
    _, sums = step_on(task, mesh, api.eval_step)
    return float(sums.loss / sums.weight)


def test_a_norm_over_the_batch_is_refused_before_a_file_is_written(tmp_path):
    task = task_of(lambda carry, x, at: (carry, batch_norm(x)))
    whole, halves = (loss_of_evaluation(task, (data, 1, 1)) for data in (1, 2))
    assert abs(whole - halves) > 1e-3 * whole  # why
    train = TrainConfig(num_steps=2, out_dir=str(tmp_path / "run"))
    refused = r"^layer layer0 mixes the rows of a batch: a change in row 0 .* output in other.*\n.*nnx\.Layer"
    for mesh in ((1, 1, 1), (2, 1, 1), (2, 2, 2)):
        with pytest.raises(ValueError, match=refused):
            fit(task, Parallel(on_devices(mesh)), train)
    assert not (tmp_path / "run").exists()


def test_a_module_that_takes_rows_first_is_told_of_the_dims():
    def make(rngs):
        return Stateless(nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs))

    refused = r"layer stateless mixes the rows .*\nFix: .* blocks are \[time, rows, \.\.\.\], so swap these"
    with pytest.raises(ValueError, match=refused):
        api.check_before_run(task_of(make=make), ONE)


@pytest.mark.full
def test_a_step_of_ones_own_refuses_it_where_rows_lie_apart():
    task = task_of(lambda carry, x, at: (carry, batch_norm(x)))
    for mesh, units in (((2, 1, 1), {}), ((1, 1, 1), {"num_microbatches": 2})):
        for make_step in (make_train_step, value_and_grad):
            with pytest.raises(ValueError, match="layer layer0 mixes"):
                step_on(task, mesh, make_step, **units)
    _, metrics = step_on(task, (1, 1, 1), make_train_step)
    assert float(metrics.loss) == pytest.approx(loss_of_evaluation(task, (1, 1, 1)), rel=1e-5)


def last_with(change):
    """`plain_last`, but for what a function (sums, y, batch) changes."""
    return lambda model, y, batch: change(plain_last(model, y, batch), y, batch)


def balance(sums, y, batch, share=0.1):
    """As of a mixture of experts: how evenly all places of the batch choose."""
    mean, best = jax.nn.softmax(y).mean((0, 1)), jax.nn.one_hot(y.argmax(-1), WIDTH).mean((0, 1))
    cost = share * WIDTH * jnp.sum(mean * best)
    return sums._replace(loss=sums.loss + sums.weight * cost)


def plain_sums(sums, y, batch, number):
    return sums._replace(metrics={"balance": number})


MIXED = {
    "the carry": (
        {"layer": lambda carry, x, at: (carry + x.mean((0, 1))[None], x)},
        "layer layer0 mixes .* row 0 .* changes its carry",
    ),
    "what was carried": (
        {"layer": lambda carry, x, at: (carry, x + carry[::-1][None])},
        "layer layer0 mixes .* changes its output",
    ),
    "the largest": (
        {"layer": lambda carry, x, at: (carry, x / jnp.max(jnp.abs(x)))},
        "layer layer0 mixes .* changes its output",
    ),
    "the next row": (
        {"layer": lambda carry, x, at: (carry, x + 1e-6 * jnp.roll(x, 1, 1))},
        "layer layer0 mixes",
    ),
    "the batch": (
        {"layer": lambda carry, x, at: (carry, x * at.batch["weight"].mean(1)[:, None, None])},
        "layer layer0 mixes",
    ),
    "what is multiplied by 0 at first": (
        {"make": lambda rngs: Stateless(Zero(rngs=rngs))},
        "layer stateless mixes",
    ),
    "channels of a group": (
        {"make": lambda rngs: Stateless(nnx.GroupNorm(WIDTH, num_groups=4, rngs=rngs))},
        "layer stateless mixes",
    ),
    "inputs": (
        {
            "first": lambda model, batch: model.inputs(
                batch["x"] - batch["x"].mean(1, keepdims=True)
            )
        },
        "^`first` mixes .* row 0 .* changes its output",
    ),
    "only whether there are resets": (
        {"first": lambda model, batch: model.inputs(batch["x"]) * jnp.sum(batch["resets"])},
        "^`first` mixes",
    ),
    "a balanced loss": (
        {"last": last_with(balance)},
        "^the sums of `last` .* its loss is .* halves",
    ),
    "a loss that is hardly balanced": (
        {"last": last_with(lambda *args: balance(*args, share=1e-6))},
        "^`last` mixes .* changes its gradient",
    ),
    "a balanced metric": (
        {"last": last_with(lambda *args: plain_sums(*args, balance(*args).loss))},
        "^the sums of `last` .* its balance is .* halves",
    ),
    "a balanced metric over many time steps": (
        {
            "last": last_with(lambda *args: plain_sums(*args, balance(*args).loss)),
            "seq_len": 128,
            "batch_size": 4,
        },
        "^the sums of `last` .* its balance is .* halves",
    ),
    "a mean": (
        {"last": last_with(lambda sums, y, batch: Sums(sums.loss / sums.weight, jnp.float32(1)))},
        r"its loss is .*\n.* not means",
    ),
    "a weight that is no sum": (
        {"last": last_with(lambda sums, y, batch: sums._replace(weight=jnp.float32(1)))},
        "its weight is 1 for some rows, and 1 and 1 for the two halves",
    ),
    "a penalty once a call": (
        {"last": last_with(lambda sums, y, batch: sums._replace(loss=sums.loss + 0.1))},
        r"its loss is .*\n.* a penalty",
    ),
    "a metric": (
        {"last": last_with(lambda sums, y, batch: sums._replace(metrics={"best": jnp.max(y)}))},
        "its best is",
    ),
}


class Zero(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.scale[...] * batch_norm(x)


@pytest.mark.rows(2)
@pytest.mark.parametrize("mixed", MIXED)
def test_rows_that_mix_are_named_by_where_they_do(mixed):
    options, message = MIXED[mixed]
    with pytest.raises(ValueError, match=message):
        api.check_before_run(task_of(**options), ONE)


TWO_CHUNKS = Parallel(on_devices((1, 2, 1)), PipelineConfig(num_chunks=2))


def causal(carry, x, at):
    """Its outputs sum up what came so far, and tell the place in the window."""
    y = carry[None] + jnp.cumsum(x, 0)
    return y[-1], y + (at.time + jnp.arange(len(x)))[:, None, None].astype(y.dtype)


def penalty(carry, x, at):
    loss = jnp.sum(jnp.square(x.mean(0)) * at.batch["weight"].mean(0)[:, None])
    return (*causal(carry, x, at), Sums(loss, 0.0))


CHUNKED = {
    "the future": ({"layer": lambda c, x, at: (c, x[::-1])}, "layer layer0 .*: its output differs"),
    "a carry that is not read": ({"layer": lambda c, x, at: causal(0 * c, x, at)}, "its carry d"),
    "a carry of the last step": ({"layer": lambda c, x, at: (c + x[-1], x)}, "its carry differs"),
    "the place in a chunk": ({"layer": lambda c, x, at: causal(c, x, at._replace(time=0))}, "its output"),
    "sums": ({"layer": penalty}, "layer layer0 .*: its loss is .* for the window, and .* for its chunks"),
    "first": (
        {"layer": causal, "first": lambda model, batch: plain_first(model, batch)[::-1]},
        "^`first` gives other numbers when its window is split .*: its output differs",
    ),
    "last": (
        {"layer": causal, "last": lambda model, y, batch: plain_last(model, y[::-1], batch)},
        r"^`last` gives other numbers .*\n.* use num_chunks=1",
    ),
}  # fmt: skip


@pytest.mark.rows(1)
@pytest.mark.parametrize("mistake", CHUNKED)
def test_what_chunks_of_time_would_change_is_named(mistake):
    options, message = CHUNKED[mistake]
    task = task_of(**options)
    api.check_before_run(task, ONE)
    with pytest.raises(ValueError, match=message):
        api.check_before_run(task, TWO_CHUNKS)


def heeds_resets(carry, x, at):
    carry = jnp.where(at.resets[0][:, None], 0.0, carry)
    return causal(carry, x, at)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("layer", "is_told"),
    [(causal, True), (heeds_resets, False), (lambda carry, x, at: (carry + x[-1], x), False)],
)
def test_a_layer_whose_state_goes_on_between_sequences_is_told(layer, is_told, caplog):
    api.check_before_run(task_of(layer), ONE)
    said = (
        "layer layer0 ignores 'resets' of the batch, so its state continues .*at\\.resets is true"
    )
    assert (re.search(said, caplog.text) is not None) == is_told, caplog.text


def test_what_chunks_of_time_leave_as_it_is_passes():
    api.check_before_run(task_of(causal), TWO_CHUNKS)


class Tags(nnx.Module):
    """Its loss is over the places that count, whichever way a test says which these are."""

    def __init__(self, counts, last, rngs):
        self.embed, self.out = nnx.Embed(8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 8, rngs=rngs)
        self.layers = Stack([lambda rngs: Layer(causal, rngs=rngs)] * 2, rngs=rngs)
        self.counts, self.after = counts, last

    def first(self, batch, at):
        return self.embed(batch["id"])

    def last(self, y, batch, at):
        counts = self.counts(batch)
        label = jnp.broadcast_to(batch["label"], counts.shape)
        logits = self.out(y) if counts.ndim > 1 else self.out(y)[-1]
        chance = jax.nn.log_softmax(logits)
        nll = -jnp.take_along_axis(chance, jnp.where(counts, label, 0)[..., None], -1)[..., 0]
        return self.after(nll, counts.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Tagged(Task):
    """Labels 1 to 7, but for 4. In some places of all batches but the first it is `later`."""

    counts: str = "not negative"
    last: str = "mean"
    later: int | None = None
    has_time: bool = True

    def make_model(self, rngs):
        return Tags(COUNTS[self.counts], LASTS[self.last], rngs)

    def make_batches(self, split, seed=None):
        rng = np.random.default_rng(0)
        ids = rng.integers(0, 8, (64, 6)).astype(np.int32)
        label = rng.choice([1, 2, 3, 5, 6, 7], (64, 6)[: 1 + self.has_time]).astype(np.int32)
        if self.later is not None:
            label[8:][rng.random(label[8:].shape) < 0.5] = self.later
        num_real = rng.integers(1, 7, 64).astype(np.int32)
        valid = np.ones(label.shape, bool)
        return ArrayBatches({"id": ids, "label": label, "valid": valid, "num_real": num_real}, 8)


COUNTS = {
    "not negative": lambda batch: batch["label"] >= 0,
    "positive": lambda batch: batch["label"] > 0,
    "not 4": lambda batch: batch["label"] != 4,
    "not -100": lambda batch: batch["label"] != -100,
    "valid": lambda batch: batch["valid"],
    "long": lambda batch: jnp.arange(len(batch["label"]))[:, None] < batch["num_real"][None],
}
LASTS = {
    "mean": lambda nll, c: Sums(
        jnp.sum(nll * c) / jnp.maximum(jnp.sum(c), 1) * c.size, jnp.float32(c.size)
    ),
    "sum": lambda nll, c: Sums(jnp.sum(nll * c), jnp.sum(c)),
    "metric": lambda nll, c: Sums(
        jnp.sum(nll * c),
        jnp.float32(c.size),
        {"most": jnp.sum(nll * c) / jnp.maximum(jnp.sum(c), 1) * c.size},
    ),
}
MEANS = [
    Tagged("not negative", later=-1),
    Tagged("not negative"),
    Tagged("positive"),
    Tagged("not -100", later=-100),
    Tagged("not 4", later=4),
    Tagged("valid"),
    more(Tagged("long")),
    Tagged("not negative", has_time=False),
    more(Tagged("positive", has_time=False)),
    Tagged("not negative", "metric"),
    more(Tagged("valid", "metric")),
]


@pytest.mark.more
@pytest.mark.parametrize("task", MEANS, ids=str)
def test_a_mean_over_the_places_that_count_is_refused(task):
    units = Parallel("pp2", PipelineConfig(num_microbatches=2))
    parallel = units if task.later == -1 else Parallel("dp2")
    refused = r"`last` (do not add up: its|mixes .* its gradient)"
    with pytest.raises(ValueError, match=refused):
        api.check_before_run(task, parallel)


@pytest.mark.more
@pytest.mark.parametrize("counts", [c if c in ("positive", "long") else more(c) for c in COUNTS])
def test_a_sum_over_the_places_that_count_is_not(counts):
    api.check_before_run(Tagged(counts, "sum", later=-1), ONE)


@dataclasses.dataclass(frozen=True)
class Streamed(Tagged):
    """Batches that a stream reads into one array; `later` is in no row of the first."""

    num_batches: int = 9

    def make_batches(self, split, seed=None):
        source = super().make_batches(split, seed)

        def read():
            batch = jax.tree.map(np.copy, source.batch(0))
            for number in range(self.num_batches):
                for name, array in source.batch(number).items():
                    batch[name][:] = array
                yield batch

        return IteratorBatches(read, 8)


@pytest.mark.parametrize("num_batches", [9, 2])
def test_rows_are_those_of_several_batches_and_a_short_stream_is_enough(num_batches):
    with pytest.raises(ValueError, match=r"`last` (do not add up: its|mixes .* its gradient)"):
        api.check_before_run(Streamed("not 4", later=4, num_batches=num_batches), ONE)
    api.check_before_run(Streamed("not 4", "sum", later=4, num_batches=num_batches), ONE)


def test_a_prediction_of_a_whole_window_is_found_where_that_is_cut():
    class Centered(Regression):
        def predict(self, y, batch, at):
            return {"y": y - y.mean(0)[None]}

    class Centers(Regress):
        def make_model(self, rngs):
            return Centered(self.kinds, rngs=rngs)

    for num_chunks in (1, 2):
        cut = Parallel("pp2", PipelineConfig(num_chunks=num_chunks))
        task = Centers(("dense", "dense"))
        if num_chunks == 1:
            make_predict_step(task, cut)
            continue
        with pytest.raises(
            ValueError, match=r"`predict` gives .* split into 2 time chunks: its output 'y'"
        ):
            make_predict_step(task, cut)


def test_what_adds_up_over_layers_beside_the_rows_is_found_in_the_layer():
    """A cost of all rows, handed from layer to layer in an array that has no rows."""

    class Costs(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, carry, x, at):
            h = self.w(x["h"])
            return carry, {"h": h, "cost": x["cost"] + jnp.mean(h)}

    task = task_of(
        make=lambda rngs: Costs(rngs=rngs),
        first=lambda model, batch: {"h": plain_first(model, batch), "cost": jnp.zeros(())},
        last=lambda model, y, batch: plain_last(model, y["h"], batch),
    )
    with pytest.raises(ValueError, match="layer costs mixes"):
        api.check_before_run(task, ONE)


@pytest.mark.full
@hypothesis.settings(max_examples=10)
@hypothesis.given(
    place=st.sampled_from(["x", "carry", "new carry", "nowhere"]),
    share=st.sampled_from([1.0, 1e-3, 1e-6]),
    shift=st.sampled_from([1, 2, 3]),
    reads=st.sampled_from(["a row", "all", "signs"]),
    number=st.integers(0, 1000),
)
def test_any_mix_is_found_and_nothing_else(place, share, shift, reads, number):
    def mix(a, dim):
        others = jnp.sign(a) if reads == "signs" else a
        others = a.mean(dim, keepdims=True) if reads == "all" else jnp.roll(others, shift, dim)
        return a + share * others

    def layer(carry, x, at):
        x = jnp.tanh(x + number) if number % 2 else nnx.softmax(jnp.cumsum(x, axis=0))
        x = mix(x, 1) if place == "x" else x
        x = x + (mix(carry, 0) if place == "carry" else carry)[None]
        after = carry + x.mean(0)
        return mix(after, 0) if place == "new carry" else after, x

    task = task_of(layer)
    if place == "nowhere":
        api.check_before_run(task, ONE)
        return
    with pytest.raises(ValueError, match="layer layer0 mixes"):
        api.check_before_run(task, ONE)


SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "embed_size": 16,
    "vocab_size": 24,
    "batch_size": 6,
    "seq_len": 8,
}


@pytest.mark.more
@pytest.mark.parametrize(
    "task",
    [
        AWD(**SMALL, window_mean=6, window_spread=1.0),
        LM(**SMALL, dtype="bfloat16", layer="gru", tie_embedding=True, packed=True),
        more(LM(**SMALL, dtype="bfloat16")),
        *(more(LM(**SMALL, layer=name)) for name in ("gru", "rglru", "mingru", "slstm", "mlstm")),
        more(LM(**SMALL | {"batch_size": 2})),
        more(LM(**SMALL | {"embed_size": 8}, num_buckets=2)),
        more(api.task_class(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")()),
        *(more(Regress((kind,))) for kind in [*MAKERS][:4]),
        *(more(Regress((kind,))) for kind in [*MAKERS][4:]),
        Regress(freeze="dense"),
    ],
    ids=lambda task: f"{task.name} {getattr(task, 'layer', getattr(task, 'kinds', ''))}",
)
def test_what_comes_with_jaxpar_mixes_no_rows(task):
    api.check_all_rows(task, ONE)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "task",
    [
        AWD(**SMALL, window_mean=6, window_spread=1.0),
        LM(**SMALL, dtype="bfloat16", layer="gru", tie_embedding=True, packed=True),
        *(
            more(LM(**SMALL, layer=name))
            for name in ("lstm", "rglru", "mingru", "slstm", "mlstm", "gated_delta")
        ),
        *(more(Regress((kind,))) for kind in MAKERS if kind not in ("block", "both ways")),
    ],
    ids=lambda task: f"{task.name} {getattr(task, 'layer', getattr(task, 'kinds', ''))}",
)
def test_what_comes_with_jaxpar_is_the_same_in_chunks_of_time(task):
    api.check_all_rows(task, TWO_CHUNKS)


def test_modules_of_jaxpar_alone_are_not_checked():
    with api.checks_of_rows() as checked:
        api.check_before_run(LM(vocab_size=64), TWO_CHUNKS)
        assert checked == []
        api.check_before_run(Regress(("gru",)), TWO_CHUNKS)
    assert checked == ["Regress"]  # its `first` and `last` are of the user's


def test_a_function_of_the_users_in_a_layer_of_jaxpars_is_checked():
    def both_ways(merge):
        def make(rngs):
            return Bidirectional(GRU(WIDTH, rngs=rngs), GRU(WIDTH, rngs=rngs), merge)

        return task_of(make=make)

    api.check_before_run(both_ways(jnp.add), ONE)
    with pytest.raises(ValueError, match=r"layer .*bidirectional.* mixes the rows of a batch"):
        api.check_before_run(both_ways(lambda y, z: y + batch_norm(z)), ONE)


def test_a_norm_over_groups_of_channels_is_no_mix_where_rows_are_first():
    class Rows(nnx.Module):
        time_major = False

        def __init__(self, rngs):
            self.embed = nnx.Linear(3, WIDTH, rngs=rngs)
            norm = lambda rngs: Stateless(nnx.GroupNorm(WIDTH, num_groups=4, rngs=rngs))  # noqa: E731
            self.layers = Stack([norm] * 2, rngs=rngs)

        def first(self, batch, at):
            return self.embed(batch["x"])

        def last(self, y, batch, at):
            return Sums(jnp.sum(y.mean((1, 2)) * batch["weight"]), jnp.sum(batch["weight"]))

    @dataclasses.dataclass(frozen=True)
    class Grouped(Task):
        def make_model(self, rngs):
            return Rows(rngs)

        def make_batches(self, split, seed=None):
            x = np.random.default_rng(0).normal(size=(40, 5, 3)).astype(np.float32)
            return ArrayBatches({"x": x}, 8, seed)

    api.check_before_run(Grouped(), ONE)


@pytest.mark.full
def test_a_run_looks_at_its_model_once_and_at_one_row_not_at_all(tmp_path):
    def run(name, task, mesh):
        fit(task, mesh, TrainConfig(num_steps=1, out_dir=str(tmp_path / name)), quiet=True)

    with api.checks_of_rows() as checked:
        run("one row", task_of(lambda carry, x, at: (carry, batch_norm(x)), batch_size=1), ONE)
        assert checked == []
        run("first", Regress(), "pp2")  # its step would look as well
        assert checked == ["Regress"]
        run("second", Regress(), "pp2")  # the task may read something that has changed
    assert checked == ["Regress"] * 2


def noise(x, scale):
    """Differs from run to run, as sums in an order that threads decide do on a GPU."""
    rng = np.random.default_rng()
    draw = jax.pure_callback(lambda: rng.normal(size=x.shape).astype(x.dtype) * scale, x)
    return x + draw


@pytest.mark.full
def test_a_layer_that_repeats_no_bits_is_judged_by_what_is_no_number():
    alone = task_of(lambda carry, x, at: (carry, noise(x, np.float32(1e-7))))
    api.check_before_run(alone, ONE)
    mixes = task_of(lambda carry, x, at: (carry, noise(batch_norm(x), np.float32(1e-7))))
    with pytest.raises(ValueError, match="layer layer0 mixes"):
        api.check_before_run(mixes, ONE)


def test_a_layer_that_gives_something_else_in_each_call_is_refused():
    with pytest.raises(
        ValueError, match=r"^layer layer0 gives other numbers each time .*\n.*at\.draw\("
    ):
        api.check_before_run(task_of(lambda carry, x, at: (carry, noise(x, np.float32(1)))), ONE)


def test_a_prediction_that_rounding_decides_is_no_mix():
    """One try of three, in which a count is off by one."""
    calls = []

    def off_by_one():
        calls.append(1)
        return np.float32(len(calls) == 2)

    def change(sums, y, batch):
        right = jax.pure_callback(off_by_one, jnp.float32(0)) + jnp.float32(y.shape[1])
        return sums._replace(metrics={"right": right})

    api.check_before_run(task_of(last=last_with(change)), ONE)
    assert len(calls) == 14  # three for each of two tries, then eight for the gradients
