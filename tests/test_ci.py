"""What `.ci/run` runs and draws of the tests."""

import collections
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import drawn

ROOT = Path(__file__).parent.parent
# Prints the marks of each test: after all other hooks, and before -m selects.
MARKS = """
import json, pytest, sys

class Marks:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in session.items}
        print("\\nMARKS" + json.dumps(marks))

sys.exit(pytest.main(["-q", "--collect-only", "-m", "", "-n", "0"], [Marks()]))
"""


class Row:
    def __init__(self, name):
        self.nodeid = name


def test_a_seed_draws_one_row_of_each_table_and_other_seeds_others():
    rows = [Row("tests/test_one.py::test_alone")] + [Row(f"test_table[{n}]") for n in range(20)]
    taken = collections.Counter()
    for seed in range(400):
        alone, row = sorted(row.nodeid for row in drawn(rows, 1, seed))[::-1]
        assert alone == rows[0].nodeid
        taken[row] += 1
    assert len(taken) == 20
    assert max(taken.values()) < 50
    assert drawn(rows, 1, 7) == drawn(rows[::-1], 1, 7)


def is_chosen(expression, marks):
    """Whether `-m` chooses a test with these marks."""
    return eval(expression, {}, collections.defaultdict(bool, dict.fromkeys(marks, True)))


@pytest.mark.full
def test_every_test_but_those_of_gpus_is_run():
    script = (ROOT / ".ci" / "run").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    parts = [settings["addopts"][settings["addopts"].index("-m") + 1]]  # the README's command
    # Of whole parts, not of choices within one: no -k, no --rows, no files but that of those tests.
    parts += re.findall(
        r'^ *(?:XLA_FLAGS="" )?tests -m "?([^"\n]+?)"?(?: tests/test_aot\.py| #.*)?$', script, re.M
    )
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MARKS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = [line for line in done.stdout.splitlines() if line.startswith("MARKS")]
    tests = json.loads(found.removeprefix("MARKS"))
    assert len(tests) > 5000
    chosen = {
        part: {name for name, marks in tests.items() if is_chosen(part, marks)} for part in parts
    }
    assert len(chosen) == 4
    assert all(chosen.values())
    gpu = {name for name, marks in tests.items() if "gpu" in marks}
    assert tests.keys() - gpu == set().union(*chosen.values())
    of_aot = {name for name, marks in tests.items() if "aot" in marks}
    assert {name.partition("::")[0] for name in of_aot} == {"tests/test_aot.py"}
