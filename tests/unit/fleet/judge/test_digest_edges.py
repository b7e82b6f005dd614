"""Test boundary conditions of digest comparison: peer groups, majorities and verdict texts.

A digest is one number, computed from all bits of the result of a computation on a GPU. The tests call `judge_digests` directly.
`test_digests.py` tests the judge and the report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.digests import DigestCounts, gpu_digests, judge_digests, uncompared_digests
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.host_view import HostView
from schemas.records import ERROR, UNSUPPORTED, Metric, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack, reading

PLAN = one_figure_plan("h1", "h2", "h3", gpu_count=2)
PLANNED = Planned(PLAN)
GOOD, BAD = "00c0ffee", "00badbad"


def digest_of(value: Any = GOOD, scope: str = "gpu=0", stage: str = "benchmark", **params: Any) -> Observation:
    return builders.observation("digest.value", value, scope=scope, stage=stage, workload="gemm", **params)


def host_view(host: str, *figures: Observation, driver: Metric | None = None, **over: Any) -> HostView:
    evidence = host_evidence(PLAN, host, *([driver] if driver else []), observations=figures, **over)
    return HostView(PLAN, PLAN.host(host), evidence, [pack()])


def driver_reading(value: Any = "570", absent: str = "") -> Metric:
    return reading(value, name="driver.version", scope="host", absent=absent)


def judged(*views: HostView) -> list[Verdict]:
    return judge_digests(views, PLANNED, DigestCounts(PLANNED, views))


def digest_verdicts(*views: HostView) -> list[tuple[str, str, str]]:
    return [(item.host, item.scope, item.verdict) for item in judged(*views)]


def three_hosts(first: Any = GOOD, second: Any = GOOD, third: Any = GOOD) -> list[HostView]:
    return [host_view(host, digest_of(value)) for host, value in (("h1", first), ("h2", second), ("h3", third))]


@pytest.mark.parametrize(
    ("views", "verdicts"),
    [
        (three_hosts()[:1], []),
        (three_hosts()[:2], [PASS, PASS]),
        (three_hosts(BAD)[:2], [INCONCLUSIVE, INCONCLUSIVE]),
        (three_hosts(), [PASS, PASS, PASS]),
        (three_hosts(BAD), [FAIL, PASS, PASS]),
        (three_hosts(BAD, "x"), [INCONCLUSIVE] * 3),
        ([*three_hosts(BAD), host_view("h1", digest_of(BAD, "gpu=1"))], [INCONCLUSIVE] * 4),
    ],
)
def test_majority_needs_more_than_half(views: list[HostView], verdicts: list[str]) -> None:
    assert [item.verdict for item in judged(*views)] == verdicts


def test_digest_verdict_states_the_majority_and_the_deviating_gpu() -> None:
    bad, good, _ = judged(*three_hosts(BAD))
    majority = f"2 of 3 GPUs of its model and software agree on {GOOD}"
    assert (bad.scope, bad.serial, bad.name, bad.stage) == ("gpu=0", "h1-0", "digest.value", "benchmark")
    assert (bad.criterion, bad.value, bad.limit, bad.operator, bad.unit) == ("digest-majority", BAD, GOOD, "eq", "1")
    assert (bad.action, bad.basis, bad.params) == ("rma", "published", {"workload": "gemm"})
    assert bad.detail == f"{majority}, the GPU with serial h1-0 does not; its host has no other comparable GPU"
    assert bad.reason == f"found {BAD}: {bad.detail}"
    assert (good.action, good.limit, good.detail) == ("none", GOOD, majority)
    assert good.reason == f"found {GOOD}; {majority}"
    alike = judged(*three_hosts())[0]
    assert (alike.reason, alike.limit, alike.detail) == (f"found {GOOD}, as on all 3 comparable GPUs", GOOD, "")
    undecided = judged(*three_hosts(BAD)[:2])[0]
    assert (undecided.limit, undecided.operator, undecided.action) == (None, "", "none")
    assert undecided.reason.endswith(f"2 digests on 2 GPUs, {BAD} on this GPU")
    without_serial = host_view("h1", digest_of(BAD), gpus=(replace(builders.gpu("h1", 0), serial=""),))
    assert "the GPU with serial unknown does not" in judged(without_serial, *three_hosts()[1:])[0].reason


@pytest.mark.parametrize(
    ("other", "expected_text"),
    [
        (GOOD, "the only other comparable GPU of its host agrees with the majority"),
        (BAD, "the only other comparable GPU of its host differs from the majority too: suspect the host"),
    ],
)
def test_host_is_suspected_if_its_other_gpus_differ_too(other: str, expected_text: str) -> None:
    both = host_view("h1", digest_of(BAD), digest_of(other, "gpu=1"))
    others = [host_view(host, digest_of(), digest_of(scope="gpu=1")) for host in ("h2", "h3")]
    assert judged(both, *others)[0].reason.endswith(expected_text)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ((GOOD, GOOD), "the 2 other comparable GPUs of its host agree with the majority"),
        ((GOOD, BAD), "1 of the 2 other comparable GPUs of its host differs from the majority too: suspect the host"),
        ((BAD, "x"), "2 of the 2 other comparable GPUs of its host differ from the majority too: suspect the host"),
    ],
)
def test_number_of_other_gpus_that_differ_is_stated(others: tuple[str, str], text: str) -> None:
    gpus = tuple(builders.gpu("h1", index) for index in range(3))

    def of_host(host: str, *digests: str) -> HostView:
        return host_view(host, *(digest_of(value, f"gpu={at}") for at, value in enumerate(digests)), gpus=gpus)

    views = [of_host("h1", BAD, *others), of_host("h2", GOOD, GOOD, GOOD), of_host("h3", GOOD, GOOD, GOOD)]
    assert judged(*views)[0].reason.endswith(f"; {text}")


def test_action_for_a_wrong_copy_is_not_rma_because_the_host_may_be_at_fault() -> None:
    views = [
        host_view(host, replace(digest_of(value), params={"workload": "copy"}))
        for host, value in (("h1", BAD), ("h2", GOOD), ("h3", GOOD))
    ]
    assert [(item.verdict, item.action) for item in judged(*views)] == [
        (FAIL, "inspect_hardware"), (PASS, "none"), (PASS, "none"),
    ]  # fmt: skip


OTHER_MODEL = replace(builders.gpu("h1", 0), name="NVIDIA X")


@pytest.mark.parametrize(
    ("odd", "compared"),
    [
        (host_view("h1", digest_of(BAD)), True),
        (host_view("h1", digest_of(BAD), gpus=(OTHER_MODEL,)), False),
        (host_view("h1", digest_of(BAD), gpus=()), False),
        (host_view("h1", digest_of(BAD, stage="gang")), False),
        (host_view("h1", digest_of(BAD, size=1)), False),
        (host_view("h1", digest_of(BAD, world_size=8)), True),
        (host_view("h1", digest_of(BAD), driver=driver_reading()), False),
        (host_view("h1", digest_of(BAD), driver=driver_reading(absent="error: x")), True),
        *(
            (host_view("h1", digest_of(BAD), software={name: "1"}), False)
            for name in ("torch", "cuda", "cublas", "cudnn", "nccl")
        ),
        (host_view("h1", digest_of(BAD), rackproof="0.9"), False),
        (host_view("h1", digest_of(BAD), software={**builders.SOFTWARE, "python": "1"}), True),
        (host_view("h1", digest_of(BAD, "host")), False),
    ],
)
def test_only_digests_of_equal_gpu_model_software_stage_and_settings_are_compared(
    odd: HostView, compared: bool
) -> None:
    """`odd`: h1, whose GPU has another digest than those of h2 and h3. It fails if the three digests are compared.

    The number of ranks and the version of Python may differ.
    """
    verdicts = digest_verdicts(odd, *three_hosts()[1:])
    assert verdicts == ([("h1", "gpu=0", FAIL)] if compared else []) + [("h2", "gpu=0", PASS), ("h3", "gpu=0", PASS)]


def records_of(host: str, *figures: tuple[str, Observation]) -> HostView:
    """Return a host with a record for each (version of Rackproof, figure). All records but the first are of a gang."""
    records = tuple(
        replace(host_evidence(PLAN, host, observations=(item,)).records[0], gang="g" if at else "", rackproof=version)
        for at, (version, item) in enumerate(figures)
    )
    return HostView(PLAN, PLAN.host(host), Evidence(records=records), [pack()])


OTHER_FIGURE = builders.observation("memory.bandwidth", 1.0, scope="gpu=0")


@pytest.mark.parametrize(
    ("figures", "compared"),
    [
        ([("0", digest_of(BAD)), ("0", OTHER_FIGURE)], True),
        ([("0", digest_of(BAD)), ("0", digest_of(BAD))], True),
        ([("0", digest_of(BAD)), ("0.9", OTHER_FIGURE)], True),
        ([("0.9", OTHER_FIGURE), ("0", digest_of(BAD))], True),
        ([("0.9", digest_of(BAD)), ("0", OTHER_FIGURE)], False),
        ([("0.9", OTHER_FIGURE), ("0.8", OTHER_FIGURE), ("0", digest_of(BAD))], True),
        ([("0.9", digest_of(BAD)), ("0", digest_of(BAD))], True),
    ],
)
def test_digests_are_compared_if_the_last_record_that_has_digests_is_of_the_same_version(
    figures: list[tuple[str, Observation]], compared: bool
) -> None:
    """The records of h2 and h3 are of version 0 of Rackproof."""
    verdicts = digest_verdicts(records_of("h1", *figures), *three_hosts()[1:])
    assert (("h1", "gpu=0", FAIL) in verdicts) is compared


def test_record_with_a_digest_and_other_figures_counts_as_a_record_with_digests() -> None:
    first = host_evidence(PLAN, "h1", observations=(OTHER_FIGURE, digest_of(BAD))).records[0]
    second = replace(first, gang="g", observations=(), rackproof="0.9")
    view = HostView(PLAN, PLAN.host("h1"), Evidence(records=(first, second)), [pack()])
    assert digest_verdicts(view, *three_hosts()[1:])[0] == ("h1", "gpu=0", FAIL)


def test_digests_in_snapshots_are_compared_although_the_versions_of_rackproof_differ() -> None:
    in_snapshot = reading(BAD, name="digest.value")
    views = [
        HostView(
            PLAN, PLAN.host("h1"), host_evidence(PLAN, "h1", in_snapshot, observations=(), rackproof=version), [pack()]
        )
        for version in ("0", "0.9")
    ]
    first, second = (gpu_digests(view, PLANNED) for view in views)
    assert first
    assert [key for key, _ in first] == [key for key, _ in second]


def test_last_driver_and_last_digest_are_used() -> None:
    measured_twice = [host_view(host, digest_of(BAD), digest_of()) for host in ("h1", "h2", "h3")]
    assert [item.value for item in judged(*measured_twice)] == [GOOD] * 3
    taken = host_evidence(PLAN, "h1", driver_reading("550"), observations=(digest_of(BAD),))
    record = taken.records[0]
    newer = replace(record.snapshots[-1], metrics=(driver_reading("570"),))
    updated = HostView(
        PLAN, PLAN.hosts[0], Evidence(records=(replace(record, snapshots=(*record.snapshots[:-1], newer)),)), [pack()]
    )
    others = [host_view(host, digest_of(), driver=driver_reading("570")) for host in ("h2", "h3")]
    assert digest_verdicts(updated, *others)[0] == ("h1", "gpu=0", FAIL)


@pytest.mark.parametrize("status", [ERROR, UNSUPPORTED])
def test_unmeasured_digest_is_not_compared(status: str) -> None:
    lost = replace(digest_of(), value=None, status=status, reason="lost")
    assert digest_verdicts(host_view("h1", lost), *three_hosts()[1:]) == [("h2", "gpu=0", PASS), ("h3", "gpu=0", PASS)]
    assert digest_verdicts(host_view("h1", digest_of(), lost), *three_hosts()[1:])[0][0] == "h2"
    assert gpu_digests(host_view("h1"), PLANNED) == []


def test_digest_counts_of_groups_of_hosts_are_merged() -> None:
    views = three_hosts(BAD)
    parts = [DigestCounts(PLANNED, [one]) for one in views]
    parts[0].update(parts[1])
    parts[0].update(parts[2])
    whole = DigestCounts(PLANNED, views)
    ((key, _),) = gpu_digests(views[0], PLANNED)
    assert parts[0].counts(key) == whole.counts(key) == {GOOD: 2, BAD: 1}
    assert whole.counts(("nothing",)) == {}


def test_uncompared_digests_are_listed() -> None:
    odd = host_view("h1", digest_of(), digest_of(scope="gpu=1", size=1))
    counts = DigestCounts(PLANNED, [odd, *three_hosts()[1:]])
    assert uncompared_digests(odd, PLANNED, counts) == [("benchmark", "gpu=1")]
    assert uncompared_digests(host_view("h1", digest_of(), gpus=()), PLANNED, counts) == [("benchmark", "gpu=0")]
    two = three_hosts()[:2]
    assert uncompared_digests(two[0], PLANNED, DigestCounts(PLANNED, two)) == []
    lost = replace(digest_of(scope="gpu=1"), value=None, status=ERROR, reason="lost")
    assert uncompared_digests(host_view("h1", digest_of(), lost), PLANNED, counts) == []
