"""Steps compiled for a machine, which need not be there: several at once, and each program once.

XLA leaves Python's lock while it compiles, so threads do; processes would import JAX once more each, and
could not read a task that is written in a notebook.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxpar.analysis.program import ProgramReport, inspect_lowered, lower_step
from jaxpar.facts import ModelFacts
from jaxpar.mesh import described_devices
from jaxpar.planning.cost import StepCost
from jaxpar.planning.machine import Machine
from jaxpar.planning.running import batch_of_run
from jaxpar.setup import Setup
from jaxpar.state import init_state
from jaxpar.step import make_train_step
from jaxpar.task import Settings


def setup_on(settings: Settings, machine: Machine, facts: ModelFacts | None = None) -> Setup:
    """The setup of a step on a machine's devices.

    Args:
      facts: of the task; None traces its model now.
    Raises:
      ValueError: there is no compiler for it, or sizes do not fit each other.
    """
    mesh = None
    if not machine.is_here:
        mesh = settings.parallel.mesh.build(described_devices(machine.name))
    return Setup.of(*settings, mesh, facts=facts)


def setup_of(cost: StepCost) -> Setup:
    """The setup of a step whose cost is known; raises as `setup_on`."""
    return setup_on(cost.settings, cost.machine, cost.counts.facts)


def compile_step(setup: Setup, machine: Machine, *, runs: bool = True) -> ProgramReport | str:
    """What the compiled step does; or why the compiler refuses it, in its own words.

    A program for the devices that are there stays in memory with the setup, for `running.time_steps`.

    Args:
      setup: of `setup_on`.
      runs: whether a state and a batch are made on devices that are there; else it is compiled for shapes.
    """
    try:
        if machine.is_here and runs:
            arguments = init_state(setup), batch_of_run(setup, 0)
            return inspect_lowered(setup, make_train_step(setup).lower(*arguments))
        return inspect_lowered(setup, lower_step(setup))
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition("\n")[0]


def compile_steps(
    setups: Sequence[Setup], machine: Machine
) -> Iterator[tuple[int, ProgramReport | str]]:
    """The number of each setup, and what `compile_step` says of it."""
    # Of those that are there, devices have room for one state.
    with ThreadPoolExecutor(1 if machine.is_here else os.cpu_count()) as pool:
        yield from enumerate(pool.map(lambda setup: compile_step(setup, machine), setups))
