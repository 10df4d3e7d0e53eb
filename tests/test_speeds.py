"""Stages of unequal speed: layers go where they are done sooner, and no loss changes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lib import api
from lib.laws import MODEL, on_devices
from lib.models import OfNoText, Regress

from jaxpar import MeshConfig, Parallel, PipelineConfig, init_state
from jaxpar.planning import estimate_step, find_machine, plan

END_SECONDS = 300  # which only a process that hangs takes
# A head of a quarter of a layer.
EIGHT = OfNoText(**vars(MODEL) | {"num_layers": 8, "vocab_size": 32})


def summary_of(stages, speeds, task=EIGHT, **pipeline):
    parallel = Parallel(on_devices((1, stages, 1)), PipelineConfig(**pipeline), speeds=speeds)
    return api.summary(task, parallel)


def placed(*args, **pipeline):
    """The number of layers on each place, and whether the head is on the last one."""
    words = re.search(r"\((.*)\)", summary_of(*args, **pipeline)["layers"])[1]
    ranges = [re.findall(r"(\d+)(?:-(\d+))?", place) for place in words.split("|")]
    numbers = (sum(int(end or begin) - int(begin) + 1 for begin, end in own) for own in ranges)
    return tuple(numbers), words.endswith("last")


@pytest.mark.parametrize(
    ("layers_in_head", "speeds", "asked", "head", "placement"),
    [
        (4, (3, 1), "last", "last", (8, 0)),
        (4, (3, 1), "auto", "sharded", (8, 0)),  # the slow stage has half of the head
        (16, (1, 3), "auto", "last", (2, 6)),
        (16, (1, 3), "sharded", "sharded", (0, 8)),
        (16, (3, 3), "auto", "sharded", (4, 4)),
    ],
)
def test_the_head_counts_as_work_where_speeds_differ(
    layers_in_head, speeds, asked, head, placement
):
    task = dataclasses.replace(EIGHT, vocab_size=8 * 16 * layers_in_head)
    assert placed(2, speeds, task, head=asked) == (placement, head == "last")


@pytest.mark.parametrize("placement", ["even", "0-3 | 4-7, last"])
def test_speeds_are_refused_where_they_would_change_nothing(placement):
    message = r"speeds=\(3, 1\) has no effect with placement=.*\nFix: use placement='balanced', or"
    with pytest.raises(ValueError, match=message):
        Parallel("pp2", PipelineConfig(placement=placement), speeds=(3, 1))


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    ("stages", "speeds", "pipeline", "placement"),
    [
        (4, (1, 1, 2, 2), {}, (1, 1, 3, 3)),
        (2, (3, 1), {}, (6, 2)),
        (2, (1.0, 7.0), {}, (1, 7)),
        (4, (1, 1, 1, 0.01), {}, (3, 3, 2, 0)),
        # Groups of a stage are as fast as it is, in the order of the schedule.
        (2, (1, 3), {"schedule": "interleaved", "num_groups": 2}, (1, 3, 1, 3)),
        (2, (1, 3), {"schedule": "v"}, (1, 3, 3, 1)),
        (2, (1, 3), {"placement": (4, 4)}, (4, 4)),
    ],
)
def test_fast_stages_have_more_layers(stages, speeds, pipeline, placement):
    for times in (1, 2):
        own = tuple(times * speed for speed in speeds)
        assert placed(stages, own, **pipeline)[0] == placement


def test_what_training_says_of_speeds():
    rows = summary_of(2, (1, 3.5), Regress())
    assert rows["speeds"] == "1 : 3.5"
    assert rows["time"].startswith("stage 0: ")
    assert "work" not in rows
    warning = summary_of(2, (1, 3.0), placement=(4, 4))["warning"]
    assert warning.startswith("placement=(4, 4): stages have unequal work and wait")
    assert "up to ~1.92 times as fast with placement=(2, 6)" in warning


@pytest.mark.full
def test_a_cost_goes_by_the_speeds():
    only_flops = dataclasses.replace(
        find_machine("v5e:1x2"), memory_bytes_per_second=1e20, loop_seconds=0.0, memory_bytes=1e12
    )
    task = dataclasses.replace(EIGHT, hidden_size=64, embed_size=64)
    units = PipelineConfig(num_chunks=4)
    plain, twice, uneven = (
        estimate_step(task, Parallel("pp2", units, speeds=speeds), None, only_flops)
        for speeds in (None, (2, 2), (1, 3))
    )
    assert twice.parts["layers"] == pytest.approx(plain.parts["layers"] / 2)
    assert twice.parts["head"] == pytest.approx(plain.parts["head"] / 2)
    assert uneven.parts["layers"] == pytest.approx(plain.parts["layers"] / 2)  # (2, 6) of (4, 4)
    # What is planned is for as many stages.
    ranking = plan(task, Parallel(speeds=(1, 3)), None, only_flops, num_finalists=0)
    assert {cost.parallel.mesh.stage for cost in ranking.fitting} == {2}
    assert ranking.best.parallel.speeds == (1, 3)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ((1, 0), r"speeds=\(1, 0\): must be positive"),
        ((1, -2.0), r"speeds=\(1, -2.0\): must be positive"),
        ((), r"speeds=\(\): must be positive"),
        ((1, float("inf")), "speeds="),
        ((1, 2, 3), r"speeds=\(1, 2, 3\): expected 2 \(stage\), got 3"),
    ],
)
def test_bad_speeds_are_refused(speeds, message):
    with pytest.raises(ValueError, match=message):
        init_state(EIGHT, Parallel(on_devices((1, 2, 1)), speeds=speeds))


def test_another_number_of_stages_has_no_speeds():
    parallel = Parallel("pp2", speeds=(1, 2))
    assert parallel.on_mesh(MeshConfig(data=2, stage=2)).speeds == (1, 2)
    assert parallel.on_mesh(MeshConfig(stage=4)).speeds is None


@pytest.mark.full
def test_two_processes_of_unequal_speed():
    """For real: both place the layers alike, and a step takes less time."""
    one_core = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lib") / "slow_process.py")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for environ in api.environments(2, 1, {**os.environ, "XLA_FLAGS": one_core})
    ]
    told = [process.communicate(timeout=END_SECONDS) for process in processes]
    for process, (_, said) in zip(processes, told, strict=True):
        assert process.returncode == 0, said
    found, other = (json.loads(printed) for printed, _ in told)
    assert found["placements"] == other["placements"]
    even, fitted = found["placements"]
    assert even == [4, 4]
    assert fitted[0] >= 5
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    even_seconds, fitted_seconds = found["times"]
    assert fitted_seconds < even_seconds
