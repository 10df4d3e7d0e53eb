"""What the README shows is what happens."""

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import mkdocs.config
import numpy as np
import pytest
from flax import nnx

import jaxpar
from jaxpar import MeshConfig, Parallel, show
from jaxpar.analysis import inspect_step
from jaxpar.cli.main import main
from jaxpar.cli.parse import read_command
from jaxpar.pipeline import make_schedule
from jaxpar.planning import describe, plan
from jaxpar.planning.counts import counts_of
from jaxpar.planning.planner import NUM_FINALISTS
from jaxpar.step.setup import Setup
from jaxpar.tasks.lm import LM
from jaxpar.tasks.lm.options import LAYERS
from jaxpar.training.config_file import default_settings, to_toml
from jaxpar.training.summary import summarize

ROOT = Path(__file__).parent.parent
GUIDES = (
    "tutorial",
    "models",
    "layers",
    "parallelism",
    "pipeline",
    "planning",
    "recipes",
    "training",
    "using",
    "analysis",
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in (*GUIDES, "coming", "pytorch", "mxnet")))
OTHERS = ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "recipes/README.md")


def blocks(language, page="README.md"):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page):
    """The arguments of each `python -m jaxpar`, without what the shell does with them."""
    lines = "".join(blocks("sh", page)).replace("\\\n", " ").splitlines()
    found = [re.search(r"python -m jaxpar (.*)", line) for line in lines]
    return [shlex.split(line[1].split(" > ")[0], comments=True) for line in found if line]


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
    "docs/models.md": ("# columns; rows of blocks.*.down", "(None, 'tensor')", "\n39  loss 0.0"),
    "docs/parallelism.md": (),
    "docs/training.md": ("runs/0001",),
    "docs/using.md": (
        "begins with the weights of runs/0001",
        "ignored  head.bias",
        "layers.0.w_x",
    ),
    "docs/analysis.md": ("row split", "dim 0 layers/stage", "profiler"),
    "docs/layers.md": (),
    "docs/coming.md": (
        "the best learning rate is 0.01\n",
        "the loss is lowest at 0.",
        "valid loss of the mean ",
    ),
}
SHORT = ("docs/models.md", "docs/layers.md")
USE = "jaxpar.fit(Forecast(num_layers=4), 'pp4dp2', jaxpar.TrainConfig(num_steps=8))"


def table_of_layers():
    """Name of a layer -> its row in docs/layers.md."""
    rows = re.findall(r"^\| `\w+` \| `(\w+)` (\|.*)", (ROOT / "docs/layers.md").read_text(), re.M)
    return {name: row.split("|") for name, row in rows}


def of_sizes(formula, **sizes):
    """The value of a formula such as 2H\u00b2 + HD."""
    terms = [re.sub(r"(?<=[\dA-Z)])(?=[A-Z(])", "*", term) for term in formula.split(" ")]
    return eval(" ".join(terms).replace("\u00b2", "**2"), {}, sizes)


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", LAYERS)
def test_the_states_of_layers_are_as_large_as_their_page_says(name):
    layer = getattr(jaxpar.nn, LAYERS[name])(32, rngs=nnx.Rngs(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(layer.initial_carry(1)))
    assert size == of_sizes(table_of_layers()[name][1], H=32, N=4, D=8)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYERS)
def test_layers_cost_and_send_what_their_page_says(name):
    _, _, cost, sent, _, block, *_ = table_of_layers()[name]
    task = LM(1, 32, 32, vocab_size=384, batch_size=2, seq_len=512, layer=name, dropout=0.0)
    [layer] = counts_of(task, 100, "cpu").unit(512, 2).kinds
    assert task.has_blocks == (block.strip() != "no block")
    if task.has_blocks:
        cost += "+" + block
    assert layer.forward.flops == pytest.approx(2 * 1024 * of_sizes(cost, H=32, N=4, D=8, C=64))
    mesh = MeshConfig(1, 1, 2, devices=(0, 1))
    most = max(each.count for each in inspect_step(task, Parallel(mesh)).collectives)
    assert most == {"at every time step": 512, "once in a window": 1}[sent.strip()]


@pytest.mark.slow
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


# The longer ones are tried for releases.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.full if page in SHORT else pytest.mark.slow)
        for page in PRINTED
    ],
)
def test_python_blocks_run_in_their_order(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python", page)))
    printed = run(script, cwd=tmp_path)
    for shown in PRINTED[page]:
        assert shown in printed
    if page == "docs/layers.md":
        differences = re.findall(r"^(\w+) differs by (\S+)$", printed, re.M)
        assert {name for name, _ in differences} == {*LAYERS.values()}
        assert all(float(number) < 1e-5 for _, number in differences)
    if page == "docs/analysis.md":
        for shown in ("row split", "dim 0 layers/stage"):
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
PICTURES = {"timeline.svg", "bytes.png", "parallelisms.svg", "memory.png"}
OWN = "# forecast.py"  # a model of the reader's, which commands below it train
GUIDE, CLASSIFIER = "docs/models.md", "# gestures.py"


@pytest.mark.parametrize(
    ("names", "made"),
    [
        pytest.param(("using",), USED, marks=pytest.mark.full),
        pytest.param(("planning", "recipes", "analysis"), PICTURES, marks=pytest.mark.slow),
    ],
)
def test_commands_of_the_readme_and_of_pages_run(names, made, tmp_path):
    [own] = [block for block in blocks("python") if block.startswith(OWN)]
    (tmp_path / "forecast.py").write_text(own)
    (tmp_path / "other.txt").write_text("the value of an object is returned\n" * 300)
    (tmp_path / "prompts.txt").write_text("the value of\nthe\n")
    pages = ("README.md", *(f"docs/{name}.md" for name in names))
    for command in dict.fromkeys(tuple(command) for page in pages for command in commands(page)):
        # Which other tests run; a machine's compiler may not be there.
        if {"curves", "--compare", "--machine"} & {*command} or (
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
    given = {"forecast.py", "other.txt", "prompts.txt", "__pycache__"}
    written = {path.name for path in tmp_path.iterdir()} - given
    assert written == {"runs", "scores", "model.safetensors", *made}


@pytest.mark.full
def test_the_classifier_of_the_guide_trains_on_a_file_of_data(tmp_path):
    """As a file by itself, which a reader has copied; the last columns tell the class."""
    [own] = [block for block in blocks("python", GUIDE) if block.startswith(CLASSIFIER)]
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
    monkeypatch.setattr(
        "jaxpar.cli.options.simulate_devices", lambda number: None
    )  # there are some
    for run in ("0001", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    for path in ("settings.toml", "runs/0001/config.toml", "runs/other/config.toml"):
        (tmp_path / path).write_text(to_toml(default_settings(LM)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for source, start in (("README.md", OWN), (GUIDE, CLASSIFIER)):
        [own] = [block for block in blocks("python", source) if block.startswith(start)]
        (tmp_path / start.removeprefix("# ")).write_text(own)
    for command in commands(page):
        read_command(command)


def test_a_run_without_a_mesh_is_described_as_its_page_shows():
    rows = [f"{name:10}  {value}" for name, value in summarize(Setup.of(LM(), Parallel()))]
    assert "\n".join([*rows[:3], "...\n"]) in blocks("text", "docs/training.md")


def test_where_jaxpar_comes_from_is_said_in_one_place():
    """It is in no registry, so nothing says that pip finds it there: `pip install jaxpar[plot]` fails."""
    sources = [path.relative_to(ROOT) for path in (ROOT / "jaxpar").rglob("*.py")]
    for page in (*PAGES, *OTHERS, *sources):
        said = re.search(r"pip install (-\S+ )*['\"]?jaxpar.*", (ROOT / page).read_text())
        assert said is None, (page, said[0])
    assert "jaxpar is not on PyPI yet" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_ranking_of_the_readme_is_of_its_command():
    """Its layouts, and of its numbers what is estimated; `test_aot` compiles for the others."""
    [command] = [each for each in commands("README.md") if each[0] == "plan"]
    [shown] = [block for block in blocks("text") if block.startswith("config ")]
    asked = read_command(command)
    ranking = plan(asked.task, machine=asked.machine, num_finalists=0)
    costs = {describe(cost.parallel): cost for cost in ranking.fitting[:NUM_FINALISTS]}
    row = r"^(.*?)  +~([\d.]+) ms +([\d.]+) (ms|us) +([\d.]+ .B)  compiling it$"
    rows = re.findall(row, shown, re.MULTILINE)
    steps = [float(step) for _, step, *_ in rows]
    assert len(rows) == 3
    assert steps == sorted(steps)
    for name, step, waits, unit, _ in rows:
        parts = {**costs[name].parts, "sending": float(waits) / {"ms": 1e3, "us": 1e6}[unit]}
        assert float(step) == pytest.approx(1000 * sum(parts.values()), rel=0.01)
        if name == rows[0][0]:
            told = re.findall(r"(\w+) (\d+)%", shown.partition("Its estimated time: ")[2])
            shares = {part: 100 * time / sum(parts.values()) for part, time in parts.items()}
            assert {part: int(share) for part, share in told} == pytest.approx(shares, abs=1)


@pytest.mark.slow
def test_options_in_the_text_exist(tmp_path):
    """Also those that stand in a sentence, in which nothing runs them."""
    scripts = (["-m", "recipes.dynamic_evaluation"], [ROOT / "examples/translation.py"])
    helps = [*map(help_of, HELPS), *(run(*own, "--help", cwd=tmp_path) for own in scripts)]
    known = set(re.findall(r"--[\w.-]+", "".join(helps)))
    known |= OF_OTHERS
    for page in (*PAGES, *OTHERS):
        text = (ROOT / page).read_text()
        for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", re.sub(r"(?m)^#.*", "", text)):
            assert option in known, (page, option)


HELPS = (
    ["train", "lm"], ["train", f"{ROOT}/recipes/awd.py:AWD"], ["plan", "lm"],
    ["train", f"{ROOT}/examples/long_context.py:LongContext"],
    ["train", f"{ROOT}/examples/experts.py:Experts"],
    ["train", f"{ROOT}/examples/hybrid.py:Digits"],
    ["train", f"{ROOT}/examples/translation.py:Translate"],
    ["inspect", "lm"], ["plot", "bytes", "lm"], ["evaluate"], ["predict"], ["sample"], ["export"],
    ["launch"],
)  # fmt: skip
# Of pip, pytest, mkdocs, Slurm, Open MPI, Ray, XLA and MXNet; and of a model of the reader's.
OF_OTHERS = {
    "--strict",
    "--head",
    "--signal",
    "--mca",
    "--ntasks",
    "--gpus",
    "--rows",
    "--help",
    "--xla_gpu_deterministic_ops",
}


def help_of(command):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return printed.getvalue()


def test_the_schedule_is_the_real_one():
    schedule = make_schedule("1f1b", 4, 2, 2)
    assert str(schedule) + "\n" in blocks("text", "docs/pipeline.md")
    assert show(schedule)._repr_svg_() == (ROOT / "docs/schedule.svg").read_text()


def test_links_lead_somewhere():
    for page in (*PAGES, *OTHERS):
        folder = (ROOT / page).parent
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (folder / link).exists(), (page, link)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
CUT = """<script>addEventListener("load", () => {
  console.error("LOOKED at", innerWidth);
  for (const code of document.querySelectorAll("pre > code"))
    if (code.scrollWidth > code.clientWidth + 1) console.error("CUT", code.textContent.slice(0, 60));
})</script>"""


def said_by(page, script, tmp_path):
    """What a page 1,300 pixels wide writes to the console, with a script in it."""
    page.write_text(page.read_text() + script)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--no-proxy-server", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'user'}", "--window-size=1300,900", "--virtual-time-budget=2000",
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.stderr


def cut_code(page, tmp_path):
    """The beginnings of blocks of code that are cut on a page; none without a browser."""
    if BROWSER is None:
        return []
    said = said_by(page, CUT, tmp_path)
    assert '"LOOKED at 1300"' in said, said
    return re.findall(r'"CUT (.*?)"', said)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built."""
    folder = tmp_path_factory.mktemp("built") / "site"
    run("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT)
    return folder


# Moves a slider to its end, picks another schedule, and writes what is shown then to the console.
MOVES = """<script>addEventListener("load", () => {
  const home = document.getElementById("schedule-explorer");
  const look = () => console.error("SHOWN " + JSON.stringify([
    ...[...home.querySelectorAll("output")].map(own => own.value).filter(Boolean),
    ...[...home.querySelectorAll("b")].map(own => own.textContent),
    home.querySelectorAll("svg g").length]) + " END");
  const change = (input, value) => {
    input.value = value;
    input.dispatchEvent(new Event("input"));
    look();
  };
  look();
  const [stages, microbatches, chunks] = home.querySelectorAll("input[type=range]");
  change(stages, stages.max);
  change(home.querySelector("select"), "v");
  change(chunks, chunks.max);
  change(microbatches, microbatches.max);
})</script>"""


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_explorer_shows_what_jaxpar_computes(site, tmp_path):
    """Moving a slider changes the picture; the numbers are those of the schedule of these sizes."""
    page = site / "pipeline/moves.html"
    page.write_text((site / "pipeline/index.html").read_text())
    assert (site / "schedules.js").stat().st_size < 1e6
    said = said_by(page, MOVES, tmp_path)
    found = [json.loads(own) for own in re.findall(r"SHOWN (.*?) END", said)]
    kinds = ["1f1b", "1f1b", "v", "v", "v"]
    assert len(found) == len(kinds)
    assert len({own[-1] for own in found}) == len(found)
    for kind, (*sizes, bubble, kept, sent, blocks) in zip(kinds, found, strict=True):
        schedule = jaxpar.pipeline.make_schedule(kind, *map(int, sizes), zero_bubble=True)
        assert bubble == f"{100 * schedule.bubble:.1f} %"
        assert kept.split() == [*map(str, schedule.live_units)]
        ways = schedule.num_groups * schedule.num_stages - 1
        assert (
            int(sent) == 2 * (ways - (kind == "v")) * schedule.num_units
        )  # v stays on its last stage once
        assert blocks == sum(int(work.busy_TS.sum()) for work in schedule.lanes)


@pytest.mark.full
def test_the_site_is_built_without_a_warning(site, tmp_path):
    """Of all pages, with a reference of every public name."""
    page = (site / "api/jaxpar/index.html").read_text()
    modules = {"nn", "pipeline", "planning", "analysis", "lm"}
    for name in {*jaxpar.__all__} - modules:
        assert re.search(rf'id="jaxpar\.(\w+\.)*{name}"', page), name
    for module in modules:
        assert (site / f"api/{module}/index.html").exists()
    for name in ("index", "tutorial/index", "mxnet/index", "benchmarks/pipeline/index"):
        text = (site / f"{name}.html").read_text()
        assert "](" not in re.sub(r"(?s)<(pre|code).*?</\1>", "", text), name
        assert not re.findall(r'<(?:link|script|img)[^>]*(?:href|src)="https?:', text), name
    assert {"md-footer__link--prev", "md-footer__link--next"} <= {
        *re.findall(r"md-footer__link--\w+", (site / "mxnet/index.html").read_text())
    }
    for path in (site / "api").rglob("*.html"):  # rows of arguments and attributes
        names = re.findall(
            r'<tr class="doc-section-item">\s*<td>(.*?)</td>', path.read_text(), re.S
        )
        assert names
        assert [name for name in names if re.match(r"\W*\w+,", re.sub("<[^>]*>", "", name))] == []
    for name in ("index", "analysis/index", "models/index"):
        assert cut_code(site / f"{name}.html", tmp_path) == [], name
    for path in ROOT.glob("notebooks/*.ipynb"):
        page = (site / f"notebooks/{path.stem}/index.html").read_text()
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                for shown in output.get("data", {}).get("image/svg+xml", ()):
                    assert shown.strip() in page


def test_addresses_of_the_site_stand_in_one_place(tmp_path, monkeypatch):
    """There are none yet; made-up ones are those of the site, whose pages name no others."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    hooks = importlib.import_module("site_hooks")
    config = hooks.on_config(mkdocs.config.load_config(str(ROOT / "mkdocs.yml")))
    assert (config.site_url, config.repo_url) == (None, None)
    project = (ROOT / "pyproject.toml").read_text()
    urls = (
        "Repository = 'https://example.org/some/one'\nDocumentation = 'https://one.example.org'\n"
    )
    (tmp_path / "pyproject.toml").write_text(f"{project}\n[project.urls]\n{urls}")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    config = hooks.on_config(config)
    assert config.site_url == "https://one.example.org/"
    assert config.repo_url == "https://example.org/some/one"
    assert config.repo_name == "some/one"


@pytest.mark.slow
def test_the_page_of_model_parallelism_shows_what_its_command_prints(tmp_path):
    printed = run("-m", "benchmarks.model_parallel.count", cwd=tmp_path)
    page = (ROOT / "benchmarks/model_parallel/README.md").read_text()
    tables = printed.strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert table in page
