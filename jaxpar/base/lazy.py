"""Packages that import their public names on first use (PEP 562).

What that is stands in their stub, `__init__.pyi`, which type checkers read too.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path


def lazily(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
      package: its `__name__`.
      file: its `__file__`, beside which the stub lies: a line for each name, such as
        `from jaxpar.model.task import Task as Task`.
    """
    stub = Path(file).with_suffix(".pyi").read_text("utf-8")
    lines = re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE)
    homes = {name: home for home, name in lines}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}\nFix: see dir({package})"
            )
        home = homes[name]
        there = vars(importlib.import_module(home))
        value = there[name] if name in there else importlib.import_module(f"{home}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), [*homes]
