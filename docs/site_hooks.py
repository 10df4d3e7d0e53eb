"""Hooks of mkdocs: pages of the site that do not lie in docs/, and the links between them.

The README is the site's first page, those of examples, recipes and benchmarks are pages too, as are notebooks
with their outputs, and the reference has a page for every public module. Links to files that are no pages,
such as source, become their paths. Addresses are those of `[project.urls]` in pyproject.toml.
"""

import ast
import itertools
import json
import posixpath
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import griffe
from mkdocs.structure.files import File

from jaxpar.pipeline import make_schedule
from jaxpar.pipeline.lanes import Lane
from jaxpar.pipeline.placement import STAYS

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "recipes/README.md": "literature.md",
}
PAGES |= {
    f"benchmarks/{path.parent.name}/README.md": f"benchmarks/{path.parent.name}.md"
    for path in sorted(ROOT.glob("benchmarks/*/README.md"))
}
NOTEBOOKS = {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md"
    for path in sorted(ROOT.glob("notebooks/*.ipynb"))
}
PICTURES = {str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/*/*.svg")}
PAGES |= NOTEBOOKS | {path: path for path in PICTURES}
MODULES = {"jaxpar": "jaxpar/__init__.py", "lm": "jaxpar/tasks/lm/__init__.py"}
MODULES |= {
    name: f"jaxpar/{name}/__init__.py" for name in ("nn", "pipeline", "planning", "analysis")
}
# What the explorer of schedules offers (docs/explorer.js); no more units, M x K, than that.
SIZES = {
    "stages": [2, 3, 4, 5, 6, 8],
    "microbatches": [1, 2, 3, 4, 6, 8, 12, 16],
    "chunks": [1, 2, 3, 4, 8],
}
KINDS = {
    "gpipe": {"groups": 1, "zb": False},
    "1f1b": {"groups": 1, "zb": True},
    "interleaved": {"groups": 2, "zb": True},
    "v": {"groups": 2, "zb": True},
}
MOST_UNITS = 32
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
_ROW = re.compile(r"^  (\w+(?:, \w+)+)(:.*(?:\n    .*)*)", re.MULTILINE)
_BACK = re.compile(r"\[Back to the README\]\([^)]*\)\. ?")


class Rows(griffe.Extension):
    """Arguments, and attributes, that a docstring tells of in one line have a row each, with their types."""

    def on_object(self, *, obj, **kwargs):
        """Repeats what is said of several names for each of them."""
        if obj.docstring is not None:
            obj.docstring.value = _ROW.sub(
                lambda row: "\n".join(f"  {name}{row[2]}" for name in row[1].split(", ")),
                obj.docstring.value,
            )


def on_config(config):
    """The addresses of the site and of its source, if there are any, and the notebooks, in their order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    urls = project.get("urls", {})
    if "Repository" in urls:
        config.repo_url = urls["Repository"]
        config.repo_name = urlsplit(urls["Repository"]).path.strip("/")
    if "Documentation" in urls:
        config.site_url = urls["Documentation"].rstrip("/") + "/"
    next(part for part in config.nav if "Notebooks" in part)["Notebooks"] = [*NOTEBOOKS.values()]
    return config


def on_files(files, config):
    """Adds the pages that lie elsewhere, and those of the reference."""
    for source, page in PAGES.items():
        if source in PICTURES:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
            continue
        content = (ROOT / source).read_text("utf-8")
        if source in NOTEBOOKS:
            content = "\n\n".join(_cells(json.loads(content)))
        files.append(File.generated(config, page, content=content))
    for name, path in MODULES.items():
        files.append(
            File.generated(config, f"api/{name}.md", content=_reference(name, ROOT / path))
        )
    content = json.dumps(schedules(), separators=(",", ":"))
    files.append(File.generated(config, "schedules.js", content=f"window.SCHEDULES={content}\n"))
    return files


def schedules():
    """The tables of the explorer of schedules, as docs/explorer.js reads them."""
    table = {}
    for kind, *sizes in itertools.product(KINDS, *SIZES.values()):
        groups, splits = KINDS[kind].values()
        for zero_bubble in (False, True)[: 1 + splits]:
            if sizes[1] * sizes[2] > MOST_UNITS:
                continue
            found = make_schedule(kind, *sizes, groups, zero_bubble=zero_bubble)
            lanes = [work.letter + _rows(work.lane, groups) for work in found.lanes]
            numbers = [round(found.bubble, 6), found.live_units, _num_sent(found)]
            key = " ".join(map(str, (kind, *sizes))) + " zb" * zero_bubble
            table[key] = numbers + lanes
    return {"sizes": SIZES, "kinds": KINDS, "table": table}


def _rows(lane: Lane, groups: int) -> str:
    """A lane as text: a row for each stage, a letter for each unit, and its group if there are several."""
    rows = []
    for units, own in zip(lane.unit.T.tolist(), lane.group.T.tolist(), strict=True):
        cells = (
            "." if unit < 0 else _LETTERS[unit] + str(group) * (groups > 1)
            for unit, group in zip(units, own, strict=True)
        )
        rows.append("".join(cells).rstrip("."))
    return "|".join(rows)


def _num_sent(schedule):
    """How many activations and cotangents go from one stage to another in a step."""
    lanes = (schedule.forward, schedule.backward)
    arrivals = (lane.arrival.items() for lane in lanes)
    return sum(int((own >= 0).sum()) for step, own in itertools.chain(*arrivals) if step != STAYS)


def on_page_markdown(markdown, page, config, files):
    """Lets links lead to pages of the site; a link to another file becomes its path."""
    uri = page.file.src_uri
    source = next((source for source, name in PAGES.items() if name == uri), f"docs/{uri}")
    markdown = _BACK.sub("", markdown)

    def changed(match):
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
            path = f"{path}/README.md"
        name = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if name is None:
            if not (ROOT / path).exists():
                raise ValueError(f"{source}: the link to {target} leads nowhere")
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return f"{mark}[{text}]({posixpath.relpath(name, posixpath.dirname(uri) or '.')}{anchor})"

    # Not in code.
    parts = re.split(r"(?ms)(^```.*?^```)", markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)


def _cells(notebook):
    """What a notebook says, its code, and what that has shown, as pieces of Markdown."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
            drawn = data.get("text/html") or data.get("image/svg+xml")
            if drawn:  # a blank line would end it
                yield "<div>" + re.sub(r"\n\s*\n", "\n", drawn) + "</div>"
            else:
                text = "".join(output.get("text", ())) or data["text/plain"]
                yield "```text\n" + re.sub(r"\x1b\[[\d;]*m", "", text).rstrip() + "\n```"


def _reference(name, path):
    """A page with all names that a module, or its stub, imports to offer them, in their order."""
    text, stub = path.read_text("utf-8"), path.with_suffix(".pyi")
    lines = stub.read_text("utf-8") if stub.exists() else text
    names = re.findall(r"^from \S+ import (\w+) as", lines, re.MULTILINE)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    title = name if name == "jaxpar" else f"jaxpar.{name}"
    lines = [f"# {title}", "", (ast.get_docstring(ast.parse(text)) or "").strip(), ""]
    lines += [f"::: {module}.{each}" for each in names if each not in MODULES]
    return "\n\n".join(lines) + "\n"
