"""What the README shows is what happens."""

import contextlib
import io
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.pages import OTHERS, PAGES, ROOT, blocks, commands, files_of, page_with, section, text_of
from lib.planned import SHOWN

import jaxpar
from jaxpar import MeshConfig, Parallel, show
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM
from jaxpar.pipeline import make_schedule
from jaxpar.planning import describe, plan


def test_one_command_sets_up_and_trains_and_one_sets_up_and_tests():
    text = " ".join("".join(blocks("sh")).split())
    setup = "python3 -m venv .venv && .venv/bin/pip install -q -c requirements.lock -e"
    assert f"{setup} . && .venv/bin/python -m jaxpar train lm --simulate 8 --mesh dp2pp2tp2" in text
    assert f"{setup} '.[dev]' && .venv/bin/python -m pytest" in text


def run(*command, cwd):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# What the Python of a page prints.
PRINTED = {
    "docs/build/custom-axes.md": ("dp2pp2context2  loss 0.1200", "dp2tp4          loss 0.0794"),
    "docs/build/custom-loop.md": ("\n39  loss 0.0",),
    "docs/build/flax-models.md": ("(32, 64)",),
    "docs/build/sequences.md": ("1,000 sequences in 20 batches; 3.8%",),
    "docs/build/sharding.md": ("# columns; rows of blocks.*.down", "(None, 'tensor')"),
    "docs/help/features.md": ("the best learning rate is 0.01\n", "the loss is lowest at 0."),
    "docs/scale/inspect.md": ("('stage',) 76", "dim 0 layers/stage"),
    "docs/train/checkpoints.md": ("20 20", "2 40"),
    "docs/train/placement.md": ("(2, 2, 2, 2)", "(6, 2)"),
    "docs/train/training.md": ("runs/0001",),
    "docs/use/export.md": (
        "begins with the weights of runs/0001",
        "ignored  head.bias",
        "layers.0.w_x",
    ),
    "docs/use/predict.md": ("valid loss of the mean ",),
}
# Whose Python the whole check tries; that of the others takes longer, and is tried for releases.
SHORT = (
    "docs/build/data.md",
    "docs/build/layer-options.md",
    "docs/build/layers.md",
    "docs/build/recurrent-layers.md",
    "docs/build/rows.md",
    "docs/concepts/pipeline.md",
    "docs/concepts/state.md",
    "docs/scale/planning.md",
    "docs/start/first-model.md",
)
PLANNING = "docs/scale/planning.md"
LAYERS_PAGE = "docs/build/recurrent-layers.md"
USE = "jaxpar.fit(Forecast(num_layers=4), 'pp4dp2', jaxpar.TrainConfig(num_steps=8))"


def table_of_layers():
    """Name of a layer -> its row in the page of layers: its class, and what is said of it."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|(.*)", text_of(LAYERS_PAGE), re.M)
    return {name: [of, *row.split("|")] for of, name, row in rows}


LAYERS = ("lstm", "gru", "rglru", "mingru", "slstm", "mlstm", "gated_delta")  # of language models


def of_sizes(formula, **sizes):
    """The value of a formula such as 2H\u00b2 + HD."""
    terms = [re.sub(r"(?<=[\dA-Z)])(?=[A-Z(])", "*", term) for term in formula.split(" ")]
    return eval(" ".join(terms).replace("\u00b2", "**2"), {}, sizes)


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", LAYERS)
def test_the_states_of_layers_are_as_large_as_their_page_says(name):
    layer = getattr(jaxpar.nn, table_of_layers()[name][0])(32, rngs=nnx.Rngs(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(layer.initial_carry(1)))
    assert size == of_sizes(table_of_layers()[name][1], H=32, N=4, D=8)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_layers_cost_and_send_what_their_page_says(name):
    _, _, cost, sent, _, block, *_ = table_of_layers()[name]
    task = LM(1, 32, 32, vocab_size=384, batch_size=2, seq_len=512, layer=name, dropout=0.0)
    [(forward, _)] = api.layer_flops(task)
    assert task.has_blocks == (block.strip() != "no block")
    if task.has_blocks:
        cost += "+" + block
    assert forward == pytest.approx(2 * 1024 * of_sizes(cost, H=32, N=4, D=8, C=64))
    mesh = MeshConfig(1, 1, 2, devices=(0, 1))
    most = max(each.count for each in inspect_step(task, Parallel(mesh)).collectives)
    assert most == {"at every time step": 512, "once in a window": 1}[sent.strip()]


@pytest.mark.full
def test_the_model_of_the_readme_trains(tmp_path):
    script = tmp_path / "page.py"
    lines = [
        "import jaxpar; jaxpar.simulate_devices(8)",
        *blocks("python"),
        f"print(len({USE}.losses))",
    ]
    script.write_text("\n".join(lines))
    printed = run(script, cwd=tmp_path)
    assert "step 8/8  loss" in printed
    assert printed.endswith("\n8\n")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.full if page in SHORT else pytest.mark.more)
        for page in PAGES[1:]
        if blocks("python", page)
    ],
)
def test_python_blocks_run_in_their_order(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python", page)))
    printed = run(script, cwd=tmp_path)
    for shown in PRINTED.get(page, ()):
        assert shown in printed
    if page == LAYERS_PAGE:
        differences = re.findall(r"^(\w+) differs by (\S+)$", printed, re.M)
        assert {name for name, _ in differences} == {row[0] for row in table_of_layers().values()}
        assert all(float(number) < 1e-5 for _, number in differences)
    if page == "docs/scale/inspect.md":
        for shown in PRINTED[page]:
            assert any(shown in block and block in printed for block in blocks("text", page))


# What makes a command quick; the mesh stays.
SMALL = {
    "--hidden-size": 16,
    "--embed-size": 16,
    "--seq-len": 4,
    "--max-vocab": 96,
    "--optimizer.warmup-steps": 2,
    "--train.num-steps": 6,
    "--pipeline.num-chunks": 1,
}
# What commands of pages write, besides those of the README.
USED = {"predicted", "stream", "half.safetensors"}
PICTURES = {
    "schedule.svg",
    "schedule.pdf",
    "timeline.svg",
    "bytes.png",
    "parallelisms.svg",
    "memory.png",
}
CLASSIFIER = "# gestures.py"


@pytest.mark.parametrize(
    ("sections", "made"),
    [
        pytest.param(("use",), USED, marks=pytest.mark.full),
        pytest.param(("concepts", "scale"), PICTURES, marks=pytest.mark.more),
    ],
)
def test_commands_of_the_readme_and_of_pages_run(sections, made, tmp_path):
    pages = ("README.md", *(page for page in PAGES if section(page) in sections))
    own = files_of(*pages, *PAGES)
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_text").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / f"my_text/{split}.txt").write_text("the value of an object is returned\n" * 300)
    (tmp_path / "other.txt").write_text("the value of an object is returned\n" * 300)
    (tmp_path / "prompts.txt").write_text("the value of\nthe\n")
    for command in dict.fromkeys(tuple(command) for page in pages for command in commands(page)):
        # Which other tests run; a machine's compiler may not be there.
        if {"curves", "--compare", "--machine", "--start-rename"} & {*command} or (
            command[0] == "launch" and "--print" not in command
        ):
            continue
        trains = {"train", "inspect", "plot"} & {*command} and "--print" not in command
        trains = trains and "lm" in command
        small = [str(part) for pair in SMALL.items() for part in pair] if trains else []
        devices = (
            ["--simulate", "8"] if command[0] == "train" and "--simulate" not in command else []
        )
        printed = run("-m", "jaxpar", *command, *devices, *small, cwd=tmp_path)
        assert printed.strip(), command
    given = {*own, "examples", "my_text", "other.txt", "prompts.txt", "__pycache__"}
    written = {path.name for path in tmp_path.iterdir()} - given
    assert written == {"runs", "scores", "model.safetensors", *made}


@pytest.mark.full
def test_the_classifier_of_the_guide_trains_on_a_file_of_data(tmp_path):
    """As a file by itself, which a reader has copied; the last columns tell the class."""
    own = files_of(page_with(CLASSIFIER))["gestures.py"]
    (tmp_path / "gestures.py").write_text(own)
    label = (np.arange(300) % 3).repeat(40)
    rows = np.stack([label, label - 1, np.sin(label), label], axis=-1) + np.zeros((12_000, 4))
    np.savetxt(tmp_path / "gestures.csv", rows, "%.2f", ",", header="x,y,z,label", comments="")
    train = (
        "-m jaxpar train gestures.py:Gestures --simulate 8 --mesh dp2pp2tp2 --pipeline.num-chunks 4"
    )
    printed = run(*train.split(), "--train.num-steps", "30", cwd=tmp_path)
    [valid] = re.findall(r"^valid +([\d.]+) +([\d.]+)", printed, re.MULTILINE)
    assert float(valid[1]) > 0.9
    assert "splits no parameter" not in printed


@pytest.mark.rows(7)
@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("0001", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    for path in ("settings.toml", "runs/0001/config.toml", "runs/other/config.toml"):
        (tmp_path / path).write_text('task = "lm"\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in files_of(page, *PAGES).items():
        (tmp_path / name).write_text(text)
    for command in commands(page):
        if {"--help", "--version"} & {*command}:
            with pytest.raises(SystemExit, match="0"):
                api.read(*command)
        else:
            api.read(*command)


def test_a_run_without_a_mesh_is_described_as_its_page_shows():
    rows = [f"{name:10}  {value}" for name, value in api.summary(LM(), Parallel()).items()]
    assert "\n".join([*rows[:3], "...\n"]) in blocks("text", "docs/train/training.md")


def test_where_jaxpar_comes_from_is_said_in_one_place():
    """It is in no registry, so nothing says that pip finds it there: `pip install jaxpar[plot]` fails."""
    sources = [path.relative_to(ROOT) for path in (ROOT / "jaxpar").rglob("*.py")]
    for page in (*PAGES, *OTHERS, *sources):
        said = re.search(r"pip install (-\S+ )*['\"]?jaxpar.*", text_of(page))
        assert said is None, (page, said[0])
    assert "jaxpar is not on PyPI yet" in (ROOT / "README.md").read_text()


@pytest.mark.full
def test_the_ranking_of_the_page_is_of_its_command():
    """Its layouts, and of its numbers what is estimated; `test_aot` compiles for the others."""
    command = next(each for each in commands(PLANNING) if each[0] == "plan")
    [shown] = [block for block in blocks("text", PLANNING) if block.startswith("layout ")]
    task, *_ = api.settings(*command)
    machine = command[command.index("--machine") + 1]
    ranking = plan(task, machine=machine, num_finalists=0)
    costs = {describe(cost.parallel): cost for cost in ranking.fitting[:12]}  # that are compiled
    row = r"^(.*?)  +~([\d.]+) ms +([\d.]+) (ms|us) +([\d.]+ .B)  compiled$"
    rows = re.findall(row, shown, re.MULTILINE)
    steps = [float(step) for _, step, *_ in rows]
    assert len(rows) == 3
    assert steps == sorted(steps)
    for name, step, waits, unit, _ in rows:
        parts = {**costs[name].parts, "sending": float(waits) / {"ms": 1e3, "us": 1e6}[unit]}
        assert float(step) == pytest.approx(1000 * sum(parts.values()), rel=0.01)
        if name == rows[0][0]:
            told = re.findall(r"(\w[\w ]*) (\d+)%", shown.partition("time per step: ")[2])
            shares = {
                SHOWN.get(part, part): time / sum(parts.values()) for part, time in parts.items()
            }
            shares = {part: 100 * share for part, share in shares.items()}
            assert {part: int(share) for part, share in told} == pytest.approx(shares, abs=1)


@pytest.mark.full
def test_options_in_the_text_exist(tmp_path):
    """Also those that stand in a sentence, in which nothing runs them."""
    scripts = (["-m", "recipes.dynamic_evaluation"], [ROOT / "examples/translation.py"])
    helps = [*map(help_of, HELPS), *(run(*own, "--help", cwd=tmp_path) for own in scripts)]
    known = set(re.findall(r"--[\w.-]+", "".join(helps)))
    known |= OF_OTHERS
    for page in (*PAGES, *OTHERS):
        text = text_of(page)
        text = re.sub(r"(?m)^#.*|^.*-->.*", "", text)  # headings, and arrows
        named = {*re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)}
        assert named <= known, page


HELPS = (
    ["train", "lm"], ["train", f"{ROOT}/recipes/awd.py:AWD"], ["plan", "lm"],
    ["train", f"{ROOT}/examples/long_context.py:LongContext"],
    ["train", f"{ROOT}/examples/experts.py:Experts"],
    ["train", f"{ROOT}/examples/hybrid.py:Digits"],
    ["train", f"{ROOT}/examples/translation.py:Translate"],
    ["inspect", "lm"], ["plot", "bytes", "lm"], ["evaluate"], ["predict"], ["sample"], ["export"],
    ["launch"],
)  # fmt: skip
# Of pip, pytest, mkdocs, Slurm, Open MPI, Ray, XLA and MXNet, of every program, and of readers' models.
OF_OTHERS = {
    "--strict",
    "--head",
    "--signal",
    "--mca",
    "--bind-to",
    "--ntasks",
    "--gpus",
    "--rows",
    "--csv",
    "--version",
    "--help",
    "--xla_gpu_deterministic_ops",
    "--xla_jf_spmd_threshold_for_windowed_einsum_mib",
}


def help_of(command):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        api.command(*command, "--help")
    return printed.getvalue()


def test_the_schedule_is_the_real_one():
    schedule = make_schedule("1f1b", 4, 2, 2)
    assert str(schedule) + "\n" in blocks("text", "docs/concepts/pipeline.md")
    assert show(schedule)._repr_svg_() == (ROOT / "docs/schedule.svg").read_text()


@pytest.mark.full
def test_the_page_of_model_parallelism_shows_what_its_command_prints(tmp_path):
    printed = run("-m", "benchmarks.model_parallel.count", cwd=tmp_path)
    page = (ROOT / "benchmarks/model_parallel/README.md").read_text()
    tables = printed.strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert table in page


@pytest.mark.more
@pytest.mark.parametrize(
    "picture", sorted((ROOT / "examples/pictures").glob("*.svg")), ids=lambda path: path.stem
)
def test_a_picture_of_an_example_is_what_its_command_draws(picture, tmp_path):
    """All that is written in it: axes, and bytes."""
    page, file = "examples/README.md", f"examples/{picture.stem}.py:"
    if picture.stem == "mamba":
        pytest.importorskip("mamba2_jax")
    assert f"(pictures/{picture.name})" in text_of(page)
    command = next(
        each for each in commands(page) if each[0] == "train" and each[1].startswith(file)
    )
    run(
        "-m",
        "jaxpar",
        "plot",
        "bytes",
        f"{ROOT}/{command[1]}",
        *command[2:],
        "-o",
        tmp_path / "a.svg",
        cwd=ROOT,
    )
    texts = [
        re.findall(r">([^<>]+)</text>", path.read_text()) for path in (picture, tmp_path / "a.svg")
    ]
    assert texts[0] == texts[1]
    assert any(text.startswith("along ") for text in texts[0])
