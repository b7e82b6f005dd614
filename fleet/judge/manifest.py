"""Compare the manifest with the parts of the hosts: each part in its slot, elsewhere or missing, and parts that were not ordered.

A part is identified by its label: the serial of a GPU, the GUID of an InfiniBand adapter (or of a RoCE one), the
address of an Ethernet port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.host_view import HostView
from schemas.plans import GPU, NIC, Part, Plan
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import Scope, pci_address

CRITERION, EXTRA = "manifest", "manifest-extra"
SERIAL, GUID, MAC = "gpu.serial", "infiniband.hca.node_guid", "network.address"
LAYER = "infiniband.link_layer"
_GUID_DIGITS = 16
_WHAT = {GUID: "GUID", MAC: "address"}


def identity(kind: str, serial: str) -> str:
    """Normalize a serial, GUID or MAC address for comparison.

    Spreadsheets drop leading zeros of a serial, and GUIDs are written with or without colons, hyphens and `0x`.
    """
    if kind == GPU:
        return serial.strip().upper().lstrip("0")
    return serial.strip().lower().removeprefix("0x").translate(str.maketrans("", "", ":-. "))


@dataclass(frozen=True, kw_only=True)
class LocatedPart:
    """A part and its location."""

    host: str
    name: str
    """Name of the observation with its serial."""
    scope: str
    serial: str
    slots: frozenset[str]
    """All names of its slot: index, PCI address, name of the adapter."""

    ethernet: bool = False
    """Whether the part is an adapter with a known link layer and no InfiniBand port."""

    @property
    def location(self) -> str:
        """Return host and scope: `r12-h02 gpu=3`."""
        return f"{self.host} {self.scope}"


@dataclass(frozen=True, kw_only=True)
class HostInventory:
    """The parts of one host."""

    host: str
    parts: tuple[LocatedPart, ...]
    unknown: Mapping[str, str]
    """Observation with serials -> why a part cannot be called missing; empty if it can."""


def host_inventory(view: HostView) -> HostInventory:
    """Return the parts in a host's record."""
    unknown = {name: _unknown(name, view) for name in (SERIAL, GUID, MAC)}
    return HostInventory(host=view.host.name, parts=tuple(_located_parts(view)), unknown=unknown)


def judge_manifest(plan: Plan, views: Iterable[HostView]) -> list[Verdict]:
    """Return a verdict on each ordered part, on each part in the wrong host, and on each part that was not ordered."""
    return judge_inventories(plan, map(host_inventory, views)) if plan.manifest else []


def judge_inventories(plan: Plan, inventories: Iterable[HostInventory]) -> list[Verdict]:
    """Return the verdicts of `judge_manifest`, from the parts of all hosts."""
    ordered = ordered_parts(plan)
    if not ordered:
        return []
    by_host = {inventory.host: inventory for inventory in inventories}
    parts = [part for inventory in by_host.values() for part in inventory.parts]
    located: dict[tuple[str, str], list[LocatedPart]] = defaultdict(list)
    for part in parts:
        for key in _keys(part):
            located[key].append(part)
    verdicts = [
        verdict
        for part in ordered
        for verdict in _on_part(part, located[(_name(part), identity(part.kind, part.serial))], by_host)
    ]
    return [*verdicts, *_extra(ordered, parts)]


def ordered_parts(plan: Plan) -> list[Part]:
    """Return the lines of the manifest that are parts, and not cables; empty in a rehearsal."""
    return [] if plan.rehearsal else [part for part in plan.manifest if part.kind in (GPU, NIC)]


def manifest_summary(plan: Plan, verdicts: Iterable[Verdict]) -> str:
    """Return `64 of 64 parts as ordered`; empty if the manifest has no part."""
    ordered = ordered_parts(plan)
    if not ordered:
        return ""
    outcomes = [(item.criterion, item.verdict) for item in verdicts]
    extra = outcomes.count((EXTRA, FAIL))
    more = f", {extra} not ordered" if extra else ""
    return f"{outcomes.count((CRITERION, PASS))} of {len(ordered)} parts as ordered{more}"


def _located_parts(view: HostView) -> Iterator[LocatedPart]:
    """Yield every part of a host that has an identity."""
    for gpu in view.evidence.gpus():
        if gpu.serial:
            slots = frozenset({str(gpu.index), pci_address(gpu.pci_bus_id)})
            yield LocatedPart(
                host=view.host.name, name=SERIAL, scope=f"gpu={gpu.index}", serial=gpu.serial, slots=slots
            )
    for name in (GUID, MAC):
        addresses = _latest(view, f"{name.rpartition('.')[0]}.pci_address")
        for scope, latest in _latest(view, name).items():
            if latest.status == MEASURED and identity(NIC, str(latest.value)).strip("0"):
                slots = frozenset(Scope.parse(scope).labels.values())
                where = addresses.get(scope)
                known = frozenset({pci_address(str(where.value))} if where and where.status == MEASURED else ())
                yield LocatedPart(
                    host=view.host.name,
                    name=name,
                    scope=scope,
                    serial=str(latest.value),
                    slots=slots | known,
                    ethernet=name == GUID and _is_ethernet(view, scope),
                )


def _latest(view: HostView, name: str) -> dict[str, Observation]:
    return {latest.scope: latest for latest in view.observations.get(name, ())}


def _keys(part: LocatedPart) -> Iterator[tuple[str, str]]:
    """Yield the identities by which a line of the manifest may name the part."""
    label = identity(GPU if part.name == SERIAL else NIC, part.serial)
    yield part.name, label
    if part.name == GUID and label[6:10] == "0300":
        # The GUID was made from the MAC address of the port: 0c42:a103:0065:8b2e from 0c:42:a1:65:8b:2e.
        yield MAC, label[:6] + label[10:]


def _name(part: Part) -> str:
    """Return the name of the observation with the serial of such a part."""
    if part.kind == GPU:
        return SERIAL
    return GUID if len(identity(NIC, part.serial)) == _GUID_DIGITS else MAC


def _on_part(part: Part, located: Sequence[LocatedPart], inventories: Mapping[str, HostInventory]) -> Iterator[Verdict]:
    in_its_host = [location for location in located if location.host == part.host]
    if in_its_host:
        in_its_slot = [location for location in in_its_host if not part.slot or part.slot in location.slots]
        yield _in_host(part, (in_its_slot or in_its_host)[0], bool(in_its_slot))
    elif located:
        reason = f"ordered for {_ordered(part)}, found in {located[0].location}"
        yield _verdict(part, FAIL, reason)
        yield _verdict(part, FAIL, reason, host=located[0].host, scope=located[0].scope)
    elif unknown := inventories[part.host].unknown[_name(part)]:
        yield _verdict(part, INCONCLUSIVE, f"ordered for {_ordered(part)}: {unknown}")
    else:
        yield _verdict(part, FAIL, f"ordered for {_ordered(part)}, found on no host")


def _in_host(part: Part, location: LocatedPart, in_its_slot: bool) -> Verdict:
    if in_its_slot:
        return _verdict(part, PASS, f"found where it was ordered: {_ordered(part)}", scope=location.scope)
    if ":" in part.slot and not any(":" in slot for slot in location.slots):
        reason = f"ordered for {_ordered(part)}, found in that host; the slot of {location.scope} was not reported"
        return _verdict(part, INCONCLUSIVE, reason, scope=location.scope)
    slots = ", ".join(sorted(location.slots, key=lambda slot: (":" not in slot, slot)))
    return _verdict(part, FAIL, f"ordered for {_ordered(part)}, found in slot {slots}", scope=location.scope)


def _ordered(part: Part) -> str:
    return f"{part.host} slot {part.slot}" if part.slot else part.host


def _unknown(name: str, view: HostView) -> str:
    """Return why the part cannot be called missing from its host; empty if it can."""
    if not view.has_record:
        return "the host left no record"
    if name == SERIAL:
        without_serial = _gpu_count(view) - sum(bool(gpu.serial) for gpu in view.evidence.gpus())
        subject = "1 GPU of the host does" if without_serial == 1 else f"{without_serial} GPUs of the host do"
        return f"{subject} not report a serial" if without_serial > 0 else ""
    latest = _latest(view, name)
    if not latest:
        return f"the host did not report the {_WHAT[name]} of any NIC"
    unread = [scope for scope, item in latest.items() if item.status != MEASURED]
    return f"{unread[0]} does not report its {_WHAT[name]}" if unread else ""


def _gpu_count(view: HostView) -> int:
    """Return the number of GPUs in the host, whether or not they report a serial."""
    counts = [_latest(view, name).get("host") for name in ("gpu.count", "gpu.pci_count")]
    known = [int(latest.value) for latest in counts if latest and isinstance(latest.value, int | float)]
    return max([*known, len(view.evidence.gpus()), 0 if known else 1])


def _extra(ordered: Sequence[Part], parts: Sequence[LocatedPart]) -> Iterator[Verdict]:
    """Yield verdicts on parts that no line of the manifest names: GPUs and InfiniBand adapters, if it lists parts of that kind.

    Ethernet ports do not count, because every mainboard has some that are not ordered separately.
    """
    names = {_name(part) for part in ordered} & {SERIAL, GUID}
    listed = {(_name(part), identity(part.kind, part.serial)) for part in ordered}
    for part in parts:
        if part.name in names and not listed & set(_keys(part)) and not (part.name == GUID and part.ethernet):
            unordered = Part(host=part.host, kind="", serial=part.serial, origin=_file(ordered[0]))
            yield _verdict(
                unordered,
                FAIL,
                "found, but no line of the manifest names it",
                scope=part.scope,
                name=part.name,
                criterion=EXTRA,
            )


def _is_ethernet(view: HostView, scope: str) -> bool:
    layers = [
        str(latest.value)
        for port_scope, latest in _latest(view, LAYER).items()
        if port_scope != scope and Scope.parse(scope).contains(port_scope) and latest.status == MEASURED
    ]
    return bool(layers) and "InfiniBand" not in layers


def _file(part: Part) -> str:
    return part.origin.rpartition(" line ")[0]


def _verdict(
    part: Part,
    verdict: str,
    reason: str,
    *,
    host: str = "",
    scope: str = "host",
    name: str = "",
    criterion: str = CRITERION,
) -> Verdict:
    return Verdict(
        host=host or part.host,
        scope=scope,
        serial=part.serial,
        name=name or _name(part),
        verdict=verdict,
        criterion=criterion,
        kind=VerdictKind.IDENTITY,
        value=part.serial,
        unit="1",
        reason=reason,
        action="inspect_hardware" if verdict == FAIL else "none",
        # Passes share a row of the report, so their source has no line number.
        source=f"manifest: {_file(part) if verdict == PASS else part.origin}",
        basis="policy",
    )
