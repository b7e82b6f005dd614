"""Test every query of every dashboard with a real Prometheus that scrapes the real exporters of three hosts, one of them faulty.

The exporters read a fake NVML, a fake /sys and a fake kernel log. They also read the progress of a run, which the agent's
`LivePublisher` publishes. The Prometheus rules are those of the product, with times of ten minutes and one hour shortened to four
seconds.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agent.exporter.live import LivePublisher
from agent.gang.rank_state import RankState
from agent.run.record import HostRun
from fleet.judge.criteria import read_packs
from fleet.report.merge import merge
from fleet.report.prometheus import render_prometheus
from schemas.records import to_json
from tests import builders
from tests.fakes import links, nvml, whole
from tests.lab import processes
from tests.lab.machine import requirements_missing
from tests.lab.prometheus import Prometheus, free_port, write_config

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus" / "rackproof.rules.yml"
SHORTER_TIMES = {"[10m]": "[4s]", "offset 1h": "offset 4s", "> 3600": "> 4"}
HOSTS = ("h1", "h2", "h3")
BAD = "h2"
DEVICES = range(8)
BOOT = "5,0,0,-;Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n"
TIMEOUT_S = 30.0
TIMES = {"$__rate_interval": "4s", "$__range": "120s"}
ALL_VALUES = dict.fromkeys(("$rack", "$host", "$gpu", "$run_id"), ".*")
SELECTED_VALUES = {"$rack": "r1", "$host": "(h1|h2|h3)", "$gpu": "(0|1|2|3)", "$run_id": "r1"}
"""Dashboard variable -> value, if the user has selected several values. Grafana inserts them into a query in this form."""


@dataclass(frozen=True)
class PanelQuery:
    """A query of a panel."""

    dashboard: str
    panel: str
    letter: str
    """Grafana's name of the query in its panel (`refId`)."""
    promql: str
    instant: bool


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all panels of a dashboard, including those in rows."""
    return [nested for panel in dashboard["panels"] for nested in (panel, *panel.get("panels", ()))]


def panel_queries() -> list[PanelQuery]:
    """Return every query of every panel of every dashboard."""
    queries = []
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", ()):
                instant = bool(target.get("instant"))
                queries.append(PanelQuery(path.stem, panel["title"], target["refId"], target["expr"], instant))
    return queries


@dataclass
class Site:
    """Three monitored hosts."""

    directory: Path
    prometheus: Prometheus
    started: list[subprocess.Popen[str]]
    exporters: dict[str, subprocess.Popen[str]]

    def get(self, path: str, **parameters: Any) -> Any:
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.prometheus.url}/api/v1/{path}?{query}", timeout=15) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def values(self, promql: str, *, instant: bool, seconds: float = 20) -> list[tuple[dict[str, str], list[float]]]:
        """Return labels and values of each series, without NaN values and without series that have only NaN values.

        With `instant`, a series has only its newest value, otherwise its values of the last `seconds` seconds.
        """
        now = time.time()
        if instant:
            answer = self.get("query", query=promql)["result"]
            series = [(item["metric"], [item["value"]]) for item in answer]
        else:
            answer = self.get("query_range", query=promql, start=now - seconds, end=now, step=1)["result"]
            series = [(item["metric"], item["values"]) for item in answer]
        numeric = [(labels, [float(text) for _, text in samples if text != "NaN"]) for labels, samples in series]
        return [(labels, numbers) for labels, numbers in numeric if numbers]

    def wait_for(self, promql: str, *, instant: bool = True) -> list[tuple[dict[str, str], list[float]]]:
        """Return the `values` of a query once it has a series. Fail after TIMEOUT_S seconds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (series := self.values(promql, instant=instant)):
            assert time.monotonic() < deadline, f"no data: {promql}"
            time.sleep(0.5)
        return series


def default_values(dashboard: str) -> dict[str, str]:
    """Return dashboard variable -> value. Everything is selected, except that `rackproof-host` shows only host BAD."""
    return {**ALL_VALUES, "$host": BAD} if dashboard == "rackproof-host" else ALL_VALUES


def substitute(promql: str, values: dict[str, str]) -> str:
    """Replace the variables in a query, like Grafana."""
    for name, value in {**TIMES, **values}.items():
        promql = promql.replace(name, value)
    assert not re.search(r"\$[^\d]", promql), promql  # $1 belongs to label_replace
    return promql


def start(command: list[Any], log: Path, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command that writes its output to `log`; `more` is added to its environment."""
    with log.open("w") as stream:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            text=True,
            env=processes.environment(more),
            start_new_session=True,
        )


def scenario(directory: Path, *lines: str) -> Path:
    """Write the scenario of a host's fake NVML: a healthy host, with these lines as overrides."""
    return nvml.write(directory / "scenario", "healthy-h100x8", *whole.NVML, *lines)


def export(directory: Path, library: Path, port: int) -> subprocess.Popen[str]:
    """Start an exporter with its own /sys and kernel log."""
    inside = f'mount --bind {directory}/root/sys /sys && mount --bind {directory}/kmsg /dev/kmsg && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, ROOT / "rackproof", "export"]
    command += ["--port", str(port), "--state", directory / "state", "--window", "3"]
    return start(command, directory / "exporter.log", nvml.environment(library, directory / "scenario"))


def publish_run(directory: Path, plan: Any, host: str) -> LivePublisher:
    """Publish an invented run of a host: the gang stage (launches of several hosts) has finished, and the benchmark stage runs.

    The figures of both stages are published as results of the benchmark stage.
    """
    run = HostRun.begin(directory / "state" / "runs" / plan.run_id, host, json.dumps(to_json(plan)))
    run.append(launches=[builders.launch("preflight", (host,)), builders.launch("gang", HOSTS)])
    work = run.directory / "work"
    work.mkdir()
    observations = builders.results(plan, host, "benchmark")
    observations += [replace(item, stage="benchmark") for item in builders.results(plan, host, "gang")]
    if host == BAD:
        observations = [degrade(item) for item in observations]
    (work / "rank0.json").write_text(json.dumps({"observations": [to_json(item) for item in observations]}))
    step = builders.observation("training.step_time", 0.25, unit="s", network="resnet50")
    loss = builders.observation("training.loss", 1.5, network="resnet50")
    (work / "rank0.now.json").write_text(json.dumps({"observations": [to_json(item) for item in (step, loss)]}))
    return LivePublisher(
        run,
        stage="benchmark",
        deadline_s=3600.0,
        work=work,
        ranks=DEVICES,
        states=lambda: [
            RankState(rank=rank, scope=f"gpu={rank}", phase="gemm bf16", waiting_s=0.5 * rank, silent_s=0.2)
            for rank in DEVICES
        ],
    )


def degrade(item: Any) -> Any:
    """Return the observation as host BAD measures it: lower rates, wrong words in memory, and no value of `digest.value`."""
    if item.name == "integrity.wrong_words" and item.scope == "gpu=1":
        return replace(item, value=3)
    if item.name == "digest.value":
        return replace(item, value=None, status="error", reason="the kernel was killed")
    if isinstance(item.value, float) and item.unit in ("FLOP/s", "B/s", "images/s", "tokens/s"):
        return replace(item, value=item.value * 0.8)
    return item


def verdicts_text() -> str:
    """Return the text of verdicts.prom for a run in which host BAD failed."""
    plan = builders.plan(*HOSTS, gpu_count=len(DEVICES))
    evidence = builders.evidence(plan)
    evidence[BAD] = builders.with_observations(evidence[BAD], degrade)
    return render_prometheus(merge(plan, evidence, read_packs([])))


def inject_faults(directory: Path) -> None:
    """Give the host of this directory an XID, a fatal SXid, memory errors, thermal throttling and rising counters."""
    uptime = int(float(Path("/proc/uptime").read_text().split()[0]) * 1e6)
    gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
    messages = [
        f"NVRM: Xid (PCI:{gpu}): 79, pid='<unknown>', GPU has fallen off the bus.",
        f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up",
    ]
    with (directory / "kmsg").open("a") as log:
        log.writelines(f"4,{number},{uptime},-;{text}\n" for number, text in enumerate(messages, 1))
    links.set_counter(directory / "root", links.IB[0], "link_downed", 3)
    links.set_aer(directory / "root", links.GPUS[0], "correctable", 90)
    hot = "gpu.1.CurrentClocksEventReasons=0x48"
    scenario(directory, "gpu.2.TotalEccErrors.1.0=2", hot, hot.replace("Event", "Throttle"))


def configure(directory: Path, targets: list[dict[str, Any]]) -> Path:
    """Write the configuration, rules and targets of Prometheus, and the verdicts that it scrapes. Return prometheus.yml."""
    (directory / "web").mkdir()
    (directory / "web" / "verdicts.prom").write_text(verdicts_text())
    (directory / "targets.json").write_text(json.dumps(targets))
    rules = RULES.read_text()
    for long, short in SHORTER_TIMES.items():
        assert long in rules
        rules = rules.replace(long, short)
    (directory / "rules.yml").write_text(rules)
    config = directory / "prometheus.yml"
    write_config(config, directory / "targets.json", "1s", job="rackproof", rules=[directory / "rules.yml"])
    return config


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    assert not requirements_missing(), requirements_missing()
    assert shutil.which("prometheus"), "install the Debian package prometheus"
    directory = tmp_path_factory.mktemp("site")
    library, plan = nvml.build(directory / "nvml"), builders.plan(*HOSTS, gpu_count=len(DEVICES))
    server, web, *ports = (free_port() for _ in range(2 + len(HOSTS)))
    address = f"http://127.0.0.1:{server}"
    new_site = Site(directory, Prometheus(url=address, log=directory / "prometheus.log", run=processes.run), [], {})
    targets = [{"targets": [f"127.0.0.1:{web}"], "labels": {"job": "node", "__metrics_path__": "/verdicts.prom"}}]
    publishers = contextlib.ExitStack()
    try:
        for host, port in zip(HOSTS, ports, strict=True):
            host_directory = directory / host
            links.build_tree(host_directory / "root")
            (host_directory / "kmsg").write_text(BOOT)
            scenario(host_directory)
            publishers.enter_context(publish_run(host_directory, plan, host))
            new_site.exporters[host] = export(host_directory, library, port)
            new_site.started.append(new_site.exporters[host])
            targets.append({"targets": [f"127.0.0.1:{port}"], "labels": {"host": host, "rack": "r1", "run_id": "r1"}})
        config = configure(directory, targets)
        serve = [sys.executable, "-m", "http.server", str(web), "--bind", "127.0.0.1", "--directory", directory / "web"]
        new_site.started.append(start(serve, directory / "web.log"))
        options = [f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
        process = start(["prometheus", *options, f"--web.listen-address=127.0.0.1:{server}"], new_site.prometheus.log)
        new_site.started.append(process)
        new_site.prometheus.wait_ready(process)
        new_site.prometheus.wait_for("rackproof_gpu_ecc_uncorrectable_volatile_total == 0", timeout=30, at_least=24)
        new_site.wait_for("count_over_time(rackproof_infiniband_link_downed_total[10s]) >= 3")
        inject_faults(directory / BAD)
        yield new_site
    finally:
        publishers.close()
        processes.end_all(new_site.started)


@pytest.mark.parametrize(
    "panel_query",
    panel_queries(),
    ids=lambda panel_query: f"{panel_query.dashboard} {panel_query.panel} {panel_query.letter}",
)
def test_every_query_returns_data(site: Site, panel_query: PanelQuery) -> None:
    site.wait_for(substitute(panel_query.promql, default_values(panel_query.dashboard)), instant=panel_query.instant)
    site.wait_for(substitute(panel_query.promql, SELECTED_VALUES), instant=panel_query.instant)


def find_query(dashboard: str, panel: str, letter: str = "A") -> PanelQuery:
    """Return a query by its letter (`refId`) and the title of its panel. `dashboard` is the name without `rackproof-`."""
    (panel_query,) = (
        item
        for item in panel_queries()
        if (item.dashboard, item.panel, item.letter) == (f"rackproof-{dashboard}", panel, letter)
    )
    return panel_query


def values_of(site: Site, panel_query: PanelQuery, values: dict[str, str] = ALL_VALUES) -> dict[tuple[str, ...], float]:
    """Return a mapping from the label values of a series, ordered by label name, to its newest value."""
    series = site.values(substitute(panel_query.promql, values), instant=panel_query.instant, seconds=5)
    return {tuple(labels[name] for name in sorted(labels)): numbers[-1] for labels, numbers in series}


def wait_for_values(
    site: Site, panel_query: PanelQuery, wanted: dict[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    """Return the values of a query once there are some, and they include `wanted`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ((values := values_of(site, panel_query)) and values.items() >= wanted.items()):
        assert time.monotonic() < deadline, f"{wanted} is not in {values}"
        time.sleep(0.5)
    return values


TABLES = [
    (path.stem, panel)
    for path in DASHBOARDS
    for panel in panels(json.loads(path.read_text()))
    if panel["type"] == "table"
]


@pytest.mark.parametrize(
    ("dashboard", "panel"), TABLES, ids=lambda value: value if isinstance(value, str) else value["title"]
)
def test_table_has_a_column_for_each_returned_label(site: Site, dashboard: str, panel: dict[str, Any]) -> None:
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    matrix = steps.get("groupingToMatrix")
    columns = {matrix["rowField"], matrix["columnField"]} if matrix else set(steps["organize"]["renameByName"])
    sets = []
    for target in panel["targets"]:
        series = site.wait_for(substitute(target["expr"], default_values(dashboard)))
        sets.append({name for labels, _ in series for name in labels})
        assert sets[-1] <= columns
    if "merge" in steps:  # Grafana joins rows by their common labels
        keys = set.intersection(*sets)
        assert keys
        for target in panel["targets"]:
            series = site.values(substitute(target["expr"], default_values(dashboard)), instant=True)
            rows = [tuple(sorted((key, labels[key]) for key in keys)) for labels, _ in series]
            assert len(rows) == len(set(rows)), f"{target['refId']} has two rows with the same labels"


ANNOTATIONS = [
    (path.stem, annotation) for path in DASHBOARDS for annotation in json.loads(path.read_text())["annotations"]["list"]
]


@pytest.mark.parametrize(
    ("dashboard", "annotation"), ANNOTATIONS, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_annotations_mark_runs_and_stages_and_xids(site: Site, dashboard: str, annotation: dict[str, Any]) -> None:
    series = site.wait_for(substitute(annotation["expr"], ALL_VALUES), instant=False)
    marked = re.findall(r"{{(\w+)}}", annotation["titleFormat"])
    assert marked
    for labels, numbers in series:
        assert set(marked) | set(annotation["tagKeys"].split(",")) <= set(labels)
        if annotation["useValueForTime"]:
            assert all(0 < time.time() - number / 1000 < 600 for number in numbers)
        else:
            assert set(numbers) == {1}


VARIABLES = [
    (path.stem, variable)
    for path in DASHBOARDS
    for variable in json.loads(path.read_text())["templating"]["list"]
    if variable["type"] == "query"
]


@pytest.mark.parametrize(
    ("dashboard", "variable"), VARIABLES, ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_query_of_each_variable_returns_the_values_of_the_site(
    site: Site, dashboard: str, variable: dict[str, Any]
) -> None:
    series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
    values = site.get(f"label/{label}/values", **{"match[]": substitute(series, ALL_VALUES)})
    wanted = {"rack": ["r1"], "host": list(HOSTS), "gpu": [str(device) for device in DEVICES], "run_id": ["r1"]}
    assert sorted(values) == wanted[variable["name"]]


# ---- the content of panels ----


def test_only_bad_gpus_are_highlighted(site: Site) -> None:
    state = values_of(site, find_query("fleet", "Rack $rack: hosts and their GPUs"))
    assert len(state) == len(HOSTS) * len(DEVICES)
    bad = {(str(gpu), host): value for (gpu, host), value in state.items() if value}
    assert bad.items() >= {("1", BAD): 2, ("2", BAD): 2}.items()  # 2: critical
    assert {host for _, host in bad} == {BAD}


def test_dashboard_counts_the_xids_and_sxids_in_the_kernel_log(site: Site) -> None:
    gpu, switch = links.GPUS[0], links.NVSWITCHES[0]
    counts = values_of(site, find_query("fleet", "XIDs and SXids"))
    assert counts == {(BAD, gpu, "r1", "79"): 1, ("yes", BAD, switch, "r1", "20034"): 1}


def test_dashboard_shows_by_how_much_counters_rose(site: Site) -> None:
    gpu = links.GPUS[0]
    wanted = {
        ("gpu_ecc_uncorrectable_volatile", "2", BAD, "r1"): 2.0,
        ("infiniband_link_downed", links.IB[0], BAD, "1", "r1"): 3.0,
        ("pcie_aer_correctable", BAD, gpu, "r1"): 90.0,
    }
    increases = values_of(site, find_query("burnin", "Error counters that rose"))
    risen = {labels: value for labels, value in increases.items() if labels[0] != "host_oom_kills"}
    assert risen.keys() == wanted.keys()
    for labels, value in risen.items():  # Prometheus extrapolates an increase to the whole range
        assert wanted[labels] <= value < 1.5 * wanted[labels]


def test_slow_host_is_below_the_limit_of_the_criteria(site: Site) -> None:
    ratios = wait_for_values(site, find_query("run", "Fleet comparison, relative to the criteria"), {})
    by_host = {host: min(value for labels, value in ratios.items() if host in labels) for host in HOSTS}
    assert by_host[BAD] < 1 < min(by_host["h1"], by_host["h3"])


def test_dashboard_shows_the_decision_on_each_host(site: Site) -> None:
    assert values_of(site, find_query("fleet", "Newest report")) == {("r1",): 3}  # 3: rejected
    decisions = values_of(site, find_query("fleet", "Verdicts by host"))
    assert decisions.keys() == {
        ("accepted", "h1", "r1", "r1"),
        ("rejected", BAD, "r1", "r1"),
        ("accepted", "h3", "r1", "r1"),
    }
    assert values_of(site, find_query("fleet", "Verdicts by host", "B"))[BAD, "r1", "r1"] > 0


def test_dashboard_shows_the_state_of_each_stage(site: Site) -> None:
    stages = values_of(site, find_query("run", "Stages"))
    assert {state for (_, stage), state in stages.items() if stage == "benchmark"} == {2}  # 2: running
    assert {state for (_, stage), state in stages.items() if stage == "gang"} == {3}  # 3: finished


COUNT_QUERIES = [
    panel_query
    for panel_query in panel_queries()
    if panel_query.instant and panel_query.panel in ("Hosts", "GPUs", "Alerts")
]


@pytest.mark.parametrize(
    "panel_query",
    COUNT_QUERIES,
    ids=lambda panel_query: f"{panel_query.dashboard} {panel_query.panel} {panel_query.letter}",
)
def test_panel_shows_no_data_instead_of_zero_if_the_selected_host_does_not_exist(
    site: Site, panel_query: PanelQuery
) -> None:
    assert values_of(site, panel_query, {**ALL_VALUES, "$host": "absent"}) == {}


def test_lost_host_stays_on_the_dashboard(site: Site) -> None:
    """Must be the last test, since it stops an exporter."""
    processes.end_all([site.exporters["h3"]])
    wait_for_values(site, find_query("fleet", "Hosts", "B"), {(): 1})
    wait_for_values(site, find_query("fleet", "Hosts over time"), {("h3", "r1"): 3})  # 3: no answer
    wait_for_values(
        site, find_query("fleet", "Rack $rack: hosts and their GPUs"), {(str(gpu), "h3"): 3 for gpu in DEVICES}
    )
    assert values_of(site, find_query("fleet", "Hosts")) == {(): 2}
