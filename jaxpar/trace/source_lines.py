"""The user's line that a traced program, a compiled one or an error comes from: "forecast.py, line 33"."""

import functools
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import flax
import jax
from jax.extend.core import JaxprEqn

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
        *(Path(str(module.__file__)).parent for module in (jax, flax)),
        _PACKAGE,
    )
)
# These modules call the user's functions. Frames further out, such as that of `fit`, are not part of them.
CALLERS = {
    str(_PACKAGE / name)
    for name in (
        *("model/facts.py", "model/traced.py", "model/tracing.py"),
        *("partition/storage.py", "step/parts.py", "step/trial.py"),
    )
}

# Lines of the tables in a compiled program's text, such as 2 {file_location_id=1 parent_frame_id=2}.
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_ENTRY = re.compile(r"^(\d+) \{\w+=(\d+) \w+=(\d+)(?: line=(\d+))?", re.MULTILINE)


def source_line_of_error(error: BaseException) -> str:
    """The line of a caught error; "" if it comes through no line of the user's."""
    frames = traceback.walk_tb(error.__traceback__)
    return _first_of_user([(frame.f_code.co_filename, line) for frame, line in frames][::-1])


def source_line_here() -> str:
    """The line that runs; "" if it is not the user's."""
    frames = traceback.walk_stack(None)
    return _first_of_user((frame.f_code.co_filename, line) for frame, line in frames)


def source_line_of_equation(eqn: JaxprEqn) -> str:
    """The line of an equation of a traced program; "" if it is not the user's."""
    found = eqn.source_info.traceback
    frames = found.frames if found else ()
    return _first_of_user((frame.file_name, frame.line_num) for frame in frames)


def source_line_of_instruction(text: str, frame: int) -> str:
    """The line of an instruction, by the text of its compiled program and its `stack_frame_id`."""
    return _first_of_user(frames_of(text, frame))


def frames_of(text: str, frame: int) -> Iterator[tuple[str, int]]:
    """Files and lines of a frame of a compiled program and of those around it, the innermost first."""
    table = _frames(text)
    base = table.get(1, (("", 0), 0))[1]  # what the first one has for none around it
    while frame in table:
        file_and_line, around = table[frame]
        yield file_and_line
        frame = around - base


@functools.lru_cache(maxsize=1)
def _frames(text: str) -> dict[int, tuple[tuple[str, int], int]]:
    """Number of a frame -> its file and line, and the number of the frame around it."""
    names, _, rest = text.partition("\nFileNames\n")[2].partition("\nFileLocations\n")
    locations, _, frames = rest.partition("\nStackFrames\n")
    files = dict(_FILE.findall(names.partition("\nFunctionNames\n")[0]))
    lines = {n: (files.get(file, ""), int(line)) for n, file, _, line in _ENTRY.findall(locations)}
    entries = _ENTRY.findall(frames)
    return {int(n): (lines.get(at, ("", 0)), int(around)) for n, at, around, _ in entries}


def _first_of_user(frames: Iterable[tuple[str, int]]) -> str:
    """The user's line among frames, the innermost first."""
    for file, line in frames:
        if file in CALLERS:
            break
        if file and not file.startswith(_LIBRARIES):
            return f"{Path(file).name}, line {line}"
    return ""
