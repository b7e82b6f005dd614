"""docs/metrics.md lists the metrics of the exporter on a complete GPU host. UPDATE_GOLDEN=1 rewrites it."""

from __future__ import annotations

import os
from pathlib import Path

from tests import ROOT
from tests.fakes import links, nvml, whole

DOCS = ROOT / "docs" / "metrics.md"


def test_metrics_page_lists_the_exported_metrics(tmp_path: Path) -> None:
    root = whole.tree(tmp_path / "root")
    gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
    whole.log(root, f"NVRM: Xid (PCI:{gpu}): 79, pid=1, GPU has fallen off the bus.")
    whole.log(root, f"NVRM: Xid (PCI:{gpu}): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)")
    whole.log(root, f"NVRM: GPU {links.GPUS[0]}: GPU has fallen off the bus.")
    whole.log(root, f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up")
    library = nvml.build(tmp_path / "nvml")
    links.add_bond(root, "bond0", {links.PLAIN_INTERFACE: "up", links.ROCE_INTERFACE: "up"})
    scenario = nvml.write(tmp_path / "scenario", "healthy-h100x8", *whole.NVML)
    page = nvml.python(["-m", "tests.fakes.whole", root, "metrics"], library, scenario)
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(page)
    assert page == DOCS.read_text()
