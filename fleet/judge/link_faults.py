"""Attribute each XID 145 to the GPU with the dead NVLink that caused it.

On NVL72, one dead link of a GPU (XID 149, fatal) makes the other GPUs of its NVLink domain report XID 145
(marin-community/marin issue 9086). Only the GPU with the dead link is at fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.judge.culprits import AFTERMATH, FATAL_XIDS, FOLLOWING, XID, XIDS
from fleet.judge.host_view import HostView
from fleet.scope_text import describe_scope
from schemas.records import MEASURED
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

DEAD_LINK = "149"
FOLLOWS_HOST, FOLLOWS_PART = "follows_host", "follows_part"
"""If another part caused a failure, these parameters of the verdict name that part: its host and its scope."""

Part = tuple[str, str]
"""Host and scope of a GPU."""


class LinkFaults:
    """The GPUs with a dead NVLink, by NVLink domain. Instances for different hosts can be merged (`update`) in any order."""

    def __init__(self) -> None:
        self._parts: dict[str, set[Part]] = {}

    def add(self, view: HostView) -> None:
        """Add the GPUs of a host that have a dead NVLink."""
        for item in view.observations[FATAL_XIDS]:
            scope = Scope.parse(item.scope)
            if item.status == MEASURED and item.value and scope.get("xid") == DEAD_LINK:
                self._parts.setdefault(_domain(view), set()).add((view.host.name, scope.device))

    def update(self, other: LinkFaults) -> None:
        """Add the GPUs of other hosts."""
        for domain, parts in other._parts.items():
            self._parts.setdefault(domain, set()).update(parts)

    def root(self, view: HostView) -> Part | None:
        """Return the GPU with a dead link in the host's domain, preferably one of the host itself; None if there is none."""
        parts = self._parts.get(_domain(view), ())
        return min(parts, key=lambda part: (part[0] != view.host.name, part), default=None)


def _domain(view: HostView) -> str:
    return view.nvlink_domain or f"host {view.host.name}"


def with_link_faults(views: Iterable[HostView], verdicts: Sequence[Verdict], faults: LinkFaults) -> list[Verdict]:
    """Return the verdicts. A failure because of XID 145 gets the GPU with the dead link in its reason, detail and parameters."""
    roots: Mapping[str, tuple[HostView, Part]] = {
        view.host.name: (view, root) for view in views if (root := faults.root(view)) is not None
    }
    return [_with_root(verdict, *roots[verdict.host]) if verdict.host in roots else verdict for verdict in verdicts]


def _with_root(verdict: Verdict, view: HostView, root: Part) -> Verdict:
    if verdict.verdict != FAIL or (verdict.host, verdict.part_scope) == root or not _is_follower(view, verdict):
        return verdict
    host, scope = root
    why = f"follows from the dead NVLink of {describe_scope(scope)} of {host} (XID {DEAD_LINK})"
    detail = "; ".join(filter(None, (why, verdict.detail)))
    params = {**verdict.params, FOLLOWS_HOST: host, FOLLOWS_PART: scope}
    return replace(verdict, reason=f"{verdict.reason}; {why}", detail=detail, params=params)


def _is_follower(view: HostView, verdict: Verdict) -> bool:
    """Return whether the failure is of an XID 145, or of `xid.last_seen` if there are no other XIDs than 145, 149 and 45.

    If `xid.last_seen` is attributed to a GPU, only the XIDs of this GPU count. Otherwise those of the whole host count.
    """
    if verdict.name == XID:
        counted = (Scope.parse(item.scope) for item in view.observations[XIDS] if item.status == MEASURED)
        codes = {scope.get("xid") for scope in counted if verdict.part in ("", scope.part)}
        return bool(codes) and codes <= {FOLLOWING, DEAD_LINK, AFTERMATH}
    return verdict.name in (XIDS, FATAL_XIDS) and Scope.parse(verdict.scope).get("xid") == FOLLOWING
