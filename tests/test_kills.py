"""The law: a run that is killed (kill -9) at any moment, as often as one likes, loses nothing.

`--seed` draws the moments:

    pytest -n 0 -m "" -s --seed again tests/test_kills.py
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from lib import api
from lib.runs import metrics_of, whole_checkpoints

STEPS = 120
NUM_KILLS = 15
END_SECONDS = 1800  # which only a process that hangs takes
LEFT_BEHIND_SECONDS = 10  # in which all end that belong to a process which was killed
SENTENCES = ["the cat sat on the mat", "a dog ran", "the mat", "a cat sat on a dog on the mat"]
# Lines in buckets, on two stages with dropout: all that a checkpoint has to hold is in use.
FLAGS = [
    "--mesh", "pp2", "--pipeline.num-chunks", "2", "--num-buckets", "3",
    "--bucket-multiple", "4", "--batch-size", "8", "--seq-len", "8", "--num-layers", "3",
    "--hidden-size", "8", "--embed-size", "8", "--dropout", "0.3", "--optimizer.learning-rate", "0.02",
    "--train.num-steps", str(STEPS), "--train.log-every", "1", "--train.checkpoint-every", "7",
    "--train.eval-every", "50",
]  # fmt: skip


class Run:
    """A run in a folder, started by the command line as often as it is killed."""

    command, devices = ("train",), ("--simulate", "2")
    codes = (0, -signal.SIGKILL)

    def __init__(self, folder, text, environ):
        self.folder, self.environ = folder, environ
        self.said = folder.with_suffix(".log")
        self._out_dir = ["--train.out-dir", str(folder)]
        self._new = ["lm", "--corpus", str(text), *FLAGS]

    @contextlib.contextmanager
    def start(self):
        """A process that begins the run or goes on with it; killed at the end."""
        resume = (self.folder / "config.toml").exists()
        arguments = [*self.devices, *self._out_dir]
        arguments = ["--resume", *arguments] if resume else [*self._new, *arguments]
        # A file, for XLA may say more of what it finds in the cache than a pipe holds.
        with self.said.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxpar", *self.command, *arguments],
                stdout=subprocess.DEVNULL, stderr=said, env=self.environ,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()
        assert process.returncode in self.codes, self.said.read_text()
        if process.returncode in (0, -signal.SIGKILL):
            assert "Traceback" not in self.said.read_text(), self.said.read_text()

    def finish(self):
        with self.start() as process:
            assert process.wait(END_SECONDS) == 0

    def latest_step(self):
        if not (self.folder / "checkpoints").exists():
            return 0
        return max(whole_checkpoints(self.folder), default=0)

    def losses(self):
        """All that was computed: of every step and evaluation."""
        names = ("step", "split", "loss", "grad_norm", "perplexity")
        return [tuple(line.get(name) for name in names) for line in metrics_of(self.folder)]

    def state(self):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(api.run_state(self.folder))]


class Launched(Run):
    """A run in two processes, which their launcher starts."""

    command, devices = ("launch", "--processes", "2", "--", "train"), ()
    codes = (0, -signal.SIGKILL, 128 + signal.SIGKILL)

    def processes(self):
        """The ids of all that belong to it and run, each with that of its parent."""
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True
        )  # fmt: skip
        rows = (row.split(maxsplit=3) for row in listed.stdout.splitlines())
        found = (row for row in rows if len(row) == 4 and not row[2].startswith("Z"))
        return {int(pid): int(parent) for pid, parent, _, args in found if self._out_dir[1] in args}

    def kill(self, process, victim):
        """Kills the launcher (0) or a child, if it is there; the seconds until nobody is left."""
        found, began = self.processes(), time.monotonic()
        assert process.pid in found or process.poll() is not None
        children = sorted(pid for pid, parent in found.items() if parent == process.pid)
        if process.poll() is None:
            os.kill([process.pid, *children][min(victim, len(children))], signal.SIGKILL)
        process.wait(END_SECONDS)
        while left := self.processes():
            assert time.monotonic() - began < LEFT_BEHIND_SECONDS, left
            time.sleep(0.1)
        return time.monotonic() - began


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run to its end: itself, its text, its environment, and the seconds until its first step."""
    folder = tmp_path_factory.mktemp("kills")
    rng = np.random.default_rng(0)
    text = folder / "text"
    text.mkdir()
    for split, num_lines in (("train", 300), ("valid", 20), ("test", 20)):
        lines = [SENTENCES[i] for i in rng.integers(len(SENTENCES), size=num_lines)]
        (text / f"{split}.txt").write_text("\n".join(lines) + "\n")
    environ = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run, began = Run(folder / "undisturbed", text, environ), time.monotonic()
    with run.start() as process:
        wait_for_a_line(run, process, 0)
        seconds = time.monotonic() - began
        assert process.wait(END_SECONDS) == 0
    return run, text, environ, seconds


def wait_for_a_line(run, process, size):
    """Until metrics.jsonl is no longer of this size, or the process has ended."""
    path = run.folder / "metrics.jsonl"
    deadline = time.monotonic() + END_SECONDS
    while process.poll() is None and (not path.exists() or path.stat().st_size == size):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def moments(request):
    """Random numbers, others for each seed of a run of the tests."""
    return random.Random(request.config.getoption("--seed"))


@pytest.mark.full
def test_a_run_that_is_killed_has_the_losses_of_one_that_is_not(undisturbed, tmp_path, moments):
    whole, text, environ, start_seconds = undisturbed
    kills = num_runs = 0
    while kills < NUM_KILLS:
        num_runs += 1
        run = Run(tmp_path / str(num_runs), text, environ)
        latest = 0
        while kills < NUM_KILLS:
            with run.start() as process:
                if moments.random() < 0.3:  # while it starts
                    time.sleep(moments.uniform(0, start_seconds))
                else:  # while it trains
                    path = run.folder / "metrics.jsonl"
                    wait_for_a_line(run, process, path.stat().st_size if path.exists() else 0)
                    time.sleep(moments.uniform(0, 0.5))
            if process.returncode == 0:
                break
            kills += 1
            before, latest = latest, run.latest_step()
            assert latest >= before  # the newest whole checkpoint stays
            print(f"kill {kills}: run {num_runs}, at checkpoint {latest}", flush=True)
        else:
            run.finish()
        assert run.losses() == whole.losses()
        for actual, expected in zip(run.state(), whole.state(), strict=True):
            np.testing.assert_array_equal(actual, expected)
    steps = [line["step"] for line in metrics_of(whole.folder) if line["split"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    assert kills == NUM_KILLS


@pytest.mark.full
def test_two_processes_that_are_killed_leave_nobody_and_lose_nothing(
    undisturbed, tmp_path, moments
):
    """The launcher and its children by turns."""
    one, text, environ, start_seconds = undisturbed
    whole = Launched(tmp_path / "whole", text, environ)
    whole.finish()
    np.testing.assert_allclose(
        [loss for _, _, loss, *_ in whole.losses()], [loss for _, _, loss, *_ in one.losses()], 1e-4
    )
    kills = num_runs = 0
    while kills < NUM_KILLS:
        num_runs += 1
        run = Launched(tmp_path / f"run-{num_runs:03}", text, environ)
        while kills < NUM_KILLS:
            with run.start() as process:
                if kills > 1 and moments.random() < 0.3:  # while it starts
                    time.sleep(moments.uniform(0, 2 * start_seconds))
                else:  # while it trains
                    path = run.folder / "metrics.jsonl"
                    wait_for_a_line(run, process, path.stat().st_size if path.exists() else 0)
                    time.sleep(moments.uniform(0, 3))
                victim = kills % 3
                seconds = run.kill(process, victim)
            if process.returncode == 0:
                break
            kills += 1
            print(
                f"kill {kills}: {victim}, run {num_runs}, nobody left after {seconds:.1f} s, at checkpoint "
                f"{run.latest_step()}",
                flush=True,
            )
        else:
            run.finish()
        assert run.losses() == whole.losses()
        for actual, expected in zip(run.state(), whole.state(), strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert kills == NUM_KILLS


@pytest.mark.full
def test_losses_are_compared_to_the_last_bit(undisturbed):
    whole = undisturbed[0]
    losses = whole.losses()
    assert [split for _, split, *_ in losses if split != "train"] == ["valid"] * 3 + ["test"]
    assert len(losses) == STEPS + 4
    assert json.loads(json.dumps(losses[0][2])) == losses[0][2]
    assert len({loss for _, split, loss, *_ in losses if split == "train"}) > STEPS // 2
