"""Programs for machines that are not there: what their compilers make of a step. `pytest -m aot`."""

import dataclasses
import importlib.metadata
import json
import re

import pytest

from jaxpar.analysis import inspect_step
from jaxpar.analysis.program import lower_step
from jaxpar.base.axes import DATA, STAGE
from jaxpar.cli.main import main
from jaxpar.config import OptimizerConfig, Parallel, PipelineConfig
from jaxpar.mesh import MeshConfig, described_devices
from jaxpar.planning import check_fits, estimate_step, plan
from jaxpar.setup import Setup
from jaxpar.step import make_train_step
from jaxpar.tasks.lm import LM

pytestmark = pytest.mark.aot

TASK = LM(
    8, 512, 512, vocab_size=10240, dropout=0.0, batch_size=128, seq_len=32,
    optimizer=OptimizerConfig("adam", 1e-3),
)  # fmt: skip
PARALLEL = Parallel("dp2pp2tp2", PipelineConfig(num_microbatches=2, num_chunks=4))
SMALL = LM(2, 128, 128, vocab_size=1024, batch_size=16, seq_len=16)
# Bytes of a device for this step, by machine and the version of its compiler.
STORED = {
    ("v5e:2x4", "libtpu 0.0.50.1"): 106_978_304,
    ("h100:1x1x8", "jax-cuda13-plugin 0.12.0.1"): 205_415_405,
}
MEMORY_ERROR = 0.02  # the promise: small changes of the step stay below it
COMPILERS = {"v5e:2x4": "libtpu", "h100:1x1x8": "jax-cuda13-plugin"}


@pytest.fixture(scope="module", params=COMPILERS)
def compiled(request):
    """Machine, setup and report of the step."""
    mesh = PARALLEL.mesh.build(described_devices(request.param))
    setup = Setup.of(TASK, PARALLEL, mesh=mesh)
    return request.param, setup, inspect_step(setup)


def test_nothing_is_sent_over_data_in_a_loop(compiled):
    _, _, report = compiled
    assert report.along(DATA)
    assert not [c for c in report.along(DATA) if c.in_loop]


def test_transfers_over_stage_are_counted_once_a_tick(compiled):
    _, setup, report = compiled
    plan_of_ticks = make_train_step(setup).full_table
    permutes = [c for c in report.along(STAGE) if c.op == "collective-permute"]
    assert [c.count for c in permutes] == [int(plan_of_ticks.num_ticks)] * 2
    one = 32 // 4 * 128 // 2 // 2 * 512 * 4 // 2  # t b H floats, split over tensor
    assert {c.bytes for c in permutes} == {one}


def test_every_run_is_known_and_what_computes_beside(compiled):
    _, _, report = compiled
    assert all(c.count is not None for c in report.collectives)
    assert any(not c.waits for c in report.collectives)
    table = str(report)
    assert "beside" in table
    assert "waits" in table


def test_memory_is_as_stored_for_this_compiler(compiled):
    machine, _, report = compiled
    version = f"{COMPILERS[machine]} {importlib.metadata.version(COMPILERS[machine])}"
    if (machine, version) not in STORED:
        pytest.skip(f"no number is stored for {version}; this one gives {report.memory.total}")
    assert report.memory.total == pytest.approx(STORED[machine, version], rel=MEMORY_ERROR)
    assert sum(report.memory.parts.values()) == report.memory.total


@pytest.mark.parametrize("machine", ["v5e:2x2", "h100:1x1x4"])
def test_finalists_are_compiled_and_kept(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ranking = plan(SMALL, machine=machine, num_finalists=2)
    known = [cost for cost in ranking.fitting if cost.program]
    assert len(known) == 2
    assert known == list(ranking.fitting[:2])
    assert not any(cost.measured for cost in ranking.fitting)
    assert len([*(tmp_path / "jaxpar/compiled").iterdir()]) == 2
    again = plan(SMALL, machine=machine, num_finalists=2)
    assert [cost.program for cost in again.fitting[:2]] == [cost.program for cost in known]
    assert ranking.best.seconds_text.startswith("~")
    assert not ranking.best.memory_text.startswith("~")


def test_a_step_that_a_chip_has_no_room_for_is_refused():
    """By the compiler: 4 GB of parameters and twice as much of Adam's, and their gradients, on 16 GB."""
    large = dataclasses.replace(TASK, num_layers=2, hidden_size=8192, embed_size=8192)
    one = Parallel(MeshConfig(data=4))
    with pytest.raises(ValueError, match=r"(needs|refuses).*; use --"):
        check_fits(estimate_step(large, one, machine="v5e:2x2"))


@pytest.mark.parametrize(
    "machine", ["v5p:2x2x1", "v6e:2x2", "a100:1x1x4", "h200:1x2x2", "b200:1x1x4"]
)
def test_every_machine_compiles_a_step(machine, capsys):
    flags = "--vocab-size 256 --num-layers 2 --hidden-size 128 --embed-size 128 --batch-size 8 --seq-len 8"
    command = ["inspect", "lm", "--machine", machine, "--mesh", "dp2tp2", *flags.split(), "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert {tuple(c["axes"]) for c in report["collectives"]} >= {("data",), ("tensor",)}
    assert report["memory"]["purposes"]["parameters"] > 0


@pytest.mark.parametrize("layer", ["rglru", "mingru"])
def test_a_linear_recurrence_is_a_scan_in_parallel_there(layer):
    mesh = MeshConfig().build(described_devices("v5e:2x2"))
    setup = Setup.of(dataclasses.replace(SMALL, layer=layer), "dp1", mesh=mesh)
    assert setup.layout.facts.platform == "tpu"
    text = lower_step(setup).as_text()
    here = lower_step(Setup.of(dataclasses.replace(SMALL, layer=layer), "dp1")).as_text()
    loops = [len(re.findall(r"stablehlo\.while", each)) for each in (text, here)]
    assert loops[0] < loops[1]
