"""Fake `ethtool` and `mlxlink` that print captured outputs for the host that `tests.fakes.links` builds."""

from __future__ import annotations

from pathlib import Path

from tests import ROOT
from tests.fakes import links
from tests.fakes.host import write_program

DATA = ROOT / "tests/data/optics"
ETHTOOL, MLXLINK = "usr/sbin/ethtool", "usr/bin/mlxlink"
MODULES = {links.ROCE_INTERFACE: "qsfp28-sr4-healthy.v6.15.json", links.PLAIN_INTERFACE: "sfp28-aoc-healthy.v6.15.json"}
STATISTICS = {links.ROCE_INTERFACE: "ethtool-S-mlx5-healthy.txt", links.PLAIN_INTERFACE: "ethtool-S-bnxt-healthy.txt"}
HEALTHY_FEC = "show-fec-stats-rs.txt"
HEALTHY_LINK = "cx7-ndr-optical-healthy.mft431.json"


def install_programs(root: Path) -> None:
    """Install both programs, which print the outputs of a healthy host."""
    # The last argument of ethtool is the interface; the second argument of mlxlink is the device.
    write_program(
        root / ETHTOOL,
        'for interface; do :; done; case "$*" in *-m*) what=module;; *-S*) what=statistics;; *--show-fec*) what=fec;; '
        "*) exit 1;; esac; "
        'exec cat "$0.d/$interface.$what"',
    )
    write_program(root / MLXLINK, 'exec cat "$0.d/$2"')
    for interface, capture in MODULES.items():
        set_output(root, interface, "module", ethtool(capture))
        set_output(root, interface, "statistics", ethtool(STATISTICS[interface]))
        set_output(root, interface, "fec", ethtool(HEALTHY_FEC))
    for hca in (*links.IB, links.ROCE):
        set_link(root, hca, mlxlink(HEALTHY_LINK))


def ethtool(capture: str) -> str:
    """Return a captured output of ethtool."""
    return (DATA / "ethtool" / capture).read_text()


def mlxlink(capture: str) -> str:
    """Return a captured output of mlxlink."""
    return (DATA / "mlxlink" / capture).read_text()


def set_output(root: Path, interface: str, what: str, text: str) -> None:
    """Set what ethtool prints for an interface: its `module`, `fec` or `statistics`."""
    links.write(root, f"{ETHTOOL}.d/{interface}.{what}", text)


def set_link(root: Path, hca: str, text: str) -> None:
    """Set what mlxlink prints for an adapter."""
    links.write(root, f"{MLXLINK}.d/{hca}", text)
