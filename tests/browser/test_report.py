"""The report in a real browser: it opens, filters, leads to each host and back, prints, and fetches nothing."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from fleet.report.html.page import MAX_BYTES, render_html
from schemas.reports import FleetReport
from tests.browser import fleets
from tests.browser.conftest import Watched
from tests.unit.fleet.report.test_render import HOSTILE, invaded, rehearsal

SCROLLS = "document.documentElement.scrollWidth > innerWidth"
CONTRAST = """() => {
  const channel = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => { const found = /^color\\(srgb ([\\d.]+) ([\\d.]+) ([\\d.]+)(?: \\/ ([\\d.]+))?/.exec(text);
    if (found) return [...found.slice(1, 4).map((part) => part * 255), found[4] === undefined ? 1 : +found[4]];
    const parts = text.match(/[\\d.]+/g).map(Number); return [...parts.slice(0, 3), parts[3] ?? 1]; };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (node) => { for (; node; node = node.parentElement) {
    const style = getComputedStyle(node), found = parse(style.backgroundColor);
    if (style.backgroundImage !== "none") return null;
    if (found[3] === 1) return found; if (found[3] > 0) return null; } return [255, 255, 255, 1]; };
  const worst = [];
  for (const node of document.querySelectorAll("main *, header *, nav *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, .dim, option")) continue;
    const below = ground(node); if (!below) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) worst.push(`${node.tagName}.${node.className}: ${ratio.toFixed(2)} ${node.textContent.slice(0, 30)}`);
  }
  return worst; }"""


@pytest.fixture(scope="module")
def racks() -> FleetReport:
    """Two racks of six hosts, five of them at fault."""
    return fleets.demo(racks=2, hosts=6, gpus=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, racks: FleetReport) -> dict[str, Path]:
    """Reports by name."""
    folder = tmp_path_factory.mktemp("reports")
    made = {"racks": racks, "large": fleets.large(), "rehearsal": rehearsal()}
    for name, report in made.items():
        (folder / f"{name}.html").write_text(render_html(report), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


def hosts_listed(page: Page) -> list[str]:
    return page.locator("#list tbody th").all_inner_texts()


def test_it_opens_with_the_decision_and_every_host(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    assert page.locator("h1").inner_text().split() == ["FINAL", "ACCEPTANCE:", "FAIL"]
    assert page.locator("#count").inner_text() == "12 hosts"
    assert page.locator("#map a").count() == 12
    assert hosts_listed(page)[:3] == ["r01-h03", "r02-h02", "r02-h04"]
    assert not page.locator("noscript").is_visible()
    assert not page.evaluate(SCROLLS)


def test_it_filters_by_text_decision_action_and_rack(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    page.keyboard.press("/")
    page.keyboard.type("gemm r01")
    assert hosts_listed(page) == []
    page.locator("#find").fill("r01-h03-3")
    assert hosts_listed(page) == ["r01-h03"], "a GPU's serial finds its host"
    assert page.locator("#count").inner_text() == "1 of 12 hosts"
    assert page.locator("#map a.dim").count() == 11
    page.locator("#find").fill("no such thing")
    assert page.locator("#list").inner_text() == "No host matches."
    page.locator("#find").fill("")
    page.select_option("#only", label="incomplete")
    assert hosts_listed(page) == ["r01-h05", "r02-h06"]
    page.select_option("#only", label="with findings")
    page.select_option("#act", label="Return the part (RMA)")
    assert hosts_listed(page) == ["r01-h03"]
    page.select_option("#act", label="any")
    page.get_by_role("button", name="r02").click()
    assert hosts_listed(page) == ["r02-h02", "r02-h04", "r02-h06"]


def host_page(page: Page, name: str) -> str:
    """What the page of a host says, once it is there: the address changes a moment before."""
    page.locator("#host-page h2", has_text=name).wait_for(state="visible")
    return page.locator("#host-page").inner_text()


def test_a_click_leads_to_the_host_and_back(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    link = page.locator("#reasons a", has_text="r01-h03").first
    link.scroll_into_view_if_needed()
    link.click()
    assert page.url.endswith("#host=r01-h03")
    text = host_page(page, "r01-h03")
    for said in ("r01-h03", "rejected", "GPU 3", "r01-h03-3", "Return the part (RMA)", "Margin", "Source", "measured, 4x H200",
                 "Evidence", "hosts/r01-h03.json", "Reproduce", "--limit r01-h03"):  # fmt: skip
        assert said in text
    assert not page.locator("#overview").is_visible()
    assert page.title().startswith("r01-h03 – FAIL")
    page.go_back()
    page.locator("#overview").wait_for(state="visible")
    assert not page.locator("#host-page").is_visible()


def test_the_keyboard_leads_to_a_host_and_back(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("/")
    page.keyboard.type("r02-h06")
    for _ in range(24):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#list') && document.activeElement.tagName") == "A":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**#host=r02-h06")
    page.wait_for_function("document.activeElement.id == 'host-page'")
    assert page.locator("#announce").inner_text() == "Page of host r02-h06, incomplete"
    assert "unreachable at preflight" in host_page(page, "r02-h06")
    page.keyboard.press("Escape")
    page.wait_for_url("**#hosts")
    page.locator("#overview").wait_for(state="visible")


def test_deep_links(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"], "#host=r02-h02")
    assert page.locator("#host-page h2").inner_text().startswith("r02-h02")
    for fragment, shown in (("#rack=r02", 6), ("#find=r02-h", 6), ("#host=nobody", 12)):
        page = watched.open(files["racks"], fragment)
        page.reload()
        assert page.locator("#list tbody tr").count() == shown
    assert page.locator("#announce").inner_text() == "This report has no host nobody"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["racks", "rehearsal"])
def test_every_text_has_contrast(watched: Watched, files: dict[str, Path], scheme: Any, name: str) -> None:
    watched.page.emulate_media(color_scheme=scheme)
    page = watched.open(files[name])
    grounds = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (grounds == "rgb(246, 247, 249)") == (scheme == "light")
    assert page.evaluate(CONTRAST) == []
    first = page.evaluate("data.names[0]")
    page.goto(page.url.partition("#")[0] + f"#host={first}")
    assert host_page(page, first)
    assert page.evaluate(CONTRAST) == []


def test_a_narrow_screen_does_not_scroll_sideways(watched: Watched, files: dict[str, Path]) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    for name in ("racks", "large", "rehearsal"):
        page = watched.open(files[name])
        assert not page.evaluate(SCROLLS)
    page = watched.open(files["racks"], "#host=r01-h03")
    assert host_page(page, "r01-h03")
    assert not page.evaluate(SCROLLS)


def test_it_prints_with_the_pages_of_hosts_that_are_not_accepted(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".print-page > h2").count() == 5
    assert page.locator(".print-page").first.is_visible()
    assert not page.locator("nav.contents").is_visible()
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 without its margins
    assert not page.evaluate(SCROLLS)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".print-page").count() == 0
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert paper.count(b"/Type /Page") >= 6


def test_page_of_a_host_shows_power_temperature_and_clocks_over_time(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"], "#host=r01-h03")
    stage = page.get_by_role("region", name="Stage benchmark over time", exact=True)
    assert stage.locator("thead th").all_inner_texts()[0] == "Part"
    pictures = stage.get_by_role("img")
    labels = pictures.evaluate_all("all => all.map(one => one.getAttribute('aria-label')).filter(Boolean)")
    assert len(labels) == 4 * 3
    assert re.fullmatch(r"Power of GPU 0: \d+ W \(\d+ to \d+\)", labels[0])
    assert "no data for 4 s" in labels[3]
    assert all(
        box["width"] > 200 and box["height"] > 30 for box in (result.bounding_box() for result in pictures.all()) if box
    )
    assert "samples lost: NVML: timed out <b>" in stage.inner_text()
    assert "Began: GEMM 10 s · Stress 18 s · Collectives 38 s" in stage.inner_text()
    assert page.evaluate(CONTRAST) == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert not page.evaluate(SCROLLS)
    assert page.evaluate(
        "[...document.querySelectorAll('.trace .scroll')].every(one => one.scrollWidth <= one.clientWidth)"
    )
    page = watched.open(files["rehearsal"])
    link = page.locator("#list tbody th a").first
    name = link.inner_text()
    link.click()
    assert "over time" not in host_page(page, name)


def test_who_listens_finds_landmarks_headings_and_captions(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    for role in ("banner", "main", "navigation", "search"):
        assert page.get_by_role(role).count() == 1, role
    levels = [
        int(result[1])
        for result in page.locator("h1, h2, h3, h4").evaluate_all(
            "all => all.filter(one => one.checkVisibility()).map(one => one.tagName)"
        )
    ]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every(one => one.caption || one.closest('[aria-label], [aria-labelledby]'))"
    )
    assert page.evaluate("[...document.querySelectorAll('svg[role=img]')].every(one => one.getAttribute('aria-label'))")
    assert page.evaluate("[...document.querySelectorAll('input, select')].every(one => one.labels.length)")
    assert page.locator("#count").get_attribute("aria-live") == "polite"


def test_decision_and_failed_hosts_need_no_script(browser: Browser, files: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{files['racks'].as_uri()}#host=r02-h02")
    text = page.locator("body").inner_text()
    for said in ("FAIL", "Return the part (RMA)", "4 of 6 accepted", "r02-h02", "r02-h06", "no record: it is missing"):
        assert said in text
    assert not page.locator("#tools").is_visible()
    context.close()


def test_hostile_names_stay_text(watched: Watched, tmp_path: Path) -> None:
    for number, word in enumerate(HOSTILE[:4] + HOSTILE[8:11]):
        file = tmp_path / f"{number}.html"
        file.write_text(render_html(invaded(word)), encoding="utf-8")
        page = watched.open(file)
        page.evaluate("location.hash = `host=${encodeURIComponent(data.names[0])}`")
        page.wait_for_function("!document.getElementById('host-page').hidden")
        assert page.locator("#host-page h2").inner_text().strip()
        assert page.evaluate("document.querySelectorAll('script').length") == 2
        assert page.locator("img, iframe, object, [onmouseover], [onerror]").count() == 0
        page.locator("body").evaluate("location.hash = 'hosts'")


def test_ten_thousand_hosts_fit_open_and_are_searched_at_once(watched: Watched, files: dict[str, Path]) -> None:
    size = files["large"].stat().st_size
    assert size <= MAX_BYTES
    before = time.perf_counter()
    page = watched.open(files["large"])
    opened = time.perf_counter() - before
    assert page.locator("#count").inner_text().startswith("10\u202f000 hosts")
    assert page.locator("#map .rack").count() == 313
    took = page.evaluate(
        """() => { const find = document.getElementById('find'), times = [];
        for (const text of ['r1', 'r123-h', '16500012340', 'rejected', 'gemm throughput', '']) {
          const begin = performance.now(); find.value = text; filter(); document.body.offsetHeight;
          times.push(performance.now() - begin); }
        return times; }"""
    )
    reported = ", ".join(f"{each:.0f}" for each in took)
    print(f"10 000 hosts: {size / 1e6:.2f} MB, opens in {opened:.2f} s, searches in {reported} ms")
    page.locator("#find").fill("r123-h07")
    assert hosts_listed(page) == ["r123-h07"]
    page.locator("#list a").click()
    text = host_page(page, "r123-h07")
    assert "rackproof report runs/20260" not in text
    assert "rackproof report runs/20261121T040000Z --host r123-h07" in text
    bad = page.evaluate("names.find((name, number) => decisionOf[number] === 1)")
    page.goto(f"{files['large'].as_uri()}#host={bad}")
    assert "Reproduce" in host_page(page, bad)


def test_a_cell_of_the_map_leads_to_its_host(watched: Watched, files: dict[str, Path]) -> None:
    page = watched.open(files["large"])
    picture = page.locator("#map .rack svg").nth(3)
    picture.scroll_into_view_if_needed()
    picture.click(position={"x": 3 * 11 + 5, "y": 11 + 5})
    page.wait_for_url("**#host=r003-h11")


def test_a_fleet_of_which_every_host_fails_fits_too() -> None:
    page = render_html(fleets.large(10_000, bad=60_000))
    assert len(page.encode()) <= MAX_BYTES
    data = json.loads(page.rpartition('id="data">')[2].partition("</script>")[0])
    assert len(data["names"]) == 10_000
    assert data["pages"]


@pytest.fixture(autouse=True)
def _quick(request: pytest.FixtureRequest) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{request.node.name}: {time.perf_counter() - begin:.1f} s")


def test_a_simulation_is_as_loud_as_a_rehearsal(watched: Watched, racks: FleetReport, tmp_path: Path) -> None:
    file = tmp_path / "simulated.html"
    file.write_text(render_html(replace(racks, simulated=True)), encoding="utf-8")
    page = watched.open(file)
    band = page.locator("aside.band")
    assert "SIMULATED" in band.inner_text()
    assert "SIMULATED" in page.title()
    page.evaluate("scrollTo(0, 5000)")
    assert band.bounding_box()["y"] == 0, "it stays in sight"
    assert page.evaluate("!/\\baccepted\\b/.test(document.querySelector('#hosts').innerText)")
