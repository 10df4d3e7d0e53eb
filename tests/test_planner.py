"""The planner against all configs that there are, its words against its numbers, and what is refused."""

import dataclasses
import itertools
import re
import statistics
import time

import jax
import numpy as np
import pytest
from lib import api, flax_models
from lib.adopted import Adopted
from lib.planned import CPU, H100, SHOWN, task_of

from jaxpar import RULES, MeshConfig, Parallel, PipelineConfig, TrainConfig, fit
from jaxpar.analysis import inspect_step
from jaxpar.lm import LM
from jaxpar.planning import (
    check_fits,
    compare,
    describe,
    estimate_step,
    find_machine,
    plan,
    plan_in_steps,
    time_steps,
)

TASK = LM(4, 96, 96, vocab_size=768, batch_size=16, seq_len=12)
TEXT = LM(2, 16, 16, batch_size=8, seq_len=4)
TWO = Parallel(MeshConfig(data=2, devices=(0, 1)))
LEAST_SHARE = 0.8  # of the memory that is estimated: with less, a layout is not tried


def of(machine, num_devices, **fields):
    return dataclasses.replace(machine, num_devices=num_devices, **fields)


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


def on_devices(parallel):
    """A layout, without what says where its update runs and what else it does to fit."""
    pipeline = dataclasses.replace(parallel.pipeline, remat=False)
    return dataclasses.replace(parallel, pipeline=pipeline, update="replicated", fsdp=False)


@pytest.mark.full
@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_first_choice_is_the_best_of_all(num_devices):
    costs = api.estimates(TASK, every_layout(num_devices), CPU)
    smallest = min(cost.estimated_bytes for cost in costs)
    least = LEAST_SHARE * smallest
    for room in (100, 1.5, 1.02):  # all fit, some, and those that save all they can
        machine = of(CPU, num_devices, memory_bytes=room * least)
        ranking = plan(TASK, machine=machine, num_finalists=0)
        most = machine.memory_bytes / LEAST_SHARE
        fitting = [cost for cost in costs if cost.estimated_bytes <= most]
        # The host has the update only of what does not fit otherwise.
        others = {on_devices(cost.parallel) for cost in fitting if cost.parallel.update != "host"}
        best = min(
            cost.seconds
            for cost in fitting
            if cost.parallel.update != "host" or on_devices(cost.parallel) not in others
        )
        assert ranking.best.seconds == pytest.approx(best)
        seconds = [cost.seconds for cost in ranking.fitting]
        assert seconds == sorted(seconds)
        assert all(cost.parallel.mesh.num_devices == num_devices for cost in ranking.fitting)
        assert all(cost.fits for cost in ranking.fitting)
        assert not any(cost.fits for cost in ranking.refused)
    too_small = of(CPU, num_devices, memory_bytes=0.98 * least)
    ranking = plan(TASK, machine=too_small, num_finalists=0)
    assert ranking.refused[0].estimated_bytes == pytest.approx(smallest)
    with pytest.raises(
        ValueError,
        match=r"no layout fits in [0-9.]+ [kM]B per device on cpu \(\d+ tried\): .* needs a",
    ):
        _ = ranking.best


@pytest.mark.full
def test_256_devices_take_seconds():
    task = LM(16, 2048, 2048, vocab_size=384 * 84, batch_size=2048, seq_len=256)
    begin = time.process_time()
    ranking = plan(task, machine="v5e:16x16", num_finalists=0)
    taken = time.process_time() - begin
    assert len(ranking.fitting) + len(ranking.refused) > 1500
    assert ranking.best.parallel.mesh.num_devices == 256
    assert taken < 20, f"{taken:.1f} s"  # 4 on an idle machine


@pytest.mark.full
def test_the_words_are_those_of_the_numbers():
    ranking = plan(TASK, machine=of(CPU, 2), num_finalists=0)
    best = ranking.best
    chosen, parts = ranking.explain().splitlines()
    assert re.match(rf"Use {describe(best.parallel)}: ~\S+ \w+ a step, ~[\d,]+ \w+/s\.", chosen)
    longest = max(best.parts, key=best.parts.__getitem__)
    assert parts.startswith(
        f"Estimated time per step: {SHOWN[longest]} {best.parts[longest] / best.seconds:.0%}, "
    )
    for cost in ranking.fitting[:12]:
        assert describe(cost.parallel) in str(ranking)
    link = dataclasses.replace(CPU.near, bytes_per_second=1e6, seconds=1e-2)
    slow = plan(TASK, machine=of(CPU, 2, near=link), num_finalists=0)
    assert slow.explain().splitlines()[1].startswith("Estimated time per step: communication")


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("hybrid", 2), ("mixed", 2),
        *(pytest.param(name, 4, marks=pytest.mark.more) for name in ("lm", "gru", "transformer", "mixed")),
    ],
)  # fmt: skip
def test_every_choice_of_the_planner_is_a_config_that_can_be_built(name, num_devices):
    task = task_of(name)
    ranking = plan(task, machine=of(H100, num_devices), num_finalists=0)
    if name != "hybrid":  # a stage needs layers
        assert {cost.parallel.mesh.stage for cost in ranking.fitting} >= {1, 2}
    for cost in ranking.fitting[:: max(len(ranking.fitting) // 3, 1)]:
        assert cost.settings == (task, cost.parallel, task.train)
        api.abstract_state(task, cost.parallel)
        assert np.prod([*cost.parallel.mesh.sizes.values()]) == num_devices
    # An image is 8 x 8. How many of its unit a batch of a task with a `loss` has is not known before it runs.
    steps = {"mixed": 8, "hybrid": 1, "transformer": 1}.get(name) or task.seq_len
    unit = "rows" if name in ("hybrid", "transformer") else task.unit
    counted = task.batch_size * steps
    assert f"~{counted / ranking.best.seconds:,.0f} {unit}/s" in ranking.explain()


@dataclasses.dataclass(frozen=True)
class NoRules(Adopted):
    """None of its dims is split."""

    @property
    def rules(self):
        return RULES.replace({"heads": None, "mlp": None})


@pytest.mark.parametrize(("task_class", "is_told"), [(NoRules, True), (Adopted, False)])
def test_the_table_says_that_tensor_needs_rules(task_class, is_told):
    task = task_class(flax_models.GPT)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ranking = plan(task, machine=of(H100, 4), num_finalists=0)
    assert ("tensor splits no parameter of this model" in str(ranking)) == is_told
    assert f"~{flax_models.ROWS / ranking.best.seconds:,.0f} rows/s" in ranking.explain()


# ---- finalists ----


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("balanced", "pp2 M=1 K=2"),
        ((2, 2), "pp2 M=1 K=2"),
        ((1, 3), "pp2 M=1 K=2 placement=1,3"),
        ("first, 0 | 1-3, last", "pp2 M=1 K=2 placement='first, 0 | 1-3, last'"),
    ],
)
def test_a_layout_in_one_line_has_its_placement(placement, text):
    assert describe(Parallel("pp2", PipelineConfig(num_chunks=2, placement=placement))) == text


@pytest.mark.full
def test_finalists_run_and_the_quickest_is_chosen():
    ranking = plan(TEXT, TWO, num_finalists=2)
    ran = [cost for cost in ranking.fitting if cost.measured]
    assert len(ran) == 2
    assert ran == list(ranking.fitting[:2])
    assert ran[0].seconds <= ran[1].seconds == statistics.median(ran[1].measured)
    assert all(cost.program.memory.total == cost.memory_bytes for cost in ran)
    assert all(cost.parallel.mesh.devices == (0, 1) for cost in ranking.fitting)
    shown = str(ranking)
    assert shown.count("  measured") == 2
    assert "~" not in ran[0].seconds_text + ran[0].memory_text
    assert shown.startswith(f"8 x {jax.devices()[0].device_kind}, 2 devices: ")


@pytest.mark.full
def test_what_was_measured_decides():
    """The first by arithmetic is slow on the clock, the third is quick; the best few run again."""
    asked = []

    def timed(layouts, num_rounds):
        asked.append([describe(layout) for layout in layouts])
        return [
            [{2: 0.1}.get(n, 0.5 + n) if len(asked) == 1 else 0.2 + n] * num_rounds
            for n in range(len(layouts))
        ]

    def compiled(num_layouts):
        return [REPORT] * num_layouts

    with api.finalists_are(compiled, timed):
        first, *_, last = plan_in_steps(TEXT.resolve(), TWO, TEXT.train, find_machine(), 6)
    third = describe(first.fitting[2].parallel)
    assert len(asked[0]) == 6
    assert asked[1][0] == third
    assert len(asked[1]) == 4
    assert describe(last.best.parallel) == third
    assert last.best.seconds == 0.2


REPORT = inspect_step(TEXT, "dp1")


@pytest.mark.full
def test_what_does_not_fit_by_the_compiler_falls_out(capsys):
    """The compiler refuses the first, and finds the second too large: others take their places."""
    large = dataclasses.replace(REPORT, memory=dataclasses.replace(REPORT.memory, temporary=10**12))
    waves = []

    def compiled(num_layouts):
        waves.append(num_layouts)
        results = ["Ran out of memory", large] if len(waves) == 1 else []
        return results + [REPORT] * (num_layouts - len(results))

    with api.finalists_are(compiled):
        first, *_, last = plan_in_steps(TASK, Parallel(), TASK.train, of(H100, 4), 4)
    said = capsys.readouterr().err
    assert f"  1 of 4: {describe(first.fitting[0].parallel)}: Ran out of memory\n" in said
    assert [wave for wave in waves if wave] == [4, 2]
    refused = [describe(cost.parallel) for cost in first.fitting[:2]]
    assert {describe(cost.parallel) for cost in last.refused[:2]} == {*refused}
    assert sum(cost.program is not None for cost in last.fitting) == 4
    assert last.best.program == REPORT
    assert "Ran out of memory" in str(last)


@pytest.mark.full
def test_setups_take_turns_on_states_of_their_own():
    runs = [fit(TEXT, shape, TrainConfig(num_steps=1), quiet=True) for shape in ("dp1", "dp2")]
    seconds = time_steps([run.setup for run in runs], 2, num_steps=1)
    assert [len(each) for each in seconds] == [2, 2]
    assert min(min(each) for each in seconds) > 0


# ---- compilers of machines that are not there ----


class Compiler:
    """Counts what it compiles.

    Attributes:
      said: of each program; "" compiles it.
    """

    def __init__(self, said=""):
        self.said, self.count = said, 0

    def __call__(self):
        self.count += 1
        if self.said:
            raise jax.errors.JaxRuntimeError(f"{self.said}\nand more")
        return REPORT


def cost_on(name, parallel="dp2"):
    """Of a step on two devices of a machine."""
    return estimate_step(TEXT.resolve(), parallel, machine=of(H100, 2, name=f"{name}:1x1x2"))


@pytest.mark.full
def test_a_program_for_another_machine_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = Compiler()
    with api.compiler_of_others(compiler):
        for _ in range(2):
            for parallel in ("dp2", "pp2"):
                assert compare(cost_on("h100", parallel)).program == REPORT
            assert compiler.count == 2
        assert compare(cost_on("h200")).program == REPORT
        assert compiler.count == 3  # of another machine
        with api.other_options_of_compilers():
            assert compare(cost_on("h100")).program == REPORT
        assert compiler.count == 4
    assert len([*(tmp_path / "jaxpar" / "compiled").iterdir()]) == 4


@pytest.mark.full
def test_a_program_whose_compiler_has_crashed_is_not_compiled_again(monkeypatch, tmp_path):
    """What a process leaves that has ended meanwhile: a note of the program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAXPAR_COMPILES", str(tmp_path))
    refuses, notes = Compiler("RESOURCE_EXHAUSTED: too large"), []

    def compiler():
        notes.extend(tmp_path.iterdir())
        return refuses()

    with api.compiler_of_others(compiler):
        assert compare(cost_on("h100")).refusal == "RESOURCE_EXHAUSTED: too large"
        [note] = notes
        assert not note.exists()
        note.touch()
        assert compare(cost_on("h100")).refusal == "it crashed"
        assert note.exists()
    assert refuses.count == 1


def test_inspect_tells_why_a_compiler_refuses_a_step(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = "--num-layers 2 --hidden-size 16 --embed-size 16 --batch-size 8 --seq-len 4"
    words = ["inspect", "lm", *small.split(), "--machine", "h100:1x1x2", "--mesh", "dp2"]
    with api.compiler_of_others(Compiler("RESOURCE_EXHAUSTED: too large")):
        assert api.command(*words) == 2
    error = capsys.readouterr().err
    refusal = "the compiler of h100:1x1x2 refuses this step: RESOURCE_EXHAUSTED: too large\nFix: use a layout"
    assert refusal in error
    assert "and more" not in error


@pytest.mark.full
def test_a_step_that_the_compiler_refuses_does_not_fit(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = "INTERNAL: no such kernel"
    with api.compiler_of_others(Compiler(said)):
        known = compare(cost_on("h100"))
        assert (known.refusal, known.program, known.measured) == (said, None, ())
        with pytest.raises(ValueError, match=rf"^the compiler refuses this step: {said}\n"):
            check_fits(cost_on("h100"))


@pytest.mark.full
def test_a_cache_that_is_broken_costs_a_compilation(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = Compiler()
    with api.compiler_of_others(compiler):
        compare(cost_on("h100"))
        [file] = (tmp_path / "jaxpar" / "compiled").iterdir()
        file.write_text("{")
        for _ in range(2):  # it is written anew
            assert compare(cost_on("h100")).program == REPORT
    assert compiler.count == 2


@pytest.mark.more
@pytest.mark.parametrize("home", ["/proc/nowhere", None])
def test_a_cache_that_cannot_be_written_costs_a_compilation(home, monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user without a name
    else:
        monkeypatch.setenv("HOME", home)
    with api.compiler_of_others(Compiler()):
        assert compare(cost_on("h100")).program == REPORT
    (said,) = caplog.messages
    assert "compiled programs cannot be kept: " in said
    assert "Fix: set XDG_CACHE_HOME" in said


# ---- one layout ----


@pytest.mark.full
def test_a_step_is_compared_with_its_program_and_with_the_clock():
    cost = compare(estimate_step(TEXT, "dp2"))
    assert cost.program is not None
    assert len(cost.measured) == 3
    assert cost.seconds == statistics.median(cost.measured)
    assert re.search(r"step +[\d.]+ \w+ +[\d.]+ ms", str(cost))
    assert re.search(r"memory +[\d.]+ \w?B", str(cost))


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("lm", "dp2"), ("mixed", "pp2")],
)
def test_a_config_that_cannot_fit_is_refused(name, mesh):
    task = TEXT if name == "lm" else task_of(name)
    cost = check_fits(estimate_step(task, mesh))
    assert cost.program is not None
    machine = dataclasses.replace(cost.machine, memory_bytes=0.8 * cost.memory_bytes)
    with pytest.raises(ValueError, match=r"a step needs .* per device, but 8 x cpu has"):
        check_fits(estimate_step(task, mesh, machine=machine))


def test_a_config_that_nothing_makes_fit_is_refused():
    tiny = find_machine(None, memory_bytes=1e3)
    with pytest.raises(ValueError, match="Fix: use a layout that plan finds, more devices, or"):
        check_fits(estimate_step(TEXT, "pp2", machine=tiny))


def test_what_cannot_be_planned_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="no mesh of 7 devices fits"):
        plan(TASK, machine="v5e:1x7")
    with pytest.raises(ValueError, match="must be one of"):
        plan(TASK, machine="h100:1x0x8")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="plan times steps in one process, got 2"):
        plan(TEXT)


# ---- machines that are not there ----


def has_compiler(machine):
    try:
        return bool(api.devices_of(machine))
    except ValueError:
        return False


def test_a_plan_says_what_it_does(capsys):
    for quiet, said in ((False, "estimating every mesh and pipeline ...\n"), (True, "")):
        plan(TASK, machine=of(CPU, 2), num_finalists=0, quiet=quiet)
        assert capsys.readouterr() == ("", said)


@pytest.mark.more
@pytest.mark.parametrize(("machine", "extra"), [("v5e:2x2", "tpu"), ("h100:1x1x4", "cuda13")])
def test_a_compiler_that_is_missing_is_named(machine, extra, capsys):
    if has_compiler(machine):
        pytest.skip("the compiler is installed")
    flags = "--vocab-size 768 --num-layers 2 --hidden-size 96 --embed-size 96"
    assert api.command("plan", "lm", "--machine", machine, *flags.split()) == 0
    said = capsys.readouterr().out
    assert "is installed: the estimates leave out how much memory a layout needs" in said
    assert f"\nFix: pip install 'jax[{extra}]'.\n" in said
    assert "To train with the first layout: " in said
    assert api.command("inspect", "lm", "--machine", machine, "--mesh", "dp4", *flags.split()) == 2
    assert f"Fix: pip install 'jax[{extra}]'" in capsys.readouterr().err


@pytest.mark.full
def test_sizes_of_memory_are_numbers_with_units(capsys):
    flags = "--vocab-size 768 --num-layers 2 --hidden-size 96 --embed-size 96 --machine h100:1x1x1"
    for size in ("16 potatoes", "1.2.3GB", "GB"):
        assert api.command("plan", "lm", *flags.split(), "--memory", size) == 2
        assert f"--memory {size} is not a size" in capsys.readouterr().err
    for size in ("1kB", "1.5MB"):
        assert api.command("plan", "lm", *flags.split(), "--memory", size) == 2
        assert "no layout fits" in capsys.readouterr().err


@pytest.mark.full
def test_training_takes_the_mesh_that_is_planned(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    sizes = "--batch-size 2 --seq-len 4 --num-layers 2 --hidden-size 8 --embed-size 8"
    flags = [
        "train", "lm", "--simulate", "8", "--mesh", "auto", "--corpus", str(tmp_path / "text.txt"),
        *sizes.split(), "--train.num-steps", "1", "--optimizer.warmup-steps", "0",
        "--train.out-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    assert api.command(*flags) == 0
    printed = capsys.readouterr().out
    [chosen] = re.findall(r"Use (\w+).* a step", printed.rpartition("status")[2])
    mesh = MeshConfig.parse(chosen)
    assert re.search(
        rf"mesh +data={mesh.data} x stage={mesh.stage} x tensor={mesh.tensor}", printed
    )
    assert mesh.num_devices == jax.device_count()
