"""Processes on Ray: what is asked of it, and for real on a cluster of several raylets on this machine.

pip install '.[ray]' && pytest -n 0 -m "" tests/test_ray.py
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from lib import api
from lib.runs import flags, read_until, train_losses

RELATIVE_TOLERANCE = 1e-5  # sums in another order, in float32
END_SECONDS = 600  # which only what hangs takes
GONE_SECONDS = 20  # in which nothing is left of a launcher that was killed
# Ray forks to start a cluster, which JAX warns of where it has run before.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

STORE_BYTES = 80 * 2**20  # about the least that a raylet takes


# ---- what is asked of Ray, without one ----


class Room:
    """A placement group that Ray has room for, or not."""

    def __init__(self, bundles, has_room):
        self.bundle_count, self._has_room = len(bundles), has_room

    def wait(self, seconds):
        return self._has_room


class Ray(types.SimpleNamespace):
    """Ray, as far as it places processes, which end at once.

    Args:
      total: the devices that it counts.
      free: those that can be had.
      starts: of each, the exit code, and the devices that are free after it.
    """

    RayError = RayActorError = ConnectionError

    def __init__(self, total, free, starts=()):
        self.total, self.free, self.starts = total, free, starts
        self.asked, self.counts = [], []
        self.util = self.exceptions = self.scheduling_strategies = self

    def init(self, **options):
        pass

    def cluster_resources(self):
        return {"CPU": 64.0, "GPU": float(self.total)}

    def placement_group(self, bundles, strategy):
        self.asked.append((bundles, strategy))
        return Room(bundles, sum(bundle["GPU"] for bundle in bundles) <= self.free)

    def remove_placement_group(self, room):
        pass

    def PlacementGroupSchedulingStrategy(self, room, index):
        return room

    def remote(self, **options):
        def of(target):
            return that_gives(self._actor if isinstance(target, type) else self._find_address)

        return of

    def get(self, value):
        return value

    def wait(self, values, timeout):
        return values, []

    def _find_address(self):
        self.counts.append(0)
        return "address:1"

    def _actor(self, *arguments):
        """If the code is that of a signal, the first one is lost, and the others fail for it."""
        code, self.free = self.starts[len(self.counts) - 1]
        if code > 128:
            code = 1 if self.counts[-1] else 128 - code
        self.counts[-1] += 1
        return types.SimpleNamespace(
            wait=that_gives(lambda: code), lines=that_gives(lambda name: []), send=that_gives(int)
        )


def that_gives(function):
    """What Ray calls a remote function."""
    return types.SimpleNamespace(remote=function)


def start(ray, monkeypatch, num_processes, min_processes):
    """The exit code of `launch` on it, with processes of 8 GPUs."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_NUM_REDIS_GET_RETRIES", "1")  # which is set where it is not
    words = ["--on", "ray", "--processes", str(num_processes), "--devices-per-process", "8"]
    if min_processes is not None:
        words += ["--elastic", "--min-processes", str(min_processes)]
    return api.command("launch", *words, "--", "train", "lm", "--train.out-dir", "nowhere")


# Exit codes of starts on a cluster of four nodes, and the GPUs that are free then; how many are started, and
# the exit code of all.
STARTS = {
    "all is well": (None, [(0, 32)], [4], 0),
    "not elastic": (None, [(137, 32)], [4], 137),
    "a node is lost": (1, [(137, 24), (0, 24)], [4, 3], 0),
    "a process dies": (1, [(137, 32), (0, 32)], [4, 4], 0),
    "and comes back": (1, [(137, 24), (137, 32), (0, 32)], [4, 3, 4], 0),
    "a number is refused": (1, [(137, 24), (2, 24), (0, 24)], [4, 3, 2], 0),
    "a mistake": (1, [(2, 32)], [4], 2),
    "not finite": (1, [(137, 24), (3, 24)], [4, 3], 3),
    "too few are left": (3, [(137, 16)], [4], 137),
}


@pytest.mark.parametrize("case", STARTS)
def test_as_many_processes_are_started_as_there_is_room_for(case, monkeypatch, capfd):
    min_processes, starts, counts, code = STARTS[case]
    ray = Ray(32, 32, starts)
    assert start(ray, monkeypatch, 4, min_processes) == code
    assert ray.counts == counts
    assert ray.asked[0] == ([{"GPU": 8}] * 4, "SPREAD")
    said = re.findall(r"continuing with (\d) of 4", capfd.readouterr().err)
    assert list(map(int, said)) == counts[1:]


def test_a_run_starts_with_fewer_if_there_is_no_room(monkeypatch, capfd):
    ray = Ray(32, 16, [(0, 16)])
    assert start(ray, monkeypatch, 4, 1) == 0
    assert ray.counts == [2]
    assert "beginning with 2 of 4 processes" in capfd.readouterr().err
    # Others have the devices; there are none; there are too few for the least.
    for ray, least, number in ((Ray(32, 8), None, 4), (Ray(8, 8), None, 4), (Ray(8, 8), 2, 2)):
        assert start(ray, monkeypatch, 4, least) == 2
        said = capfd.readouterr().err
        fact = f"no free devices for {number} processes with 8 devices each\nFix: add nodes"
        assert fact in said


MISTAKES = {
    "no command": ([], "got no command"),
    "no process": (["--processes", "0", "--", "train", "lm"], "use 1 or more of each"),
    "no folder": (["--elastic", "--", "train", "lm"], r"add --train\.out-dir FOLDER"),
    "no package": (["--", "train", "lm"], "--on ray needs the package ray\nFix: pip install ray"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    argv, message = MISTAKES[mistake]
    assert api.command("launch", "--on", "ray", *argv) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_cluster_that_is_not_there_is_told(monkeypatch, capsys):
    class Absent(Ray):
        def init(self, **options):
            raise ConnectionError("no running Ray instance")

    assert start(Absent(32, 32), monkeypatch, 4, None) == 2
    assert re.search(
        r"no cluster: .*\nFix: start one \(ray start --head\)", capsys.readouterr().err
    )


def test_signals_stay_with_the_launcher(monkeypatch):
    class Greedy(Ray):
        def init(self, **options):
            self.before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray does

        def cluster_resources(self):
            self.after = signal.getsignal(signal.SIGTERM)
            return super().cluster_resources()

    ray, handler = Greedy(32, 32, [(0, 32)]), signal.getsignal(signal.SIGTERM)
    try:
        assert start(ray, monkeypatch, 4, None) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ray.after is ray.before is not signal.SIG_DFL


# ---- a cluster ----


NODE = {"num_cpus": 1, "object_store_memory": STORE_BYTES}


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes with a CPU each, and a head without any."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", nodes.address)
        for _ in range(2):
            nodes.add_node(**NODE)
        yield nodes
        nodes.shutdown()


def launch_on_ray(*arguments):
    command = [sys.executable, "-m", "jaxpar", "launch", "--on", "ray", "--platform", "cpu"]
    return subprocess.Popen(
        [*command, "--processes", "2", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def processes():
    """The id, the parent's id and the command line of each that runs."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [row.split(None, 2) for row in listed.stdout.splitlines()]
    return [(int(pid), int(parent), args) for pid, parent, args in rows]


def processes_in(folder):
    """The ids, and those of the parents, of a run's processes; the launcher is not one of them."""
    return {
        pid: parent
        for pid, parent, args in processes()
        if str(folder) in args and " launch " not in args
    }


@pytest.mark.law
@pytest.mark.full
def test_a_run_goes_on_with_fewer_nodes_and_with_more(text, tmp_path, cluster):
    """A node is lost, and another comes, which the next start takes; the losses are those of one device."""
    out_dir = tmp_path / "run"
    process = launch_on_ray("--elastic", "--", *flags(text, out_dir, 1_000_000, "--mesh", "dp2"))
    watchdog = threading.Timer(END_SECONDS, process.kill)
    watchdog.start()
    read_until(process, r"^\[0\] step +12/")
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    said = "".join(read_until(process, r"resumed at step \d+;"))
    assert "of 2 was killed by SIGKILL, or its machine was lost; the others were ended\n" in said
    assert "continuing with 1 of 2 processes\n" in said
    assert "dp2 does not fit 1 devices; dp1 is the fastest" in said
    cluster.add_node(**NODE)
    # Of any number: the run may have come far before the node was lost.
    read_until(process, r"^\[0\] step ")
    found = processes_in(out_dir)  # with what guards them, their children
    [actor] = {*found.values()} - {*found}
    os.kill(actor, signal.SIGKILL)
    said = "".join(read_until(process, r"^\[0\] mesh "))
    assert "continuing with 2 of 2 processes\n" in said
    assert said.endswith("mesh        data=2 x stage=1 x tensor=1\n")
    read_until(process, r"^\[0\] step ")
    process.terminate()
    read_until(process, r"stopped by SIGTERM")
    process.communicate(timeout=END_SECONDS)
    watchdog.cancel()
    assert process.returncode == 128 + signal.SIGTERM
    losses = train_losses(out_dir)
    assert [path.name for path in (out_dir / "checkpoints").iterdir()].count(str(len(losses))) == 1
    assert api.command(*flags(text, tmp_path / "one", len(losses), "--devices", "0")) == 0
    assert losses == pytest.approx(train_losses(tmp_path / "one"), rel=RELATIVE_TOLERANCE)


@pytest.mark.full
def test_nothing_is_left_of_a_launcher_that_was_killed(text, tmp_path, cluster):
    process = launch_on_ray("--", *flags(text, tmp_path / "run", 1_000_000, "--mesh", "dp2"))
    read_until(process, r"^\[0\] step +2/")
    assert len(processes_in(tmp_path)) >= 2
    process.kill()
    process.communicate()
    until = time.monotonic() + GONE_SECONDS
    while left := processes_in(tmp_path):
        assert time.monotonic() < until, left
        time.sleep(0.1)


@pytest.mark.full
def test_a_folder_that_a_node_lacks_is_refused(cluster):
    program = (
        "import os, runpy\n"
        "os.getcwd = lambda: '/no/such/folder'\n"
        "runpy.run_module('jaxpar', run_name='__main__')\n"
    )
    command = ["launch", "--on", "ray", "--platform", "cpu", "--elastic", "--", "train", "lm"]
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--train.out-dir", "x"],
        capture_output=True, text=True, timeout=END_SECONDS,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: a process cannot start: .*/no/such/folder", done.stderr, re.S | re.M)
