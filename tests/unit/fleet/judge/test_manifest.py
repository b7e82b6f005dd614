"""Test the manifest (the file that lists the ordered parts): formats, errors, verdicts, report, and the command `plan`.

`test_manifest_edges.py` tests the boundary conditions of the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory.manifest_file import read_manifest
from fleet.judge.criteria import Pack
from fleet.judge.judge import Evidence, judge
from fleet.planning.plan import make_plan, read_profile
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from fleet.report.tables.summary_text import render_summary
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Part, Plan, plan_from_json
from schemas.records import Metric, Snapshot, to_json
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.accepted import rackproof
from tests.unit.fleet.planning.test_plan import listing

HOSTS = ("r12-h01", "r12-h02")
CSV = "host,kind,slot,serial\nr12-h01,gpu,0000:1b:00.0,1650123000456\nr12-h02,nic,mlx5_0,0c42:a103:0065:8b2e\n"


def write_manifest(tmp_path: Path, content: str | bytes, name: str = "order.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_parts(tmp_path: Path, content: str | bytes, name: str = "order.csv") -> list[tuple[str, str, str, str]]:
    listed_parts = read_manifest(str(write_manifest(tmp_path, content, name)), HOSTS)
    return [(part.host, part.kind, part.slot, part.serial) for part in listed_parts]


PARTS = [("r12-h01", "gpu", "0000:1b:00.0", "1650123000456"), ("r12-h02", "nic", "mlx5_0", "0c42:a103:0065:8b2e")]


@pytest.mark.parametrize(
    "content",
    [
        CSV,
        b"\xef\xbb\xbf" + CSV.encode(),
        CSV.replace("\n", "\r\n"),
        CSV.replace(",", ";"),
        CSV.replace(",", "\t"),
        CSV.replace(",", " , ").replace("host", "Host"),
        CSV.replace("gpu", "GPU").replace("\n", "\n\n,,,\n"),
        CSV.replace("\n", ",,\n"),
        CSV.replace("0000:1b:00.0", "00000000:1B:00.0"),
        CSV.replace("0000:1b:00.0", '"1B:00.0"'),
    ],
    ids=[
        "plain",
        "byte order mark",
        "CRLF",
        "semicolons",
        "tabs",
        "spaces",
        "blank lines",
        "trailing commas",
        "PCI address as NVML writes it",
        "short PCI address",
    ],
)
def test_csv_dialects_of_spreadsheets_are_read(tmp_path: Path, content: str | bytes) -> None:
    assert read_parts(tmp_path, content) == PARTS


def test_yaml_values_are_kept_as_text(tmp_path: Path) -> None:
    text = (
        "- {host: r12-h01, kind: gpu, serial: 01650123000456, slot: 3}\n"
        "- host: r12-h02\n  kind: nic\n  serial: 12:34:56:10:20:30\n"  # YAML 1.1 reads this serial as a base-60 number
        "- {host: r12-h02, kind: nic, serial: 0x0c42a10300658b2e}\n"
    )
    assert read_parts(tmp_path, text, "order.yml") == [
        ("r12-h01", "gpu", "3", "01650123000456"),
        ("r12-h02", "nic", "", "12:34:56:10:20:30"),
        ("r12-h02", "nic", "", "0x0c42a10300658b2e"),
    ]


def test_part_names_the_line_of_the_file_that_lists_it(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, CSV.replace("\nr12-h02", "\n\nr12-h02"))
    assert [part.origin for part in read_manifest(str(path), HOSTS)] == ["order.csv line 2", "order.csv line 4"]


def csv_with(text: str) -> str:
    """Return a CSV manifest that has a valid line 2, and this text from line 3 on."""
    return f"host,kind,slot,serial\nr12-h01,gpu,,1650123000456\n{text}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (csv_with("r12-h03,gpu,,1"), "order.csv line 3: host r12-h03 is not in the inventory (did you mean r12-h0"),
        (csv_with("r12-h02,gppu,,1"), "line 3: kind gppu (did you mean gpu?): choose gpu, nic, module or link"),
        (
            csv_with("r12-h02,gpu,,1.65E+12"),
            "line 3: serial 1.65E+12 was rounded by a spreadsheet, and its digits are lost",
        ),
        (csv_with('r12-h02,gpu,,"1,65E+12"'), "serial 1,65E+12 was rounded by a spreadsheet"),
        (csv_with("r12-h02,nic,,1.2E+11"), "serial 1.2E+11 was rounded by a spreadsheet"),
        (csv_with("r12-h02,gpu,,16 50"), "'16 50' is not a valid GPU serial"),
        (csv_with("r12-h02,gpu,,0000"), "'0000' is not a valid GPU serial"),
        (csv_with("r12-h02,nic,,0c42:a103"), "'0c42:a103' is not a valid NIC serial: give its node GUID (16"),
        (
            csv_with("r12-h02,gpu,,1650123000456"),
            "line 3: serial 1650123000456 is listed twice (order.csv line 2, for r12-h01)",
        ),
        (csv_with("r12-h02,gpu,,01650123000456"), "line 3: serial 01650123000456 is listed twice"),
        (
            csv_with("r12-h02,gpu,7,2\nr12-h02,gpu,07,3"),
            "line 4: slot 7 of r12-h02 already holds serial 2 (order.csv line 3)",
        ),
        (
            csv_with("r12-h02,gpu,12:00:00,2"),
            "line 3: slot '12:00:00': give a PCI address (0000:1b:00.0), the index of the GPU",
        ),
        (csv_with("r12-h02,gpu,,"), "line 3: serial is empty"),
        (csv_with("r12-h02,gpu,,1,spare"), "line 3: 'spare' is in a column without a name"),
        (csv_with('r12-h02,gpu,,"1'), "not CSV"),
        ("host,kind,solt,serial\n", "order.csv line 1: unknown column solt (did you mean slot?)"),
        ("host,kind,slot\nr12-h01,gpu,1\n", "line 1: no column serial"),
        ("r12-h01,gpu,0,1650123000456\n", "line 1: unknown column r12-h01"),
        ("host,kind,serial,kind\n", "duplicate column kind"),
        ("host,kind,slot,serial\n", "lists no part"),
        ("", "lists no part"),
        (CSV.encode("utf-16"), "not UTF-8 at offset 0: save it as `CSV UTF-8`"),
        (CSV.encode("utf-16-le"), "contains a NUL character: save it as `CSV UTF-8`"),
    ],
)
def test_mistake_in_a_csv_manifest_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_parts(tmp_path, content)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host: r12-h01", "not a list of parts"),
        ("- r12-h01", "line 1: not a part"),
        ("- {host: r12-h01, kind: gpu, serial: 1, serial: 2}", "duplicate key 'serial'"),
        ("- {host: r12-h01, kind: gpu, serail: 1}", "unknown column serail (did you mean serial?)"),
        ("- {host: r12-h01, kind: gpu, serial: [1]}", "line 1: expected one value for each"),
        ("- {host: r12-h01, kind: gpu, serial: 1.65e+12}", "was rounded by a spreadsheet"),
        ("- [", "not YAML"),
    ],
)
def test_mistake_in_a_yaml_manifest_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_parts(tmp_path, text, "order.yml")
    assert message in str(caught.value)


def test_missing_file_is_reported_with_directory_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError,
        match=rf"rackproof_manifest none\.csv: No such file or directory in {tmp_path}: give an absolute path",
    ):
        read_manifest("none.csv", HOSTS)


def test_impossible_path_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="embedded null byte"):
        read_manifest("order\0.csv", HOSTS)


def gpu_line(host: str, index: int, **over: Any) -> Part:
    """Return a manifest line that lists the GPU which `builders` creates in this host with this index.

    The index is also the number of the line in the file, so lines of several hosts have the same number.
    """
    return Part(
        **({"host": host, "kind": "gpu", "serial": f"{host}-{index}", "origin": f"order.csv line {index}"} | over)
    )


def gpu_lines(*hosts: str) -> list[Part]:
    return [gpu_line(host, index) for host in hosts for index in range(2)]


def ordered_plan(parts: list[Part], *hosts: str, **over: Any) -> Plan:
    plan = builders.plan(*(hosts or ("h1", "h2")), profile=over.pop("profile", "smoke"), rackproof_gang="none")
    return replace(plan, manifest=tuple(parts), **over)


NO_CRITERIA = Pack(name="h200-sxm", gpu_names=("NVIDIA H200",), criteria=())


def manifest_verdicts(plan: Plan, evidence: Mapping[str, Evidence] | None = None) -> list[Verdict]:
    verdicts = judge(plan, builders.evidence(plan) if evidence is None else evidence, (NO_CRITERIA,))
    return [item for item in verdicts if item.criterion.startswith("manifest")]


def not_passing(verdicts: list[Verdict]) -> list[tuple[str, str, str, str]]:
    return [(item.host, item.scope, item.verdict, item.reason) for item in verdicts if item.verdict != PASS]


def summary_line(plan: Plan, evidence: Mapping[str, Evidence] | None = None) -> str:
    report = merge(plan, builders.evidence(plan) if evidence is None else evidence, (NO_CRITERIA,))
    return next((line for line in report.acceptance.summary if line.startswith("Manifest")), "")


def test_fleet_as_ordered_passes() -> None:
    plan = ordered_plan(gpu_lines("h1", "h2"))
    verdicts = manifest_verdicts(plan)
    assert [(item.host, item.scope, item.serial, item.verdict) for item in verdicts] == [
        ("h1", "gpu=0", "h1-0", PASS),
        ("h1", "gpu=1", "h1-1", PASS),
        ("h2", "gpu=0", "h2-0", PASS),
        ("h2", "gpu=1", "h2-1", PASS),
    ]
    assert {item.source for item in verdicts} == {"manifest: order.csv"}
    assert summary_line(plan) == "Manifest: 4 of 4 parts as ordered"


@pytest.mark.parametrize("slot", ["1", "0000:01:00.0", ""])
def test_serial_is_compared_regardless_of_notation_and_of_how_the_slot_is_named(slot: str) -> None:
    plan = ordered_plan([gpu_line("h1", 0), gpu_line("h1", 1, serial="00H1-1", slot=slot), *gpu_lines("h2")])
    assert not_passing(manifest_verdicts(plan)) == []


def test_part_in_another_slot_of_its_host_fails_once() -> None:
    plan = ordered_plan([gpu_line("h1", 0, slot="0000:00:00.0"), gpu_line("h1", 1, slot="0"), *gpu_lines("h2")])
    assert not_passing(manifest_verdicts(plan)) == [
        ("h1", "gpu=1", FAIL, "ordered for h1 slot 0, found in slot 0000:01:00.0 (also named 1)")
    ]
    assert summary_line(plan) == "Manifest: 3 of 4 parts as ordered"


def test_parts_swapped_between_hosts_fail_on_both() -> None:
    swapped = [
        gpu_line("h1", 0),
        gpu_line("h1", 1, serial="h2-1", slot="1"),
        gpu_line("h2", 0),
        gpu_line("h2", 1, serial="h1-1"),
    ]
    plan = ordered_plan(swapped)
    verdicts = manifest_verdicts(plan)
    assert {item.source for item in verdicts if item.verdict == FAIL} == {"manifest: order.csv line 1"}
    first, second = "ordered for h1 slot 1, found in h2 gpu=1", "ordered for h2, found in h1 gpu=1"
    assert not_passing(verdicts) == [
        ("h1", "host", FAIL, first),
        ("h2", "gpu=1", FAIL, first),
        ("h2", "host", FAIL, second),
        ("h1", "gpu=1", FAIL, second),
    ]
    assert {item.action for item in verdicts if item.verdict == FAIL} == {"inspect_hardware"}
    assert summary_line(plan) == "Manifest: 2 of 4 parts as ordered"


def test_missing_part_and_its_replacement_both_fail() -> None:
    plan = ordered_plan([gpu_line("h1", 0), gpu_line("h1", 1, serial="165"), *gpu_lines("h2")])
    assert not_passing(manifest_verdicts(plan)) == [
        ("h1", "host", FAIL, "ordered for h1, found on no host"),
        ("h1", "gpu=1", FAIL, "found, but no line of the manifest names it"),
    ]
    assert summary_line(plan) == "Manifest: 3 of 4 parts as ordered; 1 part that was not ordered"


def test_host_that_was_not_measured_is_inconclusive() -> None:
    plan = ordered_plan(gpu_lines("h1", "h2"))
    verdicts = manifest_verdicts(plan, {"h1": builders.evidence(plan)["h1"]})
    assert set(not_passing(verdicts)) == {("h2", "host", INCONCLUSIVE, "ordered for h2: the host left no record")}
    assert summary_line(plan, {"h1": builders.evidence(plan)["h1"]}) == "Manifest: 2 of 4 parts as ordered"


def test_ordered_gpu_is_inconclusive_and_not_missing_if_a_gpu_of_the_host_reports_no_serial() -> None:
    plan = ordered_plan(gpu_lines("h1", "h2"))
    evidence = builders.evidence(plan)
    first = evidence["h1"].records[0]
    without_serial = replace(first, gpus=(first.gpus[0], replace(first.gpus[1], serial="")))
    assert not_passing(manifest_verdicts(plan, evidence | {"h1": Evidence(records=(without_serial,))})) == [
        ("h1", "host", INCONCLUSIVE, "ordered for h1: 1 GPU of the host does not report a serial")
    ]
    lost = replace(first, gpus=first.gpus[:1])  # the driver and the PCI bus count two GPUs
    assert [
        verdict
        for _, _, verdict, _ in not_passing(manifest_verdicts(plan, evidence | {"h1": Evidence(records=(lost,))}))
    ] == [INCONCLUSIVE]
    # Without the counts, no reading shows that the host has a second GPU.
    uncounted = tuple(
        replace(item, metrics=tuple(m for m in item.metrics if m.name not in ("gpu.count", "gpu.pci_count")))
        for item in first.snapshots
    )
    without_counts = replace(first, gpus=first.gpus[:1], snapshots=uncounted)
    assert not_passing(manifest_verdicts(plan, evidence | {"h1": Evidence(records=(without_counts,))})) == [
        ("h1", "host", FAIL, "ordered for h1, found on no host")
    ]


GUID, OTHER = "0c42:a103:0065:8b2e", "0c42:a103:0065:8b2f"


def nic_line(serial: str, **over: Any) -> Part:
    return Part(**({"host": "h1", "kind": "nic", "serial": serial, "origin": "order.csv line 9"} | over))


def with_nics(plan: Plan, **readings: Mapping[str, Any]) -> dict[str, Evidence]:
    """Return evidence in which a snapshot of h1 has these readings of NICs.

    Args:
        plan: the plan.
        readings: name (`__` for `.`) -> scope -> value, or (status, reason) if there is no value.
    """
    metrics = tuple(
        Metric(
            name=name.replace("__", "."),
            unit="1",
            values={scope: value for scope, value in by_scope.items() if not isinstance(value, tuple)},
            absent={scope: ": ".join(value) for scope, value in by_scope.items() if isinstance(value, tuple)},
        )
        for name, by_scope in readings.items()
    )
    taken = Snapshot(stage="benchmark", phase="after", at=builders.WHEN, duration_s=0.1, metrics=metrics)
    evidence = builders.evidence(plan)
    return evidence | {"h1": builders.with_snapshot(evidence["h1"], taken)}


def node_guids(**values: Any) -> dict[str, Any]:
    return {"infiniband__hca__node_guid": {f"hca={name}": value for name, value in values.items()}}


@pytest.mark.parametrize("serial", [GUID, "0x0C42A10300658B2E", "0c-42-a1-03-00-65-8b-2e", "0c:42:a1:65:8b:2e"])
@pytest.mark.parametrize("slot", ["", "mlx5_0", "0000:5e:00.0"])
def test_nic_is_identified_by_guid_or_mac_address(serial: str, slot: str) -> None:
    plan = ordered_plan([nic_line(serial, slot=slot)])
    evidence = with_nics(plan, **node_guids(mlx5_0=GUID), infiniband__hca__pci_address={"hca=mlx5_0": "0000:5e:00.0"})
    verdicts = manifest_verdicts(plan, evidence)
    assert [(item.scope, item.verdict) for item in verdicts] == [("hca=mlx5_0", PASS)]


def test_ethernet_port_is_identified_by_mac_address_and_a_port_that_was_not_ordered_is_ignored() -> None:
    plan = ordered_plan([nic_line("5c:25:73:00:00:01", slot="eth0")])
    evidence = with_nics(plan, network__address={"nic=eth0": "5C:25:73:00:00:01", "nic=eth1": "5c:25:73:00:00:02"})
    assert [(item.name, item.scope, item.verdict) for item in manifest_verdicts(plan, evidence)] == [
        ("network.address", "nic=eth0", PASS)
    ]


def test_misplaced_missing_and_unordered_nics_fail() -> None:
    pci_addresses = {"infiniband__hca__pci_address": {"hca=mlx5_0": "0000:5e:00.0"}}
    plan = ordered_plan([nic_line(GUID, slot="0000:1b:00.0")])
    assert not_passing(manifest_verdicts(plan, with_nics(plan, **node_guids(mlx5_0=GUID), **pci_addresses))) == [
        ("h1", "hca=mlx5_0", FAIL, "ordered for h1 slot 0000:1b:00.0, found in slot 0000:5e:00.0 (also named mlx5_0)")
    ]
    unknown = "ordered for h1 slot 0000:1b:00.0, found in that host; the PCI address of hca=mlx5_0 was not reported"
    assert not_passing(manifest_verdicts(plan, with_nics(plan, **node_guids(mlx5_0=GUID)))) == [
        ("h1", "hca=mlx5_0", INCONCLUSIVE, unknown)
    ]
    assert not_passing(
        manifest_verdicts(ordered_plan([nic_line(GUID)]), with_nics(plan, **node_guids(mlx5_0=OTHER)))
    ) == [
        ("h1", "host", FAIL, "ordered for h1, found on no host"),
        ("h1", "hca=mlx5_0", FAIL, "found, but no line of the manifest names it"),
    ]


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        ({}, "ordered for h1: the host did not report the GUID of any NIC"),
        (node_guids(mlx5_0=("error", "no such file")), "ordered for h1: hca=mlx5_0 does not report its GUID"),
        # A GUID of zeros is reported, but identifies no NIC.
        (node_guids(mlx5_0="0000:0000:0000:0000"), "ordered for h1, found on no host"),
    ],
)
def test_nic_is_reported_missing_only_if_every_nic_of_the_host_reports_its_guid(
    readings: dict[str, Any], reason: str
) -> None:
    plan = ordered_plan([nic_line(GUID)])
    verdict = FAIL if "found on no host" in reason else INCONCLUSIVE
    assert not_passing(manifest_verdicts(plan, with_nics(plan, **readings))) == [("h1", "host", verdict, reason)]


def test_manifest_of_gpus_does_not_judge_nics() -> None:
    plan = ordered_plan(gpu_lines("h1", "h2"))
    assert not_passing(manifest_verdicts(plan, with_nics(plan, **node_guids(mlx5_0=GUID)))) == []


def test_parts_are_not_judged_without_a_manifest_or_in_a_rehearsal() -> None:
    assert manifest_verdicts(ordered_plan([])) == []
    assert summary_line(ordered_plan([])) == ""
    plan = builders.plan(profile="rehearsal")
    plan = replace(plan, manifest=(gpu_line("h1", 0),))
    assert manifest_verdicts(plan, {}) == []
    assert summary_line(plan, {}) == ""


def test_report_formats_show_the_manifest_summary() -> None:
    plan = ordered_plan(gpu_lines("h1", "h2"))
    report = merge(plan, builders.evidence(plan), (NO_CRITERIA,))
    assert "- Manifest: 4 of 4 parts as ordered\n" in render_summary(report)
    assert "<dt>Manifest</dt><dd>4 of 4 parts as ordered</dd>" in render_html(report)
    assert "<dt>Manifest</dt>" not in render_html(
        merge(replace(plan, manifest=()), builders.evidence(plan), (NO_CRITERIA,))
    )


def test_manifest_of_a_plan_is_the_same_after_writing_and_reading_json() -> None:
    plan = ordered_plan([gpu_line("h1", 0, slot="1"), nic_line(GUID), *gpu_lines("h2")])
    document = json.loads(json.dumps(to_json(plan)))
    documents.validate(document, "plan", source="plan")
    assert plan_from_json(document).manifest == plan.manifest
    assert "manifest" not in to_json(ordered_plan([]))


def test_manifest_that_contradicts_the_inventory_is_refused() -> None:
    """A manifest must list all GPUs of each host, or no GPUs at all. All hosts must have the same manifest."""
    hosts = builders.inventory(rackproof_gpu_count=2)
    common: dict[str, Any] = {"run_id": "r", "nonce": builders.NONCE, "created": builders.WHEN}
    smoke = read_profile("smoke")
    assert make_plan(smoke, hosts, **common, manifest=gpu_lines("h1", "h2")).manifest
    assert make_plan(smoke, hosts, **common, manifest=[nic_line(GUID)]).manifest
    with pytest.raises(
        UsageError, match="host h2: the manifest lists 1 GPU, but rackproof_gpu_count is 2: correct one of them"
    ):
        make_plan(smoke, hosts, **common, manifest=gpu_lines("h1", "h2")[:3])
    hosts["h2"]["rackproof_manifest"] = "other.csv"
    with pytest.raises(UsageError, match=r"rackproof_manifest is None on host h1 and 'other\.csv' on host h2"):
        make_plan(smoke, hosts, **common)


def test_plan_command_stores_the_manifest(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, "host,kind,serial\nh1,gpu,165\nh2,gpu,166\n")
    variables = {"rackproof_gpu_count": 1, "rackproof_rack": "r1", "rackproof_manifest": str(path)}
    hosts = {name: {"ansible_host": f"10.0.0.{name[1]}", **variables} for name in ("h1", "h2")}
    plan_command = ("plan", "--profile", "smoke", "--run-dir", tmp_path / "run", "--inventory")
    done = rackproof(*plan_command, listing(tmp_path, hosts))
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 lines in the manifest" in done.stdout
    frozen = json.loads((tmp_path / "run" / "plan.json").read_text())["manifest"]
    assert [part["serial"] for part in frozen] == ["165", "166"]
    path.write_text("host,kind,serial\nh1,gpu,165\nh2,gpu,167\n")
    assert "was begun with other values of manifest" in rackproof(*plan_command, listing(tmp_path, hosts)).stderr
    without_manifest = {
        name: {key: value for key, value in of_host.items() if key != "rackproof_manifest"}
        for name, of_host in hosts.items()
    }
    assert (
        "was begun with other values of manifest"
        in rackproof(*plan_command, listing(tmp_path, without_manifest)).stderr
    )
    path.write_text("host,kind,serial\nh1,gpu,1.65E+12\n")
    refused = rackproof(*plan_command, listing(tmp_path, hosts))
    assert (refused.returncode, refused.stdout) == (64, "")
    assert "order.csv line 2: serial 1.65E+12 was rounded by a spreadsheet" in refused.stderr


def test_slot_of_a_gpu_without_a_pci_address_is_unknown() -> None:
    plan = ordered_plan([gpu_line("h1", 0, slot="0000:1b:00.0")])
    evidence = builders.evidence(plan)
    records = [
        replace(record, gpus=tuple(replace(gpu, pci_bus_id="") for gpu in record.gpus))
        for record in evidence["h1"].records
    ]
    evidence["h1"] = replace(evidence["h1"], records=tuple(records))
    on_gpu = [item for item in not_passing(manifest_verdicts(plan, evidence)) if item[:2] == ("h1", "gpu=0")]
    reason = "ordered for h1 slot 0000:1b:00.0, found in that host; the PCI address of gpu=0 was not reported"
    assert on_gpu == [("h1", "gpu=0", INCONCLUSIVE, reason)]
