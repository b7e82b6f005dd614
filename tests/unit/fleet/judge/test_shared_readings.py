"""Hosts share a step of the judge if all readings of the step are equal on these hosts.

A step is, for example, the evaluation of a criterion. A shared step is done only once for all hosts. If a reading of the step
differs on a later host, the step is removed. From this host on, the step is done for each host separately.

A reading may have a number as its token: readings with equal tokens are equal.
"""

from __future__ import annotations

from fleet.judge.layout import HostValues
from fleet.judge.shared_readings import SharedReadings
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan, reading

PLAN = one_figure_plan("h1")
NAMES = {"first": ("gpu.a",), "second": ("gpu.b", "gpu.c"), "third": ("gpu.c",)}
"""Step -> names of the readings that it uses."""


def values(**tokens: int) -> HostValues:
    """Return the values of a host. `tokens`: `a` -> token of the reading `gpu.a`; 0: the reading has no token."""
    metrics = []
    for name, token in tokens.items():
        metric = reading(1, name=f"gpu.{name}")
        vars(metric)["token"] = token
        metrics.append(metric)
    return HostValues(host_view(PLAN, "h1", *metrics))


def test_step_with_a_reading_that_has_no_token_is_not_shared() -> None:
    assert SharedReadings(values(a=1, b=0, c=3), NAMES).steps == {"first": ("gpu.a",), "third": ("gpu.c",)}


def test_no_step_is_removed_if_the_readings_are_equal() -> None:
    shared = SharedReadings(values(a=1, b=2, c=3), NAMES)
    assert shared.remove_changed(values(a=1, b=2, c=3)) == []
    assert shared.steps == NAMES


def test_steps_with_a_changed_reading_are_removed_once() -> None:
    shared = SharedReadings(values(a=1, b=2, c=3), NAMES)
    assert shared.remove_changed(values(a=1, b=9, c=3)) == ["second"]
    assert list(shared.steps) == ["first", "third"]
    assert shared.remove_changed(values(a=1, b=8, c=3)) == []
    assert shared.remove_changed(values(a=1, b=2, c=4)) == ["third"]


def test_change_of_a_reading_that_two_steps_use_removes_both() -> None:
    assert SharedReadings(values(a=1, b=2, c=3), NAMES).remove_changed(values(a=1, b=2, c=9)) == ["second", "third"]


def test_reading_that_only_a_removed_step_uses_is_no_longer_compared() -> None:
    shared = SharedReadings(values(a=1, b=2, c=3), NAMES)
    assert shared.remove(["first"]) == ["first"]
    assert shared.remove_changed(values(b=2, c=3)) == []
