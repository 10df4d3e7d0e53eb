"""Language models of deep LSTM networks: texts and batches, the model, samples, weights from PyTorch."""

from jaxpar.tasks.lm.buckets import (
    BucketedSentences,
    PackedSentences,
    Sentences,
    choose_edges,
)
from jaxpar.tasks.lm.corpus import Corpus, Vocabulary, load_corpus
from jaxpar.tasks.lm.loaded import TextRun
from jaxpar.tasks.lm.model import LanguageModel
from jaxpar.tasks.lm.sample import sample
from jaxpar.tasks.lm.streams import IGNORE, Batch, TokenStreams
from jaxpar.tasks.lm.task import LM
from jaxpar.tasks.lm.weights import export_weights, import_weights

__all__ = [
    "LM",
    "LanguageModel",
    "Batch",
    "IGNORE",
    "TokenStreams",
    "Sentences",
    "BucketedSentences",
    "PackedSentences",
    "choose_edges",
    "Corpus",
    "Vocabulary",
    "load_corpus",
    "TextRun",
    "sample",
    "export_weights",
    "import_weights",
]
