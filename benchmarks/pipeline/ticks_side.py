"""One side of the comparison: loss and gradients of jaxpar's pipeline, with all, idle or no ticks.

One compiled program, for the schedule is data: "all" runs it, "idle" runs as many ticks in which no stage
has a unit, "none" runs what stands before and after the loop.

    python -m benchmarks.pipeline.ticks_side B '{"num_chunks": 5}' idle
"""

import dataclasses
import json
import sys

import jax
import numpy as np

import jaxpar
from benchmarks.jaxpar_side import initial_state, make_batch, make_task
from benchmarks.sides import serve
from benchmarks.work import WORKS
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.pipeline.lanes import Lane
from jaxpar.pipeline.tables import SharedLane, TickTable, make_table
from jaxpar.step.forward import step_schedule
from jaxpar.step.setup import Setup
from jaxpar.step.step import make_loss_and_grad


def make_idle(table: TickTable, num_ticks: int) -> TickTable:
    """A table for the same program: `num_ticks` ticks, as far as it has rows, without a unit on any stage."""

    def idle(lane: Lane) -> Lane:
        return lane.map(lambda a: np.full_like(a, -1))._replace(group=lane.group)

    def nothing(lane: SharedLane) -> SharedLane:
        return SharedLane(*(np.full_like(a, -1) for a in lane))

    return dataclasses.replace(
        table,
        forward=idle(table.forward),
        backward=idle(table.backward),
        weights=tuple(map(idle, table.weights)),
        enter=nothing(table.enter),
        head=nothing(table.head),
        leave=nothing(table.leave),
        num_ticks=np.asarray(num_ticks, np.int32),
    )


def emptied(table: TickTable, ticks: str) -> TickTable:
    """The table with all of its ticks, with as many idle ones, or with none."""
    if ticks == "all":
        return table
    return make_idle(table, 0 if ticks == "none" else int(table.num_ticks))


def main() -> None:
    """Serves steps."""
    work, ticks = WORKS[sys.argv[1]], sys.argv[3]
    parallel = Parallel(MeshConfig(stage=2), PipelineConfig(**json.loads(sys.argv[2])))
    jaxpar.simulate_devices(2)
    setup = Setup.of(make_task(work), parallel)
    state = initial_state(work, setup)
    run = jax.jit(make_loss_and_grad(setup))
    batch = make_batch(work, setup)
    table = emptied(make_table([step_schedule(parallel)]), ticks)

    def step() -> float:
        (loss, _), grads = run(state, batch, table)
        jax.block_until_ready(grads)
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
