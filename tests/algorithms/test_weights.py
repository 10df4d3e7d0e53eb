"""How weights leave a run: row by row, in types that files have, and by names that people read."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import MeshConfig
from jaxpar.training import weights


@pytest.mark.parametrize(
    "array",
    [
        np.array([[-0.0, np.nan], [0.0, -np.inf]], np.float32),
        np.array([[-0.0, 1.5], [3.0, -2.0]], ml_dtypes.bfloat16),
        np.array([[-1, 2], [3, -128]], np.int8),
        np.array([[True, False], [False, True]]),
    ],
    ids=lambda array: array.dtype.name,
)
def test_a_row_of_a_stack_that_stages_split_is_picked_bit_by_bit(array):
    mesh = MeshConfig(stage=2, tensor=2).build()
    axes = "stage", None  # with the rules of jaxpar, and with {"layers": None}
    for axis, row in itertools.product(axes, range(2)):
        stack = jax.device_put(array, NamedSharding(mesh, P(axis, "tensor")))
        picked = weights._pick(stack, np.int32(row), stack.sharding)
        assert picked.sharding.spec == P("tensor")
        assert np.asarray(picked).tobytes() == array[row].tobytes()


def test_other_types_are_told(tmp_path):
    tensors = {"a": weights.Outgoing((1,), np.dtype(np.complex128), lambda: None)}
    with pytest.raises(
        ValueError, match="a has the type complex128, which safetensors files cannot"
    ):
        weights.write_weights(tmp_path / "a", tensors, {})


def test_names_of_neighbouring_layers_are_one():
    names = ["layers.0.w", "layers.1.w", "layers.3.w", "layers.2.b", "head.bias", "a.7.b"]
    expected = ["layers.0-1,3.w", "layers.2.b", "head.bias", "a.7.b"]
    assert weights.in_ranges(names) == expected
    names = ["e.blocks.0.mlp.1.w", "e.blocks.1.mlp.1.w", "layer_0.w", "layer_1.w", "b16.w"]
    assert weights.in_ranges(names) == ["e.blocks.0-1.mlp.1.w", "layer_0-1.w", "b16.w"]
