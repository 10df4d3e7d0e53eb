"""Which arrays of a batch have time."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxpar.base.trees import has_time


class Pair(NamedTuple):
    x: Any
    static: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fields:
    x: Any
    static: Any


@pytest.mark.parametrize("kind", [dict, Pair, Fields])
def test_batches_of_any_kind_have_arrays_without_time(kind):
    batch = kind(x=np.zeros((3, 5, 2)), static={"first": np.zeros((3, 2))})
    assert has_time(batch) == kind(x=True, static={"first": False})
