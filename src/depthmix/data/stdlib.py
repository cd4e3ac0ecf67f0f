"""The corpus that comes with every Python: its standard library and its documentation.

Source files are read and never run; only C modules from a fixed list are imported, for their
documentation.
"""

import ast
import importlib
import os
import re
import sysconfig
import warnings
from pathlib import Path

# third-party packages are below the same folder
NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
TOPICS = "pydoc_data/topics.py"

# built in or compiled, and safe to import; their members name them as their module, because pydoc
# documents members of other modules only if those are loaded
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

# text that depends on the machine or the process, or that is the same in every module
UNSTABLE_SECTIONS = ("DATA", "FILE", "MODULE REFERENCE", "VERSION", "AUTHOR", "DATE", "CREDITS")


def find_files() -> list[tuple[str, Path, int]]:
    """Every source file of this interpreter's library: name below it, path and size."""
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
    """Python's help topics, read from their module without importing it."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            topics = ast.literal_eval(node.value)
            return [topics[name] for name in sorted(topics)]
    return []


def render_module(name: str) -> str:
    """A module's documentation as text, without parts that differ between processes."""
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
    # the list of subclasses depends on which modules are loaded
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
