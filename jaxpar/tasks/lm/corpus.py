"""Texts as token ids, and the vocabulary between the two.

Nothing is downloaded. Two texts come with every Python and have names; all others are the user's:

    python-docs     the language reference behind `help()`, in words
    python-source   the standard library, in characters
    a folder        ptb.{train,valid,test}.txt, wiki.{train,valid,test}.tokens or
                    {train,valid,test}.txt
    a file          one plain text, its lines split 90 / 5 / 5 in their order

A text is a sequence of lines, and every line ends with the token `<eos>` (in characters it stands
for the newline), as in the language models of the Penn Treebank (PTB).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import itertools
import json
import logging
import os
import re
import sys
import sysconfig
import typing
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from jaxpar.base.checks import require_instance
from jaxpar.base.files import cache_folder, read_json, read_text, whole_file
from jaxpar.base.parts import SPLITS

Level = Literal["auto", "word", "char", "subword"]

_log = logging.getLogger(__name__)

SUBWORD = "subword"
UNK = "<unk>"
EOS = "<eos>"
NAMES = ("python-docs", "python-source")
LAYOUTS = ("ptb.{}.txt", "wiki.{}.tokens", "{}.txt")  # the first that a folder has is taken
SOURCE_CHARS = 2_000_000
LEAST_VOCAB = 3  # <unk>, <eos> and a word
MOST_WORDS = 2**22  # of a vocabulary
LEAST_SUBWORDS = 258  # <unk>, <eos> and the 256 bytes, of which all is made
# Letters that words between spaces have at most on average; and in scripts that are written without spaces.
LONGEST_MEAN_WORD, LONGEST_MEAN_CJK_WORD = 15, 4
_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
# A text is cut into words in parts of so many characters, whatever its lines; a word has at most so many.
_PART, _LONGEST_WORD = 2**16, 2**20
# A text of fewer bytes is read as quickly as its tokens; of others, so many are kept.
LEAST_CACHED_BYTES, MAX_CACHED = 2_000_000, 8
_CORPORA, _CACHE_VERSION = "corpora", 1

# A word with its contraction, or a run of one punctuation mark: `==`, `...`, `**`.
_WORD_OR_MARK = re.compile(r"<unk>|<eos>|\w+(?:['\u2019](?:t|s|re|ve|ll|d|m)\b)?|([^\w\s])\1*")
# Where a text can be cut and has the same words, or the same pieces of words, which have their space first.
_SPACE, _BEFORE_SPACE = re.compile(r"\s"), re.compile(r"\n|(?<=\S)(?= \S)")
_RULE = re.compile(r"[-+=*~^]{4,}")  # under headings, around tables

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
    """

    words: tuple[str, ...]
    tokenizer: str = "spaces"
    pieces: str = ""

    def __post_init__(self) -> None:
        if len(self) > MOST_WORDS:
            raise ValueError(
                f"a vocabulary of {len(self)} words: must be at most {MOST_WORDS}; use a smaller max_vocab"
            )
        if self.tokenizer not in (*_CUTTERS, SUBWORD):
            raise ValueError(
                f"tokenizer={self.tokenizer!r} is unknown; use {' or '.join((*_CUTTERS, SUBWORD))}"
            )
        if (self.tokenizer == SUBWORD) != bool(self.pieces):
            raise ValueError(
                f"tokenizer={self.tokenizer!r} with pieces={self.pieces[:20]!r}; only "
                f"{SUBWORD!r} has pieces, and needs them"
            )
        if missing := [word for word in (UNK, EOS) if word not in self._ids]:
            raise ValueError(f"no {' and no '.join(missing)} among the {len(self)} words; add it")
        if len(self._ids) < len(self):
            word, count = Counter(self.words).most_common(1)[0]
            raise ValueError(f"{word!r} is in the vocabulary {count} times; a word has one id")

    def __len__(self) -> int:
        return len(self.words)

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
            raise ValueError(f"the pieces of the vocabulary are no tokenizer: {error}") from error

    @property
    def separator(self) -> int:
        """The id of `<eos>`, which ends every line."""
        return self._ids[EOS]

    def encode(self, text: str | Iterable[str], *, strict: bool = False) -> np.ndarray:
        """Token ids of a text, which the tokenizer cuts, or of a list of words; int32 [tokens].

        A newline in a text becomes `<eos>`; words outside the vocabulary become `<unk>`.

        Raises:
          ValueError: strict, and a word is outside the vocabulary.
        """
        if self.tokenizer == SUBWORD and isinstance(text, str):  # of which nothing is unknown
            return _encode_pieces(self._pieces, text, self.separator)
        words = _tokenize(text, self.tokenizer) if isinstance(text, str) else text
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
            raise ValueError("its words, tokenizer or pieces are missing, or no texts")
        return cls(tuple(words), *texts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Reads a file of `to_json`, such as the vocabulary.json of a run.

        Raises:
          OSError: the file cannot be read.
          ValueError: it holds something else.
        """
        try:
            return cls.from_json(read_text(path))
        except ValueError as error:
            raise ValueError(
                f"{path} is not a vocabulary ({error}); give the vocabulary.json of a run"
            ) from error

    def _known(self, word: str) -> str:
        if word not in self._ids:
            near = difflib.get_close_matches(word, self.words, n=3)
            remedy = f"nearest are {', '.join(map(repr, near))}" if near else f"use {UNK} for it"
            raise ValueError(f"{word!r} is not among the {len(self)} words; {remedy}")
        return word


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as token ids, int32 [tokens] for each split. The vocabulary has seen train only."""

    name: str
    level: str
    vocabulary: Vocabulary
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def load_corpus(
    name_or_path: str | os.PathLike[str], level: Level = "auto", max_vocab: int = 10_000
) -> Corpus:
    """A corpus by its name or its path; a name takes precedence over a path spelled alike.

    The two named corpora differ a little between versions of Python. They are taken by paragraphs
    in a fixed order. One that repeats an earlier one is dropped: the docs say many things twice,
    and train must not know what valid asks. Of every 20 blocks of 5 paragraphs the 10th is for
    valid and the 20th for test, so that all splits speak of the same subjects. What train has
    once becomes `<unk>` there, so that a model learns how often to expect the unknown. In
    python-docs a paragraph is a line, words are lower case, punctuation marks are words.
    python-source takes whole top-level modules by name until it has 2 million characters.

    The words of the user's files stand between spaces and stay as they are. "subword" learns pieces of words
    from train (byte-level BPE, arXiv:1508.07909), of which every text is made, also one without spaces.

    The tokens of a large text are kept in the user's cache folder, and found again as long as neither it nor
    the arguments change.

    Args:
      name_or_path: "python-docs", "python-source", or a folder or file of UTF-8 text.
      level: "word", "char", "subword", or "auto": characters for python-source, words for all others.
      max_vocab: the size to which the vocabulary is cut, `<unk>` and `<eos>` counted; the words
        that are rarest in train become `<unk>`.

    Raises:
      OSError: no such corpus, a split is missing (FileNotFoundError), or a file is unreadable.
      ValueError: a text is empty, too short or not UTF-8, or an argument is out of range.
    """
    require_instance("corpus", name_or_path, str | os.PathLike, f"{', '.join(NAMES)}, or a path")
    name = os.fspath(name_or_path)
    if level not in typing.get_args(Level):
        raise ValueError(f"level={level!r} is unknown; use {', '.join(typing.get_args(Level))}")
    least = LEAST_SUBWORDS if level == SUBWORD else LEAST_VOCAB
    if max_vocab < least:
        raise ValueError(f"max_vocab={max_vocab} leaves no room for words; use {least} or more")
    if level == "auto":
        level = "char" if name == "python-source" else "word"
    tokenizer = {"char": "chars", "subword": SUBWORD}.get(
        level, "marks" if name in NAMES else "spaces"
    )
    own = dict(zip(NAMES, (_docs_paragraphs, _source_paragraphs), strict=True))
    texts = _spread(own[name]()) if name in own else _user_texts(name)
    key = _key(texts, level, tokenizer, max_vocab)
    if key is not None and (corpus := _cached(key, name, level)) is not None:
        return corpus
    if tokenizer == SUBWORD:
        vocabulary = _learn_pieces(texts["train"], max_vocab)
    else:
        counts = Counter(_tokenize(texts["train"], tokenizer))
        vocabulary = _vocabulary(counts, tokenizer, max_vocab, min_count=2 if name in NAMES else 1)
    tokens = {split: vocabulary.encode(texts[split]) for split in SPLITS}
    _warn_of_long_words(name, tokenizer, texts["train"])
    corpus = Corpus(name, level, vocabulary, **tokens)
    if key is not None:
        _keep(key, corpus)
    return corpus


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
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{what} of type {ids.dtype} are not ids; give integers")
    if ids.min() < 0 or ids.max() >= num_words:
        position = [int(i) for i in np.argwhere((ids < 0) | (ids >= num_words))[0]]
        raise ValueError(
            f"token {ids[tuple(position)]} at position {', '.join(map(str, position))}"
            f"{'' if what == 'tokens' else f' of the {what}'} is outside the vocabulary of {num_words} words "
            f"(0 to {num_words - 1}); encode the text with the vocabulary of this model"
        )


def unigram_perplexity(train_ids: np.ndarray, eval_ids: np.ndarray, vocab_size: int) -> float:
    """Perplexity of eval_ids if each token is guessed by its frequency in train_ids alone.

    A model that stays above it has learnt nothing from context. Add-one smoothing (Jurafsky and
    Martin, Speech and Language Processing): p(w) = (count(w) + 1) / (len(train_ids) + vocab_size).

    Raises:
      ValueError: eval_ids is empty, or a token is outside the vocabulary.
    """
    train_ids, eval_ids = np.asarray(train_ids), np.asarray(eval_ids)
    if not eval_ids.size:
        raise ValueError("eval_ids has 0 tokens; perplexity needs one or more")
    check_tokens(train_ids, vocab_size)
    check_tokens(eval_ids, vocab_size)
    counts_V = np.bincount(train_ids.astype(np.int64), minlength=vocab_size) + 1
    return float(np.exp(-np.mean(np.log(counts_V / counts_V.sum())[eval_ids])))


def _tokenizers() -> Any:
    """The package of subwords.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise ValueError(
            "level='subword' needs the package tokenizers; pip install tokenizers"
        ) from error


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


def _encode_pieces(tokenizer: Any, text: str, separator: int) -> np.ndarray:
    ids = [np.zeros(0, np.int32)]
    for part in _parts(text, _BEFORE_SPACE):
        encoded = tokenizer.encode_batch(part.split("\n"), add_special_tokens=False)
        for number, pieces in enumerate(encoded):
            ids.append(np.array([separator][:number] + pieces.ids, np.int32))
    return np.concatenate(ids)


def _warn_of_long_words(name: str, tokenizer: str, text: str) -> None:
    """Says so if the words between spaces are whole lines, as of a language without spaces."""
    if tokenizer != "spaces":
        return
    start = text[:100_000].split()
    letters = "".join(start)
    mean = len(letters) / max(len(start), 1)
    is_cjk = len(_WITHOUT_SPACES.findall(letters)) > 0.2 * len(letters)
    if mean > (LONGEST_MEAN_CJK_WORD if is_cjk else LONGEST_MEAN_WORD):
        _log.warning(
            "corpus %r has hardly any spaces: its words have %.0f characters on average; read it with "
            "--level char, or --level subword",
            name, mean,
        )  # fmt: skip


# ---- tokens that are kept ----


def _key(texts: Mapping[str, str], level: str, tokenizer: str, max_vocab: int) -> str | None:
    """The name of what is kept of texts; None if they are read too quickly to be kept."""
    hashed = xxhash.xxh3_128(repr((_CACHE_VERSION, level, tokenizer, max_vocab)).encode())
    num_bytes = 0
    for split in SPLITS:
        content = texts[split].encode()
        num_bytes += len(content)
        hashed.update(xxhash.xxh3_128_digest(content))
    return None if num_bytes < LEAST_CACHED_BYTES else hashed.hexdigest()


def _cached(key: str, name: str, level: str) -> Corpus | None:
    """What was kept under a key; None if there is nothing, or it is damaged."""
    try:
        path = cache_folder() / _CORPORA / f"{key}.npz"
        with np.load(path, allow_pickle=False) as file:  # a zip file, which has checksums
            vocabulary = Vocabulary.from_json(bytes(file["vocabulary"]))
            return Corpus(name, level, vocabulary, **{split: file[split] for split in SPLITS})
    except (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError):
        return None


def _keep(key: str, corpus: Corpus) -> None:
    """Keeps the tokens of a corpus, where there is a folder for it, and removes the oldest."""
    try:
        folder = cache_folder() / _CORPORA
        folder.mkdir(parents=True, exist_ok=True)
        text = corpus.vocabulary.to_json()
        with whole_file(folder / f"{key}.npz") as path, path.open("wb") as file:
            np.savez(
                file, vocabulary=np.frombuffer(text.encode(), np.uint8),
                **{split: getattr(corpus, split) for split in SPLITS},
            )  # fmt: skip
        kept = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-MAX_CACHED]:
            path.unlink(missing_ok=True)
    except OSError:  # no home, or no space: it is read anew each time
        return


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
            if end - start > _LONGEST_WORD:
                raise ValueError(
                    f"the text has {_LONGEST_WORD:,} characters without a space or newline, after "
                    f"{text[start : start + 20]!r}; read it with --level char"
                )
        yield text[start:end]
        start = end


def _vocabulary(counts: Counter[str], tokenizer: str, max_vocab: int, min_count: int) -> Vocabulary:
    """Words by falling count, equal counts by the word; `<unk>` counts for all that it replaces."""
    words = [word for word in counts if word not in (UNK, EOS) and counts[word] >= min_count]
    words = sorted(words, key=lambda word: (-counts[word], word))[: max_vocab - 2]
    kept = {word: counts[word] for word in [EOS, *words]}
    kept[UNK] = counts.total() - sum(kept.values())
    return Vocabulary(tuple(sorted(kept, key=lambda word: (-kept[word], word))), tokenizer)


def _spread(paragraphs: Iterable[str]) -> dict[str, str]:
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    for i, paragraph in enumerate(dict.fromkeys(paragraphs)):
        texts[{9: "valid", 19: "test"}.get(i // 5 % 20, "train")].append(paragraph)
    return {split: "".join(texts[split]) for split in SPLITS}


def _docs_paragraphs() -> Iterator[str]:
    from pydoc_data.topics import topics  # here, because it is half a megabyte

    for topic in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[topic]):
            if words := _RULE.sub(" ", paragraph).split():
                yield " ".join(words) + "\n"


def _source_paragraphs() -> Iterator[str]:
    num_chars = 0
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        # Not what the machine's owner or the build put there: sitecustomize, _sysconfigdata.
        if num_chars < SOURCE_CHARS and path.stem in sys.stdlib_module_names:
            text = read_text(path)
            num_chars += len(text)
            yield from (part.strip("\n") + "\n\n" for part in text.split("\n\n") if part.strip())
    if not num_chars:
        raise FileNotFoundError(
            f"{folder} holds no source of the standard library; use python-docs or your own text"
        )


def _user_texts(name: str) -> dict[str, str]:
    path = Path(name).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, [*NAMES, *beside], n=1)
        raise FileNotFoundError(
            f"no corpus {name!r}: it is neither a name ({', '.join(NAMES)}) nor a path that "
            f"exists; {f'did you mean {near[0]!r}?' if near else 'give one of these'}"
        )
    if path.is_dir():
        return {split: _read_text(file) for split, file in _split_files(path).items()}
    lines = [f"{line}\n" for line in _read_text(path).removesuffix("\n").split("\n")]
    num_lines = len(lines)
    if num_lines < 3:
        raise ValueError(
            f"{path} is too short: {num_lines} lines do not split into train, valid and test; give "
            f"3 or more (better 20), or a folder with {', '.join(map('{}.txt'.format, SPLITS))}"
        )
    held_out = max(1, num_lines // 20)
    ends = itertools.pairwise([0, num_lines - 2 * held_out, num_lines - held_out, num_lines])
    texts = {split: "".join(lines[a:b]) for split, (a, b) in zip(SPLITS, ends, strict=True)}
    if empty := [split for split in SPLITS if not texts[split].strip()]:
        raise ValueError(
            f"{path} leaves {empty[0]} empty: of its {num_lines} lines, the last {held_out} are "
            f"for test and {held_out} before them for valid; remove empty lines"
        )
    return texts


def _split_files(folder: Path) -> dict[str, Path]:
    found = []
    for layout in LAYOUTS:
        files = {split: folder / layout.format(split) for split in SPLITS}
        missing = [path.name for path in files.values() if not path.exists()]
        if not missing:
            return files
        if len(missing) < len(files):
            found.append(f"it lacks {' and '.join(missing)}")
    wanted = " or ".join(layout.format("{train,valid,test}") for layout in LAYOUTS)
    raise FileNotFoundError(
        f"{folder} is not a corpus: {'; '.join(found) or 'none of its files is known'}; "
        f"looked for {wanted}"
    )


def _read_text(path: Path) -> str:
    text = read_text(path)
    if not text or text.isspace():
        raise ValueError(
            f"{path} is empty ({len(text)} characters, all of them white space); give a text"
        )
    return text if text.endswith("\n") else text + "\n"
