"""What a compiled program does, and what a step did: collectives, FLOPs, memory, spans of time.

Training imports nothing from it, from `planning` or from `pictures`.
"""

from jaxpar.analysis.collectives import Collective as Collective
from jaxpar.analysis.collectives import find_collectives as find_collectives
from jaxpar.analysis.measured import MeasuredStep as MeasuredStep
from jaxpar.analysis.measured import Span as Span
from jaxpar.analysis.measured import measure_step as measure_step
from jaxpar.analysis.program import Memory as Memory
from jaxpar.analysis.program import ProgramReport as ProgramReport
from jaxpar.analysis.program import inspect_compiled as inspect_compiled
from jaxpar.analysis.program import inspect_function as inspect_function
from jaxpar.analysis.program import inspect_step as inspect_step
