"""A real browser for pages, and what goes wrong in it. Asserts nothing."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# root has no sandbox; and nothing is asked of the browser's maker
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def start_browser() -> Iterator[Any]:
    """Headless Chromium with an empty profile; skips where it, or its driver, is not installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((place for name in BROWSERS if (place := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with driver.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


def watch(page: Any) -> list[str]:
    """Everything that a page logs, throws, asks or refuses from now on."""
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    return problems
