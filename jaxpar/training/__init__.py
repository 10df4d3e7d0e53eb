"""A run, from its settings to its result, for any task.

`fit` begins and ends it, `loop` takes its steps. A run lives in a `run_folder` with its `checkpoint`s;
`report` is what it tells of itself, `console` shows that.
"""
