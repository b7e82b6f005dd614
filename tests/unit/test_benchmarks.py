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

from agent.benchmarks import collective, datasets
from schemas.catalogue import expand
from schemas.records import Observation, observation_from_json

ROOT = Path(__file__).parents[2]
BENCHMARKS: dict[str, dict[str, Any]] = {
    "gemm": {"dtypes": ["bf16", "fp16", "tf32", "fp32"], "size": 64, "repetitions": 2},
    "memory_copy": {"size_bytes": 4096, "repetitions": 2},
    "collective": {"sizes_bytes": [8, 4096], "repetitions": 2, "iterations": 1},
    "training": {
        "networks": ["convnet", "resnet18"],
        "epochs": 1,
        "batch_size": 16,
        "learning_rate": 0.05,
        "max_steps": 12,
        "data_directories": [],
    },
}


def torchrun(work: Path, request: dict[str, Any] | None, *arguments: str, ranks: int = 2, **environment: str) -> str:
    """Runs the ranks; returns what the launcher printed."""
    work.mkdir(exist_ok=True)
    if request is not None:
        (work / "request.json").write_text(json.dumps(request))
        arguments = ("--request", str(work / "request.json"), *arguments)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
            *("-m", "agent.benchmarks", *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    logs = "\n".join(log.read_text() for log in sorted(work.glob("rank*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout


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
    """All benchmarks once, on two ranks, with a torchvision that fits its torch."""
    work = tmp_path_factory.mktemp("ranks")
    torchrun(work, request(**BENCHMARKS), PYTHONPATH=str(ROOT / "tests" / "fakes" / "torchvision"))
    return observations(work)


def test_every_output_of_the_catalogue_is_made_once_in_its_scope(everything: list[Observation]) -> None:
    for name, settings in BENCHMARKS.items():
        for item in expand("benchmark", name, settings):
            scopes = ["cpu=0", "cpu=1"] if item.scope == "device" else ["host"]
            found = [
                seen.scope
                for seen in everything
                if seen.name == item.name and item.params.items() <= seen.params.items()
            ]
            assert found == scopes, item


def test_units_are_those_of_the_catalogue(everything: list[Observation]) -> None:
    from schemas.catalogue import BENCHMARKS as CATALOGUE

    units = {
        output.name.format(op=op): output.unit
        for benchmark in CATALOGUE.values()
        for output in benchmark.outputs
        for op in collective.OPERATIONS
    }
    assert {(seen.name, seen.unit) for seen in everything} <= set(units.items())


def test_what_a_cpu_has_not_is_unsupported_and_all_else_is_measured(everything: list[Observation]) -> None:
    absent = {
        (seen.name, next(iter(seen.params.values())), seen.status) for seen in everything if seen.status != "measured"
    }
    assert absent == {
        ("gemm.throughput", "tf32", "unsupported"),
        ("memory_copy.bandwidth", "host_to_device", "unsupported"),
        ("memory_copy.bandwidth", "device_to_host", "unsupported"),
    }


def test_all_values_arrive_right(everything: list[Observation]) -> None:
    wrong = [seen for seen in everything if seen.name.endswith("wrong_elements")]
    assert len(wrong) == len(collective.OPERATIONS) * 2
    assert {seen.value for seen in wrong} == {0}


def test_both_networks_learn(everything: list[Observation]) -> None:
    ratios = {seen.params["network"]: seen.value for seen in everything if seen.name == "training.loss_ratio"}
    assert set(ratios) == {"convnet", "resnet18"}
    assert all(isinstance(ratio, float) and ratio < 1 for ratio in ratios.values())
    assert {seen.params["data"] for seen in everything if seen.name == "training.accuracy"} == {"synthetic"}


def test_busbw_follows_from_algbw_as_nccl_tests_has_it(everything: list[Observation]) -> None:
    values = {(seen.name, seen.params.get("size_bytes")): seen.value for seen in everything}
    factors = {
        "all_reduce": 1.0,
        "all_gather": 0.5,
        "reduce_scatter": 0.5,
        "broadcast": 1.0,
        "all_to_all": 0.5,
        "send_recv": 1.0,
    }
    for op, factor in factors.items():
        algbw, latency = values[(f"collective.{op}.algbw", 4096)], values[(f"collective.{op}.latency", 4096)]
        assert values[(f"collective.{op}.busbw", 4096)] == pytest.approx(algbw * factor)
        assert algbw == pytest.approx(4096 / latency)


def test_torchvision_that_does_not_fit_is_named_and_the_other_network_runs(tmp_path: Path) -> None:
    """The published torchvision is built against CUDA; beside a CPU build of torch it does not import."""
    training = {**BENCHMARKS["training"], "networks": ["resnet18", "convnet"], "max_steps": 3}
    torchrun(tmp_path, request(training=training))
    status = {seen.params["network"]: (seen.status, seen.reason) for seen in observations(tmp_path)}
    assert status["resnet18"][0] == "unsupported"
    assert "torchvision does not fit torch" in status["resnet18"][1]
    assert status["convnet"][0] == "measured"


def test_command_line_of_the_seeds(tmp_path: Path) -> None:
    printed = torchrun(
        tmp_path, None, "--only", "training", "collective", "--validation-only", "--results", str(tmp_path)
    )
    assert "collective.all_reduce.busbw" in printed
    assert not any(seen.name.startswith("training.") for seen in observations(tmp_path))


def test_broken_data_is_an_error_on_every_rank_and_never_synthetic(tmp_path: Path) -> None:
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x03")[:-4])
    training = {**BENCHMARKS["training"], "networks": ["convnet"], "data_directories": [str(tmp_path)]}
    torchrun(tmp_path / "ranks", request(training=training))
    found = observations(tmp_path / "ranks")
    assert {seen.status for seen in found} == {"error"}
    assert "train-images-idx3-ubyte.gz" in found[0].reason


def test_loss_that_is_not_a_number_is_told_and_never_written(tmp_path: Path) -> None:
    training = {**BENCHMARKS["training"], "networks": ["convnet"], "learning_rate": 1e30, "max_steps": 4}
    torchrun(tmp_path, request(training=training), ranks=1)
    found = {seen.name: (seen.status, seen.value) for seen in observations(tmp_path)}
    assert found["training.loss_finite"] == ("measured", False)
    assert found["training.loss"] == found["training.loss_ratio"] == ("error", None)


@pytest.mark.parametrize("op", sorted(collective.OPERATIONS))
def test_one_wrong_element_is_counted(op: str) -> None:
    operation, ranks, rank, count = collective.OPERATIONS[op], 4, 2, 300
    chunks = ranks if operation.receives_chunks else 1
    right = torch.cat(
        [
            collective._pattern(0, count, torch.device("cpu")) * factor + addend
            for factor, addend in (operation.received(rank, chunk, ranks) for chunk in range(chunks))
        ]
    )
    assert collective._wrong(right, operation, rank, ranks) == 0
    right[-7] += 1
    assert collective._wrong(right, operation, rank, ranks) == 1
    right[3] = float("nan")
    assert collective._wrong(right, operation, rank, ranks) == 2


def test_idx_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"\x00\x00\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6))))
    assert datasets.idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "content", [b"", b"junk", gzip.compress(b"\x00\x00\x0d\x01"), gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05ab")]
)
def test_idx_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        datasets.idx(path)
