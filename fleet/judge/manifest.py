"""Compare the manifest (the list of the parts that were bought) with the parts in the hosts.

An ordered part is in its slot, elsewhere or missing. A part may also be in a host without having been ordered. A part is
identified by its label: the serial of a GPU or module (transceiver or cable end), the GUID of an InfiniBand or RoCE adapter, or
the MAC address of an Ethernet port. Only the serial of a module or GPU may be in several lines of the manifest: the modules at
the ends of a splitter cable may have the same serial, and so may the GPUs of one board.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fleet.judge.host_inventory import (
    GUID,
    MAC,
    MODULE_SERIAL,
    SERIAL,
    HostInventory,
    LocatedPart,
    host_inventory,
    identity,
)
from fleet.judge.host_view import HostView
from schemas.plans import GPU, MODULE, NIC, Part, Plan
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

CRITERION, EXTRA = "manifest", "manifest-extra"
PARTS = (GPU, NIC, MODULE)
"""Kinds of manifest lines that list a part. Other lines list a cable between a host and a switch."""
_GUID_DIGITS = 16
_KIND_OF = {SERIAL: GPU, MODULE_SERIAL: MODULE}


def judge_manifest(plan: Plan, views: Iterable[HostView]) -> list[Verdict]:
    """Return a verdict on each ordered part, on each part in the wrong host, and on each part that was not ordered."""
    return judge_inventories(plan, map(host_inventory, views)) if plan.manifest else []


def judge_inventories(plan: Plan, inventories: Iterable[HostInventory]) -> list[Verdict]:
    """Return the verdicts of `judge_manifest`, given the inventories (lists of parts) of all hosts."""
    ordered = ordered_parts(plan)
    if not ordered:
        return []
    by_host = {inventory.host: inventory for inventory in inventories}
    parts = [part for inventory in by_host.values() for part in inventory.parts]
    located: dict[tuple[str, str], list[LocatedPart]] = defaultdict(list)
    for part in parts:
        for key in _keys(part):
            located[key].append(part)
    lines: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for line in ordered:
        lines[_key(line)].append(line)
    verdicts = [
        verdict for part in ordered for verdict in _on_part(part, located[_key(part)], lines[_key(part)], by_host)
    ]
    return [*verdicts, *_extra(ordered, parts)]


def ordered_parts(plan: Plan) -> list[Part]:
    """Return the lines of the manifest that list a part, not a cable; empty in a rehearsal."""
    return [] if plan.rehearsal else [part for part in plan.manifest if part.kind in PARTS]


def manifest_summary(plan: Plan, verdicts: Iterable[Verdict]) -> str:
    """Return text such as `64 of 64 parts as ordered`; empty if the manifest lists no part, or in a rehearsal."""
    ordered = ordered_parts(plan)
    if not ordered:
        return ""
    outcomes = [(item.criterion, item.verdict) for item in verdicts]
    extra = outcomes.count((EXTRA, FAIL))
    more = f"; {extra} {'part that was' if extra == 1 else 'parts that were'} not ordered" if extra else ""
    return f"{outcomes.count((CRITERION, PASS))} of {len(ordered)} parts as ordered{more}"


def _keys(part: LocatedPart) -> Iterator[tuple[str, str]]:
    """Yield each key by which a line of the manifest may identify the part.

    A key consists of the name of an observation and the label of the part.
    """
    label = identity(_KIND_OF.get(part.name, NIC), part.serial)
    yield part.name, label
    if part.name == GUID and label[6:10] == "0300":
        # The GUID was made from the MAC address of the port: 0c42:a103:0065:8b2e from 0c:42:a1:65:8b:2e.
        yield MAC, label[:6] + label[10:]


def _name(part: Part) -> str:
    """Return the name of the observation that reports the label of an ordered part: its serial, GUID or MAC address."""
    if part.kind != NIC:
        return SERIAL if part.kind == GPU else MODULE_SERIAL
    return GUID if len(identity(NIC, part.serial)) == _GUID_DIGITS else MAC


def _key(part: Part) -> tuple[str, str]:
    return _name(part), identity(part.kind, part.serial)


def _on_part(
    part: Part, located: Sequence[LocatedPart], lines: Sequence[Part], inventories: Mapping[str, HostInventory]
) -> Iterator[Verdict]:
    """Yield the verdicts on a line of the manifest (`part`).

    `located`: the found parts with the label of this line; `lines`: all lines with this label.
    """
    others = [line for line in lines if line is not part]
    located = [item for item in located if not any(_is_place_of(line, item) for line in others)]
    in_its_host = [location for location in located if location.host == part.host]
    if in_its_host:
        in_its_slot = [location for location in in_its_host if not part.slot or part.slot in location.slots]
        yield _in_host(part, (in_its_slot or in_its_host)[0], bool(in_its_slot))
    elif located:
        reason = f"ordered for {_ordered(part)}, found in {located[0].location}"
        yield _verdict(part, FAIL, reason)
        yield _verdict(part, FAIL, reason, host=located[0].host, scope=located[0].scope)
    elif unknown := inventories[part.host].why_unknown(_name(part), part.slot):
        yield _verdict(part, INCONCLUSIVE, f"ordered for {_ordered(part)}: {unknown}")
    else:
        instead = [
            item for item in inventories[part.host].parts if part.slot in item.slots and item.name == _name(part)
        ]
        has = f"; {instead[0].serial} is in that slot instead" if instead and part.kind == MODULE else ""
        scope = instead[0].scope if has else "host"
        yield _verdict(part, FAIL, f"ordered for {_ordered(part)}, found on no host{has}", scope=scope)


def _is_place_of(line: Part, item: LocatedPart) -> bool:
    """Return whether a line of the manifest names the host and slot of this part; false for a line without a slot."""
    return line.host == item.host and bool(line.slot) and line.slot in item.slots


def _in_host(part: Part, location: LocatedPart, in_its_slot: bool) -> Verdict:
    """Return the verdict on an ordered part that was found in the host for which it was ordered, at `location`."""
    if in_its_slot:
        return _verdict(part, PASS, f"found where it was ordered: {_ordered(part)}", scope=location.scope)
    if ":" in part.slot and not any(":" in slot for slot in location.slots):
        reason = (
            f"ordered for {_ordered(part)}, found in that host; the PCI address of {location.scope} was not reported"
        )
        return _verdict(part, INCONCLUSIVE, reason, scope=location.scope)
    names = sorted(location.slots, key=lambda slot: (":" not in slot, slot))
    slot = f"{names[0]} (also named {', '.join(names[1:])})" if len(names) > 1 else "".join(names)
    return _verdict(part, FAIL, f"ordered for {_ordered(part)}, found in slot {slot}", scope=location.scope)


def _ordered(part: Part) -> str:
    return f"{part.host} slot {part.slot}" if part.slot else part.host


def _extra(ordered: Sequence[Part], parts: Sequence[LocatedPart]) -> Iterator[Verdict]:
    """Yield a failure for each GPU, InfiniBand adapter and module that no line of the manifest names.

    A kind of part is judged only if the manifest lists parts of this kind. RoCE adapters and Ethernet ports are not judged,
    because every mainboard has some ports that are not ordered separately. Modules at
    RDMA ports (scope `hca=…`) are judged. Modules at other interfaces (scope `nic=…`) are judged only if a found part of the
    manifest has such a scope.
    """
    names = {_name(part) for part in ordered} & {SERIAL, GUID, MODULE_SERIAL}
    listed = set(map(_key, ordered))
    kinds = {"hca"} | {Scope.parse(part.scope).device_kind for part in parts if listed & set(_keys(part))}
    for part in parts:
        is_counted = part.name != MODULE_SERIAL or Scope.parse(part.scope).device_kind in kinds
        is_other = part.name in names and not listed & set(_keys(part))
        if is_other and is_counted and not (part.name == GUID and part.ethernet):
            unordered = Part(host=part.host, kind="", serial=part.serial, origin=_file(ordered[0]))
            yield _verdict(
                unordered,
                FAIL,
                "found, but no line of the manifest names it",
                scope=part.scope,
                name=part.name,
                criterion=EXTRA,
            )


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
        # The report merges equal passes into one row. A line number would make each pass different.
        source=f"manifest: {_file(part) if verdict == PASS else part.origin}",
        basis="policy",
    )
