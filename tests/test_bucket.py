"""A run's folder in Google Cloud Storage: nothing of it is on a disk, and nothing is lost there.

The storage is a fake (`lib/fake_gcs.py`). The long form, with two hosts that share no folder and are killed
while they save:

    pytest -n 0 -m "" -s tests/test_bucket.py
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from etils import epath
from lib import api
from lib.fake_gcs import FakeGCS
from lib.runs import Act, metrics_of

from jaxpar import MeshConfig, OptimizerConfig, Parallel, TrainConfig, fit, load_run
from jaxpar.lm import LM

pytestmark = pytest.mark.usefixtures("compile_once")

RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
END_SECONDS = 600  # which only a process that hangs takes
ONE = Parallel(MeshConfig(devices=(0,)))


@pytest.fixture(scope="module")
def server():
    if find_spec("gcsfs") is None:
        pytest.skip("the extra gcs is not installed")
    import fsspec.config

    with pytest.MonkeyPatch.context() as patch, FakeGCS() as server:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        patch.setitem(
            fsspec.config.conf, "gcs", {"token": "anon"}
        )  # of the environ it was read before
        yield server
        server.shutdown()


@pytest.fixture
def address(server, request, tmp_path, monkeypatch):
    """A folder in the bucket; nothing comes onto the disk meanwhile."""
    monkeypatch.chdir(tmp_path)
    yield "gs://bucket/" + re.sub(r"\W+", "-", request.node.name)
    server.on_put = lambda name: None


def make_task(text):
    rate = OptimizerConfig(learning_rate=0.1, warmup_steps=0, lr_schedule="constant")
    return LM(
        num_layers=1, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4, optimizer=rate
    )  # fmt: skip


def make_train(folder, **train):
    options = {"num_steps": 6, "log_every": 1, "checkpoint_every": 2, "out_dir": str(folder)}
    return TrainConfig(**{**options, **train})


def has_begun(folder):
    """Whether a run has written there what it is continued from."""
    return (epath.Path(folder) / "config.toml").exists()


def numbers(folder):
    """All that was computed: of every step and evaluation."""
    names = ("step", "split", "loss", "grad_norm", "perplexity")
    return [tuple(line.get(name) for name in names) for line in metrics_of(epath.Path(folder))]


def wait_for(condition):
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- a run ----


@pytest.mark.full
def test_a_run_in_a_bucket_is_that_on_a_disk(server, address, text, tmp_path, capsys):
    task, disk = make_task(text), tmp_path / "disk"
    fit(task, ONE, make_train(disk))
    whole = numbers(disk)
    files = {str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file()}
    shutil.rmtree(disk)
    fit(task, ONE, make_train(address, num_steps=4))
    result = fit(task, ONE, make_train(address), resume=True)
    assert result.first_step == 4
    assert str(result.out_dir) == address
    taken = [line for line in numbers(address) if line[1] == "train" or line[0] == 6]
    np.testing.assert_allclose(
        [line[2:4] for line in taken[:6]], [line[2:4] for line in whole[:6]], RELATIVE_TOLERANCE
    )
    assert [line[:2] for line in taken] == [line[:2] for line in whole]
    # The same files as on a disk, the names of arrays' parts apart; and nothing on it.
    prefix = address.removeprefix("gs://bucket/") + "/"
    found = {name.removeprefix(prefix) for name in server.names(prefix)}
    assert {*map(stem, found)} == {*map(stem, files)}
    assert not [*tmp_path.iterdir()]
    assert "holds checkpoints/, config.toml, data.json, metrics.jsonl" in capsys.readouterr().out
    run = load_run(address, "dp2")
    assert run.step == 6
    np.testing.assert_allclose(run.evaluate("test").loss, whole[-1][2], RELATIVE_TOLERANCE)
    with pytest.raises(FileExistsError, match=f"out_dir='{address}' holds a run already"):
        fit(task, ONE, make_train(address))


@pytest.mark.full
def test_weights_are_taken_from_and_written_from_a_bucket(server, address, text, tmp_path, capsys):
    task = make_task(text)
    first = fit(task, ONE, make_train(address))
    words = ["export", address, "-o", "model.safetensors"]
    assert api.command(*words) == 0, capsys.readouterr().err
    for source in (address, "model.safetensors"):
        begun = fit(
            task, ONE, make_train(f"{address}-2", num_steps=1), start=source, overwrite=True
        )
        assert begun.losses[0] < first.losses[0]
        assert f"{source}" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.full
def test_commands_read_a_run_in_a_bucket(server, address, text, tmp_path, capsys):
    fit(make_task(text), ONE, make_train(address))
    for argv in (
        ["evaluate", address],
        ["sample", address, "--length", "3"],
        ["predict", address, "test", "-o", "predicted"],
        ["plot", "curves", address, "-o", "a.html"],
    ):
        assert api.command(*argv) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"{numbers(address)[-1][-1]:.4g}" in said
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "predicted"}


def stem(name):
    """The folder of a file that has a number for a name, or none."""
    return re.sub(r"\b[0-9a-f]{32}$", "", re.sub(r"^checkpoints/\d+/", "", name))


@pytest.mark.full
def test_a_copy_of_a_run_is_one(server, address, text, tmp_path):
    """From the bucket to a disk and back."""
    fit(make_task(text), ONE, make_train(address, num_steps=2))
    name = address.removeprefix("gs://bucket/")
    for each in server.names(f"{name}/"):
        path = tmp_path / "copied" / each.removeprefix(f"{name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.objects["bucket", each][1])
    fit(make_task(text), ONE, make_train("copied", num_steps=4), resume=True)
    for path in (tmp_path / "copied").rglob("*"):
        if path.is_file():
            server.put(
                ("bucket", f"{name}-back/{path.relative_to(tmp_path / 'copied')}"),
                path.read_bytes(),
            )
    back = fit(make_task(text), ONE, make_train(f"{address}-back"), resume=True)
    assert (back.first_step, len(back.losses)) == (4, 2)


@pytest.mark.full
def test_half_a_checkpoint_is_none_and_a_damaged_one_is_replaced(server, address, text, caplog):
    task, name = make_task(text), address.removeprefix("gs://bucket/")
    fit(task, ONE, make_train(address, num_steps=4))
    assert api.run_steps(address) == [2, 4]
    # As by a run that was killed while it saved.
    key = "bucket", f"{name}/checkpoints/4/checkpoint.json"
    del server.objects[key]
    stray = f"{name}/checkpoints/6/state/stray"
    server.put(("bucket", stray), b"?")
    assert api.run_steps(address) == [2]
    result = fit(task, ONE, make_train(address), resume=True)
    assert result.first_step == 2
    assert stray not in server.names()
    assert not caplog.messages
    # Cut short: it is told, and written again.
    damaged = next(each for each in server.names(f"{name}/checkpoints/6/state/d/"))
    server.put(("bucket", damaged), b"")
    result = fit(task, ONE, make_train(address, num_steps=8), resume=True)
    assert result.first_step == 4
    [skipped] = caplog.messages
    assert re.search(r"skipped the damaged checkpoint .*/6: .* has 0 of \d+ bytes", skipped)
    assert damaged not in server.names()
    assert api.run_steps(address) == [6, 8]


@pytest.mark.full
def test_lines_are_put_now_and_then_and_with_each_checkpoint(server, address, text):
    puts, kept = [], []
    server.on_put = lambda name: puts.append(name.rpartition("/")[2])

    def look():
        kept.append(len(numbers(address)))

    train = make_train(address, num_steps=20, checkpoint_every=10)
    fit(make_task(text), ONE, train, report=[Act(9, look), Act(12, look)])
    assert kept == [1, 10]
    assert puts.count("metrics.jsonl") <= 6
    assert len(numbers(address)) == 22
    train = make_train(address, num_steps=24)
    with api.lines_are_put_at_once():
        fit(make_task(text), ONE, train, resume=True, report=Act(23, look))
    assert kept == [1, 10, 25]


# ---- who may write ----


@pytest.mark.full
def test_the_newest_start_has_the_folder(server, address, text):
    """The older run ends before its next save, and says who has it now."""
    begun, newest = [], contextlib.ExitStack()

    def begin():
        wait_for(lambda: api.run_steps(address) == [2])
        newest.enter_context(api.holds(address))
        begun.extend(server.objects.items())

    who = rf"process {os.getpid()} on {re.escape(socket.gethostname())} since 20\S+ \S+"
    told = rf"^{address} is in use by another run: {who}\nFix: "
    with pytest.raises(BlockingIOError, match=told):
        fit(make_task(text), ONE, make_train(address), report=Act(3, begin))
    assert dict(begun) == server.objects
    assert api.run_steps(address) == [2]
    newest.close()
    assert len(fit(make_task(text), ONE, make_train(address), resume=True).losses) == 4


@pytest.mark.full
def test_a_save_under_way_does_not_count_once_another_run_has_begun(server, address, text):
    newest = contextlib.ExitStack()

    def begin(name):
        if name.endswith("checkpoints/4/commit_success.txt"):
            server.on_put = lambda name: None
            newest.enter_context(api.holds(address))

    server.on_put = begin
    with newest, pytest.raises(BlockingIOError, match="is in use by another run"):
        fit(make_task(text), ONE, make_train(address))
    assert api.run_steps(address) == [2]


@pytest.mark.full
def test_a_bucket_that_forgets_the_run_ends_it(server, address, text):
    with pytest.raises(FileNotFoundError, match=f"^{address} was removed during"):
        fit(make_task(text), ONE, make_train(address), report=Act(3, epath.Path(address).rmtree))
    assert server.names(address.removeprefix("gs://bucket/")) == []


# ---- what is refused, and what fails ----


@pytest.mark.full
def test_what_the_storage_refuses_is_told_in_words(server, address, text, capsys):
    def refuse(name):
        if re.search(r"checkpoints/[4-6]", name):
            raise PermissionError

    server.on_put = refuse
    told = (
        rf"^checkpoint {address}/checkpoints/4 could not be written: .*\nFix: .*newest is of step 2"
    )
    with pytest.raises(OSError, match=told):
        fit(make_task(text), ONE, make_train(address))
    assert api.run_steps(address) == [2]

    def refuse_all(name):
        raise PermissionError

    server.on_put = refuse_all
    assert api.command("train", "lm", "--train.out-dir", f"{address}/new") == 2
    assert re.search(
        rf"error: cannot write {address}/new/\.lock: .*Forbidden", capsys.readouterr().err
    )


def test_a_bucket_without_its_package_is_told(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert api.command("evaluate", "gs://bucket/run") == 2
    said = "gs://bucket/run needs the package gcsfs Fix: pip install gcsfs"
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_bucket_that_cannot_be_reached_is_told(server, tmp_path, monkeypatch, capsys):
    import fsspec.config

    key = tmp_path / "key.json"
    key.write_text("{")
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": str(key)})
    assert api.command("evaluate", "gs://elsewhere/run") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot reach gs://elsewhere/run: ")
    assert error.endswith("\nFix: check the bucket's name and your credentials\n")


def test_a_bucket_alone_and_a_profile_are_refused(address, text):
    with pytest.raises(
        ValueError, match="gs://bucket names no folder\nFix: use gs://BUCKET/FOLDER"
    ):
        load_run("gs://bucket")
    with pytest.raises(ValueError, match="is in a bucket, where JAX writes no profile"):
        fit(make_task(text), ONE, make_train(address), profile=True)


@pytest.mark.full
def test_objects(server, address):
    path = epath.Path(address)
    assert not path.exists()
    assert [*path.glob("*")] == []
    (path / "a" / "b").write_bytes(b"one\n\ntwo")
    assert (path / "a" / "b").read_bytes() == b"one\n\ntwo"
    assert (path.is_dir(), (path / "a").is_dir(), (path / "a/b").is_dir()) == (True, True, False)
    assert [*path.iterdir()] == [path / "a"]
    # Another process writes: nothing is remembered.
    for name in "cd":
        server.put(("bucket", f"{address.removeprefix('gs://bucket/')}/{name}"), b"")
    assert [each.name for each in sorted(path.glob("[c-e]"))] == ["c", "d"]
    (path / "d").unlink()
    with pytest.raises(FileNotFoundError):
        (path / "d").read_bytes()
    (path / "d").unlink(missing_ok=True)
    path.rmtree()
    assert not path.exists()


# ---- several hosts ----


def start(folders, argv, environ):
    """Processes of one run, each in a folder of its own, as on hosts that share none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = {"JAX_COORDINATOR_ADDRESS": address, "JAXPAR_NUM_PROCESSES": str(len(folders))}
    processes = []
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        its_own = {"TMPDIR": str(folder)}
        if len(folders) > 1:
            its_own |= own | {"JAXPAR_PROCESS_ID": str(number)}
        with (folder / "said").open("w") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxpar", *argv], cwd=folder, stdout=said, stderr=said,
                    env=os.environ | environ | {"JAX_NUM_CPU_DEVICES": "1"} | its_own,
                )
            )  # fmt: skip
    return processes


def end(processes, folders, codes=(0,)):
    try:
        for process in processes:
            process.wait(END_SECONDS)
    finally:
        for process in processes:
            process.kill()
    said = [(folder / "said").read_text() for folder in folders]
    assert {process.returncode for process in processes} <= {*codes}, said
    return said


def train(text, num_steps, *more):
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "4", "--num-layers", "2",
        "--hidden-size", "8", "--embed-size", "8", "--dropout", "0.3", "--optimizer.learning-rate", "0.02",
        "--train.num-steps", str(num_steps), "--train.log-every", "1", "--train.checkpoint-every", "5", *more,
    ]  # fmt: skip


def compiled_in(folder):
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.mark.full
def test_hosts_that_share_no_folder_lose_nothing(server, address, text, tmp_path):
    """Killed in mid-save, resumed on fewer and on more, and on another mesh."""
    hosts, environ = [tmp_path / f"host-{number}" for number in range(2)], compiled_in(tmp_path)

    def go_on(count, mesh, out_dir):
        argv = train(text, 60, "--mesh", mesh, "--train.out-dir", out_dir, "--resume-or-begin")
        return start(hosts[:count], argv, environ)

    end(go_on(1, "dp1", f"{address}-whole"), hosts[:1])
    whole, moments = numbers(f"{address}-whole"), random.Random(0)
    layouts = [(2, "dp2"), (2, "dp2"), (1, "dp1"), (2, "pp2"), (2, "dp2")]
    for number, (count, mesh) in enumerate(layouts):
        before = max(api.run_steps(address), default=0) if has_begun(address) else 0
        victims, left = [], [moments.randrange(1, 12)]

        def kill(name, before=before, victims=victims, left=left):
            step = re.search(r"checkpoints/(\d+)/", name)
            if step and int(step[1]) > before + 5:
                left[0] -= 1
                if left[0] == 0:
                    for process in victims:
                        process.send_signal(signal.SIGKILL)

        server.on_put = kill
        victims.extend(go_on(count, mesh, address))
        end(victims, hosts[:count], [-signal.SIGKILL])
        server.on_put = lambda name: None
        after = max(api.run_steps(address))
        print(f"kill {number + 1}: {count} processes, {mesh}, at checkpoint {after}", flush=True)
        assert before < after < 60
    end(go_on(2, "dp2", address), hosts[:2])
    assert [line[:2] for line in numbers(address)] == [line[:2] for line in whole]
    np.testing.assert_allclose(
        [line[2] for line in numbers(address)], [line[2] for line in whole], RELATIVE_TOLERANCE
    )
    assert all([*host.iterdir()] == [host / "said"] for host in hosts[:2])


@pytest.mark.full
def test_hosts_end_when_another_run_begins_in_their_folder(server, address, text, tmp_path):
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    argv = train(text, 10**6, "--mesh", "dp2", "--train.out-dir", address)
    processes = start(hosts, argv, compiled_in(tmp_path))
    wait_for(
        lambda: processes[0].poll() is not None or (has_begun(address) and api.run_steps(address))
    )
    with api.holds(address):
        holder, at = (epath.Path(address) / ".lock").read_text(), max(api.run_steps(address))
        for said in end(processes, hosts, [2]):
            assert re.search(
                rf"error: process 0: {address} is in use by another run: process \d+ on", said
            )
            assert "Traceback" not in said
    assert max(api.run_steps(address)) == at
    assert (epath.Path(address) / ".lock").read_text() == holder


@pytest.mark.more
@pytest.mark.parametrize("how", [[], ["--resume-or-begin"]], ids=["begun", "resumed"])
def test_hosts_that_share_nothing_are_refused_at_the_start(text, tmp_path, how):
    hosts = [tmp_path / "host-0", tmp_path / "host-1"]
    argv = ["train", "lm", "--corpus", str(text), "--mesh", "dp2", "--train.out-dir", "out", *how]
    if how:
        fit(make_task(text), ONE, make_train(hosts[0] / "out"))
    before = time.monotonic()
    for said in end(start(hosts, argv, {}), hosts, [2]):
        assert re.search(
            r"(?s)error: .*(out on .* is not that of process 0|in a folder that they share)", said
        )
        assert "Traceback" not in said
    assert time.monotonic() - before < 60
    assert not (hosts[1] / "out").exists()
