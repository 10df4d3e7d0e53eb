"""A mistyped command or option, told before JAX is imported: their names are read from jaxpar's own source.

The classes whose fields are the options import JAX, and with it more than a second passes.
"""

import ast
import difflib
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PROGRAM = "python -m jaxpar"

_COMMANDS = "jaxpar.commands"
# What options of training are called by other programs.
_ELSEWHERE = {
    "lr": "learning-rate", "epochs": "num-steps", "max-steps": "num-steps", "iterations": "num-steps",
    "gpus": "mesh", "num-gpus": "mesh", "data": "corpus", "output-dir": "out-dir",
}  # fmt: skip
_TASK_OPTION = "--config"  # of all commands that are about a task
_ONE_OPTION = "MeshConfig"  # a dataclass, but read from one text
# Processes of one program compare their options first, and say which of them has another one.
_STARTED_TOGETHER = (
    "JAXPAR_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "JOB_COMPLETION_INDEX",
)  # fmt: skip


def end_if_mistyped(arguments: Sequence[str]) -> None:
    """Ends the process as `main` does, with the message of `find_mistake`, if there is one."""
    if "--debug" in arguments or {*_STARTED_TOGETHER} & {*os.environ}:
        return
    message = find_mistake(arguments)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def find_mistake(arguments: Sequence[str]) -> str | None:
    """One line for a command or an option that does not exist; None if there is none.

    Nor if only a run or a user's file can tell, whose task it is; nor of an option that `train` has and
    this command does not, for which there is a better message.
    """
    own = [*itertools.takewhile(lambda argument: argument != "--", arguments)]
    if own[:1] in ([], ["-h"], ["--help"]):
        return None
    name, *rest = own
    commands = _names(_COMMANDS, "COMMANDS")
    if name not in commands:
        remedy = _nearest(name, commands) or f"there are {', '.join(commands)}"
        return f"there is no command {name!r}; {remedy}"
    if {"-h", "--help"} & {*rest}:
        return None
    words = [*itertools.takewhile(lambda argument: not argument.startswith("-"), rest)]
    kind = words[:1] if name == "plot" else []
    of_runs = {*kind} & {*_names(_COMMANDS, "PICTURES_OF_RUNS")}
    spec = "".join(words[len(kind) :][:1])
    try:
        known = _options("PlotRuns" if of_runs else commands[name], spec)
        of_train = _options(commands["train"], spec) if _TASK_OPTION in known else known
    except LookupError:
        return None
    for argument in rest:
        option = argument.partition("=")[0]
        if option.startswith("--") and option.replace("_", "-") not in known | of_train:
            nearest = _nearest_option(option.replace("_", "-"), known)
            see = f"{nearest} See" if nearest else "see"
            program = " ".join([PROGRAM, name, *kind, *[spec] * (_TASK_OPTION in known)])
            return f"there is no option {option}; {see} {program} --help"
    return None


def _nearest(word: str, words: Iterable[str], likeness: float = 0.6) -> str:
    near = difflib.get_close_matches(word, words, n=1, cutoff=likeness)
    return f"did you mean {near[0]}?" if near else ""


def _nearest_option(option: str, known: Iterable[str]) -> str:
    """The option that is meant: by what other programs call it, by whole words of it, or by its letters."""
    words = _ELSEWHERE.get(option[2:], option[2:]).rpartition(".")[2].split("-")
    have = [name for name in known if {*words} <= {*re.split(r"[-.]", name)}]
    near = min(have, key=lambda name: (len(name.rpartition(".")[2]), name), default=None)
    return f"did you mean {near}?" if near else _nearest(option, known, 0.75)


# ---- what the source says ----


@functools.cache
def _options(command: str, spec: str) -> frozenset[str]:
    """The options of a class of commands, for a task that comes with jaxpar, but for short ones.

    Raises:
      LookupError: the source does not tell.
    """
    return frozenset(_options_of(_COMMANDS, command, "--", spec))


def _options_of(module: str, name: str, prefix: str, spec: str) -> Iterator[str]:
    for field, (annotation, home) in _fields(module, name).items():
        if re.search(r"\b(ClassVar|Fixed|Positional)\b", annotation):
            continue
        renamed = re.search(r"\barg\(.*?\bname='(.*?)'", annotation)
        option = (renamed[1] if renamed else field).replace("_", "-")
        kinds = [_find(home, word) for word in re.findall(r"\w+", annotation)]
        configs = [place for place in kinds if place is not None and place[1] != _ONE_OPTION]
        if configs == [("jaxpar.task", "Task")]:
            configs = [_task_class(spec)]
        for config in configs:
            yield from _options_of(*config, f"{prefix}{option}." if option else prefix, spec)
        if not configs:
            yield f"{prefix}{option}"
            if annotation == "bool":
                yield f"{prefix}no-{option}"


def _task_class(spec: str) -> tuple[str, str]:
    tasks = ast.literal_eval(_assigned("jaxpar.task", "TASKS"))
    return tasks[spec]


def _fields(module: str, name: str) -> dict[str, tuple[str, str]]:
    """The fields of a dataclass, those of its bases included: name -> (annotation, module that says it)."""
    node = _statements(module)[name]
    assert isinstance(node, ast.ClassDef)
    fields: dict[str, tuple[str, str]] = {}
    for base in node.bases:
        place = _find(module, ast.unparse(base))
        fields |= _fields(*place) if place else {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            fields[ast.unparse(part.target)] = ast.unparse(part.annotation), module
    return fields


def _find(module: str, name: str) -> tuple[str, str] | None:
    """Where a class is written, if jaxpar has it, as (module, name)."""
    node = _statements(module).get(name)
    if isinstance(node, ast.ClassDef):
        return module, name
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpar."):
        return _find(node.module or "", name)
    made_of = re.search(r"\bdataclasses\.fields\((\w+)\)", ast.unparse(node)) if node else None
    if isinstance(node, ast.Assign) and made_of:  # a class that has some of the fields of another
        return _find(module, made_of[1])
    return None


def _names(module: str, table: str) -> dict[str, str]:
    """The keys of a dict, or the elements of a tuple, of texts, and what they stand for."""
    node = _assigned(module, table)
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): ast.unparse(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return {text: text for text in ast.literal_eval(node)}


def _assigned(module: str, name: str) -> ast.expr:
    node = _statements(module)[name]
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    assert node.value is not None
    return node.value


@functools.cache
def _statements(module: str) -> dict[str, ast.stmt]:
    """Name -> the statement at the top of a module that brings it in."""
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.ClassDef(name=name):
                found[name] = node
            case ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name: node for alias in names}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
    return found
