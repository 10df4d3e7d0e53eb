"""Whole models.

Legend of the dim suffixes: B batch, T time, E embedding, H hidden, V vocabulary;
of images, H height, W width, C channels, F features.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.axes import (
    BATCH,
    CHANNELS,
    DENSE_BATCH,
    EMBED,
    FEATURES,
    INPUT,
    TOKENS,
    UNITS,
    VOCAB,
)
from jaxpar.config import ConvNetConfig, ModelConfig
from jaxpar.nn.conv import Conv
from jaxpar.nn.cudnn import CuDNNLSTM
from jaxpar.nn.dropout import Position, dropout
from jaxpar.nn.embedding import UNIT_VARIANCE, Embedding
from jaxpar.nn.linear import Linear, matmul
from jaxpar.nn.lstm import LSTM, LSTMCarry
from jaxpar.nn.param import lecun_uniform, named_param

# Runs a model's stacked layers over a window:
# (lstm, carry, x_TBE, dropout key, where its rows begin in the batch) -> (carry, y_TBH).
RunLayers = Callable[
    [LSTM, LSTMCarry, jax.Array, jax.Array | None, jax.Array | int], tuple[LSTMCarry, jax.Array]
]


def run_plainly(
    lstm: LSTM,
    carry: LSTMCarry,
    x_TBE: jax.Array,
    dropout_key: jax.Array | None,
    first_row: jax.Array | int,
) -> tuple[LSTMCarry, jax.Array]:
    """The layers one after the other, over the whole window and batch at once."""
    return lstm(x_TBE, carry, dropout_key=dropout_key, first_row=first_row)


def make_lstm(
    config: ModelConfig, *, rngs: nnx.Rngs, layer_ids: Sequence[int] | None = None
) -> LSTM:
    """The stacked layers of a model. Without a mesh nothing can be chosen: kernel="auto" is the scan here."""
    module = CuDNNLSTM if config.kernel == "cudnn" else LSTM
    return module(
        config.embed_size,
        config.hidden_size,
        config.num_layers,
        rngs=rngs,
        forget_bias=config.forget_bias,
        dropout=config.dropout,
        layer_ids=layer_ids,
    )


class LSTMLanguageModel(nnx.Module):
    """Token embedding, stacked LSTM layers, and a head over the vocabulary."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, layer_ids: Sequence[int] | None = None
    ):
        """Draws the parameters.

        Args:
          layer_ids: the layer in each slot of the stacked parameters (`placement.slots`).

        Raises:
          ValueError: `config.vocab_size` is None.
        """
        if config.vocab_size is None:
            raise ValueError("vocab_size=None: set it, or let `fit` take it from the corpus")
        self.config = config
        # A table that is the head as well is drawn and split like a head.
        self.embedding = Embedding(
            config.vocab_size,
            config.embed_size,
            dims=(VOCAB, INPUT) if config.tie_embedding else (TOKENS, EMBED),
            init=lecun_uniform(config.embed_size) if config.tie_embedding else UNIT_VARIANCE,
            rngs=rngs,
        )
        self.lstm = make_lstm(config, rngs=rngs, layer_ids=layer_ids)
        if config.tie_embedding:
            self.head_bias = named_param(jnp.zeros(config.vocab_size), (VOCAB,))
        else:
            self.head = Linear(
                config.hidden_size, config.vocab_size, dims=(INPUT, VOCAB), rngs=rngs
            )

    def initial_carry(self, batch_size: int) -> LSTMCarry:
        """The state at the start of a text, zeros [slots, B, H]."""
        return self.lstm.initial_carry(batch_size)

    @jax.named_scope("embedding")
    def embed(self, tokens: jax.Array) -> jax.Array:
        """int [...] -> [..., E] in the compute dtype."""
        return self.embedding(tokens).astype(jnp.dtype(self.config.dtype))

    @jax.named_scope("head")
    def logits(self, y: jax.Array) -> jax.Array:
        """[..., H] -> float32 [..., V]."""
        kernel_HV, bias_V = self.head_params
        return matmul(y, kernel_HV) + jnp.expand_dims(bias_V, range(y.ndim - 1))

    @property
    def head_params(self) -> tuple[jax.Array, jax.Array]:
        """Kernel [H, V] and bias [V] of the head."""
        if self.config.tie_embedding:
            return self.embedding.table[...].T, self.head_bias[...]
        return self.head.kernel[...], self.head.bias[...]

    def outputs(
        self,
        tokens_BT: jax.Array,
        carry: LSTMCarry,
        *,
        dropout_key: jax.Array | None = None,
        first_row: jax.Array | int = 0,
        run_layers: RunLayers = run_plainly,
    ) -> tuple[LSTMCarry, jax.Array]:
        """One window of a text up to the head, from the state that the window before left.

        Args:
          tokens_BT: int32; B may be sharded over `data`.
          carry: state before the window, [slots, B, H].
          dropout_key: None means no dropout.
          first_row: where these rows begin in the whole batch.
          run_layers: what runs the stacked layers; a pipeline, for example.
        Returns:
          the state after the window, and what the head takes, time-major: [T, B, H].
        """
        x_TBE = self.embed(tokens_BT.T)
        carry, y_TBH = run_layers(self.lstm, carry, x_TBE, dropout_key, first_row)
        last = Position(layer=self.config.num_layers, time=0, row=first_row)
        return carry, dropout(y_TBH, self.config.dropout, dropout_key, last)

    def unroll(
        self, tokens_BT: jax.Array, carry: LSTMCarry, **options: Any
    ) -> tuple[LSTMCarry, jax.Array]:
        """`outputs`, and the head: float32 logits [T, B, V]."""
        carry, y_TBH = self.outputs(tokens_BT, carry, **options)
        return carry, self.logits(y_TBH)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens (batch, time) -> float32 logits (batch, time, vocab); zero state, no dropout."""
        _, logits_TBV = self.unroll(tokens_BT, self.initial_carry(tokens_BT.shape[0]))
        return logits_TBV.swapaxes(0, 1)


def anywhere(x: jax.Array, *_dims: str | None) -> jax.Array:
    """`x`, wherever the compiler lays it out; in place of a `sharding.Layout`."""
    return x


class HybridConvNet(nnx.Module):
    """Convolutions and poolings, then dense layers: a small AlexNet (Krizhevsky et al. 2012).

    Its dims have names enough for "one weird trick" (arXiv:1404.5997), and for what it is compared with,
    to be nothing but tables of rules: see `sharding.STRATEGIES`.

        images [B, H, W, C]   conv, conv, pool ...   features [B, F]   dense     dense   logits
        batch                 batch, channels        dense_batch, features  -> units -> features ...
    """

    def __init__(self, config: ConvNetConfig, *, rngs: nnx.Rngs):
        """Draws the parameters."""
        self.config = config
        channels = (config.image_shape[-1], *config.channels)
        self.convs = nnx.List(
            Conv(*sizes, (3, 3), dims=(None, None, INPUT, CHANNELS), rngs=rngs)
            for sizes in itertools.pairwise(channels)
        )
        widths = (config.num_features, *config.hidden_sizes, config.num_classes)
        names = itertools.islice(itertools.cycle((FEATURES, UNITS)), len(widths) - 1)
        # The classes have no name: they are few, and every device has the whole logits.
        self.widths = (*names, None)
        self.dense = nnx.List(
            Linear(*sizes, dims=dims, rngs=rngs)
            for sizes, dims in zip(
                itertools.pairwise(widths), itertools.pairwise(self.widths), strict=True
            )
        )

    def __call__(
        self,
        images_BHWC: jax.Array,
        layout: Callable[..., jax.Array] = anywhere,
        *,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Images -> float32 logits [B, classes].

        Args:
          layout: a `sharding.Layout` of one of the strategies.
          dropout_key: None means no dropout.
        """
        x_BHWC = images_BHWC
        for number, conv in enumerate(self.convs):
            with jax.named_scope(f"conv{number}"):
                x_BHWC = layout(nnx.relu(conv(x_BHWC)), BATCH, None, None, CHANNELS)
                if number % 2:
                    x_BHWC = nnx.max_pool(x_BHWC, (2, 2), (2, 2))
                    x_BHWC = layout(x_BHWC, BATCH, None, None, CHANNELS)
        # Channels first, so that what is split by channels is split by features as well.
        x_BF = x_BHWC.transpose(0, 3, 1, 2).reshape(x_BHWC.shape[0], -1)
        for number, (dense, dim) in enumerate(zip(self.dense, self.widths[:-1], strict=True)):
            with jax.named_scope(f"dense{number}"):
                x_BF = layout(x_BF if number == 0 else nnx.relu(x_BF), DENSE_BATCH, dim)
                position = Position(layer=number, time=0, row=0)
                x_BF = dropout(x_BF[None], self.config.dropout, dropout_key, position)[0]
                x_BF = dense(x_BF)
        return layout(x_BF, DENSE_BATCH, None)
