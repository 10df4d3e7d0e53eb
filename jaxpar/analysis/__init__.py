"""What a compiled program does, read from it. Nothing that trains imports this package."""

from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.analysis.program import (
    Memory,
    ProgramReport,
    Total,
    inspect_compiled,
    inspect_function,
    inspect_step,
)

__all__ = [
    "Collective",
    "Memory",
    "ProgramReport",
    "Total",
    "find_collectives",
    "inspect_compiled",
    "inspect_function",
    "inspect_step",
]
