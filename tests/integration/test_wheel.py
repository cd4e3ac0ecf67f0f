"""What an installation gives: the wheel, and nothing but what it asks for.

The environment is fresh, but nothing is downloaded: the packages that the wheel's metadata require,
and those that these require, are linked into it from the environment that runs the tests. So torch
is there at once, while matplotlib, transformers and whatever else only an extra brings cannot be
imported, and neither can a package that is used and was forgotten in the metadata.
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from depthmix import __version__
from depthmix.config import load_preset

ROOT = Path(__file__).parents[2]
# what extras bring; none of it is a dependency of a dependency
ABSENT = ("matplotlib", "transformers", "datasets", "pyarrow", "lm_eval", "pytest")

pytestmark = pytest.mark.slow


class Installed(NamedTuple):
    """The fresh environment, and a folder to work in."""

    bin: Path
    work: Path

    def run(self, *args: str, fails: bool = False) -> str:
        """What `depthmix` prints, on stdout or, where it is to fail, on stderr."""
        ended = subprocess.run(
            [self.bin / "depthmix", *args],
            capture_output=True,
            text=True,
            cwd=self.work,
            env=clean_environment(),
            check=False,
        )
        assert "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == (2 if fails else 0), ended.stderr
        return ended.stderr if fails else ended.stdout


def clean_environment() -> dict[str, str]:
    """Without the paths of the source tree, and as narrow as the narrowest terminal."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built by the tools of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env=clean_environment())
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "env", symlinks=True)
    place = Path(
        subprocess.check_output(
            [
                folder / "env/bin/python",
                "-c",
                "import sysconfig; print(sysconfig.get_path('purelib'))",
            ],
            text=True,
        ).strip()
    )
    for name in sorted(find_required(read_metadata(wheel))):
        link_distribution(metadata.distribution(name), place)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "env/bin/python")]
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, capture_output=True)
    work = folder / "work"
    work.mkdir()
    lines = (f"def f{i}(x):\n    return x * {i} + {i * i}\n\n\n" for i in range(3000))
    (work / "text.txt").write_text("<|endoftext|>".join(lines))
    (work / "small.toml").write_text(load_preset("tiny", vocab_size=300).to_toml())
    return Installed(folder / "env/bin", work)


def read_metadata(wheel: Path) -> metadata.PackageMetadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode("utf-8")
    from email import message_from_string

    return message_from_string(text)  # pyrefly: ignore[bad-return]


def list_required(found: metadata.PackageMetadata, extras: frozenset[str]) -> Iterator[Requirement]:
    """What a distribution requires here, with these extras of it."""
    for text in found.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in extras or {""}):
            yield requirement


def find_required(found: metadata.PackageMetadata) -> set[str]:
    """Names of all distributions that a plain install of this one brings."""
    names: set[str] = set()
    waiting = [(found, frozenset[str]())]
    seen = set()
    while waiting:
        for requirement in list_required(*waiting.pop()):
            name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
            names.add(name)
            if (name, extras) not in seen:
                seen.add((name, extras))
                waiting.append((metadata.distribution(name).metadata, extras))
    return names


def link_distribution(found: metadata.Distribution, place: Path) -> None:
    """Make a distribution's modules, and its metadata, importable from another folder."""
    files = found.files
    assert files, found.name
    for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
        source, target = Path(str(found.locate_file(top))), place / top
        if not source.exists():
            continue
        # a namespace such as `google` belongs to several of them
        if not target.exists():
            target.symlink_to(source)


def test_archives_pass_twines_check(built: Path) -> None:
    names = sorted(path.name for path in built.iterdir())
    assert names == [f"depthmix-{__version__}-py3-none-any.whl", f"depthmix-{__version__}.tar.gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED") == 2


def test_the_source_archive_has_what_it_lists(built: Path) -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = table["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for pattern in listed:
        assert list(ROOT.glob(pattern)), f"{pattern} is listed, but there is no such file"
    # what the README shows and links to
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((?!https:)([^)#]+)", text))
    assert len(linked) > 20
    assert linked - packed == set()


def test_the_wheel_promises_what_is_tested(wheel: Path) -> None:
    found = read_metadata(wheel)
    assert found["Requires-Python"] == ">=3.11"
    plain = {r.name: str(r.specifier) for r in list_required(found, frozenset())}
    assert plain["torch"] == ">=2.11"
    assert not {"matplotlib", "transformers", "pytest"} & plain.keys()
    assert {"plot", "hf", "dev"} <= set(found.get_all("Provides-Extra") or [])


def test_the_readme_names_the_versions_that_are_tested() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (torch,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"on Python 3.11 with torch {torch.rpartition('.')[0]}," in text
    assert "those for a GPU on Python 3.12 with torch 2.11" in text
    assert "torch>=2.11" in table["dependencies"]
    # each extra has a row, or stands in one
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert {name for name in table["optional-dependencies"] if f"`{name}`" not in rows} == set()


def test_the_environment_has_only_the_requirements(installed: Installed) -> None:
    code = (
        "import importlib.util as u, depthmix;"
        f"print([n for n in {ABSENT!r} if u.find_spec(n)], depthmix.__version__, depthmix.__file__)"
    )
    printed = subprocess.check_output(
        [installed.bin / "python", "-c", code], text=True, env=clean_environment()
    )
    assert printed.startswith(f"[] {__version__} {installed.bin.parent}")


def test_the_first_commands_work(installed: Installed) -> None:
    assert "Usage: depthmix" in installed.run("--help")
    assert installed.run("--version").strip() == f"depthmix {__version__}"
    assert re.search(r"60m-dense +60m-mod", installed.run("describe", "60m-dense", "60m-mod"))
    installed.run("prepare", "text.txt", "--out", "data", "--vocab-size", "300")
    model = ["--preset", "small.toml", "--data", "data", "--device", "cpu"]
    assert "finished" in installed.run("train", *model, "--steps", "4", "--out", "runs/first")
    printed = installed.run("sample", "runs/first", "--prompt", "def", "--max-tokens", "8")
    assert printed.startswith("def")
    # no picture, and one line that says why
    printed = installed.run("demo", *model, "--flops", "3e10", "--out", "runs/demo")
    missing = "pictures need matplotlib: pip install 'depthmix[plot]'"
    assert printed.splitlines().count(f"no picture: {missing}") == 1
    assert "A sample of small-mod" in printed
    tables = (
        printed.split("Training both")[0] + printed.rpartition("tokens seen")[2].split("no pic")[0]
    )
    assert "routed blocks" in tables
    assert "speed-up" in tables
    assert max(map(len, tables.splitlines())) <= 80
    assert (installed.work / "runs/demo/report/report.html").is_file()
    # a second one in the same place suggests only what demo has
    printed = installed.run("demo", *model, "--flops", "2e10", "--out", "runs/demo", fails=True)
    (line,) = printed.splitlines()
    suggested = set(re.findall(r"--[a-z-]+", line))
    assert suggested == {"--out"}
    assert suggested <= set(re.findall(r"--[a-z-]+", installed.run("demo", "--help")))
    # a report without pictures is a page with its tables
    printed = installed.run("report", "runs", "--out", "page")
    assert missing in printed
    assert "<table>" in (installed.work / "page" / "report.html").read_text()
    assert not list((installed.work / "page").glob("*.png"))


def test_shells_complete_verbs_and_options(installed: Installed) -> None:
    # which shell it is for is seen from the process that asks
    asked = ["bash", "-c", f"{installed.bin / 'depthmix'} --show-completion; exit $?"]
    script = subprocess.check_output(asked, text=True, env=clean_environment())
    assert "complete -o default -F _depthmix_completion depthmix" in script
    for typed, expected in (("tr", ["train", "trace"]), ("describe --js", ["--json"])):
        typing = f"COMP_WORDS=(depthmix {typed}); COMP_CWORD={len(typed.split())}"
        code = f'{script}\n{typing}; _depthmix_completion depthmix; echo "${{COMPREPLY[@]}}"'
        printed = subprocess.check_output(
            ["bash", "-c", code],
            text=True,
            env={**clean_environment(), "PATH": f"{installed.bin}:{os.environ['PATH']}"},
        )
        assert printed.split() == expected
