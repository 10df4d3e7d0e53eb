"""Processes that are watched to their end: which was the first cause, and what they say."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lib import api

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
