"""A run of a language model: from text to numbers, and to more text."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import jax
import numpy as np

from jaxpar.setup import Setup
from jaxpar.state import TrainState
from jaxpar.tasks.lm.corpus import Vocabulary
from jaxpar.tasks.lm.run import read_vocabulary
from jaxpar.tasks.lm.sampling import read_prompt, sample_text
from jaxpar.training.loaded import LoadedRun
from jaxpar.training.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, repr=False)
class TextRun(LoadedRun):
    """As `LoadedRun`, with the vocabulary that the run keeps."""

    vocabulary: Vocabulary

    @classmethod
    def of(cls, folder: RunFolder, setup: Setup, state: TrainState) -> Self:
        """The run with its vocabulary.

        Raises:
          ValueError, OSError: it is damaged, or cannot be read.
        """
        return cls(folder, setup, state, read_vocabulary(folder))

    def logits(self, text: str) -> np.ndarray:
        """What the model expects after each token of a text, read from the start of a line.

        Args:
          text: words of the vocabulary.
        Returns:
          float32 [tokens + 1, words]: row 0 is of the first token, row i of what follows i tokens.
          `jax.nn.softmax` of a row is the probability of each of `vocabulary.words`.
        Raises:
          ValueError: a word is outside the vocabulary.
        """
        tokens_T = read_prompt(self.vocabulary, text)
        logits_BTV = self._run(self.state.params, tokens_T[None])
        return np.asarray(logits_BTV)[0, :, : len(self.vocabulary)]

    @functools.cached_property
    def _run(self) -> Callable[..., jax.Array]:
        """(parameters, tokens) -> logits; compiled once for every length of a text."""
        layout, frozen = self.setup.layout, self.state.frozen
        return jax.jit(lambda params, tokens_BT: layout.merge(params, frozen)(tokens_BT))

    def sample(
        self, prompt: str = "", *, length: int = 50, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """A text that begins with the prompt; see `sampling.sample`."""
        numbers = {"length": length, "temperature": temperature, "seed": seed}
        return sample_text(self.setup, self.state, self.vocabulary, prompt, **numbers)
