"""The notebooks run from top to bottom, say what was learned, and show what they show."""

import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "notebooks"))

from run import execute, sources  # noqa: E402

NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sources()]
MARKS = dict(zip("34567", ("slow", "slow", "slow", "full", "slow"), strict=True))  # what takes long
RUN = [*NOTEBOOKS[:2]] + [
    pytest.param(path, id=path.stem, marks=getattr(pytest.mark, MARKS[path.name[0]]))
    for path in sources()[2:]
]


def test_there_are_seven():
    assert [path.name[0] for path in sources()] == list("1234567")


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_pair_says_the_same_and_ends_with_what_was_learned(path):
    text, stored = jupytext.read(path), nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in stored.cells
    ]
    assert len(text.cells) < 20
    assert text.cells[-1].source.startswith("## What was learned\n")


def kinds(cell):
    """What the outputs of a cell are: printed, or shown as which types. Numbers differ from run to run."""
    for output in cell.get("outputs", ()):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text
    return [output.get("name") or sorted(output.data) for output in cell.get("outputs", ())]


@pytest.mark.parametrize("path", RUN)
def test_a_notebook_runs_and_shows_what_is_stored(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = execute(path, tmp_path)
    stored = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert sum(map(bool, map(kinds, stored.cells))) >= 4
    for was, now in zip(stored.cells, done.cells, strict=True):
        assert kinds(was) == kinds(now), now.source
