"""Options of a command line: read with tyro, over the settings of a file or of a run, and written.

They are the keys of files of settings: `--optimizer.learning-rate` is `learning_rate` in `[optimizer]`.
"""

import contextlib
import inspect
import io
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
from tyro.conf import AvoidSubcommands, SuppressFixed
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxpar.base.output import PROGRAM
from jaxpar.hosts.launch import OUT_DIR, options_of
from jaxpar.mesh import MeshConfig, short_name, simulate_devices
from jaxpar.model.task import Settings, find_task, spec_of
from jaxpar.training.config_file import default_settings, option_words, read_config, read_simulated

if TYPE_CHECKING:
    from jaxpar.training.run_folder import RunFolder

_Command = TypeVar("_Command")


class OptionError(ValueError):
    """What is wrong with the options of a command line, as a box of tyro."""


def read_options(
    command: type[_Command],
    words: Sequence[str],
    arguments: Sequence[str],
    *,
    known: Mapping[str, object] | None = None,
    note: str = "",
    parse_mesh: Callable[[str], MeshConfig] = MeshConfig.parse,
) -> _Command:
    """The command with its options.

    Args:
      command: its class.
      words: what comes before the arguments on the line.
      known: fields that have their values already, or defaults of their own.
      note: to be added to the help.
      parse_mesh: reads the text of a mesh.
    Raises:
      SystemExit: after a help.
      OptionError: an option does not exist, lacks its value, or has a wrong one.
    """
    description = inspect.cleandoc(command.__doc__ or "").partition("\n\nAttributes:\n")[0]
    default: dict[str, Any] = {"default": command(**known)} if known else {}
    said = io.StringIO()
    # tyro takes --num_layers for --num-layers, but finds nothing like --num_layer.
    arguments = [re.sub(r"^--[^=]+", lambda name: name[0].replace("_", "-"), a) for a in arguments]
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                command,
                prog=" ".join([PROGRAM, *words]),
                description=f"{description}\n\n{note}".strip(),
                args=arguments,
                config=(AvoidSubcommands, SuppressFixed),
                registry=_registry(parse_mesh),
                **default,
            )
    except SystemExit as stopped:  # an error that tyro would have printed
        if not stopped.code:
            raise
        raise OptionError(said.getvalue().rstrip()) from None


def _registry(parse_mesh: Callable[[str], MeshConfig]) -> ConstructorRegistry:
    """How options become values: a mesh is one text, such as dp2pp2tp2."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def mesh(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[MeshConfig] | None:
        if info.type is not MeshConfig:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="SHAPE",
            instance_from_str=lambda texts: parse_mesh(texts[0]),
            is_instance=lambda value: type(value) is MeshConfig,
            str_from_instance=lambda mesh: [short_name(mesh)],
        )

    return registry


# ---- what comes before: a file of settings, a run ----


def read_settings(
    words: Sequence[str], spec: str | None, arguments: Sequence[str], *, may_resume: bool
) -> tuple[Settings, bool]:
    """The settings that options change: those of a resumed run, then of --config, or the task's own.

    An option that has a wrong value here is named by `read_options`.

    Args:
      words: what the arguments follow.
      spec: of the task; None if it was not named.
    Returns:
      The settings, and whether a run is resumed.
    Raises:
      ValueError: nothing says which task it is, or what does says another.
      OSError: there is no such run or file.
    """
    given = options_of(arguments)
    config, out_dir, folder, source = given.get("--config"), given.get(OUT_DIR), None, ""
    if may_resume and given.keys() & {"--resume", "--resume-or-begin"}:
        folder = _folder_to_resume(given)
    # Before the file of a task is read: it may touch a device.
    simulate = given.get("--simulate")
    if simulate is None and "--mesh" not in given:
        _simulate_as_in(config if folder is None else folder.config_path)
    elif simulate and simulate.isdecimal() and (spec is None or ":" in spec):
        simulate_devices(int(simulate))
    task = None if spec is None else find_task(spec)
    settings = None if task is None else default_settings(task)
    if folder is not None:
        settings, source = folder.settings(), str(folder)
        task = task or type(settings.task)
    if config:
        settings, source = read_config(config, settings), config
        elsewhere = out_dir is None and settings.train.out_dir != str(folder)
        if folder is not None and elsewhere:
            raise ValueError(
                f"{config} has out_dir={settings.train.out_dir!r}, and the latest run is {folder}\n"
                f"Fix: name one to continue, such as --train.out-dir {folder}."
            )
    if settings is None:
        what = " ".join(words)
        fact = f"{what} needs a task"
        raise ValueError(f"{fact}\nFix: use {what} lm, or {what} path/to/file.py:Name.")
    if task is not None and type(settings.task) is not task:
        raise ValueError(
            f"settings of {source}: expected task {spec_of(task())}, got {spec_of(settings.task)}\n"
            f"Fix: leave the task out, or begin another run without these settings."
        )
    return settings, folder is not None


def _folder_to_resume(given: Mapping[str, str]) -> "RunFolder | None":
    """The run that goes on; None if there is none, and it may begin."""
    from jaxpar.training.run_folder import RunFolder, newest_run_folder

    out_dir = given.get(OUT_DIR)
    if "--resume-or-begin" in given and out_dir is None:
        fact = "--resume-or-begin needs a folder"
        raise ValueError(f"{fact}\nFix: add --train.out-dir runs/large, or another folder.")
    folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
    return folder if "--resume" in given or folder.holds_run else None


def _simulate_as_in(config: str | os.PathLike[str] | None) -> None:
    """Simulates the devices that a file of settings asks for; GPUs and variables of JAX take precedence."""
    if not config or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    number = None
    with contextlib.suppress(OSError, ValueError):  # reported when all of the settings are read
        number = read_simulated(config)
    if number is not None:
        import jax

        with contextlib.suppress(RuntimeError):  # devices are in use already
            jax.config.update("jax_num_cpu_devices", number)


# ---- options written ----


def train_command(settings: Settings, simulate: int | None) -> str:
    """The command line that trains so. What data tell, such as the size of a vocabulary, is left to them."""
    task, parallel, _ = settings
    words = [*PROGRAM.split(), "train", spec_of(task)]
    words += ["--simulate", str(simulate)] * (simulate is not None)
    words += option_words(settings, default_settings(type(task)))
    return shlex.join([*words, "--mesh", short_name(parallel.mesh)])
