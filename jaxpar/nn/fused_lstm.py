"""An LSTM layer's loop over time as one GPU kernel forward and one backward, for GPUs like H100 and H200.

Legend of the dim suffixes: T time, B batch, H hidden, 4 the gates i f g o, U units of each of N blocks.

    z_t = zx_t + b + h_{t-1} W_h           i, f, o = sigmoid(z_i, z_f, z_o)    g = tanh(z_g)
    c_t = f * c_{t-1} + i * g              h_t = o * tanh(c_t)

XLA's loop starts several kernels for each time step, and each reads W_h from memory. These two kernels are
*persistent*: N blocks of threads run at the same time, and stay for all T steps. Each block owns U units.

    forward, at each step                         backward, at each step, from the last to the first
      1. product: all of h_{t-1}, times the         1. dz_t of its units, from dh = dy_t + dz_{t+1} W_h^T
         4 U columns of W_h of its units            2. wait until all of dz_t is there
      2. gates, c_t and h_t, in registers           3. product: dz_t of one gate, times 4 U rows of W_h:
      3. wait until all of h_t is there                a quarter of dz_t W_h^T for 4 U units
                                                    4. wait until all quarters are there

Blocks wait at a counter in memory. The quarters are added in a fixed order, so results are always the same.

In a block, one *warpgroup* (128 threads) loads, and each of the others computes 64 rows. The loader copies
tiles of both factors of the product into a ring of slots in shared memory (TMA). Tiles of W_h never
change, so it copies them before it waits for h_t. `full` barriers tell the others that a tile is there.
`empty` barriers tell the loader that a slot is free.

Why this cannot deadlock. Each block waits for all others, so all must run at once. A plan has at most as
many blocks as the GPU has multiprocessors, and each block fills one. So a kernel ends unless something else
holds a multiprocessor and itself waits. Only two things would:

  a collective    It waits for another device. On several devices XLA is told to run none beside other work
                  (`base.compiler`). Then a device runs kernels and collectives one after another, all devices
                  in the same order: each kernel ends, so each device comes to each collective.
  such a kernel   of the same program, beside it. XLA runs kernels one after another. More rows than fit take
                  one kernel after another too.

Programs that `jax.jit` compiles without that option get no kernels on several devices: only `Processor.of`
within a `shard_map` of jaxpar's offers them. Do not let two processes share a GPU.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxpar.base.trees import vary_like
from jaxpar.base.types import Arrays, Carry, DType

GATES = range(4)
ROWS = 64  # of a warpgroup: the height of its matrix instruction
MAX_ROWS = 256  # of a layer; a kernel takes half of them
_SHARED_BYTES = 226 * 1024  # of a block, at most; the barriers take the rest
_REGISTERS = {
    1: 232,
    2: 232,
}  # of a thread that computes, by the number of warpgroups; one that loads has 40


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a layer is divided among blocks.

    Attributes:
      rows: B of a kernel, 64 or 128; more rows of a layer are divided among kernels.
      width: H, a multiple of 64.
      units: U.
      tile: bytes in a row of a tile, in units of 128.
      slots: number of tiles of each factor in shared memory.
    """

    rows: int
    width: int
    units: int
    tile: int
    slots: int

    @classmethod
    def of(cls, rows: int, width: int, dtype: DType, cores: int) -> "Plan | None":
        """The plan for a layer, whose rows and units are padded; None if there is none.

        Args:
          cores: number of multiprocessors of the GPU.
        """
        B, H = (-(-size // ROWS) * ROWS for size in (min(rows, MAX_ROWS // 2), width))
        itemsize = jnp.dtype(dtype).itemsize
        if rows > MAX_ROWS or jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
            return None
        for more, units in itertools.product(range(0, 3 * ROWS, ROWS), (8, 16, 24)):
            wide = H + more
            if wide % (4 * units) or wide // units > cores:
                continue
            # Of a row: gates, c, dy, and parts of dh; those of the forward kernel are fewer.
            others = B * units * (4 * itemsize + 4 + itemsize + 16)
            for tile, least in ((2, 8), (1, 3)):
                slots = (_SHARED_BYTES - others) // ((B + 4 * units) * 128 * tile)
                if slots >= least and wide % (tile * 128 // itemsize) == 0:
                    return cls(B, wide, units, tile, min(slots, 8))
        return None

    @property
    def blocks(self) -> int:
        """N."""
        return self.width // self.units

    @property
    def groups(self) -> int:
        """Warpgroups of a block that compute."""
        return self.rows // ROWS


class _Kernel:
    """A plan for arrays of a type: sizes that follow, shared memory, and how a kernel is called.

    Attributes:
      columns: 4 U, of a block's product.
      tile: columns of a tile; `tiles` make H.
      everyone: how many times a counter is raised in a step.
    """

    def __init__(self, plan: Plan, dtype: np.dtype):
        self.plan, self.dtype, self.columns = plan, dtype, 4 * plan.units
        self.tile = plan.tile * 128 // dtype.itemsize
        self.tiles = plan.width // self.tile
        self.everyone = plan.blocks * plan.groups

    def per_unit(self, *dims: int, dtype: DTypeLike = jnp.float32) -> Any:
        """Shared memory for all rows of a block's units."""
        return plgpu.SMEM((*dims, self.plan.rows, self.plan.units), dtype)

    def block(self, *, a_smem: Any, b_smem: Any, full: Any, empty: Any, **scratch: Any) -> Any:
        """What the warpgroups of a block see, by name."""
        block = lax.axis_index("block")
        return types.SimpleNamespace(
            ring=_Ring(self, a_smem, b_smem, full, empty), block=block, group=lax.axis_index("group"),
            units=pl.ds(block * self.plan.units, self.plan.units), **scratch,
        )  # fmt: skip

    def call(
        self, body: Callable[..., None], name: str, outs: list[Any], scratch: Arrays, *args: Any
    ) -> list[jax.Array]:
        """Runs a kernel; in a `shard_map`, outputs vary over all axes that an argument varies over."""
        plan, slots = self.plan, self.plan.slots
        per_row = 128 // self.dtype.itemsize
        how = (plgpu.TilingTransform((8, per_row)), plgpu.SwizzleTransform(128))
        scratch |= {
            "a_smem": plgpu.SMEM((slots, plan.rows, self.tile), self.dtype, transforms=how),
            "b_smem": plgpu.SMEM((slots, self.columns, self.tile), self.dtype, transforms=how),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            "empty": plgpu.Barrier(num_arrivals=plan.groups, num_barriers=slots),
        }

        def with_scratch(*refs):
            pl.run_scoped(functools.partial(body, *refs), collective_axes="group", **scratch)

        args = vary_like(args, args)
        kind = jax.typeof(args[0]).manual_axis_type
        outs = [jax.ShapeDtypeStruct(*out, manual_axis_type=kind) for out in outs]
        mesh = plgpu.Mesh(
            grid=(plan.blocks,),
            grid_names=("block",),
            num_threads=plan.groups + 1,
            thread_name="group",
        )
        params = plgpu.CompilerParams()
        options: Any = {"mesh": mesh, "compiler_params": params, "name": name}
        found = pl.kernel(with_scratch, outs, **options)(*args)
        # XLA would run the kernel twice where its results are used, and written into a stack of layers.
        return lax.optimization_barrier(found)


class _Ring:
    """Tiles of two factors on their way through shared memory, for a product a [B, H] b [4 U, H]^T a step."""

    def __init__(self, kernel: _Kernel, a_smem: Any, b_smem: Any, full: Any, empty: Any):
        self.kernel, self.slots = kernel, kernel.plan.slots
        self.a, self.b, self.full, self.empty = a_smem, b_smem, full, empty

    def _slot(self, count: Any) -> Any:
        return lax.rem(count, jnp.int32(self.slots))

    def load(self, step: Any, copy_a: Any, copy_b: Any, wait: Callable[[], None]) -> None:
        """Loads all tiles of a step; for the warpgroup that loads.

        Args:
          copy_a, copy_b: (first column, slot, barrier): begin to copy a tile.
          wait: for a. Tiles of b are copied before it, as many as there is room for.
        """
        tile, tiles = self.kernel.tile, self.kernel.tiles
        ahead = min(self.slots, tiles)

        def column(k):
            # Forwards and backwards in turn: the L2 cache holds what the step before has read last.
            k = jnp.where(lax.rem(step, jnp.int32(2)) == 0, k, tiles - 1 - k)
            return pl.multiple_of(k * tile, tile)

        def load_b(k, _=None):
            count = step * tiles + k
            slot = self._slot(count)

            @pl.when(count >= self.slots)
            def _():
                plgpu.barrier_wait(self.empty.at[slot])

            copy_b(column(k), self.b.at[slot], self.full.at[slot])

        def load_a(k, _=None):
            slot = self._slot(step * tiles + k)
            copy_a(column(k), self.a.at[slot], self.full.at[slot])

        def load_both(k, _):
            load_b(k)
            load_a(k)

        lax.fori_loop(0, ahead, load_b, None)
        wait()
        lax.fori_loop(0, ahead, load_a, None)
        lax.fori_loop(ahead, tiles, load_both, None)

    def drain(self, steps: int) -> None:
        """Waits until the last tiles have been read."""
        total = steps * self.kernel.tiles
        for count in range(max(total - self.slots, 0), total):
            plgpu.barrier_wait(self.empty.at[count % self.slots])

    def product(self, step: Any, rows: Any) -> jax.Array:
        """[64, 4 U] float32 in registers, of the rows of a warpgroup that computes."""
        tiles = self.kernel.tiles

        def multiply(sums):
            def add(k, _):
                slot = self._slot(step * tiles + k)
                plgpu.barrier_wait(self.full.at[slot])
                plgpu.wgmma(sums, self.a.at[slot, rows], self.b.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)  # the one before has read its tiles

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(self.empty.at[self._slot(step * tiles + k - 1)])

            lax.fori_loop(0, tiles, add, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.empty.at[self._slot(step * tiles + tiles - 1)])
            return sums[...]

        shape = ROWS, self.kernel.columns
        return pl.run_scoped(multiply, plgpu.ACC(shape))  # pyright: ignore[reportPrivateImportUsage]


def _pad(a: jax.Array, *shape: int) -> jax.Array:
    """An array with zeros behind it along each dim."""
    return jnp.pad(a, [(0, size - own) for size, own in zip(shape, a.shape, strict=True)])


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp2(-1.4426950408889634 * x))


def _tanh(x: jax.Array) -> jax.Array:
    """Off by 1e-7 at most, also near 0."""
    return 2 * _sigmoid(2 * x) - 1


def _signal(counter: Any) -> None:
    """Raises a counter that every block sees, after copies to memory that have ended."""
    plgpu.semaphore_signal(counter, memory_scope="gpu")


def _wait_for(counter: Any, count: Any) -> None:
    plgpu.semaphore_wait(counter, count, decrement=False, memory_scope="gpu")


def _load(ref: Any, layout: Any = None) -> jax.Array:
    """From memory to registers, as the matrix instruction lays out its results."""
    options: Any = {"layout": layout or plgpu.Layout.WGMMA, "optimized": False}
    found = plgpu.load(ref, **options)
    return found + jnp.zeros((), ref.dtype)  # a sum has the type of what is in a loop


def _where_new(resets: Any, t: Any, rows: Any, units: int) -> jax.Array:
    """Where a sequence begins at a step, [64, U]."""
    is_new = _load(resets.at[t, rows], plgpu.Layout.WGMMA.reduce(1))
    return lax.broadcast_in_dim(is_new, (ROWS, units), [0]) > 0.5


def _load_forward(kernel: _Kernel, r: Any, T: int) -> None:
    """The warpgroup of a block that loads; `r` has what all of the block see, by name."""
    plgpu.set_max_registers(40, action="decrease")

    def step(t, _):
        @pl.when(t > 0)
        def _():
            plgpu.barrier_wait(r.zx_empty)

        for g in GATES:
            plgpu.copy_gmem_to_smem(r.zx.at[t, :, g, r.units], r.zx_smem.at[g], r.zx_full)

        def copy_h(column, smem, barrier):
            plgpu.copy_gmem_to_smem(r.h_prev.at[t, :, pl.ds(column, kernel.tile)], smem, barrier)

        def copy_w(column, smem, barrier):
            plgpu.copy_gmem_to_smem(r.w.at[r.block, :, pl.ds(column, kernel.tile)], smem, barrier)

        r.ring.load(t, copy_h, copy_w, lambda: _wait_for(r.made_h, (t + 1) * kernel.everyone))

    lax.fori_loop(0, T, step, None)
    r.ring.drain(T)
    plgpu.barrier_wait(r.zx_empty)


def _compute_forward(kernel: _Kernel, r: Any, T: int) -> None:
    """A warpgroup that computes, likewise."""
    plan, dtype, U = kernel.plan, kernel.dtype, kernel.plan.units
    plgpu.set_max_registers(_REGISTERS[plan.groups], action="increase")
    rows = pl.ds(r.group * ROWS, ROWS)

    def send(h, t):
        """Gives h to all blocks, for step t."""
        r.h_smem[rows] = h
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.h_smem.at[rows], r.h_prev.at[t, rows, r.units])
        plgpu.wait_smem_to_gmem(0)
        _signal(r.made_h)

    def step(t, c):
        z = r.ring.product(t, rows)
        plgpu.barrier_wait(r.zx_full)
        z = [z[:, g * U : (g + 1) * U] + r.zx_smem[g, rows] + biases[g] for g in GATES]
        i, f, g, o = _sigmoid(z[0]), _sigmoid(z[1]), _tanh(z[2]), _sigmoid(z[3])
        c = f * c + i * g
        h = h_next = (o * _tanh(c)).astype(dtype)
        after = c
        if r.news:
            resets, h_new, c_new = r.news
            is_new = _where_new(resets, jnp.minimum(t + 1, T - 1), rows, U)
            h_next = jnp.where(is_new, _load(h_new.at[rows, r.units]), h)
            after = jnp.where(is_new, _load(c_new.at[rows, r.units]), c)

        @pl.when(t + 1 < T)
        def _():  # the other blocks wait for it
            send(h_next, t + 1)

        r.h_smem[rows] = h
        r.c_smem[rows] = c
        for k, gate in enumerate((i, f, g, o)):
            r.gates_smem[k, rows] = gate.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.h_smem.at[rows], r.y.at[t, rows, r.units])
        for k in GATES:
            plgpu.copy_smem_to_gmem(r.gates_smem.at[k, rows], r.gates.at[t, rows, k, r.units])

        @pl.when(t + 1 < T)
        def _():
            plgpu.copy_smem_to_gmem(r.c_smem.at[rows], r.c_prev.at[t + 1, rows, r.units])

        @pl.when(t + 1 == T)
        def _():
            plgpu.copy_smem_to_gmem(r.c_smem.at[rows], r.c_last.at[rows, r.units])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(r.zx_empty)
        return after

    c = _load(r.c0.at[rows, r.units])
    r.c_smem[rows] = c
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r.c_smem.at[rows], r.c_prev.at[0, rows, r.units])
    send(_load(r.h0.at[rows, r.units]), 0)
    b_of = [_load(r.b.at[g, r.units], plgpu.Layout.WGMMA.reduce(0)) for g in GATES]
    biases = [lax.broadcast_in_dim(b_U, (ROWS, U), [1]) for b_U in b_of]
    lax.fori_loop(0, T, step, c)
    plgpu.wait_smem_to_gmem(0)


def _in_parts(*axes: int | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For more rows than a kernel has: one kernel after another, each for some of them.

    Args:
      axes: that of the rows of each argument after the plan; None has none. Results: 1 where there is time.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_all(plan: Plan, *args: Any) -> Any:
            found = []
            for start in range(0, args[0].shape[1], plan.rows):
                rows = slice(start, start + plan.rows)
                of_axis = {None: (...,), 0: (rows,), 1: (slice(None), rows)}
                part = [
                    jax.tree.map(lambda a, own=of_axis[axis]: a[own], arg)
                    for arg, axis in zip(args, axes, strict=False)
                ]
                part, found = lax.optimization_barrier((part, found)) if found else (part, found)
                found.append(run(plan, *part))
            return jax.tree.map(lambda *own: jnp.concatenate(own, int(own[0].ndim > 2)), *found)

        return run_all

    return decorate


@_in_parts(1, None, None, 0, 1, 0)
def forward(
    plan: Plan,
    zx_TB4H: jax.Array,
    w_HGH: jax.Array,
    b_4H: jax.Array,
    carry: Carry,
    resets_TB: jax.Array | None = None,
    initial: Carry = None,
) -> list[jax.Array]:
    """Runs all steps.

    Args:
      zx_TB4H: x W_x, float32.
      w_HGH: W_h, in the dtype of the product.
      b_4H: float32.
      carry: h and c before the first step, [B, H] float32.
      resets_TB: 1 where a sequence begins, float32; not looked at in the first step. None means nowhere.
      initial: h and c that sequences begin with, as `carry`.
    Returns:
      y and the h that each step begins with, [T, B, H]; the gates [T, B, 4, H]; in the dtype of the product.
      Then c before each step (of the step before, also where a sequence begins) [T, B, H], and after the
      last one [B, H]; float32.
    """
    T, rows, _, width = zx_TB4H.shape
    B, H, dtype, U = plan.rows, plan.width, w_HGH.dtype, plan.units
    kernel = _Kernel(plan, dtype)
    zx_TB4H, w_HGH, b_4H = _pad(zx_TB4H, T, B, 4, H), _pad(w_HGH, H, 4, H), _pad(b_4H, 4, H)

    def of_state(state: Carry) -> tuple[jax.Array, jax.Array]:
        h_BH, c_BH = (_pad(a, B, H) for a in state)
        return h_BH.astype(dtype), c_BH

    in_place = dtype == jnp.float32  # gates take the place of what they are made of
    # The columns of a block together, each with its inputs next to each other, as TF32 needs them.
    w_NCH = w_HGH.reshape(H, 4, -1, U).transpose(2, 1, 3, 0).reshape(-1, kernel.columns, H)
    more = () if resets_TB is None else (_pad(resets_TB, T, B), *of_state(initial))

    def body(zx, w, b, h0, c0, *refs, **scratch):
        *news, y, h_prev, gates, c_prev, c_last = refs
        r = kernel.block(**scratch)
        r.zx, r.w, r.b, r.h0, r.c0, r.news = zx, w, b, h0, c0, news
        r.y, r.h_prev, r.gates, r.c_prev, r.c_last = y, h_prev, gates, c_prev, c_last
        r.gates_smem = scratch.get("gates_smem", r.zx_smem)
        r.made_h = pl.get_global(plgpu.SemaphoreType.REGULAR)
        pl.when(r.group == plan.groups)(lambda: _load_forward(kernel, r, T))
        pl.when(r.group < plan.groups)(lambda: _compute_forward(kernel, r, T))

    scratch = {
        "zx_smem": kernel.per_unit(4),
        "zx_full": plgpu.Barrier(num_arrivals=4),
        "zx_empty": plgpu.Barrier(num_arrivals=plan.groups),
        "c_smem": kernel.per_unit(),
        "h_smem": kernel.per_unit(dtype=dtype),
        **({} if in_place else {"gates_smem": kernel.per_unit(4, dtype=dtype)}),
    }
    of_h, of_c = ((T, B, H), dtype), ((T, B, H), jnp.float32)
    outs = [of_h, of_h, ((T, B, 4, H), dtype), of_c, ((B, H), jnp.float32)]
    args = zx_TB4H, w_NCH, b_4H, *of_state(carry), *more
    *of_steps, c_last = kernel.call(body, "lstm_forward", outs, scratch, *args)
    return [*(a[:, :rows, ..., :width] for a in of_steps), c_last[:rows, :width]]


def _load_backward(kernel: _Kernel, r: Any, T: int) -> None:
    """The warpgroup of a block that loads, as of `_load_forward`."""
    plgpu.set_max_registers(40, action="decrease")

    def step(s, _):
        t = T - 1 - s

        @pl.when(s > 0)
        def _():
            plgpu.barrier_wait(r.kept_empty)

        for g in GATES:
            plgpu.copy_gmem_to_smem(r.gates.at[t, :, g, r.units], r.gates_smem.at[g], r.kept_full)
        plgpu.copy_gmem_to_smem(r.dy.at[t, :, r.units], r.dy_smem, r.kept_full)
        plgpu.copy_gmem_to_smem(r.cs.at[t, :, r.units], r.c_smem, r.kept_full)

        @pl.when(s == 0)  # a quarter of the gradient, four times
        def _():
            for g in GATES:
                plgpu.copy_gmem_to_smem(r.dh1.at[:, r.units], r.parts_smem.at[g], r.parts_full)

        @pl.when(s > 0)
        def _():
            _wait_for(r.made_parts, s * kernel.everyone)
            for g in GATES:
                plgpu.copy_gmem_to_smem(r.parts.at[g, :, r.units], r.parts_smem.at[g], r.parts_full)

        def copy_dz(column, smem, barrier):
            plgpu.copy_gmem_to_smem(
                r.dz.at[t, :, r.gate, pl.ds(column, kernel.tile)], smem, barrier
            )

        def copy_w(column, smem, barrier):
            of_part = r.w.at[pl.ds(r.first, kernel.columns), r.gate, pl.ds(column, kernel.tile)]
            plgpu.copy_gmem_to_smem(of_part, smem, barrier)

        r.ring.load(s, copy_dz, copy_w, lambda: _wait_for(r.made_dz, (s + 1) * kernel.everyone))

    lax.fori_loop(0, T, step, None)
    r.ring.drain(T)
    plgpu.barrier_wait(r.kept_empty)


def _compute_backward(kernel: _Kernel, r: Any, T: int) -> None:
    """A warpgroup that computes, likewise."""
    plan, dtype, U = kernel.plan, kernel.dtype, kernel.plan.units
    plgpu.set_max_registers(_REGISTERS[plan.groups], action="increase")
    rows = pl.ds(r.group * ROWS, ROWS)
    zeros = plgpu.layout_cast(jnp.zeros((ROWS, U), jnp.float32), plgpu.Layout.WGMMA)

    def step(s, carry):
        dc, c, d_new = carry
        t = T - 1 - s
        plgpu.barrier_wait(r.kept_full)
        i, f, g, o = (r.gates_smem[k, rows].astype(jnp.float32) for k in GATES)
        c_before, dy_t, tanh_c = r.c_smem[rows], r.dy_smem[rows].astype(jnp.float32), _tanh(c)
        plgpu.barrier_wait(r.parts_full)
        dh = (
            r.parts_smem[0, rows]
            + r.parts_smem[1, rows]
            + r.parts_smem[2, rows]
            + r.parts_smem[3, rows]
        )
        c_prev, is_new = c_before, None
        if r.news:
            resets, c_new = r.news
            after = jnp.minimum(t + 1, T - 1)
            was_new = _where_new(resets, after, rows, U) & (t + 1 < T)
            d_new = d_new[0] + jnp.where(was_new, dh, 0.0), d_new[1]
            dh = jnp.where(was_new, 0.0, dh)
            is_new = _where_new(resets, t, rows, U)
            c_prev = jnp.where(is_new, _load(c_new.at[rows, r.units]), c_before)
        dh += dy_t
        dc += dh * o * (1 - tanh_c * tanh_c)
        dz_i, dz_f = dc * g * (1 - i) * i, dc * c_prev * (1 - f) * f
        dz_g, dz_o = dc * i * (1 - g * g), dh * tanh_c * (1 - o) * o
        for k, dz_k in enumerate((dz_i, dz_f, dz_g, dz_o)):  # in place of the gates
            r.gates_smem[k, rows] = dz_k.astype(dtype)
        plgpu.commit_smem()
        for k in GATES:
            plgpu.copy_smem_to_gmem(r.gates_smem.at[k, rows], r.dz.at[t, rows, k, r.units])
        plgpu.wait_smem_to_gmem(0)
        _signal(r.made_dz)
        plgpu.barrier_arrive(r.kept_empty)
        part = r.ring.product(s, rows)
        for k in GATES:
            r.parts_smem[k, rows] = part[:, k * U : (k + 1) * U]
        plgpu.commit_smem()
        for k in GATES:
            where = pl.ds(r.first + k * U, U)
            plgpu.copy_smem_to_gmem(r.parts_smem.at[k, rows], r.parts.at[r.gate, rows, where])
        plgpu.wait_smem_to_gmem(0)
        _signal(r.made_parts)
        dc = dc * f
        if is_new is not None:
            d_new = d_new[0], d_new[1] + jnp.where(is_new, dc, 0.0)
            dc = jnp.where(is_new, 0.0, dc)
        return dc, c_before, d_new

    start = _load(r.dc1.at[rows, r.units]), _load(r.c_last.at[rows, r.units])
    carry = *start, (zeros,) * (2 if r.news else 0)
    dc, _, totals = lax.fori_loop(0, T, step, carry)
    for where, total in zip((r.dc0, *r.d_new), (dc, *totals), strict=True):
        r.c_smem[rows] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.c_smem.at[rows], where.at[rows, r.units])
        plgpu.wait_smem_to_gmem(0)


@_in_parts(1, 1, 1, 0, None, 0, 1, 0)
def backward(
    plan: Plan,
    dy_TBH: jax.Array,
    gates_TB4H: jax.Array,
    c_TBH: jax.Array,
    c_BH: jax.Array,
    w_HGH: jax.Array,
    d_carry: Carry,
    resets_TB: jax.Array | None = None,
    initial: Carry = None,
) -> tuple[jax.Array, Carry, Carry]:
    """Runs all steps, from the last to the first.

    Args:
      dy_TBH, gates_TB4H, w_HGH: in the dtype of the products.
      c_TBH, c_BH: c before each step, and after the last one, as `forward` gives them; float32.
      d_carry: gradients of h and c after the last step, [B, H] float32.
      resets_TB: as of `forward`, here looked at in the first step as well.
      initial: as of `forward`.
    Returns:
      dz [T, B, 4, H] in the dtype of the products; the gradients of h and c before the first step, and of
      those that sequences begin with, as `d_carry`.
    """
    T, rows, _, width = gates_TB4H.shape
    B, H, dtype = plan.rows, plan.width, w_HGH.dtype
    kernel = _Kernel(plan, dtype)
    of_gate = plan.blocks // 4  # blocks
    args = [
        *(
            _pad(dy_TBH, T, B, H),
            _pad(gates_TB4H, T, B, 4, H),
            _pad(c_TBH, T, B, H),
            _pad(c_BH, B, H),
        ),
        *(_pad(w_HGH, H, 4, H), _pad(d_carry[0] / 4, B, H), _pad(d_carry[1], B, H)),
    ]
    more = () if resets_TB is None else (_pad(resets_TB, T, B), _pad(initial[1], B, H))

    def body(dy, gates, cs, c_last, w, dh1, dc1, *refs, **scratch):
        r = kernel.block(**scratch)
        r.dy, r.gates, r.cs, r.c_last, r.w, r.dh1, r.dc1 = dy, gates, cs, c_last, w, dh1, dc1
        r.news, (r.dz, r.parts, r.dc0, *r.d_new) = refs[: len(more)], refs[len(more) :]
        r.made_dz = pl.get_global(plgpu.SemaphoreType.REGULAR)
        r.made_parts = pl.get_global(plgpu.SemaphoreType.REGULAR)
        # The gate and the first unit of its quarter.
        r.gate, r.first = lax.div(r.block, of_gate), lax.rem(r.block, of_gate) * kernel.columns
        pl.when(r.group == plan.groups)(lambda: _load_backward(kernel, r, T))
        pl.when(r.group < plan.groups)(lambda: _compute_backward(kernel, r, T))

    scratch = {
        "gates_smem": kernel.per_unit(4, dtype=dtype),
        "parts_smem": kernel.per_unit(4),
        "c_smem": kernel.per_unit(),
        "dy_smem": kernel.per_unit(dtype=dtype),
        "kept_full": plgpu.Barrier(num_arrivals=6),
        "kept_empty": plgpu.Barrier(num_arrivals=plan.groups),
        "parts_full": plgpu.Barrier(num_arrivals=4),
    }
    of_row = (B, H), jnp.float32
    outs = [((T, B, 4, H), dtype), ((4, B, H), jnp.float32), *[of_row] * (3 if more else 1)]
    dz, parts, *others = kernel.call(body, "lstm_backward", outs, scratch, *args, *more)
    dh0, dc0, *d_new = (a[:rows, :width] for a in (parts.sum(0), *others))
    if resets_TB is not None:
        is_new = resets_TB[0][:, None] > 0.5
        d_new[0] += jnp.where(is_new, dh0, 0.0)
        dh0 = jnp.where(is_new, 0.0, dh0)
    return dz[:, :rows, :, :width], (dh0, dc0), tuple(d_new) or (dh0, dc0)
