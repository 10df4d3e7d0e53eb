"""The layout of the package, and what each part of it may know."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

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


# What objects of the inside are called where public ones hold them.
INSIDE = {"storage", "facts", "cut_model"}


class Known:
    """What a file of the tests knows below the public packages.

    Attributes:
      found: such as ("imports", "jaxpar.step.setup").
    """

    def __init__(self, path: Path, own: str | None = None):
        """Of one module, named `own`, it may know all."""
        self.found, self._own, self._stands_for = set[tuple[str, str]](), own, dict[str, str]()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            self._look_at(node)
        for node in ast.walk(tree):
            self._look_for_patches(node)

    def _imported(self, name: str, how: str) -> None:
        module = name if is_module(name) else name.rpartition(".")[0]
        parts = module.split(".")
        if parts[0] == "jaxpar" and module not in PUBLIC and parts[-1] != self._own:
            self.found.add((how, module))

    def _look_at(self, node: ast.AST) -> None:
        """Imports, attributes, and programs in texts."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._imported(alias.name, "imports")
                if alias.asname:
                    self._stands_for[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self._imported(name, "imports")
                self._stands_for[alias.asname or alias.name] = name
        elif isinstance(node, ast.Attribute) and node.attr in INSIDE and not self._own:
            self.found.add(("reads", f".{node.attr}"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines = re.findall(r"^ *from (jaxpar[\w.]*) import (\w+)", node.value, re.MULTILINE)
            for module, name in lines:
                self._imported(f"{module}.{name}", "has a program that imports")

    def _look_for_patches(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "setitem")):
            first, *others = ast.unparse(node.args[0]).strip("'").split(".")
            name = ".".join([self._stands_for.get(first, first), *others])
            if name.split(".")[0] == "jaxpar" and self._own not in name.split("."):
                self.found.add(("patches", name))


def is_module(name: str) -> bool:
    """Whether this is a module of jaxpar, where no public function or class has the name."""
    package, _, last = name.rpartition(".")
    if package in PUBLIC - {"jaxpar"}:
        return isinstance(getattr(importlib.import_module(package), last, None), ModuleType)
    path = name.removeprefix("jaxpar.").replace(".", "/")
    return name == "jaxpar" or bool({f"{path}.py", f"{path}/__init__.py"} & SOURCES.keys())


def test_of_the_tests_one_file_knows_the_inside():
    """`tests/lib/api.py`; and a file of `tests/algorithms` the module that it is named after."""
    tests, found = Path(__file__).parent, []
    for path in sorted(tests.rglob("*.py")):
        own = path.stem.removeprefix("test_") if path.parent.name == "algorithms" else None
        if path.name not in ("api.py", "test_house.py", "test_imports.py"):
            found += [(path.name, *what) for what in sorted(Known(path, own).found)]
    assert found == []


def test_what_knows_the_inside_is_seen(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(
        "import jaxpar.cli.main\n"
        "from jaxpar import lm, mesh, step, fit\n"
        "from jaxpar.nn import dropout, matrix_memory\n"
        "from jaxpar.step.setup import Setup\n"
        "def test_it(monkeypatch):\n"
        "    monkeypatch.setattr('jaxpar.partition.pool.COLUMNS', 8)\n"
        "    monkeypatch.setattr(lm.LM, 'batch', None)\n"
        "    fit(lm.LM()).setup.facts\n"
        "    program = 'from jaxpar.cli import parse'\n"
    )
    assert Known(path).found == {
        ("imports", "jaxpar.cli.main"),
        ("imports", "jaxpar.mesh"),
        ("imports", "jaxpar.step"),
        ("imports", "jaxpar.nn.matrix_memory"),
        ("imports", "jaxpar.step.setup"),
        ("patches", "jaxpar.partition.pool.COLUMNS"),
        ("patches", "jaxpar.lm.LM"),
        ("reads", ".facts"),
        ("has a program that imports", "jaxpar.cli.parse"),
    }
