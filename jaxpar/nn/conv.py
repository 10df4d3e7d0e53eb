"""Convolutions."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jaxpar.nn.param import named_param


class Conv(nnx.Conv):
    """Flax's convolution, its kernel [*window, in, out] and bias [out] with named dims.

    A rule for the last dim splits its outputs (column-parallel), one for the dim before it splits its inputs
    (row-parallel). A rule for the batch of images alone leaves the kernel whole.

    Example:
      conv = jaxpar.nn.Conv(3, 16, (3, 3), dims=(None, None, "input", "hidden"), rngs=rngs)
      print(conv(jnp.ones((2, 8, 8, 3))).shape)  # (2, 8, 8, 16)
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        kernel_size: int | Sequence[int],
        *,
        dims: tuple[str | None, ...],
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Draws the kernel with variance 1 / (window * in_size).

        Args:
          dims: the names of the kernel's dims.
          options: those of `nnx.Conv`, such as strides and padding.
        Raises:
          ValueError: the number of names is not that of the kernel's dims.
        """
        super().__init__(in_size, out_size, kernel_size, rngs=rngs, **options)
        self.kernel = named_param(self.kernel[...], dims)
        if self.bias is not None:
            self.bias = named_param(self.bias[...], dims[-1:])
