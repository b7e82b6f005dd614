"""Test that schemas/readings.json and docs/checks.md are current. With UPDATE_GOLDEN=1 in the environment, generate both files.

readings.json lists the readings of a simulated host that has every kind of device. checks.md lists the criteria of the pack
`common` and of the packs that it includes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fleet.judge.criteria import read_pack
from fleet.report.checks import checks
from schemas import readings
from tests import ROOT
from tests.fakes import links, nvml, whole

DOCS = ROOT / "docs" / "checks.md"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the expected text of readings.json. The simulated host has every kind of device, and errors in its kernel log."""
    with links.memory_directory() as folder:
        root = whole.build_host(folder)
        gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
        whole.append_kernel_log(root, f"NVRM: Xid (PCI:{gpu}): 79, pid=1, GPU has fallen off the bus.")
        whole.append_kernel_log(root, f"NVRM: GPU {links.GPUS[0]}: GPU has fallen off the bus.")
        whole.append_kernel_log(
            root, f"NVRM: Xid (PCI:{gpu}): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)"
        )
        whole.append_kernel_log(root, f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up")
        whole.append_kernel_log(root, "mlx5_core 0000:0d:00.0: device's health compromised - reached miss count")
        links.add_bond(root, "bond0", {links.PLAIN_INTERFACE: "up", links.ROCE_INTERFACE: "up"})
        links.add_efa(root)
        yield whole.run_program(root, nvml.build(tmp_path_factory.mktemp("nvml")), "readings")


def test_readings_catalogue_is_current(expected: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        readings.PATH.write_text(expected)
    assert expected == readings.PATH.read_text()


def test_checks_page_is_current() -> None:
    page = checks([read_pack("common")])
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(page)
    assert page == DOCS.read_text()
