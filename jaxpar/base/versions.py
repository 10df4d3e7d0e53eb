"""Which versions of JAX are excluded, and why: checked when jaxpar is imported.

`pip` keeps to the same holes (`pyproject.toml`), but a later `pip install -U jax` does not.
"""

import importlib.metadata
import re
import sys

OLDEST = (0, 10, 1)
EXCLUDED = {
    (0, 10, 2): "computes wrong results on CPU under jit, without an error (jax#39103)",
    (0, 11): "crashes on CPU in broadcast-reduces of high rank (jax#39257)",
}
# jax 0.11 and later need this Python.
NEWER_JAX_PYTHON = (3, 12)


def excluded_reason(jax_version: str, python_version: tuple[int, int]) -> tuple[str, str] | None:
    """The reason why jaxpar does not run on this JAX, and the remedy; None if it does.

    Args:
      jax_version: as in `jax.__version__`; suffixes such as `rc1` are not looked at.
      python_version: (major, minor), which decides the JAX to install instead.
    """
    release = _release(jax_version)
    if release in EXCLUDED:
        reason = EXCLUDED[release]
    elif release < OLDEST:
        reason = f"is too old: {'.'.join(map(str, OLDEST))} or later is needed"
    else:
        return None
    newer = python_version >= NEWER_JAX_PYTHON
    remedy = "pip install -U 'jax>=0.11.1'" if newer else "pip install 'jax==0.10.1'"
    return f"jax {jax_version} {reason}", remedy


def check_jax_version() -> None:
    """Stops the import of jaxpar on a JAX that is excluded. Does not import JAX.

    Raises:
      ImportError: with the installed version, the reason and the remedy.
    """
    if found := excluded_reason(importlib.metadata.version("jax"), sys.version_info[:2]):
        reason, remedy = found
        raise ImportError(f"jaxpar does not run on this JAX: {reason}\nFix: {remedy}")


def _release(version: str) -> tuple[int, ...]:
    """`"0.11.0rc1"` -> (0, 11); trailing zeros do not count."""
    digits = re.match(r"\d+(\.\d+)*", version)
    assert digits is not None, version
    return tuple(int(n) for n in re.sub(r"(\.0)+$", "", digits[0]).split("."))
