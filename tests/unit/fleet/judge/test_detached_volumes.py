"""Events of an NVMe controller that a virtual machine had in no snapshot show no lost disk."""

from __future__ import annotations

import pytest

from collectors.kernel_events import VOLUME_EVENTS
from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, Verdict
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

PLAN = one_figure_plan()
PACKS = read_packs([])
EVENTS = "kernel.event.count"
LISTED = {"values": {"disk=nvme0": 1}}
UNREADABLE = {"values": {}, "absent": {"disk=nvme0": "error: Input/output error"}}
OTHER = {"values": {"disk=nvme1": 1}}


def verdicts(event: str, *, virtual: bool, controllers: dict[str, dict[str, object]] | None) -> list[Verdict]:
    """Return the verdicts other than passes on the event of the controller nvme0.

    `controllers` are the fields of the reading of the built-in NVMe controllers.
    """
    metrics = [
        Metric(name=EVENTS, unit="1", values={f"disk=nvme0,event={event}": 1}),
        Metric(name="host.virtual_machine", unit="1", values={"host": virtual}),
    ]
    if controllers is not None:
        metrics.append(Metric(name="storage.controller.namespaces", unit="1", **controllers))  # type: ignore[arg-type]
    result = judge(PLAN, {"h1": host_evidence(PLAN, "h1", *metrics)}, PACKS)
    return [item for item in result if item.name == EVENTS and item.verdict in (FAIL, INCONCLUSIVE)]


@pytest.mark.parametrize("event", VOLUME_EVENTS)
@pytest.mark.parametrize(
    ("virtual", "controllers", "expected"),
    [
        (True, LISTED, FAIL),
        (True, UNREADABLE, FAIL),
        (True, OTHER, INCONCLUSIVE),
        (True, None, INCONCLUSIVE),
        (False, LISTED, FAIL),
        (False, OTHER, FAIL),
        (False, None, FAIL),
    ],
)
def test_event_of_a_controller_that_no_snapshot_lists_is_inconclusive_only_in_a_virtual_machine(
    event: str, virtual: bool, controllers: dict[str, dict[str, object]] | None, expected: str
) -> None:
    (verdict,) = verdicts(event, virtual=virtual, controllers=controllers)
    assert verdict.verdict == expected
    if expected == INCONCLUSIVE:
        assert "a volume that was detached" in verdict.reason
        assert verdict.action == "none"


@pytest.mark.parametrize("event", VOLUME_EVENTS.values())
def test_event_of_a_volume_is_not_judged(event: str) -> None:
    assert verdicts(event, virtual=True, controllers=LISTED) == []


@pytest.mark.parametrize("event", ["disk_error", "file_system", "array_member_failed"])
def test_other_events_of_disks_of_a_virtual_machine_fail(event: str) -> None:
    (verdict,) = verdicts(event, virtual=True, controllers=None)
    assert verdict.verdict == FAIL
