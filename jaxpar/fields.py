"""Whether the fields of a frozen dataclass have values of the types that it declares."""

import functools
import math
import types
import typing
from typing import Any, Literal


def check_fields(config: Any) -> None:
    """Nothing, if every field has a value of its type; to be called in `__post_init__`.

    Whole numbers are numbers; truth values are not. Numbers must be finite. A list is taken for a
    tuple, as JSON and TOML have no other.

    Args:
      config: a dataclass whose fields are of int, float, bool, str, None, a class, a Literal, a tuple
        of one of these, or one of several of them.
    Raises:
      ValueError: names the first field that does not, its value, and what to use.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(config, name, value)
        options = _options(hint)
        if any(_fits(value, option) for option in options):
            continue
        if isinstance(value, float) and float in options:
            raise ValueError(f"{name}={value}: use a finite number")
        wanted = " or ".join(map(_describe, options))
        kind = f" ({type(value).__name__})" if isinstance(value, int | float) else ""
        raise ValueError(f"{name}={value!r}{kind}: use {wanted}")


_hints = functools.cache(typing.get_type_hints)


def _options(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is Literal:
        return value in typing.get_args(wanted)
    if typing.get_origin(wanted) is tuple:
        part_type = typing.get_args(wanted)[0]
        return isinstance(value, tuple) and all(_fits(part, part_type) for part in value)
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, wanted)


def _describe(wanted: Any) -> str:
    if typing.get_origin(wanted) is Literal:
        return " or ".join(map(repr, typing.get_args(wanted)))
    if typing.get_origin(wanted) is tuple:
        return f"a list of {_describe(typing.get_args(wanted)[0]).removeprefix('a ')}s"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        types.NoneType: "None",
    }
    return names.get(wanted, f"a {wanted.__name__}")
