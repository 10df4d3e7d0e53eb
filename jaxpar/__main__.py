"""The command line: which of the `commands`, on which config, and how a mistake ends.

    train | plan | evaluate | sample | inspect | plot | export | import | launch | doctor

See `--help` of each.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro
from tyro.conf import AvoidSubcommands, FlagCreatePairsOff, subcommand

from jaxpar.commands import (
    AUTO,
    Command,
    Doctor,
    Evaluate,
    Export,
    Import,
    Inspect,
    Launch,
    Options,
    Plan,
    Plot,
    Sample,
    Train,
)
from jaxpar.config import CONFIGS, RunConfig
from jaxpar.config_file import read_config
from jaxpar.files import cache_folder
from jaxpar.hosts.distributed import leave_processes
from jaxpar.mesh import MeshConfig, simulate_devices
from jaxpar.training.run_folder import RunFolder, newest_run_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit code.

    A user's mistake prints one message and gives 2, a number that is not finite 3; `--debug` raises the
    error instead.

    Args:
      argv: arguments; None takes those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in itertools.takewhile(lambda argument: argument != "--", argv)
    if not debug:  # Orbax logs the tracebacks of errors that it also raises
        logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        command = _parse(argv)
        if isinstance(command, Options):
            if command.simulate is not None:
                _simulate(command.simulate)
            _use_compile_cache(command.compile_cache)
        return command.run()
    except KeyboardInterrupt:
        if debug:
            raise
        print("stopped", file=sys.stderr)
        return leave_processes(130)
    except (ValueError, OSError, FloatingPointError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return leave_processes(3 if isinstance(error, FloatingPointError) else 2)


def _parse(argv: list[str]) -> Command:
    config, said = _base_config(argv), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                Annotated[Train, subcommand("train", default=Train(config=config))]
                | Annotated[Plan, subcommand("plan", default=Plan(config=config))]
                | Annotated[Evaluate, subcommand("evaluate")]
                | Annotated[Sample, subcommand("sample")]
                | Annotated[Inspect, subcommand("inspect", default=Inspect(config=config))]
                | Annotated[Plot, subcommand("plot", default=Plot(kind="schedule", config=config))]
                | Annotated[Export, subcommand("export")]
                | Annotated[Import, subcommand("import")]
                | Annotated[Launch, subcommand("launch")]
                | Annotated[Doctor, subcommand("doctor")],
                prog="python -m jaxpar",
                description="Trains LSTM language models, and networks on images, on a mesh.",
                args=argv,
                config=(FlagCreatePairsOff, AvoidSubcommands),  # --model chooses, not a subcommand
            )
    except SystemExit as stopped:
        # Of a value that a config refuses tyro tells no more than the config itself, in a box.
        cause = stopped.__context__
        while cause is not None:
            if isinstance(cause, ValueError) and _is_raised_here(cause):
                raise cause from None
            cause = cause.__context__
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def _is_raised_here(error: ValueError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("jaxpar.")


def _base_config(argv: list[str]) -> RunConfig:
    """The settings that single flags change: --model's, of a resumed run, then --config, then --mesh."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--config")
    early.add_argument("--mesh")
    early.add_argument("--model", choices=list(CONFIGS))
    early.add_argument("--resume", action="store_true")
    early.add_argument("--train.out-dir", "--train.out_dir", dest="out_dir")
    try:
        given, _ = early.parse_known_args(argv[1:])
    except argparse.ArgumentError:
        return CONFIGS["lstm"]  # tyro will find the same mistake, and tell it better
    config = CONFIGS[given.model or "lstm"]
    if argv[:1] not in (["train"], ["inspect"], ["plot"], ["plan"]) or {"-h", "--help"} & set(argv):
        return config
    if given.resume:
        folder = newest_run_folder() if given.out_dir is None else RunFolder(given.out_dir)
        config = folder.config()
    if given.config is not None:
        config = read_config(given.config, config)
    if given.model not in (None, config.model.name):
        raise ValueError(
            f"--model {given.model}: the settings of {given.config or 'the run'} are for the model "
            f"{config.model.name!r}; leave --model away, or begin another run without them"
        )
    if given.mesh is not None and not (given.mesh == AUTO and argv[0] == "train"):
        config = dataclasses.replace(config, mesh=MeshConfig.parse(given.mesh))
    return config


def _use_compile_cache(use: bool) -> None:
    """JAX's persistent cache, in the user's cache folder unless a variable of JAX's says where.

    Not by itself with JAX 0.10, whose XLA calls every cached program for CPU one of another machine, in a
    line of 3,000 letters.
    """
    jax.config.update("jax_enable_compilation_cache", use)
    if not use or "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.__version_info__ < (0, 11):
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _simulate(num_devices: int) -> None:
    try:
        simulate_devices(num_devices)
    except RuntimeError as error:  # too late, in a process that has used devices before
        raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
