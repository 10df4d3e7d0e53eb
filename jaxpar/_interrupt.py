"""Ctrl-C while `python -m jaxpar` imports JAX and itself, for some seconds: it ends without a traceback."""

import os
import signal
import sys


def leave_imports(_number: int, _frame: object) -> None:
    """The handler of SIGINT until `main` begins: ends the process as `main` does."""
    os.write(2, b"stopped\n")
    os._exit(128 + signal.SIGINT)


def end_quietly_on_interrupt() -> None:
    """Sets the handler, if the command line imports this package and the signal is handled as ever."""
    # So argv says until all packages above the module that is run are imported.
    program = sys.argv[0] if sys.argv else ""
    on_command_line = program == "-m" or os.path.basename(program) == "jaxpar"
    if on_command_line and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_imports)
