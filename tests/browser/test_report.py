"""Test the report page in a real browser: search, host pages, printing, accessibility, and no network requests."""

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
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from fleet.report.html.page import MAX_BYTES, render_html
from schemas.reports import FigureHistory, FleetReport, PartHistory, RunHistory, SeenBefore
from tests.browser import fleets
from tests.browser.conftest import WatchedPage
from tests.unit.fleet.report.test_render import HOSTILE, rehearsal, report_with_text

SCROLLS_SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"
LOW_CONTRAST = """() => {
  const channel = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => { const found = /^color\\(srgb ([\\d.]+) ([\\d.]+) ([\\d.]+)(?: \\/ ([\\d.]+))?/.exec(text);
    if (found) return [...found.slice(1, 4).map((part) => part * 255), found[4] === undefined ? 1 : +found[4]];
    const parts = text.match(/[\\d.]+/g).map(Number); return [...parts.slice(0, 3), parts[3] ?? 1]; };
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const backgroundOf = (node) => { for (; node; node = node.parentElement) {
    const style = getComputedStyle(node), found = parse(style.backgroundColor);
    if (style.backgroundImage !== "none") return null;
    if (found[3] === 1) return found; if (found[3] > 0) return null; } return [255, 255, 255, 1]; };
  const worst = [];
  for (const node of document.querySelectorAll("main *, header *, nav *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!hasText || !node.checkVisibility() || node.closest("svg, .dim, option")) continue;
    const below = backgroundOf(node); if (!below) continue;
    const [a, b] = [luminance(parse(getComputedStyle(node).color)), luminance(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) worst.push(`${node.tagName}.${node.className}: ${ratio.toFixed(2)} ${node.textContent.slice(0, 30)}`);
  }
  return worst; }"""

FEWER_SIBLINGS = """() => document.querySelectorAll("body *").forEach((parent) => { const seen = {};
  for (const child of [...parent.children]) { const kind = `${child.tagName} ${child.getAttribute("class")}`;
    seen[kind] = (seen[kind] ?? 0) + 1; if (seen[kind] > 4) child.remove(); } })"""
"""Remove each element that has four siblings with the same tag and class before it, such as the fifth row of a table."""


@pytest.fixture(scope="module")
def racks() -> FleetReport:
    """Return the report on two racks of six hosts each. Five of the twelve hosts are not accepted."""
    return fleets.demo(racks=2, hosts=6, gpus=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, racks: FleetReport) -> dict[str, Path]:
    """Write the reports and return name -> path."""
    folder = tmp_path_factory.mktemp("reports")
    reports = {"racks": racks, "large": fleets.large(), "rehearsal": rehearsal()}
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(render_html(report), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in reports}


def hosts_listed(page: Page) -> list[str]:
    return page.locator("#list tbody th").all_inner_texts()


def test_page_opens_with_decision_and_all_hosts(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    assert page.locator("h1").inner_text().split() == ["FINAL", "ACCEPTANCE:", "FAIL"]
    assert page.locator("#count").inner_text() == "12 hosts"
    assert page.locator("#map a").count() == 12
    assert hosts_listed(page)[:3] == ["r01-h03", "r02-h02", "r02-h04"]
    assert not page.locator("noscript").is_visible()
    assert not page.evaluate(SCROLLS_SIDEWAYS)


def test_list_filters_by_text_decision_action_and_rack(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    page.keyboard.press("/")
    page.keyboard.type("gemm r01")
    assert hosts_listed(page) == [], (
        "the search covers only the most urgent cause of a host; in r01, this is never GEMM"
    )
    page.locator("#find").fill("r01-h03-3")
    assert hosts_listed(page) == ["r01-h03"], "the search must find a host by the serial of its GPU"
    assert page.locator("#count").inner_text() == "1 of 12 hosts"
    assert page.locator("#map a.dim").count() == 11
    page.locator("#find").fill("no such thing")
    assert page.locator("#list").inner_text() == "No host matches."
    page.locator("#find").fill("")
    page.select_option("#only", label="incomplete")
    assert hosts_listed(page) == ["r01-h05", "r02-h06"]
    page.select_option("#only", label="not accepted")
    page.select_option("#act", label="Return the part (RMA)")
    assert hosts_listed(page) == ["r01-h03"]
    page.select_option("#act", label="any")
    page.get_by_role("button", name="r02").click()
    assert hosts_listed(page) == ["r02-h02", "r02-h04", "r02-h06"]


def host_page(page: Page, name: str) -> str:
    """Wait for the page of a host, which appears shortly after the URL changes, and return its text."""
    page.locator("#host-page h2", has_text=name).wait_for(state="visible")
    return page.locator("#host-page").inner_text()


def test_click_opens_the_host_page_and_back_returns_to_the_overview(
    watched: WatchedPage, files: dict[str, Path]
) -> None:
    page = watched.open(files["racks"])
    link = page.locator("#reasons a", has_text="r01-h03").first
    link.scroll_into_view_if_needed()
    link.click()
    assert page.url.endswith("#host=r01-h03")
    text = host_page(page, "r01-h03")
    for expected in ("r01-h03", "rejected", "GPU 3", "r01-h03-3", "Return the part (RMA)", "Margin", "Source",
                     "measured, h200x4-standard", "Evidence", "hosts/r01-h03.json",
                     "Package it for return", "--serial r01-h03-3"):  # fmt: skip
        assert expected in text
    assert not page.locator("#overview").is_visible()
    assert page.title().startswith("r01-h03 – FAIL")
    page.go_back()
    page.locator("#overview").wait_for(state="visible")
    assert not page.locator("#host-page").is_visible()


def test_page_of_an_adapter_shows_its_lanes_counters_and_neighbor(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"], "#host=r01-h03")
    host_page(page, "r01-h03")
    page.get_by_role("link", name="mlx5_0", exact=True).click()
    page.wait_for_url("**#hca=r01-h03%2Fmlx5_0")
    text = host_page(page, "mlx5_0")
    for expected in ("0000:1a:00.0", "nearest to GPU 0–1 (PIX)", "leaf01", "28.39.1002", "8.333 an hour", "AO800-2DR4"):
        assert expected in text
    picture = page.locator(".light svg").first
    label = picture.get_attribute("aria-label") or ""
    assert "5 no light" in label
    assert "alarm limits" in label
    assert picture.locator(".fail").count() == 1
    assert page.title().startswith("mlx5_0 of r01-h03")
    assert page.evaluate(LOW_CONTRAST) == []
    assert not page.evaluate(SCROLLS_SIDEWAYS)
    page.get_by_role("link", name="mlx5_1", exact=True).click()
    assert "no finding" in host_page(page, "mlx5_1")
    page.set_viewport_size({"width": 390, "height": 844})
    assert not page.evaluate(SCROLLS_SIDEWAYS)
    page.locator("#hosts").evaluate("location.hash = 'hosts'")
    page.get_by_role("link", name="adapter mlx5_0", exact=True).click()
    assert "failed" in host_page(page, "mlx5_0")
    watched.open(files["racks"], "#hca=r01-h03/none").reload()
    assert host_page(page, "r01-h03")


def test_keys_open_the_host_page_and_return_to_the_overview(watched: WatchedPage, files: dict[str, Path]) -> None:
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


def test_url_fragment_selects_a_host_or_a_rack_or_a_search(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"], "#host=r02-h02")
    assert page.locator("#host-page h2").inner_text().startswith("r02-h02")
    for fragment, host_count in (("#rack=r02", 6), ("#find=r02-h", 6)):
        page = watched.open(files["racks"], fragment)
        page.reload()
        assert page.locator("#list tbody tr").count() == host_count
        assert page.get_by_text("This report has no").count() == 0


@pytest.mark.parametrize(
    ("fragment", "sentence"),
    [
        ("#host=unknown", "This report has no host unknown."),
        ("#hca=unknown/mlx5_0", "This report has no host unknown."),
        ("#rack=unknown", "This report has no rack unknown."),
    ],
)
def test_url_fragment_of_an_unknown_host_or_rack_shows_a_sentence_and_all_hosts(
    watched: WatchedPage, files: dict[str, Path], fragment: str, sentence: str
) -> None:
    page = watched.open(files["racks"], fragment)
    page.reload()
    assert page.locator("p.empty", has_text=sentence).is_visible()
    assert page.locator("#announce").inner_text() == sentence
    assert page.locator("#list tbody tr").count() == 12


@pytest.mark.parametrize("name", ["racks", "rehearsal"])
def test_every_text_has_enough_contrast_in_light_and_dark(
    watched: WatchedPage, files: dict[str, Path], name: str
) -> None:
    page = watched.open(files[name])
    assert low_contrast(page) == {"light": [], "dark": []}
    first = page.evaluate("data.names[0]")
    page.goto(page.url.partition("#")[0] + f"#host={first}")
    assert host_page(page, first)
    assert low_contrast(page) == {"light": [], "dark": []}
    if name == "racks":
        page.goto(page.url.partition("#")[0] + "#hca=r01-h03/mlx5_0")
        assert host_page(page, "mlx5_0")
        assert low_contrast(page) == {"light": [], "dark": []}


def low_contrast(page: Page) -> dict[str, list[str]]:
    """Return color scheme -> texts that have too little contrast in it. Check that the two schemes have different backgrounds."""
    result, backgrounds = {}, {}
    schemes: tuple[Any, ...] = ("light", "dark")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)
        backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        result[scheme] = page.evaluate(LOW_CONTRAST)
    assert backgrounds["light"] == "rgb(246, 247, 249)" != backgrounds["dark"]
    return result


def test_narrow_screen_does_not_scroll_sideways(watched: WatchedPage, files: dict[str, Path]) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    for name in ("racks", "large", "rehearsal"):
        page = watched.open(files[name])
        assert not page.evaluate(SCROLLS_SIDEWAYS)
    page = watched.open(files["racks"], "#host=r01-h03")
    assert host_page(page, "r01-h03")
    assert not page.evaluate(SCROLLS_SIDEWAYS)


def test_printed_report_includes_the_pages_of_hosts_that_are_not_accepted(
    watched: WatchedPage, files: dict[str, Path]
) -> None:
    page = watched.open(files["racks"])
    # A group with many reasons shows some and has the others in `<details class="rest">`. This report has no such group, so add
    # an open and a closed element of this kind.
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<details class=rest open></details><details class=rest></details>')"
    )
    sections = page.locator("details.rest")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert sections.evaluate_all("sections => sections.every(section => section.open)")
    assert page.locator(".print-host > h3").count() == 5
    assert page.locator(".print-host").first.is_visible()
    assert not page.locator("nav.contents").is_visible()
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 without its margins
    assert not page.evaluate(SCROLLS_SIDEWAYS)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".print-host").count() == 0
    assert sections.evaluate_all("sections => sections.map(section => section.open)") == [True, False]
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    assert 4 <= len(re.findall(rb"/Type /Page\b", paper)) <= 24


def test_page_of_a_host_shows_power_temperature_and_clocks_over_time(
    watched: WatchedPage, files: dict[str, Path]
) -> None:
    page = watched.open(files["racks"], "#host=r01-h03")
    stage = page.get_by_role("region", name="Stage benchmark over time", exact=True)
    assert "1 min 00 s" in stage.locator("h4").inner_text()
    pictures = stage.get_by_role("img")
    labels = pictures.evaluate_all("all => all.map(image => image.getAttribute('aria-label')).filter(Boolean)")
    assert len(labels) == 4 * 3
    assert re.fullmatch(r"Power of GPU 0: \d+ W \(\d+ to \d+\)", labels[0])
    assert "no data for 4 s" in labels[3]
    assert all(
        box["width"] > 200 and box["height"] > 30
        for box in (picture.bounding_box() for picture in pictures.all())
        if box
    )
    assert "samples lost: NVML: timed out <b>" in stage.inner_text()
    assert "Began: GEMM 10 s · Stress 18 s · Collectives 38 s" in stage.inner_text()
    assert page.evaluate(LOW_CONTRAST) == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert not page.evaluate(SCROLLS_SIDEWAYS)
    assert page.evaluate(
        "[...document.querySelectorAll('.trace .scroll')].every(box => box.scrollWidth <= box.clientWidth)"
    )
    page = watched.open(files["rehearsal"])
    link = page.locator("#list tbody th a").first
    name = link.inner_text()
    link.click()
    assert "over time" not in host_page(page, name)


def test_page_of_a_host_compares_its_figures_with_former_runs(
    watched: WatchedPage, racks: FleetReport, tmp_path: Path
) -> None:
    values = (6.9e14, 6.92e14, 6.85e14, 6.7e14)
    parts = tuple(PartHistory(host="r01-h03", part=f"gpu={gpu}", percentile=42.0, values=values) for gpu in range(4))
    figure = FigureHistory(
        name="gemm.throughput", stage="benchmark", params={"dtype": "bf16"}, unit="FLOP/s", model="NVIDIA H200",
        accepted=310, median=6.9e14, parts=parts,
    )  # fmt: skip
    position = next(number for number, cause in enumerate(racks.causes) if cause.host == "r01-h03")
    seen = SeenBefore(cause=position, parts=1, runs=3, last="2026-02-01", run="r2")
    file = tmp_path / "report.html"
    file.write_text(render_html(replace(racks, history=RunHistory(runs=4, figures=(figure,), causes=(seen,)))))
    page = watched.open(file, "#host=r01-h03")
    assert "3 times, last on 2026-02-01 in r2" in page.locator(".card").first.inner_text()
    page.get_by_text("Compared with former runs: 4 figures").click()
    rows = page.get_by_role("region", name="Place among accepted parts").locator("tbody tr")
    assert [text.strip() for text in rows.nth(1).inner_text().split("\t")][1:] == [
        "GPU 1", "percentile 42 of 310 accepted H200", "690 TFLOP/s to 670 TFLOP/s over 4 runs",
    ]  # fmt: skip
    pictures = rows.get_by_role("img")
    assert pictures.count() == 4
    assert all(box["width"] > 100 and box["height"] > 25 for item in pictures.all() if (box := item.bounding_box()))
    assert page.evaluate(LOW_CONTRAST) == []
    page.set_viewport_size({"width": 390, "height": 900})
    assert not page.evaluate(SCROLLS_SIDEWAYS)


def test_screen_reader_finds_landmarks_headings_and_captions(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    for role in ("banner", "main", "navigation", "search"):
        assert page.get_by_role(role).count() == 1, role
    levels = [
        int(tag[1])
        for tag in page.locator("h1, h2, h3, h4").evaluate_all(
            "all => all.filter(heading => heading.checkVisibility()).map(heading => heading.tagName)"
        )
    ]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every(item => item.caption || item.closest('[aria-label], [aria-labelledby]'))"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].every(image => image.getAttribute('aria-label'))"
    )
    assert page.evaluate("[...document.querySelectorAll('input, select')].every(field => field.labels.length)")
    assert page.locator("#count").get_attribute("aria-live") == "polite"


def test_axe_finds_nothing_serious(browser: Browser, files: dict[str, Path]) -> None:
    """Axe checks pages only in the light color scheme, because dark pages differ only in their colors.

    Its check of the contrast is slow, so only one page gets it. Other tests check the contrast of most pages (LOW_CONTRAST).
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page = context.new_page()
    page.goto(files["racks"].as_uri())
    assert serious_violations(page) == []
    page.set_viewport_size({"width": 390, "height": 900})
    for fragment, title in (("#host=r01-h03", "r01-h03"), ("#hca=r01-h03/mlx5_0", "mlx5_0")):
        page.goto(f"{files['racks'].as_uri()}{fragment}")
        assert host_page(page, title)
        assert serious_violations(page) == []
    page.goto(files["rehearsal"].as_uri())
    assert serious_violations(page, contrast=True) == []
    context.close()


def serious_violations(page: Page, *, contrast: bool = False) -> list[str]:
    """Return the serious and critical violations that axe finds, each with the HTML of the first element at fault.

    Most rows and plots are removed first, because they are all alike and axe then takes a fifth of the time.

    `contrast`: also check the contrast of texts.
    """
    page.evaluate(FEWER_SIBLINGS)
    options = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": contrast}}}
    return [
        f"{item['id']}: {item['nodes'][0]['html'][:200]}"
        for item in Axe().run(page, options=options).response["violations"]
        if item["impact"] in ("serious", "critical")
    ]


def test_navigation_is_visible_on_a_phone_and_marks_the_section_in_view(
    browser: Browser, files: dict[str, Path]
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto(files["rehearsal"].as_uri())
    page.evaluate("document.getElementById('figures').scrollIntoView()")
    page.wait_for_selector(".contents a[aria-current]")
    assert page.locator(".contents a[aria-current]").inner_text() == "Figures"
    box = page.locator(".contents").bounding_box()
    assert box is not None
    covering = page.evaluate(
        "([x, y]) => document.elementFromPoint(x, y).closest('.contents') !== null", [20, box["y"] + 12]
    )
    assert covering, "nothing may cover the navigation"
    context.close()


def test_arrow_keys_step_through_the_values_of_a_plot(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["racks"])
    plot = page.locator(".plot > svg[tabindex]:has(circle ~ circle)").first
    plot.focus()
    first = page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    assert first
    assert page.locator("#tip").is_visible()
    assert page.locator("#tip").inner_text() == plot.locator("title").nth(1).inner_html()


def test_decision_and_failed_hosts_are_shown_without_javascript(browser: Browser, files: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{files['racks'].as_uri()}#host=r02-h02")
    text = page.locator("body").inner_text()
    for expected in (
        "FAIL",
        "Return the part (RMA)",
        "4 of 6 accepted",
        "r02-h02",
        "r02-h06",
        "it is missing",
    ):
        assert expected in text
    assert not page.locator("#tools").is_visible()
    context.close()


def test_hostile_names_are_shown_as_text(watched: WatchedPage, tmp_path: Path) -> None:
    for number, word in enumerate(HOSTILE[:4] + HOSTILE[8:11]):
        file = tmp_path / f"{number}.html"
        file.write_text(render_html(report_with_text(word)), encoding="utf-8")
        page = watched.open(file)
        page.evaluate("location.hash = `host=${encodeURIComponent(data.names[0])}`")
        page.wait_for_function("!document.getElementById('host-page').hidden")
        assert page.locator("#host-page h2").inner_text().strip()
        assert page.evaluate("document.querySelectorAll('script').length") == 2
        assert page.locator("img, iframe, object, [onmouseover], [onerror]").count() == 0
        page.locator("body").evaluate("location.hash = 'hosts'")


def test_page_of_ten_thousand_hosts_opens_and_can_be_searched(watched: WatchedPage, files: dict[str, Path]) -> None:
    size = files["large"].stat().st_size
    assert size <= MAX_BYTES
    begin = time.perf_counter()
    page = watched.open(files["large"])
    opened_s = time.perf_counter() - begin
    assert page.locator("#count").inner_text().startswith("10\u202f000 hosts")
    assert page.locator("#map .rack").count() == 313
    search_times_ms = page.evaluate(
        """() => { const find = document.getElementById('find'), times = [];
        for (const text of ['r1', 'r123-h', '16500012340', 'rejected', 'gemm throughput', '']) {
          const begin = performance.now(); find.value = text; filter(); document.body.offsetHeight;
          times.push(performance.now() - begin); }
        return times; }"""
    )
    times = ", ".join(f"{time_ms:.0f}" for time_ms in search_times_ms)
    print(f"10 000 hosts: {size / 1e6:.2f} MB, opens in {opened_s:.2f} s, searches in {times} ms")
    page.locator("#find").fill("r123-h07")
    assert hosts_listed(page) == ["r123-h07"]
    page.locator("#list a").click()
    text = host_page(page, "r123-h07")
    assert "rackproof report runs/20260" not in text
    assert "rackproof report runs/20261121T040000Z --host r123-h07" in text
    failed = page.evaluate("names.find((name, number) => decisionOf[number] === 1)")
    page.goto(f"{files['large'].as_uri()}#host={failed}")
    assert "Copy" in host_page(page, failed)


def test_click_on_a_map_cell_opens_the_page_of_its_host(watched: WatchedPage, files: dict[str, Path]) -> None:
    page = watched.open(files["large"])
    picture = page.locator("#map .rack svg").nth(3)
    picture.scroll_into_view_if_needed()
    picture.click(position={"x": 3 * 11 + 5, "y": 11 + 5})
    page.wait_for_url("**#host=r003-h11")


def test_page_of_a_fleet_with_hardly_any_accepted_host_stays_within_its_size_limit() -> None:
    page = render_html(fleets.large(10_000, bad=60_000))
    assert len(page.encode()) <= MAX_BYTES
    data = json.loads(page.rpartition('id="data">')[2].partition("</script>")[0])
    assert len(data["names"]) == 10_000
    assert data["pages"]


@pytest.fixture(autouse=True)
def _print_duration(request: pytest.FixtureRequest) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    print(f"{request.node.name}: {time.perf_counter() - begin:.1f} s")


def test_simulation_is_marked_like_a_rehearsal(watched: WatchedPage, racks: FleetReport, tmp_path: Path) -> None:
    file = tmp_path / "simulated.html"
    file.write_text(render_html(replace(racks, simulated=True)), encoding="utf-8")
    page = watched.open(file)
    band = page.locator("aside.band")
    assert "SIMULATED" in band.inner_text()
    assert "SIMULATED" in page.title()
    page.evaluate("scrollTo(0, 5000)")
    assert band.bounding_box()["y"] == 0, "the band must stay visible"
    assert page.evaluate("!/\\baccepted\\b/.test(document.querySelector('#hosts').innerText)")
