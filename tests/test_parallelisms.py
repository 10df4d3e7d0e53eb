"""Four ways to share one model's step: what is drawn is what the layouts hold, send and wait for."""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from lib import api
from lib.browser import browse, needs_browser, rgb
from lib.models import Regress, Tokens

from jaxpar import (
    MeshConfig,
    Parallel,
    PipelineConfig,
    inspect_step,
    show,
)
from jaxpar.analysis import inspect_function
from jaxpar.lm import LM
from jaxpar.planning import compare_parallelisms

ROOT = Path(__file__).parent.parent
Digits = api.task_class(f"{ROOT}/examples/hybrid.py:Digits")
TASK = LM(4, 128, 128, vocab_size=1920, batch_size=32, seq_len=16)
WAYS = [f"{way} parallelism" for way in ("data", "tensor", "model", "pipeline")]
FORWARD, SENDING = 0, 4
FOUR = MeshConfig(-1, devices=(0, 1, 2, 3))
NO_COMPILER = "no compiler for this machine is installed"


@pytest.fixture(scope="module")
def found():
    return compare_parallelisms(TASK, Parallel(FOUR, PipelineConfig(num_chunks=4)))


@pytest.fixture
def no_compiler():
    with api.parallelisms_are_estimated(NO_COMPILER):
        yield


@pytest.mark.full
def test_the_picture_of_any_model_says_what_its_compiled_steps_send_and_need():
    found = compare_parallelisms(Tokens(), FOUR)
    assert [each.name for each in found.drawn] == WAYS
    text, picture = str(found), show(found)._repr_svg_()
    for each in found.drawn[1:3]:
        report = inspect_step(Tokens(), each.cost.parallel)
        sent = {t.axes: t.sent_bytes for t in report.totals if t.sent_bytes >= 1000}
        words = [f"{api.format_bytes(size)} along {' '.join(axes)}" for axes, size in sent.items()]
        assert words
        for size in (*sent.values(), report.memory.total):
            assert api.format_bytes(size) in text
        assert f"sends {', '.join(words)}" in picture
        assert f"{api.format_bytes(report.memory.total)} on a device" in picture
        assert each.weight_bytes == report.memory.purposes["parameters"]
    data, tensor, model, pipeline = found.drawn
    # Most of the weights are in the table, which each device has whole.
    assert data.holds[0] == "all weights, rows 0-1"
    assert {*tensor.holds} == {
        f"{100 * tensor.weight_bytes / data.weight_bytes:.3g}% of all weights"
    }
    assert model.holds == pipeline.holds
    assert model.holds[1] == "layer 1, all of embed"
    assert model.weight_bytes > 0.7 * data.weight_bytes
    assert ">1: layer 1, all of embed<" in picture


@pytest.mark.full
def test_without_a_compiler_neither_bytes_nor_memory_are_shown(no_compiler):
    found = compare_parallelisms(Regress(("gru",) * 4), FOUR)
    for text in (" ".join(str(found).split()), show(found)._repr_svg_().replace("\n", " ")):
        assert f"are unknown: {NO_COMPILER}" in " ".join(re.sub("<.*?>", " ", text).split())
        assert "on a device" not in text
        assert not re.search(r"\d B along|B along|sends", text.replace("bytes sent by", ""))
    assert all(each.cost.program is None for each in found.drawn)
    assert all(each.cost.seconds_text.startswith("~") for each in found.drawn)


@pytest.mark.full
def test_a_long_list_of_what_a_stage_holds_is_told_whole(no_compiler):
    found = compare_parallelisms(Regress(("gru",) * 4), FOUR)
    model = found.drawn[-2]._replace(
        holds=("layer 0, all of " + ", ".join(f"part{n}" for n in range(9)),)
    )
    picture = show(dataclasses.replace(found, drawn=(model,)))._repr_svg_()
    assert " ...</text>" in picture
    assert "part8" in picture


@pytest.mark.full
def test_each_way_holds_and_sends_what_its_compiled_step_does(found):
    """Estimates alone would do for this model, apart from what a device holds."""
    for each in found.drawn:
        assert each.weight_bytes == each.cost.program.memory.purposes["parameters"]
        state = api.abstract_state(TASK, each.cost.parallel)
        assert each.weight_bytes == api.device_bytes(state.params)
        assert f"{each.cost.seconds_text} a step" in show(found)._repr_svg_()
    data, tensor, model, pipeline = found.drawn
    assert data.weight_bytes == 4 * tensor.weight_bytes == 4 * model.weight_bytes
    assert data.holds == tuple(f"all weights, rows {n}-{n + 7}" for n in (0, 8, 16, 24))
    assert set(tensor.holds) == {"25% of all weights"}
    ends = "1/4 of embedding, head"
    assert model.holds == pipeline.holds == tuple(f"layer {n}, {ends}" for n in range(4))


@pytest.mark.full
def test_blocks_take_the_estimated_time_and_leave_the_rest_idle(found):
    for each in found.drawn:
        parts, sends = each.cost.parts, each.cost.waiting
        assert max(b.start + b.cost for b in each.blocks) == pytest.approx(each.cost.seconds)
        for device in range(4):
            blocks = sorted(each.blocks_of(device), key=lambda block: block.start)
            for one, other in itertools.pairwise(blocks):
                assert one.start + one.cost <= other.start + 1e-12
        layers = [sum(b.cost for b in each.blocks_of(d) if b.unit < 3) for d in range(4)]
        assert max(layers) == pytest.approx(parts["layers"])
        sending = sum(b.cost for b in each.blocks_of(0) if b.unit == SENDING)
        assert 0 < sending < 1.001 * sends
    data, tensor, model, pipeline = ([each.idle_of(d) for d in range(4)] for each in found.drawn)
    assert max(data + tensor) < 1e-9
    # One of four computes; what all send at the end, and the update, are done by all.
    assert min(model) > 0.5 > max(pipeline) > min(pipeline) > 0


@pytest.mark.full
def test_what_is_split_over_data_as_well_is_not_held_whole(no_compiler):
    data = compare_parallelisms(TASK, Parallel(FOUR, fsdp=True)).drawn[0]
    assert data.holds[1] == "25% of all weights, rows 8-15"


@pytest.mark.full
def test_a_placement_in_words_is_drawn_as_its_work(no_compiler):
    """MXNet's: embedding and head alone, all time steps forward before the first goes back."""
    placement = "first | 0-1 | 2-3 | last"
    cut = PipelineConfig("gpipe", num_chunks=16, placement=placement)
    *_, model, pipeline = compare_parallelisms(TASK, Parallel(FOUR, cut)).drawn
    assert model.holds == pipeline.holds
    ends = "first, all of embedding", "last, all of head"
    assert model.holds == (ends[0], "layers 0-1", "layers 2-3", ends[1])
    assert pipeline.cost.parallel.pipeline.num_chunks == 16
    for each in (model, pipeline):
        forward = [sum(b.cost for b in each.blocks_of(d) if b.unit == FORWARD) for d in range(4)]
        assert forward[0] == forward[3] == 0 < forward[1] == pytest.approx(forward[2])
    assert model.idle_of(0) > 0.9
    assert 16 <= sum(b.unit == FORWARD for b in pipeline.blocks_of(1)) <= 17


@pytest.mark.full
def test_a_step_of_one_unit_is_cut_as_is_quickest(no_compiler):
    found = compare_parallelisms(Regress(("gru",) * 4), FOUR)
    pipeline = found.drawn[-1].cost.parallel
    assert 1 < pipeline.num_units <= 8
    assert found.drawn[-1].cost.seconds < found.drawn[-2].cost.seconds


@pytest.mark.full
def test_cuts_that_a_task_refuses_are_passed_over(no_compiler):
    class Whole(Regress):
        def check(self, parallel):
            if parallel.num_chunks >= 4:
                raise ValueError("too short")

    assert compare_parallelisms(Whole(("gru",) * 4), FOUR).drawn[-1].cost.parallel.num_chunks < 4


@pytest.mark.more
@pytest.mark.parametrize(
    ("task", "devices", "left_out"),
    [
        (Regress(("gru", "dense")), 4, {2: "2 layers for 4 devices", 3: "2 layers for 4 devices"}),
        (Regress(("gru",) * 4, batch_size=2), 4, {0: "batch_size=2 "}),
        (Digits(batch_size=64), 4, {2: "0 layers for 4 devices", 3: "0 layers for 4"}),
    ],
    ids=["two layers", "two rows", "no layers"],
)
def test_a_way_that_is_left_out_says_why(task, devices, left_out, no_compiler):
    found = compare_parallelisms(task, MeshConfig(-1, devices=tuple(range(devices))))
    for number, why in left_out.items():
        assert why in found.left_out[WAYS[number]]
        for picture in (str(found), show(found)._repr_svg_()):
            assert f"{WAYS[number]} is left out" in picture
    assert [each.name for each in found.drawn] == [
        name for name in WAYS if name not in found.left_out
    ]


def test_tensor_parallelism_of_a_model_that_it_does_not_split_is_left_out(no_compiler):
    class Plain(Regress):
        rules = Regress().rules.replace(dict.fromkeys(("heads", "inner", "hidden"), None))

    found = compare_parallelisms(Plain(("dense",) * 4), FOUR)
    assert "tensor=4 splits no parameter\nFix: name dims" in found.left_out[WAYS[1]]


def test_each_way_that_a_task_refuses_is_left_out(no_compiler):
    class Uncut(Regress):
        def check(self, parallel):
            if parallel.mesh.stage > 1 and parallel.pipeline.schedule != "gpipe":
                raise ValueError("too short to cut")

    found = compare_parallelisms(Uncut(("gru",) * 4), FOUR)
    assert found.left_out == {WAYS[3]: "too short to cut"}

    class Whole(Regress):
        def check(self, parallel):
            if parallel.mesh.num_devices > 1:
                raise ValueError("too small to split\nFix: use one device")

    with pytest.raises(
        ValueError, match="no way to split the step over 4 devices: too small to split\nFix"
    ):
        compare_parallelisms(Whole(("dense",) * 4), FOUR)


def test_what_the_compiler_says_of_all_ways_is_said():
    fact = "with XLA_FLAGS='--xla_none=1' the compiler fails"
    message = f"no way to split the step over 2 devices: {fact}\n"
    with (
        api.compiler_of_parallelisms_fails(f"{fact}\nFix: take it out"),
        pytest.raises(ValueError, match=message),
    ):
        compare_parallelisms(Regress(("dense",) * 2), MeshConfig(-1, devices=(0, 1)))


def test_a_step_that_sends_next_to_nothing_says_so(no_compiler):
    found = compare_parallelisms(Regress(("dense",) * 4), FOUR)

    def says(parallelism):
        drawn = show(dataclasses.replace(found, drawn=(parallelism,)))._repr_svg_()
        return " ".join(texts_of(drawn))

    parallelism = found.drawn[0]
    assert " of weights" in says(parallelism)
    assert "sends" not in says(parallelism)
    report = inspect_function(lambda x: x + 1, jax.ShapeDtypeStruct((8,), jnp.float32))
    parallelism = parallelism._replace(cost=parallelism.cost.known(report))
    assert "of weights, sends nothing" in says(parallelism)


def test_one_device_shares_with_none():
    with pytest.raises(ValueError, match="a step cannot be split over one device\nFix: use two"):
        compare_parallelisms(TASK, MeshConfig(devices=(0,)))


def command_of(page):
    text = (ROOT / page).read_text()
    return [shlex.split(line) for line in text.splitlines() if " plot parallelisms " in line]


def texts_of(picture):
    return re.findall(r">([^<>]+)</t(?:ext|span)>", picture)


@pytest.mark.full
def test_the_picture_of_the_page_has_what_its_command_draws(tmp_path, no_compiler):
    """All but times, memory and bytes, which are from the machine's compiler: `test_aot` has the whole."""
    [command] = command_of("docs/concepts/parallelism.md")
    *arguments, output, place = command[3:]
    assert (output, place) == ("-o", "docs/parallelisms.svg")
    assert api.command(*arguments, "-o", str(tmp_path / "a.svg")) == 0
    drawn, stored = (tmp_path / "a.svg").read_text(), (ROOT / place).read_text()
    names = [text for text in texts_of(drawn) if re.match(r"\d: |\w+ parallelism: $", text)]
    holds = re.findall(r"each holds [\d.]+ .?B of weights", drawn)
    assert (len(names), len(holds)) == (4 + 16, 4)
    assert [text for text in texts_of(stored) if text in names] == names
    assert re.findall(r"each holds [\d.]+ .?B of weights", stored) == holds
    assert stored.count(" on a device") == stored.count("sends ") == 4
    assert len(stored) < 120_000
    assert "<script" not in stored
    assert stored.count("http") == 2  # the names of SVG and its links


@pytest.mark.full
@needs_browser
def test_the_picture_moves_and_stands_still_where_motion_is_not_wanted(tmp_path, found):
    page = tmp_path / "parallelisms.html"
    colors = [api.PALETTE[number] for number in (0, 1, 5, 6, 3, 2)]
    # The moment that is seen: a delay below 0 begins within the animation.
    seen = []
    for seconds, flags in ((1, []), (5, []), (1, ["--force-prefers-reduced-motion"])):
        moment = f"animation-delay:-{seconds}s!important;animation-play-state:paused!important"
        picture = show(found)._repr_svg_()
        page.write_text(api.page("moves", f"{picture}<style>#later path{{{moment}}}</style>"))
        pixels, console, urls = browse(page, tmp_path, *flags)
        assert (console, urls) == ([], set())
        solid = sum((pixels == rgb(color)).all(-1).sum() for color in colors)
        seen.append(int(solid))
    early, late, whole = seen
    assert 0 < early < 0.7 * late
    assert late < 0.95 * whole
