"""Test the benchmark `mnnvl`: collectives with and without NVLink between hosts.

For each of the two measurements, each rank starts a process and reports the results or the error of this process. Here the
process runs a fake program with the protocol of `mnnvl_rank`, because the real program needs two GPUs.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from agent.benchmarks.collectives import mnnvl
from agent.benchmarks.runtime.context import Context

SETTINGS = {"ops": ["all_reduce"], "sizes_bytes": [1000]}
RANK = """
import json, os, sys
request = json.loads(sys.stdin.readline())
if request["rank"] == 0:
    print(json.dumps({"id": "ab" * 4}), flush=True)
else:
    assert json.loads(sys.stdin.readline())["id"] == "ab" * 4
off = os.environ.get("NCCL_MNNVL_ENABLE") == "0"
with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
    log.write("Channel 00/0 : 0[0] -> 1[0] via " + ("NET/IB/0" if off else "P2P/MNNVL") + chr(10))
result = {"op": "all_reduce", "size_bytes": 1000, "moved": 1000, "seconds": 4.0 if off else 1.0, "wrong": 0}
print("NCCL WARN not a line of the protocol")
print(json.dumps({"results": [result]}))
"""
"""The fake program. It reports that its collective took 1 s, or 4 s with NCCL_MNNVL_ENABLE=0 (no NVLink between hosts)."""


class Ranks:
    """Two ranks, one on each of two hosts. Both run as threads of this process.

    Args:
        work: work directory of both hosts.
        domain: name of the NVLink domain of both hosts; empty if the inventory puts them into none.
    """

    def __init__(self, work: Path, domain: str) -> None:
        self.reported: list[tuple[int, str, float, dict[str, Any]]] = []
        self.absent: list[tuple[int, str]] = []
        self._store, self._work = HashStore(), work
        (work / "request.json").write_text(json.dumps({"nvlink_domain": domain} if domain else {}))
        self._codes: list[int] = []
        self._values: list[float] = []
        self._agree, self._left = threading.Barrier(2), threading.Barrier(2)

    def run(self) -> None:
        """Run the benchmark on both ranks."""
        threads = [threading.Thread(target=mnnvl.run, args=(self._context(rank), SETTINGS)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def _context(self, rank: int) -> Context:
        def agree(code: int) -> tuple[int, int]:
            self._codes.append(code)
            self._agree.wait(60)
            ends = min(self._codes), max(self._codes)
            self._left.wait(60)
            self._codes.clear()
            return ends

        def add(value: float) -> float:
            self._values.append(value)
            self._agree.wait(60)
            total = sum(self._values)
            self._left.wait(60)
            self._values.clear()
            return total

        def report_wrong_data(name: str, count: int, **params: Any) -> None:
            self.reported.append((rank, name, count, params))

        def report(figures: Any, **params: Any) -> None:
            self.reported += [(rank, name, value, params) for name, (value, _) in figures.items()]

        return cast(
            Context,
            SimpleNamespace(
                kind="gpu", rank=rank, local_rank=0, world_size=2, is_reporting_rank=True, world_scope="gang=all",
                work=self._work, store=self._store,
                heartbeat=SimpleNamespace(record_progress=lambda: None), set_phase=lambda phase: None,
                min_max_over_ranks=agree, report_world=report,
                sum_over_ranks=add, report_wrong_data=report_wrong_data,
                report_absent=lambda name, **over: self.absent.append((rank, over["reason"])),
            ),
        )  # fmt: skip


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, *, domain: str = "nvl1", limit_s: float = 30.0
) -> Ranks:
    monkeypatch.setattr(mnnvl, "COMMAND", (sys.executable, "-S", "-c", program))
    monkeypatch.setattr(mnnvl, "LIMIT_S", limit_s)
    ranks = Ranks(tmp_path, domain)
    ranks.run()
    return ranks


def test_both_rates_and_their_ratio_are_reported_by_every_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = run_ranks(monkeypatch, tmp_path, RANK)
    assert ranks.absent == []
    for rank in range(2):
        own = [(name, value, params) for number, name, value, params in ranks.reported if number == rank]
        assert [(name, value) for name, value, _ in own] == [
            ("mnnvl.busbw", 1000.0), ("mnnvl.busbw", 250.0), ("mnnvl.speedup", 4.0),
        ]  # fmt: skip
        assert [(params.get("mnnvl"), params.get("transport")) for _, _, params in own] == [
            (True, "P2P/MNNVL"), (False, "NET/IB"), (None, None),
        ]  # fmt: skip


def test_sum_of_the_wrong_elements_of_all_ranks_is_reported_instead_of_the_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = RANK.replace('"wrong": 0', '"wrong": 0 if off else 2 + request["rank"]')
    ranks = run_ranks(monkeypatch, tmp_path, program)
    assert ranks.absent == []
    for rank in range(2):
        # 2 wrong elements on rank 0 and 3 on rank 1
        own = [(name, value, params["mnnvl"]) for number, name, value, params in ranks.reported if number == rank]
        assert own == [("mnnvl.wrong_elements", 5, True), ("mnnvl.busbw", 250.0, False)]


def test_launch_outside_an_nvlink_domain_starts_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks = run_ranks(monkeypatch, tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')", domain="")
    assert not (tmp_path / "started").exists()
    assert (ranks.reported, ranks.absent) == ([], [])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit(3)", "the process ended with exit code 3 and 0 results"),
        ('print(\'{"error": "NcclError: check the IMEX configuration"}\')', "NcclError: check the IMEX configuration"),
        ("import time; time.sleep(60)", "no result within 2 s"),
    ],
)
def test_figures_are_absent_on_all_ranks_if_a_rank_has_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, reason: str
) -> None:
    ranks = run_ranks(monkeypatch, tmp_path, program, limit_s=2.0 if "sleep" in program else 30.0)
    assert ranks.reported == []
    assert len(ranks.absent) == 4, "each host must report two rates as absent: with NVLink between hosts and without"
    assert {text for _, text in ranks.absent} == {f"rank 0: {reason} (and 1 more)"}


def test_reporting_rank_names_another_rank_whose_process_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = RANK.replace("off =", "assert request['rank'] == 0; off =", 1)
    assert program != RANK
    ranks = run_ranks(monkeypatch, tmp_path, program)
    reported = {text for rank, text in ranks.absent if rank == 0}
    assert reported == {"rank 1: the process ended with exit code 1 and 0 results"}


def test_process_that_cannot_be_started_is_reported_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mnnvl, "COMMAND", (str(tmp_path / "python"),))
    ranks = Ranks(tmp_path, "nvl1")
    ranks.run()
    assert [number for number, _ in sorted(ranks.absent)] == [0, 0, 1, 1]
    assert all("No such file or directory" in text for _, text in ranks.absent)
