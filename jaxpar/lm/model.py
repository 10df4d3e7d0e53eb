"""The language model: token embedding, a stack of recurrent layers, a head over the vocabulary.

Legend of the dim suffixes: B batch, T time, E embedding, H hidden, V vocabulary.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.base.at import LayerContext
from jaxpar.base.axes import EMBED, INPUT, STAGE, TENSOR, TOKENS, VOCAB
from jaxpar.base.types import Carry, Module
from jaxpar.lm import loss
from jaxpar.lm.drawing import TOKEN, draw_tokens, whole_logits
from jaxpar.lm.options import Options
from jaxpar.lm.streams import Batch
from jaxpar.model.model import Sums
from jaxpar.model.stack import Stack
from jaxpar.nn.dropout import dropout
from jaxpar.nn.embedding import UNIT_VARIANCE, Embedding
from jaxpar.nn.gated_block import GatedBlock, rms_norm
from jaxpar.nn.linear import Linear, matmul
from jaxpar.nn.lstm import extend
from jaxpar.nn.param import lecun_uniform, named_param, uniform
from jaxpar.sharding import dims_of

LOG_LIKELIHOOD = "log_likelihood"  # what is predicted

# A head after a norm: logits begin small, with a standard deviation of 0.02 sqrt(H) (as in GPT-2).
AFTER_NORM = uniform(0.02 * 3**0.5)


class LanguageModel(nnx.Module):
    """Predicts the next token of every place of a text; its batches are `streams.Batch`.

    Example:
      task = jaxpar.lm.LM(num_layers=2, hidden_size=16, embed_size=16, corpus="text.txt").resolve()
      model = task.make_model(rngs)
    """

    def __init__(self, task: Options, *, rngs: nnx.Rngs):
        """Draws the parameters.

        Args:
          task: says what they are; its vocab_size V, rows of the table, is known.
        Raises:
          ValueError: it is None.
        """
        self.width, self.vocab_size = task.widths[0], task.known_vocab_size
        self.num_words = self.vocab_size if task.num_words is None else task.num_words
        self.dropout, self.tie_embedding, self.dtype = task.dropout, task.tie_embedding, task.dtype
        self.has_blocks = task.has_blocks
        init = uniform(task.init_range) if task.init_range else None
        of_head = init or (AFTER_NORM if task.has_blocks else None)
        E, V = task.embed_size, self.vocab_size
        # A table that is the head as well is drawn and split like a head.
        tied = task.tie_embedding
        dims = (VOCAB, INPUT) if tied else (TOKENS, EMBED)
        of_table = (of_head or lecun_uniform(E)) if tied else (init or UNIT_VARIANCE)
        self.embedding = Embedding(V, E, dims=dims, init=of_table, rngs=rngs)
        options: dict[str, Any] = {"init": init, "dropout": task.dropout}
        if task.fused:
            options["fused"] = True
        if task.forget_bias != 1.0:  # as layers have it by themselves
            options["forget_bias"] = task.forget_bias
        if task.heads != 1:
            options["num_heads"] = task.heads

        @functools.cache  # layers of one function are drawn at once
        def maker(inputs: int, width: int) -> Callable[[nnx.Rngs], Module]:
            def make(rngs: nnx.Rngs) -> Module:
                layer = task.layer_class(width, inputs=inputs, rngs=rngs, **options)
                return GatedBlock(layer, rngs=rngs, init=init) if task.has_blocks else layer

            return make

        makers = itertools.starmap(maker, itertools.pairwise(task.widths))
        self.layers = Stack([*makers], rngs=rngs, unroll=1)  # the smallest
        if tied:
            self.head_bias = named_param(jnp.zeros(V, jnp.float32), (VOCAB,))
        else:
            self.head = Linear(task.widths[-1], V, dims=(INPUT, VOCAB), rngs=rngs, init=of_head)

    def prepare(self, sizes: Mapping[str, int]) -> "LanguageModel":
        """The model, its table zero-extended to the width of the layers where `tensor` splits it.

        Extending moves its parts between devices, which must not be done within a unit: not all devices take
        part in one.
        """
        if sizes[TENSOR] == 1 or self.embedding.table.shape[1] == self.width:
            return self
        model = nnx.clone(self)
        table_VH = extend(self.embedding.table[...], self.width)
        model.embedding.table = named_param(table_VH, dims_of(self.embedding.table))
        return model

    @jax.named_scope("embedding")
    def first(self, batch: Batch, at: LayerContext) -> jax.Array:
        """Embedded inputs [T, B, H] in the compute dtype; beyond the width of the embedding they are zero."""
        x_TBE = self.embedding(jnp.asarray(batch.inputs_BT))
        return extend(x_TBE.astype(jnp.dtype(self.dtype)), self.width)

    def last(self, y_TBH: jax.Array, batch: Batch, at: LayerContext) -> Sums:
        """Negative log-likelihood of the targets, and how many there are."""
        y_TBH, most = dropout(self._normed(y_TBH), self.dropout, at), loss.logits_at_once(at)
        targets_TB = jnp.asarray(batch.targets_BT)
        how = {"max_logits": most, "rounds_gradient": at.on_gpu}
        return loss.linear_cross_entropy(y_TBH, *self._head(), targets_TB, **how)

    def last_part(self, y_TBH: jax.Array, batch: Batch, at: LayerContext) -> Sums:
        """`last` on every stage with its part of the vocabulary."""
        y_TBH = dropout(self._normed(y_TBH), self.dropout, at)
        logits_TBV = self._logits_part(y_TBH, rounds_gradient=at.on_gpu)
        return loss.cross_entropy(logits_TBV, jnp.asarray(batch.targets_BT), manual_axis=STAGE)

    def predict(self, y_TBH: jax.Array, batch: Batch, at: LayerContext) -> dict[str, jax.Array]:
        """The log-likelihood of each target, in nats: float32 [T, B]; or a token that is drawn."""
        if batch.draw is not None:
            logits_TBV = self.logits(y_TBH)
            return {TOKEN: draw_tokens(logits_TBV, batch.draw, at, num_words=self.num_words)}
        y_TBH, most = self._normed(y_TBH), loss.logits_at_once(at)
        targets_TB = jnp.asarray(batch.targets_BT)
        found_TB = loss.linear_log_likelihood(y_TBH, *self._head(), targets_TB, max_logits=most)
        return {LOG_LIKELIHOOD: found_TB}

    def predict_part(
        self, y_TBH: jax.Array, batch: Batch, at: LayerContext
    ) -> dict[str, jax.Array]:
        """`predict` on every stage with its part of the vocabulary."""
        logits_TBV = self._logits_part(self._normed(y_TBH))
        targets_TB = jnp.asarray(batch.targets_BT)
        if batch.draw is not None:
            logits_TBV = whole_logits(logits_TBV)
            return {TOKEN: draw_tokens(logits_TBV, batch.draw, at, num_words=self.num_words)}
        return {LOG_LIKELIHOOD: loss.log_likelihood(logits_TBV, targets_TB, manual_axis=STAGE)}

    def _normed(self, y: jax.Array) -> jax.Array:
        """y with a norm where it is a sum of what blocks add."""
        return rms_norm(y) if self.has_blocks else y

    def _logits_part(self, y_TBH: jax.Array, *, rounds_gradient: bool = False) -> jax.Array:
        """Those of this stage's part of the vocabulary."""
        (kernel_HV, bias_V), dtype = self._head(STAGE), jnp.dtype(self.dtype)
        logits_TBV = matmul(y_TBH, kernel_HV, dtype, rounds_gradient=rounds_gradient)
        return logits_TBV + bias_V[None, None]

    @jax.named_scope("head")
    def logits(self, y: jax.Array) -> jax.Array:
        """[..., H] -> float32 [..., V]; those of ids that are not words are hugely negative."""
        kernel_HV, bias_V = self._head()
        return matmul(self._normed(y), kernel_HV) + jnp.expand_dims(bias_V, range(y.ndim - 1))

    def unroll(
        self, tokens_BT: jax.Array, carry: Carry, resets_BT: jax.Array | None = None
    ) -> tuple[Carry, jax.Array]:
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
        at = LayerContext(layer=0, time=0, row=0, batch=batch)
        carry, y, *_ = self.layers(carry, self.first(batch, at), at)
        return carry, self.logits(y)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens (batch, time) -> float32 logits (batch, time, vocab); zero state, no dropout."""
        carry = self.layers.initial_carry(tokens_BT.shape[0])
        return self.unroll(tokens_BT, carry)[1].swapaxes(0, 1)

    def _head(self, manual_axis: str | None = None) -> tuple[jax.Array, jax.Array]:
        """Kernel [H, V] and bias [V], or this device's part of them, without probability for padding."""
        if self.tie_embedding:
            kernel_HV, bias_V = self.embedding.table[...].T, self.head_bias[...]
        else:
            kernel_HV, bias_V = self.head.kernel[...], self.head.bias[...]
        if self.num_words < self.vocab_size:
            bias_V = loss.without_padding(bias_V, self.num_words, manual_axis=manual_axis)
        return kernel_HV, bias_V
