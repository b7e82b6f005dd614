"""One headless Chromium a module of tests, as Debian has it, with a profile of its own and no way out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or "/usr/bin/chromium"
"""The first takes half of the second's time: it has no window that nobody sees."""
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
"""A test machine is root in a container, and nothing may be fetched."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The browser; a page of it is a fresh profile."""
    with sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield result
        result.close()


class Watched:
    """A page and what must not happen in it: messages on its console, and requests beyond its own file."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.fetched: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.fetched.append(request.url))

    def open(self, file: Path, fragment: str = "") -> Page:
        """Opens a report."""
        self.page.goto(f"{file.as_uri()}{fragment}")
        return self.page


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    """A page at 1280 × 900; at its end nothing was said and nothing but the file itself was fetched."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    result = Watched(context.new_page())
    yield result
    context.close()
    assert result.said == []
    assert all(url.startswith("file://") and url.partition("#")[0].endswith(".html") for url in result.fetched)
