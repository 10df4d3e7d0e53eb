"""Writes torch_gru.npz: a `torch.nn.GRU` of two layers, its inputs, outputs and gradients, by PyTorch.

    python tests/torch_gru.py

Made with PyTorch 2.13 on a CPU; needs PyTorch and NumPy alone.
"""

from pathlib import Path

import numpy as np
import torch

T, B, H, LAYERS = 7, 3, 6, 2


def main() -> None:
    """Weights, state, inputs and cotangents are random; the gradients are those of sums of products."""
    torch.manual_seed(20)
    gru = torch.nn.GRU(H, H, LAYERS)
    x, h_0 = torch.randn(T, B, H, requires_grad=True), torch.randn(LAYERS, B, H, requires_grad=True)
    y, h_n = gru(x, h_0)
    dy, dh_n = torch.randn_like(y), torch.randn_like(h_n)
    (torch.sum(y * dy) + torch.sum(h_n * dh_n)).backward()
    arrays = {"x": x, "h_0": h_0, "y": y, "h_n": h_n, "dy": dy, "dh_n": dh_n}
    arrays |= {"dx": x.grad, "dh_0": h_0.grad}
    for name, parameter in gru.named_parameters():
        arrays |= {f"weights/{name}": parameter, f"gradients/{name}": parameter.grad}
    path = Path(__file__).with_suffix(".npz")
    np.savez_compressed(path, **{name: a.detach().numpy() for name, a in arrays.items()})


if __name__ == "__main__":
    main()
