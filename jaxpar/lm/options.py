"""The options of the language model task, and properties of the model that follow from them."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from jaxpar.base.checks import (
    check_divides,
    nearest_multiples,
    require,
    require_not_negative,
    require_rate,
    require_sizes,
)
from jaxpar.config import OptimizerConfig
from jaxpar.model.task import Task

if TYPE_CHECKING:
    from jaxpar.lm.corpus import Corpus

# That a list of layers and a batch can have here.
MOST_LAYERS, MOST_TOKENS = 10_000, 2**28

# Layers by their names here, and in `jaxpar.nn`; those with a forget bias; and how many heads those have that
# can have several, where nothing else is said.
LAYERS = {
    "lstm": "LSTM", "gru": "GRU", "rglru": "RGLRU", "mingru": "MinGRU", "slstm": "SLSTM",
    "mlstm": "MLSTM", "gated_delta": "GatedDeltaNet",
}  # fmt: skip
FORGETFUL = ("lstm", "slstm")
HEADS = {"lstm": 1, "gru": 1, "slstm": 1, "mlstm": 4, "gated_delta": 4}

# Layers that papers have in residual blocks, and that learn little without: `nn.GatedBlock` is around each.
GATED = ("rglru", "slstm", "mlstm", "gated_delta")


def _free(default: Any) -> Any:
    """A field that may change between two runs of one state."""
    return dataclasses.field(default=default, metadata={"free": True})


@dataclasses.dataclass(frozen=True)
class Options(Task):
    """The options of `task.LM`; see its attributes."""

    num_layers: int = 4
    hidden_size: int = 192
    embed_size: int = 192
    vocab_size: int | None = None
    num_words: int | None = None
    dropout: float = _free(0.2)
    layer: Literal["lstm", "gru", "rglru", "mingru", "slstm", "mlstm", "gated_delta"] = "lstm"
    num_heads: int | None = None
    forget_bias: float = _free(1.0)
    init_range: float = _free(0.0)
    fused: bool = _free(False)
    tie_embedding: bool = False
    dtype: Literal["float32", "bfloat16"] = _free("float32")
    corpus: str = _free("python-docs")
    level: Literal["auto", "word", "char", "subword"] = _free("auto")
    max_vocab: int = _free(10_000)
    batch_size: int = _free(16)
    seq_len: int = _free(32)
    num_buckets: int = _free(0)
    bucket_multiple: int = _free(1)
    packed: bool = _free(False)
    optimizer: OptimizerConfig = _free(OptimizerConfig())

    def __post_init__(self):
        super().__post_init__()
        fact = f"num_layers={self.num_layers} must be at most {MOST_LAYERS}."
        require(self.num_layers <= MOST_LAYERS, f"{fact}\nFix: use fewer layers.")
        require_sizes(
            self, "num_layers", "hidden_size", "embed_size", "max_vocab", "batch_size", "seq_len",
            "bucket_multiple", "vocab_size", "num_words", "num_heads",
        )  # fmt: skip
        require(
            self.batch_size * self.seq_len <= MOST_TOKENS,
            f"batch_size={self.batch_size} x seq_len={self.seq_len} are more than {MOST_TOKENS} tokens.\n"
            f"Fix: use fewer rows or steps.",
        )
        require_rate(self, "dropout")
        require_not_negative(self, "init_range")
        fact = f"forget_bias={self.forget_bias}: layer={self.layer!r} has no forget bias."
        is_valid = self.layer in FORGETFUL or self.forget_bias == 1.0
        require(is_valid, f"{fact}\nFix: leave it out, or use layer='lstm' or 'slstm'.")
        require(
            self.layer in HEADS or self.num_heads in (None, 1),
            f"num_heads={self.num_heads}: layer={self.layer!r} has no recurrent matrix to split into heads.\n"
            f"Fix: leave it out, or use layer={' or '.join(map(repr, HEADS))}.",
        )
        require(
            self.layer == "lstm" or not self.fused,
            f"fused: layer={self.layer!r} has no kernels.\nFix: leave it out, or use layer='lstm'.",
        )
        check_divides("hidden_size", self.hidden_size, {"num_heads": self.heads})
        fact = f"num_words={self.num_words} is more than vocab_size={self.vocab_size}."
        is_valid = self.num_words is None or self.num_words <= (self.vocab_size or self.num_words)
        require(is_valid, f"{fact}\nFix: use vocab_size={self.num_words} or more, or leave it out.")
        first, *_, last = self.widths
        fact = f"embed_size={self.embed_size} is larger than hidden_size={first}."
        require(self.embed_size <= first, f"{fact}\nFix: use embed_size={first} or less.")
        fact = f"tie_embedding needs embed_size={self.embed_size} equal to hidden_size={last}."
        is_valid = not self.tie_embedding or self.embed_size == last
        require(is_valid, f"{fact}\nFix: use embed_size={last}, or leave tie_embedding out.")
        fact = "corpus='' is empty."
        require(self.corpus != "", f"{fact}\nFix: use python-docs, or a file or folder.")
        require_not_negative(self, "num_buckets")
        require(
            self.num_buckets == 0 or self.seq_len % self.bucket_multiple == 0,
            f"bucket_multiple={self.bucket_multiple} does not divide seq_len={self.seq_len}, the longest "
            f"bucket.\nFix: use seq_len={nearest_multiples(self.seq_len, self.bucket_multiple)}.",
        )
        fact = f"packed and num_buckets={self.num_buckets} exclude each other: both read lines."
        is_valid = not (self.packed and self.num_buckets)
        require(is_valid, f"{fact}\nFix: use num_buckets=0, or leave packed out.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Of what goes into each layer, and of what the last one gives."""
        return (self.hidden_size,) * (self.num_layers + 1)

    @property
    def heads(self) -> int:
        """Of each layer."""
        return self.num_heads or HEADS.get(self.layer, 1)

    @property
    def has_blocks(self) -> bool:
        """Whether each layer is in a `nn.GatedBlock`, and a norm comes after the last one."""
        return self.layer in GATED

    @property
    def known_vocab_size(self) -> int:
        """The rows of the embedding.

        Raises:
          ValueError: vocab_size is None.
        """
        fact, size = "vocab_size=None is not known yet.", self.vocab_size
        require(size is not None, f"{fact}\nFix: set it, or call task.resolve(), as fit does.")
        return size or 0

    @property
    def layer_class(self) -> Any:
        """The class of its layers, of `jaxpar.nn`."""
        from jaxpar import nn

        return getattr(nn, LAYERS[self.layer])

    def read_text(self) -> "Corpus":
        """The corpus, whose words the vocabulary must have room for."""
        raise NotImplementedError
