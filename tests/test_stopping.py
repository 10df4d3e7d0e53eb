"""The law: a signal to any process ends all of them at the same place, in seconds, and nothing is lost."""

import re
import signal
import time
from pathlib import Path
from typing import ClassVar

import jax
import pytest
from lib import api
from lib.runs import NEVER, metrics_of, start_by_hand, validation_losses, whole_checkpoints

from jaxpar import MeshConfig, OptimizerConfig, Parallel, TrainConfig, fit
from jaxpar.lm import LM

END_SECONDS = 120  # which only a process that hangs takes
STOP_SECONDS = 5.0  # with steps that are quicker than that


@pytest.mark.full
def test_a_signal_to_one_process_stops_all_at_the_same_step(text, tmp_path):
    folder = tmp_path / "run"
    processes = start_by_hand(
        [
            "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "8",
            "--num-layers", "1", "--hidden-size", "8", "--embed-size", "8", "--mesh", "dp2",
            "--train.num-steps", NEVER, "--train.log-every", NEVER, "--train.checkpoint-every", "0",
            "--train.out-dir", str(folder),
        ]
    )  # fmt: skip
    try:
        for line in processes[0].stdout:
            if re.match(r"step +1/", line):
                break
        time.sleep(1)  # some steps later
        sent = time.monotonic()
        processes[1].send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=END_SECONDS) for process in processes]
        seconds = time.monotonic() - sent
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, ends
    said = re.search(r"^stopped by SIGTERM after step (\d+)/", ends[0][0], re.MULTILINE)
    assert said, ends
    assert whole_checkpoints(folder) == [int(said[1])]
    assert int(said[1]) > 1
    assert [line["step"] for line in metrics_of(folder)] == [1]  # no log point in between
    assert seconds < STOP_SECONDS


HANGING = """
import ctypes, dataclasses, sys, time
import jax
sys.path.insert(0, TESTS)
from lib import api
from jaxpar.lm import LM

api.tell_stalls_after(2.0)


def spin():
    while True:
        pass


def sleep():
    time.sleep(1000)


def keep():
    ctypes.PyDLL(None).sleep(1000)  # keeps Python's lock


class Batches:
    def __init__(self, batches):
        self.batches, self.batch_size, self.num_windows = batches, batches.batch_size, batches.num_windows

    def batch(self, step, rows=slice(None)):
        if step == 2:
            time.sleep(3)  # a slow step, after which nobody may come to look for the next one
        if step == 3 and jax.process_index() == VICTIM:
            HANG()
        return self.batches.batch(step, rows)


@dataclasses.dataclass(frozen=True)
class Hanging(LM):
    def make_batches(self, split, seed=None):
        return Batches(super().make_batches(split, seed))
"""


@pytest.mark.more
@pytest.mark.parametrize(
    ("victim", "hang"),
    [(0, "sleep"), (1, "spin"), (1, "keep")],
)
def test_a_process_that_never_comes_to_the_next_step_is_named(victim, hang, text, tmp_path):
    file = tmp_path / "hanging.py"
    program = HANGING.replace("VICTIM", str(victim)).replace("HANG()", f"{hang}()")
    file.write_text(program.replace("TESTS", repr(str(Path(__file__).parent))))
    processes = start_by_hand(
        [
            "train", f"{file}:Hanging", "--corpus", str(text), "--batch-size", "8", "--seq-len", "8",
            "--num-layers", "1", "--hidden-size", "8", "--embed-size", "8", "--mesh", "dp2",
            "--train.num-steps", "100", "--train.out-dir", str(tmp_path / "run"),
        ]
    )  # fmt: skip
    try:
        said = []
        for line in processes[victim].stderr:
            said.append(line)
            if re.search(rf"line \d+ in {hang}\n", line):
                break
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert "Timeout (0:00:02)!\n" in said
    assert re.search(rf'File "{file}", line \d+ in {hang}\n', said[-1]), said


class Signalled:
    """Batches; before the second one, once, comes a signal."""

    def __init__(self, batches, signals):
        self.batches, self.signals = batches, signals

    def __getattr__(self, name):
        return getattr(self.batches, name)

    def batch(self, step, rows=slice(None)):
        if step == 1 and self.signals:
            signal.raise_signal(self.signals.pop())
        return self.batches.batch(step, rows)


class Ended(LM):
    """Its first validation ends after a batch."""

    signals: ClassVar = [signal.SIGTERM]

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        return Signalled(batches, self.signals) if split == "valid" else batches


@pytest.mark.full
@pytest.mark.usefixtures("compile_once")
def test_a_validation_that_a_signal_ends_is_made_up_for(text, tmp_path):
    task = Ended(
        num_layers=1,
        hidden_size=8,
        embed_size=8,
        corpus=str(text),
        batch_size=4,
        seq_len=8,
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    run, whole = tmp_path / "run", tmp_path / "whole"

    def train(folder, **options):
        config = TrainConfig(num_steps=6, log_every=2, eval_every=3, out_dir=str(folder))
        return fit(task, Parallel(MeshConfig(devices=(0,))), config, **options)

    result = train(run)
    assert (result.stopped_by, int(result.state.step)) == (signal.SIGTERM, 3)
    assert [line["split"] for line in metrics_of(run)] == ["train"] * 2
    train(run, resume=True)
    train(whole)

    def validations(folder):
        lines = [line for line in metrics_of(folder) if line["split"] != "train"]
        return [(line["step"], line["split"], line["loss"]) for line in lines]

    assert validations(run) == validations(whole)
    assert validation_losses(run / "checkpoints/6").keys() == {3, 6}
    states = api.run_state(run), api.run_state(whole)
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert (ours == theirs).all()
