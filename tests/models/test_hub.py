"""A model's name on the hub becomes a folder, or a sentence that says how to get one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from depthmix.cli import main
from depthmix.models.hub import PATTERNS, fetch_model, is_hub_name
from foreign_models import write_foreign


def test_hub_names_are_distinguished_from_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    assert is_hub_name("HuggingFaceTB/SmolLM2-135M")
    # a mistyped folder beside others is not looked for on the hub
    for path in ("models/there", "models/typo", "name", "/a/b", "./a/b", "a/b/c", "~/a", "../a"):
        assert not is_hub_name(path), path


def test_a_model_is_fetched_and_upcycled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, asked = write_foreign(tmp_path / "cache"), []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(dense)

    fake: Any = SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.chdir(tmp_path)
    assert main(["upcycle", "owner/name", "--out", "run"]) == 0
    assert asked == [("owner/name", PATTERNS)]
    # no code and no pickles
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in PATTERNS)
    printed, errors = capsys.readouterr()
    assert "downloading owner/name from the Hugging Face hub" in errors
    assert f"parameters of {dense} (llama)" in printed
    # a folder that is taken is refused before a download
    assert main(["upcycle", "owner/name", "--out", "run"]) == 2
    assert capsys.readouterr().err.endswith("'run' already contains a run: choose another --out\n")
    assert len(asked) == 1


def test_missing_hub_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(name: str, **options: Any) -> str:
        raise OSError("no route to host\nand a page more")

    fake: Any = SimpleNamespace(snapshot_download=fail)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    told = r"hub \(no route to host\): check .*'hf download owner/name --local-dir DIR', and name"
    with pytest.raises(ValueError, match=told):
        fetch_model("owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'depthmix\[hf\]', or download it with 'hf"):
        fetch_model("owner/name")
