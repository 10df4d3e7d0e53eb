"""The house: sizes of files, classes and functions, and what each package may know."""

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path

import pytest

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source):
    """Lines that are neither docstring, comment nor blank."""
    docs, lines = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            docs |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docs)


def too_long(source):
    """Classes of more than 250 lines of code, and functions of more than 80."""
    rows, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            size = code_lines(textwrap.dedent("\n".join(rows[node.lineno - 1 : node.end_lineno])))
            if size > (250 if isinstance(node, ast.ClassDef) else 80):
                found.append(node.name)
    return found


def test_few_files_are_loose():
    assert {n for n in SOURCES if "/" not in n} - {"__init__.py", "__main__.py"} == {
        "config.py", "mesh.py", "sharding.py",
    }  # fmt: skip


def test_no_class_or_function_is_long():
    assert {name: found for name, text in SOURCES.items() if (found := too_long(text))} == {}


@pytest.mark.parametrize(("kind", "most"), [("class Long:", 250), ("def long():", 80)])
def test_long_ones_are_seen(kind, most):
    lines = [kind, '    """Docstrings and comments do not count."""', "    # no", ""]
    body = [f"    x{n} = {n}" for n in range(most)]
    assert too_long("\n".join(lines + body)) == [kind.split()[1].rstrip("():")]
    assert too_long("\n".join(lines + body[1:])) == []


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
