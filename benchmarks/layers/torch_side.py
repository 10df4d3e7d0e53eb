"""One side: the same step by PyTorch, with `torch.nn.GRU` or `torch.nn.LSTM`.

python -m benchmarks.layers.torch_side gru '{"width": 256}'
"""

import os
import sys

import torch
from torch import nn

from benchmarks.layers.work import LEARNING_RATE, Work
from benchmarks.sides import serve


def main() -> None:
    """Serves steps."""
    kind, work = sys.argv[1], Work.from_arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    model = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](work.width, work.width, work.layers)
    with torch.no_grad():
        for layer, kernels in enumerate(work.gru()):
            for name, kernel in zip(("ih", "hh"), kernels, strict=True):
                if kind == "gru":
                    weight = torch.from_numpy(kernel).flatten(1).T
                    getattr(model, f"weight_{name}_l{layer}").copy_(weight)
                getattr(model, f"bias_{name}_l{layer}").zero_()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    x, y = (torch.from_numpy(a.swapaxes(0, 1).copy()) for a in work.batch())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x)[0], y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    serve(step)


if __name__ == "__main__":
    main()
