"""What a GPU saves where steps of a loop over time share a turn, and so launches (`LayerContext.unroll`).

    JAX_PLATFORMS=cuda,cpu python -m benchmarks.layers.loops

The training step of a language model with one step a turn and with as many as jaxpar takes, each in a process
of its own; they take turns.
"""

import argparse
import dataclasses
import json
import os
import sys
from typing import Any, ClassVar

import jax

from benchmarks.sides import Side, measure, serve, table
from jaxpar import OptimizerConfig, Parallel, TrainConfig
from jaxpar.base.at import LayerContext
from jaxpar.data.batches import place_batch
from jaxpar.lm import LM
from jaxpar.step.functions import init_state, make_train_step
from jaxpar.step.setup import Setup
from jaxpar.step.step import batch_sharding

SMALL, LARGE = (4, 512, 32, 64), (2, 1024, 64, 35)  # layers, width, rows, steps of a window
ROWS = (("lstm", SMALL), ("gru", SMALL), ("slstm", SMALL), ("lstm", LARGE))


@dataclasses.dataclass(frozen=True)
class Plain(LM):
    """Layers of all kinds without blocks around them."""

    has_blocks: ClassVar[bool] = False


def serve_steps(layer: str, sizes: tuple[int, int, int, int], unroll: int) -> None:
    """A side."""
    LayerContext.unroll = unroll  # type: ignore[assignment]
    layers, width, rows, steps = sizes
    task = Plain(
        layers, width, width, max_vocab=1024, dropout=0.0, batch_size=rows, seq_len=steps,
        layer=layer, num_heads=4 if layer == "slstm" else 1,
        optimizer=OptimizerConfig("sgd", warmup_steps=0),
    ).resolve()  # fmt: skip
    setup = Setup.of(task, Parallel("dp1"), TrainConfig(clip_norm=0.0))
    train_step, state = make_train_step(setup), init_state(setup)
    batch: Any = place_batch(task.make_batches("train", 0), 0, batch_sharding(setup))

    def step() -> jax.Array:
        nonlocal state
        state, metrics = train_step.run(state, batch)
        return metrics.loss

    serve(step)


def main() -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    args = parser.parse_args()
    cores, many = (tuple(os.sched_getaffinity(0)),), LayerContext(0, 0, 0, platform="gpu").unroll
    env = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),)
    for layer, sizes in ROWS:
        sides = [
            Side(
                f"{n} a turn",
                ("-m", __spec__.name, layer, json.dumps(sizes), str(n)),
                cores,
                env=env,
            )
            for n in (1, many)
        ]
        results = measure(sides, num_rounds=args.rounds, num_steps=args.steps)
        layers, width, rows, steps = sizes
        print(f"{layers} {layer} of {width:,}, {rows} x {steps}\n")
        print(table(results, rows * steps), "\n", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        serve_steps(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
