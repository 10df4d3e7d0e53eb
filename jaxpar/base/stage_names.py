"""A placement in words, such as "first, 0-2 | 3-5 | 6-7, last": which parts of a model are on which stage.

Between bars stand the parts of a stage, in the order of the data: `first`, what comes before the layers;
layers by their numbers, from 0; `last`, what comes after them. `first` and `last` are left out where each
stage has a part of them. Nothing stands between the bars of a stage that only passes on what it gets. Where a
stage has several groups of layers, each stands by itself.
"""

import dataclasses
import itertools
import re
from typing import NamedTuple

from jaxpar.base.checks import require

FIRST, LAST = "first", "last"
_EXAMPLE = "first, 0-2 | 3-5 | 6-7, last"
_LAYERS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


@dataclasses.dataclass(frozen=True)
class NamedPlacement:
    """A placement that was read from words.

    Attributes:
      layers: how many are in each place.
      has_first: whether what comes before the layers is in the first place.
      has_last: whether what comes after the layers is in the last place.
    """

    layers: tuple[int, ...]
    has_first: bool
    has_last: bool

    def __str__(self) -> str:
        """The words, the same for equal placements."""
        begin, places = 0, list[list[str]]()
        for number in self.layers:
            end = begin + number - 1
            places.append([f"{begin}-{end}" if number > 1 else str(begin)] * (number > 0))
            begin += number
        places[0][:0] = [FIRST] * self.has_first
        places[-1] += [LAST] * self.has_last
        return "|".join(f" {', '.join(parts)} " if parts else " " for parts in places).strip()


class _Part(NamedTuple):
    """Layers in a place, by the numbers of the first and the last of them; `first` is before layer 0."""

    begin: int
    end: int
    place: int


def read_placement(text: str) -> NamedPlacement:
    """The placement that words give.

    Raises:
      ValueError: a part is unknown, or missing, stands twice, or is not where the data come to it.
    """
    places = text.split("|")
    parts, after = _parts_of(text, places)
    _check_order(text, parts, {-1: FIRST, after: LAST})
    has_first, has_last = parts[0].begin == -1, parts[-1].begin == after
    require(
        not ((has_first and parts[0].place) or (has_last and parts[-1].place < len(places) - 1)),
        f"placement={text!r}: a stage before first or after last has nothing to do; leave it out, and take a "
        f"mesh of fewer stages",
    )
    layers = [0] * len(places)
    for part in parts:
        if 0 <= part.begin < after:
            layers[part.place] += part.end - part.begin + 1
    return NamedPlacement(tuple(layers), has_first, has_last)


def _parts_of(text: str, places: list[str]) -> tuple[list[_Part], int]:
    """The parts as they stand, and the number after that of the last layer, which `last` has."""
    words = [
        (word.strip(), place)
        for place, own in enumerate(places)
        if own.strip()
        for word in own.split(",")
    ]
    spans = {FIRST: (-1, -1)}
    for word, _ in words:
        if found := _LAYERS.fullmatch(word):
            begin, end = int(found[1]), int(found[2] or found[1])
            require(begin <= end, f"placement={text!r}: {word!r} counts down; write {end}-{begin}")
            spans[word] = begin, end
    after = max(1, *(end + 1 for _, end in spans.values()))
    spans[LAST] = after, after
    for word, _ in words:
        require(
            word in spans,
            f"placement={text!r}: {word!r} is not a part of a model; write what is on each stage, such as "
            f'{_EXAMPLE!r}, or numbers of layers such as (3, 3, 2), "balanced" or "even"',
        )
    return [_Part(*spans[word], place) for word, place in words], after


def _check_order(text: str, parts: list[_Part], ends: dict[int, str]) -> None:
    """Raises where a part is missing, stands twice, or is not in the order of the data."""

    def name(number: int) -> str:
        return ends.get(number, f"layer {number}")

    order = sorted(parts)
    expected = min(order[0].begin, 0) if order else 0
    for part in order:
        require(
            part.begin >= expected,
            f"placement={text!r}: {name(part.begin)} stands twice; name every part once",
        )
        if part.begin > expected:
            break
        expected = part.end + 1
    require(
        bool(order) and order[-1].end < expected,
        f"placement={text!r}: {name(expected)} is missing; name every part, as in {_EXAMPLE!r}",
    )
    for before, part in itertools.pairwise(parts):
        require(
            before < part,
            f"placement={text!r}: {name(part.begin)} stands after {name(before.begin)}; name parts in the "
            f"order of the data: first, layers from 0 on, last",
        )
