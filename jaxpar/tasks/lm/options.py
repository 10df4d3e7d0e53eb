"""Options of a language model in a table of their own. Plain data: nothing here needs JAX."""

import dataclasses
from typing import TYPE_CHECKING

from jaxpar.fields import check_fields, require_not_negative, require_rate

if TYPE_CHECKING:
    from jaxpar.nn.dropout import Dropout

# The modules of a file of weights, if nobody says otherwise; the layers are "lstm" or "gru".
NAMES = "embedding", "auto", "head"


@dataclasses.dataclass(frozen=True)
class Regularization:
    """Options of a language model, in addition to its `dropout`.

    Attributes:
      input_dropout: rate on the embedded inputs; None takes `dropout`.
      output_dropout: rate before the head; None takes `dropout`.
      hold_masks: use the same dropout mask for all time steps of a window.
      word_dropout: rate at which words lose their whole embedding, at all their places in a batch at once.
      kernel_dropout: rate on the weights of the recurrent kernels (DropConnect).
      activations: weight of the mean square of what goes into the head, in the loss of training.
      slowness: weight of the mean square of how much the last layer's outputs, without dropout, change from
        one step of a window to the next.
    """

    input_dropout: float | None = None
    output_dropout: float | None = None
    hold_masks: bool = False
    word_dropout: float = 0.0
    kernel_dropout: float = 0.0
    activations: float = 0.0
    slowness: float = 0.0

    def __post_init__(self):
        check_fields(self)
        for name in ("input_dropout", "output_dropout", "word_dropout", "kernel_dropout"):
            if getattr(self, name) is not None:
                require_rate(self, name)
        require_not_negative(self, "activations", "slowness")

    def of_layers(self, rate: float) -> "float | Dropout":
        """Dropout of the layers' inputs, of which `rate` is that between layers."""
        from jaxpar.nn.dropout import Dropout

        first = rate if self.input_dropout is None else self.input_dropout
        return (
            rate if first == rate and not self.hold_masks else Dropout(rate, first, self.hold_masks)
        )

    def of_head(self, rate: float) -> "float | Dropout":
        """Dropout of the head's inputs."""
        from jaxpar.nn.dropout import Dropout

        rate = rate if self.output_dropout is None else self.output_dropout
        return Dropout(rate, rate, True) if self.hold_masks else rate
