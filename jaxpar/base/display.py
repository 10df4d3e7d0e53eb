"""How things are shown: sizes and times in words, and pictures, which `pictures` draws."""

import functools
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_NAMED = 8  # that a message names


@functools.singledispatch
def show(thing: object) -> Any:
    """Shows a mesh, sharded array, parameters, schedule, report, cost, plan or run as a picture.

    A notebook shows it as HTML, `rich.print` in colour, `print` as text; `to_page()` is a file of HTML.

    Args:
      thing: a `MeshConfig` or `Mesh`; an array, also an abstract one, or a Flax variable; a `TrainState`, an
        `nnx.State`, an `nnx.Module`; a `Schedule`; a `ProgramReport`; a `MeasuredStep`; a `Cost`, a
        `Comparison`, a `Ranking` or `Parallelisms`; a `FitResult`.
    Raises:
      ValueError: there is no picture of such an object.

    Example:
      print(jaxpar.show(jaxpar.MeshConfig(data=2, stage=2)))
    """
    # What draws registers itself, and is not imported before it is needed.
    nobody = show.dispatch(object)
    for module in ("results", "grid", "params", "timeline", "measured", "reports", "parallelisms"):
        importlib.import_module(f"jaxpar.pictures.{module}")
        if (draw := show.dispatch(type(thing))) is not nobody:
            return draw(thing)
    raise ValueError(
        f"no picture of type {type(thing).__name__}\n"
        f"Fix: give a mesh, a JAX array, a Flax state or module, a Schedule, or what jaxpar returns."
    )


class Shown:
    """A class whose objects a notebook and `rich.print` show as their picture."""

    def _repr_html_(self) -> str:
        return show(self)._repr_html_()

    def _repr_svg_(self) -> str | None:
        return show(self)._repr_svg_()

    def __rich__(self) -> Any:
        return show(self)


class Printed(Shown):
    """One whose objects `print` shows so too, and a prompt, if it is a dataclass with `repr=False`."""

    def __str__(self) -> str:
        return str(show(self))

    __repr__ = __str__


def format_count(number: int, noun: str, ending: str = "s") -> str:
    """1 chunk, 2 chunks."""
    return f"{number} {noun}{ending * (number != 1)}"


def format_names(names: Sequence[str]) -> str:
    """Names of parameters, of many the first."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def join_names(names: Iterable[str]) -> str:
    """Names that differ in one of their steps, as one name: blocks.0-3,5.up.kernel."""
    steps = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(map(_join, map(dict.fromkeys, steps)))


def _join(steps: Iterable[str]) -> str:
    found = [re.fullmatch(r"(\D*)(\d+)", step) for step in steps]
    texts = {match and match[1] for match in found}
    if len(texts) > 1 or None in texts:
        return ",".join(steps)
    return f"{texts.pop()}{','.join(format_ranges(int(match[2]) for match in found if match))}"


def format_ranges(numbers: Iterable[int]) -> Iterator[str]:
    """Whole numbers; consecutive ones become one range: 0-3, 5."""
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    for _, group in groups:
        first, *others = (number for _, number in group)
        yield f"{first}-{others[-1]}" if others else str(first)


def format_shape(shape: tuple[int, ...]) -> str:
    """4x4x192; a scalar's is "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def format_seconds(seconds: float) -> str:
    """With three digits: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(num_bytes: float) -> str:
    """In powers of 1000: 516.1 kB."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
