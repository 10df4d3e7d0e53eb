"""The training steps that are compared: sizes, initial weights and text, the same for every framework.

Plain SGD without momentum, float32, one bias a layer, zero initial state, mean loss over all positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np

LEARNING_RATE = 0.5


@dataclasses.dataclass(frozen=True)
class Work:
    """Options of a deep LSTM language model and its batch."""

    num_layers: int
    hidden_size: int
    embed_size: int
    batch_size: int
    seq_len: int
    vocab_size: int = 10_000

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len

    def weights(self) -> dict[str, np.ndarray]:
        """Initial weights by name; kernels [in, 4, hidden] with gates i, f, g, o."""
        rng = np.random.default_rng(0)

        def draw(*shape: int) -> np.ndarray:
            bound = (3 / shape[0]) ** 0.5
            return rng.uniform(-bound, bound, shape).astype(np.float32)

        H = self.hidden_size
        weights = {"table": draw(self.vocab_size, self.embed_size) * self.vocab_size**0.5}
        for layer in range(self.num_layers):
            weights[f"w_x_{layer}"] = draw(H if layer else self.embed_size, 4, H)
            weights[f"w_h_{layer}"] = draw(H, 4, H)
            weights[f"b_{layer}"] = np.zeros((4, H), np.float32)
        return {
            **weights,
            "kernel": draw(H, self.vocab_size),
            "bias": np.zeros(self.vocab_size, np.float32),
        }

    def text(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, int32 [batch, time]."""
        size = (self.batch_size, self.seq_len + 1)
        tokens = np.random.default_rng(1).integers(0, self.vocab_size, size, dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:].copy()


WORKS = {
    "A": Work(4, 256, 256, 32, 64),
    "B": Work(8, 400, 200, 20, 35),
    "C": Work(2, 1024, 1024, 64, 35),
    "D": Work(4, 2048, 2048, 128, 128),  # for GPUs
}
