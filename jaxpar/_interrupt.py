"""Ctrl-C while `python -m jaxpar` imports JAX and itself, for some seconds: it ends without a traceback."""

import os
import signal
import sys


def leave_imports(_number: int, _frame: object) -> None:
    """The handler of SIGINT until `main` begins: ends the process as `main` does."""
    os.write(2, b"stopped\n")
    os._exit(128 + signal.SIGINT)


def command_line() -> list[str] | None:
    """The arguments of `python -m jaxpar` or `jaxpar`, if one of these imports this package; else None."""
    program, *arguments = sys.argv or [""]
    if os.path.basename(program) == "jaxpar":
        return arguments
    # Until all packages above the module that is run are imported, argv begins with -m.
    is_run = program == "-m" and [*sys.orig_argv, ""][-len(sys.argv) - 1] == "jaxpar"
    return arguments if is_run else None


def end_quietly_on_interrupt() -> None:
    """Sets the handler, if the signal is handled as ever."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_imports)
