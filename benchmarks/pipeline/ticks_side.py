"""One side of the comparison: loss and gradients of jaxpar's pipeline, with all, idle or no ticks.

One compiled program, for the schedule is data: "all" runs it, "idle" runs as many ticks in which no stage
has a unit, "none" runs what stands before and after the loop.

    python -m benchmarks.pipeline.ticks_side B '{"num_chunks": 5}' idle
"""

import json
import sys

import jax

import jaxpar
from benchmarks.jaxpar_side import initial_state, make_config
from benchmarks.sides import serve
from benchmarks.work import WORKS
from jaxpar import Batch, MeshConfig, PipelineConfig, make_schedule
from jaxpar.pipeline.ticks import Plan, make_idle, make_plan
from jaxpar.step import make_loss_and_grad


def emptied(plan: Plan, ticks: str) -> Plan:
    """The plan with all of its ticks, with as many idle ones, or with none."""
    if ticks == "all":
        return plan
    return make_idle(plan, 0 if ticks == "none" else int(plan.num_ticks))


def main() -> None:
    """Serves steps."""
    work, pipeline, ticks = (
        WORKS[sys.argv[1]],
        PipelineConfig(**json.loads(sys.argv[2])),
        sys.argv[3],
    )
    jaxpar.simulate_devices(2)
    config = make_config(work, MeshConfig(stage=2), pipeline)
    mesh = config.mesh.build()
    state, run = initial_state(work, config, mesh), jax.jit(make_loss_and_grad(config, mesh))
    batch = Batch(*(jax.device_put(a, jaxpar.batch_sharding(mesh)) for a in work.text()), True)
    schedule = make_schedule(
        pipeline.schedule, 2, pipeline.num_microbatches, pipeline.num_chunks, pipeline.num_groups
    )
    plan = emptied(make_plan([schedule]), ticks)

    def step() -> float:
        (loss, _), grads = run(state.params, state.carry, batch, 0, plan)
        jax.block_until_ready(grads)
        return float(loss)

    serve(step)


if __name__ == "__main__":
    main()
