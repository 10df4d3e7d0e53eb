"""A schedule: the work of each stage at each tick, as arrays. NumPy only.

Legend: S stages, M microbatches, K chunks of time, V groups of layers per stage. Unit u = m K + k
is chunk k of microbatch m. A unit passes V S *virtual stages*, and back again; each is a group of layers on a
stage. Which schedules there are, and when each unit runs, is decided in `schedules`.

A tick has three parts, in this order, the same on every stage:

    1. forward    at most one unit:  reads its input, writes its residuals into a slot
    2. backward   at most one unit:  reads its cotangent and its slot, which is then free
    3. exchange   what a unit gave goes to the stage of its next virtual stage: up, down, or it stays; it lies
                  in a buffer there until the tick, at least one later, that reads it

A zero-bubble schedule (arXiv:2401.10241) splits a backward unit: B, the cotangents of its input and
state, stays in its place, since others wait for it; W, the gradients of its weights, is what nobody waits
for. W goes where stages would wait: where a stage has no forward unit, or after the backward; until then its
slot is kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxpar.base.display import Printed
from jaxpar.base.types import Function
from jaxpar.pipeline.placement import Route

# Of a unit: everywhere the same, or [groups, stages].
Costs = float | np.ndarray


class Lane(NamedTuple):
    """One kind of work of a schedule: int32 arrays, all [ticks, num_stages].

    A NamedTuple, so that it is a pytree: `jax.tree.map(lambda a: a[tick, stage], lane)` is what a
    stage does at a tick. -1 is "none": mask it before indexing, where it would mean "the last".
    """

    unit: np.ndarray
    """u = m K + k of the unit that runs; -1: idle."""
    group: np.ndarray
    """Which of the stage's V groups of layers runs it; 0 when idle."""
    slot: np.ndarray
    """Residual slot: forward writes it, backward (or W, if there is one) frees it; -1: idle, or no backward
    pass."""
    source: np.ndarray
    """Buffer the input is read from; -1: idle, W, or from the embedding (backward: the head)."""
    arrival: dict[int, np.ndarray]
    """Buffer that takes what this tick's exchange brings to the stage, by the direction in which it moves
    (`placement.UP`, `DOWN`, `STAYS`); -1: nothing arrives. Directions in which nothing ever moves are not
    there."""

    def map(self, function: Function, *others: Lane) -> Lane:
        """The lane of what a function makes of each array, and of the same ones of other lanes."""
        lanes = self, *others
        arrays = (function(*(getattr(lane, name) for lane in lanes)) for name in Lane._fields[:-1])
        steps = {step: function(*(lane.arrival[step] for lane in lanes)) for step in self.arrival}
        return Lane(*arrays, arrival=steps)


class Work(NamedTuple):
    """A kind of work in a tick.

    Attributes:
      letter: F, B or W; H of a head.
      half: of the tick, 0 or 1; stages meet between them if they share a head, and after the second.
      lane: who does it, when.
    """

    letter: str
    half: int
    lane: Lane

    @property
    def busy_TS(self) -> np.ndarray:
        """Which stages have some."""
        return self.lane.unit >= 0


class Block(NamedTuple):
    """A piece of work of a stage: what pictures of schedules and measured steps are drawn from.

    Attributes:
      start, cost: when it begins, and how long it takes.
      label: "" for none.
      letter: F, B or W, as of a `Work`; H for a head.
      unit: what is worked on; -1 if it is not one of the schedule's.
    """

    stage: int
    start: float
    cost: float
    label: str
    letter: str
    unit: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(Printed):
    """The work of each stage at each tick; built by `schedules.make_schedule`. Its arrays are read-only.

    Example:
      schedule = jaxpar.pipeline.make_schedule("1f1b", num_stages=4, num_microbatches=8)
      print(schedule.bubble, schedule.live_units)
    """

    name: str
    route: Route = dataclasses.field(repr=False)
    """The virtual stages, in the order in which a unit passes them."""
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_groups: int
    num_slots: int
    """Residual slots that the fullest stage needs; 0 without a backward pass."""
    num_forward_buffers: int
    """Activations that wait on any one stage, at most; 0 if nothing is ever sent."""
    num_backward_buffers: int
    """Cotangents that wait on any one stage, at most."""
    forward: Lane = dataclasses.field(repr=False)
    backward: Lane = dataclasses.field(repr=False)
    """All idle without a backward pass."""
    weights: tuple[Lane, ...] = dataclasses.field(default=(), repr=False)
    """W: in the place of a forward, after the backward, after that; none if backward units are whole."""
    head: Lane | None = dataclasses.field(default=None, repr=False)
    """What follows the last layer, first in its half; None where it is not looked at, as by the loop."""

    @property
    def zero_bubble(self) -> bool:
        """Whether W is apart."""
        return bool(self.weights)

    @property
    def lanes(self) -> tuple[Work, ...]:
        """All kinds of work, in the order in which a stage does it within a tick."""
        beside, *after = self.weights or (None,)
        return (
            Work("F", 0, self.forward),
            *([Work("W", 0, beside)] if beside else []),
            *([Work("H", 1, self.head)] if self.head else []),
            Work("B", 1, self.backward),
            *(Work("W", 1, lane) for lane in after),
        )

    @property
    def num_units(self) -> int:
        """M K. Each unit runs V times on every stage, once per group."""
        return self.num_microbatches * self.num_chunks

    @functools.cached_property
    def num_ticks(self) -> int:
        """Ticks until the last unit is done: the loop's length. `padded` arrays have more rows."""
        busy_T = np.any([work.busy_TS.any(axis=1) for work in self.lanes], axis=0)
        return int(np.flatnonzero(busy_T)[-1]) + 1

    @functools.cached_property
    def bubble(self) -> float:
        """Idle share of stage-time, where F costs 1, and B and W cost 1 each, or 2 as a whole.

        (S-1) / (MK + S-1) for gpipe, 1f1b and v (arXiv:1811.06965, section 2.3, with MK for M), and
        (S-1) / (VMK + S-1) for interleaved with MK >= S (arXiv:2104.04473, section 2.2, which
        divides by the work instead of the total). With separate W (S-1) / (3VMK + S-1), where MK is large
        enough.
        """
        return self.bubble_at(*self.unit_costs)

    @property
    def unit_costs(self) -> tuple[float, float, float]:
        """Costs of F, B and W where nothing is known: equal matmuls, two for a whole backward unit."""
        return (1.0, 1.0, 1.0) if self.weights else (1.0, 2.0, 0.0)

    def bubble_at(
        self, forward: Costs, backward: Costs, weights: Costs = 0.0, head: Costs = 0.0
    ) -> float:
        """Idle share of stage-time, given what units cost.

        Stages run in lockstep: each half of a tick, before the head and from there on, lasts as long as the
        busiest stage has work in it.

        Args:
          forward, backward, weights, head: as of `work_at`.
        """
        half_T2S = self.work_at(forward, backward, weights, head)
        elapsed = half_T2S.max(axis=2).sum() * self.num_stages
        return float((elapsed - half_T2S.sum()) / elapsed)

    def work_at(
        self, forward: Costs, backward: Costs, weights: Costs = 0.0, head: Costs = 0.0
    ) -> np.ndarray:
        """What each stage does in both halves of every tick, float64 [ticks, 2, stages]; see `bubble_at`.

        Args:
          forward, backward, weights, head: of a unit; a number, or one for each group and stage. A backward
            unit whole or without W, as the schedule has it; W if it is apart; a head 0 to leave it out.
        """
        costs = {"F": forward, "B": backward, "W": weights, "H": head}
        assert all(np.min(cost) >= 0 for cost in costs.values())
        stages = np.arange(self.num_stages)
        half_T2S = np.zeros((len(self.forward.unit), 2, self.num_stages))
        for work in self.lanes:
            cost_GS = np.broadcast_to(costs[work.letter], (self.num_groups, self.num_stages))
            cost_TS = cost_GS[work.lane.group, stages]
            half_T2S[:, work.half] += np.where(work.busy_TS, cost_TS, 0.0)
        return half_T2S

    @property
    def live_units(self) -> tuple[int, ...]:
        """Per stage, the largest number of units whose residuals are held at once.

        With V groups a unit holds 1/V of the stage's layers. On stage s,

            gpipe         MK
            1f1b          min(MK, K + 2(S-1-s))
            interleaved   min(VM, VS + S-1-2s)      for K = 1 and M a multiple of S
            v             min(2MK, 2(K + S-1))      on every stage, where M is large enough

        K because a sequence goes back in reverse order (arXiv:2406.03488); 2(S-1-s), where
        arXiv:2006.09503 has S-1-s, because a lockstep tick holds a forward and a backward unit. With W split
        off, no stage holds more than the fullest does without.
        """
        if not self.num_slots:
            return (0,) * self.num_stages
        frees = "W" if self.weights else "B"
        freed_TS = sum(w.busy_TS.astype(np.int64) for w in self.lanes if w.letter == frees)
        live_TS = np.cumsum(self.forward.unit >= 0, axis=0, dtype=np.int64)
        live_TS[1:] -= np.cumsum(freed_TS, axis=0, dtype=np.int64)[:-1]
        return tuple(live_TS.max(axis=0).tolist())

    def padded(self, num_rows: int) -> Schedule:
        """Appends idle rows, so that schedules of several lengths share one array shape.

        `num_ticks`, `bubble` and its picture do not change.
        """
        rows = len(self.forward.unit)
        assert num_rows >= rows

        def pad(lane: Lane) -> Lane:
            idle = idle_lane(num_rows - rows, self.num_stages, lane.arrival)
            return frozen(lane.map(lambda *parts: np.concatenate(parts), idle))

        return dataclasses.replace(
            self,
            forward=pad(self.forward),
            backward=pad(self.backward),
            weights=tuple(map(pad, self.weights)),
        )

    def half_times(self, costs: Sequence[Costs]) -> np.ndarray:
        """When each half of a tick begins, and when the last one ends, [2 * num_ticks + 1].

        Stages run in lockstep: a half lasts as long as its busiest stage has work.

        Args:
          costs: of a forward unit, a backward unit, W if it is apart, and a head; as of `work_at`.
        """
        work_T2 = self.work_at(*costs)[: self.num_ticks].max(axis=2)
        return np.concatenate([[0.0], np.cumsum(work_T2)])

    def blocks(self, costs: Sequence[Costs]) -> list[Block]:
        """All work in its place in time, heads if they have a cost; costs as of `half_times`."""
        # Of what comes next.
        begins_TS = self.half_times(costs)[:-1, None].repeat(self.num_stages, 1)
        cost_of, blocks = dict(zip("FBWH", costs, strict=False)), []
        for letter, half, lane in (work for work in self.lanes if work.letter in cost_of):
            cost_GS = np.broadcast_to(cost_of[letter], (self.num_groups, self.num_stages))
            for tick, stage in np.argwhere(lane.unit >= 0).tolist():
                cost = float(cost_GS[lane.group[tick, stage], stage])
                unit, start = int(lane.unit[tick, stage]), float(begins_TS[2 * tick + half, stage])
                label = self.label(letter, unit, lane.group[tick, stage])
                blocks.append(Block(stage, start, cost, label, letter, unit))
                begins_TS[2 * tick + half, stage] += cost
        return blocks

    def label(self, letter: str, unit: int, group: int) -> str:
        """F1.0/2, of what is more than one: microbatch 1, chunk 0, group 2; a dot for no unit."""
        if unit < 0:
            return "."
        microbatch, chunk = divmod(int(unit), self.num_chunks)
        chunk_text = f".{chunk}" if self.num_chunks > 1 else ""
        group_text = f"/{group}" if self.num_groups > 1 else ""
        return f"{letter}{microbatch}{chunk_text}{group_text}"

    @property
    def title(self) -> str:
        """The name, and zb if W is separate."""
        return self.name + "+zb" * self.zero_bubble


def idle_lane(num_ticks: int, num_stages: int, steps: Iterable[int] = ()) -> Lane:
    """A lane in which nothing is done, and nothing arrives in these directions."""

    def nothing() -> np.ndarray:
        return np.full((num_ticks, num_stages), -1, np.int32)

    group = np.zeros((num_ticks, num_stages), np.int32)
    return Lane(nothing(), group, nothing(), nothing(), {step: nothing() for step in steps})


def frozen(lane: Lane) -> Lane:
    """The lane, which can no longer be changed."""

    def freeze(array: np.ndarray) -> np.ndarray:
        array.setflags(write=False)
        return array

    return lane.map(freeze)
