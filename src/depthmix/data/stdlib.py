"""The corpus that every Python brings along: its own standard library and its documentation.

Owns what belongs to it. Reads source files and never runs them; only C modules of a fixed list are
imported, for their documentation. Does not know what the text is for.
"""

import ast
import importlib
import os
import re
import sysconfig
import warnings
from pathlib import Path

# outside packages live below the same folder
NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
TOPICS = "pydoc_data/topics.py"

# built in or compiled, and safe to import; what they hold says it is theirs, because pydoc finds
# the things of another module only where that one is loaded
MODULES = (
    "_bisect",
    "_codecs",
    "_csv",
    "_heapq",
    "_imp",
    "_queue",
    "_random",
    "_signal",
    "_struct",
    "_thread",
    "_tracemalloc",
    "array",
    "atexit",
    "binascii",
    "builtins",
    "cmath",
    "faulthandler",
    "fcntl",
    "gc",
    "grp",
    "itertools",
    "marshal",
    "math",
    "mmap",
    "posix",
    "pwd",
    "pyexpat",
    "resource",
    "select",
    "termios",
    "time",
    "unicodedata",
    "zlib",
)

# their text depends on the machine or the process, or it is the same in every module
UNSTABLE_SECTIONS = ("DATA", "FILE", "MODULE REFERENCE", "VERSION", "AUTHOR", "DATE", "CREDITS")


def find_files() -> list[tuple[str, Path, int]]:
    """Every source file of the running interpreter's library: name below it, path, size."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - NOT_STANDARD)
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file():
                found.append((path.relative_to(root).as_posix(), path, path.stat().st_size))
    return sorted(found)


def render_topics(path: Path) -> list[str]:
    """The language's own help topics, read as data out of their module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            topics = ast.literal_eval(node.value)
            return [topics[name] for name in sorted(topics)]
    return []


def render_module(name: str) -> str:
    """Plain documentation of a module, without what another process would print differently."""
    import pydoc

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError:
            return ""
        text = pydoc.plain(pydoc.text.document(module, name))
    sections = re.split(r"\n(?=[A-Z][A-Z ]*\n)", text)
    kept = [s for s in sections if s.partition("\n")[0] not in UNSTABLE_SECTIONS]
    text = "\n".join(kept)
    # which subclasses there are depends on what else is loaded
    text = re.sub(r"(?m)^ +\|  Built-in subclasses:\n(?: +\|   .*\n)*(?: +\|  \n)?", "", text)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text).strip() + "\n"


def render_modules() -> list[str]:
    """The documentation of every module in the list that this Python has."""
    return [text for name in MODULES if (text := render_module(name))]


def is_text(path: Path) -> bool:
    """Whether a file is UTF-8, as most of the library is."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
