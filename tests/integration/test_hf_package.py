"""Without transformers, what needs it says so, and what does not works."""

import subprocess
import sys
from pathlib import Path

import pytest

from variants import make_model

HIDE = "import sys; sys.modules['transformers'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True)


def test_models_need_transformers() -> None:
    ended = run("from depthmix.hf import DepthmixForCausalLM")
    assert "ImportError: transformers is not installed: pip install 'depthmix[hf]'" in ended.stderr
    ended = run("from depthmix.hf import Depthmix")
    assert "cannot import name 'Depthmix'" in ended.stderr


def test_only_exporting_needs_transformers(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "exported", tmp_path / "run"
    pytest.importorskip("depthmix.hf.export").export_model(make_model("mod"), folder)
    code = "from depthmix.cli import main; "
    code += f"assert main(['import', '{folder}', '--out', '{run_dir}']) == 0; "
    code += (
        f"sys.exit(main(['export', '{run_dir}', '--out', '{tmp_path}/again', '--no-tokenizer']))"
    )
    ended = run(code)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith(
        "needs the package 'transformers': pip install 'depthmix[hf]'"
    )
