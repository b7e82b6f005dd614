"""Test groups of parts (hosts, GPUs or ports) that must have the same value.

The tests cover the reference value of a group, the values that agree with it, and missing parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion
from fleet.judge.host_view import HostView
from fleet.judge.uniformity import (
    PartValue,
    ValueGroup,
    ValueGroups,
    group_key,
    group_keys,
    has_observation,
    is_alike,
    name_of_group,
    part_values,
    uniform,
)
from schemas.plans import Plan
from schemas.records import Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, stage_snapshots

HOSTS = ("h1", "h2", "h3", "h4")
PLAN = one_figure_plan(*HOSTS, rackproof_gang="all")
NAME = "host.thing"
Readings = Mapping[str, Mapping[str, Value]]
"""Name -> scope -> value; the text `status: reason` if the reading has no value."""


def rule(name: str = NAME, scope: str = "host", **fields: Any) -> Criterion:
    """Return a criterion that requires the same value of all parts of a group."""
    return criterion(name, **{"scope": scope, "value": None, "same_as_fleet": True, "action": "none", **fields})


def view(host: str, criterion: Criterion, *snapshots: Readings, plan: Plan = PLAN, **fields: Any) -> HostView:
    """Return a host that the criterion judges. `snapshots`: the readings of each snapshot."""
    taken = stage_snapshots("benchmark", *snapshots)
    return HostView(plan, plan.host(host), host_evidence(plan, host, snapshots=taken, **fields), [pack(criterion)])


def views_of(criterion: Criterion, values: Mapping[str, Value], plan: Plan = PLAN) -> list[HostView]:
    """Return a view of each host; `values`: host -> value of the reading that the criterion compares (None: no reading)."""
    return [
        view(host, criterion, {criterion.name: {"host": value}} if value is not None else {}, plan=plan)
        for host, value in values.items()
    ]


def judged(criterion: Criterion, *views: HostView) -> list[tuple[str, str, str, str]]:
    """Return host, scope, verdict and reason of each verdict."""
    groups = ValueGroups(views)
    verdicts = [verdict for each in views for verdict in uniform(each, criterion, groups)]
    return [(item.host, item.scope, item.verdict, item.reason) for item in verdicts]


def group(*values: tuple[Value, int]) -> ValueGroup:
    """Return a group of hosts. `values`: (value, number of hosts that have it)."""
    result = ValueGroup(what="host")
    for value, count in values:
        result.add(value, count)
    return result


# ---- the reference value ----


@pytest.mark.parametrize(
    ("values", "fields", "reference"),
    [
        ([], {}, (None, 0)),
        ([], {"within": 0.1}, (None, 0)),
        ([("a", 1), ("b", 2)], {}, ("b", 2)),
        ([("a", 2), ("b", 2)], {}, (None, 0)),
        ([("a", 2), ("b", 2), ("c", 1)], {"prefer": "b"}, ("b", 2)),
        ([("a", 2), ("b", 2), ("c", 2)], {"prefer": "a"}, ("a", 2)),
        ([("a", 2), ("b", 2), ("c", 1)], {"prefer": "c"}, (None, 0)),
        ([(True, 2), (False, 2)], {"prefer": 1}, (None, 0)),
        ([(5, 2), (7, 2), (9, 1)], {"operator": "ge"}, (7, 2)),
        ([(5, 2), (7, 2), (3, 1)], {"operator": "le"}, (5, 2)),
        ([(5, 2), (7, 2)], {"operator": "eq"}, (None, 0)),
        ([(5, 2), ("a", 2)], {"operator": "ge"}, (None, 0)),
        # With `within`, the count of a number includes numbers near it. `within` is the tolerance, as a fraction of the number.
        ([(50, 3), (100, 2), (105, 2)], {"within": 0.1}, (100, 4)),
        ([(50, 3), (100, 2), (120, 2)], {"within": 0.1}, (50, 3)),
        ([(90, 1), (100, 2), (110, 1), (50, 3)], {"within": 0.1}, (100, 4)),
        ([(-105, 2), (-100, 2), (50, 3)], {"within": 0.1}, (-100, 4)),
        ([(100, 2), (200, 2)], {"within": 0.1}, (None, 0)),
        ([("a", 3), (100, 2)], {"within": 0.1}, ("a", 3)),
        ([("a", 2), ("b", 1), (100, 2), (101, 1)], {"within": 0.1}, (100, 3)),
        ([(True, 3), (1.0, 2), (1.1, 2)], {"within": 0.2}, (1.0, 4)),
    ],
)  # fmt: skip
def test_reference_is_the_most_common_value(
    values: list[tuple[Value, int]], fields: dict[str, Any], reference: tuple[Value, int]
) -> None:
    """If several values are equally common, `prefer` decides, or else the operator. If neither does, there is no reference.

    Numbers near each other do not compete, even if equally common: the first in `by_count()` is the reference.
    """
    assert group(*values).reference(rule(**fields)) == reference


def test_reference_of_a_group_changes_when_a_part_is_added() -> None:
    values = group(("a", 1), ("b", 2))
    assert (values.reference(rule()), values.by_count()) == (("b", 2), (("b", 2), ("a", 1)))
    values.add("a", 2)
    assert (values.reference(rule()), values.by_count(), values.total) == (("a", 3), (("a", 3), ("b", 2)), 5)
    values.add("b")
    assert values.by_count() == (("a", 3), ("b", 3)), "equally common values must be sorted as text"
    assert values.plural == "hosts"


def test_merged_group_has_the_counts_of_both_groups() -> None:
    """True and 1 are different values."""
    first, second = group((1, 1), ("a", 2)), group((True, 4), (1, 2))
    merged = first.merged(second)
    assert [(value, type(value), count) for value, count in merged.by_count()] == [
        (True, bool, 4), (1, int, 3), ("a", str, 2)
    ]  # fmt: skip
    assert (merged.what, first.total, second.total) == ("host", 3, 6)


@pytest.mark.parametrize(
    ("value", "reference", "fields", "expected"),
    [
        ("a", "a", {}, True),
        ("a", "b", {}, False),
        ("a", "b", {"prefer": "a"}, True),
        ("a", "b", {"prefer": "c"}, False),
        (True, 0, {"prefer": 1}, False),
        (True, 1, {}, False),
        (90, 100, {"within": 0.1}, True),
        (100, 90, {"within": 0.1}, True),
        (89, 100, {"within": 0.1}, False),
        (112, 100, {"within": 0.1}, False),
        (-100, -95, {"within": 0.1}, True),
        ("a", 100, {"within": 0.1}, False),
        (100, "a", {"within": 0.1}, False),
        (5, 4, {"operator": "ge"}, True),
        (3, 4, {"operator": "ge"}, False),
        (3, 4, {"operator": "le"}, True),
        (5, 4, {"operator": "le"}, False),
        (5, 4, {}, False),
        (3, 4, {}, False),
        ("b", 4, {"operator": "ge"}, False),
        (4, "b", {"operator": "ge"}, False),
        (True, 0, {"operator": "ge"}, False),
        (True, False, {"operator": "ge"}, True),
        (1, True, {"operator": "ge"}, False),
        (True, 1, {"operator": "le"}, False),
    ],
)
def test_equal_close_better_or_preferred_value_agrees_with_the_reference(
    value: Value, reference: Value, fields: dict[str, Any], expected: bool
) -> None:
    """`within` states how close a value must be. The operator states which values are better."""
    assert is_alike(rule(**fields), value, reference) == expected


@pytest.mark.parametrize(
    ("among", "name"), [("", "g1"), ("host", "g1"), ("rack", "rack r7"), ("domain", "domain nvl1")]
)
def test_name_of_a_group_is_the_gang_the_rack_or_the_domain(among: str, name: str) -> None:
    assert name_of_group(rule(among=among), "g1", "r7", "domain nvl1") == name


# ---- groups and their keys ----


@pytest.mark.parametrize(
    ("scope", "name", "key", "what"),
    [
        ("host", NAME, ("NVIDIA H200", "host"), "host"),
        ("hca=a,port=1", "port.thing", ("NVIDIA H200", "hca=a,port=1"), "host"),
        ("gpu=0", "gpu.thing", ("NVIDIA H200", "gpu,"), "GPU"),
        ("gpu=9", "gpu.thing", ("", "gpu,"), "GPU"),
        ("gpu=0,link=3", "gpu.thing", ("NVIDIA H200", "gpu,link=3"), "part"),
        ("gpu=0,peer=1", "gpu.thing", ("NVIDIA H200", "gpu=0,peer=1"), "host"),
        ("gpu=0", "pcie.width", ("NVIDIA H200", "gpu=0"), "host"),
    ],
)
def test_group_key_omits_the_gpu_index_unless_the_slot_matters(
    scope: str, name: str, key: tuple[str, str], what: str
) -> None:
    """The slot matters for PCIe readings and for readings of pairs of GPUs."""
    compared = rule(name, scope=scope.rpartition(",")[2].partition("=")[0])
    first = view("h1", compared, {name: {scope: 1}})
    item = first.observations[name][0]
    assert group_key(first, compared, item) == (("c", name, key[0], "all", key[1]), what)
    assert group_keys(first, compared) == (("c", name, key[0], "all", key[1]),)
    (part,) = part_values(first, compared)
    assert (part.value, part.kind) == (1, ("c", "NVIDIA H200", "all"))


def test_value_of_a_part_is_the_last_one_that_was_read() -> None:
    first = view("h1", rule(), {NAME: {"host": "a"}}, {NAME: {"host": "b"}}, {NAME: {"host": "error: lost"}})
    assert [part.value for part in part_values(first, rule())] == ["b"]
    assert len(group_keys(first, rule())) == 1


def test_part_in_another_group_keeps_the_rest_of_its_key() -> None:
    part = PartValue(key=("c", NAME, "H200", "g1", "host"), what="host", value=1, kind=("c", "H200", "g1"))
    moved = part.in_group("g2")
    assert (moved.key, moved.kind, moved.value) == (("c", NAME, "H200", "g2", "host"), ("c", "H200", "g2"), 1)


@pytest.mark.parametrize(
    ("name", "scope", "expected"), [(NAME, "host", True), ("host.other", "host", False), (NAME, "nic=eth0", False)]
)
def test_observation_is_judged_by_a_criterion_with_its_name_and_scope(name: str, scope: str, expected: bool) -> None:
    assert has_observation(view("h1", rule(), {name: {scope: 1}}), rule()) == expected


def test_pci_readings_of_drives_are_not_compared() -> None:
    compared = rule("pcie.width", scope="pci")
    kinds: Readings = {"pcie.kind": {"pci=a": "network", "pci=b": "nvme"}, "pcie.width": {"pci=a": 16, "pci=b": 4}}
    assert [part.key[4] for part in part_values(view("h1", compared, kinds), compared)] == ["pci=a"]


# ---- the groups of a fleet ----


@pytest.mark.parametrize(
    ("fields", "counted"),
    [({}, 2), ({"among": "rack"}, 2), ({"among": "host"}, 0), ({"among": "device"}, 0), ({"same_as_fleet": False}, 0)],
)
def test_values_are_counted_only_if_they_are_compared_between_hosts(fields: dict[str, Any], counted: int) -> None:
    compared = rule(**fields)
    views = views_of(compared, {"h1": "a", "h2": "b"})
    groups = ValueGroups(views)
    assert groups.of(views[0], compared, views[0].observations[NAME][0]).total == counted
    assert groups.has_value(views[0], compared) == bool(counted)


def test_updated_groups_also_have_the_values_of_the_other_groups() -> None:
    views = views_of(rule(), {"h1": "a", "h2": "a", "h3": "b"})
    groups = ValueGroups(views[:1])
    other = rule("host.other", id="other")
    groups.update(ValueGroups([*views[1:], view("h4", other, {"host.other": {"host": 1}})]))
    assert groups.of(views[0], rule(), views[0].observations[NAME][0]).by_count() == (("a", 2), ("b", 1))
    assert groups.has_value(views[0], other)
    assert not ValueGroups(views).has_value(views[0], other)


COMPLETE = rule("hca.thing", scope="hca", complete=True)
"""With `complete`, a part that most hosts have must be on every host."""


def adapters(host: str, *names: str) -> HostView:
    """Return a host with these adapters."""
    return view(host, COMPLETE, {"hca.thing": {f"hca={name}": "x" for name in names}})


def test_common_parts_are_on_more_than_half_of_the_hosts() -> None:
    views = [adapters("h1", "a", "b", "c"), adapters("h2", "a", "b"), adapters("h3", "a"), adapters("h4", "a")]
    groups = ValueGroups(views[:2])
    assert [*groups.common_parts(views[0], COMPLETE)] == ["hca=a", "hca=b"]
    for each in views[2:]:
        groups.add(each)
    assert [*groups.common_parts(views[0], COMPLETE)] == ["hca=a"], "`b` is on half of the hosts, not on more than half"
    groups.update(ValueGroups(views[:2]))
    assert [*groups.common_parts(views[0], COMPLETE)] == ["hca=a", "hca=b"]
    assert groups.common_parts(views[0], rule(id="unknown")) == {}


def test_each_gang_has_its_own_common_parts() -> None:
    gangs = {"h1": "g1", "h2": "g2"}
    plan = replace(PLAN, hosts=tuple(replace(host, gang=gangs.get(host.name, "")) for host in PLAN.hosts))
    scopes = {"h1": "hca=a", "h2": "hca=b"}
    views = [view(host, COMPLETE, {"hca.thing": {scope: "x"}}, plan=plan) for host, scope in scopes.items()]
    groups = ValueGroups(views)
    assert [[*groups.common_parts(each, COMPLETE)] for each in views] == [["hca=a"], ["hca=b"]]


@pytest.mark.parametrize(
    ("values", "required"),
    [
        ({"h1": "a"}, (1, str, "a")),
        ({"h1": "a", "h2": "a"}, (2, str, "a")),
        ({"h1": "a", "h2": "a", "h3": "a", "h4": "b"}, (2, str, "a")),
        ({"h1": "a", "h2": "b"}, (2, type(None), None)),
        ({"h1": True}, (1, bool, True)),
        ({"h1": None}, None),
    ],
)
def test_majority_states_the_reference_and_the_number_of_hosts(
    values: Mapping[str, Value], required: tuple[int, type, Value] | None
) -> None:
    """`required`: number of hosts with a value (2 means two or more), type of the reference, reference."""
    views = views_of(rule(), values)
    keys = group_keys(view("h1", rule(), {NAME: {"host": "z"}}), rule())
    # Give the keys another gang. majority() must use the gang of views[0], not the gang in the keys.
    keys = tuple((*key[:3], "other", key[4]) for key in keys)
    assert ValueGroups(views).majority(views[0], rule(), keys) == ((required,), None, required is not None)


def test_majority_has_the_common_parts_of_a_complete_criterion() -> None:
    views = [adapters("h1", "a", "b"), adapters("h2", "a", "b"), adapters("h3", "a")]
    assert ValueGroups(views).majority(views[0], COMPLETE, ()) == ((), frozenset({"hca=a", "hca=b"}), True)


# ---- verdicts ----


@pytest.mark.parametrize(("domain", "count"), [("", 0), ("nvl1", 2)])
def test_hosts_without_an_nvlink_domain_are_not_compared_within_a_domain(domain: str, count: int) -> None:
    compared = rule(among="domain")
    plan = replace(PLAN, hosts=tuple(replace(host, nvlink_domain=domain) for host in PLAN.hosts))
    views = views_of(compared, {"h1": "a", "h2": "a"}, plan)
    assert len(judged(compared, *views)) == count
    assert judged(replace(compared, same_as_fleet=False), *views) == []


@pytest.mark.parametrize(
    ("fields", "values", "expected"),
    [
        ({}, {"h1": "a", "h2": None}, [(INCONCLUSIVE, "not observed, but other hosts report it")]),
        ({}, {"h1": "a", "h2": "error: lost"}, [(INCONCLUSIVE, "error: lost")]),
        ({}, {"h1": "a", "h2": "unsupported: gone"}, [(INCONCLUSIVE, "unsupported: gone")]),
        ({"optional": True}, {"h1": "a", "h2": "unsupported: gone"}, []),
        ({"optional": True}, {"h1": "a", "h2": "error: lost"}, [(INCONCLUSIVE, "error: lost")]),
        ({"optional": True}, {"h1": "a", "h2": None}, []),
    ],
)
def test_verdict_on_a_host_without_a_value(
    fields: dict[str, Any], values: Mapping[str, Value], expected: list[tuple[str, str]]
) -> None:
    """A required reading without a value is inconclusive. An optional reading is inconclusive only if it failed."""
    compared = rule(**fields)
    assert judged(compared, *views_of(compared, values)) == [("h2", "host", *item) for item in expected]


@pytest.mark.parametrize(
    ("values", "fields", "reasons"),
    [
        (
            {"h1": "a", "h2": "a", "h3": "b"}, {},
            ["found a, as on 2 of 3 hosts"] * 2
            + ["found b, 2 of 3 hosts have a; set the value of the majority, and measure again"],
        ),
        (
            {"h1": "a", "h2": "a", "h3": "b"}, {"action": "reseat"},
            ["found a, as on 2 of 3 hosts"] * 2 + ["found b, 2 of 3 hosts have a"],
        ),
        ({"h1": "a", "h2": "a", "h3": "a"}, {}, ["found a, as on all 3 hosts"] * 3),
        (
            {"h1": "a", "h2": "a", "h3": "b"}, {"prefer": "b"},
            ["found a, as on 2 of 3 hosts"] * 2 + ["found b, 2 of 3 hosts have a"],
        ),
        (
            {"h1": "a", "h2": "b"}, {"action": "configure"},
            [f"found {value}, 1 of 2 hosts has a, 1 has b; set one value on all of them, and measure again"
             for value in "ab"],
        ),
        (
            {"h1": "a", "h2": "a", "h3": "b", "h4": "b"}, {"action": "reseat"},
            [f"found {value}, 2 of 4 hosts have a, 2 have b" for value in "aabb"],
        ),
    ],
)  # fmt: skip
def test_reason_states_how_many_hosts_agree(
    values: Mapping[str, Value], fields: dict[str, Any], reasons: list[str]
) -> None:
    compared = rule(**fields)
    assert [reason for *_, reason in judged(compared, *views_of(compared, values))] == reasons


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("aab", {"verdict": FAIL, "limit": "a", "operator": "ge", "action": "reseat", "severity": "warning"}),
        ("ab", {"verdict": FAIL, "limit": None, "operator": "", "action": "reseat", "severity": "warning"}),
        ("bb", {"verdict": PASS, "limit": "b", "operator": "ge", "action": "none", "severity": ""}),
    ],
)
def test_only_a_failed_verdict_has_the_action_and_severity_of_the_criterion(
    values: str, expected: dict[str, Value]
) -> None:
    compared = rule(operator="ge", action="reseat", severity="warning")
    views = views_of(compared, dict(zip(HOSTS, values, strict=False)))
    (*_, verdict) = [verdict for each in views for verdict in uniform(each, compared, ValueGroups(views))]
    assert {name: getattr(verdict, name) for name in expected} == expected
    assert (verdict.value, verdict.kind, verdict.criterion, verdict.source) == ("b", "peers", "c", compared.source)


def test_tie_of_four_values_lists_all_of_them() -> None:
    (reason, *_) = [
        reason for *_, reason in judged(rule(action="reseat"), *views_of(rule(), dict(zip(HOSTS, "abcd", strict=True))))
    ]
    assert reason == "found a, 1 of 4 hosts has a, 1 has b, 1 has c, 1 has d"


def test_tie_lists_at_most_four_values() -> None:
    plan = one_figure_plan(*(f"h{number}" for number in range(6)), rackproof_gang="all")
    values = {f"h{number}": text for number, text in enumerate("abcdef")}
    (reason, *_) = [reason for *_, reason in judged(rule(action="reseat"), *views_of(rule(), values, plan))]
    assert reason == "found a, 1 of 6 hosts has a, 1 has b, 1 has c, 1 has d, 2 more values"


def test_text_that_changed_during_the_run_fails_but_a_changed_number_passes() -> None:
    reasons = [
        "found 5, as on all 2 hosts",
        "found b, 2 of 2 hosts have a; the value changed during the run: measure again",
    ]
    for old, new, reason in ((6, 5, reasons[0]), ("b", "a", reasons[1])):
        views = [
            view("h1", rule(), {NAME: {"host": old}}, {NAME: {"host": new}}),
            view("h2", rule(), {NAME: {"host": new}}, {NAME: {"host": new}}),
        ]
        assert judged(rule(), *views)[0][3] == reason


def test_missing_part_fails_with_the_action_basis_severity_and_unit_of_the_criterion() -> None:
    compared = replace(COMPLETE, action="reseat", basis="policy", severity="warning", unit="B")
    views = [adapters("h1", "a", "b"), adapters("h2", "a", "b"), adapters("h3", "a"), adapters("h4")]
    groups = ValueGroups(views)
    verdicts = [item for each in views for item in uniform(each, compared, groups) if item.verdict != PASS]
    assert [(item.host, item.scope, item.verdict, item.reason) for item in verdicts] == [
        ("h3", "hca=b", FAIL, "not on this host; 2 other hosts have it"),
        ("h4", "host", INCONCLUSIVE, "not observed, but other hosts report it"),
    ]
    missing = verdicts[0]
    assert (missing.kind, missing.action, missing.basis, missing.severity, missing.unit) == (
        "peers", "reseat", "policy", "warning", "B"
    )  # fmt: skip
    assert judged(replace(compared, complete=False), *views[:3]) == [
        (host, "hca=a", PASS, "found x, as on all 3 hosts") if scope == "a" else
        (host, "hca=b", PASS, "found x, as on all 2 hosts")
        for host, scopes in (("h1", "ab"), ("h2", "ab"), ("h3", "a")) for scope in scopes
    ]  # fmt: skip


def test_missing_parts_are_in_the_order_of_their_scopes() -> None:
    verdicts = judged(COMPLETE, adapters("h1", "c", "b", "a"), adapters("h2", "c", "b", "a"), adapters("h3", "a"))
    assert [scope for _, scope, verdict, _ in verdicts if verdict == FAIL] == ["hca=b", "hca=c"]


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ("a", PASS),
        ("error: lost", INCONCLUSIVE),
        ("unsupported: gone", INCONCLUSIVE),
        ("skipped: busy", PASS),
    ],
)
def test_part_is_inconclusive_if_its_last_reading_failed_or_is_unsupported(last: str, verdict: str) -> None:
    first = view("h1", rule(), {NAME: {"host": "a"}}, {NAME: {"host": last}})
    assert judged(rule(), first, *views_of(rule(), {"h2": "a"}))[0][2] == verdict


# ---- parts of one host ----

PORT_RULE = rule("port.thing", scope="port", among="host", action="none")


def ports(values: str, criterion: Criterion = PORT_RULE, plan: Plan = PLAN, **more: Mapping[str, Value]) -> HostView:
    """Return a host with one port for each letter of `values`. The letter is the value of the reading of this port.

    `more`: other readings, with `__` instead of `.` in their names.
    """
    states = {f"hca={number},port=1": letter for number, letter in enumerate(values)}
    return view("h1", criterion, {criterion.name: states, **{key.replace("__", "."): of for key, of in more.items()}},
                plan=plan)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "failing"),
    [("aaa", None), ("aaaa", 0), ("aaab", 1), ("aabb", None), ("aab", None), ("aaaaaabb", 2), ("aaaaabbb", None)],
)
def test_ports_of_a_host_are_compared_if_at_least_four_exist_and_three_quarters_agree(
    values: str, failing: int | None
) -> None:
    verdicts = [verdict for _, _, verdict, _ in judged(PORT_RULE, ports(values))]
    assert (verdicts.count(FAIL), len(verdicts)) == ((failing, len(values)) if failing is not None else (0, 0))


def test_gpus_of_a_host_are_compared_if_there_are_at_least_two() -> None:
    compared = rule("gpu.thing", scope="gpu", among="host")
    reasons = [reason for *_, reason in judged(compared, view("h1", compared, {"gpu.thing": {"gpu=0": 1, "gpu=1": 2}}))]
    tie = "1 of 2 GPUs has 1, 1 has 2; set one value on all of them, and measure again"
    assert reasons == [f"found {value}, {tie}" for value in (1, 2)]
    assert judged(compared, view("h1", compared, {"gpu.thing": {"gpu=0": 1}})) == []


def test_links_of_one_gpu_are_compared_if_among_is_device() -> None:
    """If `among` is `host`, a link is compared with the same link of the other GPUs.

    At least four such links are needed. Two GPUs have only two.
    """
    states = {f"gpu={gpu},link={link}": "x" if gpu == 0 and link == 0 else "y" for gpu in range(2) for link in range(4)}
    for among, failing in (("device", 1), ("host", 0)):
        compared = rule("gpu.link.thing", scope="link", among=among)
        verdicts = judged(compared, view("h1", compared, {"gpu.link.thing": states}))
        assert [verdict for *_, verdict, _ in verdicts].count(FAIL) == failing
    device = judged(replace(compared, among="device"), view("h1", compared, {"gpu.link.thing": states}))
    assert device[0] == (
        "h1", "gpu=0,link=0", FAIL, "found x, 3 of 4 links have y; set the value of the majority, and measure again"
    )  # fmt: skip


GROUPED = replace(PORT_RULE, among="", group_by=("port.kind",))


@pytest.mark.parametrize(
    ("kinds", "count"),
    [("kkkkkkkk", 8), ("kkkkllll", 8), ("kkkkklll", 5), ("kkkk", 4), ("", 0)],
)
def test_ports_of_a_lone_host_are_compared_with_ports_of_the_same_kind(kinds: str, count: int) -> None:
    """A port is not compared if its kind is not known, or if the host has fewer than four ports of this kind."""
    of_port: dict[str, Value] = {f"hca={number},port=1": kind for number, kind in enumerate(kinds)}
    assert len(judged(GROUPED, ports("aaaaaaaa", GROUPED, port__kind=of_port))) == count


def test_port_without_a_kind_of_its_own_has_the_kind_of_its_adapter() -> None:
    of_adapter: dict[str, Value] = {f"hca={number}": "k" for number in range(4)}
    assert len(judged(GROUPED, ports("aaab", GROUPED, port__kind=of_adapter))) == 4


@pytest.mark.parametrize(
    ("fields", "stated", "count"),
    [({"prefer": "a"}, 0, 4), ({"prefer": "a"}, 3, 0), ({}, 3, 4), ({"prefer": "a", "group_by": ()}, 3, 4)],
)
def test_port_count_in_the_inventory_replaces_the_comparison_of_ports(
    fields: dict[str, Any], stated: int, count: int
) -> None:
    """This applies only to criteria with both `prefer` and `group_by`."""
    compared = replace(GROUPED, among="host", **fields)
    plan = replace(PLAN, hosts=tuple(replace(host, infiniband_ports=stated) for host in PLAN.hosts))
    kinds: dict[str, Value] = {f"hca={number},port=1": "k" for number in range(4)}
    assert len(judged(compared, ports("aaab", compared, plan, port__kind=kinds))) == count


def test_port_is_compared_with_the_same_port_of_other_hosts_rather_than_with_ports_of_its_kind() -> None:
    kinds: dict[str, Value] = {f"hca={number},port=1": "k" for number in range(4)}
    first = ports("aaab", GROUPED, port__kind=kinds)
    verdicts = judged(GROUPED, first, view("h2", GROUPED, {"port.thing": {"hca=3,port=1": "b"}}))
    assert ("h1", "hca=3,port=1", PASS, "found b, as on all 2 hosts") in verdicts
