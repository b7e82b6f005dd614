"""Support `rackproof rma --reason`: the operator returns a part for a reason that is not in the run, such as a later alert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.evidence import Evidence
from fleet.rma.parts import GPU, HOST, IDENTITY_READINGS, FailedPart
from fleet.scope_text import describe_scope
from schemas.records import MEASURED
from schemas.reports import FAIL, Cause, CausePart

PROBLEM = "operator-reason"
"""`Cause.problem` of the cause that `with_reason` adds."""
_KINDS = {readings["serial"]: kind for kind, readings in IDENTITY_READINGS.items() if "serial" in readings}
"""Name of a reading that reports a serial -> kind of the parts that have such a serial."""


def parts_with_serial(evidence: Mapping[str, Evidence], hosts: Sequence[str], serial: str) -> list[FailedPart]:
    """Return the parts of `hosts` that have this serial, normally one part. They have no causes or findings."""
    return [
        FailedPart(host=host, scope=scope, serial=serial, causes=(), findings=(), open=())
        for host in hosts
        for scope in dict.fromkeys(_scopes(evidence.get(host, Evidence()), serial))
    ]


def _scopes(evidence: Evidence, serial: str) -> Iterator[str]:
    yield from (f"{GPU}={gpu.index}" for gpu in evidence.gpus() if gpu.serial == serial)
    for item in evidence.observations():
        if item.name in _KINDS and item.status == MEASURED and str(item.value) == serial:
            yield item.scope


def with_reason(part: FailedPart, reason: str) -> FailedPart:
    """Return the part with one more cause in front: the operator's reason, with the action `rma` (return the part)."""
    name = part.host if part.scope == HOST else f"{describe_scope(part.scope)} of {part.host}"
    cause = Cause(
        problem=PROBLEM,
        title=f"{name} is returned for a reason that the run does not show",
        why=reason,
        verdict=FAIL,
        host=part.host,
        hosts=(part.host,),
        part=part.scope,
        parts=(CausePart(host=part.host, scope=part.scope, serial=part.serial),),
        confidence="unknown",
        verdicts=(),
        serial=part.serial,
        action="rma",
    )
    return replace(part, causes=(cause, *part.causes))
