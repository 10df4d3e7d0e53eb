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
from lib import api
from lib.runs import Act, metrics_of, validation_losses, whole_checkpoints

from jaxpar import MeshConfig, OptimizerConfig, Parallel, Report, TrainConfig, fit, load_run
from jaxpar.lm import LM

pytestmark = pytest.mark.usefixtures("compile_once")

ONE = Parallel(MeshConfig(devices=(0,)))
END_SECONDS = 600  # which only a process that hangs takes

HOLD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from lib import api
with api.holds(sys.argv[1]):
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
    command = [sys.executable, "-c", HOLD, str(folder), str(Path(__file__).parent)]
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
def test_a_run_that_is_begun_meanwhile_is_not_overwritten(text, tmp_path):
    task, train, begun = make_task(text), make_train(tmp_path / "run"), []

    def begin_another(folder, take):
        if not begun:
            begun.append(folder)
            fit(task, ONE, train)
        return take()

    with (
        api.instead_of("take the folder", begin_another),
        pytest.raises(FileExistsError, match="run' holds a run already"),
    ):
        fit(task, ONE, train)
    assert begun == [tmp_path / "run"]
    assert len(metrics_of(tmp_path / "run")) == 6


@pytest.mark.full
def test_a_run_holds_its_folder_to_its_end(text, tmp_path):
    folder, told = tmp_path / "run", []

    def look():
        told.append((folder / ".lock").read_text().split()[1])
        with (
            pytest.raises(BlockingIOError, match=f"process {os.getpid()} on "),
            api.holds(folder),
        ):
            pass

    fit(make_task(text), ONE, make_train(folder), report=Act(2, look))
    assert told == [str(os.getpid())]
    with api.holds(folder):
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    number = errno.ENOLCK

    def fail(_file, _how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with api.holds(tmp_path):
        assert re.search("has no locks: make sure", caplog.text)
    number = errno.EIO
    with (
        pytest.raises(OSError, match=r"cannot lock .*: Input/output error\nFix: "),
        api.holds(tmp_path),
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
    assert api.command("train", "--resume", "--train.num-steps", "6") == 0
    assert before == (
        sorted(run.rglob("*")),
        [p.read_bytes() for p in sorted(run.rglob("*.jsonl"))],
    )
    assert not elsewhere.exists()
    folder = Path("runs/0001")
    assert load_run(folder).setup.train.out_dir == "runs/0001"
    assert max(line["step"] for line in metrics_of(folder)) == 6
    assert "out_dir" not in (folder / "config.toml").read_text()


def test_a_file_of_settings_does_not_say_which_run_goes_on(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "runs/0001")
    (tmp_path / "more.toml").write_text('[train]\nout_dir = "run"\n')
    assert api.command("train", "--resume", "--config", "more.toml") == 2
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


@pytest.mark.parametrize(
    "moment", ["make the folder of a checkpoint", "write arrays", "finish a checkpoint"]
)
def test_a_folder_that_is_removed_in_mid_save_gets_no_checkpoint(text, tmp_path, moment):
    """What writes the arrays makes its folders anew."""
    calls = []

    def remove_at_the_second(_, work):
        calls.append(moment)
        if len(calls) == 2:
            shutil.rmtree(tmp_path / "run")
        return work()

    train = make_train(tmp_path / "run", checkpoint_every=1)
    with (
        api.instead_of(moment, remove_at_the_second),
        pytest.raises(FileNotFoundError, match=r"run was removed during its run"),
    ):
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


# ---- what has changed, or is damaged ----


def test_a_run_of_an_older_version_is_refused_in_one_line(run):
    data = json.loads((run / "data.json").read_text())
    older = {"data": data["data"], "files": data["files"], "sha256": ""}
    (run / "data.json").write_text(json.dumps(older))
    with pytest.raises(
        ValueError,
        match=r"^\S*data\.json is damaged, or of another version of jaxpar\n",
    ):
        load_run(run)


def test_an_unfinished_last_line_is_no_damage(run, caplog):
    path = run / "metrics.jsonl"
    whole, written = path.read_bytes(), metrics_of(run)
    last = whole.splitlines()[-1]
    for size in (1, len(last) // 2, len(last)):
        path.write_bytes(whole + last[:size])
        assert load_run(run).metrics() == written
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
    losses = validation_losses(run / "checkpoints/3")
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
    assert whole_checkpoints(run) == [best, 5]
    assert load_run(run, best=True).step == best


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
    assert api.command("train", "lm", "--corpus", os.fsdecode(b"t\xebxt")) == 2
    assert capsys.readouterr().err.startswith("error: ")
