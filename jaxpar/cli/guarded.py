"""Runs commands that compile for other machines in a child process, because such a compiler can crash.

The child keeps a file for each program while it compiles it. If the child crashes, the command runs again
without the programs whose files are left, so a plan continues with the others.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxpar.planning.compiled import ONE_BY_ONE
from jaxpar.planning.compiled import WATCHED as WATCHED

_MOST_TRIES = 30
_DUMP = re.compile(r"[EF]\d{4} \d\d:|\*\*\* |Fatal Python error")  # how the words of a crash begin


def run_guarded(command: Sequence[str], machine: str) -> int:
    """Runs a command until it ends by itself; the exit code.

    Raises:
      ValueError: its process was ended by a signal while nothing was compiled, or too often.
    """
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder)
        for _ in range(_MOST_TRIES):
            before = {*notes.iterdir()}
            code = _relay(command, folder)
            if code >= 0:
                return code
            left = {*notes.iterdir()} - before
            if not left:
                break
            if len(left) > 1:  # which of them it was is not known
                for note in left:
                    note.unlink()
                (notes / ONE_BY_ONE).touch()
    raise ValueError(
        f"the compiler for {machine} ended its process ({signal.Signals(-code).name})\n"
        f"Fix: name another machine, such as v5e:4x8, or install another version of its compiler."
    )


def _relay(command: Sequence[str], folder: str) -> int:
    """Runs a command once, and passes on what it says on stderr, without the words of a crash."""
    environ, held = {**os.environ, WATCHED: folder}, list[str]()
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if held or _DUMP.match(line):
                held.append(line)
            else:
                print(line, end="", file=sys.stderr, flush=True)
    if child.returncode >= 0:
        print(*held, sep="", end="", file=sys.stderr, flush=True)
    return child.returncode
