"""A compiler that ends its process ends no plan: with children that are ended by a signal."""

import subprocess
import sys

import pytest
from lib import api

from jaxpar.cli.guarded import WATCHED, run_guarded

# Compiles three programs, two at once unless it is told otherwise; the second one ends the process.
CHILD = """
import os, signal, sys
from pathlib import Path
folder = Path(os.environ["JAXPAR_COMPILES"])
together = [["a", "b"], ["c"]] if not (folder / "one").exists() else [["a"], ["b"], ["c"]]
for names in together:
    own = [name for name in names if not (folder / name).exists()]
    for name in own:
        (folder / name).touch()
    if "b" in own:
        print("F1128 10:00:00.0 compiler.cc:1] a check failed", file=sys.stderr)
        print("    @ 0x7f00 somewhere()", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    for name in own:
        (folder / name).unlink()
    print("compiled", *own, file=sys.stderr, flush=True)
"""


def test_a_program_that_ends_its_process_is_left_out(capfd):
    assert run_guarded([sys.executable, "-c", CHILD], "v5e:2x2") == 0
    said = capfd.readouterr().err.splitlines()
    assert said[-3:] == ["compiled a", "compiled", "compiled c"]
    assert not any("0x7f00" in line or line.startswith("F1128") for line in said)


def test_a_process_that_ends_elsewhere_is_an_error(capfd):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    with pytest.raises(ValueError, match=r"the compiler for v5e:2x2 ended its process \(SIGABRT\)"):
        run_guarded([sys.executable, "-c", code], "v5e:2x2")


def test_exit_codes_and_words_are_the_child_s(capfd):
    code = "import sys; print('F1128 10:00 said', file=sys.stderr); print('shown'); sys.exit(2)"
    assert run_guarded([sys.executable, "-c", code], "v5e:2x2") == 2
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("shown\n", "F1128 10:00 said\n")


@pytest.mark.full
def test_a_command_for_another_machine_runs_in_a_child(monkeypatch, capfd):
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, command, **options):
            started.append(command)
            super().__init__(command, **options)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.delenv(WATCHED)
    words = ["inspect", "lm", "--vocab-size", "96", "--machine", "h100:1x1x0"]
    assert api.command(*words) == 2
    assert capfd.readouterr().err.startswith("error: machine 'h100:1x1x0': must be one of")
    [command] = started
    assert command[-len(words) :] == words
