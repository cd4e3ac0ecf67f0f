"""`depthmix report`: what it prints, what it writes, what it refuses."""

import sys
from pathlib import Path

import pytest

from depthmix.cli import main
from synthetic_runs import DENSE, MOD, Bowl, count_parameters, write_bowl, write_run


def test_a_report_is_written_and_summed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    center = count_parameters({**DENSE, "width": 64})
    write_bowl(tmp_path / "runs", "dense", DENSE, Bowl(center, 4.0))
    write_bowl(tmp_path / "runs", "mod", MOD, Bowl(center, 3.9), routed=True)
    write_run(tmp_path / "runs/half", DENSE, 3.0, state="interrupted", reason="Ctrl-C")
    out = tmp_path / "my report"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    lines = printed.splitlines()
    assert lines[0] == "10 finished runs. 1 left out."
    assert lines[1].startswith("At 1e12 training FLOPs (executed) mod is 2.50 ± 0.00 % below dense")
    assert lines[2] == "left out: half (interrupted): ended at step 100 of 100: Ctrl-C"
    assert lines[-1] == f"page: {out / 'report.html'}"
    page = (out / "report.html").read_text()
    assert f"depthmix report {tmp_path / 'runs'} --out &#x27;{out}&#x27;" in page
    assert (out / "isoflop.png").exists()
    # again, over the old one; a file of records then stands for the folder
    file = tmp_path / "kept" / "bowl.jsonl"
    again = ["report", str(tmp_path / "runs"), "--out", str(out), "--records", str(file)]
    assert main(again) == 0
    assert capsys.readouterr().out.endswith(f"\nrecords: 10 added to {file}\n")
    assert main(["report", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1] == lines[1]
    assert (file.parent / "report" / "report.html").exists()


def test_missing_images_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", DENSE, 3.0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 finished run.",
        "pictures need matplotlib: pip install 'depthmix[plot]'",
        f"page: {tmp_path / 'report' / 'report.html'}",
    ]


def test_empty_folder_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert main(["report", str(folder)]) == 2
        printed, errors = capsys.readouterr()
        assert printed == ""
        assert errors == (
            f"depthmix: there is no run in '{folder}': make one with 'depthmix train'\n"
        )
    assert list(tmp_path.iterdir()) == [], "and nothing is written"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--help"]) == 0
    assert "depthmix report runs/isoflop" in capsys.readouterr().out
