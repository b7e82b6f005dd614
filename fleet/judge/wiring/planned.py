"""Compare the cables with the manifest: a line of kind `link` gives a port of a host its switch port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.judge.wiring.links import SWITCH_PORT, HostLinks, PortLink
from schemas.plans import LINK, Part
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

CRITERION = "manifest-link"
_PairKey = tuple[str, str]
"""Host and port of a line of the manifest."""


def planned_lines(manifest: Sequence[Part]) -> list[Part]:
    """Return the lines of the manifest that describe a cable."""
    return [part for part in manifest if part.kind == LINK]


def judge_planned(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> list[Verdict]:
    """Return a verdict on each cable of the manifest. Two swapped cables get verdicts with the same text, which names both."""
    links = {_key(line): _link(line, hosts) for line in lines}
    moved = [line for line in lines if _is_elsewhere(line, links[_key(line)])]
    partners = _partners(moved, links)
    return [_verdict(line, links[_key(line)], partners.get(_key(line)), links, hosts, moved) for line in lines]


def covered_ports(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> set[tuple[str, str]]:
    """Return host and scope of the ports that the manifest names."""
    links = (_link(line, hosts) for line in lines)
    return {(link.host, link.scope) for link in links if link}


def _key(line: Part) -> _PairKey:
    return line.host, line.slot


def _link(line: Part, hosts: Mapping[str, HostLinks]) -> PortLink | None:
    """Return the port that a line names; None if the host has no such port, or did not report it."""
    if line.host not in hosts:
        return None
    return next((link for link in hosts[line.host].links if line.slot in link.names), None)


def _is_elsewhere(line: Part, link: PortLink | None) -> bool:
    return link is not None and bool(link.switch_id) and not link.is_at(line.switch, line.switch_port)


def _partners(moved: Sequence[Part], links: Mapping[_PairKey, PortLink | None]) -> dict[_PairKey, Part]:
    """Return for each cable that is swapped with another one the line of the other."""
    partners: dict[_PairKey, Part] = {}
    by_switch_port: dict[str, list[Part]] = {}
    for line in moved:
        by_switch_port.setdefault(line.switch_port.casefold(), []).append(line)
    for line in moved:
        link = links[_key(line)]
        for name in {link.port.casefold(), link.label.casefold()} if link else ():
            for other in by_switch_port.get(name, ()):
                other_link = links[_key(other)]
                is_free = _key(line) not in partners and _key(other) not in partners and other is not line
                if is_free and link and other_link and _are_swapped(line, link, other, other_link):
                    partners |= {_key(line): other, _key(other): line}
    return partners


def _are_swapped(line: Part, link: PortLink, other: Part, other_link: PortLink) -> bool:
    return link.is_at(other.switch, other.switch_port) and other_link.is_at(line.switch, line.switch_port)


def _verdict(
    line: Part,
    link: PortLink | None,
    partner: Part | None,
    links: Mapping[_PairKey, PortLink | None],
    hosts: Mapping[str, HostLinks],
    moved: Sequence[Part],
) -> Verdict:
    wanted = f"{line.switch} {line.switch_port}"
    if link is None or not link.switch_id:
        reason = f"port {line.slot} belongs at {wanted}, which could not be verified: {_why_unread(line, link, hosts)}"
        return _of_line(line, link, INCONCLUSIVE, reason)
    if link.is_at(line.switch, line.switch_port):
        return _of_line(line, link, PASS, "as in the manifest")
    other_link = links[_key(partner)] if partner else None
    if partner and other_link:
        pairs = sorted([(link.own_end, wanted, link.end), (other_link.own_end, _wanted(partner), other_link.end)])
        text = "; ".join(f"{own} belongs at {there} and is at {end}" for own, there, end in pairs)
        return _of_line(line, link, FAIL, f"{text}: swap the two cables", is_swapped=True)
    owner = next((other for other in moved if other is not line and link.is_at(other.switch, other.switch_port)), None)
    there = f"; the manifest has port {owner.slot} of {owner.host} there" if owner else ""
    return _of_line(line, link, FAIL, f"the manifest has {wanted}{there}")


def _wanted(line: Part) -> str:
    return f"{line.switch} {line.switch_port}"


def _why_unread(line: Part, link: PortLink | None, hosts: Mapping[str, HostLinks]) -> str:
    host = hosts.get(line.host)
    if link:
        return link.reason
    if not host or not host.has_record:
        return "the host left no record"
    if not host.links:
        return "the host reported the switch of no port"
    names = ", ".join(sorted(link.scope for link in host.links)[:8])
    return f"the host has no such port: it has {names}"


def _of_line(line: Part, link: PortLink | None, verdict: str, detail: str, *, is_swapped: bool = False) -> Verdict:
    value = link.end if link and link.switch_id else None
    kind = (
        VerdictKind.SWAPPED if is_swapped else VerdictKind.MISSING if verdict == INCONCLUSIVE else VerdictKind.IDENTITY
    )
    return Verdict(
        host=line.host,
        scope=link.scope if link else "host",
        name=f"{link.kind if link else 'network'}.{SWITCH_PORT}",
        verdict=verdict,
        criterion=CRITERION,
        kind=kind,
        value=value,
        limit=_wanted(line) if value else None,
        operator="eq" if value else "",
        unit="1",
        reason=f"at {value}: {detail}" if value else detail,
        detail=detail if value else "",
        action="recable" if verdict == FAIL else "none",
        # Passes share a row of the report, so their source has no line number.
        source=f"manifest: {line.origin.rpartition(' line ')[0] if verdict == PASS else line.origin}",
        basis="policy",
    )
