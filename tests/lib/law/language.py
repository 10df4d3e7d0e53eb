"""The language model, and what its parts around the layers are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpar import Sums, lm, nn
from lib.law.training import ByName

# Of `jaxpar.nn`, its options, and whether it is in a residual block.
LAYERS = {
    "lstm": (nn.LSTM, {}, False),
    "gru": (nn.GRU, {}, False),
    "mingru": (nn.MinGRU, {}, False),
    "rglru": (nn.RGLRU, {}, True),
    "slstm": (nn.SLSTM, {}, True),
    "mlstm": (nn.MLSTM, {"num_heads": 4}, True),
    "gated_delta": (nn.GatedDeltaNet, {"num_heads": 4}, True),
}
NUM_WORDS = 27


@dataclasses.dataclass(frozen=True)
class LanguageTask(ByName, lm.LM):
    """A language model on random tokens.

    Attributes:
      optimizer_name: of `PLAIN_OPTIMIZERS`.
      frozen_name: of what is not trained; "" trains all.
    """

    optimizer_name: str = "sgd of a config"
    frozen_name: str = ""

    def make_batches(self, split, seed=None):
        return Tokens(self)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Batches of random tokens; a tenth of the targets is ignored."""

    task: LanguageTask

    def batch(self, step):
        rng = np.random.default_rng(step)
        shape = self.task.batch_size, self.task.seq_len
        inputs, targets = rng.integers(0, NUM_WORDS, (2, *shape), dtype=np.int32)
        targets[rng.random(shape) < 0.1] = lm.IGNORE
        batch = lm.Batch(inputs, targets, starts=False)
        if not self.task.packed:
            return batch
        lengths = np.full(shape[0], shape[1], np.int32)
        return batch._replace(resets=rng.random(shape) < 0.2, lengths=lengths)


class Ends:
    """What is before and after the layers, as formulas of arrays by name.

    Attributes:
      trained: the names of what is trained.
    """

    def __init__(self, task):
        self.task = task
        head = {"head_bias"} if task.tie_embedding else {"head.kernel", "head.bias"}
        names = {"embedding.table"} | head
        self.trained = {name for name in names if task.frozen_name not in name.split(".")}

    def layers(self):
        """(layer, whether it reads the whole window) of each."""
        make, options, in_block = LAYERS[self.task.layer]
        width, found = self.task.hidden_size, []
        for _ in range(self.task.num_layers):
            rngs = nnx.Rngs(0)
            layer = make(width, inputs=width, dropout=self.task.dropout, rngs=rngs, **options)
            found.append((nn.GatedBlock(layer, rngs=rngs) if in_block else layer, False))
        return found

    def first(self, arrays, batch, at):
        """x [time, rows, width]: beyond the embedding it is zero."""
        x = arrays["embedding.table"][batch["inputs_BT"]].astype(self.task.dtype)
        missing = self.task.hidden_size - x.shape[-1]
        return jnp.pad(x, ((0, 0), (0, 0), (0, missing)))

    def last(self, arrays, y, batch, at):
        """Sums of the loss."""
        y = nn.dropout(self._normed(y), self.task.dropout, at)
        found = self._log_likelihood(arrays, y, batch)
        return Sums(-jnp.sum(found), jnp.sum(batch["targets_BT"] != lm.IGNORE).astype(jnp.float32))

    def predict(self, arrays, y, batch, at):
        """The log-likelihood of each target; 0 for those that are ignored."""
        return {"log_likelihood": self._log_likelihood(arrays, self._normed(y), batch)}

    def _normed(self, y):
        if not LAYERS[self.task.layer][2]:
            return y
        z = y.astype(jnp.float32)
        return (z / jnp.sqrt(jnp.mean(z**2, -1, keepdims=True) + 1e-6)).astype(y.dtype)

    def _log_likelihood(self, arrays, y, batch):
        if self.task.tie_embedding:
            kernel, bias = arrays["embedding.table"].T, arrays["head_bias"]
        else:
            kernel, bias = arrays["head.kernel"], arrays["head.bias"]
        logits = jnp.matmul(y, kernel.astype(y.dtype), preferred_element_type=jnp.float32)
        logits = logits + bias[None, None]
        scores = jax.nn.log_softmax(logits[..., : self.task.num_words])
        targets = batch["targets_BT"]
        found = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.where(targets == lm.IGNORE, 0.0, found)
