"""What a run learns from and is measured by: a text, or images. The loop knows no more of either."""

import dataclasses
import math
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxpar.config import VOCAB_MULTIPLE, AnyConfig, Config, ImageConfig, RunConfig
from jaxpar.data.batches import make_batches
from jaxpar.data.buckets import BucketedSentences
from jaxpar.data.corpus import Corpus, load_corpus, unigram_perplexity
from jaxpar.data.images import ImageBatches, Images
from jaxpar.data.streams import TokenStreams
from jaxpar.kernel import choose_kernel, with_kernel
from jaxpar.mesh import MeshConfig
from jaxpar.training.evaluate import Evaluator, ImageEvaluator
from jaxpar.training.report import ImageEvaluation, ImageProgress, TextEvaluation, TextProgress


def complete(config: RunConfig, mesh: Mesh) -> RunConfig:
    """The config with its mesh and the size of its vocabulary filled in; see `read_vocab`.

    Raises:
      ValueError: sizes do not fit each other.
    """
    if isinstance(config, Config):
        return _on_mesh(read_vocab(config), mesh)
    return _on_mesh(config, mesh)


def _on_mesh(config: AnyConfig, mesh: Mesh) -> AnyConfig:
    sizes = MeshConfig(**mesh.shape, devices=config.mesh.devices)
    return dataclasses.replace(config, mesh=sizes).check()


def read_vocab(config: Config) -> Config:
    """The config with the size of its vocabulary; its text is read if it does not say it."""
    if config.model.vocab_size is not None:
        return config
    data = config.data
    return with_vocab(config, load_corpus(data.corpus, data.level, data.max_vocab))


class TextTask:
    """Language modelling.

    Attributes:
      config: with its mesh, the size of its vocabulary and the kernel of its layers filled in.
      kernel: why it is this one.
    """

    def __init__(self, config: Config, mesh: Mesh, corpus: Corpus):
        """Compiles nothing yet.

        Raises:
          ValueError: sizes do not fit each other, or the vocabulary does not fit the model.
        """
        config = _on_mesh(with_vocab(config, corpus), mesh)
        self.kernel = choose_kernel(config, mesh)
        self.config = with_kernel(config, self.kernel)
        self._corpus = corpus
        self._evaluator = Evaluator(self.config, mesh, corpus.vocabulary.separator)

    def batches(self) -> TokenStreams | BucketedSentences:
        """Of training."""
        tokens, separator = self._corpus.train, self._corpus.vocabulary.separator
        return make_batches(self.config, tokens, separator, self.config.train.seed)

    def evaluate(self, params: nnx.State, split: str) -> TextEvaluation:
        """Loss and perplexity on a split of the corpus, beside that of its unigrams."""
        tokens = getattr(self._corpus, split)
        loss = self._evaluator.loss(params, tokens)
        # The first token is no target of the model either.
        num_words = len(self._corpus.vocabulary)
        unigram = unigram_perplexity(self._corpus.train, tokens[1:], num_words)
        return TextEvaluation(split, loss, perplexity(loss), unigram)

    def progress(self, targets_per_second: float, **known: Any) -> TextProgress:
        """A line of training."""
        return TextProgress(
            **known, perplexity=perplexity(known["loss"]), tokens_per_second=targets_per_second
        )


def with_vocab(config: Config, corpus: Corpus) -> Config:
    """The config with the size of the vocabulary filled in, as the corpus needs it.

    Raises:
      ValueError: the corpus has more words than `model.vocab_size`.
    """
    num_words, vocab_size = len(corpus.vocabulary), config.model.vocab_size
    if vocab_size is None:
        vocab_size = -(-num_words // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    elif vocab_size < num_words:
        raise ValueError(
            f"vocab_size={vocab_size} is less than the {num_words} words of corpus "
            f"{corpus.name!r}; leave it away, or use data.max_vocab={vocab_size}"
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=vocab_size)
    )


class ImageTask:
    """Telling what images show.

    Attributes:
      config: with its mesh filled in.
    """

    def __init__(self, config: ImageConfig, mesh: Mesh, images: Images):
        """Compiles nothing yet.

        Raises:
          ValueError: sizes do not fit each other, or the images do not fit the model.
        """
        for name in ("image_shape", "num_classes"):
            if getattr(config.model, name) != getattr(images, name):
                raise ValueError(
                    f"{name}={getattr(config.model, name)} of the model does not fit the images "
                    f"{images.name!r}; use {name}={getattr(images, name)}"
                )
        self.config = _on_mesh(config, mesh)
        self._images = images
        self._evaluator = ImageEvaluator(self.config, mesh)

    def batches(self) -> ImageBatches:
        """Of training."""
        return ImageBatches(self._images.train, self.config.data.batch_size, self.config.train.seed)

    def evaluate(self, params: nnx.State, split: str) -> ImageEvaluation:
        """Loss and accuracy on a split of the images."""
        loss, accuracy = self._evaluator.evaluate(params, getattr(self._images, split))
        return ImageEvaluation(split, loss, accuracy)

    def progress(self, targets_per_second: float, **known: Any) -> ImageProgress:
        """A line of training."""
        return ImageProgress(**known, images_per_second=targets_per_second)


Task = TextTask | ImageTask


def make_task(config: RunConfig, mesh: Mesh, data: Corpus | Images) -> Task:
    """The task of a config and the data that it names.

    Raises:
      ValueError: they do not fit each other or the mesh.
    """
    if isinstance(config, ImageConfig):
        assert isinstance(data, Images)
        return ImageTask(config, mesh, data)
    assert isinstance(data, Corpus)
    return TextTask(config, mesh, data)


def perplexity(loss: float) -> float:
    """`exp(loss)`; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
