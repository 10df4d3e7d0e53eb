"""The schedules: the tick at which each unit runs forward (F), backward (B) and its weight gradients (W).

Read `gpipe` first: it is the simplest schedule. All others follow from the same idea, a picture and its
mirror image. Forward units enter the first virtual stage in some order, and move to the next stage at each
tick. Backward units enter the last virtual stage in some order, and move back:

    stage 0   F0   F1   F2   F3   .    .             stage 0   .    .    B0   B1   B2   B3
    stage 1   .    F0   F1   F2   F3   .             stage 1   .    B0   B1   B2   B3   .
    stage 2   .    .    F0   F1   F2   F3            stage 2   B0   B1   B2   B3   .    .

The second picture starts as early as the last virtual stage allows. There, a backward unit may use the
forward unit of its own tick. Schedules differ in the two orders, and in the devices that hold the virtual
stages.

**gpipe and 1f1b.** Virtual stage p runs the forward of unit u = mK + k at tick u + p, and its backward at
tick

    gpipe   (MK-1 - u)     + (MK-1) + 2(S-1) - p       arXiv:1811.06965
    1f1b    mK + (K-1 - k) + (K-1)  + 2(S-1) - p       arXiv:2006.09503, arXiv:2406.03488

**interleaved** (arXiv:2104.04473) sends units around the ring of stages in rounds of S units or a few more. A
round passes group 0 of all stages, then group 1, and so on. The next round follows without a gap. M can be
any number, not only a multiple of S, and K can be above 1.

**v** sends units up through group 0 of each stage, and down through group 1. So the first and the last
virtual stage share stage 0. A unit enters every second tick, and meets units on their way down in the other
ticks. Nothing waits, and all stages hold equally many units, as in V-Half of arXiv:2405.15362. Its forward is
at tick 2u + p, and its backward at

    v       2 (mK + (K-1 - k)) + 2(K-1) + 2(2S-1) - p

**zero_bubble** (arXiv:2401.10241) runs W as a unit of its own. W is placed after F and B are: in ticks where
its stage would wait for others, and no later than its slot is needed. `_place_weights` shows that this is
best.

NumPy only. Legend: S stages, M microbatches, K chunks of time, V groups of layers per stage; P = V S virtual
stages. Unit u = m K + k is chunk k of microbatch m.
"""

import numpy as np

from jaxpar.base.checks import require
from jaxpar.pipeline.lanes import Lane, Schedule, frozen, idle_lane
from jaxpar.pipeline.placement import Route, route_of

NAMES = ("gpipe", "1f1b", "interleaved", "v")


def gpipe(num_stages: int, num_microbatches: int) -> list[tuple[dict[int, int], dict[int, int]]]:
    """What GPipe runs at each tick: microbatches forward, and backward, by stage.

    A microbatch enters stage 0, and moves to the next stage at each tick. After all forwards, the backwards
    are the same picture in reverse. `gpipe(3, 4)` is, with a column for each tick:

        stage 0   F0   F1   F2   F3   .    .    .    B3   B2   B1   B0
        stage 1   .    F0   F1   F2   F3   .    B3   B2   B1   B0   .
        stage 2   .    .    F0   F1   F2   F3B3 B2   B1   B0   .    .

    `make_schedule("gpipe", ...)` gives the same, with slots and buffers, as arrays that a device can read.
    """
    last_tick = 2 * (num_stages + num_microbatches - 2)

    def running(tick: int) -> dict[int, int]:
        stages = range(num_stages)
        return {s: tick - s for s in stages if 0 <= tick - s < num_microbatches}

    return [(running(tick), running(last_tick - tick)) for tick in range(last_tick + 1)]


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    num_groups: int | None = None,
    *,
    backward: bool = True,
    zero_bubble: bool = False,
) -> Schedule:
    """Returns the schedule of a training step, or with `backward=False` of an evaluation step.

    Args:
      name: Name of the schedule: "gpipe" (all forwards, then all backwards in reverse), "1f1b" (each backward
        as early as possible), "interleaved" (1f1b with V groups of layers per stage and about 1/V of the
        bubble), or "v" (1f1b with a group on the way up and one on the way down, and about half of the
        memory).
      num_stages: Number S of stages.
      num_microbatches: Number M of microbatches.
      num_chunks: Number K of time chunks per sequence. State passes from chunk k to k + 1 on its stage. Each
        group finishes a sequence before it starts the next, so one state per group is enough.
      num_groups: Number V of groups: above 1 for "interleaved", 2 for "v", 1 for the others. None is the
        smallest that the schedule can have.
      backward: False leaves only the forward units, which then save no activations.
      zero_bubble: Whether W, the gradients of weights, is separate from the backward units. Each W then runs
        where stages would wait (`_place_weights`). The number of slots stays the same. Not for gpipe.
    Raises:
      ValueError: The name is unknown, a count is below 1, or the schedule cannot have this number of groups
        or this zero_bubble.

    Example:
      print(jaxpar.pipeline.make_schedule("1f1b", num_stages=4, num_microbatches=2, num_chunks=2))
    """
    if num_groups is None:
        num_groups = 2 if name in ("interleaved", "v") else 1
    _check(name, zero_bubble, (num_stages, num_microbatches, num_chunks, num_groups))
    route = route_of(name, num_stages, num_groups)
    num_units = num_microbatches * num_chunks
    forward_PU = _ticks_on_the_way(name, route, num_units)
    # The mirror image: virtual stages and chunks from last to first, and for gpipe microbatches, too.
    m, k = np.divmod(np.arange(num_units), num_chunks)
    m = m[::-1] if name == "gpipe" else m
    mirror_PU = forward_PU[::-1][:, m * num_chunks + num_chunks - 1 - k]
    backward_PU = mirror_PU + (forward_PU[-1] - mirror_PU[-1]).max()
    if not backward:
        backward_PU = backward_PU[:, :0]

    num_ticks = int((backward_PU if backward else forward_PU).max()) + 1
    slot_PU, num_slots, weights = np.full_like(forward_PU, -1), 0, ()
    if backward:
        # In quarters of a tick: F, W while others run F, B (and W after it), another W.
        when_PU = 4 * backward_PU + 2
        slot_PU, num_slots = _assign_slots(4 * forward_PU, when_PU, route)
        if zero_bubble:
            when_PU = _place_weights(forward_PU, backward_PU, route, num_slots)
            slot_PU, num_slots = _assign_slots(4 * forward_PU, when_PU, route)
            weights = _weight_lanes(when_PU, slot_PU, route, num_ticks)
    forward, num_forward_buffers = _lane(forward_PU, slot_PU, route, num_ticks, +1)
    back, num_backward_buffers = _lane(backward_PU, slot_PU, route, num_ticks, -1)
    return Schedule(
        name=name,
        route=route,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        num_groups=num_groups,
        num_slots=num_slots,
        num_forward_buffers=num_forward_buffers,
        num_backward_buffers=num_backward_buffers,
        forward=forward,
        backward=back,
        weights=weights,
    )


def _ticks_on_the_way(name: str, route: Route, num_units: int) -> np.ndarray:
    """The tick at which the u-th unit to enter is on each virtual stage, [P, MK]."""
    if name == "v":
        return 2 * np.arange(num_units) + np.arange(len(route.stages))[:, None]
    # Even rounds of S units or a few more. A unit is back at stage 0 after S ticks, when its next group runs.
    # In a round of S + r units it waits r ticks, in up to r + 1 buffers. Fewer than S units are one round,
    # with gaps. With one group, unit u enters at tick u.
    num_rounds = max(1, num_units // route.num_stages)
    bounds = np.arange(num_rounds + 1) * num_units // num_rounds
    round_U = np.repeat(np.arange(num_rounds), np.diff(bounds))
    start_U = bounds[round_U]
    length_U = np.maximum(np.diff(bounds)[round_U], route.num_stages)
    stage_P1, group_P1 = (np.array(own)[:, None] for own in (route.stages, route.groups))
    entry_PU = route.num_groups * start_U + group_P1 * length_U + np.arange(num_units) - start_U
    return stage_P1 + entry_PU


def _assign_slots(
    acquired_PU: np.ndarray, released_PU: np.ndarray, route: Route
) -> tuple[np.ndarray, int]:
    """Gives each interval a slot of its stage that no other interval uses at the time, like registers.

    Args:
      acquired_PU, released_PU: First and last instant of each interval, [P, MK]. An interval needs no slot if
        acquired < 0. Within a stage, all instants differ.
    Returns:
      Slots [P, MK], -1 where none is needed, and the number of slots on the fullest stage. That is the most
      that are in use there at any time.
    """
    slot_PU, num_slots = np.full_like(acquired_PU, -1), 0
    for stage in range(route.num_stages):
        mine = np.array(route.stages) == stage
        needed = acquired_PU[mine] >= 0
        acquired, released = acquired_PU[mine][needed], released_PU[mine][needed]
        by_acquired, by_released = np.argsort(acquired), np.argsort(released)
        freed_before = np.searchsorted(released[by_released], acquired[by_acquired])
        order = np.arange(len(acquired))
        width = int((order + 1 - freed_before).max(initial=0))
        # The free list is a queue. The first `width` intervals take the slots in order. Each later one
        # inherits the slot that has been free for longest. Follow inheritance back, in doubling steps.
        inherits_from = order.copy()
        inherits_from[by_acquired[width:]] = by_released[: len(order) - width]
        while (inherits_from[inherits_from] != inherits_from).any():
            inherits_from = inherits_from[inherits_from]
        first_slot = np.empty_like(order)
        first_slot[by_acquired] = order
        slots = slot_PU[mine]
        slots[needed] = first_slot[inherits_from]
        slot_PU[mine] = slots
        num_slots = max(num_slots, width)
    return slot_PU, num_slots


def _place_weights(
    forward_PU: np.ndarray, backward_PU: np.ndarray, route: Route, num_slots: int
) -> np.ndarray:
    """When the W of each unit runs, in quarters of a tick, [P, MK]; no schedule of these F and B is shorter.

    A stage has room for a W where it waits while another stage runs F or B: the tick is then no longer. Each
    stage needs a free slot for its next forward, and no W may remain at the end. Where there is too little
    room, one W makes the second half of a tick longer, for all stages. That tick is as late as possible,
    because late room serves the demands of later ticks, too. (Demands are sums over intervals of ticks: to
    take them in the order of their ends, with the latest ticks first, is optimal.) Waiting units run in the
    order of their backward units.
    """
    num_ticks, num_stages = int(backward_PU.max()) + 1, route.num_stages
    stage_P = np.array(route.stages)
    f_TS, b_TS = (np.zeros((num_ticks, num_stages), np.int64) for _ in range(2))
    f_TS[forward_PU, stage_P[:, None]] = 1
    b_TS[backward_PU, stage_P[:, None]] = 1
    # Room in both halves of a tick, the units that begin to wait before each, and the most that may wait
    # after.
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
    free = []  # halves that could be longer
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
            # One fewer waits from there on, up to where nothing waited.
            waits_HS = np.logical_and.accumulate(waiting_HS[longer : half + 1] > 0, axis=0)
            waiting_HS[longer : half + 1] -= waits_HS
            last_S = waiting_HS[half]
    before_HS = np.vstack([np.zeros_like(waiting_HS[:1]), waiting_HS[:-1]])
    runs_HS = before_HS + comes_HS - waiting_HS
    when_PU = np.empty_like(backward_PU)
    for stage in range(num_stages):
        mine = backward_PU[stage_P == stage]
        when = np.empty(mine.size, np.int64)
        # 4t + 1 while others run F; after the backward 4t + 2, and 4t + 3 for another.
        halves = np.repeat(np.arange(2 * num_ticks), runs_HS[:, stage])
        again = np.concatenate([[0], halves[1:] == halves[:-1]])
        when[np.argsort(mine, axis=None)] = 2 * halves + 1 - halves % 2 + again
        when_PU[stage_P == stage] = when.reshape(mine.shape)
    return when_PU


def _weight_lanes(
    when_PU: np.ndarray, slot_PU: np.ndarray, route: Route, num_ticks: int
) -> tuple[Lane, ...]:
    """W as lanes: one in place of forwards, one after backwards, and more where needed."""
    lanes = []
    for quarter in range(1, int((when_PU % 4).max()) + 1):
        lane = idle_lane(num_ticks, route.num_stages)
        p, u = np.nonzero(when_PU % 4 == quarter)
        _write(lane, when_PU[p, u] // 4, p, u, slot_PU, route)
        lanes.append(frozen(lane))
    return tuple(lanes)


def _lane(
    tick_PU: np.ndarray, slot_PU: np.ndarray, route: Route, num_ticks: int, way: int
) -> tuple[Lane, int]:
    """The lane of work that runs at these ticks, and the number of buffers on the fullest stage.

    Args:
      tick_PU: Tick at which each virtual stage runs each unit, [P, MK]; [P, 0] if nothing runs.
      slot_PU: Slot of the saved activations of each unit.
      way: +1 from the first virtual stage to the last, -1 back.
    """
    num_units, steps = tick_PU.shape[1], route.steps(way)
    lane = idle_lane(num_ticks, route.num_stages, sorted({*steps[1:]}) if num_units else ())
    if not num_units:
        return frozen(lane), 0
    # Each virtual stage receives from the one before it on the way; the first one receives nothing.
    before_P = np.arange(len(tick_PU)) - way
    enters_P = (before_P < 0) | (before_P == len(tick_PU))
    sent_PU = np.where(enters_P[:, None], -1, tick_PU[before_P % len(tick_PU)])
    # In half ticks: a buffer holds an input from the exchange that brought it until a unit reads it.
    acquired_PU = np.where(sent_PU < 0, -1, 2 * sent_PU + 1)
    buffer_PU, num_buffers = _assign_slots(acquired_PU, 2 * tick_PU, route)
    p, u = np.indices(tick_PU.shape).reshape(2, -1)
    when = _write(lane, tick_PU[p, u], p, u, slot_PU, route)
    lane.source[when] = buffer_PU[p, u]
    for step, p in list(zip(steps, range(len(tick_PU))[::way], strict=True))[1:]:
        lane.arrival[step][sent_PU[p], route.stages[p]] = buffer_PU[p]
    return frozen(lane), num_buffers


def _write(
    lane: Lane, tick: np.ndarray, p: np.ndarray, u: np.ndarray, slot_PU: np.ndarray, route: Route
) -> tuple[np.ndarray, np.ndarray]:
    """Writes units of virtual stages into their ticks of a lane, and returns the index of these entries."""
    when = tick, np.array(route.stages)[p]
    lane.unit[when] = u
    lane.group[when] = np.array(route.groups)[p]
    lane.slot[when] = slot_PU[p, u]
    return when


def _check(name: str, zero_bubble: bool, counts: tuple[int, ...]) -> None:
    if name not in NAMES:
        raise ValueError(f"name={name!r} is not a schedule.\nFix: use one of {', '.join(NAMES)}.")
    names = "num_stages", "num_microbatches", "num_chunks", "num_groups"
    for what, count in zip(names, counts, strict=True):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
            raise ValueError(f"{what}={count!r} is not a count.\nFix: use an integer of 1 or more.")
    fits = {"interleaved": counts[-1] > 1, "v": counts[-1] == 2}.get(name, counts[-1] == 1)
    require(
        fits,
        f"name={name!r} cannot have num_groups={counts[-1]} groups of layers on a stage.\n"
        f"Fix: use num_groups=2 or more with 'interleaved', 2 with 'v', 1 with others.",
    )
    require(
        not (zero_bubble and name == "gpipe"),
        "name='gpipe' cannot have zero_bubble.\nFix: use name='1f1b', 'interleaved' or 'v'.",
    )
