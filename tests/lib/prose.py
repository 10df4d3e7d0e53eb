"""Measures the prose of a Markdown page: lengths of sentences and paragraphs, and how often it says "you"."""

import re
from typing import NamedTuple

# The end of a sentence; a colon is none.
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"(])")
_ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.) )")
_NO_PROSE = re.compile(r"\s*(#|\||!\[|---)")
_MARKS = re.compile(r"^\s*(?:>\s*)?(?:\[!\w+\]\s*)?(?:[-*]|\d+\.)? ?")


class Prose(NamedTuple):
    """Numbers of a page.

    Attributes:
      mean: words of a sentence.
      long: percentage of sentences with more than 30 words.
      paragraph: words of the longest paragraph or list item.
      you: "you" or "your" in 100 words.
    """

    mean: float
    long: float
    paragraph: int
    you: float


def paragraphs_of(text):
    """Paragraphs and list items as plain sentences, without code blocks, tables, headings and HTML."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    text = re.sub(r"<[^>]+>", " ", text)
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not _NO_PROSE.match(line)]
        for item in _ITEM.split("\n".join(lines)):
            item = re.sub(r"^\s*>\s?", "", _MARKS.sub("", item), flags=re.M)
            item = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", item)
            item = re.sub(r"`[^`]*`", "code", item).replace("**", "")
            if len(item.split()) > 2:
                found.append(" ".join(item.split()))
    return found


def sentences_of(paragraphs):
    """Those of several words."""
    split = (sentence for own in paragraphs for sentence in _END.split(own))
    return [sentence for sentence in split if len(sentence.split()) > 1]


def measure(text):
    """The numbers of a page's Markdown."""
    paragraphs = paragraphs_of(text)
    lengths = [len(sentence.split()) for sentence in sentences_of(paragraphs)] or [0]
    words = sum(len(own.split()) for own in paragraphs) or 1
    yours = len(re.findall(r"\byou(?:r|rs|'re|'ve|'ll)?\b", " ".join(paragraphs), re.I))
    return Prose(
        sum(lengths) / len(lengths),
        100 * sum(length > 30 for length in lengths) / len(lengths),
        max((len(own.split()) for own in paragraphs), default=0),
        100 * yours / words,
    )
