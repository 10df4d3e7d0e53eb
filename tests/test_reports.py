"""The law: reports hear a run to its end, whatever that is, and no error of theirs ends it."""

import dataclasses
import json
import logging
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lib import api
from lib.models import Regress
from lib.runs import metrics_of, start_by_hand, whole_checkpoints

from jaxpar import (
    ConsoleReport,
    MeshConfig,
    Parallel,
    Report,
    TensorBoard,
    Tracker,
    Trackio,
    TrainConfig,
    WandB,
    fit,
)

pytestmark = pytest.mark.usefixtures("compile_once")

TASK, ONE = Regress(("dense",)), Parallel(MeshConfig(devices=(0,)))
HOOKS = [name for name in vars(Report) if name[0] != "_" and not name.startswith("stop")]


class Hears(Report):
    """Notes every method that is called, and may do something then."""

    def __init__(self, **actions):
        self.told, self.actions = [], actions

    def __getattribute__(self, name):
        if name in HOOKS:
            self.told.append(name)
            return self.actions.get(name, lambda *_: None)
        return super().__getattribute__(name)


def train(folder, num_steps=6, **options):
    return TrainConfig(num_steps, log_every=1, out_dir=str(folder), **options)


def name_of(folder):
    """What trackers call a run."""
    return json.loads((folder / "data.json").read_text())["run"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(TASK, ONE, train(tmp_path_factory.mktemp("runs") / "whole"), quiet=True)


def break_down(*_):
    raise ConnectionError("no route to host")


@pytest.mark.full
def test_what_a_report_raises_is_one_warning_and_ends_no_run(whole, tmp_path, caplog):
    broken, hears = Hears(**dict.fromkeys(HOOKS, break_down)), Hears()
    result = fit(TASK, ONE, train(tmp_path / "run"), report=[broken, hears])
    assert result.losses == whole.losses
    assert broken.told == hears.told
    assert hears.told[:2] == ["plan", "begin"]
    assert hears.told[-5:] == ["end", "evaluation", "evaluation", "finish", "close"]
    [said] = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        r"Hears.plan: ConnectionError: no route to host \(.*test_reports.py, line \d+\); training continues, "
        r"and further errors of this callback are not shown",
        said,
    )


def test_a_report_hears_of_the_error_that_ends_a_run(tmp_path):
    folder, errors = tmp_path / "run", []
    hears = Hears(progress=lambda *_: folder.rename(tmp_path / "away"), failed=errors.append)
    with pytest.raises(FileNotFoundError, match="was removed") as raised:
        fit(TASK, ONE, train(folder), report=hears)
    assert errors == [raised.value]
    assert hears.told[-2:] == ["failed", "close"]
    assert "finish" not in hears.told


def test_a_report_ends_a_run_that_is_resumed_without_a_trace(whole, tmp_path):
    hears = Hears()
    hears.actions["progress"] = lambda progress, _: progress.step == 3 and hears.stop("enough")
    stopped = fit(TASK, ONE, train(tmp_path / "run"), report=hears)
    assert (stopped.stopped_by, len(stopped.losses)) == ("enough", 3)
    assert "3 of 6 steps" in repr(stopped)
    assert "; stopped (enough); in " in repr(stopped)
    assert [*stopped.evaluations] == ["valid", "test"]
    assert whole_checkpoints(tmp_path / "run") == [3]
    hears.actions.clear()  # of the run before
    resumed = fit(TASK, ONE, train(tmp_path / "run"), report=hears, resume=True)
    assert (resumed.stopped_by, stopped.losses + resumed.losses) == (None, whole.losses)


STOPS = """
import sys
sys.path.insert(0, sys.argv[2])
import jax
from lib import api
api.start_processes()
from jaxpar import Report, TrainConfig, fit
from lib.models import Regress


class Stops(Report):
    def progress(self, progress, num_steps):
        if progress.step == 4:
            self.stop("enough")


train = TrainConfig(
    10**6, log_every=2, checkpoint_every=0, checkpoint_minutes=1e-6, keep_checkpoints=10**6,
    out_dir=sys.argv[1],
)
with api.clock_of_runs(1000 if jax.process_index() == 0 else 0.001):  # clocks that do not agree
    result = fit(Regress(("dense",)), "dp2", train, report=Stops())
print(result.stopped_by, int(result.state.step), *result.evaluations)
"""


@pytest.mark.full
def test_processes_stop_and_save_after_the_same_steps(tmp_path):
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    tests = str(Path(__file__).parent)
    processes = start_by_hand([str(tmp_path / "run"), tests], program=[str(script)])
    try:
        ends = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ends[0][0] == ends[1][0], ends
    found = re.fullmatch(r"enough (\d+) valid test\n", ends[0][0])
    assert found, ends
    last = int(found[1])
    assert 4 <= last < 10**6
    assert whole_checkpoints(tmp_path / "run") == sorted({1, *range(2, last + 1, 2), last})


# ---- patience, and checkpoints by the clock ----


@pytest.mark.full
def test_patience_counts_on_in_a_resumed_run(tmp_path):
    still = dataclasses.replace(
        TASK, optimizer=dataclasses.replace(TASK.optimizer, learning_rate=1e-30)
    )

    def run(folder, patience, **options):
        config = train(tmp_path / folder, 20, eval_every=2, patience=patience)
        return fit(still, ONE, config, **options)

    ended = run("whole", 3, quiet=True)
    assert int(ended.state.step) == 8
    assert ended.stopped_by == "patience=3: no lower validation loss in the last 3"
    valid = [line for line in metrics_of(tmp_path / "whole") if line["split"] == "valid"]
    assert [line["step"] for line in valid] == [2, 4, 6, 8]
    assert ended.evaluations["valid"].loss == valid[-1]["loss"]
    hears = Hears()
    hears.actions["progress"] = lambda progress, _: progress.step == 5 and hears.stop()
    assert int(run("parts", 3, report=hears).state.step) == 5
    again = run("parts", 3, resume=True, quiet=True)
    assert (int(again.state.step), again.stopped_by) == (8, ended.stopped_by)
    again = run("parts", 3, resume=True, quiet=True)
    assert (again.losses, again.stopped_by) == ([], ended.stopped_by)
    assert int(run("parts", 4, resume=True, quiet=True).state.step) == 10


def test_checkpoints_by_the_clock(tmp_path):
    config = dataclasses.replace(
        train(tmp_path / "run", checkpoint_every=0, checkpoint_minutes=1e-6, keep_checkpoints=9),
        log_every=2,
    )
    fit(TASK, ONE, config, quiet=True)
    assert whole_checkpoints(tmp_path / "run") == [1, 2, 4, 6]
    rarely = dataclasses.replace(config, checkpoint_minutes=1e3)
    fit(TASK, ONE, rarely, quiet=True, overwrite=True)
    assert whole_checkpoints(tmp_path / "run") == [6]


# ---- trackers ----


class Notes(Tracker):
    package = "json"

    def __init__(self):
        super().__init__()
        self.lines = []

    def log(self, step, numbers):
        self.lines.append((step, numbers))


@dataclasses.dataclass(frozen=True)
class WithoutNumbers(Regress):
    """The third batch of its training is not finite."""

    def make_batches(self, split, seed=None):
        batches = super().make_batches(split, seed)
        whole = batches.batch

        def batch(step, rows=slice(None)):
            found = whole(step, rows)
            is_bad = split == "train" and step == 2
            return {**found, "y": found["y"] * np.float32(np.nan)} if is_bad else found

        batches.batch = batch
        return batches


def lines_of(folder):
    """What trackers are told of a run, by its metrics.jsonl."""
    lines = []
    for line in metrics_of(folder):
        split, step = line.pop("split"), line.pop("step")
        lines.append((step, {f"{split}/{n}": v for n, v in line.items() if v is not None}))
    return lines


def test_a_tracker_of_ones_own_hears_all_numbers_by_name(tmp_path):
    notes = Notes()
    fit(TASK, ONE, train(tmp_path / "run", eval_every=3), report=notes)
    assert notes.lines == lines_of(tmp_path / "run")
    splits = [next(iter(numbers)).partition("/")[0] for _, numbers in notes.lines]
    assert splits == ["train"] * 3 + ["valid"] + ["train"] * 3 + ["valid", "test"]


def test_callbacks_hear_of_skipped_steps(tmp_path, capsys):
    notes, skips = Notes(), {"nonfinite": "skip", "max_skipped": 5}
    reports = [notes, ConsoleReport()]
    fit(WithoutNumbers(("dense",)), ONE, train(tmp_path / "run", 4, **skips), report=reports)
    assert (3, {"train/skipped": 1}) in notes.lines
    assert re.search(
        r"the loss of step 3 is not finite \(batch 2 of \d+ in epoch 0, from 0\): skipped, 1 of 5 allowed\n",
        capsys.readouterr().out,
    )


def test_a_tracker_of_ones_own_hears_of_failure():
    notes = Notes()
    notes.failed(ConnectionError())
    assert notes.exit_code == 1


def test_the_console_tells_what_happens_between_the_numbers(capsys):
    report = ConsoleReport()
    report.warning("batch 7 has [no] loss")
    report.adjusted(4)
    assert capsys.readouterr().out == (
        "warning: batch 7 has [no] loss\nstep 4  optimizer state updated by Task.after_validation\n"
    )


def test_a_package_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="WandB needs the package wandb\nFix: pip install wandb"):
        WandB()
    assert api.command("train", "lm", "--train.track", "wandb") == 2
    assert "error: WandB needs the package wandb" in capsys.readouterr().err


def test_the_command_line_tells_trackers_as_well(monkeypatch, tmp_path, capsys):
    notes = Notes()
    monkeypatch.chdir(tmp_path)
    task = f"{Path(__file__).parent}/lib/models.py:Regress"
    with api.tracker_is("wandb", notes):
        options = ["--mesh", "dp1", "--kinds", "dense", "--train.track", "wandb"]
        assert api.command("train", task, *options, "--train.num-steps", "2") == 0
        assert notes.lines == lines_of(tmp_path / "runs" / "0001")
        assert "step 2/2  loss" in capsys.readouterr().out
        assert api.command("train", "--resume", "--train.num-steps", "3") == 0
    assert notes.lines[-3:] == lines_of(tmp_path / "runs" / "0001")[-3:]
    assert notes.lines[-3][0] == 3


def run_in_two_parts(folder, report):
    """Three steps, and from there, after a crash, to the sixth; the last with an error."""
    fit(TASK, ONE, train(folder, 3), report=report)
    fit(TASK, ONE, train(folder, 5), report=report, resume=True)
    hears = Hears(progress=lambda *_: folder.rename(folder.with_name("away")))
    with pytest.raises(FileNotFoundError, match="was removed"):
        fit(TASK, ONE, train(folder), report=[report, hears], resume=True)
    return lines_of(folder.with_name("away"))


def test_tensorboard_shows_a_resumed_run_once(tmp_path, caplog):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, report = tmp_path / "run", TensorBoard()
    config = train(folder, checkpoint_every=3)
    fit(TASK, ONE, config, report=report)
    assert [r for r in caplog.records if r.name.startswith("jaxpar")] == []
    shutil.rmtree(folder / "checkpoints" / "6")  # as a crash in step 6 would
    assert len(fit(TASK, ONE, config, report=report, resume=True).losses) == 3
    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    losses = [(each.step, each.value) for each in found.Scalars("train/loss")]
    assert losses == [(step, n["train/loss"]) for step, n in lines_of(folder) if "train/loss" in n]
    assert len(losses) == 6


def test_wandb_knows_a_resumed_run_and_a_failed_one(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    known = run_in_two_parts(tmp_path / "run", WandB(dir=str(tmp_path)))
    found, end = [], time.monotonic() + 60
    while [each for each in found if each.HasField("exit")][2:] == [] and time.monotonic() < end:
        files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
        contents = [path.read_bytes() for path in files]  # the last one a moment after the run
        found = [wandb_internal_pb2.Record.FromString(r) for c in contents for r in records(c)]
    ids = {record.run.run_id for record in found if record.HasField("run")}
    codes = [record.exit.exit_code for record in found if record.HasField("exit")]
    lines = [{i.nested_key[0]: i.value_json for i in record.history.item} for record in found]
    losses = [(int(n["step"]), float(n["train/loss"])) for n in lines if "train/loss" in n]
    assert ids == {name_of(tmp_path / "away")}
    assert codes == [0, 0, 1]
    assert losses == [(step, n["train/loss"]) for step, n in known if "train/loss" in n]
    assert [record for record in caplog.records if record.name.startswith("jaxpar")] == []


def records(content):
    """Those of a file of W&B, which is a log of LevelDB: blocks, in them records in parts."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole one, or the last part
            yield whole
            whole = b""


def test_trackio_goes_on_with_a_resumed_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    caplog.set_level(logging.WARNING, "jaxpar")
    known = run_in_two_parts(tmp_path / "run", Trackio("learned"))
    [name] = SQLiteStorage.get_runs("learned")
    assert name == f"run-{name_of(tmp_path / 'away')}"
    logs = SQLiteStorage.get_logs("learned", name)
    losses = [(log["step"], log["train/loss"]) for log in logs if "train/loss" in log]
    assert losses == [(step, n["train/loss"]) for step, n in known if "train/loss" in n]
    assert [record for record in caplog.records if record.name.startswith("jaxpar")] == []
