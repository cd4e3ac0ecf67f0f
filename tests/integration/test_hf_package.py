"""Without transformers, what needs it says so, and what does not works."""

import subprocess
import sys

HIDE = "import sys; sys.modules['transformers'] = None; "


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True)


def test_files_can_be_read_without_transformers() -> None:
    assert run("import depthmix.models.upcycle").returncode == 0


def test_models_need_transformers() -> None:
    ended = run("from depthmix.hf import DepthmixForCausalLM")
    assert "ImportError: transformers is not installed: pip install 'depthmix[hf]'" in ended.stderr
    ended = run("from depthmix.hf import Depthmix")
    assert "cannot import name 'Depthmix'" in ended.stderr


def test_the_command_needs_transformers() -> None:
    code = "from depthmix.cli import main; sys.exit(main(['import', '.', '--out', 'nowhere']))"
    ended = run(code)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith(
        "transformers is not installed: pip install 'depthmix[hf]'"
    )
