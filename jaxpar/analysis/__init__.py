"""What a program will cost, what a compiled one does, and pictures. Training does not import it."""

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
from jaxpar.analysis.grid import Grid
from jaxpar.analysis.hardware import MACHINES, Hardware, Link, Sample, Work
from jaxpar.analysis.measured import MeasuredStep, Span, measure_step
from jaxpar.analysis.params import Params
from jaxpar.analysis.picture import Picture
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
from jaxpar.analysis.timeline import Timeline
from jaxpar.analysis.traffic import Traffic

__all__ = [
    "Advice",
    "Collective",
    "Comparison",
    "Cost",
    "Grid",
    "HERE",
    "Hardware",
    "Link",
    "MACHINES",
    "MeasuredStep",
    "Memory",
    "MemoryCost",
    "Params",
    "Picture",
    "ProgramReport",
    "Ranking",
    "Sample",
    "Seconds",
    "Span",
    "SplitCost",
    "Timeline",
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
    "measure_step",
    "pieces_of",
    "place",
    "plan",
    "plan_here",
    "predict_step",
    "strategy_for",
]
