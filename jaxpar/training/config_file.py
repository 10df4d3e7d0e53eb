"""Settings as TOML files: `--config` reads them, and a run writes one into its folder.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpar.base.bucket import as_path
from jaxpar.base.checks import leaves_of
from jaxpar.base.files import read_text
from jaxpar.config import Parallel
from jaxpar.mesh import short_name
from jaxpar.model.task import Settings, Task, find_task, spec_of

TASK, SIMULATE, TRAIN, MESH = "task", "simulate", "train", "mesh"
PARALLEL = tuple(field.name for field in dataclasses.fields(Parallel))
RESERVED = (TASK, SIMULATE, TRAIN, *PARALLEL)  # names that no field of a task may have

Tables = dict[str, Any]  # of a TOML file


def read_config(path: str | os.PathLike[str], base: Settings | None = None) -> Settings:
    """The settings of a TOML file; those that the file leaves out are as in `base`.

    If the file names another task than `base` has, they are the defaults of that task.

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
    except ValueError as error:
        error.args = (f"{path}: {error}",)
        raise


def read_simulated(path: str | os.PathLike[str]) -> int | None:
    """The number of simulated devices in a config file; None if it has none.

    Raises:
      OSError, ValueError: as of `read_config`.
    """
    return _take_simulated(read_toml(as_path(path)))


def read_toml(path: Path) -> Tables:
    """The tables of a config file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not TOML in UTF-8.
    """
    import tomllib

    text = read_text(path, "the config")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}\nFix: correct it.") from error


def option_words(settings: Settings, before: Settings) -> list[str]:
    """The options of a command line that change the settings `before` to these, except for the mesh.

    Fields of the task that are None before, such as the size of a vocabulary, are left to the data.
    """
    words, known = [], keys_of(before)
    of_task = {field.name for field in dataclasses.fields(before.task)}
    for key, value in keys_of(settings).items():
        is_left_to_data = key in of_task and known[key] is None
        if value == known[key] or is_left_to_data or key.startswith("mesh."):
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
      simulate: number of simulated devices, for `read_simulated`.
    Raises:
      ValueError: a value would be read back as another one.
    """
    import tomllib

    import tomli_w

    task, parallel, train = settings
    own = tuple((axis, size) for axis, size in parallel.mesh.axes if size != 1)
    mesh = dataclasses.replace(parallel.mesh, axes=own)
    settings = Settings(task, dataclasses.replace(parallel, mesh=mesh), train)
    tables = _tables(keys_of(settings))
    if mesh.devices is None:
        tables[MESH] = short_name(mesh)
    head = {TASK: spec_of(task)} | ({} if simulate is None else {SIMULATE: simulate})
    try:
        text = tomli_w.dumps(head | tables)
    except TypeError as error:
        raise ValueError(
            f"task {head[TASK]} cannot be written as TOML: {error}\nFix: use numbers and strings."
        ) from error
    again = keys_of(_change(default_settings(type(task)), tomllib.loads(tomli_w.dumps(tables))))
    for key, value in keys_of(settings).items():
        if key not in again or value != again[key]:
            raise ValueError(
                f"{key}={value!r} would be read back from TOML, which has no null, as {again.get(key)!r}\n"
                f"Fix: use another value, or another default."
            )
    return text


def keys_of(settings: Settings) -> Tables:
    """Every value of the settings by its key, such as `optimizer.learning_rate`."""
    task, parallel, train = settings
    return leaves_of(task) | leaves_of(parallel) | leaves_of({TRAIN: train})


def default_settings(task: type[Task]) -> Settings:
    """The default settings of a task.

    Raises:
      ValueError: one of its fields has no default, or the name of a setting that every task has.
    """
    for field in dataclasses.fields(task):
        named = f"field {field.name!r} of {task.__name__}"
        if field.name in RESERVED:
            raise ValueError(
                f"{named} has the name of a setting that every task has\nFix: give it another name."
            )
        if field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{named} has no default\nFix: give it one.")
    return Settings(task(), task.parallel, task.train)


def _take_simulated(tables: Tables) -> int | None:
    """The number of simulated devices, which is removed from the tables."""
    number = tables.pop(SIMULATE, None)
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"{SIMULATE}={number!r} is not a number of devices\nFix: use 1 or more.")
    return number


def _base(tables: Tables, base: Settings | None) -> Settings:
    """The settings that a file changes; the name of the task is removed from the tables."""
    spec = tables.pop(TASK, None)
    if base is not None and spec in (None, spec_of(base.task)):
        return base
    if not isinstance(spec, str):
        raise ValueError(
            f'{TASK}={spec!r}: must name a task\nFix: add task = "lm" or task = "path/to/file.py:Name".'
        )
    return default_settings(find_task(spec))


def _change(settings: Settings, tables: Tables) -> Settings:
    """The settings with the values of a file."""
    task, parallel, train = settings
    known = [*keys_of(settings)]
    shared = {key: tables[key] for key in PARALLEL if key in tables}
    own = {key: tables[key] for key in tables if key not in (*PARALLEL, TRAIN)}
    return Settings(
        _replace(task, own, "", known),
        _replace(parallel, shared, "", known),
        _replace(train, tables.get(TRAIN, {}), f"{TRAIN}.", known),
    )


def _replace(config: Any, values: object, path: str, known: Sequence[str]) -> Any:
    """A dataclass with the values of a TOML table.

    Args:
      path: path of the table, with a dot at its end.
      known: all keys of the settings.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path[:-1]}={values!r} is not a table\nFix: write [{path[:-1]}].")
    names = [field.name for field in dataclasses.fields(config)]
    changes = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(_unknown(f"{path}{key}", value, known))
        now = getattr(config, key)
        if dataclasses.is_dataclass(now) and not (key == MESH and isinstance(value, str)):
            changes[key] = _replace(now, value, f"{path}{key}.", known)
        elif isinstance(now, float) and type(value) is int and value.bit_length() < 64:
            changes[key] = float(value)
        else:
            changes[key] = _tuple(value)
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        begins = str(error).partition("=")[0]
        raise ValueError(f"{path if begins in names else ''}{error}") from error


def _tuple(value: object) -> object:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _unknown(name: str, value: object, known: Sequence[str]) -> str:
    """The message for a key, or for the first key in a table, that does not exist."""
    if isinstance(value, dict) and value:
        name = f"{name}.{next(iter(value))}"
    table = name.rpartition(".")[0]
    others = [key for key in known if key.rpartition(".")[0] == table] or known
    near = difflib.get_close_matches(name, known, n=1) or [f"one of {', '.join(others)}"]
    return f"no key {name}\nFix: use {near[0]}."


def _tables(values: Tables) -> Tables:
    """Values by their keys as tables, without those that are None."""
    tables: Tables = {}
    for key, value in values.items():
        *names, last = key.split(".")
        table = functools.reduce(lambda table, name: table.setdefault(name, {}), names, tables)
        if value is not None:
            table[last] = value
    return tables
