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
from jaxpar.analysis.strategy import Advice, SplitCost, inspect_split, strategy_for

__all__ = [
    "Advice",
    "Collective",
    "Memory",
    "ProgramReport",
    "SplitCost",
    "Total",
    "find_collectives",
    "inspect_compiled",
    "inspect_function",
    "inspect_split",
    "inspect_step",
    "strategy_for",
]
