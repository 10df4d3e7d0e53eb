"""Hooks of mkdocs: pages of the site that do not lie in docs/, and the links between them.

The README is the site's first page, those of examples, recipes and benchmarks are pages too, and the
reference has a page for every public module. Links to files that are no pages, such as source, become their
paths.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "recipes/README.md": "literature.md",
}
PAGES |= {
    f"benchmarks/{path.parent.name}/README.md": f"benchmarks/{path.parent.name}.md"
    for path in sorted(ROOT.glob("benchmarks/*/README.md"))
}
MODULES = {"jaxpar": "jaxpar/__init__.py", "lm": "jaxpar/tasks/lm/__init__.py"}
MODULES |= {"images": "jaxpar/tasks/images/__init__.py"}
MODULES |= {
    name: f"jaxpar/{name}/__init__.py" for name in ("nn", "pipeline", "planning", "analysis")
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
_BACK = re.compile(r"\[Back to the README\]\([^)]*\)\. ?")


def on_files(files, config):
    """Adds the pages that lie elsewhere, and those of the reference."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    for name, path in MODULES.items():
        files.append(
            File.generated(config, f"api/{name}.md", content=_reference(name, ROOT / path))
        )
    return files


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
