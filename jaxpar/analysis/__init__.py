"""What a compiled program does, and what a step did: collectives, FLOPs, memory, spans of time.

Training imports nothing from it, from `planning` or from `pictures`.
"""

from jaxpar.base.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
