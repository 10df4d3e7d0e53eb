"""Placements as text, such as "first, 0-2 | 3-5 | 6-7, last": the parts of a model on each stage.

Between bars stand the parts of a stage, in the order of the data: `first`, what comes before the layers;
layers by their numbers, from 0; `last`, what comes after them. `first` and `last` are left out where each
stage has a part of them. Nothing stands between the bars of a stage that only passes on what it gets. Where a
stage has several groups of layers, each stands by itself.
"""

import dataclasses
import re

from jaxpar.base.checks import require

FIRST, LAST = _OUTER = "first", "last"
_EXAMPLE = "first, 0-2 | 3-5 | 6-7, last"
_LAYERS = re.compile(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?")


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


def read_placement(text: str) -> NamedPlacement:
    """The placement that words give.

    Raises:
      ValueError: a part is unknown, or missing, stands twice, or is not where the data come to it.
    """
    places = [[word.strip() for word in own.split(",") if own.strip()] for own in text.split("|")]
    words = [word for own in places for word in own]
    layers = [[_layers_of(text, word) for word in own if word not in _OUTER] for own in places]
    found = [number for own in layers for numbers in own for number in numbers]
    expected = [*range(max(found, default=0) + 1)]
    has_first, has_last = FIRST in words, LAST in words
    order = [FIRST] * has_first + [w for w in words if w not in _OUTER] + [LAST] * has_last
    require(
        found == expected and words == order,
        f"placement={text!r}: must name first, all layers from 0 and last in order, each once\n"
        f"Fix: write such as {_EXAMPLE!r}.",
    )
    require(
        not (has_first and FIRST not in places[0]) and not (has_last and LAST not in places[-1]),
        f"placement={text!r}: a stage before first or after last would have no work\n"
        f"Fix: leave it out, and use a mesh with fewer stages.",
    )
    return NamedPlacement(tuple(sum(map(len, own)) for own in layers), has_first, has_last)


def _layers_of(text: str, word: str) -> range:
    """The numbers of layers that a word such as 0-2 means."""
    match = _LAYERS.fullmatch(word)
    require(
        match is not None,
        f"placement={text!r}: {word!r} is not a part of a model\n"
        f'Fix: write such as {_EXAMPLE!r}, (3, 3, 2), "balanced" or "even".',
    )
    assert match is not None
    return range(int(match[1]), int(match[2] or match[1]) + 1)
