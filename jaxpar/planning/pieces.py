"""The pieces that every training step is made of, and what each has to do: FLOPs and bytes.

`cost` puts a step together from them, `calibrate` measures them. Float32; `Hardware` knows other matmuls.

Legend: t time steps, b rows, H hidden, h = H / tensor, V vocabulary (or a device's part of it).
"""

import math

from jaxpar.optimizer import OptimizerConfig
from jaxpar.planning.hardware import Work

WORD = 4  # bytes of a float32

# Logits that a head without units computes at once, but those of so many rows at least. A test holds them
# to the loss of the language model.
MAX_LOGITS_ON_CPU = 5 * 2**19
MAX_LOGITS = 2**27
MIN_ROWS = 128

CLIPPED, MOMENTUM = "clipped", "momentum"
FORWARD, BACKWARD, HEAD, DROPOUT = "layer forward", "layer backward", "head", "dropout"


def moments(optimizer: OptimizerConfig) -> int:
    """Arrays of the size of the parameters that the optimizer keeps."""
    kept = {"adam": 2, "adamw": 2, "rmsprop": 1, "sgd": 0}[optimizer.name]
    return kept + (optimizer.momentum > 0)


def layer_forward(t: int, b: int, H: int, h: int, layers: int) -> Work:
    """One of so many LSTM layers over a unit, with what it keeps for later (`nn.lstm.lstm_forward`).

    Two matmuls; W_x is read once, W_h at every step. z is written and read, and seven arrays are kept.
    """
    return Work(
        FORWARD,
        (t, b, _mean_width(H, h), layers),
        flops=2 * 2 * t * b * H * 4 * h,
        bytes=WORD * ((1 + t) * H * 4 * h + 17 * t * b * h),
        turns=t,
    )


def layer_backward(t: int, b: int, H: int, h: int, layers: int) -> Work:
    """Its backward pass (`nn.lstm.lstm_backward`), gradients added to those of earlier units.

    Four matmuls, one of them at every step; two kernels' gradients are made, read, and written.
    """
    return Work(
        BACKWARD,
        (t, b, _mean_width(H, h), layers),
        flops=4 * 2 * t * b * H * 4 * h,
        bytes=WORD * ((7 + t) * H * 4 * h + 26 * t * b * h),
        turns=t,
    )


def head(rows: int, H: int, V: int) -> Work:
    """Loss of so many rows and its gradients, added to those of earlier rows (`loss.cross_entropy`).

    Three matmuls; the kernel is read twice, its gradient made, read and written; logits pass eight times.
    """
    return Work(
        HEAD,
        (rows, H, V),
        flops=3 * 2 * rows * H * V,
        bytes=WORD * (5 * H * V + 8 * rows * V),
    )


def dropout(elements: int) -> Work:
    """A random mask, and what it leaves (`nn.dropout`)."""
    return Work(DROPOUT, (elements,), flops=0, bytes=2.25 * WORD * elements)


def update(elements: int, optimizer: OptimizerConfig, clip_norm: float) -> Work:
    """From gradients to new parameters: norm, clipping, the optimizer's moments, the sum."""
    clipped = clip_norm > 0
    kind = [optimizer.name] + [MOMENTUM] * (optimizer.momentum > 0) + [CLIPPED] * clipped
    return Work(
        " ".join(kind),
        (elements,),
        flops=0,
        bytes=(4 + 2 * clipped + 2 * moments(optimizer)) * WORD * elements,
    )


def copy(num_bytes: float) -> Work:
    """Bytes read and written."""
    return Work("", (), flops=0, bytes=2 * num_bytes)


def _mean_width(H: int, h: int) -> int:
    """A layer split over `tensor` is as slow as the whole one of as many weights."""
    return round(math.sqrt(H * h))
