"""Processes that are watched to their end: which was the first cause, and what they say."""

import contextlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lib import api

from jaxpar.hosts import launch
from jaxpar.hosts.launch import _Watch


def test_a_reader_that_goes_away_ends_nothing_but_the_printing():
    """More lines than wait in a pipe are taken from a process when nobody reads them any more."""
    program = (
        "import errno, io, sys; from jaxpar.base import output; from jaxpar.hosts.launch import _relay\n"
        "output.keep_printing(); output.DROPPED.add(errno.EPIPE)\n"
        "lines = io.StringIO('a line of a run\\n' * 100_000)\n"
        "_relay(0, lines, sys.stdout)\n"
        "print(lines.tell() == len(lines.getvalue()), file=sys.stderr)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "[0] a line of a run\n"
    process.stdout.close()
    assert process.stderr.read() == "warning: printed output is lost: Broken pipe\nTrue\n"
    assert process.wait(60) == 0
    process.stderr.close()


# Ends of three processes in their order, as (number, return code); the exit code, how many were lost, and
# who is named.
CAUSES = {
    "killed": ([(1, -9), (0, 1), (2, -6)], 137, 1, "process 1 of 3 was killed by SIGKILL"),
    "killed, but others are faster": (
        [(0, 1), (2, -6), (1, -9)], 137, 1, "process 1 of 3 was killed by SIGKILL"
    ),
    "two are killed": ([(0, 1), (1, -9), (2, -9)], 137, 2, "process 1 of 3 was killed by SIGKILL"),
    "an error": ([(2, 1), (0, -6), (1, 0)], 1, 1, "process 2 of 3 ended with exit code 1"),
    "a refusal": ([(0, 2), (1, 2), (2, 2)], 2, 1, "process 0 of 3 ended with exit code 2"),
    "none": ([(0, 0), (1, 0), (2, 0)], 0, 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_the_first_cause_is_named(case, capfd):
    ends, code, num_lost, named = CAUSES[case]

    class Ended:
        stdout = stderr = ()
        pid = -1

        def __init__(self, number):
            self.number = number

        def poll(self):
            """One after the other."""
            place = [number for number, _ in ends].index(self.number)
            return ends[place][1] if len(watch._ends) >= place else None

        def send_signal(self, number):
            raise AssertionError("all have ended")

    watch = _Watch([Ended(number) for number in range(3)], [], 0.5)
    assert watch.wait() == (code, num_lost)
    said = capfd.readouterr().err
    assert said == (f"error: {named}; the others were ended\n" if named else "")


def test_what_a_process_leaves_behind_is_not_waited_for():
    """Something that it started may hold its output open."""
    reading, writing = os.pipe()
    with api.processes_have_seconds_to_end(0.2), open(reading) as output:
        with open(writing, "w"):
            ended = SimpleNamespace(stdout=output, stderr=(), poll=lambda: 0)
            watch = _Watch([ended], [], 0.5)
            assert watch.wait() == (0, 0)
            assert any(reader.is_alive() for reader in watch._readers)
        for reader in watch._readers:
            reader.join()


# ---- processes that are lost ----

COMMAND = ["train", "lm", "--train.out-dir", "nowhere"]


ENDS = {
    "all is well": ([(0, 0)], {}, [3], 0),
    "one dies": ([(137, 1), (0, 0)], {}, [3, 2], 0),
    "two die": ([(137, 2), (0, 0)], {}, [3, 1], 0),
    "one after the other": ([(137, 1), (134, 1), (0, 0)], {}, [3, 2, 1], 0),
    "a number is refused": ([(137, 1), (2, 1), (0, 0)], {}, [3, 2, 1], 0),
    "a mistake": ([(2, 1)], {}, [3], 2),
    "not finite": ([(137, 1), (3, 1)], {}, [3, 2], 3),
    "all die": ([(137, 1), (137, 1), (139, 1)], {}, [3, 2, 1], 139),
    "too few are left": ([(137, 1), (137, 1)], {"min_processes": 2}, [3, 2], 137),
    "not elastic": ([(137, 1)], {"elastic": False}, [3], 137),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_as_many_processes_as_are_left_are_started(case, monkeypatch, capfd):
    ends, options, expected, code = ENDS[case]
    started = []

    class Launcher(launch.Launcher):
        @contextlib.contextmanager
        def start(self, command, count, devices):
            more = ["--elastic", "--resume-or-begin"] if options.get("elastic", True) else []
            assert command == COMMAND + more
            started.append(count)
            yield []

    monkeypatch.setattr(launch, "Launcher", Launcher)
    monkeypatch.setattr(launch._Watch, "wait", lambda self: ends[len(started) - 1])
    assert launch.launch(COMMAND, 3, 1, **{"elastic": True, **options}) == code
    assert started == expected
    said = capfd.readouterr().err
    assert [int(n) for n in re.findall(r"continuing with (\d) of 3 processes", said)] == expected[
        1:
    ]
    told = "too few of 3 processes are left (--min-processes 2)"
    assert (told in said) == (case == "too few are left")


def test_a_run_that_always_fails_is_given_up(monkeypatch, capfd):
    """A launcher that finds other machines starts as many processes as before."""
    started = []

    class Launcher(launch.Launcher):
        @contextlib.contextmanager
        def start(self, command, count, devices):
            started.append(count)
            yield []

    monkeypatch.setattr(launch._Watch, "wait", lambda self: (137, 1))
    assert launch.launch(COMMAND, 3, 1, elastic=True, launcher=Launcher()) == 137
    assert started == [3] * (1 + launch.MAX_RESTARTS)
    assert capfd.readouterr().err.count("continuing with 3 of 3 processes\n") == launch.MAX_RESTARTS


def test_every_start_resumes_what_has_begun():
    for command in (["train", "--train.out-dir", "run"], ["train", "--train.out_dir=run"]):
        more = ["--elastic", "--resume-or-begin"]
        assert launch.elastic_command(command, 3, 1) == [*command, *more]
        command = [*command, "--resume"]
        assert launch.elastic_command(command, 3, 1) == [*command, "--elastic"]
        with pytest.raises(
            ValueError, match="--overwrite would remove an elastic run at every start"
        ):
            launch.elastic_command([*command, "--overwrite"], 3, 1)
