"""Two data-parallel devices on two cores, one of them three times as slow: even shares against (3, 1).

    python -m benchmarks.shares.speed

The slow device runs every unit three times over and keeps one result, so that both sides compute the same.
"""

import argparse
import dataclasses
import json

import jax
from jax import lax

import jaxpar
import jaxpar.pipeline.engine
from benchmarks.jaxpar_side import initial_state, make_config
from benchmarks.sides import Side, measure, serve, table
from benchmarks.work import WORKS
from jaxpar import Batch, MeshConfig, PipelineConfig
from jaxpar.axes import DATA
from jaxpar.nn.stack import SavingLayers

TIMES = 3


class SlowedLayers(SavingLayers):
    """Layers that the last data-parallel device runs three times."""

    def forward(self, params, carry, x_TBW, position, layer_ids):
        """As of `SavingLayers`."""

        def run(x_TBW):
            return SavingLayers.forward(self, params, carry, x_TBW, position, layer_ids)

        # What is added is zero, and the compiler does not know it.
        return _again(lambda out: run(x_TBW + 0 * out[1]), run(x_TBW))

    def backward(self, params, saved, d_carry, dy_TBW, grads, layer_ids):
        """As of `SavingLayers`."""

        def run(dy_TBW):
            return SavingLayers.backward(self, params, saved, d_carry, dy_TBW, grads, layer_ids)

        return _again(lambda out: run(dy_TBW + 0 * out[2]), run(dy_TBW))


def _again(run, out):
    times = jax.numpy.where(lax.axis_index(DATA) == 1, TIMES, 1)
    return lax.fori_loop(1, times, lambda _, out: run(out), out)


def serve_side(shares: tuple[int, ...], num_microbatches: int) -> None:
    """The process of one side."""
    jaxpar.pipeline.engine.SavingLayers = SlowedLayers
    # A small vocabulary: the head is not slowed.
    work = dataclasses.replace(WORKS["A"], vocab_size=384)
    jaxpar.simulate_devices(2)
    pipeline = PipelineConfig(num_microbatches=num_microbatches)
    config = make_config(work, MeshConfig(data=2), pipeline)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, shares=shares))
    mesh = config.mesh.build()
    state, train_step = initial_state(work, config, mesh), jaxpar.make_train_step(config, mesh)
    layout = jaxpar.batch_sharding(mesh, config)
    batch = Batch(*(jax.device_put(a, layout) for a in work.text()), True)

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready(state)
        return float(metrics.loss)

    serve(step)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_side(*json.loads(args.serve))
        return
    # Microbatches of 8 rows on both sides.
    sides = [
        Side(
            f"shares {shares}", ("-m", __spec__.name, "--serve", json.dumps((shares, M))), ((0, 1),)
        )
        for shares, M in (((1, 1), 2), ((3, 1), 1))
    ]
    print(table(measure(sides, num_rounds=args.rounds, num_steps=2), WORKS["A"].tokens))


if __name__ == "__main__":
    main()
