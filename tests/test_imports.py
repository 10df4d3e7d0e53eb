"""Imports point down: the order of the package's modules and folders, and no circles."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent

# From the bottom to the top. What stands in one line does not import each other; a folder is one name, whose
# own modules import each other without a circle.
LAYERS = (
    "base",  # what all else stands on: names, checks, files, text, trees of arrays
    "__init__",  # what is offered, by names
    "trace data",  # traced programs; batches
    "internal",  # machinery of layers and of the pipeline
    "mesh sharding hosts",  # devices, rules, many processes
    "config nn",  # options that tasks share; layers
    "pipeline",  # schedules, and the engine that runs them
    "model",  # tasks, models, and the facts of both
    "partition",  # a model divided over a mesh
    "step",  # one training step
    "training",  # many steps
    "analysis",  # what a compiled step does
    "planning",  # what a step will cost
    "pictures",  # how all of it is drawn
    "cli",  # the command line
    "lm",  # the language model: a task, and its commands
    "__main__",
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names.split()}

# `show` finds what draws an object when it is to be drawn.
LATE = {"jaxpar.base.display": {"jaxpar.pictures"}}


def name_of(path: Path) -> str:
    parts = ("jaxpar", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(path.read_text()) for name, path in PATHS.items()}


def imported(tree: ast.AST) -> set[str]:
    """The package's modules that a module imports: at its top, in a function, or for its types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module  # names are in full
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names & TREES.keys()
            found |= modules | ({node.module} if names - modules else set())
    return found & TREES.keys()


def late(tree: ast.AST) -> set[str]:
    """Packages of jaxpar that are imported by text, such as "jaxpar.pictures" in `import_module`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = [ast.unparse(c) for c in calls if "import_module" in ast.unparse(c.func)]
    return {f"jaxpar.{top}" for top in HEIGHT for word in words if f"jaxpar.{top}" in word}


def layer(module: str) -> str:
    return [*module.split("."), "__init__"][1]


IMPORTS = {name: imported(tree) for name, tree in TREES.items()}


def pointing_up(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in sorted(others)
        if layer(name) != layer(other) and HEIGHT[layer(name)] <= HEIGHT[layer(other)]
    ]


def test_every_module_has_its_layer():
    assert {layer(name) for name in TREES} == HEIGHT.keys()
    assert len(TREES) > 100


def test_no_import_points_up():
    assert pointing_up(IMPORTS) == []


def test_no_modules_import_each_other():
    graphlib.TopologicalSorter(IMPORTS).prepare()


def test_only_show_imports_by_name_what_is_above():
    assert {name: found for name, tree in TREES.items() if (found := late(tree))} == LATE


def test_nothing_knows_the_language_model():
    """Its task and its commands are found by their names, in tables."""
    knows = {layer(name) for name, others in IMPORTS.items() if "lm" in map(layer, others)}
    assert knows == {"lm"}


def test_arrows_up_and_circles_are_seen():
    """Also those in functions, and those of types alone."""
    up = "from jaxpar.pictures.chart import Chart"
    texts = {
        "jaxpar.step.step": f"def f():\n    {up}\n",
        "jaxpar.mesh": "from jaxpar import sharding",  # in one line with it
        "jaxpar.step.setup": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {up}\n",
    }
    imports = IMPORTS | {name: imported(ast.parse(text)) for name, text in texts.items()}
    assert sorted(pointing_up(imports)) == [
        "jaxpar.mesh imports jaxpar.sharding",
        "jaxpar.step.setup imports jaxpar.pictures.chart",
        "jaxpar.step.step imports jaxpar.pictures.chart",
    ]
    circle = {"a": {"b"}, "b": {"a"}}
    with pytest.raises(graphlib.CycleError, match="nodes are in a cycle"):
        graphlib.TopologicalSorter(circle).prepare()


def test_no_test_imports_a_test():
    """What several of them use is in `lib`."""
    folder = Path(__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            modules = names if isinstance(node, ast.Import) else [getattr(node, "module", None)]
            for module in filter(None, modules):
                assert not module.split(".")[-1].startswith("test_"), path.name


def test_private_uses_of_jax_are_in_one_file():
    private = re.compile(r"\bjax(lib)?\._[a-z]|\b_cache_size\b")
    found = {name for name in TREES if private.search(PATHS[name].read_text())}
    assert found == {"jaxpar.base.jax_private"}
