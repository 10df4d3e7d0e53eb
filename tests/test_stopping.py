"""The law: a signal to any process ends all of them at the same place, in seconds, and nothing is lost."""

import re
import signal
import time

import jax
import pytest
from lib.runs import NEVER, start_by_hand

from jaxpar import MeshConfig, OptimizerConfig, Parallel, TrainConfig, fit
from jaxpar.hosts import stopping
from jaxpar.lm import LM
from jaxpar.step.setup import Setup
from jaxpar.training import loop
from jaxpar.training.run_folder import RunFolder

END_SECONDS = 120  # which only a process that hangs takes
STOP_SECONDS = 5.0  # with steps that are quicker than that


@pytest.mark.full
def test_a_signal_to_one_process_stops_all_at_the_same_step(text, tmp_path):
    folder = RunFolder(tmp_path / "run")
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
    assert folder.checkpoints(Setup.of(*folder.settings())).steps() == [int(said[1])]
    assert int(said[1]) > 1
    assert [line["step"] for line in folder.metrics()] == [1]  # no log point in between
    assert seconds < STOP_SECONDS


HANGING = """
import ctypes, dataclasses, time
import jax
from jaxpar.hosts import stopping
from jaxpar.lm import LM

stopping.STALL_SECONDS = 2.0


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


@pytest.mark.parametrize(("answers", "lost"), [((1, 2), []), ((2,), [1])])
def test_processes_whose_threads_do_not_answer_are_lost(answers, lost, monkeypatch):
    """Process 0 asks on the board of three; who answers is there, whatever its step does."""
    looks = []

    class Board:
        def put(self, name, text):
            assert (name, text) == ("lost/0", "")

        def texts(self):
            looks.append(1)
            return {"lost/0": "", **{f"alive/{number}": "" for number in answers}}

    group = object.__new__(stopping._Group)
    group._board = Board()
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert group.find_lost() == lost
    assert len(looks) == (stopping._ANSWER_POLLS if lost else 1)


@pytest.mark.more
@pytest.mark.parametrize(
    ("victim", "hang"),
    [(0, "sleep"), (1, "spin"), (1, "keep")],
)
def test_a_process_that_never_comes_to_the_next_step_is_named(victim, hang, text, tmp_path):
    file = tmp_path / "hanging.py"
    file.write_text(HANGING.replace("VICTIM", str(victim)).replace("HANG()", f"{hang}()"))
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


@pytest.mark.full
@pytest.mark.usefixtures("compile_once")
def test_a_validation_that_a_signal_ends_is_made_up_for(text, tmp_path, monkeypatch):
    task = LM(
        num_layers=1,
        hidden_size=8,
        embed_size=8,
        corpus=str(text),
        batch_size=4,
        seq_len=8,
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    run, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")

    def train(folder, **options):
        config = TrainConfig(num_steps=6, log_every=2, eval_every=3, out_dir=str(folder))
        return fit(task, Parallel(MeshConfig(devices=(0,))), config, **options)

    begun = []

    def evaluate(*arguments):  # a signal that comes after the first batch
        *others, before_batch = arguments

        def interrupted():
            begun.append(1)
            if len(begun) == 2:
                signal.raise_signal(signal.SIGTERM)
            before_batch()

        return loop_evaluate(*others, interrupted)

    loop_evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", evaluate)
    result = train(run)
    monkeypatch.undo()
    assert (result.stopped_by, int(result.state.step), len(begun)) == (signal.SIGTERM, 3, 2)
    assert [line["split"] for line in run.metrics()] == ["train"] * 2
    train(run, resume=True)
    train(whole)

    def lines(folder):
        return [(line["step"], line["split"], line["loss"]) for line in folder.metrics()]

    assert [line for line in lines(run) if line[1] != "train"] == [
        line for line in lines(whole) if line[1] != "train"
    ]
    assert run.checkpoints(Setup.of(*run.settings())).stored_losses().keys() == {3, 6}
    states = (each.checkpoints(Setup.of(*each.settings())).restore() for each in (run, whole))
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert (ours == theirs).all()
