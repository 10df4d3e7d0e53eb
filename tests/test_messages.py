"""Messages of errors are short, and say what to do; help texts are phrases without names of Python."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lib import api

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent
MOST_WORDS = 40
# Facts of damaged files, which their callers put into a message with what to do.
FACTS = {
    "_ is missing", "_ is not what was written", "_ has _ of _ bytes", "it names no task",
    "it is the checkpoint of step _", "it is of another run (_, not _)",
    "_ _ is stored in chunks of _",
}  # fmt: skip


def text_of(node: ast.AST) -> str | None:
    """A message as its source has it, with each value as one word; None if it is made elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "_" for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return (text_of(left) or "_") + (text_of(right) or "_")
    return None


def messages() -> Iterator[tuple[str, str]]:
    """(where, text) of every error that is raised with words, also by `require`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(args=[said, *_])):
                    text = text_of(said)
                case ast.Call(func=ast.Name("require"), args=[_, said]):
                    text = text_of(said)
                case _:
                    continue
            if text is not None and " " in text.strip():
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


MESSAGES = list(messages())


def test_messages_have_at_most_40_words():
    assert len(MESSAGES) > 350  # they are found
    long = {where: len(text.split()) for where, text in MESSAGES}
    assert {where: words for where, words in long.items() if words > MOST_WORDS} == {}


def test_sentences_of_messages_have_at_most_25_words():
    sentences = [part for _, text in MESSAGES for part in re.split(r"\n|(?<=[.;:]) ", text)]
    assert [part for part in sentences if len(part.split()) > 25] == []


def test_messages_to_users_say_what_to_do():
    silent = [where for where, text in MESSAGES if "Fix: " not in text and text not in FACTS]
    assert silent == []


def test_headings_named_by_messages_are_on_the_page_on_troubleshooting():
    calls = [
        node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    named = {
        text_of(node.args[0])
        for node in calls
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "see"
    }
    assert len(named) > 8
    page = (PACKAGE.parent / "docs/help/troubleshooting.md").read_text()
    headings = {line.lstrip("# ") for line in page.splitlines() if line.startswith("#")}
    assert named - headings == set()


CONFIGS = (
    jaxpar.MeshConfig, jaxpar.Parallel, jaxpar.PipelineConfig, jaxpar.TrainConfig,
    jaxpar.OptimizerConfig, jaxpar.lm.LM,
)  # fmt: skip
DOCSTRINGS = api.docstrings_of_commands() | {cls.__name__: inspect.getdoc(cls) for cls in CONFIGS}


@pytest.mark.parametrize("options", sorted(DOCSTRINGS))
def test_help_of_options_is_a_phrase(options):
    listed = DOCSTRINGS[options].partition("Attributes:\n")[2].partition("\n\n")[0]
    helps = re.findall(r"^  (\w+): ((?:.*\n?)(?:    .*\n?)*)", listed, re.MULTILINE)
    for name, text in helps:
        assert text[0].isupper(), (name, text)
        assert text.rstrip().endswith("."), (name, text)
        assert "`" not in text.replace("`jax.devices()`", "").replace("`Task.axes`", ""), (
            name,
            text,
        )


def test_remedies_on_pages_are_those_of_messages():
    """The first words of each, so that a search for a message finds the page."""
    known = " ".join(text for _, text in MESSAGES) + " ".join(
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    shown = [
        line.removeprefix("Fix: ")
        for page in (PACKAGE.parent / "docs").rglob("*.md")
        for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if line.startswith("Fix: ")
    ]
    assert len(shown) >= 4
    unknown = [line for line in shown if " ".join(line.split()[:3]) not in known]
    assert unknown == []
