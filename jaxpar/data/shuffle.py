"""A random order that is not stored: the row at each place is computed from a few keys.

A place below length is two digits (a, b) to the base side = ceil(sqrt(length)). A round, one of a Feistel
network, makes (b, a + hash(b, key) mod side) of them; whatever the hash, the digits before can be had back
from those after it, so rounds one after the other change places among side**2 and leave none out. Those few
that end at length or above go on until they are below it ("cycle walking"), where no other place ends.
"""

import math

import numpy as np

ROUNDS = 6  # four would do with a perfect hash


class Shuffle:
    """A permutation of the numbers below length; it takes places as an array of indices does.

    Args:
      length: below 2**62.
      rng: of which the keys are drawn.
    """

    def __init__(self, length: int, rng: np.random.Generator):
        self._length, self._side = length, math.isqrt(max(length - 1, 0)) + 1
        self._keys = rng.integers(2**64, size=ROUNDS, dtype=np.uint64)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """The numbers at places of any shape, each below length; int64."""
        found = self._moved(np.asarray(places, np.uint64))
        while (above := found >= self._length).any():
            found[above] = self._moved(found[above])
        return found.astype(np.int64)

    def _moved(self, numbers: np.ndarray) -> np.ndarray:
        """Among those below side**2, of which length are no padding."""
        side = np.uint64(self._side)
        high, low = np.divmod(numbers, side)
        for key in self._keys:
            high, low = low, (high + _hash(low ^ key) % side) % side
        return np.asarray(high * side + low)


def _hash(numbers: np.ndarray) -> np.ndarray:
    """The last steps of SplitMix64: every bit of the result depends on all bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
