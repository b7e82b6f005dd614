"""Test the alerts for Prometheus.

Rackproof generates the rule file and the runbook from the table of alerts (`fleet/integrations/alerts/table.yml`) and from the
criteria packs, the files that define the limits. If UPDATE_GOLDEN=1 is set, the tests rewrite the rule file and the runbook.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.exporter import metric_names
from collectors.nvml import reading_kinds
from fleet.integrations.alerts.page import runbook
from fleet.integrations.alerts.rules import (
    PACKS,
    PARTS,
    RUNBOOK,
    Rule,
    criteria_of,
    exported,
    read_table,
    rule_file,
    rules_of,
)
from fleet.judge.criteria import Criterion, Pack, read_pack
from fleet.yaml_files import LOADER
from schemas.errors import UsageError
from schemas.reports import ACTIONS
from tests import ROOT
from tests.accepted import rackproof
from tests.fakes import links, nvml, whole

RULES = ROOT / "deploy" / "prometheus" / "rackproof.rules.yml"
PAGE = ROOT / "docs" / "alerts.md"
CASES: dict[str, dict[str, dict[str, str]]] = yaml.load((RULES.parent / "cases.yml").read_text(), LOADER)  # noqa: S506 - a SafeLoader
SHIPPED = [read_pack(name) for name in PACKS]
CRITERIA = criteria_of(SHIPPED)
ALERTS = [alert for group in read_table() for alert in group.alerts]
ALL_RULES = [rule for alert in ALERTS for rule in rules_of(alert, CRITERIA)]
MINUTES = 75
"""Number of minutes after which the alerts of each case in cases.yml are checked."""
NOT_AFTER_A_BOOT = "unless on (instance) rackproof_host_uptime_seconds < 3600"
FIRST_RUN, NEXT_RUN = 'run_id="r"', 'run_id="s"'
FIRING_HOSTS = 'group by (host) (ALERTS{alertstate="firing", %s})'
FIRING_PARTS = 'group by (host, gpu, pci, hca, nic, disk, serial, slot, model) (ALERTS{alertstate="firing", %s})'
METRIC = re.compile(r"(?<![\w:])rackproof_[a-z0-9_]+")


def gpu_info(gpu: str, pci: str, serial: str) -> str:
    """Return the selector of the series that identifies a GPU."""
    return f'rackproof_gpu_info{{gpu="{gpu}", pci="{pci}", serial="{serial}", uuid="GPU-{serial}"}}'


def entries(text: str) -> list[dict[str, Any]]:
    """Return the alerting and recording rules of a rule file."""
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    one_thread = {**os.environ, "GOMAXPROCS": "1"}  # otherwise promtool's garbage collector uses every processor
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, env=one_thread)


# ---- the files ----


def test_rule_file_is_up_to_date() -> None:
    text = rule_file(SHIPPED)
    if os.environ.get("UPDATE_GOLDEN"):
        RULES.write_text(text)
    assert text == RULES.read_text()


def test_runbook_is_up_to_date() -> None:
    page = runbook(SHIPPED)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(page)
    assert page == PAGE.read_text()


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    site = re.search(r"^site_url: (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert site
    assert f"{site[1]}{PAGE.stem}/" == RUNBOOK, "RUNBOOK must be the URL of the page on the documentation site"
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)}
    for entry in entries(RULES.read_text()):
        if "alert" in entry:
            page, anchor = entry["annotations"]["runbook_url"].split("#")
            assert page == RUNBOOK
            assert anchor in anchors


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_severity_action_and_annotations() -> None:
    for entry in entries(RULES.read_text()):
        if "alert" in entry:
            assert entry["labels"]["severity"] in ("critical", "warning")
            assert entry["labels"]["action"] == entry["annotations"]["action"]
            assert entry["labels"]["action"] in ACTIONS
            assert set(entry["annotations"]) - {"rma"} == {"summary", "description", "action", "runbook_url"}
            assert "<" not in "".join(entry["annotations"].values()), "a placeholder was not replaced"


def test_every_rule_without_a_criterion_states_the_source_of_its_limit() -> None:
    assert [rule.alert.alert for rule in ALL_RULES if not rule.criteria and not rule.alert.source] == []


def test_command_criteria_alerts_prints_the_rules(tmp_path: Path) -> None:
    assert rackproof("criteria", "alerts").stdout == RULES.read_text()
    site_pack = tmp_path / "mine.yml"
    criterion = {
        "id": "pcie-replay",
        "replaces": "pcie-replay",
        "name": "gpu.pcie.replays",
        "scope": "gpu",
        "operator": "le",
        "value": 7,
        "delta": True,
    }
    criterion |= {"unit": "1", "action": "reseat", "source": "ours: seven", "basis": "policy"}
    site_pack.write_text(yaml.safe_dump({"schema": "rackproof.criteria/1", "summary": "ours", "criteria": [criterion]}))
    printed = rackproof("criteria", "alerts", site_pack, "--runbook", "https://wiki.example/alerts").stdout
    assert "increase(rackproof_gpu_pcie_replays_total[1h]) > 7" in printed
    assert "https://wiki.example/alerts#rackproofpciereplays" in printed


# ---- limits come from the packs ----


def test_every_rule_of_an_alert_has_its_for_clause() -> None:
    wanted = {alert.alert: alert.hold for alert in ALERTS}
    for entry in entries(RULES.read_text()):
        assert entry.get("for", "") == wanted.get(entry.get("alert", ""), "")


@pytest.mark.parametrize("name", ["xid.count", "xid.fatal", "sxid.count"])
def test_every_xid_and_sxid_criterion_of_the_packs_has_a_rule_with_its_action(name: str) -> None:
    wanted = {(item.id, item.action) for item in CRITERIA.values() if item.name == name}
    covered = {(item.id, rule.action) for rule in ALL_RULES for item in rule.criteria if item.name == name}
    assert covered == wanted != set()
    for rule in ALL_RULES:
        for item in rule.criteria:
            assert all(str(value) in re.split(r"[\"|]", rule.expr) for value in item.where.values())


def pack(base: str, **changes: Any) -> Pack:
    """Return a site pack (criteria that a site adds) with one criterion: the shipped criterion with the id `base`, changed."""
    criterion: Criterion = replace(CRITERIA[base], **changes)
    return Pack(name="mine", gpu_names=(), criteria=(criterion,))


def expressions(*packs: Pack) -> dict[tuple[str, str], str]:
    """Generate the rules from the shipped packs and `packs`. Return (alert, criterion or "") -> condition of the alert."""
    rules = entries(rule_file([*SHIPPED, *packs]))
    return {
        (entry["alert"], entry["labels"].get("criterion", "")): condition(entry["expr"])
        for entry in rules
        if "alert" in entry
    }


@cache
def shipped_expressions() -> dict[tuple[str, str], str]:
    return expressions()


def condition(expr: str) -> str:
    """Return the condition of a rule without the join that adds the labels of the faulty part, such as its serial."""
    joined = re.fullmatch(r"\((.*)\)\n  \* on .*\nor \(\1\)\n  unless on .*", expr, re.DOTALL)
    return joined[1] if joined else expr


@pytest.mark.parametrize(
    ("base", "changes", "alert", "expr"),
    [
        (
            "pcie-replay",
            {"value": 7},
            "RackproofPcieReplays",
            f"increase(rackproof_gpu_pcie_replays_total[1h]) > 7\n{NOT_AFTER_A_BOOT}",
        ),
        (
            "ecc-sram-uncorrectable-aggregate",
            {"value": 2},
            "RackproofGpuMemoryWorn",
            "rackproof_gpu_ecc_uncorrectable_sram_aggregate_total > 2",
        ),
        ("row-remap-pending", {"value": True}, "RackproofGpuRemapPending", "rackproof_gpu_remapped_rows_pending != 1"),
        (
            "recovery-action",
            {"value": '1.0"\\'},
            "RackproofGpuRecoveryNeeded",
            r'rackproof_gpu_info{recovery_action!="1.0\"\\", recovery_action!=""}',
        ),
    ],
)
def test_limit_of_a_site_pack_changes_its_alert(base: str, changes: dict[str, Any], alert: str, expr: str) -> None:
    shipped, with_site_pack = shipped_expressions(), expressions(pack(base, **changes))
    assert {key for key in shipped if shipped[key] != with_site_pack[key]} == {(alert, base)}
    assert with_site_pack[(alert, base)] == expr


def test_drift_and_outlier_alerts_use_the_fleet_fraction_of_the_criterion() -> None:
    before, after = shipped_expressions(), expressions(pack("stress-vs-fleet", fleet_fraction=0.875))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("RackproofThroughputDrift", ""), ("RackproofFleetOutlier", "")}
    for key in changed:
        assert after[key].count("< 0.875") == 1


@pytest.mark.parametrize(
    ("base", "changes"),
    [("row-remap-pending", {"value": None, "fleet_fraction": 0.9}), ("stress-vs-fleet", {"fleet_fraction": None})],
)
def test_criterion_for_which_no_rule_can_be_generated_is_reported(base: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=base):
        rule_file([*SHIPPED, pack(base, **changes)])


def test_alert_whose_criterion_is_in_no_pack_is_reported() -> None:
    with pytest.raises(UsageError, match="no pack has the criterion"):
        rule_file([Pack(name="none", gpu_names=(), criteria=())])


# ---- names of metrics ----


SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from collectors.table import build_collectors
from agent.exporter.exporter import registry
sys.stdout.buffer.write(generate_latest(registry(build_collectors(identity=True, root=Path(sys.argv[1])))))
"""


@pytest.fixture(scope="module")
def scraped(scraped_text: str) -> set[str]:
    """Return the names of the metrics in `scraped_text`."""
    return set(re.findall(r"^(rackproof_\w+)", scraped_text, re.MULTILINE))


@pytest.fixture(scope="module")
def scraped_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the metrics page of the exporter on a fake host with eight H100, without the metrics of a run."""
    directory = tmp_path_factory.mktemp("host")
    root = whole.build_host(directory / "root")
    gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
    whole.append_kernel_log(
        root, f"NVRM: Xid (PCI:{gpu}): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)"
    )
    whole.append_kernel_log(root, f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up")
    scenario = nvml.write(directory / "scenario", "healthy-h100x8", *whole.NVML)
    text: str = nvml.python(["-c", SCRAPE, root], nvml.build(directory / "nvml"), scenario)
    return text


def test_rules_use_only_exported_metrics(scraped: set[str]) -> None:
    """The fake host lacks the metrics of a run and those of some GPU models and drivers. Rules can use these too."""
    other_models = {exported(kind[0]) for kind in reading_kinds(full_snapshot=False)}
    used = {name for rule in ALL_RULES for name in METRIC.findall(rule.expr)}
    used |= {name for group in read_table() for expr in (group.record or {}).values() for name in METRIC.findall(expr)}
    used |= {name for part in PARTS.values() for expr in part.recordings.values() for name in METRIC.findall(expr)}
    known = scraped | other_models | set(metric_names.EVERY)
    assert used - known - {"rackproof"} == set()


# ---- each rule fires only on its fault ----


def name_of(rule: Rule) -> str:
    """Return the name of the alert, followed by `Rule.criterion` if that is not empty."""
    return f"{rule.alert.alert} {rule.criterion}".strip()


def covers_case(rule: Rule, case: str) -> bool:
    """Return whether a case of cases.yml (`ALERT` or `ALERT CRITERION`) tests this rule.

    `Rule.criterion` may contain a template, as in `xid-{{ $labels.xid }}`. The template stands for a number.
    """
    alert, _, criterion = case.partition(" ")
    pattern = re.sub(r"\\\{\\\{.*?\\\}\\\}", r"\\d+", re.escape(rule.criterion))
    ids = [item.id for item in rule.criteria] or [""]
    return alert == rule.alert.alert and criterion in ids and bool(re.fullmatch(pattern, criterion))


def test_every_rule_has_series_on_which_it_fires_and_series_on_which_it_is_quiet() -> None:
    untested = [name_of(rule) for rule in ALL_RULES if not any(covers_case(rule, case) for case in CASES)]
    assert untested == []
    assert [case for case in CASES if not any(covers_case(rule, case) for rule in ALL_RULES)] == []
    assert all(case["fires"] and case["quiet"] for case in CASES.values())


def series(host: str, values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the series of a host in the form that promtool reads.

    `values`: selector of a series -> its values. The label `host` is `host` unless the selector has another value.
    """
    target = {"host": host, "instance": f"{host}:9836", "job": "rackproof", "rack": "r1", "run_id": "r"}
    for selector, numbers in values.items():
        name, _, matchers = selector.partition("{")
        labels = target | dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        text = ", ".join(f'{key}="{value}"' for key, value in labels.items())
        yield {"series": f"{name}{{{text}}}", "values": numbers}


def expected(number: int, case: str) -> dict[str, Any]:
    """Return the sample that promtool must find if the alert of this case fires on the host `h{number}`."""
    alert, _, criterion = case.partition(" ")
    labels = {"alertname": alert, "host": f"h{number}"} | ({"criterion": criterion} if criterion else {})
    return {"labels": f"{{{', '.join(f'{key}={value!r}' for key, value in labels.items())}}}", "value": 1}


@pytest.mark.parametrize("kind", ["fires", "quiet"])
def test_rules_fire_exactly_in_the_expected_cases(kind: str, tmp_path: Path) -> None:
    played = list(enumerate(CASES.items()))
    inputs = [line for number, (_, values) in played for line in series(f"h{number}", values[kind])]
    check = {
        "expr": 'group by (host, alertname, criterion) (ALERTS{alertstate="firing"})',
        "eval_time": f"{MINUTES}m",
        "exp_samples": [expected(number, case) for number, (case, _) in played if kind == "fires"],
    }
    play(tmp_path, inputs, promql_expr_test=[check])


def play(tmp_path: Path, inputs: list[dict[str, str]], **checks: Any) -> None:
    """Let promtool evaluate the rules on series with one sample a minute. These checks must pass."""
    done = evaluate(tmp_path, inputs, **checks)
    assert done.returncode == 0, done.stdout + done.stderr


def evaluate(tmp_path: Path, inputs: list[dict[str, str]], **checks: Any) -> subprocess.CompletedProcess[str]:
    """Let promtool evaluate the rules on series with one sample a minute, and run these checks."""
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, **checks}],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document))
    return promtool("test", "rules", tmp_path / "cases.yml")


# ---- scenarios ----


@dataclass(frozen=True)
class Scenario:
    """Series of some hosts, and which alerts must fire on them. No other alerts may fire at the same times."""

    hosts: Sequence[Mapping[str, str]]
    """The series of each host, h0 and following: selector -> values."""
    firing: Mapping[int, Sequence[str]]
    """Minute -> labels of the alerts that fire then, without those labels by which they are not grouped."""
    query: str = FIRING_HOSTS
    """Expression that finds the alerts, with `%s` in place of the matcher that selects the hosts of the scenario."""


def on_hosts(*numbers: int) -> list[str]:
    """Return the labels of firing alerts that are grouped by host."""
    return [f'host="h{number}"' for number in numbers]


def on_parts(values: Mapping[str, str], minutes: Sequence[int], *parts: str) -> Scenario:
    """Return a scenario of the host h0, on which exactly these parts have firing alerts.

    Args:
        values: selector of a series -> its values.
        minutes: times of the check.
        parts: the labels of each part with a firing alert. An empty text stands for the host itself.
    """
    labels = [f'host="h0", {part}' for part in parts]
    return Scenario([{"up": "1x200"} | values], dict.fromkeys(minutes, labels), FIRING_PARTS)


def collectors(values: str) -> dict[str, str]:
    """Return the series that tell whether the collectors of adapters and drives worked."""
    return {f'rackproof_collector_success{{collector="{name}"}}': values for name in ("infiniband", "storage")}


def change_before_the_next_run(name: str, labels: str, healthy: int, faulty: int) -> Scenario:
    """Return a scenario in which a value becomes faulty during a run, and is still faulty in the next run."""
    first, following = (f"{name}{{{', '.join(filter(None, (labels, run)))}}}" for run in (FIRST_RUN, NEXT_RUN))
    values = {
        first: f"{healthy}x10 {faulty}x10 stale _x60",
        following: f"_x22 {faulty}x59",
        "up": "1x20 stale _x60",
        f"up{{{NEXT_RUN}}}": "_x22 1x59",
    }
    return Scenario([values], {5: [], 18: on_hosts(0), 70: on_hosts(0)})


_HEALTHY, _ABSENT, _RESTARTED = "8x60 _x3 0x1 8x60", "1x60 _x3 _x1 1x60", "6x60 _x3 2x62"
REBOOT = {
    "up": "1x60 0x3 1x62",
    "rackproof_host_uptime_seconds": "90000+60x60 _x3 90+60x62",
    "rackproof_gpus": _HEALTHY,
    'rackproof_gpu_info{gpu="2", pci="0000:5d:00.0", fabric_state="completed"}': "1x60 _x3 _x4 1x58",
    'rackproof_gpu_info{gpu="2", pci="0000:5d:00.0", fabric_state="in_progress"}': "_x60 _x3 _x2 1x2 stale _x57",
    "rackproof_fabric_manager_missing": "0x60 _x3 1x2 0x60",
    'rackproof_gpu_nvlink_active_links{gpu="2"}': "18x60 _x3 _x2 0x2 18x58",
    'rackproof_hca_info{hca="mlx5_0"}': _ABSENT,
    'rackproof_disk_info{disk="nvme0n1"}': _ABSENT,
    'rackproof_collector_success{collector="infiniband"}': "1x60 _x3 1x62",
    'rackproof_collector_success{collector="storage"}': "1x60 _x3 1x62",
    'rackproof_infiniband_link_downed_total{hca="mlx5_0", port="1"}': _RESTARTED,
    'rackproof_infiniband_link_error_recovery_total{hca="mlx5_0", port="1"}': _RESTARTED,
    'rackproof_network_carrier_changes_total{nic="eth0"}': _RESTARTED,
}
"""After a boot the driver lists no GPU for two minutes, and then the GPUs are not yet registered with the fabric.

Each link goes up and down once while the host boots, so its counters restart at numbers above zero."""
COUNT_MISSING = {"rackproof_gpus": "8x5 _x30", "up": "1x35"}
TARGET_MISSING = {"rackproof_gpus": "8x5 _x30", "up": "1x5 stale _x30"}
"""The target disappears, as at the end of a run."""
IN_NEXT_RUN = {
    "rackproof_gpus": "8x5 stale _x30",
    "up": "1x5 stale _x30",
    f"rackproof_gpus{{{NEXT_RUN}}}": "_x6 8x29",
    f"up{{{NEXT_RUN}}}": "_x6 1x29",
}
GPU_2, GPU_3 = gpu_info("2", "0000:5d:00.0", "S2"), gpu_info("3", "0000:9b:00.0", "S3")
LOST_GPU_2 = 'gpu="2", pci="0000:5d:00.0", serial="S2", slot="0000:5d:00.0"'
LOST_GPU_3 = 'gpu="3", pci="0000:9b:00.0", serial="S3", slot="0000:9b:00.0"'
OF_ONE_RUN = {"rackproof_gpus": "8x9 7x40", GPU_2: "1x9 stale _x40", "up": "1x50"}
OF_TWO_RUNS = {
    **OF_ONE_RUN,
    f"rackproof_gpus{{{NEXT_RUN}}}": "8x9 7x40",
    GPU_2.replace("}", f", {NEXT_RUN}}}"): "1x9 stale _x40",
    f"up{{{NEXT_RUN}}}": "1x50",
}
XID_79 = 'rackproof_xid_errors{pci="0000:5d:00.0", xid="79"}'
LOST = {GPU_2: "1x5 stale _x200"}
FAILED_GPU_2 = 'rackproof_gpu_remapped_rows_failed{gpu="2", uuid="GPU-1"}'
HCA_INFO = (
    'rackproof_hca_info{hca="mlx5_0", infiniband_hca_node_guid="b8ce:f603", infiniband_hca_pci_address="0000:18:00.0"}'
)
HCA = 'hca="mlx5_0", serial="b8ce:f603", slot="0000:18:00.0"'
DISK_INFO = (
    'rackproof_disk_info{disk="nvme0n1", storage_disk_model="MZQL2", storage_disk_serial="S64", '
    'storage_disk_pci_address="0000:80:00.0"}'
)
DISK = 'disk="nvme0n1", serial="S64", slot="0000:80:00.0", model="MZQL2"'
PARTS_GONE = {HCA_INFO: "1x9 stale _x40", DISK_INFO: "1x9 stale _x40"}
RENAMED = {
    "up": "1x9 0x9 1x40",
    HCA_INFO: "1x9 stale _x60",
    HCA_INFO.replace("mlx5_0", "rocep24s0"): "_x19 1x40",
    DISK_INFO: "1x9 stale _x60",
    DISK_INFO.replace("nvme0n1", "nvme4n1"): "_x19 1x40",
    **collectors("1x9 stale _x8 1x40"),
}
"""The host boots, and udev and the kernel then give the adapter and the drive other names."""
MOVED_GPUS = {
    "up": "1x9 0x9 1x60",
    "rackproof_gpus": "2x9 stale _x8 2x9 1x50",
    gpu_info("0", "0000:5d:00.0", "S2"): "1x9 stale _x60",
    gpu_info("1", "0000:9b:00.0", "S3"): "1x9 stale _x60",
    gpu_info("0", "0000:5e:00.0", "S2"): "_x19 1x60",
    gpu_info("1", "0000:9c:00.0", "S3"): "_x19 1x9 stale _x50",
}
"""The host boots, its PCI buses then have other numbers, and later one of the two GPUs is lost."""


def drives(values: str, *serials: str, first: int = 0) -> dict[str, str]:
    """Return the series of NVMe drives that the kernel numbers from `first`. The serial ends with the number of the slot."""
    return {
        DISK_INFO.replace("nvme0n1", f"nvme{number}n1")
        .replace("S64", serial)
        .replace(":80:", f":8{serial[-1]}:"): values
        for number, serial in enumerate(serials, first)
    }


BOOTED = {"up": "1x9 0x9 1x60", **collectors("1x9 stale _x8 1x60")}
SHIFTED = BOOTED | drives("1x9 stale _x80", "S0", "S1", "S2") | drives("_x19 1x60", "S1", "S2")
"""At a boot the first drive does not answer, so the kernel gives its name to the second drive."""
REPAIRED = SHIFTED | drives("_x19 1x20 stale _x40", "S1", "S2")
REPAIRED |= drives("_x45 1x40", "S10") | drives("1x9 stale _x37 1x40", "S1", "S2", first=1)
REPLACED = (
    BOOTED | drives("1x9 stale _x80", "S0", "S1") | drives("_x19 1x60", "S1") | drives("_x21 1x60", "S10", first=1)
)
"""The new drive is in the slot of the lost drive, and has another name."""
SAME_SERIAL = drives("1x40", "S0", "S0") | drives("1x9 stale _x60", "S0", first=2) | collectors("1x60") | {"up": "1x60"}
"""Namespaces of one drive have the same serial, and so have the local drives of some clouds."""
BRIDGED = {
    f'rackproof_gpu_nvlink_active_links{{gpu="{gpu}", uuid="GPU-{uuid}"}}': values
    for gpu, uuid, values in ((0, 0, "4x9 stale _x60"), (1, 1, "4x9 stale _x60"), (2, 2, "0x9 stale _x60"))
}
BRIDGED |= {'rackproof_gpu_nvlink_active_links{gpu="1", uuid="GPU-2"}': "_x19 0x60"}
"""Of three GPUs, the first two are connected by a bridge. After a boot the third has the index of the second."""


def in_job(job: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the same series, scraped by another job."""
    return {
        f'{selector.rstrip("}")}{", " if "{" in selector else "{"}job="{job}"}}': text
        for selector, text in values.items()
    }


OTHER_JOB = {'up{job="node", run_id=""}': "1x60"}
"""The same instance in another scrape job, such as that of node_exporter."""


def with_clock(offset_s: int) -> dict[str, str]:
    """Return the series of a healthy host whose clock differs from that of Prometheus (promtool's clock starts at 0)."""
    return {
        'rackproof_collector_last_success_timestamp_seconds{collector="sampler"}': f"{offset_s}+60x90",
        'rackproof_gpu_sampled_timestamp_seconds{gpu="0"}': f"{offset_s - 1}+60x90",
        'rackproof_collector_last_success_timestamp_seconds{collector="run"}': f"{offset_s}+60x90",
        'rackproof_stage_deadline_timestamp_seconds{stage="benchmark"}': f"{offset_s + 6000}x90",
        'rackproof_stage_state{stage="benchmark", state="running"}': "1x90",
    }


NIC_INFO = {
    'rackproof_nic_info{nic="eth0", network_address="b8:3f:d2:00:00:a2", network_pci_address="0000:1a:00.0"}': "1x40",
    'rackproof_nic_info{nic="eth1"}': "1x40",
}
NIC = 'nic="eth0", serial="b8:3f:d2:00:00:a2", slot="0000:1a:00.0"'
NIC_ERRORS = {'rackproof_network_rx_crc_errors_total{nic="eth0"}': "0x5 500x35"}
RATES = {
    "rackproof_run_started_timestamp_seconds": "1x80 4800x120",
    'rackproof_benchmark_flop_per_second{stage="soak", benchmark="stress", gpu="0"}': "100x80 80x120",
}
FAULTS_THAT_END = (
    {'rackproof_gpu_throttle_active{gpu="0", reason="hw_thermal"}': "0x9 1x9 0x100"},
    {'rackproof_gpu_nvlink_replays_total{gpu="0", link="0"}': "0x9 1x110"},  # the alert fires for an hour
    {XID_79: "_x10 1x9 stale _x100"},  # a reboot ends the series
    {"up": "1x9 0x9 1x100"},
)

SCENARIOS = {
    "absent GPU count: an alert only while the host is up": Scenario(
        [COUNT_MISSING, TARGET_MISSING, IN_NEXT_RUN], {5: [], 12: on_hosts(0), 35: on_hosts(0)}
    ),
    "healthy reboot: only RackproofExporterDown": Scenario(
        [REBOOT],
        dict.fromkeys(range(55, 126), ()),
        'group by (alertname) (ALERTS{alertstate="firing", alertname!="RackproofExporterDown", %s})',
    ),
    "next run, fewer GPUs": change_before_the_next_run("rackproof_gpus", "", 8, 7),
    "next run, NVLink down": change_before_the_next_run("rackproof_gpu_nvlink_active_links", 'gpu="2"', 18, 17),
    "next run, InfiniBand down": change_before_the_next_run(
        "rackproof_infiniband_active", 'hca="mlx5_0", port="1"', 1, 0
    ),
    "next run, no carrier": change_before_the_next_run("rackproof_network_carrier", 'nic="eth0"', 1, 0),
    "targets of two runs on a host, and of one on another: one alert on each host": Scenario(
        [OF_TWO_RUNS, OF_ONE_RUN],
        {30: on_hosts(0, 1)},
        'count by (host) (ALERTS{alertstate="firing", alertname="RackproofGpuGone", slot="0000:5d:00.0", %s})',
    ),
    "missing adapter and drive": on_parts(PARTS_GONE | collectors("1x50"), [20], HCA, DISK),
    # A collector that fails reads no adapter and no drive, so nothing is known to be missing.
    "failing collectors": on_parts(PARTS_GONE | collectors("1x9 0x41"), [20], ""),
    "alerts resolve when the fault ends": Scenario(
        FAULTS_THAT_END, {9: [], 15: on_hosts(0, 1, 2, 3), 30: on_hosts(1), 90: []}
    ),
    "drift: rates of different runs are not compared": Scenario(
        [RATES, {**RATES, "rackproof_run_started_timestamp_seconds": "1x200"}], {79: [], 170: on_hosts(1)}
    ),
    "GPU with slot and serial": on_parts(
        {GPU_2: "1x20", GPU_3: "1x20", FAILED_GPU_2: "1x20"}, [10], 'gpu="2", serial="S2", slot="0000:5d:00.0"'
    ),
    "GPU with a PCI address": on_parts({GPU_2: "1x20", XID_79: "1x20"}, [10], LOST_GPU_2),
    "lost GPU keeps its serial": on_parts(LOST | {XID_79: "_x5 1x200"}, [20, 150], LOST_GPU_2),
    "lost GPU is replaced": on_parts(
        LOST | {gpu_info("2", "0000:5d:00.0", "S9"): "_x10 1x40", XID_79: "_x5 1x200"},
        [20],
        LOST_GPU_2.replace("S2", "S9"),
    ),
    "lost GPU keeps its serial in the next run": on_parts(
        {
            GPU_2: "1x5 stale _x40",
            "up": "1x9 stale _x40",
            f"up{{{NEXT_RUN}}}": "_x11 1x40",
            XID_79.replace("}", f", {NEXT_RUN}}}"): "_x11 1x40",
        },
        [30],
        LOST_GPU_2,
    ),
    "identity of a part ends if the scrape target is gone for five minutes": Scenario(
        [{GPU_2: "1x5 stale _x40", "up": "1x9 stale _x40"}], {20: []}, "count by (host) (rackproof:part:gpu{%s})"
    ),
    "missing GPU": on_parts({"rackproof_gpus": "2x5 1x40", GPU_3: "1x40", **LOST}, [20], LOST_GPU_2),
    "missing GPU, and another index of the remaining GPU after a reboot": on_parts(
        {
            "rackproof_gpus": "2x5 1x40",
            gpu_info("0", "0000:5d:00.0", "S2"): "1x5 stale _x40",
            gpu_info("1", "0000:9b:00.0", "S3"): "1x5 stale _x40",
            gpu_info("0", "0000:9b:00.0", "S3"): "_x8 1x40",
        },
        [20],
        LOST_GPU_2.replace('gpu="2"', 'gpu="0"'),
    ),
    "driver that hangs": on_parts(
        {"rackproof_gpus": "2x5 stale _x40", GPU_3: "1x5 stale _x40", **LOST}, [20], LOST_GPU_2, LOST_GPU_3
    ),
    "adapter and drive with other names after a reboot": Scenario(
        [RENAMED], {30: [], 50: []}, 'group by (host, alertname) (ALERTS{alertstate="firing", %s})'
    ),
    "drive that is lost at a boot, so that other drives get its name": Scenario(
        [SHIFTED, REPAIRED],
        {35: ['host="h0", serial="S0"', 'host="h1", serial="S0"'], 60: ['host="h0", serial="S0"']},
        'group by (host, serial) (ALERTS{alertstate="firing", %s})',
    ),
    "replaced drive with another name": Scenario([REPLACED], {35: [], 60: []}),
    "scrape job with another name": on_parts(
        in_job("gpus", PARTS_GONE | LOST | collectors("1x50") | {"rackproof_gpus": "2x5 stale _x50", "up": "1x50"}),
        [20],
        HCA,
        DISK,
        LOST_GPU_2,
    ),
    "lost drive whose serial other drives have": Scenario(
        [SAME_SERIAL], {30: ['host="h0", disk="nvme2n1"']}, 'group by (host, disk) (ALERTS{alertstate="firing", %s})'
    ),
    "lost GPU after a reboot that changed the PCI addresses": Scenario(
        [MOVED_GPUS],
        {25: [], 40: ['host="h0", slot="0000:9c:00.0", serial="S3"']},
        'group by (host, slot, serial) (ALERTS{alertstate="firing", %s})',
    ),
    "GPU without a bridge that gets the index of a GPU with a bridge": Scenario([BRIDGED], {40: []}),
    "stopped exporter of an instance that another job scrapes": Scenario(
        [OF_ONE_RUN | {"rackproof_gpus": "8x9 stale _x60", "up": "1x9 stale _x60"} | OTHER_JOB], {20: [], 40: []}
    ),
    "labels of an alert are not those of another job": Scenario(
        [PARTS_GONE | collectors("1x50") | {"up": "1x50"} | OTHER_JOB],
        {20: ['host="h0", job="rackproof", run_id="r"']},
        'group by (host, job, run_id) (ALERTS{alertstate="firing", %s})',
    ),
    "host with a wrong clock": Scenario([with_clock(-7200), with_clock(7200)], {30: [], 80: []}),
    "part of unknown identity": on_parts({'rackproof_gpu_remapped_rows_failed{gpu="2"}': "1x20"}, [10], 'gpu="2"'),
    "HCA with node GUID and PCI address": on_parts(
        {HCA_INFO: "1x40", 'rackproof_infiniband_active{hca="mlx5_0", port="1"}': "1x5 0x35"}, [20], HCA
    ),
    "NIC with MAC and PCI address": on_parts(
        NIC_INFO | {'rackproof_network_carrier{nic="eth0"}': "1x5 0x35"}, [20], NIC
    ),
    "errors of a NIC": on_parts(NIC_INFO | NIC_ERRORS, [20], NIC),
    "errors of a NIC of unknown identity": on_parts(NIC_ERRORS, [20], 'nic="eth0"'),
    "disk with model, serial and slot": on_parts(
        {DISK_INFO: "1x5 stale _x40", 'rackproof_storage_disk_online{disk="nvme0n1"}': "1x5 0x35"}, [20], DISK
    ),
    "array without a disk": on_parts(
        {DISK_INFO: "1x5 stale _x40", 'rackproof_storage_array_missing{array="md0"}': "0x5 1x35"}, [20], ""
    ),
}
"""Name -> scenario. promtool evaluates all of them at once: the time that it takes depends on the minutes, not on the hosts."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what promtool prints about the checks of the scenarios that failed. A host has the name of its scenario, too."""
    inputs, checks = [], []
    for name, scenario in SCENARIOS.items():
        for number, values in enumerate(scenario.hosts):
            inputs += series(f"{name}-h{number}", values)
        for minute, alerts in scenario.firing.items():
            labels = [text.replace('host="', f'host="{name}-') for text in alerts]
            samples = [{"labels": f"{{{text}}}", "value": 1} for text in labels]
            expr = scenario.query % f'host=~"{name}-.*"'
            checks.append({"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples})
    done = evaluate(tmp_path_factory.mktemp("scenarios"), inputs, promql_expr_test=checks)
    output = done.stdout + done.stderr
    assert done.returncode == 0 or any(f'"{name}-.*' in output for name in SCENARIOS), output
    return output


@pytest.mark.parametrize("name", SCENARIOS)
def test_alerts_of_a_scenario_are_those_expected(name: str, failures: str) -> None:
    assert f'"{name}-.*' not in failures, failures


def test_annotations_of_an_alert_are_filled_in(tmp_path: Path) -> None:
    labels = {"host": "h0", "instance": "h0:9836", "job": "rackproof", "rack": "r1", "run_id": "r"}
    labels |= {"gpu": "2", "uuid": "GPU-1", "severity": "critical", "action": "reset_gpu"}
    labels |= {"serial": "S2 $(reboot)", "slot": "0000:5d:00.0"}
    wanted = {
        "summary": "h0: GPU 2 has uncorrectable memory errors",
        "description": "GPU 2 (GPU-1) of h0 has counted 3 uncorrectable errors since the driver was loaded; "
        "serial S2 $(reboot), slot 0000:5d:00.0 "
        f"(ecc-uncorrectable-volatile, wanted: 0; source: {CRITERIA['ecc-uncorrectable-volatile'].source})",
        "action": "reset_gpu",
        "rma": "rackproof rma runs/r --host h0 --serial S2reboot --reason RackproofGpuEccUncorrectable",
        "runbook_url": f"{RUNBOOK}#rackproofgpueccuncorrectable",
    }
    values = {
        'rackproof_gpu_ecc_uncorrectable_volatile_total{gpu="2", uuid="GPU-1"}': "0x9 3",
        gpu_info("2", "0000:5d:00.0", labels["serial"]): "1x10",
    }
    inputs = list(series("h0", values))
    alert = {"exp_labels": labels | {"criterion": "ecc-uncorrectable-volatile"}, "exp_annotations": wanted}
    test = {"alertname": "RackproofGpuEccUncorrectable", "eval_time": "10m", "exp_alerts": [alert]}
    play(tmp_path, inputs, alert_rule_test=[test | {"eval_time": "9m", "exp_alerts": []}, test])


def test_annotations_of_a_disk_alert_contain_model_serial_and_command(tmp_path: Path) -> None:
    labels = {"host": "h0", "instance": "h0:9836", "job": "rackproof", "rack": "r1", "run_id": "r", "disk": "nvme0n1"}
    labels |= {"severity": "warning", "action": CRITERIA["disk-online"].action, "criterion": "disk-online"}
    labels |= {"serial": "S64$(reboot)", "slot": "0000:80:00.0", "model": "MZQL2"}
    identity = 'storage_disk_model="MZQL2", storage_disk_serial="S64$(reboot)", storage_disk_pci_address="0000:80:00.0"'
    values = {
        f'rackproof_disk_info{{disk="nvme0n1", {identity}}}': "1x10",
        'rackproof_storage_disk_online{disk="nvme0n1"}': "1x9 0",
    }
    wanted = {
        "summary": "h0: a disk or file system is failing",
        "description": "Disk nvme0n1 of h0 fails a criterion with the value 0; MZQL2; serial S64$(reboot), slot 0000:80:00.0 "
        f"(disk-online, wanted: 1 (yes); source: {CRITERIA['disk-online'].source})",
        "action": CRITERIA["disk-online"].action,
        "rma": "rackproof rma runs/r --host h0 --serial S64reboot --reason RackproofDiskFailing",
        "runbook_url": f"{RUNBOOK}#rackproofdiskfailing",
    }
    alert = {"exp_labels": labels, "exp_annotations": wanted}
    test = {"alertname": "RackproofDiskFailing", "eval_time": "10m", "exp_alerts": [alert]}
    play(tmp_path, list(series("h0", values)), alert_rule_test=[test])


def test_info_series_have_the_labels_that_the_rules_join(scraped_text: str) -> None:
    for part in PARTS.values():
        lines = re.findall(rf"^{re.escape(part.info.partition('{')[0])}{{(.*)}} 1", scraped_text, re.MULTILINE)
        names = [set(re.findall(r'(\w+)="', line)) for line in lines]
        assert names, part.info
        assert all({part.key, *part.sources.values()} <= labels for labels in names), part.info
