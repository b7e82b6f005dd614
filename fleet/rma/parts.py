"""Find the failed parts of a fleet and how each is identified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.records import MEASURED, Observation
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, Verdict
from schemas.scopes import Scope

RETURNED = ("rma", "inspect_hardware", "reseat")
"""Actions that need work on the part itself."""
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
"""Kind of part -> identifier -> reading. The serial of an HCA is its node GUID, that of a NIC its MAC address."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of one host, and the verdicts on it."""

    host: str
    place: str
    """Scope of the part: `gpu=3`, `hca=mlx5_0`, `host`."""
    findings: tuple[Verdict, ...]
    """Failed verdicts, the most severe action first."""
    open: tuple[Verdict, ...]
    """Inconclusive verdicts."""

    @property
    def kind(self) -> str:
        """`gpu`, `hca`, `disk` … or `host`."""
        return Scope.parse(self.place).device_kind

    @property
    def serial(self) -> str:
        """Return the serial that the findings report, or an empty string."""
        return next((verdict.serial for verdict in (*self.findings, *self.open) if verdict.serial), "")

    @property
    def action(self) -> str:
        """Return the most severe action of the findings."""
        return min((verdict.action for verdict in self.findings), key=_action_rank, default="none")

    @property
    def returned(self) -> bool:
        """Return whether an unwaived finding needs work on the part."""
        return any(verdict.action in RETURNED and verdict.stands for verdict in self.findings)


def parts(verdicts: Iterable[Verdict]) -> list[Part]:
    """Return every part with a failed verdict. Verdicts on a gang belong to no part."""
    failed: dict[tuple[str, str], list[Verdict]] = {}
    unknown: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        document = {FAIL: failed, INCONCLUSIVE: unknown}.get(verdict.verdict)
        if document is not None and not Scope.parse(verdict.place).is_gang:
            document.setdefault((verdict.host, verdict.place), []).append(verdict)
    return [
        Part(
            host=host,
            place=slot_name,
            findings=tuple(sorted(document, key=lambda verdict: _action_rank(verdict.action))),
            open=tuple(unknown.get((host, slot_name), ())),
        )
        for (host, slot_name), document in failed.items()
    ]


def within(scope: str, slot_name: str) -> bool:
    """Return whether a scope is the part itself, or within it."""
    return Scope.parse(slot_name).contains(scope)


def identity(part: Part, observations: Iterable[Observation]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the identifiers of the part, as last read; and for those that could not be read, why."""
    wanted = {name: key for key, name in IDENTITY.get(part.kind, {}).items()}
    document: dict[str, str] = {}
    lost = dict.fromkeys(wanted.values(), "not observed")
    for item in observations:
        if item.scope == part.place and item.name in wanted:
            key = wanted[item.name]
            if item.status == MEASURED:
                document[key] = str(item.value)
            else:
                lost[key] = f"{item.status}: {item.reason}"
    if part.serial:
        document["serial"] = part.serial
    ordered = {key: document[key] for key in IDENTITY.get(part.kind, {}) if key in document}
    return {**ordered, **document}, {key: why for key, why in lost.items() if key not in document}


def _action_rank(action: str) -> int:
    return ACTIONS.index(action) if action in ACTIONS else len(ACTIONS)
