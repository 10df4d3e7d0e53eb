"""A run of a language model: from text to numbers, and to more text."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.base.checks import require
from jaxpar.base.files import read_text
from jaxpar.base.parts import SPLITS
from jaxpar.data.batches import Batches
from jaxpar.data.order import check_at_least
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.task import spec_of
from jaxpar.tasks.lm.task import LM, VOCABULARY
from jaxpar.tasks.lm.vocabulary import UNK, Vocabulary, check_tokens
from jaxpar.tasks.lm.weights import WORDS, to_torch
from jaxpar.training.loaded import LoadedRun, load_run
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.weights import Outgoing

_log = logging.getLogger(__name__)


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

    def batches(self, data: str) -> Batches:
        """The batches of a split of the run's data, or of a file of text.

        A text is read with the run's vocabulary, in which other words are `<unk>` (a warning counts
        them), and as the task says: as one stream, or by lines.

        Args:
          data: "train", "valid" or "test"; or the path of a file.
        Raises:
          ValueError, OSError: as of `LoadedRun.batches`, or the file is too short, or no text.
        """
        if data in SPLITS:
            return super().batches(data)
        if not Path(data).expanduser().exists():
            raise FileNotFoundError(
                f"{data} is neither a split ({', '.join(SPLITS)}) nor a file of text; give one of these"
            )
        tokens = self.vocabulary.encode(read_text(Path(data).expanduser()))
        num_unknown = int((tokens == self.vocabulary.words.index(UNK)).sum())
        if num_unknown and jax.process_index() == 0:
            _log.warning(
                "%s of the %s tokens of %s are not in the vocabulary of the run, and are read as %s",
                f"{num_unknown:,}", f"{len(tokens):,}", data, UNK,
            )  # fmt: skip
        assert isinstance(self.setup.task, LM)
        return self.setup.task.batches_of(tokens, self.vocabulary.separator)

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
        logits_BTV = self._run(self.state.params, self._read(text)[None])
        return np.asarray(logits_BTV)[0, :, : len(self.vocabulary)]

    def _to_torch(self, tensors: Mapping[str, Outgoing]) -> Mapping[str, Outgoing]:
        assert isinstance(self.setup.task, LM)
        return to_torch(tensors, self.setup.task)

    def _texts(self) -> dict[str, str]:
        return {WORDS: json.dumps(self.vocabulary.words)}

    @functools.cached_property
    def _run(self) -> Callable[..., jax.Array]:
        """(parameters, tokens) -> logits; compiled once for every length of a text."""
        layout, frozen = self.setup.layout, self.state.frozen
        return jax.jit(lambda params, tokens_BT: layout.merge(params, frozen)(tokens_BT))

    def sample(
        self, prompt: str = "", *, length: int = 50, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """A text that begins with the prompt; see `sample`."""
        assert isinstance(self.setup.task, LM)
        tokens = self._read(prompt)
        separator = self.vocabulary.separator if self.setup.task.reads_lines else None
        numbers = {"length": length, "temperature": temperature, "seed": seed}
        new = self.sample_tokens(tokens, separator, **numbers)
        return self.vocabulary.decode(np.concatenate([tokens, new])[1:])

    def sample_tokens(
        self,
        prompt: np.ndarray,
        separator: int | None = None,
        *,
        length: int = 50,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> np.ndarray:
        """The tokens that follow a prompt, int32 [length], token by token from the carried state.

        Args:
          prompt: token ids [tokens], at least one.
          separator: the token after which the model starts a line afresh; None if there is none.
          length, temperature, seed: as of `sample`.
        Raises:
          ValueError: a token is outside the vocabulary, or a number is out of range.
        """
        check_at_least(1, length=length, num_tokens=len(prompt))
        check_at_least(0, seed=seed)
        require(
            math.isfinite(temperature) and temperature >= 0,
            f"temperature={temperature}: use a finite temperature, and no negative number",
        )
        num_words = len(self.vocabulary)
        check_tokens(prompt, num_words)
        layout, params, frozen = self.setup.layout, self.state.params, self.state.frozen

        @jax.jit
        def step(params, carry, token, key):
            token_BT = token[None, None]
            resets_BT = None if separator is None else token_BT == separator
            carry, logits_TBV = layout.merge(params, frozen).unroll(token_BT, carry, resets_BT)
            logits_V = logits_TBV[0, 0, :num_words]
            if temperature == 0:
                return carry, jnp.argmax(logits_V).astype(jnp.int32)
            drawn = jax.random.categorical(key, logits_V / temperature)
            return carry, drawn.astype(jnp.int32)

        carry = self.model.layers.initial_carry(1)
        keys = jax.random.split(jax.random.key(seed), length)
        for known in prompt[:-1]:
            carry, _ = step(params, carry, jnp.int32(known), keys[0])
        token, tokens = jnp.int32(prompt[-1]), []
        for key in keys:
            carry, token = step(params, carry, token, key)
            tokens.append(token)  # on the device: nothing waits for it here
        return np.asarray(jax.device_get(tokens), np.int32)

    def _read(self, prompt: str) -> np.ndarray:
        """Its tokens, after one `<eos>`: the model reads it as the start of a line."""
        tokens = self.vocabulary.encode(prompt, strict=True)
        return np.insert(tokens, 0, self.vocabulary.separator)


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
