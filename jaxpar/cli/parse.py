"""Reads a command line: which command it is, and for which task."""

import dataclasses
import difflib
import importlib.metadata
import inspect
import sys
from collections.abc import Sequence

from jaxpar import __version__
from jaxpar.base.checks import require
from jaxpar.base.output import PROGRAM
from jaxpar.cli import commands
from jaxpar.cli.command import Command
from jaxpar.cli.commands import PICTURES, PICTURES_OF_RUNS, Plot, PlotRuns, TaskOptions, Train
from jaxpar.cli.options import read_options, read_settings
from jaxpar.mesh import MeshConfig
from jaxpar.model.task import COMMANDS_OF_TASKS, Task
from jaxpar.training.config_file import default_settings

TASKS = "lm (a language model), or path/to/file.py:Name for your own task"


def read_command(argv: Sequence[str]) -> Command:
    """The command of a command line.

    Raises:
      SystemExit: after a help.
      ValueError: there is no such command, task or option, or a setting is refused.
      OSError: a file of settings or of a task cannot be read.
    """
    if argv[:1] == ["--version"]:
        jax = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
        print(f"jaxpar {__version__}, {jax}, python {sys.version.split()[0]}")
        raise SystemExit(0)
    known = all_commands()
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(_help(known))
        raise SystemExit(0 if argv else 2)
    name, *arguments = argv
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"no command {name!r}\nFix: use {', '.join(near or known)}.")
    command, words = known[name], [name]
    fields: dict[str, object] = {}
    if command is Plot:
        fields["kind"] = kind = _take_word(arguments) or ("KIND" if asks_help(argv) else "")
        if kind in PICTURES_OF_RUNS:
            command = PlotRuns
        elif kind not in (*PICTURES, "KIND"):
            kinds = ", ".join((*PICTURES, *PICTURES_OF_RUNS))
            fact = f"no picture {kind!r}"
            raise ValueError(f"{fact}\nFix: write plot KIND TASK, with a KIND of {kinds}.")
        words.append(kind)
    if not issubclass(command, TaskOptions):
        return read_options(command, words, arguments, known=fields)
    spec, note, resumes = _take_word(arguments), "", False
    if spec is None and asks_help(argv):
        note = (
            f"TASK is {TASKS}. For the options of a task: {' '.join([PROGRAM, *words])} lm --help"
        )
        words, settings = [*words, "TASK"], default_settings(Task)
    else:
        words += [] if spec is None else [spec]
        settings, resumes = read_settings(words, spec, arguments, may_resume=command is Train)
    _check_names(settings.task, command, name)
    fields |= settings._asdict()
    parse = commands.read_mesh if command is Train else MeshConfig.parse
    found = read_options(command, words, arguments, known=fields, note=note, parse_mesh=parse)
    # Decided once: another process may begin the run any moment.
    return dataclasses.replace(found, resume=resumes) if isinstance(found, Train) else found


def all_commands() -> dict[str, type[Command]]:
    """Those of every task, and those that tasks add, by their names."""
    modules = [commands, *map(importlib.import_module, COMMANDS_OF_TASKS)]
    return {name: command for module in modules for name, command in module.COMMANDS.items()}


def asks_help(argv: Sequence[str]) -> bool:
    """Whether the line says -h or --help."""
    return bool({"-h", "--help"} & {*argv})


def _take_word(arguments: list[str]) -> str | None:
    """The first of the arguments, removed from them; None if there is none, or it is an option."""
    return arguments.pop(0) if arguments and not arguments[0].startswith("-") else None


def _check_names(task: Task, command: type[TaskOptions], name: str) -> None:
    """Raises if a field of the task cannot be an option of the command, as it has one of that name."""
    taken = {field.name for field in dataclasses.fields(command)} | {"config", "help"}
    for field in dataclasses.fields(task):
        fact = f"field {field.name!r} of {type(task).__name__} is already an option of {name}"
        require(field.name not in taken, f"{fact}\nFix: rename the field.")


def _help(known: dict[str, type[Command]]) -> str:
    """All commands, each with the first sentence of its docstring."""
    lines = [f"usage: {PROGRAM} COMMAND ...", ""]
    for name, command in known.items():
        what = "KIND " * (command is Plot) + "TASK" * issubclass(command, TaskOptions)
        summary = inspect.cleandoc(command.__doc__ or "").partition("\n")[0]
        lines.append(f"  {f'{name} {what}':16} {summary}")
    lines += ["", f"TASK is {TASKS}.", f"See {PROGRAM} COMMAND --help, {PROGRAM} --version."]
    return "\n".join(lines)
