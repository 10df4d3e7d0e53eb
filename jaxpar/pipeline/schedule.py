"""Pipeline schedules: what each stage does at each tick, as plain arrays. NumPy only.

Legend: S stages, M microbatches, K chunks of time, V groups of layers per stage. Unit u = m K + k
is chunk k of microbatch m. Group v on stage s is virtual stage p = v S + s; a unit climbs all V S
of them and comes back down.

A tick has three parts, in this order, the same on every stage:

    1. forward    at most one unit:  reads its input, writes its residuals into a slot
    2. backward   at most one unit:  reads its cotangent and its slot, which is then free
    3. exchange   activations go up the ring (s to s + 1 mod S), cotangents down (s to s - 1 mod S);
                  both lie in a buffer until the tick, at least one later, that reads them

A zero-bubble schedule (arXiv:2401.10241) splits a backward unit: B, the cotangents of its input and
state, stays in its place, since others wait for it; W, the gradients of its weights, is what nobody waits
for. W goes where stages would wait: where a stage has no forward unit, or after the backward; until then its
slot is kept.

Every schedule here is one picture and its mirror image. Forward units enter stage 0 in some order
and move up one stage per tick; backward units enter stage S - 1 in some order and move down:

    stage 0   F0   F1   F2   F3   .    .             stage 0   .    .    B0   B1   B2   B3
    stage 1   .    F0   F1   F2   F3   .             stage 1   .    B0   B1   B2   B3   .
    stage 2   .    .    F0   F1   F2   F3            stage 2   B0   B1   B2   B3   .    .

The second is laid over the first as early as the last virtual stage allows, where a backward unit
may use the forward of its own tick. The kinds differ only in the two orders.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from jaxpar.config import ZeroBubble
from jaxpar.display import Printed
from jaxpar.fields import require

# Of a unit: everywhere the same, or [groups, stages].
Costs = float | np.ndarray

KINDS = ("gpipe", "1f1b", "interleaved")


class Lane(NamedTuple):
    """One kind of work of a schedule: five int32 arrays, all [ticks, num_stages].

    A NamedTuple, so that it is a pytree: `jax.tree.map(lambda a: a[tick, stage], lane)` is what a
    stage does at a tick. -1 is "none": mask it before indexing, where it would mean "the last".
    """

    unit: np.ndarray
    """u = m K + k of the unit that runs; -1: idle. Of W for a whole microbatch: its first."""
    group: np.ndarray
    """Which of the stage's V groups of layers runs it; 0 when idle."""
    slot: np.ndarray
    """Residual slot: forward writes it, backward (or W, if there is one) frees it; -1: idle, or no backward
    pass."""
    source: np.ndarray
    """Buffer the input is read from; -1: idle, W, or from the embedding (backward: the head)."""
    arrival: np.ndarray
    """Buffer that takes what this tick's exchange brings to the stage; -1: nothing arrives."""


class Work(NamedTuple):
    """A kind of work in a tick.

    Attributes:
      letter: F, B or W.
      half: of the tick, 0 or 1; stages meet between them if they share a head, and after the second.
      lane: who does it, when.
      num_units: that are done at once.
    """

    letter: str
    half: int
    lane: Lane
    num_units: int

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
      unit: what is worked on, the first if several; -1 if it is not one of the schedule's.
    """

    stage: int
    start: float
    cost: float
    label: str
    letter: str
    unit: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(Printed):
    """What each stage does at each tick; built by `make_schedule`. Its arrays are read-only."""

    kind: str
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
    zero_bubble: ZeroBubble = "off"

    @property
    def lanes(self) -> tuple[Work, ...]:
        """All kinds of work, in the order in which a stage does it within a tick."""
        beside, *after = self.weights or (None,)
        units = self.num_chunks if self.zero_bubble == "microbatch" else 1
        return (
            Work("F", 0, self.forward, 1),
            *([Work("W", 0, beside, units)] if beside else []),
            Work("B", 1, self.backward, 1),
            *(Work("W", 1, lane, units) for lane in after),
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

        (S-1) / (MK + S-1) for gpipe and 1f1b (arXiv:1811.06965, section 2.3, with MK for M), and
        (S-1) / (VMK + S-1) for interleaved with MK >= S (arXiv:2104.04473, section 2.2, which
        divides by the work instead of the total). With separate W (S-1) / (3VMK + S-1), where MK is large
        enough, and 2(S-1) / (3MK + 2(S-1)) for 1f1b with one W a microbatch.
        """
        return self.bubble_at(*self.unit_costs)

    @property
    def unit_costs(self) -> tuple[float, float, float]:
        """Costs of F, B and W where nothing is known: equal matmuls, two for a whole backward unit."""
        return (1.0, 1.0, 1.0) if self.weights else (1.0, 2.0, 0.0)

    def bubble_at(self, forward: float, backward: float, weights: float = 0.0) -> float:
        """Idle share of stage-time, given what units cost.

        Stages run in lockstep: each half of a tick, before and after the head, lasts as long as the busiest
        stage has work in it.

        Args:
          backward: of a backward unit, whole or without W, as the schedule has it.
          weights: of a unit's W, if it is separate.
        """
        half_T2S = self.work_at(forward, backward, weights)
        elapsed = half_T2S.max(axis=2).sum() * self.num_stages
        return float((elapsed - half_T2S.sum()) / elapsed)

    def work_at(self, forward: Costs, backward: Costs, weights: Costs = 0.0) -> np.ndarray:
        """What each stage does in both halves of every tick, float64 [ticks, 2, stages]; see `bubble_at`.

        Args:
          forward, backward, weights: of a unit; a number, or one for each group and stage.
        """
        costs, stages = {"F": forward, "B": backward, "W": weights}, np.arange(self.num_stages)
        named = {"forward": forward, "backward": backward, "weights": weights}
        for name, cost in named.items():
            may_be_zero = np.ndim(cost) > 0 or (name == "weights" and not self.weights)
            if not (np.min(cost) > 0 or (may_be_zero and np.min(cost) == 0)):
                raise ValueError(f"the cost {name}={cost} must be above 0; use 1 if unknown.")
        half_T2S = np.zeros((len(self.forward.unit), 2, self.num_stages))
        for work in self.lanes:
            cost_GS = np.broadcast_to(costs[work.letter], (self.num_groups, self.num_stages))
            cost_TS = cost_GS[work.lane.group, stages] * work.num_units
            half_T2S[:, work.half] += np.where(work.busy_TS, cost_TS, 0.0)
        return half_T2S

    @property
    def live_units(self) -> tuple[int, ...]:
        """Per stage, the largest number of units whose residuals are held at once.

        With V groups a unit holds 1/V of the stage's layers. On stage s,

            gpipe         MK
            1f1b          min(MK, K + 2(S-1-s))
            interleaved   min(VM, VS + S-1-2s)      for K = 1 and M a multiple of S

        K because a sequence goes back in reverse order (arXiv:2406.03488); 2(S-1-s), where
        arXiv:2006.09503 has S-1-s, because a lockstep tick holds a forward and a backward unit. With W split
        off per unit, no stage holds more than the fullest does without; with W per microbatch all hold
        min(MK, 2K-1 + 2(S-1)) in 1f1b, and less on later stages only where M is small.
        """
        if not self.num_slots:
            return (0,) * self.num_stages
        frees = "W" if self.weights else "B"
        freed_TS = sum(w.num_units * w.busy_TS for w in self.lanes if w.letter == frees)
        live_TS = np.cumsum(self.forward.unit >= 0, axis=0, dtype=np.int64)
        live_TS[1:] -= np.cumsum(freed_TS, axis=0, dtype=np.int64)[:-1]
        return tuple(live_TS.max(axis=0).tolist())

    def padded(self, num_rows: int) -> Schedule:
        """Appends idle rows, so that schedules of several lengths share one array shape.

        `num_ticks`, `bubble` and its picture do not change.
        """
        rows = len(self.forward.unit)
        if num_rows < rows:
            raise ValueError(f"num_rows={num_rows} cannot hold {rows} ticks; use {rows} or more.")
        idle = idle_lane(num_rows - rows, self.num_stages)

        def pad(lane: Lane) -> Lane:
            return _frozen(Lane(*map(np.concatenate, zip(lane, idle, strict=True))))

        return dataclasses.replace(
            self,
            forward=pad(self.forward),
            backward=pad(self.backward),
            weights=tuple(map(pad, self.weights)),
        )

    def half_times(self, costs: Sequence[float]) -> np.ndarray:
        """When each half of a tick begins, and when the last one ends, [2 * num_ticks + 1].

        Stages run in lockstep: a half lasts as long as its busiest stage has work.

        Args:
          costs: of a forward unit, a backward unit, and W if it is apart.
        """
        work_T2 = self.work_at(*costs)[: self.num_ticks].max(axis=2)
        return np.concatenate([[0.0], np.cumsum(work_T2)])

    def blocks(self, costs: Sequence[float]) -> list[Block]:
        """All work in its place in time; costs as of `half_times`."""
        # Of what comes next.
        begins_TS = self.half_times(costs)[:-1, None].repeat(self.num_stages, 1)
        cost_of, blocks = dict(zip("FBW", costs, strict=False)), []
        for letter, half, lane, num_units in self.lanes:
            cost = cost_of.get(letter, 0.0) * num_units
            for tick, stage in np.argwhere(lane.unit >= 0).tolist():
                unit, start = int(lane.unit[tick, stage]), float(begins_TS[2 * tick + half, stage])
                label = self.label(letter, unit, lane.group[tick, stage])
                blocks.append(Block(stage, start, cost, label, letter, unit))
                begins_TS[2 * tick + half, stage] += cost
        return blocks

    def label(self, letter: str, unit: int, group: int) -> str:
        """F1.0/2, of what is more than one: microbatch 1, chunk 0, group 2; a dot for no unit.

        W of a whole microbatch is W1/2.
        """
        if unit < 0:
            return "."
        microbatch, chunk = divmod(int(unit), self.num_chunks)
        is_whole = letter == "W" and self.zero_bubble == "microbatch"
        chunk_text = f".{chunk}" if self.num_chunks > 1 and not is_whole else ""
        group_text = f"/{group}" if self.num_groups > 1 else ""
        return f"{letter}{microbatch}{chunk_text}{group_text}"

    @property
    def title(self) -> str:
        """The kind, and zb if W is separate."""
        return (
            self.kind
            + {"off": "", "unit": "+zb", "microbatch": "+zb(microbatch)"}[self.zero_bubble]
        )


def make_schedule(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    num_groups: int = 1,
    *,
    backward: bool = True,
    zero_bubble: ZeroBubble = "off",
) -> Schedule:
    """Returns the schedule of a training step, or with `backward=False` of an evaluation step.

    Stage s runs the forward of unit u = mK + k at tick u + s, and its backward at tick

        gpipe         (MK-1 - u)     + (MK-1) + 2(S-1) - s       arXiv:1811.06965
        1f1b          mK + (K-1 - k) + (K-1)  + 2(S-1) - s       arXiv:2006.09503, arXiv:2406.03488

    interleaved (arXiv:2104.04473) sends units round the ring in rounds of S or a few more: a round
    passes group 0, then group 1, and so on, and the next round follows without a gap. M need not be
    a multiple of S, K need not be 1.

    Args:
      kind: "gpipe" (all forwards, then all backwards in reverse), "1f1b" (each backward as early
        as it can be), or "interleaved" (1f1b with V groups of layers per stage and about 1/V of the
        bubble).
      num_stages: S.
      num_microbatches: M.
      num_chunks: K, chunks of time per sequence. State passes from chunk k to k + 1 on its stage,
        and each group finishes a sequence before it starts the next: one state per group is enough.
      num_groups: V; above 1 for "interleaved", 1 for the others.
      backward: False leaves only the forward units, which then hold no residuals.
      zero_bubble: takes W, the gradients of weights, out of the backward units of 1f1b and interleaved:
        "unit" puts each where stages would wait (`_place_weights`), in no more slots than without;
        "microbatch" runs it once for all chunks of a microbatch, on all stages in the tick in which the
        first of them runs its last B. That takes more slots, but goes over the gradients only 1/K as often.
    Raises:
      ValueError: unknown kind, a count below 1, a number of groups or a zero_bubble that the kind does not
        have.
    """
    counts = num_stages, num_microbatches, num_chunks, num_groups
    _check(kind, zero_bubble, counts)
    num_units = num_microbatches * num_chunks
    p = np.arange(num_groups * num_stages)
    stage_P, group_P = p % num_stages, p // num_stages
    entry_VU = _entry_ticks(num_stages, num_groups, num_units)
    forward_PU = stage_P[:, None] + entry_VU[group_P]
    forward_sent_PU = np.vstack([np.full_like(forward_PU[:1], -1), forward_PU[:-1]])

    # The mirror image: stages, groups, chunks from last to first, and for gpipe microbatches too.
    m, k = np.divmod(np.arange(num_units), num_chunks)
    m = m[::-1] if kind == "gpipe" else m
    turn_U = m * num_chunks + num_chunks - 1 - k
    mirror_PU = (num_stages - 1 - stage_P)[:, None] + entry_VU[num_groups - 1 - group_P][:, turn_U]
    backward_PU = mirror_PU + (forward_PU[-1] - mirror_PU[-1]).max()
    backward_sent_PU = np.vstack([backward_PU[1:], np.full_like(backward_PU[:1], -1)])

    num_ticks = int((backward_PU if backward else forward_PU).max()) + 1
    slot_PU, num_slots = np.full_like(forward_PU, -1), 0
    backward_lane, num_backward_buffers = idle_lane(num_ticks, num_stages), 0
    weights: tuple[Lane, ...] = ()
    if backward:
        # In quarters of a tick: forward, W beside others' forward, backward (and W after it), another W.
        slot_PU, num_slots = _assign_slots(4 * forward_PU, 4 * backward_PU + 2, num_stages)
        if zero_bubble != "off":
            if zero_bubble == "unit":
                when_PU = _place_weights(forward_PU, backward_PU, num_stages, num_slots)
            else:
                ends_P = num_stages * group_P  # the first stage of its group
                when_PU = (
                    4 * backward_PU[ends_P][:, np.arange(num_units) // num_chunks * num_chunks] + 2
                )
            slot_PU, num_slots = _assign_slots(4 * forward_PU, when_PU, num_stages)
            weights = _weight_lanes(
                when_PU, slot_PU, num_stages, num_ticks, zero_bubble, num_chunks
            )
        backward_lane, num_backward_buffers = _lane(
            backward_PU, backward_sent_PU, slot_PU, num_stages, num_ticks
        )
    forward_lane, num_forward_buffers = _lane(
        forward_PU, forward_sent_PU, slot_PU, num_stages, num_ticks
    )
    return Schedule(
        kind=kind,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        num_groups=num_groups,
        num_slots=num_slots,
        num_forward_buffers=num_forward_buffers,
        num_backward_buffers=num_backward_buffers,
        forward=_frozen(forward_lane),
        backward=_frozen(backward_lane),
        weights=weights,
        zero_bubble=zero_bubble if backward else "off",
    )


def _entry_ticks(num_stages: int, num_groups: int, num_units: int) -> np.ndarray:
    """Returns the tick at which stage 0 runs the forward of each group and unit, [V, MK].

    Even rounds of S units or a few more: a unit is back at stage 0, S ticks later, when the turn of
    its next group comes. In a round of S + r units it waits r ticks, in up to r + 1 buffers. Fewer
    than S units are one round, with gaps. With one group, unit u enters at tick u in any case.
    """
    num_rounds = max(1, num_units // num_stages)
    bounds = np.arange(num_rounds + 1) * num_units // num_rounds
    round_U = np.repeat(np.arange(num_rounds), np.diff(bounds))
    start_U = bounds[round_U]
    length_U = np.maximum(np.diff(bounds)[round_U], num_stages)
    place_U = np.arange(num_units) - start_U
    return num_groups * start_U + np.arange(num_groups)[:, None] * length_U + place_U


def _assign_slots(
    acquired_PU: np.ndarray, released_PU: np.ndarray, num_stages: int
) -> tuple[np.ndarray, int]:
    """Gives every interval a slot of its stage that no other has meanwhile, like registers.

    Args:
      acquired_PU, released_PU: first and last instant of each interval, [V S, MK]; acquired < 0:
        needs no slot. Within a stage all instants differ.
    Returns:
      Slots [V S, MK], -1 where none is needed, and the number of slots on the fullest stage, which
      is the most that are ever in use there.
    """
    slot_PU, num_slots = np.full_like(acquired_PU, -1), 0
    for stage in range(num_stages):
        mine = slice(stage, None, num_stages)
        needed = acquired_PU[mine] >= 0
        acquired, released = acquired_PU[mine][needed], released_PU[mine][needed]
        by_acquired, by_released = np.argsort(acquired), np.argsort(released)
        freed_before = np.searchsorted(released[by_released], acquired[by_acquired])
        order = np.arange(len(acquired))
        width = int((order + 1 - freed_before).max(initial=0))
        # The free list is a queue: the first `width` intervals take the slots in order, each later
        # one inherits the slot that has been free for longest. Follow inheritance back, doubling.
        inherits_from = order.copy()
        inherits_from[by_acquired[width:]] = by_released[: len(order) - width]
        while (inherits_from[inherits_from] != inherits_from).any():
            inherits_from = inherits_from[inherits_from]
        first_slot = np.empty_like(order)
        first_slot[by_acquired] = order
        slot_PU[mine][needed] = first_slot[inherits_from]
        num_slots = max(num_slots, width)
    return slot_PU, num_slots


def _place_weights(
    forward_PU: np.ndarray, backward_PU: np.ndarray, num_stages: int, num_slots: int
) -> np.ndarray:
    """When each unit's W runs, in quarters of a tick, [V S, MK]; no schedule of these F and B is shorter.

    A stage has room for a W, without making the tick longer, beside another stage's forward and beside
    another's backward; what is asked of it is a free slot for its next forward, and that nothing is left at
    the end. Where the room does not do, the second half of a tick is made longer by one W, for all stages:
    as late as possible, for what comes late serves the demands of later ticks as well. (Demands are sums over
    intervals of ticks: taking them in the order of their ends, with the latest ticks first, is optimal.)
    Waiting units run in the order of their backward units.
    """
    num_ticks = int(backward_PU.max()) + 1
    stage_P = np.arange(len(forward_PU)) % num_stages
    f_TS, b_TS = (np.zeros((num_ticks, num_stages), np.int64) for _ in range(2))
    f_TS[forward_PU, stage_P[:, None]] = 1
    b_TS[backward_PU, stage_P[:, None]] = 1
    # Room in both halves of a tick, what comes to wait before each, and what may wait at most after each.
    room_HS = np.stack(
        [f_TS.max(1, keepdims=True) - f_TS, b_TS.max(1, keepdims=True) - b_TS], axis=1
    )
    room_HS = room_HS.reshape(2 * num_ticks, num_stages)
    comes_HS = np.stack([np.zeros_like(b_TS), b_TS], axis=1).reshape(room_HS.shape)
    begun_TS = np.cumsum(f_TS, axis=0)
    due_TS = np.maximum(np.vstack([begun_TS[1:], begun_TS[-1:]]) - num_slots, 0)
    due_TS[-1] = begun_TS[-1]
    most_TS = np.cumsum(b_TS, axis=0) - due_TS
    waiting_HS = np.zeros_like(room_HS)
    free = []  # ticks that could be longer
    last_S = waiting_HS[0]
    for half in range(2 * num_ticks):
        last_S = np.maximum(last_S + comes_HS[half] - room_HS[half], 0)
        waiting_HS[half] = last_S
        if half % 2 == 0:
            continue
        if last_S.any():
            free.append(half)
        while (last_S > most_TS[half // 2]).any():
            longer = free.pop()
            room_HS[longer] += 1
            # One less waits from there on, until nothing would have waited anyway.
            waits_HS = np.logical_and.accumulate(waiting_HS[longer : half + 1] > 0, axis=0)
            waiting_HS[longer : half + 1] -= waits_HS
            last_S = waiting_HS[half]
    before_HS = np.vstack([np.zeros_like(waiting_HS[:1]), waiting_HS[:-1]])
    runs_HS = before_HS + comes_HS - waiting_HS
    when_PU = np.empty_like(backward_PU)
    for stage in range(num_stages):
        mine = backward_PU[stage::num_stages]
        when = np.empty(mine.size, np.int64)
        # 4t + 1 beside a forward; after the backward 4t + 2, and 4t + 3 for another.
        halves = np.repeat(np.arange(2 * num_ticks), runs_HS[:, stage])
        again = np.concatenate([[0], halves[1:] == halves[:-1]])
        when[np.argsort(mine, axis=None)] = 2 * halves + 1 - halves % 2 + again
        when_PU[stage::num_stages] = when.reshape(mine.shape)
    return when_PU


def _weight_lanes(
    when_PU: np.ndarray,
    slot_PU: np.ndarray,
    num_stages: int,
    num_ticks: int,
    zero_bubble: ZeroBubble,
    num_chunks: int,
) -> tuple[Lane, ...]:
    """W as lanes: beside forwards, after backwards, and as many more as are needed."""
    if zero_bubble == "microbatch":
        when_PU, slot_PU = when_PU[:, ::num_chunks], slot_PU[:, ::num_chunks]
    units = np.arange(when_PU.shape[1]) * (num_chunks if zero_bubble == "microbatch" else 1)
    p = np.arange(len(when_PU))[:, None]
    lanes = []
    for place in range(1, int((when_PU % 4).max()) + 1):
        lane, chosen = idle_lane(num_ticks, num_stages), when_PU % 4 == place
        when = (when_PU // 4)[chosen], np.broadcast_to(p % num_stages, chosen.shape)[chosen]
        lane.unit[when] = np.broadcast_to(units, chosen.shape)[chosen]
        lane.group[when] = np.broadcast_to(p // num_stages, chosen.shape)[chosen]
        lane.slot[when] = slot_PU[chosen]
        lanes.append(_frozen(lane))
    return tuple(lanes)


def _lane(
    tick_PU: np.ndarray, sent_PU: np.ndarray, slot_PU: np.ndarray, num_stages: int, num_ticks: int
) -> tuple[Lane, int]:
    """Turns "when" into "what".

    Args:
      tick_PU: when each virtual stage runs each unit, [V S, MK].
      sent_PU: when its input was sent, -1 where it comes from the embedding or the head.
      slot_PU: its residual slot.
    Returns:
      The lane, and the number of buffers on the fullest stage.
    """
    # In half ticks: an input lies in a buffer from the exchange that brought it until it is read.
    acquired_PU = np.where(sent_PU < 0, -1, 2 * sent_PU + 1)
    buffer_PU, num_buffers = _assign_slots(acquired_PU, 2 * tick_PU, num_stages)
    lane = idle_lane(num_ticks, num_stages)
    p = np.arange(len(tick_PU))[:, None]
    when = tick_PU, p % num_stages
    lane.unit[when] = np.arange(tick_PU.shape[1])
    lane.group[when] = p // num_stages
    lane.slot[when] = slot_PU
    lane.source[when] = buffer_PU
    sent = np.nonzero(sent_PU >= 0)
    lane.arrival[sent_PU[sent], sent[0] % num_stages] = buffer_PU[sent]
    return lane, num_buffers


def idle_lane(num_ticks: int, num_stages: int) -> Lane:
    """A lane in which nothing is done."""
    nothing = [np.full((num_ticks, num_stages), -1, np.int32) for _ in Lane._fields]
    return Lane(*nothing)._replace(group=np.zeros((num_ticks, num_stages), np.int32))


def _frozen(lane: Lane) -> Lane:
    for array in lane:
        array.setflags(write=False)
    return lane


def _check(kind: str, zero_bubble: str, counts: tuple[int, ...]) -> None:
    if kind not in KINDS:
        nearest = difflib.get_close_matches(str(kind).lower(), KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"kind={kind!r} is not a schedule; "
            f"did you mean {nearest!r}? Use one of {', '.join(KINDS)}."
        )
    names = "num_stages", "num_microbatches", "num_chunks", "num_groups"
    for name, count in zip(names, counts, strict=True):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise ValueError(f"{name}={count!r} is not a count; use an integer of 1 or more.")
    require(
        (kind == "interleaved") == (counts[-1] > 1),
        f"kind={kind!r} with num_groups={counts[-1]} groups of layers on a stage; use num_groups=2 or more "
        f"with kind='interleaved', and num_groups=1 with the others.",
    )
    require(
        zero_bubble in get_args(ZeroBubble),
        f"zero_bubble={zero_bubble!r} is none of {', '.join(map(repr, get_args(ZeroBubble)))}.",
    )
    require(
        zero_bubble == "off" or kind != "gpipe",
        f"kind='gpipe' keeps all residuals, and has no zero_bubble={zero_bubble!r}; use kind='1f1b' or "
        f"'interleaved', which hold fewer.",
    )
