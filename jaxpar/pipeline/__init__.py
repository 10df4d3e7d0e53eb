"""Layers on stages: which layer stands where, what runs when, and the engine that runs it.

`placement`, `schedule` and `orders` are plain Python and NumPy; `tables` makes arrays of a schedule. `split`
takes a layer apart into F, B and W, `kept` says what lies between them; `walk` goes through the layers of a
`stage`, `loop` over ticks. `engine` puts it together, and can be used alone: `Pipeline` takes functions, a
mesh and arrays.
"""

from jaxpar.pipeline.engine import Pipeline as Pipeline
from jaxpar.pipeline.orders import make_schedule as make_schedule
from jaxpar.pipeline.placement import balance as balance
from jaxpar.pipeline.placement import make_slots as make_slots
from jaxpar.pipeline.schedule import Schedule as Schedule
from jaxpar.pipeline.spec import PipelineParams as PipelineParams
from jaxpar.pipeline.tables import make_table as make_table
