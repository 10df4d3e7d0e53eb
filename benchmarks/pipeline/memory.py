"""Compiled memory and compile time of the pipeline: they do not grow with microbatches or layers.

Prints, for 4 stages and a fixed microbatch size, the temporary memory per device of the compiled loss and
gradients: scheduled (1F1B) against autodiff through its forward units (GPipe). Nothing is run.
"""

import argparse
import time
from typing import Any
from unittest import mock

import jax

import jaxpar
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.lm import LM
from jaxpar.pipeline.engine import Pipeline
from jaxpar.pipeline.tables import make_table
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.step.state import abstract_state
from jaxpar.step.step import abstract_batch, make_loss_and_grad


def make_settings(
    num_microbatches: int, num_chunks: int, num_layers: int, **options: Any
) -> tuple[LM, Parallel]:
    """4 stages, 8 rows a microbatch, 64 steps of time."""
    task = LM(num_layers, 256, 256, vocab_size=384, batch_size=8 * num_microbatches, seq_len=64)
    cut = {"num_microbatches": num_microbatches, "num_chunks": num_chunks}
    pipeline = PipelineConfig(**cut, **options)
    return task, Parallel(MeshConfig(stage=4), pipeline)


def lower_scheduled(task: LM, parallel: Parallel):
    """The engine's loss and gradients."""
    return _lower(task, parallel, backward=True)


def lower_autodiff(task: LM, parallel: Parallel):
    """The same by autodiff through the engine's forward units."""

    def forward(pipeline: Pipeline, *args: Any, d_loss: Any = None, **options: Any):
        return pipeline.forward(*args, **options)

    with mock.patch.object(Pipeline, "sums", forward):
        return _lower(task, parallel, backward=False)


def _lower(task: LM, parallel: Parallel, *, backward: bool):
    mesh = parallel.mesh.build()
    table = make_table([step_schedule(parallel, backward=backward)])
    run = make_loss_and_grad(Setup.of(task, parallel, mesh=mesh))
    arguments = (
        abstract_state(Setup.of(task, parallel, mesh=mesh)),
        abstract_batch(Setup.of(task, parallel, mesh=mesh)),
    )
    return jax.jit(lambda state, batch: run(state, batch, table)).lower(*arguments)


def temporary_mib(lowered) -> float:
    """MiB per device that the compiled program needs besides arguments and results."""
    return lowered.compile().memory_analysis().temp_size_in_bytes / 2**20


def main() -> None:
    """Prints both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    jaxpar.simulate_devices(4)
    print("temporary memory per device, MiB: 8 layers of 256, T=64, K=4, 8 rows a microbatch")
    interleaved = {"schedule": "interleaved", "num_groups": 2}
    columns = {
        "1f1b": {"zero_bubble": False},
        "1f1b+zb": {},
        "1f1b+zb, unroll": {"zero_bubble": True, "unroll": True},
        "interleaved": {**interleaved, "zero_bubble": False},
        "interleaved+zb": interleaved,
        "v": {"schedule": "v", "zero_bubble": False},
        "v+zb": {"schedule": "v"},
        "1f1b, remat": {"remat": True},
    }
    print("| M | " + " | ".join([*columns, "autodiff"]) + " |")
    for num_microbatches in (4, 8, 16, 32):
        row = [
            temporary_mib(lower_scheduled(*make_settings(num_microbatches, 4, 8, **options)))
            for options in columns.values()
        ]
        row.append(temporary_mib(lower_autodiff(*make_settings(num_microbatches, 4, 8))))
        print(f"| {num_microbatches} | " + " | ".join(f"{mib:.1f}" for mib in row) + " |")
    print("\ntime to lower and compile, seconds (median of 3)")
    zero_bubble = {"zero_bubble": True}
    for num_layers, num_microbatches, num_chunks, options in (
        (8, 4, 4, {}),
        (64, 32, 16, {}),
        (8, 4, 4, zero_bubble),
        (64, 32, 16, zero_bubble),
    ):
        settings = make_settings(num_microbatches, num_chunks, num_layers, **options)
        seconds = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            lower_scheduled(*settings).compile()
            seconds.append(time.perf_counter() - start)
        print(
            f"{num_layers} layers, M={num_microbatches}, K={num_chunks}, {options or '1f1b'}: "
            f"{sorted(seconds)[1]:.2f}"
        )


if __name__ == "__main__":
    main()
