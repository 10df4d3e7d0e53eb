"""Checks of values and types, and the errors that name what to change."""

import dataclasses
import difflib
import inspect
import math
import os
import re
import reprlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, Union

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TypeHint: TypeAlias = Any  # a type as code declares it: a class, `int | None`, `tuple[int, ...]`
Table: TypeAlias = "Mapping[str, object] | DataclassInstance"

MOST = 2**30  # of a size: JAX counts the places along a dim with 31 bits
# Whole numbers are below it: TOML promises no more, and nobody has so many of anything.
_LARGEST = 2**63

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def check_fields(config: "DataclassInstance") -> None:
    """Nothing, if every field has a value of its type; to be called in `__post_init__`.

    Whole numbers are numbers; truth values are not. Numbers must be finite, and whole ones of 64 bits. A list
    is taken for a tuple, as JSON and TOML have no other; a path for its text, where a string is meant.

    Args:
      config: a dataclass whose fields are of int, float, bool, str, None, a class, a Literal, a tuple
        or list of these, or one of several of them. Of any other type only the class is looked at.
    Raises:
      ValueError: names the first field that does not, its value, and what to use.
    """
    hints = _hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value, hint = getattr(config, name), hints[name]
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(config, name, value)
        if isinstance(value, os.PathLike) and str in _options(hint):
            value = os.fspath(value)
            object.__setattr__(config, name, value)
        _check_bits(name, value)
        if fits(value, hint):
            continue
        options = _options(hint)
        if isinstance(value, float) and float in options:
            raise ValueError(f"{name}={value}: must be a finite number\nFix: change {name}.")
        types = " or ".join(map(_describe, options))
        kind = f" ({type(value).__name__})" if isinstance(value, int | float) else ""
        raise ValueError(f"{name}={_SHORT.repr(value)}{kind}: must be {types}\nFix: change {name}.")


def _check_bits(name: str, value: object) -> None:
    """Raises for a whole number that is too large for 64 bits, also in a tuple."""
    if isinstance(value, tuple):
        for each in value:
            _check_bits(name, each)
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        shown = value if value.bit_length() < 1000 else f"a number of {value.bit_length()} bits"
        raise ValueError(f"{name}={shown}: must be below 2**63\nFix: give a smaller number.")


def _hints(of: type) -> dict[str, TypeHint]:
    """The types of a class's fields. The class keeps them, so they leave the memory with it."""
    if "_jaxpar_hints" not in vars(of):
        setattr(of, "_jaxpar_hints", typing.get_type_hints(of))  # noqa: B010 - of any class
    return vars(of)["_jaxpar_hints"]


def _options(hint: TypeHint) -> tuple[TypeHint, ...]:
    """The types that a value may have."""
    is_union = typing.get_origin(hint) in (UnionType, Union)
    return typing.get_args(hint) if is_union else (hint,)


def fits(value: object, wanted: TypeHint) -> bool:
    """Whether a value is of a type, as of `check_fields`; and those in a table as well."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return value in parts
    if origin in (UnionType, Union):
        return any(fits(value, part) for part in parts)
    if origin in (tuple, list):
        if not isinstance(value, tuple):
            return False
        if origin is list or parts[1:] == (...,):
            parts = parts[:1] * len(value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, parts[1]) for each in value.values())
    if isinstance(value, bool):
        return wanted in (bool, Any)
    if wanted is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return wanted is Any or isinstance(value, origin or wanted)


def _describe(wanted: TypeHint) -> str:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if wanted is type(None):
        return "None"
    if origin is list or (origin is tuple and parts[1:] == (...,)):
        return f"a list of {_describe(parts[0]).removeprefix('a ')}s"
    if origin is tuple:
        return f"a list of {len(parts)}: {', '.join(map(_describe, parts))}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    name = names.get(wanted) or f"a {getattr(wanted, '__name__', wanted)}"
    return re.sub(r"^a (?=[AEIO])", "an ", name)


def walk(tree: Table, path: str = "") -> Iterator[tuple[str, object]]:
    """All that is in a table or dataclass, by its path, such as `a.b`; a table before what is in it."""
    for name, value in _entries(tree).items():
        yield f"{path}{name}", value
        if _is_table(value):
            yield from walk(value, f"{path}{name}.")


def leaves_of(tree: Table) -> dict[str, object]:
    """The values in tables and dataclasses, by the names that lead to them, such as `a.b`."""
    return {path: value for path, value in walk(tree) if not _is_table(value)}


def _is_table(value: object) -> TypeGuard[Table]:
    """Whether something is in it."""
    if isinstance(value, Mapping):
        return len(value) > 0
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _entries(tree: Table) -> Mapping[str, object]:
    if isinstance(tree, Mapping):
        return tree
    return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}


def see(heading: str) -> str:
    """The end of a message that names a heading of the page on troubleshooting."""
    return f' See docs/help/troubleshooting.md, "{heading}".'


def require(condition: bool, message: str) -> None:
    """Raises a ValueError of the message if the condition does not hold."""
    if not condition:
        raise ValueError(message)


def fact_of(error: Exception) -> str:
    """What a message says is wrong, without what to do about it."""
    return str(error).partition("\nFix: ")[0]


def require_instance(name: str, value: object, kind: TypeHint, use: str) -> None:
    """Raises if a value is no object of a class; `use` says what is."""
    if isinstance(value, kind):
        return
    if isinstance(value, type) and isinstance(kind, type) and issubclass(value, kind):
        given = value.__name__
        raise ValueError(f"{name}={given} is a class\nFix: give an object, {given}().")
    shown = " ".join(_SHORT.repr(value).split())  # a tree of arrays has many lines
    raise ValueError(f"{name}={shown} ({type(value).__name__}): must be {use}\nFix: change {name}.")


def check_takes(
    function: Callable[..., object], arguments: Sequence[str], what: str, use: str
) -> None:
    """Raises if a function, which `what` names, cannot be called with so many; `use` says what can."""
    require(callable(function), f"{what} cannot be called\nFix: {use}.")
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError:
        takes, given = ", ".join(signature.parameters), ", ".join(arguments)
        raise ValueError(f"{what} takes ({takes}), expected ({given})\nFix: {use}.") from None


def check_names(what: str, own: object, base: type) -> None:
    """Raises if a class has a public name that is almost an optional one of `base`, which it leaves out."""
    cls = type(own)
    known = {name for name in vars(base) if not name.startswith("_")}
    missing = {name for name in known if getattr(cls, name, None) in (None, getattr(base, name))}
    fields = getattr(cls, "__dataclass_fields__", {})
    for name in sorted({*dir(cls)} - {*dir(base), *fields}):
        near = difflib.get_close_matches(name, missing, 1, 0.86)
        if near and not name.startswith("_"):
            raise ValueError(
                f"{what} has {name}, which jaxpar doesn't know\nFix: rename it to {near[0]}, or another name."
            )


def require_positive(config: object, *names: str) -> None:
    """Raises if one of these fields is not above 0."""
    _require_each(config, names, lambda value: value > 0, "must be positive")


def require_not_negative(config: object, *names: str) -> None:
    """Raises if one of these fields is below 0."""
    _require_each(config, names, lambda value: value >= 0, "must not be negative")


def require_int32(config: object, *names: str) -> None:
    """Raises if one of these fields is 2**31 or more: a state counts with 32 bits."""
    _require_each(config, names, lambda value: value < 2**31, f"must be below {2**31}")


def require_sizes(config: object, *names: str) -> None:
    """Raises if one of these fields is not from 1 to `MOST`, so that it could be the size of a dim."""
    require_positive(config, *names)
    _require_each(config, names, lambda value: value <= MOST, f"must be at most {MOST}")


def require_rate(config: object, *names: str) -> None:
    """Raises if one of these fields is not from 0 to less than 1."""
    _require_each(config, names, lambda value: 0 <= value < 1, "must be at least 0 and less than 1")


def _require_each(
    config: object, names: Sequence[str], holds: Callable[[float], bool], rule: str
) -> None:
    """Asks of each number, also of those in a tuple; None, where a field may be it, is none."""
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        require(all(map(holds, numbers)), f"{name}={value}: {rule}\nFix: change {name}.")


def check_divides(name: str, size: int, divisors: Mapping[str, int]) -> None:
    """Checks that the product of the divisors divides `size`.

    Raises:
      ValueError: names all of them, and the nearest sizes that work.
    """
    divisor = math.prod(divisors.values())
    product = " x ".join(f"{part}={value}" for part, value in divisors.items())
    product += f" = {divisor}" * (len(divisors) > 1)
    require(
        size % divisor == 0,
        f"{name}={size} does not divide by {product}\n"
        f"Fix: use {name}={nearest_multiples(size, divisor)}, or other sizes of {' and '.join(divisors)}.",
    )


def nearest_multiples(size: int, divisor: int) -> str:
    """The nearest positive sizes that `divisor` divides: "96 or 128" for 100 and 32."""
    below = size // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
