"""The law: a share of the peak is that of the model's own products, and every second of a run counts once."""

import dataclasses
import time

import jax
import pytest
from lib import api
from lib.models import MAKERS, Dense, Regress
from lib.runs import metrics_of

from jaxpar import MeshConfig, OptimizerConfig, Parallel, Report, TrainConfig, fit
from jaxpar.lm import LM

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))


class Again(Dense):
    """Its backward pass computes the forward pass anew."""

    def __call__(self, carry, x, at):
        return jax.checkpoint(lambda x: super(Again, self).__call__(carry, x, at))(x)


# Of 16 x 8 = 128 positions, 3 features and 16 units, by hand: `first` has a product forward and one for its
# weights, a layer and `last` have one forward and two backward; a product is 2 FLOPs a position and weight.
BY_HAND = 2 * 128 * (2 * 3 * 16 + 2 * 3 * 16 * 16 + 3 * 16 * 3)


@pytest.mark.parametrize("kinds", [("dense", "dense"), ("dense", "again")])
def test_utilization_is_as_by_hand(kinds, tmp_path, monkeypatch):
    monkeypatch.setitem(MAKERS, "again", lambda rngs: Again(rngs=rngs))
    told, report = [], Report()
    report.progress = lambda progress, _: told.append(progress)
    task, train = Regress(kinds), TrainConfig(4, log_every=2, out_dir=str(tmp_path / "run"))
    with api.devices_have_peak(1e9):
        fit(task, Parallel("dp2tp2", ONE.pipeline), train, report=report)
    first, *lines = told
    assert first.mfu is None
    batches = task.make_batches("train", train.seed)
    for line, steps in zip(lines, [[1], [2, 3]], strict=True):
        units = sum(batches.batch(step)["weight"].sum() for step in steps)
        seconds = units / line.units_per_second
        assert line.mfu == pytest.approx(len(steps) * BY_HAND / seconds / 4e9)  # of four devices


@pytest.mark.full
def test_utilization_is_told_beside_the_speed(text, tmp_path):
    adam = OptimizerConfig(warmup_steps=1)
    task = LM(1, 8, 8, corpus=str(text), batch_size=8, seq_len=4, optimizer=adam)
    told, report = [], Report()
    report.progress = lambda progress, _: told.append(progress)
    train = TrainConfig(6, log_every=2, out_dir=str(tmp_path / "run"))
    with api.devices_have_peak(1e12):
        fit(task, ONE, train, report=report)
    assert told[0].mfu is None
    for each in told[1:]:
        assert each.mfu > 0
        assert each.to_text().endswith(f" tokens/s  MFU {each.mfu:.1%}")
    train_lines = [line for line in metrics_of(tmp_path / "run") if line["split"] == "train"]
    assert [line.get("mfu") for line in train_lines] == [each.mfu for each in told]


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
def test_every_second_is_where_it_was_spent(tmp_path):
    found, report = {}, Report()

    def slow_save(_, save):
        time.sleep(0.4)
        return save()

    report.finish = lambda evaluations, out_dir, seconds: found.update(seconds)
    train = TrainConfig(6, log_every=3, out_dir=str(tmp_path / "run"), checkpoint_every=3)
    begin = time.perf_counter()
    with api.instead_of("save", slow_save):
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
