"""Two devices of MXNet 1.9.1, whose model-parallel LSTM was the first of its kind, against two stages.

python -m benchmarks.ten_years.speed B --mxnet-python venv/bin/python
"""

import argparse
import subprocess
from collections.abc import Sequence

import jax

from benchmarks.pipeline.speed import jaxpar_side
from benchmarks.sides import Measured, Side, measure, processor, table
from benchmarks.single_device.speed import CUTS
from benchmarks.work import WORKS

BOTH = ((0, 1),)
SAME = 1e-5  # of a loss: float32 adds up to 2,240 losses in another order


def mxnet_side(name: str, work: str, contexts: int, threads: int, python: str) -> Side:
    """The training step of MXNet; `threads` of each operator."""
    arguments = ("-m", "benchmarks.ten_years.mxnet_side", work, str(contexts))
    env = ("OMP_NUM_THREADS", str(threads)), ("MXNET_SUBGRAPH_VERBOSE", "0")
    return Side(name, arguments, BOTH, python, env)


def sides_of(work: str, python: str) -> list[Side]:
    """All sides, on both cores; the first is what the others are held against."""
    m, k = CUTS[work]
    cut = {"num_microbatches": m, "num_chunks": k, "unroll": True}
    half, end = WORKS[work].num_layers // 2, WORKS[work].num_layers
    theirs = f"first, {_span(0, half)} | {_span(half, end)}, last"
    words = f"jaxpar, 2 stages, M={m}, K={k}"
    return [
        mxnet_side("MXNet, 2 contexts, a thread each", work, 2, 1, python),
        mxnet_side("MXNet, 2 contexts, two threads each", work, 2, 2, python),
        mxnet_side("MXNet, 1 context, two threads", work, 1, 2, python),
        jaxpar_side(f"{words}, placed as MXNet's", work, BOTH, 2, {**cut, "placement": theirs}),
        jaxpar_side(f"{words}, the head over both", work, BOTH, 2, cut),
        jaxpar_side("jaxpar, 1 device, two threads", work, BOTH),
    ]


def _span(begin: int, end: int) -> str:
    return f"{begin}-{end - 1}" if end - begin > 1 else str(begin)


def check_losses(results: Sequence[Measured]) -> None:
    """Raises where the sides did not do the same work."""
    for losses in zip(*(result.about["losses"] for result in results), strict=True):
        if max(losses) - min(losses) > SAME * min(losses):
            raise ValueError(f"losses of one step differ: {losses}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=CUTS)
    parser.add_argument("--mxnet-python", required=True, help="of an environment with mxnet==1.9.1")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    version = subprocess.check_output(
        [args.mxnet_python, "-c", "import mxnet; print(mxnet.__version__)"], text=True
    ).strip()
    versions = f"jax {jax.__version__}, MXNet {version}"
    print(f"{processor()}, {versions}, work {args.work}: {WORKS[args.work]}\n")
    results = measure(sides_of(args.work, args.mxnet_python), num_rounds=args.rounds, num_steps=2)
    check_losses(results)
    print(table(results, WORKS[args.work].tokens), "\n")
    peaks = (f"{result.side.name} {result.about['peak_mib']:.0f}" for result in results)
    print(f"Peak memory of the process, MiB: {', '.join(peaks)}")


if __name__ == "__main__":
    main()
