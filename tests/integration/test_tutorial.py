"""The tutorial notebook runs from top to bottom, without Jupyter and with few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Before the first cell: `python -m depthmix` runs in the notebook's own process, as a dozen of them
# would spend most of their time loading torch.
PRELUDE = """
import contextlib, io, subprocess, sys
from depthmix.cli import main

start_process = subprocess.run

def run(command, **options):
    if command[:3] != [sys.executable, "-m", "depthmix"]:
        return start_process(command, **options)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command[3:])
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

subprocess.run = run
"""


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    script = tmp_path / "tutorial.py"
    script.write_text("\n\n".join([PRELUDE, *cells]), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=os.environ | {"DEPTHMIX_TUTORIAL_STEPS": "4", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "of the dense FLOPs were saved" in done.stdout
    assert "block 5 keeps [" in done.stdout
    # the last lines are of `eval`, for the model that was healed
    assert "runs/healed: " in done.stdout
    assert "<html" in (tmp_path / "view.html").read_text(encoding="utf-8")


def test_the_tutorial_is_committed_without_outputs() -> None:
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    assert notebook["cells"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
