"""Compare the cables with the manifest, the operator's list of parts and cables.

A line of kind `link` states that a port of a host belongs at a port of a switch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fleet.judge.wiring.links import SWITCH_PORT, HostLinks, PortLink, switch_keys
from schemas.plans import LINK, Part
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

CRITERION = "manifest-link"
MAX_PORTS = 8
"""Maximum number of ports of a host that the reason of a verdict lists."""


def planned_lines(manifest: Sequence[Part]) -> list[Part]:
    """Return the lines of the manifest that describe a cable."""
    return [part for part in manifest if part.kind == LINK]


class _Cables:
    """The cables in the manifest: which port of a host each line names, and which line lists a switch port."""

    def __init__(self, lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> None:
        self.hosts = hosts
        # `id()` of a line -> the host's port that the line names.
        self.links = {id(line): _link(line, hosts) for line in lines}
        self._lines_at: dict[tuple[str, str], list[Part]] = defaultdict(list)
        for line in lines:
            for name in switch_keys(line.switch):
                self._lines_at[name, line.switch_port.casefold()].append(line)

    def line_at(self, link: PortLink | None) -> Part | None:
        """Return the line of the manifest that lists the switch port to which `link` is cabled.

        None if no line lists this switch port, or if the host did not read the switch.
        """
        if link is None or not link.switch_id:
            return None
        keys = [
            (name, port.casefold())
            for name in (*switch_keys(link.switch), *switch_keys(link.switch_id))
            for port in (link.port, link.label)
        ]
        candidates = (line for key in keys for line in self._lines_at.get(key, ()))
        return next((line for line in candidates if link.is_at(line.switch, line.switch_port)), None)

    def partner(self, line: Part) -> Part | None:
        """Return the line whose cable is swapped with the cable of `line`; None if there is no such line.

        Two cables are swapped if each is plugged into the switch port that the manifest lists for the other.
        """
        other = self.line_at(self.links[id(line)])
        is_swapped = other is not None and other is not line and self.line_at(self.links[id(other)]) is line
        return other if is_swapped else None


def judge_planned(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> list[Verdict]:
    """Return a verdict on each cable of the manifest.

    The verdicts on two swapped cables have the same `detail`, which names both cables.
    """
    cables = _Cables(lines, hosts)
    return [_verdict(line, cables) for line in lines]


def covered_ports(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> set[tuple[str, str]]:
    """Return host and scope of the hosts' ports that the manifest lists."""
    links = (_link(line, hosts) for line in lines)
    return {(link.host, link.scope) for link in links if link}


def _link(line: Part, hosts: Mapping[str, HostLinks]) -> PortLink | None:
    """Return the host's port that a line of the manifest names; None if the host did not report such a port."""
    if line.host not in hosts:
        return None
    return next((link for link in hosts[line.host].links if line.slot in link.names), None)


def _verdict(line: Part, cables: _Cables) -> Verdict:
    """Return the verdict on the cable of one line of the manifest."""
    link, wanted = cables.links[id(line)], _wanted(line)
    if link and link.is_at(line.switch, line.switch_port):
        return _of_line(line, link, PASS, "as in the manifest")
    if link is None or not link.switch_id or _is_incomparable(link, line):
        why = _why_unread(line, link, cables.hosts)
        reason = f"port {line.slot} belongs at {wanted}; whether it is there could not be verified: {why}"
        return _of_line(line, link, INCONCLUSIVE, reason)
    partner = cables.partner(line)
    other_link = cables.links[id(partner)] if partner else None
    if partner and other_link:
        pairs = sorted([(link.own_end, wanted, link.end), (other_link.own_end, _wanted(partner), other_link.end)])
        text = "; ".join(f"{own} belongs at {there} and is at {end}" for own, there, end in pairs)
        return _of_line(line, link, FAIL, f"{text}: swap the two cables", is_swapped=True)
    other = cables.line_at(link)
    belongs_there = f", and port {other.slot} of {other.host} to {link.end}" if other else ""
    return _of_line(line, link, FAIL, f"the manifest connects port {line.slot} to {wanted}{belongs_there}")


def _is_incomparable(link: PortLink, line: Part) -> bool:
    """Return whether the port is at the right switch, but its switch port cannot be compared with the manifest.

    `PortLink.names_port_as` states when that is so.
    """
    return link.is_switch(line.switch) and not link.names_port_as(line.switch_port)


def _wanted(line: Part) -> str:
    return f"{line.switch} {line.switch_port}"


def _why_unread(line: Part, link: PortLink | None, hosts: Mapping[str, HostLinks]) -> str:
    host = hosts.get(line.host)
    if link:
        sent = f"only `{link.port}`, not a name," if link.port else "no name"
        return link.reason or f"the switch sends {sent} for its port"
    if not host or not host.has_record:
        return "the host left no record"
    if not host.links:
        return "the host reported no switch for any of its ports"
    ports = sorted(link.scope for link in host.links)
    more = f" and {len(ports) - MAX_PORTS} more" if len(ports) > MAX_PORTS else ""
    return f"the host reported no port of this name; it reported {', '.join(ports[:MAX_PORTS])}{more}"


def _of_line(line: Part, link: PortLink | None, verdict: str, detail: str, *, is_swapped: bool = False) -> Verdict:
    value = link.end if link and link.switch_id else None
    kind = (
        VerdictKind.SWAPPED if is_swapped else VerdictKind.MISSING if verdict == INCONCLUSIVE else VerdictKind.IDENTITY
    )
    return Verdict(
        host=line.host,
        scope=link.scope if link else "host",
        # Often the switch port could not be read because the cable is bad or missing. So an inconclusive verdict is attributed to
        # the adapter, like other failures of its ports.
        part=f"hca={link.adapter}" if verdict == INCONCLUSIVE and link and link.adapter else "",
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
        # All passes share one row of the report, which has one source, so their source has no line number.
        source=f"manifest: {line.origin.rpartition(' line ')[0] if verdict == PASS else line.origin}",
        basis="policy",
    )
