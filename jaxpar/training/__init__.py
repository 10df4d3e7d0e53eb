"""A run, from its config to its result.

`fit` begins and ends it, `loop` takes its steps; `tasks` knows what is learned, a text or images. A run
lives in a `run_folder` with its `checkpoint`s; `report` is what it tells of itself, `console` shows that.
"""
