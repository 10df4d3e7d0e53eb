"""Layers in float64, from their definitions."""

from typing import NamedTuple

import numpy as np

# The promise: bfloat16 has 8 bits, float32 24, and the roundings of some tens of operations add up.
RELATIVE_ERRORS = {"float32": 1e-5, "bfloat16": 2e-2}


def assert_close(actual, expected, bound):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


class Step(NamedTuple):
    """What one time step leaves behind; gates i, f, g, o."""

    x: np.ndarray
    h_before: np.ndarray
    c_before: np.ndarray
    i: np.ndarray
    f: np.ndarray
    g: np.ndarray
    o: np.ndarray
    c: np.ndarray


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def forward(params, carry, x):
    """State after the last step, outputs, steps."""
    (w_x, w_h, b), (h, c) = params, carry
    outputs, steps = [], []
    for x_t in x:
        z = np.einsum("bi,igh->gbh", x_t, w_x) + np.einsum("bj,jgh->gbh", h, w_h) + b[:, None]
        i, f, g, o = sigmoid(z[0]), sigmoid(z[1]), np.tanh(z[2]), sigmoid(z[3])
        c_next = f * c + i * g
        steps.append(Step(x_t, h, c, i, f, g, o, c_next))
        h, c = o * np.tanh(c_next), c_next
        outputs.append(h)
    return (h, c), np.stack(outputs), steps


def backward(params, steps, d_carry, dy):
    """Gradients of the weights, of the state before the first step, and of the inputs."""
    w_x, w_h, b = params
    d_w_x, d_w_h, d_b, dx = np.zeros_like(w_x), np.zeros_like(w_h), np.zeros_like(b), []
    dh, dc = d_carry
    for s, dy_t in zip(reversed(steps), reversed(dy), strict=True):
        dh, tanh_c = dh + dy_t, np.tanh(s.c)
        dc = dc + dh * s.o * (1 - tanh_c**2)
        dz = np.stack(
            [
                dc * s.g * s.i * (1 - s.i),
                dc * s.c_before * s.f * (1 - s.f),
                dc * s.i * (1 - s.g**2),
                dh * tanh_c * s.o * (1 - s.o),
            ]
        )
        d_w_x += np.einsum("bi,gbh->igh", s.x, dz)
        d_w_h += np.einsum("bj,gbh->jgh", s.h_before, dz)
        d_b += dz.sum(1)
        dx.append(np.einsum("gbh,igh->bi", dz, w_x))
        dh, dc = np.einsum("gbh,jgh->bj", dz, w_h), dc * s.f
    return (d_w_x, d_w_h, d_b), (dh, dc), np.stack(dx[::-1])


def draw(T, B, I, H, seed):  # noqa: E741
    """Weights, state and inputs as a trained layer may have them, and cotangents of state and outputs."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = (
        normal(I, 4, H) / np.float32(I**0.5),
        normal(H, 4, H) / np.float32(H**0.5),
        normal(4, H),
    )
    arguments = params, (normal(B, H), normal(B, H)), normal(T, B, I)
    return arguments, ((normal(B, H), normal(B, H)), normal(T, B, H))
