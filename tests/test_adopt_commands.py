"""Each command, with a Flax model as people write it, in a file with its task."""

import contextlib
import functools
import io
import json
import re
import shlex

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from lib import api, gpt
from lib.gpt import ARRAYS, PLACES, ROWS, Words, arrays_of, plain
from lib.runs import train_losses
from orbax import checkpoint as orbax

import jaxpar
from jaxpar import load_run

pytestmark = pytest.mark.usefixtures("compile_once")

TASK = f"{gpt.__file__}:Words"
RATE = 0.01
TRAIN = [
    "--optimizer.lr-schedule", "constant", "--optimizer.learning-rate", str(RATE),
    "--train.log-every", "1", "--train.clip-norm", "0",
]  # fmt: skip
LOSS = re.compile(r"^step 1/1  loss +(\S+)", re.MULTILINE)


@pytest.fixture(autouse=True, scope="module")
def models_of_users_convert_and_broadcast():
    """As JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def jaxpar_prints(*arguments):
    """What a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert api.command(*map(str, arguments)) == 0, printed.getvalue()
    return printed.getvalue()


def train(folder, num_steps, *more):
    options = ["--train.num-steps", num_steps, "--train.out-dir", folder]
    return jaxpar_prints("train", *(() if "--resume" in more else (TASK, *TRAIN)), *options, *more)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps, and what it printed."""
    folder = tmp_path_factory.mktemp("adopted") / "run"
    return folder, train(folder, 3, "--mesh", "dp2pp2")


@functools.cache
def plain_losses():
    """Those of three steps of plain Flax, and the model after them."""
    task, optimizer = Words(), optax.adam(RATE)
    graphdef, params, others = nnx.split(plain(), nnx.Param, ...)
    state, batches, losses = optimizer.init(params), task.make_batches("train", 0), []

    @jax.jit
    @jax.value_and_grad
    def mean(params, batch):
        sums = task.loss(nnx.merge(graphdef, params, others, copy=True), batch)
        return sums.loss / sums.weight

    for step in range(3):
        loss, grads = mean(params, batches.batch(step))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, nnx.merge(graphdef, params, others)


def test_train_does_as_plain_flax(run):
    folder, printed = run
    losses, model = plain_losses()
    np.testing.assert_allclose(train_losses(folder), losses, 1e-5)
    for pattern in (
        r"^layers +4 \(first, 0-1 \| 2-3, last\)",
        r"^each stage +stores all of embed.*; all of head",
        r"^blocks\.0-3\.mlp\.0\.kernel +4x8x16 ",
        r"^embed\.embedding +16x8 ",
    ):
        assert re.search(pattern, printed, re.MULTILINE), f"{pattern} is not in:\n{printed}"
    found = arrays_of(load_run(folder).model())
    for name, value in arrays_of(model).items():
        np.testing.assert_allclose(found[name], value, 1e-3, 1e-5, err_msg=name)


def test_evaluate_prints_what_the_run_has(run):
    folder, printed = run
    rows = jaxpar_prints("evaluate", folder).splitlines()[-2:]
    assert [row.split()[0] for row in rows] == ["valid", "test"]
    assert set(rows) <= {*printed.splitlines()}
    assert load_run(folder).evaluate("valid").loss == pytest.approx(
        float(rows[0].split()[1]), abs=1e-3
    )


def test_predict_writes_what_the_users_model_returns(run, tmp_path):
    folder, _ = run
    jaxpar_prints("predict", folder, "test", "-o", tmp_path / "out")
    found = np.load(tmp_path / "out" / "output.npy")
    expected = load_run(folder).model()(ARRAYS["x"][PLACES["test"]])
    assert found.shape == (ROWS, gpt.TIME, gpt.VOCAB)
    np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


def test_a_run_goes_on_on_another_mesh(run, tmp_path):
    folder = tmp_path / "half"
    train(folder, 1, "--mesh", "pp4")
    printed = train(folder, 3, "--resume", "--mesh", "dp4")
    assert "resumed at step 1" in printed
    np.testing.assert_allclose(train_losses(folder), train_losses(run[0]), 1e-5)


def test_weights_go_out_and_come_in(run, tmp_path):
    folder, _ = run
    file, saved = tmp_path / "model.safetensors", tmp_path / "flax"
    assert str(file) in jaxpar_prints("export", folder, "-o", file)
    model = load_run(folder).model()
    exported, expected = safetensors.numpy.load_file(file), arrays_of(model)
    assert exported.keys() == arrays_of(plain()).keys()
    assert all(np.array_equal(exported[name], value) for name, value in expected.items())
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(saved, nnx.state(model))
    losses = set()
    for n, start in enumerate((file, saved, folder)):
        printed = train(tmp_path / str(n), 1, "--mesh", "dp2", "--start", start)
        assert re.search(r"^taken +blocks\.0-3\.norm\.scale +8 ", printed, re.MULTILINE), printed
        losses.add(LOSS.search(printed)[1])
    task, batch = Words(), Words().make_batches("train", 0).batch(0)
    sums = task.loss(model, batch)
    [loss] = losses
    assert float(loss) == pytest.approx(float(sums.loss / sums.weight), abs=1e-3)


def test_a_start_is_renamed_by_the_users_names(run, tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {name.replace("blocks.", "h."): a for name, a in arrays_of(plain(seed=5)).items()}
    safetensors.numpy.save_file(arrays, path)
    rename = "--start-rename", r"h\.(.*)=blocks.\1", "--start-ignore", r"head\..*"
    printed = train(tmp_path / "new", 1, "--mesh", "dp2", "--start", path, *rename)
    assert re.search(
        r"^taken +blocks\.0-3\.mlp\.0\.bias +16 +was h\.0-3\.mlp\.0\.bias", printed, re.MULTILINE
    )
    assert re.search(r"^new +head\.kernel ", printed, re.MULTILINE)


def test_inspect_counts_what_a_step_does():
    printed = jaxpar_prints("inspect", TASK, "--mesh", "dp2pp2")
    for pattern in (r"permute +stage ", r"all-reduce +data", r"FLOPs per device +[\d,]+"):
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    report = json.loads(jaxpar_prints("inspect", TASK, "--mesh", "dp2", "--json"))
    assert {tuple(own["axes"]) for own in report["collectives"]} == {("data",)}


@pytest.mark.full
def test_plan_prints_a_command_for_the_task():
    with api.plans_are_estimated():
        printed = jaxpar_prints("plan", TASK, "--machine", "h100:1x1x4")
    command = printed.splitlines()[-1].partition("python -m jaxpar ")[2]
    task, parallel, _ = api.settings(*shlex.split(command))
    assert type(task).__name__ == "Words"
    assert parallel.mesh.num_devices == 4


@pytest.mark.parametrize(
    ("kind", "options", "texts"),
    [
        ("schedule", ["--mesh", "pp4", "--pipeline.num-microbatches", "4"], ["stage 3"]),
        ("parallelisms", ["--machine", "h100:1x1x4"], ["embed", "head"]),
        pytest.param("timeline", ["--mesh", "pp2"], ["stage 1"], marks=pytest.mark.more),
        ("memory", ["--mesh", "pp2"], ["parameters"]),
    ],
)
def test_plot_draws_the_task(kind, options, texts, tmp_path):
    path = tmp_path / "picture.svg"
    jaxpar_prints("plot", kind, TASK, *options, "-o", path)
    picture = path.read_text()
    assert all(text in picture for text in texts)
    assert "outer" not in picture


def test_the_result_of_fit_has_the_users_model(tmp_path):
    train = jaxpar.TrainConfig(num_steps=1, out_dir=str(tmp_path / "run"))
    result = jaxpar.fit(Words(), "dp2", train, quiet=True)
    model = result.model()
    assert type(model) is gpt.GPT
    found = load_run(tmp_path / "run").predict("test", quiet=True)["output"]
    np.testing.assert_allclose(found, model(ARRAYS["x"][PLACES["test"]]), 1e-5, 1e-6)
