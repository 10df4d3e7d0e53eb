"""What a run leaves can be looked at: a table of its numbers, its curves, and how to go on."""

import dataclasses
import io
import math
import re
import shlex

import pandas
import pytest
from lib import api
from lib.browser import browse, needs_browser
from lib.models import Regress
from rich.console import Console

import jaxpar
from jaxpar import MeshConfig, OptimizerConfig, Parallel, Report, TrainConfig, fit, show
from jaxpar.lm import LM

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))


def points(number, height=1.0):
    return [(step, height * (1 + math.cos(step))) for step in range(1, number + 1)]


def ways_on(result):
    """What it says can be done with the run, and how."""
    printed = Console(width=1000, file=io.StringIO())
    printed.print(result)
    rows = re.findall(r"^(go on|evaluate|in Python) +(.*?) *$", printed.file.getvalue(), re.M)
    return dict(rows)


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """3 of 8 steps of a language model on one device."""
    adam = OptimizerConfig(warmup_steps=1)
    task = LM(1, 8, 8, corpus=str(text), batch_size=4, seq_len=4, optimizer=adam)
    report = Report()
    report.progress = lambda progress, _: progress.step == 3 and report.stop("enough")
    out_dir = str(tmp_path_factory.mktemp("runs") / "run")
    return fit(task, ONE, TrainConfig(8, log_every=1, eval_every=2, out_dir=out_dir), report=report)


@pytest.fixture(scope="module")
def result(stopped):
    """The same, resumed to its end by the line of Python that it shows."""
    line = ways_on(stopped)["in Python"]
    assert line == "jaxpar.fit(*result.setup.settings, resume=True)"
    return eval(line, {"jaxpar": jaxpar, "result": stopped})


@pytest.mark.full
def test_history_is_a_table_of_the_whole_run(result):
    table = pandas.DataFrame(result.history)
    assert table["step"].tolist() == [*range(1, 9)]
    assert result.first_step == 3
    assert table["train/loss"].iloc[3:].tolist() == result.losses
    assert table["train/learning_rate"].notna().all()
    assert table["valid/loss"].dropna().index.tolist() == [1, 2, 3, 5, 7]
    assert table["valid/perplexity"].iloc[-1] == result.evaluations["valid"].metrics["perplexity"]
    assert table["test/loss"].iloc[-1] == result.evaluations["test"].loss
    # A process's first line has no speed.
    assert table["train/tokens_per_second"].isna().tolist() == [
        True,
        *[False] * 2,
        True,
        *[False] * 4,
    ]
    assert {*table.dtypes.map(str)} == {"int64", "float64"}


@pytest.mark.full
def test_a_notebook_shows_what_came_of_it(result):
    shown = result._repr_html_()
    out_dir = result.out_dir
    for text in (
        *(
            "LM on dp1: 8 of 8 steps; loss ",
            "unigram perplexity",
            "training loss",
            "validation loss",
        ),
        f"python -m jaxpar train --resume --train.out-dir {out_dir}<",
        f"python -m jaxpar evaluate {out_dir}<",
        "jaxpar.fit(*result.setup.settings, resume=True)",
    ):
        assert text in shown
    assert len(shown) < 16_000  # a stored notebook stays small
    printed = Console(width=100, file=io.StringIO())
    printed.print(result)
    assert re.search(r"^[▁-█]{8} training loss *$", printed.file.getvalue(), re.M)


@pytest.mark.full
def test_what_it_says_to_go_on_works(result, capsys):
    ways = ways_on(result)
    assert [*ways] == ["go on", "evaluate", "in Python"]
    assert api.command(*shlex.split(ways["evaluate"])[3:]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.full
def test_a_task_that_is_in_no_file_goes_on_in_python_alone(tmp_path):
    own = dataclasses.make_dataclass("Own", [], bases=(Regress,), frozen=True)
    own.__module__ = "nowhere"  # as a notebook's class has no file
    result = fit(own(("dense",)), ONE, TrainConfig(1, out_dir=str(tmp_path / "run")), quiet=True)
    assert [*ways_on(result)] == ["in Python"]
    assert "python -m" not in result._repr_html_()


def test_a_curve_is_drawn_where_its_numbers_are():
    curves = api.curves(
        10,
        {"split": "train", "step": 0, "loss": 4.0}, {"split": "train", "step": 10, "loss": 2.0},
        {"split": "train", "step": 5, "loss": math.inf}, {"split": "valid", "step": 5, "loss": 3.0},
        {"split": "test", "step": 10, "loss": 9.0}, {"split": "skipped", "step": 7, "nonfinite": "loss"},
    )  # fmt: skip
    axes = show(curves).to_figure().axes[0]
    assert [name for name, spine in axes.spines.items() if spine.get_visible()] == [
        "left",
        "bottom",
    ]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"training loss": [[0, 4], [10, 2]], "validation loss": [[5, 3]]}
    assert ">validation loss</text>" in show(curves).to_html()
    assert show(api.curves(10)).to_html() == ""
    only = show(api.curves(10, {"split": "train", "step": 1, "loss": 2.0})).to_figure()
    assert [line.get_xydata().tolist() for line in only.axes[0].get_lines()] == [[[1, 2]]]


# What JupyterLab says of tables, and its dark theme, on a system that is light.
JUPYTER = """<style>body{background:#111}.lab td,.lab th{text-align:right}.lab tbody tr{color:#222;
background:#eee}.lab tbody tr:nth-child(odd){background:#fff}</style>"""


@pytest.mark.full
@needs_browser
def test_a_browser_shows_a_run_in_the_theme_of_the_notebook(result, tmp_path):
    page, body = tmp_path / "page.html", result._repr_html_()
    for number, height in ((1, 1.0), (3, 1e-4), (500, 1e5), (5_000, 0.5)):
        curves = api.curves(number)
        curves.points.update(train=points(number, height), valid=points(number // 50, height))
        body += f'<div class="jaxpar">{show(curves).to_html()}</div>'
    pixels = {}
    for is_light in ("true", "false"):
        inside = f'<div class="lab" data-jp-theme-light="{is_light}">{body}</div>'
        page.write_text(api.page("run", JUPYTER + inside))
        pixels[is_light], console, urls = browse(page, tmp_path)
        assert (console, urls) == ([], set())
    tables = {theme: shot[:120, 60:500] for theme, shot in pixels.items()}
    assert tables["false"].mean() < 60 < 200 < tables["true"].mean()
