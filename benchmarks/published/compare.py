"""Compares the losses of runs with those of the first, step by step.

    python -m benchmarks.published.compare RUN RUN...

Losses are those in metrics.jsonl: with `--train.log-every 1`, of all steps.
"""

import argparse
from pathlib import Path

from jaxpar.training.run_folder import RunFolder

LIMIT = 1e-5  # relative


def losses_of(run: Path, split: str = "train") -> dict[int, float]:
    """By step."""
    return {
        line["step"]: line["loss"] for line in RunFolder(run).metrics() if line["split"] == split
    }


def compare(run: Path, first: Path, split: str) -> str:
    """How far the losses of a run are from those of the first."""
    own, others = losses_of(run, split), losses_of(first, split)
    steps = sorted(own.keys() & others.keys())
    if not steps:
        return f"{run}: {split}, no loss of a step that {first} has"
    errors = {step: abs(own[step] / others[step] - 1) for step in steps}
    worst = max(errors, key=errors.__getitem__)
    beyond = next((step for step, error in errors.items() if error > LIMIT), None)
    return (
        f"{run}: {split}, {len(steps)} losses up to step {steps[-1]}: {errors[worst]:.1e} at most, at step "
        f"{worst}; "
        + (f"above {LIMIT:g} from step {beyond}" if beyond else f"never above {LIMIT:g}")
    )


def main() -> None:
    """A line for each run and split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    for run in args.runs:
        for split in ("train", "valid", "test"):
            print(compare(run, args.first, split))


if __name__ == "__main__":
    main()
