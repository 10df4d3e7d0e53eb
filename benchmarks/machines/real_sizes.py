"""Steps at the sizes of rented clusters, compiled for machines that are not there: a row for each.

python -m benchmarks.machines.real_sizes             # all of them: half an hour of one core
python -m benchmarks.machines.real_sizes gpt v5p     # those whose names have one of these words

It needs `pip install 'jaxpar[tpu,cuda13]' mamba2-jax`. Each row is computed in a process of its own, so that
its memory on the host can be told.
"""

import argparse
import dataclasses
import json
import math
import resource
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import jaxpar
from benchmarks.machines import peer
from benchmarks.machines.cycles import count_cycles
from jaxpar import OptimizerConfig, Parallel, PipelineConfig, Task
from jaxpar.analysis import ProgramReport
from jaxpar.analysis.collectives import sent_bytes
from jaxpar.analysis.program import inspect_lowered, lower_step
from jaxpar.lm import LM
from jaxpar.model.task import find_task
from jaxpar.planning import describe, estimate_step, find_machine
from jaxpar.planning.compiled import setup_on
from jaxpar.planning.cost import StepCost
from jaxpar.step.step import check_program

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAM = OptimizerConfig("adam", 1e-3)
GB, MB = 1e9, 1e6


def lstm(layers: int, width: int, words: int, rows: int, steps: int) -> Task:
    """LSTM layers in bfloat16; embedding and head are as wide as they are."""
    sizes = {"num_layers": layers, "hidden_size": width, "embed_size": width, "vocab_size": words}
    batch = {"batch_size": rows, "seq_len": steps}
    return LM(**sizes, **batch, dropout=0.0, dtype="bfloat16", optimizer=ADAM)


def xlstm(layers: int, width: int, rows: int, steps: int) -> Task:
    """Seven blocks with a matrix memory to one with an sLSTM, and 50,304 words."""
    sizes = {"num_layers": layers, "hidden_size": width, "embed_size": width, "vocab_size": 50304}
    make = find_task(f"{EXAMPLES}/xlstm.py:XLSTM")
    return make(**sizes, batch_size=rows, seq_len=steps, dropout=0.0, dtype="bfloat16")


def gpt(layers: int, width: int, rows: int, steps: int, tensor: int = 1, **options: Any) -> Task:
    """A Flax transformer as it stands, with 50,304 words and the rules that are suggested for `tensor`."""
    model = peer.Sizes(layers, width, 50304, rows, steps, **options)
    rules = jaxpar.suggest_rules(peer.task_of(model), f"tp{tensor}") if tensor > 1 else {}
    return peer.task_of(model, rules)


def mamba(layers: int, width: int, rows: int, steps: int) -> Task:
    """Mamba-2 of the package mamba2-jax."""
    make = find_task(f"{EXAMPLES}/mamba.py:Mamba")
    sizes = {"num_layers": layers, "width": width, "num_heads": width // 32}
    return make(**sizes, batch_size=rows, seq_len=steps, state_size=64, block_size=64)


@dataclasses.dataclass(frozen=True)
class Row:
    """A step to compile.

    Attributes:
      machine: what it is compiled for.
      make: the task.
      mesh, pipeline, layout: of `Parallel`.
      refused: words of the reason, where that is right.
    """

    machine: str
    make: Callable[[], Task]
    mesh: str
    pipeline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: str = ""

    def cost(self) -> StepCost:
        """What plan estimates."""
        parallel = Parallel(self.mesh, PipelineConfig(**self.pipeline), **self.layout)
        return estimate_step(self.make(), parallel, machine=self.machine)


def units(microbatches: int, chunks: int = 1, **options: Any) -> dict[str, Any]:
    """Of a pipeline."""
    return {"num_microbatches": microbatches, "num_chunks": chunks, **options}


SPEEDS = {"speeds": (1.0, 1.0, 1.0, 0.5)}
ROWS = {
    # Layers and units.
    "lstm 4 x 4,096": Row("v5e:2x4", lambda: lstm(4, 4096, 10_000, 64, 256), "pp2tp4", units(8, 8)),
    "lstm 16 x 4,096": Row("v5e:16x16", lambda: lstm(16, 4096, 50_304, 1024, 256), "dp8pp16tp2",
                           units(1, 64, head="last")),
    "lstm 16 x 4,096, head split": Row("v5e:16x16", lambda: lstm(16, 4096, 50_304, 1024, 256), "dp8pp16tp2",
                                       units(1, 64, head="sharded"), {"update": "sharded"}),
    "lstm 16 x 8,192": Row("v5e:16x16", lambda: lstm(16, 8192, 128_256, 512, 512), "dp8pp4tp8", units(4, 8)),
    "lstm 8 x 2,048": Row("v5e:4x4", lambda: lstm(8, 2048, 10_000, 512, 256), "dp4pp4", units(2, 8)),
    "lstm 8 x 2,048, gpipe": Row("v5e:4x4", lambda: lstm(8, 2048, 10_000, 512, 256), "dp4pp4",
                                 units(2, 8, schedule="gpipe", zero_bubble=False)),
    "lstm 16 x 2,048, interleaved": Row("v5e:4x4", lambda: lstm(16, 2048, 10_000, 512, 256), "dp4pp4",
                                        units(4, 4, schedule="interleaved", num_groups=2)),
    "lstm 16 x 2,048, V": Row("v5e:4x4", lambda: lstm(16, 2048, 10_000, 512, 256), "dp4pp4",
                              units(4, 4, schedule="v", num_groups=2)),
    "lstm 8 x 2,048, recomputed": Row("v5e:4x4", lambda: lstm(8, 2048, 50_304, 1024, 2048), "dp4pp4",
                                      units(4, 16, remat=True)),
    "lstm 32 x 2,048": Row("v5p:4x4x2", lambda: lstm(32, 2048, 50_304, 512, 512), "dp4pp8", units(4, 8)),
    "lstm 16 x 4,096, FSDP": Row("v5e:4x4", lambda: lstm(16, 4096, 50_304, 256, 256), "dp16", {},
                                 {"fsdp": True}),
    "lstm 16 x 4,096, unequal stages": Row("v5p:4x4x2", lambda: lstm(16, 4096, 50_304, 256, 256), "dp8pp4",
                                           units(4, 4), SPEEDS),
    "lstm 8 x 4,096, by name": Row("v6e:4x4", lambda: lstm(8, 4096, 50_304, 256, 256), "dp4pp4",
                                   units(4, 4, placement="first, 0-2 | 3-5 | 6-7 | last")),
    "lstm 8 x 4,096, unequal shares": Row("v6e:4x4", lambda: lstm(8, 4096, 50_304, 288, 256), "dp4pp4",
                                          units(3, 4), {"shares": (2, 1, 1, 2)}),
    "lstm 8 x 8,192": Row("v5p:4x4x4", lambda: lstm(8, 8192, 50_304, 256, 256), "dp4pp4tp4",
                          units(4, 8)),
    "lstm 16 x 4,096, H100": Row("h100:1x2x8", lambda: lstm(16, 4096, 50_304, 256, 256), "dp4pp4",
                                 units(4, 4)),
    "xlstm 16 x 2,048": Row("v5p:4x4x2", lambda: xlstm(16, 2048, 64, 512), "dp8pp4", units(4, 2)),
    "xlstm 16 x 2,048, split": Row("v5p:4x4x2", lambda: xlstm(16, 2048, 64, 512), "dp4pp4tp2", units(4, 2)),
    "gpt 24 x 2,048": Row("v5p:4x4x2", lambda: gpt(24, 2048, 64, 1024, 4), "dp4pp2tp4", units(4)),
    "gpt 24 x 2,048, data": Row("v5p:4x4x2", lambda: gpt(24, 2048, 64, 1024), "dp32"),
    "gpt 24 x 2,048, FSDP": Row("v5p:4x4x2", lambda: gpt(24, 2048, 64, 1024), "dp32", {}, {"fsdp": True}),
    "gpt 24 x 2,048, tensor": Row("v5p:4x4x2", lambda: gpt(24, 2048, 64, 1024, 4), "dp8tp4"),
    "gpt 24 x 2,048, v6e": Row("v6e:4x4", lambda: gpt(24, 2048, 64, 1024, 2), "dp2pp4tp2",
                               units(8, remat=True)),
    "gpt 24 x 2,048, too large": Row("v5e:4x4", lambda: gpt(24, 2048, 64, 1024, 4), "dp4tp4",
                                     refused="RESOURCE_EXHAUSTED"),
    "gpt 48 x 4,096": Row("v5p:4x4x4", lambda: gpt(48, 4096, 64, 2048, 4), "dp4pp4tp4", units(8, remat=True),
                          {"update": "sharded"}),
    "gpt 24 x 2,048, H100": Row("h100:1x1x8", lambda: gpt(24, 2048, 64, 1024, 2), "pp4tp2", units(8)),
    "gpt 24 x 2,048, 32 H100s": Row("h100:1x4x8", lambda: gpt(24, 2048, 64, 1024), "dp8pp4", units(4)),
    # Kernels: JAX takes that of cuDNN as it is. Its own of Pallas does not say the types of its outputs.
    "gpt 8 x 2,048, cuDNN": Row("h100:1x1x8", lambda: gpt(8, 2048, 64, 1024, attention="cudnn"), "dp2pp4",
                                units(8)),
    "gpt 8 x 2,048, Pallas": Row("v5p:2x2x2", lambda: gpt(8, 2048, 64, 1024, attention="pallas"), "dp2pp4",
                                 units(8), refused="Pallas kernel that does not say"),
    "mamba 24 x 2,048": Row("v5p:4x4x2", lambda: mamba(24, 2048, 64, 512), "dp8pp4", units(4)),
}  # fmt: skip
# The same transformer by jax.jit and NamedSharding alone.
PEERS = {
    "gpt 24 x 2,048, plain FSDP": ("v5p:4x4x2", peer.Sizes(24, 2048, 50304, 64, 1024)),
    "gpt 24 x 2,048, plain FSDP, 8 H100s": ("h100:1x1x8", peer.Sizes(24, 2048, 50304, 64, 1024)),
}  # fmt: skip


def compile_row(row: Row) -> dict[str, Any]:
    """What is known of a step."""
    begin = time.perf_counter()
    cost = row.cost()
    machine = find_machine(row.machine)
    setup = setup_on(cost.settings, machine)
    found: dict[str, Any] = {
        "layout": describe(cost.parallel),
        "estimate": cost.estimated_bytes,
        "least": sent(cost),
    }
    try:
        lowered = lower_step(setup)
        found |= set_up(begin)
        compiled = lowered.compile()
        if setup.parallel.splits_units:
            check_program(compiled)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return found | {"refused": str(error).partition("\n")[0]}
    report = inspect_lowered(setup, lowered)
    table = setup.train_step().full_table
    return found | said(report) | {"cycles": count_cycles(compiled.as_text() or "", table)}


def set_up(begin: float) -> dict[str, Any]:
    """What it takes from the task to the program that is given to the compiler."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"setup seconds": time.perf_counter() - begin, "host": memory}


def said(report: ProgramReport) -> dict[str, Any]:
    """Memory and bytes of a program."""
    sums, waits = Counter[str](), 0
    for each in report.collectives:
        num_bytes = each.sent_bytes * (each.count or 0)
        sums[" ".join(each.axes)] += num_bytes
        waits += num_bytes if each.waits else 0
    assert report.memory is not None
    return {"memory": report.memory.total, "sent": dict(sums), "waits": waits}


def sent(cost: StepCost) -> dict[str, float]:
    """The bytes that plan estimates, by axes."""
    sums, sizes = Counter[str](), cost.parallel.mesh.sizes
    for each in cost.sent:
        devices = math.prod(sizes[axis] for axis in each.axes)
        sums[" ".join(each.axes)] += sent_bytes(each.op, each.bytes, devices) * each.runs
    return dict(sums)


def compile_peer(machine: str, sizes: peer.Sizes) -> dict[str, Any]:
    """The same of a step without jaxpar."""
    begin = time.perf_counter()
    lowered, mesh = peer.lower(sizes, machine)
    found: dict[str, Any] = {"layout": f"plain JAX, {mesh.size} devices"} | set_up(begin)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return found | {"refused": str(error).partition("\n")[0]}
    report = jaxpar.analysis.inspect_compiled(compiled, mesh)
    return found | said(report) | {"cycles": count_cycles(compiled.as_text() or "", None)}


def text_of(name: str, machine: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    least, sums = found.get("least", {}), found.get("sent", {})

    def bytes_of(axis: str) -> str:
        one = sum(size for axes, size in sums.items() if axes.split()[:1] == [axis]) / MB
        other = sum(size for axes, size in least.items() if axes.split()[:1] == [axis]) / MB
        estimate = f" ({other:,.0f})" if "least" in found else ""
        return f"{one:,.0f}{estimate}" if one > 1 or other > 1 else ""

    layout = found["layout"].replace("|", r"\|")
    if "refused" in found:
        why = textwrap.shorten(found["refused"], 100, placeholder=" ...")
        return f"| {name} | {machine} | {layout} | refused: {why} | | | | | | |"
    memory = f"{found['memory'] / GB:.2f}"
    memory += f" ({found['estimate'] / GB:.2f})" if "estimate" in found else ""
    cycles = f"{found['cycles'] / MB:,.0f}" if found["cycles"] else ""
    waits = f"{found['waits'] / MB:,.0f}"
    axes = " | ".join(map(bytes_of, ("data", "stage", "tensor")))
    setup = f"{found['setup seconds']:.0f} s, {found['host'] / GB:.1f} GB"
    return f"| {name} | {machine} | {layout} | {memory} | {axes} | {waits} | {cycles} | {setup} |"


HEAD = (
    "| model | machine | layout | memory (estimated), GB | data, MB | stage, MB | tensor, MB "
    "| waits, MB | M cycles | set-up |\n|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the names of rows or machines")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if name := options.row:
        found = compile_row(ROWS[name]) if name in ROWS else compile_peer(*PEERS[name])
        print(json.dumps(found))
        return
    machines = {name: row.machine for name, row in ROWS.items()}
    machines |= {name: machine for name, (machine, _) in PEERS.items()}
    print(HEAD)
    for name, machine in machines.items():
        if options.words and not any(word in f"{name} {machine}" for word in options.words):
            continue
        command = [sys.executable, "-m", "benchmarks.machines.real_sizes", "--row", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(text_of(name, machine, json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main()
