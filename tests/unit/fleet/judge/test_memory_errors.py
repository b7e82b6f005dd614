"""If the memory test (`integrity`) finds wrong words, only the GPU that has them fails.

This is tested with records of this version and with records of older versions, which lack `integrity.error`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from schemas.records import Observation
from schemas.reports import PASS
from tests import builders

WORDS = "integrity.wrong_words"
NO_ERROR: dict[str, Any] = {"passes": 1, "elapsed_s": 0.2, "bytes": 1 << 30, "wrong_addresses": 0, "wrong_bits": ""}


def reported_by_this_version(item: Observation, faulty: bool) -> list[Observation]:
    """Return what this version reports for one pattern of the test. A faulty GPU returned 20 wrong words, at 2 addresses."""
    healthy = replace(item, params={**item.params, **NO_ERROR})
    if not faulty:
        return [healthy]
    summary = replace(healthy, value=20, params={**healthy.params, "wrong_addresses": 2, "wrong_bits": "3, 17"})
    common: dict[str, Any] = {"pattern": item.params["pattern"], "expected": "0x0000000000000000"}
    errors = (
        replace(
            item,
            name="integrity.error",
            value=f"{1 << bit:#018x}",
            params={**common, "number": number, "address": hex(number << 12), "bits": str(bit)},
        )
        for number, bit in ((1, 3), (2, 17))
    )
    return [summary, *errors]


def reported_by_older_versions(item: Observation, faulty: bool) -> list[Observation]:
    """Return what versions without `integrity.error` report for one pattern of the test."""
    if not faulty:
        return [item]
    sentence = "address 0x1000: expected 0x0000000000000000, read 0x0000000000000008"
    return [replace(item, value=20), replace(item, name="integrity.first_error", value=sentence)]


@pytest.mark.parametrize(
    ("version", "details"),
    [(reported_by_this_version, " at 2 addresses, bits 3, 17"), (reported_by_older_versions, "")],
    ids=["this version", "older versions"],
)
def test_wrong_words_fail_only_the_gpu_with_them(
    version: Callable[[Observation, bool], list[Observation]], details: str
) -> None:
    plan = builders.plan("h1", "h2", profile="standard")
    evidence = builders.evidence(plan)
    for host, of_host in evidence.items():

        def changed(items: list[Observation], host: str = host) -> list[Observation]:
            return [
                result
                for item in items
                for result in (version(item, (host, item.scope) == ("h2", "gpu=1")) if item.name == WORDS else [item])
            ]

        records = tuple(
            replace(record, observations=tuple(changed([*record.observations]))) for record in of_host.records
        )
        evidence[host] = replace(of_host, records=records)
    # Verdicts that do not pass even if no word is wrong:
    unrelated = [item for item in judge(plan, builders.evidence(plan), read_packs([])) if item.verdict != PASS]
    verdicts = judge(plan, evidence, read_packs([]))
    not_passing = [item for item in verdicts if item.verdict != PASS]
    assert {(item.criterion, item.host, item.scope, item.action) for item in not_passing} - {
        (item.criterion, item.host, item.scope, item.action) for item in unrelated
    } == {("integrity-wrong-words", "h2", "gpu=1", "rma")}
    assert len(not_passing) == len(unrelated) + 10, "each of the ten patterns of the test must give one failure"
    titles = [cause.title for cause in diagnose(verdicts, {})]
    # Each pattern found 20 wrong words. The title does not add them up.
    assert f"GPU 1 of h2 has memory that returns wrong data: 20 wrong words{details}" in titles
