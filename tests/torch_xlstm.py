"""Writes torch_xlstm.npz: an mLSTM and an sLSTM block, their inputs, outputs and gradients, by their authors.

    python tests/torch_xlstm.py

Made with xlstm 2.0.6 and PyTorch 2.13 on a CPU; needs these two and NumPy alone.
"""

import functools
from pathlib import Path

import numpy as np
import torch
from xlstm.blocks.mlstm.block import mLSTMBlockConfig
from xlstm.blocks.mlstm.layer import mLSTMLayerConfig
from xlstm.blocks.slstm.block import sLSTMBlockConfig
from xlstm.blocks.slstm.layer import sLSTMLayerConfig
from xlstm.components.feedforward import FeedForwardConfig
from xlstm.xlstm_block_stack import xLSTMBlockStack, xLSTMBlockStackConfig

B, T, W, HEADS = 2, 7, 8, 2


def main() -> None:
    """Weights, inputs and cotangents are random; the gradients are those of a sum of products."""
    torch.manual_seed(20)
    stack = xLSTMBlockStack(
        xLSTMBlockStackConfig(
            mlstm_block=mLSTMBlockConfig(
                mLSTMLayerConfig(num_heads=HEADS, round_proj_up_to_multiple_of=2 * W)
            ),
            slstm_block=sLSTMBlockConfig(
                sLSTMLayerConfig(backend="vanilla", num_heads=HEADS),
                FeedForwardConfig(proj_factor=4 / 3),
            ),
            context_length=T, num_blocks=2, embedding_dim=W, slstm_at=[1],
        )
    )  # fmt: skip
    # By tanh, as the example has it; theirs is by erf.
    stack.blocks[1].ffn.act_fn = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    with torch.no_grad():
        for parameter in stack.parameters():  # some begin as zeros
            parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(B, T, W, requires_grad=True)
    y = stack(x)
    dy = torch.randn_like(y)
    torch.sum(y * dy).backward()
    arrays = {"x": x, "y": y, "dy": dy, "dx": x.grad}
    for name, parameter in stack.named_parameters():
        arrays |= {f"weights/{name}": parameter, f"gradients/{name}": parameter.grad}
    path = Path(__file__).with_suffix(".npz")
    np.savez_compressed(path, **{name: a.detach().numpy() for name, a in arrays.items()})


if __name__ == "__main__":
    main()
