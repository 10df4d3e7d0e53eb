"""What a process has traced before changes no number of what it does next: as in a new process."""

import dataclasses
import functools
import sys
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from lib import api

import jaxpar
from jaxpar import ArrayBatches, Parallel, Stack, Sums, Task, TrainConfig, make_predict_step
from jaxpar.analysis import inspect_function

pytestmark = pytest.mark.fresh

X = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)
LIKE = {"y": 1.0}  # what `ByData` reads
FACTOR = 1.0  # and what `ByGlobal` does
CONSTANTS = types.ModuleType("constants_of_a_user")
OPTIMIZER = optax.sgd(lambda _: 0.1 * CONSTANTS.rate)


class Scaled(nnx.Module):
    """A layer without state: factor tanh(w x)."""

    def __init__(self, factor, *, rngs):
        self.factor, self.kernel = factor, nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, carry, x, at):
        return carry, self.factor * jnp.tanh(self.kernel(x))


class Model(nnx.Module):
    def __init__(self, task, rngs):
        self.task, self.layers = task, Stack(task.makers() * 2, rngs=rngs)

    def first(self, batch, at):
        return batch["x"]

    def last(self, y, batch, at):
        error = (jnp.sum(y, (0, 2)) - batch["y"]) ** 2 * batch["weight"]
        return Sums(self.task.of_loss() * jnp.sum(error), jnp.sum(batch["weight"]))

    def predict(self, y, batch, at):
        return {"y": self.task.of_loss() * y}


@dataclasses.dataclass(frozen=True)
class Plain(Task):
    """Factors as fields, by which tasks differ."""

    loss: float = 1.0
    layer: float = 1.0
    rate: float = 1.0
    data: float = 1.0
    mean: float = 1.0

    def of_loss(self):
        return self.loss

    def makers(self):
        return [lambda rngs: Scaled(self.layer, rngs=rngs)]

    def make_model(self, rngs):
        return Model(self, rngs)

    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": X, "y": self.data * X[:, 0, 0]}, 4, seed)

    def make_optimizer(self, num_steps):
        return optax.sgd(0.1 * self.rate)

    def evaluated_params(self, params, opt_state):
        params = super().evaluated_params(params, opt_state)
        return jax.tree.map(lambda a: self.mean * a, params)


class ByGlobal(Plain):
    def of_loss(self):
        return FACTOR


class ByMethod(Plain):
    pass


@dataclasses.dataclass(frozen=True)
class ByField(Plain):
    hidden: object = dataclasses.field(default=None, compare=False)

    def of_loss(self):
        return self.hidden


class ByModule(Plain):
    def of_loss(self):
        return CONSTANTS.factor


class ByClosure(Plain):
    def makers(self):
        return [MAKER]


class ByClass(Plain):
    def makers(self):
        return [lambda rngs: OfClass(1.0, rngs=rngs)]


class OfClass(Scaled):
    pass


class ByOptimizer(Plain):
    def make_optimizer(self, num_steps):
        return OPTIMIZER


class ByData(Plain):
    def make_batches(self, split, seed=None):
        return ArrayBatches({"x": X, "y": LIKE["y"] * X[:, 0, 0]}, 4, seed)


class ByMean(Plain):
    def evaluated_params(self, params, opt_state):
        return jax.tree.map(lambda a: CONSTANTS.mean * a, params)


def make_maker():
    factor = 1.0

    def maker(rngs):
        return Scaled(factor, rngs=rngs)

    def change(value):
        nonlocal factor
        factor = value

    return maker, change


MAKER, change_maker = make_maker()


def change_class(value):
    OfClass.__call__ = lambda self, carry, x, at: (carry, value * jnp.tanh(self.kernel(x)))


def change_method(value):
    ByMethod.of_loss = lambda self: value


# What changes, the field of `Plain` that says the same, and how it is changed.
CHANGES = {
    "a global": (ByGlobal(), "loss", lambda value: globals().update(FACTOR=value)),
    "a method": (ByMethod(), "loss", change_method),
    "a field that is not compared": (ByField(), "loss", None),
    "a constant of a module": (ByModule(), "loss", lambda v: setattr(CONSTANTS, "factor", v)),
    "a variable of a maker": (ByClosure(), "layer", change_maker),
    "a method of a layer": (ByClass(), "layer", change_class),
    "the rate of an optimizer": (ByOptimizer(), "rate", lambda v: setattr(CONSTANTS, "rate", v)),
    "the data": (ByData(), "data", lambda value: LIKE.update(y=value)),
    "what is evaluated": (ByMean(), "mean", lambda value: setattr(CONSTANTS, "mean", value)),
}


def step(task, _):
    state, losses = jaxpar.init_state(task, "dp1"), []
    run, batches = jaxpar.make_train_step(task, "dp1"), task.make_batches("train", 0)
    for number in range(2):
        state, metrics = run(state, batches.batch(number))
        losses.append(metrics.loss)
    return losses


def gradient(task, _):
    state, batch = jaxpar.init_state(task, "dp1"), task.make_batches("train", 0).batch(0)
    (loss, _), grads = jaxpar.value_and_grad(task, "dp1")(state, batch)
    return [loss, *jax.tree.leaves(grads)]


def evaluate(task, _):
    state, batch = jaxpar.init_state(task, "dp1"), task.make_batches("valid").batch(0)
    return [api.evaluation(task, Parallel("dp1"), state, batch)[0]["loss"]]


def predict(task, _):
    state, batch = jaxpar.init_state(task, "dp1"), task.make_batches("valid").batch(0)
    return [make_predict_step(task, "dp1")(state, batch)[1]["y"]]


def fit(task, folder):
    train = TrainConfig(num_steps=2, out_dir=str(folder), checkpoint_every=0)
    result = jaxpar.fit(task, "dp1", train, quiet=True)
    return [*result.losses, *(own.loss for own in result.evaluations.values())]


@functools.cache
def expected(use, field, value):
    with tempfile.TemporaryDirectory() as folder:
        return use(Plain(**{field: value}), f"{folder}/run")


SEEN = {  # which calls see a change of a field
    "loss": (step, gradient, evaluate, predict, fit),
    "layer": (step, gradient, evaluate, predict, fit),
    "rate": (step, fit),
    "data": (step, fit),
    "mean": (fit,),
}
ROWS = [
    pytest.param(what, use, marks=pytest.mark.more if use not in (SEEN[field][0], *soon) else ())
    for what, (_, field, _) in CHANGES.items()
    for soon in [SEEN[field] if what == "a global" else ()]
    for use in SEEN[field]
]


@pytest.mark.more
@pytest.mark.parametrize(("what", "use"), ROWS)
def test_what_has_changed_is_seen_by_the_next_call(what, use, tmp_path):
    task, field, change = CHANGES[what]
    found = []
    for value in (1.0, 3.0):
        if change is None:
            task = dataclasses.replace(task, hidden=value)
        else:
            change(value)
        found.append(use(task, tmp_path / f"{value}"))
        for ours, of_plain in zip(found[-1], expected(use, field, value), strict=True):
            np.testing.assert_allclose(ours, of_plain, rtol=1e-6)
    assert not np.allclose(found[0][-1], found[1][-1], rtol=1e-2)


@pytest.fixture(autouse=True)
def as_at_first():
    vars(CONSTANTS).update(factor=1.0, rate=1.0, mean=1.0)
    yield
    for task, _, change in CHANGES.values():
        assert task == type(task)()  # what changes is nothing that tasks are compared by
        if change is not None:
            change(1.0)


def test_the_number_of_layers_may_change_too():
    """A plan, an estimate and a report are of the model as it is now."""

    class Deep(Plain):
        def makers(self):
            return [lambda rngs: Scaled(1.0, rngs=rngs)] * CONSTANTS.deep

    seconds = []
    for deep in (1, 2):
        CONSTANTS.deep = deep
        seconds.append(jaxpar.planning.estimate_step(Deep(), "dp1").parts["layers"])
        assert api.summary(Deep(), Parallel("dp1"))["layers"].split()[0] == f"{2 * deep}"
    assert seconds[1] == pytest.approx(2 * seconds[0])


@pytest.mark.parametrize("update", ["replicated", "host"])
def test_an_optimizer_begins_as_it_says_now(update):
    begins = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda a: 0 * a + CONSTANTS.factor, params),
        lambda updates, state, params=None: (updates, state),
    )

    class Begins(Plain):
        def make_optimizer(self, num_steps):
            return begins

    for value in (1.0, 2.0):
        CONSTANTS.factor = value
        state = jaxpar.init_state(Begins(), Parallel("dp1", update=update))
        for leaf in jax.tree.leaves(state.opt_state):
            np.testing.assert_array_equal(leaf, np.full(leaf.shape, value))


def test_a_function_that_is_inspected_is_traced_now():
    def function(x):
        return x @ x if CONSTANTS.factor == 1 else x

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    flops = []
    for value in (1.0, 2.0):
        CONSTANTS.factor = value
        flops.append(inspect_function(function, x).flops or 0)
    assert flops[0] >= 2 * 8**3 > flops[1]


TASK = """
import dataclasses
import helper_of_a_task
from helper_of_a_task import FACTOR
from jaxpar import Task

@dataclasses.dataclass(frozen=True)
class Own(Task):
    def factors(self):
        return helper_of_a_task.FACTOR, FACTOR
"""


def test_a_file_that_a_task_imports_may_change(tmp_path):
    file, helper = tmp_path / "own.py", tmp_path / "helper_of_a_task.py"
    file.write_text(TASK)
    helper.write_text("FACTOR = 1\n")
    first = api.task_class(f"{file}:Own")
    assert api.task_class(f"{file}:Own") is first  # nothing has changed
    helper.write_text("FACTOR = 1 + 1\n")
    second = api.task_class(f"{file}:Own")
    assert (first().factors(), second().factors()) == ((1, 1), (2, 2))
    file.write_text(TASK + "\n# another text\n")
    third = api.task_class(f"{file}:Own")
    assert third is not second
    assert third().factors() == (2, 2)
    assert api.spec_of(first()) == api.spec_of(third()) == f"{file}:Own"
    del sys.modules["helper_of_a_task"]


@pytest.mark.full
def test_a_run_that_is_loaded_again_is_of_the_files_as_they_are(tmp_path, monkeypatch):
    file, helper = tmp_path / "own.py", tmp_path / "factor_of_a_task.py"
    monkeypatch.syspath_prepend(tmp_path.parent)
    helper.write_text("FACTOR = 1.0\n")
    file.write_text(
        f"import sys\nsys.path.append({str(tmp_path)!r})\n"
        "import dataclasses\nimport factor_of_a_task\nfrom test_changes import Plain\n\n"
        "@dataclasses.dataclass(frozen=True)\nclass Own(Plain):\n"
        "    def of_loss(self):\n        return factor_of_a_task.FACTOR\n"
    )
    fit(api.task_class(f"{file}:Own")(), tmp_path / "run")
    losses, predictions = [], []
    for text in ("1.0", "10.00"):
        helper.write_text(f"FACTOR = {text}\n")
        run = jaxpar.load_run(tmp_path / "run")
        losses.append(run.evaluate("valid").loss)
        predictions.append(run.predict("valid", quiet=True)["y"])
    np.testing.assert_allclose(losses[1], 10 * losses[0], rtol=1e-5)
    np.testing.assert_allclose(predictions[1], 10 * predictions[0], rtol=1e-5)
