"""Text from two stages on two cores: tokens a second by the number of groups of prompts.

    python -m benchmarks.pipeline.sampling

The sides draw the same texts: all have the same mean of what is drawn, in the column of losses.
"""

import argparse
import dataclasses
import sys

import jax
import numpy as np

import jaxpar
from benchmarks.jaxpar_side import make_task
from benchmarks.sides import Side, measure, processor, serve, table
from benchmarks.work import Work
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.tasks.lm import sampling
from jaxpar.tasks.lm.drawing import Draw

PROMPTS, LENGTH = 192, 16
WORK = Work(8, 512, 512, PROMPTS, LENGTH)
SIDE = "side"


def serve_texts(stages: int, groups: int) -> None:
    """Serves calls that draw all texts, each of one process of as many devices as stages."""
    jaxpar.simulate_devices(stages)
    setup = Setup.of(make_task(WORK), f"pp{stages}" if stages > 1 else "dp1")
    state, choose = init_state(setup), sampling.in_groups

    def in_groups(*args):
        parallel, rows = choose(*args)
        pipeline = dataclasses.replace(parallel.pipeline, num_microbatches=groups)
        return dataclasses.replace(parallel, pipeline=pipeline), rows

    sampling.in_groups = in_groups
    prompts = [np.array([row], np.int32) for row in range(PROMPTS)]
    serve(lambda: sampling.sample_tokens(setup, state, prompts, Draw.of(), LENGTH).mean())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    def side(name: str, stages: int, groups: int, *cores: int) -> Side:
        arguments = "-m", "benchmarks.pipeline.sampling", SIDE, str(stages), str(groups)
        return Side(name, arguments, (cores,))

    sides = [
        side("2 stages, all prompts in 1 group", 2, 1, 0, 1),
        side("2 stages, 2 groups (the default)", 2, 2, 0, 1),
        side("2 stages, 3 groups", 2, 3, 0, 1),
        side("2 stages, 4 groups", 2, 4, 0, 1),
        side("1 device", 1, 1, 0),
        side("1 device, both cores", 1, 1, 0, 1),
    ]
    print(f"{processor()}, Python {sys.version.split()[0]}, jax {jax.__version__}: {WORK}\n")
    print(table(measure(sides, num_rounds=args.rounds, num_steps=1), PROMPTS * LENGTH))


if __name__ == "__main__":
    if sys.argv[1:2] == [SIDE]:
        serve_texts(*map(int, sys.argv[2:]))
    else:
        main()
