"""Models and machines to plan for, and what programs send."""

import functools
from collections import Counter
from pathlib import Path

from jaxpar.lm import LM
from lib import api

EXAMPLES = Path(__file__).parents[2] / "examples"


CPU, H100 = map(api.machine_of, ("cpu", "h100"))
# The parts of a step's time, as a plan prints them.
SHOWN = {
    "layers": "layers", "head": "output head", "bubble": "pipeline bubble", "sending": "communication",
    "update": "optimizer", "ticks": "overhead",
}  # fmt: skip


@functools.cache
def task_of(name):
    """Five models, of sizes at which memory is worth a thought."""
    if name == "lm":
        return LM(4, 128, 128, vocab_size=1920, batch_size=32, seq_len=16, dropout=0.1)
    if name == "mlstm":
        return LM(2, 32, 32, vocab_size=384, batch_size=32, seq_len=16, layer="mlstm")
    spec, sizes = {
        "gru": ("forecaster.py:Forecast", {"width": 128, "batch_size": 16}),
        "transformer": (
            "transformer.py:Characters",
            {"width": 128, "batch_size": 32, "seq_len": 32},
        ),
        "mixed": ("mixed.py:Digits", {"width": 128, "batch_size": 64, "num_convs": 3}),
        "hybrid": ("hybrid.py:Digits", {"batch_size": 64}),
    }[name]
    return api.task_class(f"{EXAMPLES}/{spec}")(**sizes)


def sums_of(parts, axes):
    """(op, axes) -> bytes of all runs, of collectives over some of these axes."""
    sums = Counter()
    for part in parts:
        if {*part.axes} <= {*axes}:
            runs = part.runs if hasattr(part, "runs") else part.count
            sums[part.op, part.axes] += runs * part.bytes
    return sums
