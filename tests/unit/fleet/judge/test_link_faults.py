"""In an NVLink domain, failures because of XID 145 are attributed to the GPU with the dead NVLink.

That GPU reports a fatal XID 149. A failure of `xid.last_seen` does not name an XID. It too is attributed to the GPU with the
dead NVLink if all reported XIDs are 145, 149 or 45. The XIDs are those of the GPU in `Verdict.part`, or if there is no
part, of the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.host_view import HostView
from fleet.judge.link_faults import LinkFaults, with_link_faults
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

ONE_DOMAIN = one_figure_plan("h1", "h2", "h3", gpu_count=2, rackproof_nvlink_domain="d1")
SEPARATE = one_figure_plan("h1", "h2", "h3", gpu_count=2)
DEAD = Metric(name="xid.fatal", unit="1", values={"gpu=1,xid=149": 1})
FOLLOWING = {"name": "xid.fatal", "scope": "gpu=0,xid=145"}
WHY = "follows from the dead NVLink of GPU 1 of h2 (XID 149)"


def failure(host: str = "h1", **fields: Any) -> Verdict:
    default = {"host": host, "verdict": FAIL, "criterion": "xid", "reason": "found 1", "params": {"phase": "after"}}
    return Verdict(**{**default, **FOLLOWING, **fields})


def views(dead: Metric = DEAD, plan: Any = ONE_DOMAIN, **logs: Metric) -> list[HostView]:
    """Return the views of h1, h2 and h3; h2 has the reading `dead`. `logs`: h1 or h2 -> one more reading of that host."""
    return [
        host_view(plan, "h1", *([logs["h1"]] if "h1" in logs else [])),
        host_view(plan, "h2", dead, *([logs["h2"]] if "h2" in logs else [])),
        host_view(plan, "h3"),
    ]


def faults_of(hosts: list[HostView]) -> LinkFaults:
    faults = LinkFaults()
    for view in hosts:
        faults.add(view)
    return faults


def attributed(verdict: Verdict, hosts: list[HostView] | None = None) -> Verdict:
    hosts = hosts or views()
    (result,) = with_link_faults(hosts, [verdict], faults_of(hosts))
    return result


@pytest.mark.parametrize("name", ["xid.count", "xid.fatal"])
def test_failure_because_of_xid_145_names_the_gpu_with_the_dead_link(name: str) -> None:
    result = attributed(failure(name=name, detail="in the kernel log"))
    assert result.reason == f"found 1; {WHY}"
    assert result.detail == f"{WHY}; in the kernel log"
    assert result.params == {"phase": "after", "follows_host": "h2", "follows_part": "gpu=1"}


def test_detail_is_only_the_explanation_if_the_failure_had_no_detail() -> None:
    assert attributed(failure()).detail == WHY


@pytest.mark.parametrize(
    "verdict",
    [
        failure(verdict=PASS),
        failure(verdict=INCONCLUSIVE),
        failure(scope="gpu=0,xid=79"),
        failure(name="kernel.event.count"),
        failure(host="h2", scope="gpu=1,xid=145"),
        failure(host="h4"),
    ],
    ids=["pass", "inconclusive", "another XID", "another reading", "the GPU with the dead link itself", "unknown host"],
)
def test_verdicts_that_do_not_follow_from_the_dead_link_stay_the_same(verdict: Verdict) -> None:
    assert attributed(verdict) is verdict


def test_xid_145_of_another_gpu_of_the_same_host_follows_from_the_dead_link() -> None:
    assert attributed(failure(host="h2")).params["follows_part"] == "gpu=1"


@pytest.mark.parametrize(
    ("codes", "follows"),
    [
        (("145",), True),
        (("145", "149", "45"), True),
        (("145", "79"), False),
        ((), False),
    ],
)
def test_failure_of_xid_last_seen_follows_from_a_dead_link_only_if_the_log_has_xids_and_all_are_145_149_or_45(
    codes: tuple[str, ...], follows: bool
) -> None:
    log = Metric(
        name="xid.count",
        unit="1",
        values={f"gpu=0,xid={code}": 1 for code in codes},
        absent={"gpu=1,xid=79": "error: no"},
    )
    verdict = failure(name="xid.last_seen", scope="host")
    assert (attributed(verdict, views(h1=log)) != verdict) is follows


@pytest.mark.parametrize(("part", "follows"), [("", False), ("gpu=0", True), ("gpu=1", False)])
def test_xids_of_other_gpus_are_ignored_if_the_failure_of_xid_last_seen_names_a_gpu(part: str, follows: bool) -> None:
    log = Metric(name="xid.count", unit="1", values={"gpu=0,xid=145": 1, "gpu=1,xid=145": 1, "gpu=1,xid=94": 1})
    verdict = failure(name="xid.last_seen", scope="host", part=part)
    assert (attributed(verdict, views(h1=log)) != verdict) is follows


@pytest.mark.parametrize(
    "dead",
    [
        Metric(name="xid.fatal", unit="1", values={"gpu=1,xid=149": 0}),
        Metric(name="xid.fatal", unit="1", absent={"gpu=1,xid=149": "error: the log cannot be read"}),
        Metric(name="xid.fatal", unit="1", values={"gpu=1,xid=145": 1}),
        Metric(name="xid.count", unit="1", values={"gpu=1,xid=149": 1}),
    ],
    ids=["no XID 149", "log not read", "other XID", "XID 149 counted, but not as fatal"],
)
def test_no_gpu_is_named_without_a_fatal_xid_149(dead: Metric) -> None:
    assert attributed(failure(), views(dead)) == failure()


def test_hosts_outside_a_domain_are_not_affected_by_each_other() -> None:
    hosts = views(plan=SEPARATE)
    assert attributed(failure(), hosts) == failure()
    assert attributed(failure(host="h2"), hosts).params["follows_host"] == "h2"


def test_root_is_the_dead_link_of_the_host_itself_or_else_of_the_first_host_by_name() -> None:
    hosts = [
        host_view(ONE_DOMAIN, name, replace(DEAD, values={f"gpu={at},xid=149": 1}))
        for name, at in (("h3", 0), ("h2", 1))
    ]
    faults = faults_of(hosts)
    assert faults.root(hosts[0]) == ("h3", "gpu=0")
    assert faults.root(host_view(ONE_DOMAIN, "h1")) == ("h2", "gpu=1")


def test_faults_of_two_groups_of_hosts_are_merged() -> None:
    first, second, third = views()
    merged = faults_of([first, third])
    assert merged.root(first) is None
    merged.update(faults_of([second]))
    assert merged.root(first) == ("h2", "gpu=1")
