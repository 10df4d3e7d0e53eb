"""Images with labels: scikit-learn's handwritten digits.

Dims: N images of a split, H height, W width, C colours.
"""

import functools
import importlib.util

import numpy as np

from jaxpar.base.parts import SPLITS
from jaxpar.tasks.images.model import IMAGE, LABEL

SPLIT_SEED = 0  # of the order in which images are dealt to the splits: every run tests on the same


@functools.cache
def load_digits() -> dict[str, dict[str, np.ndarray]]:
    """The 1,797 digits by split: of every 10, 7 are for train, 1 for valid and 2 for test.

    Returns:
      images float32 [N, 8, 8, 1], from 0 to 1, and labels int32 [N].
    Raises:
      ValueError: scikit-learn, which has them, is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("the digits come with scikit-learn; pip install scikit-learn")
    from sklearn import datasets

    points_NP, labels_N = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels_N))
    images_NHWC = (points_NP[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels_N = labels_N[order].astype(np.int32)
    ends = np.array([7, 8]) * len(labels_N) // 10
    parts = zip(SPLITS, np.split(images_NHWC, ends), np.split(labels_N, ends), strict=True)
    return {split: {IMAGE: images, LABEL: labels} for split, images, labels in parts}
