"""What a pipeline runs: functions, a mesh, and how the work is cut."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.base.at import LayerContext, anywhere
from jaxpar.base.axes import DATA, MESH_AXES, STAGE, TENSOR
from jaxpar.base.types import (
    Activations,
    Arrays,
    Carry,
    Cotangents,
    Function,
    Outputs,
    Params,
    Specs,
)
from jaxpar.config import PipelineConfig
from jaxpar.pipeline.placement import Slots
from jaxpar.pipeline.store import Store
from jaxpar.pipeline.walk import Scan, make_walk

Head = Literal["last", "sharded"]

# One layer: (its parameters, what of them is frozen, its carry, inputs, where they lie) -> (carry, outputs),
# or (carry, outputs, sums). Inputs and outputs are trees of floats of the same shapes and dtypes; so is the
# carry before and after. Sums are of the structure of those of `last`, to which they are added.
Layer = Callable[[Params, Params, Carry, Activations, LayerContext], tuple[Arrays, ...]]
# Before the first layer: (its parameters, what of them is frozen, where the unit lies) -> x.
First = Callable[[Params, Params, LayerContext], Activations]
# After the last layer: (its parameters, what of them is frozen, y, where the unit lies) -> sums, a tree of
# float32 scalars whose first leaf is the loss. y is float32 if the head is sharded. Where rows are collected,
# any tree of arrays [t, b, ...], or [b, ...] without time.
Last = Callable[[Params, Params, Activations, LayerContext], Outputs]
# Adds what `first` contributes: (gradients so far, parameters, frozen, where the unit lies, dx) -> gradients.
FirstGradient = Callable[[Cotangents, Params, Params, LayerContext, Cotangents], Cotangents]


class PipelineParams(NamedTuple):
    """Parameters of what a pipeline runs; any pytrees of floating-point arrays.

    Attributes:
      first: of the function before the layers.
      layers: of layers, as `Spec.stores` has them. In stacks: a tree for every kind, every leaf [rows, ...],
        rows sharded over `stage`.
      last: of the function after the layers.
      outer: what a store holds of `first` and `last` apart from layers; those variables are None in both.

    Example:
      layers = (jnp.ones((4, 8)),)  # four layers of one kind
      params = jaxpar.pipeline.PipelineParams(first=jnp.ones(8), layers=layers, last=jnp.ones(8))
    """

    first: Params
    layers: Params
    last: Params
    outer: Params = ()


@dataclasses.dataclass(frozen=True)
class Spec:
    """Functions, a mesh, and how the work is cut.

    Attributes:
      layers: a function for every kind of layer, see `Layer`; none may use collectives of its own over
        `stage` or `data`, but over axes of the mesh that are none of jaxpar's (`own_axes`).
      first, last: before the first and after the last layer; see `First` and `Last`.
      slots: where each layer lies (`placement.make_slots`).
      stores: how parameters are stored, and the variables that are frozen; see `store.Store`.
      chunk_len: t, time steps of a chunk; None if the model has no time, and blocks are [rows, ...].
      microbatch_rows: b, rows of a microbatch on one data-parallel device.
      collects: what `last` gives of each unit: "sums", which are added up, or "rows", which are put in their
        places. Rows are for the forward pass alone, and layers add no sums then.
      adds_sums: whether layers return sums; all of them or none.
      head: "last" runs `last` on one stage only, that of the last layer; with "sharded" every stage runs it
        on its part of the parameters, and `last` combines the parts by collectives over `stage`.
      shares_first: whether every stage runs `first` on its part of the parameters, and it combines the parts
        by collectives over `stage`; otherwise one does.
      first_specs, last_specs: partition specs of `params.first` and `params.last`, and of what is frozen of
        them, over `own_axes`, and over `stage` where all stages have parts.
      layer_specs, carry_specs: of layers, likewise, for every kind trees as the parameters; and of the carry.
      row_axes, time_axes: those of `own_axes` that split the rows of a batch, and its time steps.
      config: how a unit runs and what is kept of it: `unroll`, `remat` and `remat_keeps`. The rest is said
        by the table that is run, by `slots` and by `head`.
      num_segments: G, of a window, each of as many chunks as the table says.
      first_gradient: adds the gradient of `first` in place; None derives it from `first`.
      first_rows: where each data-parallel group's rows begin in the batch, for `LayerContext`; None if all
        have as many.
      layout: for `LayerContext`.
      lay_out_gradients: those of layers -> the same, laid out as the parameters over the axes that the
        compiler splits.
      buffer_fill: initial value of all buffers; None leaves what is there. A test fills them with NaN.
    """

    layers: tuple[Layer, ...]
    first: First
    last: Last
    mesh: Mesh
    slots: Slots
    chunk_len: int | None
    microbatch_rows: int
    collects: Literal["sums", "rows"] = "sums"
    adds_sums: bool = False
    head: Head = "last"
    shares_first: bool = False
    first_specs: Sequence[Arrays] = (P(), P())
    last_specs: Sequence[Arrays] = (P(), P())
    layer_specs: tuple[Specs, Specs] = (P(STAGE), P(STAGE))
    carry_specs: Specs = dataclasses.field(default=P(STAGE, DATA))
    row_axes: tuple[str, ...] = ()
    time_axes: tuple[str, ...] = ()
    config: PipelineConfig = dataclasses.field(default=PipelineConfig())
    num_segments: int = 1
    first_gradient: FirstGradient | None = None
    first_rows: tuple[int, ...] | None = None
    layout: Function = anywhere
    lay_out_gradients: Callable[[Arrays], Arrays] = lambda tree: tree
    buffer_fill: float | None = None
    stores: tuple[Store, Store] = (Store(), Store())

    @property
    def platform(self) -> str:
        """Of the mesh's devices, as JAX calls it."""
        return self.mesh.devices.flat[0].platform

    @property
    def own_axes(self) -> tuple[str, ...]:
        """Axes of the mesh that are none of jaxpar's."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in MESH_AXES)

    @property
    def has_axes(self) -> bool:
        """Whether devices are along another axis than `tensor`: without, there is nothing to sum over."""
        return self.mesh.size > self.mesh.shape[TENSOR]

    @property
    def unroll(self) -> bool:
        """Whether the layers of a stage are written out; otherwise they are a loop.

        Each then has weights of its own, which are laid out for the backward pass once a step. For layers of
        one kind, in one group.
        """
        return self.config.unroll and self.mesh.shape[STAGE] > 1

    @property
    def remat(self) -> bool:
        """Whether a unit's input and state are kept instead of its residuals."""
        return self.config.remat and self.num_segments == 1

    @property
    def keeps_on_host(self) -> bool:
        """Whether they lie in the memory of the host; where devices have none of their own it is the same."""
        return self.config.remat_keeps == "host" and self.platform != "cpu"

    @property
    def rows_dim(self) -> int:
        """Which dim of a batch's arrays are its rows."""
        return 0 if self.chunk_len is None else 1

    @property
    def walk(self) -> Scan:
        """The way through the layers of a stage."""
        empty = self.slots.has_empty_slots
        return make_walk(len(self.layers), has_empty_slots=empty, unroll=self.unroll)
