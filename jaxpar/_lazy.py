"""Packages that import what they offer when it is used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, whose modules are there as well.

    Args:
      package: its `__name__`.
      homes: what it offers: the name, and the module that has it, or is it, if it ends with a dot.
    """

    def get(name: str) -> Any:
        home = homes.get(name, f"{package}.{name}.")
        try:
            module = importlib.import_module(home.removesuffix("."))
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = module if home.endswith(".") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes})
