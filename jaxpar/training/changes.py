"""The settings that change the numbers of a run, and how those of two starts differ.

A resumed run compares itself with the start before it. Settings are of three sorts:

    of the update    optimizer.*, train.clip_norm             no batch depends on them
    free             the seed, fields that the task frees     batches may change with them
    checked          all other fields of the task             batches must stay as they were
"""

import dataclasses
import json
from collections.abc import Iterable

from jaxpar.base.checks import leaves_of
from jaxpar.base.types import Json
from jaxpar.step.setup import Setup

_FREE = "free"  # in the metadata of a task's field
_CLIP_NORM, _SEED = "train.clip_norm", "train.seed"


def describe_settings(setup: Setup) -> Json:
    """The task's fields, the limit of the gradient norm and the seed: by their keys, as JSON has them."""
    settings = leaves_of(setup.task)
    settings |= {_CLIP_NORM: setup.settings.clip_norm, _SEED: setup.train.seed}
    return json.loads(json.dumps(settings, default=repr))


def free_keys(setup: Setup) -> list[str]:
    """The keys of the settings that are free."""
    free_fields = set[str]()
    for field in dataclasses.fields(setup.task):
        if field.metadata.get(_FREE):
            free_fields.add(field.name)
    keys = [_SEED]
    for key in describe_settings(setup):
        if _field_of(key) in free_fields and not _is_of_update(key):
            keys.append(key)
    return keys


def checked_keys(keys: Iterable[str], free: Iterable[str]) -> list[str]:
    """Those of some keys whose settings are checked; `free` is as of `free_keys`."""
    return [key for key in keys if key not in free and not _is_of_update(key)]


def changed_keys(before: Json, now: Json) -> list[str]:
    """The keys of settings that both sides know, and that differ."""
    return [key for key, value in now.items() if key in before and before[key] != value]


def in_words(keys: Iterable[str], before: Json, now: Json) -> str:
    """What the settings of these keys were and are."""
    return "; ".join(f"{key} was {before[key]}, is {now[key]}" for key in keys)


def _is_of_update(key: str) -> bool:
    return _field_of(key) == "optimizer" or key == _CLIP_NORM


def _field_of(key: str) -> str:
    return key.partition(".")[0]
