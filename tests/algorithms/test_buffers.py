"""The order of dims in which a TPU keeps arrays."""

import pytest

from jaxpar.pipeline.buffers import order_of_dims


@pytest.mark.parametrize(
    ("shape", "itemsize", "order"),
    [
        ((16, 128, 4, 1024), 4, (0, 1, 2, 3)),  # four rows make a tile of four
        ((256, 6, 1024), 2, (0, 1, 2)),  # a third more is less than copies cost
        ((32, 256, 16, 64), 2, (0, 2, 3, 1)),  # 64 columns would take the room of 128
        ((2048, 4), 4, (1, 0)),
    ],
)
def test_a_tpu_keeps_arrays_in_an_order_that_wastes_no_room(shape, itemsize, order):
    assert order_of_dims(shape, itemsize) == order
