"""The law: a share of the peak is that of the model's own products, and every second of a run counts once."""

import dataclasses
import io
import json
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from lib.models import MAKERS, Dense, Regress
from rich.console import Console

from jaxpar import ConsoleReport, MeshConfig, OptimizerConfig, Parallel, Report, TrainConfig, fit
from jaxpar.base.sheets import peak_flops
from jaxpar.lm import LM
from jaxpar.step.setup import Setup
from jaxpar.training.checkpoint import Checkpoints
from jaxpar.training.progress import Progress, Times, Utilization

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "peak"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("gpu", "NVIDIA H100 80GB HBM3", "float32", 494.7e12),
        ("gpu", "NVIDIA A100-SXM4-80GB", "float16", 156e12), ("tpu", "TPU v5 lite", "bfloat16", 197e12),
        ("tpu", "TPU v6 lite", "float32", 918e12), ("gpu", "NVIDIA H100 PCIe", "bfloat16", None),
        ("gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None), ("gpu", "NVIDIA L4", "float32", None),
        ("gpu", "NVIDIA GH200 480GB", "float32", None), ("cpu", "cpu", "float32", None),
    ],
)  # fmt: skip
def test_a_peak_is_that_of_the_very_kind(platform, kind, dtype, peak):
    device = type("Device", (), {"platform": platform, "device_kind": kind})
    assert peak_flops(device, dtype) == peak


class Again(Dense):
    """Its backward pass computes the forward pass anew."""

    def __call__(self, carry, x, at):
        return jax.checkpoint(lambda x: super(Again, self).__call__(carry, x, at))(x)


# Of 16 x 8 = 128 positions, 3 features and 16 units, by hand: `first` has a product forward and one for its
# weights, a layer and `last` have one forward and two backward; a product is 2 FLOPs a position and weight.
BY_HAND = 2 * 128 * (2 * 3 * 16 + 2 * 3 * 16 * 16 + 3 * 16 * 3)


def test_utilization_is_as_by_hand(monkeypatch):
    monkeypatch.setitem(MAKERS, "again", lambda rngs: Again(rngs=rngs))
    monkeypatch.setattr("jaxpar.training.progress.peak_flops", lambda device, dtype: 1e9)
    for kinds in (("dense", "dense"), ("dense", "again")):
        setup = Setup.of(Regress(kinds), Parallel("dp2tp2", ONE.pipeline))
        used = Utilization(setup)
        assert setup.facts.step_flops == BY_HAND
        batch = setup.task.make_batches("train").batch(0)
        for _ in range(3):
            used.add(batch)
        assert used.take(0.5) == pytest.approx(3 * BY_HAND / 0.5 / 4e9)  # of four devices
        used.add({name: leaf[:, :4] if np.ndim(leaf) > 1 else leaf for name, leaf in batch.items()})
        # Of 16 rows, with 8 numbers a time step and two without time; and one that says where it starts.
        share = (16 * (4 * 8 + 2) + 1) / (16 * (8 * 8 + 2) + 1)
        assert used.take(1.0) == pytest.approx(BY_HAND / 4e9 * share)


@pytest.mark.full
def test_utilization_is_told_beside_the_speed(text, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpar.training.progress.peak_flops", lambda device, dtype: 1e12)
    adam = OptimizerConfig(warmup_steps=1)
    task = LM(1, 8, 8, corpus=str(text), batch_size=8, seq_len=4, optimizer=adam)
    told = []
    report = Report()
    report.progress = lambda progress, _: told.append(progress)
    train = TrainConfig(6, log_every=2, out_dir=str(tmp_path / "run"))
    result = fit(task, ONE, train, report=report)
    of_token = result.setup.facts.step_flops / 32 / 1e12
    assert told[0].mfu is None
    for each in told[1:]:
        assert each.mfu == pytest.approx(of_token * each.units_per_second)
        assert each.to_text().endswith(f" tokens/s  MFU {each.mfu:.1%}")
    lines = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    train_lines = [line for line in lines if line["split"] == "train"]
    assert [line.get("mfu") for line in train_lines] == [each.mfu for each in told]


def test_where_no_peak_is_known_nothing_is_traced_or_told(text, tmp_path, monkeypatch):
    setup = Setup.of(Regress(("dense",)), ONE)
    used = Utilization(setup)
    used.add(setup.task.make_batches("train").batch(0))
    assert used.take(1.0) is None
    assert "costs" not in vars(setup.facts)
    line = Progress(2, 1.0, {}, 1.0, None, "rows", 5.0, 1.0)
    assert "MFU" not in line.to_text()
    assert "mfu" not in line.to_json()


class Slow:
    """Batches that take a while each."""

    def __init__(self, batches, seconds):
        self._batches, self._seconds = batches, seconds

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def batch(self, *args):
        time.sleep(self._seconds)
        return self._batches.batch(*args)


SLEEPS = {"train": 0.05, "valid": 0.08, "test": 0.0}


@dataclasses.dataclass(frozen=True)
class SlowTask(Regress):
    def make_batches(self, split, seed=None):
        return Slow(super().make_batches(split, seed), SLEEPS[split])


@pytest.mark.full
def test_every_second_is_where_it_was_spent(tmp_path, monkeypatch):
    save, found = Checkpoints.save, {}

    def slow_save(*args):
        time.sleep(0.4)
        return save(*args)

    monkeypatch.setattr(Checkpoints, "save", slow_save)
    report = Report()
    report.finish = lambda evaluations, out_dir, seconds: found.update(seconds)
    train = TrainConfig(6, log_every=3, out_dir=str(tmp_path / "run"), checkpoint_every=3)
    begin = time.perf_counter()
    result = fit(SlowTask(("dense",)), ONE, train, report=report)
    elapsed = time.perf_counter() - begin
    assert [*found] == ["steps", "compiling", "input", "evaluation", "checkpoints", "other"]
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) <= elapsed
    windows = result.setup.task.make_batches("valid").num_windows
    assert found["input"] >= 6 * 0.05
    assert found["evaluation"] >= windows * 0.08
    assert found["checkpoints"] >= 2 * 0.4
    assert found["compiling"] > found["steps"] > 0


def test_each_moment_counts_once(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    spent = Times()
    batches = [{"x": jax.numpy.zeros((2, n)), "starts": True} for n in (3, 4)]
    for batch, seconds in ((batches[0], 5), (batches[0], 1), (batches[1], 3), (batches[1], 1)):
        with spent.of_step(batch):
            now[0] += seconds
    for what, seconds in (("input", 60), ("input", 2), ("steps", 0.5)):
        with spent.of(what):
            now[0] += seconds
    now[0] += 7
    assert spent.parts() == {
        "steps": 2.5, "compiling": 8, "input": 62, "evaluation": 0, "checkpoints": 0, "other": 7,
    }  # fmt: skip
    console = Console(width=100, file=io.StringIO())
    ConsoleReport(console).finish({}, Path("nowhere"), spent.parts())
    assert console.file.getvalue() == (
        "time: steps 0:02, compiling 0:08, input 1:02, other 0:07\n1:20 in all; nowhere holds \n"
    )
