"""The law: a disk that is full for one process ends all of them with the same words; checkpoints stay."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lib import api
from lib.runs import NEVER, make_run, metrics_of, start_by_hand

from jaxpar import ConsoleReport, Report, TrainConfig, fit, load_run

END_SECONDS = 90  # of which starting takes most; a process that hangs takes longer
MORE_THAN_WORDS = "Traceback|Event loop is closed|never retrieved|was destroyed"
SMALL = [
    "--batch-size", "12", "--seq-len", "8", "--num-layers", "1", "--hidden-size", "16",
    "--embed-size", "16", "--optimizer.warmup-steps", "2", "--train.log-every", "1",
]  # fmt: skip

# Runs a command; files of some work in some process cannot grow beyond 100 bytes, as on a full disk.
FULL = """
import os, resource, signal, sys

case, culprit, out_dir, tests, *arguments = sys.argv[1:]
sys.path.insert(0, tests)
from lib import api

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
lines = 0

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def is_full(folder):
    if case in ("metrics", "start"):
        return str(folder) == out_dir and (case == "start" or lines >= 10)
    return str(folder.parents[1]) == out_dir and int(folder.name) >= 10

def on_full_disk(folder, work):
    global lines
    lines += 1
    if not is_full(folder):
        return work()
    if case == "folder":
        raise OSError(28, os.strerror(28), str(folder))
    limit(100)
    try:
        return work()
    finally:
        limit(resource.RLIM_INFINITY)

moment = {
    "shards": "write arrays", "parts": "finish a checkpoint", "folder": "make the folder of a checkpoint",
    "metrics": "add a line", "start": "begin",
}[case]
if os.environ.get("JAXPAR_PROCESS_ID", "0") != culprit:
    sys.exit(api.command(*arguments))
with api.instead_of(moment, on_full_disk):
    code = api.command(*arguments)
sys.exit(code)
"""


# Trains on a disk of its own, which is filled so that the next save fails at a random point, again and again.
SMALL_DISK = """
import json, os, random, sys
from pathlib import Path
import jaxpar
jaxpar.simulate_devices(1)
import jax.numpy as jnp, numpy as np, optax
from flax import nnx

disk, elsewhere, num_tries = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x

def loss(model, batch):
    return jaxpar.mean(jnp.square(model(batch["x"])).sum(-1), batch["weight"])

x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
task = jaxpar.adopt(Net, loss, "blocks", batches={"x": x}, batch_size=16, optimizer=optax.adam(1e-3))

def train(folder, num_steps, **options):
    settings = jaxpar.TrainConfig(
        num_steps=num_steps, out_dir=str(folder), checkpoint_every=1, keep_checkpoints=1, keep_best=False
    )
    return jaxpar.fit(task, "dp1", settings, quiet=True, **options)

def free_bytes():
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize

run, filler, chance = disk / "run", disk / "filler", random.Random(0)
train(run, 2)
[saved] = (run / "checkpoints").iterdir()
num_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
messages, steps = [], []
for _ in range(num_tries):
    room = int(num_bytes * chance.random() ** 3)  # often so little that smaller files fail as well
    filler.write_bytes(bytes(free_bytes() - room))
    try:
        train(run, 4, resume=True)
    except OSError as error:
        messages.append(str(error))
    filler.unlink()
    steps.append(int(jaxpar.load_run(run).state.step))
continued = train(run, 6, resume=True).losses
undisturbed = train(elsewhere, 6).losses[-len(continued):]
print(json.dumps({"messages": messages, "steps": steps, "losses": [continued, undisturbed]}))
"""


def more(*values):
    return pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.more
@pytest.mark.parametrize(
    ("case", "num_processes", "culprit", "ends_by"),
    [
        ("shards", 2, 1, "a step"),
        *(more("shards", n, k, "a step") for n, k in ((1, 0), (2, 0), (3, 2))),
        *(more("shards", n, k, how) for n, k in ((1, 0), (2, 0), (2, 1)) for how in ("end", "signal")),
        *(more("parts", n, 0, how) for n in (1, 2, 3) for how in ("a step", "end")),
        *(more("folder", n, 0, how) for n in (1, 2, 3) for how in ("a step", "end")),
        *(more("metrics", n, 0, how) for n in (1, 2, 3) for how in ("a step", "end")),
    ],
)  # fmt: skip
def test_a_full_disk_of_one_process_ends_all_alike(
    case, num_processes, culprit, ends_by, text, tmp_path
):
    out_dir = tmp_path / "run"
    num_steps, every = {"a step": (NEVER, 5), "end": (10, 0), "signal": (NEVER, 0)}[ends_by]
    arguments = [
        "train", "lm", "--corpus", str(text), *SMALL, "--mesh", f"dp{num_processes}",
        "--train.num-steps", str(num_steps), "--train.checkpoint-every", str(every),
        "--train.out-dir", str(out_dir),
    ]  # fmt: skip
    errors = run_on_full_disk(
        tmp_path, num_processes, case, culprit, arguments, signals=ends_by == "signal"
    )
    assert len({*errors}) == 1, errors
    who = f"process {culprit}: " if num_processes > 1 else ""
    no_line = rf"{who}cannot write {out_dir}/metrics\.jsonl: File too large"
    if case == "metrics":
        assert re.match(f"error: {no_line}", errors[0]), errors[0]
    else:
        reason = {
            "shards": "File too large",
            "parts": "File too large",
            "folder": "No space left on device",
        }[case]
        newest = "the newest is of step 5" if ends_by == "a step" else "there is none"
        reason = (
            rf"checkpoint {out_dir}/checkpoints/\d+ could not be written: {who}{reason}\n"
            rf"Fix: free some space, and continue from the newest whole checkpoint \({newest}\)"
        )
        # Process 0 may come to write a line meanwhile.
        told = rf"{reason}|{no_line}" if culprit == 0 else reason
        assert re.match(f"error: ({told})", errors[0]), errors[0]
    saved = [5] if ends_by == "a step" else []
    if case != "metrics":
        assert api.run_steps(out_dir) == saved
    assert [line["step"] for line in metrics_of(out_dir)][:9] == [*range(1, 10)]
    if num_processes > 1 and ends_by == "end":
        again = ["train", "--resume", "--train.out-dir", str(out_dir)]
        assert wait_for(start_by_hand(again, num_processes))[0] == [0] * num_processes


@pytest.mark.more
@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_run_that_cannot_begin_ends_in_all_processes(num_processes, text, tmp_path):
    arguments = [
        "train", "lm", "--corpus", str(text), *SMALL, "--mesh", f"dp{num_processes}",
        "--train.out-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    errors = run_on_full_disk(tmp_path, num_processes, "start", 0, arguments)
    assert len({*errors}) == 1, errors
    assert re.fullmatch(
        r"error: process 0: cannot write \S+/run/\S+: File too large\nFix: give a place that .*\n",
        errors[0],
    )


def run_on_full_disk(tmp_path, num_processes, case, culprit, arguments, signals=False):
    """What each of the processes of `FULL` says; all end by themselves, as it is an error."""
    script = tmp_path / "full.py"
    script.write_text(FULL)
    out_dir = arguments[arguments.index("--train.out-dir") + 1]
    processes = start_by_hand(
        [case, str(culprit), out_dir, str(Path(__file__).parent), *arguments],
        num_processes,
        program=[str(script)],
    )
    if signals:
        with contextlib.suppress(StopIteration):
            next(line for line in processes[0].stdout if re.match(r"step +10/", line))
        processes[-1].send_signal(signal.SIGTERM)
    codes, errors = wait_for(processes)
    assert codes == [2] * num_processes, errors
    return errors


def wait_for(processes):
    """Exit codes of processes, and what they have said on stderr."""
    try:
        said = [process.communicate(timeout=END_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for text in said:
        assert not re.search(MORE_THAN_WORDS, text), text
    # Gloo may say more.
    lines = ["".join(re.findall(r"(?m)^error: .*\n(?:Fix: .*\n)?", each)) for each in said]
    return [process.returncode for process in processes], lines


@pytest.mark.more
@pytest.mark.parametrize(
    "num_processes", [2, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 3))]
)
def test_a_small_disk_keeps_its_newest_checkpoint(num_processes, text, tmp_path):
    disk, out_dir = tmp_path / "disk", tmp_path / "disk" / "run"
    disk.mkdir()
    copy = f'"$@"; code=$?; cp -r {out_dir} {tmp_path / "copy"}; exit $code'
    on_disk = on_small_disk(disk, "2m", copy)
    launch = ["launch", "--processes", str(num_processes), "--"] if num_processes > 1 else []
    command = [
        sys.executable, "-m", "jaxpar", *launch, "train", "lm", "--corpus", str(text), *SMALL,
        "--hidden-size", "128", "--mesh", f"dp{num_processes}", "--train.checkpoint-every", "1",
        "--train.out-dir", str(out_dir),
    ]  # fmt: skip
    ended = subprocess.run(
        [*on_disk, *command],
        capture_output=True, text=True, timeout=END_SECONDS, env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    said = []
    for process in range(num_processes):
        prefix = f"[{process}] " if num_processes > 1 else ""
        lines = [line for line in ended.stderr.splitlines(keepends=True) if line.startswith(prefix)]
        own = "".join(line.removeprefix(prefix) for line in lines)
        said += re.findall(
            r"error: checkpoint \S+disk/run/checkpoints/\d+ could not be written: (.*)\nFix: .*the newest is "
            r"of step (\d+)",
            own,
        )
    assert len(said) == num_processes, ended.stderr
    assert not re.search(MORE_THAN_WORDS, ended.stderr), ended.stderr
    assert all("No space left on device" in reason for reason, _ in said)
    assert load_run(tmp_path / "copy").step == int(said[0][1])


@pytest.mark.full
def test_a_disk_that_is_full_at_any_point_gives_one_error_and_loses_nothing(tmp_path):
    num_tries = 20
    script, disk = tmp_path / "small_disk.py", tmp_path / "disk"
    script.write_text(SMALL_DISK)
    disk.mkdir()
    on_disk = on_small_disk(disk, "4m", '"$@"')
    arguments = [str(disk), str(tmp_path / "elsewhere"), str(num_tries)]
    ended = subprocess.run(
        [*on_disk, sys.executable, str(script), *arguments],
        capture_output=True, text=True, timeout=5 * END_SECONDS,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert len(told["messages"]) == num_tries
    for message in told["messages"]:
        assert re.fullmatch(
            r"(cannot write \S+|checkpoint \S+ could not be written): No space left on device\nFix: [^\n]+",
            message,
        ), message
    assert told["steps"] == [2] * num_tries
    continued, undisturbed = told["losses"]
    assert continued == undisturbed


# The start of a command whose rest is "$@" of a shell script. The disk is there for that script alone.
def on_small_disk(disk, size, script):
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={size} none {disk}"
    if subprocess.run([*private, mount], capture_output=True).returncode:
        pytest.skip("this process may not mount a small disk")
    return [*private, f"{mount} && {script}", "sh"]


@pytest.mark.full
def test_a_save_that_fails_in_the_background_ends_the_run_before_the_next(text, tmp_path):
    failed = []

    def fail_once(folder, write):
        if failed:
            return write()
        failed.append(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = make_run(text, tmp_path / "run", checkpoint_every=5, num_steps=10**6, log_every=1)
    message = r"checkpoints/5 could not be written: .*\nFix: .*there is none"
    with api.instead_of("write arrays", fail_once), pytest.raises(OSError, match=message):
        fit(*run, report=Slow())


class Slow(Report):
    def progress(self, progress, num_steps):
        time.sleep(0.2)


@pytest.mark.full
def test_a_full_disk_under_stdout_ends_no_run(text, tmp_path):
    out_dir = tmp_path / "run"
    command = [
        sys.executable, "-m", "jaxpar", "train", "lm", "--corpus", str(text), *SMALL,
        "--train.num-steps", "12", "--train.out-dir", str(out_dir),
    ]  # fmt: skip
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=END_SECONDS,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "warning: printed output is lost: No space left on device\n"
    lines = metrics_of(out_dir)
    assert [line["step"] for line in lines if line["split"] == "train"] == [*range(1, 13)]


@pytest.mark.full
def test_what_a_script_prints_on_a_full_disk_ends_no_run(text, tmp_path, monkeypatch, caplog):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = fit(*make_run(text, tmp_path / "run"), report=ConsoleReport())
        with contextlib.suppress(OSError):
            full.close()
    assert len(result.losses) == 20
    [said] = [each.message for each in caplog.records if "ConsoleReport" in each.message]
    assert "No space left on device" in said


@pytest.mark.parametrize("address", ["s3://bucket/run", "file:///tmp/run", "gs:/bucket/run"])
def test_an_address_is_refused_before_a_folder_is_made(address, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = (
        f"out_dir='{address}' must be a folder of this machine or gs://BUCKET/FOLDER, got another"
    )
    with pytest.raises(ValueError, match=f"^{said}"):
        TrainConfig(out_dir=address)
    assert api.command("train", "lm", "--train.out-dir", address) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    for command in (["evaluate"], ["sample"], ["export", "--output", "weights"]):
        assert api.command(*command, address) == 2
        assert "must be a folder of this machine" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
