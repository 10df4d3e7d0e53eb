"""What `.ci/run` draws of the tests."""

import collections

from conftest import drawn


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
