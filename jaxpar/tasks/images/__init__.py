"""Classifying images, with convolutions and dense layers that the devices split in different ways."""

from jaxpar.tasks.images.digits import load_digits
from jaxpar.tasks.images.model import HybridConvNet
from jaxpar.tasks.images.task import STRATEGIES, Images

__all__ = ["Images", "STRATEGIES", "HybridConvNet", "load_digits"]
