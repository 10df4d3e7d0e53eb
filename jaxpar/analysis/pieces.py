"""The pieces that every training step is made of, and what each has to do: FLOPs and bytes.

`cost` puts a step together from them, `calibrate` measures them. Float32; `Hardware` knows other matmuls.

Legend: t time steps, b rows, H hidden, h = H / tensor, V vocabulary (or a device's part of it).
"""

import math

from jaxpar.analysis.hardware import Work

WORD = 4  # bytes of a float32

# Arrays of the size of the parameters that an optimizer keeps; sgd one more with momentum.
MOMENTS = {"adam": 2, "adamw": 2, "rmsprop": 1, "sgd": 0}

FORWARD, BACKWARD, HEAD, DROPOUT = "layer forward", "layer backward", "head", "dropout"


def layer_forward(t: int, b: int, H: int, h: int) -> Work:
    """One LSTM layer over a unit, with what it keeps for the backward pass (`nn.lstm.lstm_forward`).

    Two matmuls; W_x is read once, W_h at every step. z is written and read, and seven arrays are kept.
    """
    return Work(
        FORWARD,
        (t, b, _mean_width(H, h)),
        flops=2 * 2 * t * b * H * 4 * h,
        bytes=WORD * ((1 + t) * H * 4 * h + 17 * t * b * h),
        turns=t,
    )


def layer_backward(t: int, b: int, H: int, h: int) -> Work:
    """Its backward pass (`nn.lstm.lstm_backward`), gradients added to those of earlier units.

    Four matmuls, one of them at every step; two kernels' gradients are made, read, and written.
    """
    return Work(
        BACKWARD,
        (t, b, _mean_width(H, h)),
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


def update(elements: int, optimizer: str) -> Work:
    """From gradients to new parameters: norm, clipping, the optimizer's moments, the sum."""
    passes = 6 + 2 * MOMENTS[optimizer]
    return Work(optimizer, (elements,), flops=0, bytes=passes * WORD * elements)


def copy(num_bytes: float) -> Work:
    """Bytes read and written."""
    return Work("", (), flops=0, bytes=2 * num_bytes)


def _mean_width(H: int, h: int) -> int:
    """A layer split over `tensor` is as slow as the whole one of as many weights."""
    return round(math.sqrt(H * h))
