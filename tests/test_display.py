"""Pictures: what they show is what is, and a browser shows them without help from elsewhere."""

import html
import html.parser
import itertools
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import rich
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_measured import make_measured

import jaxpar
from jaxpar import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig, make_schedule, show
from jaxpar.pictures.animation import make_animation, make_strategies
from jaxpar.pictures.picture import PALETTE, color_of, make_page, text_color_on
from jaxpar.state import abstract_state

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
        self.tag = tag

    def handle_data(self, data):
        if self.rows and self.rows[-1] and self.tag != "p":
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def config():
    return Config(
        mesh=MeshConfig(2, 2, 2),
        model=ModelConfig(num_layers=2, hidden_size=8, embed_size=8, vocab_size=32),
        pipeline=PipelineConfig(num_microbatches=2),
        data=DataConfig(batch_size=8, seq_len=4),
    )


@pytest.fixture(scope="module")
def mesh(config):
    return config.mesh.build()


def idle_share(picture):
    """Of the area of the rectangles: a unit's own height, its foot aside."""
    rects = re.findall(
        r'<rect (class="idle" \S+ )?x="\S+" width="(\S+)" y="\S+" height="24"', picture
    )
    widths = np.array([float(width) for _, width in rects])
    # Each is drawn a pixel narrower on either side.
    widths += 2 * np.where(widths > 6, 1, 0.3)
    return widths[[bool(idle) for idle, _ in rects]].sum() / widths.sum()


@pytest.mark.parametrize("args", SCHEDULES)
def test_the_grey_of_a_schedule_is_its_bubble_and_every_unit_is_drawn_once(args):
    schedule = make_schedule(*args)
    picture = schedule._repr_html_()
    assert idle_share(picture) == pytest.approx(schedule.bubble, abs=2e-3)  # tenths of pixels
    labels = re.findall(r"<title>(\S+)</title>", picture)
    places = schedule.num_stages * schedule.num_groups * schedule.num_units
    assert len(labels) == 2 * places
    assert len(set(labels)) == 2 * places / schedule.num_stages
    assert sum(label[0] == "B" for label in labels) == places
    assert f"bubble {schedule.bubble:.1%}" in picture
    assert ", ".join(map(str, schedule.live_units)) in picture
    text = str(show(schedule))
    assert sorted(re.findall(r"[FB]\d[\d./]*", text.split(args[0])[0])) == sorted(labels)
    assert max(map(len, text.splitlines())) <= 100


def test_a_long_schedule_says_what_it_leaves_out():
    schedule = make_schedule("1f1b", 4, 100, 4)
    left_out = re.search(r"<p>(\d+) ticks are left out", schedule._repr_html_())
    assert left_out is not None
    numbers = re.findall(r"\.\.\. (\d+) ticks are left out", str(show(schedule)))
    n = schedule.num_ticks
    assert (int(left_out[1]), *map(int, numbers)) == (n - 200, n - 48)
    assert len(re.findall("<title>", schedule._repr_html_())) < 2 * 4 * 200
    assert len(schedule._repr_html_()) < 500_000


def test_a_forward_only_schedule_has_no_backward_units():
    picture = make_schedule("1f1b", 3, 4, backward=False)._repr_html_()
    assert "backward" not in picture
    assert "<title>F3</title>" in picture


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
    assert [side.name.split("/")[0] for side in grid.sides] == [f"dim {d}" for d in split]
    found = {}
    for place, devices in grid.devices.items():
        labels = [side.labels[i] for side, i in zip(grid.sides, place, strict=True)]
        found |= dict.fromkeys(devices, labels)
    for shard in array.addressable_shards:
        ranges = [shard.index[dim].indices(shape[dim])[:2] for dim in split]
        assert found[shard.device.id] == [f"[{start}:{stop}]" for start, stop in ranges]
    # Both renderings have the devices of a place together, in the order of places.
    places = [" ".join(map(str, devices)) for devices in grid.devices.values()]
    chips = [cell.strip() for row in Rows(grid.to_html()).rows for cell in row if "[" not in cell]
    assert [cell for cell in chips if re.fullmatch(r"[\d ]+", cell)] == places
    lines = [line for line in str(grid).splitlines() if re.match("│[^│]*(dim|devices)", line)]
    cells = [" ".join(cell.split()) for line in lines for cell in line.split("│")]
    assert [cell for cell in cells if re.fullmatch(r"[\d ]+", cell)] == places


def test_a_picture_of_a_mesh_has_axes_around_devices():
    rows = Rows(MeshConfig(2, 2, 2)._repr_html_()).rows
    assert rows == [
        ["stage", "0", "1"],
        ["tensor", "0", "1", "0", "1"],
        ["data 0", "0", "1", "2", "3"],
        ["data 1", "4", "5", "6", "7"],
    ]
    rows = Rows(MeshConfig(stage=2, devices=(5, 3))._repr_html_()).rows
    assert rows[1] == ["devices", "5", "3"]
    assert "data takes as many more as there are" in str(show(MeshConfig(-1, 2)))


def test_many_devices_in_one_place_are_written_as_ranges(mesh):
    grid = show(mesh)
    grid.devices = {place: [*range(9), 12] for place in grid.devices}
    assert "0-8 12" in grid.to_html()
    assert "0-8 12" in str(grid)


def test_parameters_with_dims_axes_and_bytes_and_the_replicated_marked(config, mesh):
    state = abstract_state(config, mesh)
    rows = Rows(state._repr_html_()).rows
    dims = "layers/stage, input, gates, hidden/tensor"
    assert ["lstm.w_h", "2x8x4x8", dims, "1x8x4x4", "512 B"] in rows
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


def test_a_report_shows_the_same_in_text_and_html(mesh):
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    report = jaxpar.inspect_function(lambda x: x.sum(0), x)
    cells = [cell.strip() for row in Rows(report._repr_html_()).rows for cell in row]
    words = " ".join(str(report).split())
    assert "all-reduce" in cells
    for cell in cells:
        assert cell in words
    assert repr(report) == str(report)


def test_a_plan_shows_the_same_in_text_and_html(config):
    ranking = jaxpar.plan(config, 8, jaxpar.find_machine("h100"))
    for picture in (ranking, ranking.best):
        words = " ".join(str(picture).split())
        cells = [" ".join(cell.split()) for row in Rows(picture._repr_html_()).rows for cell in row]
        assert len(cells) > 8
        assert all(cell in words for cell in cells)
        assert repr(picture) == str(picture)
    assert ranking.explain().split(":")[0] in html.unescape(ranking._repr_html_())


def test_what_has_no_picture_is_an_error():
    with pytest.raises(ValueError, match="no picture of a int"):
        show(3)
    with pytest.raises(ValueError, match=r"shape \(3,\) has no sharding"):
        show(jax.ShapeDtypeStruct((3,), jnp.float32))


def test_labels_stand_out_from_their_background():
    def luminance(color):
        channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    for number in range(len(PALETTE)):
        for paleness in (0, 0.3, 0.65):
            color = color_of(number, paleness)
            low, high = sorted((luminance(color), luminance(text_color_on(color))))
            assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.2, level AA


def test_rich_prints_what_shows_itself(capsys):
    rich.print(make_schedule("1f1b", 2, 2))
    rich.print(MeshConfig(stage=2))
    printed = capsys.readouterr().out
    assert "bubble 33.3%" in printed
    assert "stage 1" in printed


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


# Writes to the console which text of an SVG is cut, or overlaps another of its picture.
LOOK = """<script>addEventListener("load", () => {
  for (const svg of document.querySelectorAll("svg:not(svg svg)")) {
    const inside = svg.getBoundingClientRect(), seen = [];
    for (const text of svg.querySelectorAll("text")) {
      const a = text.getBoundingClientRect(), say = what => console.error(text.textContent + what);
      if (!a.width) continue;
      if (a.left < inside.left - 1 || a.right > inside.right + 1 || a.top < inside.top - 1 ||
          a.bottom > inside.bottom + 1) say(" is cut");
      for (const [b, other] of seen)
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
          say(" overlaps " + other);
      seen.push([a, text.textContent]);
    }
  }
})</script>"""


def rgb(color):
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def browse(path, tmp_path, *flags, moment=""):
    """A picture of the page, what its console says, and the addresses that it asks for."""
    shot, log, page = (tmp_path / name for name in ("page.png", "net.json", "looked-at.html"))
    page.write_text(path.read_text() + LOOK)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--no-first-run", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", f"--log-net-log={log}", f"--user-data-dir={tmp_path / 'user'}",
            "--window-size=1100,1600", "--virtual-time-budget=2000", f"--screenshot={shot}",
            *flags, f"{page.as_uri()}#{moment}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert shot.exists(), done.stderr
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).astype(np.uint8)
    console = re.findall(r"CONSOLE.*", done.stderr)
    # The browser asks its maker for updates on its own; what a file asks for has the origin "null".
    asked = re.findall(r'"initiator":"null".*?"url":"([^"]+)"', log.read_text())
    return pixels, console, set(asked)


@needs_browser
def test_a_browser_shows_the_pictures_and_asks_nobody(config, mesh, tmp_path):
    state = abstract_state(config, mesh)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    things = (
        *(mesh, state, state.params["lstm"]["w_h"], make_schedule("interleaved", 4, 4, 1, 2)),
        jaxpar.inspect_function(lambda x: x.sum(0), x),
    )
    page = tmp_path / "page.html"
    body = "".join(show(thing)._repr_html_() for thing in things)
    measured = make_measured()
    body += "".join(show(make_schedule("1f1b", 4, *units)).to_svg() for units in ((20, 2), (1, 1)))
    body += measured.to_svg()
    body += measured._repr_html_()
    page.write_text(make_page("pictures", body))
    pixels, console, urls = browse(page, tmp_path)
    assert (console, urls) == ([], set())
    assert set(map(rgb, PALETTE)) <= set(map(tuple, pixels.reshape(-1, 3).tolist()))
    assert (pixels == 255).all(-1).mean() < 0.98
    dark, _, _ = browse(page, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark.mean() < 60 < 200 < pixels.mean()


@needs_browser
def test_the_browser_test_sees_errors_and_requests(tmp_path):
    page = tmp_path / "page.html"
    body = "<img src='https://example.com/x.png'><script>nothing.here()</script>"
    body += "<svg width='90'><text y='9'>long</text><text y='12'>over it</text></svg>"
    body += "<svg width='90'><text x='80' y='20'>too far</text></svg>"
    page.write_text(make_page("bad", body))
    _, console, urls = browse(page, tmp_path)
    for message in ("nothing is not defined", "over it overlaps long", "too far is cut"):
        assert any(message in line for line in console), console
    assert "https://example.com/x.png" in urls


def test_the_strategies_do_the_same_work_and_differ_in_waiting():
    strategies = {strategy.name.split()[0]: strategy for strategy in make_strategies(4, 2)}
    for strategy in strategies.values():
        assert sum(b.cost for b in strategy.blocks if b.label) == pytest.approx(4 * (1 + 2))
        for device in range(4):
            spans = sorted(
                (b.start, b.start + b.cost) for b in strategy.blocks if b.stage == device
            )
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    assert {name: s.busy for name, s in strategies.items()} == pytest.approx(
        {
            "model": 1 - make_schedule("gpipe", 4, 1).bubble,
            "tensor": 1,
            "data": 1,
            "pipeline": 1 - make_schedule("1f1b", 4, 4, 2).bubble,
        }
    )
    # Every layer is held once, but with data parallelism by every device.
    for name, strategy in strategies.items():
        held = sum(stop - start for parts in strategy.holds for _, start, stop in parts)
        assert held == (16 if name == "data" else 4)


@needs_browser
def test_the_animation_runs_in_a_browser(tmp_path):
    page = tmp_path / "strategies.html"
    page.write_text(make_animation())
    assert page.stat().st_size < 100_000
    early, console, urls = browse(page, tmp_path, moment="t=2")
    assert (console, urls) == ([], set())
    late, console, _ = browse(page, tmp_path, moment="t=12")
    assert console == []
    # Colours are pale until their time has come.
    solid = [(pixels == rgb(color_of(0))).all(-1).sum() for pixels in (early, late)]
    assert 0 < solid[0] < 0.8 * solid[1]
