"""What every side computes: a stack of recurrent layers learns random numbers, by SGD.

Legend: T time, B batch, H width; 3 the gates r z n.
"""

import dataclasses
import json
import sys

import numpy as np

LEARNING_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Work:
    """Options.

    Attributes:
      width: of inputs, state and outputs of every layer.
      rows, steps: of the batch.
    """

    width: int = 256
    layers: int = 4
    rows: int = 32
    steps: int = 64

    @classmethod
    def from_arguments(cls) -> "Work":
        """By the last argument of the command."""
        return cls(**json.loads(sys.argv[-1]))

    def to_argument(self) -> str:
        """As `from_arguments` reads it."""
        return json.dumps(dataclasses.asdict(self))

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs, and targets of the mean squared error: [B, T, H]."""
        x, y = np.random.default_rng(0).normal(size=(2, self.rows, self.steps, self.width))
        return x.astype(np.float32), (y / 4).astype(np.float32)

    def gru(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Kernels of every layer, of the inputs and of the state: [H, 3, H]. Biases begin at zero."""
        draw, shape = np.random.default_rng(1), (2, self.width, 3, self.width)
        drawn = (draw.normal(size=shape) / self.width**0.5 for _ in range(self.layers))
        return [tuple(pair.astype(np.float32)) for pair in drawn]
