"""What a program will cost, and what a compiled one does. Nothing that trains imports this package."""

from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.analysis.cost import Comparison, Cost, MemoryCost, Seconds, compare, predict_step
from jaxpar.analysis.hardware import MACHINES, Hardware, Link, calibrate, find_machine
from jaxpar.analysis.program import (
    Memory,
    ProgramReport,
    Total,
    inspect_compiled,
    inspect_function,
    inspect_step,
)
from jaxpar.analysis.strategy import Advice, SplitCost, inspect_split, strategy_for
from jaxpar.analysis.traffic import Traffic

__all__ = [
    "Advice",
    "Collective",
    "Comparison",
    "Cost",
    "Hardware",
    "Link",
    "MACHINES",
    "Memory",
    "MemoryCost",
    "ProgramReport",
    "Seconds",
    "SplitCost",
    "Total",
    "Traffic",
    "calibrate",
    "compare",
    "find_collectives",
    "find_machine",
    "inspect_compiled",
    "inspect_function",
    "inspect_split",
    "inspect_step",
    "predict_step",
    "strategy_for",
]
