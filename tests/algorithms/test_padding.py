"""Arrays of unequal shapes in blocks of one shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar import LayerContext
from jaxpar.base.padding import Padding


@pytest.mark.parametrize("rows", [3, 1])  # blocks of fewer rows as well
def test_blocks_come_back_as_what_they_were(rows):
    shapes = [
        {"a": jnp.ones((2, 3, 4, 5)), "b": jnp.ones((2, 3), jnp.bfloat16)},
        jnp.ones((2, 3, 7), jnp.bfloat16),
    ]
    padding, layout = Padding(shapes, {"time": 2, "rows": 3}), LayerContext(0, 0, 0).layout
    assert (padding.width, padding.dtype) == (21, jnp.float32)
    key = jax.random.key(0)
    x = jax.tree.map(lambda a: jax.random.normal(key, (2, rows, *a.shape[2:]), a.dtype), shapes[0])
    block = padding.pad(x, layout)
    assert block.shape == (2, rows, 21)
    jax.tree.map(np.testing.assert_array_equal, padding.unpad(block, shapes[0], layout), x)


def test_arrays_of_one_shape_stay_as_they_are():
    x, layout = jnp.ones((2, 3, 7), jnp.bfloat16), LayerContext(0, 0, 0).layout
    assert Padding([x] * 2, {"time": 2, "rows": 3}).pad(x, layout) is x
