"""Start Debian's headless Chromium once per test module. The pages of the fixture `watched` must not use the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or "/usr/bin/chromium"
"""Path of the browser. `chromium-headless-shell` is preferred, because it starts in half the time of `chromium`."""
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
"""Allow Chromium to run as root in a container, and disable its background requests (updates, synchronization)."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a running browser, in which each test opens its own context (profile)."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield chromium
        chromium.close()


class WatchedPage:
    """A page whose console messages and requests are recorded."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, file: Path, fragment: str = "") -> Page:
        """Open an HTML file and return the page. `fragment`, such as `#hosts`, is appended to the URL."""
        self.page.goto(f"{file.as_uri()}{fragment}")
        return self.page


@pytest.fixture
def watched(browser: Browser) -> Iterator[WatchedPage]:
    """Yield a page of 1280 × 900 pixels, with a fresh profile.

    The test fails if the page writes to the console, or requests anything that is not a local HTML file.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched_page = WatchedPage(context.new_page())
    yield watched_page
    context.close()
    assert watched_page.messages == []
    assert all(url.startswith("file://") and url.partition("#")[0].endswith(".html") for url in watched_page.requests)
