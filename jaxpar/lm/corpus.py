"""Texts as token ids.

Nothing is downloaded. Two texts come with every Python and have names; all others are the user's:

    python-docs     the language reference behind `help()`, in words
    python-source   the standard library, in characters
    a folder        ptb.{train,valid,test}.txt, wiki.{train,valid,test}.tokens or
                    {train,valid,test}.txt
    a file          one plain text, its lines split 90 / 5 / 5 in their order; one long line between words

A text is a sequence of lines, and every line ends with the token `<eos>` (in characters it stands
for the newline), as in the language models of the Penn Treebank (PTB).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
import sys
import sysconfig
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxpar.base.checks import require, require_instance
from jaxpar.base.files import read_text
from jaxpar.base.parts import SPLITS
from jaxpar.base.paths import local_path
from jaxpar.lm.vocabulary import SUBWORD, Vocabulary, check_tokens

Level = Literal["auto", "word", "char", "subword"]

NAMES = ("python-docs", "python-source")
LAYOUTS = ("ptb.{}.txt", "wiki.{}.tokens", "{}.txt")  # the first that a folder has is taken
SOURCE_CHARS = 2_000_000
LEAST_LETTERS = 200  # of one line that is split between words
LEAST_VOCAB = 3  # <unk>, <eos> and a word
LEAST_SUBWORDS = 258  # <unk>, <eos> and the 256 bytes, of which all is made

_RULE = re.compile(r"[-+=*~^]{4,}")  # under headings, around tables


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as token ids, int32 [tokens] for each split. The vocabulary has seen train only.

    Example:
      corpus = jaxpar.lm.load_corpus("text.txt")
      print(corpus.level, corpus.train.shape, len(corpus.vocabulary))
    """

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

    Args:
      name_or_path: "python-docs", "python-source", or a folder or file of UTF-8 text.
      level: "word", "char", "subword", or "auto": characters for python-source, words for all others.
      max_vocab: the size to which the vocabulary is cut, `<unk>` and `<eos>` counted; the words
        that are rarest in train become `<unk>`.

    Raises:
      OSError: no such corpus, a split is missing (FileNotFoundError), or a file is unreadable.
      ValueError: a text is empty, too short or not UTF-8, or an argument is out of range.

    Example:
      corpus = jaxpar.lm.load_corpus("text.txt", level="char")
    """
    require_instance("corpus", name_or_path, str | os.PathLike, f"{', '.join(NAMES)}, or a path")
    name = os.fspath(name_or_path)
    levels = typing.get_args(Level)
    require(level in levels, f"level={level!r} is unknown.\nFix: use {', '.join(levels)}.")
    least = LEAST_SUBWORDS if level == SUBWORD else LEAST_VOCAB
    message = f"max_vocab={max_vocab} leaves no room for words.\nFix: use {least} or more."
    require(max_vocab >= least, message)
    if level == "auto":
        level = "char" if name == "python-source" else "word"
    of_words = "marks" if name in NAMES else "spaces"
    tokenizer = {"char": "chars", "subword": SUBWORD}.get(level, of_words)
    own = dict(zip(NAMES, (_docs_paragraphs, _source_paragraphs), strict=True))
    texts = _spread(own[name]()) if name in own else _user_texts(name)
    min_count = 2 if name in NAMES else 1
    vocabulary = Vocabulary.learn(texts["train"], tokenizer, max_vocab, min_count)
    tokens = {split: vocabulary.encode(texts[split]) for split in SPLITS}
    return Corpus(name, level, vocabulary, **tokens)


def unigram_perplexity(train_ids: np.ndarray, eval_ids: np.ndarray, vocab_size: int) -> float:
    """Perplexity of eval_ids if each token is guessed by its frequency in train_ids alone.

    A model that stays above it has learnt nothing from context. Add-one smoothing (Jurafsky and
    Martin, Speech and Language Processing): p(w) = (count(w) + 1) / (len(train_ids) + vocab_size).

    Raises:
      ValueError: eval_ids is empty, or a token is outside the vocabulary.
    """
    train_ids, eval_ids = np.asarray(train_ids), np.asarray(eval_ids)
    require(eval_ids.size > 0, "eval_ids has no tokens.\nFix: give one or more.")
    check_tokens(train_ids, vocab_size)
    check_tokens(eval_ids, vocab_size)
    counts_V = np.bincount(train_ids.astype(np.int64), minlength=vocab_size) + 1
    return float(np.exp(-np.mean(np.log(counts_V / counts_V.sum())[eval_ids])))


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
        fact = f"{folder} holds no source of the standard library."
        raise FileNotFoundError(f"{fact}\nFix: use python-docs, or your own text.")


def _user_texts(name: str) -> dict[str, str]:
    path = local_path(name)
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, [*NAMES, *beside], n=1)
        hint = f"did you mean {near[0]!r}?" if near else "give a name or a path."
        known = f"neither a name ({', '.join(NAMES)}) nor a path that exists"
        raise FileNotFoundError(f"no corpus {name!r}: it is {known}.\nFix: {hint}")
    if path.is_dir():
        return {split: _read_text(file) for split, file in _split_files(path).items()}
    text = _read_text(path).removesuffix("\n")
    lines = [f"{line}\n" for line in text.split("\n")]
    num_lines, is_line = len(lines), len(lines) < 3 and len(text) >= LEAST_LETTERS
    require(
        num_lines >= 3 or is_line,
        f"{path} is too short: {num_lines} lines do not split into train, valid and test.\n"
        f"Fix: give 3 lines or more (better 20), or a folder with {', '.join(map('{}.txt'.format, SPLITS))}.",
    )
    size = len(text) if is_line else num_lines
    held_out = max(1, size // 20)
    ends = [0, size - 2 * held_out, size - held_out, size]
    if is_line:  # such as text8: between words
        ends[1:3] = (text.rfind(" ", 0, end) + 1 or end for end in ends[1:3])
        parts = [text[a:b].strip() + "\n" for a, b in itertools.pairwise(ends)]
    else:
        parts = ["".join(lines[a:b]) for a, b in itertools.pairwise(ends)]
    texts: dict[str, str] = dict(zip(SPLITS, parts, strict=True))
    if empty := [split for split in SPLITS if not texts[split].strip()]:
        raise ValueError(
            f"{path} leaves {empty[0]} empty: of {num_lines} lines, the last {held_out} are for test, and "
            f"{held_out} before them for valid.\nFix: remove empty lines."
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
    fact = f"{folder} is not a corpus: {'; '.join(found) or 'none of its files is known'}."
    raise FileNotFoundError(f"{fact}\nFix: name its files {wanted}.")


def _read_text(path: Path) -> str:
    text = read_text(path)
    blank = f"{path} is empty: {len(text)} characters of white space.\nFix: give a text."
    require(bool(text.strip()), blank)
    return text if text.endswith("\n") else text + "\n"
