"""Language models of deep LSTM networks: texts and batches, the model, samples, weights from PyTorch."""

from jaxpar.base.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
