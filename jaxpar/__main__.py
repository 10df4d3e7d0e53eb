"""The command line: which of the `commands`, for which task, with which settings, and how a mistake ends.

    train | plan | inspect TASK       plot KIND TASK       evaluate | sample | export | import RUN_DIR

TASK is lm, images, or path/to/file.py:Name, a task of your own. Its fields are options: `train TASK --help`
lists them.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import tyro
from tyro.conf import AvoidSubcommands, SuppressFixed
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxpar._interrupt import leave_imports
from jaxpar._mistyped import PROGRAM, find_mistake
from jaxpar.commands import (
    COMMANDS,
    PICTURES,
    PICTURES_OF_RUNS,
    Command,
    Options,
    Plan,
    Plot,
    PlotRuns,
    TaskOptions,
    Train,
    read_mesh,
)
from jaxpar.config import short_name
from jaxpar.config_file import default_settings, read_config, read_simulated
from jaxpar.files import cache_folder
from jaxpar.hosts.agreement import await_agreement
from jaxpar.hosts.distributed import leave_processes, start_processes
from jaxpar.hosts.together import DifferentError, SharedError
from jaxpar.mesh import MeshConfig, simulate_devices
from jaxpar.option_errors import shorten
from jaxpar.output import keep_printing
from jaxpar.task import FILE_OF_TASK, Settings, Task, find_task, spec_of
from jaxpar.training.run_folder import RunFolder, newest_run_folder

TASKS = "lm (a language model), images (a network of convolutions), or path/to/file.py:Name, one of your own"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit code.

    A user's mistake prints one message and gives 2, a number that is not finite 3; `--debug` raises the
    error instead.

    Args:
      argv: arguments; None takes those of the process.
    """
    if signal.getsignal(signal.SIGINT) is leave_imports:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal lacks shall not end a run
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in (
            "utf-8",
            "utf8",
        ):
            stream.reconfigure(errors="backslashreplace")
    if argv[:1] in (["train"], ["launch"]):  # of what others print nothing may be missing
        keep_printing()
    debug = "--debug" in itertools.takewhile(lambda argument: argument != "--", argv)
    if not debug:  # Orbax, and what it awaits, log the tracebacks of errors that it also raises
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        _check_encoding(argv)
        # Before the file of a task is read: it may touch a device.
        given = _given(argv)
        if given.simulate is not None:
            _simulate(given.simulate)
        else:
            _simulate_as_before(argv, given)
        if argv[:1] == ["train"] and not _asks_help(argv):
            start_processes()
            await_agreement()
        command = _parse(argv)
        if isinstance(command, Options):
            _use_compile_cache(command.compile_cache)
        return command.run()
    except KeyboardInterrupt:
        if debug:
            raise
        print("stopped", file=sys.stderr)
        return leave_processes(130, "it was stopped")
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        if debug:
            raise
        print(f"error: {error}{_place_of(error)}", file=sys.stderr)
        code = 3 if isinstance(error, FloatingPointError) else 2
        return leave_processes(
            code, str(error), shared=isinstance(error, SharedError | DifferentError)
        )
    except Exception as error:
        place = _place_of(error)
        if debug or not place:  # a slip of our own
            raise
        where = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        text = " ".join([f"{type(error).__name__}:", *str(error).split(), *where])
        print(f"error: {text}{place}; --debug shows the traceback", file=sys.stderr)
        return leave_processes(2, text)


def _check_encoding(argv: list[str]) -> None:
    """Raises for arguments with bytes that mean no letters here: such a path cannot be written down."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{argument!a} is not text in the encoding of this process, "
                f"{sys.getfilesystemencoding()}; set PYTHONUTF8=1 (or LC_ALL=C.UTF-8), or rename it"
            ) from None


def _parse(argv: list[str]) -> Command:
    """The command of a command line.

    Raises:
      SystemExit: after a help.
      ValueError: there is no such command, task or option, or a setting is refused.
    """
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(_help())
        raise SystemExit(0 if argv else 2)
    name, *arguments = argv
    mistake = find_mistake(argv)
    if mistake is not None:
        raise ValueError(mistake)
    command, words, known = COMMANDS[name], [name], {}
    if command is Plot:
        known["kind"] = kind = _take_word(arguments) or ("KIND" if _asks_help(argv) else "")
        if kind in PICTURES_OF_RUNS:
            command = PlotRuns
        elif kind not in (*PICTURES, "KIND"):
            raise ValueError(
                f"there is no picture {kind!r}; write plot KIND TASK with one of "
                f"{', '.join(PICTURES)}, or plot KIND with one of {', '.join(PICTURES_OF_RUNS)}"
            )
        words.append(kind)
    if issubclass(command, TaskOptions):
        spec = _take_word(arguments)
        if spec is None and _asks_help(argv):
            words.append("TASK")
            settings = default_settings(Task)
        else:
            words += [] if spec is None else [spec]
            given = _given([name, *arguments])
            settings = _settings(words, spec, given)
            if given.resume_or_begin:  # decided once: another process may begin the run any moment
                known["resume"] = given.resume
        _check_names(settings.task, command, name)
        known |= settings._asdict()
    if command is Plan:
        _refuse_layout(arguments)
    return _read_options(command, arguments, " ".join([PROGRAM, *words]), known)


def _asks_help(argv: list[str]) -> bool:
    return bool({"-h", "--help"} & {*argv})


def _take_word(arguments: list[str]) -> str | None:
    """The first of the arguments, removed from them; None if there is none, or it is an option."""
    return arguments.pop(0) if arguments and not arguments[0].startswith("-") else None


def _settings(words: list[str], spec: str | None, given: "_Given") -> Settings:
    """The settings that single options change: those of a resumed run, then of --config, or the task's own.

    Args:
      words: what the arguments follow.
      spec: of the task; None if it was not named.
    Raises:
      ValueError: nothing says which task it is, or what does says another.
      OSError: there is no such run or file.
    """
    task = None if spec is None else find_task(spec)
    settings, source, folder = None if task is None else default_settings(task), "", None
    if given.resume:
        folder = newest_run_folder() if given.out_dir is None else RunFolder(given.out_dir)
        settings, source = folder.settings(), str(folder)
        before = read_config(folder.config_path).train.fallback_dir
        if before is not None and given.fallback_dir is None:
            print(
                f"warning: the settings of {folder} have fallback_dir={before!r}, which is not followed, for "
                f"a folder may be somebody else's; if it is yours, add --train.fallback-dir {before}",
                file=sys.stderr,
            )
        task = task or type(settings.task)
    if given.config is not None:
        settings, source = read_config(given.config, settings), given.config
        if given.resume and given.out_dir is None and settings.train.out_dir != str(folder):
            raise ValueError(
                f"{given.config} says out_dir={settings.train.out_dir!r}, the latest run is {folder}; say "
                f"which one to continue, such as --train.out-dir {folder}"
            )
    if settings is None:
        what = " ".join(words)
        raise ValueError(
            f"{what} what? Name a task after it: {what} lm (a language model), {what} images (a network of "
            f"convolutions), or one of your own, {what} path/to/file.py:Name"
        )
    if task is not None and type(settings.task) is not task:
        raise ValueError(
            f"the settings of {source} are of the task {spec_of(settings.task)}, not of {spec_of(task())}; "
            f"name no task, or begin another run without them"
        )
    return settings


class _Given(NamedTuple):
    """What is read of the arguments before all of them are."""

    config: str | None = None
    resume: bool = False
    resume_or_begin: bool = False
    out_dir: str | None = None
    fallback_dir: str | None = None
    simulate: int | None = None


def _given(argv: list[str]) -> _Given:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config")
    early.add_argument("--simulate", type=int)
    if argv[:1] == ["train"]:
        early.add_argument("--resume", action="store_true")
        early.add_argument("--resume-or-begin", "--resume_or_begin", action="store_true")
        early.add_argument("--train.out-dir", "--train.out_dir", dest="out_dir")
        early.add_argument("--train.fallback-dir", "--train.fallback_dir", dest="fallback_dir")
    if argv[:1] == ["launch"]:
        return _Given()  # those after -- are not its own
    try:
        given = _Given(**vars(early.parse_known_args(argv[1:])[0]))
    except argparse.ArgumentError:
        return _Given()  # tyro will find the same mistake, and tell it better
    if not given.resume_or_begin:
        return given
    if given.out_dir is None:
        raise ValueError(
            "--resume-or-begin looks for the run in the folder that is named; add --train.out-dir, such as "
            "--train.out-dir runs/large"
        )
    return given._replace(resume=RunFolder(given.out_dir).holds_run)


def _refuse_layout(arguments: list[str]) -> None:
    """Raises for options that say what `plan` is to find out."""
    for argument in arguments:
        if re.match(r"--(mesh|pipeline|shares|fsdp|update)\b", argument):
            raise ValueError(
                f"plan looks for the mesh and the pipeline itself; leave {argument} out and say how many "
                f"devices there are (--devices 8), or ask about one mesh: inspect TASK --mesh dp2 --compare"
            )


def _check_names(task: Task, command: type[TaskOptions], name: str) -> None:
    """Raises if a field of the task cannot be an option of the command, as it has one of that name."""
    taken = {field.name for field in dataclasses.fields(command)} | {"config", "help"}
    for field in dataclasses.fields(task):
        if field.name in taken:
            raise ValueError(
                f"the field {field.name!r} of {type(task).__name__} has the name of an option of {name}; "
                f"give it another name"
            )


def _read_options(
    command: type[Command], arguments: list[str], program: str, known: Mapping[str, object]
) -> Command:
    """The command with its options.

    Args:
      program: what comes before the arguments.
      known: fields that have their values already, or defaults of their own.
    """
    said, description = io.StringIO(), inspect.cleandoc(command.__doc__ or "")
    if program.endswith(" TASK"):
        description += (
            f"\n\nTASK is {TASKS}; its own options: {program.replace('TASK', 'lm')} --help"
        )
    cli = functools.partial(
        tyro.cli,
        command,
        prog=program,
        description=description,
        args=arguments,
        config=(AvoidSubcommands, SuppressFixed),
        registry=_registry(read_mesh if command is Train else MeshConfig.parse),
    )
    try:
        with contextlib.redirect_stderr(said):
            return cli(default=command(**known)) if known else cli()
    except SystemExit as stopped:
        # Of a value that a config refuses tyro tells no more than the config itself, in a box.
        cause = stopped.__context__
        while cause is not None:
            if isinstance(cause, ValueError) and _is_raised_here(cause):
                raise cause from None
            cause = cause.__context__
        if stopped.code:
            raise ValueError(shorten(said.getvalue(), arguments, program)) from None
        raise


def _registry(parse: Callable[[str], MeshConfig]) -> ConstructorRegistry:
    """How options become values: a mesh is one text, such as dp2pp2tp2."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def mesh(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[MeshConfig] | None:
        if info.type is not MeshConfig:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="SHAPE",
            instance_from_str=lambda texts: parse(texts[0]),
            is_instance=lambda value: type(value) is MeshConfig,
            str_from_instance=lambda mesh: [short_name(mesh)],
        )

    return registry


def _is_raised_here(error: ValueError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("jaxpar.")


def _place_of(error: BaseException) -> str:
    """The line of the user's task that an error came through, if any: " (forecast.py, line 3)"."""
    places = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for raised in (error.__cause__, error)
        for frame, line in traceback.walk_tb(raised and raised.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(FILE_OF_TASK)
        and frame.f_code.co_filename.endswith(".py")  # what dataclasses write is in no file
    ]
    return places[-1] if places else ""


def _help() -> str:
    """All commands, each with the first sentence of its docstring."""
    lines = [f"usage: {PROGRAM} COMMAND ...", ""]
    for name, command in COMMANDS.items():
        what = (
            "KIND TASK" if command is Plot else "TASK" if issubclass(command, TaskOptions) else ""
        )
        summary = inspect.cleandoc(command.__doc__ or "").partition("\n")[0]
        lines.append(f"  {f'{name} {what}':16} {summary}")
    return "\n".join([*lines, "", f"TASK is {TASKS}.", f"See {PROGRAM} COMMAND --help."])


def _use_compile_cache(use: bool) -> None:
    """JAX's persistent cache, in the user's cache folder unless a variable of JAX's says where.

    Not by itself with JAX 0.10, whose XLA calls every cached program for CPU one of another machine, in a
    line of 3,000 letters.
    """
    jax.config.update("jax_enable_compilation_cache", use)
    if not use or "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.__version_info__ < (0, 11):
        return
    try:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    except FileNotFoundError:  # the user has no home: programs are compiled each time
        return
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _simulate_as_before(argv: list[str], given: "_Given") -> None:
    """Simulates the devices that the run to be resumed had, or that a config asks for, unless told otherwise.

    GPUs take precedence, and so do JAX's own variables.
    """
    chosen = any(argument.partition("=")[0] == "--mesh" for argument in argv)
    if chosen or _asks_help(argv) or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        if given.config is not None:
            number = read_simulated(given.config)
        elif given.resume:
            folder = newest_run_folder() if given.out_dir is None else RunFolder(given.out_dir)
            number = read_simulated(folder.config_path)
        else:
            return
    except (OSError, ValueError):  # which is said when all of the settings are read
        return
    if number is not None:
        with contextlib.suppress(RuntimeError):  # devices are in use already
            jax.config.update("jax_num_cpu_devices", number)


def _simulate(num_devices: int) -> None:
    try:
        simulate_devices(num_devices)
    except RuntimeError as error:  # too late, in a process that has used devices before
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
