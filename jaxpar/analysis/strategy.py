"""Which split of a layer moves the fewest bytes: of the batch, of its columns or of its rows."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxpar.base.trees import whole_bytes


class SplitCost(NamedTuple):
    """What one split of a layer makes every device send in a training step.

    Attributes:
      split: "data", "column" or "row".
      forward_bytes, backward_bytes: sent by each device.
      exchanged: what they are, in words.
      obstacle: why sizes do not allow this split; empty if they do.
    """

    split: str
    forward_bytes: float
    backward_bytes: float
    exchanged: str
    obstacle: str

    @property
    def total_bytes(self) -> float:
        """Sent by each device, forward and backward."""
        return self.forward_bytes + self.backward_bytes


class Advice(NamedTuple):
    """How to split a layer; `print` shows the numbers behind it.

    Attributes:
      layer: its kind and sizes.
      batch: rows of the global batch.
      num_devices: that it is split over.
      costs: of "data", "column" and "row".
      flip_batch: the smallest batch at which splitting the batch moves no more than the better of those
        splits of the weights that sizes allow; below it, the weights should be split.
    """

    layer: str
    batch: int
    num_devices: int
    costs: tuple[SplitCost, ...]
    flip_batch: int

    @property
    def best(self) -> str:
        """The split that moves the fewest bytes, of those that sizes allow."""
        return min((x for x in self.costs if not x.obstacle), key=lambda x: x.total_bytes).split

    def __str__(self) -> str:
        """A table."""
        lines = [f"{self.layer}, batch {self.batch}, {self.num_devices} devices: {self.best} split"]
        for cost in self.costs:
            line = f"  {cost.split:6} {cost.total_bytes:14,.0f} bytes/device  {cost.exchanged}"
            lines.append(line + f"; {cost.obstacle}" * bool(cost.obstacle))
        flips = f"below batch {self.flip_batch:,} split the weights, from there on the batch"
        always = "split the batch, whatever its size"
        return "\n".join([*lines, f"  {flips if self.flip_batch > 1 else always}"])


def strategy_for(
    layer: nnx.Module,
    batch: int | tuple[int, ...],
    num_devices: int,
    *,
    is_first: bool = False,
) -> Advice:
    """Which split of a layer over some devices moves the fewest bytes.

    For n devices, gradients of P bytes, and inputs and outputs of X and Y bytes (the whole batch's):

        data     gradients added                                  2 P       (n-1)/n
        column   outputs stacked, gradients of the inputs added   (Y + 2 X) (n-1)/n
        row      outputs added, gradients of the inputs stacked   (2 Y + X) (n-1)/n

    Data parallelism has the activations split by rows before and after the layer; the other two have them
    whole on every device (Krizhevsky 2014, arXiv:1404.5997, section 3). A ring sends (n-1)/n of an array
    once to stack (all-gather) and twice to add (all-reduce), and no algorithm can send less
    (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). X and Y grow with the batch and
    P does not, hence the flip. A dense layer has many parameters for each input and flips late; a
    convolution uses its few at every position of an image and flips early.

    Args:
      layer: one with a `kernel` [..., in, out], such as `nn.Linear`, `nn.Conv` and Flax's own; may be
        abstract (`nnx.eval_shape`).
      batch: rows of the global batch, or the input's shape if it has more dims than [batch, in].
      num_devices: over which the layer is split.
      is_first: whether the gradient of its input is not needed.
    Raises:
      ValueError: the layer has no kernel, the shape does not fit it, there is a single device, or no size
        can be split.
    """
    if num_devices < 2:
        raise ValueError(f"num_devices={num_devices} is too small\nFix: use 2 or more.")
    shape = _input_shape(layer, batch)
    graphdef, params = nnx.split(layer)
    kernel = params["kernel"]
    in_size, out_size = kernel.shape[-2:]
    x = jax.ShapeDtypeStruct(shape, kernel.dtype)
    y: Any = jax.eval_shape(lambda params, x: nnx.merge(graphdef, params)(x), params, x)
    P, X, Y = map(whole_bytes, (params, x, y))
    X, part = 0 if is_first else X, (num_devices - 1) / num_devices

    def cost(split: str, forward: int, backward: int, exchanged: str, name: str, size: int):
        obstacle = f"{name}={size} does not divide by {num_devices}" if size % num_devices else ""
        exchanged = exchanged.partition(", ")[0] if is_first else exchanged
        return SplitCost(split, forward * part, backward * part, exchanged, obstacle)

    costs = (
        cost("data", 0, 2 * P, "gradients added", "batch", shape[0]),
        cost("column", Y, 2 * X, "outputs stacked, gradients of inputs added", "out", out_size),
        cost("row", 2 * Y, X, "outputs added, gradients of inputs stacked", "in", in_size),
    )
    if all(cost.obstacle for cost in costs):
        obstacles = ", ".join(cost.obstacle for cost in costs)
        raise ValueError(f"no split: {obstacles}\nFix: use sizes that divide by {num_devices}.")
    by_weights = [cost.total_bytes / shape[0] for cost in costs[1:] if not cost.obstacle]
    flip_batch = math.ceil(costs[0].total_bytes / min(by_weights)) if by_weights else 1
    window = f", window {'x'.join(map(str, kernel.shape[:-2]))}" * (len(kernel.shape) > 2)
    name = f"{type(layer).__name__} {in_size}x{out_size}{window}"
    return Advice(name, shape[0], num_devices, costs, flip_batch)


def _input_shape(layer: nnx.Module, batch: int | tuple[int, ...]) -> tuple[int, ...]:
    kernel = getattr(layer, "kernel", None)
    if kernel is None or len(kernel.shape) < 2:
        raise ValueError(
            f"layer={type(layer).__name__} has no kernel [..., in, out]\nFix: give one that has."
        )
    in_size = kernel.shape[-2]
    shape = (batch, in_size) if isinstance(batch, int) else tuple(batch)
    if len(shape) < len(kernel.shape) or shape[-1] != in_size or min(shape) < 1:
        raise ValueError(
            f"batch={shape} does not fit the kernel {tuple(kernel.shape)}\n"
            f"Fix: give (rows, ...{', height, width' * (len(kernel.shape) == 4)}, {in_size})."
        )
    return shape
