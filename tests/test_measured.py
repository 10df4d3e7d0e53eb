"""Measured steps: every unit of the schedule ran, when what it needs was there."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from lib import api
from lib.measured import BACKWARD, FORWARD, HEAD, Own, make_measured
from lib.models import Regress
from lib.seen import boxes, opened

import jaxpar
from jaxpar import (
    MeshConfig,
    Parallel,
    PipelineConfig,
    show,
)
from jaxpar.lm import LM
from jaxpar.pipeline import make_schedule

TASK = LM(num_layers=4, hidden_size=8, embed_size=8, vocab_size=32, batch_size=8, seq_len=4)


def parallel_of(mesh, **pipeline):
    return Parallel(mesh, PipelineConfig(**pipeline))


@pytest.fixture(scope="module")
def measured():
    parallel = parallel_of(
        MeshConfig(data=2, stage=2, tensor=2), num_microbatches=2, num_chunks=2, head="last"
    )
    return jaxpar.measure_step(TASK, parallel, num_steps=1)


def times(measured):
    """(part but W, virtual stage, unit) -> begin and end of the layers, which follow the embedding."""
    s, found = measured.schedule, {}
    for span in sorted(measured.spans, key=lambda span: span.start):
        if span.part not in (FORWARD, HEAD, BACKWARD):
            continue
        lane = s.backward if span.part == BACKWARD else s.forward
        unit, group = (int(a[span.tick, span.stage]) for a in (lane.unit, lane.group))
        key = (span.part, group * s.num_stages + span.stage, unit)
        start, end = found.get(key, (span.start, 0.0))
        found[key] = (start, max(end, span.start + span.seconds))
    return found


def check_order(measured):
    s = measured.schedule
    found, stages = times(measured), s.num_stages * s.num_groups
    units = {key for key in found if key[0] != HEAD}
    assert units == {
        (part, p, u)
        for part in (FORWARD, BACKWARD)
        for p in range(stages)
        for u in range(s.num_units)
    }
    for (part, p, unit), (start, end) in found.items():
        assert 0 <= start < end <= measured.loop_seconds * (1 + 1e-6)
        before = {FORWARD: (FORWARD, p - 1, unit), BACKWARD: (BACKWARD, p + 1, unit)}.get(part)
        if before in found:
            assert found[before][0] < start
            # What a unit needs has been computed: it is the neighbour's result.
            assert found[before][1] <= start + SLACK
        if part == BACKWARD:
            assert found[FORWARD, p, unit][1] <= start + SLACK


# Nothing is free of the clock's grain.
SLACK = 1e-6


@pytest.mark.full
def test_units_run_when_what_they_need_is_there(measured):
    check_order(measured)
    heads = [span for span in measured.spans if span.part == HEAD]
    assert [span.stage for span in heads] == [1] * 4  # on the last stage, once a unit


@pytest.mark.full
def test_an_interleaved_pipeline_with_a_split_head_is_measured():
    parallel = parallel_of(
        MeshConfig(stage=2, devices=(3, 1)),
        schedule="interleaved", num_groups=2, num_microbatches=2,
    )  # fmt: skip
    measured = jaxpar.measure_step(TASK, parallel, num_steps=1)
    check_order(measured)
    heads = [span.stage for span in measured.spans if span.part == HEAD]
    assert sorted(heads) == [0, 0, 1, 1]


@pytest.mark.full
def test_w_runs_after_its_backward_on_every_stage():
    parallel = parallel_of(
        MeshConfig(stage=2, devices=(0, 1)), num_microbatches=4, zero_bubble=True
    )
    measured = jaxpar.measure_step(TASK, parallel, num_steps=1)
    ends, found = {}, []
    for span in measured.spans:
        if span.part == BACKWARD:
            unit = int(measured.schedule.backward.unit[span.tick, span.stage])
            # What follows it with dx, the gradient of what comes before the layers, need not be before W.
            ends[span.stage, unit] = min(
                span.start + span.seconds, ends.get((span.stage, unit), math.inf)
            )
    for span in measured.spans:
        if span.part.startswith("weights"):
            lane = measured.schedule.weights[int(span.part.removeprefix("weights"))]
            unit = int(lane.unit[span.tick, span.stage])
            found.append((span.stage, unit))
            assert span.start >= ends[span.stage, unit] - SLACK
    assert sorted(found) == sorted(ends)
    assert len(found) == 2 * 4
    assert "ms W," in " ".join(str(measured).split())
    assert ">W" in show(measured)._repr_svg_()


@pytest.mark.full
def test_layers_without_a_w_of_their_own_are_shown_as_they_run():
    parallel = parallel_of(MeshConfig(stage=2, devices=(0, 1)), zero_bubble=True)
    measured = jaxpar.measure_step(Regress(("gru", "gru")), parallel, num_steps=1)
    assert measured.schedule.title == "1f1b"
    assert not measured.schedule.weights
    assert 0 < measured.predicted_bubble < 1


@pytest.mark.full
def test_a_task_of_ones_own_is_measured_on_its_own_layout():
    measured = jaxpar.measure_step(Own(), num_steps=1)
    check_order(measured)
    heads = [span.stage for span in measured.spans if span.part == HEAD]
    assert heads == [2, 2]  # the model has no `last_part`


@pytest.mark.full
def test_a_group_with_fewer_microbatches_waits_for_the_others():
    # Three microbatches for the second group, one for the first, which is shown.
    parallel = Parallel(MeshConfig(data=2, stage=2, devices=(0, 1, 2, 3)), shares=(1, 3))
    measured = jaxpar.measure_step(TASK, parallel, num_steps=1)
    check_order(measured)
    assert measured.schedule.num_microbatches == 1


@pytest.mark.full
def test_busy_and_idle_time_are_all_of_the_loop(measured):
    assert all(0 < busy < measured.loop_seconds for busy in measured.busy_seconds)
    assert 0 < measured.bubble < 1
    assert measured.loop_seconds < measured.step_seconds < 1.2 * measured.traced_seconds
    assert measured.late < measured.bubble
    assert measured.num_devices == 8
    text = " ".join(str(measured).split())
    assert f"idle {measured.bubble:.1%}, predicted {measured.predicted_bubble:.1%}" in text
    cost = r"With the profiler a step takes [\d.]+ ms, without it [\d.]+ ms\."
    assert re.search(cost, text)


@pytest.mark.parametrize(
    ("heads", "busy", "loop"), [((0, 1), (21, 21), 27), ((1,), (18, 21), 27)],
)  # fmt: skip
def test_what_runs_as_predicted_is_shown_so(heads, busy, loop):
    measured = make_measured(heads)
    head_S = [float(stage in heads) for stage in range(2)]
    assert [seconds_S.tolist() for seconds_S in measured.unit_seconds] == [
        [2, 2], [4, 4], [0, 0], head_S,
    ]  # fmt: skip
    assert measured.busy_seconds == busy
    assert measured.predicted_seconds == measured.loop_seconds == loop
    assert measured.bubble == measured.predicted_bubble == pytest.approx(1 - sum(busy) / loop / 2)
    assert measured.late == 0
    rows = show(measured).chart.rows
    assert [row.name for row in rows[:2]] == ["stage 0 predicted", "measured"]
    for predicted, found in zip(rows[::2], rows[1::2], strict=True):
        assert list(predicted.spans) == list(found.spans) == [(0, 1000 * loop)]
        for letter in "BH":
            own, of_found = (
                [b for b in sorted(row.blocks, key=lambda b: b.start) if b.letter == letter]
                for row in (predicted, found)
            )
            assert own == of_found
    figure, svg = show(measured).to_figure(), show(measured)._repr_svg_()
    drawn = {left: width for left, _, width, _, color in boxes(figure) if color != api.IDLE}
    blocks = {b.letter: drawn[min(drawn, key=lambda x: abs(x - b.start))] for b in rows[-1].blocks}
    # A gap on either side.
    assert blocks["B"] == pytest.approx(blocks["H"] * 4, rel=0.1)
    idle = f"idle {measured.bubble:.1%}, predicted {measured.bubble:.1%}"
    assert idle in svg
    # The schedule alone is drawn as it always is.
    plain = make_schedule("1f1b", 2, 3)
    assert measured.schedule.bubble == plain.bubble
    assert show(measured.schedule)._repr_svg_() == show(plain)._repr_svg_()
    assert f"Idle time by cause: {measured.bubble:.1%} the schedule (with measured unit" in svg


def test_the_caption_says_why_a_step_is_not_as_predicted():
    as_planned = make_measured()
    # Every second unit of time passes without work: half of the loop, whatever the schedule.
    spans = tuple(span._replace(start=2 * span.start) for span in as_planned.spans)
    late = make_measured(spans=spans, loop_seconds=2 * as_planned.loop_seconds)
    assert late.late == pytest.approx(0.5)
    assert late.bubble - late.late == pytest.approx(as_planned.bubble / 2)
    text = " ".join(str(late).split())
    assert (
        "50.0% waiting for data or a core. The pipeline takes 54000.0 ms (predicted 27000.0 ms"
        in text
    )
    assert "2 devices on 2 cores." in text
    # Where stage 0 has a forward unit, that of stage 1 is shorter: it waits for stage 0, by the schedule.
    both_T = (as_planned.schedule.forward.unit >= 0).all(axis=1)
    spans = tuple(
        span._replace(seconds=0.5) if both_T[span.tick] and span[::2][:2] == (1, FORWARD) else span
        for span in as_planned.spans
    )
    quick = make_measured(spans=spans)
    assert quick.bubble > as_planned.bubble
    assert quick.late == pytest.approx(0)
    shared = " ".join(str(make_measured(num_devices=8)).split())
    assert "8 devices share 2 cores, so each waits at least 75% of the time" in shared


@pytest.mark.parametrize(
    ("mesh", "others", "message"),
    [
        ({"data": 2}, {}, "no pipeline to measure\\nFix: give a mesh with stages"),
        ({"stage": 2}, {"update": "host"}, "update='host' is not one program"),
    ],
)
def test_what_cannot_be_measured_is_said(mesh, others, message):
    with pytest.raises(ValueError, match=message):
        jaxpar.measure_step(TASK, Parallel(MeshConfig(**mesh, devices=(0, 1)), **others))


@pytest.mark.full
def test_the_command_draws_a_measured_step(tmp_path, capsys):
    path = tmp_path / "timeline.svg"
    small = ["--num-layers", "2", "--hidden-size", "8", "--embed-size", "8"]
    small += ["--vocab-size", "32", "--batch-size", "8", "--seq-len", "4"]
    flags = ["--mesh", "pp2dp4", "--pipeline.num-chunks", "2"]
    assert api.command("plot", "timeline", "lm", *flags, *small, "-o", str(path)) == 0
    pixels, words = opened(path)
    assert pixels.mean() > 0.5
    assert "stage 1 predicted measured" in words
    assert "#0072b2" in path.read_text()  # units of microbatch 0: how wide is the clock's


@pytest.mark.full
def test_a_profiled_run_has_a_trace_of_three_steps(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_text("the cat sat on the mat\n" * 100)
    out = tmp_path / "run"
    flags = [
        "train", "lm", "--mesh", "pp2", "--devices", "0", "1", "--corpus", str(text),
        "--batch-size", "8", "--seq-len", "4", "--num-layers", "2",
        "--hidden-size", "8", "--embed-size", "8", "--train.out-dir", str(out),
        "--optimizer.warmup-steps", "0",
    ]  # fmt: skip
    assert api.command(*flags, "--profile", "--train.num-steps", "4") == 2
    assert "at least 5 for a profile" in capsys.readouterr().err
    assert not out.exists()
    assert api.command(*flags, "--profile", "--train.num-steps", "6") == 0
    [path] = out.rglob("perfetto_trace.json.gz")
    assert f"{path}; view it at ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    runs = {
        (event["args"]["run_id"], event["args"]["device_ordinal"])
        for event in events
        if event.get("args", {}).get("hlo_module") == "jit_step"
    }
    assert len(runs) == 3 * 2
    # Another run in its place has no profile.
    assert api.command(*flags, "--overwrite", "--train.num-steps", "1") == 0
    assert [*out.rglob("perfetto_trace.json.gz")] == []


def test_the_page_says_what_its_picture_shows():
    docs = Path(__file__).parent.parent / "docs"
    svg, page = ((docs / name).read_text() for name in ("timeline.svg", "scale/inspect.md"))
    idle, predicted = re.search(r"idle ([\d.]+)%, predicted ([\d.]+)%", svg).groups()
    explained = re.search(r"Idle time by cause: ([\d.]+)% the schedule", svg)[1]
    says = f"of {idle} % idle time the schedule explains {explained}, as predicted ({predicted})"
    assert says in " ".join(page.split())
