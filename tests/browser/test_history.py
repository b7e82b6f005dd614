"""Test the history page in a browser: plots, table of racks, accessibility, and no console messages or network requests."""

from __future__ import annotations

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe

from fleet.history.database import History
from fleet.history.store import add_run
from fleet.history_page.page import render_page
from schemas.baselines import SIMULATED
from tests.browser.conftest import WatchedPage
from tests.histories import FleetHistory


def test_page_is_accessible_and_draws_its_plots(tmp_path: Path, watched: WatchedPage) -> None:
    for rows in FleetHistory(racks=6, hosts=3, gpus=4, months=5).runs():
        add_run(tmp_path / "h", rows)
    path = tmp_path / "history.html"
    path.write_text(render_page(History(tmp_path / "h", SIMULATED)), encoding="utf-8")
    page = watched.open(path)
    assert page.locator("figure svg").count() == 5
    box = page.locator("figure svg path.middle").first.bounding_box()
    assert box
    assert box["width"] > 200
    assert page.locator("table.racks tbody tr").count() == 6
    assert Axe().run(page).response["violations"] == []
