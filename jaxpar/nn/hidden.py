"""What recurrent layers have in common: their constructors, and a state of h, one vector per row."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import At
from jaxpar.base.axes import BATCH, GATES, HIDDEN, INPUT
from jaxpar.nn.dropout import dropout
from jaxpar.nn.param import Initializer, kernel_param, named_param
from jaxpar.nn.resets import initial_of


class GateParams(NamedTuple):
    """Weights of one layer, or of several stacked on a leading dim; I inputs, H hidden, G gates. float32."""

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
    """

    carry_dims: ClassVar[Any] = (BATCH, HIDDEN)
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
        rngs: nnx.Rngs,
        init: Initializer | None = None,
        dropout: float = 0.0,
    ):
        """Draws the kernels; biases are 0.

        Args:
          width: H, of state and outputs.
          inputs: I, of inputs; None is H.
          init: of the kernels; None draws them with variance 1 / their inputs.
          dropout: rate on the inputs; see `nn.dropout`.
        """
        self.width, self.inputs, self.dropout = width, inputs or width, dropout
        for name, size in zip(self.kernels, (self.inputs, width), strict=False):
            shape = (size, self.num_gates, width)
            setattr(self, name, kernel_param(rngs, shape, (INPUT, GATES, HIDDEN), init))
        self.b = named_param(jnp.zeros((self.num_biases, width), jnp.float32), (GATES, HIDDEN))

    @property
    def params(self) -> GateParams:
        """The weights."""
        return GateParams(self.w_x[...], self.w_h[...], self.b[...])

    def initial_carry(self, rows: int) -> Any:
        """Zeros, [rows, H]; a layer of your own may return something else, such as a parameter."""
        return jnp.zeros((rows, self.width), jnp.float32)

    def begins_with(self, x_TBH: jax.Array, at: At) -> Any:
        """The state that sequences within the block begin with; None is zeros."""
        return initial_of(self, x_TBH, at)

    def __call__(self, carry: Any, x_TBH: jax.Array, at: At) -> tuple[Any, jax.Array]:
        """Dropout, then the layer over a window of time."""
        with jax.named_scope(type(self).__name__.lower()):
            initial = self.begins_with(x_TBH, at)
            return self.over_time(carry, dropout(x_TBH, self.dropout, at), at, initial)

    def over_time(
        self, carry: Any, x_TBH: jax.Array, at: At, initial: Any
    ) -> tuple[Any, jax.Array]:
        """The layer over a window of time.

        The dtype of x is that of the matmuls' inputs; they accumulate in float32, and the state is float32.

        Args:
          carry: the state before the first step.
          initial: that which sequences begin with (`at.resets`); None is zeros.
        Returns:
          the state after the last step, and the outputs, as x.
        """
        raise NotImplementedError


class ForgetGate(Recurrence):
    """A layer whose gates are four, and whose second one says what the state forgets."""

    num_gates = num_biases = 4

    def __init__(self, width: int, *, forget_bias: float = 1.0, **options: Any):
        """Draws the kernels; biases are 0 except for the forget gate's.

        Args:
          width: H, of state and outputs.
          forget_bias: initial bias of the forget gate (Jozefowicz et al. 2015 recommend 1).
          options: `rngs`, `inputs`, `init` and `dropout`, as of every `Recurrence`.
        """
        super().__init__(width, **options)
        self.b[...] = self.b[...].at[1].set(forget_bias)
