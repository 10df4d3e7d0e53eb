"""The planner: ranks meshes and pipelines by estimated step time, compiles the best, and times them.

Thousands of layouts are ranked by estimates. The best 12 are compiled for the target machine. Its compiler
tells how much memory they need, which transfers overlap with work, and whether it supports them. If the
devices are available, a few measured steps of each decide.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

import jax

from jaxpar.base.checks import see
from jaxpar.base.display import Printed, format_bytes, format_count
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.order import check_at_least
from jaxpar.mesh import NoCompilerError, described_devices
from jaxpar.model.task import Task, check_task
from jaxpar.planning.compiled import compile_step, compile_steps, setup_of
from jaxpar.planning.cost import StepCost
from jaxpar.planning.machine import Machine, find_machine
from jaxpar.planning.running import time_steps
from jaxpar.planning.search import describe, rank
from jaxpar.step.setup import Setup

NUM_FINALISTS = 12
# The names of `StepCost.parts`, as they are printed.
SHOWN = {
    "layers": "layers", "head": "output head", "bubble": "pipeline bubble", "sending": "communication",
    "update": "optimizer", "ticks": "overhead",
}  # fmt: skip
# So many of what is compiled may be refused for each that is wanted.
_MOST_TRIED = 3
# Rounds in which all finalists run, and in which the best few of them run again.
_ROUNDS, _LAST_ROUNDS, _BEST = 3, 9, 4


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Printed):
    """The result of `plan`: print it, or read its attributes.

    Attributes:
      machine: Target machine.
      fitting: Layouts that fit, fastest first: measured ones, then compiled ones, then estimated ones.
      refused: Layouts that do not fit, or that the compiler refuses: first those that were compiled.
      no_compiler: Why none could be compiled, and the remedy; "" if there is a compiler.

    Example:
      ranking = jaxpar.planning.plan(task, machine="v5e:2x2", num_finalists=0)
      print([jaxpar.planning.describe(cost.parallel) for cost in ranking.fitting[:3]])
    """

    machine: Machine
    fitting: tuple[StepCost, ...]
    refused: tuple[StepCost, ...]
    no_compiler: str = ""

    @classmethod
    def of(cls, machine: Machine, costs: Sequence[StepCost], no_compiler: str = "") -> "Ranking":
        """Makes a ranking of layouts in any order."""
        by_time = sorted(costs, key=lambda c: (not c.measured, c.program is None, c.seconds))
        by_size = sorted(
            costs, key=lambda c: (not c.memory_bytes, c.memory_bytes or c.estimated_bytes)
        )
        fitting = tuple(cost for cost in by_time if cost.fits)
        refused = tuple(cost for cost in by_size if not cost.fits)
        return cls(machine, fitting, refused, no_compiler)

    @property
    def best(self) -> StepCost:
        """The first layout.

        Raises:
          ValueError: none fits.
        """
        if self.fitting:
            return self.fitting[0]
        least, room = self.refused[0], format_bytes(self.machine.memory_bytes)
        raise ValueError(
            f"no layout fits in {room} per device on {self.machine.name} ({len(self.refused):,} tried): "
            f"the smallest, {describe(least.parallel)}, needs {least.needs_text}\n"
            f"Fix: use more devices, or a smaller model or batch."
        )

    def explain(self) -> str:
        """A few sentences on the best layout and what takes its time.

        Raises:
          ValueError: none fits.
        """
        best, (_, parallel, _) = self.best, self.best.settings
        size, unit = best.counts.size_of_batch
        parts = {**best.parts, "sending": best.waiting}
        names = sorted(parts, key=parts.__getitem__, reverse=True)
        about = "~" * (not best.measured)
        shares = (f"{SHOWN[name]} {parts[name] / sum(parts.values()):.0%}" for name in names)
        room = format_bytes(self.machine.memory_bytes)
        lines = [
            f"Use {describe(parallel)}: {best.seconds_text} a step, "
            f"{about}{size / best.seconds:,.0f} {unit}/s"
            + f", {best.memory_text} of {room} on each device" * bool(best.memory_text)
            + ".",
            f"Estimated time per step: {', '.join(shares)}.",
        ]
        if self.refused:
            number = len(self.fitting) + len(self.refused)
            lines.append(f"{len(self.refused):,} of {number:,} layouts do not fit in memory.")
        return "\n".join(lines)


def plan(
    task: Task,
    parallel: Parallel | str | None = None,
    train: TrainConfig | None = None,
    machine: Machine | str | None = None,
    *,
    num_finalists: int = NUM_FINALISTS,
    quiet: bool = False,
) -> Ranking:
    """Ranks all layouts for a task's training step on a machine, fastest first.

    Args:
      task, train: Task and training settings, as for `fit`.
      parallel: Layout whose shares, speeds and device numbers are kept. The planner searches for the rest.
      machine: Target machine, or its text as for `find_machine`. None takes the devices that JAX has, and
        times the finalists on them.
      num_finalists: Number of fitting layouts to compile. 0 relies on estimates, and so does a machine
        whose compiler is not installed.
      quiet: Whether to leave out progress lines on stderr.
    Raises:
      ValueError: as of `search.rank` and `find_machine`; or there are several processes, of which each would
        measure for itself.

    Example:
      print(jaxpar.planning.plan(task, machine="v5e:2x2", num_finalists=0))
    """
    check_task(task)
    check_at_least(0, num_finalists=num_finalists)
    machine = find_machine(machine)
    given, train = Parallel.of(parallel, task.parallel), train or task.train
    *_, last = plan_in_steps(task, given, train, machine, num_finalists, quiet=quiet)
    return last


def plan_in_steps(
    task: Task,
    given: Parallel,
    train: TrainConfig,
    machine: Machine,
    num_finalists: int = NUM_FINALISTS,
    *,
    quiet: bool = False,
) -> Iterator[Ranking]:
    """Yields the rankings of `plan` as they improve: estimated, after each compilation, and after timing.

    Args:
      quiet: Whether to leave out progress lines, as for `plan`.

    Example:
      machine = jaxpar.planning.find_machine("v5e:2x2")
      settings = jaxpar.Parallel(), jaxpar.TrainConfig()
      for ranking in jaxpar.planning.plan_in_steps(task, *settings, machine, num_finalists=0):
        print(len(ranking.fitting))
    """

    def tell(doing: str) -> None:
        if not quiet:
            print(doing, file=sys.stderr, flush=True)

    no_compiler = ""
    if num_finalists and not machine.is_here:
        try:
            described_devices(machine.name)
        except NoCompilerError as error:
            num_finalists, no_compiler = 0, str(error)
    tell("estimating every mesh and pipeline ...")
    if machine.is_here and num_finalists and jax.process_count() > 1:
        raise ValueError(
            f"plan times steps in one process, got {jax.process_count()} processes\n"
            f"Fix: name a machine to plan for, such as h100:1x2x8, or use --elastic."
        )
    if given.mesh.devices is not None:
        machine = dataclasses.replace(machine, num_devices=len(given.mesh.devices))
    costs = rank(task, given, train, machine)
    yield Ranking.of(machine, costs, no_compiler)
    likely = iter([number for number, cost in enumerate(costs) if cost.fits])
    setups = dict[int, Setup]()
    for _ in range(_MOST_TRIED):
        wanted = num_finalists - sum(cost.program is not None and cost.fits for cost in costs)
        wave = {n: setup_of(costs[n]) for n in itertools.islice(likely, wanted)}
        if wave:
            tell(f"compiling {format_count(len(wave), 'layout')} ...")
        for place, found in compile_steps([*wave.values()], machine):
            number = [*wave][place]
            costs[number] = costs[number].known(found)
            said = costs[number].refusal or costs[number].memory_text
            tell(f"  {place + 1} of {len(wave)}: {describe(costs[number].parallel)}: {said}")
            yield Ranking.of(machine, costs)
        setups |= {n: setup for n, setup in wave.items() if costs[n].fits}
    for rounds in (_ROUNDS, _LAST_ROUNDS) if machine.is_here and setups else ():
        tell(f"timing {format_count(len(setups), 'layout')} in {rounds} rounds ...")
        for n, seconds in zip(setups, time_steps([*setups.values()], rounds), strict=True):
            costs[n] = dataclasses.replace(costs[n], measured=tuple(seconds))
        quickest = sorted(setups, key=lambda n: costs[n].seconds)[:_BEST]
        setups = {n: setups[n] for n in quickest}
        yield Ranking.of(machine, costs)


def compare(cost: StepCost) -> StepCost:
    """Compiles a step for its machine, and times it if the devices are available.

    Args:
      cost: Estimate of the step, as `estimate_step` gives it.
    Raises:
      ValueError: there is no compiler for the machine.

    Example:
      print(jaxpar.planning.compare(jaxpar.planning.estimate_step(task, "dp2")))
    """
    setup = setup_of(cost)
    cost = cost.known(compile_step(setup, cost.machine))
    if cost.refusal or not cost.machine.is_here:
        return cost
    [seconds] = time_steps([setup], _ROUNDS)
    return dataclasses.replace(cost, measured=tuple(seconds))


def check_fits(cost: StepCost) -> StepCost:
    """Checks by compiling that a step fits in the memory of a device.

    Args:
      cost: Estimate of the step, as `estimate_step` gives it.
    Raises:
      ValueError: it does not fit.

    Example:
      cost = jaxpar.planning.check_fits(jaxpar.planning.estimate_step(task, "dp2"))
      print(cost.memory_bytes)
    """
    machine, room = cost.machine, cost.machine.memory_bytes
    if cost.fits:  # by its estimate
        cost = cost.known(compile_step(setup_of(cost), machine))
    if cost.fits:
        return cost
    why = f"a step needs {cost.needs_text} per device, but {machine.name} has {format_bytes(room)}"
    if cost.refusal:
        why = f"the compiler refuses this step: {cost.refusal}"
    fix = "use a layout that plan finds, more devices, or a smaller model or batch."
    raise ValueError(f"{why}\nFix: {fix}{see('A step needs more memory than a device has')}")
