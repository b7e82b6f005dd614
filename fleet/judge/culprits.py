"""Attribute findings to a part of a host, if their own scope does not name it.

One broken GPU also fails its seven neighbours, since a pair is as fast as its slower end. An XID fails the host whose log has
it. Neither the neighbours nor the host must be returned.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from schemas.records import MEASURED
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import Scope

XID, XIDS, SXIDS = "xid.last_seen", "xid.count", "sxid.count"
LEAST_PARTNERS = 3
"""If a GPU fails with only two others, the links between two halves of a small host explain it as well."""
_PAIR = re.compile(r"(gpu=\d+),peer=(\d+)")

_Partners = Mapping[str, Mapping[str, bool]]
"""GPU -> each GPU that it was measured with, and whether that failed, in either direction."""


def with_culprits(view: HostView, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on one host; those that fail because of another part are attributed to it (`part`).

    A GPU is the cause of its failed pairs under three conditions. It fails a criterion with more than half of its partners, and
    with at least three. Fewer than half of the GPUs do so. No two of these GPUs pass with each other: otherwise the link
    between two halves of the host is the cause. A new XID is attributed to the only GPU with new XIDs in the run, if the XID is
    one for which a GPU fails and no NVSwitch reported an error.
    """
    partners: dict[str, dict[str, dict[str, bool]]] = defaultdict(lambda: defaultdict(dict))
    for verdict in verdicts:
        if verdict.verdict in (PASS, FAIL) and (ends := _ends(view, verdict.scope)):
            for one, other in (ends, ends[::-1]):
                of_one = partners[verdict.criterion][one]
                of_one[other] = of_one.get(other, False) or verdict.verdict == FAIL
    blamed = {criterion: _blamed(of_gpu) for criterion, of_gpu in partners.items()}
    with_xid = _with_xid(view, verdicts)
    result = []
    for verdict in verdicts:
        part, text = "", ""
        if verdict.verdict == FAIL and verdict.name == XID:
            part, text = with_xid, "which had an XID during the run"
        elif verdict.verdict == FAIL and (ends := _ends(view, verdict.scope)):
            own, other = ends
            counts = blamed[verdict.criterion]
            if own not in counts and other in counts:
                part, text = other, f"which fails it with {counts[other]} others"
        result.append(_laid(verdict, part, text, view.serial(part)) if part else verdict)
    return result


def _ends(view: HostView, scope: str) -> tuple[str, str] | None:
    """The two GPUs of a pair that the host has."""
    result = _PAIR.fullmatch(scope)
    ends = (result[1], f"gpu={result[2]}") if result else ("", "")
    return ends if ends[0] != ends[1] and all(end in view.serials for end in ends) else None


def _blamed(partners: _Partners) -> dict[str, str]:
    """GPU that is to blame -> with how many of the others it fails."""
    failing = {gpu: sum(of_gpu.values()) for gpu, of_gpu in partners.items()}
    result = {
        gpu: f"{count} of {len(partners[gpu])}"
        for gpu, count in failing.items()
        if count >= LEAST_PARTNERS and 2 * count > len(partners[gpu])
    }
    halves = any(partners[one].get(other) is False for one in result for other in result)
    return result if 2 * len(result) < len(partners) and not halves else {}


def _with_xid(view: HostView, verdicts: Sequence[Verdict]) -> str:
    """The one GPU that had XIDs during the run, and fails for one; empty where there is none such, or an NVSwitch had any."""
    risen = _risen(view, XIDS)
    if len(risen) != 1 or _risen(view, SXIDS):
        return ""
    (gpu,) = risen
    fails = any(item.verdict == FAIL and item.name == XIDS and item.place == gpu for item in verdicts)
    return gpu if fails and gpu in view.serials else ""


def _risen(view: HostView, name: str) -> set[str]:
    """Return the parts whose count is higher at the end than in the first snapshot; a missing first count is 0."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for observation in view.observations.get(name, ()):
        if observation.status == MEASURED and isinstance(observation.value, int | float):
            last[observation.scope] = observation.value
            if (observation.stage, observation.params.get("phase")) == view.first_snapshot:
                first[observation.scope] = observation.value
    return {Scope.parse(scope).part for scope, count in last.items() if count > first.get(scope, 0)}


def _laid(verdict: Verdict, part: str, why: str, serial: str) -> Verdict:
    values = f"laid to {part}, {why}"
    detail = "; ".join(text for text in (verdict.detail, values) if text)
    return replace(verdict, part=part, serial=serial, reason=f"{verdict.reason}; {values}", detail=detail)
