"""The HTML page of the history lists all drifts and lemons (racks, hosts, slots and parts that fail repeatedly).

It has no scripts or external resources, and escapes text that comes from hosts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from fleet.history.database import History
from fleet.history.lemons import lemons
from fleet.history.store import add_run
from fleet.history.trends import drifts
from fleet.history_page.grid import months_of, new_drivers, rack_rows
from fleet.history_page.page import render_page
from fleet.history_page.plots import FRAME, _rack_values, _spreads, plots
from schemas.baselines import SIMULATED
from tests.accepted import rackproof
from tests.histories import DRIVERS, FIGURES, MODEL, Faults, FleetHistory

HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Collects the tags and attributes of a page, and checks that each end tag matches the open tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(fleet: tuple[Faults, Path]) -> str:
    return render_page(History(fleet[1], SIMULATED))


def test_page_shows_every_drift_lemon_and_month_and_has_a_row_for_each_rack(
    fleet: tuple[Faults, Path], text: str
) -> None:
    planted, directory = fleet
    history = History(directory, SIMULATED)
    result = [*drifts(history), *lemons(history)]
    assert {("rack", name) for kind, name in planted.drifts if kind == "rack"} < {
        (item.level, item.id) for item in drifts(history)
    }
    assert len(result) > 5
    assert all(item.id in text for item in result)
    assert "SIMULATED" in text
    months = months_of(history)
    assert (len(months), months[0]) == (20, "2024-01")
    assert all(f">{month}</th>" in text for month in months)
    racks = rack_rows(history, months)
    assert [row.rack for row in racks] == [f"r{number:02}" for number in range(7)]
    assert {sum(cell.has_new_driver for cell in row.cells) for row in racks} == {2}
    assert sorted(driver for names in new_drivers(history, months).values() for driver in names) == sorted(DRIVERS[1:])
    assert text == render_page(history)


def test_run_with_a_wrong_date_is_in_no_month(tmp_path: Path) -> None:
    """The second of four monthly runs ended nine months after its date. No run takes so long, so the date is wrong."""
    for month, rows in enumerate(FleetHistory(racks=6, hosts=3, gpus=4, months=4).runs()):
        late = {**rows.entry, "ended": "2024-12-01 00:00:00"}
        add_run(tmp_path, replace(rows, entry=late) if month == 1 else rows)
    history = History(tmp_path, SIMULATED)
    months = months_of(history)
    assert months == ("2024-01", "2024-02", "2024-03", "2024-04")
    for row in rack_rows(history, months):
        assert [cell.text for cell in row.cells].index("–") == 1
    (figure,) = history.rows("select name, settings, stage, within, model from levels where level = 'host' limit 1")
    assert {*_spreads(history, [figure], months)[figure]} == {0, 2, 3}
    assert {*_rack_values(history, figure, "r00", months)} == {0, 2, 3}


@pytest.mark.parametrize(("below", "kind"), [("link=3", "link=*"), ("peer=1", "peer=*")])
def test_drift_of_one_link_or_peer_is_plotted_with_all_links_or_peers(below: str, kind: str, tmp_path: Path) -> None:
    name = "host_copy.bandwidth"
    for rows in FleetHistory(racks=6, hosts=3, gpus=4, months=2).runs():
        hosts = [
            replace(
                host, figures=tuple({**item, "within": below if item["name"] == name else ""} for item in host.figures)
            )
            for host in rows.hosts
        ]
        add_run(tmp_path, replace(rows, hosts=iter(hosts)))
    history = History(tmp_path, SIMULATED)
    drift = Mock(settings=FIGURES[name][0], stage="benchmark", within=below, model=MODEL, level="gpu")
    drift.name = name
    first, *_ = plots(history, months_of(history), {}, [drift], [])
    assert (first.title, first.note) == (f"{name} {FIGURES[name][0]}", f"{MODEL}, benchmark, {kind}")


def test_page_has_no_scripts_or_external_resources_and_is_well_formed(text: str) -> None:
    page = Page(text)
    assert not page.open
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "object")]
    assert not [
        link
        for _, attributes in page.tags
        for key in ("src", "href")
        if (link := attributes.get(key)) and link[0] != "#"
    ]
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on") or key == "style"]
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in str(policy)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_plots_stay_in_their_frames(text: str) -> None:
    page = Page(text)
    paths = [
        str(attributes["d"])
        for tag, attributes in page.tags
        if tag == "path" and attributes.get("class") in ("spread", "middle", "rack")
    ]
    assert len(paths) >= 10
    for path in paths:
        for x, y in re.findall(r"([\d.]+),([\d.]+)", path):
            assert 0 <= float(x) <= FRAME.width
            assert 0 <= float(y) <= FRAME.height


def test_text_of_hosts_is_escaped(tmp_path: Path) -> None:
    for rows in FleetHistory(racks=6, hosts=3, gpus=4, months=2).runs():
        hosts = [
            type(host)(parts=tuple({**part, "rack": HOSTILE, "driver": HOSTILE} for part in host.parts),
                       figures=tuple({**figure, "name": HOSTILE, "rack": HOSTILE} for figure in host.figures))
            for host in rows.hosts
        ]  # fmt: skip
        add_run(
            tmp_path,
            type(rows)(kind=rows.kind, nonce=rows.nonce, entry=rows.entry, causes=rows.causes, hosts=iter(hosts)),
        )
    text = render_page(History(tmp_path, SIMULATED))
    assert HOSTILE not in text
    assert text.count("&lt;script&gt;") > 3


def test_command_writes_the_page(fleet: tuple[Faults, Path], tmp_path: Path) -> None:
    path = tmp_path / "fleet.html"
    done = rackproof("history", "page", path, "--history", fleet[1], "--kind", SIMULATED)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"page: {path}\n", "")
    assert path.read_text().rstrip().endswith("</html>")
