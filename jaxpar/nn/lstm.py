"""An LSTM layer as a pair (forward, backward), and as an NNX module.

Legend of the dim suffixes: T time, B batch, I input, H hidden, 4 the gates i f g o.

    z_t = x_t W_x + h_{t-1} W_h + b        i, f, o = sigmoid(z_i, z_f, z_o)    g = tanh(z_g)
    c_t = f * c_{t-1} + i * g              h_t = o * tanh(c_t)

(Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000.) The input projection of all
steps is one matmul before the time loop, and so is every weight gradient after it: the backward loop
produces dz_t only. Autodiff of a scan would add an outer product into dW_h at every step instead, and
under data parallelism all-reduce it there.
"""

import functools
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from jaxpar.base.at import LayerContext, kernel_cores
from jaxpar.base.axes import BATCH, HIDDEN, TENSOR
from jaxpar.base.checks import require
from jaxpar.base.trees import vary_like
from jaxpar.base.types import Arrays, Carry, Dims
from jaxpar.internal.products import sum_of_outer_products, transposable
from jaxpar.nn.hidden import ForgetGate, GateParams
from jaxpar.nn.param import named_param
from jaxpar.nn.resets import begin_anew

if TYPE_CHECKING:  # an import of Pallas takes a while, and only some GPUs need it
    from jaxpar.nn.fused_lstm import Plan

# Names of precisions of matmuls in which a GPU may round float32 to TF32, as the kernels do.
_ROUNDED = (None, "default", "fastest", "high", "bfloat16", "bfloat16_3x", "tensorfloat32")
# Of the gates i f g o: sigmoid(z) = tanh(z / 2) / 2 + 1 / 2, so that one vectorised tanh makes all of them.
_IS_TANH_4 = np.array([0, 0, 1, 0], np.float32)


class LSTMCarry(NamedTuple):
    """The state between two windows of time: of one layer [B, H], or stacked [L, B, H]. float32.

    Example:
      carry = jaxpar.nn.LSTMCarry(h_BH=jnp.zeros((2, 16)), c_BH=jnp.zeros((2, 16)))
    """

    h_BH: jax.Array
    c_BH: jax.Array


class _Residuals(NamedTuple):
    """What the backward pass of one layer needs besides the weights."""

    x_TBI: jax.Array
    gates_TB4H: jax.Array  # i, f, g, o after their nonlinearity
    h_prev_TBH: jax.Array  # h_{t-1}; where a sequence begins, its initial state
    c_prev_TBH: jax.Array  # c_{t-1}, float32; also where a sequence begins
    c_last_BH: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def lstm_layer(
    params: GateParams,
    carry: LSTMCarry,
    x_TBI: jax.Array,
    resets_TB: jax.Array | None = None,
    initial: LSTMCarry | None = None,
    how: "int | Plan" = 1,
) -> tuple[LSTMCarry, jax.Array]:
    """One layer over a window of time.

    The dtype of `x_TBI` is the compute dtype of the matmuls (they accumulate in float32); c and the gate
    arithmetic stay float32.

    Args:
      params: of one layer; H, or heads, may be sharded over `tensor`.
      carry: (h, c) before the first step, [B, H] float32; of heads [B, N, D] (`GateParams`), as outputs are.
      resets_TB: where a sequence begins, from the state `initial` (None: zeros); None means nowhere.
      how: a plan for kernels that take all steps; or how many steps a turn of a loop takes, as in `lax.scan`.
    Returns:
      (h, c) after the last step, and the outputs h_TBH in the dtype of x.

    Example:
      lstm = jaxpar.nn.LSTM(16, rngs=rngs)
      params = jaxpar.nn.GateParams(lstm.w_x[...], lstm.w_h[...], lstm.b[...])
      carry, outputs = jaxpar.nn.lstm_layer(params, lstm.initial_carry(2), jnp.ones((5, 2, 16)))
    """
    return _forward(params, carry, x_TBI, resets_TB, initial, how)[0]


def _forward(
    params: GateParams,
    carry: LSTMCarry,
    x_TBI: jax.Array,
    resets_TB: jax.Array | None,
    initial: Carry,
    how: "int | Plan",
):
    """The layer, and what its backward pass needs."""
    dtype = x_TBI.dtype
    w_h, n = params.w_h_HGH.astype(dtype), _heads(params)
    zx_TB4H = _dot(f"tbi,ig{n}h->tbg{n}h", x_TBI, params.w_x_IGH.astype(dtype))
    if not isinstance(how, int):
        from jaxpar.nn import fused_lstm

        news = _news(resets_TB, initial, carry)
        carry = begin_anew(None if resets_TB is None else resets_TB[0], initial, carry)
        found = fused_lstm.forward(how, zx_TB4H, w_h, params.b_GH, carry, *news)
        y_TBH, h_prev, gates, c_prev, c = found
        after = LSTMCarry(y_TBH[-1].astype(jnp.float32), c)
        residuals = _Residuals(x_TBI, gates, h_prev, c_prev, c)
        return (after, y_TBH), (params, residuals, resets_TB, initial)
    scale_141 = (1 + _is_tanh(zx_TB4H)) / 2

    def step(carry, inputs):
        (h_BH, c_before_BH, buffer_TB4H), (t, is_new_B) = carry, inputs
        h_BH, c_BH = begin_anew(is_new_B, initial, LSTMCarry(h_BH, c_before_BH))
        z_B4H = buffer_TB4H[t] + _dot(f"b{n}j,{n}jgh->bg{n}h", h_BH, w_h) + params.b_GH[None]
        gates_B4H = jnp.tanh(z_B4H * scale_141) * scale_141 + (1 - scale_141)
        i, f, g, o = (gates_B4H[:, gate] for gate in range(4))
        c_next = f * c_BH + i * g
        h_next = (o * jnp.tanh(c_next)).astype(dtype)
        # The gates take the place of what they are made of: memory that is at hand, and in the cache.
        buffer_TB4H = lax.dynamic_update_index_in_dim(buffer_TB4H, gates_B4H, t, 0)
        return (h_next, c_next, buffer_TB4H), (h_next, h_BH, c_before_BH)

    start = (carry.h_BH.astype(dtype), carry.c_BH, zx_TB4H)
    steps = jnp.arange(len(x_TBI)), resets_TB
    (h, c, gates), (y_TBH, h_prev, c_prev) = lax.scan(step, start, steps, unroll=how)
    residuals = _Residuals(x_TBI, gates.astype(dtype), h_prev, c_prev, c)
    after = LSTMCarry(h.astype(jnp.float32), c)
    return (after, y_TBH), (params, residuals, resets_TB, initial)


def _news(resets_TB: jax.Array | None, initial: Carry, like: LSTMCarry) -> tuple[Arrays, ...]:
    """Where sequences begin, as numbers, and the state that they begin with; nothing if none does."""
    if resets_TB is None:
        return ()
    initial = jax.tree.map(jnp.zeros_like, like) if initial is None else initial
    return resets_TB.astype(jnp.float32), initial


def _backward(how: "int | Plan", saved: Arrays, cotangents: tuple[LSTMCarry, jax.Array]):
    """From cotangents of the (h, c) after the last step and of the outputs to those of the arguments.

    Those of the weights are float32.
    """
    params, residuals, resets_TB, initial = saved
    dtype = residuals.x_TBI.dtype
    w_x_I4H, n = transposable(params.w_x_IGH.astype(dtype)), _heads(params)
    if isinstance(how, int):
        dz_TB4H, d_carry, d_initial = _over_time(how, saved, cotangents)
    else:
        from jaxpar.nn import fused_lstm

        d_carry, dy_TBH = cotangents
        of_steps = dy_TBH, residuals.gates_TB4H, residuals.c_prev_TBH, residuals.c_last_BH
        w_h, news = params.w_h_HGH.astype(dtype), _news(resets_TB, initial, d_carry)
        dz_TB4H, *found = fused_lstm.backward(how, *of_steps, w_h, d_carry, *news)
        d_carry, d_initial = (LSTMCarry(*own) for own in found)
        d_initial = None if initial is None else d_initial
    d_params = GateParams(
        w_x_IGH=sum_of_outer_products(residuals.x_TBI, dz_TB4H),
        w_h_HGH=sum_of_outer_products(
            residuals.h_prev_TBH,
            jnp.swapaxes(dz_TB4H, 2, 3) if n else dz_TB4H,  # heads come first
            num_blocks=len(n),
        ),
        b_GH=jnp.sum(dz_TB4H.astype(jnp.float32), axis=(0, 1)),
    )
    dx_TBI = _dot(f"tbg{n}h,ig{n}h->tbi", dz_TB4H, w_x_I4H).astype(dtype)
    return d_params, d_carry, dx_TBI, None, d_initial


def _over_time(unroll: int, saved: Arrays, cotangents: tuple[LSTMCarry, jax.Array]):
    """Cotangents of z of all steps, of the (h, c) before the first one, and of the initial state."""
    params, residuals, resets_TB, initial = saved
    d_carry, dy_TBH = cotangents
    dtype, n = residuals.x_TBI.dtype, _heads(params)
    # Transposed here, or it would be at every step.
    order = (0, 2, 3, 1) if n else (1, 2, 0)
    w_h_4HH = lax.optimization_barrier(params.w_h_HGH.astype(dtype).transpose(order))
    is_tanh_141 = _is_tanh(residuals.gates_TB4H)

    def step(carry, inputs):
        dh_BH, dc_BH, c_BH, d_initial = carry
        *inputs, is_new_B = inputs
        dy_BH, gates_B4H, c_before_BH = lax.optimization_barrier(tuple(inputs))
        c_prev_BH = begin_anew(is_new_B, None if initial is None else initial.c_BH, c_before_BH)
        gates_B4H = gates_B4H.astype(jnp.float32)
        i, f, g, o = (gates_B4H[:, gate] for gate in range(4))
        tanh_c = jnp.tanh(c_BH)
        dh_BH = dh_BH + dy_BH.astype(jnp.float32)
        dc_BH = dc_BH + dh_BH * o * (1 - tanh_c * tanh_c)
        d_gates_B4H = jnp.stack([dc_BH * g, dc_BH * c_prev_BH, dc_BH * i, dh_BH * tanh_c], axis=1)
        slope_B4H = (1 - gates_B4H) * (gates_B4H + is_tanh_141)
        dz_B4H = lax.optimization_barrier((d_gates_B4H * slope_B4H).astype(dtype))
        d_prev = LSTMCarry(_dot(f"bg{n}h,{n}ghj->b{n}j", dz_B4H, w_h_4HH), dc_BH * f)
        if resets_TB is not None and initial is not None:
            d_initial = jax.tree.map(
                lambda total, d: total + begin_anew(is_new_B, d, jnp.zeros_like(d)),
                *(d_initial, d_prev),
            )
        d_prev = begin_anew(is_new_B, None, d_prev)
        return (*d_prev, c_before_BH, d_initial), dz_B4H

    d_initial = vary_like(jax.tree.map(jnp.zeros_like, initial), dy_TBH)
    start = (*d_carry, residuals.c_last_BH, d_initial)
    inputs = (dy_TBH, residuals.gates_TB4H, residuals.c_prev_TBH, resets_TB)
    (dh, dc, _, d_initial), dz_TB4H = lax.scan(step, start, inputs, reverse=True, unroll=unroll)
    return dz_TB4H, LSTMCarry(dh, dc), d_initial


lstm_layer.defvjp(_forward, _backward)


def _heads(params: GateParams) -> str:
    """The letter of their dim in formulas of products; none for one head."""
    return "n" * (params.w_h_HGH.ndim > 3)


def _is_tanh(gates_TB4H: jax.Array) -> np.ndarray:
    """1 for the gate that is a tanh and 0 for the others, for arrays of a time step."""
    return _IS_TANH_4[None, :, *[None] * (gates_TB4H.ndim - 3)]


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


class LSTM(ForgetGate):
    """One LSTM layer.

    Attributes:
      carry_dims: of its state.
      h_0, c_0: [H], the initial state, if it is learned.
      w_x: [I, 4, H]; `w_h`: [H, 4, H], of heads [N, D, 4, D].
      b: [4, H].

    Example:
      layer = jaxpar.nn.LSTM(16, forget_bias=1.0, rngs=rngs)
      carry, y = layer(layer.initial_carry(2), jnp.ones((5, 2, 16)), jaxpar.LayerContext(0, 0, 0))
    """

    carry_dims: ClassVar[Dims] = LSTMCarry(*[(BATCH, HIDDEN)] * 2)  # pyright: ignore[reportArgumentType]

    def __init__(
        self, width: int, *, learn_initial: bool = False, fused: bool = False, **options: Any
    ):
        """Draws the kernels; biases are 0 except for the forget gate's.

        Args:
          width: H, of state and outputs.
          learn_initial: learn the state that sequences begin with; otherwise it is zeros.
          fused: take all time steps in one GPU kernel each way, on GPUs like H100 with JAX 0.12 or later
            (`fused_lstm`). Elsewhere nothing changes. With several GPUs, no transfer overlaps other work.
          options: `rngs`, `inputs`, `num_heads`, `init`, `dropout` and `forget_bias`, as of every
            `ForgetGate`.
        """
        super().__init__(width, **options)
        self.learn_initial, self.fused = learn_initial, fused
        if learn_initial:
            self.h_0 = named_param(jnp.zeros(width, jnp.float32), (HIDDEN,))
            self.c_0 = named_param(jnp.zeros(width, jnp.float32), (HIDDEN,))

    def initial_carry(self, rows: int) -> LSTMCarry:
        """(h, c) of zeros or as learned, [rows, H] each."""
        if self.learn_initial:
            row = LSTMCarry(self.h_0[...], self.c_0[...])
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, self.width)), row)
        zeros = jnp.zeros((rows, self.width), jnp.float32)
        return LSTMCarry(zeros, zeros)

    def begins_with(self, x_TBH: jax.Array, at: LayerContext) -> Carry:
        """As learned; None is zeros."""
        return super().begins_with(x_TBH, at) if self.learn_initial else None

    def over_time(self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry):
        """See `lstm_layer`."""
        how = self._plan(x_TBH, at) or at.unroll
        found: Arrays = lstm_layer(self.params, carry, x_TBH, at.resets, initial, how)
        return found

    def _plan(self, x_TBH: jax.Array, at: LayerContext) -> "Plan | None":
        """Of the kernels for this GPU; None where the loop is XLA's."""
        cores = at.processor.cores if at.processor else 0
        if not (self.fused and cores and self.num_heads == 1):
            return None
        config: Any = jax.config
        if config.jax_default_matmul_precision not in _ROUNDED:
            return None
        from jaxpar.nn.fused_lstm import Plan

        return Plan.of(x_TBH.shape[1], self.width, x_TBH.dtype, cores)


def has_kernels(model: nnx.Module, mesh: Mesh) -> bool:
    """Whether the kernels of `fused_lstm` may run in a program of a model."""
    can_run = kernel_cores(mesh) > 0 and mesh.shape[TENSOR] == 1
    layers = (node for _, node in nnx.iter_graph(model) if isinstance(node, LSTM))
    return can_run and any(layer.fused for layer in layers)


def extend(x: jax.Array, width: int) -> jax.Array:
    """x with its last dim zero-extended to `width`.

    Raises:
      ValueError: it is wider.

    Example:
      print(jaxpar.nn.extend(jnp.ones((2, 3)), 5).shape)  # (2, 5)
    """
    if x.shape[-1] == width:
        return x
    wider = f"inputs of width {x.shape[-1]} are wider than width={width}"
    require(x.shape[-1] <= width, f"{wider}.\nFix: use width={x.shape[-1]} or more.")
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
