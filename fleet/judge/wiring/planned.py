"""Compare the cables with the manifest: a line of kind `link` names a port of a host and the switch port of its cable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fleet.judge.wiring.links import SWITCH_PORT, HostLinks, PortLink, switch_keys
from schemas.plans import LINK, Part
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

CRITERION = "manifest-link"
MAX_PORTS = 8
"""Maximum number of ports of a host that a reason names."""


def planned_lines(manifest: Sequence[Part]) -> list[Part]:
    """Return the lines of the manifest that describe a cable."""
    return [part for part in manifest if part.kind == LINK]


class _Cables:
    """The lines of the manifest, the host's port that each line names, and the line that names a given switch port."""

    def __init__(self, lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> None:
        self.hosts = hosts
        self.links = {id(line): _link(line, hosts) for line in lines}
        self._lines_at: dict[tuple[str, str], list[Part]] = defaultdict(list)
        for line in lines:
            for name in switch_keys(line.switch):
                self._lines_at[name, line.switch_port.casefold()].append(line)

    def owner(self, link: PortLink | None) -> Part | None:
        """Return the line that names the switch port of a cable; None if no line names this port, or if it was not read."""
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

        Two cables are swapped if each is at the switch port of the other cable in the manifest.
        """
        owner = self.owner(self.links[id(line)])
        is_swapped = owner is not None and owner is not line and self.owner(self.links[id(owner)]) is line
        return owner if is_swapped else None


def judge_planned(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> list[Verdict]:
    """Return a verdict on each cable of the manifest. Two swapped cables get verdicts with equal `detail`, which names both."""
    cables = _Cables(lines, hosts)
    return [_verdict(line, cables) for line in lines]


def covered_ports(lines: Sequence[Part], hosts: Mapping[str, HostLinks]) -> set[tuple[str, str]]:
    """Return host and scope of the ports that the manifest names."""
    links = (_link(line, hosts) for line in lines)
    return {(link.host, link.scope) for link in links if link}


def _link(line: Part, hosts: Mapping[str, HostLinks]) -> PortLink | None:
    """Return the port that a line names; None if the host has no such port, or did not report it."""
    if line.host not in hosts:
        return None
    return next((link for link in hosts[line.host].links if line.slot in link.names), None)


def _verdict(line: Part, cables: _Cables) -> Verdict:
    """Return the verdict on the cable of one line."""
    link, wanted = cables.links[id(line)], _wanted(line)
    if link and link.is_at(line.switch, line.switch_port):
        return _of_line(line, link, PASS, "as in the manifest")
    if link is None or not link.switch_id or _has_other_names(link, line):
        why = _why_unread(line, link, cables.hosts)
        reason = f"port {line.slot} belongs at {wanted}, which could not be verified: {why}"
        return _of_line(line, link, INCONCLUSIVE, reason)
    partner = cables.partner(line)
    other_link = cables.links[id(partner)] if partner else None
    if partner and other_link:
        pairs = sorted([(link.own_end, wanted, link.end), (other_link.own_end, _wanted(partner), other_link.end)])
        text = "; ".join(f"{own} belongs at {there} and is at {end}" for own, there, end in pairs)
        return _of_line(line, link, FAIL, f"{text}: swap the two cables", is_swapped=True)
    owner = cables.owner(link)
    belongs_there = f"; at {link.end} the manifest has port {owner.slot} of {owner.host}" if owner else ""
    return _of_line(line, link, FAIL, f"the manifest has {wanted} for this port{belongs_there}")


def _has_other_names(link: PortLink, line: Part) -> bool:
    """Return whether the port is at the right switch, which does not name its ports as the manifest does."""
    return link.is_switch(line.switch) and not link.names_port_as(line.switch_port)


def _wanted(line: Part) -> str:
    return f"{line.switch} {line.switch_port}"


def _why_unread(line: Part, link: PortLink | None, hosts: Mapping[str, HostLinks]) -> str:
    host = hosts.get(line.host)
    if link:
        sent = f": it sends {link.port}" if link.port else ""
        return link.reason or f"the switch does not name the port{sent}"
    if not host or not host.has_record:
        return "the host left no record"
    if not host.links:
        return "the host reported no switch for any of its ports"
    ports = sorted(link.scope for link in host.links)
    more = f" and {len(ports) - MAX_PORTS} more" if len(ports) > MAX_PORTS else ""
    return f"the host has no such port: it has {', '.join(ports[:MAX_PORTS])}{more}"


def _of_line(line: Part, link: PortLink | None, verdict: str, detail: str, *, is_swapped: bool = False) -> Verdict:
    value = link.end if link and link.switch_id else None
    kind = (
        VerdictKind.SWAPPED if is_swapped else VerdictKind.MISSING if verdict == INCONCLUSIVE else VerdictKind.IDENTITY
    )
    return Verdict(
        host=line.host,
        scope=link.scope if link else "host",
        # The switch port could not be read, often because the cable has no signal. Like other failures of the port, the missing
        # reading is attributed to the adapter.
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
        # Passes share a row of the report, so their source has no line number.
        source=f"manifest: {line.origin.rpartition(' line ')[0] if verdict == PASS else line.origin}",
        basis="policy",
    )
