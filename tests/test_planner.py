"""The planner against all configs that there are, its words against its numbers, and what is refused."""

import dataclasses
import itertools
import re
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_cost import laptop_here, own_cache, task_of  # noqa: F401
from test_equivalence import make_settings
from test_placement import all_placements

from jaxpar.cli.main import main
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.facts import ModelFacts
from jaxpar.layout import Layout
from jaxpar.mesh import MeshConfig
from jaxpar.planning import (
    MACHINES,
    calibration,
    check_fits,
    place,
    plan,
    plan_here,
    planner,
    predict_step,
)
from jaxpar.planning.hardware import Link
from jaxpar.planning.planner import describe
from jaxpar.tasks.lm import LM

README = Path(__file__).parent.parent / "docs/planning.md"
LAPTOP, H100 = MACHINES["laptop-cpu"], MACHINES["h100"]
TASK = LM(4, 96, 96, vocab_size=768, batch_size=16, seq_len=12)


def with_memory(hardware, num_bytes):
    return dataclasses.replace(hardware, memory_bytes=num_bytes)


def every_layout(num_devices):
    """All that the planner may choose, without its short cuts."""
    base = TASK.parallel
    divisors = [1, 2, 4, 8, 16]
    for data, stage, M, K in itertools.product(divisors, divisors, divisors, (1, 2, 3, 6, 12)):
        if num_devices % (data * stage) or stage > 4 or 16 % (data * M):
            continue
        if (stage == 1 and K > 1) or 16 * stage < M * K:
            continue
        options = (
            ("last", "sharded"),
            (False, True),
            ("replicated", "sharded", "host"),
            (False, True),
        )
        for head, remat, update, fsdp in itertools.product(*options):
            yield dataclasses.replace(
                base,
                mesh=MeshConfig(data, stage, num_devices // data // stage),
                pipeline=PipelineConfig(num_microbatches=M, num_chunks=K, head=head, remat=remat),
                update=update,
                fsdp=fsdp,
            )


@pytest.mark.parametrize("num_devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_choice_is_the_best_of_all(num_devices):
    layouts = every_layout(num_devices)
    costs = [predict_step(TASK, p, hardware=LAPTOP, quick=True) for p in layouts]
    smallest = min(cost.memory.total for cost in costs)
    for room in (100, 1.5, 1.02):  # all fit, some, and those that save all they can
        hardware = with_memory(LAPTOP, room * smallest)
        ranking = plan(TASK, num_devices=num_devices, hardware=hardware, num_compiled=0)
        fitting = [c.seconds.total for c in costs if c.memory.total <= hardware.memory_bytes]
        assert ranking.best.seconds.total == pytest.approx(min(fitting))
        seconds = [cost.seconds.total for cost in ranking.costs]
        assert seconds == sorted(seconds)
        assert all(cost.memory.total <= hardware.memory_bytes for cost in ranking.costs)
        assert all(cost.parallel.mesh.num_devices == num_devices for cost in ranking.costs)
    too_small = with_memory(LAPTOP, 0.98 * smallest)
    ranking = plan(TASK, num_devices=num_devices, hardware=too_small, num_compiled=0)
    assert ranking.smallest.memory.total == smallest
    with pytest.raises(ValueError, match=f"configs fits in [0-9.]+ MB on {num_devices} devices"):
        _ = ranking.best


@pytest.mark.slow
def test_1024_devices_take_little_longer_than_64():
    task = LM(16, 4096, 4096, vocab_size=384 * 84, batch_size=2048, seq_len=256)
    seconds = {64: [], 1024: []}
    for num_devices in (64, 1024, 64, 1024):  # by turns
        start = time.process_time()
        ranking = plan(task, num_devices=num_devices, hardware=H100, num_compiled=0)
        seconds[num_devices].append(time.process_time() - start)
    assert min(seconds[1024]) < 4 * min(seconds[64])  # twice as long, as measured
    assert min(seconds[1024]) < 10  # once its pieces are known
    assert ranking.best.parallel.mesh.num_devices == 1024
    assert len(ranking.best_of_meshes) > 5


def test_the_words_are_those_of_the_numbers():
    ranking = plan(TASK, num_devices=2, hardware=LAPTOP, num_compiled=0)
    best, other, *_ = ranking.best_of_meshes
    chosen, limits, runner_up = ranking.explain().splitlines()
    assert chosen.startswith(f"Use {describe(best.parallel)}: ")
    largest = max(dataclasses.asdict(best.seconds).values()) / best.seconds.total
    assert f"({largest:.0%});" in limits
    more = other.seconds.total / best.seconds.total - 1
    assert f"The runner-up, {describe(other.parallel)}, would take" in runner_up
    assert f"{more:+.0%}" in runner_up
    for cost in ranking.best_of_meshes:
        assert describe(cost.parallel) in str(ranking)
    # With links that take no time, nothing of the sort is said; with slow ones little else.
    slow = dataclasses.replace(LAPTOP, near=Link(1e6, 1e-2))
    assert (
        plan(TASK, num_devices=2, hardware=slow, num_compiled=0)
        .explain()
        .splitlines()[1]
        .startswith("What takes most of its time: sending")
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("lm", marks=pytest.mark.full),
        pytest.param("gru", marks=pytest.mark.slow),
        pytest.param("mixed", marks=pytest.mark.slow),
    ],
)
def test_a_config_that_cannot_fit_is_refused_with_changes_that_fit(name):
    task = dataclasses.replace(TASK, batch_size=64, seq_len=48) if name == "lm" else task_of(name)
    settings = make_settings((1, 2, 1), (1, 4), task)
    cost = check_fits(*settings, LAPTOP)
    assert cost.report is not None
    hardware = with_memory(LAPTOP, 0.8 * cost.memory_bytes)
    with pytest.raises(ValueError, match=r"a step needs .* on a device, laptop-cpu has") as refused:
        check_fits(*settings, hardware)
    changes = re.findall(
        r"(?:use|or) (--.*?) \(([\d.]+) MB, ([\d.]+) ms a step\)", str(refused.value)
    )
    assert 1 <= len(changes) <= 3
    assert [float(ms) for *_, ms in changes] == sorted(float(ms) for *_, ms in changes)
    for text, size, ms in changes:
        changed = settings.parallel
        for flag in text.split(" and "):
            field, _, value = flag.removeprefix("--").partition(" ")
            value = {"": True}.get(value, int(value) if value.isdigit() else value)
            value = MeshConfig.parse(value) if field == "mesh" else value
            part, _, field = field.replace("-", "_").rpartition(".")
            own = {field: value}
            if part:
                own = {part: dataclasses.replace(getattr(changed, part), **own)}
            changed = dataclasses.replace(changed, **own)
        fits = check_fits(task, changed, settings.train, hardware)
        assert fits.memory_bytes / 1e6 == pytest.approx(float(size), abs=0.06)
        assert fits.seconds.total * 1e3 == pytest.approx(float(ms), rel=0.01)


def test_a_config_that_nothing_makes_fit_is_refused():
    settings = make_settings((1, 2, 1), (1, 4), TASK)
    with pytest.raises(ValueError, match=r"none was found that makes it fit, the least is .* MB"):
        check_fits(*settings, with_memory(LAPTOP, 1e5))


@pytest.mark.full
def test_what_needs_least_is_proposed_where_nothing_else_is_found(monkeypatch):
    monkeypatch.setattr(planner, "_MOST_TRIED", 0)
    settings = make_settings((1, 2, 1), (1, 4), TASK)
    hardware = with_memory(LAPTOP, 0.8 * check_fits(*settings, LAPTOP).memory_bytes)
    with pytest.raises(ValueError, match=r"laptop-cpu has [\d.]+ MB; use --\S") as refused:
        check_fits(*settings, hardware)
    assert ", or " not in str(refused.value)


def test_what_does_not_fit_by_the_compiler_falls_out():
    whole = plan(TASK, num_devices=2, hardware=LAPTOP, num_compiled=1)
    [first, *_] = whole.costs
    assert first.report is not None
    assert all(cost.report is None for cost in whole.costs[1:])
    # By its estimate it would fit.
    room = with_memory(LAPTOP, max(first.memory_bytes - 1, first.memory.total / 1.1))
    if first.memory_bytes <= room.memory_bytes:
        pytest.skip("the estimate is far above the compiler's number")
    other = plan(TASK, num_devices=2, hardware=room, num_compiled=1).best
    assert other.parallel != first.parallel
    assert other.report is not None
    assert other.memory_bytes <= room.memory_bytes


def test_layers_are_placed_by_time_and_by_memory():
    only_flops = dataclasses.replace(LAPTOP, memory_bytes_per_second=1e20, loop_seconds=0.0)
    task = dataclasses.replace(TASK, num_layers=16, vocab_size=16 * 96, batch_size=8)
    settings = make_settings((1, 4, 1), (2, 4), task, head="last")  # a head of two layers

    def cost(placement):
        pipeline = dataclasses.replace(settings.parallel.pipeline, placement=placement)
        parallel = dataclasses.replace(settings.parallel, pipeline=pipeline)
        return predict_step(task, parallel, settings.train, only_flops)

    assert place(*settings, only_flops) == (5, 5, 5, 1)
    seconds = {placement: cost(placement).seconds for placement in all_placements(16, 4)}
    in_ticks = {p: s.layers + s.head + s.bubble for p, s in seconds.items()}
    # Ticks at the beginning and the end have no unit for some of the stages: others may be a bit quicker.
    assert in_ticks[5, 5, 5, 1] <= 1.05 * min(in_ticks.values())
    assert place(*settings, only_flops, by="memory") == (4, 4, 4, 4)
    four, five = (cost(p).memory.total for p in ((4, 4, 4, 4), (5, 4, 4, 3)))
    assert place(*settings, with_memory(only_flops, (four + five) / 2)) == (4, 4, 4, 4)
    with pytest.raises(ValueError, match="by='tyme': use"):
        place(*settings, only_flops, by="tyme")
    assert place(*make_settings((2, 1, 1), task=task), LAPTOP) == (16,)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("gru", 2), ("images", 2),
        *(
            pytest.param(name, 4, marks=pytest.mark.slow)
            for name in ("lm", "gru", "transformer", "mixed", "images")
        ),
    ],
)  # fmt: skip
def test_every_choice_of_the_planner_is_a_config_that_can_be_built(name, num_devices):
    task = task_of(name)
    ranking = plan(task, None, None, num_devices, LAPTOP, num_compiled=0)
    if name != "images":  # a stage needs layers
        assert {cost.parallel.mesh.stage for cost in ranking.costs} >= {1, 2}
    for cost in ranking.costs[:: max(len(ranking.costs) // 3, 1)]:
        assert cost.settings == (task, cost.parallel, task.train)
        layout = Layout(ModelFacts.of(task), cost.parallel)
        assert sum(layout.placement or (0,)) == len(layout.facts.kind_of)
        assert np.prod([*cost.parallel.mesh.sizes.values()]) == num_devices
    assert f"{task.unit}/s" in ranking.explain()


def test_layers_of_several_kinds_are_placed():
    task = task_of("mixed")
    for by in ("time", "memory"):
        placement = place(*make_settings((1, 2, 1), (2, 2), task), LAPTOP, by=by)
        assert sum(placement) == 7
        assert min(placement) > 0


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="no mesh of 7 devices fits"):
        plan(TASK, num_devices=7, hardware=LAPTOP)
    for num_devices in (0, -8):
        with pytest.raises(ValueError, match=f"num_devices={num_devices}: must be positive"):
            plan(TASK, num_devices=num_devices, hardware=LAPTOP)
    some = Parallel(mesh=MeshConfig(data=2, devices=(0, 1)))
    with pytest.raises(ValueError, match=r"num_devices=8, but the mesh names devices=\(0, 1\)"):
        plan(TASK, some, num_devices=8, hardware=LAPTOP)
    assert plan(TASK, some, hardware=LAPTOP, num_compiled=0).best.parallel.mesh.devices == (0, 1)


def test_the_command_prints_the_table(capsys, laptop_here):  # noqa: F811
    flags = "--vocab-size 768 --num-layers 2 --hidden-size 96 --embed-size 96"
    assert main(["plan", "lm", "--machine", "h100", "--devices", "2", *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"2 devices of h100; [\d,]+ configs", lines[0])
    assert any(line.startswith("Use ") for line in lines)
    assert main(["plan", "images", "--devices", "2"]) == 0
    assert "2 devices of laptop-cpu" in capsys.readouterr().out
    for size in ("16 potatoes", "1.2.3GB", "GB"):
        assert main(["plan", "images", "--machine", "h100", "--memory", size]) == 2
        assert (
            f"--memory {size}: write a number and its unit, such as 16GB" in capsys.readouterr().err
        )
    for size, message in (
        ("1kB", "a device has 1.0 kB, and the parameters alone need"),
        ("2MB", "none of"),
    ):
        command = ["plan", "lm", "--machine", "h100", "--devices", "1", "--memory", size]
        assert main([*command, *flags.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_readme_shows_what_the_command_prints(capsys):
    [(command, shown)] = re.findall(
        r"^python -m jaxpar (plan .*?)^```\n\n```text\n(.*?)^```",
        README.read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert main(command.replace("\\\n", " ").split()) == 0
    printed = capsys.readouterr().out
    # Versions of JAX trace and compile a little differently: numbers are about those of the page.
    sizes = [re.search(r"; ([\d,]+) configs", text)[1] for text in (shown, printed)]
    assert sizes[0] == sizes[1]
    tables = [
        re.findall(r"^(?:dp|pp|tp)\d\S* M=\d.*?(?=  )", text, re.M) for text in (shown, printed)
    ]
    assert tables[0] == tables[1][: len(tables[0])]
    best = [re.search(r"Use (.*?):", text)[1] for text in (shown, printed)]
    assert best[0] == best[1]


@pytest.mark.full
def test_training_takes_the_mesh_that_is_planned(capsys, tmp_path, laptop_here):  # noqa: F811
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    sizes = "--batch-size 8 --seq-len 4 --num-layers 2 --hidden-size 8 --embed-size 8"
    flags = [
        "train", "lm", "--simulate", "8", "--mesh", "auto", "--corpus", str(tmp_path / "text.txt"),
        *sizes.split(), "--train.num-steps", "1", "--optimizer.warmup-steps", "0",
        "--train.out-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main(flags) == 0
    printed = capsys.readouterr().out
    # Its vocabulary is that of any text of up to 384 words.
    best = plan_here(LM(2, 8, 8, vocab_size=384, batch_size=8, seq_len=4)).best.parallel.mesh
    assert re.search(
        rf"mesh +data={best.data} x stage={best.stage} x tensor={best.tensor}", printed
    )
    assert best.num_devices == jax.device_count()


@pytest.mark.parametrize("home", ["/proc/nowhere", None])
def test_a_home_that_cannot_be_used_costs_a_measurement(home, monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user without a name
    else:
        monkeypatch.setenv("HOME", home)
    measured = MACHINES["laptop-cpu"]
    monkeypatch.setattr(calibration, "calibrate", lambda: calibration._keep(measured, ()))
    assert calibration.find_machine("here") == measured
    (said,) = caplog.messages
    assert "cannot be kept, and will be measured anew: " in said
    assert "set XDG_CACHE_HOME" in said
