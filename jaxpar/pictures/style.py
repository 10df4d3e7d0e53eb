"""Colours, the style sheet, and a page of HTML that needs no other."""

import html

# Okabe and Ito's, which all kinds of colour vision tell apart (https://jfly.uni-koeln.de/color/). Blue and
# orange first, which differ most in brightness. Theirs has black as its eighth, which is lost on a dark page.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#56B4E9", "#661100",
)  # fmt: skip

# A notebook's theme need not be the system's: a picture brings its background along.
STYLE = """\
.jaxpar{--fg:#1b1f24;--bg:#fff;--dim:#59636e;--line:#d1d9e0;--idle:#e4e8ec;--axis:#0a5ca8;--warn:#9a4b00;
color-scheme:light dark;color:var(--fg);background:var(--bg);font:13px/1.45 system-ui,sans-serif;
padding:10px 12px;border-radius:6px;overflow-x:auto}
@media(prefers-color-scheme:dark){.jaxpar{--fg:#e6edf3;--bg:#12161c;--dim:#9aa5b1;--line:#3a424c;--idle:#262c34;
--axis:#79c0ff;--warn:#ffb35c}}
.jaxpar table{border-collapse:collapse;margin:4px 0;color:inherit;font-size:13px}
.jaxpar th,.jaxpar td{padding:3px 10px;text-align:left;vertical-align:top;background:none}
.jaxpar th{white-space:nowrap;color:var(--dim);font-weight:600;border-bottom:1px solid var(--line)}
.jaxpar td{font-variant-numeric:tabular-nums}
.jaxpar .right{text-align:right}
.jaxpar p{margin:4px 0;color:var(--dim)}
.jaxpar p b{color:var(--fg)}
.jaxpar .axis{color:var(--axis);font-weight:600}
.jaxpar .warn{color:var(--warn);font-weight:600}
.jaxpar .grid th,.jaxpar .grid td{border:1px solid var(--line);text-align:center;vertical-align:middle}
.jaxpar .device{padding:2px 2px;border-radius:4px;font-weight:600;white-space:pre}
.jaxpar svg{display:block;height:auto}
.jaxpar svg text{font:11px system-ui,sans-serif;fill:var(--fg)}
.jaxpar svg .dim{fill:var(--dim)}"""

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
