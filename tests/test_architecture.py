"""The promises of the architecture: who imports whom, what loads torch, and how files look."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "depthmix"
SOURCES = sorted(SRC.rglob("*.py"))

# planning and reporting: present modules among these must load without torch
NO_TORCH = (
    *("budget", "config", "files", "flops", "runs"),
    *("interrupt", "progress", "units", "sweep", "report"),
)


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def modules_loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running `code`."""
    script = f"""
import json, sys
try:
    exec({code!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print()
print(json.dumps(sorted(sys.modules)))
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def no_torch_modules() -> list[str]:
    return [
        module_name(path)
        for path in SOURCES
        if path.relative_to(SRC).with_suffix("").parts[0] in NO_TORCH
    ]


def below_src(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter")
    done = run_python(
        "-c",
        "import sys; from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(no_logo=True, cache_dir=None))",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["depthmix", *no_torch_modules()])
def test_loads_no_torch(name: str) -> None:
    loaded = modules_loaded_by(f"import {name}")
    assert name in loaded
    assert "torch" not in loaded


def test_help_loads_no_torch() -> None:
    loaded = modules_loaded_by(
        "import sys; sys.argv = ['depthmix', '--help']; from depthmix.cli import main; main()"
    )
    assert "depthmix.cli" in loaded
    assert "torch" not in loaded


def test_the_torch_check_can_fail() -> None:
    assert "torch" in modules_loaded_by("import depthmix.nn")


@pytest.mark.parametrize("path", SOURCES, ids=below_src)
def test_source_file_keeps_the_rules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert path.stem not in {"utils", "common", "helpers"}, "name the file after what it owns"
    told = ast.get_docstring(tree)
    assert told, "say in a docstring what the module owns"
    assert told.splitlines()[0].endswith("."), "say what the module owns in the first line"

    # it turns annotations into strings, which jaxtyping's runtime checks cannot read
    futures = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert not any(n.module == "__future__" for n in futures), "no `from __future__` import"


def test_a_name_is_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(below_src(path))
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__) and "integration" not in path.parts
    ],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_tests_mirror_the_source(path: Path) -> None:
    source = path.relative_to(ROOT / "tests").with_name(path.stem.removeprefix("test_"))
    # the measurements stand beside the package
    mirrored = (ROOT if source.parts[0] == "benchmarks" else SRC) / source
    assert mirrored.with_suffix(".py").exists() or mirrored.is_dir(), (
        f"no {mirrored.relative_to(ROOT)}: move what spans modules to tests/integration/"
    )
