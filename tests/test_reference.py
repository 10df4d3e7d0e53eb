"""The examples in the docstrings of public names: there is one for each, and all of them run."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
from flax import nnx
from lib.pages import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import site_hooks

sys.path.remove(str(ROOT / "docs"))

NAMES = [
    f"{module}.{name}" for module in site_hooks.MODULES for name in site_hooks.names_of(module)
]
# Of what is not installed for tests.
NEEDS = {"jaxpar.WandB": "wandb", "jaxpar.Trackio": "trackio"}


def docstring_of(full_name):
    module, _, name = full_name.rpartition(".")
    return site_hooks.docstring_of(module, name)


def example_of(docstring):
    """The code of the block Example, which is the last one; "" without one."""
    return inspect.cleandoc(docstring.partition("\nExample:\n")[2].rstrip()).strip()


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_a_short_example(name):
    lines = example_of(docstring_of(name)).splitlines()
    assert 1 <= len(lines) <= 16
    assert max(map(len, lines)) <= 100


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """What the examples use, as a file of the reader's."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 500)
    (folder / "examples_of_names.py").write_text(site_hooks.PREAMBLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        yield importlib.import_module("examples_of_names")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name, examples):
    if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    code = compile(example_of(docstring_of(name)), f"the example of {name}", "exec")
    exec(code, {**vars(examples), "rngs": nnx.Rngs(0)})


def test_all_of_jaxpar_is_in_the_reference():
    offered = {
        f"{module}.{name}"
        for module in site_hooks.MODULES
        for name in getattr(importlib.import_module(site_hooks._home(module)), "__all__", ())
        if f"{module}.{name}" not in site_hooks.MODULES
    }
    assert offered <= {*NAMES}
    assert Path(site_hooks.__file__).parent == ROOT / "docs"
