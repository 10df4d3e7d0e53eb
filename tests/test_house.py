"""The layout of the package, and what each part of it may know."""

import ast
import re
from pathlib import Path

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_few_files_are_loose():
    assert {n for n in SOURCES if "/" not in n} - {"__init__.py", "__main__.py"} == {
        "config.py", "mesh.py", "sharding.py",
    }  # fmt: skip


def test_few_files_know_pools():
    word = re.compile(r"\b[Pp]ool(s|ed)?\b|POOL_")
    assert {name for name, text in SOURCES.items() if word.search(text)} == {
        "base/axes.py", "partition/packing.py", "partition/partition.py", "partition/pool.py",
        "partition/storage.py",
    }  # fmt: skip


def test_the_engine_knows_nothing_of_the_search_for_numbers_that_are_not_finite():
    word = re.compile(r"nonfinite|not finite|isfinite|find_origin|\bwrap=", re.IGNORECASE)
    names = [n for n in SOURCES if n.startswith("pipeline/") or n == "step/forward.py"]
    assert len(names) > 10
    assert [name for name in names if word.search(SOURCES[name])] == []


def test_types_say_something():
    assert sum(len(re.findall(r"\bAny\b", text)) for text in SOURCES.values()) <= 600


PUBLIC = {
    "jaxpar",
    *(f"jaxpar.{name}" for name in ("nn", "pipeline", "planning", "analysis", "lm")),
}


def test_the_law_is_written_with_public_names():
    """`lib/api.py` alone knows the inside; models and optimizers of the law know no more than users do."""
    tests, seen = Path(__file__).parent, set()
    paths = [tests / "test_law.py", *tests.glob("lib/law/*.py")]
    while paths:
        path = paths.pop()
        seen.add(path.name)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
                files = [tests / f"{node.module}/{alias.name}.py" for alias in node.names]
                files.append(tests / f"{node.module.replace('.', '/')}.py")
                paths += [
                    own for own in files if own.is_file() and own.name not in {*seen, "api.py"}
                ]
            inside = {name for name in names if name.split(".")[0] == "jaxpar"} - PUBLIC
            assert not inside, (path.name, inside)
    assert {"plain.py", "layers.py", "optimizers.py", "flax_models.py"} <= seen
