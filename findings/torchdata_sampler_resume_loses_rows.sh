#!/usr/bin/env bash
# A StatefulDataLoader with a RandomSampler loses rows and repeats others when it is resumed.
#
# Guess: `shuffle=True` and `sampler=RandomSampler(data)` are the same, so both are resumed where they were.
# Behavior: the state has the generator's numbers only with `shuffle=True`, for which torchdata makes a sampler
#   of its own. Of PyTorch's RandomSampler it has how many rows were read. A new process draws another order
#   and skips as many rows of that one. Nothing is raised or printed.
# Seen with torchdata 0.11.0, torch 2.13.0, Python 3.11; 4,000 rows, stopped after 2,000:
#   shuffle=True: 0 lost, 0 twice
#   RandomSampler: 976 lost, 976 twice
#   RandomSampler with a seed: 0 lost, 0 twice
# What helps: give the sampler a generator with a seed of its own, or use shuffle=True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchdata==0.11.0 numpy
cat >"$folder/resume.py" <<'END_OF_FILE'
import collections
import itertools
import warnings

warnings.simplefilter("ignore")  # of a call that torch deprecates

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = list(range(4000))


def with_seed():
    return RandomSampler(ROWS, generator=torch.Generator().manual_seed(0))


def lost_and_twice(**options):
    torch.manual_seed(1)
    data = StatefulDataLoader(ROWS, batch_size=10, **{name: make() for name, make in options.items()})
    seen = [row for batch in itertools.islice(data, 200) for row in batch.tolist()]
    state = data.state_dict()
    torch.manual_seed(2)  # as in another process
    again = StatefulDataLoader(ROWS, batch_size=10, **{name: make() for name, make in options.items()})
    again.load_state_dict(state)
    count = collections.Counter([*seen, *(row for batch in again for row in batch.tolist())])
    return f"{len(ROWS) - len(count)} lost, {sum(times > 1 for times in count.values())} twice"


print("shuffle=True:", lost_and_twice(shuffle=lambda: True))
print("RandomSampler:", lost_and_twice(sampler=lambda: RandomSampler(ROWS)))
print("RandomSampler with a seed:", lost_and_twice(sampler=with_seed))
END_OF_FILE
"$folder/env/bin/python" "$folder/resume.py" | tee "$folder/found"
diff "$folder/found" - <<'END_OF_FILE'
shuffle=True: 0 lost, 0 twice
RandomSampler: 976 lost, 976 twice
RandomSampler with a seed: 0 lost, 0 twice
END_OF_FILE
echo "as described"
