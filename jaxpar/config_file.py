"""Configs as TOML files: what `--config` reads, and what a run leaves in its folder.

mesh = "dp2pp2tp2"      # or a table [mesh] with data, stage, tensor, devices

[model]                 # or model = "hybrid", for a model as it is by default
name = "lstm"
num_layers = 8
"""

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.config import CONFIGS, RunConfig
from jaxpar.files import whole_file
from jaxpar.mesh import MeshConfig


def read_config(path: str | os.PathLike[str], base: RunConfig | None = None) -> RunConfig:
    """The config of a TOML file; what the file leaves out is as in `base`.

    If the file names another model than `base` has, the rest is as that model's runs have it by default.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no TOML, a key does not exist (the message gives its full path and the
        nearest name), or a value has the wrong type or is out of range.
    """
    path = Path(path).expanduser()
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise type(error)(
            f"cannot read the config {path}: {error.strerror}; give a readable TOML file"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no TOML in UTF-8: {error}") from error
    try:
        base = base or CONFIGS["lstm"]
        model = tables.get("model", {})
        if isinstance(model, str):  # the short form
            tables["model"] = model = {"name": model}
        name = model.get("name", base.model.name) if isinstance(model, dict) else None
        if isinstance(name, str) and name != base.model.name:
            if name not in CONFIGS:
                raise ValueError(f"model.name={name!r}: use {' or '.join(map(repr, CONFIGS))}")
            base = CONFIGS[name]
        return _replace(base, tables, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Writes every value that is not None as TOML; the file appears whole or not at all."""
    lines = []
    for section in dataclasses.fields(config):
        lines += ["", f"[{section.name}]"]
        part = getattr(config, section.name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            # TOML has no null: None must be what `read_config` takes for a key that is missing.
            assert value is not None or field.default is None, field.name
            if value is not None:
                lines.append(f"{field.name} = {_toml(value)}")
    with whole_file(path) as file:
        file.write_bytes("\n".join([*lines[1:], ""]).encode())


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's strings, numbers and booleans are TOML's, but for the delete character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(config: Any, values: Mapping[str, Any], path: str) -> Any:
    """`config`, a dataclass, with the values of a TOML table."""
    hints = typing.get_type_hints(type(config))
    changes = {}
    for key, value in values.items():
        name = f"{path}{key}"
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.4)
            remedy = f"did you mean {path}{near[0]}?" if near else f"keys are {', '.join(hints)}"
            raise ValueError(f"there is no key {name}; {remedy}")
        wanted = hints[key]
        if wanted is MeshConfig and isinstance(value, str):
            changes[key] = MeshConfig.parse(value)
        elif dataclasses.is_dataclass(wanted):
            if not isinstance(value, dict):
                raise ValueError(f"{name}={value!r}: write a table [{name}]")
            changes[key] = _replace(getattr(config, key), value, f"{name}.")
        else:
            is_number = wanted is float and isinstance(value, int) and not isinstance(value, bool)
            changes[key] = float(value) if is_number else value
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"{path}{error}") from error
