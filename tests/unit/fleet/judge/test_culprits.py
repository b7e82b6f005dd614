"""A failed pair of GPUs or a new XID is attributed to one GPU if the evidence is clear."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_packs
from fleet.judge.culprits import with_culprits
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.waivers import WaiverMatcher
from fleet.rma.parts import failed_parts
from rackproof.main import main
from schemas.records import Metric, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.waivers import Waiver
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

Pairs = set[tuple[int, int]]


def host_view(gpus: int, *logs: Mapping[str, Value]) -> HostView:
    """Return the view of a host with this many GPUs; each of `logs` has the XID counts of one snapshot: scope -> count."""
    plan = one_figure_plan("h1", gpu_count=gpus)
    evidence = host_evidence(plan, observations=())
    first = evidence.records[0].snapshots[0]
    taken = []
    for number, log in enumerate(logs):
        of_kind = [
            (kind, {scope: count for scope, count in log.items() if f",{kind}=" in scope}) for kind in ("xid", "sxid")
        ]
        metrics = tuple(Metric(name=f"{kind}.count", unit="1", values=counts) for kind, counts in of_kind)
        taken.append(replace(first, stage=f"stage{number}", metrics=metrics))
    evidence = replace(evidence, records=(replace(evidence.records[0], snapshots=tuple(taken)),)) if taken else evidence
    return HostView(plan, plan.hosts[0], evidence, ())


def pair_verdicts(
    gpus: int, failing: Pairs, *, unknown: Pairs | None = None, criterion: str = "peers"
) -> list[Verdict]:
    """Return a verdict on every ordered pair of GPUs: failed in `failing`, inconclusive in `unknown`, otherwise passed."""
    return [
        Verdict(
            host="h1",
            scope=f"gpu={a},peer={b}",
            serial=f"s{a}",
            name="peer_copy.bandwidth",
            verdict=INCONCLUSIVE if (a, b) in (unknown or ()) else FAIL if (a, b) in failing else PASS,
            criterion=criterion,
            reason=f"found {a}.{b}",
            action="inspect_hardware",
        )
        for a, b in permutations(range(gpus), 2)
    ]


def pairs_of(*bad: int, gpus: int = 8) -> Pairs:
    """Return every pair with one of these GPUs as an end."""
    return {(a, b) for a, b in permutations(range(gpus), 2) if a in bad or b in bad}


def attributed_parts(gpus: int, verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Return scope of a failed pair -> its second GPU, for each pair whose failure is attributed to the second GPU.

    A pair whose first GPU is the cause keeps its verdict, because its scope begins with this GPU.
    """
    return {verdict.scope: verdict.part for verdict in with_culprits(host_view(gpus), verdicts) if verdict.part}


@pytest.mark.parametrize(
    ("gpus", "failing", "bad"),
    [
        (8, pairs_of(6), {6}),
        (8, pairs_of(2, 5), {2, 5}),
        (8, pairs_of(1, 2, 3), {1, 2, 3}),
        (4, pairs_of(0, gpus=4), {0}),
        (8, {(0, 6), (1, 6), (2, 6), (3, 6)}, {6}),  # GPU 6 fails with four of seven others, each in one direction
    ],
)
def test_failed_pairs_are_attributed_to_gpus_that_fail_with_most_of_the_others(
    gpus: int, failing: Pairs, bad: set[int]
) -> None:
    expected = {f"gpu={a},peer={b}": f"gpu={b}" for a, b in failing if b in bad and a not in bad}
    assert expected
    assert attributed_parts(gpus, pair_verdicts(gpus, failing)) == expected


@pytest.mark.parametrize(
    ("gpus", "failing"),
    [
        (2, {(0, 1), (1, 0)}),  # the host has two GPUs, and either may be the cause
        (4, pairs_of(0, 1, gpus=4)),  # half of the GPUs fail with all others
        # The cause may be the link between two sockets: GPU 1 may be alone on its socket.
        (3, pairs_of(1, gpus=3)),
        (3, pairs_of(0, 1, 2, gpus=3)),  # all GPUs fail with all others
        # Every pair between three GPUs and the other five fails.
        (8, {(a, b) for a, b in permutations(range(8), 2) if (a < 3) != (b < 3)}),
        # All eight GPUs fail with more than half of the others.
        (8, {(a, b) for a, b in pairs_of(0) | {(a, b) for a in (1, 2, 3) for b in (4, 5, 6, 7)}}),
        (8, {(0, 6), (6, 0)}),  # one pair, in both directions
        (8, {(0, 6), (1, 6), (2, 6)}),  # GPU 6 fails with three of seven others
        (8, {(0, 1), (2, 3), (4, 5), (6, 7)}),  # each GPU fails with one other
    ],
)
def test_pairs_are_not_attributed_without_a_clear_culprit(gpus: int, failing: Pairs) -> None:
    assert attributed_parts(gpus, pair_verdicts(gpus, failing)) == {}


def test_unknown_pairs_count_neither_for_nor_against_a_gpu() -> None:
    """GPU 6 fails with three others. That is more than half if it was measured with five others, but not with six."""
    for lost, attributed in (({3, 4}, {"gpu=6"}), ({3}, set())):
        unmeasured = {(a, b) for a, b in pairs_of(6) if {a, b} & lost}
        verdicts = pair_verdicts(8, {(0, 6), (1, 6), (2, 6)}, unknown=unmeasured)
        assert set(attributed_parts(8, verdicts).values()) == attributed


def test_pairs_with_an_invalid_scope_are_ignored() -> None:
    """GPU 6 fails with three of seven others. If it failed with a fourth, it would be the cause."""
    strange = [
        replace(item, scope=scope)
        for scope in ("gpu=88,peer=6", "gpu=06,peer=6", "gpu=6,peer=6")
        for item in pair_verdicts(2, {(0, 1), (1, 0)})
    ]
    assert attributed_parts(8, [*pair_verdicts(8, {(0, 6), (1, 6), (2, 6)}), *strange]) == {}


def test_failures_of_two_criteria_are_not_added_up() -> None:
    one = pair_verdicts(8, {(0, 6), (1, 6)}, criterion="one")
    other = pair_verdicts(8, {(2, 6), (3, 6)}, criterion="other")
    assert attributed_parts(8, [*one, *other]) == {}


def test_attributed_verdict_names_the_part_and_its_serial() -> None:
    verdicts = {item.scope: item for item in with_culprits(host_view(8), pair_verdicts(8, pairs_of(6)))}
    verdict = verdicts["gpu=0,peer=6"]
    assert (verdict.verdict, verdict.action, verdict.serial) == (
        FAIL,
        "inspect_hardware",
        host_view(8).serial("gpu=6"),
    )
    assert verdict.serial
    assert verdict.reason == "found 0.6; attributed to gpu=6, which fails this check with 7 of 7 other GPUs"
    assert verdict.detail == "attributed to gpu=6, which fails this check with 7 of 7 other GPUs"
    assert verdicts["gpu=6,peer=0"] == next(
        item for item in pair_verdicts(8, pairs_of(6)) if item.scope == "gpu=6,peer=0"
    )


def test_attributed_pairs_give_one_cause_and_one_returned_part() -> None:
    verdicts = with_culprits(host_view(8), pair_verdicts(8, pairs_of(6)))
    (cause,) = diagnose(verdicts, {})
    assert (cause.host, cause.part, cause.serial, len(cause.verdicts)) == ("h1", "gpu=6", "s6", 14)
    (part,) = failed_parts([cause], verdicts)
    assert (part.scope, len(part.findings), part.needs_part_work) == ("gpu=6", 14, True)


def xid_verdict() -> Verdict:
    return Verdict(
        host="h1", scope="host", name="xid.last_seen", verdict=FAIL, criterion="xid-during-run", reason="changed by 9 s",
        action="inspect_hardware",
    )  # fmt: skip


def xid_count_verdict(scope: str) -> Verdict:
    return replace(xid_verdict(), name="xid.count", scope=scope, criterion="xid-79", reason="found 1, wanted = 0")


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        ({}, {"gpu=3,xid=79": 1}, "gpu=3"),
        ({}, {"gpu=3,xid=79": 1, "gpu=3,xid=31": 2}, "gpu=3"),
        ({"gpu=3,xid=79": 1}, {"gpu=3,xid=79": 2}, "gpu=3"),
        (
            {},
            {"gpu=3,xid=79": 1, **{f"gpu={gpu},xid=45": 8 for gpu in range(8)}},
            "gpu=3",
        ),  # XID 45 on all GPUs only shows that the ranks were terminated
        ({"gpu=1,xid=31": 4}, {"gpu=1,xid=31": 4, "gpu=3,xid=79": 1}, "gpu=3"),  # XID 31 was logged before the run
        ({"gpu=3,xid=79": 1}, {"gpu=3,xid=79": 1}, ""),  # no XID is new
        ({}, {"gpu=3,xid=79": 1, "gpu=1,xid=31": 1}, ""),  # either GPU may be the cause
        ({}, {"gpu=7,xid=79": 1, "gpu=3,xid=79": 1}, "gpu=3"),  # both GPUs fail: the host is not the cause
        ({}, {"gpu=3,xid=79": 1, "gpu=1,xid=31": "x"}, "gpu=3"),  # a count that is not a number is ignored
        ({}, {"gpu=1,xid=31": 1}, ""),  # no GPU has a failed XID criterion
        ({}, {"gpu=9,xid=79": 1}, ""),  # the host has no such GPU
        ({}, {"gpu=3,xid=79": 1, "pci=0000:05:00.0,sxid=20034": 1}, ""),  # the NVSwitch may be the cause
    ],
)
def test_new_xid_is_attributed_only_to_a_clear_culprit(
    before: Mapping[str, Value], after: Mapping[str, Value], part: str
) -> None:
    host = host_view(8, before, after)
    failing = [xid_count_verdict(scope) for scope in after if scope.endswith("xid=79")]
    verdict = with_culprits(host, [*failing, xid_verdict()])[-1]
    assert (verdict.part, verdict.serial, verdict.part_scope) == (
        part,
        host.serial(part) if part else "",
        part or "host",
    )


@pytest.mark.parametrize("code", [str(code) for code in range(144, 151)])
def test_new_xid_is_attributed_to_the_gpu_that_fails_for_a_fatal_nvlink_xid(code: str) -> None:
    fatal = replace(xid_count_verdict(f"gpu=3,xid={code}"), name="xid.fatal")
    assert with_culprits(host_view(8, {}, {fatal.scope: 1}), [fatal, xid_verdict()])[-1].part == "gpu=3"


@pytest.mark.parametrize(
    ("codes", "part"),
    [
        ({0: ["145"], 3: ["149"]}, "gpu=3"),
        ({0: ["145"], 3: ["149", "79"]}, "gpu=3"),
        ({0: ["145"], 1: ["145", "94"], 3: ["149"]}, "gpu=1"),
        ({1: ["145"], 2: ["145"]}, "gpu=1"),
    ],
)
def test_new_xid_is_attributed_to_a_gpu_with_another_xid_than_145_if_there_is_one(
    codes: Mapping[int, Sequence[str]], part: str
) -> None:
    """XID 145 follows from the dead NVLink of another GPU. Each GPU fails for the first of its XIDs."""
    log = {f"gpu={gpu},xid={code}": 1 for gpu, of_gpu in codes.items() for code in of_gpu}
    failing = [
        replace(xid_count_verdict(f"gpu={gpu},xid={of_gpu[0]}"), name="xid.fatal") for gpu, of_gpu in codes.items()
    ]
    assert with_culprits(host_view(8, {}, log), [*failing, xid_verdict()])[-1].part == part


@pytest.mark.parametrize("verdict", [PASS, INCONCLUSIVE])
def test_new_xid_is_the_cause_only_of_failed_xid_verdicts(verdict: str) -> None:
    host = host_view(8, {}, {"gpu=3,xid=79": 1})
    others = [replace(xid_verdict(), verdict=verdict), replace(xid_verdict(), name="host.load")]
    assert with_culprits(host, [xid_count_verdict("gpu=3,xid=79"), *others])[1:] == others


def test_judge_attributes_slow_pairs() -> None:
    plan = builders.plan("h1", gpu_count=8, rackproof_gang="none")

    def slow_down(observed: Observation) -> Observation:
        pair = observed.name == "peer_copy.bandwidth" and "=6" in observed.scope
        return replace(observed, value=observed.value * 0.5) if pair else observed  # type: ignore[operator]

    evidence = {"h1": builders.with_observations(builders.evidence(plan)["h1"], slow_down)}
    failed = [item for item in judge(plan, evidence, read_packs(())) if item.verdict == FAIL]
    assert failed
    assert {item.part_scope for item in failed} == {"gpu=6"}


@pytest.mark.parametrize(("scope", "serial", "covered"), [("gpu=6", "", 14), ("gpu=0", "", 1), ("", "h1-6", 7)])
def test_waiver_for_a_part_covers_attributed_verdicts(scope: str, serial: str, covered: int) -> None:
    """GPU 6 has 14 failed pairs. In seven, such as `gpu=0,peer=6`, it is the second GPU: they are attributed to it.

    Only the attributed verdicts have its serial h1-6. The others keep the serial s6, which `pair_verdicts` made up.
    """
    waiver = Waiver(criterion="peers", who="me", why="known", until="2026-12-31", host="h1", scope=scope, serial=serial)
    failed = [item for item in pair_verdicts(8, pairs_of(6)) if item.verdict == FAIL]
    verdicts = [
        WaiverMatcher([waiver], "2026-11-21", {}).apply(item) for item in with_culprits(host_view(8), [*failed])
    ]
    assert sum(item.waiver is not None for item in verdicts) == covered


def test_rma_document_lists_attributed_pairs(tmp_path: Path) -> None:
    """`siblings_summary` of each finding covers the 42 ordered pairs of the other seven GPUs. All of them are above the limit."""
    assert (
        main(
            ["simulate", str(tmp_path / "r1"), "--hosts", "2", "--profile", "smoke", "--fault", "nvlink_down:r01-h01:6"]
        )
        == 0
    )
    main(["report", str(tmp_path / "r1")])
    assert main(["rma", str(tmp_path / "r1")]) == 0
    (package,) = (tmp_path / "r1" / "rma").iterdir()
    document = json.loads((package / "part.json").read_text())
    assert document["slot"]["place"] == "gpu=6"
    copies = [item for item in document["findings"] if item["name"] == "peer_copy.bandwidth"]
    assert len(copies) == 14
    for item in copies:
        assert item["siblings_summary"]["n"] == 42
        assert item["siblings_summary"]["min"] > item["limit"]
    rows = (package / "observations.csv").read_text()
    assert all(f'"{item["scope"]}"' in rows for item in copies)
