"""What processes tell each other: who differs in what, and what fails in one of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from lib import api

from jaxpar.hosts.agree import describe_processes, differences

END_SECONDS = 120  # which only a process that hangs takes


def test_differences_name_the_field_and_every_value():
    facts = {n: {"train.seed": "0", "data": "a"} for n in range(4)}
    assert differences(facts) == ""
    facts[1]["train.seed"] = "7"
    del facts[3]["data"]
    assert differences(facts) == (
        "train.seed is 0 in processes 0, 2, 3, 7 in process 1; "
        "data is a in processes 0, 1, 2, not there in process 3"
    )


def test_many_differences_are_counted():
    facts = {n: {f"field {i}": str(n) for i in range(8)} for n in range(2)}
    assert differences(facts).endswith("field 4 is 0 in process 0, 1 in process 1; 3 more")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "process 3"), ([0, 1], "processes 0, 1"), ([0, 1, 2, 5], "processes 0, 1, 2, 5")],
)
def test_processes_are_named_in_words(numbers, text):
    assert describe_processes(numbers) == text


ALONE = """
from jaxpar.hosts import agree
agree.await_agreement()
print(agree.tell_failure("a mistake"))
"""


def test_a_process_that_runs_alone_tells_nobody_of_its_failure():
    """As the only pod of a job does, once it has joined its group of one."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


TOGETHER = """
import jax
from jaxpar.hosts.agree import SharedError, in_process_0, together
from lib import api

api.start_processes()
index = jax.process_index()
print(in_process_0(lambda: ["found", index]))
try:
    together(lambda: 1 / index)
except SharedError as error:
    print(error, type(error.__cause__).__name__)
print(together(lambda: index))
"""


@pytest.mark.full
def test_what_one_process_finds_and_what_fails_in_it_is_so_in_all():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER], env=environ, cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for environ in api.environments(2, 1)
    ]  # fmt: skip
    said = [process.communicate(timeout=END_SECONDS)[0].splitlines() for process in processes]
    for index, cause in enumerate(("ZeroDivisionError", "NoneType")):
        assert said[index] == ["['found', 0]", f"process 0: division by zero {cause}", str(index)]
