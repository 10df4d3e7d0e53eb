"""Every test that needs no GPU is run by some part of `.ci/run`, all rows in the end."""

import collections
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import drawn

ROOT = Path(__file__).parent.parent
# Collects all tests, and prints the name and the marks of each.
COLLECTS = """
import json, sys, pytest

class Printer:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        print(json.dumps([(item.nodeid, [mark.name for mark in item.iter_markers()]) for item in items]))

sys.exit(pytest.main(["--collect-only", "-qq", "-n", "0", "-m", "", sys.argv[1]], plugins=[Printer()]))
"""


def selections():
    """What the parts of `.ci/run` select by marks alone: in which files, and the expression of `-m`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    default = settings["addopts"][settings["addopts"].index("-m") + 1]
    yield "", default  # the README's command
    text = (ROOT / ".ci/run").read_text().replace("\\\n", " ")
    for line in re.findall(r'^ *(?:XLA_FLAGS="" )?tests (.*)$', text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        if not {"-k", "--rows", "--ignore"} & {*words}:
            files = [word for word in words if word.startswith("tests/")]
            yield tuple(files) or "", words[words.index("-m") + 1] if "-m" in words else default


@pytest.mark.full
def test_every_test_but_those_of_gpus_is_run():
    run = subprocess.run(
        [sys.executable, "-c", COLLECTS, ROOT / "tests"], env=os.environ | {"PYTEST_ADDOPTS": ""},
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    [found] = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[[")]
    parts = [*selections()]
    assert len(parts) == 4, parts
    count = collections.Counter()
    for name, marks in found:
        holds = collections.defaultdict(bool, dict.fromkeys(marks, True))
        runs = [name.startswith(files) and eval(rule, {}, holds) for files, rule in parts]
        assert sum(runs) == (not holds["gpu"]), (name, marks)
        count.update(n for n, each in enumerate(runs) if each)
    assert min(count.values()) > 10
    assert sum(count.values()) > 6000


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
