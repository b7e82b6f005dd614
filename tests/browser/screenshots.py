"""The screenshots in docs/images, made again: `python -m tests.browser.screenshots`, or with the names of some of them.

The pictures are cut to a height at which a reader still sees something, and to few colours, so that none is over 250 kB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from fleet.judge.criteria import read_packs
from fleet.records.load import load
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from tests.browser import fleets
from tests.browser.conftest import CHROMIUM, QUIET

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 250_000
SIZES = {1280: 2600, 390: 2400}
"""Width -> so much of the page's height."""
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
    """Name of the picture -> address of the report it is of."""
    values = {}
    if "lab" in names:
        values["lab"] = _written(folder, "lab", render_html(fleets.lab()))
    if "h200" in names:
        values["h200"] = _written(folder, "h200", _of_run(ROOT / "docs" / "measurements" / "h200x4-burnin"))
    if {"demo", "host"} & names:
        run = folder / "demo"
        command = [sys.executable, str(ROOT / "rackproof"), "simulate", str(run), "--hosts", "64", "--racks", "8"]
        subprocess.run(
            [*command, *(word for fault in FAULTS for word in ("--fault", fault))],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        demo = _written(folder, "demo", _of_run(run))
        values |= {
            name: address for name, address in (("demo", demo), ("host", f"{demo}#host=r04-h08")) if name in names
        }
    return values


def _of_run(directory: Path) -> str:
    run = load(directory)
    packs = read_packs(run.plan.criteria)
    return render_html(merge(run.plan, run.evidence, packs, events=run.events, quarantined=run.quarantined))


def _written(folder: Path, name: str, html: str) -> str:
    path = folder / f"{name}.html"
    path.write_text(html, encoding="utf-8")
    return path.as_uri()


def shoot(browser: Browser, address: str, width: int, path: Path) -> None:
    """One picture, its height cut, in a palette."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    page.goto(address)
    height = min(SIZES[width], page.evaluate("document.documentElement.scrollHeight"))
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
    page.close()
    _fewer_colours(path)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def _fewer_colours(path: Path) -> None:
    """Pillow comes with torchvision; without it the pictures stay as they are."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(colors=128, dither=Image.Dither.NONE).save(path, optimize=True)


def main(names: list[str]) -> int:
    """Makes them; 1 where one is too large."""
    chosen = set(names) or {"lab", "h200", "demo", "host"}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        for name, address in pages(Path(folder), chosen).items():
            for width in SIZES:
                shoot(browser, address, width, IMAGES / f"report-{name}-{width}.png")
        browser.close()
    return int(any(path.stat().st_size > MOST_BYTES for path in IMAGES.glob("report-*.png")))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
