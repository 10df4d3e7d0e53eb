"""One side of the comparison: the training step of torch.nn.LSTM.

python -m benchmarks.single_device.torch_side A
python -m benchmarks.single_device.torch_side C cuda tf32|float32|autocast|bfloat16

tf32: matmuls of float32 round to TF32. autocast: bfloat16 where autocast thinks so, float32 parameters.
bfloat16: the parameters as well.
"""

import contextlib
import os
import sys

import torch
from torch import nn

from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work


class Model(nn.Module):
    """Embedding, LSTM, head; time-major, which is what the kernels like."""

    def __init__(self, work: Work):
        super().__init__()
        self.embedding = nn.Embedding(work.vocab_size, work.embed_size)
        self.lstm = nn.LSTM(work.embed_size, work.hidden_size, work.num_layers)
        self.head = nn.Linear(work.hidden_size, work.vocab_size)
        weights = {name: torch.from_numpy(value) for name, value in work.weights().items()}
        with torch.no_grad():
            self.embedding.weight.copy_(weights["table"])
            self.head.weight.copy_(weights["kernel"].T)
            self.head.bias.copy_(weights["bias"])
            for layer in range(work.num_layers):
                for theirs, ours in (("ih", "w_x"), ("hh", "w_h")):
                    kernel = weights[f"{ours}_{layer}"]
                    getattr(self.lstm, f"weight_{theirs}_l{layer}").copy_(kernel.flatten(1).T)
                    getattr(self.lstm, f"bias_{theirs}_l{layer}").zero_()
                # One bias a layer is trained, the other stays zero.
                getattr(self.lstm, f"bias_hh_l{layer}").requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, B] -> [T, B, V]."""
        return self.head(self.lstm(self.embedding(tokens))[0])


def main() -> None:
    """Serves steps."""
    work = WORKS[sys.argv[1]]
    device, numbers = sys.argv[2:] or ("cpu", "float32")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision("high" if numbers == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = numbers == "tf32"
    model = Model(work).to(device, torch.bfloat16 if numbers == "bfloat16" else torch.float32)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), LEARNING_RATE)
    inputs, targets = (torch.from_numpy(a.T.copy()).long().to(device) for a in work.text())
    cast = numbers == "autocast"

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16) if cast else contextlib.nullcontext():
            logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    if device == "cuda":
        serve(step, lambda: torch.cuda.max_memory_allocated() / 2**20)
    else:
        serve(step)


if __name__ == "__main__":
    main()
