"""Schedules as data that a compiled pipeline reads at every tick."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.base.axes import DATA, STAGE
from jaxpar.base.types import Arrays, Index, Params
from jaxpar.pipeline.lanes import Lane, Schedule, idle_lane
from jaxpar.pipeline.placement import Route


class SharedLane(NamedTuple):
    """Units that all stages look up alike, whatever they do at that tick.

    Attributes:
      unit: int32 [data, ticks]; -1 for none.
      slot: its residual slot, likewise.
    """

    unit: Index
    slot: Index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TickTable:
    """A schedule for every data-parallel group, as data for one compiled program.

    Attributes:
      forward, backward: lanes of arrays [data, ticks, stage].
      weights: W beside forwards, and after backwards: lanes of arrays [data, ticks, stage, places], whose
        first places are taken first; () if backward units are whole.
      enter: the unit that comes to the first layer.
      head: the unit that leaves the last layer.
      leave: the unit whose cotangent leaves the first layer.
      num_ticks: int32 scalar, the loop's length; rows beyond it are not looked at. After the first
        `num_forward_ticks` no stage has a forward unit.
      num_chunks: int32 scalar, K.
      max_microbatches, max_chunks: M and K of the largest batch that the program holds.
      route: the virtual stages: the first layer lies on the stage of the first, the last on that of the last.
    The other attributes are sizes of buffers; programs of equal sizes are one program.
    """

    forward: Lane
    backward: Lane
    weights: tuple[Lane, ...]
    enter: SharedLane
    head: SharedLane
    leave: SharedLane
    num_ticks: np.ndarray | jax.Array
    num_forward_ticks: np.ndarray | jax.Array
    num_chunks: np.ndarray | jax.Array
    max_microbatches: int = dataclasses.field(metadata={"static": True})
    max_chunks: int = dataclasses.field(metadata={"static": True})
    route: Route = dataclasses.field(metadata={"static": True})
    num_slots: int = dataclasses.field(metadata={"static": True})
    num_forward_buffers: int = dataclasses.field(metadata={"static": True})
    num_backward_buffers: int = dataclasses.field(metadata={"static": True})

    @property
    def specs(self) -> Self:
        """Its partition specs over the mesh."""
        lanes = P(DATA, None, STAGE)
        whole: Any = dict.fromkeys(("num_ticks", "num_forward_ticks", "num_chunks"), P())
        shared: Any = dict.fromkeys(("enter", "head", "leave"), P(DATA))
        weights: Params = (lanes,) * len(self.weights)
        return dataclasses.replace(
            self, forward=lanes, backward=lanes, weights=weights, **shared, **whole
        )

    def with_remat(self) -> Self:
        """The table of a step that runs forward passes again: the head runs where the last layer's does."""
        comes = jnp.asarray(self.backward.source) < 0
        return dataclasses.replace(self, head=_shared(self.backward, comes, jnp))

    @property
    def weight_units(self) -> list[np.ndarray]:
        """The units of each lane of W, [data, ticks, stage]."""
        units = [np.asarray(lane.unit) for lane in self.weights]
        return [unit[..., place] for unit in units for place in range(unit.shape[-1])]


def make_table(schedules: Sequence[Schedule], capacity: Schedule | None = None) -> TickTable:
    """Schedules as data.

    Args:
      schedules: one for every data-parallel group. They may differ in the number of microbatches alone.
      capacity: the largest schedule that the compiled program shall hold; None takes the largest here.

    Example:
      schedule = jaxpar.pipeline.make_schedule("1f1b", num_stages=2, num_microbatches=4)
      table = jaxpar.pipeline.make_table([schedule])  # of one data-parallel group
    """
    capacity = capacity or largest(schedules)
    shape = operator.attrgetter("name", "zero_bubble", "num_stages", "num_groups")
    sizes = "num_ticks", "num_slots", "num_forward_buffers", "num_backward_buffers"
    for schedule in schedules:
        assert shape(schedule) == shape(capacity)
        assert schedule.num_chunks == schedules[0].num_chunks
        assert all(getattr(schedule, name) <= getattr(capacity, name) for name in sizes)
    padded = [
        _with_lanes(schedule, len(capacity.weights)).padded(capacity.num_ticks)
        for schedule in schedules
    ]

    def stack(lanes: Sequence[Lane], axis: int = 0) -> Lane:
        return lanes[0].map(lambda *arrays: np.stack(arrays, axis), *lanes[1:])

    forward = stack([s.forward for s in padded])
    backward = stack([s.backward for s in padded])
    places = [stack(lanes) for lanes in zip(*(s.weights for s in padded), strict=True)]
    weights = (stack(places[:1], -1), stack(places[1:], -1)) if places else ()
    route, stages = capacity.route, np.arange(capacity.num_stages)

    def shared(lane: Lane, p: int) -> SharedLane:
        is_there = (stages == route.stages[p]) & (lane.group == route.groups[p])
        return _shared(lane, is_there, np)

    max_microbatches = max(capacity.num_microbatches, *(s.num_microbatches for s in schedules))
    max_chunks = max(capacity.num_chunks, schedules[0].num_chunks)
    return TickTable(
        forward=forward,
        backward=backward,
        weights=weights,
        enter=shared(forward, 0),
        head=shared(forward, -1),
        leave=shared(backward, 0),
        num_ticks=np.asarray(max(schedule.num_ticks for schedule in schedules), np.int32),
        num_forward_ticks=np.asarray(np.argwhere(forward.unit >= 0)[:, 1].max() + 1, np.int32),
        num_chunks=np.asarray(schedules[0].num_chunks, np.int32),
        max_microbatches=max_microbatches,
        max_chunks=max_chunks,
        route=route,
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
    assert len(schedule.weights) <= num_lanes
    idle = idle_lane(*schedule.forward.unit.shape, steps=())
    more = (idle,) * (num_lanes - len(schedule.weights))
    return dataclasses.replace(schedule, weights=(*schedule.weights, *more))


def _shared(lane: Lane, is_there: Any, np: Any) -> SharedLane:
    """The unit of a lane on the one stage where it is there, for all stages."""

    def found(a: Any) -> Arrays:
        return np.where(is_there & (lane.unit >= 0), a, -1).max(axis=-1)

    return SharedLane(found(lane.unit), found(lane.slot))
