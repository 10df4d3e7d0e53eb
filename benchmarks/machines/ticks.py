"""What a tick of the pipeline costs that does nothing, by the estimates of a TPU's compiler.

python -m benchmarks.machines.ticks     # a v5e:2x4; three minutes on two cores

Each instruction of a program for TPUs carries the cycles that its compiler expects. An idle tick runs what is
in the body of the loop over ticks, outside of the branches of units. It needs `pip install
'jaxpar[tpu]' scikit-learn`.
"""

import dataclasses

import jax

from benchmarks.machines.compile import MODELS, UNITS
from jaxpar import Parallel, PipelineConfig
from jaxpar.analysis.hlo import Module, attribute
from jaxpar.analysis.program import lower_step
from jaxpar.mesh import described_devices
from jaxpar.step.setup import Setup

MACHINE, CLOCK_GHZ = "v5e:2x4", 0.94


def idle_cycles(text: str) -> int:
    """Cycles of the loop over ticks that no branch, loop or unit is around."""
    total, visits = 0, list(Module(text).visits())
    permutes = [v for v in visits if "/exchange/ppermute" in v.instruction.op_name]
    ticks = permutes[0].callers[-1]
    for visit in visits:
        if visit.callers and visit.callers[-1] == ticks:
            total += int(attribute(visit.instruction, '"estimated_cycles":"') or 0)
    return total


def main() -> None:
    """Prints the table."""
    jax.config.update("jax_platforms", "cpu")
    print("| model | mesh | cycles of an idle tick | us | memory, MB |\n|---|---|---:|---:|---:|")
    tasks = {name: make() for name, make in MODELS.items()}
    rows = (
        ("lstm 1,024", "lstm 1,024", {}),
        ("gru", "lstm 1,024", {"layer": "gru"}),
        ("transformer", "transformer", {}),
        ("mixed of 8 layers", "mixed", {"num_lstms": 4}),
    )
    for name, like, options in rows:
        task, (M, K) = dataclasses.replace(tasks[like], **options), UNITS[like]
        for shape in ("dp2pp2tp2", "pp8"):
            parallel = Parallel(shape, PipelineConfig(num_microbatches=M, num_chunks=K))
            mesh = parallel.mesh.build(described_devices(MACHINE))
            program = lower_step(Setup.of(task, parallel, mesh=mesh)).compile()
            memory = program.memory_analysis()
            cycles = idle_cycles(program.as_text())
            print(
                f"| {name} | {shape} M={M} K={K} | {cycles:,} | {cycles / CLOCK_GHZ / 1e3:,.0f} "
                f"| {memory.total_allocation_bytes / 1e6:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
