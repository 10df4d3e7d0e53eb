"""The planner: estimates of a step's cost on a machine, and the best layout for it."""

from jaxpar.base.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
