"""From English to German, letter by letter: LSTMs that read, LSTMs that write and look back.

The sentences are the messages of Django, which its own translators keep in German too. All layers are one
stack of two kinds. What moves through it is a dict, the source and the target as far as they have come:
encoders work on the one, decoders on the other, with attention to the source.

    python -m jaxpar train examples/translation.py:Translate --simulate 8 --mesh dp2pp4
"""

import ast
import collections
import dataclasses
import functools
import re
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar import (
    ArrayBatches,
    OptimizerConfig,
    Parallel,
    PipelineConfig,
    Stack,
    Sums,
    Task,
    TrainConfig,
)
from jaxpar.nn import LSTM, dropout

PAD, END = "", "\n"  # what fills a sentence up, and what ends it
LONGEST = 8  # letters that the baseline remembers

# --- The model. Activations are [time, rows, width]; letters are numbers, and that of PAD is 0.


class Encoder(LSTM):
    """An LSTM over the source."""

    def __call__(self, carry, x, at):
        """The state after the source, and x with more of the source understood."""
        carry, y = super().__call__(carry, x["source"], at)
        return carry, {**x, "source": x["source"] + y}


class Decoder(LSTM):
    """An LSTM over the target; at every letter it looks at the source."""

    def __init__(self, width, *, rngs, dropout):
        super().__init__(width, rngs=rngs, dropout=dropout)
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, carry, x, at):
        """The state after the target, and x with more of the target written."""
        carry, y = super().__call__(carry, x["target"], at)
        scores = jnp.einsum("tbw,sbw->bts", self.query(y), x["source"])
        is_letter = (at.batch["source"] > 0).T[:, None]
        attention = nnx.softmax(jnp.where(is_letter, scores, -1e9))
        seen = jnp.einsum("bts,sbw->tbw", attention, x["source"])
        return carry, {**x, "target": x["target"] + jnp.tanh(y + self.mix(seen))}


class Translator(nnx.Module):
    """Letters of both languages in, encoders, decoders, logits of the next letter out."""

    def __init__(self, num_letters, width, num_encoders, num_decoders, rate, *, rngs):
        self.embed = nnx.Embed(num_letters, width, rngs=rngs)
        layers = [lambda rngs: Encoder(width, rngs=rngs, dropout=rate)] * num_encoders
        layers += [lambda rngs: Decoder(width, rngs=rngs, dropout=rate)] * num_decoders
        self.layers = Stack(layers, rngs=rngs)
        self.head, self.rate = nnx.Linear(width, num_letters, rngs=rngs), rate

    def first(self, batch, at):
        """What goes into the first encoder."""
        return {"source": self.embed(batch["source"]), "target": self.embed(batch["given"])}

    def last(self, y, batch, at):
        """The loss of what comes out of the last decoder, summed."""
        logits = self.head(dropout(y["target"], self.rate, at))
        weight = jnp.where(batch["wanted"] > 0, batch["weight"][None], 0.0)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["wanted"])
        right = jnp.sum(weight, where=jnp.argmax(logits, axis=-1) == batch["wanted"])
        return Sums(jnp.sum(weight * nll), jnp.sum(weight), {"accuracy": right})


# --- The task: its fields are options of the command line.


@dataclasses.dataclass(frozen=True)
class Translate(Task):
    """Translations, learned from sentences in both languages.

    Attributes:
      num_encoders: LSTMs that read.
      num_decoders: LSTMs that write.
      width: of what moves between them.
      dropout: rate on the inputs of every LSTM.
      batch_size: sentences in a batch.
      max_letters: longer sentences are left out.
      optimizer: how it learns.
    """

    num_encoders: int = 2
    num_decoders: int = 2
    width: int = 64
    dropout: float = 0.3
    batch_size: int = 32
    max_letters: int = 48
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2)

    unit: ClassVar[str] = "letters"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=600, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_microbatches=4))

    def make_model(self, rngs):
        """The network, with its initial values."""
        sizes = self.width, self.num_encoders, self.num_decoders, self.dropout
        return Translator(len(load_letters()), *sizes, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Sentences: the source, the target as it is given, and one letter further, as it is wanted."""
        return ArrayBatches(load_sentences(split, self.max_letters), self.batch_size, seed)

    def check(self, parallel):
        """Refuses chunks of time: a decoder looks at the whole source."""
        if parallel.num_chunks > 1:
            raise ValueError(
                f"num_chunks={parallel.num_chunks} would show a decoder one part of the source at a time; "
                f"use num_chunks=1"
            )

    def baseline(self, split):
        """The accuracy of who sees the German only, and says what followed the same letters most often."""
        follows = collections.defaultdict(collections.Counter)
        for letter, endings in letters_after(load_sentences("train", self.max_letters)):
            for ending in endings:
                follows[ending][letter] += 1
        right = [
            letter == follows[next(filter(follows.__contains__, endings))].most_common(1)[0][0]
            for letter, endings in letters_after(load_sentences(split, self.max_letters))
        ]
        return {"accuracy without the English": float(np.mean(right))}


def letters_after(sentences):
    """Every letter that is wanted, and all endings of what is given before it, the longest first."""
    for given, wanted in zip(sentences["given"], sentences["wanted"], strict=True):
        for end, letter in enumerate(wanted[wanted > 0].tolist(), start=1):
            starts = range(max(end - LONGEST, 0), end + 1)
            yield letter, [tuple(given[start:end].tolist()) for start in starts]


@functools.cache
def load_pairs():
    """Messages of Django's without line breaks, {English: German}."""
    import django

    text = r'((?:".*"\n)+)'  # in quotes, on one line or on several
    pairs = {}
    for path in sorted(Path(django.__file__).parent.rglob("locale/de/LC_MESSAGES/*.po")):
        for found in re.findall(f"^msgid {text}msgstr {text}", path.read_text("utf-8"), re.M):
            source, target = ("".join(map(ast.literal_eval, part.splitlines())) for part in found)
            if source and target and END not in source + target:
                pairs[source] = target
    return dict(sorted(pairs.items()))


@functools.cache
def load_letters():
    """The number of every letter."""
    letters = {letter for pair in load_pairs().items() for text in pair for letter in text}
    return {letter: number for number, letter in enumerate([PAD, END, *sorted(letters)])}


@functools.cache
def load_sentences(split, max_letters):
    """Numbers of letters, int32 [N, max_letters + 1]. Of every 10 pairs, 8 are for train."""

    def numbers(texts):
        places = load_letters()
        rows = [[places[letter] for letter in text] for text in texts]
        return np.array([row + [0] * (max_letters + 1 - len(row)) for row in rows], np.int32)

    pairs = [pair for pair in load_pairs().items() if max(map(len, pair)) <= max_letters]
    places = {"train": range(8), "valid": [8], "test": [9]}[split]
    pairs = [pair for number, pair in enumerate(pairs) if number % 10 in places]
    return {
        "source": numbers(source + END for source, _ in pairs),
        "given": numbers(END + target for _, target in pairs),
        "wanted": numbers(target + END for _, target in pairs),
    }
