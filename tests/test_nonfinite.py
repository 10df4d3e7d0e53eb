"""The law: a loss or gradient that is not finite changes nothing, on any mesh, and is told where it began."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api
from lib.models import Regress, Series

from jaxpar import (
    ArrayBatches,
    MeshConfig,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Report,
    Stack,
    Sums,
    Task,
    TrainConfig,
    fit,
    init_state,
    make_train_step,
)
from jaxpar.lm import LM, Batch, LanguageModel
from jaxpar.nn import Stateless, named_param

RARE = 23  # a word that only bad batches have
ROWS, STEPS = 8, 4
RATE = OptimizerConfig(warmup_steps=0)
TASK = LM(
    num_layers=4, hidden_size=8, embed_size=8, vocab_size=24, dropout=0.0, batch_size=ROWS, seq_len=STEPS,
    optimizer=RATE,
)  # fmt: skip


class Settings(NamedTuple):
    """As `make_train_step` takes them."""

    task: Task
    parallel: Parallel
    train: TrainConfig = TrainConfig()

    def state(self):
        return init_state(self.task, self.parallel)

    def origin(self, state, batch):
        return api.origin(self.task, self.parallel, state, batch)


def make_settings(data=1, stage=1, tensor=1, pipeline=None, optimizer=RATE, **layout):
    mesh = MeshConfig(data, stage, tensor, devices=tuple(range(data * stage * tensor)))
    return Settings(
        dataclasses.replace(TASK, optimizer=optimizer),
        Parallel(mesh, PipelineConfig(**{"num_chunks": 2, **(pipeline or {})}), **layout),
        TrainConfig(nonfinite="skip", max_skipped=1),
    )


INTERLEAVED = {"schedule": "interleaved", "num_groups": 2, "num_microbatches": 2, "remat": True}
SETTINGS = {
    "one device": make_settings(),
    "data, tensor, fsdp": make_settings(2, 1, 2, fsdp=True),
    "shares, gradient accumulation": make_settings(2, shares=(3, 1), update="sharded"),
    "all axes, sharded update": make_settings(
        2, 2, 2, {"num_microbatches": 2}, OptimizerConfig("adamw", warmup_steps=0), update="sharded"
    ),
    "uneven stages, update on the host": make_settings(
        2, 2, pipeline={"placement": (1, 3), "head": "last"}, update="host"
    ),
    "interleaved": make_settings(
        1, 2, 1, INTERLEAVED, OptimizerConfig("sgd", warmup_steps=0, momentum=0.9)
    ),
}


def batch_of(number, rare_rows=(), length=STEPS):
    tokens = np.random.default_rng(number).integers(0, RARE, (2, ROWS, length), np.int32)
    tokens[0, list(rare_rows), -1] = RARE
    return Batch(*tokens, starts=number == 0)


def change(state, settings, name, function):
    """The state with another array of parameters, named and shaped as it is stored."""
    name, (task, parallel, _) = f"params/{name}", settings
    array = np.array(api.stored(task, parallel, state)[name])
    function(array)
    return api.with_arrays(task, parallel, state, {name: array})


def poison(state, settings, word=RARE):
    def put_infinity(table_VE):
        table_VE[word] = np.inf

    return change(state, settings, "embedding/table", put_infinity)


def arrays_of(state):
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def assert_same(state, expected):
    for actual, array in zip(arrays_of(state), expected, strict=True):
        np.testing.assert_array_equal(actual, array)


SLOW_ROWS = ("shares, gradient accumulation", "interleaved")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.more if name in SLOW_ROWS else ()) for name in SETTINGS
    ],
)
def setup(request):
    settings = SETTINGS[request.param]
    return settings, make_train_step(*settings)


@pytest.mark.rows(1)
@pytest.mark.law
def test_a_bad_step_is_skipped_and_one_too_many_halts(setup):
    settings, step = setup

    def begin():
        return step(poison(settings.state(), settings), batch_of(0))[0]

    # What is to come out: the second step leaves no trace but in the counts and the carry.
    state = begin()
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros_like(a), a.sharding), state.carry)
    counts = {
        "step": jax.device_put(np.int32(2), state.step.sharding),
        "skipped": jax.device_put(np.int32(1), state.skipped.sharding),
    }
    state, metrics = step(dataclasses.replace(state, carry=zeros, **counts), batch_of(2))
    expected, good_losses = arrays_of(state), float(metrics.loss)
    assert np.isfinite(good_losses)

    state, reported = begin(), []
    for number, rare_rows in ((1, (0, 6)), (2, ()), (3, (5,)), (4, ()), (5, ())):
        state, metrics = step(state, batch_of(number, rare_rows))
        reported.append(metrics)  # the host does not look before all have been started
    reported = jax.device_get(reported)
    assert [int(metrics.skipped) for metrics in reported] == [1, 1, 2, 2, 2]
    assert not np.isfinite([reported[0].loss, reported[2].loss]).any()
    assert float(reported[1].loss) == good_losses
    api.audit(state)
    state = api.release(state, settings.train.allowed_skips)
    assert int(state.step) == 3
    assert_same(state, expected)

    origin = settings.origin(state, batch_of(3, (5, 7)))
    assert origin == ("the output of first", (5, 7), 3)
    assert_same(state, expected)
    state, metrics = step(state, batch_of(4))
    assert (int(state.step), np.isfinite(metrics.loss)) == (4, True)


def put_nan(where):
    def function(array):
        array[where] = np.nan

    return function


def scale(array):
    array *= 1e30


ORIGINS = {
    "first layer": ("layers/lstm/w_h", put_nan((0, 3, 1, 5)), "the output of layer 0 (lstm)"),
    "middle layer": ("layers/lstm/w_x", put_nan((2, 7, 0, 2)), "the output of layer 2 (lstm)"),
    "last layer": ("layers/lstm/b", put_nan((3, 2, 4)), "the output of layer 3 (lstm)"),
    "head": ("head/bias", put_nan(5), "the output of last"),
    # Logits and their loss are finite; so are the head's gradients, but not the norm of what is below.
    "on the way back": ("head/kernel", scale, "the gradient of layer 3 (lstm)"),
}


@pytest.mark.more
def test_the_first_module_is_named(setup):
    settings, step = setup
    batch = batch_of(0)
    for parameter, function, expected in ORIGINS.values():
        state = change(settings.state(), settings, parameter, function)
        place, rows, time = settings.origin(state, batch)
        assert place == expected
        if "lstm" in place and "output" in place:
            assert (rows, time) == (tuple(range(ROWS)), 0)
        state, metrics = step(state, batch)
        assert int(metrics.skipped) == 1
        assert np.isfinite(metrics.loss) == ("gradient" in place)
    if settings.parallel.mesh.stage > 1:  # a bucket's batch may be shorter
        task = dataclasses.replace(settings.task, num_buckets=2, bucket_multiple=STEPS // 2)
        settings = settings._replace(task=task)
        state = poison(settings.state(), settings)
        batch = batch_of(0, rare_rows=(2,), length=STEPS // 2)
        batch = batch._replace(lengths=np.full(ROWS, STEPS // 2, np.int32))
        assert settings.origin(state, batch) == ("the output of first", (2,), 1)


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["data", "hybrid"])
def test_a_network_for_images_is_halted_too(strategy):
    Digits = api.task_class(f"{Path(__file__).parent.parent}/examples/hybrid.py:Digits")
    sizes = {"channels": (4, 4), "widths": (8,), "batch_size": 8}
    task = Digits(strategy=strategy, **sizes, optimizer=RATE)
    settings = Settings(task, Parallel(MeshConfig(2, devices=(0, 1))))
    step = make_train_step(*settings)
    rng = np.random.default_rng(0)
    images, labels = rng.random((8, 8, 8), np.float32), rng.integers(0, 10, 8, np.int32)
    batch = {"image": images, "label": labels, "weight": np.ones(8, np.float32)}
    for parameter, where in (("convs/1/bias", "convs.1"), ("dense/0/kernel", "dense.0")):
        state = change(settings.state(), settings, parameter, put_nan(...))
        before = arrays_of(state)
        assert settings.origin(state, batch)[0] == f"the parameters of {where}"
        for _ in range(2):
            state, metrics = step(state, batch)
        assert int(metrics.skipped) == 1
        assert_same(api.release(state, settings.train.allowed_skips), before)


# ---- a task of one's own: two kinds of layers, no time, one of them without parameters ----


class Dense(nnx.Module):
    def __init__(self, *, rngs):
        self.kernel = named_param(0.5 * rngs.params.normal((4, 4)), ("input", "hidden"))

    def __call__(self, x):
        return x @ self.kernel[...]


class Root(nnx.Module):
    """Not finite where its inputs are negative, or their gradients where they are zero."""

    def __call__(self, carry, x, at):
        return carry, jnp.sqrt(x)


class Rooted(nnx.Module):
    time_major = False

    def __init__(self, *, rngs):
        self.scale = named_param(jnp.ones(4), ("hidden",))
        dense = lambda rngs: Stateless(Dense(rngs=rngs))  # noqa: E731
        self.layers = Stack([dense, lambda rngs: Root(), dense, dense], rngs=rngs)
        self.shift = named_param(jnp.zeros(4), ("hidden",))
        self.gain = named_param(jnp.ones(4), ("hidden",))

    def first(self, batch, at):
        return batch["x"] * self.scale[...][None]

    def last(self, y, batch, at):
        y = y + (self.gain[...] * self.shift[...])[None]
        return Sums(jnp.sum(jnp.square(y)), jnp.float32(y.shape[0]))


@dataclasses.dataclass(frozen=True)
class Roots(Task):
    optimizer: OptimizerConfig = RATE

    def make_model(self, rngs):
        return Rooted(rngs=rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": np.full((16, 4), 0.5, np.float32)}, 8, seed)


@pytest.mark.more
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_the_first_place_in_a_model_of_ones_own_is_named(mesh):
    num_devices = mesh[0] * mesh[1]
    layout = Parallel(MeshConfig(*mesh, devices=tuple(range(num_devices))))
    settings = Settings(Roots(), layout)
    state = settings.state()

    def identity(kernel):
        kernel[:] = np.eye(4)

    state = change(state, settings, "layers/stateless/module/kernel", identity)

    def origin(x=0.5, rows=(), state=state):
        x_B4 = np.full((8, 4), 0.5, np.float32)
        x_B4[list(rows)] = x
        batch = {"x": x_B4, "weight": np.ones(8, np.float32)}
        return settings.origin(state, batch)[:2]

    assert origin(np.nan, (6,)) == ("the output of first", (6,))
    assert origin(-1.0, (0, 5)) == ("the output of layer 1 (root)", (0, 5))
    assert origin(0.0, (3,)) == ("the gradient of layer 1 (root)", (3,))
    shifted = change(state, settings, "shift", put_nan(2))
    assert origin(state=shifted)[0] == "the output of last"
    steep = change(state, settings, "gain", lambda a: a.fill(1e20))
    assert origin(state=steep)[0] == "the gradient of shift"


class Drawn(Rooted):
    """Not finite with the parameters of a step, whatever those of the state are."""

    def draw(self, key):
        model = nnx.clone(self)
        model.scale[...] = model.scale[...] + jnp.nan
        return model


class DrawnRoots(Roots):
    def make_model(self, rngs):
        return Drawn(rngs=rngs)


def test_the_first_place_is_that_of_the_parameters_that_are_drawn():
    settings = Settings(DrawnRoots(), Parallel("dp1"))
    batch = DrawnRoots().make_batches("train", 0).batch(0)
    assert settings.origin(settings.state(), batch)[0] == "the output of first"


# ---- numbers that are put where the batch says ----


@jax.custom_vjp
def give_back(y, d_y, is_here):
    """y, and another gradient of it where it is here."""
    return y


give_back.defvjp(
    lambda y, *other: (y, other),
    lambda other, d_y: (jnp.where(other[1], other[0], d_y), jnp.zeros_like(d_y), None),
)


def put_value(y_TB4, at):
    """The value of the batch at its layer, row and time; on the way back, if the batch says so."""
    batch, times_T1 = at.batch, (at.time + jnp.arange(len(y_TB4)))[:, None]
    is_here_TB = (batch["layer"] == at.layer)[None] & (batch["time"][None] == times_T1)
    is_back_B, value_TB4 = (
        batch["is_back"] > 0,
        jnp.broadcast_to(batch["value"][None, :, None], y_TB4.shape),
    )
    y_TB4 = jnp.where((is_here_TB & ~is_back_B[None])[..., None], value_TB4, y_TB4)
    return give_back(y_TB4, value_TB4, (is_here_TB & is_back_B[None])[..., None])


class Summing(nnx.Module):
    """Adds up over time what comes in; in a row of the batch one number of one layer is not finite."""

    def __init__(self, *, rngs):
        self.kernel = named_param(0.3 * rngs.params.normal((4, 4)), ("input", "hidden"))

    def initial_carry(self, rows):
        return jnp.zeros((rows, 4))

    def __call__(self, h_B4, x_TB4, at):
        y_TB4 = h_B4[None] + jnp.cumsum(jnp.tanh(x_TB4 @ self.kernel[...]), axis=0)
        y_TB4 = put_value(y_TB4, at)
        return y_TB4[-1], y_TB4


class Sums4(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = Stack([lambda rngs: Summing(rngs=rngs)] * NUM_LAYERS, rngs=rngs)
        self.gain = named_param(jnp.ones(4), ("hidden",))

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        loss = jnp.square(put_value(y, at) * self.gain[...][None, None]).sum()
        return Sums(loss, jnp.float32(y.shape[0] * y.shape[1]))


NUM_LAYERS, LONG = 4, 8
UNITS = PipelineConfig(num_chunks=4, num_microbatches=2)
ADDED_UP = {
    "one device": Parallel(MeshConfig(devices=(0,))),
    "stages": Parallel(MeshConfig(1, 4, devices=(0, 1, 2, 3)), UNITS),
    "data": Parallel(MeshConfig(4, devices=(0, 1, 2, 3)), fsdp=True),
    "data, stages": Parallel(
        MeshConfig(2, 2, devices=(0, 1, 2, 3)),
        dataclasses.replace(UNITS, zero_bubble=True),
        shares=(3, 1),
    ),
}


@dataclasses.dataclass(frozen=True)
class Adding(Task):
    optimizer: OptimizerConfig = RATE

    def make_model(self, rngs):
        return Sums4(rngs=rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches(good_rows(16), ROWS, seed)


def good_rows(number):
    nowhere = np.full(number, -1, np.int32)
    x = np.random.default_rng(number).random((number, LONG, 4), np.float32)
    zeros = np.zeros(number, np.float32)
    return {
        "x": x,
        "layer": nowhere,
        "time": nowhere.copy(),
        "value": zeros,
        "is_back": zeros.copy(),
    }


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("layout", "times"),
    [("one device", 4), ("data, stages", 4)]
    + [pytest.param(layout, 25, marks=pytest.mark.more) for layout in ADDED_UP],
)
def test_a_number_is_traced_to_its_step_layer_time_and_row(layout, times):
    parallel = ADDED_UP[layout]
    settings = Settings(Adding(), parallel)
    step, rng = make_train_step(*settings), np.random.default_rng(times)
    for number in range(times):
        is_back = number % 2  # then also in what is after the layers
        bad_step, layer, time, row = map(int, rng.integers((4, NUM_LAYERS + is_back, LONG, ROWS)))
        state = settings.state()
        for step_number in range(6):
            rows = good_rows(ROWS) | {"weight": np.ones(ROWS, np.float32)}
            if step_number == bad_step:
                rows["layer"][row], rows["time"][row], rows["is_back"][row] = layer, time, is_back
                rows["value"][row] = rng.choice([np.nan, np.inf, -np.inf])
                bad = rows
            state, metrics = step(state, rows)
        assert int(metrics.skipped) == 1  # halted since
        assert int(state.step) == bad_step
        origin = settings.origin(api.release(state, 0), bad)
        part = "last" if layer == NUM_LAYERS else f"layer {layer} (summing)"
        what = "gradient" if is_back else "output"
        assert origin == (f"the {what} of {part}", (row,), time)


# ---- updates ----


@dataclasses.dataclass(frozen=True)
class Steep(LM):
    """A rate of the second step alone that no float32 can hold."""

    def make_optimizer(self, num_steps):
        return optax.adam(lambda count: jnp.where(count == 1, jnp.inf, jnp.float32(0.005)))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "skips"),
    [
        ("one device", False),
        ("all axes, sharded update", True),
        ("uneven stages, update on the host", True),
    ],
)
def test_an_update_that_is_not_finite_is_never_saved(name, skips, text, tmp_path):
    layout = SETTINGS[name].parallel
    fields = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    task = Steep(**fields | {"vocab_size": None, "corpus": str(text)})
    train = TrainConfig(
        8, nonfinite="skip" if skips else "stop", checkpoint_every=1, keep_best=False,
        out_dir=str(tmp_path / "run"),
    )  # fmt: skip
    message = (
        r"parameter \S+ is not finite after step 2: an update overflowed\. The last checkpoint is whole\.\n"
        r"Fix: resume with a lower learning rate"
    )
    with pytest.raises(FloatingPointError, match=message):
        fit(task, layout, train)
    assert api.run_steps(tmp_path / "run") == [1]
    arrays = arrays_of(api.run_state(tmp_path / "run"))
    assert np.isfinite(np.concatenate([array.ravel() for array in arrays])).all()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Gaps(Series):
    """Batch 1 has a gap, in one of its arrays."""

    gap = "x"

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step)
        if step == 1:
            batch[self.gap][3, 5] = np.nan
        return {name: a[rows] if np.ndim(a) else a for name, a in batch.items()}


@dataclasses.dataclass(frozen=True)
class WithGaps(Regress):
    gap: str = "x"

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        batches = Gaps(batches.arrays, 16, 8, seed)
        batches.gap = self.gap
        return batches


@pytest.mark.parametrize(("gap", "mesh"), [("x", "dp1"), ("y", "dp2pp2")])
def test_a_gap_in_the_data_is_told_of_the_data(gap, mesh, tmp_path):
    train = TrainConfig(3, out_dir=str(tmp_path / "run"))
    message = (
        rf"step 2 is not finite \(batch 1 of \d+ in epoch 0, from 0\); the first number that is not finite "
        rf"is in the data: batch\['{gap}'\] at time step 5, in row 3\. .*\nFix: give finite numbers"
    )
    with pytest.raises(FloatingPointError, match=message) as caught:
        fit(WithGaps(("dense", "dense"), gap=gap), mesh, train, quiet=True)
    assert "learning rate" not in str(caught.value)


class Unweighted(Series):
    """Nothing counts in steps 1 and 3, from 0."""

    def batch(self, step, rows=slice(None)):
        batch = super().batch(step, rows)
        return {**batch, "weight": batch["weight"] * np.float32(step not in (1, 3))}


class SometimesEmpty(Regress):
    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        return batches if seed is None else Unweighted(batches.arrays, 16, 8, seed)


@pytest.mark.more
@pytest.mark.parametrize("log_every", [1, 10])
def test_a_batch_in_which_nothing_counts_has_no_loss(log_every, tmp_path):
    class Told(Report):
        def __init__(self):
            self.warnings, self.steps, self.losses = [], [], []

        def warning(self, text):
            self.warnings.append(text)

        def progress(self, progress, num_steps):
            self.steps.append(progress.step)
            self.losses.append(progress.loss)

    train, report = TrainConfig(5, log_every=log_every, out_dir=str(tmp_path / "run")), Told()
    parallel = Parallel(MeshConfig(2, devices=(0, 1)))
    result = fit(SometimesEmpty(("dense",)), parallel, train, report=report)
    assert [np.isnan(loss) for loss in result.losses] == [False, True, False, True, False]
    assert report.warnings == [
        f"the weights of batch {step - 1} sum to 0, so step {step} has no loss" for step in (2, 4)
    ]
    assert report.steps == ([1, 3, 5] if log_every == 1 else [1, 5])
    assert np.isfinite(report.losses).all()
    assert min(report.losses) > 0
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if line["split"] == "train"] == report.steps
    assert int(result.state.skipped) == 0


class Overflowing(LanguageModel):
    """Not finite where it reads one word."""

    def first(self, batch, at):
        is_bad = jnp.asarray(batch.inputs_BT) == self.bad_word
        return jnp.where(is_bad[..., None], jnp.nan, super().first(batch, at))


@dataclasses.dataclass(frozen=True)
class Zebras(LM):
    bad_word: int = -1

    def make_model(self, rngs):
        model = Overflowing(self, rngs=rngs)
        model.bad_word = self.bad_word
        return model


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """Settings of a run after its first step, and the later steps, which read a word that overflows."""
    text, out_dir = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("runs") / "run"
    lines = ["the cat sat on the mat", "a dog ran to the cat"] * 60
    (text / "valid.txt").write_text("\n".join(lines[:10]))
    (text / "test.txt").write_text("\n".join(lines[:10]))
    for number in (33, 57, 71):
        lines[number] = "the zebra ran"
    (text / "train.txt").write_text("\n".join(lines))
    optimizer = OptimizerConfig(warmup_steps=0, lr_schedule="constant")
    fields = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    fields |= {"num_layers": 2, "vocab_size": None, "batch_size": 4, "seq_len": 8}
    task = Zebras(**fields | {"corpus": str(text), "optimizer": optimizer})
    word = task.read_text().vocabulary.words.index("zebra")
    task = dataclasses.replace(task, bad_word=word)
    train = TrainConfig(num_steps=1, out_dir=str(out_dir), log_every=5, checkpoint_every=0)
    parallel = Parallel(MeshConfig(devices=(0,)))
    fit(task, parallel, train)
    settings, batches = Settings(task, parallel, train), task.make_batches("train", train.seed)
    bad = [step for step in range(1, 21) if (batches.batch(step).inputs_BT == word).any()]
    assert len(bad) > 1
    assert bad[-1] < 19
    assert all(step % 5 for step in bad)  # steps are under way before the host looks
    return settings, bad


def go_on(settings, out_dir, num_steps, learning_rate=None, **train):
    task, parallel, before = settings
    if not out_dir.exists():
        shutil.copytree(before.out_dir, out_dir)
    if learning_rate is not None:
        optimizer = dataclasses.replace(task.optimizer, learning_rate=learning_rate)
        task = dataclasses.replace(task, optimizer=optimizer)
    train = dataclasses.replace(before, num_steps=num_steps, out_dir=str(out_dir), **train)
    return fit(task, parallel, train, resume=True)


@pytest.mark.full
@pytest.mark.usefixtures("compile_once")
def test_the_state_is_saved_before_its_origin_is_searched_for(poisoned, tmp_path):
    """The search may need more memory than there is."""
    (settings, bad), error = poisoned, MemoryError("too large")
    with api.search_for_origin_raises(error), pytest.raises(MemoryError, match="too large"):
        go_on(settings, tmp_path / "run", 20)
    assert api.run_steps(tmp_path / "run") == [1, bad[0]]


@pytest.mark.full
@pytest.mark.usefixtures("compile_once")
def test_a_run_stops_with_the_state_before_and_goes_on_if_told_to(poisoned, tmp_path):
    (settings, bad), folder = poisoned, tmp_path / "run"
    message = (
        rf"(?s)the loss of step {bad[0] + 1} is not finite \(batch {bad[0]} of \d+ in epoch 0, from 0\); the "
        r"first number that is not finite is in the output of first at time step \d, in row \d\. .*"
        rf"--train\.out-dir {folder} and a lower learning rate, .*, or --train\.nonfinite skip with a "
    )
    for _ in range(2):  # again the same batch
        with pytest.raises(FloatingPointError, match=message):
            go_on(settings, folder, 20)
    assert api.run_steps(folder) == [1, bad[0]]
    assert_same(
        api.run_state(folder), arrays_of(go_on(settings, tmp_path / "before", bad[0]).state)
    )

    result = go_on(settings, folder, 20, nonfinite="skip", learning_rate=0.01)
    assert np.flatnonzero(~np.isfinite(result.losses)).tolist() == [n - bad[0] for n in bad]
    assert (int(result.state.step), int(result.state.skipped)) == (20, len(bad))
    lines = [line for line in lines_of(folder) if line["split"] == "skipped"]
    assert [line["step"] for line in lines] == [n + 1 for n in bad]
    assert [line["skipped"] for line in lines] == list(range(1, len(bad) + 1))

    with pytest.raises(
        FloatingPointError,
        match=rf"step {bad[-1] + 1} is not (?s:.*) larger --train\.max-skipped \(now {len(bad) - 1}\)\.",
    ):
        go_on(settings, tmp_path / "limit", 20, nonfinite="skip", max_skipped=len(bad) - 1)
    assert api.run_steps(tmp_path / "limit")[-1] == bad[-1]

    # What has been skipped does not stop a run that may skip no more.
    assert int(go_on(settings, folder, 21).state.step) == 21
