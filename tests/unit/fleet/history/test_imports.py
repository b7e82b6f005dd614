"""Figures imported from other tools get the name and SI unit of the same figure of Rackproof, if there is one.

A file of unknown content is an error.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from fleet.history.database import History
from fleet.history.imports import read_output
from fleet.history.rows import Row
from schemas.errors import UsageError
from tests import ROOT
from tests.accepted import Done, rackproof

REFERENCE = ROOT / "docs" / "measurements"
OUTPUTS = sorted([*REFERENCE.glob("reference*/nccl/*.txt"), *REFERENCE.glob("reference*/nvbandwidth/*.json")])
NCCL_JSON: dict[str, Any] = {
    "version": 1, "start_time": "2026-01-01T00:00:00", "args": ["/opt/nccl-tests/build/all_reduce_perf", "-J", "out.json"],
    "env": ["TOKEN=secret"], "nccl_version": 22809,
    "config": {"graph": 0, "devices": [
        {"rank": rank, "hostname": "h1", "device": rank, "device_hex": "0x1b", "device_info": "NVIDIA H200"} for rank in range(8)
    ]},
    "results": [
        {"size": 8589934592, "count": 2147483648, "type": "bfloat16", "redop": "sum", "root": "-1",
         "out_of_place": {"time": 31000.5, "alg_bw": 277.1, "bus_bw": 484.9, "nwrong": 0.0},
         "in_place": {"time": 31000.5, "alg_bw": 277.1, "bus_bw": 485.1, "nwrong": 3.0}},
    ],
}  # fmt: skip
SUPERBENCH: dict[str, Any] = {
    "node": "h7", "kernel-launch/event_time:0": 0.0059, "nccl-bw:default/allreduce_8589934592_busbw:0": 480.2,
    "gemm-flops/bf16_tc_flops:3": 702000.0, "mem-bw/h2d_bw:1": 55.1, "monitor/gpu_temperature:0": None,
}  # fmt: skip
DCGM_4: dict[str, Any] = {
    "DCGM Diagnostic": {"test_categories": [{"category": "Integration", "tests": [{"name": "pcie", "results": [
        {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 0, "status": "Pass",
         "info": ["GPU to Host bandwidth:\t\t52.9 GB/s", "Host to GPU bandwidth:\t\t53.8 GB/s"]},
        {"entity_group": "GPU", "entity_id": 1, "status": "Fail", "warnings": [{"warning": "slow"}]},
        {"entity_group": "CPU", "entity_id": 0, "status": "Skip"},
    ]}]}]},
    "metadata": {"version": "4.2.3", "Driver Version Detected": "580.82.09"},
}  # fmt: skip
DCGM_3: dict[str, Any] = {
    "DCGM GPU Diagnostic": {"version": "3.3.5", "Driver Version Detected": "550.54.15", "test_categories": [
        {"category": "Hardware", "tests": [{"name": "GPU Memory", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}]},
    ]},
}  # fmt: skip


def rows_of(directory: Path, content: object, name: str = "out.json") -> list[Row]:
    """Write an output of another tool to a file; return the rows of figures that are read from it."""
    path = directory / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(read_output(path)[0].rows)


@pytest.mark.parametrize("path", OUTPUTS, ids=lambda path: "/".join(path.parts[-3:]))
def test_every_output_of_the_reference_measurements_is_read(path: Path) -> None:
    imported, _ = read_output(path)
    assert imported.version.startswith({"nccl": "2.19", "nvbandwidth": "v0."}[path.parent.name])
    assert {row["model"] for row in imported.rows} == {"NVIDIA H200"}
    assert all(row["value"] > 0 and row["unit"] in ("B/s", "s") for row in imported.rows)
    assert not [row for row in imported.rows if "unknown" in row["name"]]


def test_figures_of_nccl_tests_have_rackproof_settings_and_si_units() -> None:
    imported, _ = read_output(REFERENCE / "reference" / "nccl" / "all_reduce.txt")
    settings = "backend=nccl dtype=fp32 placement=in_place size_bytes=8589934592 world_size=4"
    values = {row["name"]: row["value"] for row in imported.rows if row["settings"] == settings}
    assert values == pytest.approx(
        {"collective.all_reduce.busbw": 365.08e9, "collective.all_reduce.latency": 35293.4e-6}
    )


def test_bidirectional_figures_of_nvbandwidth_are_sums_of_both_directions() -> None:
    imported, _ = read_output(REFERENCE / "reference" / "nvbandwidth" / "peer.json")
    both = [row["value"] for row in imported.rows if row["settings"] == "direction=both_ways"]
    assert len(both) == 12
    assert min(both) > 7.7e11, "a single direction reaches less than 4e11 B/s"


def test_figures_of_wrong_results_are_omitted_and_environment_variables_are_not_stored(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, NCCL_JSON)
    assert [(row["name"], row["value"]) for row in rows] == [
        ("collective.all_reduce.latency", pytest.approx(0.0310005)),
        ("collective.all_reduce.busbw", pytest.approx(484.9e9)),
    ]
    assert rows[0]["settings"] == "backend=nccl dtype=bf16 placement=out_of_place size_bytes=8589934592 world_size=8"
    assert "secret" not in str(rows)


def test_superbench_metrics_have_rackproof_names_if_rackproof_has_the_same_figure(tmp_path: Path) -> None:
    rows = {row["tool_name"]: row for row in rows_of(tmp_path, json.dumps(SUPERBENCH) + "\n", "results-summary.jsonl")}
    assert {name: (row["name"], row["settings"], row["value"], row["slot"]) for name, row in rows.items()} == {
        "kernel-launch/event_time": ("superbench.kernel-launch/event_time", "", 0.0059, "gpu=0"),
        "nccl-bw/allreduce_8589934592_busbw":
            ("collective.all_reduce.busbw", "backend=nccl size_bytes=8589934592", pytest.approx(480.2e9), "gpu=0"),
        "gemm-flops/bf16_tc_flops": ("gemm.throughput", "dtype=bf16", pytest.approx(7.02e14), "gpu=3"),
        "mem-bw/h2d_bw": ("host_copy.bandwidth", "direction=host_to_device sharing=alone", pytest.approx(5.51e10), "gpu=1"),
    }  # fmt: skip
    assert {row["host"] for row in rows.values()} == {"h7"}


def test_results_of_dcgm_are_read_in_the_layouts_of_versions_3_and_4(tmp_path: Path) -> None:
    new = [(row["name"], row["settings"], row["value"], row["slot"]) for row in rows_of(tmp_path, DCGM_4)]
    assert new == [
        ("dcgm.pcie.passed", "", 1.0, "gpu=0"),
        ("host_copy.bandwidth", "direction=device_to_host sharing=alone", pytest.approx(52.9e9), "gpu=0"),
        ("host_copy.bandwidth", "direction=host_to_device sharing=alone", pytest.approx(53.8e9), "gpu=0"),
        ("dcgm.pcie.passed", "", 0.0, "gpu=1"),
    ]
    old = rows_of(tmp_path, DCGM_3)
    assert [(row["name"], row["slot"], row["driver"]) for row in old] == [
        ("dcgm.gpu_memory.passed", slot, "550.54.15") for slot in ("gpu=0", "gpu=1")
    ]


GARBAGE = ["", "text", "[]", "{}", "null", '{"nvbandwidth": {}}', '{"nvbandwidth": {"testcases": [7, {"bandwidth_matrix": 3}]}}',
           '{"nccl_version": 1, "results": [3, {"size": "x"}]}', '{"node": "h1"}', '{"node": 3}', "[" * 100_000,
           '{"DCGM Diagnostic": {"test_categories": [{"tests": [{"results": [{"status": "Pass"}, 7]}]}]}}',
           "# nThread 1 minBytes 8 graph: 0\n 8 2 float sum -1 a b c d e f g h\n"]  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_file_of_unknown_content_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"neither a run directory nor|without a figure"):
        rows_of(tmp_path, text)


@pytest.mark.parametrize("path", OUTPUTS[:: len(OUTPUTS) // 4], ids=lambda path: path.name)
def test_truncated_output_gives_no_additional_rows(tmp_path: Path, path: Path) -> None:
    text = path.read_text()
    complete = len(read_output(path)[0].rows)
    for share in (0.1, 0.5, 0.9):
        with contextlib.suppress(UsageError):
            assert len(rows_of(tmp_path, text[: int(len(text) * share)], path.name)) <= complete


def test_file_that_is_imported_twice_is_stored_once_with_its_source(tmp_path: Path) -> None:
    path, store = REFERENCE / "reference" / "nccl" / "all_reduce.txt", tmp_path / "h"
    first = rackproof("history", "import", path, "--history", store)
    second = rackproof("history", "import", path, "--history", store)
    assert (first.returncode, first.stderr, second.returncode) == (0, "", 0)
    assert second.stdout == f"0 added to {store}, 1 unchanged\n"
    ((count, sources),) = History(store).rows(
        "select count(*), count(distinct source || version || file) from imported"
    )
    assert (count, sources) == (42, 1)
    asked = rackproof(
        "history", "figure", "collective.all_reduce.busbw", "--value", "3e11", "--json", "--history", store
    )
    imported = json.loads(asked.stdout)["imported"]
    assert {(row["source"], row["version"], row["file"]) for row in imported} == {
        ("nccl-tests", "2.19.6, NCCL 22809", "all_reduce.txt")
    }
    question = ("history", "figure", "collective.all_reduce.busbw", "--value", "3e11", "--history", store)
    assert rackproof(*question).stdout.count("  no accepted host has this figure") == 2
    assert rackproof(*question, "--all").stdout.count("  no host has this figure") == 2
    (file,) = (store / "gpu" / "imported").iterdir()
    file.unlink()  # a new import must restore the lost file
    rackproof("history", "import", path, "--history", store)
    assert History(store).rows("select count(*) from imported") == [(42,)]


def models(store: Path, path: Path, *options: str) -> tuple[Done, list[str]]:
    """Import a file; return the result of the command, and the GPU models of all imported figures."""
    done = rackproof("history", "import", path, "--history", store, *options)
    return done, [row[0] for row in History(store).rows("select distinct model from imported order by all")]


def test_wrong_model_is_corrected_by_importing_again(tmp_path: Path) -> None:
    path, store = tmp_path / "results-summary.jsonl", tmp_path / "h"
    path.write_text(json.dumps(SUPERBENCH) + "\n")
    assert models(store, path, "--model", "NVIDIA H100") == (Done(0, f"1 added to {store}\n", ""), ["NVIDIA H100"])
    again = f"0 added to {store}, 1 "
    assert models(store, path, "--model", "NVIDIA H200") == (Done(0, f"{again}replaced\n", ""), ["NVIDIA H200"])
    assert models(store, path) == (Done(0, f"{again}unchanged\n", ""), ["NVIDIA H200"])
    # The entries `node` and `monitor/gpu_temperature:0`, which is null, are no figures.
    assert History(store).rows("select count(*) from imported") == [(len(SUPERBENCH) - 2,)]


def test_model_in_the_file_takes_precedence_over_the_option(tmp_path: Path) -> None:
    path = REFERENCE / "reference" / "nccl" / "all_reduce.txt"
    done, stored = models(tmp_path / "h", path, "--model", "NVIDIA B200")
    assert stored == ["NVIDIA H200"]
    assert "--model was not used: the file names the model of each figure: NVIDIA H200" in done.stderr


def test_files_of_the_same_name_are_not_pooled(tmp_path: Path) -> None:
    store, text = tmp_path / "h", (REFERENCE / "reference" / "nccl" / "all_reduce.txt").read_text()
    for name, content in (("a", text), ("b", text.replace("365.08", "165.08"))):
        path = tmp_path / name / "all_reduce.txt"
        path.parent.mkdir()
        path.write_text(content)
        rackproof("history", "import", path, "--history", store)
    asked = rackproof(
        "history", "figure", "collective.all_reduce.busbw", "--settings", "size_bytes=8589934592 placement=in_place",
        "--value", "3e11", "--json", "--history", store,
    )  # fmt: skip
    rows = json.loads(asked.stdout)["imported"]
    assert [row["file"] for row in rows] == ["all_reduce.txt"] * 2
    assert len({row["sha256"] for row in rows}) == 2
    assert sorted((row["values"], row["median"]) for row in rows) == [(1, 165.08e9), (1, 365.08e9)]
    assert {row["percentile"] for row in rows} == {None}, "one value has no percentiles"
