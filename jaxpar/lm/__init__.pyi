from jaxpar.lm.task import LM as LM
from jaxpar.lm.model import LanguageModel as LanguageModel
from jaxpar.lm.streams import Batch as Batch
from jaxpar.lm.streams import IGNORE as IGNORE
from jaxpar.lm.streams import TokenStreams as TokenStreams
from jaxpar.lm.corpus import Corpus as Corpus
from jaxpar.lm.vocabulary import Vocabulary as Vocabulary
from jaxpar.lm.corpus import load_corpus as load_corpus
from jaxpar.lm.loaded import TextRun as TextRun
from jaxpar.lm.loaded import sample as sample

__all__: list[str]
