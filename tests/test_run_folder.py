"""A run's folder is its own: one run at a time in it, and nothing of it follows another path."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from jaxpar import OptimizerConfig, Parallel, TrainConfig
from jaxpar.__main__ import main
from jaxpar.mesh import MeshConfig
from jaxpar.tasks.lm.task import LM
from jaxpar.training.fit import fit
from jaxpar.training.lock import FolderLock
from jaxpar.training.report import Report
from jaxpar.training.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))
END_SECONDS = 600  # which only a process that hangs takes

HOLD = """
import sys, time
from jaxpar.training.run_folder import RunFolder
with RunFolder(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(600)
"""


def make_task(text):
    rate = OptimizerConfig(learning_rate=0.1, warmup_steps=0)
    return LM(
        num_layers=1, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4, optimizer=rate
    )  # fmt: skip


def make_train(folder, **train):
    return TrainConfig(**{"num_steps": 4, "log_every": 1, "out_dir": str(folder), **train})


@pytest.fixture
def run(text, tmp_path):
    """A run of four steps in a folder."""
    folder = tmp_path / "run"
    fit(make_task(text), ONE, make_train(folder))
    return folder


class Act(Report):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def progress(self, progress, num_steps):
        if progress.step == self.step:
            self.action()


# ---- the lock ----


@contextlib.contextmanager
def another_process(folder):
    """Holds a folder's lock; killed at the end."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_run_at_a_time_and_the_other_is_named(run, text):
    task, written = make_task(text), (run / "metrics.jsonl").read_bytes()
    with another_process(run) as process:
        message = (
            rf"run is in use: process {process.pid} on {re.escape(socket.gethostname())} has it since "
            r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; let it end, or use another --train\.out-dir"
        )
        for use in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(BlockingIOError, match=message):
                fit(task, ONE, make_train(run), **use)
        assert (run / "metrics.jsonl").read_bytes() == written
    # Killed, it holds it no more.
    assert (run / ".lock").exists()
    assert len(fit(task, ONE, make_train(run, num_steps=5), resume=True).losses) == 1
    assert not (run / ".lock").exists()


def test_a_run_that_is_begun_meanwhile_is_not_overwritten(text, tmp_path, monkeypatch):
    folder, lock = tmp_path / "run", RunFolder.lock
    task, train = make_task(text), make_train(tmp_path / "run")

    def late(self):
        monkeypatch.undo()
        fit(task, ONE, train)
        return lock(self)

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(FileExistsError, match="run' holds a run already"):
        fit(task, ONE, train)
    assert len(RunFolder(folder).metrics()) == 6


def test_a_run_holds_its_folder_to_its_end(text, tmp_path):
    folder, told = tmp_path / "run", []

    def look():
        told.append(json.loads((folder / ".lock").read_text())["pid"])
        with (
            pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "),
            RunFolder(folder).lock(),
        ):
            pass

    fit(make_task(text), ONE, make_train(folder), report=Act(2, look))
    assert told == [os.getpid()]
    assert not (folder / ".lock").exists()


def test_a_lock_that_its_holder_takes_away_is_not_shared(tmp_path, monkeypatch):
    """Between opening the file and locking it, the one before ends."""
    first = FolderLock(tmp_path, lambda: None)
    first.__enter__()
    flock, calls = fcntl.flock, []

    def late(file, how):
        if not calls:
            first.__exit__()
        calls.append(file)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with FolderLock(tmp_path, lambda: None) as lock:
        assert len(calls) == 2
        lock.check()
        with pytest.raises(BlockingIOError, match="is in use"):
            FolderLock(tmp_path, lambda: None).__enter__()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def fail(_file, _how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with RunFolder(tmp_path).lock():
        assert re.search(r"cannot be locked \(No locks available\): make sure", caplog.text)


# ---- its path ----


@pytest.mark.parametrize("move", ["copied", "of another path"])
def test_a_run_goes_on_in_the_folder_that_was_asked_for(run, tmp_path, monkeypatch, move, capsys):
    elsewhere = tmp_path / "elsewhere"
    if move == "copied":
        shutil.copytree(run, tmp_path / "runs" / "0001")
    else:
        shutil.move(run, tmp_path / "runs" / "0001")
        config = tmp_path / "runs" / "0001" / "config.toml"
        text = re.sub("(?m)^# sha256.*\n", "", config.read_text())
        places = f'[train]\nout_dir = "{elsewhere}"\nfallback_dir = "{elsewhere}/full"\n'
        config.write_text(text.replace("[train]\n", places))
        run = elsewhere
    before = sorted(run.rglob("*")), [p.read_bytes() for p in sorted(run.rglob("*.jsonl"))]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--train.num-steps", "6"]) == 0
    assert before == (
        sorted(run.rglob("*")),
        [p.read_bytes() for p in sorted(run.rglob("*.jsonl"))],
    )
    said = f"fallback_dir='{elsewhere}/full', which is not followed, .* add --train.fallback-dir {elsewhere}"
    assert bool(re.search(said, capsys.readouterr().err)) == (move != "copied")
    assert not elsewhere.exists()
    folder = RunFolder("runs/0001")
    assert folder.settings().train.out_dir == "runs/0001"
    assert max(line["step"] for line in folder.metrics()) == 6
    assert "out_dir" not in folder.config_path.read_text()


def test_a_file_of_settings_does_not_say_which_run_goes_on(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "runs/0001")
    (tmp_path / "more.toml").write_text('[train]\nout_dir = "run"\n')
    assert main(["train", "--resume", "--config", "more.toml"]) == 2
    assert re.search(
        r"more\.toml says out_dir='run', the latest run is runs/0001; say which",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_a_folder_that_is_removed_ends_the_run_with_an_error(text, tmp_path, checkpoint_every):
    folder = tmp_path / "run"
    train = make_train(folder, num_steps=20, log_every=10, checkpoint_every=checkpoint_every)
    with pytest.raises(FileNotFoundError, match=r"run was removed or replaced during its run"):
        fit(make_task(text), ONE, train, report=Act(1, lambda: shutil.rmtree(folder)))
    assert not folder.exists()


def test_a_folder_that_is_removed_at_the_end_ends_the_run_with_an_error(text, tmp_path):
    class Remove(Report):
        def evaluation(self, step, evaluation):
            if evaluation.split == "test":  # the last that is written
                (tmp_path / "run").rename(tmp_path / "away")  # a save may still go on in it

    with pytest.raises(FileNotFoundError, match="was removed or replaced"):
        fit(make_task(text), ONE, make_train(tmp_path / "run"), report=Remove())


def test_another_run_in_the_place_of_a_removed_one_stays_as_it_is(run, text, tmp_path):
    def replace():
        shutil.rmtree(tmp_path / "new")
        shutil.copytree(run, tmp_path / "new")

    with pytest.raises(FileNotFoundError, match=r"new was removed or replaced"):
        fit(make_task(text), ONE, make_train(tmp_path / "new"), report=Act(2, replace))
    for path in run.rglob("*"):
        copy = tmp_path / "new" / path.relative_to(run)
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()


def test_overwriting_keeps_a_link_and_what_is_not_of_the_run(run, text, tmp_path):
    disk = tmp_path / "disk"
    shutil.move(run / "checkpoints", disk)
    (run / "checkpoints").symlink_to(disk)
    (disk / "mine").mkdir()
    (disk / "3.damaged-1").mkdir()
    fit(make_task(text), ONE, make_train(run, num_steps=2), overwrite=True)
    assert (run / "checkpoints").is_symlink()
    assert sorted(path.name for path in disk.iterdir()) == ["2", "mine"]


# ---- what is damaged ----


@pytest.mark.parametrize(
    "line", ['{"note":1}', "[]", "", "\ufffd", '{"step": 1, "split": "valid"}']
)
def test_a_line_of_metrics_that_no_run_writes_is_named(tmp_path, line):
    folder = RunFolder(tmp_path)
    for step in range(3):
        folder.append_metrics({"split": "train", "step": step, "loss": 1.0})
    lines = folder.metrics_path.read_text().splitlines()
    folder.metrics_path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]), encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"metrics\.jsonl is damaged: line 3 is not what was written; move it aside, or remove",
    ):
        folder.metrics()


def test_metrics_of_an_older_version_are_read_and_go_on(run, text):
    path = run / "metrics.jsonl"
    written = RunFolder(run).metrics()
    path.write_text("".join(json.dumps(each) + "\n" for each in written))
    assert RunFolder(run).metrics() == written
    fit(make_task(text), ONE, make_train(run, num_steps=6), resume=True)
    assert RunFolder(run).metrics()[: len(written)] == written
    assert "crc32" in path.read_text().splitlines()[-1]


def test_an_unfinished_last_line_is_no_damage(run):
    path = run / "metrics.jsonl"
    whole, written = path.read_bytes(), RunFolder(run).metrics()
    last = whole.splitlines()[-1]
    for size in (1, len(last) // 2, len(last)):
        path.write_bytes(whole + last[:size])
        assert RunFolder(run).metrics() == written
    path.write_bytes(whole[:-1] + b"*")  # the line's end is another letter
    with pytest.raises(ValueError, match="line 6 is not what was written"):
        RunFolder(run).metrics()


def test_settings_that_are_changed_by_hand_say_so(run):
    path = run / "config.toml"
    changed = path.read_text().replace("num_steps = 4", "num_steps = 9")
    path.write_text(changed)
    with pytest.raises(
        ValueError, match=r"config\.toml is damaged: .*, or remove its last line if you"
    ):
        RunFolder(run).settings()
    path.write_text(re.sub("(?m)^# sha256.*\n", "", changed))
    assert RunFolder(run).settings().train.num_steps == 9


# ---- the command line ----


def test_ctrl_c_during_imports_ends_quietly(tmp_path):
    """At a moment that is certain: when JAX is imported."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        'import time\nprint("importing", flush=True)\ntime.sleep(600)\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpar", "doctor"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=END_SECONDS) == ("", "stopped\n")
    finally:
        process.kill()
    assert process.returncode == 130


def test_an_imported_package_leaves_ctrl_c_alone():
    code = "import signal, jaxpar; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"


def test_paths_with_any_letters(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = "l\u00e4ufe/\u4e2d"
    fit(make_task(shutil.copytree(text, "t\u00ebxt")), ONE, make_train(folder))
    fit(make_task("t\u00ebxt"), ONE, make_train(folder, num_steps=5), resume=True)
    assert main(["train", "lm", "--corpus", os.fsdecode(b"t\xebxt")]) == 2
    assert (
        "error: 't\\udcebxt' is not text in the encoding of this process, utf-8"
        in capsys.readouterr().err
    )
