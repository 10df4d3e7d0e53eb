"""The language model: token embedding, a stack of recurrent layers, a head over the vocabulary.

Legend of the dim suffixes: B batch, T time, E embedding, H hidden, V vocabulary.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import At
from jaxpar.base.axes import EMBED, INPUT, STAGE, TENSOR, TOKENS, VOCAB
from jaxpar.model import Stack, Sums
from jaxpar.nn.dropout import dropout
from jaxpar.nn.embedding import UNIT_VARIANCE, Embedding
from jaxpar.nn.linear import Linear, matmul
from jaxpar.nn.lstm import LSTM, extend
from jaxpar.nn.param import lecun_uniform, named_param, uniform
from jaxpar.tasks.lm.loss import (
    cross_entropy,
    linear_cross_entropy,
    logits_at_once,
    without_padding,
)
from jaxpar.tasks.lm.streams import Batch


class LanguageModel(nnx.Module):
    """Predicts the next token of every place of a text; its batches are `streams.Batch`."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        embed_size: int,
        vocab_size: int,
        *,
        rngs: nnx.Rngs,
        num_words: int | None = None,
        dropout: float = 0.0,
        init_range: float = 0.0,
        tie_embedding: bool = False,
        dtype: str = "float32",
        layer: Callable[..., Any] = LSTM,
    ):
        """Draws the parameters.

        Args:
          embed_size: E, at most hidden_size, and equal to it if the embedding is tied.
          vocab_size: V, rows of the table.
          num_words: ids from here on are padding, and get no probability; None if there are none.
          dropout: rate on the embedding, between layers and before the head.
          init_range: the table and all kernels are drawn uniformly within plus and minus this; 0 draws them
            by their widths.
          dtype: of activations and matmul inputs.
          layer: makes one, as `nn.LSTM` does.
        """
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_words = vocab_size if num_words is None else num_words
        self.dropout, self.tie_embedding, self.dtype = dropout, tie_embedding, dtype
        init = uniform(init_range) if init_range else None
        # A table that is the head as well is drawn and split like a head.
        self.embedding = Embedding(
            vocab_size,
            embed_size,
            dims=(VOCAB, INPUT) if tie_embedding else (TOKENS, EMBED),
            init=init or (lecun_uniform(embed_size) if tie_embedding else UNIT_VARIANCE),
            rngs=rngs,
        )

        def make(rngs: nnx.Rngs) -> Any:
            return layer(hidden_size, rngs=rngs, init=init, dropout=dropout)

        self.layers = Stack([make] * num_layers, rngs=rngs, unroll=1)  # the smallest
        if tie_embedding:
            self.head_bias = named_param(jnp.zeros(vocab_size, jnp.float32), (VOCAB,))
        else:
            self.head = Linear(hidden_size, vocab_size, dims=(INPUT, VOCAB), rngs=rngs, init=init)

    def prepare(self, sizes: Mapping[str, int]) -> "LanguageModel":
        """The model, its table zero-extended to the width of the layers where `tensor` splits it.

        Extending moves its parts between devices, which must not be done within a unit: not all devices take
        part in one.
        """
        if sizes[TENSOR] == 1 or self.embedding.table.shape[1] == self.hidden_size:
            return self
        model = nnx.clone(self)
        table_VH = extend(self.embedding.table[...], self.hidden_size)
        model.embedding.table = named_param(table_VH, (TOKENS, EMBED))
        return model

    @jax.named_scope("embedding")
    def first(self, batch: Batch, at: At) -> jax.Array:
        """Embedded inputs [T, B, H] in the compute dtype; beyond the width of the embedding they are zero."""
        x_TBE = self.embedding(jnp.asarray(batch.inputs_BT))
        return extend(x_TBE.astype(jnp.dtype(self.dtype)), self.hidden_size)

    def add_first_gradient(self, grads: Any, dx_TBH: jax.Array, batch: Batch, at: At) -> nnx.State:
        """The gradients with those of the rows that `first` took, added in place."""
        table = grads["embedding"]["table"]
        dx_TBE = dx_TBH[..., : table.shape[1]].astype(table.dtype)
        table = table.replace(table[...].at[batch.inputs_BT].add(dx_TBE))
        return nnx.State({**grads, "embedding": {"table": table}})

    def last(self, y_TBH: jax.Array, batch: Batch, at: At) -> Sums:
        """Negative log-likelihood of the targets, and how many there are."""
        return self._sums(y_TBH, batch, at)

    def last_part(self, y_TBH: jax.Array, batch: Batch, at: At) -> Sums:
        """`last` on every stage with its part of the vocabulary."""
        return self._sums(y_TBH, batch, at, manual_axis=STAGE)

    @jax.named_scope("head")
    def logits(self, y: jax.Array) -> jax.Array:
        """[..., H] -> float32 [..., V]; those of ids that are not words are hugely negative."""
        kernel_HV, bias_V = self._head()
        return matmul(y, kernel_HV) + jnp.expand_dims(bias_V, range(y.ndim - 1))

    def unroll(
        self, tokens_BT: jax.Array, carry: Any, resets_BT: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """One window of a text from the state that the window before left, without dropout.

        Args:
          tokens_BT: int32.
          carry: as `layers.initial_carry` gives it.
          resets_BT: where lines begin, before that token; None if nowhere.
        Returns:
          the state after the window, and float32 logits [T, B, V].
        """
        resets_TB = None if resets_BT is None else resets_BT.T
        batch = Batch(tokens_BT.T, tokens_BT.T, starts=False, resets=resets_TB)
        at = At(layer=0, time=0, row=0, batch=batch)
        carry, y, *_ = self.layers(carry, self.first(batch, at), at)
        return carry, self.logits(y)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens (batch, time) -> float32 logits (batch, time, vocab); zero state, no dropout."""
        carry = self.layers.initial_carry(tokens_BT.shape[0])
        return self.unroll(tokens_BT, carry)[1].swapaxes(0, 1)

    def _sums(self, y_TBH: jax.Array, batch: Batch, at: At, manual_axis: str | None = None) -> Sums:
        kernel_HV, bias_V = self._head(manual_axis)
        y_TBH, targets_TB = dropout(y_TBH, self.dropout, at), jnp.asarray(batch.targets_BT)
        if manual_axis is None:
            most = logits_at_once(at)
            return linear_cross_entropy(y_TBH, kernel_HV, bias_V, targets_TB, max_logits=most)
        logits_TBV = matmul(y_TBH, kernel_HV, jnp.dtype(self.dtype)) + bias_V[None, None]
        return cross_entropy(logits_TBV, targets_TB, manual_axis=manual_axis)

    def _head(self, manual_axis: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Kernel [H, V] and bias [V], or this device's part of them, without probability for padding."""
        if self.tie_embedding:
            kernel_HV, bias_V = self.embedding.table[...].T, self.head_bias[...]
        else:
            kernel_HV, bias_V = self.head.kernel[...], self.head.bias[...]
        if self.num_words < self.vocab_size:
            bias_V = without_padding(bias_V, self.num_words, manual_axis=manual_axis)
        return kernel_HV, bias_V
