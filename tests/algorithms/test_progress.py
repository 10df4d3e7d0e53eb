"""The numbers of a run as text and as columns, and where the time of a run goes."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxpar import ConsoleReport
from jaxpar.training.progress import (
    Evaluation,
    Progress,
    Times,
    Utilization,
    columns_of,
    format_number,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (92.23, "92.2"), (5.6284, "5.628"), (0.9344, "0.934"), (0.00921, "0.00921"), (0.0, "0.000"),
        (-3.5, "-3.500"), (1234.56, "1234.6"), (3.2e8, "3.2e+08"), (math.inf, "inf"), (9.2e-6, "9.2e-06"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_that_say_something(value, text):
    assert format_number(value) == text


def test_columns_are_equally_long_and_in_the_order_of_steps():
    lines = [
        {"split": "train", "step": 2, "loss": 3.0, "learning_rate": None},
        {"split": "train", "step": 4, "loss": 2.0, "learning_rate": 0.1},
        {"split": "skipped", "step": 5, "nonfinite": "loss"},
        {"split": "valid", "step": 3, "loss": 2.5},
    ]
    nan = math.nan
    expected = {
        "step": [2, 3, 4],
        "train/loss": [3.0, nan, 2.0],
        "train/learning_rate": [nan, nan, 0.1],
        "valid/loss": [nan, 2.5, nan],
    }
    found = columns_of(lines)
    assert [*found] == [*expected]
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)
    assert columns_of([]) == {"step": []}


def test_the_loss_is_shown_as_the_loss():
    shown = Evaluation("valid", 1.5, {"loss": 1.5, "error": 2.0}).to_text()
    assert shown.startswith("valid loss 1.5")


# ---- utilization ----

BATCH = {"x": np.zeros((4, 8)), "level": np.zeros(4), "starts": True}  # 37 numbers


def utilization(kind):
    """Of a model that needs 1000 FLOPs a batch, on two devices of a kind."""
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    facts = SimpleNamespace(passed=np.zeros(1, np.float32), batch=BATCH, step_flops=1000)
    mesh = SimpleNamespace(devices=np.array([device, device]))
    return Utilization(SimpleNamespace(facts=facts, mesh=mesh))


def test_a_utilization_is_of_the_batches_since_the_last_one():
    used, peak = utilization("NVIDIA H100 80GB HBM3"), 2 * 494.7e12
    for _ in range(3):
        used.add(BATCH)
    assert used.take(0.5) == pytest.approx(3 * 1000 / 0.5 / peak)
    used.add({**BATCH, "x": BATCH["x"][:, :4]})  # shorter ones count by their numbers
    assert used.take(1.0) == pytest.approx(1000 / peak * (16 + 4 + 1) / 37)


def test_where_no_peak_is_known_nothing_is_counted_or_told():
    used = utilization("NVIDIA L4")
    del used._facts.step_flops  # which would trace the model
    used.add(BATCH)
    assert used.take(1.0) is None
    line = Progress(2, 1.0, {}, 1.0, None, "rows", 5.0, 1.0)
    assert "MFU" not in line.to_text()
    assert "mfu" not in line.to_json()


# ---- times ----


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
