"""Entry point of the command line: reads a command, runs it, and turns errors into exit codes.

    train | plan | inspect TASK       plot KIND TASK
    evaluate | sample | export RUN_DIR       predict RUN_DIR DATA

TASK is lm, or path/to/file.py:Name for your own task. Its fields are options: `train TASK --help` lists
them.
"""

import gc
import importlib
import io
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from jaxpar.base.output import keep_printing, open_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    A wrong option or input prints one message and gives 2, a loss or gradient that is not finite gives 3.
    `--debug` raises the error instead.

    Args:
      argv: arguments; None takes those of the process, of which this is the program.
    """
    if argv is None:
        # Tracing makes much that stays: a tenth of a small run's time.
        gc.set_threshold(100_000, 10, 10)
        open_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal lacks shall not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from jaxpar.cli.parse import asks_help

    runs = argv[:1] in (["train"], ["launch"]) and not asks_help(argv)
    if runs:  # of what others print nothing may be missing
        keep_printing()
    debug = "--debug" in itertools.takewhile(lambda argument: argument != "--", argv)
    if not debug:  # Orbax, and what it awaits, log the tracebacks of errors that it also raises
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        if debug:
            raise
        print("stopped", file=sys.stderr)
        return _leave(130, "it was stopped")
    except (ValueError, OSError, FloatingPointError, MemoryError) as error:
        if debug:
            raise
        if isinstance(error, BrokenPipeError) and not runs:  # who read it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        from jaxpar.cli.options import OptionError

        is_box = isinstance(error, OptionError)
        print(error if is_box else _error_text(str(error), _source_line(error)), file=sys.stderr)
        reason = "its options are wrong" if is_box else str(error)
        return _leave(3 if isinstance(error, FloatingPointError) else 2, reason, error)
    except Exception as error:
        source_line = _source_line(error)
        if debug or not source_line:  # a slip of our own
            raise
        where = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        text = " ".join([f"{type(error).__name__}:", *str(error).split(), *where])
        said = f"{text}\nFix: see the traceback with --debug."
        print(_error_text(said, source_line), file=sys.stderr)
        return _leave(2, text)


def _run(argv: list[str]) -> int:
    """Reads a command line, runs its command and returns the exit code."""
    from jaxpar.cli.command import Options
    from jaxpar.cli.commands import Launch
    from jaxpar.cli.parse import asks_help, read_command
    from jaxpar.hosts.group import find_processes
    from jaxpar.mesh import simulate_devices

    if argv[:1] == ["train"] and not asks_help(argv) and find_processes(os.environ) is not None:
        _load("jaxpar.training.fit")
        from jaxpar.hosts.agree import await_agreement
        from jaxpar.hosts.distributed import start_processes

        start_processes()  # so that a mistake in one of them ends all
        await_agreement()
    command = read_command(argv)
    if machine := getattr(command, "machine", None):
        from jaxpar.cli.guarded import WATCHED, run_guarded

        if WATCHED not in os.environ:  # else this is the child
            return run_guarded([sys.executable, "-m", "jaxpar", *argv], machine)
    _load("jaxpar.hosts.launch" if isinstance(command, Launch) else "jaxpar.training.fit")
    if isinstance(command, Options):
        if command.simulate is not None:
            simulate_devices(command.simulate)
        import jax

        from jaxpar.base.compiler import use_compile_cache

        jax.config.update("jax_enable_compilation_cache", command.compile_cache)
        use_compile_cache()
    return command.run()


def _load(module: str) -> None:
    """Imports what takes long, such as JAX."""
    gc.disable()  # what is imported stays, and the collector would look through all of it again and again
    importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _leave(code: int, reason: str, error: Exception | None = None) -> int:
    """The exit code, once the other processes know; if there are any, this one ends here."""
    if "jaxpar.hosts.distributed" not in sys.modules:
        return code
    from jaxpar.hosts.distributed import leave_processes

    return leave_processes(code, reason, error)


def _error_text(text: str, source_line: str) -> str:
    """A message, with the line that it came from behind the fact."""
    fact, newline, remedy = text.partition("\n")
    at_line = f" ({source_line})" if source_line not in text else ""
    return f"error: {fact}{at_line}{newline}{remedy}"


def _source_line(error: BaseException) -> str:
    """The line of the user's task that an error came through, if any: "forecast.py, line 3"."""
    from jaxpar.model.task import FILE_OF_TASK

    lines = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for raised in (error.__cause__, error)
        for frame, line in traceback.walk_tb(raised and raised.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(FILE_OF_TASK)
        and frame.f_code.co_filename.endswith(".py")  # what dataclasses write is in no file
    ]
    return lines[-1] if lines else ""
