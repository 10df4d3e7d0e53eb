"""Pictures, in notebooks, terminals and files: meshes, shards, parameters, schedules, measured steps, runs.

`display.show` finds the picture of an object by its type; figures and the animation are made by `plot`.
"""

from jaxpar.pictures.grid import Grid
from jaxpar.pictures.params import Params
from jaxpar.pictures.picture import Picture
from jaxpar.pictures.timeline import Timeline

__all__ = ["Grid", "Params", "Picture", "Timeline"]
