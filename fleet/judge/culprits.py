"""Attribute failures on a host to the part that causes them, if the scope of the failure does not name that part.

The pair measurements of a healthy GPU with a broken one also fail, because a pair is as fast as its slower GPU. An XID in the
kernel log fails the whole host. Without this module, healthy GPUs or the whole host would be returned to the vendor.
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

XID, XIDS, FATAL_XIDS, SXIDS = "xid.last_seen", "xid.count", "xid.fatal", "sxid.count"
AFTERMATH = "45"
"""XID that follows the end of a process. After the fault of one GPU, all GPUs of the launch report it."""
FOLLOWING = "145"
"""XID that the other GPUs of an NVLink domain report if a link of one GPU is dead."""
MIN_FAILED_PARTNERS = 3
"""A GPU that fails with only two others may be healthy: on a small host, its links to these two may be the cause."""
_PAIR = re.compile(r"(gpu=\d+),peer=(\d+)")

_Partners = Mapping[str, Mapping[str, bool]]
"""GPU -> other GPU that it was measured with -> whether the pair failed in any direction."""


def with_culprits(view: HostView, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on one host. If another part than that in the scope causes a failure, `Verdict.part` names it.

    A GPU is the cause of its failed pairs under three conditions:
    - Its pairs with more than half of its partners, and with at least three of them, fail the same criterion.
    - Fewer than half of the GPUs meet the first condition.
    - No two GPUs that meet the first condition pass as a pair. If two pass, the cause is the link between two groups of GPUs.

    A new XID in the kernel log is attributed to a GPU if every GPU with new XIDs in the run fails a criterion on the number of
    its XIDs or of its fatal XIDs, and no NVSwitch reported a new error (SXID) in the run. Of several GPUs, it is the one with the
    lowest index. A GPU whose only new XID is FOLLOWING is chosen only if the others have no other new XID either.
    """
    partners: dict[str, dict[str, dict[str, bool]]] = defaultdict(lambda: defaultdict(dict))
    for verdict in verdicts:
        if verdict.verdict in (PASS, FAIL) and (ends := _ends(view, verdict.scope)):
            for gpu, partner in (ends, ends[::-1]):
                failed = partners[verdict.criterion][gpu]
                failed[partner] = failed.get(partner, False) or verdict.verdict == FAIL
    culprits = {criterion: _pair_culprits(of_gpu) for criterion, of_gpu in partners.items()}
    xid_culprit = _xid_culprit(view, verdicts)
    attributed = []
    for verdict in verdicts:
        part, why = "", ""
        if verdict.verdict == FAIL and verdict.name == XID:
            part, why = xid_culprit, "which had an XID during the run"
        elif verdict.verdict == FAIL and (ends := _ends(view, verdict.scope)):
            gpu, partner = ends
            counts = culprits[verdict.criterion]
            if gpu not in counts and partner in counts:
                part, why = partner, f"which fails this check with {counts[partner]} other GPUs"
        attributed.append(_attribute(verdict, part, why, view.serial(part)) if part else verdict)
    return attributed


def _ends(view: HostView, scope: str) -> tuple[str, str] | None:
    """Return the two GPUs of a pair; None if the scope is not a pair of two GPUs of the host."""
    match = _PAIR.fullmatch(scope)
    ends = (match[1], f"gpu={match[2]}") if match else None
    return ends if ends and ends[0] != ends[1] and all(end in view.serials for end in ends) else None


def _pair_culprits(partners: _Partners) -> dict[str, str]:
    """Return the GPUs that cause their failed pairs, each with the number of partners it fails with, such as `5 of 7`."""
    failures = {gpu: sum(of_gpu.values()) for gpu, of_gpu in partners.items()}
    suspects = {
        gpu: f"{count} of {len(partners[gpu])}"
        for gpu, count in failures.items()
        if count >= MIN_FAILED_PARTNERS and 2 * count > len(partners[gpu])
    }
    pass_together = any(partners[gpu].get(other) is False for gpu in suspects for other in suspects)
    return suspects if 2 * len(suspects) < len(partners) and not pass_together else {}


def _xid_culprit(view: HostView, verdicts: Sequence[Verdict]) -> str:
    """Return the GPU that a new XID is attributed to; empty if there is none."""
    new_codes = _new_codes(view, XIDS)
    failed = {item.part_scope for item in verdicts if item.verdict == FAIL and item.name in (XIDS, FATAL_XIDS)}
    if not new_codes.keys() <= failed & view.serials.keys() or _new_codes(view, SXIDS):
        return ""
    return min(new_codes, key=lambda gpu: (new_codes[gpu] == {FOLLOWING}, Scope.parse(gpu).index or 0), default="")


def _new_codes(view: HostView, name: str) -> dict[str, set[str]]:
    """Return part -> XIDs whose counter is higher at the end than in the first snapshot of the run, for parts with such XIDs.

    The XID is empty for another counter than that of XIDs. A counter that is missing in the first snapshot was 0 there. Counters
    of XID 45 (AFTERMATH) are ignored.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for observation in view.observations.get(name, ()):
        if Scope.parse(observation.scope).get("xid") == AFTERMATH:
            continue
        if observation.status == MEASURED and isinstance(observation.value, int | float):
            last[observation.scope] = observation.value
            if (observation.stage, observation.params.get("phase")) == view.first_snapshot:
                first[observation.scope] = observation.value
    new: dict[str, set[str]] = defaultdict(set)
    for scope, count in last.items():
        if count > first.get(scope, 0):
            new[Scope.parse(scope).part].add(Scope.parse(scope).get("xid"))
    return new


def _attribute(verdict: Verdict, part: str, why: str, serial: str) -> Verdict:
    text = f"attributed to {part}, {why}"
    detail = "; ".join(filter(None, (verdict.detail, text)))
    return replace(verdict, part=part, serial=serial, reason=f"{verdict.reason}; {text}", detail=detail)
