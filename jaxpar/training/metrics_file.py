"""metrics.jsonl, as anybody may have left it."""

import logging
from pathlib import Path
from typing import Any

from jaxpar.base.files import read_file, read_json
from jaxpar.training.record import REMEDY

_NAMED = 3  # lines that a message names

_log = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics; none if there is no such file.

    Lines that no run writes are passed over with a warning; a last one that a killed process left
    unfinished without.
    """
    if not path.exists():
        return []
    # The last is b"" after a whole line.
    *contents, _ = read_file(path, remedy=REMEDY).split(b"\n")
    lines = [_from_line(content) for content in contents]
    if bad := [str(number) for number, line in enumerate(lines, 1) if line is None]:
        _log.warning(
            "%s: line %s is not what a run writes, and passed over; bring the file back from a copy, or "
            "remove what is wrong",
            path,
            ", ".join(bad[:_NAMED]) + ", ..." * (len(bad) > _NAMED),
        )
    return [line for line in lines if line is not None]


def _from_line(content: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is none that a run writes."""
    try:
        line = read_json(content)
    except ValueError:
        return None
    if type(line.get("step")) is not int:
        return None
    split, loss = line.get("split"), line.get("loss")
    of_split = split in ("train", "valid", "test") and type(loss) in (int, float)
    return line if of_split or split == "skipped" else None
