"""Packages for a vendor: the failed part alone, with its evidence; and never a file outside the run directory."""

from __future__ import annotations

import csv
import io
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.rma.files import names, safe, write_package
from fleet.rma.parts import IDENTITY, parts
from rackproof.main import main
from schemas import documents
from schemas.errors import RunError
from schemas.plans import Plan
from schemas.readings import READINGS
from schemas.records import Launch, Metric, Observation, Rank, Record, to_json
from schemas.reports import Verdict
from tests import builders
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke", rackproof_gang="none")
TAIL = "step 41\nstep 42 ```\n<script>alert(1)</script>\n\x1b[31mCUDA error"
XID = Metric(name="xid.count", unit="1", values={"pci=0000:01:00.0,xid=63": 2, "pci=0000:00:00.0,xid=13": 1})


def slow(observation: Observation) -> Observation:
    return (
        replace(observation, value=1.0e12)
        if observation.name == "memory.bandwidth" and observation.scope == "gpu=1"
        else observation
    )


def launched(launch: Launch) -> Launch:
    ranks = tuple(
        Rank(rank=number, local_rank=number, phase="gemm", exit_code=0, log_tail=TAIL if number else "all is well")
        for number in range(2)
    )
    return replace(launch, ranks=ranks)


def slow_record(plan: Plan, host: str) -> Record:
    """GPU 1 copies slowly, replays over PCIe and has an XID."""
    (record,) = builders.records(plan, host)
    first, last = record.snapshots
    replays = builders.snapshot(range(2), stage="benchmark", phase="after", gpu__pcie__replays={"gpu=0": 0, "gpu=1": 7})
    metrics = tuple(
        metric for metric in replays.metrics if metric.name != "xid.count" and not metric.name.startswith("gpu.part")
    )
    part = Metric(name="gpu.part_number", unit="1", values={"gpu=0": "692-A", "gpu=1": "692-B"})
    return replace(
        record,
        snapshots=(first, replace(last, metrics=(*metrics, XID, part))),
        observations=tuple(map(slow, record.observations)),
        launches=tuple(map(launched, record.launches)),
    )


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "r1"
    write_run(directory, PLAN)
    documents.write(directory / "hosts" / "h2.json", to_json(slow_record(PLAN, "h2")))
    assert main(["report", str(directory)]) == 1
    return directory


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported, tmp_path / "r1"))


def package(run: Path, *options: str) -> dict[str, Any]:
    assert main(["rma", str(run), *options]) == 0
    (path,) = [path for path in (run / "rma").iterdir() if path.is_dir()]
    result: dict[str, Any] = documents.read(path / "part.json", "part")
    return result


def test_one_package_of_the_failed_part_with_what_a_vendor_asks_for(run: Path) -> None:
    result = package(run)
    assert [path.name for path in (run / "rma").iterdir()] == ["h2-1"]
    assert (result["part"]["serial"], result["part"]["uuid"], result["part"]["model"]) == (
        "h2-1",
        "GPU-h2-1",
        "NVIDIA H200",
    )
    assert result["part"]["part_number"] == "692-B"
    assert result["part"]["not_read"]["vbios"] == "unsupported: not on this host"
    assert result["slot"] == {
        "host": "h2", "rack": "r1", "address": "10.0.0.2", "place": "gpu=1", "pci_address": "0000:01:00.0", "nvml_index": "1",
    }  # fmt: skip
    assert result["action"] == "rma"
    assert result["mark"] == ""
    assert result["versions"]["torch"] == "2.11.0"


def test_commands_that_measure_it_again_are_those_of_the_agent_on_the_host(run: Path) -> None:
    commands = {item["purpose"]: item["command"] for item in package(run)["again"]}
    assert commands["the failed benchmarks, on this GPU alone"] == (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=GPU-h2-1 /opt/rackproof/bin/python -m torch.distributed.run "
        "--standalone --nproc-per-node=1 -m agent.benchmarks --only memory"
    )
    assert "sudo /opt/rackproof/bin/rackproof doctor --gpus 2" in commands.values()
    play = "ansible-playbook -i INVENTORY playbooks/acceptance.yml -e rackproof_profile=smoke"
    assert commands["with all hosts, judged as in this run"] == play
    assert [text for what, text in commands.items() if what.startswith("this host alone")] == [f"{play} --limit h2"]


def test_findings_have_value_limit_and_how_the_siblings_did(run: Path) -> None:
    found = {item["criterion"]: item for item in package(run)["findings"]}
    floor = next(item for name, item in found.items() if item["name"] == "memory.bandwidth")
    assert floor["value"] == 1.0e12 < floor["limit"]
    assert floor["siblings"] == [{"scope": "gpu=0", "serial": "h2-0", "value": 4.27e12}]
    assert floor["source"]
    assert {item["scope"] for item in found.values()} == {"gpu=1"}


def test_counters_before_and_after_errors_and_logs_are_the_parts_own(run: Path) -> None:
    result = package(run)
    replays = {"name": "gpu.pcie.replays", "scope": "gpu=1", "unit": "1", "before": 0, "after": 7, "rose_by": 7}
    assert replays in result["counters"]
    assert {item["scope"].split(",")[0] for item in result["counters"]} == {"gpu=1"}
    assert result["errors"] == [{"name": "xid.count", "scope": "gpu=1,xid=63", "count": 2}]
    assert [item["what"] for item in result["logs"]] == ["stage benchmark, rank 1 (exit 0, at gemm)"]
    assert "CUDA error" in result["logs"][0]["text"]
    assert "\x1b" not in json.dumps(result)


def test_observations_are_the_parts_own(run: Path) -> None:
    package(run)
    rows = list(csv.DictReader(io.StringIO((run / "rma/h2-1/observations.csv").read_text(), newline="")))
    assert {(row["host"], row["serial"], row["scope"].split(",")[0]) for row in rows} == {("h2", "h2-1", "gpu=1")}
    assert {row["name"] for row in rows if row["verdict"] == "fail"} == {"memory.bandwidth"}


def test_readme_has_it_for_people_and_nothing_of_a_host_leaves_its_fence(run: Path) -> None:
    package(run)
    text = (run / "rma/h2-1/README.md").read_text()
    assert text.startswith("# Failed part: `NVIDIA H200`, serial `h2-1`\n")
    for output in (
        "Return the part (RMA)",
        "`1000 GB/s`",
        "`gpu.pcie.replays GPU 1` | `0` | `7` | `7`",
        "xid=63",
        "step 42",
    ):
        assert output in text
    assert "<script>" not in text
    assert text.count("```") % 2 == 0


def test_unknown_fields_of_a_finding_are_reported(run: Path) -> None:
    record = slow_record(PLAN, "h2")
    lost = Metric(name="xid.last_seen", unit="s", absent={"host": "error: /dev/kmsg: Permission denied"})
    last = record.snapshots[-1]
    metrics = (*(metric for metric in last.metrics if not metric.name.startswith("xid.")), lost)
    record = replace(record, snapshots=(*record.snapshots[:-1], replace(last, metrics=metrics)))
    documents.write(run / "hosts" / "h2.json", to_json(record))
    main(["report", str(run)])
    result = package(run)
    assert result["errors"] == []
    assert result["errors_not_read"] == "error: /dev/kmsg: Permission denied"
    assert "There may have been errors." in (run / "rma/h2-1/README.md").read_text()


def test_zip_holds_the_package_and_is_the_same_each_time(run: Path) -> None:
    package(run, "--zip")
    archive = run / "rma" / "h2-1.zip"
    first = archive.read_bytes()
    assert sorted(zipfile.ZipFile(archive).namelist()) == ["h2-1/README.md", "h2-1/observations.csv", "h2-1/part.json"]
    (run / "rma/h2-1/from-the-vendor.txt").write_text("RMA 4711")
    package(run, "--zip")
    assert archive.read_bytes() == first
    assert (run / "rma/h2-1/from-the-vendor.txt").exists(), "what was not made here stays"


def test_parts_are_chosen_by_serial_or_host(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["rma", str(run), "--serial", "h2-1", "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)
    assert (output["host"], output["place"], output["action"], output["path"]) == (
        "h2",
        "gpu=1",
        "rma",
        str(run / "rma/h2-1"),
    )
    assert main(["rma", str(run), "--serial", "h2-2"]) == 64
    assert "h2-2: no failure (did you mean h2-1?)" in capsys.readouterr().err
    assert main(["rma", str(run), "--host", "h1"]) == 64
    assert "h1: no failure" in capsys.readouterr().err
    assert main(["rma", str(run), "--host", "h2"]) == 0


def test_an_accepted_run_has_no_package_and_one_without_a_report_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "r1", PLAN)
    assert main(["rma", str(tmp_path / "r1")]) == 2
    assert f"rackproof report {tmp_path / 'r1'}" in capsys.readouterr().err
    main(["report", str(tmp_path / "r1")])
    assert main(["rma", str(tmp_path / "r1")]) == 0
    assert "no part needs to be returned: nothing failed\n" in capsys.readouterr().out
    assert not (tmp_path / "r1" / "rma").exists()


@pytest.mark.parametrize("what", ["rma", "rma/h2-1"])
def test_nothing_is_written_through_a_link(
    run: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / what).parent.mkdir(exist_ok=True)
    (run / what).symlink_to(outside)
    assert main(["rma", str(run)]) == 2
    assert "a link or not a directory" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_symlink_instead_of_a_file_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("as it was")
    (run / "rma" / "h2-1").mkdir(parents=True)
    (run / "rma" / "h2-1" / "README.md").symlink_to(tmp_path / "precious")
    package(run)
    assert (tmp_path / "precious").read_text() == "as it was"
    assert not (run / "rma" / "h2-1" / "README.md").is_symlink()


def document(serial: str, host: str = "h1", place: str = "gpu=0") -> dict[str, Any]:
    return {"part": {"serial": serial}, "slot": {"host": host, "place": place}}


HOSTILE = [
    "../../etc/cron.d/x",
    "/etc/passwd",
    "..",
    ".",
    "",
    " ",
    "a/b",
    "\x00",
    "con",
    "CON.txt",
    "-rf",
    "~",
    "ä" * 300,
    "$(id)",
    "\ud800",
]


@pytest.mark.parametrize("serial", HOSTILE)
def test_a_serial_names_one_file_within_the_run_directory(tmp_path: Path, serial: str) -> None:
    (name,) = names([document(serial)])
    path = write_package(tmp_path, name, {"part.json": "{}"}, zipped=True)
    assert path.resolve().parent == tmp_path / "rma"
    assert len(path.name) < 100
    assert {item.name for item in tmp_path.iterdir()} == {"rma"}


@settings(max_examples=50)
@given(st.lists(st.text(max_size=80), unique_by=str.casefold, min_size=2, max_size=6))
def test_two_serials_never_share_a_directory(serials: list[str]) -> None:
    result = names([document(serial, place=f"gpu={number}") for number, serial in enumerate(serials)])
    assert len({name.casefold() for name in result}) == len(serials)
    assert all(name and "/" not in name and name[0] not in ".-" for name in result)


def test_the_same_serial_twice_is_two_packages() -> None:
    result = names([document("1650", "h1", "gpu=0"), document("1650", "h2", "gpu=3"), document("1651")])
    assert result == ["1650-h1-gpu-0", "1650-h2-gpu-3", "1651"]


def test_a_plain_serial_is_its_own_name() -> None:
    assert [safe(text) for text in ("1650123000456", "GPU-1.b_c")] == ["1650123000456", "GPU-1.b_c"]


def test_a_package_is_no_directory_where_a_file_stands(tmp_path: Path) -> None:
    (tmp_path / "rma").write_text("a file")
    with pytest.raises(RunError, match="remove it"):
        write_package(tmp_path, "x", {}, zipped=False)


def test_located_parts_are_parts_and_gangs_are_not() -> None:
    def failed(scope: str, action: str = "rma") -> Verdict:
        return Verdict(host="h1", scope=scope, name="x", verdict="fail", criterion="c", reason="r", action=action)

    result = parts(
        [
            failed("gpu=1,link=3", "monitor"),
            failed("gpu=1"),
            failed("gang=r1"),
            failed("mc=0,dimm=2"),
            failed("host", "reboot"),
        ]
    )
    assert [(part.place, part.action, part.returned) for part in result] == [
        ("gpu=1", "rma", True),
        ("mc=0,dimm=2", "rma", True),
        ("host", "reboot", False),
    ]


def test_what_identifies_a_part_is_what_the_collectors_read() -> None:
    assert {name for known in IDENTITY.values() for name in known.values()} <= set(READINGS)


def test_a_rehearsal_says_so_first(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    documents.write(run / "report.json", {**report, "rehearsal": True})
    assert package(run)["mark"] == "REHEARSAL"
    text = (run / "rma/h2-1/README.md").read_text()
    assert text.startswith("# REHEARSAL: Failed part")
    assert "No GPU was tested" in text
