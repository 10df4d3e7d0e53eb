"""The law: one script serves the first start of a run and every other, on a cluster as it is.

A real Slurm on this machine, of two nodes, and Open MPI, where they are installed (Debian's slurm-wlm and
openmpi-bin):

    pytest -n 0 -m "" tests/test_clusters.py
"""

import contextlib
import getpass
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from lib import api
from lib.runs import train_losses, whole_checkpoints

START_SECONDS = 60  # of the daemons
END_SECONDS = 240  # which only what hangs takes
PENDING_SECONDS = 45  # of a job: one that is requeued waits for 6, and for the scheduler
RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
# The names of both nodes are addresses of this machine, so that all can find them.
NODES = ("127.0.0.1", "127.0.0.2")


def train(text, num_steps, *more):
    return [
        "train", "lm", "--corpus", str(text), "--batch-size", "8", "--seq-len", "8", "--num-layers", "1",
        "--hidden-size", "8", "--embed-size", "8", "--mesh", "dp2", "--optimizer.lr-schedule", "constant",
        "--train.num-steps", str(num_steps), "--train.log-every", "1000000",
        "--train.checkpoint-every", "0", *more,
    ]  # fmt: skip


def has_metrics(run):
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


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


def is_free(port):
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def free_job():
    """The number of a job whose port is free: JAX's for process 0, by that number; the next job's too.

    Each cluster counts from 1, and two tests may have theirs at a time: the processes of both would meet.
    """
    port_of_0 = 65536 - 4096
    return next(
        job
        for job in random.sample(range(1, 4095), 4094)
        if is_free(port_of_0 + job) and is_free(port_of_0 + job + 1)
    )


def processes_in(folder):
    """The ids of those that work in this folder, whoever started them."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder):
                yield int(process.name)


@pytest.fixture
def folder():
    """A folder with a short name; what still works in it at the end is killed.

    Slurm puts a socket there for each step. Where its name would be longer than 107 bytes, as in pytest's
    folders, no job is started: it is held for ever.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpar-", dir="/tmp") as name:
        folder = Path(name).resolve()
        yield folder
        deadline = time.monotonic() + START_SECONDS
        while (left := [*processes_in(folder)]) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)


class Slurm:
    """A cluster of two nodes on this machine, and its commands."""

    def __init__(self, folder):
        self.folder, self._daemons = folder, []
        for name in ("run", "state"):
            (folder / name).mkdir()
        key, user = folder / "munge.key", getpass.getuser()
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        of_controller, *of_nodes = free_ports(1 + len(NODES))
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
            f"AccountingStorageType=accounting_storage/none\nFirstJobId={free_job()}\n"
            "SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0\n"
            # A process that waits for one that is lost takes so long to end.
            "KillWait=15\n"
            # On a busy machine a node may be late with an answer. It is asked again after a third of this.
            "SlurmdTimeout=60\nReturnToService=1\n"
            + "\n".join(nodes)
            + "\nPartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        self._environ = os.environ | {"SLURM_CONF": str(config)}
        munged = ["munged", "-F", "--force", f"--key-file={key}"]
        munged += [f"--{name}-file={folder}/run/munge.{name}" for name in ("pid", "seed")]
        munged += [f"--socket={folder}/run/munge.sock"]
        of_nodes = [["slurmd", "-D", "-N", node] for node in NODES]
        self._commands = [munged, ["slurmctld", "-D", "-i"], *of_nodes]

    def start(self):
        for number, command in enumerate(self._commands):
            with (self.folder / f"{number}.log").open("w") as said:
                self._daemons.append(
                    subprocess.Popen(
                        command, stdout=said, stderr=said, env=self._environ, cwd=self.folder
                    )
                )

    def is_up(self):
        return all(daemon.poll() is None for daemon in self._daemons)

    def nodes(self):
        """The state of each node: a star if it does not answer; none without a controller."""
        found = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, env=self._environ
        )
        return found.stdout.split()

    def said(self):
        """The last words of the daemons."""
        logs = [self.folder / f"{number}.log" for number in range(len(self._daemons))]
        return [log.read_text().splitlines()[-2:] for log in logs]

    def __call__(self, *command):
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environ, cwd=self.folder, check=True
        )
        return done.stdout

    def state(self, job):
        return re.findall(
            r"(?:JobState|Restarts|ExitCode)=(\S*)", self("scontrol", "show", "job", job)
        )

    def log(self, job):
        path = self.folder / f"jaxpar-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job, condition):
        """Waits while the job runs, and no longer than it must while it is pending."""
        now = time.monotonic()
        end, pending = now + END_SECONDS, now
        while True:
            [state] = self.state(job)[:1]  # what a job says it has said before it ends
            if condition():
                return
            now = time.monotonic()
            pending = pending if state == "PENDING" else now
            assert now < end, self.report(job)
            assert now - pending < PENDING_SECONDS, self.report(job)
            assert state in ("PENDING", "RUNNING", "COMPLETING"), self.report(job)
            time.sleep(0.2)

    def report(self, job):
        """Why a job does not do what it should."""
        of_job = self("scontrol", "show", "job", job), self("sinfo", "-N", "-o", "%N %T %E")
        return "\n".join([*of_job, *map(str, self.said()), self.log(job)])

    def submit(self, script):
        (self.folder / "job.sbatch").write_text(script)
        return self("sbatch", "--parsable", "job.sbatch").strip()

    def close(self):
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.fixture
def slurm(folder):
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not there: install slurm-wlm and munge")
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    cluster = Slurm(folder)
    try:
        cluster.start()
        deadline = time.monotonic() + START_SECONDS
        while cluster.nodes() != ["idle"] * len(NODES):
            if not cluster.is_up() or time.monotonic() > deadline:
                pytest.skip(f"no Slurm can be run here: {cluster.said()}")
            time.sleep(0.2)
        yield cluster
    finally:
        cluster.close()


@pytest.mark.full
def test_slurm_requeues_a_run_that_goes_on_and_cancels_one_for_good(slurm, text):
    since = time.monotonic()
    job = slurm.submit(slurm_script(train(text, 10**6)))
    folder = slurm.folder / f"runs/slurm-{job}"

    def said(pattern):
        return re.findall(pattern, slurm.log(job), re.MULTILINE)

    def wait_for(condition):
        slurm.wait_for(job, condition)

    # The time limit, in minutes: Slurm's notice, two before it or less. It looks every 30 seconds.
    wait_for(lambda: said(r"^0: step +\d+/"))
    minutes = 2 + int(time.monotonic() - since) // 60
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    wait_for(lambda: said(r"stopped by SIGTERM after step (\d+)/"))
    wait_for(lambda: slurm.state(job)[1] == "1")
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_for(lambda: said(r"resumed at step (\d+);"))
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
    cancelled, since = job, time.monotonic()
    stopped_at = [int(step) for step in said(r"stopped by SIGTERM after step (\d+)/")]
    assert stopped_at == sorted(set(stopped_at))
    assert len(stopped_at) == 3
    assert whole_checkpoints(folder)[-1] == stopped_at[-1]

    # Another job goes on to the end.
    more = ("--train.out-dir", str(folder))
    job = slurm.submit(slurm_script(train(text, stopped_at[-1] + 3, *more)))
    wait_for(lambda: slurm.state(job)[0] not in ("PENDING", "RUNNING", "COMPLETING"))
    assert slurm.state(job) == ["COMPLETED", "0", "0:0"], slurm.report(job)
    assert whole_checkpoints(folder)[-1] == stopped_at[-1] + 3
    time.sleep(max(0, since + 10 - time.monotonic()))  # longer than a requeued job waits
    assert slurm.state(cancelled)[:2] == ["CANCELLED", "2"]


@pytest.mark.full
def test_slurm_goes_on_with_the_nodes_that_are_left(slurm, text):
    """A node is lost, and comes back; then a process dies."""
    folder = slurm.folder / "elastic"
    logged = ("--train.log-every", "1")
    elastic = ("--train.out-dir", str(folder), "--train.checkpoint-every", "20", *logged)
    command = [*train(text, 10**6, *elastic), "--elastic"]
    job = slurm.submit(slurm_script(command, "1-2", elastic=True))

    def wait_for(condition):
        slurm.wait_for(job, condition)

    def wait_for_meshes(*expected):
        def meshes():
            return re.findall(r"^0: mesh +data=(\d)", slurm.log(job), re.MULTILINE)

        wait_for(lambda: len(meshes()) >= len(expected))
        assert meshes() == [*expected], slurm.report(job)

    def wait_for_a_checkpoint():
        before = whole_checkpoints(folder)[-1:]
        wait_for(lambda: whole_checkpoints(folder)[-1:] > before)

    wait_for_meshes("2")
    wait_for((folder / "checkpoints").exists)
    wait_for_a_checkpoint()
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
    wait_for_meshes("2", "1")
    wait_for_a_checkpoint()
    slurm("scontrol", "update", f"NodeName={NODES[1]}", "State=RESUME")
    wait_for(lambda: slurm.nodes()[1] == "idle")
    slurm("scontrol", "requeue", job)
    wait_for_meshes("2", "1", "2")
    wait_for_a_checkpoint()
    pids = slurm("pgrep", "-f", rf"^\S*python\S* -m jaxpar train .*{folder}").split()
    os.kill(int(pids[-1]), signal.SIGKILL)
    wait_for_meshes("2", "1", "2", "2")
    wait_for_a_checkpoint()
    slurm("scancel", job)
    wait_for(lambda: slurm.state(job)[0] == "CANCELLED")
    resumed = re.findall(r"resumed at step (\d+);", slurm.log(job))
    assert len(resumed) == 3
    assert sorted(map(int, resumed)) == list(map(int, resumed))
    assert len({*resumed}) == 3
    # An unbroken run of one device.
    losses, alone = train_losses(folder), slurm.folder / "alone"
    more = ("--train.out-dir", str(alone), *logged, "--devices", "0")
    arguments = [each for each in train(text, len(losses), *more) if each not in ("--mesh", "dp2")]
    assert api.command(*arguments) == 0
    assert losses == pytest.approx(train_losses(alone), rel=RELATIVE_TOLERANCE)


@pytest.mark.full
def test_open_mpi_stops_a_run_with_its_state_and_goes_on(text, folder):
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: install openmpi-bin")
    # Told to end, mpirun waits so long, sends SIGTERM, waits as long again, and kills: by default a second.
    mpirun = ["mpirun", "-n", "2", "--oversubscribe", "--mca", "odls_base_sigkill_timeout", "5"]
    mpirun += ["--allow-run-as-root"] * (os.getuid() == 0)
    # By default it gives a single core to each of two processes.
    mpirun += ["--bind-to", "none", "--mca", "orte_tmpdir_base", str(folder)]
    run = folder / "run"

    def start(num_steps):
        command = train(text, num_steps, "--train.out-dir", str(run), "--resume-or-begin")
        return subprocess.Popen(
            [*mpirun, sys.executable, "-m", "jaxpar", *command], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd=folder,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    with start(10**6) as process:
        try:
            # On the terminal that Open MPI gives it a run has no lines.
            wait_until(lambda: has_metrics(run) or process.poll() is not None, lambda: "no step")
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=END_SECONDS)
        finally:
            process.kill()
    [step] = map(int, re.findall(r"stopped by SIGTERM after step (\d+)/", said))
    assert whole_checkpoints(run) == [step]
    assert process.returncode != 0
    with start(step + 3) as process:
        said, _ = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 0, said
    assert f"resumed at step {step};" in said
    assert whole_checkpoints(run)[-1] == step + 3
