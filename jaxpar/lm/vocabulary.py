"""The vocabulary of a text: its words, characters or subwords, and their ids."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpar.base.checks import require, require_instance
from jaxpar.base.files import read_json

SUBWORD = "subword"
UNK = "<unk>"
EOS = "<eos>"
MOST_WORDS = 2**22  # of a vocabulary
# A text is cut into words in parts of so many characters, whatever its lines; a word has at most so many.
_PART, _LONGEST_WORD = 2**16, 2**20

# A word with its contraction, or a run of one punctuation mark: `==`, `...`, `**`.
_WORD_OR_MARK = re.compile(r"<unk>|<eos>|\w+(?:['\u2019](?:t|s|re|ve|ll|d|m)\b)?|([^\w\s])\1*")
# Where a text can be cut and has the same words, or the same pieces of words, which have their space first.
_SPACE, _BEFORE_SPACE = re.compile(r"\s"), re.compile(r"\n|(?<=\S)(?= \S)")

# Words and characters are cut here, pieces of words by the package tokenizers. That takes seven times as long
# for words (19 MB: 3.5 s of CPU time instead of 0.5) and thirteen times for characters; and what it takes for
# white space and lower case is not what Python does, by which the texts of published numbers were cut.
_CUTTERS: dict[str, Callable[[str], list[str]]] = {
    "spaces": lambda part: part.replace("\n", f" {EOS} ").split(),
    "marks": lambda part: [
        match.group() for match in _WORD_OR_MARK.finditer(part.lower().replace("\n", f" {EOS} "))
    ],
    "chars": lambda part: [EOS if char == "\n" else char for char in part],
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The words of a language model; the id of a word is its place.

    Attributes:
      words: all distinct, `<unk>` and `<eos>` among them.
      tokenizer: how `encode` cuts a text: "spaces" between words, as in PTB's files; "marks",
        lower case and punctuation apart; "chars"; "subword", as `pieces` says.
      pieces: of "subword", what the package tokenizers writes of its tokenizer, JSON; "" for the others.

    Example:
      vocabulary = jaxpar.lm.load_corpus("text.txt").vocabulary
      print(vocabulary.decode(vocabulary.encode("the cat")))  # the cat
    """

    words: tuple[str, ...]
    tokenizer: str = "spaces"
    pieces: str = ""

    def __post_init__(self) -> None:
        known = (*_CUTTERS, SUBWORD)
        size = f"a vocabulary of {len(self)} words must have at most {MOST_WORDS}"
        require(len(self) <= MOST_WORDS, f"{size}.\nFix: use a smaller max_vocab.")
        unknown = f"tokenizer={self.tokenizer!r} is unknown"
        require(self.tokenizer in known, f"{unknown}.\nFix: use {' or '.join(known)}.")
        pieces = f"tokenizer={self.tokenizer!r} with pieces={self.pieces[:20]!r}"
        has_pieces = (self.tokenizer == SUBWORD) == bool(self.pieces)
        require(has_pieces, f"{pieces}.\nFix: give pieces to {SUBWORD!r} alone.")
        for word in (UNK, EOS):
            require(word in self._ids, f"no {word} among the {len(self)} words.\nFix: add it.")
        word, count = Counter(self.words).most_common(1)[0]
        twice = f"{word!r} is in the vocabulary {count} times"
        require(len(self._ids) == len(self), f"{twice}.\nFix: give each word once.")

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def learn(cls, text: str, tokenizer: str, max_vocab: int, min_count: int = 1) -> Vocabulary:
        """The vocabulary of a text, which the tokenizer cuts.

        Words stand by falling count, those of equal counts in the order of the alphabet; `<unk>` counts for
        all that it replaces. Of "subword", pieces of words, the more frequent the longer.

        Args:
          max_vocab: how many there are at most, the rarest are left out.
          min_count: how often a word must stand in the text; not of "subword".
        Raises:
          ValueError: a word has no end, or the package tokenizers is missing.
        """
        if tokenizer == SUBWORD:
            return _learn_pieces(text, max_vocab)
        counts = Counter(_tokenize(text, tokenizer))
        words = [w for w in counts if w not in (UNK, EOS) and counts[w] >= min_count]
        words = sorted(words, key=lambda word: (-counts[word], word))[: max_vocab - 2]
        kept = {word: counts[word] for word in [EOS, *words]}
        kept[UNK] = counts.total() - sum(kept.values())
        return cls(tuple(sorted(kept, key=lambda word: (-kept[word], word))), tokenizer)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @functools.cached_property
    def _pieces(self) -> Any:
        """The tokenizer of "subword".

        Raises:
          ValueError: the package is not installed.
        """
        try:
            return _tokenizers().Tokenizer.from_str(self.pieces)
        except Exception as error:  # the package has no error of its own
            fact = f"the pieces of the vocabulary are no tokenizer: {error}"
            raise ValueError(f"{fact}\nFix: give the vocabulary.json of a run.") from error

    @property
    def separator(self) -> int:
        """The id of `<eos>`, which ends every line."""
        return self._ids[EOS]

    def encode(self, text: str | Iterable[str], *, strict: bool = False) -> np.ndarray:
        """Token ids of a text, which the tokenizer cuts, or of a list of words; int32 [tokens].

        A newline in a text becomes `<eos>`; words outside the vocabulary become `<unk>`.

        Raises:
          ValueError: it is neither, or strict, and a word is outside the vocabulary.
        """
        require_instance("text", text, str | Iterable, "a string, or a list of words")
        if self.tokenizer == SUBWORD and isinstance(text, str):  # of which nothing is unknown
            return _encode_pieces(self._pieces, text, self.separator)
        words = _tokenize(text, self.tokenizer) if isinstance(text, str) else map(_as_word, text)
        if strict:
            words = map(self._known, words)
        unk = itertools.repeat(self._ids[UNK])
        return np.fromiter(map(self._ids.get, words, unk), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, with spaces between words and `<eos>` as a newline.

        In characters `<unk>` is U+FFFD. Ids of an encoded text, decoded and encoded, come back.

        Raises:
          ValueError: an id is outside the vocabulary.
        """
        ids = np.asarray(ids)
        check_tokens(ids, len(self))
        if self.tokenizer == SUBWORD:
            lines = np.split(ids.ravel(), np.flatnonzero(ids.ravel() == self.separator) + 1)
            texts = (self._pieces.decode(line[line != self.separator].tolist()) for line in lines)
            return "\n".join(texts)
        words: list[str] = [self.words[i] for i in ids.ravel().tolist()]
        if self.tokenizer == "chars":
            return "".join({EOS: "\n", UNK: "\ufffd"}.get(word, word) for word in words)
        return re.sub(" ?\n ?", "\n", " ".join("\n" if word == EOS else word for word in words))

    def to_json(self) -> str:
        """What `from_json` reads."""
        content = {"tokenizer": self.tokenizer, "words": self.words}
        if self.pieces:
            content["pieces"] = self.pieces
        return json.dumps(content, ensure_ascii=False, indent=0)

    @classmethod
    def from_json(cls, text: str | bytes) -> Vocabulary:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: it is something else.
        """
        content = read_json(text)
        words, *texts = (content.get(name, "") for name in ("words", "tokenizer", "pieces"))
        if not (isinstance(words, list) and {str}.issuperset(map(type, [*texts, *words]))):
            fact = "a vocabulary lacks words or tokenizer, or has some that are no strings"
            raise ValueError(f"{fact}\nFix: give the vocabulary.json of a run.")
        return cls(tuple(words), *texts)

    def _known(self, word: str) -> str:
        if word not in self._ids:
            near = difflib.get_close_matches(word, self.words, n=3)
            others = ", ".join(map(repr, near or (UNK,)))
            raise ValueError(f"{word!r} is not among the {len(self)} words.\nFix: use {others}.")
        return word


def check_tokens(ids: np.ndarray | Sequence[int], num_words: int, what: str = "tokens") -> None:
    """Nothing, if all tokens are integers in [0, num_words).

    To be asked before the tokens go to a device: JAX does not complain of an index out of bounds,
    it takes another row or NaN.

    Args:
      what: what an error calls them.
    Raises:
      ValueError: names the first token that is outside, and its position.
    """
    ids = np.asarray(ids)
    if not ids.size:
        return
    are_integers = np.issubdtype(ids.dtype, np.integer)
    require(are_integers, f"{what} of type {ids.dtype} are not ids.\nFix: give integers.")
    if ids.min() < 0 or ids.max() >= num_words:
        position = [int(i) for i in np.argwhere((ids < 0) | (ids >= num_words))[0]]
        raise ValueError(
            f"token {ids[tuple(position)]} at position {', '.join(map(str, position))} of the {what} is "
            f"outside the vocabulary of {num_words} words.\nFix: encode the text with the model's vocabulary."
        )


def _learn_pieces(text: str, max_vocab: int) -> Vocabulary:
    """Pieces of words, the more frequent the longer."""
    package = _tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=max_vocab,
        special_tokens=[UNK, EOS],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    parts = (line for part in _parts(text, _BEFORE_SPACE) for line in part.split("\n"))
    tokenizer.train_from_iterator(parts, trainer)
    ids = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__)), SUBWORD, tokenizer.to_str())


def _tokenizers() -> Any:
    """The package of subwords.

    Raises:
      ValueError: it is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError("level='subword' needs a package.\nFix: pip install tokenizers")
    return importlib.import_module("tokenizers")


def _encode_pieces(tokenizer: Any, text: str, separator: int) -> np.ndarray:
    ids = [np.zeros(0, np.int32)]
    for part in _parts(text, _BEFORE_SPACE):
        encoded = tokenizer.encode_batch(part.split("\n"), add_special_tokens=False)
        for number, pieces in enumerate(encoded):
            ids.append(np.array([separator][:number] + pieces.ids, np.int32))
    return np.concatenate(ids)


def _as_word(word: Any) -> str:
    use = "a string; `decode` makes a text of token ids"
    require_instance("a word of the text", word, str, use)
    return word


def _tokenize(text: str, tokenizer: str) -> Iterator[str]:
    parts = _parts(text, None if tokenizer == "chars" else _SPACE)
    return itertools.chain.from_iterable(map(_CUTTERS[tokenizer], parts))


def _parts(text: str, between: re.Pattern[str] | None) -> Iterator[str]:
    """A text in parts of about `_PART` characters, whatever its lines.

    Args:
      between: where it may be cut, after the match; None is anywhere.
    Raises:
      ValueError: there is no such place for too long.
    """
    start = 0
    while start < len(text):
        end = start + _PART
        if between is not None and end < len(text):
            found = between.search(text, end, start + _LONGEST_WORD)
            end = found.end() if found else len(text)
            require(
                end - start <= _LONGEST_WORD,
                f"the text has {_LONGEST_WORD:,} characters without a space, after "
                f"{text[start : start + 20]!r}.\nFix: read it with --level char.",
            )
        yield text[start:end]
        start = end
