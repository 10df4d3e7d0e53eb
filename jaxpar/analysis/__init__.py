"""What a compiled program does, read from it, and pictures. Nothing that trains imports this package."""

from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.analysis.grid import Grid
from jaxpar.analysis.measured import MeasuredStep, Span, measure_step
from jaxpar.analysis.params import Params
from jaxpar.analysis.picture import Picture
from jaxpar.analysis.program import (
    Memory,
    ProgramReport,
    Total,
    inspect_compiled,
    inspect_function,
    inspect_step,
)
from jaxpar.analysis.strategy import Advice, SplitCost, inspect_split, strategy_for
from jaxpar.analysis.timeline import Timeline

__all__ = [
    "Advice",
    "Collective",
    "Grid",
    "MeasuredStep",
    "Memory",
    "Params",
    "Picture",
    "ProgramReport",
    "Span",
    "SplitCost",
    "Timeline",
    "Total",
    "find_collectives",
    "inspect_compiled",
    "inspect_function",
    "inspect_split",
    "inspect_step",
    "measure_step",
    "strategy_for",
]
