"""A run's folder is its own: one run at a time in it, and nothing of it follows another path."""

import contextlib
import dataclasses
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
from pathlib import Path

import pytest
from lib.runs import Act

from jaxpar import MeshConfig, OptimizerConfig, Parallel, Report, TrainConfig, fit
from jaxpar.cli.main import main
from jaxpar.lm import LM
from jaxpar.step.setup import Setup
from jaxpar.training.checkpoint import Writing
from jaxpar.training.run_folder import FolderLock, RunFolder

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))
END_SECONDS = 600  # which only a process that hangs takes

HOLD = """
import sys, time
from jaxpar.training.run_folder import RunFolder
with RunFolder(sys.argv[1]).lock:
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


@pytest.mark.full
def test_one_run_at_a_time_and_the_other_is_named(run, text):
    task, written = make_task(text), (run / "metrics.jsonl").read_bytes()
    with another_process(run) as process:
        message = (
            rf"run is in use by process {process.pid} on {re.escape(socket.gethostname())} since "
            r"20\d\d-\d\d-\d\d \d\d:\d\d:\S+\nFix: let it end, or use another folder"
        )
        for use in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(BlockingIOError, match=message):
                fit(task, ONE, make_train(run), **use)
        assert (run / "metrics.jsonl").read_bytes() == written
    # Killed, it holds it no more.
    assert len(fit(task, ONE, make_train(run, num_steps=5), resume=True).losses) == 1


@pytest.mark.full
def test_a_run_that_is_begun_meanwhile_is_not_overwritten(text, tmp_path, monkeypatch):
    folder, take = tmp_path / "run", FolderLock._take
    task, train = make_task(text), make_train(tmp_path / "run")

    def late(self):
        monkeypatch.undo()
        fit(task, ONE, train)
        return take(self)

    monkeypatch.setattr(FolderLock, "_take", late)
    with pytest.raises(FileExistsError, match="run' holds a run already"):
        fit(task, ONE, train)
    assert len(RunFolder(folder).metrics()) == 6


@pytest.mark.full
def test_a_run_holds_its_folder_to_its_end(text, tmp_path):
    folder, told = tmp_path / "run", []

    def look():
        told.append((folder / ".lock").read_text().split()[1])
        with (
            pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "),
            RunFolder(folder).lock,
        ):
            pass

    fit(make_task(text), ONE, make_train(folder), report=Act(2, look))
    assert told == [str(os.getpid())]
    with RunFolder(folder).lock:
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    number = errno.ENOLCK

    def fail(_file, _how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with RunFolder(tmp_path).lock:
        assert re.search("has no locks: make sure", caplog.text)
    number = errno.EIO
    with (
        pytest.raises(OSError, match=r"cannot lock .*: Input/output error\nFix: "),
        RunFolder(tmp_path).lock,
    ):
        pass


# ---- its path ----


@pytest.mark.more
@pytest.mark.parametrize("move", ["copied", "of another path"])
def test_a_run_goes_on_in_the_folder_that_was_asked_for(run, tmp_path, monkeypatch, move):
    elsewhere = tmp_path / "elsewhere"
    if move == "copied":
        shutil.copytree(run, tmp_path / "runs" / "0001")
    else:
        shutil.move(run, tmp_path / "runs" / "0001")
        config = tmp_path / "runs" / "0001" / "config.toml"
        text = config.read_text()
        config.write_text(text.replace("[train]\n", f'[train]\nout_dir = "{elsewhere}"\n'))
        run = elsewhere
    before = sorted(run.rglob("*")), [p.read_bytes() for p in sorted(run.rglob("*.jsonl"))]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", "--train.num-steps", "6"]) == 0
    assert before == (
        sorted(run.rglob("*")),
        [p.read_bytes() for p in sorted(run.rglob("*.jsonl"))],
    )
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
        r"more\.toml has out_dir='run', and the latest run is runs/0001\nFix: name one",
        capsys.readouterr().err,
    )


@pytest.mark.more
@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_a_folder_that_is_removed_ends_the_run_with_an_error(text, tmp_path, checkpoint_every):
    folder = tmp_path / "run"
    train = make_train(folder, num_steps=20, log_every=10, checkpoint_every=checkpoint_every)
    with pytest.raises(FileNotFoundError, match=r"run was removed during its run"):
        fit(make_task(text), ONE, train, report=Act(1, lambda: shutil.rmtree(folder)))
    assert not folder.exists()


@pytest.mark.full
def test_a_folder_that_is_removed_at_the_end_ends_the_run_with_an_error(text, tmp_path):
    class Remove(Report):
        def evaluation(self, step, evaluation):
            if evaluation.split == "test":  # the last that is written
                (tmp_path / "run").rename(tmp_path / "away")  # a save may still go on in it

    with pytest.raises(FileNotFoundError, match="was removed"):
        fit(make_task(text), ONE, make_train(tmp_path / "run"), report=Remove())


@pytest.mark.parametrize("moment", ["_make_folder", "_write", "_finish"])
def test_a_folder_that_is_removed_in_mid_save_gets_no_checkpoint(
    text, tmp_path, monkeypatch, moment
):
    """What writes the arrays makes its folders anew."""
    work, calls = getattr(Writing, moment), []

    def late(self, *args):
        calls.append(moment)
        if len(calls) == 2:
            shutil.rmtree(tmp_path / "run")
        return work(self, *args)

    monkeypatch.setattr(Writing, moment, late)
    train = make_train(tmp_path / "run", checkpoint_every=1)
    with pytest.raises(FileNotFoundError, match=r"run was removed during its run"):
        fit(make_task(text), ONE, train)
    assert len(calls) == 2
    assert not [*tmp_path.glob("run/checkpoints/[0-9]")]


def test_another_run_in_the_place_of_a_removed_one_stays_as_it_is(run, text, tmp_path):
    def replace():
        shutil.rmtree(tmp_path / "new")
        shutil.copytree(run, tmp_path / "new")

    with pytest.raises(BlockingIOError, match=r"new is in use by another run: process"):
        fit(make_task(text), ONE, make_train(tmp_path / "new"), report=Act(2, replace))
    for path in run.rglob("*"):
        copy = tmp_path / "new" / path.relative_to(run)
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()


# ---- links, which lead elsewhere ----


def test_a_lock_is_no_link(run, text, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"cannot lock \S*run: Too many levels of symbolic links"):
        fit(make_task(text), ONE, make_train(run, num_steps=5), resume=True)
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.rows(6)
@pytest.mark.parametrize("use", [{"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", "profile", "checkpoints", "checkpoints/5"]
)
def test_a_run_writes_and_deletes_through_no_link(run, text, tmp_path, name, use):
    mine = tmp_path / "mine"
    mine.mkdir()
    if (run / name).exists():
        shutil.move(run / name, mine / Path(name).name)
        (run / name).symlink_to(mine / Path(name).name)
    else:
        (run / name).symlink_to(mine)
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} is a link\nFix: put the file itself there"
    ):
        fit(make_task(text), ONE, make_train(run, num_steps=5), **use)
    assert before == {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    assert (run / name).is_symlink()


def test_a_folder_of_another_program_is_not_overwritten(text, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "epoch1.pt").write_text("theirs")
    (tmp_path / "run" / "config.toml").write_text("lr = 1\n")
    with pytest.raises(ValueError, match=r"config\.toml is damaged: it names no task"):
        fit(make_task(text), ONE, make_train(tmp_path / "run"), overwrite=True)
    assert (tmp_path / "run" / "checkpoints" / "epoch1.pt").exists()


@pytest.mark.parametrize(
    "name", ["..", "", ".", "../mine.txt", "folder", "checkpoints/../../mine.txt"]
)
def test_only_files_that_a_run_can_have_written_are_removed(run, tmp_path, name):
    folder = tmp_path / "work" / "run"
    shutil.copytree(run, folder)
    mine = [folder.parent / "mine.txt", folder / "folder" / "mine.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("keep me")
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**data, "files": {name: "0"}}))
    RunFolder(folder).clear()
    assert all(path.read_text() == "keep me" for path in mine)
    assert not (folder / "data.json").exists()


def test_a_link_in_a_run_is_removed_and_what_it_leads_to_stays(run, tmp_path):
    folder, mine = tmp_path / "copy", tmp_path / "mine"
    shutil.copytree(run, folder)
    mine.mkdir()
    (mine / "file").write_text("keep me")
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(mine)
    RunFolder(folder).clear()
    assert (mine / "file").read_text() == "keep me"
    assert not (folder / "checkpoints").is_symlink()


# ---- what has changed, or is damaged ----


def test_a_run_of_an_older_version_is_refused_in_one_line(run):
    folder = RunFolder(run)
    data = json.loads(folder.data_path.read_text())
    folder.data_path.write_text(
        json.dumps({"data": data["data"], "files": data["files"], "sha256": ""})
    )
    with pytest.raises(
        ValueError,
        match=r"^\S*data\.json is damaged, or of another version of jaxpar\n",
    ):
        folder.restore()


@pytest.mark.parametrize(
    "line",
    [
        '{"note":1}',
        "[]",
        "",
        "\ufffd",
        '{"step": 1, "split": "valid"}',
        "[" * 100_000,
        '{"step": 1e999, "split": "valid", "loss": 1}',
    ],
)
def test_a_line_of_metrics_that_no_run_writes_is_named_and_passed_over(tmp_path, line, caplog):
    folder = RunFolder(tmp_path)
    written = [{"split": "train", "step": step, "loss": 1.0} for step in range(3)]
    lines = [json.dumps(each) for each in written]
    folder.metrics_path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]), encoding="utf-8")
    assert folder.metrics() == written
    assert re.search(r"metrics\.jsonl: line 3 is not what a run writes", caplog.text)


def test_an_unfinished_last_line_is_no_damage(run, caplog):
    path = run / "metrics.jsonl"
    whole, written = path.read_bytes(), RunFolder(run).metrics()
    last = whole.splitlines()[-1]
    for size in (1, len(last) // 2, len(last)):
        path.write_bytes(whole + last[:size])
        assert RunFolder(run).metrics() == written
        RunFolder(run).check()
    assert not caplog.messages


@pytest.mark.more
@pytest.mark.parametrize(
    "damage",
    ["zeros", *(pytest.param(n, marks=pytest.mark.more) for n in ("missing", "cut", "edited"))],
)
def test_the_best_state_is_known_without_metrics(run, text, damage, caplog):
    """Which is why nothing that happens to a log of numbers deletes it."""
    more = {"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1}
    rate = OptimizerConfig(learning_rate=30.0, warmup_steps=0)  # it becomes worse at once
    task = dataclasses.replace(make_task(text), optimizer=rate)
    fit(task, ONE, make_train(run, num_steps=3, clip_norm=0.0, **more), overwrite=True)
    with RunFolder(run).checkpoints(Setup.of(*RunFolder(run).settings())) as checkpoints:
        losses = checkpoints.stored_losses()
    best = min(losses, key=losses.__getitem__)
    assert losses.keys() == {1, 2, 3}
    assert best == 1
    path = run / "metrics.jsonl"
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_text()
        edited = content.replace('"split": "valid"', '"split": "test"')
        changed = {"zeros": "\0" * len(content), "cut": content[:20], "edited": edited}
        path.write_text(changed[damage])
    train = make_train(run, num_steps=5, clip_norm=0.0, **more)
    fit(task, ONE, train, resume=True)
    assert sorted(int(each.name) for each in (run / "checkpoints").iterdir()) == [best, 5]
    _, state = RunFolder(run).restore(best=True)
    assert int(state.step) == best


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


@pytest.mark.full
def test_paths_with_any_letters(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = "l\u00e4ufe/\u4e2d"
    fit(make_task(shutil.copytree(text, "t\u00ebxt")), ONE, make_train(folder))
    fit(make_task("t\u00ebxt"), ONE, make_train(folder, num_steps=5), resume=True)
    assert main(["train", "lm", "--corpus", os.fsdecode(b"t\xebxt")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
