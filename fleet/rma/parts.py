"""Find the failed parts of a fleet, and the identifiers of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from schemas.records import MEASURED, Observation
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, Verdict
from schemas.scopes import Scope

PART_ACTIONS = ("rma", "inspect_hardware", "reseat")
"""Actions that need work on the part itself."""
GPU, HOST = "gpu", "host"
IDENTITY_READINGS: Mapping[str, Mapping[str, str]] = {
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
"""Kind of part -> identifier -> reading. The serial of an HCA is its node GUID; the serial of a NIC is its MAC address."""


@dataclass(frozen=True, kw_only=True)
class FailedPart:
    """A part of one host, and the verdicts on it."""

    host: str
    scope: str
    """Scope of the part: `gpu=3`, `hca=mlx5_0`, `host`."""
    findings: tuple[Verdict, ...]
    """Failed verdicts, the most severe action first."""
    open: tuple[Verdict, ...]
    """Inconclusive verdicts."""

    @property
    def kind(self) -> str:
        """Return the kind: `gpu`, `hca`, `disk` … or `host`."""
        return Scope.parse(self.scope).device_kind

    @property
    def serial(self) -> str:
        """Return the serial that the findings report; empty if none does."""
        return next((verdict.serial for verdict in (*self.findings, *self.open) if verdict.serial), "")

    @property
    def action(self) -> str:
        """Return the most severe action of the findings."""
        return min((verdict.action for verdict in self.findings), key=_action_rank, default="none")

    @property
    def needs_part_work(self) -> bool:
        """Return whether a finding without a waiver requires work on the part."""
        return any(verdict.action in PART_ACTIONS and verdict.blocks_acceptance for verdict in self.findings)


def failed_parts(verdicts: Iterable[Verdict]) -> list[FailedPart]:
    """Return every part with a failed verdict. Verdicts on a gang belong to no part."""
    failed: dict[tuple[str, str], list[Verdict]] = {}
    inconclusive: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        verdicts_by_part = {FAIL: failed, INCONCLUSIVE: inconclusive}.get(verdict.verdict)
        if verdicts_by_part is not None and not Scope.parse(verdict.part_scope).is_gang:
            verdicts_by_part.setdefault((verdict.host, verdict.part_scope), []).append(verdict)
    return [
        FailedPart(
            host=host,
            scope=part_scope,
            findings=tuple(sorted(findings, key=lambda verdict: _action_rank(verdict.action))),
            open=tuple(inconclusive.get((host, part_scope), ())),
        )
        for (host, part_scope), findings in failed.items()
    ]


def is_within(scope: str, part_scope: str) -> bool:
    """Return whether a scope is the part itself, or within it."""
    return Scope.parse(part_scope).contains(scope)


def read_identifiers(part: FailedPart, observations: Iterable[Observation]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the last reading of each identifier of the part, and for the others the reason why they are missing."""
    key_by_reading = {name: key for key, name in IDENTITY_READINGS.get(part.kind, {}).items()}
    identifiers: dict[str, str] = {}
    missing = dict.fromkeys(key_by_reading.values(), "not observed")
    for item in observations:
        if item.scope == part.scope and item.name in key_by_reading:
            key = key_by_reading[item.name]
            if item.status == MEASURED:
                identifiers[key] = str(item.value)
            else:
                missing[key] = f"{item.status}: {item.reason}"
    if part.serial:
        identifiers["serial"] = part.serial
    ordered = {key: identifiers[key] for key in IDENTITY_READINGS.get(part.kind, {}) if key in identifiers}
    return {**ordered, **identifiers}, {key: reason for key, reason in missing.items() if key not in identifiers}


def _action_rank(action: str) -> int:
    return ACTIONS.index(action) if action in ACTIONS else len(ACTIONS)
