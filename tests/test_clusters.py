"""The law: one script serves the first start of a run and every other, on a cluster as it is.

A real Slurm on this machine, of two nodes, and Open MPI, where they are installed (Debian's slurm-wlm and
openmpi-bin):

    pytest -n 0 -m "" tests/test_clusters.py
"""

import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from jaxpar.step.setup import Setup
from jaxpar.training.run_folder import RunFolder

START_SECONDS = 20  # of the daemons
END_SECONDS = 600  # which only what hangs takes
RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
# Slurm's clock has a resolution of a minute: the notice comes in the job's first.
SHORT = ["--time=2", "--signal=TERM@60"]
# The names of both nodes are addresses of this machine, so that all can find them.
NODES = ("127.0.0.1", "127.0.0.2")


def train(text, num_steps, *more):
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "8", "--num-layers", "1",
        "--hidden-size", "8", "--embed-size", "8", "--mesh", "dp2", "--optimizer.lr-schedule", "constant",
        "--train.num-steps", str(num_steps), "--train.log-every", "1000000",
        "--train.checkpoint-every", "0", *more,
    ]  # fmt: skip


def slurm_script(command, nodes="2", elastic=False):
    """The template of the docs, for nodes without GPUs and with these commands."""
    script = (Path(__file__).parents[1] / "docs/slurm.sh").read_text()
    where = [] if "--train.out-dir" in command else ["--train.out-dir", '"$out_dir"']
    words = [*map(shlex.quote, command), *where, "--resume-or-begin"]
    python = shlex.quote(os.path.dirname(sys.executable))
    for old, new in (
        ("--nodes=4", f"--nodes={nodes}"),
        ("#SBATCH --gpus-per-node=8\n", ""),
        ("export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\n", f"export PATH={python}:$PATH\n"),
        (
            "# export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8",
            "export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1",
        ),
        ('train lm --mesh dp8pp4 --train.out-dir "$out_dir" --resume-or-begin', " ".join(words)),
        *[("  # *) [", "  *) [")] * elastic,
    ):
        assert old in script
        script = script.replace(old, new)
    return script


def wait_until(condition, what):
    deadline = time.monotonic() + END_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Slurm:
    """A cluster of two nodes on this machine, and its commands."""

    def __init__(self, folder):
        self.folder, self._daemons = folder, []
        for name in ("run", "state"):
            (folder / name).mkdir()
        key, user = folder / "munge.key", getpass.getuser()
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        of_controller, *of_nodes = free_ports(3)
        nodes = (
            f"NodeName={node} NodeAddr={node} Port={port} CPUs=1 State=UNKNOWN"
            for node, port in zip(NODES, of_nodes, strict=True)
        )
        config = folder / "slurm.conf"
        config.write_text(
            f"ClusterName=test\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort={of_controller}\n"
            f"SlurmUser={user}\nSlurmdUser={user}\nAuthType=auth/munge\n"
            # A requeued job waits for the time in which its credential expires.
            f"AuthInfo=socket={folder}/run/munge.sock,cred_expire=5\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/run/slurmctld.pid\nSlurmdPidFile={folder}/run/slurmd-%n.pid\n"
            f"ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none\n"
            f"MpiDefault=none\nJobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n"
            f"AccountingStorageType=accounting_storage/none\nSchedulerParameters=sched_interval=2\n"
            + "\n".join(nodes)
            + "\nPartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        self._environ = os.environ | {"SLURM_CONF": str(config)}
        munged = [
            "munged",
            "-F",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/run/munge.sock",
        ]
        munged += [f"--pid-file={folder}/run/munge.pid", f"--seed-file={folder}/run/seed"]
        self._start(munged)
        self._start(["slurmctld", "-D", "-i"])
        for node in NODES:
            self._start(["slurmd", "-D", "-N", node])

    def _start(self, command):
        said = (self.folder / f"{len(self._daemons)}.log").open("w")
        with said:
            self._daemons.append(
                subprocess.Popen(command, stdout=said, stderr=said, env=self._environ)
            )

    def is_ready(self):
        found = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, env=self._environ
        )
        return found.stdout.split() == ["idle"] * len(NODES)

    def said(self):
        """The last words of the daemons."""
        logs = [self.folder / f"{number}.log" for number in range(len(self._daemons))]
        return [log.read_text().splitlines()[-1:] for log in logs]

    def __call__(self, *command):
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environ, cwd=self.folder, check=True
        )
        return done.stdout

    def state(self, job):
        return re.findall(
            r"(?:JobState|Restarts|ExitCode)=(\S*)", self("scontrol", "show", "job", job)
        )

    def submit(self, script, *options):
        (self.folder / "job.sbatch").write_text(script)
        return self("sbatch", "--parsable", *options, "job.sbatch").strip()

    def close(self):
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(END_SECONDS)


@pytest.fixture
def slurm(tmp_path):
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not there: install slurm-wlm and munge")
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    cluster = Slurm(tmp_path)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not cluster.is_ready():
            if time.monotonic() > deadline:
                pytest.skip(f"no Slurm can be run here: {cluster.said()}")
            time.sleep(0.2)
        yield cluster
        cluster("scancel", "--state=RUNNING")
        # Of a test that failed: its daemons would wait for them.
        wait_until(lambda: not cluster("squeue", "-h"), lambda: cluster("squeue"))
    finally:
        cluster.close()


@pytest.mark.full
def test_slurm_requeues_a_run_that_goes_on_and_cancels_one_for_good(slurm, text):
    job = slurm.submit(slurm_script(train(text, 10**6)), *SHORT)
    log, folder = slurm.folder / f"jaxpar-{job}.log", RunFolder(slurm.folder / f"runs/slurm-{job}")

    def said(pattern):
        return re.findall(pattern, log.read_text(), re.MULTILINE) if log.exists() else []

    def steps():
        return folder.checkpoints(Setup.of(*folder.settings())).steps()

    def wait_for(condition):
        wait_until(condition, lambda: (slurm.state(job), log.exists() and log.read_text()))

    # The time limit: Slurm's notice.
    wait_for(lambda: said(r"stopped by SIGTERM after step (\d+)/"))
    wait_for(lambda: said(r"resumed at step (\d+);"))
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert said(r"resumed at step (\d+);") == said(r"stopped by SIGTERM after step (\d+)/")
    assert slurm.state(job)[:2] == ["RUNNING", "1"]

    # By hand, or because a job that is more urgent has taken the nodes.
    wait_for(lambda: len(said(r"^0: step +\d+/")) == 2)
    slurm("scontrol", "requeue", job)
    wait_for(lambda: len(said(r"^0: step +\d+/")) == 3)
    assert said(r"resumed at step (\d+);") == said(r"stopped by SIGTERM after step (\d+)/")
    assert slurm.state(job)[:2] == ["RUNNING", "2"]

    # Cancelled: its state is saved, and it is not started again.
    slurm("scancel", job)
    wait_for(lambda: slurm.state(job)[0] == "CANCELLED")
    stopped_at = [int(step) for step in said(r"stopped by SIGTERM after step (\d+)/")]
    assert stopped_at == sorted(set(stopped_at))
    assert len(stopped_at) == 3
    assert steps()[-1] == stopped_at[-1]
    time.sleep(10)  # longer than a requeued job waits
    assert slurm.state(job)[:2] == ["CANCELLED", "2"]

    # Another job goes on to the end.
    more = ("--train.out-dir", str(folder))
    job = slurm.submit(slurm_script(train(text, stopped_at[-1] + 3, *more)))
    wait_for(lambda: slurm.state(job)[0] not in ("PENDING", "RUNNING", "COMPLETING"))
    assert slurm.state(job) == ["COMPLETED", "0", "0:0"], log.read_text()
    assert steps()[-1] == stopped_at[-1] + 3


@pytest.mark.full
def test_slurm_goes_on_with_the_nodes_that_are_left(slurm, text):
    """A node is lost, and comes back; then a process dies."""
    folder = RunFolder(slurm.folder / "elastic")
    logged = ("--train.log-every", "1")
    elastic = ("--train.out-dir", str(folder), "--train.checkpoint-every", "20", *logged)
    command = [*train(text, 10**6, *elastic), "--elastic"]
    job = slurm.submit(slurm_script(command, "1-2", elastic=True))
    log = slurm.folder / f"jaxpar-{job}.log"

    def meshes():
        said = log.read_text() if log.exists() else ""
        return re.findall(r"^0: mesh +data=(\d)", said, re.MULTILINE)

    def wait_for(condition):
        wait_until(condition, lambda: (slurm.state(job), log.exists() and log.read_text()))

    def wait_for_a_checkpoint():
        before = max(folder.checkpoints(Setup.of(*folder.settings())).steps(), default=0)
        wait_for(
            lambda: (
                max(folder.checkpoints(Setup.of(*folder.settings())).steps(), default=0) > before
            )
        )

    wait_for(lambda: meshes() == ["2"] and folder.checkpoints_path.exists())
    wait_for_a_checkpoint()
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    wait_for(lambda: meshes() == ["2", "1"])
    wait_for_a_checkpoint()
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    slurm("scontrol", "requeue", job)
    wait_for(lambda: meshes() == ["2", "1", "2"])
    wait_for_a_checkpoint()
    pids = slurm("pgrep", "-f", rf"^\S*python\S* -m jaxpar train .*{folder}").split()
    os.kill(int(pids[-1]), signal.SIGKILL)
    wait_for(lambda: meshes() == ["2", "1", "2", "2"])
    wait_for_a_checkpoint()
    slurm("scancel", job)
    wait_for(lambda: slurm.state(job)[0] == "CANCELLED")
    resumed = re.findall(r"resumed at step (\d+);", log.read_text())
    assert len(resumed) == 3
    assert sorted(map(int, resumed)) == list(map(int, resumed))
    assert len({*resumed}) == 3
    # An unbroken run of one device.
    losses = [line["loss"] for line in folder.metrics() if line["split"] == "train"]
    alone = RunFolder(slurm.folder / "alone")
    more = ("--train.out-dir", str(alone), *logged, "--devices", "0")
    arguments = [each for each in train(text, len(losses), *more) if each not in ("--mesh", "dp2")]
    assert main(arguments) == 0
    expected = [line["loss"] for line in alone.metrics() if line["split"] == "train"]
    assert losses == pytest.approx(expected, rel=RELATIVE_TOLERANCE)


@pytest.mark.full
def test_open_mpi_stops_a_run_with_its_state_and_goes_on(text, tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: install openmpi-bin")
    # Told to end, mpirun waits so long, sends SIGTERM, waits as long again, and kills: by default a second.
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", "--mca", "odls_base_sigkill_timeout", "5"]
    mpirun += ["--allow-run-as-root"] * (os.getuid() == 0)
    folder = RunFolder(tmp_path / "run")

    def start(num_steps):
        command = train(text, num_steps, "--train.out-dir", str(folder), "--resume-or-begin")
        return subprocess.Popen(
            [*mpirun, sys.executable, "-m", "jaxpar", *command], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    with start(10**6) as process:
        try:
            # On the terminal that Open MPI gives it a run has no lines.
            wait_until(lambda: folder.metrics(), lambda: process.poll())
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()
    [step] = map(int, re.findall(r"stopped by SIGTERM after step (\d+)/", said))
    assert folder.checkpoints(Setup.of(*folder.settings())).steps() == [step]
    assert process.returncode != 0
    with start(step + 3) as process:
        said, _ = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 0, said
    assert f"resumed at step {step};" in said
    assert folder.checkpoints(Setup.of(*folder.settings())).steps()[-1] == step + 3
