"""`make reproduce-smoke` asks for what there is: its commands are read from the Makefile."""

import re
import shlex
from pathlib import Path

import pytest

from depthmix.cli import main
from synthetic_runs import DENSE, write_run

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def read_recipe(target: str) -> list[list[str]]:
    """The words of each line that a target runs, with the Makefile's own places in them."""
    text = MAKEFILE.read_text()
    places = dict(re.findall(r"^(\w+) := (.+)$", text, re.MULTILINE))
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    recipe = re.sub(r"\$\((\w+)\)", lambda found: places.get(found[1], found[0]), recipe)
    return [shlex.split(line) for line in recipe.splitlines()]


def test_reproduce_smoke_plans_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = read_recipe("reproduce-smoke")
    sweep, report = (words[1:] for words in lines if words[0].endswith("/depthmix"))
    assert sweep[:4] == ["sweep", "isoflop", "--size", "smoke"]
    assert main([*sweep, "--dry-run"]) == 0
    assert "20 runs, 20 to train" in capsys.readouterr().out
    # what is reported on is where the runs are
    folder = Path(sweep[sweep.index("--out") + 1])
    write_run(folder / "2e11" / "dense" / "w8-l4-s0", DENSE, 4.0)
    assert main(report) == 0
    assert f"page: {folder / 'report' / 'report.html'}" in capsys.readouterr().out
    assert f"{folder}/report/report.html" in lines[-1][-1], "and that is what is told last"
