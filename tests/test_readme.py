"""What the README shows is what happens."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar
from jaxpar import show
from jaxpar.__main__ import _parse
from jaxpar.config_file import default_settings, write_config
from jaxpar.pipeline import make_schedule
from jaxpar.tasks.lm import LM

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/training.md", "docs/analysis.md")


def blocks(language, page="README.md"):
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(page):
    """The arguments of each `python -m jaxpar`, without what the shell does with them."""
    lines = "".join(blocks("sh", page)).replace("\\\n", " ").splitlines()
    found = [re.search(r"python -m jaxpar (.*)", line) for line in lines]
    return [shlex.split(line[1].split(" > ")[0], comments=True) for line in found if line]


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


@pytest.mark.parametrize(
    "page", ["README.md", *(pytest.param(page, marks=pytest.mark.full) for page in PAGES[1:])]
)
def test_python_blocks_run_in_their_order(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("python", page)))
    printed = run(script, cwd=tmp_path)
    for shown in {
        "README.md": ("(None, 'tensor')",),
        "docs/training.md": ("runs/0001",),
        "docs/analysis.md": ("row split", "dim 0 layers/stage", "the profiler makes a step"),
    }[page]:
        assert shown in printed
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
OWN = "# forecast.py"  # a model of the reader's, which commands below it train


@pytest.mark.full
def test_commands_of_the_readme_run(tmp_path):
    [own] = [block for block in blocks("python") if block.startswith(OWN)]
    (tmp_path / "forecast.py").write_text(own)
    for command in dict.fromkeys(map(tuple, commands("README.md"))):
        trains = {"train", "inspect", "plot"} & {*command} and "--print" not in command
        trains = trains and "lm" in command
        small = [str(part) for pair in SMALL.items() for part in pair] if trains else []
        devices = (
            ["--simulate", "8"] if command[0] == "train" and "--simulate" not in command else []
        )
        printed = run("-m", "jaxpar", *command, *devices, *small, cwd=tmp_path)
        assert printed.strip(), command
    written = {path.name for path in tmp_path.iterdir()} - {"forecast.py", "__pycache__"}
    assert written == {"runs", "timeline.svg", "bytes.png", "strategies.html"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/0001").mkdir(parents=True)
    for path in ("settings.toml", "runs/0001/config.toml"):
        write_config(default_settings(LM), tmp_path / path)
    [own] = [block for block in blocks("python") if block.startswith(OWN)]
    (tmp_path / "forecast.py").write_text(own)
    for command in commands(page):
        _parse(command)


def test_the_schedule_is_the_real_one():
    schedule = make_schedule("1f1b", 4, 2, 2)
    assert schedule.to_text() + "\n" in blocks("text")
    assert show(schedule).to_svg() == (ROOT / "docs/schedule.svg").read_text()


def test_links_lead_somewhere():
    for page in PAGES:
        folder = (ROOT / page).parent
        for link in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (folder / link).exists(), (page, link)


def test_the_reference_is_built_of_every_public_name(tmp_path):
    run("-m", "pdoc", "-d", "google", "jaxpar", "-o", "site", cwd=tmp_path)
    page = (tmp_path / "site/jaxpar.html").read_text()
    modules = {"nn", "pipeline", "planning", "analysis", "lm", "images"}
    for name in {*jaxpar.__all__} - modules:
        assert f'id="{name}"' in page, name
    for module in ("nn", "pipeline", "planning", "analysis"):
        assert (tmp_path / f"site/jaxpar/{module}.html").exists()


def test_the_page_of_model_parallelism_shows_what_its_command_prints():
    printed = run("-m", "benchmarks.model_parallel.count", cwd=ROOT)
    page = (ROOT / "benchmarks/model_parallel/README.md").read_text()
    tables = printed.strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert table in page
