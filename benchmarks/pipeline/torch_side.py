"""One side of the comparison: the training step of torch.distributed.pipelining, two processes over gloo.

python -m benchmarks.pipeline.torch_side B 1f1b 4
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.sides import serve
from benchmarks.work import LEARNING_RATE, WORKS, Work

NUM_STAGES = 2


class Contiguous(torch.autograd.Function):
    """What is sent, activations and their gradients, has to be contiguous; a batch-first LSTM's are not."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x.contiguous()

    @staticmethod
    def backward(ctx, dx: torch.Tensor) -> torch.Tensor:
        """dx."""
        return dx.contiguous()


class Stage(nn.Module):
    """A part of the layers, with the embedding on the first stage and the head on the last."""

    def __init__(self, work: Work, stage: int):
        super().__init__()
        H, each = work.hidden_size, work.num_layers // NUM_STAGES
        self.embedding = nn.Embedding(work.vocab_size, work.embed_size) if stage == 0 else None
        self.lstm = nn.LSTM(work.embed_size if stage == 0 else H, H, each, batch_first=True)
        self.head = nn.Linear(H, work.vocab_size) if stage == NUM_STAGES - 1 else None
        weights = {name: torch.from_numpy(value) for name, value in work.weights().items()}
        with torch.no_grad():
            if self.embedding is not None:
                self.embedding.weight.copy_(weights["table"])
            if self.head is not None:
                self.head.weight.copy_(weights["kernel"].T)
                self.head.bias.copy_(weights["bias"])
            for own in range(each):
                layer = stage * each + own
                for theirs, ours in (("ih", "w_x"), ("hh", "w_h")):
                    kernel = weights[f"{ours}_{layer}"]
                    getattr(self.lstm, f"weight_{theirs}_l{own}").copy_(kernel.flatten(1).T)
                    getattr(self.lstm, f"bias_{theirs}_l{own}").zero_()
                # One bias a layer is trained, the other stays zero.
                getattr(self.lstm, f"bias_hh_l{own}").requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [b, T] on the first stage, logits [b, T, V] from the last, [b, T, H] between them."""
        x = Contiguous.apply(x) if self.embedding is None else self.embedding(x)
        y, _ = self.lstm(x)
        return Contiguous.apply(y) if self.head is None else self.head(y)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run(rank: int, cores: list[int], work: Work, kind: str, num_microbatches: int) -> None:
    """One process of the pipeline; the last one serves."""
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_STAGES)
    module = Stage(work, rank)
    stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"))
    make = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    schedule = make(stage, num_microbatches, loss_fn=loss_of)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    inputs, targets = (torch.from_numpy(a).long() for a in work.text())

    def agree(go_on: bool) -> bool:
        """What the last process, which is the one that is asked, says."""
        said = torch.tensor([go_on])
        dist.broadcast(said, NUM_STAGES - 1)
        return bool(said)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        dist.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    if rank == NUM_STAGES - 1:
        serve(lambda: agree(True) and step())
        agree(False)
    else:
        while agree(False):
            step()


def main() -> None:
    """Starts the other process and serves steps."""
    name, kind, num_microbatches = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    arguments = (cores, WORKS[name], kind, num_microbatches)
    torch.multiprocessing.set_start_method("spawn")
    other = torch.multiprocessing.Process(target=run, args=(0, *arguments), daemon=True)
    other.start()
    run(1, *arguments)


if __name__ == "__main__":
    main()
