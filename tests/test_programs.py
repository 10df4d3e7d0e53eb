"""The programs that redesigns are measured with: they need no test, and a changed one is seen."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import programs
from benchmarks.program_tables import TABLES

ROOT = Path(__file__).parent.parent
TAPER = "taper_sizes_1_1_1"

# Imports them and makes what they train, and prints the files of tests that this takes.
MAKE_ALL = """
import sys
from pathlib import Path

from benchmarks import programs

for table in programs.TABLES:
    for row in table.rows:
        table.make(**row)
files = [Path(module.__file__) for module in sys.modules.values() if getattr(module, "__file__", None)]
print(*[file for file in files if Path("tests").resolve() in file.resolve().parents])
"""


def test_programs_need_nothing_of_the_tests():
    command = [sys.executable, "-c", MAKE_ALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def change_table(monkeypatch, table_name, **fields):
    tables = []
    for table in TABLES:
        is_changed = table.name == table_name
        tables.append(dataclasses.replace(table, **fields) if is_changed else table)
    monkeypatch.setattr(programs, "TABLES", tables)


@pytest.fixture
def stored(tmp_path):
    assert programs.store(tmp_path, TAPER)
    return tmp_path


def test_a_program_is_the_same_as_itself(stored, capsys):
    assert programs.compare(stored, TAPER)
    assert (
        "same     taper_sizes_1_1_1_pipeline\n1 same, 0 differ, 0 gone, 0 new"
        in capsys.readouterr().out
    )


def test_another_program_of_its_name_differs(stored, monkeypatch, capsys):
    [timeless] = [table for table in TABLES if table.name == "timeless"]
    change_table(monkeypatch, "taper", make=lambda **row: timeless.make(mesh=(1, 1, 1)))
    assert not programs.compare(stored, TAPER)
    printed = capsys.readouterr().out
    assert "differs  taper_sizes_1_1_1_pipeline\n    --- stored\n    +++ now\n" in printed
    assert "0 same, 1 differ, 0 gone, 0 new" in printed


def test_programs_that_are_gone_or_new_are_told(stored, monkeypatch, capsys):
    change_table(monkeypatch, "taper", name="tapered")
    assert not programs.compare(stored, "sizes_1_1_1")
    printed = capsys.readouterr().out
    assert "new      tapered_sizes_1_1_1_pipeline\n" in printed
    assert "gone     taper_sizes_1_1_1_pipeline\n" in printed
    assert "0 same, 0 differ, 1 gone, 1 new" in printed


def test_where_nothing_is_stored_nothing_is_the_same(tmp_path, capsys):
    assert not programs.compare(tmp_path, TAPER)
    assert "0 same, 0 differ, 0 gone, 1 new" in capsys.readouterr().out


def test_a_program_that_fails_is_told_and_the_others_are_lowered(tmp_path, monkeypatch, capsys):
    def refuse(**row):
        raise ValueError("no such mesh")

    change_table(monkeypatch, "taper", make=refuse)
    assert not programs.store(tmp_path, TAPER)
    printed = capsys.readouterr().out
    assert "stored   taper_sizes_1_1_1_pipeline failed: ValueError: no such mesh\n" in printed
    assert "1 programs, 1 failed" in printed
