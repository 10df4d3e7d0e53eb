"""The task of classifying images: its options, and what follows from them.

Plain data: what needs JAX or NumPy is imported where it is used.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxpar.base.axes import DATA, TENSOR
from jaxpar.base.checks import check_divides, require, require_rate, require_sizes
from jaxpar.config import OptimizerConfig, Parallel, TrainConfig
from jaxpar.mesh import MeshConfig
from jaxpar.task import Task

if TYPE_CHECKING:
    import numpy as np
    from flax import nnx

    from jaxpar.data.array import ArrayBatches
    from jaxpar.sharding import Rules
    from jaxpar.tasks.images.model import HybridConvNet

MOST_PIXELS = 2**28  # that a batch can have here


@dataclasses.dataclass(frozen=True)
class Images(Task):
    """Convolutions, then dense layers, for images.

    Attributes:
      channels: of each 3x3 convolution; a 2x2 max pooling follows every second one.
      hidden_sizes: widths of the dense layers before the last.
      dropout: rate on the input of every dense layer.
      strategy: what all devices of the mesh split: "data" the batch, "model" the weights, "hybrid" the
        batch of the convolutions and the weights of the dense layers, with an all-to-all between them.
        "hybrid-gather" has an all-gather there. See `STRATEGIES`.
      image_shape: height, width and colours of an image.
      num_classes: how many classes there are.
      dataset: "digits", the 1,797 images of 8x8 pixels that come with scikit-learn (the extra `images`).
      batch_size: images of a batch.
      optimizer: and its learning rate.
    """

    unit: ClassVar[str] = "images"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=300)
    parallel: ClassVar[Parallel] = Parallel(mesh=MeshConfig(data=-1))

    channels: tuple[int, ...] = (32, 64)
    hidden_sizes: tuple[int, ...] = (512,)
    dropout: float = dataclasses.field(default=0.2, metadata={"free": True})
    strategy: Literal["hybrid", "hybrid-gather", "data", "model"] = dataclasses.field(
        default="hybrid", metadata={"free": True}
    )
    image_shape: tuple[int, ...] = (8, 8, 1)
    num_classes: int = 10
    dataset: Literal["digits"] = "digits"
    batch_size: int = dataclasses.field(default=128, metadata={"free": True})
    optimizer: OptimizerConfig = dataclasses.field(
        default=OptimizerConfig(learning_rate=2e-3), metadata={"free": True}
    )

    def __post_init__(self):
        super().__post_init__()
        require_sizes(self, "channels", "hidden_sizes", "image_shape", "num_classes", "batch_size")
        require_rate(self, "dropout")
        require(len(self.channels) > 0, f"channels={self.channels}: give one convolution or more")
        require(
            len(self.image_shape) == 3,
            f"image_shape={self.image_shape}: give height, width and colours",
        )
        require(
            self.batch_size * math.prod(self.image_shape) <= MOST_PIXELS,
            f"batch_size={self.batch_size} x image_shape={self.image_shape} are more numbers in a batch than "
            f"{MOST_PIXELS}; use fewer or smaller images",
        )
        require(
            self.num_features > 0,
            f"image_shape={self.image_shape} is too small for the {len(self.channels) // 2} poolings of "
            f"{len(self.channels)} convolutions; use fewer channels",
        )

    @property
    def num_features(self) -> int:
        """What the convolutions hand to the dense layers per image."""
        height, width, _ = self.image_shape
        num_poolings = len(self.channels) // 2
        return (height >> num_poolings) * (width >> num_poolings) * self.channels[-1]

    @property
    def rules(self) -> "Rules":
        """Those of the strategy."""
        from jaxpar.tasks.images.strategies import STRATEGIES

        return STRATEGIES[self.strategy]

    def make_model(self, rngs: "nnx.Rngs") -> "HybridConvNet":
        """The network."""
        from jaxpar.tasks.images.model import HybridConvNet

        return HybridConvNet(self, rngs=rngs)

    def make_batches(self, split: str, seed: int | None = None) -> "ArrayBatches":
        """The images of a split, their labels, and which of them count.

        Raises:
          ValueError: there is no such split, or the images do not fit the model, or are not installed.
        """
        from jaxpar.base.parts import check_split
        from jaxpar.data.array import ArrayBatches
        from jaxpar.tasks.images.digits import load_digits
        from jaxpar.tasks.images.model import IMAGE, LABEL

        check_split(split)
        arrays = load_digits()[split]
        shape, classes = arrays[IMAGE].shape[1:], int(arrays[LABEL].max()) + 1
        for name, known in (("image_shape", shape), ("num_classes", classes)):
            require(
                getattr(self, name) == known,
                f"{name}={getattr(self, name)} of the model does not fit the images {self.dataset!r}; use "
                f"{name}={known}",
            )
        return ArrayBatches(arrays, self.batch_size, seed)

    def example_batch(self) -> "dict[str, np.ndarray]":
        """Black images: no data are read for it."""
        import numpy as np

        from jaxpar.base.parts import WEIGHT
        from jaxpar.tasks.images.model import IMAGE, LABEL

        B = self.batch_size
        return {
            IMAGE: np.zeros((B, *self.image_shape), np.float32),
            LABEL: np.zeros(B, np.int32),
            WEIGHT: np.ones(B, np.float32),
        }

    def check(self, parallel: Parallel) -> None:
        """Raises a ValueError for what this model does not have: stages, microbatches, split updates."""
        require(
            parallel.mesh.stage == 1,
            f"stage={parallel.mesh.stage}: the task images has no pipeline; use stage=1, and data and tensor "
            f"for all devices",
        )
        for name, plain in (("fsdp", False), ("update", "replicated")):
            value = getattr(parallel, name)
            require(
                value == plain,
                f"{name}={value!r} is not for the task images, whose strategy says what is split; use "
                f"{name}={plain!r}",
            )
        if self.strategy != "model":
            sizes = parallel.mesh.sizes
            parts = {axis: sizes[axis] for axis in (DATA, TENSOR) if sizes[axis] > 1}
            check_divides("batch_size", self.batch_size, parts)

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Raises a ValueError for a label that is not one of the classes."""
        import numpy as np

        from jaxpar.tasks.images.model import LABEL

        labels = np.asarray(batch[LABEL])
        if bad := [int(i) for i in np.flatnonzero((labels < 0) | (labels >= self.num_classes))[:1]]:
            raise ValueError(
                f"label {labels[bad[0]]} at position {bad[0]} is not one of the {self.num_classes} classes "
                f"(0 to {self.num_classes - 1}); set num_classes, or correct the labels"
            )

    def describe(self) -> list[tuple[str, str]]:
        """Layers, strategy, images."""
        from jaxpar.base.parts import SPLITS
        from jaxpar.tasks.images.digits import load_digits
        from jaxpar.tasks.images.model import LABEL

        channels, dense = (", ".join(map(str, s)) for s in (self.channels, self.hidden_sizes))
        splits = ", ".join(f"{len(load_digits()[split][LABEL]):,} {split}" for split in SPLITS)
        return [
            (
                "network",
                f"convolutions of {channels}; dense of {dense or 'no'}, {self.num_classes}",
            ),
            ("strategy", self.strategy),
            ("images", f"{self.dataset}: {splits}"),
            ("batch", f"{self.batch_size} images"),
        ]

    def fingerprint(self) -> dict[str, Any]:
        """Number and checksum of the images of each split, and of their labels."""
        from jaxpar.tasks.images.digits import load_digits
        from jaxpar.training.fingerprint import describe_array

        return {
            split: {name: describe_array(array) for name, array in arrays.items()}
            for split, arrays in load_digits().items()
        }
