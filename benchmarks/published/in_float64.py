"""The language model and AWD-LSTM in float64 instead of float32, to tell rounding from mistakes.

    python -m jaxpar train benchmarks/published/in_float64.py:LM ...
    python -m jaxpar train benchmarks/published/in_float64.py:AWD ...

Two runs that drift apart because rounding grows stay together here; those that compute something else do not.
It is for this alone: all of jaxpar computes in float64 once the file is loaded.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import lm
from recipes import awd

NAMES: Any = jnp

jax.config.update("jax_enable_x64", True)
NAMES.float32 = jnp.float64


@dataclasses.dataclass(frozen=True)
class LM(lm.LM):
    """As `train lm`."""

    def make_model(self, rngs: nnx.Rngs) -> Any:
        """The model, its activations in float64."""
        return _widened(super().make_model(rngs))


@dataclasses.dataclass(frozen=True)
class AWD(awd.AWD):
    """As `train recipes/awd.py:AWD`."""

    def make_model(self, rngs: nnx.Rngs) -> Any:
        """The model, its activations in float64."""
        return _widened(super().make_model(rngs))


def _widened(model: Any) -> Any:
    model.dtype = "float64"
    return model
