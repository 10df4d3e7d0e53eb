"""From English to German: LSTMs that read, LSTMs that write and look back; then greedy and beam search.

The sentences are the messages of Django, which its own translators keep in German too, or those of a file.
All layers are one stack of two kinds. What moves through it is a dict, the source and the target as far as
they have come: encoders work on the one, decoders on the other, with attention to the source.

    python -m jaxpar train examples/translation.py:Translate --simulate 8 --mesh dp2pp4
    python examples/translation.py runs/0001 --beam 4 --mesh pp2 --simulate 2
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
import tyro
from flax import nnx
from jax import lax

import jaxpar
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

PAD = 0  # fills a sentence up; the tokens of a vocabulary are counted from 1
END = "\n"  # ends a sentence, and comes before the first token
BEST = 8  # next tokens that a model tells of, so the widest beam

# --- The model. Activations are [time, rows, width].


class Encoder(LSTM):
    """An LSTM over the source."""

    def __call__(self, carry, x, at):
        """The state after the source, and x with more of the source understood."""
        carry, y = super().__call__(carry, x["source"], at)
        return carry, {**x, "source": x["source"] + y}


class Decoder(LSTM):
    """An LSTM over the target; at every token it looks at the source."""

    def __init__(self, width, *, rngs, dropout):
        super().__init__(width, rngs=rngs, dropout=dropout)
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, carry, x, at):
        """The state after the target, and x with more of the target written."""
        carry, y = super().__call__(carry, x["target"], at)
        scores = jnp.einsum("tbw,sbw->bts", self.query(y), x["source"])
        is_token = (at.batch["source"] != PAD).T[:, None]
        attention = nnx.softmax(jnp.where(is_token, scores, -1e9))
        seen = jnp.einsum("bts,sbw->tbw", attention, x["source"])
        return carry, {**x, "target": x["target"] + jnp.tanh(y + self.mix(seen))}


class Translator(nnx.Module):
    """Tokens of both languages in, encoders, decoders, logits of the next token out."""

    def __init__(self, num_tokens, width, num_encoders, num_decoders, rate, *, rngs):
        self.embed = nnx.Embed(num_tokens, width, rngs=rngs)
        layers = [lambda rngs: Encoder(width, rngs=rngs, dropout=rate)] * num_encoders
        layers += [lambda rngs: Decoder(width, rngs=rngs, dropout=rate)] * num_decoders
        self.layers = Stack(layers, rngs=rngs)
        self.head, self.rate = nnx.Linear(width, num_tokens, rngs=rngs), rate

    def first(self, batch, at):
        """What goes into the first encoder."""
        return {"source": self.embed(batch["source"]), "target": self.embed(batch["given"])}

    def last(self, y, batch, at):
        """The loss of what comes out of the last decoder, summed."""
        logits = self.head(dropout(y["target"], self.rate, at))
        weight = jnp.where(batch["wanted"] != PAD, batch["weight"][None], 0.0)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["wanted"])
        right = jnp.sum(weight, where=jnp.argmax(logits, axis=-1) == batch["wanted"])
        return Sums(jnp.sum(weight * nll), jnp.sum(weight), {"accuracy": right})

    def predict(self, y, batch, at):
        """The likeliest tokens after all that is given, and their log-likelihoods.

        [time, rows, BEST]: they are computed once, for the last token, and stand at every time step.
        """
        T, B = batch["given"].shape
        last = jnp.sum(batch["given"] != PAD, axis=0) - 1
        log_likelihood = nnx.log_softmax(self.head(y["target"][last, jnp.arange(B)]))
        found = dict(zip(("log_likelihood", "token"), lax.top_k(log_likelihood, BEST), strict=True))
        return {name: jnp.broadcast_to(best, (T, B, BEST)) for name, best in found.items()}


# --- The task: its fields are options of the command line.


@dataclasses.dataclass(frozen=True)
class Translate(Task):
    """Translations, learned from sentences in both languages.

    Attributes:
      pairs: a file with a sentence, a tab and its translation in each line; without it the messages of
        Django, in English and German.
      num_pieces: of words, learned from both languages together; 0 for letters.
      num_encoders: LSTMs that read.
      num_decoders: LSTMs that write.
      width: of what moves between them.
      dropout: rate on the inputs of every LSTM.
      batch_size: sentences in a batch.
      max_tokens: longer sentences are left out.
      optimizer: how it learns.
    """

    pairs: str = ""
    num_pieces: int = 0
    num_encoders: int = 2
    num_decoders: int = 2
    width: int = 64
    dropout: float = 0.3
    batch_size: int = 32
    max_tokens: int = 48
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-2)

    unit: ClassVar[str] = "tokens"
    train: ClassVar[TrainConfig] = TrainConfig(num_steps=600, log_every=100)
    parallel: ClassVar[Parallel] = Parallel(pipeline=PipelineConfig(num_microbatches=4))

    @property
    def vocabulary(self):
        """Of both languages."""
        return load_vocabulary(self.pairs, self.num_pieces)

    def load(self, split):
        """Sentences and their translations, [(text, text)], none longer than `max_tokens`."""
        return load_split(self.pairs, self.num_pieces, self.max_tokens, split)

    def numbers(self, texts):
        """The tokens of texts, filled up by PAD, int32 [N, max_tokens + 1]; longer ones are cut."""
        rows = np.full((len(texts), self.max_tokens + 1), PAD, np.int32)
        for row, text in zip(rows, texts, strict=True):
            tokens = self.vocabulary.encode(text)[: len(row)] + 1
            row[: len(tokens)] = tokens
        return rows

    def make_model(self, rngs):
        """The network, with its initial values."""
        sizes = self.width, self.num_encoders, self.num_decoders, self.dropout
        return Translator(len(self.vocabulary) + 1, *sizes, rngs=rngs)

    def make_batches(self, split, seed=None):
        """Sentences: the source, the target as it is given, and one token further, as it is wanted."""
        return ArrayBatches(self.sentences(split), self.batch_size, seed)

    def sentences(self, split):
        """Their tokens by name, [N, max_tokens + 1] each."""
        sources, targets = zip(*self.load(split), strict=True)
        return {
            "source": self.numbers([text + END for text in sources]),
            "given": self.numbers([END + text for text in targets]),
            "wanted": self.numbers([text + END for text in targets]),
        }

    def check(self, parallel):
        """Refuses chunks of time: a decoder looks at the whole source."""
        if parallel.num_chunks > 1:
            raise ValueError(
                f"num_chunks={parallel.num_chunks} would show a decoder one part of the source at a time; "
                f"use num_chunks=1"
            )

    def baseline(self, split):
        """The accuracy of who sees the German only, and says what followed the same tokens most often."""
        longest = 2 if self.num_pieces else 8
        follows = collections.defaultdict(collections.Counter)
        for token, endings in tokens_after(self.sentences("train"), longest):
            for ending in endings:
                follows[ending][token] += 1
        right = [
            token == follows[next(filter(follows.__contains__, endings))].most_common(1)[0][0]
            for token, endings in tokens_after(self.sentences(split), longest)
        ]
        return {"accuracy without the English": float(np.mean(right))}


def tokens_after(sentences, longest):
    """Every token that is wanted, and all endings of what is given before it, the longest first."""
    for given, wanted in zip(sentences["given"], sentences["wanted"], strict=True):
        for end, token in enumerate(wanted[wanted != PAD].tolist(), start=1):
            starts = range(max(end - longest, 0), end + 1)
            yield token, [tuple(given[start:end].tolist()) for start in starts]


# --- Sentences in both languages.


@functools.cache
def load_pairs(path):
    """{English: German} of a file, or messages of Django's without line breaks."""
    if path:
        lines = Path(path).read_text("utf-8").strip().split("\n")
        for number, line in enumerate(lines, start=1):
            if line.count("\t") != 1:
                raise ValueError(
                    f"line {number} of {path} has {line.count(chr(9))} tabs; give a sentence, one tab and "
                    f"its translation in each line"
                )
        return dict(sorted(line.split("\t") for line in lines))
    import django

    text = r'((?:".*"\n)+)'  # in quotes, on one line or on several
    pairs = {}
    for po in sorted(Path(django.__file__).parent.rglob("locale/de/LC_MESSAGES/*.po")):
        for found in re.findall(f"^msgid {text}msgstr {text}", po.read_text("utf-8"), re.M):
            source, target = ("".join(map(ast.literal_eval, part.splitlines())) for part in found)
            if source and target and END not in source + target:
                pairs[source] = target
    return dict(sorted(pairs.items()))


@functools.cache
def load_vocabulary(path, num_pieces):
    """The tokens of all sentences: letters, or pieces of words."""
    text = END.join(text for pair in load_pairs(path).items() for text in pair)
    return jaxpar.lm.Vocabulary.learn(
        text, "subword" if num_pieces else "chars", num_pieces or len(text)
    )


@functools.cache
def load_split(path, num_pieces, max_tokens, split):
    """Pairs of texts. Of every 10, 8 are for train."""
    encode = load_vocabulary(path, num_pieces).encode
    pairs = [p for p in load_pairs(path).items() if max(len(encode(t)) for t in p) <= max_tokens]
    places = {"train": range(8), "valid": [8], "test": [9]}[split]
    return [pair for number, pair in enumerate(pairs) if number % 10 in places]


# --- Translations. Dims: N sentences, B hypotheses of each, T time.


def translate(run, texts, beam=1):
    """The likeliest translations that a search finds, and their log-likelihoods.

    Each step keeps the `beam` best beginnings of each sentence; 1 is greedy search. The model reads them
    from the start at every step, by one compiled program, wherever its layers lie.

    Args:
      run: from `jaxpar.load_run`, on any mesh.
      texts: N sentences.
      beam: B, at most `BEST`.
    Returns:
      N texts, and their log-likelihoods [N], that of the end included. What has no end after
      `max_tokens` is cut.
    """
    if not 1 <= beam <= BEST:
        raise ValueError(f"beam={beam}: must be from 1 to {BEST}")
    task, N = run.setup.task, len(texts)
    end = task.vocabulary.separator + 1
    source_NT = task.numbers([text + END for text in texts])
    T = source_NT.shape[1]
    tokens_NBT = np.full((N, beam, T), PAD, np.int32)
    score_NB = np.where(np.arange(beam) == 0, 0.0, -np.inf) + np.zeros((N, 1))
    is_open_NB = np.isfinite(score_NB)
    for t in range(T):
        n, b = np.nonzero(is_open_NB)
        if not len(n):
            break
        given = np.insert(tokens_NBT[n, b, :-1], 0, end, axis=1)
        arrays = {"source": source_NT[n], "given": given, "wanted": np.zeros_like(given)}
        found = run.predict(ArrayBatches(arrays, task.batch_size), quiet=True)
        # A translation that has its end goes on as it is, one of the candidates for its place.
        token_NBB, more_NBB = np.full((2, N, beam, beam), -np.inf)
        token_NBB[:], more_NBB[..., 0] = PAD, 0.0
        token_NBB[n, b], more_NBB[n, b] = (
            found[name][:, 0, :beam] for name in ("token", "log_likelihood")
        )
        total = (score_NB[..., None] + more_NBB).reshape(N, -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, :beam]
        row, parent = np.arange(N)[:, None], best // beam
        score_NB, tokens_NBT = total[row, best], tokens_NBT[row, parent]
        tokens_NBT[..., t] = token_NBB.reshape(N, -1)[row, best]
        is_open_NB = is_open_NB[row, parent] & (tokens_NBT[..., t] != end) & np.isfinite(score_NB)
    is_text = (tokens_NBT[:, 0] != PAD) & (tokens_NBT[:, 0] != end)
    found = [
        task.vocabulary.decode(row[own] - 1)
        for row, own in zip(tokens_NBT[:, 0], is_text, strict=True)
    ]
    return found, score_NB[:, 0]


def main(
    run_dir: tyro.conf.Positional[str],
    beam: int = 1,
    mesh: str = "dp1",
    simulate: int = 0,
    split: str = "test",
    limit: int = 1000,
):
    """Translates a split of a run's sentences, and compares with the references.

    Args:
      run_dir: the folder of the run.
      beam: hypotheses that are kept of each sentence; 1 is greedy search.
      mesh: where the model lies.
      simulate: devices to simulate; 0 for those that are there.
      split: of the sentences.
      limit: how many sentences there are at most.
    """
    import sacrebleu

    if simulate:
        jaxpar.simulate_devices(simulate)
    run = jaxpar.load_run(run_dir, mesh)
    sources, references = zip(*run.setup.task.load(split)[:limit], strict=True)
    found, scores = translate(run, sources, beam)
    for number in range(0, len(sources), max(len(sources) // 8, 1)):
        print(f"{sources[number]}\n  {found[number]}\n  ({references[number]})")
    bleu = sacrebleu.metrics.BLEU()
    print(f"{len(sources)} sentences, log-likelihood {np.mean(scores):.2f}, beam {beam}")
    print(bleu.corpus_score(found, [references]), bleu.get_signature(), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
