"""Names of a user's arrays and metrics: what they mean to jaxpar, or a refusal before anything runs."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.models import Dense, Regress, Regression

import jaxpar
from jaxpar import (
    ArrayBatches,
    IteratorBatches,
    OptimizerConfig,
    SeriesBatches,
    Stack,
    Sums,
    Task,
    TrainConfig,
)
from jaxpar.nn import GRU

pytestmark = pytest.mark.fresh  # a warning is given once for a setup

N, T = 12, 4
X = np.random.default_rng(0).normal(size=(N, T, 3)).astype(np.float32)
LENGTHS = [3, 5, 1, 3]  # of sequences, N steps in all

# Batches of jaxpar's, of arrays of N rows or steps.
MAKERS = {
    "rows": lambda arrays: ArrayBatches(arrays, 5),
    "rows in another order": lambda arrays: ArrayBatches(arrays, 5, 0),
    "series": lambda arrays: SeriesBatches(arrays, 2, T, warmup=1),
    "packed": lambda arrays: api.PackedBatches(arrays, LENGTHS, 2, T),
    "buckets": lambda arrays: api.BucketedBatches(arrays, LENGTHS, 2, (3, 5)),
    "stream": lambda arrays: IteratorBatches(
        lambda: [{n: a[i : i + 5] for n, a in arrays.items()} for i in (0, 5, 10)], 5
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_of_ones_own_multiply_those_of_batches(kind):
    own = np.linspace(0.5, 2.0, N)
    own[0] = 7.0  # rows of padding are copies of the first
    number = np.arange(N)
    plain = MAKERS[kind]({"x": X[:, 0], "number": number})
    weighted = MAKERS[kind]({"x": X[:, 0], "number": number, "weight": own})
    is_padded = False
    for step in range(2 if kind == "rows in another order" else 3):
        one, other = plain.batch(step), weighted.batch(step)
        is_padded |= 0 in one["weight"]
        assert one["weight"].shape == other["weight"].shape
        np.testing.assert_allclose(other["weight"], one["weight"] * own[one["number"]], rtol=1e-6)
    assert is_padded or kind == "rows in another order"


def test_weights_of_steps_and_those_that_are_not_finite():
    own = np.full((N, T), 2)
    own_of_steps = np.full(N, np.nan, np.float32)
    own_of_steps[1:] = 0.5
    rows = ArrayBatches({"x": X, "weight": own}, 8).batch(1)
    assert rows["weight"].dtype == np.float32
    np.testing.assert_array_equal(rows["weight"], [[2] * T] * 4 + [[0] * T] * 4)
    series = SeriesBatches({"x": X[:, 0], "weight": own_of_steps}, 1, 8, warmup=2).batch(0)
    np.testing.assert_array_equal(series["weight"], [[0, 0] + [0.5] * 6])  # the first is warm-up


def test_resets_of_ones_own_are_added_to_those_of_packed_sequences():
    own = np.zeros(N, np.int32)
    own[1] = 3  # the second step of the first sequence
    plain = api.PackedBatches({"x": X[:, 0]}, LENGTHS, 2, T).batch
    batch = api.PackedBatches({"x": X[:, 0], "n": np.arange(N), "resets": own}, LENGTHS, 2, T).batch
    for step in range(2):
        added = (batch(step)["n"] == 1) & (batch(step)["weight"] > 0)
        np.testing.assert_array_equal(batch(step)["resets"], plain(step)["resets"] | added)


# Arrays [N, ...] that mean something else.
WRONG = [
    ("rows", "starts", np.ones(N, bool)),
    ("rows", "rate", np.ones(N)),
    ("rows", "resets", np.ones(N, int)),
    ("rows", "weight", X),
    ("rows", "weight", np.array(["a"] * N)),
    ("series", "starts", np.ones(N, bool)),
    ("series", "rate", np.ones(N)),
    ("series", "resets", X[:, 0]),
    ("series", "weight", X[:, 0]),
    ("packed", "starts", np.ones(N, bool)),
    ("buckets", "rate", np.ones(N)),
]


@pytest.mark.parametrize(("kind", "name", "array"), WRONG)
def test_arrays_of_these_names_that_are_something_else_are_refused(kind, name, array):
    with pytest.raises(ValueError, match=rf"arrays\['{name}'\].* means .*\nFix: rename your array"):
        MAKERS[kind]({"x": X, name: array})


class Model(nnx.Module):
    def __init__(self, task, rngs):
        self.task = task
        self.time_major = task.has_time
        make = {True: lambda rngs: GRU(3, rngs=rngs), False: lambda rngs: Same()}[task.has_state]
        self.layers, self.scale = Stack([make], rngs=rngs), nnx.Param(jnp.ones(3))

    def first(self, batch, at):
        return batch["x"] * self.scale[...].reshape((1,) * (batch["x"].ndim - 1) + (3,))

    def last(self, y, batch, at):
        return Sums(
            jnp.sum(y), jnp.float32(y.size), {n: jnp.sum(y) for n in self.task.metric_names}
        )


class Same(nnx.Module):
    def __call__(self, carry, x, at):
        return carry, x


class Own:
    """Batches of a user's, in which a row is of any meaning."""

    batch_size, num_windows = 4, 2

    def __init__(self, **more):
        self.more = more

    def batch(self, step, rows=slice(None)):
        batch = {"x": X[:4], **self.more}
        return {name: array[rows] if np.ndim(array) else array for name, array in batch.items()}


@dataclasses.dataclass(frozen=True)
class Named(Task):
    batches: object = None
    metric_names: tuple[str, ...] = ()
    reported: tuple[tuple[str, float], ...] = ()
    has_state: bool = False
    has_time: bool = True
    unit = "steps"
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=0)

    def make_model(self, rngs):
        return Model(self, rngs)

    def make_batches(self, split, seed=None):
        return self.batches or ArrayBatches({"x": X}, 4, seed)

    def metrics(self, loss, means):
        return {**super().metrics(loss, means), **dict(self.reported)}


OF_BATCHES = {
    "starts": np.zeros(4, bool),
    "resets": np.zeros((4, T, 3), np.int32),
    "rate": np.ones(1, np.float32),
    "weight": np.float32(1.0),
}


@pytest.mark.parametrize("name", OF_BATCHES)
def test_batches_of_ones_own_are_looked_at_before_a_run(name, tmp_path):
    task = Named(Own(**{name: OF_BATCHES[name]}))
    told = rf"batch\['{name}'\] of task Named is .* means .*\nFix: rename your array"
    with pytest.raises(ValueError, match=told):
        jaxpar.init_state(task, "dp1")
    with pytest.raises(ValueError, match=told):
        fit_one_step(task, tmp_path / "run")
    stream = IteratorBatches(lambda: [Own(**{name: OF_BATCHES[name]}).batch(0)], 4)
    with pytest.raises(ValueError, match=rf"batch\['{name}'\] of the stream .* means "):
        stream.batch(0)
    assert not (tmp_path / "run").exists()


def fit_one_step(task, folder):
    jaxpar.fit(task, "dp1", TrainConfig(num_steps=1, out_dir=str(folder)), quiet=True)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.zeros(())])
def test_starts_is_a_bool_or_a_whole_number(value):
    with pytest.raises(ValueError, match=r"float.* with 0 dims, but 'starts' means one bool"):
        jaxpar.init_state(Named(Own(starts=value)), "dp1")


def test_what_these_names_mean_is_taken():
    weights = np.ones((4, T), np.int32), np.ones(4, bool), jnp.ones(4, jnp.bfloat16)
    resets = np.zeros((4, T), bool), np.zeros((4, T), np.float32)
    for weight in weights:
        jaxpar.init_state(Named(Own(weight=weight, starts=True, rate=2)), "dp1")
    for reset in resets:
        own = Own(resets=reset, starts=np.int32(1), rate=np.float32(0.5))
        jaxpar.init_state(Named(own), "dp1")


NUMBERS = (
    "split", "step", "loss", "weight", "grad_norm", "learning_rate", "seconds", "mfu", "skipped",
    "grad norm", "steps_per_second", "steps per second",
)  # fmt: skip


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", NUMBERS)
def test_metrics_that_are_named_as_other_numbers_of_a_run_are_refused(name, tmp_path):
    tasks = [Named(metric_names=(name,))]
    if name != "loss":
        tasks.append(Named(reported=((name, 1.0),)))
    for task in tasks:
        with pytest.raises(ValueError, match=rf"task Named gives a metric '{name}'.*\nFix: rename"):
            fit_one_step(task, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_two_metrics_that_are_written_under_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives a metric 'a_b', but another number"):
        fit_one_step(Named(metric_names=("a b", "a_b")), tmp_path / "run")


def test_the_loss_is_the_loss():
    assert Task().metrics(1.5, {"loss": 7.0, "error": 2.0}) == {"loss": 1.5, "error": 2.0}


# Batches, whether the model has state, and time, and whether it is told that its state begins anew.
TOLD = [
    (Own(), True, True, True),
    (Own(resets=np.zeros((4, T), bool)), True, True, True),
    (IteratorBatches(lambda: [Own().batch(0)] * 9, 4), True, True, True),
    (Own(starts=False), True, True, False),
    (Own(starts=True), True, True, False),
    (Own(), False, True, False),
    (Own(), False, False, False),
    (ArrayBatches({"x": X}, 4, 0), True, True, False),
    (SeriesBatches({"x": X[:, 0]}, 2, T, 0), True, True, False),
    (api.PackedBatches({"x": X[:, 0]}, LENGTHS, 2, T, 0), True, True, False),
    (api.BucketedBatches({"x": X[:, 0]}, LENGTHS, 2, (5,), 0), True, True, False),
]


@pytest.mark.rows(7)
@pytest.mark.parametrize(("batches", "has_state", "has_time", "is_told"), TOLD)
def test_a_state_that_begins_anew_in_every_batch_is_told(
    batches, has_state, has_time, is_told, caplog
):
    task = Named(batches, has_state=has_state, has_time=has_time)
    step, state = jaxpar.make_train_step(task, "dp1"), jaxpar.init_state(task, "dp1")
    batch = batches.batch(0)
    for _ in range(2):
        state, _ = step(state, batch)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == is_told
    for text in told:
        assert "batches of task Named have no 'starts', so the state of layer gru" in text
        assert "Fix: add a scalar 'starts' to each batch" in text


@dataclasses.dataclass(frozen=True)
class Alone(Named):
    has_state: bool = True

    def make_batches(self, split, seed=None):
        return Own()


@pytest.mark.more
@pytest.mark.parametrize("use", ["fit", "step", "gradient"])
def test_a_run_and_a_loop_of_ones_own_are_told_once(use, caplog, tmp_path):
    task = Alone()
    with caplog.at_level(logging.WARNING):
        if use == "fit":
            train = TrainConfig(num_steps=2, out_dir=str(tmp_path / "run"))
            jaxpar.fit(task, "dp1", train, quiet=True)
        else:
            make = {"step": jaxpar.make_train_step, "gradient": jaxpar.value_and_grad}[use]
            step, state = make(task, "dp1"), jaxpar.init_state(task, "dp1")
            assert not caplog.records
            for number in range(2):
                found = step(state, Own().batch(number))
                state = found[0] if use == "step" else found[0][1][0]
    told = [record for record in caplog.records if "'starts'" in record.getMessage()]
    assert len(told) == 1


# ---- names of methods ----


@pytest.mark.parametrize(
    ("owner", "name", "value", "meant"),
    [
        ("model", "last_parts", lambda self, y, batch, at: None, "last_part"),
        ("model", "prediction_part", lambda self, y, batch, at: None, "predict_part"),
        ("layer", "init_carry", lambda self, rows: (), "initial_carry"),
        ("layer", "whole_windows", True, "whole_window"),
        ("task", "metric", lambda self, loss, means: {}, "metrics"),
        ("task", "evaluate_params", lambda self, params, state: params, "evaluated_params"),
        ("report", "evaluations", lambda self, *what: None, "evaluation"),
    ],
)
def test_a_name_that_is_almost_an_optional_one_is_refused(owner, name, value, meant):
    def of(base, kind):
        return type(base.__name__, (base,), {name: value} if owner == kind else {})

    layer, model, task = of(Dense, "layer"), of(Regression, "model"), of(Regress, "task")

    def make_model(self, rngs):
        made = model((), rngs=rngs)
        made.layers = Stack([lambda rngs: layer(rngs=rngs)], rngs=rngs)
        return made

    task.make_model = make_model
    report = of(jaxpar.Report, "report")()
    with pytest.raises(ValueError, match=f" has {name}, which .*\nFix: rename it to {meant},"):
        jaxpar.fit(task(), "dp1", TrainConfig(1), report=report)
