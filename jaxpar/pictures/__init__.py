"""Pictures, in notebooks, terminals and files: meshes, shards, parameters, schedules, reports, costs, runs.

`display.show` finds the picture of an object by its type, and imports the module that draws it; figures are
made by `plot`.
"""
