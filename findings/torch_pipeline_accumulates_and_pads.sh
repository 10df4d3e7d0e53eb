#!/usr/bin/env bash
# Two schedules of torch.distributed.pipelining that return other numbers than the plain model.
#
# Guess: calling `step` twice before the optimizer adds both gradients, as `backward` does. A batch that does not
#   divide by the microbatches has a smaller last one.
# Behavior: after each `step` all gradients are divided by the number of microbatches, also those that were there
#   before. So the first batch counts half as much with two microbatches. Ten rows in four microbatches come back
#   as twelve: buffers have the size of the first one, and rows that nothing filled hold what was in memory.
# Seen with torch 2.13.0 on CPU, gloo, Python 3.11:
#   the plain model: -6.0
#   two steps: -4.0
#   rows: 12, of them [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and [8.0, 9.0] in place
# What helps: clear gradients before each `step`; with more microbatches instead of more steps the mean is that of
#   all rows. Pad a batch to a multiple of the microbatches, with a weight of 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/pipelines.py" <<'END_OF_FILE'
import sys

import torch
from torch import distributed, multiprocessing
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

X, TARGETS = torch.ones(4, 1), [torch.full((4, 1), 3.0), torch.full((4, 1), 2.0)]


def loss(y, target):
    return ((y - target) ** 2).mean()


def layer():
    made = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(made.weight)
    return made


def run(rank, meet):
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    own = layer()
    schedule = ScheduleGPipe(PipelineStage(own, rank, 2, torch.device("cpu")), 2, loss_fn=loss)
    for target in TARGETS:
        schedule.step(X) if rank == 0 else schedule.step(target=target)
    if rank:
        print("two steps:", own.weight.grad.item(), flush=True)
    passes = PipelineStage(torch.nn.Identity(), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(passes, 4)
    rows = schedule.eval(torch.arange(10.0)[:, None]) if rank == 0 else schedule.eval()
    if rank:
        rows = rows[:, 0].tolist()
        print(f"rows: {len(rows)}, of them {rows[:6]} and {rows[9:11]} in place")
    distributed.destroy_process_group()


if __name__ == "__main__":
    first, second = layer(), layer()
    for target in TARGETS:
        loss(second(first(X)), target).backward()
    print("the plain model:", second.weight.grad.item(), flush=True)
    multiprocessing.spawn(run, args=(sys.argv[1],), nprocs=2)
END_OF_FILE
"$folder/env/bin/python" "$folder/pipelines.py" "$folder/meet" 2>"$folder/errors" | tee "$folder/found"
diff "$folder/found" - <<'END_OF_FILE'
the plain model: -6.0
two steps: -4.0
rows: 12, of them [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and [8.0, 9.0] in place
END_OF_FILE
echo "as described"
