"""Messages of errors are short, and say what to do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jaxpar

PACKAGE = Path(jaxpar.__file__).parent
MOST_WORDS = 40


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


def messages() -> Iterator[tuple[str, str, str]]:
    """(where, kind of error, text) of every error that is raised with words."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = text_of(node.exc.args[0])
                if text is not None and " " in text.strip():
                    where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                    yield where, ast.unparse(node.exc.func), text


MESSAGES = list(messages())


def test_messages_have_at_most_40_words():
    assert len(MESSAGES) > 150  # they are found
    long = {where: len(text.split()) for where, _, text in MESSAGES}
    assert {where: words for where, words in long.items() if words > MOST_WORDS} == {}


def test_messages_to_users_say_what_to_do():
    silent = [where for where, _, text in MESSAGES if "Fix: " not in text]
    assert silent == []
