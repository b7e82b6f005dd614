"""The documentation builds as a site without a warning, and a broken link fails the build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from deploy.site import links
from tests import ROOT


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    accept = (tmp_path / "site/accept/index.html").read_text(encoding="utf-8")
    assert 'href="../security/#the-exporter-stays"' in accept
    contributing = "https://github.com/rackproof/rackproof/blob/main/CONTRIBUTING.md"
    assert contributing in (tmp_path / "site/index.html").read_text(encoding="utf-8")


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# Page\n", encoding="utf-8")
    broken = ("missing.md", "../missing.md", "page.md#no-such-heading")
    (docs / "index.md").write_text("".join(f"[link]({link})\n" for link in broken), encoding="utf-8")
    validation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["validation"]
    config = {
        "site_name": "test",
        "repo_url": "https://example.org",
        "validation": {"links": validation["links"]},
        "hooks": [str(Path(links.__file__))],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    warnings = [
        line for line in done.stderr.splitlines() if line.startswith("WARNING") or "does not contain an anchor" in line
    ]
    assert [link for link in broken if not any(f"'{link}'" in line for line in warnings)] == []
