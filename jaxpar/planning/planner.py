"""Which mesh, and how a step is cut on it: count little, compile the few that matter, run what can be run.

Thousands of layouts are ranked by arithmetic. The first dozen are compiled for the machine, which says what
memory they need, which transfers have work beside them, and whether it takes them at all. Where the devices
are there, a few real steps of each decide.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence

import jax

from jaxpar.base.display import Printed, format_bytes, format_count
from jaxpar.config import Parallel, TrainConfig
from jaxpar.data.order import check_at_least
from jaxpar.model.task import Task, check_task
from jaxpar.planning.compiled import compile_step, compile_steps, setup_of
from jaxpar.planning.cost import StepCost
from jaxpar.planning.machine import Machine, find_machine
from jaxpar.planning.running import time_steps
from jaxpar.planning.search import describe, rank
from jaxpar.step.setup import Setup

NUM_FINALISTS = 12
# So many of what is compiled may be refused for each that is wanted.
_MOST_TRIED = 3
# Rounds in which all finalists run, and in which the best few of them run again.
_ROUNDS, _LAST_ROUNDS, _BEST = 3, 9, 4


@dataclasses.dataclass(frozen=True, repr=False)
class Ranking(Printed):
    """What `plan` found; `print` it, or read its attributes.

    Attributes:
      machine: what it is for.
      fitting: measured layouts first, then compiled ones, each the quickest first.
      refused: those that do not fit, or that the compiler refuses: first those that were compiled.

    Example:
      ranking = jaxpar.planning.plan(task, machine="v5e:2x2", num_finalists=0)
      print([jaxpar.planning.describe(cost.parallel) for cost in ranking.fitting[:3]])
    """

    machine: Machine
    fitting: tuple[StepCost, ...]
    refused: tuple[StepCost, ...]

    @classmethod
    def of(cls, machine: Machine, costs: Sequence[StepCost]) -> "Ranking":
        """Of layouts in any order."""
        by_time = sorted(costs, key=lambda c: (not c.measured, c.program is None, c.seconds))
        by_size = sorted(costs, key=lambda c: (not c.memory_bytes, c.memory_bytes or c.least_bytes))
        fitting = tuple(cost for cost in by_time if cost.fits)
        return cls(machine, fitting, tuple(cost for cost in by_size if not cost.fits))

    @property
    def best(self) -> StepCost:
        """The first.

        Raises:
          ValueError: none fits.
        """
        if self.fitting:
            return self.fitting[0]
        least, room = self.refused[0], format_bytes(self.machine.memory_bytes)
        needs = least.memory_text or f"more than {format_bytes(least.least_bytes)}"
        raise ValueError(
            f"none of {len(self.refused):,} configs fits in {room} on {self.machine.name}: "
            f"{describe(least.parallel)} needs {needs} on each device\n"
            f"Fix: use more devices, or a smaller model or batch."
        )

    def explain(self) -> str:
        """In words: what takes the time of the best.

        Raises:
          ValueError: none fits.
        """
        best, counts, (task, parallel, _) = self.best, self.best.counts, self.best.settings
        parts = {**best.parts, "sending": best.waiting}
        names = sorted(parts, key=parts.__getitem__, reverse=True)
        about = "~" * (not best.measured)
        shares = (f"{name} {parts[name] / sum(parts.values()):.0%}" for name in names)
        room = format_bytes(self.machine.memory_bytes)
        lines = [
            f"Use {describe(parallel)}: {best.seconds_text} a step, "
            f"{about}{counts.counted / best.seconds:,.0f} {task.unit}/s"
            + f", {best.memory_text} of {room} on each device" * bool(best.memory_text)
            + ".",
            f"Its estimated time: {', '.join(shares)}.",
        ]
        if self.refused:
            number = len(self.fitting) + len(self.refused)
            lines.append(f"{len(self.refused):,} of {number:,} configs do not fit in memory.")
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
    """Every way to run a task's training step on a machine, ranked.

    Args:
      task, train: as `fit` takes them.
      parallel: its shares, its speeds and the devices that its mesh names are kept; everything else is
        searched for.
      machine: or its text, as of `find_machine`; None: the devices that JAX has, on which the finalists run.
      num_finalists: so many that fit are compiled; 0 relies on arithmetic.
      quiet: do not print what is done, on stderr.
    Raises:
      ValueError: as of `search.rank` and `find_machine`; there is no compiler for the machine; or there are
        several processes, of which each would measure for itself.

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
    """`plan` as it goes: by arithmetic alone, then after every program, then after all have run.

    Args:
      quiet: as of `plan`.

    Example:
      machine = jaxpar.planning.find_machine("v5e:2x2")
      settings = jaxpar.Parallel(), jaxpar.TrainConfig()
      for ranking in jaxpar.planning.plan_in_steps(task, *settings, machine, num_finalists=0):
        print(len(ranking.fitting))
    """

    def tell(doing: str) -> None:
        if not quiet:
            print(f"{doing} ...", file=sys.stderr, flush=True)

    tell("ranking every mesh and pipeline by arithmetic")
    if machine.is_here and num_finalists and jax.process_count() > 1:
        raise ValueError(
            f"a plan measures steps in one process, got {jax.process_count()} processes\n"
            f"Fix: plan for a machine by its name, such as h100:1x2x8, or use --elastic."
        )
    if given.mesh.devices is not None:
        machine = dataclasses.replace(machine, num_devices=len(given.mesh.devices))
    costs = rank(task, given, train, machine)
    yield Ranking.of(machine, costs)
    likely = iter([number for number, cost in enumerate(costs) if cost.fits])
    setups = dict[int, Setup]()
    for _ in range(_MOST_TRIED):
        wanted = num_finalists - sum(cost.program is not None and cost.fits for cost in costs)
        wave = {n: setup_of(costs[n]) for n in itertools.islice(likely, wanted)}
        if wave:
            tell(f"compiling {format_count(len(wave), 'config')}")
        for place, found in compile_steps([*wave.values()], machine):
            number = [*wave][place]
            costs[number] = costs[number].known(found)
            yield Ranking.of(machine, costs)
        setups |= {n: setup for n, setup in wave.items() if costs[n].fits}
    for rounds in (_ROUNDS, _LAST_ROUNDS) if machine.is_here and setups else ():
        tell(f"running {format_count(len(setups), 'config')} in {rounds} rounds")
        for n, seconds in zip(setups, time_steps([*setups.values()], rounds), strict=True):
            costs[n] = dataclasses.replace(costs[n], measured=tuple(seconds))
        quickest = sorted(setups, key=lambda n: costs[n].seconds)[:_BEST]
        setups = {n: setups[n] for n in quickest}
        yield Ranking.of(machine, costs)


def compare(cost: StepCost) -> StepCost:
    """A step compiled for its machine, and measured where the devices are there.

    Args:
      cost: by arithmetic, as of `estimate_step`.
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
    """A step, if by the compiler's number a device has the memory for it.

    Args:
      cost: by arithmetic, as of `estimate_step`.
    Raises:
      ValueError: it does not.

    Example:
      cost = jaxpar.planning.check_fits(jaxpar.planning.estimate_step(task, "dp2"))
      print(cost.memory_bytes)
    """
    machine, room = cost.machine, cost.machine.memory_bytes
    if cost.fits:  # by what must be there
        cost = cost.known(compile_step(setup_of(cost), machine))
    if cost.fits:
        return cost
    needs = cost.memory_text or f"more than {format_bytes(cost.least_bytes)}"
    why = f"a step needs {needs} on a device, {machine.name} has {format_bytes(room)}"
    if cost.refusal:
        why = f"the compiler refuses this step: {cost.refusal}"
    raise ValueError(f"{why}\nFix: use what plan finds, more devices, or a smaller model or batch.")
