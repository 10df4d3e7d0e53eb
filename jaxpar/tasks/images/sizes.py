"""Sizes of the network for images, as arithmetic."""

from collections.abc import Sequence


def num_features(channels: Sequence[int], image_shape: Sequence[int]) -> int:
    """The number of features that the convolutions hand to the dense layers per image."""
    height, width, _ = image_shape
    num_poolings = len(channels) // 2
    return (height >> num_poolings) * (width >> num_poolings) * channels[-1]
