"""Layers on stages: which layer stands where, what runs when, and the engine that runs it.

`schedule` and `placement` are plain Python and NumPy; `ticks` makes arrays of a schedule, `engine` runs them
in one loop. `gpipe` is a pipeline without all that: one to read first, and differentiated by autodiff.
"""
