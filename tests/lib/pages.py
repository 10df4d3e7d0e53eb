"""The pages of the documentation, found by their place: their code, commands, links and anchors."""

import posixpath
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _found(pattern):
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)))


PAGES = ("README.md", *_found("docs/**/*.md"))
OTHERS = (
    *("CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "recipes/README.md"),
    *_found("benchmarks/README.md"),
)
MEASURED = _found("benchmarks/*/README.md")
# Sections that say what a reader does.
GUIDES = ("start", "concepts", "build", "train", "scale", "use", "help")


def section(page):
    """The folder of a page of docs/; "" of another page."""
    parts = page.split("/")
    return parts[1] if parts[0] == "docs" and len(parts) > 2 else ""


def text_of(page):
    return (ROOT / page).read_text("utf-8")


def blocks(language, page="README.md"):
    """The code blocks of a language that stand at the margin."""
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def commands(page):
    """The arguments of each `python -m jaxpar`, without what the shell does with them."""
    lines = "".join(blocks("sh", page)).replace("\\\n", " ").splitlines()
    found = [re.search(r"python -m jaxpar (.*)", line) for line in lines]
    return [shlex.split(line[1].split(" > ")[0], comments=True) for line in found if line]


def files_of(*pages):
    """Name of a file -> its text, of Python blocks that begin with that name: `# forecast.py`."""
    found = {}
    for page in pages:
        for block in blocks("python", page):
            if name := re.match(r"# (\w+\.py)\n", block):
                found.setdefault(name[1], block)
    return found


def page_with(start):
    """The page of docs/ that has a Python block with such a beginning."""
    return next(
        page for page in PAGES[1:] for block in blocks("python", page) if block.startswith(start)
    )


def without_code(text):
    return re.sub(r"(?ms)^( *)```.*?^\1```", "", text)


def headings(page):
    """As they are read."""
    lines = re.findall(r"(?m)^#{1,6} +(.*?)#* *$", without_code(text_of(page)))
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("`", "") for line in lines]


def anchors(page):
    """What may stand after the # of a link to a page, as GitHub and the site have it."""
    found = set(re.findall(r'<\w+ [^>]*?(?:id|name)="([^"]+)"', text_of(page)))
    for heading in headings(page):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("**", "").lower()).replace(" ", "-")
        again = 0
        while (name := f"{slug}-{again}" if again else slug) in found:
            again += 1
        found.add(name)
    return found


def links(page):
    """What a page links to in the repository: (path, anchor or "")."""
    text = re.sub(r"`[^`\n]*`", "code", without_code(text_of(page)))
    written = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r'(?:href|<img [^>]*src)="([^"]+)"', text
    )
    for target in written:
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            there = posixpath.join(posixpath.dirname(page), path) if path else page
            yield posixpath.normpath(there), anchor


def clicks(page):
    """The pages that it links to; a folder is its README."""
    found = {path for path, _ in links(page)}
    found = {f"{path}/README.md" if (ROOT / path).is_dir() else path for path in found}
    return {path for path in found if path.endswith(".md") and (ROOT / path).exists()}
