"""Layers and drawn text against PyTorch and the definitions."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "examples"
# Sums in another order differ by float32 rounding, 6e-8 a term; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error, scale = np.linalg.norm(actual[name] - value), np.linalg.norm(value)
        assert error <= RELATIVE_ERROR * scale, f"{name}: error {error:.1e} of {scale:.1e}"
