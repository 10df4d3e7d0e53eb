"""Pipelines: the layers of each stage, the schedule, and the engine that runs it.

`placement` and `schedules` say where layers lie and when each unit runs, in `lanes`: plain Python and NumPy;
`tables` makes of a schedule what a compiled program looks up. `split` takes a layer apart into F, B and W,
`kept` says what lies between them, in `buffers`; `walk` goes through the layers of a `stage`, `loop` over
ticks. `engine` puts it together, and can be used alone: `Pipeline` takes functions (`spec`), a mesh and
arrays.
"""

from jaxpar.pipeline.engine import Pipeline as Pipeline
from jaxpar.pipeline.lanes import Schedule as Schedule
from jaxpar.pipeline.placement import balance as balance
from jaxpar.pipeline.placement import make_slots as make_slots
from jaxpar.pipeline.schedules import make_schedule as make_schedule
from jaxpar.pipeline.spec import PipelineParams as PipelineParams
from jaxpar.pipeline.tables import make_table as make_table
