"""Pages in a browser."""

import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


# Writes to the console which text of an SVG is cut, or overlaps another of its picture.
LOOK = """<script>addEventListener("load", () => {
  for (const svg of document.querySelectorAll("svg:not(svg svg)")) {
    const inside = svg.getBoundingClientRect(), seen = [];
    for (const text of svg.querySelectorAll("text")) {
      const a = text.getBoundingClientRect(), say = what => console.error(text.textContent + what);
      if (!a.width) continue;
      if (a.left < inside.left - 1 || a.right > inside.right + 1 || a.top < inside.top - 1 ||
          a.bottom > inside.bottom + 1) say(" is cut");
      for (const [b, other] of seen)
        if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
          say(" overlaps " + other);
      seen.push([a, text.textContent]);
    }
  }
})</script>"""


def rgb(color):
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def browse(path, tmp_path, *flags):
    """A picture of the page, what its console says, and the addresses that it asks for."""
    shot, log, page = (tmp_path / name for name in ("page.png", "net.json", "looked-at.html"))
    page.write_text(path.read_text() + LOOK)
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--no-first-run", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr", f"--log-net-log={log}", f"--user-data-dir={tmp_path / 'user'}",
            "--window-size=1100,1600", "--virtual-time-budget=2000", f"--screenshot={shot}",
            *flags, page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert shot.exists(), done.stderr
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).astype(np.uint8)
    console = re.findall(r"CONSOLE.*", done.stderr)
    # The browser asks its maker for updates on its own; what a file asks for has the origin "null".
    asked = re.findall(r'"initiator":"null".*?"url":"([^"]+)"', log.read_text())
    return pixels, console, set(asked)
