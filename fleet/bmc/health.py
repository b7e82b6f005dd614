"""Health of a part in a Redfish resource, in the spelling of the standard: `OK`, `Warning: …`, `Critical: …`.

Callers first check with `is_there` whether the part counts: the health of a part that is absent or disabled is ignored, because
some services report a wrong one (`Critical` for an empty bay). A part in the state `UnavailableOffline` is present but cannot
be used. It is faulty if its health is bad or its line input is lost or out of range: this is how Dell and OpenBMC report a
power supply whose cord is unplugged. Any other part in the state `UnavailableOffline` is a spare and does not count.

The health itself is the property `Health`, with the reasons in `Conditions`. `HealthRollup` is not used: an old log entry can
make it bad.
"""

from __future__ import annotations

from fleet.bmc.client import Resource
from fleet.bmc.target import clean_text

OK, WARNING, CRITICAL = "OK", "Warning", "Critical"
_WITHOUT_HEALTH = frozenset({"absent", "disabled", "notpresent"})
_UNUSABLE = "unavailableoffline"
_SPELLINGS = {
    OK: ("ok", "good", "normal", "nominal", "healthy", "optimal", "enabled", "true", "informational", "present"),
    WARNING: ("warning", "noncritical", "caution", "minor", "degraded"),
    CRITICAL: ("critical", "failed", "failure", "fault", "error", "bad", "false", "major", "fatal", "nonrecoverable"),
}
_WITH_READING = frozenset({"Fans", "PowerSupplies", "Temperatures"})
"""Subsystems of HPE's `AggregateHealthStatus` whose parts have readings of their own."""
_BAD_INPUT = ("LossOfInput", "OutOfRange")


def standard(value: object) -> str | None:
    """Return the standard spelling of a health or severity; None if `value` is None or an unknown spelling."""
    text = "".join(char for char in clean_text(value, 40).lower() if char.isalnum()) if value is not None else ""
    return next((name for name, spellings in _SPELLINGS.items() if text in spellings), None)


def is_there(resource: Resource) -> bool:
    """Return whether the part counts: it is neither absent nor disabled, and it is not a spare (see above)."""
    state = _state(resource)
    if is_offline(resource):
        return standard(_raw_health(resource)) in (WARNING, CRITICAL) or resource.get("LineInputStatus") in _BAD_INPUT
    return state not in _WITHOUT_HEALTH


def is_offline(resource: Resource) -> bool:
    """Return whether a part is present but cannot be used now. OpenBMC reports this of a sensor that does not answer."""
    return _state(resource) == _UNUSABLE


def _state(resource: Resource) -> str:
    """Return the property `State` of the part in lower case, without spaces and punctuation."""
    status = resource.get("Status")
    state = status.get("State") if isinstance(status, dict) else status
    return "".join(char for char in str(state).lower() if char.isalnum())


def has_health(resource: Resource) -> bool:
    """Return whether the part reports a health, known to `standard` or not."""
    return _raw_health(resource) not in (None, "")


def _raw_health(resource: Resource) -> object:
    status = resource.get("Status")
    return status.get("Health") if isinstance(status, dict) else status


def health(resource: Resource) -> str | None:
    """Return the health of a part, with the reason if the health is bad; None if the health is missing or unknown."""
    status, value = resource.get("Status"), standard(_raw_health(resource))
    if value in (None, OK):
        return value
    reasons = status.get("Conditions") if isinstance(status, dict) else None
    items = reasons if isinstance(reasons, list) else []
    texts = [clean_text(item.get("Message") or "") for item in items if isinstance(item, dict)]
    reason = "; ".join(dict.fromkeys(filter(None, texts)))
    if not reason and _state(resource) == _UNUSABLE:
        reason = "it is present, but cannot be used (UnavailableOffline)"
    reason = reason or _bad_subsystems(resource)
    return f"{value}: {reason}"[:400] if reason else value


def _bad_subsystems(system: Resource) -> str:
    """Return the subsystems of a system of HPE whose health is bad; empty if that of a part with a reading of its own is bad."""
    oem = system.get("Oem")
    hpe = oem.get("Hpe") if isinstance(oem, dict) else None
    aggregate = hpe.get("AggregateHealthStatus") if isinstance(hpe, dict) else None
    subsystems = aggregate if isinstance(aggregate, dict) else {}
    bad = {
        name
        for name, item in subsystems.items()
        if isinstance(item, dict) and standard(_raw_health(item)) in (WARNING, CRITICAL)
    }
    return "" if bad & _WITH_READING else clean_text(", ".join(sorted(bad)))


def power_supply_health(supply: Resource) -> str | None:
    """Return the health of a power supply: critical if its line input is lost or out of range, whatever its `Health` is."""
    value, line = health(supply), supply.get("LineInputStatus")
    if line in _BAD_INPUT:
        return f"{CRITICAL}: its line input has the status {line}"
    has_no_input = supply.get("LineInputVoltage") == 0 and supply.get("PowerOutputWatts") in (0, None)
    return f"{value}: it has no input (0 V)" if value in (WARNING, CRITICAL) and has_no_input else value


def leak_health(detector: Resource) -> str | None:
    """Return the health of a leak detector: its `DetectorState`, or its `Health` if `DetectorState` is missing or unknown."""
    value = standard(detector.get("DetectorState"))
    return f"{value}: it reports a leak" if value in (WARNING, CRITICAL) else value or health(detector)
