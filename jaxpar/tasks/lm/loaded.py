"""A run of a language model: from text to numbers, and to more text."""

import dataclasses
import functools
from collections.abc import Callable
from os import PathLike

import jax
import numpy as np

from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.task import spec_of
from jaxpar.tasks.lm.corpus import Vocabulary
from jaxpar.tasks.lm.sampling import read_prompt, sample_text
from jaxpar.tasks.lm.task import LM, VOCABULARY
from jaxpar.training.loaded import LoadedRun, load_run
from jaxpar.training.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, repr=False)
class TextRun(LoadedRun):
    """As `LoadedRun`, with the vocabulary that the run keeps."""

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """As the run keeps it.

        Raises:
          ValueError, OSError: it is damaged, or cannot be read.
        """
        return Vocabulary.from_json(self.folder.read(VOCABULARY))

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
        """A text that begins with the prompt; see `sample`."""
        numbers = {"length": length, "temperature": temperature, "seed": seed}
        return sample_text(self.setup, self.state, self.vocabulary, prompt, **numbers)


def load_text_run(
    run_dir: str | PathLike[str], mesh: MeshConfig = ONE_DEVICE, *, best: bool = False
) -> TextRun:
    """As `load_run`, of a language model.

    Raises:
      ValueError, OSError: as of `load_run`, or the run is of another task.
    """
    task = RunFolder(run_dir).settings().task
    if not isinstance(task, LM):
        raise ValueError(
            f"the run in {run_dir} is of the task {spec_of(task)}; give one of the task lm, or look "
            f"at this one in Python: jaxpar.load_run({str(run_dir)!r}).params"
        )
    run = load_run(run_dir, mesh, best=best)
    assert isinstance(run, TextRun)
    return run


def sample(
    run_dir: str | PathLike[str],
    prompt: str = "",
    *,
    length: int = 50,
    temperature: float = 1.0,
    seed: int = 0,
    mesh: MeshConfig = ONE_DEVICE,
    best: bool = False,
) -> str:
    """A text that begins with the prompt and continues as the model of a run would.

    Args:
      run_dir: the folder that `fit` wrote.
      prompt: words of the run's vocabulary; the model reads it as the start of a line.
      length: tokens to add.
      temperature: logits are divided by it; 0 takes the likeliest token every time.
      seed: the same seed gives the same text.
      best: use the state with the lowest validation loss, not the newest.
    Raises:
      ValueError: a word is outside the vocabulary, or a number is out of range.
      FileNotFoundError: no run, or no checkpoint in it.
    """
    run = load_text_run(run_dir, mesh, best=best)
    return run.sample(prompt, length=length, temperature=temperature, seed=seed)
