"""Test the RMA packages for vendors: each has the evidence on one failed part. No file is written outside the run directory."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.diagnosis.diagnose import diagnose
from fleet.rma import part_document as part_module
from fleet.rma import readme
from fleet.rma.files import package_names, safe_file_name, write_package
from fleet.rma.listing import Package, cause_rows, render_rows
from fleet.rma.parts import IDENTITY_READINGS, failed_parts
from rackproof.main import main
from schemas import documents
from schemas.errors import RunError
from schemas.plans import LOCAL_RUN, Plan
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Metric, Observation, Rank, Record, to_json
from schemas.reports import FAIL, Cause, CausePart, Verdict
from tests import builders
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke", rackproof_gang="none")
TAIL = "step 41\nstep 42 ```\n<script>alert(1)</script>\n\x1b[31mCUDA error"
XID = Metric(name="xid.count", unit="1", values={"pci=0000:01:00.0,xid=63": 2, "pci=0000:00:00.0,xid=13": 1})


def reduce_bandwidth(observation: Observation) -> Observation:
    return (
        replace(observation, value=1.0e12)
        if observation.name == "memory.bandwidth" and observation.scope == "gpu=1"
        else observation
    )


def with_logs(launch: Launch) -> Launch:
    ranks = tuple(
        Rank(rank=number, local_rank=number, phase="gemm", exit_code=0, log_tail=TAIL if number else "all is well")
        for number in range(2)
    )
    return replace(launch, ranks=ranks)


def slow_record(plan: Plan, host: str) -> Record:
    """Return a record in which GPU 1 has low memory bandwidth, PCIe replays and an XID."""
    (record,) = builders.records(plan, host)
    first, *_, last = record.snapshots
    replays = builders.snapshot(range(2), stage="benchmark", phase="after", gpu__pcie__replays={"gpu=0": 0, "gpu=1": 7})
    metrics = tuple(
        metric for metric in replays.metrics if metric.name != "xid.count" and not metric.name.startswith("gpu.part")
    )
    part = Metric(name="gpu.part_number", unit="1", values={"gpu=0": "692-A", "gpu=1": "692-B"})
    return replace(
        record,
        snapshots=(first, replace(last, metrics=(*metrics, XID, part))),
        observations=tuple(map(reduce_bandwidth, record.observations)),
        launches=tuple(map(with_logs, record.launches)),
    )


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with its report: GPU 1 of h2 fails."""
    directory = tmp_path_factory.mktemp("runs") / "r1"
    write_run(directory, PLAN)
    documents.write(directory / "hosts" / "h2.json", to_json(slow_record(PLAN, "h2")))
    assert main(["report", str(directory)]) == 1
    return directory


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported, tmp_path / "r1"))


def package(run: Path, *options: str) -> dict[str, Any]:
    """Run `rackproof rma`; return the content of `part.json` in the only package."""
    assert main(["rma", str(run), *options]) == 0
    (path,) = [path for path in (run / "rma").iterdir() if path.is_dir()]
    part_document: dict[str, Any] = documents.read(path / "part.json", "part")
    return part_document


def test_package_identifies_the_failed_part(run: Path) -> None:
    part_document = package(run)
    assert [path.name for path in (run / "rma").iterdir()] == ["h2-1"]
    assert (part_document["part"]["serial"], part_document["part"]["uuid"], part_document["part"]["model"]) == (
        "h2-1",
        "GPU-h2-1",
        "NVIDIA H200",
    )
    assert part_document["part"]["part_number"] == "692-B"
    assert part_document["part"]["not_read"]["vbios"] == "unsupported: not on this host"
    assert part_document["slot"] == {
        "host": "h2", "rack": "r1", "address": "10.0.0.2", "place": "gpu=1", "pci_address": "0000:01:00.0", "nvml_index": "1",
    }  # fmt: skip
    assert part_document["action"] == "rma"
    assert part_document["mark"] == ""
    assert part_document["versions"]["torch"] == "2.11.0"


def test_commands_that_repeat_the_failed_benchmarks_use_the_agent_of_the_host(run: Path) -> None:
    commands = {item["purpose"]: item["command"] for item in package(run)["again"]}
    assert commands["the failed benchmarks, on this GPU alone"] == (
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 /opt/rackproof/bin/python -m torch.distributed.run "
        "--standalone --nproc-per-node=1 -m agent.benchmarks --only memory"
    )
    assert "sudo /opt/rackproof/bin/rackproof doctor --gpus 2" in commands.values()
    play = "ansible-playbook -i INVENTORY playbooks/acceptance.yml -e rackproof_profile=smoke"
    assert commands["acceptance test of all hosts, with the same profile"] == play
    assert [text for purpose, text in commands.items() if purpose.startswith("acceptance test of this host alone")] == [
        f"{play} --limit h2"
    ]


def test_part_of_a_machine_that_was_tested_without_ansible_is_tested_again_without_ansible(run: Path) -> None:
    documents.write(run / "plan.json", to_json(replace(PLAN, begun_by=LOCAL_RUN)))
    commands = [item["command"] for item in package(run)["again"]]
    assert [text for text in commands if "playbook" in text] == []
    assert commands[0].startswith("rackproof run --profile smoke --gpus 2")


UUID = "GPU-41b7e0c5-2d93-4f68-ba10-5c8e96f3d702"


@pytest.mark.parametrize(
    ("uuid", "selected"),
    [
        (UUID, UUID),
        ("", "1"),
        ("GPU-1", "1"),
        ("GPU-\x1b'; reboot '", "1"),
        ("GPU-\x1b[0m'; reboot #", "1"),
        (f"{UUID}\n", "1"),
        (f"{UUID} $(reboot)", "1"),
        (f"{UUID}`reboot`", "1"),
    ],
)
def test_command_selects_the_gpu_by_uuid_or_else_by_index(run: Path, uuid: str, selected: str) -> None:
    """Any other text from the host must not be in a command that the operator copies to a shell."""
    record = slow_record(PLAN, "h2")
    gpus = tuple(replace(gpu, uuid=uuid) if gpu.index == 1 else gpu for gpu in record.gpus)
    documents.write(run / "hosts" / "h2.json", to_json(replace(record, gpus=gpus)))
    assert main(["report", str(run)]) == 1
    again = package(run)["again"]
    words = {item["purpose"]: shlex.split(item["command"]) for item in again}
    assert f"CUDA_VISIBLE_DEVICES={selected}" in words["the failed benchmarks, on this GPU alone"]
    assert words["state of the GPU"] == ["nvidia-smi", "-q", "-i", selected]
    assert "reboot" not in str(again)


def test_finding_has_its_value_its_limit_and_the_values_of_other_gpus(run: Path) -> None:
    findings = {item["criterion"]: item for item in package(run)["findings"]}
    floor = next(item for item in findings.values() if item["name"] == "memory.bandwidth")
    assert floor["value"] == 1.0e12 < floor["limit"]
    assert floor["siblings"] == [{"scope": "gpu=0", "serial": "h2-0", "value": 4.27e12}]
    assert floor["source"]
    assert {item["scope"] for item in findings.values()} == {"gpu=1"}


def test_package_has_counters_errors_and_logs_of_only_this_part(run: Path) -> None:
    part_document = package(run)
    replays = {"name": "gpu.pcie.replays", "scope": "gpu=1", "unit": "1", "before": 0, "after": 7, "rose_by": 7}
    assert replays in part_document["counters"]
    assert {item["scope"].split(",")[0] for item in part_document["counters"]} == {"gpu=1"}
    assert part_document["errors"] == [{"name": "xid.count", "scope": "gpu=1,xid=63", "count": 2}]
    assert [item["what"] for item in part_document["logs"]] == ["stage benchmark, rank 1 (exit code 0, at gemm)"]
    assert "CUDA error" in part_document["logs"][0]["text"]
    assert "\x1b" not in json.dumps(part_document)


def test_package_has_the_observations_of_only_this_part(run: Path) -> None:
    package(run)
    rows = list(csv.DictReader(io.StringIO((run / "rma/h2-1/observations.csv").read_text(), newline="")))
    assert {(row["host"], row["serial"], row["scope"].split(",")[0]) for row in rows} == {("h2", "h2-1", "gpu=1")}
    assert {row["name"] for row in rows if row["verdict"] == "fail"} == {"memory.bandwidth"}


def test_readme_has_the_evidence_and_escapes_text_from_hosts(run: Path) -> None:
    package(run)
    text = (run / "rma/h2-1/README.md").read_text()
    assert text.startswith("# Failed part: `NVIDIA H200`, serial `h2-1`\n")
    for expected in (
        "Return the part (RMA)",
        "`1000 GB/s`",
        "`gpu.pcie.replays GPU 1` | `0` | `7` | `7`",
        "xid=63",
        "step 42",
    ):
        assert expected in text
    assert "<script>" not in text
    assert text.count("```") % 2 == 0


def test_unreadable_kernel_log_is_reported(run: Path) -> None:
    record = slow_record(PLAN, "h2")
    unread = Metric(name="xid.last_seen", unit="s", absent={"host": "error: /dev/kmsg: Permission denied"})
    last = record.snapshots[-1]
    metrics = (*(metric for metric in last.metrics if not metric.name.startswith("xid.")), unread)
    record = replace(record, snapshots=(*record.snapshots[:-1], replace(last, metrics=metrics)))
    documents.write(run / "hosts" / "h2.json", to_json(record))
    main(["report", str(run)])
    part_document = package(run)
    assert part_document["errors"] == []
    assert part_document["errors_not_read"] == "error: /dev/kmsg: Permission denied"
    assert "There may have been errors." in (run / "rma/h2-1/README.md").read_text()


def test_zip_contains_the_package_and_is_reproducible(run: Path) -> None:
    package(run, "--zip")
    archive = run / "rma" / "h2-1.zip"
    first = archive.read_bytes()
    assert sorted(zipfile.ZipFile(archive).namelist()) == ["h2-1/README.md", "h2-1/observations.csv", "h2-1/part.json"]
    (run / "rma/h2-1/from-the-vendor.txt").write_text("RMA 4711")
    package(run, "--zip")
    assert archive.read_bytes() == first
    assert (run / "rma/h2-1/from-the-vendor.txt").exists(), "files that Rackproof did not write must be kept"


def test_parts_are_selected_by_serial_or_host(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "h2-2: no failure in this run (did you mean h2-1?)" in capsys.readouterr().err
    assert main(["rma", str(run), "--host", "h1"]) == 64
    assert "h1: no failure" in capsys.readouterr().err
    assert main(["rma", str(run), "--host", "h2"]) == 0


def test_part_without_a_failure_is_returned_with_the_reason_of_the_operator(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["rma", str(run), "--serial", "h1-0"]) == 64
    assert "--reason TEXT" in capsys.readouterr().err
    part_document = package(run, "--host", "h1", "--serial", "h1-0", "--reason", "RackproofFatalXid: XID 79\x1b[31m")
    assert (part_document["part"]["uuid"], part_document["slot"]["pci_address"]) == ("GPU-h1-0", "0000:00:00.0")
    assert (part_document["action"], part_document["findings"]) == ("rma", [])
    (cause,) = part_document["causes"]
    assert cause["title"] == "GPU 0 of h1 is returned for a reason that the run does not show"
    assert cause["why"].startswith("RackproofFatalXid: XID 79")
    assert "\x1b" not in cause["why"]
    readme = (run / "rma/h1-0/README.md").read_text()
    assert readme.startswith("# Returned part: `NVIDIA H200`, serial `h1-0`\n")
    assert "This part failed no check in acceptance run" in readme
    assert "`RackproofFatalXid: XID 79" in readme


def test_reason_is_added_to_the_failures_of_the_run(run: Path) -> None:
    causes = package(run)["causes"]
    assert package(run, "--serial", "h2-1", "--reason", "burn marks")["causes"][1:] == causes


def test_reason_needs_text_and_the_serial_of_a_part_of_the_chosen_host(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (
        ["--reason", "smoke"],
        ["--serial", "h1-0", "--reason", " "],
        ["--serial", "h1-0", "--host", "h2", "--reason", "smoke"],
    )
    for options in wrong:
        assert main(["rma", str(run), *options]) == 64
        assert "h1-0: no part of h2 has this serial" in capsys.readouterr().err or "--host" not in options
    assert not (run / "rma").exists()


def test_adapter_is_selected_by_its_node_guid(run: Path) -> None:
    record = slow_record(PLAN, "h2")
    guid = Metric(name="infiniband.hca.node_guid", unit="1", values={"hca=mlx5_0": "b8ce:f603:0012:0034"})
    last = record.snapshots[-1]
    record = replace(record, snapshots=(*record.snapshots[:-1], replace(last, metrics=(*last.metrics, guid))))
    documents.write(run / "hosts" / "h2.json", to_json(record))
    main(["report", str(run)])
    part_document = package(run, "--serial", "b8ce:f603:0012:0034", "--reason", "RackproofInfinibandFlapping")
    assert (part_document["part"]["kind"], part_document["slot"]["place"]) == ("hca", "hca=mlx5_0")


def test_package_of_an_adapter_names_the_module_at_its_failed_port(run: Path) -> None:
    record = slow_record(PLAN, "h2")
    port, other = "hca=mlx5_0,port=1", "hca=mlx5_0,port=2"
    modules = {"vendor": "ACME", "part_number": "AO-400", "serial": "S1", "firmware_version": "46.1"}
    metrics = [
        Metric(name=f"optics.module.{name}", unit="1", values={port: value, other: f"other {value}"})
        for name, value in modules.items()
    ]
    metrics.append(Metric(name="optics.rx_los", unit="1", values={f"{port},lane=1": True, f"{other},lane=1": False}))
    snapshots = tuple(replace(taken, metrics=(*taken.metrics, *metrics)) for taken in record.snapshots)
    documents.write(run / "hosts" / "h2.json", to_json(replace(record, snapshots=snapshots)))
    main(["report", str(run)])
    main(["rma", str(run)])
    part = next(
        document["part"]
        for path in (run / "rma").glob("*/part.json")
        if (document := json.loads(path.read_text()))["part"]["kind"] == "hca"
    )
    named = {"module_vendor": "ACME", "module_part_number": "AO-400", "module_serial": "S1", "module_firmware": "46.1"}
    assert {key: part[key] for key in named} == named


def test_accepted_run_has_no_package_and_unreported_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "r1", PLAN)
    assert main(["rma", str(tmp_path / "r1")]) == 2
    assert f"rackproof report {tmp_path / 'r1'}" in capsys.readouterr().err
    main(["report", str(tmp_path / "r1")])
    assert main(["rma", str(tmp_path / "r1")]) == 0
    assert "No part of a host needs to be returned, inspected or reseated." in capsys.readouterr().out
    assert not (tmp_path / "r1" / "rma").exists()


@pytest.mark.parametrize("link", ["rma", "rma/h2-1"])
def test_symbolic_link_in_place_of_a_directory_is_not_followed(
    run: Path, tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(outside)
    assert main(["rma", str(run)]) == 2
    assert "a link or not a directory" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_symlink_instead_of_a_file_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("unchanged")
    (run / "rma" / "h2-1").mkdir(parents=True)
    (run / "rma" / "h2-1" / "README.md").symlink_to(tmp_path / "precious")
    package(run)
    assert (tmp_path / "precious").read_text() == "unchanged"
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
def test_hostile_serial_gives_one_directory_within_the_run_directory(tmp_path: Path, serial: str) -> None:
    (name,) = package_names([document(serial)])
    path = write_package(tmp_path, name, {"part.json": "{}"}, zipped=True)
    assert path.resolve().parent == tmp_path / "rma"
    assert len(path.name) < 100
    assert {item.name for item in tmp_path.iterdir()} == {"rma"}


@settings(max_examples=50)
@given(st.lists(st.text(max_size=80), unique_by=str.casefold, min_size=2, max_size=6))
def test_different_serials_have_different_directories(serials: list[str]) -> None:
    directories = package_names([document(serial, place=f"gpu={number}") for number, serial in enumerate(serials)])
    assert len({name.casefold() for name in directories}) == len(serials)
    assert all(name and "/" not in name and name[0] not in ".-" for name in directories)


def test_two_parts_with_the_same_serial_have_two_packages() -> None:
    directories = package_names([document("1650", "h1", "gpu=0"), document("1650", "h2", "gpu=3"), document("1651")])
    assert directories == ["1650-h1-gpu-0", "1650-h2-gpu-3", "1651"]


def test_plain_serial_is_unchanged_as_a_file_name() -> None:
    assert [safe_file_name(text) for text in ("1650123000456", "GPU-1.b_c")] == ["1650123000456", "GPU-1.b_c"]


def test_file_named_rma_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rma").write_text("a file")
    with pytest.raises(RunError, match="remove it"):
        write_package(tmp_path, "x", {}, zipped=False)


def failed(scope: str, action: str = "rma", host: str = "h1") -> Verdict:
    return Verdict(host=host, scope=scope, name=f"x.{scope}", verdict="fail", criterion="c", reason="r", action=action)


def test_failed_parts_do_not_include_gangs_and_a_rail_switch_or_file_server_needs_no_work_on_a_host() -> None:
    verdicts = [
        failed("gpu=1,link=3", "monitor"),
        failed("gpu=1"),
        failed("gang=r1"),
        failed("mc=0,dimm=2"),
        failed("host", "reboot"),
        failed("rail=1", "inspect_hardware"),
        failed("switch=s1", "inspect_hardware"),
        replace(failed("directory=data", "inspect_hardware"), name="shared_storage.file_bandwidth"),
        replace(failed("directory=home", "inspect_hardware"), name="shared_storage.bandwidth"),
    ]
    located = failed_parts(diagnose(verdicts, {}), verdicts)
    assert sorted((part.scope, part.action, part.needs_part_work, len(part.findings)) for part in located) == [
        ("directory=data", "inspect_hardware", False, 1),
        ("directory=home", "inspect_hardware", True, 1),
        ("gpu=1", "rma", True, 2),
        ("host", "reboot", False, 1),
        ("mc=0,dimm=2", "rma", True, 1),
        ("rail=1", "inspect_hardware", False, 1),
        ("switch=s1", "inspect_hardware", False, 1),
    ]


def test_part_with_two_causes_and_one_action_is_listed_once() -> None:
    parts = (CausePart(host="h1", scope="gpu=3", serial="S3"),)
    cause = Cause(
        problem="slow-gpu", title="slow", why="", verdict=FAIL, host="h1", hosts=("h1",), part="gpu=3", parts=parts,
        confidence="likely", verdicts=(0,), serial="S3", action="rma",
    )  # fmt: skip
    package = Package(path=Path("rma/S3"), model="NVIDIA H200", slot="0000:0c:00.0")
    causes = [cause, replace(cause, title="hot"), replace(cause, title="loose", action="reseat")]
    rows = cause_rows(causes, {("h1", "gpu=3"): package}, any_action=False)
    assert len(rows) == 3
    listed = [line for line in render_rows(rows, "", None).splitlines() if line.endswith("rma/S3")]
    assert [line.split("  ")[0] for line in listed] == ["Return the part (RMA)", "Reseat the part"]


def test_checks_that_fail_because_of_a_lost_gpu_do_not_change_the_action_for_the_gpu() -> None:
    """Some of these checks have the action `inspect_hardware` or `rma`. The action for the lost GPU remains `reboot`."""
    verdicts = [failed("gpu=1,xid=79", "reboot"), failed("gpu=1", "inspect_hardware"), failed("gpu=1,peer=2", "rma")]
    verdicts[0] = replace(verdicts[0], name="xid.count")
    (part,) = failed_parts(diagnose(verdicts, {}), verdicts)
    assert (part.action, part.needs_part_work, len(part.findings)) == ("reboot", False, 3)


def test_identity_readings_of_parts_are_in_the_table_of_readings() -> None:
    assert {name for readings in IDENTITY_READINGS.values() for name in readings.values()} <= set(READINGS)


def test_rehearsal_is_marked_in_the_title(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    documents.write(run / "report.json", {**report, "rehearsal": True})
    assert package(run)["mark"] == "REHEARSAL"
    text = (run / "rma/h2-1/README.md").read_text()
    assert text.startswith("# REHEARSAL: Failed part")
    assert "No GPU was tested" in text


def test_increase_of_a_reset_counter_is_its_value_since_the_reset() -> None:
    counter = "gpu.pcie.replays"

    def reading(phase: str, value: int) -> Observation:
        params = {"phase": phase}
        return Observation(
            name=counter, scope="gpu=1", stage="benchmark", unit="1", status=MEASURED, value=value, params=params
        )

    reset = [reading("before", 40), reading("after", 3)]
    (entry,) = part_module._counters(reset, "gpu=1")
    assert (entry["before"], entry["after"], entry["rose_by"]) == (40, 3, 3)
    to_zero = {**entry, "after": 0, "rose_by": 0.0}  # the counter was at 40 before its reset, so it did not stay at 0
    assert "stayed at 0" not in readme._counters([to_zero])
    assert "`gpu.pcie.replays GPU 1` | `40` | `0` | `0`" in readme._counters([to_zero])
