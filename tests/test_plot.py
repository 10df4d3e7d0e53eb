"""Figures: what they draw is what is, nothing is cut, and the command writes them."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.browser import rgb
from lib.seen import opened

from jaxpar import MeshConfig, OptimizerConfig, Parallel, inspect_step
from jaxpar.lm import LM

TASK = LM(num_layers=2, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4)


@dataclasses.dataclass(frozen=True)
class Frozen(LM):
    frozen = nnx.PathContains("embedding")


@pytest.mark.full
def test_frozen_parameters_are_a_kind_of_memory():
    parallel, options = Parallel(MeshConfig(devices=(0,))), {"num_layers": 1, "vocab_size": 32}
    options |= {"hidden_size": 8, "embed_size": 8, "batch_size": 8, "seq_len": 4}
    found = {}
    for make in (LM, Frozen):
        task = make(**options, optimizer=OptimizerConfig(name="sgd"))
        found[make] = inspect_step(task, parallel).memory.parts
    assert found[LM]["frozen parameters"] == 0
    assert found[Frozen]["frozen parameters"] == 4 * 32 * 8
    sums = [kinds["parameters"] + kinds["frozen parameters"] for kinds in found.values()]
    assert sums[0] == sums[1]


LINES = [
    {"split": "train", "step": step, "loss": 5 - step / 10, "tokens_per_second": speed}
    for step, speed in ((1, None), (10, 1e4), (20, 2e4))
] + [{"split": "valid", "step": 20, "loss": 4.0}]


SMALL = ["--num-layers", "2", "--hidden-size", "8", "--embed-size", "8"]
SMALL += ["--vocab-size", "32", "--batch-size", "8", "--seq-len", "4"]
# Of each kind: its arguments, and words in it.
KINDS = {
    "schedule": (["lm", "--mesh", "pp3"], ("1f1b+zb", "stage 2", "microbatch 0", "tick")),
    "timeline": (["lm", "--mesh", "pp2dp4", *SMALL], ("stage 1 predicted", "measured", "ms")),
    "parallelisms": (
        ["lm", "--mesh", "dp8", *SMALL],
        ("data parallelism:", "0: all weights", "idle"),
    ),
    "memory": (["lm", "--mesh", "dp8", *SMALL], ("dp8", "optimizer state", "memory per device")),
    "bytes": (["lm", "--mesh", "dp8", *SMALL], ("dp8", "along data", "sent per device")),
    "curves": (["run"], ("loss", "step", "run, training loss")),
}


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """The folder `run`, in the present one, of a run with a few lines of metrics."""
    monkeypatch.chdir(tmp_path)
    folder = Path("run")
    folder.mkdir()
    (folder / "config.toml").write_text('task = "lm"\n')
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))


def compiles(kind):
    return [pytest.mark.more] * (kind not in ("schedule", "curves"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=compiles(kind)) for kind in KINDS])
def test_programs_that_are_no_browsers_open_every_kind_of_picture(kind, a_run, tmp_path, capsys):
    """Papers and slides have them: dark on white, with their words, in the colors of the palette."""
    arguments, words = KINDS[kind]
    for suffix in (".svg", ".png", ".pdf"):
        path = tmp_path / f"{kind}{suffix}"
        assert api.command("plot", kind, *arguments, "-o", str(path)) == 0
        assert capsys.readouterr().out.endswith(f"wrote {path}\n")
        pixels, text = opened(path)
        assert min(pixels.shape[:2]) > 70
        assert pixels.mean() > 0.6  # white between blocks and letters
        assert pixels.min() < 0.3
        first = np.array(rgb(api.PALETTE[0])) / 255
        assert (np.abs(pixels - first).max(-1) < 0.02).any(), path
        for word in words if text is not None else ():
            assert word in " ".join(text.split()), path
    svg = (tmp_path / f"{kind}.svg").read_text()
    assert "var(" not in svg
    assert "currentColor" not in svg


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["memory", "lm", "-o", "a.gif"],
            "cannot draw memory into 'a.gif'\nFix: use a file that ends in .svg, .png, .pdf, .html",
        ),
        (["parallelisms"], "plot parallelisms needs a task\nFix: use plot parallelisms lm"),
        (["parallelisms", "lm", "--devices", "0"], "a step cannot be split over one device"),
        (
            ["bytes", "lm", "--machine", "v5e:2x2", "-o", "a.png"],
            "machine='v5e:2x2' has no effect on bytes\nFix: leave it out",
        ),
        (["bytes", "lm"], "plot bytes needs a file\nFix: add one, such as -o bytes.svg"),
        (
            ["schedule", "lm", "-o", "no/a.svg"],
            "cannot write no/a.svg: No such file or directory",
        ),
        (["curves", "-o", "a.png"], "plot curves needs runs"),
        (["curves", "nowhere", "-o", "a.png"], "nowhere"),
        (["memory", "lm", "--meshes", "dp3x"], "mesh 'dp3x' is not made of axes"),
    ],
)
def test_a_picture_that_cannot_be_is_one_message(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert api.command("plot", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") <= 3
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_asked_for_where_a_picture_needs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert api.command("plot", "memory", "lm", "--mesh", "pp4", "-o", "memory.png") == 2
    assert "needs the package matplotlib\nFix: pip install matplotlib" in capsys.readouterr().err
    assert api.command("plot", "schedule", "lm", "--mesh", "pp4", "-o", "schedule.svg") == 2
    assert "needs the package matplotlib" in capsys.readouterr().err
    assert api.command("plot", "schedule", "lm", "--mesh", "pp4") == 0
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_not_trained_has_no_curves(a_run, capsys):
    Path("run/metrics.jsonl").write_text(json.dumps(LINES[3]))
    assert api.command("plot", "curves", "run", "-o", "a.svg") == 2
    assert "run has no training loss in its metrics.jsonl" in capsys.readouterr().err


def test_without_a_file_a_schedule_is_shown_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert api.command("plot", "schedule", "lm", "--mesh", "pp4") == 0
    assert "stage 3|" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_help_names_all_kinds_and_shows_what_works(capsys):
    with pytest.raises(SystemExit, match="0"):
        api.command("plot", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert api.command("plot", "nothing") == 2
    [kinds] = re.findall(r"with a KIND of ([^.]*)\.", capsys.readouterr().err)
    assert kinds.split(", ") == [*KINDS]
    for kind in KINDS:
        assert f'"{kind}"' in text
    [shapes] = re.findall(r"Meshes to compare in memory and bytes, such as ([^.]*)\.", text)
    for shape in shapes.split():
        assert Parallel(shape).mesh.build().size == 8
    [runs] = re.findall(r"\(plot (curves [^)]*)\)", text)
    assert api.command("plot", *runs.split(), "-o", "a.svg") == 2
    assert runs.split()[1] in capsys.readouterr().err
