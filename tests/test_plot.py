"""Figures: what they draw is what is, nothing is cut, and the command writes them."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib.browser import rgb
from lib.seen import opened
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from jaxpar import MeshConfig, OptimizerConfig, Parallel, inspect_step
from jaxpar.analysis import inspect_function
from jaxpar.cli.commands import PICTURES, PICTURES_OF_RUNS
from jaxpar.cli.main import main
from jaxpar.cli.parse import read_command
from jaxpar.lm import LM
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Settings
from jaxpar.partition.partition import Partition
from jaxpar.pictures import figures
from jaxpar.pictures.style import PALETTE
from jaxpar.training.config_file import to_toml
from jaxpar.training.progress import Curves
from jaxpar.training.run_folder import RunFolder

TASK = LM(num_layers=2, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4)


def texts(figure):
    """Everything written in a figure, after a check that all of it is inside and no two overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, (width, height) = canvas.get_renderer(), canvas.get_width_height()
    found, not_drawn = [], set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                not_drawn |= {tick.label1, tick.label2}
    for text in set(figure.findobj(Text)) - not_drawn:
        box = text.get_window_extent(renderer)
        if not text.get_visible() or not text.get_text().strip():
            continue
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y1 <= height + 1, text
        found.append((text.get_text(), box))
    for i, (a, box) in enumerate(found):
        for b, other in found[i + 1 :]:
            assert a == b or not box.overlaps(other), f"{a!r} overlaps {b!r}"
    return [text for text, _ in found]


@pytest.mark.full
def test_figures_of_memory_and_bytes_add_up():
    parallel = Parallel(MeshConfig(data=2, tensor=4))
    report = inspect_step(TASK, parallel)
    memory = report.memory.parts
    assert sum(memory.values()) == report.memory.total
    # Two arrays of token numbers [4, 4] on a device, a flag, and what pads arguments.
    assert 128 <= memory["batch and schedule"] <= 512
    # Adam has two moments, and a counter.
    assert 0 < memory["optimizer state"] - 2 * memory["parameters"] <= 64
    assert "memory per device" in texts(figures.draw_memory({"a": report}))
    figure = figures.draw_bytes({"dp2tp4": report, "the same": report})
    sent = {" and ".join(total.axes): total.sent_bytes for total in report.totals}
    bars = {c.get_label(): [bar.get_width() for bar in c] for c in figure.axes[0].containers}
    assert {"along data", "along tensor"} <= set(bars)
    for label, sizes in bars.items():
        assert sizes == pytest.approx([sent[label.removeprefix("along ")]] * 2)
    assert "sent per device in a step" in " ".join(texts(figure))


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


def test_a_report_without_memory_has_no_figure_of_it():
    report = inspect_function(lambda x: x + 1, jax.ShapeDtypeStruct((8,), jnp.float32))
    assert "memory per device" in texts(figures.draw_memory({"a": report}))
    with pytest.raises(ValueError, match="reports no memory on this backend\nFix: use JAX_PLATFO"):
        figures.draw_memory({"a": report, "b": dataclasses.replace(report, memory=None)})


def test_collectives_that_are_not_counted_are_named():
    mesh = MeshConfig(data=8).build()
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    n = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))

    def loop(x, n):
        return jax.lax.while_loop(
            lambda carry: carry[0] < n,
            lambda carry: (
                carry[0] + 1,
                carry[1] + jnp.broadcast_to(carry[1].sum(0)[None], (8, 4)),
            ),
            (jnp.int32(0), x),
        )

    report = inspect_function(loop, x, n)
    assert report.totals[0].unknown == 1
    written = texts(figures.draw_bytes({"dp8": report}))
    assert any("without 1 collective in loops of unknown length" in text for text in written)


LINES = [
    {"split": "train", "step": step, "loss": 5 - step / 10, "tokens_per_second": speed}
    for step, speed in ((1, None), (10, 1e4), (20, 2e4))
] + [{"split": "valid", "step": 20, "loss": 4.0}]


def test_a_figure_of_curves_has_the_losses_of_runs():
    runs = {f"runs/000{n}": Curves(0).add(*LINES[: 5 - n]) for n in (1, 2)}
    figure = figures.draw_curves(runs)
    curves = [np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].get_lines()]
    train = [[1, 4.9], [10, 4.0], [20, 3.0]]
    assert curves == [train, [[20, 4.0]], train]
    assert {"loss", "step", "runs/0001, validation loss"} <= set(texts(figure))


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
    folder = RunFolder("run")
    folder.path.mkdir()
    folder.config_path.write_text(to_toml(Settings(TASK, LM.parallel, LM.train)))
    for line in LINES:
        folder.append_metrics(line)


def compiles(kind):
    return [pytest.mark.more] * (kind not in ("schedule", "curves"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=compiles(kind)) for kind in KINDS])
def test_programs_that_are_no_browsers_open_every_kind_of_picture(kind, a_run, tmp_path, capsys):
    """Papers and slides have them: dark on white, with their words, in the colors of the palette."""
    assert {*KINDS} == {*PICTURES, *PICTURES_OF_RUNS}
    arguments, words = KINDS[kind]
    for suffix in (".svg", ".png", ".pdf"):
        path = tmp_path / f"{kind}{suffix}"
        assert main(["plot", kind, *arguments, "-o", str(path)]) == 0
        assert capsys.readouterr().out.endswith(f"wrote {path}\n")
        pixels, text = opened(path)
        assert min(pixels.shape[:2]) > 70
        assert pixels.mean() > 0.6  # white between blocks and letters
        assert pixels.min() < 0.3
        first = np.array(rgb(PALETTE[0])) / 255
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
    assert main(["plot", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") <= 3
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_asked_for_where_a_picture_needs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plot", "memory", "lm", "--mesh", "pp4", "-o", "memory.png"]) == 2
    assert "needs the package matplotlib\nFix: pip install matplotlib" in capsys.readouterr().err
    assert main(["plot", "schedule", "lm", "--mesh", "pp4", "-o", "schedule.svg"]) == 2
    assert "needs the package matplotlib" in capsys.readouterr().err
    assert main(["plot", "schedule", "lm", "--mesh", "pp4"]) == 0
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_not_trained_has_no_curves(a_run, capsys):
    RunFolder("run").metrics_path.write_text(json.dumps(LINES[3]))
    assert main(["plot", "curves", "run", "-o", "a.svg"]) == 2
    assert "run has no training loss in its metrics.jsonl" in capsys.readouterr().err


def test_without_a_file_a_schedule_is_shown_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "schedule", "lm", "--mesh", "pp4"]) == 0
    assert "stage 3|" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_help_names_all_kinds_and_shows_what_works(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["plot", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for kind in (*PICTURES, *PICTURES_OF_RUNS):
        assert f'"{kind}"' in text
    [shapes] = re.findall(r"Meshes to compare in memory and bytes, such as ([^.]*)\.", text)
    facts = ModelFacts.of(LM().resolve())
    for shape in shapes.split():
        assert Partition(facts, Parallel.of(shape, LM.parallel)).parallel.mesh.num_devices == 8
    [runs] = re.findall(r"\(plot (curves [^)]*)\)", text)
    assert read_command(["plot", *runs.split(), "-o", "a.svg"]).runs == tuple(runs.split()[1:])
