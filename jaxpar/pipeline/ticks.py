"""Schedules as data: what a compiled pipeline looks up at every tick."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxpar.pipeline.schedule import Lane, Schedule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for every data-parallel group, as data for one compiled program.

    Attributes:
      forward, backward: lanes of arrays [data, ticks, stage].
      head: what leaves the last layer: unit and residual slot, [data, ticks, 2]; -1 for nothing.
      num_ticks: int32 scalar, the loop's length; rows beyond it are not looked at.
      num_chunks: int32 scalar, K.
      max_microbatches, max_chunks: M and K of the largest batch that the program holds.
    The other attributes are sizes of buffers; programs of equal sizes are one program.
    """

    forward: Lane
    backward: Lane
    head: np.ndarray | jax.Array
    num_ticks: np.ndarray | jax.Array
    num_chunks: np.ndarray | jax.Array
    max_microbatches: int = dataclasses.field(metadata={"static": True})
    max_chunks: int = dataclasses.field(metadata={"static": True})
    num_groups: int = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    num_forward_buffers: int = dataclasses.field(metadata={"static": True})
    num_backward_buffers: int = dataclasses.field(metadata={"static": True})


def make_plan(schedules: Sequence[Schedule], capacity: Schedule | None = None) -> Plan:
    """Schedules as data.

    Args:
      schedules: one for every data-parallel group. They may differ in the number of microbatches.
      capacity: the largest schedule that the compiled program shall hold; None takes the largest here.
    Raises:
      ValueError: the schedules differ in more than microbatches, or do not fit the capacity.
    """
    capacity = capacity or largest(schedules)
    shape = ("kind", "num_stages", "num_groups")
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
    padded = [schedule.padded(capacity.num_ticks) for schedule in schedules]
    forward = Lane(*(np.stack(lanes) for lanes in zip(*(s.forward for s in padded), strict=True)))
    backward = Lane(*(np.stack(lanes) for lanes in zip(*(s.backward for s in padded), strict=True)))
    done = forward.group[..., -1] == capacity.num_groups - 1
    head = np.stack([forward.unit[..., -1], forward.slot[..., -1]], axis=-1)
    return Plan(
        forward=forward,
        backward=backward,
        head=np.where(done[..., None], head, -1),
        num_ticks=np.asarray(max(schedule.num_ticks for schedule in schedules), np.int32),
        num_chunks=np.asarray(schedules[0].num_chunks, np.int32),
        max_microbatches=max(capacity.num_microbatches, *(s.num_microbatches for s in schedules)),
        max_chunks=max(capacity.num_chunks, schedules[0].num_chunks),
        num_groups=capacity.num_groups,
        num_slots=capacity.num_slots,
        num_forward_buffers=capacity.num_forward_buffers,
        num_backward_buffers=capacity.num_backward_buffers,
    )


def make_idle(plan: Plan, num_ticks: int) -> Plan:
    """A plan for the same program: so many ticks, as far as it has rows, in which no stage has a unit."""

    def idle(lane: Lane) -> Lane:
        return Lane(*(np.full_like(a, -1) for a in lane))._replace(group=lane.group)

    return dataclasses.replace(
        plan,
        forward=idle(plan.forward),
        backward=idle(plan.backward),
        head=np.full_like(plan.head, -1),
        num_ticks=np.asarray(num_ticks, np.int32),
    )


def largest(schedules: Sequence[Schedule]) -> Schedule:
    """The longest of these schedules, with slots and buffers for each of them.

    A smaller one may need more: in an interleaved schedule of fewer chunks units can wait for longer.
    """
    names = ("num_slots", "num_forward_buffers", "num_backward_buffers")
    most = {name: max(getattr(schedule, name) for schedule in schedules) for name in names}
    return dataclasses.replace(max(schedules, key=lambda schedule: schedule.num_ticks), **most)
