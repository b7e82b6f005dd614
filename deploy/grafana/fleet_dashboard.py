"""The fleet dashboard: which hosts and GPUs need attention, and what the last report found."""

from __future__ import annotations

from typing import Any

from deploy.grafana.board import HOST, POSITION, RACK, TO_RUNBOOK, Board, Section, to_host
from deploy.grafana.parts import (
    BAD,
    BUSY,
    FINE,
    GONE,
    HALF,
    HOSTS,
    THIRD,
    WARN,
    WHOLE,
    engines,
    figures,
    lines,
    now,
    query,
    states,
    steps,
    texts,
    words,
)
from deploy.grafana.tables import Column, matrix, rows

text = texts("fleet")
RACKPROOF_ALERTS = f'alertname=~"Rackproof.+", {HOSTS}'
FIRING = f'ALERTS{{alertstate="firing", {RACKPROOF_ALERTS}}}'
CRITICAL, WARNING = (FIRING.replace("{", f'{{severity="{severity}", ') for severity in ("critical", "warning"))
UP = f'up{{job="rackproof", {HOSTS}}}'
HEALTH = {
    "0": ("answers, no alert", FINE),
    "1": ("warning", WARN),
    "2": ("critical", BAD),
    "3": ("no answer", GONE),
}
"""Number that the queries of `_racks` return for a host or a GPU -> text and colour."""
DECISIONS = {
    "accepted": ("accepted", FINE),
    "incomplete": ("incomplete", WARN),
    "rejected": ("rejected", BAD),
    **{
        name: (name, GONE)
        for mark in ("REHEARSAL", "SIMULATED")
        for name in (f"{mark} accepted", f"{mark} incomplete", f"{mark} rejected")
    },
}
ACTIONS = {
    "rma": ("rma", BAD),
    "inspect_hardware": ("inspect hardware", BAD),
    "reseat": ("reseat", WARN),
    "recable": ("recable", WARN),
    "reset_gpu": ("reset gpu", WARN),
    "reboot": ("reboot", WARN),
    "recover_imex_domain": ("recover imex domain", WARN),
    "drain_p2p": ("drain p2p", WARN),
    "configure": ("configure", WARN),
    "monitor": ("monitor", BUSY),
}
SEVERITIES = {"critical": ("critical", BAD), "warning": ("warning", WARN)}
NUMBERED = {
    "1": DECISIONS["accepted"],
    "2": DECISIONS["incomplete"],
    "3": DECISIONS["rejected"],
    "4": ("REHEARSAL or SIMULATED", GONE),
}
"""Number that the query of `_decision` returns -> text and colour."""

RULES = "count(rackproof:part:gpu)"
"""A query that has a result only if Prometheus evaluates Rackproof's rules. Without the rules no alert can fire. So other
queries return the number 0 (no alert) only if this query has a result: `0 * … and on () RULES`."""


def _now() -> Section:
    counted = f"0 * (count({UP} == 1) and on () {RULES})"
    buses, drivers = f"sum(rackproof_pci_gpus{{{HOSTS}}})", f"sum(rackproof_gpus{{{HOSTS}}})"
    hosts = (now(f"sum({UP})", "answer"), now(f"count({UP}) - sum({UP})", "silent"))
    gpus = (now(drivers, "answer"), now(f"{buses} - ({drivers} or vector(0))", "on the bus, silent"))
    alerts = (
        now(f"count({CRITICAL}) or {counted}", "critical"),
        now(f"count({WARNING}) or {counted}", "warning"),
    )
    newest = figures(text("newest-report"), now(_decision(), "{{run_id}}")).mappings([words(NUMBERED)])
    return Section(
        title="Now",
        panels=[
            figures(text("hosts"), *hosts, bad={"silent": (1, BAD)}),
            figures(text("gpus"), *gpus, bad={"on the bus, silent": (1, BAD)}),
            figures(text("alerts"), *alerts, bad={"critical": (1, BAD), "warning": (1, WARN)}),
            newest,
        ],
    )


def _decision() -> str:
    """Return a query for the decision of the newest report, as a key of NUMBERED."""
    names = ("accepted", "incomplete", "rejected", "(REHEARSAL|SIMULATED).+")
    query_text = " or ".join(
        f'{number} * (rackproof_report_decision{{decision=~"{name}"}} == 1)' for number, name in enumerate(names, 1)
    )
    return f"max by (run_id) ({query_text}) and on (run_id) topk(1, rackproof_report_end_timestamp_seconds)"


def _racks() -> Section:
    answers = f"rackproof_gpu_info{{{HOSTS}}}"
    gone = f"3 * (last_over_time({answers}[$__range]) unless on (host, gpu) {answers})"
    critical, warning = (alerts.replace("{", '{gpu!="", ') for alerts in (CRITICAL, WARNING))
    tiles = matrix(
        text("racks"),
        f"max by (host, gpu) (2 * {critical} or {warning} or 0 * {answers} and on () {RULES} or {gone})",
        ("host", "Host"),
        "gpu",
        mappings={**HEALTH, "3": ("answered before, not now", GONE)},
        numbers=True,
        link=to_host(),
    )
    worst = f"max by (rack, host) (2 * {CRITICAL} or {WARNING} or ({UP} == 0) + 3 or 0 * {UP} and on () {RULES})"
    return Section(
        title="Racks",
        panels=[
            tiles.repeat("rack").repeat_direction("h").max_per_row(3),
            states(text("hosts-over-time"), query(worst, "{{rack}} {{host}}"), mappings=HEALTH, height=10),
        ],
    )


def _findings() -> Section:
    codes = f"rackproof_xid_errors{{{HOSTS}}} or rackproof_sxid_errors{{{HOSTS}}}"
    xids = rows(
        text("xids"),
        {"A": f"max by (rack, host, pci, xid, sxid, fatal) ({codes})"},
        {
            "rack": POSITION["rack"],
            "host": POSITION["host"],
            "pci": Column(title="PCI address"),
            "xid": Column(title="XID"),
            "sxid": Column(title="SXid"),
            "fatal": Column(title="Fatal"),
            "A": Column(title="Count"),
        },
        sort="Count",
    )
    stages = matrix(
        text("hosts-by-stage"),
        f"count by (stage, state) (rackproof_stage_state{{{HOSTS}}} == 1)",
        ("stage", "Stage"),
        "state",
        scale=steps(GONE, (1, FINE)),
        width=HALF,
        height=8,
    )
    return Section(title="Findings", panels=[_firing(), xids, stages])


def _firing() -> Any:
    labels = "severity, alertname, rack, host, gpu, pci, stage, action"
    since = f"ALERTS_FOR_STATE{{{RACKPROOF_ALERTS}}} and ignoring (alertstate) {FIRING}"
    return rows(
        text("alerts-that-fire"),
        {"A": f"1000 * max by ({labels}) ({since})"},
        {
            "severity": Column(title="Severity", words=SEVERITIES, width=90),
            "alertname": Column(title="Alert", link=TO_RUNBOOK),
            **POSITION,
            "pci": Column(title="PCI address"),
            "stage": Column(title="Stage"),
            "action": Column(title="Action", words=ACTIONS),
            "A": Column(title="Since", unit="dateTimeFromNow"),
        },
        sort="Since",
        width=WHOLE,
    )


def _reports() -> Section:
    failures = rows(
        text("failures"),
        {
            "A": "sum by (run_id, rack, host, gpu, scope, serial, criterion, action) "
            f"(rackproof_report_failures{{{HOSTS}}})"
        },
        {
            "action": Column(title="Action", words=ACTIONS),
            **POSITION,
            "scope": Column(title="Part"),
            "serial": Column(title="Serial"),
            "criterion": Column(title="Criterion"),
            "A": Column(title="Count"),
            "run_id": Column(title="Run"),
        },
        sort="Count",
    )
    return Section(title="Last reports", panels=[_verdicts(), failures])


def _verdicts() -> Any:
    key, decision = "run_id, rack, host", f"rackproof_report_host_decision{{{HOSTS}}}"
    observations = f"sum by ({key}) (rackproof_report_host_observations{{{HOSTS}, status="
    verdicts = f"sum by ({key}) (rackproof_report_host_verdicts{{{HOSTS}, verdict="
    ended = "max by (run_id) (rackproof_report_end_timestamp_seconds)"
    return rows(
        text("verdicts"),
        {
            "A": f"max by ({key}, decision) ({decision} == 1)",
            "B": f'{verdicts}"fail"}})',
            "C": f'{verdicts}"inconclusive"}})',
            "D": f'{observations}"measured"}}) / {observations}"expected"}})',
            "E": f"1000 * (max by ({key}) (0 * {decision}) + on (run_id) group_left () {ended})",
        },
        {
            "rack": POSITION["rack"],
            "host": POSITION["host"],
            "decision": Column(title="Decision", words=DECISIONS),
            "B": Column(title="Fails", steps=steps(FINE, (1, BAD))),
            "C": Column(title="Inconclusive", steps=steps(FINE, (1, WARN))),
            "D": Column(title="Measured", unit="percentunit", decimals=1, steps=steps(WARN, (1, FINE))),
            "run_id": Column(title="Run"),
            "E": Column(title="Ended", unit="dateTimeAsIso"),
        },
        sort="Fails",
    )


def _load() -> Section:
    utilization = f"avg by (rack) (rackproof_gpu_utilization_ratio{{{HOSTS}}})"
    average = f"avg by (rack) (rackproof_gpu_temperature_window_mean_celsius{{{HOSTS}}})"
    hottest = f"max by (host) (rackproof_gpu_temperature_window_max_celsius{{{HOSTS}}})"
    power = f"sum by (rack) (rackproof_gpu_power_window_mean_watts{{{HOSTS}}})"
    return Section(
        title="Load, heat and power",
        panels=[
            lines(text("utilization"), query(utilization, "{{rack}}"), unit="percentunit", most=1),
            lines(
                text("engines"),
                *engines(f"avg by (rack) (rackproof_gpu_gpm_%s{{{HOSTS}}})", "{{rack}}"),
                unit="percentunit",
                most=1,
            ),
            lines(text("average-temperature"), query(average, "{{rack}}"), unit="celsius", width=THIRD, least=20),
            lines(text("hottest"), query(hottest, "{{host}}"), unit="celsius", width=THIRD, least=20),
            lines(text("power"), query(power, "{{rack}}"), unit="watt", width=THIRD),
        ],
    )


BOARD = Board(
    name="fleet",
    title="Rackproof fleet",
    about="Racks, hosts and GPUs: which need attention, the progress of the run, and the result of the last report.",
    variables=[RACK, HOST],
    sections=[_now(), _racks(), _findings(), _reports(), _load()],
)
