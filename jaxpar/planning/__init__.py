"""What a step of any task will cost on a machine, and which config is best there."""

from jaxpar.base.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
