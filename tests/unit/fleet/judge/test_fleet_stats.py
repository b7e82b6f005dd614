"""Hosts are added to each statistic of a fleet, and each statistic is merged when two groups of hosts are merged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence, Planned
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.host_view import HostView
from schemas.plans import Part
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

OF_IDENTITIES = (
    *("duplicates", "serials", "slots", "lanes", "domains", "machines", "link_faults", "support", "stated", "software"),
)
"""Names of the statistics to which `FleetStats.add_identities` adds every host."""
OF_VALUES = ("figures", "groups", "ranks")
"""Names of the statistics to which `FleetStats.add_values` adds every host."""
OF_RECORDS = ("digests", "paths")
"""Names of the statistics to which only hosts with a host record are added."""
PLAN = one_figure_plan("h1", "h2")


class Recorder:
    """A fake statistic, which records what is added to it and merged into it."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.merged: list[Recorder] = []

    def add(self, *what: Any, **_: Any) -> None:
        self.added.append(what[0])

    def update(self, other: Recorder) -> None:
        self.merged.append(other)


def recorded(plan: Any = PLAN) -> FleetStats:
    """Return statistics of a fleet in which a Recorder replaces each single statistic."""
    stats = FleetStats(Planned(plan))
    for name in (*OF_IDENTITIES, *OF_VALUES, *OF_RECORDS):
        setattr(stats, name, Recorder())
    return stats


def added(stats: FleetStats, names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: getattr(stats, name).added for name in names}


def test_host_is_added_to_every_statistic() -> None:
    stats, view = recorded(), host_view(PLAN)
    stats.add_identities(view)
    views = {name: [view] for name in OF_IDENTITIES}
    assert added(stats, OF_IDENTITIES) == {**views, "duplicates": [view.host.name]}
    assert added(stats, ("digests", *OF_VALUES)) == {"digests": [view], "figures": [], "groups": [], "ranks": []}
    stats.add_values(view)
    assert added(stats, (*OF_VALUES, "paths")) == {name: [view] for name in (*OF_VALUES, "paths")}
    assert [links.host for links in stats.links] == ["h1"]


def test_host_without_a_host_record_is_not_added_to_digests_and_paths() -> None:
    stats, view = recorded(), HostView(PLAN, PLAN.hosts[0], Evidence(), ())
    stats.add_identities(view)
    stats.add_values(view)
    assert added(stats, OF_RECORDS) == {"digests": [], "paths": []}
    assert added(stats, ("slots", "figures")) == {"slots": [view], "figures": [view]}


@pytest.mark.parametrize("has_manifest", [True, False])
def test_parts_of_a_host_are_listed_only_if_the_plan_has_a_manifest(has_manifest: bool) -> None:
    plan = replace(PLAN, manifest=(Part(host="h1", kind="gpu", serial="h1-0"),)) if has_manifest else PLAN
    stats = FleetStats(Planned(plan))
    stats.add_identities(host_view(plan))
    assert [inventory.host for inventory in stats.inventories] == (["h1"] if has_manifest else [])


def test_statistics_of_two_groups_are_merged_one_by_one() -> None:
    stats, other = recorded(), recorded()
    other.links.append("links")  # type: ignore[arg-type]
    other.inventories.append("parts")  # type: ignore[arg-type]
    stats.update(other)
    for name in (*OF_IDENTITIES, *OF_VALUES, *OF_RECORDS):
        assert getattr(stats, name).merged == [getattr(other, name)], name
    assert (stats.links, stats.inventories) == (["links"], ["parts"])


def test_every_statistic_is_tested() -> None:
    known = {*OF_IDENTITIES, *OF_VALUES, *OF_RECORDS, "planned", "inventories", "links"}
    assert vars(FleetStats(Planned(PLAN))).keys() == known


def test_complete_completes_the_paths_machines_stated_values_and_changes_of_software(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats, result = FleetStats(Planned(PLAN)), []
    monkeypatch.setattr(stats.paths, "find_normal_paths", result.append)
    monkeypatch.setattr(stats.machines, "complete", lambda: result.append("machines"))
    monkeypatch.setattr(stats.stated, "complete", lambda: result.append("stated"))
    monkeypatch.setattr(stats.software, "complete", lambda: result.append("software"))
    stats.complete()
    assert result == [stats.figures, "machines", "stated", "software"]
