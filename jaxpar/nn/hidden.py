"""The base of recurrent layers whose state is one vector per row: constructors and initial state.

With N heads (Beck et al. 2024, arXiv:2405.04517, section 2.2) a recurrent matrix is N blocks on a diagonal:
a unit sees the state of the D = H / N units of its own head. Where `tensor` splits heads, no time step waits
for another device. In a loop over time the dim H of state and gates is two, [N, D].
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import BATCH, GATES, HEADS, HIDDEN, INPUT
from jaxpar.base.checks import check_divides, require, require_positive
from jaxpar.base.types import Carry, Dims, LayerOutput, Tree
from jaxpar.internal.products import contract
from jaxpar.nn.dropout import dropout
from jaxpar.nn.param import Initializer, kernel_param, lecun_uniform, named_param
from jaxpar.nn.resets import initial_of


class GateParams(NamedTuple):
    """Weights of one layer, or of several stacked on a leading dim; I inputs, H hidden, G gates. float32.

    Of N heads of D units w_h is [N, D, G, D], and H is two dims, [N, D], in the others.

    Example:
      lstm = jaxpar.nn.LSTM(16, rngs=rngs)
      params = jaxpar.nn.GateParams(lstm.w_x[...], lstm.w_h[...], lstm.b[...])
    """

    w_x_IGH: jax.Array
    w_h_HGH: jax.Array
    b_GH: jax.Array


class Recurrence(nnx.Module):
    """A layer with kernels and biases of gates; its state is h, if it does not say otherwise.

    Attributes:
      carry_dims: of its state.
      kernels: what they are called, in the order in which they are drawn.
      num_gates, num_biases: of each kernel, and of all of them.
      width: H, of state and outputs; `inputs` I, of inputs.
      num_heads: N, blocks of the recurrent kernel.
    """

    carry_dims: ClassVar[Dims] = (BATCH, HIDDEN)
    kernels: ClassVar[tuple[str, ...]] = ("w_x", "w_h")
    num_gates: ClassVar[int]
    num_biases: ClassVar[int]
    w_x: nnx.Param
    w_h: nnx.Param

    def __init__(
        self,
        width: int,
        *,
        inputs: int | None = None,
        num_heads: int = 1,
        rngs: nnx.Rngs,
        init: Initializer | None = None,
        dropout: float = 0.0,
    ):
        """Draws the kernels; biases are 0.

        Args:
          width: H, of state and outputs.
          inputs: I, of inputs; None is H.
          num_heads: N; a unit sees the state of the H / N neighbours of its head alone.
          init: of the kernels; None draws them with variance 1 / their inputs.
          dropout: rate on the inputs; see `nn.dropout`.
        Raises:
          ValueError: as of `draw_params`.
        """
        self.width, self.inputs, self.dropout = width, inputs or width, dropout
        self.num_heads = num_heads
        self.draw_params(rngs, init)

    def draw_params(self, rngs: nnx.Rngs, init: Initializer | None) -> None:
        """Draws the kernels; biases are 0.

        Raises:
          ValueError: heads do not divide the width, or the layer has no recurrent kernel.
        """
        width, num_heads = self.width, self.num_heads
        require_positive(self, "num_heads")
        require(
            num_heads == 1 or "w_h" in self.kernels,
            f"num_heads={num_heads}: {type(self).__name__} has no recurrent matrix to split into heads.\n"
            f"Fix: leave it out, or use LSTM, GRU or SLSTM.",
        )
        check_divides("width", width, {"num_heads": num_heads})
        for name, size in zip(self.kernels, (self.inputs, width), strict=False):
            shape, dims = (size, self.num_gates, width), (INPUT, GATES, HIDDEN)
            if name == "w_h" and num_heads > 1:
                size = width // num_heads
                shape, dims = (num_heads, size, self.num_gates, size), (HEADS, INPUT, GATES, None)
            draw = init or lecun_uniform(size)
            setattr(self, name, kernel_param(rngs, shape, dims, draw))
        self.b = named_param(jnp.zeros((self.num_biases, width), jnp.float32), (GATES, HIDDEN))

    @property
    def params(self) -> GateParams:
        """The weights."""
        return GateParams(self._by_head(self.w_x[...]), self.w_h[...], self._by_head(self.b[...]))

    @property
    def _has_blocks(self) -> bool:
        """Whether its recurrent matrix is of blocks."""
        return self.num_heads > 1 and "w_h" in self.kernels

    def _by_head(self, tree: Tree) -> Tree:
        """Arrays [..., H], each as [..., N, D] if there are heads."""
        if not self._has_blocks:
            return tree
        return jax.tree.map(lambda a: a.reshape(*a.shape[:-1], self.num_heads, -1), tree)

    def initial_carry(self, rows: int) -> Carry:
        """Zeros, [rows, H]; a layer of your own may return something else, such as a parameter."""
        return jnp.zeros((rows, self.width), jnp.float32)

    def begins_with(self, x_TBH: jax.Array, at: LayerContext) -> Carry:
        """The state that sequences within the block begin with; None is zeros."""
        return initial_of(self, x_TBH, at)

    def __call__(self, carry: Carry, x_TBH: jax.Array, at: LayerContext) -> LayerOutput:
        """Dropout, then the layer over a window of time."""
        with jax.named_scope(type(self).__name__.lower()):
            initial = self._by_head(self.begins_with(x_TBH, at))
            x_TBH = dropout(x_TBH, self.dropout, at)
            found = self.over_time(self._by_head(carry), x_TBH, at, initial)
            if not self._has_blocks:
                return found
            return jax.tree.map(lambda a: a.reshape(*a.shape[:-2], -1), found)

    def over_time(
        self, carry: Carry, x_TBH: jax.Array, at: LayerContext, initial: Carry
    ) -> LayerOutput:
        """The layer over a window of time.

        The dtype of x is that of the matmuls' inputs; they accumulate in float32, and the state is float32.

        Args:
          carry: the state before the first step; of N heads of D units H is [N, D], in results as well.
          initial: that which sequences begin with (`at.resets`); None is zeros.
        Returns:
          the state after the last step, and the outputs, as x.
        """
        raise NotImplementedError


def gates_of_state(h_BH: jax.Array, w_h_HGH: jax.Array) -> jax.Array:
    """h W_h, [B, G, H] float32; [B, G, N, D] of heads. The matmul runs in the dtype of h."""
    w_h = w_h_HGH.astype(h_BH.dtype)
    if w_h.ndim == 3:
        return contract(h_BH, w_h, out=jnp.float32)
    return contract(h_BH, w_h, out=jnp.float32, num_blocks=1).swapaxes(1, 2)


class ForgetGate(Recurrence):
    """A layer whose gates are four, and whose second one says what the state forgets."""

    num_gates = num_biases = 4

    def __init__(self, width: int, *, forget_bias: float = 1.0, **options: Any):
        """Draws the kernels; biases are 0 except for the forget gate's.

        Args:
          width: H, of state and outputs.
          forget_bias: initial bias of the forget gate (Jozefowicz et al. 2015 recommend 1).
          options: `rngs`, `inputs`, `num_heads`, `init` and `dropout`, as of every `Recurrence`.
        """
        super().__init__(width, **options)
        self.b[...] = self.b[...].at[1].set(forget_bias)
