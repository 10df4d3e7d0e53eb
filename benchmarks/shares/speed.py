"""Two data-parallel devices on two cores, one of them three times as slow: even shares against (3, 1).

    python -m benchmarks.shares.speed

The slow device runs every unit three times over and keeps one result, so that both sides compute the same.
"""

import argparse
import json

import jax
from jax import lax

import jaxpar
import jaxpar.pipeline.kept
from benchmarks.sides import Side, measure, serve, table
from benchmarks.work import LEARNING_RATE, WORKS
from jaxpar import MeshConfig, OptimizerConfig, Parallel, PipelineConfig
from jaxpar.base.axes import DATA
from jaxpar.config import TrainConfig
from jaxpar.lm import LM
from jaxpar.pipeline.kept import Residuals
from jaxpar.planning.running import batch_of_run
from jaxpar.step.functions import init_state, make_train_step
from jaxpar.step.setup import Setup

TIMES = 3
WORK = WORKS["A"]


class SlowedLayers(Residuals):
    """Layers that the last data-parallel device runs three times."""

    def forward(self, buffers, slot, unit, group, carry, x):
        """As of `Residuals`."""

        def run(x):
            return Residuals.forward(self, buffers, slot, unit, group, carry, x)

        return _again(run, 1, x)

    def backward(self, buffers, slot, group, d_carry, dy, grads):
        """As of `Residuals`."""

        def run(dy):
            return Residuals.backward(self, buffers, slot, group, d_carry, dy, grads)

        return _again(run, 2, dy)


def _again(run, place, given):
    """What `run` gives, three times on the slow device; at `place` there is something like its argument."""

    def once_more(_, out):  # what is added is zero, and the compiler does not know it
        return run(jax.tree.map(lambda a, b: a + 0 * b, given, out[place]))

    times = jax.numpy.where(lax.axis_index(DATA) == 1, TIMES, 1)
    return lax.fori_loop(1, times, once_more, run(given))


def serve_side(shares: tuple[int, ...], num_microbatches: int) -> None:
    """The process of one side."""
    jaxpar.pipeline.kept.Residuals = SlowedLayers
    jaxpar.simulate_devices(2)
    task = LM(
        WORK.num_layers,
        WORK.hidden_size,
        WORK.embed_size,
        vocab_size=384,  # small: the head is not slowed
        dropout=0.0,
        batch_size=WORK.batch_size,
        seq_len=WORK.seq_len,
        optimizer=OptimizerConfig("sgd", LEARNING_RATE, lr_schedule="constant", warmup_steps=0),
    )
    pipeline = PipelineConfig(num_microbatches=num_microbatches)
    parallel = Parallel(MeshConfig(data=2), pipeline, tuple(shares))
    setup = Setup.of(task, parallel, TrainConfig(clip_norm=0.0))
    step, state, batch = make_train_step(setup), init_state(setup), batch_of_run(setup, 0)

    def run() -> float:
        nonlocal state
        state, metrics = step.run(state, batch)
        return float(metrics.loss)

    serve(run)


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
    print(table(measure(sides, num_rounds=args.rounds, num_steps=2), WORK.tokens))


if __name__ == "__main__":
    main()
