"""What a program will cost, and what a compiled one does. Nothing that trains imports this package."""

from jaxpar.analysis.calibration import HERE, calibrate, find_machine, measure_pieces
from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.analysis.cost import (
    Comparison,
    Cost,
    MemoryCost,
    Seconds,
    compare,
    compare_here,
    pieces_of,
    predict_step,
)
from jaxpar.analysis.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.analysis.planner import Ranking, check_fits, place, plan, plan_here
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
    "HERE",
    "Hardware",
    "Link",
    "MACHINES",
    "Memory",
    "MemoryCost",
    "ProgramReport",
    "Ranking",
    "Sample",
    "Seconds",
    "SplitCost",
    "Total",
    "Traffic",
    "Work",
    "calibrate",
    "check_fits",
    "compare",
    "compare_here",
    "find_collectives",
    "find_machine",
    "inspect_compiled",
    "inspect_function",
    "inspect_split",
    "inspect_step",
    "measure_pieces",
    "pieces_of",
    "place",
    "plan",
    "plan_here",
    "predict_step",
    "strategy_for",
]
