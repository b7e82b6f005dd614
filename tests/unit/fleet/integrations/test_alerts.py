"""The alerts: the rule file and the runbook are what table and packs say, and each rule fires on its fault and on nothing else.

UPDATE_GOLDEN=1 writes both anew.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.exporter import metric_names
from collectors.nvml import reading_kinds
from fleet.integrations.alerts.page import runbook
from fleet.integrations.alerts.rules import PACKS, RUNBOOK, Rule, criteria_of, exported, read_table, rule_file, rules_of
from fleet.judge.criteria import Criterion, Pack, read_pack
from fleet.yaml_files import LOADER
from schemas.errors import UsageError
from schemas.reports import ACTIONS
from tests import ROOT
from tests.accepted import rackproof
from tests.fakes import links, nvml, whole

RULES = ROOT / "deploy" / "prometheus" / "rackproof.rules.yml"
CASES: dict[str, dict[str, dict[str, str]]] = yaml.load((RULES.parent / "cases.yml").read_text(), LOADER)  # noqa: S506 - a SafeLoader
SHIPPED = [read_pack(name) for name in PACKS]
CRITERIA = criteria_of(SHIPPED)
ALERTS = [alert for group in read_table() for alert in group.alerts]
EVERY = [rule for alert in ALERTS for rule in rules_of(alert, CRITERIA)]
MINUTES = 75
METRIC = re.compile(r"(?<![\w:])rackproof_[a-z0-9_]+")


def entries(text: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the files ----


def test_the_rule_file_is_what_table_and_packs_say() -> None:
    text = rule_file(SHIPPED)
    if os.environ.get("UPDATE_GOLDEN"):
        RULES.write_text(text)
    assert text == RULES.read_text()


def test_the_runbook_is_what_table_and_packs_say() -> None:
    page = runbook(SHIPPED)
    if os.environ.get("UPDATE_GOLDEN"):
        (ROOT / RUNBOOK).write_text(page)
    assert page == (ROOT / RUNBOOK).read_text()


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)}
    for entry in entries(RULES.read_text()):
        if "alert" in entry:
            page, anchor = entry["annotations"]["runbook_url"].split("#")
            assert page == RUNBOOK
            assert anchor in anchors


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", RULES)


def test_every_alert_says_what_is_to_be_done() -> None:
    for entry in entries(RULES.read_text()):
        if "alert" in entry:
            assert entry["labels"]["severity"] in ("critical", "warning")
            assert entry["labels"]["action"] == entry["annotations"]["action"]
            assert entry["labels"]["action"] in ACTIONS
            assert set(entry["annotations"]) == {"summary", "description", "action", "runbook_url"}
            assert "<" not in "".join(entry["annotations"].values()), "a place that was not filled in"


def test_what_no_criterion_says_has_a_source() -> None:
    assert [rule.alert.alert for rule in EVERY if not rule.criteria and not rule.alert.source] == []


def test_the_verb_prints_the_rules(tmp_path: Path) -> None:
    assert rackproof("criteria", "alerts").stdout == RULES.read_text()
    own = tmp_path / "mine.yml"
    criterion = {
        "id": "pcie-replay",
        "name": "gpu.pcie.replays",
        "scope": "gpu",
        "operator": "le",
        "value": 7,
        "delta": True,
    }
    criterion |= {"unit": "1", "action": "reseat", "source": "ours: seven", "basis": "policy"}
    own.write_text(yaml.safe_dump({"schema": "rackproof.criteria/1", "summary": "ours", "criteria": [criterion]}))
    printed = rackproof("criteria", "alerts", own, "--runbook", "https://wiki.example/alerts").stdout
    assert "increase(rackproof_gpu_pcie_replays_total[1h]) > 7" in printed
    assert "https://wiki.example/alerts#rackproofpciereplays" in printed


# ---- limits stand in the packs alone ----


def test_a_rule_of_a_criterion_fires_at_once_and_only_others_wait() -> None:
    holder = {entry["labels"].get("criterion") for entry in entries(RULES.read_text()) if "for" in entry}
    assert holder == {None}


@pytest.mark.parametrize("name", ["xid.count", "xid.fatal", "sxid.count"])
def test_every_fatal_code_of_the_packs_is_in_a_rule_with_its_action(name: str) -> None:
    wanted = {(item.id, item.action) for item in CRITERIA.values() if item.name == name}
    spoken = {(item.id, rule.action) for rule in EVERY for item in rule.criteria if item.name == name}
    assert spoken == wanted != set()
    for rule in EVERY:
        for item in rule.criteria:
            assert all(str(value) in re.split(r"[\"|]", rule.expr) for value in item.where.values())


def pack(base: str, **changes: Any) -> Pack:
    criterion: Criterion = replace(CRITERIA[base], **changes)
    return Pack(name="mine", gpu_names=(), criteria=(criterion,))


def expressions(*packs: Pack) -> dict[tuple[str, str], str]:
    result = entries(rule_file([*SHIPPED, *packs]))
    return {
        (entry["alert"], entry["labels"].get("criterion", "")): entry["expr"] for entry in result if "alert" in entry
    }


@pytest.mark.parametrize(
    ("base", "changes", "alert", "expr"),
    [
        ("pcie-replay", {"value": 7}, "RackproofPcieReplays", "increase(rackproof_gpu_pcie_replays_total[1h]) > 7"),
        (
            "ecc-sram-uncorrectable-aggregate",
            {"value": 2},
            "RackproofGpuMemoryWorn",
            "rackproof_gpu_ecc_uncorrectable_sram_aggregate_total > 2",
        ),
        ("row-remap-pending", {"value": True}, "RackproofGpuRemapPending", "rackproof_gpu_remapped_rows_pending != 1"),
        ("recovery-action", {"value": "x"}, "RackproofGpuRecoveryNeeded", 'rackproof_gpu_info{recovery_action!~"x|"}'),
    ],
)
def test_a_sites_own_limit_is_its_alerts_limit(base: str, changes: dict[str, Any], alert: str, expr: str) -> None:
    shipped, own = expressions(), expressions(pack(base, **changes))
    assert {key for key in shipped if shipped[key] != own[key]} == {(alert, base)}
    assert own[(alert, base)] == expr


def test_drift_and_outliers_have_the_fractions_of_the_fleet_criteria() -> None:
    before, after = expressions(), expressions(pack("stress-vs-fleet", fleet_fraction=0.875))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {("RackproofThroughputDrift", ""), ("RackproofFleetOutlier", "")}
    for key in changed:
        assert after[key].count("< 0.875") == 1


@pytest.mark.parametrize(
    ("base", "changes"),
    [("row-remap-pending", {"value": None, "fleet_fraction": 0.9}), ("stress-vs-fleet", {"fleet_fraction": None})],
)
def test_limit_without_a_rule_is_reported(base: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=base):
        rule_file([*SHIPPED, pack(base, **changes)])


def test_alert_of_an_unknown_criterion_is_reported() -> None:
    with pytest.raises(UsageError, match="no pack has the criterion"):
        rule_file([Pack(name="none", gpu_names=(), criteria=())])


# ---- names ----


SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
import collectors
from agent.exporter.exporter import registry
sys.stdout.buffer.write(generate_latest(registry(collectors.build_collectors(root=Path(sys.argv[1])))))
"""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a scrape of a whole GPU host; what only a snapshot reads is not there."""
    directory = tmp_path_factory.mktemp("host")
    root = whole.tree(directory / "root")
    gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
    whole.log(root, f"NVRM: Xid (PCI:{gpu}): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)")
    whole.log(root, f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up")
    scenario = nvml.write(directory / "scenario", "healthy-h100x8", *whole.NVML)
    text = nvml.python(["-c", SCRAPE, root], nvml.build(directory / "nvml"), scenario)
    return set(re.findall(r"^(rackproof_\w+)", text, re.MULTILINE))


def test_every_rule_reads_what_the_exporter_gives(scraped: set[str]) -> None:
    """Of GPUs, also what other models and drivers tell at a scrape."""
    other_models = {exported(kind[0]) for kind in reading_kinds(full_snapshot=False)}
    used = {name for rule in EVERY for name in METRIC.findall(rule.expr)}
    used |= {name for group in read_table() for expr in (group.record or {}).values() for name in METRIC.findall(expr)}
    known = scraped | other_models | set(metric_names.EVERY)
    assert used - known - {"rackproof"} == set()


# ---- each rule fires on its fault, and on nothing else ----


def name_of(rule: Rule) -> str:
    """A rule's name in cases.yml: the alert, and the pattern of the criterion's id."""
    return f"{rule.alert.alert} {rule.criterion}".strip()


def covers_case(rule: Rule, case: str) -> bool:
    alert, _, criterion = case.partition(" ")
    pattern = re.sub(r"\\\{\\\{.*?\\\}\\\}", r"\\d+", re.escape(rule.criterion))
    ids = [item.id for item in rule.criteria] or [""]
    return alert == rule.alert.alert and criterion in ids and bool(re.fullmatch(pattern, criterion))


def test_every_rule_has_a_case_that_fires_and_one_that_does_not() -> None:
    without = [name_of(rule) for rule in EVERY if not any(covers_case(rule, case) for case in CASES)]
    assert without == []
    assert [case for case in CASES if not any(covers_case(rule, case) for rule in EVERY)] == []
    assert all(case["fires"] and case["quiet"] for case in CASES.values())


def series(case: str, number: int, values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The series of a case, of a host of its own unless they say which."""
    target = {"host": f"h{number}", "instance": f"h{number}:9836", "job": "rackproof", "rack": "r1", "run_id": "r"}
    for selector, numbers in values.items():
        name, _, reported = selector.partition("{")
        labels = target | dict(re.findall(r'(\w+)="([^"]*)"', reported))
        text = ", ".join(f'{key}="{value}"' for key, value in labels.items())
        yield {"series": f"{name}{{{text}}}", "values": numbers}


def expected(number: int, case: str) -> dict[str, Any]:
    alert, _, criterion = case.partition(" ")
    labels = {"alertname": alert, "host": f"h{number}"} | ({"criterion": criterion} if criterion else {})
    return {"labels": f"{{{', '.join(f'{key}={value!r}' for key, value in labels.items())}}}", "value": 1}


@pytest.mark.parametrize("kind", ["fires", "quiet"])
def test_promtool_plays_every_case(kind: str, tmp_path: Path) -> None:
    played = list(enumerate(CASES.items()))
    inputs = [line for number, (case, values) in played for line in series(case, number, values[kind])]
    check = {
        "expr": 'group by (host, alertname, criterion) (ALERTS{alertstate="firing"})',
        "eval_time": f"{MINUTES}m",
        "exp_samples": [expected(number, case) for number, (case, _) in played if kind == "fires"],
    }
    play(tmp_path, inputs, promql_expr_test=[check])


def play(tmp_path: Path, inputs: list[dict[str, str]], **checks: Any) -> None:
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, **checks}],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", tmp_path / "cases.yml")


def firing(at: int, *found: str) -> dict[str, Any]:
    """Which hosts' alerts fire after so many minutes."""
    samples = [{"labels": f"{{host={host!r}}}", "value": 1} for host in found]
    return {"expr": 'group by (host) (ALERTS{alertstate="firing"})', "eval_time": f"{at}m", "exp_samples": samples}


def test_a_driver_that_answers_for_no_gpu_has_lost_them_but_a_run_that_is_over_has_not(tmp_path: Path) -> None:
    """h0: the count goes while the host is up. h1: the whole target goes, as at the end of a run. h2: the next run's labels."""
    gone = {"rackproof_gpu_count": "8x5 _x30", "up": "1x35"}
    over = {"rackproof_gpu_count": "8x5 _x30", "up": "1x5 stale _x30"}
    next_run = {
        "rackproof_gpu_count": "8x5 stale _x30",
        "up": "1x5 stale _x30",
        'rackproof_gpu_count{run_id="s"}': "_x6 8x29",
        'up{run_id="s"}': "_x6 1x29",
    }
    inputs = [line for number, values in enumerate((gone, over, next_run)) for line in series("", number, values)]
    play(tmp_path, inputs, promql_expr_test=[firing(5), firing(12, "h0"), firing(35, "h0")])


def test_alerts_end_with_their_fault(tmp_path: Path) -> None:
    faults = (
        {'rackproof_gpu_throttle_active{gpu="0", reason="hw_thermal"}': "0x9 1x9 0x100"},
        {'rackproof_gpu_nvlink_replays_total{gpu="0", link="0"}': "0x9 1x110"},  # after the hour
        {'rackproof_xid_count{pci="0000:5d:00.0", xid="79"}': "_x10 1x9 stale _x100"},  # a reboot
        {"up": "1x9 0x9 1x100"},
    )
    inputs = [line for number, values in enumerate(faults) for line in series("", number, values)]
    play(
        tmp_path, inputs, promql_expr_test=[firing(9), firing(15, "h0", "h1", "h2", "h3"), firing(30, "h1"), firing(90)]
    )


def test_drift_restarts_with_another_run(tmp_path: Path) -> None:
    values = {
        "rackproof_run_started_timestamp_seconds": "1x80 4800x120",
        'rackproof_benchmark_flop_per_second{stage="soak", benchmark="stress", gpu="0"}': "100x80 80x120",
    }
    inputs = list(series("", 0, values))
    play(tmp_path, inputs, promql_expr_test=[firing(79), firing(170)])
    going_on = {**values, "rackproof_run_started_timestamp_seconds": "1x200"}
    play(tmp_path, list(series("", 0, going_on)), promql_expr_test=[firing(79), firing(170, "h0")])


def test_an_alert_reads_well(tmp_path: Path) -> None:
    labels = {"host": "h0", "instance": "h0:9836", "job": "rackproof", "rack": "r1", "run_id": "r"}
    labels |= {"gpu": "2", "uuid": "GPU-1", "severity": "critical", "action": "reset_gpu"}
    wanted = {
        "summary": "h0: GPU 2 has uncorrectable memory errors",
        "description": "GPU 2 (GPU-1) of h0 has counted 3 uncorrectable errors since the driver was loaded "
        f"(ecc-uncorrectable-volatile, wanted: 0; source: {CRITERIA['ecc-uncorrectable-volatile'].source})",
        "action": "reset_gpu",
        "runbook_url": "docs/alerts.md#rackproofgpueccuncorrectable",
    }
    inputs = list(series("", 0, {'rackproof_gpu_ecc_uncorrectable_volatile_total{gpu="2", uuid="GPU-1"}': "0x9 3"}))
    alert = {"exp_labels": labels | {"criterion": "ecc-uncorrectable-volatile"}, "exp_annotations": wanted}
    test = {"alertname": "RackproofGpuEccUncorrectable", "eval_time": "10m", "exp_alerts": [alert]}
    play(tmp_path, inputs, alert_rule_test=[test | {"eval_time": "9m", "exp_alerts": []}, test])
