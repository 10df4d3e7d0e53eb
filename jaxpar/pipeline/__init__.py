"""Layers on stages: which layer stands where, what runs when, and the engine that runs it.

`schedule` and `placement` are plain Python and NumPy; `ticks` makes arrays of a schedule, `layers` takes
layers apart into forward and backward, `engine` runs both in one loop. It can be used alone: `Pipeline`
takes functions, a mesh and arrays.
"""

from jaxpar.pipeline.engine import Pipeline as Pipeline
from jaxpar.pipeline.engine import PipelineParams as PipelineParams
from jaxpar.pipeline.placement import balance as balance
from jaxpar.pipeline.placement import make_slots as make_slots
from jaxpar.pipeline.schedule import Schedule as Schedule
from jaxpar.pipeline.schedule import make_schedule as make_schedule
from jaxpar.pipeline.ticks import make_plan as make_plan
