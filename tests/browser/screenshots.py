"""Take the screenshots in docs/images: `python -m tests.browser.screenshots [NAME …]`.

Each NAME is one of `lab`, `h200`, `demo`, `host` and `pulse`; without a name, all are taken. To keep the pictures small, their
height and number of colours are limited. The exit code is 1 if a file docs/images/report-*.png is larger than 250 kB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

from fleet.judge.criteria import read_packs
from fleet.records.load import load
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from tests.browser import fleets
from tests.browser.conftest import CHROMIUM, CHROMIUM_ARGUMENTS

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 250_000
SIZES = {1280: 2200, 390: 2400}
"""Width of the window -> largest height of the picture, in pixels."""
FAULTS = (
    "ecc",
    "slow_nic:r03-h02:5",
    "unreachable:r05-h01",
    "slow_gpu:r02-h03:1",
    "thermal:r04-h02:5",
    "pcie_narrow:r04-h08:3",
    "hung:r07-h05",
)


def pages(folder: Path, names: set[str]) -> dict[str, str]:
    """Write the reports for the pictures `names` to `folder`. Return picture name -> URL of its report."""
    urls = {}
    if "lab" in names:
        urls["lab"] = _write_page(folder, "lab", render_html(fleets.lab()))
    if "h200" in names:
        urls["h200"] = _write_page(folder, "h200", _render_run(ROOT / "docs" / "measurements" / "h200x4-standard"))
    if "pulse" in names:
        page = _write_page(folder, "pulse", _render_run(ROOT / "docs" / "measurements" / "h200x2-extended"))
        urls["pulse"] = f"{page}#host=h200x2"
    if {"demo", "host"} & names:
        run = folder / "demo"
        command = [sys.executable, str(ROOT / "rackproof"), "simulate", str(run), "--hosts", "64", "--racks", "8"]
        subprocess.run(
            [*command, *(word for fault in FAULTS for word in ("--fault", fault))],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        demo = _write_page(folder, "demo", _render_run(run))
        urls |= {name: url for name, url in (("demo", demo), ("host", f"{demo}#host=r04-h08")) if name in names}
    return urls


def _render_run(directory: Path) -> str:
    run = load(directory)
    packs = read_packs(run.plan.criteria)
    return render_html(merge(run.plan, run.evidence, packs, events=run.events, quarantined=run.quarantined))


def _write_page(folder: Path, name: str, html: str) -> str:
    path = folder / f"{name}.html"
    path.write_text(html, encoding="utf-8")
    return path.as_uri()


def shoot(browser: Browser, url: str, width: int, path: Path, scheme: Literal["light", "dark"] = "light") -> None:
    """Take one picture, with limited height and number of colours."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(url)
    height = min(SIZES[width], page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
    page.close()
    _reduce_colours(path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def shoot_print(browser: Browser, url: str, path: Path) -> None:
    """Take a picture of the first page as it is printed, with the width of A4 paper less the margins."""
    page = browser.new_page(viewport={"width": 720, "height": 1010}, color_scheme="light")
    page.goto(url)
    page.emulate_media(media="print")
    page.screenshot(path=path)
    page.close()
    _reduce_colours(path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def shoot_pulse(browser: Browser, url: str, path: Path) -> None:
    """Take a picture of the last section of plots on the page of a host: the power under pulsed load, over one period."""
    page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
    page.goto(url)
    page.locator("section.trace").last.screenshot(path=path)
    page.close()
    _reduce_colours(path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def _reduce_colours(path: Path) -> None:
    """Reduce the picture to 128 colours. If Pillow is not installed, leave the picture as it is."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(colors=128, dither=Image.Dither.NONE).save(path, optimize=True)


def main(names: list[str]) -> int:
    """Take the pictures. Return 1 if a file docs/images/report-*.png, new or old, is larger than MAX_BYTES."""
    chosen = set(names) or {"lab", "h200", "demo", "host", "pulse"}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        for name, url in pages(Path(folder), chosen).items():
            if name == "pulse":
                shoot_pulse(browser, url, IMAGES / "report-pulse.png")
                continue
            for width in SIZES:
                shoot(browser, url, width, IMAGES / f"report-{name}-{width}.png")
            if name == "demo":
                shoot(browser, url, 1280, IMAGES / "report-demo-dark.png", "dark")
                shoot_print(browser, url, IMAGES / "report-demo-print.png")
        browser.close()
    return int(any(path.stat().st_size > MAX_BYTES for path in IMAGES.glob("report-*.png")))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
