"""The task of a language model: its options, model and data.

Plain data: what needs JAX or NumPy is imported where it is used.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jaxpar.base.axes import TENSOR
from jaxpar.base.checks import check_divides, require
from jaxpar.base.paths import local_path
from jaxpar.config import Parallel, PipelineConfig
from jaxpar.lm.options import Options

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx

    from jaxpar.lm.corpus import Corpus
    from jaxpar.lm.model import LanguageModel
    from jaxpar.lm.streams import Batch, TextBatches
    from jaxpar.model.weights import Weights

# The vocabulary is padded to a multiple of this, so that it splits over any usual mesh and every mesh
# trains the same model (Megatron-LM does likewise, arXiv:1909.08053).
VOCAB_MULTIPLE = 384

VOCABULARY = "vocabulary.json"


def padded(num_words: int) -> int:
    """Rows of an embedding for a number of words."""
    return -(-num_words // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclasses.dataclass(frozen=True)
class LM(Options):
    """A deep recurrent language model and its training text.

    Attributes:
      num_layers: Number of recurrent layers.
      hidden_size: Hidden size of each layer.
      embed_size: Width of the token embedding, at most the hidden size.
      vocab_size: Rows of the embedding table. By default the words of the corpus plus padding.
      num_words: Words of the vocabulary. Rows of the embedding from this number on are padding without
        probability. By default the words of the corpus, or all rows if a vocabulary size is given.
      dropout: Dropout rate, after the embedding, between layers and before the output head.
      layer: Kind of recurrent layer: LSTM, GRU, the linear recurrences RG-LRU and minGRU, sLSTM, or the
        matrix memories mLSTM and gated DeltaNet. RG-LRU, sLSTM, mLSTM and gated DeltaNet are put into
        gated residual blocks.
      num_heads: Recurrent heads per layer: blocks of hidden units that see only the state of their own block.
        With several heads, tensor parallelism sends nothing between time steps. By default 1, and 4
        for mLSTM and gated DeltaNet.
      fused: Run all time steps of an LSTM in one GPU kernel per direction. For GPUs like H100 with JAX 0.12
        or newer; no effect elsewhere. Not yet tried on a GPU.
      forget_bias: Initial bias of the forget gates, for LSTM and sLSTM.
      init_range: Range of uniform initial weights, from -R to R. 0 scales them by the width of each layer.
      tie_embedding: Use the embedding table as the output head. Needs equal embedding and hidden sizes.
      dtype: Data type of activations and matrix product inputs. Parameters, accumulation and the LSTM's cell
        state stay float32.
      corpus: Training text: python-docs (words), python-source (characters), or your own file or folder.
      level: Tokens of the text. auto takes words or characters as suits the corpus; subword learns pieces of
        words from the text (needs pip install tokenizers).
      max_vocab: Largest number of different tokens. Rarer tokens become <unk>.
      batch_size: Rows (parallel sequences) of a batch.
      seq_len: Time steps of a window. Gradients stop at its ends (truncated BPTT); the recurrent state
        continues.
      num_buckets: Largest number of length buckets. Reads each line as a sequence of its own, in batches of
        similar length up to seq-len. 0 reads the text as one long stream.
      bucket_multiple: Multiple that bucket lengths are rounded up to. With a pipeline it must be a multiple
        of the steps of a time chunk.
      packed: Read each line as a sequence of its own, several of them packed into a row of seq-len steps.
        Long lines continue in the next window.
      optimizer: Optimizer and learning rate.

    Example:
      task = jaxpar.lm.LM(num_layers=2, hidden_size=16, embed_size=16, corpus="text.txt", seq_len=8)
      result = jaxpar.fit(task, "dp2pp2", jaxpar.TrainConfig(num_steps=4))
    """

    unit: ClassVar[str] = "tokens"
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_chunks=4))
    run_class: ClassVar[str] = "jaxpar.lm.loaded:TextRun"

    @property
    def variable_length(self) -> bool:
        """Whether lines are read in buckets, so batches differ in length."""
        return self.num_buckets > 0

    @property
    def reads_lines(self) -> bool:
        """Whether each line of the text is read from the initial state."""
        return self.packed or self.num_buckets > 0

    def make_model(self, rngs: "nnx.Rngs") -> "LanguageModel":
        """The model.

        Raises:
          ValueError: vocab_size is None.
        """
        from jaxpar.lm.model import LanguageModel

        return LanguageModel(self, rngs=rngs)

    def make_batches(self, split: str, seed: int | None = None) -> "TextBatches":
        """Windows of the text as one long stream, or its lines in buckets or packed.

        Raises:
          OSError: the text cannot be read.
          ValueError: there is no such split, it is too short, or its words do not fit the vocabulary.
        """
        from jaxpar.base.parts import check_split

        check_split(split)
        corpus = self.read_text()
        return self.batches_of(getattr(corpus, split), corpus.vocabulary.separator, seed)

    def batches_of(
        self, tokens: "np.ndarray", separator: int, seed: int | None = None
    ) -> "TextBatches":
        """The batches of any text.

        Args:
          tokens: integers [tokens].
          separator: the token that ends a line.
          seed: None for evaluation.
        Raises:
          ValueError: the text is too short, or has no lines.
        """
        from jaxpar.data.bucketed import choose_edges
        from jaxpar.lm import streams

        B, T = self.batch_size, self.seq_len
        if not self.reads_lines:
            return streams.TokenStreams(tokens, B, T, seed)
        starts, lengths = streams.line_places(tokens, separator)
        text = {streams.TOKENS: tokens}
        if self.packed:
            return streams.PackedText(text, lengths, B, T, seed, starts=starts)
        edges = choose_edges(lengths, self.num_buckets, self.bucket_multiple, T, B)
        return streams.BucketedText(text, lengths, B, edges, seed, starts=starts)

    def example_batch(self) -> "Batch":
        """Random tokens: no text is read for it."""
        import numpy as np

        from jaxpar.lm.streams import Batch

        high, shape = self.num_words or self.known_vocab_size, (self.batch_size, self.seq_len)
        inputs, targets = np.random.default_rng(0).integers(0, high, (2, *shape), dtype=np.int32)
        batch = Batch(inputs, targets, starts=True, resets=inputs == 0 if self.packed else None)
        if not self.reads_lines:
            return batch
        return batch._replace(lengths=np.full(self.batch_size, self.seq_len, np.int32))

    @functools.cached_property
    def _corpus(self) -> "Corpus":
        from jaxpar.lm.corpus import load_corpus

        return load_corpus(self.corpus, self.level, self.max_vocab)

    def read_text(self) -> "Corpus":
        """The corpus, whose words the vocabulary must have room for; it is read once.

        Raises:
          OSError: it cannot be read.
          ValueError: its words do not fit the vocabulary.
        """
        corpus = self._corpus
        found, room = len(corpus.vocabulary), self.num_words or self.vocab_size
        name = "vocab_size" if self.num_words is None else "num_words"
        fact = f"{name}={room} is less than the {found} words of corpus {corpus.name!r}."
        require(
            room is None or found <= room, f"{fact}\nFix: leave it out, or use a smaller max_vocab."
        )
        fact = f"vocab_size={room} has more rows than words: corpus {corpus.name!r} has {found}."
        is_valid = self.num_words is not None or room in (None, found)
        require(is_valid, f"{fact}\nFix: use num_words={found} with it, or leave vocab_size out.")
        return corpus

    # ---- with data and devices ----

    def resolve(self) -> Self:
        """The task with the sizes of its vocabulary filled in, and the whole path of its text.

        The text is read where vocab_size does not say what is needed.
        """
        from jaxpar.lm.corpus import NAMES

        path = local_path(self.corpus).absolute()
        whole = str(path) if self.corpus not in NAMES and path.exists() else self.corpus
        task = dataclasses.replace(self, corpus=whole)  # what has changed since is read again
        if self.vocab_size is None:
            corpus = task._corpus
            words = self.num_words or len(corpus.vocabulary)
            task = dataclasses.replace(task, num_words=words, vocab_size=padded(words))
            vars(task)["_corpus"] = corpus
        return task

    def check(self, parallel: Parallel) -> None:
        """Raises a ValueError if layers or buckets do not fit the mesh and the chunks of time."""
        check_divides("hidden_size", self.hidden_size, {TENSOR: parallel.mesh.tensor})
        if self.heads > 1:
            check_divides("num_heads", self.heads, {TENSOR: parallel.mesh.tensor})
        chunk_len = self.seq_len // parallel.num_chunks
        if self.num_buckets and parallel.num_chunks > 1 and self.bucket_multiple % chunk_len:
            raise ValueError(
                f"bucket_multiple={self.bucket_multiple} is not a multiple of the {chunk_len} steps of "
                f"a time chunk.\nFix: use bucket_multiple={chunk_len}, or more chunks."
            )

    def check_batch(self, batch: "Batch") -> None:
        """Raises a ValueError for a token outside of the vocabulary."""
        from jaxpar.lm.streams import check_batch

        check_batch(batch, self.num_words or self.known_vocab_size)

    # ---- metrics, descriptions and files ----

    def metrics(self, loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Perplexity; infinity where it overflows."""
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}

    def baseline(self, split: str) -> dict[str, float]:
        """The perplexity that word frequencies alone reach."""
        from jaxpar.lm.corpus import unigram_perplexity

        corpus = self.read_text()
        # The first token is no target of the model either.
        tokens, num_words = getattr(corpus, split)[1:], len(corpus.vocabulary)
        return {"unigram perplexity": unigram_perplexity(corpus.train, tokens, num_words)}

    def describe(self) -> list[tuple[str, str]]:
        """Text, vocabulary and batches."""
        from jaxpar.base.parts import SPLITS

        corpus = self.read_text()
        words, sizes = len(corpus.vocabulary), [len(getattr(corpus, split)) for split in SPLITS]
        padding = (self.vocab_size or words) - (self.num_words or self.vocab_size or words)
        splits = ", ".join(f"{n:,} {split}" for n, split in zip(sizes, SPLITS, strict=True))
        how = f" = {self.batch_size * self.seq_len:,} tokens"
        if self.reads_lines:
            how = ", lines packed" if self.packed else " or less, in buckets"
        return [
            ("data", f"{corpus.name}, {corpus.level}s: {splits}"),
            ("vocabulary", f"{words:,}" + f" + {padding} padding" * bool(padding)),
            ("batch", f"{self.batch_size} rows x {self.seq_len} steps{how}"),
        ]

    def fingerprint(self) -> dict[str, Any]:
        """Tokens and checksum of each split."""
        from jaxpar.base.parts import SPLITS
        from jaxpar.training.fingerprint import describe_array

        corpus = self.read_text()
        return {split: describe_array(getattr(corpus, split)) for split in SPLITS}

    def files(self) -> dict[str, str]:
        """The vocabulary."""
        return {VOCABULARY: self.read_text().vocabulary.to_json()}

    def take_weights(self, weights: "Weights") -> "Weights":
        """The rows of the words that both know, by whatever ids; and PyTorch's names as the model's."""
        from jaxpar.lm.weights import with_words

        return with_words(weights, self, weights.texts.get(VOCABULARY))
