"""A real browser for the pages."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, where it and the library that drives it are installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((place for name in BROWSERS if (place := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with driver.sync_playwright() as play:
        # root has no sandbox
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
