"""Images with labels: scikit-learn's digits, and batches of them.

Dims: N images of a split, B batch rows, H height, W width, C colours.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpar.data.streams import IGNORE, check_at_least

SPLIT_SEED = 0  # of the order in which images are dealt to the splits: every run tests on the same


class ImageBatch(NamedTuple):
    """Images with their labels.

    Attributes:
      images_BHWC: float32, from 0 to 1.
      labels_B: int32; `IGNORE` where there is no image.
    """

    images_BHWC: np.ndarray | jax.Array
    labels_B: np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Images:
    """A set of images; each split has all of its own as one batch."""

    name: str
    train: ImageBatch
    valid: ImageBatch
    test: ImageBatch

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width, colours."""
        return self.train.images_BHWC.shape[1:]

    @property
    def num_classes(self) -> int:
        """Labels go from 0 to one less."""
        return int(self.train.labels_B.max()) + 1


def load_images(name: str) -> Images:
    """A set of images by its name: of every 10, 7 are for train, 1 for valid and 2 for test.

    Raises:
      ValueError: there is no such set, or the package that has it is missing.
    """
    if name != "digits":
        raise ValueError(f"there are no images {name!r}; use 'digits'")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError(
            "the digits come with scikit-learn, which is not installed; "
            "pip install scikit-learn, or jaxpar with its extra [images]"
        ) from error
    points_NP, labels_N = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels_N))
    images_NHWC = (points_NP[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels_N = labels_N[order].astype(np.int32)
    ends = np.array([7, 8]) * len(labels_N) // 10
    splits = zip(np.split(images_NHWC, ends), np.split(labels_N, ends), strict=True)
    return Images(name, *(ImageBatch(*split) for split in splits))


class ImageBatches:
    """The batches of a split: `batch(step)` on the host, `batch_on(step, sharding)` on a mesh.

    With a seed, for training: every epoch has another order, drawn from (seed, epoch), and all batches
    are full; what does not fill one is left to other epochs. Without a seed, for evaluation: plain order,
    every image once, the last batch filled with images whose label is `IGNORE`.

    Args:
      split: all images.
      batch_size: B, over all processes.
    Raises:
      ValueError: a number is out of range, or there are too few images for a batch.
    """

    def __init__(self, split: ImageBatch, batch_size: int, seed: int | None = None):
        check_at_least(1, batch_size=batch_size)
        check_at_least(0, seed=0 if seed is None else seed)
        if seed is not None and batch_size > len(split.labels_B):
            raise ValueError(
                f"batch_size={batch_size} is more than the {len(split.labels_B)} images there are; use "
                f"{len(split.labels_B)} or less"
            )
        self.split, self.batch_size, self.seed = split, batch_size, seed

    @property
    def num_windows(self) -> int:
        """Batches in an epoch."""
        num_images = len(self.split.labels_B)
        return (
            num_images // self.batch_size
            if self.seed is not None
            else -(-num_images // self.batch_size)
        )

    @property
    def num_targets(self) -> int:
        """Images in an epoch."""
        return (
            self.num_windows * self.batch_size
            if self.seed is not None
            else len(self.split.labels_B)
        )

    def batch(self, step: int, rows: slice = slice(None)) -> ImageBatch:
        """The batch of a step, counted from 0 over all epochs; only some of its rows, if asked."""
        epoch, window = divmod(step, self.num_windows)
        places_B = np.arange(window * self.batch_size, (window + 1) * self.batch_size)[rows]
        there_B = places_B < len(self.split.labels_B)
        places_B = np.where(there_B, places_B, 0)
        if self.seed is not None:
            rng = np.random.default_rng([self.seed, epoch])
            places_B = rng.permutation(len(self.split.labels_B))[places_B]
        labels_B = np.where(there_B, self.split.labels_B[places_B], IGNORE).astype(np.int32)
        return ImageBatch(self.split.images_BHWC[places_B], labels_B)

    def batch_on(self, step: int, sharding: NamedSharding) -> ImageBatch:
        """The batch of a step as global arrays on a mesh; each process reads only its own rows.

        Args:
          sharding: of the batch dim, such as `step.batch_sharding` gives.
        """
        read = functools.cache(lambda start, stop: self.batch(step, slice(start, stop)))

        def array(name: str, shape: tuple[int, ...]) -> jax.Array:
            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                start, stop, _ = (index or (slice(None),))[0].indices(self.batch_size)
                return getattr(read(start, stop), name)

            return jax.make_array_from_callback((self.batch_size, *shape), sharding, part)

        return ImageBatch(
            array("images_BHWC", self.split.images_BHWC.shape[1:]), array("labels_B", ())
        )
