"""A task of one's own, in a file outside the package: every command takes it as it takes those of jaxpar."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest
from lib import api

FILE = '''"""Forecasts of waves whose period changes: a GRU says the next value."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpar

ON_IMPORT = jnp.ones(3)  # touches a device


class GRU(nnx.Module):
    def __init__(self, width, *, rngs):
        named = jaxpar.nn.named_param
        shape, init = (width, 3, width), nnx.initializers.lecun_normal(0, (1, 2))
        self.w_x = named(init(rngs.params(), shape), ("input", "gates", "hidden"))
        self.w_h = named(init(rngs.params(), shape), ("input", "gates", "hidden"))
        self.b = named(jnp.zeros((3, width)), ("gates", "hidden"))

    def initial_carry(self, rows):
        return jnp.zeros((rows, self.w_h.shape[0]))

    def __call__(self, h, x, at):
        def step(h, x):
            zx = jnp.einsum("bi,igh->gbh", x, self.w_x[...]) + self.b[...][:, None]
            zh = jnp.einsum("bi,igh->gbh", h, self.w_h[...])
            u = nnx.sigmoid(zx[1] + zh[1])
            h = u * h + (1 - u) * jnp.tanh(zx[2] + nnx.sigmoid(zx[0] + zh[0]) * zh[2])
            return h, h

        h, y = jax.lax.scan(step, h, x)
        return h, jaxpar.nn.dropout(y, 0.1, at)


class Forecaster(nnx.Module):
    def __init__(self, width, num_layers, *, rngs):
        self.embed, self.out = nnx.Linear(1, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)
        self.layers = jaxpar.Stack([lambda r: GRU(width, rngs=r)] * num_layers, rngs=rngs)

    def first(self, batch, at):
        return self.embed(batch["x"][..., None])

    def last(self, y, batch, at):
        error = (self.out(y)[..., 0] - batch["y"]) * batch["weight"]
        return jaxpar.Sums(jnp.sum(error**2), jnp.sum(batch["weight"]), {"mae": jnp.sum(abs(error))})


@dataclasses.dataclass(frozen=True)
class Forecast(jaxpar.Task):
    """Forecasts the next value of a series.

    Attributes:
      num_layers: GRUs.
      width: units of each.
      optimizer: how it learns.
    """

    num_layers: int = 2
    width: int = 6
    optimizer: jaxpar.OptimizerConfig = jaxpar.OptimizerConfig(learning_rate=3e-2, warmup_steps=2)

    unit: ClassVar[str] = "values"
    train: ClassVar[jaxpar.TrainConfig] = jaxpar.TrainConfig(num_steps=60, log_every=10)
    parallel: ClassVar[jaxpar.Parallel] = jaxpar.Parallel(
        pipeline=jaxpar.PipelineConfig(num_chunks=2)
    )

    def make_model(self, rngs):
        return Forecaster(self.width, self.num_layers, rngs=rngs)

    def make_batches(self, split, seed=None):
        size, phase = {"train": (2000, 0), "valid": (300, 1), "test": (300, 2)}[split]
        t = np.arange(size + 1)
        series = np.sin(t / 5 + phase + np.sin(t / 90)).astype(np.float32)
        return jaxpar.SeriesBatches({"x": series[:-1], "y": series[1:]}, 8, 16, seed)

    def metrics(self, loss, means):
        return {"rmse": loss**0.5, **means}

    def fingerprint(self):
        return {"series": "waves"}
'''


def jaxpar(*arguments, cwd, code=0):
    """What a command line prints; and to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", *map(str, arguments)],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the user's file, a run of it on eight devices, and what that printed."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "forecast.py").write_text(FILE)
    printed, said = jaxpar(
        "train", "forecast.py:Forecast", "--simulate", 8, "--mesh", "dp2pp2tp2", "--num-layers", 4,
        "--pipeline.num-microbatches", 2, "--optimizer.learning-rate", "2e-2",
        "--train.checkpoint-every", 20, cwd=folder,
    )  # fmt: skip
    assert said == ""
    return folder, printed


@pytest.fixture
def here(world, tmp_path):
    """A copy of the folder, whose run is of the file beside it."""
    folder, _ = world
    shutil.copytree(folder, tmp_path / "user")
    run = tmp_path / "user/runs/0001"
    config = run / "config.toml"
    config.write_text(config.read_text().replace(str(folder), str(tmp_path / "user")))
    return tmp_path / "user"


def losses(folder):
    lines = map(json.loads, (folder / "runs/0001/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def evaluated(printed):
    """Split -> the numbers of its row in a table."""
    rows = re.findall(r"^ *(valid|test) +([\d. ]+?) *$", printed, re.MULTILINE)
    return {split: [float(number) for number in numbers.split()] for split, numbers in rows}


@pytest.mark.full
def test_it_trains_on_every_axis(world):
    folder, printed = world
    for pattern in (
        r"mesh +data=2 x stage=2 x tensor=2",
        r"layers +4 \(first, 0-1 \| 2-3, last\); 2 microbatches x 2 time chunks",
        r"layers\.gru\.w_h +4x6x3x6 +layers/stage, input, gates, hidden/tensor +2x6x3x3 ",
        r"step +60/60 +loss +0\.\d+ .*values/s",
    ):
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    rows = evaluated(printed)
    assert rows.keys() == {"valid", "test"}
    found = losses(folder)
    assert found[60] < 0.3 * found[1]
    assert rows["test"][0] == pytest.approx(found[60] ** 0.5, rel=1)


@pytest.mark.full
def test_the_run_knows_its_task(world):
    folder, _ = world
    tables = tomllib.loads((folder / "runs/0001/config.toml").read_text())
    assert tables["task"] == f"{folder}/forecast.py:Forecast"
    assert (tables["num_layers"], tables["optimizer"]["learning_rate"]) == (4, 2e-2)
    assert tables["mesh"] == "dp2pp2tp2"
    assert (folder / "runs/0001/task.py").read_text() == FILE


@pytest.mark.full
def test_it_is_resumed_on_other_devices_and_evaluated_on_one(here):
    before = losses(here)
    more = ("--simulate", 4, "--mesh", "pp4", "--train.num-steps", 80)
    printed, said = jaxpar("train", "--resume", *more, cwd=here)
    assert said == ""
    assert "resumed at step 60" in printed
    assert re.search(r"layers +4 \(first, 0 \| 1 \| 2 \| 3, last\)", printed)
    after = losses(here)
    assert {step: after[step] for step in before} == before
    assert after[80] < after[10]
    again, said = jaxpar("evaluate", "runs/0001", cwd=here)
    assert said == ""
    numbers = evaluated(again)
    assert numbers.keys() == {"valid", "test"}
    assert numbers == evaluated(printed)
    assert all(map(math.isfinite, numbers["valid"]))


@pytest.mark.full
def test_the_same_task_may_be_named_beside_its_run_and_no_other(here):
    resume = ("--resume", "--simulate", 2, "--mesh", "pp2", "--train.num-steps", 61)
    printed, _ = jaxpar("train", "./forecast.py:Forecast", *resume, cwd=here)
    assert "resumed at step 60" in printed
    _, said = jaxpar("train", "lm", *resume, cwd=here, code=2)
    assert re.fullmatch(
        r"error: settings of runs/0001: expected task lm, got .*forecast\.py:Forecast\n.*\n",
        said,
    )


@pytest.mark.full
def test_it_runs_in_several_processes(here):
    printed, _ = jaxpar(
        "launch", "--processes", 2, "--devices-per-process", 2, "--", "train", "forecast.py:Forecast",
        "--mesh", "dp2pp2", "--train.num-steps", 4, "--train.log-every", 1, cwd=here,
    )  # fmt: skip
    assert re.search(r"^\[0\] step 4/4 +loss ", printed, re.MULTILINE)
    assert (here / "runs/0002/task.py").read_text() == FILE


@pytest.mark.full
def test_it_is_inspected_and_plotted(here):
    step = ("--simulate", 8, "--mesh", "dp2pp2tp2", "--num-layers", 4)
    printed, said = jaxpar("inspect", "forecast.py:Forecast", *step, cwd=here)
    assert said == ""
    for pattern in (r"permute +stage ", r"all-reduce +tensor ", r"all-reduce +data .*", r"FLOPs"):
        assert re.search(pattern, printed), f"{pattern} is not in:\n{printed}"
    printed, said = jaxpar(
        "plot", "schedule", "forecast.py:Forecast", "--mesh", "pp4", "--num-layers", 4,
        "-o", "schedule.svg", cwd=here,
    )  # fmt: skip
    assert (printed, said) == ("wrote schedule.svg\n", "")
    picture = (here / "schedule.svg").read_text()
    assert picture.startswith("<svg")
    assert picture.count("stage") >= 4


@pytest.mark.full
def test_help_tells_its_options(world):
    printed, _ = jaxpar("train", "forecast.py:Forecast", "--help", cwd=world[0])
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", printed).split())
    assert "usage: python -m jaxpar train forecast.py:Forecast" in said
    assert "--width INT units of each. (default: 6)" in said
    assert "--train.num-steps INT" in said
    assert "(default: 60)" in said


@pytest.mark.full
def test_the_planner_compiles_it_and_runs_it(world):
    printed, _ = jaxpar("plan", "forecast.py:Forecast", "--simulate", 1, cwd=world[0])
    assert re.match(
        r"1 x cpu, 1 device: \d+ layouts, best first:\n(.*\n){3,}.* measured\n", printed
    )
    found = r"Use dp1.*: [\d.]+ \w+ a step, [\d,]+ \w+/s, [\d.]+ \w?B of [\d.]+ GB"
    assert re.search(found, printed)


@pytest.mark.full
def test_a_file_that_has_changed_is_told(here):
    file = here / "forecast.py"
    file.write_text(FILE + "# changed\n")
    printed, said = jaxpar("evaluate", "runs/0001", cwd=here)
    assert evaluated(printed).keys() == {"valid", "test"}
    assert said.count("\n") <= 3
    assert f"{file} has changed since " in said
    assert "has changed since the run began, see runs/0001/task.py" in said


@pytest.mark.full
def test_a_file_that_is_gone_is_told_with_its_copy(here):
    file = here / "forecast.py"
    file.unlink()
    _, said = jaxpar("evaluate", "runs/0001", cwd=here, code=2)
    assert re.fullmatch(
        rf"error: {file}, which has the task of the run in runs/0001, does not exist\n"
        r"Fix: restore it; runs/0001/task\.py is a copy\n",
        said,
    )
    shutil.copy(here / "runs/0001/task.py", file)
    printed, said = jaxpar("evaluate", "runs/0001", cwd=here)
    assert (evaluated(printed).keys(), said) == ({"valid", "test"}, "")


MISTAKES = {
    "no such file": ("other.py:Forecast", r"cannot read the file of task 'other\.py:Forecast', other\.py: N"),
    "no such class": ("forecast.py:Forcast", r"forecast\.py has no task 'Forcast'; it has Forecast"),
    "no name": ("forecast.py", r"there is no task 'forecast\.py'\.\n.*path/to/file\.py:Name"),
    "a file that fails": ("fails.py:Own", r"fails\.py fails when it is run: ZeroDivisionError"),
    "a file that ends the program": (
        "ends.py:Own", r"ends\.py ends the program when it is run: it calls sys\.exit\(0\) .*\nFix: call it",
    ),
    "a file that trains": (
        "trains.py:Own",
        r"fit would train once more \(trains\.py, line 5\)\nFix: put fit in trains\.py under if __name__",
    ),
    "a file that simulates": (
        "simulates.py:Own", r"already started with 8 .*\n.*put simulate_devices\(3\) in simulates\.py under ",
    ),
    "a field named as an option": (
        "names.py:Own", r"field 'resume' of Own is already an option of train",
    ),
    "a field named as a setting": (
        "names.py:Mesh", r"field 'mesh' of Mesh has the name of a setting that every task has",
    ),
    "a field without a default": ("names.py:Bare", r"field 'width' of Bare has no default"),
    "a value that it refuses": ("names.py:Picky", r"error: 7 is my favourite"),
}  # fmt: skip

TRAINS = """
import jaxpar
class Own(jaxpar.lm.LM):
    pass
jaxpar.fit(Own(num_layers=1), train=jaxpar.TrainConfig(num_steps=1))
"""
NAMES = """
import dataclasses
import jaxpar

@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    resume: int = 1

@dataclasses.dataclass(frozen=True)
class Mesh(jaxpar.Task):
    mesh: str = "dp2"

@dataclasses.dataclass(frozen=True)
class Bare(jaxpar.Task):
    width: int

@dataclasses.dataclass(frozen=True)
class Picky(jaxpar.Task):
    number: int = 7
    def __post_init__(self):
        super().__post_init__()
        if self.number != 7:
            raise ValueError("7 is my favourite")
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_have_one_message(mistake, tmp_path, monkeypatch, capsys):
    assert len(jax.devices()) == 8  # started, or a file that simulates would have its way
    (tmp_path / "forecast.py").write_text(FILE)
    (tmp_path / "fails.py").write_text("1 / 0\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "names.py").write_text(NAMES)
    (tmp_path / "trains.py").write_text(TRAINS)
    (tmp_path / "simulates.py").write_text("import jaxpar\njaxpar.simulate_devices(3)\n")
    monkeypatch.chdir(tmp_path)
    spec, message = MISTAKES[mistake]
    more = ["--number", "8"] if spec.endswith("Picky") else []
    assert api.command("train", spec, "--mesh", "dp8", *more) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err, re.M | re.S), captured.err
    assert captured.err.count("\n") <= 3
    assert not (tmp_path / "runs").exists()


def test_a_program_that_loads_its_own_task_is_not_run_again(tmp_path):
    program = """
import dataclasses, jaxpar
from lib import api
@dataclasses.dataclass(frozen=True)
class Own(jaxpar.Task):
    pass
print("once", api.task_class(api.spec_of(Own())) is Own)
"""
    (tmp_path / "own.py").write_text(program)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("once True\n", "")


SUMS = 'jaxpar.Sums(jnp.sum(error**2), jnp.sum(batch["weight"]), {"mae": jnp.sum(abs(error))})'
BATCHES = 'jaxpar.SeriesBatches({"x": series[:-1], "y": series[1:]}, 8, 16, seed)'
OPTIMIZER = FILE[FILE.index("    optimizer: jaxpar") : FILE.index("\n\n    unit")]
FIRST = 'return self.embed(batch["x"][..., None])'
STACK = "jaxpar.Stack([lambda r: GRU(width, rngs=r)] * num_layers, rngs=rngs)"
UNIT = '    unit: ClassVar[str] = "values"'
LOOP = "jax.lax.scan(step, h, x)"
FROZEN = (
    r"frozen=PathContains\(.*'lstm'.*\) of task Forecast matches no parameter of embed\.bias, "
    r"embed\.kernel, layers\.gru\.b, .*\n.* such as nnx\.PathContains\('embed'\)"
)
more = functools.partial(pytest.param, marks=pytest.mark.more)
WRONG = [
    (SUMS, "jnp.mean(error**2)", r"returns an array of shape \[\]\.\nFix: return jaxpar\.Sums"),
    (SUMS, SUMS.replace("jnp.sum(error**2)", "error**2"), r"shape \[16, 8\] as 'loss' .*\n.*jnp\.sum\("),
    more(SUMS, SUMS.replace("jnp.sum(abs(error))", "abs(error)"), r"as 'mae' of its Sums\.\nFix: use jnp"),
    more(SUMS, "None", "`last` of Forecaster returns nothing\\.\nFix: return jaxpar"),
    more(SUMS, SUMS.replace("{", "[").replace("}", "]").replace('"mae": ', ""), "whose metrics are a list"),
    ("def last(self, y, batch, at)", "def last(self, y, batch)", r"last takes .*write last\(self, y,"),
    more(SUMS, SUMS.replace('"mae"', "7"), r"`last` of Forecaster names a metric 7, a int\.\nFix: use a st"),
    (FIRST, "pass", r"`first` of Forecaster returns nothing for a batch of 8 rows\.\nFix: return x, \[time,"),
    more(FIRST, f"{FIRST}.swapaxes(0, 1)", r"Forecaster returns an array \[8, 16, 6\] for a batch of 8 rows"),
    (FIRST, 'return batch["x"]', r"layer gru does not take its input, float32\[16, 8\]: .*\nFix: let `fi"),
    ("def make_model", "def build", r"Forecast has no make_model\(self, rngs\)\.\nFix: write one\.$"),
    more("def make_batches", "def build", r"Forecast has no make_batches\(self, split, seed=None\)\.\nFix"),
    (OPTIMIZER, "", r"Forecast has no optimizer\.\nFix: write make_optimizer\(self, .* or a field opt"),
    (STACK, STACK.replace("GRU(width", "nnx.Linear(width, width"), r"layer Linear takes .*nn\.Stateless\("),
    more(STACK, STACK.replace("GRU(", "nnx.GRUCell(width, "), r"layer GRUCell takes .*Recurrent\(cell\)"),
    more(STACK, f"nnx.List([{STACK}])", r"has no Stack called layers\.\nFix: write self\.layers = jaxpar"),
    (STACK, STACK.replace("lambda r: ", "").replace("=r)", "=rngs)"), "a GRU is a layer already"),
    more(STACK, STACK.replace("lambda r:", "lambda:").replace("=r)", "=rngs)"), r"takes \(\), expected \("),
    more(STACK, STACK.replace("GRU(width, rngs=r)", "None"), "maker of a Stack returns=None .*: must be"),
    (BATCHES, '{"x": series[:-1]}', "make_batches of task Forecast returns a dict.* such as jaxpar.Array"),
    more("split, seed=None", "split", r"make_batches takes \(split\).* write make_batches\(self"),
    more("make_model(self, rngs)", "make_model(self)", r"Fix: write make_model\(self, rngs\)"),
    ('"y": series[1:]', '"y": series[1:].astype(str)', r"batch\['y'\] of task .* array of <U\d+\.\n.* int32"),
    ('"x": series[:-1]', '"x": series[:-1].astype(object)', r"\['x'\] of .* of object\.\n.*\(\.astype\("),
    more('"x": series[:-1]', '"x": series[:-1].view([("f", "f4")])', r"\['x'\] of .*\n.* such as array\['f'"),
    ("jaxpar.nn.dropout(y, 0.1, at)", "jaxpar.nn.dropout(y[-1], 0.1, at)", r"must be .*\(own\.py, line"),
    ("@dataclasses.dataclass(frozen=True)\n", "", "Forecast has fields and is no dataclass.* above it"),
    ("jnp.zeros((rows, self", "jnp.zeros((4, self", r"_carry\(16\) has the shape \[4, 6\]\.\nFix"),
    more("jnp.zeros((rows, self.w_h.shape[0]))", "jnp.zeros(6)", r"has the shape \[6\]\.\nFix: give"),
    (OPTIMIZER, "    def make_optimizer(self, n):\n        pass", "make_optimizer .* returns nothing"),
    (LOOP, LOOP.replace("h, x", "jnp.zeros(h.shape), x"), r"gru gives other numbers when its wind"),
    ("nnx.Linear(1, width", "nnx.Linear(2, width", r"TypeError: dot_general .* in first of .*\(own\.py, l"),
    ("h, y = ", "h, y = h, x if x.any() else ", r"gru \(own\.py, line 35\) uses an array in "),
    more('batch["x"]', 'batch["z"]', r"KeyError: 'z' in first of .* \(own\.py, line \d+\)$"),
    ('"valid": (300, 1), ', "", r"KeyError: 'valid' \(own\.py, line \d+\)$"),
    more('"valid": (300, 1)', '"valid": (0, 1)', r"'valid': 0 steps are fewer .*\(own\.py, line \d+\)$"),
    more("8, 16, seed)", "8 if seed is None else 16, 16, seed)", r"split 'valid': batch\['lengths'\] is int"),
    more("size, phase = {", "1 / 0, {", r"ZeroDivisionError: .* \(own\.py, line \d+\)$"),
    more("return h, jaxpar", "h, jaxpar", r"layer gru returns nothing\.\nFix: return \(carry, y\) or "),
    more('("gates", "hidden")', '("gates",)', r"\('gates',\) do not fit .* \(3, 6\).*give a na"),
    (UNIT, f'{UNIT}\n    frozen = nnx.PathContains("lstm")', FROZEN),
    more("size, phase = {", "open('data.csv'), {", r"No such file.*'data\.csv' \(own\.py, line \d+\)$"),
]  # fmt: skip


@pytest.mark.rows(4)
@pytest.mark.parametrize(("right", "wrong", "message"), WRONG)
def test_mistakes_in_a_model_have_one_message(right, wrong, message, tmp_path, monkeypatch, capsys):
    assert right in FILE
    (tmp_path / "own.py").write_text(FILE.replace(right, wrong))
    monkeypatch.chdir(tmp_path)
    assert api.command("train", "own.py:Forecast", "--mesh", "dp2pp2tp2") == 2
    captured = capsys.readouterr()
    assert re.search(f"error: .*{message}", captured.err, re.M | re.S), captured.err
    assert captured.err.count("\n") <= 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_counts_in_python_and_the_numbers_of_numpy_are_taken(tmp_path, monkeypatch, capsys):
    """A weight that is an int, labels of int64: what NumPy and shapes give by themselves."""
    text = FILE.replace('jnp.sum(batch["weight"]), {', "error.size, {")
    (tmp_path / "own.py").write_text(text.replace(".astype(np.float32)", ""))
    monkeypatch.chdir(tmp_path)
    assert (
        api.command("train", "own.py:Forecast", "--mesh", "dp2pp2tp2", "--train.num-steps", "2")
        == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "splits no parameter" not in captured.out
    (tmp_path / "own.py").write_text(text.replace('"hidden"', "None"))
    assert (
        api.command("train", "own.py:Forecast", "--mesh", "dp2pp2tp2", "--train.num-steps", "2")
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "warning tensor=2 splits no parameter, so 2 devices repeat the same work; name" in said


@pytest.mark.full
def test_a_loop_may_begin_with_constants(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(
        FILE.replace(LOOP, LOOP.replace("h, x", "jnp.zeros(h.shape), x"))
    )
    monkeypatch.chdir(tmp_path)
    for mesh in ("dp1", "dp2pp2tp2"):
        command = ["train", "own.py:Forecast", "--mesh", mesh, "--train.out-dir", mesh]
        # The loop begins anew in each chunk of time.
        command += ["--pipeline.num-chunks", "1", "--train.num-steps", "3"]
        assert api.command(*command, "--train.log-every", "1") == 0
    assert capsys.readouterr().err == ""
    one, many = (
        [
            json.loads(line)["loss"]
            for line in (tmp_path / mesh / "metrics.jsonl").read_text().splitlines()
        ][:3]
        for mesh in ("dp1", "dp2pp2tp2")
    )
    assert many == pytest.approx(one, rel=1e-5)
