"""Pictures: what they show is what is, and a browser shows them without help from elsewhere."""

import dataclasses
import html
import html.parser
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lib import api
from lib.browser import browse, needs_browser, rgb
from lib.measured import make_measured
from lib.seen import boxes, labels
from rich.console import Console

from jaxpar import (
    ConsoleReport,
    MeshConfig,
    Parallel,
    PipelineConfig,
    TrainConfig,
    fit,
    init_state,
    load_run,
    show,
)
from jaxpar.analysis import inspect_function
from jaxpar.lm import LM
from jaxpar.pipeline import make_schedule
from jaxpar.planning import plan

SCHEDULES = (
    ("gpipe", 4, 8),
    ("1f1b", 4, 2, 4),
    ("1f1b", 3, 1, 5),
    ("interleaved", 4, 8, 1, 2),
    ("1f1b", 1, 2, 2),
)


class Rows(html.parser.HTMLParser):
    """The cells of all tables, row by row."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tag = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "br":
            self.rows[-1][-1] += "|"
        self.tag = tag

    def handle_data(self, data):
        if self.rows and self.rows[-1] and self.tag != "p":
            self.rows[-1][-1] += data


TASK = LM(num_layers=2, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4)
PARALLEL = Parallel(MeshConfig(2, 2, 2), PipelineConfig(num_microbatches=2))


@pytest.fixture(scope="module")
def mesh():
    return PARALLEL.mesh.build()


@pytest.mark.parametrize("args", SCHEDULES)
def test_the_grey_of_a_schedule_is_its_bubble_and_every_unit_is_drawn_once(args):
    schedule = make_schedule(*args)
    picture, html_of_it = show(schedule), schedule._repr_html_()
    figure, gap = picture.to_figure(), 2 / picture.chart.scale  # a pixel on either side
    areas = {True: 0.0, False: 0.0}
    for _, _, width, _, color in boxes(figure):
        areas[color == api.IDLE] += width + gap * (color != api.IDLE)
    assert 1 - areas[False] / areas[True] == pytest.approx(schedule.bubble)
    found = labels(figure)
    assert found == re.findall(r"<text[^>]*>([FB]\d[\d./]*)</text>", html_of_it)
    places = schedule.num_stages * schedule.num_groups * schedule.num_units
    assert len(found) == 2 * places
    assert len(set(found)) == 2 * places / schedule.num_stages
    assert sum(label[0] == "B" for label in found) == places
    assert f"bubble {schedule.bubble:.1%}" in html_of_it
    assert f"live units {' '.join(map(str, schedule.live_units))}" in html_of_it
    text = str(show(schedule))
    assert sorted(re.findall(r"[FB]\d[\d./]*", text.split(args[0])[0])) == sorted(found)
    assert max(map(len, text.splitlines())) <= 100


def test_a_long_schedule_says_what_it_leaves_out():
    schedule = make_schedule("1f1b", 4, 100, 4)
    left_out = re.search(r"ticks, (\d+) of them left out", schedule._repr_html_())
    assert left_out is not None
    n = schedule.num_ticks
    assert f"... {n - 48} ticks left out" in str(show(schedule))
    shown = n - int(left_out[1])
    assert 20 < shown < 60
    chart = show(schedule).chart
    assert 2200 < chart.width <= 2400  # and so there is room for every label:
    assert all(chart.fits(b) for row in chart.rows for b in row.blocks)
    lanes = (("F", schedule.forward), ("B", schedule.backward))
    expected = [
        schedule.label(f, lane.unit[t, s], 0)
        for f, lane in lanes
        for t in range(shown)
        for s in range(4)
    ]
    found = labels(show(schedule).to_figure())
    assert sorted(found) == sorted(label for label in expected if label != ".")
    for row in chart.rows:
        [(begin, end)] = row.spans
        assert all(begin <= b.start and b.start + b.cost <= end + 1e-6 for b in row.blocks)


def test_a_legend_has_a_sample_of_every_kind_of_block():
    schedule = make_schedule("interleaved", 2, 4, 2, 2, zero_bubble=True)
    chart = show(schedule).chart
    words = {key.text: key for key in chart.legend}
    for text in (
        "F3.1/1: forward of microbatch 3, chunk 1, through group 1 of the stage's layers",
        "B3.1/1: its backward for the inputs (dark band)",
        "W3.1/1: gradients of the weights (grey band)",
    ):
        assert words[text].colors == (chart.colors[7],)
    assert len({words[f"microbatch {m}"].colors for m in range(4)}) == 4


def test_the_time_left_is_that_of_the_mean_step(monkeypatch):
    """A save or an evaluation in one line is not one in every line to come."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    report = ConsoleReport(Console(width=100, file=io.StringIO()))
    numbers = {"loss": 1.0, "metrics": {}, "grad_norm": 1.0, "learning_rate": None, "unit": "rows"}
    for _ in range(2):  # two runs
        report.begin(0, 100, Path("runs/0001"))
        # One line of ten steps takes 20 s, the others 10 s.
        for step, time, eta in (
            (1, 5, "compiled"),
            (11, 15, "1:29"),
            (21, 35, "1:58"),
            (31, 45, "1:32"),
        ):
            now[0] = time
            progress = api.progress(
                step=step, **numbers, units_per_second=step > 1 or None, seconds=time
            )
            report.progress(progress, 100)
            assert eta in report.console.file.getvalue().splitlines()[-1]


def test_one_of_a_thing_is_said_so():
    caption = show(make_schedule("1f1b", 1, 1)).chart.caption
    assert caption.startswith("1f1b: 1 ticks; bubble 0.0%, live units 1")


@pytest.mark.parametrize("args", SCHEDULES)
def test_the_colours_of_a_text_are_those_of_the_picture(args):
    schedule = make_schedule(*args)
    chart = show(schedule).chart
    colors = {b.label: chart.colors[b.unit] for row in chart.rows for b in row.blocks}
    console = rich.console.Console(width=10_000)
    [text] = show(schedule).parts
    *texts, _ = text.__rich_console__(console, console.options)
    found = {t.plain[s.start : s.end]: str(s.style).split()[-1] for t in texts for s in t.spans}
    assert found == colors


def test_no_tick_is_cut_wherever_a_text_is_broken():
    schedule = make_schedule("1f1b", 2, 3, 2, zero_bubble=True)
    labels = sorted(b.label for b in schedule.blocks(schedule.unit_costs))
    for width in range(30, 80):
        console = Console(width=width, file=io.StringIO())
        console.print(show(schedule), highlight=False)
        shown = console.file.getvalue().split("1f1b")[0]
        assert sorted(re.findall(r"[FBW]\d\.\d", shown)) == labels


def test_a_picture_shrinks_to_the_page_and_stays_readable():
    html_of_it = make_schedule("1f1b", 4, 8, 4)._repr_html_()
    style = r'<svg style="max-width:100%;min-width:(\d+)pt" [^>]*width="([\d.]+)pt"'
    least, natural = map(float, re.search(style, html_of_it).groups())
    assert natural > 1000
    assert least == pytest.approx(0.7 * natural, abs=1)


def test_without_matplotlib_a_notebook_shows_the_text(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    picture = show(make_schedule("1f1b", 2, 2))
    assert "stage 1|" in picture._repr_html_()
    assert picture._repr_svg_() is None
    with pytest.raises(ValueError, match="needs the package matplotlib"):
        picture.to_figure()


def test_every_block_is_drawn_where_it_is():
    picture = show(make_measured())
    chart, figure = picture.chart, picture.to_figure()
    drawn, gap = [*boxes(figure)], 1 / chart.scale  # a pixel on either side
    expected = []
    for row in chart.rows:
        place = row.top + 1 / 26, 24 / 26
        expected += [(a, place[0], z - a, place[1], api.IDLE) for a, z in row.spans]
        expected += [
            (b.start + gap, place[0], b.cost - 2 * gap, place[1], chart.colors[b.unit])
            for b in row.blocks
        ]
    assert [box[4] for box in drawn] == [box[4] for box in expected]
    np.testing.assert_allclose(
        [b[:4] for b in drawn], [b[:4] for b in expected], rtol=1e-9, atol=1e-9
    )
    fitting = sorted(b.label for row in chart.rows for b in row.blocks if chart.fits(b))
    assert sorted(labels(figure)) == fitting


def test_a_forward_only_schedule_has_no_backward_units():
    picture = make_schedule("1f1b", 3, 4, backward=False)._repr_html_()
    assert "backward" not in picture
    assert ">F3</text>" in picture


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8,), P(("stage", "data"))),
        ((4, 6), P("data", "tensor")),
        ((4, 6), P()),
        ((2, 4, 6, 2), P("data", None, "tensor", "stage")),
        ((2, 4, 2, 6, 2), P(None, "stage", None, None, "data")),
    ],
)
def test_a_picture_of_a_sharded_array_has_every_device_at_its_shard(mesh, shape, spec):
    array = jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))
    grid = show(array)
    split = [d for d in range(len(shape)) if array.sharding.shard_shape(shape)[d] < shape[d]]
    found = {}
    for place, devices in grid.devices.items():
        labels = [label.rsplit(" ", 1) for label in place]
        assert [head.split("/")[0] for head, _ in labels] == [f"dim {d}" for d in split]
        found |= {device: [bounds for _, bounds in labels] for device in devices}
    for shard in array.addressable_shards:
        ranges = [shard.index[dim].indices(shape[dim])[:2] for dim in split]
        assert found[shard.device.id] == [f"[{start}:{stop}]" for start, stop in ranges]
    # Both renderings have the devices of a place together, in the order of places.
    places = [" ".join(map(str, devices)) for devices in grid.devices.values()]
    chips = [" ".join(cell.split()) for row in Rows(grid.to_html()).rows for cell in row]
    assert [cell for cell in chips if re.fullmatch(r"[\d ]+", cell)] == places
    lines = [line for line in str(grid).splitlines() if re.match("│[^│]*(dim|devices)", line)]
    cells = [" ".join(cell.split()) for line in lines for cell in line.split("│")]
    assert [cell for cell in cells if re.fullmatch(r"[\d ]+", cell)] == places


def test_a_picture_of_a_mesh_has_axes_around_devices():
    rows = Rows(MeshConfig(2, 2, 2)._repr_html_()).rows
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["", "stage 0|tensor 0", "stage 0|tensor 1", "stage 1|tensor 0", "stage 1|tensor 1"],
        ["data 0", "0", "1", "2", "3"],
        ["data 1", "4", "5", "6", "7"],
    ]
    rows = Rows(MeshConfig(stage=2, devices=(5, 3))._repr_html_()).rows
    assert [cell.strip() for cell in rows[1]] == ["devices", "5", "3"]
    assert "data takes all other devices" in str(show(MeshConfig(-1, 2)))


def test_a_picture_is_a_page_that_needs_no_other_file():
    picture = show(nnx.State({"a": nnx.Param(jnp.ones(2))}))
    page = picture.to_page("a & b")
    assert page.startswith("<!doctype html>")
    assert "<title>a &amp; b</title>" in page
    assert picture._repr_html_() in page


def test_parameters_with_dims_axes_and_bytes_and_the_replicated_marked(mesh):
    state = api.abstract_state(TASK, PARALLEL)
    rows = Rows(state._repr_html_()).rows
    dims = "layers/stage, input, gates, hidden/tensor"
    assert ["layers.lstm.w_h", "2x8x4x8", dims, "1x8x4x4", "512 B"] in rows
    assert "replicated" not in str(rows)
    params = {
        "bias": jax.device_put(jnp.zeros(4), NamedSharding(mesh, P())),
        "scale": jax.device_put(jnp.zeros((4, 2)), NamedSharding(mesh, P(None, "data"))),
    }
    rows = Rows(show(params)._repr_html_()).rows
    assert ["scale", "4x2", "-, -/data", "4x1", "16 B"] in rows
    assert ["bias", "4", "-, replicated", "4", "16 B"] in rows
    with pytest.raises(ValueError, match="parameter bias of shape"):
        show(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))))


def test_a_prompt_shows_names_and_shapes_and_no_numbers(text, tmp_path):
    task = dataclasses.replace(TASK, num_words=11, corpus=str(text))
    result = fit(task, "dp1", TrainConfig(1, out_dir=str(tmp_path / "run")), quiet=True)
    run = load_run(result.out_dir)
    assert repr(run) == f"<TextRun {result.out_dir}: LM after step 1>"
    assert "layers.lstm.w_h  2x8x4x8" in repr(run.params).splitlines()
    assert repr(run.params["head"]) == "bias  32\nkernel  8x32"
    assert len(repr(run.state)) < 100
    assert len(repr(jax.tree.map(jnp.isfinite, run.params))) < 1000
    assert nnx.state(run.model(), nnx.Param)["head"]["bias"].shape == (32,)


@dataclasses.dataclass(frozen=True)
class Frozen(LM):
    frozen = nnx.PathContains("embedding")


def test_frozen_parameters_have_a_table_of_their_own(mesh):
    options = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    state = init_state(Frozen(**options), PARALLEL, mesh=mesh)
    rows = Rows(state._repr_html_()).rows
    [heading] = [i for i, row in enumerate(rows) if row[0] == "frozen"]
    assert rows[0][0] == "parameter"
    assert [row[0] for row in rows[heading + 1 :]] == ["embedding.table"]
    assert "embedding.table" not in [row[0] for row in rows[:heading]]


def test_a_report_shows_the_same_in_text_and_html(mesh):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    report = inspect_function(lambda x: x.sum(0), x)
    cells = [cell.strip() for row in Rows(report._repr_html_()).rows for cell in row]
    words = " ".join(str(report).split())
    assert "all-reduce" in cells
    for cell in cells:
        assert cell in words
    assert repr(report) == str(report)


def test_a_plan_shows_the_same_in_text_and_html():
    ranking = plan(TASK, machine="h100:1x1x2", num_finalists=0)
    for picture in (ranking, ranking.best):
        words = " ".join(str(picture).split())
        cells = [" ".join(cell.split()) for row in Rows(picture._repr_html_()).rows for cell in row]
        assert len(cells) > 8
        assert all(cell in words for cell in cells)
        assert repr(picture) == str(picture)
    assert ranking.explain().split(":")[0] in html.unescape(ranking._repr_html_())


def test_what_has_no_picture_is_an_error():
    with pytest.raises(ValueError, match="no picture of type int"):
        show(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) has no sharding"):
        show(jax.ShapeDtypeStruct((3,), jnp.float32))


def test_rich_prints_what_shows_itself(capsys):
    rich.print(make_schedule("1f1b", 2, 2))
    rich.print(MeshConfig(stage=2))
    printed = capsys.readouterr().out
    assert "bubble 33.3%" in printed
    assert "stage 1" in printed


@needs_browser
def test_a_browser_shows_the_pictures_and_asks_nobody(mesh, tmp_path):
    state = api.abstract_state(TASK, PARALLEL)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    things = (
        *(
            mesh,
            state,
            state.params["layers"]["lstm"]["w_h"],
            make_schedule("interleaved", 4, 4, 1, 2),
        ),
        inspect_function(lambda x: x.sum(0), x),
    )
    page = tmp_path / "page.html"
    body = "".join(show(thing)._repr_html_() for thing in things)
    measured = make_measured()
    for thing in (*(make_schedule("1f1b", 4, *units) for units in ((20, 2), (1, 1))), measured):
        body += thing._repr_svg_()
    body += measured._repr_html_()
    page.write_text(api.page("pictures", body))
    pixels, console, urls = browse(page, tmp_path)
    assert (console, urls) == ([], set())
    assert set(map(rgb, api.PALETTE)) <= set(map(tuple, pixels.reshape(-1, 3).tolist()))
    assert (pixels == 255).all(-1).mean() < 0.98
    dark, _, _ = browse(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    # Tables heed the theme; figures are on white.
    assert (pixels == 255).all(-1).mean() > 0.5 < (dark == (18, 22, 28)).all(-1).mean()


@needs_browser
def test_the_browser_test_sees_errors_and_requests(tmp_path):
    page = tmp_path / "page.html"
    body = "<img src='https://example.com/x.png'><script>nothing.here()</script>"
    body += "<svg width='90'><text y='9'>long</text><text y='12'>over it</text></svg>"
    body += "<svg width='90'><text x='80' y='20'>too far</text></svg>"
    page.write_text(api.page("bad", body))
    _, console, urls = browse(page, tmp_path)
    for message in ("nothing is not defined", "over it overlaps long", "too far is cut"):
        assert any(message in line for line in console), console
    assert "https://example.com/x.png" in urls
