"""The tutorial notebook runs from top to bottom, without Jupyter and with few steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from depthmix.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


# Before the first cell: `python -m depthmix` runs in the notebook's own process, as a dozen of them
# would spend most of their time loading torch.
PRELUDE = """
import contextlib, io, json, subprocess, sys
from depthmix.cli import main
from run_tutorial import NOTEBOOK, run_cells

start_process = subprocess.run

def run(command, **options):
    if command[:3] != [sys.executable, "-m", "depthmix"]:
        return start_process(command, **options)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command[3:])
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

subprocess.run = run
notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
run_cells(notebook)
print(json.dumps(notebook))
"""


def list_outputs(notebook: dict) -> list[str]:
    """What each cell of code printed."""
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(line for o in cell["outputs"] for line in o["text"]) for cell in code]


@pytest.fixture
def notebook() -> dict:
    return json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_tutorial_runs(notebook: dict, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = [str(ROOT / "src"), str(DOCS), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE],
        cwd=tmp_path,
        env=os.environ
        | {"DEPTHMIX_TUTORIAL_STEPS": "4", "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    fresh = list_outputs(json.loads(done.stdout.splitlines()[-1]))
    printed = "".join(fresh)
    assert "of the dense FLOPs were saved" in printed
    assert "block 5 keeps [" in printed
    # the run that was healed, and the Llama
    assert "runs/healed: " in printed
    assert "runs/llama-healed: " in printed
    assert "def main(" in fresh[-1]
    assert "<html" in (tmp_path / "view.html").read_text(encoding="utf-8")
    # what is committed is what these cells print: the same lines, but for numbers and texts
    kept = list_outputs(notebook)
    assert [bool(text) for text in fresh] == [bool(text) for text in kept]
    for ours, theirs in zip(fresh, kept, strict=True):
        assert find_words(ours) - find_words(theirs) == set()


def find_words(text: str) -> set[str]:
    """The first words of lines about runs, models and files."""
    starts = re.findall(
        r"^(?:[\w./-]+: |block \d|finished|forward FLOPs|routed blocks)", text, re.M
    )
    return set(starts)


def test_the_tutorial_is_committed_with_its_outputs(
    notebook: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    outputs = list_outputs(notebook)
    assert sum(map(bool, outputs)) == len(outputs) - 1
    text = "".join(outputs)
    assert len(text) < 12_000
    # nothing of the machine that ran it
    assert not re.search(r"/(home|tmp|root|work|usr|Users)/", text)
    # the description of the model is still the one that depthmix prints
    (source,) = re.findall(r'write_text\("""\n(.*?)"""\)', join_code(notebook), re.S)
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(source)
    capsys.readouterr()
    assert main(["describe", "small.toml"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(lines).strip() in text, "it has changed: python docs/run_tutorial.py"


def join_code(notebook: dict) -> str:
    cells = notebook["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
