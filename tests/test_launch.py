"""Several processes: who belongs together, and a launcher that starts and ends them."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from lib import api
from lib.runs import children_of, flip_a_bit

# Sums in another order, in float32.
RELATIVE_TOLERANCE = 1e-5
END_SECONDS = 600  # which only a process that hangs takes
MINUTE_SECONDS = 60  # in which the others of a process that stands still end
WATCHDOG_SECONDS = 10  # in which the children of a launcher that was killed end
BY_HAND = {
    "JAX_COORDINATOR_ADDRESS": "a.b:1", "JAXPAR_NUM_PROCESSES": "4", "JAXPAR_PROCESS_ID": "3",
}  # fmt: skip
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.filterwarnings("ignore:Kubernetes environment detected")  # of JAX
def test_a_pod_that_jax_finds_nobody_for_is_refused(monkeypatch, text, tmp_path, capsys):
    for name, value in (POD | {"JOB_COMPLETION_INDEX": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # not installed
    assert api.command(*flags(text, "--train.out-dir", str(tmp_path / "run"))) == 2
    assert re.search(
        r"JAX does not find the processes that Kubernetes started",
        capsys.readouterr().err,
    )


def test_a_time_to_start_that_is_no_number_is_refused(monkeypatch, text, tmp_path, capsys):
    for name, value in (BY_HAND | {"JAXPAR_START_SECONDS": "soon"}).items():
        monkeypatch.setenv(name, value)
    assert api.command(*flags(text, "--train.out-dir", str(tmp_path / "run"))) == 2
    assert capsys.readouterr().err == (
        "error: JAXPAR_START_SECONDS='soon' is not a number of seconds\n"
        "Fix: use a whole number of seconds, such as 300.\n"
    )


def test_a_run_on_one_device_is_not_evaluated_by_several():
    code, out, err = finish(start(["evaluate", "runs/1"]))
    assert (code, out) == (2, "")
    said = re.findall(r"^\[[01]\] (.*)", err, re.MULTILINE)
    assert said[:2] == [
        "error: evaluate in several processes needs --mesh",
        "Fix: give a mesh over all devices, or set JAXPAR_NUM_PROCESSES=1.",
    ]


def flags(text, *more, task="lm"):
    """A tiny run."""
    return [
        "train", task, "--corpus", str(text), "--batch-size", "8", "--seq-len", "8", "--num-layers", "2",
        "--hidden-size", "16", "--embed-size", "16", "--optimizer.warmup-steps", "2", "--train.num-steps",
        "6", "--train.log-every", "1", *more,
    ]  # fmt: skip


def start(arguments, *options, processes=2):
    """The launcher, with two processes."""
    command = [sys.executable, "-m", "jaxpar", "launch", "--processes", str(processes), *options]
    return subprocess.Popen(
        [*command, "--", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip


def finish(process):
    """Its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=END_SECONDS)
    finally:
        process.terminate()
    return process.returncode, out, err


def start_long_run(text, out_dir, *more, **how):
    """A launched run that has taken a step, and would take many more; its children's ids."""
    process = start(
        flags(text, "--mesh", "dp2", "--train.num-steps", "1000000", "--train.out-dir", out_dir),
        *more, **how,
    )  # fmt: skip
    for line in process.stdout:  # lines come while it runs
        if re.match(r"\[0\] step +1/1000000", line):
            break
    else:
        raise AssertionError(process.stderr.read())
    return process, children_of(process.pid)


def assert_gone(pids, seconds):
    """Within so many seconds none of them runs any more."""
    until = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def is_running(pid):
    """Not for one that has ended and that nobody has asked for its exit code."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip()[:1] not in ("", "Z")


def train_losses(out_dir):
    lines = (json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run of two processes with four devices each: its folder and what was printed."""
    out_dir = tmp_path_factory.mktemp("runs") / "two"
    process = start(
        flags(text, "--mesh", "dp2pp2tp2", "--train.num-steps", "10", "--train.out-dir", str(out_dir)),
        "--devices-per-process", "4",
    )  # fmt: skip
    code, out, err = finish(process)
    assert code == 0, err
    assert "Gloo" not in out + err
    return out_dir, out


@pytest.mark.full
@pytest.mark.law
def test_two_processes_have_the_losses_of_one_device(run, text, tmp_path):
    one = tmp_path / "one"
    one_device = ("--devices", "0", "--train.num-steps", "10", "--train.out-dir", str(one))
    assert api.command(*flags(text, *one_device)) == 0
    losses = train_losses(run[0])
    assert len(losses) == 10
    assert losses == pytest.approx(train_losses(one), rel=RELATIVE_TOLERANCE)


# What is drawn by seed and step, and every process has a part of: windows, masks of activations and weights.
AWD = f"{Path(__file__).parents[1]}/recipes/awd.py:AWD"
DRAWN = (
    "--window-mean", "6", "--dropout", "0.2", "--word-dropout", "0.2", "--drop-connect", "0.2", "--tar", "1",
    "--optimizer.learning-rate", "0.1", "--train.eval-every", "100",
)  # fmt: skip


@pytest.mark.full
def test_a_run_goes_on_in_two_processes_and_back_in_one(text, tmp_path, compile_once):
    """The two begin before a checkpoint in which a bit has changed, and name its file."""

    def arguments(name, num_steps, *more):
        out_dir = ("--train.out-dir", str(tmp_path / name), "--train.num-steps", str(num_steps))
        return [*flags(text, *out_dir, *DRAWN, task=AWD), *more]

    assert (
        api.command(*arguments("run", 5, "--mesh", "dp2pp2tp2", "--train.checkpoint-every", "3"))
        == 0
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "5"
    damaged = flip_a_bit(checkpoint)
    resume = [*arguments("run", 25), "--resume", "--mesh", "dp2pp2"]
    code, out, err = finish(start(resume, "--devices-per-process", "2"))
    assert code == 0, err
    assert f"skipped the damaged checkpoint {checkpoint}: {damaged} is not what was written" in err
    assert "resumed at step 3;" in out
    assert api.command(*arguments("run", 30), "--resume", "--mesh", "dp2pp2tp2") == 0
    assert api.command(*arguments("whole", 30, "--devices", "0")) == 0
    losses, expected = train_losses(tmp_path / "run"), train_losses(tmp_path / "whole")
    assert len(losses) == 30
    assert losses == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


@pytest.mark.full
def test_process_0_alone_prints_and_writes(run):
    out_dir, out = run
    assert all(line.startswith("[0] ") for line in out.splitlines()), out
    assert "[0] mesh        data=2 x stage=2 x tensor=2" in out.splitlines()
    assert out.count("step 10/10") == 1
    steps = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["split"] for line in steps] == ["train"] * 10 + ["valid", "test"]
    assert [path.name for path in (out_dir / "checkpoints").iterdir()] == ["10"]


@pytest.mark.full
def test_failure_ends_all_with_its_message_and_exit_code(run, text):
    arguments = flags(text, "--mesh", "dp2", "--train.out-dir", str(run[0]))
    code, out, err = finish(start(arguments))
    assert (code, out) == (2, "")
    assert re.search(r"^\[[01]\] error: out_dir=.* holds a run already", err, re.MULTILINE), err
    assert re.fullmatch(
        r"error: process [01] of 2 ended with exit code 2; the others were ended",
        err.splitlines()[-1],
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--mesh", "dp2"], "needs 2 devices, got 4\n.*name 2 with devices"),
        pytest.param(
            ["--batch-size", "6"], "batch_size=6 does not divide by data=4", marks=pytest.mark.more
        ),
    ],
)
def test_several_processes_leave_no_device_out(more, message, text, tmp_path):
    out_dir = tmp_path / "run"
    arguments = flags(text, "--train.out-dir", str(out_dir), *more)
    code, out, err = finish(start(arguments, "--devices-per-process", "2"))
    assert (code, out) == (2, "")
    assert re.search(rf"^\[[01]\] error: .*{message}", err, re.MULTILINE), err
    assert not out_dir.exists()


@pytest.mark.full
def test_numbers_that_are_not_finite_end_all_with_the_state_saved(text, tmp_path):
    out_dir = tmp_path / "run"
    arguments = flags(
        text, "--mesh", "dp2", "--train.out-dir", str(out_dir), "--optimizer.learning-rate", "1e38",
        "--optimizer.name", "sgd", "--train.clip-norm", "0", "--optimizer.warmup-steps", "0",
    )  # fmt: skip
    code, _, err = finish(start(arguments))
    assert code == 3, err
    said = re.search(r"^\[[01]\] error: the \w+ of step (\d) is not finite", err, re.MULTILINE)
    assert said, err
    saved = [path.name for path in (out_dir / "checkpoints").iterdir()]
    assert saved == [str(int(said[1]) - 1)]


@pytest.mark.more
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.more)])
def test_a_killed_process_ends_the_others(victim, text, tmp_path):
    process, children = start_long_run(text, str(tmp_path / "run"))
    os.kill(children[victim], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGKILL
    assert (
        err.splitlines()[-1]
        == f"error: process {victim} of 2 was killed by SIGKILL; the others were ended"
    )
    assert_gone(children, 0)


@pytest.mark.full
def test_a_process_started_by_hand_says_which_other_was_killed(text, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    own = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAXPAR_NUM_PROCESSES": "2",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    arguments = flags(
        text, "--mesh", "dp2", "--train.num-steps", "1000000", "--train.out-dir", str(tmp_path / "run")
    )  # fmt: skip
    first, second = (
        subprocess.Popen(
            [sys.executable, "-m", "jaxpar", *arguments], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=os.environ | own | {"JAXPAR_PROCESS_ID": str(number)},
        )
        for number in range(2)
    )  # fmt: skip
    assert any(line.startswith("step") for line in first.stdout)
    second.kill()
    second.communicate()
    code, _, err = finish(first)
    assert code == 1
    assert "error: process 1 of 2 ended in the middle of a step\nFix: start all" in err
    assert "Traceback" not in err


def test_children_end_with_their_launcher_however_it_ends(text, tmp_path):
    process, children = start_long_run(text, str(tmp_path / "run"))
    assert len(children) == 2
    os.kill(children[1], signal.SIGSTOP)
    process.kill()
    process.wait()
    assert_gone(children, WATCHDOG_SECONDS)
    process.stdout.close()
    process.stderr.close()


@pytest.mark.full
def test_a_terminal_that_closes_lets_the_run_save_its_state(text, tmp_path):
    """First nobody reads what is printed, then SIGHUP comes."""
    process, _ = start_long_run(text, str(tmp_path / "run"))
    process.stdout.close()
    process.stderr.close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    size, until = metrics.stat().st_size, time.monotonic() + END_SECONDS
    while metrics.stat().st_size < size + 2000:  # some steps
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(END_SECONDS) == 128 + signal.SIGTERM
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


@pytest.mark.more
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_hangs_ends_all(victim, text, tmp_path):
    process, children = start_long_run(text, str(tmp_path / "run"))
    began = time.monotonic()
    os.kill(children[victim], signal.SIGSTOP)
    code, _, err = finish(process)
    assert code not in (0, 2)
    assert re.match(
        rf"error: process {1 - victim} of 2 .*; the others were ended", err.splitlines()[-1]
    ), err
    assert time.monotonic() - began < MINUTE_SECONDS
    assert_gone(children, 0)


@pytest.mark.full
def test_a_process_that_stands_still_for_a_while_ends_nothing(text, tmp_path):
    """Process 0, which has JAX's coordinator."""
    process, children = start_long_run(text, str(tmp_path / "run"))
    os.kill(children[0], signal.SIGSTOP)
    time.sleep(20)
    os.kill(children[0], signal.SIGCONT)
    for _ in range(3):  # that came before it
        process.stdout.readline()
    assert re.match(r"\[0\] step +\d+/1000000", process.stdout.readline())
    process.terminate()
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out


@pytest.mark.more
@pytest.mark.parametrize("closed", [">&- 2>&- <&-", pytest.param("<&-", marks=pytest.mark.more)])
def test_streams_that_are_closed_end_no_run(closed, text, tmp_path):
    out_dir = tmp_path / "run"
    command = [sys.executable, "-m", "jaxpar", "launch", "--", *flags(text, "--mesh", "dp2")]
    command += ["--train.out-dir", str(out_dir)]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {closed}"], timeout=END_SECONDS, check=False
    )
    assert done.returncode == 0
    assert len(train_losses(out_dir)) == 6


@pytest.mark.full
def test_ctrl_c_lets_the_run_save_its_state(text, tmp_path):
    process, _ = start_long_run(text, str(tmp_path / "run"))
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGINT, err
    stopped = re.search(r"^\[0\] stopped by SIGINT after step (\d+)/1000000", out, re.MULTILINE)
    assert stopped, out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [stopped[1]]
    assert "error" not in err


@pytest.mark.full
def test_a_failed_process_does_not_wait_for_the_others(tmp_path):
    # Process 1 fails alone, process 0 waits for it; without a launcher to end it.
    program = (
        "import jax; from jax.experimental import multihost_utils as all\n"
        "from lib import api; api.start_processes()\n"
        "all.sync_global_devices('begin')\n"
        "if jax.process_index(): raise RuntimeError('of process 1')\n"
        "all.sync_global_devices('end')\n"
    )
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL, env=environ, cwd=Path(__file__).parent,
        )
        for environ in api.environments(2, 1)
    )  # fmt: skip
    code, _, err = finish(second)
    assert (code, err.splitlines()[-1]) == (1, "RuntimeError: of process 1")
    assert finish(first)[0] != 0


MISTAKES = {
    "nothing to launch": (
        ["--processes", "2"],
        r"launch starts train, evaluate, predict, export; got no command",
    ),
    "sample": (
        ["--", "sample", "runs/1"],
        r"launch starts train, evaluate, predict, export; got sample",
    ),
    "no process": (["--processes", "0", "--", "train"], r"processes=0, .*nothing to start"),
    "simulate": (["--", "train", "--simulate=4"], r"Fix: use --devices-per-process"),
    "overwrite": (
        ["--elastic", "--", "train", "lm", "--train.out-dir=x", "--overwrite"],
        r"--overwrite would remove an elastic run at every start",
    ),
    "elastic without a folder": (
        ["--elastic", "--", "train", "lm"],
        r"add --train\.out-dir FOLDER",
    ),
    "elastic evaluate": (
        ["--elastic", "--", "evaluate", "runs/1"],
        r"add --train\.out-dir FOLDER",
    ),
    "too few": (
        ["--elastic", "--min-processes", "3", "--", "train", "lm", "--train.out-dir=x"],
        "min_processes=3 is out of range",
    ),
    "not elastic": (["--min-processes", "2", "--", "train"], r"min_processes=2 needs elastic"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake, capsys):
    argv, message = MISTAKES[mistake]
    assert api.command("launch", *argv) == 2
    assert re.search(message, capsys.readouterr().err)


TEMPLATES = Path(__file__).parents[1] / "docs"


def test_slurm_template_starts_and_continues_a_run(tmp_path):
    script = (TEMPLATES / "slurm.sh").read_text()
    started = [
        "train",
        "lm",
        "--mesh",
        "dp8pp4",
        "--train.out-dir",
        "runs/slurm-7",
        "--resume-or-begin",
    ]
    for code, requeued in ((0, False), (143, True), (2, False), (3, False), (137, False)):
        assert run_script(script, tmp_path, code) == (code, started, requeued)
    elastic = script.replace("  # *) [", "  *) [")
    assert elastic != script
    for code, requeued in ((0, False), (143, True), (2, False), (3, False), (137, True)):
        assert run_script(elastic, tmp_path, code) == (code, started, requeued)


def run_script(script, folder, code):
    """Runs a script for Slurm; its exit code, what jaxpar was to do, and whether the job was requeued.

    Args:
      code: that `srun` gives.
    """
    for name, then in (("srun", f"exit {code}"), ("scontrol", "")):
        program = folder / name
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {folder}/{name}.said\n{then}\n')
        program.chmod(0o755)
        (folder / f"{name}.said").unlink(missing_ok=True)
    environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, text=True, check=False, env=environ)
    said = (folder / "srun.said").read_text().splitlines()
    requeued = folder / "scontrol.said"
    if is_requeued := requeued.exists():
        assert requeued.read_text().split() == ["requeue", "7"]
    return done.returncode, said[said.index("jaxpar") + 1 :], is_requeued


def test_jobset_template_starts_a_process_in_each_pod():
    job_set = yaml.safe_load((TEMPLATES / "jobset.yaml").read_text())
    assert job_set["kind"] == "JobSet"
    (workers,) = job_set["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    start = "python -m jaxpar train lm --mesh dp8pp4 --train.out-dir runs/jaxpar --resume-or-begin"
    assert container["command"] == start.split()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert "persistentVolumeClaim" in mounts[container["workingDir"]]
    # All start again, unless the exit code says that it would be of no use.
    assert spec["restartPolicy"] == "Never"
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    [hopeless] = job["podFailurePolicy"]["rules"]
    assert hopeless["onExitCodes"] == {
        "containerName": container["name"], "operator": "In", "values": [2, 3],
    }  # fmt: skip
    assert job_set["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values.pop("JAXPAR_PROCESS_ID") is None  # the annotation of its pod
    # The first pod of the first job, in the service that has the name of the set.
    host = f"{job_set['metadata']['name']}-{workers['name']}-0-0.{job_set['metadata']['name']}"
    assert values["JAXPAR_NUM_PROCESSES"] == "4"
    assert values["JAX_COORDINATOR_ADDRESS"] == f"{host}:8476"
