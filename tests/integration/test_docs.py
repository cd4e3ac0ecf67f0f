"""The documentation: its example, API page, paths and lines are right, and its script runs."""

import json
import re
import runpy
import sys
import tokenize
import unicodedata
from pathlib import Path

import pytest
import typer

import depthmix
from depthmix.cli import app
from depthmix.config import ModelConfig, Recipe
from depthmix.config.fields import document_fields
from text_runs import write_text_run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# what a path may be written below
BASES = (ROOT, ROOT / "src" / "depthmix")
# names that no file shall have, and a folder that only a command makes
NOT_THERE = {"utils.py", "common.py", "helpers.py", "htmlcov/"}


def test_the_example_model_file_loads() -> None:
    text = (DOCS / "using.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert ModelConfig.from_toml(example).routed_layers == (3, 5, 7, 9, 11)


@pytest.mark.parametrize("name", depthmix.__all__)
def test_every_export_has_an_entry_and_a_docstring(name: str) -> None:
    assert f"\n::: depthmix.{name}\n" in (DOCS / "api.md").read_text(encoding="utf-8")
    assert getattr(depthmix, name).__doc__


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_named_files_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = set(re.findall(r"`([\w./-]+(?:\.py|/))`", text)) - NOT_THERE
    assert len(paths) > 20
    missing = [path for path in paths if not any((base / path).exists() for base in BASES)]
    assert missing == []


def test_lines_of_text_have_at_most_100_columns() -> None:
    long = []
    for path in _list_pages():
        text = path.read_text(encoding="utf-8")
        # code may not be wrapped, and pictures cannot be
        text = re.sub(r"^```.*?^```", _blank, text, flags=re.S | re.M)
        # written by a program
        text = re.sub(r"^<!-- results: .*?^<!-- end -->", _blank, text, flags=re.S | re.M)
        # tables of measurements, and of the server's options, may be wide
        wide = path.parent.name == "results" or path.name == "serving.md"
        allowed = ("    ", "![", "|") if wide else ("    ", "![")
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > 100 and not line.startswith(allowed):
                long.append(f"{path.relative_to(ROOT)}:{number}")
    assert long == []


def test_prose_has_no_odd_words() -> None:
    """Words that are archaic, or that make a program a person; names in code may have them."""
    odd = re.compile(r"\b(anew|dear|glad|nobody|tells|told)\b", re.IGNORECASE)
    prose = {path: path.read_text(encoding="utf-8") for path in _list_pages()}
    for folder in ("src", "docs", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            kinds = {tokenize.COMMENT, tokenize.STRING}
            with path.open("rb") as file:
                found = (t.string for t in tokenize.tokenize(file.readline) if t.type in kinds)
                prose[path] = "\n".join(found)
    assert len(prose) > 150
    # code in backticks and in braces
    plain = {
        path: re.sub(r"```.*?```|`[^`]*`|\{[^}]*\}", "", text, flags=re.S)
        for path, text in prose.items()
    }
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in plain.items()
        for match in odd.finditer(text)
    }
    assert found == set()


def test_commands_have_the_options_and_fields_they_are_shown_with() -> None:
    verbs = typer.main.get_command(app).commands  # pyrefly: ignore
    fields = {*document_fields(Recipe, "train."), *document_fields(ModelConfig)}
    wrong, num_commands = [], 0
    for page in _list_pages():
        for command in find_commands(page.read_text(encoding="utf-8")):
            verb, *arguments = command.split()[1:] or ["--help"]
            options = {"--help", "--version", "--install-completion", "--show-completion"}
            if not verb.startswith("-"):
                num_commands += 1
                options |= (
                    {o for p in verbs[verb].params for o in p.opts} if verb in verbs else set()
                )
            named = {a.partition("=")[0] for a in arguments if re.match(r"--?[a-z]", a)}
            named |= {a.partition("=")[0] for a in arguments if re.match(r"[a-z_.]+=", a)} - fields
            if (verb not in verbs and not verb.startswith("-")) or named - options:
                wrong.append(f"{page.relative_to(ROOT)}: {command}")
    assert num_commands > 150
    assert wrong == []


def find_commands(page: str) -> list[str]:
    """The commands in a page's blocks of code and sentences, without comments and redirections."""
    fence = r"^```\w*\n(.*?)^```"
    blocks = "\n".join(re.findall(fence, page, re.S | re.M)).replace("\\\n", " ")
    found = re.findall(r"(?:^|&& |\| | -m )(depthmix(?: [^\n#&|>]*)?)", blocks, re.M)
    found += re.findall(r"`(depthmix [a-z][^`]*)`", re.sub(fence, "", page, flags=re.S | re.M))
    # options of SLURM
    return [re.sub(r"--slurm \S+", "--slurm", command) for command in found]


def test_links_and_anchors_exist() -> None:
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in _list_pages()}
    notebook = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))
    cells = ("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    pages[(DOCS / "tutorial.ipynb").resolve()] = "\n\n".join(cells)
    broken, num_links = [], 0
    for page, text in pages.items():
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"(https?|mailto):", target):
                continue
            num_links += 1
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            anchors = list_anchors(pages[found]) if found in pages else {""}
            if not found.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert num_links > 150
    assert broken == []


def test_anchors_are_made_as_the_site_makes_them() -> None:
    text = "# A `b_c`: d, (e)\n```\n# not one\n```\n## A b_c d e\n## [Link](x.md) & more\n"
    assert list_anchors(text) == {"a-b_c-d-e", "a-b_c-d-e_1", "link-more"}


def list_anchors(page: str) -> set[str]:
    """The anchors of a page's headings, by the rule of Python-Markdown, which builds the site."""
    anchors: set[str] = set()
    page = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    for heading in re.findall(r"^#{1,6} (.+)$", page, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
        plain = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        name, number = plain, 1
        while name in anchors:
            name, number = f"{plain}_{number}", number + 1
        anchors.add(name)
    return anchors


def _list_pages() -> list[Path]:
    return [path for name in ("*.md", "docs/*.md", "results/*.md") for path in ROOT.glob(name)]


def _blank(code: re.Match[str]) -> str:
    return "\n" * code[0].count("\n")


def test_named_identifiers_exist() -> None:
    sources = [p for name in ("src", "tests") for p in sorted((ROOT / name).rglob("*.*"))]
    sources = [p for p in sources if p.suffix in {".py", ".cu", ".cuh", ".toml"}]
    sources += [ROOT / "Makefile", ROOT / "pyproject.toml"]
    known = {w for p in sources for w in re.findall(r"\w+", p.read_text(encoding="utf-8"))}
    for name in ("CONTRIBUTING.md", "docs/design.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text))
        assert len(named) > 30
        parts = {thing: set(re.findall(r"\w+", thing)) for thing in named}
        missing = [t for t, words in parts.items() if words - known and not (ROOT / t).exists()]
        assert missing == []


def test_the_picture_is_drawn_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run = write_text_run(tmp_path, "max_seq_len=8")
    before = {path: path.read_bytes() for path in DOCS.glob("*.png")}
    arguments = [str(run), "--start", "1", "--count", "4"]
    monkeypatch.setattr(sys, "argv", ["draw_depth.py", *arguments])
    runpy.run_path(str(DOCS / "draw_depth.py"), run_name="__main__")
    assert (run / "depth.png").read_bytes().startswith(b"\x89PNG")
    # tracked files stay as they are
    assert {path: path.read_bytes() for path in DOCS.glob("*.png")} == before
