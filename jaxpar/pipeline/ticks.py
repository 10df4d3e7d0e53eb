"""Schedules as data: what a compiled pipeline looks up at every tick."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxpar.pipeline.schedule import Lane, Schedule, ZeroBubble, idle_lane


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for every data-parallel group, as data for one compiled program.

    Attributes:
      forward, backward: lanes of arrays [data, ticks, stage].
      weights: W beside forwards, and after backwards: lanes of arrays [data, ticks, stage, places], whose
        first places are taken first; () if backward units are whole.
      slot_of: int32 [data, stage, groups, units], the residual slot of each, for W of whole microbatches.
      head: what leaves the last layer: unit and residual slot, [data, ticks, 2]; -1 for nothing.
      num_ticks: int32 scalar, the loop's length; rows beyond it are not looked at.
      num_chunks: int32 scalar, K.
      max_microbatches, max_chunks: M and K of the largest batch that the program holds.
    The other attributes are sizes of buffers; programs of equal sizes are one program.
    """

    forward: Lane
    backward: Lane
    weights: tuple[Lane, ...]
    slot_of: np.ndarray | jax.Array | None
    head: np.ndarray | jax.Array
    num_ticks: np.ndarray | jax.Array
    num_chunks: np.ndarray | jax.Array
    max_microbatches: int = dataclasses.field(metadata={"static": True})
    max_chunks: int = dataclasses.field(metadata={"static": True})
    zero_bubble: ZeroBubble = dataclasses.field(metadata={"static": True})
    num_groups: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    num_forward_buffers: int = dataclasses.field(metadata={"static": True})
    num_backward_buffers: int = dataclasses.field(metadata={"static": True})

    @property
    def weight_units(self) -> list[np.ndarray]:
        """The units of each lane of W, [data, ticks, stage]."""
        units = [np.asarray(lane.unit) for lane in self.weights]
        return [unit[..., place] for unit in units for place in range(unit.shape[-1])]


def make_plan(schedules: Sequence[Schedule], capacity: Schedule | None = None) -> Plan:
    """Schedules as data.

    Args:
      schedules: one for every data-parallel group. They may differ in the number of microbatches.
      capacity: the largest schedule that the compiled program shall hold; None takes the largest here.
    Raises:
      ValueError: the schedules differ in more than microbatches, or do not fit the capacity.
    """
    capacity = capacity or largest(schedules)
    shape = ("kind", "zero_bubble", "num_stages", "num_groups")
    for schedule in schedules:
        for name in shape:
            if getattr(schedule, name) != getattr(capacity, name):
                raise ValueError(
                    f"{name}={getattr(schedule, name)} of a schedule differs from "
                    f"{getattr(capacity, name)} of the compiled program; use equal ones"
                )
        if schedule.num_chunks != schedules[0].num_chunks:
            raise ValueError(
                f"num_chunks={schedule.num_chunks} and {schedules[0].num_chunks} in one batch; a batch "
                f"has one length"
            )
        for name in ("num_ticks", "num_slots", "num_forward_buffers", "num_backward_buffers"):
            if getattr(schedule, name) > getattr(capacity, name):
                raise ValueError(
                    f"{name}={getattr(schedule, name)} is more than the {getattr(capacity, name)} of the "
                    f"compiled program, which holds num_microbatches={capacity.num_microbatches} and "
                    f"num_chunks={capacity.num_chunks}; compile it for more"
                )
    padded = [
        _with_lanes(schedule, len(capacity.weights)).padded(capacity.num_ticks)
        for schedule in schedules
    ]

    def stack(lanes: Sequence[Lane], axis: int = 0) -> Lane:
        return Lane(*(np.stack(arrays, axis) for arrays in zip(*lanes, strict=True)))

    forward = stack([s.forward for s in padded])
    backward = stack([s.backward for s in padded])
    places = [stack(lanes) for lanes in zip(*(s.weights for s in padded), strict=True)]
    weights = (stack(places[:1], -1), stack(places[1:], -1)) if places else ()
    done = forward.group[..., -1] == capacity.num_groups - 1
    head = np.stack([forward.unit[..., -1], forward.slot[..., -1]], axis=-1)
    max_microbatches = max(capacity.num_microbatches, *(s.num_microbatches for s in schedules))
    max_chunks = max(capacity.num_chunks, schedules[0].num_chunks)
    return Plan(
        forward=forward,
        backward=backward,
        weights=weights,
        slot_of=(
            _slots_of(forward, capacity.num_groups, max_microbatches * max_chunks)
            if capacity.zero_bubble == "microbatch"
            else None
        ),
        head=np.where(done[..., None], head, -1),
        num_ticks=np.asarray(max(schedule.num_ticks for schedule in schedules), np.int32),
        num_chunks=np.asarray(schedules[0].num_chunks, np.int32),
        max_microbatches=max_microbatches,
        max_chunks=max_chunks,
        zero_bubble=capacity.zero_bubble,
        num_groups=capacity.num_groups,
        num_slots=capacity.num_slots,
        num_forward_buffers=capacity.num_forward_buffers,
        num_backward_buffers=capacity.num_backward_buffers,
    )


def largest(schedules: Sequence[Schedule]) -> Schedule:
    """The longest of these schedules, with slots, buffers and lanes for each of them.

    A smaller one may need more: in an interleaved schedule of fewer chunks units can wait for longer.
    """
    num_lanes = max(len(schedule.weights) for schedule in schedules)
    names = ("num_slots", "num_forward_buffers", "num_backward_buffers")
    most = {name: max(getattr(schedule, name) for schedule in schedules) for name in names}
    longest = max(schedules, key=lambda schedule: schedule.num_ticks)
    return dataclasses.replace(_with_lanes(longest, num_lanes), **most)


def _with_lanes(schedule: Schedule, num_lanes: int) -> Schedule:
    """The schedule with so many lanes for W, the last ones idle."""
    if len(schedule.weights) > num_lanes:
        raise ValueError(
            f"{len(schedule.weights)} lanes for W are more than the {num_lanes} of the compiled program; "
            f"compile it for more"
        )
    idle = idle_lane(*schedule.forward.unit.shape)
    more = (idle,) * (num_lanes - len(schedule.weights))
    return dataclasses.replace(schedule, weights=(*schedule.weights, *more))


def _slots_of(forward: Lane, num_groups: int, num_units: int) -> np.ndarray:
    """The slot of each unit of each group, [data, stage, groups, units]; 0 for units that are not there."""
    data, _, stages = forward.unit.shape
    slots = np.zeros((data, stages, num_groups, num_units), np.int32)
    at = group, _, stage = np.nonzero(forward.unit >= 0)
    slots[group, stage, forward.group[at], forward.unit[at]] = forward.slot[at]
    return slots
