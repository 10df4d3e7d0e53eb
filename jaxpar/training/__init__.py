"""A run, from its settings to its result, for any task.

`fit` has the whole run, from top to bottom; `loop` has the parts of its loop over steps. A run is stored in a
`run_folder` with its `checkpoint`s. `callbacks` receive what happens; `progress` has the numbers.
"""
