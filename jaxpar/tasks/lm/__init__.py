"""Language models of deep LSTM networks: texts and batches, the model, samples, weights from PyTorch."""

from typing import TYPE_CHECKING

from jaxpar._lazy import lazily

_HOMES = {
    "LM": "jaxpar.tasks.lm.task",
    "LanguageModel": "jaxpar.tasks.lm.model",
    "Batch": "jaxpar.tasks.lm.streams",
    "IGNORE": "jaxpar.tasks.lm.streams",
    "TokenStreams": "jaxpar.tasks.lm.streams",
    "Sentences": "jaxpar.tasks.lm.buckets",
    "BucketedSentences": "jaxpar.tasks.lm.buckets",
    "PackedSentences": "jaxpar.tasks.lm.buckets",
    "choose_edges": "jaxpar.tasks.lm.buckets",
    "Corpus": "jaxpar.tasks.lm.corpus",
    "Vocabulary": "jaxpar.tasks.lm.corpus",
    "load_corpus": "jaxpar.tasks.lm.corpus",
    "TextRun": "jaxpar.tasks.lm.loaded",
    "sample": "jaxpar.tasks.lm.sampling",
    "export_weights": "jaxpar.tasks.lm.weights",
    "import_weights": "jaxpar.tasks.lm.weights",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from jaxpar.tasks.lm.buckets import BucketedSentences as BucketedSentences
    from jaxpar.tasks.lm.buckets import PackedSentences as PackedSentences
    from jaxpar.tasks.lm.buckets import Sentences as Sentences
    from jaxpar.tasks.lm.buckets import choose_edges as choose_edges
    from jaxpar.tasks.lm.corpus import Corpus as Corpus
    from jaxpar.tasks.lm.corpus import Vocabulary as Vocabulary
    from jaxpar.tasks.lm.corpus import load_corpus as load_corpus
    from jaxpar.tasks.lm.loaded import TextRun as TextRun
    from jaxpar.tasks.lm.model import LanguageModel as LanguageModel
    from jaxpar.tasks.lm.sampling import sample as sample
    from jaxpar.tasks.lm.streams import IGNORE as IGNORE
    from jaxpar.tasks.lm.streams import Batch as Batch
    from jaxpar.tasks.lm.streams import TokenStreams as TokenStreams
    from jaxpar.tasks.lm.task import LM as LM
    from jaxpar.tasks.lm.weights import export_weights as export_weights
    from jaxpar.tasks.lm.weights import import_weights as import_weights
else:
    __getattr__, __dir__ = lazily(__name__, _HOMES)
