"""Thirty layouts compiled for machines that are not there: memory, seconds to compile, what waits.

python -m benchmarks.machines.compile              # all of them, ten minutes on two cores
python -m benchmarks.machines.compile v5e:2x4      # those of one machine

It needs `pip install 'jaxpar[tpu,cuda13]' scikit-learn`, and JAX_PLATFORMS=cpu where it would find other
devices.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax

from jaxpar import OptimizerConfig, Parallel, PipelineConfig
from jaxpar.analysis import ProgramReport
from jaxpar.analysis.program import inspect_lowered, lower_step
from jaxpar.base.axes import DATA, STAGE
from jaxpar.lm import LM
from jaxpar.model.task import Task, find_task
from jaxpar.planning import describe, estimate_step, find_machine
from jaxpar.planning.compiled import setup_on

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAM = OptimizerConfig("adam", 1e-3)


def lstm(width: int) -> LM:
    """Eight layers, a vocabulary of 10,240, 256 rows of 64 steps."""
    sizes = {"hidden_size": width, "embed_size": width, "vocab_size": 10240, "dropout": 0.0}
    return LM(num_layers=8, **sizes, batch_size=256, seq_len=64, optimizer=ADAM)


MODELS = {
    "lstm 1,024": lambda: lstm(1024),
    "lstm 2,048": lambda: lstm(2048),
    "transformer": lambda: dataclasses.replace(
        find_task(f"{EXAMPLES}/transformer.py:Characters")(),
        width=1024, num_heads=16, num_layers=8, batch_size=256, seq_len=256,
    ),
    "mixed": lambda: find_task(f"{EXAMPLES}/mixed.py:Digits")(width=1024, batch_size=1024),
}  # fmt: skip
UNITS = {"lstm 1,024": (2, 4), "lstm 2,048": (2, 4), "transformer": (8, 1), "mixed": (4, 2)}
LAYOUTS = {
    "v5e:2x4": dict.fromkeys(MODELS, ("dp8", "dp2pp2tp2")),
    "h100:1x1x8": dict.fromkeys(MODELS, ("dp8", "dp2pp2tp2")),
    "h100:1x2x8": {"lstm 1,024": ("dp4pp4", "dp4pp2tp2"), "lstm 2,048": ("dp4pp4", "dp2pp4tp2")},
    "v5p:2x2x2": {"lstm 1,024": ("dp4pp2",), "lstm 2,048": ("dp2pp4", "pp4tp2"), "transformer": ("dp2pp4",)},
    "v5e:16x16": {
        "lstm 1,024": ("dp64pp4", "dp32pp4tp2"), "lstm 2,048": ("dp32pp8", "dp32pp4tp2"),
        "transformer": ("dp32pp8",), "mixed": ("dp128pp2",),
    },
}  # fmt: skip


def row_of(name: str, task: Task, shape: str, machine_name: str) -> str:
    """A row of the table."""
    M, K = UNITS[name]
    pipeline = (
        PipelineConfig(num_microbatches=M, num_chunks=K) if "pp" in shape else PipelineConfig()
    )
    machine = find_machine(machine_name)
    cost = estimate_step(task, Parallel(shape, pipeline), machine=machine)
    setup = setup_on(cost.settings, machine)
    lowered = lower_step(setup)
    begin = time.perf_counter()
    try:
        report = inspect_lowered(setup, lowered)
    except jax.errors.JaxRuntimeError as error:
        why = str(error).partition("\n")[0]
        return f"| {machine_name} | {name} | {describe(cost.parallel)} | refused: {why} | | | |"
    seconds, cost = time.perf_counter() - begin, cost.known(report)
    waits, beside = transfers(report)
    return (
        f"| {machine_name} | {name} | {describe(cost.parallel)} | {cost.memory_text} | {seconds:.0f} "
        f"| {waits} | {beside} |"
    )


def transfers(report: ProgramReport) -> tuple[str, str]:
    """Runs of transfers that wait, and of those with work beside them; over `stage` apart."""
    texts = []
    for is_waiting in (True, False):
        own = [c for c in report.collectives if c.waits is is_waiting]
        stage = sum(c.count or 0 for c in own if STAGE in c.axes and DATA not in c.axes)
        texts.append(f"{sum(c.count or 0 for c in own) - stage:,} + {stage:,}")
    return texts[0], texts[1]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("machines", nargs="*", default=list(LAYOUTS))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(
        "| machine | model | config | memory "
        "| seconds to compile | runs of transfers that wait, elsewhere + over stage "
        "| with work beside them |\n|---|---|---|---:|---:|---:|---:|"
    )
    for machine in options.machines:
        for name, shapes in LAYOUTS[machine].items():
            for shape in shapes:
                print(row_of(name, MODELS[name](), shape, machine), flush=True)


if __name__ == "__main__":
    main()
