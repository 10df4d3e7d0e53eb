"""Checksums of rows."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.training.fingerprint import hash_rows


def rows(num_rows):
    return np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 11))
def test_checksums_of_parts_add_up_and_any_row_changes_them(cuts, row):
    batch = {
        "x": rows(12),
        "half": rows(12).astype(jnp.bfloat16),
        "there": np.arange(12) % 3 > 0,
        "starts": True,
        "scale": np.float32(3),
    }
    whole, ends = hash_rows(batch, 0), sorted({0, 12, *cuts})
    parts = [
        hash_rows({k: v[a:b] if np.ndim(v) else v for k, v in batch.items()}, a)
        for a, b in itertools.pairwise(ends)
    ]
    assert sum(parts) % 2**64 == whole
    for name in ("x", "half", "there"):
        other = {**batch, name: batch[name].copy()}
        other[name][row] = ~other[name][row] if name == "there" else other[name][row] + 1
        assert hash_rows(other, 0) != whole
    swapped = {**batch, "x": np.roll(batch["x"], 1, axis=0)}
    assert len({hash_rows(swapped, 0), hash_rows({**batch, "starts": False}, 0), whole}) == 3
