"""Find the failed parts of a fleet, and the identifiers of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, Cause, CausePart, Verdict, action_rank
from schemas.scopes import Scope

PART_ACTIONS = ("rma", "inspect_hardware", "reseat")
"""Actions (`schemas.reports.ACTIONS`) that need work on the part itself."""
OF_SERVERS = ("slow-files",)
"""Problems of the servers of a shared file system. No part of the host that they name is at fault."""
GPU, HOST = "gpu", "host"
MODULE: Mapping[str, str] = {
    "module_vendor": "optics.module.vendor",
    "module_part_number": "optics.module.part_number",
    "module_serial": "optics.module.serial",
    "module_firmware": "optics.module.firmware_version",
}
"""Identifier -> reading, for the transceiver module or cable in a port of the part. An empty port has none of them."""
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
        **MODULE,
    },
    "nic": {
        "model": "network.driver",
        "serial": "network.address",
        "pci_address": "network.pci_address",
        **MODULE,
    },
    "disk": {
        "model": "storage.disk.model",
        "serial": "storage.disk.serial",
        "firmware": "storage.disk.firmware",
        "pci_address": "storage.disk.pci_address",
    },
    "mc": {"label": "host.dimm.label"},
    "dimm": {
        "vendor": "host.dimm.manufacturer",
        "part_number": "host.dimm.part_number",
        "serial": "host.dimm.serial",
    },
    HOST: {
        "vendor": "host.system.vendor",
        "model": "host.system.product",
        "serial": "host.system.serial",
        "bios": "host.bios.version",
    },
}
"""Kind of part -> identifier -> name of the reading with its value.

The identifier `serial` is the node GUID of an HCA, and the MAC address of a NIC.
"""


@dataclass(frozen=True, kw_only=True)
class FailedPart:
    """A part of one host, the causes that name it (what is wrong with it), and the verdicts that show them."""

    host: str
    scope: str
    """Scope of the part: `gpu=3`, `hca=mlx5_0`, `host`."""
    serial: str
    """Serial of the part in the report; empty if the report has none."""
    causes: tuple[Cause, ...]
    """Causes with the verdict `fail` that name this part, including waived causes. The most urgent is first, as in the report."""
    findings: tuple[Verdict, ...]
    """Failed verdicts of these causes on this host, those with the most severe action first.

    Verdicts on other parts that the same cause names are left out.
    """
    open: tuple[Verdict, ...]
    """Inconclusive verdicts on the part."""

    @property
    def kind(self) -> str:
        """Return the kind: `gpu`, `hca`, `disk` … or `host`."""
        return Scope.parse(self.scope).device_kind

    @property
    def action(self) -> str:
        """Return the most severe action of the causes without a waiver; if all causes are waived, that of all causes."""
        blocking = [cause for cause in self.causes if cause.waiver is None] or self.causes
        return min((cause.action for cause in blocking), key=action_rank)

    @property
    def needs_part_work(self) -> bool:
        """Return whether a cause without a waiver has an action in PART_ACTIONS, and the cause is in the host.

        A rail, a switch and a server of a shared file system are not. Each host that uses them has such a part here.
        """
        is_in_host = not Scope.parse(self.scope).is_in_fabric
        return is_in_host and any(
            cause.action in PART_ACTIONS and cause.waiver is None and cause.problem not in OF_SERVERS
            for cause in self.causes
        )


def failed_parts(causes: Iterable[Cause], verdicts: Sequence[Verdict]) -> list[FailedPart]:
    """Return every part with a cause whose verdict is `fail`, in the order of the causes.

    Causes may also name a gang (the hosts of one multi-node launch), which is not a part.

    Args:
        causes: causes of the report.
        verdicts: all verdicts of the report. `Cause.verdicts` has positions in them.
    """
    by_part: dict[tuple[str, str], list[tuple[Cause, CausePart]]] = {}
    for cause in causes:
        for part in cause.parts if cause.verdict == FAIL else ():
            if not Scope.parse(part.scope).is_gang:
                by_part.setdefault((part.host, part.scope), []).append((cause, part))
    inconclusive: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.verdict == INCONCLUSIVE:
            inconclusive.setdefault((verdict.host, verdict.part_scope), []).append(verdict)
    return [
        FailedPart(
            host=host,
            scope=scope,
            serial=next((part.serial for _, part in members if part.serial), ""),
            causes=tuple(cause for cause, _ in members),
            findings=tuple(_findings([cause for cause, _ in members], verdicts, host, scope)),
            open=tuple(inconclusive.get((host, scope), ())),
        )
        for (host, scope), members in by_part.items()
    ]


def _findings(causes: Iterable[Cause], verdicts: Sequence[Verdict], host: str, scope: str) -> list[Verdict]:
    """Return the failed verdicts of the causes on `host`, except verdicts on other parts that the same cause names."""
    findings = []
    for cause in causes:
        others = {part.scope for part in cause.parts if part.host == host} - {scope}
        of_host = (verdicts[position] for position in cause.verdicts if verdicts[position].host == host)
        findings += [item for item in of_host if item.verdict == FAIL and item.part_scope not in others]
    return sorted(findings, key=lambda verdict: action_rank(verdict.action))


def is_within(scope: str, part_scope: str) -> bool:
    """Return whether `scope` is the part itself, or a component of it, such as `gpu=0,link=3` of `gpu=0`."""
    return Scope.parse(part_scope).contains(scope)


def read_identifiers(part: FailedPart, observations: Iterable[Observation]) -> tuple[dict[str, str], dict[str, str]]:
    """Return identifier -> last measured value, and identifier -> why it has no value.

    The serial in the report takes precedence over a measured serial. An identifier of MODULE that was not observed is in neither
    mapping.
    """
    key_by_reading = {name: key for key, name in IDENTITY_READINGS.get(part.kind, {}).items()}
    identifiers: dict[str, str] = {}
    missing = dict.fromkeys((key for key in key_by_reading.values() if key not in MODULE), "not observed")
    ports = _failed_ports(part)
    for item in observations:
        is_of_module = item.name.startswith("optics.module.") and any(is_within(item.scope, port) for port in ports)
        if item.name in key_by_reading and (item.scope == part.scope or is_of_module):
            key = key_by_reading[item.name]
            if item.status == MEASURED:
                identifiers[key] = str(item.value)
            else:
                missing[key] = f"{item.status}: {item.reason}"
    if part.serial:
        identifiers["serial"] = part.serial
    ordered = {key: identifiers[key] for key in IDENTITY_READINGS.get(part.kind, {}) if key in identifiers}
    return {**ordered, **identifiers}, {key: reason for key, reason in missing.items() if key not in identifiers}


def _failed_ports(part: FailedPart) -> list[str]:
    """Return the scopes of the ports that findings of the part name; the scope of the part if no finding names a port."""
    scopes = (Scope.parse(finding.scope) for finding in part.findings)
    ports = [f"{scope.device},port={scope.get('port')}" for scope in scopes if scope.get("port")]
    return ports or [part.scope]
