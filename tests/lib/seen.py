"""What a figure of matplotlib has, and what programs that are no browsers see in a file of it."""

import io
import itertools
import re
from pathlib import Path

import matplotlib
import matplotlib.image
import pypdfium2
import resvg_py
from matplotlib.colors import to_hex


def boxes(figure):
    """All that is drawn as (left, top, width, height, color), rows first; without bands that darken."""
    for bars in figure.axes[0].collections:
        for path, color in zip(bars.get_paths(), itertools.cycle(bars.get_facecolor())):
            if color[3] == 1:
                (left, top), (right, bottom) = path.get_extents().get_points()
                yield left, top, right - left, bottom - top, to_hex(color)


def labels(figure):
    """What is written on blocks."""
    texts = (text.get_text() for text in figure.axes[0].texts)
    return [text for text in texts if re.fullmatch(r"[FBWH][\d./]*", text)]


def opened(path):
    """Pixels [height, width, 3] from 0 to 1, and words; a .png has none that can be read."""
    if path.suffix == ".png":
        return matplotlib.image.imread(path)[..., :3], None
    if path.suffix == ".pdf":
        with pypdfium2.PdfDocument(path) as document:
            [page] = document
            pixels = page.render(scale=2).to_numpy()[..., 2::-1]
            return pixels / 255, page.get_textpage().get_text_range()
    fonts = Path(matplotlib.get_data_path()) / "fonts/ttf"
    png = resvg_py.svg_to_bytes(svg_path=str(path), dpi=96, font_dirs=[str(fonts)])
    pixels = matplotlib.image.imread(io.BytesIO(bytes(png)))
    assert pixels[1:-1, 1:-1, 3].min() == 1  # on white, not on nothing
    return pixels[..., :3], " ".join(re.sub("<[^>]*>", " ", path.read_text()).split())
