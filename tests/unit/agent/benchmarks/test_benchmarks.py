"""Test the benchmarks that do not train. They run on CPUs with gloo, under torchrun or in forks with torchrun's variables."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.collectives import operations
from agent.benchmarks.collectives.operations import OPERATIONS
from agent.benchmarks.runtime import datasets
from agent.launch import guard
from schemas.benchmarks import DTYPES, Benchmark
from schemas.benchmarks.communication import COMMUNICATION
from schemas.benchmarks.hardware import HARDWARE
from schemas.catalogue import BENCHMARKS, DURATION, expand, supports_placement
from schemas.decode import observation_from_json
from schemas.records import Observation
from tests import ranks

PLACEMENTS = ("out_of_place", "in_place")
QUICK: dict[str, dict[str, Any]] = {
    "gemm": {"dtypes": [*DTYPES], "size": 64, "seconds": 0.02},
    "memory": {"size_bytes": 65536, "seconds": 0.02},
    "integrity": {"most_bytes": 1 << 20},
    "stress": {"size": 64, "seconds": 0.6, "settle_seconds": 0.1},
    "digest": {"size": 64, "seconds": 0.1},
    "collective": {"sizes_bytes": [8, 4096], "seconds": 0.01},
}
"""Benchmark -> settings that override the catalogue's settings for CPUs, so that the benchmark takes less time."""


def cpu_settings(benchmarks: Mapping[str, Benchmark], quick: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return name -> settings of each benchmark that runs on the CPUs of one host.

    Settings in `quick` override the catalogue's settings for CPUs.
    """
    return {
        name: {**benchmark.cpu_settings, **quick.get(name, {})}
        for name, benchmark in benchmarks.items()
        if benchmark.cpu_settings is not None and name != "pairs"  # `pairs` needs several hosts
    }


SETTINGS = cpu_settings({**HARDWARE, **COMMUNICATION}, QUICK)


def torchrun(work: Path, request: dict[str, Any], **environment: str) -> None:
    """Run a request on two ranks under torchrun."""
    write_request(work, request)
    run_launcher(
        work, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "agent.benchmarks", **environment
    )


def run_as_agent(work: Path, request: dict[str, Any], program: str, **environment: str) -> None:
    """Run a request on two ranks, as the agent does: a launcher imports torch once and forks the ranks, which run `program`."""
    write_request(work, request)
    config = {"name": "ranks", "rank": 0, "hosts": 1, "address": "127.0.0.1", "port": 0, "admitted": [], "trains": True}
    (work / "rendezvous.json").write_text(json.dumps(config))
    forks = ("--nnodes=1", "--nproc-per-node=2", "--run-path", "--start-method=fork", guard.__file__)
    run_launcher(work, "agent.benchmarks.rendezvous", work / "rendezvous.json", *forks, program, **environment)


def write_request(work: Path, request: dict[str, Any]) -> None:
    (work / "request.json").write_text(json.dumps(request))


def run_launcher(work: Path, *launcher: str | Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "--request", work / "request.json"],
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


def run_forked(work: Path, request: dict[str, Any] | None, *arguments: str) -> str:
    """Run two forked ranks with the variables that torchrun would set; return their output."""
    if request is not None:
        write_request(work, request)
        arguments = ("--request", "request.json", *arguments)
    started = ranks.start("agent.benchmarks", *arguments, work=work)
    codes, output = started.wait(), started.output.read_text()
    assert codes == [0, 0], f"{output}\n{logs(work)}"
    return output


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
        for path in sorted(work.glob("rank[0-9].json"))
        for item in json.loads(path.read_text())["observations"]
    ]


def check_every_output_once(settings: dict[str, dict[str, Any]], measured: list[Observation]) -> None:
    """Check that each output with the scope `device` is observed once per device, and each other output once per host."""
    for name, chosen in settings.items():
        for expected in expand("benchmark", name, chosen, "cpu"):
            scopes = [
                observation.scope
                for observation in measured
                if observation.name == expected.name and expected.params.items() <= observation.params.items()
            ]
            assert scopes == (["cpu=0", "cpu=1"] if expected.scope == "device" else ["host"]), expected


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """Return the observations of all benchmarks in SETTINGS, which run once on two ranks."""
    work = tmp_path_factory.mktemp("ranks")
    torchrun(work, request(**SETTINGS))
    return observations(work)


def test_every_catalogue_output_is_measured_once(measured: list[Observation]) -> None:
    check_every_output_once(SETTINGS, measured)


def test_units_are_those_of_the_catalogue(measured: list[Observation]) -> None:
    outputs = [output for benchmark in BENCHMARKS.values() for output in (*benchmark.outputs, DURATION)]
    for observation in measured:
        assert observation.unit in {output.unit for output in outputs if output.makes(observation.name)}, observation


def test_only_figures_that_a_cpu_cannot_measure_are_unsupported(measured: list[Observation]) -> None:
    absent = {(item.name, item.params.get("dtype"), item.status) for item in measured if item.status != "measured"}
    absent.discard(("host_compute.clock", None, "unsupported"))  # a virtual machine has no cpufreq driver
    assert absent == {("gemm.throughput", "tf32", "unsupported"), ("gemm.throughput", "fp8", "unsupported")}


@pytest.mark.parametrize("name", ["gemm.throughput", "memory.bandwidth", "collective.all_reduce.latency"])
def test_sampled_figure_has_precision_and_stop_reason(measured: list[Observation], name: str) -> None:
    samples = [item.samples for item in measured if item.name == name and item.status == "measured"]
    assert samples
    for sample in samples:
        assert sample is not None
        assert sample.n >= 6
        assert sample.min <= sample.p50 <= sample.max
        assert sample.precision is not None
        assert sample.stopped in ("precision", "time")


def test_digests_of_equal_devices_are_equal_and_constant(measured: list[Observation]) -> None:
    for workload in ("gemm", "reduction", "training_step"):
        values = [
            item.value for item in measured if item.name == "digest.value" and item.params["workload"] == workload
        ]
        assert len(set(values)) == 1
        assert len(str(values[0])) == 16
    mismatches = [item for item in measured if item.name == "digest.mismatches"]
    assert {item.value for item in mismatches} == {0}
    assert all(int(str(item.params["repetitions"])) >= 4 for item in mismatches)


def test_collectives_deliver_correct_values(measured: list[Observation]) -> None:
    counts = [item.value for item in measured if fnmatch(item.name, "collective.*.wrong_elements")]
    cases = [
        (op, placement) for op in OPERATIONS for placement in PLACEMENTS if supports_placement(op, placement, "cpu")
    ]
    assert counts == [0] * len(cases) * 2


def test_ratio_of_busbw_to_algbw_is_that_of_nccl_tests(measured: list[Observation]) -> None:
    values = {(item.name, item.params.get("size_bytes"), item.params.get("placement")): item.value for item in measured}
    # Bus bandwidth divided by algorithm bandwidth, for two ranks. For the operations that are not listed it is 0.5.
    factors = {"all_reduce": 1.0, "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0}
    for op in OPERATIONS:
        placement = "out_of_place" if supports_placement(op, "out_of_place", "cpu") else "in_place"
        algbw, busbw, latency = (
            values[(f"collective.{op}.{kind}", 4096, placement)] for kind in ("algbw", "busbw", "latency")
        )
        assert busbw == pytest.approx(algbw * factors.get(op, 0.5))
        assert algbw == pytest.approx(4096 / latency)


def test_size_beyond_the_memory_is_an_error_and_other_sizes_are_measured(tmp_path: Path) -> None:
    huge = 1 << 50
    collective = {
        "ops": ["all_reduce", "all_gather"],
        "placements": ["in_place"],
        "sizes_bytes": [huge, 8],
        "seconds": 0.01,
    }
    run_forked(
        tmp_path, request(memory={"ops": ["copy"], "size_bytes": huge}, gemm={"size": 1 << 24}, collective=collective)
    )
    measured = observations(tmp_path)
    errors = [item for item in measured if item.status == "error"]
    assert {item.name.split(".")[0] for item in errors} == {"memory", "gemm", "collective"}
    assert all("memory" in item.reason or "alloc" in item.reason for item in errors), {item.reason for item in errors}
    sizes = {
        item.params["size_bytes"] for item in measured if item.name == "collective.all_gather.busbw" and item.value
    }
    assert sizes == {8}


def test_selected_training_is_skipped_with_validation_only(tmp_path: Path) -> None:
    output = run_forked(
        tmp_path, None, "--only", "training", "kernel_launch", "--validation-only", "--results", str(tmp_path / "kept")
    )
    assert "cpu=0          kernel_launch.latency" in output
    assert "cpu=1          kernel_launch.latency" in output
    assert not any(item.name.startswith("training.") for item in observations(tmp_path / "kept"))


def test_single_rank_runs_without_torchrun_and_removes_its_files(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    arguments = ("--only", "host_copy", "digest", "collective")
    temporary = str(tmp_path / "temporary")
    started = ranks.start_alone("agent.benchmarks", *arguments, work=tmp_path, TMPDIR=temporary)
    codes, output = started.wait(), started.output.read_text()
    assert codes == [0], output
    assert "digest.value" in output
    assert "skipped: host_copy" in output
    assert "skipped: a collective needs two ranks" in output
    assert not list((tmp_path / "temporary").iterdir())


def run_hosts(work: Path, gang: list[str], members: list[str], **pairs: Any) -> dict[str, list[Observation]]:
    """Run the benchmark `pairs` on `members`, which have two ranks each; return host -> observations.

    `gang` lists the hosts for which the multi-node launch was planned, including those that were lost before this launch.
    """
    for host in members:
        (work / host).mkdir()
        launch = {"stage": "gang", "world_scope": "gang=r1", "members": members, "gang": gang}
        write_request(work / host, {**request(pairs=pairs), **launch})
    started = ranks.start("agent.benchmarks", "--request", "request.json", work=work, hosts=members)
    assert started.wait() == [0] * 2 * len(members), started.output.read_text()
    return {host: observations(work / host) for host in members}


def test_both_ends_of_a_pair_measure_and_a_missing_host_is_skipped(tmp_path: Path) -> None:
    gang, members = ["h1", "h2", "h3"], ["h1", "h3"]  # h2 was lost in an earlier launch
    measured = run_hosts(tmp_path, gang, members, size_bytes=1 << 18, seconds=0.1)
    for host, other in (("h1", "h3"), ("h3", "h1")):
        for name, unit in (("pairs.bandwidth", "B/s"), ("pairs.latency", "s")):
            by_scope = {item.scope: item for item in measured[host] if item.name == name}
            assert set(by_scope) == {f"cpu={rail},partner={partner}" for rail in (0, 1) for partner in (other, "h2")}
            for rail in (0, 1):
                present, lost = by_scope[f"cpu={rail},partner={other}"], by_scope[f"cpu={rail},partner=h2"]
                assert (present.status, present.unit, present.params["rail"]) == ("measured", unit, rail)
                assert float(str(present.value)) > 0
                assert (lost.status, lost.value) == ("skipped", None)
        (duration,) = (item.value for item in measured[host] if item.name == "benchmark.duration")
        assert float(str(duration)) < 3.0


def test_single_host_skips_pairs(tmp_path: Path) -> None:
    run_forked(tmp_path, request(pairs={}))
    pairs = [item for item in observations(tmp_path) if item.name.startswith("pairs.")]
    assert {(item.status, item.reason) for item in pairs} == {("skipped", "the pairs benchmark needs two hosts")}
    assert {item.name for item in pairs} == {"pairs.bandwidth", "pairs.latency"}


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_single_wrong_element_is_counted(op: str) -> None:
    operation, world_size, rank, count = OPERATIONS[op], 4, 2, 300
    chunks = world_size if operation.receives_chunks else 1
    received = torch.cat(
        [
            operations.pattern(0, count, torch.device("cpu")) * factor + addend
            for factor, addend in (operation.received(rank, chunk, world_size) for chunk in range(chunks))
        ]
    )
    assert operations.count_wrong_elements(received, operation, rank, world_size) == 0
    received[-7] += 1
    assert operations.count_wrong_elements(received, operation, rank, world_size) == 1
    received[3] = float("nan")
    assert operations.count_wrong_elements(received, operation, rank, world_size) == 2


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("world_size", [1, 2, 61, 62, 500, 4096])
def test_reduction_must_return_the_sum_of_the_sent_elements(op: str, world_size: int) -> None:
    """A rank sends pattern + addend, so the sum over all ranks is pattern * world_size + the sum of the addends."""
    operation = OPERATIONS[op]
    for rank in {0, world_size // 2, world_size - 1}:
        sent = sum(operation.sent(sender, rank, world_size) for sender in range(world_size))
        assert operation.received(rank, 0, world_size) == (world_size, sent)


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter"])
def test_ranks_send_different_elements_in_a_reduction_of_up_to_2600_ranks(op: str) -> None:
    """Otherwise a reduction that adds the elements of one rank twice and skips another rank could give the right sum."""
    assert len({OPERATIONS[op].sent(rank, 0, 2600) for rank in range(2600)}) == 2600


@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter"])
def test_sums_of_45_000_ranks_are_integers_that_fp32_represents_exactly(op: str) -> None:
    """Otherwise the sum would depend on the order in which NCCL adds."""
    world_size = 45_000
    for rank in range(world_size):
        factor, addend = OPERATIONS[op].received(rank, 0, world_size)
        assert factor * (operations.PERIOD - 1) + addend < 1 << 24


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "training", "--epochs", "0"], 2, "0 is not a whole number of at least 1"),
        (["--only", "fashion_mnist", "--batch-size", "1000000"], 1, "images are fewer than one batch of 1000000"),
    ],
)
def test_error_without_a_supervisor_sets_the_exit_code_and_is_printed(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    """Under a supervisor (the agent's process that launches the ranks), errors of benchmarks are in the host's record instead."""
    started = ranks.start_alone("agent.benchmarks", *arguments, work=tmp_path)
    codes, output = started.wait(), started.output.read_text()
    assert (codes, message in output) == ([code], True), output


def test_idx_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6))))
    assert datasets.read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        gzip.compress(b"\x00\x00\x0d\x01", mtime=0),
        gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05ab", mtime=0),
        gzip.compress(b"\x00\x00\x08\x03\x00\x00", mtime=0),
    ],
)
def test_invalid_idx_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        datasets.read_idx(path)


def test_cifar_10_without_training_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-bin: no data_batch_\*\.bin in it"):
        datasets._cifar_10(tmp_path / "cifar-10-batches-bin")
