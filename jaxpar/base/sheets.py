"""Data sheets of machines, from machines.toml."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, TypeAlias

Device: TypeAlias = Any  # of JAX, or of a machine that is described

# Cards, and parts of one, that are slower than the one of the sheet with their name.
_LESS = {"pcie", "nvl", "mig"}


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins the devices along a mesh axis.

    Attributes:
      bytes_per_second: sent by a device, in one direction.
      seconds: the latency: from the start of an empty message to its arrival.
    """

    bytes_per_second: float
    seconds: float


def _read_sheets() -> dict[str, dict[str, Any]]:
    sheets = tomllib.loads(Path(__file__).with_name("machines.toml").read_text("utf-8"))
    for sheet in sheets.values():
        sheet |= {link: Link(**sheet[link]) for link in ("near", "far")}
    return sheets


SHEETS = _read_sheets()  # of a device of each machine, by its name


def sheet_of(device: Device) -> str:
    """The name of the sheet of a device, by its kind; else the first of its platform, or of all."""
    kind, of_platform = _kind_of(device), _of_platform(device)
    return next((name for name in of_platform if name in kind), [*of_platform, *SHEETS][0])


def peak_flops(device: Device, dtype: str) -> float | None:
    """FLOPs per second of a device at its best; None if no sheet is of its very kind, as of all CPUs.

    Args:
      dtype: of the inputs of matmuls; one that the sheet does not have counts as float32.
    """
    words = {*re.split(r"[\s-]+", _kind_of(device))}
    names = [] if device.platform == "cpu" else words.intersection(_of_platform(device))
    for name in () if words & _LESS else names:
        rates = SHEETS[name]["flops_per_second"]
        return rates.get(dtype, rates["float32"])
    return None


def _kind_of(device: Device) -> str:
    kind = device.device_kind.lower().replace(" lite", "e") + " "
    return kind.replace("v5 ", "v5p ")  # as JAX calls it


def _of_platform(device: Device) -> list[str]:
    return [name for name, each in SHEETS.items() if each["platform"] == device.platform]
