"""A run of a language model: logits and samples for any text."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np

from jaxpar.base.checks import require, require_instance
from jaxpar.base.files import check_path, read_text
from jaxpar.base.parts import SPLITS
from jaxpar.base.paths import local_path
from jaxpar.data.batches import Batches
from jaxpar.lm.drawing import Draw
from jaxpar.lm.sampling import StoppedSample, sample_tokens
from jaxpar.lm.task import LM, VOCABULARY
from jaxpar.lm.vocabulary import UNK, Vocabulary
from jaxpar.lm.weights import WORDS, to_torch
from jaxpar.mesh import ONE_DEVICE, MeshConfig
from jaxpar.model.task import spec_of
from jaxpar.training.loaded import LoadedRun, load_run
from jaxpar.training.run_folder import RunFolder
from jaxpar.training.weights import Outgoing

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, repr=False)
class TextRun(LoadedRun):
    """A loaded run of a language model, with its vocabulary.

    Example:
      task = jaxpar.lm.LM(num_layers=2, hidden_size=16, embed_size=16, corpus="text.txt", seq_len=8)
      result = jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), quiet=True)
      run = jaxpar.load_run(result.out_dir)
      print(run.sample("the cat", length=5, temperature=0.8))
    """

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
        check_path("data", data)
        if data in SPLITS:
            return super().batches(data)
        if not local_path(data).exists():
            fact = f"{data} is neither a split ({', '.join(SPLITS)}) nor a file."
            raise FileNotFoundError(f"{fact}\nFix: give one of these.")
        tokens = self.vocabulary.encode(read_text(local_path(data)))
        num_unknown = int((tokens == self.vocabulary.words.index(UNK)).sum())
        if num_unknown and jax.process_index() == 0:
            _log.warning(
                "%s of the %s tokens of %s are not in the vocabulary of the run; they are read as %s",
                f"{num_unknown:,}", f"{len(tokens):,}", data, UNK,
            )  # fmt: skip
        assert isinstance(self.setup.task, LM)
        return self.setup.task.batches_of(tokens, self.vocabulary.separator)

    def logits(self, text: str) -> np.ndarray:
        """Logits of the next token after each token of a text, read from the start of a line.

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
        storage, frozen = self.setup.storage, self.state.frozen
        return jax.jit(lambda params, tokens_BT: storage.merge(params, frozen)(tokens_BT))

    def sample(
        self,
        prompt: str | Sequence[str] = "",
        *,
        length: int = 50,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        end: str | None = None,
        seed: int = 0,
    ) -> Any:
        """A text that begins with the prompt; or one for each prompt of a list; see `sample`."""
        assert isinstance(self.setup.task, LM)
        require_instance("prompt", prompt, str | Sequence, "a text, or a list of texts")
        prompts = [prompt] if isinstance(prompt, str) else [*prompt]
        separator = self.vocabulary.separator if self.setup.task.reads_lines else None
        ends = [] if end is None else self.vocabulary.encode(end, strict=True)
        fact = f"end={end!r} is {len(ends)} tokens of the run's vocabulary"
        require(end is None or len(ends) == 1, f"{fact}\nFix: use one, such as '<eos>'")
        draw = Draw.of(seed, temperature, top_k, top_p, separator)
        known = [self._read(each) for each in prompts]
        sampled = sample_tokens(self.setup, self.state, known, draw, length)
        texts = []
        for tokens, new in zip(known, sampled.tokens, strict=True):
            new = new[: np.flatnonzero(np.append(np.isin(new, ends), True))[0]]
            texts.append(self.vocabulary.decode(np.concatenate([tokens, new])[1:]))
        if sampled.signal is not None:
            fewest = min(map(len, sampled.tokens))
            told = f"stopped after {fewest} of {length} tokens"
            raise StoppedSample(told, sampled.signal, texts)
        return texts[0] if isinstance(prompt, str) else texts

    def _read(self, prompt: str) -> np.ndarray:
        """Its tokens, after one `<eos>`: the model reads it as the start of a line."""
        tokens = self.vocabulary.encode(prompt, strict=True)
        return np.insert(tokens, 0, self.vocabulary.separator)


def sample(
    run_dir: str | PathLike[str],
    prompt: str | Sequence[str] = "",
    *,
    mesh: MeshConfig = ONE_DEVICE,
    best: bool = False,
    **options: Any,
) -> Any:
    """A text that begins with the prompt and continues as the model of a run would; or one for each prompt.

    Args:
      run_dir: the folder that `fit` wrote.
      prompt: words of the run's vocabulary, or a list of such texts; the model reads each as the start of a
        line. As many prompts as stages, for each data-parallel group, leave no stage waiting.
      mesh: where the model lies; texts are the same on every mesh, up to the first draw whose two best scores
        differ by no more than rounding.
      best: use the state with the lowest validation loss, not the newest.
      options: of `TextRun.sample`: `length`, the tokens to add (50). `temperature`, which logits are divided
        by (1); 0 takes the likeliest token every time. `top_k` and `top_p` draw among so many of the
        likeliest words, or the likeliest that have this probability together (0 and 1: among all). `end`, a
        token at which a text ends, without it (None). `seed` (0): the same one gives the same text.
    Returns:
      the text, or a list of texts.
    Raises:
      ValueError: the run is of another task, a word is outside the vocabulary, a number is out of range, or
        layers of the model need all of a text at once.
      FileNotFoundError: no run, or no checkpoint in it.
      KeyboardInterrupt: SIGINT or SIGTERM has ended it; its attribute `texts` is a list of the texts so far.

    Example:
      task = jaxpar.lm.LM(num_layers=2, hidden_size=16, embed_size=16, corpus="text.txt", seq_len=8)
      result = jaxpar.fit(task, "dp1", jaxpar.TrainConfig(num_steps=4), quiet=True)
      print(jaxpar.lm.sample(result.out_dir, "the cat", length=5))
    """
    task = RunFolder(run_dir).settings().task
    fact = f"the run in {run_dir} is of the task {spec_of(task)}."
    require(isinstance(task, LM), f"{fact}\nFix: give a run of the task lm.")
    run: Any = load_run(run_dir, mesh, best=best)
    return run.sample(prompt, **options)
