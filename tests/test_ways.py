"""Four ways to share one model's step: what is drawn is what the layouts hold, send and wait for."""

import functools
import itertools
import shlex
from pathlib import Path

import pytest
from models import Regress
from test_display import browse, needs_browser, rgb

from jaxpar import MeshConfig, Parallel, PipelineConfig, inspect_step, show
from jaxpar.base.checks import require
from jaxpar.base.display import format_bytes
from jaxpar.base.trees import device_bytes
from jaxpar.cli.main import main
from jaxpar.mesh import find_devices
from jaxpar.pictures.strategies import COLORS
from jaxpar.pictures.style import make_page
from jaxpar.planning import strategies
from jaxpar.setup import Setup
from jaxpar.state import abstract_state
from jaxpar.tasks.images import Images
from jaxpar.tasks.lm import LM

ROOT = Path(__file__).parent.parent
TASK = LM(4, 128, 128, vocab_size=1920, batch_size=32, seq_len=16)
WAYS = [f"{way} parallelism" for way in ("data", "tensor", "model", "pipeline")]
FORWARD, SENDING = 0, 4
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FOUR = MeshConfig(-1, devices=(0, 1, 2, 3))


@pytest.fixture(scope="module")
def found():
    return strategies(TASK, Parallel(FOUR, PipelineConfig(num_chunks=4)))


@pytest.mark.parametrize(
    ("number", "near"), [(0, 0.01), slow(1, 0.1), slow(2, 0.03), (3, 0.03)], ids=str
)
def test_each_way_holds_and_sends_what_its_compiled_step_does(found, number, near):
    each = found.drawn[number]
    mesh = each.cost.parallel.mesh.build(find_devices()[:4])
    report = inspect_step(Setup.of(TASK, each.cost.parallel, mesh=mesh))
    assert each.weight_bytes == report.memory.purposes["parameters"]
    [(axes, sent)] = each.cost.sent_along.items()
    compiled = sum(total.sent_bytes for total in report.totals if total.axes == axes)
    assert sent == pytest.approx(compiled, rel=near)


def test_the_picture_says_who_holds_and_sends_what(found):
    assert [each.name for each in found.drawn] == WAYS
    picture = show(found).to_svg()
    for each in found.drawn:
        mesh = each.cost.parallel.mesh.build(find_devices()[:4])
        state = abstract_state(Setup.of(TASK, each.cost.parallel, mesh=mesh))
        assert each.weight_bytes == device_bytes(state.params)
        [(axes, sent)] = each.cost.sent_along.items()
        for words in (
            f"{each.cost.seconds_text} a step",
            f"{each.cost.memory_text} on a device",
            f"each holds {format_bytes(each.weight_bytes)} of weights",
            f"sends {format_bytes(sent)} along {axes[0]}",
        ):
            assert words in picture
    data, tensor, model, pipeline = found.drawn
    assert data.weight_bytes == 4 * tensor.weight_bytes == 4 * model.weight_bytes
    assert data.holds == tuple(f"all layers, rows {n}-{n + 7}" for n in (0, 8, 16, 24))
    assert set(tensor.holds) == {"25% of all layers"}
    assert model.holds == pipeline.holds == tuple(f"layer {n}" for n in range(4))


def test_blocks_take_the_estimated_time_and_leave_the_rest_idle(found):
    for each in found.drawn:
        parts = each.cost.parts
        assert max(b.start + b.cost for b in each.blocks) == pytest.approx(each.cost.seconds)
        for device in range(4):
            blocks = sorted(each.blocks_of(device), key=lambda block: block.start)
            for one, other in itertools.pairwise(blocks):
                assert one.start + one.cost <= other.start + 1e-12
        layers = [sum(b.cost for b in each.blocks_of(d) if b.unit < 3) for d in range(4)]
        assert max(layers) == pytest.approx(parts["layers"])
        sending = sum(b.cost for b in each.blocks_of(0) if b.unit == SENDING)
        assert 0 < sending < 1.001 * parts["sending"]
    data, tensor, model, pipeline = ([each.idle_of(d) for d in range(4)] for each in found.drawn)
    assert max(data + tensor) < 1e-9
    # One of four computes; what all send at the end, and the update, are done by all.
    assert min(model) > 0.5 > max(pipeline) > min(pipeline) > 0


def test_what_is_split_over_data_as_well_is_not_held_whole():
    data = strategies(TASK, Parallel(FOUR, fsdp=True)).drawn[0]
    assert data.holds[1] == "25% of all layers, rows 8-15"


def test_a_placement_in_words_is_drawn_as_its_work():
    """MXNet's: embedding and head alone, all time steps forward before the first goes back."""
    placement = "first | 0-1 | 2-3 | last"
    cut = PipelineConfig("gpipe", num_chunks=16, placement=placement)
    *_, model, pipeline = strategies(TASK, Parallel(FOUR, cut)).drawn
    assert model.holds == pipeline.holds == ("first", "layers 0-1", "layers 2-3", "last")
    assert pipeline.cost.parallel.pipeline.num_chunks == 16
    for each in (model, pipeline):
        forward = [sum(b.cost for b in each.blocks_of(d) if b.unit == FORWARD) for d in range(4)]
        assert forward[0] == forward[3] == 0 < forward[1] == pytest.approx(forward[2])
    assert model.idle_of(0) > 0.9
    assert 16 <= sum(b.unit == FORWARD for b in pipeline.blocks_of(1)) <= 17


def test_a_step_of_one_unit_is_cut_as_is_quickest():
    found = strategies(Regress(("gru",) * 4), FOUR)
    pipeline = found.drawn[-1].cost.parallel
    assert 1 < pipeline.num_units <= 8
    assert found.drawn[-1].cost.seconds < found.drawn[-2].cost.seconds


def test_cuts_that_a_task_refuses_are_passed_over():
    class Whole(Regress):
        def check(self, parallel):
            require(parallel.num_chunks < 4, "too short")

    assert strategies(Whole(("gru",) * 4), FOUR).drawn[-1].cost.parallel.num_chunks < 4


@pytest.mark.parametrize(
    ("task", "devices", "left_out"),
    [
        (Regress(("gru", "dense")), 4, {2: "2 layers for 4 devices", 3: "2 layers for 4 devices"}),
        (Regress(("gru",) * 4, batch_size=2), 4, {0: "batch_size=2 "}),
        (Images(batch_size=64), 4, {2: "0 layers for 4 devices", 3: "0 layers for 4"}),
    ],
    ids=["two layers", "two rows", "images"],
)
def test_a_way_that_is_left_out_says_why(task, devices, left_out):
    found = strategies(task, MeshConfig(-1, devices=tuple(range(devices))))
    for number, why in left_out.items():
        assert why in found.left_out[WAYS[number]]
        for picture in (str(found), show(found).to_svg()):
            assert f"{WAYS[number]} is left out" in picture
    assert [each.name for each in found.drawn] == [
        name for name in WAYS if name not in found.left_out
    ]


def test_tensor_parallelism_of_a_model_that_it_does_not_split_is_left_out():
    class Plain(Regress):
        rules = Regress().rules.replace(dict.fromkeys(("heads", "inner", "hidden"), None))

    found = strategies(Plain(("dense",) * 4), FOUR)
    assert "tensor=4 splits no parameter; name dims" in found.left_out[WAYS[1]]


def test_one_device_shares_with_none():
    with pytest.raises(ValueError, match="one device shares its step with none; use two"):
        strategies(TASK, MeshConfig(devices=(0,)))


def command_of(page):
    text = (ROOT / page).read_text()
    return [shlex.split(line) for line in text.splitlines() if " plot strategies " in line]


def test_the_picture_of_the_page_is_what_its_command_draws(tmp_path):
    [command] = command_of("docs/parallelism.md")
    *arguments, output, place = command[3:]
    assert (output, place) == ("-o", "docs/strategies.svg")
    assert main([*arguments, "-o", str(tmp_path / "a.svg")]) == 0
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (ROOT / place).read_text()
    assert len(drawn) < 60_000
    assert "<script" not in drawn
    assert drawn.count("http") == 1  # the name of SVG


@needs_browser
def test_the_picture_moves_and_stands_still_where_motion_is_not_wanted(tmp_path, found):
    page = tmp_path / "strategies.html"
    # The moment that is seen: a delay below 0 begins within the animation.
    seen = []
    for seconds, flags in ((1, []), (6, []), (1, ["--force-prefers-reduced-motion"])):
        moment = f"animation-delay:-{seconds}s!important;animation-play-state:paused!important"
        picture = show(found).to_svg()
        page.write_text(make_page("moves", f"{picture}<style>.later{{{moment}}}</style>"))
        pixels, console, urls = browse(page, tmp_path, *flags)
        assert (console, urls) == ([], set())
        solid = sum((pixels == rgb(color)).all(-1).sum() for color in COLORS)
        seen.append(int(solid))
    early, late, whole = seen
    assert 0 < early < 0.7 * late
    assert late < 0.95 * whole
