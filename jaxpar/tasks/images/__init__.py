"""Classifying images, with convolutions and dense layers that the devices split in different ways."""

from typing import TYPE_CHECKING

from jaxpar._lazy import lazily

_HOMES = {
    "Images": "jaxpar.tasks.images.task",
    "STRATEGIES": "jaxpar.tasks.images.strategies",
    "HybridConvNet": "jaxpar.tasks.images.model",
    "load_digits": "jaxpar.tasks.images.digits",
}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from jaxpar.tasks.images.digits import load_digits as load_digits
    from jaxpar.tasks.images.model import HybridConvNet as HybridConvNet
    from jaxpar.tasks.images.strategies import STRATEGIES as STRATEGIES
    from jaxpar.tasks.images.task import Images as Images
else:
    __getattr__, __dir__ = lazily(__name__, _HOMES)
