"""The context of a block of activations: its place in the computation, and the batch, key and resets."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar.base.parts import LENGTHS, RESETS, part_of
from jaxpar.base.trees import time_steps, timed_leaves
from jaxpar.base.types import Activations, Batch, Function, Index

# Added to the number of a draw, so that no dropout has the same key.
_DRAWS = 2**31 + 2**30


class Processor(NamedTuple):
    """The kind of device that computes.

    Attributes:
      platform: as JAX calls it.
      cores: number of multiprocessors that a kernel may fill; 0 where the compiler divides arrays over
        devices, on GPUs other than H100 and its like, and with JAX older than 0.12.
    """

    platform: str
    cores: int = 0

    @classmethod
    def of(cls, mesh: Mesh) -> "Processor":
        """The devices of a mesh. Call it where they compute: within the `shard_map` if there is one."""
        by_hand = jax.sharding.get_abstract_mesh().manual_axes
        is_whole = all(size == 1 or axis in by_hand for axis, size in mesh.shape.items())
        return cls(mesh.devices.flat[0].platform, kernel_cores(mesh) if is_whole else 0)


def kernel_cores(mesh: Mesh) -> int:
    """Number of multiprocessors of each device, where kernels of `nn.fused_lstm` can run; else 0."""
    device = mesh.devices.flat[0]
    is_like_h100 = getattr(device, "compute_capability", None) == "9.0"
    return device.core_count if is_like_h100 and jax.__version_info__ >= (0, 12) else 0


def anywhere(x: Activations, *_dims: str | None) -> Activations:
    """`x`, wherever the compiler lays it out."""
    return x


class LayerContext(NamedTuple):
    """Context that `first`, layers and `last` receive as `at`: place, batch, key and resets of their block.

    Attributes:
      layer: its number in the stack; int32. In `last` it is the number of layers, in `first` one more, so
        that every place has dropout masks of its own.
      time: of the block's first time step, within the window; int32.
      row: of its first row, within the global batch; int32.
      key: of this training step, the same for all layers and blocks; None in evaluation. Draw random numbers
        by `draw`, or by `nn.dropout`.
      batch: the block's part of the batch; what has no time (`static`) is [rows, ...], whole in every block.
      layout: lays activations out by the names of their dims, `at.layout(x, "batch", None, "heads")`.
      time_major: whether blocks are [time, rows, ...]; else [rows, ...].
      processor: that computes; None is JAX's default device.

    Example:
      layer = jaxpar.nn.GRU(16, rngs=rngs)
      at = jaxpar.LayerContext(layer=0, time=0, row=0)  # as jaxpar passes it; here for a call by hand
      carry, outputs = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), at)
    """

    layer: Index
    time: Index
    row: Index
    key: jax.Array | None = None
    batch: Batch = None
    layout: Function = anywhere
    time_major: bool = True
    processor: Processor | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the computation runs on CPUs, where other algorithms may be faster."""
        return self._platform == "cpu"

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs compute: they multiply numbers of 16 bits several times as fast as float32."""
        return self._platform == "gpu"

    @property
    def unroll(self) -> int:
        """How many time steps a turn of a loop over time takes at most.

        On a GPU each operation of a turn is a launch, of microseconds, and steps of one turn share some: an
        LSTM's step is 9 operations forward and 11 backward, with 8 steps a turn 4.75 and 3.9, a GRU's 9 and
        13, or 3 and 4 (compiled for an H100, `tests/test_aot.py`).
        """
        return 8 if self.on_gpu else 1

    @property
    def _platform(self) -> str:
        return self.processor.platform if self.processor else jax.default_backend()

    @property
    def resets(self) -> jax.Array | None:
        """Where a sequence begins within the block: bool [time, rows]; None if the batch does not say.

        It is the batch's field or key `resets`, [rows, time] there. A recurrent layer starts such a step from
        its initial state.
        """
        resets = part_of(self.batch, RESETS)
        return None if resets is None else resets.astype(bool)

    @property
    def lengths(self) -> jax.Array | None:
        """How many steps of the block are real in each row: int32 [rows]; None if the batch does not say.

        The steps after them are padding. A layer that reads later steps must leave padding out, so that what
        it gives for real steps does not depend on it. It is the batch's field or key `lengths`, [rows], which
        counts the real steps of the window; here it is cut to the block.
        """
        lengths = part_of(self.batch, LENGTHS)
        if lengths is None:
            return None
        steps = max(time_steps(self.batch, int(not self.time_major)).values(), default=1)
        return jnp.clip(lengths.astype(jnp.int32) - self.time, 0, steps)

    def draw(self, sample: Function, shape: Sequence[int], number: int = 0) -> jax.Array:
        """Random numbers for the rows of the block: `x + 0.1 * at.draw(jax.random.normal, x.shape)`.

        Those of a row at a time step depend on the run's seed, the training step, the layer, the row, the
        time step and `number` alone: they are the same on any mesh, with any microbatches and time chunks.

        Args:
          sample: (key, shape) -> an array of that shape, such as `jax.random.normal`. Write other functions
            as `lambda key, shape: jax.random.bernoulli(key, 0.9, shape)`. It is called for one row, and in a
            model that has time for one time step.
          shape: of the result: [time, rows, ...], or [rows, ...] in a model that is not `time_major`.
          number: distinguishes several draws in one layer. Two with the same number have the same key.
        Raises:
          ValueError: there is no key, as in evaluation; or the shape has not the rows of the block.
        """
        if self.key is None:
            raise ValueError(
                "at.draw needs at.key, which is None in evaluation and prediction.\n"
                "Fix: draw only if at.key is not None."
            )
        key = jax.random.fold_in(self.key, _DRAWS + number)
        return draw_rows(key, self, sample, shape)


def draw_rows(
    key: jax.Array, at: LayerContext, sample: Function, shape: Sequence[int]
) -> jax.Array:
    """As `LayerContext.draw`, of a key of the training step.

    Raises:
      ValueError: the shape has not the rows of the block.
    """
    _check_rows(shape, at)
    dim, key = int(at.time_major), jax.random.fold_in(key, at.layer)
    rows = at.row + jnp.arange(shape[dim], dtype=jnp.int32)

    def of_rows(key):
        return jax.vmap(lambda row: sample(jax.random.fold_in(key, row), shape[dim + 1 :]))(rows)

    if not at.time_major:
        return of_rows(key)
    times = at.time + jnp.arange(shape[0], dtype=jnp.int32)
    return jax.vmap(lambda time: of_rows(jax.random.fold_in(key, time)))(times)


def _check_rows(shape: Sequence[int], at: LayerContext) -> None:
    dim = int(at.time_major)
    rows = {leaf.shape[dim * timed] for leaf, timed in timed_leaves(at.batch) if jnp.ndim(leaf)}
    wanted = rows if len(rows) == 1 else {*shape[dim : dim + 1]}
    if len(shape) <= dim or {shape[dim]} != wanted:
        dims = "time, rows, ..." if at.time_major else "rows, ..."
        with_rows = f", with the {rows.pop()} rows of the block" if len(rows) == 1 else ""
        raise ValueError(
            f"random numbers of shape {list(shape)}: must be [{dims}]{with_rows}.\nFix: draw for the whole "
            f"block, such as x.shape, and take what you need of the result."
        )
