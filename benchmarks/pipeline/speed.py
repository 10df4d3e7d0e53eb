"""Two stages on two cores: how many times as fast as one core, and where the rest of 2.0 goes.

    python -m benchmarks.pipeline.speed B --torch-python venv/bin/python

Cuts of the work are tried first, for a few rounds each; the best of jaxpar and of PyTorch are compared then.
"""

import argparse
import json
from typing import Any

import jax

from benchmarks.sides import Measured, Side, measure, table
from benchmarks.work import WORKS
from jaxpar import MeshConfig, Parallel, PipelineConfig
from jaxpar.step.forward import step_schedule

BOTH = ((0, 1),)
# Microbatches and chunks that are tried,
CUTS = {
    "A": [(1, 8), (1, 16), (2, 4), (2, 8)],
    "B": [(1, 5), (1, 7), (2, 5)],
    "C": [(1, 5), (1, 7), (2, 5)],
}
# and what becomes of the gradients of weights.
WAYS = {
    "1f1b": {"zero_bubble": False},
    "zb": {"unroll": True},
}


def jaxpar_side(
    name: str, work: str, cores, stages: int = 1, options: dict[str, Any] | None = None
) -> Side:
    """The training step on one device, or on two stages; options of `PipelineConfig`."""
    arguments = work, json.dumps({"stage": stages}), json.dumps(options or {})
    return Side(name, ("-m", "benchmarks.jaxpar_side", *arguments), cores)


def ticks_side(work: str, ticks: str, options: dict[str, Any]) -> Side:
    """Loss and gradients, with all, idle or no ticks."""
    name = f"loss and gradients, {ticks} ticks"
    arguments = work, json.dumps(options), ticks
    return Side(name, ("-m", "benchmarks.pipeline.ticks_side", *arguments), BOTH)


def torch_side(work: str, kind: str, num_microbatches: int, python: str) -> Side:
    """torch.distributed.pipelining in two processes of a core each."""
    arguments = ("-m", "benchmarks.pipeline.torch_side", work, kind, str(num_microbatches))
    return Side(f"PyTorch, {kind}, M={num_microbatches}", arguments, BOTH, python)


def best(work: str, sides: list[Side], rounds: int) -> Side:
    """The fastest side."""
    results = measure(sides, num_rounds=rounds, num_steps=2)
    print(table(results, WORKS[work].tokens), "\n")
    return min(results, key=lambda result: result.median).side


def explain(
    plain: Measured, copies: Measured, one_core: Measured, pipe: Measured, bubble: float, executor
):
    """The way from 2.0 to what was measured, a line each."""
    ceiling = plain.median / copies.median
    speedup, work = plain.median / pipe.median, plain.median / one_core.median
    left = speedup / (ceiling * (1 - bubble) * work)
    return "\n".join(
        [
            "| | factor | left of 2.0 |",
            "|---|---:|---:|",
            f"| two independent copies, a core each: the machine's ceiling | {ceiling / 2:.2f} "
            f"| {ceiling:.2f} |",
            f"| bubble of the schedule | {1 - bubble:.2f} | {ceiling * (1 - bubble):.2f} |",
            f"| cut into units: two stages on one core against plain | {work:.2f} "
            f"| {ceiling * (1 - bubble) * work:.2f} |",
            f"| waiting for each other: what is left | {left:.2f} | {speedup:.2f} |",
            "",
            f"The executor's own cost, idle ticks against all: {executor:.1%} of the loss and gradients.",
        ]
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=CUTS)
    parser.add_argument("--torch-python", help="of an environment with torch and numpy")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"jax {jax.__version__}, work {args.work}: {WORKS[args.work]}\n")
    few = max(args.rounds // 3, 2)
    ways = {
        f"2 stages, M={m}, K={k}, {way}": {"num_microbatches": m, "num_chunks": k, **options}
        for m, k in CUTS[args.work]
        for way, options in WAYS.items()
    }
    sides = [jaxpar_side(name, args.work, BOTH, 2, options) for name, options in ways.items()]
    chosen = best(args.work, sides, few)
    options = ways[chosen.name]
    sides = [
        jaxpar_side("plain", args.work, ((0,),)),
        jaxpar_side("two copies of plain", args.work, ((0,), (1,))),
        jaxpar_side("plain, both cores", args.work, BOTH),
        jaxpar_side(f"{chosen.name}, one core", args.work, ((0,),), 2, options),
        chosen,
        *(ticks_side(args.work, ticks, options) for ticks in ("all", "idle", "none")),
    ]
    if args.torch_python:
        kinds = [(kind, m) for kind in ("gpipe", "1f1b") for m in (2, 4)]
        sides.append(
            best(
                args.work, [torch_side(args.work, *kind, args.torch_python) for kind in kinds], few
            )
        )
    results = measure(sides, num_rounds=args.rounds, num_steps=2)
    print(table(results, WORKS[args.work].tokens), "\n")
    plain, copies, _, one_core, pipe, full, idle, none, *_ = results
    executor = (idle.median - none.median) / full.median
    bubble = step_schedule(Parallel(MeshConfig(stage=2), PipelineConfig(**options))).bubble
    print(explain(plain, copies, one_core, pipe, bubble, executor))


if __name__ == "__main__":
    main()
