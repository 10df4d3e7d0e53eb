"""What is wrong with the options of a command line, in one line: tyro's boxes say it in ten."""

import re
from collections.abc import Sequence

# How a help says which values an option takes, and how a person does.
_KINDS = {"INT": "a whole number", "FLOAT": "a number", "STR": "a text"}


def shorten(said: str, arguments: Sequence[str], program: str) -> str:
    """One line for what tyro says: the fact, the value, the remedy.

    Args:
      said: a box; what it says in a way that is not known here is kept, without its frame.
      arguments: that it is about.
      program: what comes before them.
    """
    sections = _sections(said)
    words = " ".join(sections[0]) if sections else said.strip()
    found = (form(words, sections, arguments) for form in _FORMS)
    message = next((message for message in found if message), words)
    return f"{message}{' See' if message.endswith('?') else '; see'} {program} --help"


def _sections(said: str) -> list[list[str]]:
    """The lines of a box between its rules, without frame and title."""
    sections: list[list[str]] = [[]]
    for line in said.splitlines():
        inner = re.sub(r"^[│|] ?|\s*[│|]$", "", line).strip()
        if re.match(r"[╭╰+]", line):
            continue
        if re.fullmatch(r"─+|-{5,}", inner):
            sections.append([])
        elif inner:
            sections[-1].append(inner)
    sections = [section for section in sections if section]
    return sections if "╭" in said else sections[1:]  # in ASCII the title has no frame


def _unknown(words: str, sections: list[list[str]], _: Sequence[str]) -> str | None:
    match = re.match(r"Unrecognized options?: (.*)", words)
    if match is None:
        return None
    given = match[1].split(", ")
    option = next((word for word in given if word.startswith("-")), None)
    if option is None:
        return f"unexpected argument {given[0]!r}"
    near = (
        [line.split()[0] for line in sections[1][1:] if line.startswith("-")]
        if sections[2:]
        else []
    )
    return f"there is no option {option}" + f"; did you mean {' or '.join(near[:2])}?" * bool(near)


def _value(words: str, sections: list[list[str]], arguments: Sequence[str]) -> str | None:
    match = re.match(r"Error parsing ([^:]+):", words)
    if match is None:
        return None
    option = match[1].split("/")[0].split(",")[0]
    helped = next((section for section in sections if section[0] == "Argument helptext:"), ["", ""])
    metavar = helped[1].split(", ")[-1].partition(" ")[2].replace("{None}|", "")
    kind = re.sub(r"\{?\[(INT|FLOAT|STR) \[\1 \.\.\.\]\]\}?", r"\1s", metavar)
    kind = re.sub(r"(INT|FLOAT|STR)s", lambda m: _KINDS[m[1]].removeprefix("a ") + "s", kind)
    kind = re.sub(r"INT|FLOAT|STR", lambda m: _KINDS[m[0]], kind).replace("|", " or ")
    return f"{option} {' '.join(_given(option, arguments))}: use {kind}"


def _given(option: str, arguments: Sequence[str]) -> list[str]:
    """The values that follow an option, however it is spelled."""
    values: list[str] = []
    taken = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            taken = name.replace("_", "-") == option.replace("_", "-")
            values = ([value] if equals else []) if taken else values
        elif taken:
            values.append(argument)
    return values


def _too_few(words: str, _: list[list[str]], __: Sequence[str]) -> str | None:
    match = re.match(r"Missing value for argument '([^']+)'\. Expected (\d+)", words)
    return match and f"{match[1]} needs {'a value' if match[2] == '1' else f'{match[2]} values'}"


def _choice(words: str, _: list[list[str]], __: Sequence[str]) -> str | None:
    match = re.match(
        r"invalid choice '(.*)' for argument '([^']+)'\. Expected one of \((.*)\)", words
    )
    if match is None:
        return None
    choices = re.findall(r"'([^']*)'", match[3])
    return f"{match[2]} {match[1]}: use {' or '.join(choices)}"


def _required(words: str, sections: list[list[str]], _: Sequence[str]) -> str | None:
    if not words.startswith("Missing from "):
        return None
    names = [line for line in sections[0][1:] if re.match(r"-|[A-Z_]+$", line)]
    missing = [name.split(", ")[-1] for name in names]
    return f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing"


_FORMS = (_unknown, _value, _too_few, _choice, _required)
