"""MkDocs hooks that build the site from the repository as it is.

Pages keep their paths in the repository (`docs/training.md`, `results/isoflop.md`), so relative
links work on the site, in an editor and on a code host. The README becomes the home page, and the
tutorial notebook a page. Warns about every name in `depthmix.__all__` that `api.md` leaves out or
that has no docstring; in strict mode, warnings fail the build.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# a warning under this name counts in strict mode
LOG = logging.getLogger("mkdocs.hooks.depthmix")


def on_files(files: Files, config: Any) -> Files:
    """Give pages their paths in the repository, and add those outside docs/."""
    moved = (".md", ".png", ".ipynb", "grafana.json")
    found = Files([file for file in files if not file.src_uri.endswith(moved)])
    # the theme's own files stay as they are
    kinds = ("docs/*.md", "docs/*.png", "docs/grafana.json", "results/**/*")
    for path in sorted(path for kind in kinds for path in ROOT.glob(kind) if path.is_file()):
        found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=path))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff"):
        found.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    found.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    found.append(File.generated(config, "docs/tutorial.md", content=render_notebook(notebook)))
    return found


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Check the API page, and fix links to pages that are made from other files."""
    if page.file.src_uri == "docs/api.md":
        for problem in find_undocumented(markdown):
            LOG.warning(problem)
    return re.sub(
        r"\]\(([^):]*)(tutorial\.ipynb|README\.md)(#[^)]*)?\)",
        lambda link: _link(link, page.file.src_uri),
        markdown,
    )


def render_notebook(notebook: dict) -> str:
    """A notebook as Markdown, with what its cells print."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", []):
            parts.append(f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts) + "\n"


def find_undocumented(page: str) -> list[str]:
    """Exported names without an entry on the page or without a docstring."""
    package = griffe.load("depthmix", search_paths=[ROOT / "src"])
    problems = []
    for name in package.exports or []:
        if not re.search(rf"^::: depthmix\.(\w+\.)*{name}$", page, re.MULTILINE):
            problems.append(f"depthmix.{name} is exported, but docs/api.md has no entry for it")
        member = package[name]
        target = member.final_target if member.is_alias else member
        if not target.has_docstring:
            problems.append(f"depthmix.{name} is exported, but has no docstring")
    return problems


def _link(link: re.Match[str], source: str) -> str:
    folder, name, anchor = link[1], link[2], link[3] or ""
    if name == "tutorial.ipynb":
        name = "tutorial.md"
    elif folder == ("../" if "/" in source else ""):
        name = "index.md"
    return f"]({folder}{name}{anchor})"
