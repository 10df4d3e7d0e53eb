"""Runs notebooks from top to bottom and stores what they show: `python notebooks/run.py [1 2 ...]`.

Each is a pair, kept by jupytext: N_name.py, to read and to edit, and N_name.ipynb, with its outputs.
"""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def sources(numbers: Iterable[str] = ()) -> list[Path]:
    """The .py files, of all or of some."""
    return [f for f in sorted(FOLDER.glob("[0-9]_*.py")) if f.name[0] in numbers or not numbers]


def execute(source: Path, folder: str | Path) -> Any:
    """The notebook of a .py file with its outputs.

    Args:
      folder: where its kernel writes.
    Raises:
      nbclient.exceptions.CellExecutionError: a cell fails.
    """
    notebook = jupytext.read(source)
    NotebookClient(
        notebook, timeout=3600, startup_timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()  # fmt: skip
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Without what differs from run to run; drawings as SVG, which code hosts show, not as HTML."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", ()):
            if "image/svg+xml" in output.get("data", ()):
                output.data.pop("text/html")
    notebook.metadata.pop("language_info", None)
    return notebook


def joined(outputs: Iterable[Any]) -> list[Any]:
    """Outputs, with what a cell prints in one piece; in how many it comes depends on the clock."""
    found: list[Any] = []
    for output in outputs:
        if found and output.get("name", "") == found[-1].get("name") == "stdout":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


if __name__ == "__main__":
    for source in sources(sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(source, folder), source.with_suffix(".ipynb"))
        print(source.with_suffix(".ipynb"))
