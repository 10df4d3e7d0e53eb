from jaxpar.tasks.lm.task import LM as LM
from jaxpar.tasks.lm.model import LanguageModel as LanguageModel
from jaxpar.tasks.lm.streams import Batch as Batch
from jaxpar.tasks.lm.streams import IGNORE as IGNORE
from jaxpar.tasks.lm.streams import TokenStreams as TokenStreams
from jaxpar.tasks.lm.corpus import Corpus as Corpus
from jaxpar.tasks.lm.vocabulary import Vocabulary as Vocabulary
from jaxpar.tasks.lm.corpus import load_corpus as load_corpus
from jaxpar.tasks.lm.loaded import TextRun as TextRun
from jaxpar.tasks.lm.loaded import sample as sample

__all__: list[str]
