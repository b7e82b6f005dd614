"""Which part of a host a finding is laid to, where its own scope does not say.

One broken GPU fails its seven neighbours too, as a pair is as fast as the slower of its ends; and an XID fails the host in whose
log it stands. Neither the neighbours nor the host are to be returned.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.judge.evidence import HostView
from schemas.records import MEASURED
from schemas.reports import FAIL, PASS, Verdict

XID, XIDS = "xid.last_seen", "xid.count"
LEAST_PARTNERS = 2
"""Of a pair alone, either GPU may be what is wrong."""
_PAIR = re.compile(r"(gpu=\d+),peer=(\d+)")

_Partners = Mapping[str, Mapping[str, bool]]
"""GPU -> each GPU that it was measured with, and whether that failed, in either direction."""


def with_culprits(view: HostView, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on one host; those that fail for another part's sake are laid to it (`part`).

    A GPU is to blame for its pairs where it fails a criterion with more than half of the others that it was measured with, and
    with two at least; and where fewer than half of the GPUs are such. A new XID is laid to the one GPU that has any.
    """
    partners: dict[str, dict[str, dict[str, bool]]] = defaultdict(lambda: defaultdict(dict))
    for verdict in verdicts:
        if verdict.verdict in (PASS, FAIL) and (ends := _ends(verdict.scope)):
            for one, other in (ends, ends[::-1]):
                of_one = partners[verdict.criterion][one]
                of_one[other] = of_one.get(other, False) or verdict.verdict == FAIL
    blamed = {criterion: _blamed(of_gpu) for criterion, of_gpu in partners.items()}
    with_xid = {
        seen.scope.partition(",")[0]
        for seen in view.observations.get(XIDS, ())
        if seen.status == MEASURED and seen.value
    }
    found = []
    for verdict in verdicts:
        part, told = "", ""
        if verdict.verdict == FAIL and verdict.name == XID and len(with_xid) == 1:
            (part,), told = with_xid, "the one with an XID"
        elif verdict.verdict == FAIL and (ends := _ends(verdict.scope)):
            own, other = ends
            counts = blamed[verdict.criterion]
            if own not in counts and other in counts:
                part, told = other, f"which fails it with {counts[other]} others"
        found.append(_laid(verdict, part, told, view.serial(part)) if part in view.serials else verdict)
    return found


def _ends(scope: str) -> tuple[str, str] | None:
    found = _PAIR.fullmatch(scope)
    return (found[1], f"gpu={found[2]}") if found else None


def _blamed(partners: _Partners) -> dict[str, str]:
    """GPU that is to blame -> with how many of the others it fails."""
    failing = {gpu: sum(of_gpu.values()) for gpu, of_gpu in partners.items()}
    found = {
        gpu: f"{count} of {len(partners[gpu])}"
        for gpu, count in failing.items()
        if count >= LEAST_PARTNERS and 2 * count > len(partners[gpu])
    }
    return found if 2 * len(found) < len(partners) else {}


def _laid(verdict: Verdict, part: str, why: str, serial: str) -> Verdict:
    told = f"laid to {part}, {why}"
    detail = "; ".join(text for text in (verdict.detail, told) if text)
    return replace(verdict, part=part, serial=serial, reason=f"{verdict.reason}; {told}", detail=detail)
