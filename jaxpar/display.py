"""Things that show themselves as pictures, in Jupyter and in rich's consoles. `analysis` draws them."""

import functools
from typing import Any


@functools.singledispatch
def show(thing: Any) -> Any:
    """A picture of a mesh, a sharded array, parameters, a schedule or a report on a program.

    A notebook shows it as HTML, `rich.print` in colour, `print` as text; `to_page()` is a file of HTML.

    Args:
      thing: a `MeshConfig` or `Mesh`; an array, also an abstract one, or a Flax variable; a `TrainState`, an
        `nnx.State`, an `nnx.Module`; a `Schedule`; a `ProgramReport`; a `MeasuredStep`.
    Raises:
      ValueError: there is no picture of such a thing.
    """
    raise ValueError(
        f"there is no picture of a {type(thing).__name__}; give a mesh, an array, a state or module of Flax, "
        f"a TrainState, a Schedule, a ProgramReport or a MeasuredStep"
    )


class Shown:
    """A class whose objects a notebook and `rich.print` show as their picture."""

    def _repr_html_(self) -> str:
        return show(self)._repr_html_()

    def _repr_svg_(self) -> str | None:
        return show(self)._repr_svg_()

    def __rich__(self) -> Any:
        return show(self)
