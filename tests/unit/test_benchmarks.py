"""The benchmarks, on CPUs and gloo, under a real torchrun."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.collectives import operations
from agent.benchmarks.collectives.operations import OPERATIONS
from agent.benchmarks.runtime import datasets
from agent.launch import guard
from schemas.catalogue import BENCHMARKS as CATALOGUE
from schemas.catalogue import DURATION, expand, offers
from schemas.records import Observation, observation_from_json
from tests import ranks

PLACEMENTS = ("out_of_place", "in_place")
BENCHMARKS: dict[str, dict[str, Any]] = {
    "gemm": {"size": 64, "seconds": 0.02},
    "memory": {"size_bytes": 65536, "seconds": 0.02},
    "integrity": {"most_bytes": 1 << 20},
    "stress": {"dtypes": ["fp32"], "size": 64, "seconds": 0.6, "settle_seconds": 0.1},
    "digest": {"size": 64, "seconds": 0.1},
    "collective": {"sizes_bytes": [8, 4096], "seconds": 0.01},
}


def torchrun(work: Path, request: dict[str, Any], **environment: str) -> None:
    """Runs two ranks."""
    request_of(work, request)
    launched(work, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", **environment)


def as_the_agent(work: Path, request: dict[str, Any], **environment: str) -> None:
    """Runs two ranks as the agent starts them: forks of torchrun, which imports torch once for both."""
    request_of(work, request)
    place = {"name": "ranks", "rank": 0, "hosts": 1, "address": "127.0.0.1", "port": 0, "admitted": [], "trains": True}
    (work / "rendezvous.json").write_text(json.dumps(place))
    forks = ("--nnodes=1", "--nproc-per-node=2", "--run-path", "--start-method=fork", guard.__file__)
    launched(work, "agent.benchmarks.rendezvous", work / "rendezvous.json", *forks, **environment)


def request_of(work: Path, request: dict[str, Any]) -> None:
    (work / "request.json").write_text(json.dumps(request))


def launched(work: Path, *launcher: str | Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "agent.benchmarks", "--request", work / "request.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(work)}"


def logs(work: Path) -> str:
    return "\n".join(log.read_text() for log in sorted(work.glob("rank*.log")))


def forked(work: Path, request: dict[str, Any] | None, *arguments: str) -> str:
    """Runs two ranks, as torchrun would; returns what they printed."""
    if request is not None:
        request_of(work, request)
        arguments = ("--request", "request.json", *arguments)
    started = ranks.start("agent.benchmarks", *arguments, work=work)
    codes, printed = started.end(), started.printed.read_text()
    assert codes == [0, 0], f"{printed}\n{logs(work)}"
    return printed


def request(**benchmarks: dict[str, Any]) -> dict[str, Any]:
    return {
        "stage": "benchmark",
        "world_scope": "host",
        "device": "cpu",
        "devices": [0, 1],
        "collective_timeout_s": 30,
        "benchmarks": benchmarks,
    }


def observations(work: Path) -> list[Observation]:
    return [
        observation_from_json(item)
        for path in sorted(work.glob("rank?.json"))
        for item in json.loads(path.read_text())["observations"]
    ]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """The benchmarks of the hardware once, on two ranks."""
    work = tmp_path_factory.mktemp("ranks")
    torchrun(work, request(**BENCHMARKS))
    return observations(work)


def test_every_output_of_the_catalogue_is_made_once_in_its_scope(everything: list[Observation]) -> None:
    for name, settings in BENCHMARKS.items():
        for item in expand("benchmark", name, settings, "cpu"):
            scopes = ["cpu=0", "cpu=1"] if item.scope == "device" else ["host"]
            found = [
                seen.scope
                for seen in everything
                if seen.name == item.name and item.params.items() <= seen.params.items()
            ]
            assert found == scopes, item


def test_units_are_those_of_the_catalogue(everything: list[Observation]) -> None:
    for seen in everything:
        outputs = [output for entry in CATALOGUE.values() for output in (*entry.outputs, DURATION)]
        assert seen.unit in {output.unit for output in outputs if output.makes(seen.name)}, seen


def test_what_a_cpu_has_not_is_unsupported_and_all_else_is_measured(everything: list[Observation]) -> None:
    absent = {(seen.name, seen.params.get("dtype"), seen.status) for seen in everything if seen.status != "measured"}
    assert absent == {("gemm.throughput", "tf32", "unsupported"), ("gemm.throughput", "fp8", "unsupported")}


def test_a_figure_says_how_sure_it_is_and_why_it_was_taken_no_further(everything: list[Observation]) -> None:
    for name in ("gemm.throughput", "memory.bandwidth", "collective.all_reduce.latency"):
        for seen in everything:
            if seen.name == name and seen.status == "measured":
                assert seen.samples is not None
                assert seen.samples.n >= 6
                assert seen.samples.min <= seen.samples.p50 <= seen.samples.max
                assert seen.samples.precision is not None
                assert seen.samples.stopped in ("precision", "time")


def test_two_equal_devices_have_equal_digests_that_never_change(everything: list[Observation]) -> None:
    for workload in ("gemm", "reduction", "training_step"):
        values = [seen for seen in everything if seen.name == "digest.value" and seen.params["workload"] == workload]
        assert len({seen.value for seen in values}) == 1
        assert len(str(values[0].value)) == 16
    changed = [seen for seen in everything if seen.name == "digest.mismatches"]
    assert {seen.value for seen in changed} == {0}
    assert all(int(str(seen.params["repetitions"])) >= 4 for seen in changed)


def test_all_values_arrive_right(everything: list[Observation]) -> None:
    wrong = [seen for seen in everything if seen.name.endswith("wrong_elements")]
    cases = [(op, placement) for op in OPERATIONS for placement in PLACEMENTS if offers(op, placement, "cpu")]
    assert len(wrong) == len(cases) * 2
    assert {seen.value for seen in wrong} == {0}


def test_busbw_follows_from_algbw_as_nccl_tests_has_it(everything: list[Observation]) -> None:
    values = {
        (seen.name, seen.params.get("size_bytes"), seen.params.get("placement")): seen.value for seen in everything
    }
    each, one = 0.5, 1.0  # of two ranks
    factors = {"all_reduce": one, "broadcast": one, "reduce": one, "send_recv": one}
    for op in OPERATIONS:
        placement = "out_of_place" if offers(op, "out_of_place", "cpu") else "in_place"
        algbw, busbw, latency = (
            values[(f"collective.{op}.{kind}", 4096, placement)] for kind in ("algbw", "busbw", "latency")
        )
        assert busbw == pytest.approx(algbw * factors.get(op, each))
        assert algbw == pytest.approx(4096 / latency)


def test_a_size_that_no_memory_holds_is_an_error_with_its_reason_and_the_others_are_measured(tmp_path: Path) -> None:
    huge = 1 << 50
    collective = {
        "ops": ["all_reduce", "all_gather"],
        "placements": ["in_place"],
        "sizes_bytes": [huge, 8],
        "seconds": 0.01,
    }
    forked(
        tmp_path, request(memory={"ops": ["copy"], "size_bytes": huge}, gemm={"size": 1 << 24}, collective=collective)
    )
    found = observations(tmp_path)
    lost = [seen for seen in found if seen.status == "error"]
    assert {seen.name.split(".")[0] for seen in lost} == {"memory", "gemm", "collective"}
    assert all("memory" in seen.reason or "alloc" in seen.reason for seen in lost), {seen.reason for seen in lost}
    sizes = {seen.params["size_bytes"] for seen in found if seen.name == "collective.all_gather.busbw" and seen.value}
    assert sizes == {8}


def test_command_line_of_a_single_benchmark(tmp_path: Path) -> None:
    printed = forked(
        tmp_path, None, "--only", "training", "gemm", "--validation-only", "--results", str(tmp_path / "kept")
    )
    assert "cpu=0          gemm.throughput" in printed
    assert "cpu=1          gemm.throughput" in printed
    assert not any(seen.name.startswith("training.") for seen in observations(tmp_path / "kept"))


def test_a_rank_can_be_tried_without_torchrun_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent.benchmarks", "--only", "digest", "collective"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "digest.value" in done.stdout
    assert "skipped: one rank has nobody to talk to" in done.stdout
    assert not list(tmp_path.iterdir())


def hosts_together(work: Path, gang: list[str], members: list[str], **pairs: Any) -> dict[str, list[Observation]]:
    """Runs `pairs` on hosts of two ranks each; host -> what it observed."""
    for host in members:
        (work / host).mkdir()
        together = {"stage": "gang", "world_scope": "gang=r1", "members": members, "gang": gang}
        (work / host / "request.json").write_text(json.dumps({**request(pairs=pairs), **together}))
    started = ranks.start("agent.benchmarks", "--request", "request.json", work=work, hosts=members)
    assert started.end() == [0] * 2 * len(members), started.printed.read_text()
    return {
        host: [
            observation_from_json(item)
            for path in sorted((work / host).glob("rank[0-9].json"))
            for item in json.loads(path.read_text())["observations"]
        ]
        for host in members
    }


def test_pairs_are_measured_by_both_ends_on_every_rail_and_a_host_that_is_not_there_is_no_success(
    tmp_path: Path,
) -> None:
    gang, members = ["h1", "h2", "h3"], ["h1", "h3"]  # h2 was lost before
    found = hosts_together(tmp_path, gang, members, size_bytes=1 << 18, seconds=0.1)
    for host, other in (("h1", "h3"), ("h3", "h1")):
        for name, unit in (("pairs.bandwidth", "B/s"), ("pairs.latency", "s")):
            seen = {item.scope: item for item in found[host] if item.name == name}
            assert set(seen) == {f"cpu={rail},partner={partner}" for rail in (0, 1) for partner in (other, "h2")}
            for rail in (0, 1):
                measured, lost = seen[f"cpu={rail},partner={other}"], seen[f"cpu={rail},partner=h2"]
                assert (measured.status, measured.unit, measured.params["rail"]) == ("measured", unit, rail)
                assert float(str(measured.value)) > 0
                assert (lost.status, lost.value) == ("skipped", None)
        (duration,) = (item.value for item in found[host] if item.name == "benchmark.duration")
        assert float(str(duration)) < 3.0


def test_a_host_alone_has_no_pairs(tmp_path: Path) -> None:
    forked(tmp_path, request(pairs={}))
    seen = [item for item in observations(tmp_path) if item.name.startswith("pairs.")]
    assert {(item.status, item.reason) for item in seen} == {("skipped", "one host has no other to exchange with")}
    assert {item.name for item in seen} == {"pairs.bandwidth", "pairs.latency"}


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_one_wrong_element_is_counted(op: str) -> None:
    operation, ranks, rank, count = OPERATIONS[op], 4, 2, 300
    chunks = ranks if operation.receives_chunks else 1
    right = torch.cat(
        [
            operations.pattern(0, count, torch.device("cpu")) * factor + addend
            for factor, addend in (operation.received(rank, chunk, ranks) for chunk in range(chunks))
        ]
    )
    assert operations.wrong_elements(right, operation, rank, ranks) == 0
    right[-7] += 1
    assert operations.wrong_elements(right, operation, rank, ranks) == 1
    right[3] = float("nan")
    assert operations.wrong_elements(right, operation, rank, ranks) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--only", "training", "--epochs", "0"], 2, "0 is no whole number of at least 1"),
        (["--only", "training", "--batch-size", "1000000"], 1, "images on each of 1 ranks: too few"),
        (["--only", "host_copy", "digest"], 0, "left out: host_copy"),
    ],
)
def test_what_goes_wrong_by_hand_is_in_the_exit_code(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    started = ranks.alone("agent.benchmarks", *arguments, work=tmp_path)
    assert (started.end(), said in started.printed.read_text()) == ([code], True), started.printed.read_text()


def test_idx_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6))))
    assert datasets.idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        gzip.compress(b"\x00\x00\x0d\x01", mtime=0),
        gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05ab", mtime=0),
    ],
)
def test_idx_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        datasets.idx(path)
