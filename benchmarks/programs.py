"""Stores the programs of training steps, and compares those of changed code with them.

    python -m benchmarks.programs store FOLDER [--only PART_OF_NAMES]
    python -m benchmarks.programs compare FOLDER [--only PART_OF_NAMES]

Code that only moves leaves every program as it is. Programs are lowered, not compiled, for the tables of
`program_tables.py`: meshes, schedules, storage, layers, models and optimizers. What a program is given of its
schedule comes after its text. Places in files and names of functions are left out. With update="host", a
program ends with the gradients.
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import gzip
import hashlib
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import jaxpar
from benchmarks.program_tables import TABLES, Table, Training
from jaxpar.model.facts import ModelFacts
from jaxpar.step.functions import make_train_step
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state
from jaxpar.step.step import abstract_batch

MOST_LINES = 12  # of a difference that is printed


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered step; `text` says why there is none if it failed."""

    name: str
    text: str
    failed: bool = False

    @property
    def digest(self) -> str:
        """The same for equal texts alone."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def line(self, result: str) -> str:
        """What is printed of it: a word, its name, and why it failed if it did."""
        reason = self.text if self.failed else ""
        return f"{result:8} {self.name} {reason}".rstrip()


# ---- programs ----


def lower_programs(part: str) -> Iterator[Program]:
    """Each program with this part in its name."""
    names = set()
    for table in TABLES:
        facts_of = functools.lru_cache(4)(ModelFacts.of)  # of a task, as long as constants stay
        with constants_set(table.constants):
            for row in table.rows:
                name = name_of(table, row)
                assert name not in names, name
                names.add(name)
                if part in name:
                    yield lower_program(name, table, row, facts_of)


def name_of(table: Table, row: Mapping[str, Any]) -> str:
    """The name of the table, and fields and values of the row, as one word."""
    fields = ",".join(f"{field} {value}" for field, value in row.items())
    return re.sub(r"[^\w.]+", "_", f"{table.name} {fields}").strip("_")


@contextlib.contextmanager
def constants_set(constants: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile, what is at these places in jaxpar has these values."""
    with contextlib.ExitStack() as stack:
        for place, value in constants.items():
            stack.enter_context(mock.patch(place, value))
        yield


def lower_program(name: str, table: Table, row: Mapping[str, Any], facts_of) -> Program:
    """The program of a row; one that fails does not stop the others."""
    try:
        training = table.make(**row)
        return Program(name, lower(training, facts_of(training.task)))
    except Exception as error:
        return Program(name, f"failed: {type(error).__name__}: {error}\n", failed=True)


def lower(training: Training, facts: ModelFacts) -> str:
    """The text of a step, without what may change when code moves, and the tables that it is given."""
    setup = Setup.of(training.task, training.parallel, training.train, facts=facts)
    step = make_train_step(setup)
    text = step.lower(abstract_state(setup), abstract_batch(setup)).as_text()
    tables = [f"// {table.dtype} {table.tolist()}\n" for table in jax.tree.leaves(step.full_table)]
    return without_places_and_names(text) + "".join(tables)


def without_places_and_names(text: str) -> str:
    """A program without places in files, with numbers instead of the names of its functions."""
    text = re.sub(r"^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)", "", text, flags=re.MULTILINE)
    private_names = re.findall(r"func\.func private @([\w.$-]+)", text)
    new_names = {f"@{name}": f"@f{number}" for number, name in enumerate(private_names)}
    text = re.sub(r"@[\w.$-]+", lambda match: new_names.get(match[0], match[0]), text)
    return re.sub(r"^module @\S+", "module", text)


# ---- the folder ----


@dataclasses.dataclass(frozen=True)
class ProgramFolder:
    """A folder of programs; its index has the digest of each, by name."""

    folder: Path

    def read_index(self) -> dict[str, str]:
        """The digests; none of a new folder."""
        path = self.folder / "index.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write_index(self, index: Mapping[str, str]) -> None:
        """Stores the digests, sorted by name."""
        path = self.folder / "index.json"
        path.write_text(json.dumps(index, indent=1, sort_keys=True))

    def read(self, name: str) -> str:
        """The text of a program."""
        return gzip.decompress(self._path(name).read_bytes()).decode()

    def write(self, program: Program) -> None:
        """Stores the text of a program; equal texts make equal files."""
        self._path(program.name).write_bytes(gzip.compress(program.text.encode(), 6, mtime=0))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.txt.gz"


def store(folder: Path, part: str = "") -> bool:
    """Stores programs; whether all could be lowered."""
    begin = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    files = ProgramFolder(folder)
    index = {name: digest for name, digest in files.read_index().items() if part not in name}
    num_stored = num_failed = 0
    for program in lower_programs(part):
        print(program.line("stored"), flush=True)
        files.write(program)
        index[program.name] = program.digest
        num_stored += 1
        num_failed += program.failed
    files.write_index(index)
    print(f"{num_stored} programs, {num_failed} failed, in {time.monotonic() - begin:.0f} s")
    return num_failed == 0


def compare(folder: Path, part: str = "") -> bool:
    """Compares programs with those stored; whether all that are stored are the same.

    A program that is not stored is new. There is nothing to compare it with, so it counts for nothing.
    """
    begin = time.monotonic()
    files = ProgramFolder(folder)
    stored = {name: digest for name, digest in files.read_index().items() if part in name}
    gone = set(stored)
    counts = Counter()
    for program in lower_programs(part):
        gone.discard(program.name)
        if program.name not in stored:
            result = "new"
        elif program.digest == stored[program.name]:
            result = "same"
        else:
            result = "differs"
        counts[result] += 1
        print(program.line(result), flush=True)
        if result == "differs":
            print_difference(files.read(program.name), program.text)
    for name in sorted(gone):
        print(f"gone     {name}")
    print(
        f"{counts['same']} same, {counts['differs']} differ, {len(gone)} gone, {counts['new']} new, "
        f"in {time.monotonic() - begin:.0f} s"
    )
    return 0 < counts["same"] == len(stored)


def print_difference(before: str, after: str) -> None:
    """The first lines that differ by more than the numbers of their values."""
    lines = difflib.unified_diff(
        without_numbers(before), without_numbers(after), "stored", "now", n=1, lineterm=""
    )
    for line in itertools.islice(lines, MOST_LINES):
        print(f"    {line[:200]}")


def without_numbers(text: str) -> list[str]:
    """The lines of a program whose values are not numbered."""
    return re.sub(r"%[\w#:]+", "%", text).splitlines()


def main() -> None:
    """Exits with 1 if a program could not be lowered, or is not as it is stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["store", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of programs")
    arguments = parser.parse_args()
    jaxpar.simulate_devices(8)
    run = {"store": store, "compare": compare}[arguments.command]
    sys.exit(0 if run(arguments.folder, arguments.only) else 1)


if __name__ == "__main__":
    main()
