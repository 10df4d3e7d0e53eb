"""Words, and what is to be known after each of their letters: parity, arithmetic, permutations.

All of a word's beginnings are words of the task as well, so a word of T letters is an example of each length
up to T. Nothing is downloaded: words are drawn from a generator. Dims: B words, T letters.
"""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

MODULUS, OPERATORS = 5, "+-*"
PERMUTATIONS = list(itertools.permutations(range(5)))
SWAPS = list(itertools.combinations(range(5), 2))
NOTHING = -1  # the label of a letter after which nothing is asked


def parity(rng: np.random.Generator, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits, and whether the ones so far are odd in number."""
    letters_BT = rng.integers(2, size=(rows, steps))
    return letters_BT, letters_BT.cumsum(axis=1) % 2


def arithmetic(rng: np.random.Generator, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Expressions such as 3+4*2-1, and their values modulo 5 after each number; * goes before + and -."""
    letters_BT = rng.integers(MODULUS, size=(rows, steps))
    letters_BT[:, 1::2] = MODULUS + rng.integers(len(OPERATORS), size=(rows, steps // 2))
    labels_BT = np.full_like(letters_BT, NOTHING)
    total_B, term_B = np.zeros_like(letters_BT[:, 0]), letters_BT[:, 0]
    labels_BT[:, 0] = term_B
    for time in range(2, steps, 2):
        number_B, operator_B = letters_BT[:, time], letters_BT[:, time - 1] - MODULUS
        sign_B = np.array([1, -1, 0])[operator_B]  # a product goes on with its term
        total_B = (total_B + np.where(sign_B == 0, 0, term_B)) % MODULUS
        term_B = np.where(sign_B == 0, term_B, sign_B) * number_B % MODULUS
        labels_BT[:, time] = (total_B + term_B) % MODULUS
    return letters_BT, labels_BT


def swaps(rng: np.random.Generator, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Letter 0 leaves five things where they are, 1 to 10 swap two places; which order they are in then."""
    letters_BT = rng.integers(1 + len(SWAPS), size=(rows, steps))
    labels_BT, order_B = np.empty_like(letters_BT), np.zeros_like(letters_BT[:, 0])
    for time in range(steps):
        order_B = labels_BT[:, time] = AFTER[order_B, letters_BT[:, time]]
    return letters_BT, labels_BT


def _after(order: tuple[int, ...], letter: int) -> int:
    things = list(order)
    if letter:
        a, b = SWAPS[letter - 1]
        things[a], things[b] = things[b], things[a]
    return PERMUTATIONS.index(tuple(things))


# The number of an order of things, and of a letter -> the number of the order after it.
AFTER = np.array([[_after(order, n) for n in range(1 + len(SWAPS))] for order in PERMUTATIONS])


@dataclasses.dataclass(frozen=True)
class Problem:
    """A task.

    Attributes:
      title: for the page.
      num_letters, num_labels: how many there are; one of `num_labels` is right, by chance 1 of so many.
      draw: (generator, B, T) -> letters and labels, int [B, T].
    """

    title: str
    num_letters: int
    num_labels: int
    draw: Callable[[np.random.Generator, int, int], tuple[np.ndarray, np.ndarray]]


PROBLEMS = {
    "parity": Problem("parity", 2, 2, parity),
    "arithmetic": Problem("arithmetic modulo 5", MODULUS + len(OPERATORS), MODULUS, arithmetic),
    "s5": Problem("words in S5", 1 + len(SWAPS), len(PERMUTATIONS), swaps),
}
