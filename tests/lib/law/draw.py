"""Cases that together have all pairs of choices.

Each case is the best of some that are drawn at random. Best is what has the most that no case before has, in
the time that it takes; what is rare among random cases counts more.
"""

import collections
import functools
import itertools
import random
import zlib
from collections.abc import Callable, Hashable

from lib.law.options import MESHES, OPTIONS, SCHEDULES, Case, chosen_layers, sizes

NUM_TRIED = 80
AXES = ("data", "stage", "tensor")
# What a layer is not told of: which others there are and where they lie, and what is done with its gradients.
# Of a mesh, it meets the axes.
NOT_OF_A_LAYER = (
    "mesh", "beside", "pattern", "placement", "optimizer", "update", "clip", "resume on",
)  # fmt: skip
NUM_RANDOM = 4000  # cases that tell what is rare
NUM_SHARES, FAVOR = 10, 100.0
# Updates of several kinds of layers have by far the most pairs: without turns there would be little else.
TURNS = (
    {"result": "updates", "form": "layers"},
    {"result": "updates", "form": "language"},
    {"result": "updates", "form": "layers"},
    {"result": "updates", "form": "flax"},
    {"result": "updates", "form": "language"},
    {"result": "updates", "beside": "itself"},
    {"result": "updates", "form": "layers", "pattern": "a"},
    {"result": "gradients"},
)


def random_case(numbers: random.Random, **wanted: str) -> Case:
    """A case: each option takes any value that goes with those before it, and what is wanted if that does."""
    case = {}
    for name, option in OPTIONS.items():
        fitting = option.fitting(case)
        case[name] = wanted[name] if wanted.get(name) in fitting else numbers.choice(fitting)
    return case


def fits(case: Case) -> bool:
    """Whether all of its choices go together."""
    before = {}
    for name, value in case.items():
        if value not in OPTIONS[name].fitting(before):
            return False
        before[name] = value
    return True


def choices_of(case: Case) -> set[Hashable]:
    """(option, value) of each option; each of its layers counts as chosen."""
    return {*case.items()} | {("layer", name) for name in chosen_layers(case)}


def pairs_of(case: Case) -> set[Hashable]:
    """The pairs of its choices; each of its layers counts as chosen."""
    others = [(name, value) for name, value in case.items() if name != "layer"]
    layers = [("layer", name) for name in chosen_layers(case)]
    met = [own for own in others if own[0] not in NOT_OF_A_LAYER]
    met += [("splits", axis) for axis, size in zip(AXES, sizes(case), strict=True) if size > 1]
    return {*itertools.combinations(others, 2), *itertools.product(layers, met)}


@functools.cache
def _number_of(value: Hashable) -> int:
    return zlib.crc32(repr(value).encode())


@functools.cache
def _rarity(parts_of: Callable[[Case], set[Hashable]]) -> collections.Counter:
    numbers, times = random.Random("rare"), collections.Counter()
    for _ in range(NUM_RANDOM):
        times.update(parts_of(random_case(numbers)))
    return times


class Draws:
    """Cases, each chosen by what those before it lack."""

    def __init__(self, seed: str):
        self._numbers, self.cases = random.Random(seed), list[Case]()
        self._share = _number_of(seed) % NUM_SHARES

    def _favor(self, part: Hashable) -> float:
        """A run looks for one of ten shares of what there is first, so that runs differ."""
        return FAVOR if _number_of(part) % NUM_SHARES == self._share else 1.0

    def add(self, count: int, parts_of: Callable[[Case], set[Hashable]], **wanted: str) -> None:
        """Adds so many cases with these choices, where they fit."""
        times = _rarity(parts_of)
        seen = set().union(*map(parts_of, self.cases))

        def worth(case: Case) -> float:
            found = sum(self._favor(part) / (1 + times[part]) for part in parts_of(case) - seen)
            return found / time_of(case)

        for _ in range(count):
            case = max((random_case(self._numbers, **wanted) for _ in range(NUM_TRIED)), key=worth)
            seen |= parts_of(case)
            self.cases.append(case)


def time_of(case: Case) -> float:
    """About what it takes, most of it compiling; a case that compiles one step takes 1."""
    return 1.0 + 0.8 * (case["resume on"] != "no") + 0.2 * (case["predicts"] == "yes")


@functools.cache
def default_cases() -> list[Case]:
    """Each mesh with each schedule, and each value of each option."""
    draws = Draws("default")
    for mesh, schedule in itertools.product(MESHES, SCHEDULES):
        draws.add(1, choices_of, mesh=mesh, schedule=schedule)
    return draws.cases


def every_choice() -> set[Hashable]:
    """All values of all options."""
    return {(name, value) for name, option in OPTIONS.items() for value in option.values}


@functools.cache
def draw(count: int, seed: str) -> list[Case]:
    """So many cases, with as many pairs of choices as they can have."""
    draws = Draws(seed)
    for wanted in itertools.islice(itertools.cycle(TURNS), count):
        draws.add(1, pairs_of, **wanted)
    return draws.cases
