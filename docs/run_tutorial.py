"""Run the cells of tutorial.ipynb and keep what they print in it: `python docs/run_tutorial.py`.

The cells work in a temporary folder, and standard output is all that is kept, so no notebook server
is needed.
"""

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from depthmix.files import replace_file

NOTEBOOK = Path(__file__).parent / "tutorial.ipynb"
PROGRESS = " left, ends "


def run_cells(notebook: dict[str, Any]) -> None:
    """Run all code cells in the working directory, and set their outputs and numbers."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    for number, cell in enumerate(code, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        # without the progress of a run, which depends on the machine and the hour
        lines = [
            line.rstrip() + "\n" for line in printed.getvalue().splitlines() if PROGRESS not in line
        ]
        cell["execution_count"] = number
        cell["outputs"] = (
            [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        )


def main() -> None:
    """Run them in a temporary folder, and write the notebook."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run_cells(notebook)
    replace_file(NOTEBOOK, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.pop("DEPTHMIX_TUTORIAL_STEPS", None)
    main()
