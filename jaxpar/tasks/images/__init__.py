"""Classifying images, with convolutions and dense layers that the devices split in different ways."""

from jaxpar.base.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
