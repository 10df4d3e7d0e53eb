"""What is made once for each class, and leaves the memory with it."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def once_per_class(
    make: Callable[Concatenate[type, Arguments], Made],
) -> Callable[Concatenate[type, Arguments], Made]:
    """A decorator of a function of a class, which keeps what it returns in the class itself.

    With `functools.cache`, a class that is made in a function, such as in a cell of a notebook, would never
    leave the memory, nor would the data that its methods read.

    Args:
      make: returns the same for equal arguments; those after the class are hashable.
    """
    attribute = f"_jaxpar_{make.__name__}"

    @functools.wraps(make)
    def made(of: type, *args: Any, **options: Any) -> Made:
        known = vars(of).get(attribute)
        if known is None:
            known = {}
            setattr(of, attribute, known)
        key = args, tuple(options.items())
        if key not in known:
            known[key] = make(of, *args, **options)
        return known[key]

    return made
