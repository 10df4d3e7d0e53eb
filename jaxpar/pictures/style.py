"""Colors, the style sheet, and a self-contained HTML page."""

import html
from pathlib import Path

# Okabe and Ito's, which all kinds of colour vision tell apart (https://jfly.uni-koeln.de/color/). Blue and
# orange first, which differ most in brightness. Theirs has black as its eighth, which is lost on a dark page.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#56B4E9", "#661100",
)  # fmt: skip

# A picture brings its background along. In HTML it also heeds the theme of a notebook, which need not be the
# system's, and whose own style of tables it undoes.
STYLE = Path(__file__).with_name("style.css").read_text("utf-8").strip()
HTML_STYLE = f"{STYLE}\n{Path(__file__).with_name('notebook.css').read_text('utf-8').strip()}"

HEAD = "dim"  # style of a column whose cells are headers of their rows


def make_page(title: str, body: str) -> str:
    """A file of HTML in which nothing is fetched from elsewhere."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,"><style>:root{color-scheme:light dark}'
        "body{margin:16px;background:#fff}@media(prefers-color-scheme:dark){body{background:#12161c}}"
        f"</style></head>\n<body>{body}</body></html>\n"
    )


def color_of(number: int, paleness: float = 0.0) -> str:
    """The colour of a device or microbatch, as #rrggbb; `paleness` 1 is white, -1 black."""
    solid = PALETTE[number % len(PALETTE)]
    target, amount = (255 if paleness > 0 else 0), abs(paleness)
    channels = (int(solid[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (target - c) * amount):02x}" for c in channels)


def text_color_on(color: str) -> str:
    """Black or white, whichever differs more from a background (WCAG 2.2, relative luminance)."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # Where both contrasts, 1.05 / (L + 0.05) and (L + 0.05) / 0.05, are equal.
    return "#000000" if luminance > 0.179 else "#ffffff"


def style_on(color: str) -> str:
    """What rich calls text that can be read on a background."""
    return f"{text_color_on(color)} on {color}"
