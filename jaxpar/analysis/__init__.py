"""What a compiled program does, and what a step did: collectives, FLOPs, memory, spans of time.

Training imports nothing from it, from `planning` or from `pictures`.
"""

from jaxpar.analysis.collectives import Collective, find_collectives
from jaxpar.analysis.measured import MeasuredStep, Span, measure_step
from jaxpar.analysis.program import (
    Memory,
    ProgramReport,
    inspect_compiled,
    inspect_function,
    inspect_step,
)
from jaxpar.analysis.strategy import strategy_for

__all__ = [
    "Collective",
    "MeasuredStep",
    "Memory",
    "ProgramReport",
    "Span",
    "find_collectives",
    "inspect_compiled",
    "inspect_function",
    "inspect_step",
    "measure_step",
    "strategy_for",
]
