"""A run in a notebook: all that it prints is one display, which is shown anew as it grows."""

import html
import io
import time
from typing import Any

from rich.console import Console

from jaxpar.base.console import WIDTH
from jaxpar.base.display import show
from jaxpar.training.history import Curves

_PAGE = (
    '<pre style="white-space:pre;overflow-x:auto;font-size:13px;line-height:1.3;margin:0;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{}</pre>"
)
_REFRESH_SECONDS = 0.1  # a browser is sent no more, however quick the steps are


class NotebookConsole(Console):
    """A console that prints into one display, under which a line and curves may stand that change.

    rich by itself makes a display of every line, and needs ipywidgets for one that changes.

    Attributes:
      curves: shown from their second point on, as they are when anything is printed.
    """

    def __init__(self):
        super().__init__(
            width=WIDTH, file=io.StringIO(), record=True, force_jupyter=False, force_terminal=False
        )
        self.curves = Curves(0)
        self._display, self._shown_at = None, float("-inf")

    def print(self, *objects: Any, **options: Any) -> None:
        """Adds to the display; lines are cut at `WIDTH`, as no page shows where one goes on."""
        options["soft_wrap"] = False
        super().print(*objects, **options)
        self._show("")

    def show_below(self, line: str) -> None:
        """Shows a line below what was printed, until the next one or the next print."""
        if time.monotonic() > self._shown_at + _REFRESH_SECONDS:
            self._show(f"{line}\n")

    def _show(self, below: str) -> None:
        # A package of notebooks, where alone this console is used.
        from IPython.display import display

        printed = self.export_html(clear=False, inline_styles=True, code_format="{code}")
        page = _PAGE.format(printed + html.escape(below))
        if len(self.curves.points["train"]) > 1:
            page += show(self.curves).to_html()
        bundle = {"text/plain": self.export_text(clear=False) + below, "text/html": page}
        if self._display is None:
            self._display = display(bundle, raw=True, display_id=True)
        else:
            self._display.update(bundle, raw=True)
        self._shown_at = time.monotonic()
