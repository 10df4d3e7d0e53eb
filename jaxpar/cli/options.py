"""Options of a command line: read with tyro, over the settings of a file or of a run, and written.

They are the keys of files of settings: `--optimizer.learning-rate` is `learning_rate` in `[optimizer]`.
"""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

import tyro
from tyro import MISSING
from tyro.conf import AvoidSubcommands, SuppressFixed
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from jaxpar.base.output import PROGRAM
from jaxpar.config_file import default_settings, option_words, read_config, read_simulated
from jaxpar.hosts.scripts import OUT_DIR, options_of
from jaxpar.mesh import MeshConfig, short_name, simulate_devices
from jaxpar.task import Settings, find_task, spec_of

if TYPE_CHECKING:
    from jaxpar.training.run_folder import RunFolder

_Command = TypeVar("_Command")
# What options of training are called by other programs.
_ELSEWHERE = {
    "--lr": "--optimizer.learning-rate", "--learning-rate": "--optimizer.learning-rate",
    "--epochs": "--train.num-steps", "--num-epochs": "--train.num-steps",
    "--max-steps": "--train.num-steps", "--gpus": "--mesh",
    "--data": "--corpus", "--output-dir": "--train.out-dir",
}  # fmt: skip


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
        meant = [f"{name} is {_ELSEWHERE[name]} here\n" for name in arguments if name in _ELSEWHERE]
        raise OptionError("".join([said.getvalue(), *meant]).rstrip()) from None


def _registry(parse_mesh: Callable[[str], MeshConfig]) -> ConstructorRegistry:
    """How options become values: a mesh is one text, such as dp2pp2tp2.

    And what is said of the fields of jaxpar's own classes: by their docstrings. tyro would look for it in
    their source, which takes longer than all else.
    """
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

    @registry.struct_rule
    def table(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type) or not info.type.__module__.startswith(
            "jaxpar."
        ):
            return None
        hints, helps = typing.get_type_hints(info.type, include_extras=True), _helps(info.type)
        fields = [
            StructFieldSpec(
                name=field.name,
                type=_told(hints[field.name]),
                default=getattr(info.default, field.name, _default_of(field)),
                helptext=helps.get(field.name),
            )
            for field in dataclasses.fields(info.type)
        ]
        return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))

    return registry


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _told(hint: Any) -> Any:
    """The same type, such that tyro can tell if a default has it, without the import of typeguard."""
    if typing.get_origin(hint) is Annotated:
        kind, *more = typing.get_args(hint)
        return Annotated[(_told(kind), *more)]
    if typing.get_origin(hint) is tuple:
        made = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(hint, set()))
        return Annotated[object, made]
    if isinstance(hint, types.UnionType):
        kinds = sorted(typing.get_args(hint), key=lambda kind: kind is not types.NoneType)
        return Union[tuple(kinds)]  # noqa: UP007
    return hint


def _helps(kind: type) -> dict[str, str]:
    """What is said of the fields of a class under "Attributes", in its docstring and those of its bases."""
    helps: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:")[2]
        for entry in re.split(r"\n  (?=\w)", section.partition("\n\n")[0])[1:]:
            names, _, text = entry.partition(": ")
            helps |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return helps


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
        before = read_config(folder.config_path).train.fallback_dir
        if before is not None and "--train.fallback-dir" not in given:
            print(
                f"warning: the settings of {folder} have fallback_dir={before!r}, which is not followed, for "
                f"a folder may be somebody else's; if it is yours, add --train.fallback-dir {before}",
                file=sys.stderr,
            )
        task = task or type(settings.task)
    if config:
        settings, source = read_config(config, settings), config
        elsewhere = out_dir is None and settings.train.out_dir != str(folder)
        if folder is not None and elsewhere:
            raise ValueError(
                f"{config} says out_dir={settings.train.out_dir!r}, the latest run is {folder}; say "
                f"which one to continue, such as --train.out-dir {folder}"
            )
    if settings is None:
        what = " ".join(words)
        raise ValueError(
            f"{what} what? Name a task after it: {what} lm (a language model), or one of your own, "
            f"{what} path/to/file.py:Name"
        )
    if task is not None and type(settings.task) is not task:
        raise ValueError(
            f"the settings of {source} are of the task {spec_of(settings.task)}, not of {spec_of(task())}; "
            f"name no task, or begin another run without them"
        )
    return settings, folder is not None


def _folder_to_resume(given: Mapping[str, str]) -> "RunFolder | None":
    """The run that goes on; None if there is none, and it may begin."""
    from jaxpar.training.run_folder import RunFolder, newest_run_folder

    out_dir = given.get(OUT_DIR)
    if "--resume-or-begin" in given and out_dir is None:
        raise ValueError(
            "--resume-or-begin looks for the run in the folder that is named; add --train.out-dir, such as "
            "--train.out-dir runs/large"
        )
    folder = newest_run_folder() if out_dir is None else RunFolder(out_dir)
    return folder if "--resume" in given or folder.holds_run else None


def _simulate_as_in(config: str | os.PathLike[str] | None) -> None:
    """Simulates the devices that a file of settings asks for; GPUs and variables of JAX take precedence."""
    if not config or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        number = read_simulated(config)
    except (OSError, ValueError):  # which is said when all of the settings are read
        return
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
