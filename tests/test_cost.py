"""The cost model against the compiler and the machine: bytes exactly, memory nearly, for any task."""

import dataclasses
import functools
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from test_equivalence import SGD, make_settings

from jaxpar.analysis import inspect_step
from jaxpar.cli.main import main
from jaxpar.config import Parallel, PipelineConfig, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.planning import calibration, compare, compiled_cost, cost, planner, predict_step
from jaxpar.planning.calibration import calibrate, find_machine, measure_pieces, path_here
from jaxpar.planning.compiled import report_of, simulated_mesh
from jaxpar.planning.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.planning.pieces import works_of
from jaxpar.planning.shape import StepShape, shapes_of
from jaxpar.planning.traffic import predict_traffic, totals, traffic_of
from jaxpar.planning.unit import BACKWARD, BOTH, FORWARD, Unit, _corners, facts_of, measure_facts
from jaxpar.setup import Setup
from jaxpar.state import abstract_state
from jaxpar.task import Settings, find_task
from jaxpar.tasks.images import Images
from jaxpar.tasks.lm import LM
from jaxpar.work import amount

# Of an estimate before anything is compiled; the compiler packs buffers in a way of its own.
MEMORY_ERROR = 0.15
# Along `tensor` the compiler decides by the whole program, of which a small one is compiled.
TENSOR_ERROR = 0.02

EXAMPLES = Path(__file__).parent.parent / "examples"


@functools.cache
def task_of(name):
    """Five models, of sizes at which memory is worth a thought: programs of 20 to 1,500 MB."""
    if name == "lm":
        return LM(6, 384, 384, vocab_size=1920, batch_size=96, seq_len=48, dropout=0.1)
    if name == "images":
        return Images(batch_size=192)
    spec, sizes = {
        "gru": ("forecaster.py:Forecast", {"width": 384, "batch_size": 48}),
        "transformer": (
            "transformer.py:Characters",
            {"width": 256, "batch_size": 96, "seq_len": 64},
        ),
        "mixed": ("mixed.py:Digits", {"width": 384, "batch_size": 192, "num_convs": 3}),
    }[name]
    return find_task(f"{EXAMPLES}/{spec}")(**sizes)


def random_settings(name, seed, tensor=(1,)):
    """Any mesh of up to 8 devices, M, K, schedule, head, FSDP and update of a model."""
    rng, task = random.Random(seed), task_of(name)
    data, stages, n = rng.choice(
        [(d, s, t) for d in (1, 2, 4) for s in (1, 2, 3, 4) for t in tensor if 1 < d * s * t <= 8]
    )
    mesh = MeshConfig(data, stages, n)
    if name == "images":
        return Settings(task, Parallel(dataclasses.replace(mesh, stage=1)), TrainConfig())
    num_groups = 2 if stages == 2 and name != "transformer" and rng.random() < 0.3 else 1
    pipeline = PipelineConfig(
        schedule="interleaved" if num_groups > 1 else rng.choice(("1f1b", "gpipe")),
        num_microbatches=rng.choice((1, 2, 4)),
        num_chunks=1 if name == "transformer" else rng.choice((1, 2, 4)),
        num_groups=num_groups,
        head=rng.choice(("auto", "last")),
    )
    update = rng.choice(("replicated", "sharded", "host"))
    clip_norm = rng.choice((0.0, 1.0))
    parallel = Parallel(mesh, pipeline, fsdp=rng.random() < 0.3, update=update)
    return Settings(task, parallel, TrainConfig(clip_norm=clip_norm))


def predicted_and_compiled(settings):
    return totals(predict_traffic(StepShape(*settings))), totals(traffic_of(report_of(*settings)))


def assert_same_bytes(name, seed):
    settings = random_settings(name, seed)
    predicted, compiled = predicted_and_compiled(settings)
    assert predicted == compiled, settings
    assert predicted or settings.parallel.mesh.num_devices == 1


def assert_memory_is_near(settings):
    estimate = predict_step(*settings, quick=True)
    compiled = report_of(*settings).memory
    assert abs(estimate.memory.total / compiled.total - 1) <= MEMORY_ERROR, (
        f"{settings}\n{estimate}"
    )


@pytest.mark.law
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("lm", 7), ("gru", 1),
        *(pytest.param(*row, marks=pytest.mark.full) for row in (("transformer", 6), ("mixed", 0))),
        *(
            pytest.param(name, seed, marks=pytest.mark.slow)
            for name in ("lm", "gru", "transformer", "mixed")
            for seed in range(10)
        ),
    ],
)  # fmt: skip
def test_bytes_over_data_and_stages_are_those_of_the_compiled_program(name, seed):
    assert_same_bytes(name, seed)
    assert_memory_is_near(random_settings(name, seed))


@pytest.mark.law
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("images", 0),
        pytest.param("gru", 2, marks=pytest.mark.full),
        *(
            pytest.param(name, seed, marks=pytest.mark.slow)
            for name in ("lm", "gru", "transformer", "mixed", "images")
            for seed in range(10)
        ),
    ],
)
def test_what_the_compiler_decides_it_is_asked(name, seed):
    """Of all that is sent where it divides the batch, or an array over `tensor`."""
    settings = random_settings(name, seed, tensor=(1, 2) if name == "images" else (2, 4))
    predicted = predict_step(*settings)
    report = inspect_step(*settings, simulated_mesh(settings.parallel.mesh))
    result = compare(predicted, report)
    assert result.predicted == result.compiled
    assert (
        sum(n for (_, axes), n in result.compiled.items() if "tensor" in axes) or name == "images"
    )
    assert predicted.memory_bytes == report.memory.total
    # Copies of weights in a step that is one whole are not estimated: -18 %. On JAX 0.12 both transformers
    # have -19 %: XLA orders operations for concurrency, and more is alive at once.
    if (name, seed) not in {("gru", 0), ("transformer", 2), ("transformer", 4)}:
        assert_memory_is_near(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lm", "transformer"])
@pytest.mark.parametrize("seed", range(5))
def test_what_goes_over_tensor_is_estimated(name, seed):
    settings = random_settings(name, seed, tensor=(2, 4))
    estimate, asked = (predict_step(*settings, quick=quick) for quick in (True, False))
    sums = [
        {k: n for k, n in totals(cost.traffic).items() if "tensor" in k[1]}
        for cost in (estimate, asked)
    ]
    whole = sum(sums[1].values())
    assert whole > 0
    off = sum(abs(sums[0].get(k, 0) - sums[1].get(k, 0)) for k in {*sums[0], *sums[1]})
    assert off <= TENSOR_ERROR * whole


@pytest.mark.full
def test_quick_compiling_says_the_same():
    settings = random_settings("gru", 1)
    whole = inspect_step(*settings, simulated_mesh(settings.parallel.mesh))
    quick = report_of(*settings)
    assert quick.collectives == whole.collectives
    assert quick.memory == whole.memory


@pytest.mark.parametrize("name", ["lm", "gru", "transformer", "mixed"])
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))]
)
def test_what_is_stored_is_what_the_state_holds(name, seed):
    task, parallel, train = random_settings(name, seed, tensor=(1, 2))
    step, mesh = StepShape(task, parallel, train), simulated_mesh(parallel.mesh)
    assert step.placement == Setup.of(task, parallel).layout.placement
    state = abstract_state(Setup.of(task, parallel, mesh=mesh))
    params, opt_state, carry = (
        sum(
            leaf.dtype.itemsize * np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int)
            for leaf in jax.tree.leaves(tree)
        )
        for tree in ((state.params, state.frozen), state.opt_state, state.carry)
    )
    assert step.bytes_of((*step.params, *step.frozen), step.param_rules) == params
    assert step.bytes_of(step.opt_state, step.opt_rules) == opt_state
    assert step.bytes_of(step.carry, step.carry_rules) == carry


@pytest.mark.parametrize("name", ["lm", "gru", "transformer", "mixed"])
def test_units_of_all_sizes_follow_from_a_few(name):
    model = shapes_of(task_of(name))
    assert _corners(model, True) is not None
    t, b = model.facts.num_steps, 8
    told, traced = (function(model, t, b, True) for function in (facts_of, measure_facts))
    for left, right in ((told.x, traced.x), (told.carry, traced.carry), (told.saved, traced.saved)):
        np.testing.assert_allclose(*map(jax.tree.leaves, (left, right)), rtol=1e-9)
    for key, own in traced.amounts.items():
        assert told.amounts[key].flops == pytest.approx(own.flops, rel=1e-9)


def test_what_is_alive_is_what_a_compiler_of_fused_loops_writes_down():
    a, w = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1000, 8), (8, 8)))

    def most(op):
        def run(a, w):
            h = a @ w
            y = op(h)
            return (y * 2).sum() + (h * y).sum()

        return max(amount(run, a, w).live)

    one = 4 * 1000 * 8
    assert one <= most(lambda h: h + 1) < 1.1 * one  # made for each of its readers
    assert 2 * one <= most(jax.numpy.tanh) < 2.1 * one  # made once

    def stack(x):
        return jax.lax.scan(lambda c, _: (c + 1, c * 2), x, None, length=10)[1].sum(0)

    # The room of the second is there before the first runs.
    assert 20 * one <= max(amount(lambda a: stack(stack(a)), a).live) < 24 * one


@pytest.mark.full
def test_images_that_split_the_batch_over_tensor_are_estimated():
    settings = Settings(task_of("images"), Parallel("dp2tp2"), TrainConfig())
    assert StepShape(*settings).row_parts == 2
    assert_memory_is_near(settings)


@pytest.mark.full
@pytest.mark.parametrize("keeps", ["device", "host", "carries"])
def test_memory_and_bytes_where_inputs_are_kept_in_the_place_of_residuals(keeps):
    task = LM(4, 128, 128, vocab_size=384, batch_size=64, seq_len=64, optimizer=SGD)
    settings = make_settings((1, 2, 1), (2, 8), task, remat=True, remat_keeps=keeps)
    assert_memory_is_near(settings)
    whole = make_settings((1, 2, 1), (2, 8), task)
    kept, of_whole = (predict_step(*each).memory.activations for each in (settings, whole))
    assert kept < of_whole / (1 if keeps == "carries" else 3)
    if keeps != "carries":  # loops of segments have lengths that the program does not tell
        predicted, compiled = predicted_and_compiled(settings)
        assert predicted == compiled


@pytest.mark.full
def test_memory_is_that_of_the_live_units():
    # GPipe holds all 8 microbatches: more than everything else together.
    task = LM(4, 128, 128, vocab_size=384, batch_size=64, seq_len=64, optimizer=SGD)
    settings = make_settings((1, 2, 1), (8, 1), task, schedule="gpipe")
    memory = predict_step(*settings).memory
    assert memory.activations > memory.total / 2
    assert_memory_is_near(settings)


def test_a_compiled_cost_has_the_compilers_numbers():
    settings = random_settings("gru", 1)
    estimate = predict_step(*settings)
    known = compiled_cost(estimate)
    assert estimate.memory_text.startswith("~")
    assert known.memory_bytes == report_of(*settings).memory.total
    assert not known.memory_text.startswith("~")
    assert compiled_cost(known) is known


def test_flops_are_those_of_a_program_without_loops():
    # Its loops have one turn, so that XLA counts all of it; rows are many, so that matmuls are most of it.
    task = LM(1, 256, 256, 384, dropout=0.0, batch_size=512, seq_len=1, optimizer=SGD)
    settings = make_settings(task=task, train=TrainConfig(clip_norm=0.0))
    tokens, H, V = 512, 256, 384
    flops = predict_step(*settings).flops
    assert flops == tokens * (6 * 2 * H * 4 * H + 3 * 2 * H * V)
    # Nobody needs the dh before the only step: XLA leaves that matmul away.
    needed = flops - tokens * 2 * H * 4 * H
    assert needed <= inspect_step(*settings).flops <= 1.05 * needed


# One FLOP takes a second, and nothing else takes any time.
ONLY_FLOPS = Hardware(
    name="only FLOPs",
    flops_per_second={"float32": 1.0},
    memory_bytes=1e9,
    memory_bytes_per_second=1e99,
    host_bytes_per_second=1e99,
    near=Link(1e99, 0.0),
    far=Link(1e99, 0.0),
    devices_per_host=8,
    loop_seconds=0.0,
    tick_seconds=0.0,
    platform="cpu",
    source="here",
)


@pytest.mark.parametrize("name", ["lm", "gru", "transformer", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_seconds_are_flops_where_only_flops_take_time(name, seed):
    cost = predict_step(*random_settings(name, seed), ONLY_FLOPS)
    busy = cost.seconds.layers + cost.seconds.head
    assert busy == pytest.approx(cost.flops, rel=1e-12)
    assert cost.seconds.total == pytest.approx(busy + cost.seconds.bubble)


# Matmuls of F, B and W of a layer; the head stands beside them.
@pytest.mark.parametrize(("apart", "costs"), [("off", (2, 4)), ("unit", (2, 2, 2))])
@pytest.mark.parametrize("units", [(1, 4), (4, 2)])
def test_the_bubble_is_that_of_the_schedule(units, apart, costs):
    settings = make_settings((1, 4, 1), units, zero_bubble=apart)
    cost = predict_step(*settings, ONLY_FLOPS)
    schedule = StepShape(*settings).schedule
    waiting = cost.seconds.bubble / (cost.seconds.layers + cost.seconds.bubble)
    assert waiting == pytest.approx(schedule.bubble_at(*costs))
    assert (cost.num_ticks, cost.bubble) == (schedule.num_ticks, schedule.bubble)


def test_an_axis_has_the_link_that_its_devices_share():
    machine, sizes = MACHINES["h100"], {"data": 4, "stage": 2, "tensor": 4}
    assert machine.link(("tensor",), sizes) == machine.near
    assert machine.link(("stage",), sizes) == machine.near  # 2 x 4 devices of one host
    assert machine.link(("data",), sizes) == machine.far
    assert machine.link(("data", "tensor"), sizes) == machine.far
    assert machine.link(("data",), {"data": 8, "stage": 1, "tensor": 1}) == machine.near


def test_sending_takes_latency_and_bandwidth():
    slow = dataclasses.replace(ONLY_FLOPS, near=Link(1000.0, 0.5))
    without_clipping = TrainConfig(clip_norm=0.0)
    settings = make_settings((1, 2, 1), (1, 4), train=without_clipping, head="last")
    cost = predict_step(*settings, slow)
    seconds = sum(
        part.count * (part.sent_bytes / 1000 + (1.0 if part.op == "all-reduce" else 0.5))
        for part in cost.traffic
    )
    assert cost.seconds.sending == pytest.approx(seconds)
    assert cost.sent_bytes == sum(part.count * part.sent_bytes for part in cost.traffic)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def laptop_here(own_cache, monkeypatch):
    """A machine that has been calibrated before, and is not measured further."""
    MACHINES["laptop-cpu"].save(path_here())
    monkeypatch.setattr(cost, "measure_pieces", lambda machine, steps: machine)
    monkeypatch.setattr(planner, "measure_pieces", lambda machine, steps: machine)
    monkeypatch.setattr(planner, "NUM_COMPILED", 1)


def test_a_machine_is_measured_once(own_cache, monkeypatch):
    monkeypatch.setattr(calibration._Bench, "part", 0.01)
    machine = calibrate()
    assert machine.devices_per_host == jax.device_count() == 8
    # Any computer of today, however busy.
    assert 1e6 < machine.flops_per_second["float32"] < 1e14
    assert 1e6 < machine.memory_bytes_per_second < 1e13
    assert 1e-8 < machine.loop_seconds < 1e-2
    assert 0 <= machine.tick_seconds < 1
    assert 1e5 < machine.near.bytes_per_second < 1e13
    assert 1e-8 < machine.near.seconds < 1
    assert len(machine.near.sizes) == 3
    assert machine.memory_bytes > 1e8
    monkeypatch.setattr(calibration, "calibrate", None)
    assert find_machine("here") == machine == find_machine(str(path_here()))
    assert find_machine("here", 5e6).memory_bytes == 5e6


@pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ((2, 2, 2), (1, 2)),
        pytest.param((8, 1, 1), (1, 1), marks=pytest.mark.full),
        pytest.param((4, 2, 1), (1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("update", ["sharded", pytest.param("host", marks=pytest.mark.full)])
def test_every_piece_of_a_step_is_measured_once(mesh, cut, update, own_cache, monkeypatch):
    monkeypatch.setattr(calibration._Bench, "part", 0.0)
    monkeypatch.setattr(calibration._Bench, "use_caches", lambda bench: ())
    task = LM(2, 16, 16, vocab_size=384, batch_size=8, seq_len=4, optimizer=SGD)
    step = StepShape(*make_settings(mesh, cut, task, layout={"update": update}))
    machine = dataclasses.replace(MACHINES["laptop-cpu"], samples=())
    known = measure_pieces(machine, [step])
    works = works_of(step)
    assert [(s.kind, s.sizes) for s in known.samples] == [(w.kind, w.sizes) for w in works.values()]
    assert find_machine("here").samples == known.samples
    for work, sample in zip(works.values(), known.samples, strict=True):
        assert known.seconds(work) == pytest.approx(known.roofline(work) * sample.slowness)
    assert measure_pieces(known, [step]) is known
    # What was measured with its exchanges is not sent once more.
    sent = [predict_step(*step.settings, each).seconds.sending for each in (machine, known)]
    has_exchanges = step.tensor > 1 or update == "sharded"
    assert sent[1] < sent[0] if has_exchanges else sent[1] == sent[0]


@pytest.mark.parametrize("name", ["lm", "mixed"])
def test_layers_of_a_step_at_once_are_one_piece(name):
    step = StepShape(task_of(name), "dp1")
    works, unit = works_of(step), Unit(step.model, step.t, step.b, splits=False)
    assert not {FORWARD, BACKWARD} & {piece for piece, _ in works}
    for kind, rows in enumerate(step.unit_rows):
        flops = amount(*unit.at_once(kind, rows)).flops
        assert flops == pytest.approx(rows * works[BOTH, kind].flops)
    assert predict_step(task_of(name), "dp1", hardware=MACHINES["h100"]).seconds.layers > 0


def test_pieces_of_other_models_are_others():
    kinds = [
        {work.kind for work in works_of(StepShape(*random_settings(name, 1))).values()}
        for name in ("lm", "gru", "transformer", "mixed")
    ]
    assert len(set.union(*kinds)) == sum(map(len, kinds))


def test_links_are_as_fast_as_at_the_nearest_sizes():
    link = Link(1e6, 0.5, ((100.0, 1e3), (10_000.0, 1e5)))
    assert link.time(0, 2) == 1.0
    assert link.time(100, 1) == pytest.approx(0.5 + 0.1)
    assert link.time(1000, 0) == pytest.approx(1000 / 1e4)  # half-way, in logarithms
    assert link.time(1e6, 0) == pytest.approx(10)
    assert Link(1e6, 0.5).time(1e6, 1) == pytest.approx(1.5)


def test_slowness_is_that_of_samples_like_it():
    works = [Work("forward", (8, b, 1, 2), flops=1e9 * b, bytes=1e6, turns=8) for b in (4, 8, 16)]
    samples = tuple(Sample(w.kind, w.sizes, s) for w, s in ((works[0], 2.0), (works[2], 8.0)))
    machine = dataclasses.replace(MACHINES["h100"], samples=samples)
    slowness = [machine.seconds(work) / machine.roofline(work) for work in works]
    assert slowness == pytest.approx([2.0, 4.0, 8.0], rel=1e-6)  # half-way between two samples
    other = dataclasses.replace(works[0], kind="last")
    assert machine.seconds(other) == machine.roofline(other)


def skip_on_busy_cores(num_cores):
    """What others do on the machine is not predicted: so many processes must get a core each."""
    spin = "from time import *; end = time() + 1\nwhile time() < end: pass\nprint(process_time())"
    spins = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE, text=True)
        for _ in range(num_cores)
    ]
    share = min(float(process.communicate()[0]) for process in spins)
    if share < 0.9:
        pytest.skip(f"{num_cores} processes get {share:.0%} of a core each")


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "lm --num-layers 4 --hidden-size 256 --embed-size 256 --vocab-size 2688 --seq-len 64",
        f"{EXAMPLES}/forecaster.py:Forecast --width 256",
        f"{EXAMPLES}/transformer.py:Characters --width 128",
    ],
    ids=["lm", "gru", "transformer"],
)
@pytest.mark.parametrize("shape", ["dp1", "dp2", "pp2"])
def test_time_is_within_a_tenth_of_the_measured(shape, task, tmp_path_factory):
    # The one in the middle of three, each of which measures the pieces beside the step.
    flags = f"inspect {task} --compare --simulate {shape[-1]} --mesh {shape}"
    command = [sys.executable, "-m", "jaxpar", *flags.split()]
    errors = []
    for number in range(3):
        skip_on_busy_cores(int(shape[-1]))
        own = {"XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / f"machine-{number}")}
        run = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | own
        )
        [error] = re.findall(r"step .* ([+-][\d.]+)%", run.stdout)
        errors.append(float(error))
    assert abs(statistics.median(errors)) <= 10, errors


@pytest.mark.parametrize(
    "change",
    [
        {"tie_embedding": True},
        {"dtype": "bfloat16"},
        {"embed_size": 64},
        {"num_buckets": 2, "bucket_multiple": 4},
    ],
    ids=str,
)
def test_any_option_of_a_task_has_a_cost(change):
    task = dataclasses.replace(LM(3, 96, 96, vocab_size=384, batch_size=8, seq_len=8), **change)
    settings = make_settings((2, 2, 1), (2, 2), task)
    cost = predict_step(*settings, MACHINES["h100"])
    assert cost.memory.total > 0
    assert cost.seconds.total > 0
    assert cost.sent_bytes > 0


def test_unequal_shares_are_those_of_the_group_with_most():
    task, parallel, train = make_settings((2, 1, 1))
    shares = dataclasses.replace(parallel, shares=(3, 1))
    even, uneven = (predict_step(task, p, train, ONLY_FLOPS).seconds for p in (parallel, shares))
    assert uneven.layers == pytest.approx(even.layers * 1.5)


def test_what_cannot_be_predicted_is_refused(tmp_path):
    task, parallel, train = make_settings((2, 1, 1))
    unknown = dataclasses.replace(task, vocab_size=None, corpus="nowhere")
    with pytest.raises(FileNotFoundError, match="no corpus 'nowhere'"):
        predict_step(unknown, parallel, train)
    with pytest.raises(ValueError, match=r"hidden_size=\d+ does not divide by tensor=7"):
        predict_step(task, "tp7", train)
    with pytest.raises(ValueError, match="stage=2: the task images has no pipeline"):
        predict_step(task_of("images"), "pp2")
    with pytest.raises(
        ValueError, match="head='sharded': model Forecaster has no method last_part"
    ):
        predict_step(task_of("gru"), Parallel("pp2", PipelineConfig(head="sharded")))
    with pytest.raises(
        ValueError, match=r"unknown machine .h900.; use here .measured., h100, h200, a100"
    ):
        find_machine("h900")
    (tmp_path / "other.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match=r"other\.json describes no hardware"):
        find_machine(str(tmp_path / "other.json"))


@pytest.mark.parametrize("memory_bytes", [0, -1.0, float("nan"), float("inf")])
def test_no_machine_has_such_memory(memory_bytes):
    with pytest.raises(ValueError, match=f"memory_bytes={memory_bytes}: must be positive"):
        find_machine("h100", memory_bytes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", float("nan")),
        ("memory_bytes_per_second", 0.0),
        ("host_bytes_per_second", float("inf")),
        ("devices_per_host", 0),
        ("loop_seconds", -1.0),
        ("tick_seconds", float("nan")),
        ("flops_per_second", {"float32": float("nan")}),
    ],
)
def test_numbers_of_no_machine_are_refused(field, value, tmp_path):
    shown = next(iter(value.values())) if field == "flops_per_second" else value
    with pytest.raises(ValueError, match=rf"{field}.*={shown}: must be"):
        dataclasses.replace(ONLY_FLOPS, **{field: value})
    MACHINES["h100"].save(tmp_path / "machine.json")
    text = (tmp_path / "machine.json").read_text()
    broken = re.sub(r'"loop_seconds": [^,]+', '"loop_seconds": NaN', text)
    (tmp_path / "machine.json").write_text(broken)
    with pytest.raises(ValueError, match=r"machine\.json describes no hardware \(loop_seconds=nan"):
        find_machine(str(tmp_path / "machine.json"))


@pytest.mark.parametrize(
    "task",
    [
        "lm --vocab-size 384 --hidden-size 32 --embed-size 32",
        pytest.param(f"{EXAMPLES}/forecaster.py:Forecast", marks=pytest.mark.full),
    ],
    ids=["lm", "gru"],
)
def test_the_command_prints_predicted_compiled_and_measured(task, capsys, laptop_here):
    flags = f"inspect {task} --compare --simulate 8 --mesh dp4pp2"
    assert main(flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {tuple(line.split()[:2]): line.split()[2:] for line in lines[2:-2]}
    predicted, compiled, difference = columns["collective-permute", "stage"]
    assert (predicted, difference) == (compiled, "none")
    assert re.fullmatch(r"memory per device .* bytes \([+-]\d+\.\d%\)", lines[-2])
    assert re.fullmatch(r"step +[\d.]+ ms +[\d.]+ ms +[+-]\d+\.\d%", lines[-1])
