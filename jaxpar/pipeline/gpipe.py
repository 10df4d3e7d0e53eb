"""Layers on stages: a batch flows through them in units of one microbatch and one chunk of time.

tick       0      1      2      3          unit u = (microbatch m, chunk k), u = m K + k
stage 0   F0     F1     F2     ...         (h, c) stay on their stage between chunks;
stage 1          F0     F1     ...         only x [T/K, B/M, W] crosses a link
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.axes import DATA, STAGE
from jaxpar.nn.dropout import Position
from jaxpar.nn.stack import Carry, Layer, Params, run_layers
from jaxpar.pipeline.schedule import make_schedule


def run_pipeline(
    layer: Layer,
    params: Params,
    carry: Carry,
    x_TBW: jax.Array,
    *,
    mesh: Mesh,
    layer_ids: tuple[int, ...],
    num_microbatches: int,
    num_chunks: int,
) -> tuple[Carry, jax.Array]:
    """Runs stacked layers as a pipeline; the same result as `nn.run_layers`, differentiable by autodiff.

    Autodiff gives the GPipe schedule: all forward units, then all backward units, every residual kept.

    Args:
      layer: one layer; see `nn.Layer`.
      params: leaves [slots, ...], slots sharded over `stage`.
      carry: leaves [slots, B, ...], sharded over `stage` and `data`.
      x_TBW: inputs of the first layer, B sharded over `data`.
      layer_ids: the layer in each slot (`placement.slots`).
      num_microbatches, num_chunks: M and K; M divides B / data, K divides T.
    Returns:
      the carry after the window, laid out as before, and the last layer's output [T, B, W], sharded over
      `data` and replicated over `stage`.
    Raises:
      ValueError: a size does not divide.
    """
    num_stages, num_rows = mesh.shape[STAGE], x_TBW.shape[1]
    M, K = num_microbatches, num_chunks
    if num_rows % (mesh.shape[DATA] * M) or x_TBW.shape[0] % K:
        raise ValueError(
            f"inputs of {x_TBW.shape[0]} steps and {num_rows} rows do not divide by num_chunks={K} and "
            f"data={mesh.shape[DATA]} x num_microbatches={M}"
        )
    if len(layer_ids) % num_stages:
        raise ValueError(f"{len(layer_ids)} slots do not divide by stage={num_stages}")
    units = make_schedule("gpipe", num_stages, M, K, backward=False).forward.unit
    t, b = x_TBW.shape[0] // K, num_rows // mesh.shape[DATA] // M

    def on_device(params, carry, x_TBW, layer_ids_local, units):
        # From here on every array is this device's own part, and may differ on every device. Casting
        # before the loop puts the sum over `data` of the weights' cotangents after the loop.
        params, layer_ids_local, units = lax.pcast(
            (params, layer_ids_local, units), DATA, to="varying"
        )
        x_TBW = lax.pcast(x_TBW, STAGE, to="varying")
        stage, first_row = lax.axis_index(STAGE), lax.axis_index(DATA) * (b * M)

        def tick(state, unit):
            carry, arrived_tbW = state
            m, k = unit // K, unit % K
            x_tbW = jnp.where(
                stage == 0,
                lax.dynamic_slice(x_TBW, (k * t, m * b, 0), (t, b, x_TBW.shape[2])),
                arrived_tbW,
            )
            carry_b = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, m * b, b, 1), carry)

            def busy(params, carry_b, x_tbW):
                position = Position(layer=0, time=k * t, row=first_row + m * b)
                return run_layers(
                    layer,
                    *(params, carry_b, x_tbW, position, layer_ids_local),
                    has_empty_slots=-1 in layer_ids,
                )

            def idle(params, carry_b, x_tbW):
                return carry_b, x_tbW

            carry_b, y_tbW = lax.cond(unit >= 0, busy, idle, params, carry_b, x_tbW)
            carry = jax.tree.map(
                lambda a, part: lax.dynamic_update_slice_in_dim(a, part, m * b, 1), carry, carry_b
            )
            up = [(s, s + 1) for s in range(num_stages - 1)]
            return (carry, lax.ppermute(y_tbW, STAGE, up)), y_tbW

        arrived_tbW = jnp.zeros((t, b, x_TBW.shape[2]), x_TBW.dtype)
        arrived_tbW = lax.pcast(arrived_tbW, (DATA, STAGE), to="varying")
        (carry, _), y_per_tick = lax.scan(tick, (carry, arrived_tbW), units[:, 0])
        # The last stage finished unit u at tick u + S - 1.
        y_MKtbW = y_per_tick[num_stages - 1 :].reshape(M, K, t, b, -1)
        y_TBW = y_MKtbW.transpose(1, 2, 0, 3, 4).reshape(x_TBW.shape)
        y_TBW = jnp.where(stage == num_stages - 1, y_TBW, jnp.zeros_like(y_TBW))
        return carry, lax.psum(y_TBW, STAGE)

    stacked, rows = P(STAGE), P(STAGE, DATA)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        axis_names={DATA, STAGE},
        in_specs=(stacked, rows, P(None, DATA), stacked, P(None, STAGE)),
        out_specs=(rows, P(None, DATA)),
    )(params, carry, x_TBW, jnp.asarray(layer_ids, jnp.int32), jnp.asarray(units))
