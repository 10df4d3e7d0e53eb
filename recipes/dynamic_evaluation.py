"""Dynamic evaluation (Krause et al. 2017, arXiv:1709.07432): a model learns from what it was tested on.

    python -m recipes.dynamic_evaluation runs/0001 --rate 0.1 --decay 0.01 --batch-size 1 --seq-len 5

Each batch is scored first. Then the parameters p take a step of gradient descent on its mean loss, and back
towards those that were trained: p - rate * gradient + decay * (trained p - p). Each split begins with the
parameters of the run, on one device or on any mesh.
"""

import argparse
import dataclasses
from os import PathLike
from typing import Any

import jax

from jaxpar import MeshConfig, Sums, load_run, simulate_devices
from jaxpar.base.console import make_console
from jaxpar.mesh import ONE_DEVICE
from jaxpar.step.setup import Setup
from jaxpar.step.state import TrainState, state_shardings
from jaxpar.step.step import make_loss_and_grad
from jaxpar.training.evaluate import Step, evaluate, in_batches
from jaxpar.training.fingerprint import describe_data
from jaxpar.training.progress import Evaluation, evaluation_table


def adapting_step(setup: Setup, trained: TrainState, *, rate: float, decay: float) -> Step:
    """The sums of a batch without dropout, and then a step of gradient descent on it.

    Args:
      trained: has the parameters towards which others decay.
      rate: of gradient descent; above 0.
      decay: the part of the way back to the trained parameters that each step goes, from 0 to 1.
    Raises:
      ValueError: a number is out of range, or batches differ in length.
    """
    if not rate > 0:
        raise ValueError(f"rate={rate}: must be above 0; evaluate without adaptation instead")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay}: must be from 0 to 1")
    if setup.task.variable_length:
        raise ValueError(
            f"batches of task {setup.task.name} differ in length, and this evaluation is for those of one "
            f"length; use a task that reads its data in windows"
        )
    value_and_grad = make_loss_and_grad(setup, seed=None)

    def adapt(state: TrainState, batch: Any, trained: Any) -> tuple[TrainState, Sums]:
        (_, (carry, sums)), grads = value_and_grad(state, batch)

        def move(param, grad, trained):
            return param - rate * grad + decay * (trained - param)

        params = jax.tree.map(move, state.params, grads, trained)
        return dataclasses.replace(state, params=params, carry=carry), sums

    adapt = jax.jit(adapt, out_shardings=(state_shardings(trained, setup.mesh), None))
    return lambda state, batch: adapt(state, batch, trained.params)


def evaluate_dynamically(
    run_dir: str | PathLike[str],
    mesh: MeshConfig | str = ONE_DEVICE,
    *,
    rate: float,
    decay: float = 0.0,
    best: bool = False,
    **sizes: int,
) -> list[Evaluation]:
    """Evaluates the newest state of a run on valid and test.

    Args:
      run_dir: the folder that `fit` wrote.
      mesh: any; it need not be that of the run.
      rate, decay: as of `adapting_step`.
      best: the state with the lowest validation loss, not the newest.
      sizes: fields of the task that shall differ from training, such as batch_size=1.
    Raises:
      ValueError: a number is out of range, the model does not fit the mesh, or its data have changed.
      OSError: no run, no checkpoint, or data that cannot be read.
    """
    run = load_run(run_dir, mesh, best=best)
    run.folder.check_data(describe_data(run.setup))
    setup, state = in_batches(run.setup, run.state, **sizes)
    step = adapting_step(setup, state, rate=rate, decay=decay)
    return [evaluate(setup, state, split, step=step) for split in ("valid", "test")]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="Dynamic evaluation of a run.")
    parser.add_argument("run_dir")
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, help="1 reads a text as one stream")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--best", action="store_true", help="the state with the lowest loss")
    parser.add_argument("--mesh", default=ONE_DEVICE, metavar="SHAPE", help="such as dp2pp2")
    parser.add_argument("--simulate", type=int, metavar="N", help="devices on the CPU")
    args = vars(parser.parse_args())
    if number := args.pop("simulate"):
        simulate_devices(number)
    sizes = {name: args.pop(name) for name in ("batch_size", "seq_len")}
    known = {name: size for name, size in sizes.items() if size is not None}
    make_console().print(evaluation_table(evaluate_dynamically(**args, **known)))


if __name__ == "__main__":
    main()
