"""Orders of many numbers, computed place by place."""

import numpy as np

from jaxpar.data.shuffle import Shuffle


def test_a_shuffle_has_every_number_once():
    for length in (*range(1, 200), 997, 1024, 1025, 65_536, 65_537, 100_000):
        for seed in range(3):
            shuffle = Shuffle(length, np.random.default_rng([seed, length]))
            found = shuffle[np.arange(length)]
            assert found.dtype == np.int64
            np.testing.assert_array_equal(np.sort(found), np.arange(length))


def test_all_orders_of_few_numbers_are_as_likely():
    orders = [tuple(Shuffle(4, np.random.default_rng(n))[np.arange(4)]) for n in range(4800)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert np.sum((counts - 200) ** 2 / 200) < 60  # chi-squared of 23: 1 in 30,000 is above


def test_neighbours_in_a_shuffle_are_far_from_each_other():
    """Where the rows of a batch lie, and each of them beside the next, is uniform."""
    length = 200_000_003
    found = Shuffle(length, np.random.default_rng([0, 3]))[np.arange(10**6, 10**6 + 40_000)]
    assert len(np.unique(found)) == 40_000
    bins = found * 20 // length
    pairs = np.bincount(bins[:-1] * 20 + bins[1:], minlength=400)
    assert np.sum((pairs - 100) ** 2 / 100) < 520  # chi-squared of 399: 1 in 30,000 is above
    parity = np.bincount((found[:-1] % 2) * 2 + found[1:] % 2)
    np.testing.assert_allclose(parity, 10_000, atol=400)
