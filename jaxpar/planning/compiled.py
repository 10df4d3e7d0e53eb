"""Steps compiled for a target machine, which need not be available: several at once, each once.

XLA leaves Python's lock while it compiles, so threads do; processes would import JAX once more each, and
could not read a task that is written in a notebook. What is found of a program is kept in a cache of its own:
JAX's compilation cache writes programs for machines that are not there, and cannot read them back.
"""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import pickle
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxpar.analysis.program import ProgramReport, inspect_lowered, lower_step
from jaxpar.base.compiler import FLAGS, OPTIONS
from jaxpar.base.files import cache_folder, whole_file
from jaxpar.mesh import described_devices
from jaxpar.model.facts import ModelFacts
from jaxpar.model.task import Settings
from jaxpar.planning.cost import StepCost
from jaxpar.planning.machine import Machine
from jaxpar.planning.running import batch_of_run
from jaxpar.step.setup import Setup
from jaxpar.step.step import StuckError, check_program

_PACKAGES = ("jaxpar", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# What is kept of a program, and how it is read; another number where either changes.
_VERSION = 3
# A variable with a folder, in which a file stands for each program that is compiled (`cli.guarded`); and the
# name of a file there that says to compile one after the other.
WATCHED, ONE_BY_ONE = "JAXPAR_COMPILES", "one"
_MOST_LETTERS = 100  # of what XLA says
_log = logging.getLogger(__name__)


def setup_on(settings: Settings, machine: Machine, facts: ModelFacts | None = None) -> Setup:
    """The setup of a step on a machine's devices.

    Args:
      facts: of the task; None traces its model now.
    Raises:
      ValueError: there is no compiler for it, or sizes do not fit each other.
    """
    shape = settings.parallel.mesh
    mesh = None if machine.is_here else shape.build(described_devices(machine.name))
    return Setup.of(*settings, mesh, facts=facts)


def setup_of(cost: StepCost) -> Setup:
    """The setup of a step whose cost is known; raises as `setup_on`."""
    return setup_on(cost.settings, cost.machine, cost.counts.facts)


def compile_step(setup: Setup, machine: Machine, *, runs: bool = True) -> ProgramReport | str:
    """What the compiled step does; or why the compiler refuses it, or jaxpar, as it would never end.

    A program that was compiled before for a machine that is not there is read from the user's cache folder.
    One for the devices that are there stays in memory with the setup, for `running.time_steps`.

    Args:
      setup: of `setup_on`.
      runs: whether a state and a batch are made on devices that are there; else it is compiled for shapes.
    Raises:
      ValueError: with the user's flags, the compiler of a machine that is not there fails for any program.
    """
    try:
        if machine.is_here and runs:
            arguments = setup.init_state(), batch_of_run(setup, 0)
            return _checked(setup, setup.train_step().lower(*arguments))
        lowered = lower_step(setup)
        if machine.is_here:
            return _checked(setup, lowered)
        name = _name_of(lowered, machine)
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):  # not there, or broken
            return pickle.loads((_folder() / name).read_bytes())
        with _noted(name) as has_failed:
            if has_failed:
                return "it crashed"
            report = _checked(setup, lowered)
    except StuckError as error:
        return str(error).partition("\n")[0]
    except jax.errors.JaxRuntimeError as error:
        if not machine.is_here:
            _check_flags(setup.mesh.devices.flat[0], machine)
        return str(error).partition("\n")[0]
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with whole_file(_folder() / name) as file:
            file.write_bytes(pickle.dumps(report))
    except OSError as error:
        _log.warning(
            "compiled programs cannot be kept: %s\nFix: set XDG_CACHE_HOME to a writable folder.",
            error,
        )
    return report


def _check_flags(device: Any, machine: Machine) -> None:
    """Compiles a product alone, where the user has set flags: what fails there too is no fault of a layout.

    Raises:
      ValueError: it fails.
    """
    flags = {name: os.environ[name] for name in FLAGS if os.environ.get(name)}
    if not flags:
        return
    a = jax.ShapeDtypeStruct((128, 128), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(jnp.matmul).lower(a, a).compile()
    except jax.errors.JaxRuntimeError as error:
        said, names = textwrap.shorten(str(error), _MOST_LETTERS), " or ".join(flags)
        told = ", ".join(f"{name}={value!r}" for name, value in flags.items())
        raise ValueError(
            f"with {told} the compiler of {machine.name} fails for a product alone: {said}\n"
            f"Fix: take the flag that it does not support out of {names}."
        ) from error


@contextlib.contextmanager
def _noted(name: str) -> Iterator[bool]:
    """Leaves a file while a program is compiled; whether there is one from a process that ended meanwhile."""
    note = Path(folder) / name if (folder := os.environ.get(WATCHED)) else None
    if note is None or note.exists():
        yield note is not None
        return
    note.touch()
    try:
        yield False
    finally:
        note.unlink()


def _checked(setup: Setup, lowered: jax.stages.Lowered) -> ProgramReport:
    """What a compiled step does.

    Raises:
      StuckError: it would not end.
    """
    report = inspect_lowered(setup, lowered)
    if setup.parallel.splits_units:
        check_program(lowered.compile())
    return report


def _folder() -> Path:
    return cache_folder() / "compiled"


def _name_of(lowered: jax.stages.Lowered, machine: Machine) -> str:
    """Of the file for what is known of a program: by its text, and all that it depends on besides."""
    versions = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(package))
    flags = tuple(map(os.environ.get, FLAGS))
    asked = repr((lowered.as_text(), machine.name, versions, flags, OPTIONS, _VERSION))
    return f"{hashlib.sha256(asked.encode()).hexdigest()}.pickle"


def compile_steps(
    setups: Sequence[Setup], machine: Machine
) -> Iterator[tuple[int, ProgramReport | str]]:
    """The number of each setup, and what `compile_step` says of it."""
    # Of those that are there, devices have room for one state.
    folder = os.environ.get(WATCHED)
    one_by_one = machine.is_here or (folder and (Path(folder) / ONE_BY_ONE).exists())
    with ThreadPoolExecutor(1 if one_by_one else os.cpu_count()) as executor:
        yield from enumerate(executor.map(lambda setup: compile_step(setup, machine), setups))
