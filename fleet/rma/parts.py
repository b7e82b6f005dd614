"""Which parts of a fleet failed, and what each of them is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.records import MEASURED, Observation
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, Verdict
from schemas.scopes import Scope

RETURNED = ("rma", "inspect_hardware", "reseat")
"""Actions for which somebody has to touch the part."""
GPU, HOST = "gpu", "host"
IDENTITY: Mapping[str, Mapping[str, str]] = {
    GPU: {
        "model": "gpu.name",
        "serial": "gpu.serial",
        "uuid": "gpu.uuid",
        "part_number": "gpu.part_number",
        "vbios": "gpu.vbios_version",
        "inforom": "gpu.inforom.version",
        "board_id": "gpu.board_id",
        "module_id": "gpu.module_id",
        "pci_address": "gpu.pci_bus_id",
    },
    "hca": {
        "model": "infiniband.hca.type",
        "psid": "infiniband.hca.board_id",
        "serial": "infiniband.hca.node_guid",
        "firmware": "infiniband.hca.firmware_version",
        "pci_address": "infiniband.hca.pci_address",
    },
    "nic": {
        "model": "network.driver",
        "serial": "network.address",
        "pci_address": "network.pci_address",
    },
    "disk": {"model": "storage.disk.model", "serial": "storage.disk.serial", "firmware": "storage.disk.firmware"},
    "mc": {"label": "host.dimm.label"},
    HOST: {
        "vendor": "host.system.vendor",
        "model": "host.system.product",
        "serial": "host.system.serial",
        "bios": "host.bios.version",
    },
}
"""Kind of part -> what identifies it -> the reading that has it. A HCA is known by its node GUID, a NIC by its address."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of one host, and what was found of it."""

    host: str
    place: str
    """Scope of the part: `gpu=3`, `hca=mlx5_0`, `host`."""
    findings: tuple[Verdict, ...]
    """What failed, the gravest action first."""
    open: tuple[Verdict, ...]
    """What could not be told of it."""

    @property
    def kind(self) -> str:
        """`gpu`, `hca`, `disk` … or `host`."""
        return Scope.parse(self.place).device_kind

    @property
    def serial(self) -> str:
        """As its findings tell it; empty where none does."""
        return next((verdict.serial for verdict in (*self.findings, *self.open) if verdict.serial), "")

    @property
    def action(self) -> str:
        """The gravest that a finding asks for."""
        return min((verdict.action for verdict in self.findings), key=_gravity, default="none")

    @property
    def returned(self) -> bool:
        """Somebody has to touch it, and nobody answers for leaving it in."""
        return any(verdict.action in RETURNED and verdict.stands for verdict in self.findings)


def parts(verdicts: Iterable[Verdict]) -> list[Part]:
    """Every part of which something failed. What is of a gang of hosts is of no part."""
    failed: dict[tuple[str, str], list[Verdict]] = {}
    unknown: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        found = {FAIL: failed, INCONCLUSIVE: unknown}.get(verdict.verdict)
        if found is not None and not Scope.parse(verdict.place).is_gang:
            found.setdefault((verdict.host, verdict.place), []).append(verdict)
    return [
        Part(
            host=host,
            place=place,
            findings=tuple(sorted(found, key=lambda verdict: _gravity(verdict.action))),
            open=tuple(unknown.get((host, place), ())),
        )
        for (host, place), found in failed.items()
    ]


def within(scope: str, place: str) -> bool:
    """Whether a scope is the part's own, or below it."""
    return Scope.parse(place).contains(scope)


def identity(part: Part, seen: Iterable[Observation]) -> tuple[dict[str, str], dict[str, str]]:
    """What identifies the part, as it was read last; and of what could not be read why."""
    wanted = {name: key for key, name in IDENTITY.get(part.kind, {}).items()}
    found: dict[str, str] = {}
    lost = dict.fromkeys(wanted.values(), "not observed")
    for item in seen:
        if item.scope == part.place and item.name in wanted:
            key = wanted[item.name]
            if item.status == MEASURED:
                found[key] = str(item.value)
            else:
                lost[key] = f"{item.status}: {item.reason}"
    if part.serial:
        found["serial"] = part.serial
    told = {key: found[key] for key in IDENTITY.get(part.kind, {}) if key in found}
    return {**told, **found}, {key: why for key, why in lost.items() if key not in found}


def _gravity(action: str) -> int:
    return ACTIONS.index(action) if action in ACTIONS else len(ACTIONS)
