"""Vocabularies: what is encoded is decoded, and what is no vocabulary is refused."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from lib import api

from jaxpar.lm import Vocabulary
from jaxpar.lm.vocabulary import EOS, UNK, check_tokens

SPECIALS = (UNK, EOS)
ABC = Vocabulary((*SPECIALS, "a", "b", "c"))


@hypothesis.given(st.lists(st.sampled_from(["a", "b", "c", EOS, UNK])))
def test_words_round_trip(words):
    ids = ABC.encode(words, strict=True)
    assert [ABC.words[i] for i in ids] == words
    np.testing.assert_array_equal(ABC.encode(ABC.decode(ids)), ids)


@hypothesis.given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), min_size=1))
def test_any_text_round_trips_in_characters(text):
    vocabulary = Vocabulary((*SPECIALS, *sorted(set(text) - {"\n"})), "chars")
    assert vocabulary.decode(vocabulary.encode(text, strict=True)) == text


@pytest.mark.parametrize("tokenizer", ["spaces", "marks"])
@hypothesis.given(text=st.text())
def test_any_text_round_trips_in_words(tokenizer, text):
    words = Vocabulary(SPECIALS, tokenizer)
    np.testing.assert_array_equal(
        words.encode(words.decode(words.encode(text))), words.encode(text)
    )


def test_empty_text_has_no_tokens():
    assert ABC.encode("").shape == (0,)
    assert ABC.encode("").dtype == np.int32
    assert ABC.decode([]) == ""


def test_strict_encoding_names_the_first_unknown_word():
    with pytest.raises(ValueError, match=r"'bb' is not among the 5 words\.\nFix: use 'b'"):
        ABC.encode("a bb x", strict=True)
    assert ABC.decode(ABC.encode("a bb x")) == "a <unk> <unk>"


@pytest.mark.parametrize("unknown", [5, -1])
def test_decoding_an_unknown_id_names_it(unknown):
    with pytest.raises(ValueError, match=f"token {unknown} at position 1 .* of 5 words"):
        ABC.decode([0, unknown])


@pytest.mark.parametrize(
    ("words", "tokenizer", "message"),
    [
        (("a", EOS), "spaces", "no <unk> among the 2 words"),
        (("a",), "spaces", "no <unk> among the 1 words"),
        ((*SPECIALS, "a", "a"), "spaces", "'a' is in the vocabulary 2 times"),
        (SPECIALS, "bpe", "tokenizer='bpe' is unknown\\.\nFix: use spaces or marks or chars"),
    ],
)
def test_vocabulary_refuses(words, tokenizer, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(words, tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        "a b c",
        "[]",
        "[" * 100_000,
        '{"words": ["a"]}',
        '{"words": [1], "tokenizer": "chars"}',
        '{"words": ["<unk>", "<eos>"], "tokenizer": []}',
        '{"words": ["<unk>", "<eos>"], "tokenizer": "subword", "pieces": 3}',
    ],
)
def test_something_else_is_refused(content):
    with pytest.raises(ValueError, match=r"JSON|a vocabulary lacks words|tokenizer='' is unknown"):
        Vocabulary.from_json(content)


def test_pieces_that_are_no_tokenizer_are_refused():
    pytest.importorskip("tokenizers")
    vocabulary = Vocabulary(("<unk>", "<eos>"), "subword", "{")
    with pytest.raises(ValueError, match=r"^the pieces of the vocabulary are no tokenizer: EOF"):
        vocabulary.encode("a text")


def test_a_vocabulary_has_a_limit():
    with (
        api.limits_of_texts(most_words=3),
        pytest.raises(ValueError, match=r"of 4 words must have at most 3\.\nFix: use a smaller"),
    ):
        Vocabulary(("a", "b", "<unk>", "<eos>"))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 5, 7], "token 5 at position 1 of the tokens is outside the vocabulary of 5 words"),
        ([[0, 1], [2, -3]], "token -3 at position 1, 1 of the tokens is outside"),
        ([0.5], "tokens of type float64"),
    ],
)
def test_check_tokens_names_the_first_token_outside(ids, message):
    with pytest.raises(ValueError, match=message):
        check_tokens(ids, 5)


def test_check_tokens_names_what_it_looks_at():
    with pytest.raises(ValueError, match="token 6 at position 1, 0 of the targets is outside"):
        check_tokens([[0], [6]], 5, "targets")


def test_check_tokens_lets_all_ids_pass():
    check_tokens(np.arange(5, dtype=np.uint16), 5)
    check_tokens([], 5)
