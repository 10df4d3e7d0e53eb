"""Settings as TOML files: what `--config` reads, and what a run leaves in its folder.

Keys are the options of the command line: the task's own fields and those of `Parallel` at the top, those
of its optimizer, of the pipeline and of training in tables.

    task = "lm"             # or "path/to/file.py:Name"
    simulate = 8            # devices on a CPU, where there are no others
    num_layers = 8
    mesh = "dp2pp2tp2"      # or a table [mesh] with data, stage, tensor, devices

    [optimizer]
    learning_rate = 1e-3

    [train]
    num_steps = 2000
"""

import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.base.bucket import as_path
from jaxpar.base.checks import leaves_of, walk
from jaxpar.base.files import read_file
from jaxpar.config import Parallel
from jaxpar.mesh import MeshConfig, short_name
from jaxpar.task import Settings, Task, find_task, spec_of

TASK, SIMULATE, TRAIN, MESH = "task", "simulate", "train", "mesh"
PARALLEL = tuple(field.name for field in dataclasses.fields(Parallel))
MOST_BYTES = 2**18  # of a file
# A hundred parts of a key: to read one takes the square of their number.
_LONG_KEY = re.compile(rb"""(\.\s*+([\w-]++|"(\\.|[^"\\\n])*+"|'[^'\n]*+')\s*+){100}""")
RESERVED = (TASK, SIMULATE, TRAIN, *PARALLEL)  # names that no field of a task may have


def read_config(path: str | os.PathLike[str], base: Settings | None = None) -> Settings:
    """The settings of a TOML file; what the file leaves out is as in `base`.

    If the file names another task than `base` has, the rest is as that task's runs have it by default.

    Raises:
      OSError: the file, or that of the task, cannot be read.
      ValueError: it is not TOML, names no task and there is no base, a key does not exist (the message
        gives its full path and the nearest), or a value has the wrong type or is out of range.
    """
    path = as_path(path)
    tables = read_toml(path)
    try:
        _take_simulated(tables)
        return _change(_base(tables, base), tables)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_simulated(path: str | os.PathLike[str]) -> int | None:
    """The number of simulated devices that a file of settings asks for; None if it does not.

    Raises:
      OSError, ValueError: as of `read_config`.
    """
    return _take_simulated(read_toml(as_path(path)))


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file of settings.

    Raises:
      OSError: it cannot be read, or is longer than any settings.
      ValueError: it is not TOML in UTF-8, or nested too deeply.
    """
    import tomllib

    content = read_file(path, "the config", "give a readable TOML file", MOST_BYTES)
    if _LONG_KEY.search(content):
        raise ValueError(f"{path} is nested too deeply")
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        byte = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise ValueError(f"{path} is not TOML in UTF-8: {byte}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML in UTF-8: {error}") from error


def option_words(settings: Settings, before: Settings) -> list[str]:
    """The options of a command line that make settings of those before, but for the mesh.

    What is None before, such as the size of a vocabulary, is left to the data.
    """
    words, known = [], keys_of(before)
    for key, value in keys_of(settings).items():
        if value == known[key] or known[key] is None or key.startswith("mesh."):
            continue
        option = key.replace("_", "-")
        if isinstance(value, bool):
            table, dot, name = option.rpartition(".")
            words.append(f"--{option}" if value else f"--{table}{dot}no-{name}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{option}", *map(str, values)]
    return words


def to_toml(settings: Settings, simulate: int | None = None) -> str:
    """Every value that is not None, as `read_config` reads it.

    Args:
      simulate: the number of simulated devices, for `read_simulated`.
    Raises:
      ValueError: a value would not be read back as it is.
    """
    import tomllib

    import tomli_w

    task, parallel, train = settings
    own = tuple((axis, size) for axis, size in parallel.mesh.axes if size != 1)
    mesh = dataclasses.replace(parallel.mesh, axes=own)
    settings = Settings(task, dataclasses.replace(parallel, mesh=mesh), train)
    spec, tables = spec_of(task), _tables(keys_of(settings))
    if mesh.devices is None:
        tables[MESH] = short_name(mesh)
    elif not own:
        del tables[MESH]["axes"]
    try:
        simulated = {} if simulate is None else {SIMULATE: simulate}
        text = tomli_w.dumps({TASK: spec, **simulated, **tables})
    except TypeError as error:
        raise ValueError(f"the settings of {spec} cannot be written as TOML: {error}") from error
    found = _change(default_settings(type(task)), tomllib.loads(tomli_w.dumps(tables)))
    again = keys_of(found)
    for key, value in keys_of(settings).items():
        if key not in again or value != again[key]:
            raise ValueError(
                f"{key}={value!r} would be read back from a TOML file as {again.get(key)!r}; TOML has no "
                f"null, and does not keep types: use another value, or another default"
            )
    return text


def keys_of(settings: Settings) -> dict[str, Any]:
    """Every value of the settings by its key, such as `optimizer.learning_rate`."""
    task, parallel, train = settings
    return leaves_of(task) | leaves_of(parallel) | leaves_of({TRAIN: train})


def default_settings(task: type[Task]) -> Settings:
    """Those that runs of a task have by default.

    Raises:
      ValueError: one of its fields has no default, or the name of a setting that every task has.
    """
    for field in dataclasses.fields(task):
        if field.name in RESERVED:
            raise ValueError(
                f"the field {field.name!r} of {task.__name__} has the name of a setting that every task has; "
                f"give it another name"
            )
        if field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"the field {field.name!r} of {task.__name__} has no default; give it one"
            )
    return Settings(task(), task.parallel, task.train)


def _take_simulated(tables: dict[str, Any]) -> int | None:
    number = tables.pop(SIMULATE, None)
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"{SIMULATE}={number!r}: use a number of devices, 1 or more")
    return number


def _base(tables: dict[str, Any], base: Settings | None) -> Settings:
    """The settings that a file changes; its names of the task are removed."""
    spec = tables.pop(TASK, None)
    if not isinstance(spec, str | None):
        raise ValueError(f'{TASK}={spec!r}: use a string, such as {TASK} = "lm"')
    if spec is None and base is None:
        raise ValueError(
            'it names no task; add a line such as task = "lm" or task = "path/to/file.py:Name" at the top'
        )
    if base is not None and spec in (None, spec_of(base.task)):
        return base
    assert spec is not None
    return default_settings(find_task(spec))


def _change(settings: Settings, tables: Mapping[str, Any]) -> Settings:
    """The settings with the values of a file."""
    task, parallel, train = settings
    paths = [path for tree in (task, parallel, {TRAIN: train}) for path, _ in walk(tree)]
    for key, value in tables.items():
        if key not in paths or "." in key:
            raise ValueError(_unknown(key, value, paths))

    def changed(config: Any) -> Any:
        names = [field.name for field in dataclasses.fields(config)]
        return _replace(config, {key: tables[key] for key in names if key in tables}, "", paths)

    values = _as_table(TRAIN, tables.get(TRAIN, {}))
    return Settings(changed(task), changed(parallel), _replace(train, values, f"{TRAIN}.", paths))


def _replace(config: Any, values: Mapping[str, Any], path: str, paths: list[str]) -> Any:
    """A dataclass with the values of a TOML table.

    Args:
      path: of the table, with a dot at its end.
      paths: all that there are.
    """
    hints = typing.get_type_hints(type(config))
    names = [field.name for field in dataclasses.fields(config)]
    changes = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(_unknown(f"{path}{key}", value, paths))
        now = getattr(config, key)
        if key == MESH and isinstance(value, str):
            changes[key] = MeshConfig.parse(value)
        elif dataclasses.is_dataclass(now):
            table = _as_table(f"{path}{key}", value)
            changes[key] = _replace(now, table, f"{path}{key}.", paths)
        elif type(value) is int and value.bit_length() < 64 and hints[key] in (float, float | None):
            changes[key] = float(value)
        else:
            changes[key] = _tuple(value)
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        begins = str(error).partition("=")[0]
        raise ValueError(f"{path if begins in names else ''}{error}") from error


def _as_table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}={value!r}: write a table [{name}]")
    return value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _unknown(name: str, value: Any, paths: list[str]) -> str:
    """What is said of a key, or of the first key in a table, that does not exist."""
    if isinstance(value, dict) and value:
        name = f"{name}.{next(iter(value))}"
    level = name.rpartition(".")[0]
    others = [path for path in paths if not name.startswith(f"{path}.")]
    near = difflib.get_close_matches(name, others, n=1)
    beside = [path for path in paths if path.rpartition(".")[0] == level] or paths
    remedy = f"did you mean {near[0]}?" if near else f"keys are {', '.join(beside)}"
    return f"there is no key {name}; {remedy}"


def _tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their keys as tables, without those that are None."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *names, last = key.split(".")
        table = functools.reduce(lambda table, name: table.setdefault(name, {}), names, tables)
        if value is not None:
            table[last] = value
    return tables
