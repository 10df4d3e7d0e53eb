"""Texts, splits and vocabularies: nothing is lost, nothing leaks, nothing depends on the run."""

import json
import os
import subprocess
import sys
import sysconfig
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from lib import api

from jaxpar.lm import Corpus, Vocabulary, load_corpus
from jaxpar.lm.corpus import unigram_perplexity

SPLITS = ("train", "valid", "test")
SPECIALS = UNK, EOS = "<unk>", "<eos>"


@pytest.fixture(scope="module")
def docs() -> Corpus:
    return load_corpus("python-docs")


@pytest.fixture(scope="module")
def source() -> Corpus:
    return load_corpus("python-source")


def write_splits(folder: Path, layout: str, **texts: str) -> Path:
    for split, text in texts.items():
        (folder / layout.format(split)).write_text(text, encoding="utf-8")
    return folder


def lines_of(corpus: Corpus, split: str) -> list[str]:
    return corpus.vocabulary.decode(getattr(corpus, split)).splitlines()


# The named corpora.


def test_python_docs_has_the_size_and_the_words_of_english(docs):
    sizes = np.array([len(docs.train), len(docs.valid), len(docs.test)])
    assert sizes.sum() > 50_000
    np.testing.assert_allclose(sizes / sizes.sum(), [0.90, 0.05, 0.05], atol=0.02)
    assert 1_000 < len(docs.vocabulary) < 10_000
    assert {"the", "statement", "__init__", ".", "("} <= set(docs.vocabulary.words)
    assert docs.level == "word"
    assert all(getattr(docs, split).dtype == np.int32 for split in ("train", "valid", "test"))


def test_python_docs_has_the_unknown_in_train_and_little_in_valid(docs):
    unk = docs.vocabulary.encode([UNK])[0]
    assert 0.005 < np.mean(docs.train == unk) < 0.05
    assert 0.005 < np.mean(docs.valid == unk) < 0.10


def test_python_docs_splits_share_no_paragraph():
    # In characters, so that no two lines look equal for their unknown words.
    corpus = load_corpus("python-docs", "char")
    lines = [line for split in ("train", "valid", "test") for line in lines_of(corpus, split)]
    assert len(lines) > 1000
    assert [line for line, count in Counter(lines).items() if count > 1] == []


def test_unigram_perplexity_of_the_splits_is_alike(docs):
    valid, test = (
        unigram_perplexity(docs.train, ids, len(docs.vocabulary)) for ids in (docs.valid, docs.test)
    )
    assert 100 < valid < 500
    assert 100 < test < 500
    assert max(valid, test) / min(valid, test) < 1.3


def test_python_docs_does_not_depend_on_the_hash_seed():
    code = (
        "import zlib; from jaxpar.lm.corpus import load_corpus; c = load_corpus('python-docs');"
        "print([zlib.crc32(ids.tobytes()) for ids in (c.train, c.valid, c.test)], "
        "zlib.crc32(' '.join(c.vocabulary.words).encode()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().startswith("[")


def test_python_source_is_characters_of_whole_modules(source):
    sizes = np.array([len(source.train), len(source.valid), len(source.test)])
    assert 1_500_000 < sizes.sum() < 2_500_000
    np.testing.assert_allclose(sizes / sizes.sum(), [0.90, 0.05, 0.05], atol=0.02)
    assert source.level == "char"
    assert all(len(word) == 1 for word in source.vocabulary.words if word not in SPECIALS)
    assert "def __init__(self" in source.vocabulary.decode(source.valid)


def test_python_source_without_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"{tmp_path.name} holds no source"):
        load_corpus("python-source")


@pytest.mark.parametrize("name", ["docs", "source"])
def test_vocabulary_is_sorted_by_falling_count_in_train(name, request):
    corpus = request.getfixturevalue(name)
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary))
    assert np.all(np.diff(counts) <= 0)
    ranked = list(zip(-counts, corpus.vocabulary.words, strict=True))
    assert ranked == sorted(ranked)


@pytest.mark.parametrize("name", ["docs", "source"])
def test_decoded_corpus_encodes_to_the_same_ids(name, request):
    corpus = request.getfixturevalue(name)
    again = corpus.vocabulary.encode(corpus.vocabulary.decode(corpus.valid))
    np.testing.assert_array_equal(again, corpus.valid)


def test_docs_vocabulary_cuts_a_prompt_as_it_cut_the_docs(docs):
    words = ["the", "list", "(", "x", ")", "doesn't", "...", EOS]
    prompt = docs.vocabulary.encode("The list(x) doesn't...\n")
    np.testing.assert_array_equal(prompt, docs.vocabulary.encode(words))


# The user's own files.


@pytest.mark.parametrize("layout", ["ptb.{}.txt", "wiki.{}.tokens", "{}.txt"])
def test_folder_layouts_follow_the_ptb_convention(tmp_path, layout):
    write_splits(
        tmp_path, layout, train=" b a b \n b <unk>\n", valid=" a x\n", test="y b <unk>\n\nb"
    )
    corpus = load_corpus(tmp_path)
    assert corpus.vocabulary.words == ("b", EOS, UNK, "a")
    assert corpus.vocabulary.decode(corpus.train) == "b a b\nb <unk>\n"
    np.testing.assert_array_equal(corpus.train, [0, 3, 0, 1, 0, 2, 1])
    np.testing.assert_array_equal(corpus.valid, [3, 2, 1])
    np.testing.assert_array_equal(corpus.test, [2, 0, 2, 1, 1, 0, 1])


def test_vocabulary_comes_from_train_only_and_keeps_max_vocab(tmp_path):
    write_splits(tmp_path, "{}.txt", train="c c c b b a a d\n", valid="e e e e\n", test="e\n")
    assert load_corpus(tmp_path).vocabulary.words == ("c", "a", "b", EOS, "d", UNK)
    cut = load_corpus(tmp_path, max_vocab=4)
    assert cut.vocabulary.words == (UNK, "c", "a", EOS)  # three tokens became <unk>
    assert cut.vocabulary.decode(cut.train) == "c c c <unk> <unk> a a <unk>\n"


def test_characters_of_the_users_files(tmp_path):
    write_splits(tmp_path, "ptb.{}.txt", train="ab a\n", valid="b\n", test="xé\n")
    corpus = load_corpus(str(tmp_path), level="char")
    assert corpus.vocabulary.words == ("a", " ", EOS, "b", UNK)
    assert corpus.vocabulary.decode(corpus.train) == "ab a\n"
    assert corpus.vocabulary.decode(corpus.test) == "\ufffd\ufffd\n"


def test_file_is_split_by_lines_in_their_order(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(b"w%d\r\n" % i for i in range(40)))
    corpus = load_corpus(path)
    assert lines_of(corpus, "train") == [f"w{i}" for i in range(36)]
    assert (len(corpus.valid), len(corpus.test)) == (4, 4)
    assert lines_of(corpus, "valid") == [UNK, UNK]
    assert not {"\r", "\ufeff"} & set(load_corpus(path, "char").vocabulary.words)


def test_name_goes_before_a_path(tmp_path, monkeypatch, docs):
    monkeypatch.chdir(tmp_path)
    Path("python-docs").write_text("a\n" * 20, encoding="utf-8")
    assert load_corpus("python-docs").vocabulary == docs.vocabulary
    assert len(load_corpus("./python-docs").vocabulary) == 3


@pytest.mark.parametrize("name", ["docs", "source"])
def test_vocabulary_is_read_as_it_was_written(name, request, tmp_path):
    vocabulary = request.getfixturevalue(name).vocabulary
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert json.loads(vocabulary.to_json())["words"] == list(vocabulary.words)


# Texts in one line.


@pytest.mark.full
def test_a_long_line_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    line = "the cat sat on the mat " * 200_000
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(line if split == "train" else "a cat")
    tracemalloc.start()
    try:
        corpus = load_corpus(tmp_path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(corpus.train) == 1_200_001
    assert most < 5 * len(line)  # the text, its bytes, and tokens of as many


@pytest.mark.parametrize("tokenizer", ["spaces", "chars", "subword"])
@api.limits_of_texts(part=7)
def test_a_long_line_has_the_tokens_of_its_words(tokenizer, tmp_path):
    text = "a  cat's\u00a0\tfriend ,, sat\n\n  on  the x" + "y" * 20 + " mat"
    if tokenizer == "subword":
        package = pytest.importorskip("tokenizers")
        (tmp_path / "text").write_text(text * 3 + "\nb\nc\nd\n")
        vocabulary = load_corpus(tmp_path / "text", "subword", 270).vocabulary
        whole = package.Tokenizer.from_str(vocabulary.pieces)
        lines = [whole.encode(line).ids for line in text.split("\n")]
        expected = [*lines[0], 1, *lines[1], 1, *lines[2]]
        assert vocabulary.separator == 1
    else:
        words = [*text.replace("\n", " ")] if tokenizer == "chars" else text.split()
        vocabulary = Vocabulary((*dict.fromkeys([*words, "<unk>", "<eos>"]),), tokenizer)
        words = [*text] if tokenizer == "chars" else text.replace("\n", " <eos> ").split()
        expected = [vocabulary.words.index("<eos>" if word == "\n" else word) for word in words]
    assert vocabulary.encode(text).tolist() == expected


@pytest.mark.parametrize("level", ["word", "subword"])
@api.limits_of_texts(part=10, longest_word=100)
def test_a_word_without_an_end_is_refused(tmp_path, level):
    if level == "subword":
        pytest.importorskip("tokenizers")
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text("a cat " + "x" * 200)
    message = (
        r"the text has 100 characters without a space, after '.*x'\.\nFix: read it with --level ch"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path, level, 300)
    assert len(load_corpus(tmp_path, "char").train) == 207


# Perplexity.


def test_unigram_perplexity_is_the_formula():
    # Counts 3, 1, 0 and one added to each: p = 4/7, 2/7, 1/7.
    perplexity = unigram_perplexity(np.array([0, 0, 0, 1]), np.array([0, 2]), 3)
    assert perplexity == pytest.approx((4 / 7 * 1 / 7) ** -0.5)
    assert unigram_perplexity(np.array([], np.int32), np.array([1]), 8) == pytest.approx(8)


def test_unigram_perplexity_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="eval_ids has no tokens"):
        unigram_perplexity(np.array([0]), np.array([], np.int32), 3)
    with pytest.raises(ValueError, match="token 3 at position 0"):
        unigram_perplexity(np.array([0]), np.array([3]), 3)
    with pytest.raises(ValueError, match="token 4 at position 0"):
        unigram_perplexity(np.array([4]), np.array([0]), 3)


# What cannot be loaded.


def test_unknown_name_lists_the_names_and_the_nearest():
    with pytest.raises(
        FileNotFoundError, match=r"(?s)'python-doc'.*python-source.*'python-docs'\?"
    ):
        load_corpus("python-doc")


def test_unknown_path_names_a_near_file(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"did you mean 'shakespeare.txt'\?"):
        load_corpus(tmp_path / "shakespear.txt")
    with pytest.raises(FileNotFoundError, match=r"(?s)no corpus .*nowhere.*give a name"):
        load_corpus(tmp_path / "qq" / "nowhere")


def test_missing_split_names_it_and_what_was_looked_for(tmp_path):
    write_splits(tmp_path, "ptb.{}.txt", train="a\n", test="a\n")
    with pytest.raises(
        FileNotFoundError, match=r"it lacks ptb\.valid\.txt\.\nFix: name its files .*tokens"
    ):
        load_corpus(tmp_path)


def test_folder_without_known_files(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="none of its files is known\\.\nFix: name its files ptb"
    ):
        load_corpus(tmp_path)


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_empty_split_names_the_file(tmp_path, text):
    write_splits(tmp_path, "{}.txt", train="a\n", valid=text, test="a\n")
    with pytest.raises(ValueError, match=rf"valid\.txt is empty: {len(text)} characters"):
        load_corpus(tmp_path)


def test_short_file_names_its_lines(tmp_path):
    (tmp_path / "x.txt").write_text("one two three\nfour\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.txt is too short: 2 lines"):
        load_corpus(tmp_path / "x.txt")


def test_file_with_an_empty_end_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("one\ntwo\n\nfour\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.txt leaves valid empty: of 4 lines"):
        load_corpus(tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("encoding", "fact", "named"),
    [
        ("utf-16", "it begins as UTF-16 does, with bytes ff fe", "utf-16"),
        ("utf-32", "it begins as UTF-32 does, with bytes ff fe", "utf-32"),
        ("utf-16-le", "byte 0xe5 at offset 10", "ENCODING"),
        ("shift_jis", "byte 0x93 at offset 5", "ENCODING"),
        ("gb18030", "byte 0xc8 at offset 5", "ENCODING"),
    ],
)
def test_a_text_in_another_encoding_is_refused_without_a_guess(encoding, fact, named, tmp_path):
    (tmp_path / "other.txt").write_bytes("text \u65e5\u672c\n".encode(encoding) * 40)
    message = rf"other\.txt is not UTF-8 text: {fact}\n.*: iconv -f {named} -t utf-8$"
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "other.txt", "char")
    if encoding == "utf-16-le":  # of these letters alone, as of UTF-16 that was taken for Latin-1
        (tmp_path / "other.txt").write_bytes("text\n".encode(encoding) * 40)
        with pytest.raises(ValueError, match="UTF-8 text: byte 0x00 at offset 1\n"):
            load_corpus(tmp_path / "other.txt", "char")


@pytest.mark.parametrize("level", ["word", "char"])
def test_one_long_line_is_split_between_words(level, tmp_path):
    words = [f"word{n % 7}" for n in range(1000)]
    (tmp_path / "line.txt").write_text(" ".join(words))
    corpus = load_corpus(tmp_path / "line.txt", level)
    parts = [corpus.vocabulary.decode(getattr(corpus, split)) for split in SPLITS]
    assert " ".join(parts).split() == words
    lengths = [len(getattr(corpus, split)) for split in SPLITS]
    assert lengths[0] == pytest.approx(18 * lengths[1], rel=0.05)
    assert lengths[1] == pytest.approx(lengths[2], rel=0.05)


def test_file_that_is_not_utf8_names_the_byte(tmp_path):
    write_splits(tmp_path, "{}.txt", train="a\n", test="a\n")
    (tmp_path / "valid.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=r"valid\.txt is not UTF-8 text: byte 0xe9 at offset 3"):
        load_corpus(tmp_path)


def test_folder_in_place_of_a_file_is_named(tmp_path):
    write_splits(tmp_path, "{}.txt", train="a\n", test="a\n")
    (tmp_path / "valid.txt").mkdir()
    with pytest.raises(OSError, match=r"cannot read .*valid\.txt"):
        load_corpus(tmp_path)


def test_file_without_permission_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_text("a\n" * 20, encoding="utf-8")

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))  # root would be let in

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(PermissionError, match=r"cannot read .*x\.txt: Permission denied"):
        load_corpus(tmp_path / "x.txt")


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="level='words' is unknown"):
        load_corpus("python-docs", level="words")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_vocab=2 leaves no room"):
        load_corpus("python-docs", max_vocab=2)


CHINESE = "我们今天去公园散步然后回家吃饭晚上看书学习新的东西\n明天早上我要去学校上课下午和朋友一起打篮球\n"


def test_subwords_cut_any_text_and_give_it_back(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "text.txt"
    path.write_text(
        (CHINESE + "the cat sat on the mat\na dog ran to the cat\n") * 50, encoding="utf-8"
    )
    corpus = load_corpus(path, "subword", 400)
    vocabulary = corpus.vocabulary
    assert 258 < len(vocabulary) <= 400
    for text in (
        "the cat\n",
        "the cat\nran",
        "\n\n",
        "",
        "zebra \U0001f993\n",
        " two  spaces ",
        CHINESE,
    ):
        tokens = vocabulary.encode(text, strict=True)
        assert vocabulary.decode(tokens) == text
        assert (tokens == vocabulary.separator).sum() == text.count("\n")
    assert len(corpus.train) < 0.3 * len(CHINESE.encode()) * 100  # pieces, no bytes
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again == vocabulary
    np.testing.assert_array_equal(again.encode("the dog\n"), vocabulary.encode("the dog\n"))
    with pytest.raises(
        ValueError, match=r"max_vocab=200 leaves no room for words\.\nFix: use 258 or more"
    ):
        load_corpus(path, "subword", 200)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs a package\.\nFix: pip install tokenizers"):
        load_corpus("python-docs", "subword")
