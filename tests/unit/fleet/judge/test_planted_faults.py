"""Test `rackproof power --planted-faults`: how likely the benchmarks of a profile find a GPU that returns wrong bits.

How often `digest` repeats a computation is taken from earlier runs, and scaled to the time that the profile gives `digest`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.planted_faults import COLLISION, Comparison, comparisons
from fleet.planning.plan import read_profile
from fleet.report.planted_faults import render_planted_faults
from rackproof.main import main
from schemas.records import Observation
from tests import ROOT, builders

RUN = ROOT / "docs/measurements/h200x2"


def measured(profile: str, planned: str = "standard", **repetitions: int) -> dict[str, Comparison]:
    """Return test (benchmark and case, such as `digest gemm`) -> its comparison in a profile, computed from one run.

    The run has two GPUs. GPU 1 makes half as many repetitions as GPU 0.

    Args:
        profile: profile whose comparisons are returned.
        planned: profile of the run.
        repetitions: workload -> number of its repetitions on GPU 0.
    """
    plan = builders.plan("h1", gpu_count=2, profile=planned, rackproof_gang="none")

    def change(observation: Observation) -> Observation:
        count = repetitions.get(str(observation.params.get("workload")))
        if observation.name == "digest.mismatches" and count:
            count //= 1 + (observation.scope == "gpu=1")
            return replace(observation, params={**observation.params, "repetitions": count})
        if observation.name == "integrity.tested_share":
            return replace(observation, value=0.9, params={"bytes": 8000, "free_bytes": 9000})
        return observation

    evidence = {"h1": builders.with_observations(builders.evidence(plan)["h1"], change)}
    result = comparisons([(plan, evidence)], [read_profile(profile)])
    return {f"{item.benchmark} {item.case}": item for item in result}


def test_repetitions_are_those_of_the_slowest_gpu_in_proportion_to_the_time_budget() -> None:
    standard = measured("standard", gemm=1000)  # 500 on GPU 1 in 2/3 s (2 s for 3 workloads), plus the first result
    assert standard["digest gemm"].repetitions == pytest.approx(501)
    smoke = measured("smoke", gemm=1000)  # 250 in 1/3 s (1 s for 3 workloads), plus the first result
    assert smoke["digest gemm"].repetitions == pytest.approx(251)
    extended = measured("extended", gemm=1000)  # 120 s for 16 workloads and the copies between GPUs
    assert extended["digest gemm"].repetitions == pytest.approx(500 / (2 / 3) * 120 / 17 + 1)
    both = measured("extended", "extended", gemm=1000, copy=1000)
    # The right result of `copy` is known, so its recorded repetitions include the first result. Those of `gemm` do not.
    difference = (both["digest gemm"].repetitions or 0.0) - (both["digest copy"].repetitions or 0.0)
    assert difference == pytest.approx(1)
    assert extended["digest sort"].repetitions is None
    assert extended["digest round_trip to each of the other GPUs"].repetitions is None


def test_fault_in_every_repetition_is_found_only_by_comparison_with_other_gpus_or_with_a_known_result() -> None:
    extended = measured("extended", gemm=1000)
    for name, alone, compared in (
        ("digest gemm", 0.0, 1 - COLLISION),
        ("digest copy", 1.0, 1.0),
        ("digest round_trip to each of the other GPUs", 1.0, 1.0),
        ("stress bf16", 0.0, 0.0),
        ("integrity 15 patterns", 0.9, 0.9),
    ):
        assert (extended[name].always_alone, extended[name].always_compared) == (alone, compared), name
    assert extended["integrity 15 patterns"].elements == 1000
    assert extended["stress bf16"].repetitions == 660 / 0.5  # a product every 0.5 s, in 600 s and 60 s to settle


def test_unmeasured_workloads_are_listed_separately() -> None:
    lines = list(render_planted_faults([*measured("extended", gemm=1000).values()]))
    (line,) = (line for line in lines if line.startswith("- "))
    assert "extended: not in the table, because no run shows how often these tests repeat their computation" in line
    assert "digest sort" in line
    assert "digest gemm," not in line
    rows = [line for line in lines if "| digest gemm |" in line]
    # The columns `always, GPU alone` and `always, three equal GPUs`.
    assert [row.split(" | ")[5:7] for row in rows] == [["not found", "> 99.9999 %"]]


def test_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--planted-faults", "--profile", "smoke", str(RUN)]) == 0
    text = capsys.readouterr().out
    assert "| NVIDIA H200 | smoke | digest gemm |" in text
    assert main(["power", "--planted-faults", "--json", str(RUN)]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {item["profile"] for item in document["comparisons"]} == {"standard", "extended"}
    assert document["patterns"]["one bit of one element"] == 0.0


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["power", "--pool", "--profile", "smoke", str(RUN)]) == 64
    assert "--planted-faults" in capsys.readouterr().err
    assert main(["power", "--planted-faults", str(RUN), str(RUN)]) == 64
