"""Every query of every dashboard, asked of a real Prometheus that scrapes three real exporters of hosts with faults.

The GPUs are the stub of NVML, /sys is a tree of the test's own, and a run goes on by the code that tells of one. Of the rules
only the times are shorter: the first hour, and the ten minutes of a mean, are seconds.
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
SHORTER = {"[10m]": "[4s]", "offset 1h": "offset 4s", "> 3600": "> 4"}
HOSTS = ("h1", "h2", "h3")
BAD = "h2"
DEVICES = range(8)
BOOT = "5,0,0,-;Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP\n"
PATIENCE_S = 30.0
TIMES = {"$__rate_interval": "4s", "$__range": "120s"}
EVERYTHING = dict.fromkeys(("$rack", "$host", "$gpu", "$run_id"), ".*")
CHOSEN = {"$rack": "r1", "$host": "(h1|h2|h3)", "$gpu": "(0|1|2|3)", "$run_id": "r1"}
"""As Grafana writes what an operator has picked."""


@dataclass(frozen=True)
class Ask:
    """A query of a panel."""

    dashboard: str
    panel: str
    letter: str
    promql: str
    instant: bool


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for panel in dashboard["panels"] for one in (panel, *panel.get("panels", ()))]


def asked() -> list[Ask]:
    questions = []
    for path in DASHBOARDS:
        for panel in panels(json.loads(path.read_text())):
            for target in panel.get("targets", ()):
                instant = bool(target.get("instant"))
                questions.append(Ask(path.stem, panel["title"], target["refId"], target["expr"], instant))
    return questions


@dataclass
class Site:
    """Three hosts that are watched."""

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
        """Labels and values of each series, without those that are no number."""
        now = time.time()
        if instant:
            result = self.get("query", query=promql)["result"]
            series = [(item["metric"], [item["value"]]) for item in result]
        else:
            result = self.get("query_range", query=promql, start=now - seconds, end=now, step=1)["result"]
            series = [(item["metric"], item["values"]) for item in result]
        parsed = [(labels, [float(text) for _, text in samples if text != "NaN"]) for labels, samples in series]
        return [(labels, numbers) for labels, numbers in parsed if numbers]

    def wait_for(self, promql: str, *, instant: bool = True) -> list[tuple[dict[str, str], list[float]]]:
        ends = time.monotonic() + PATIENCE_S
        while not (result := self.values(promql, instant=instant)):
            assert time.monotonic() < ends, f"no data: {promql}"
            time.sleep(0.5)
        return result


def everything(dashboard: str) -> dict[str, str]:
    """As a dashboard is first opened: all of everything, and of the dashboard that shows one host one."""
    return {**EVERYTHING, "$host": BAD} if dashboard == "rackproof-host" else EVERYTHING


def filled(promql: str, values: dict[str, str]) -> str:
    """As Grafana does before it asks."""
    for name, value in {**TIMES, **values}.items():
        promql = promql.replace(name, value)
    assert not re.search(r"\$[^\d]", promql), promql  # $1 is of label_replace
    return promql


def start(command: list[Any], log: Path, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
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
    return nvml.write(directory / "scenario", "healthy-h100x8", *whole.NVML, *lines)


def export(directory: Path, library: Path, port: int) -> subprocess.Popen[str]:
    """The exporter of a host that has /sys and the kernel's log of its own."""
    inside = f'mount --bind {directory}/root/sys /sys && mount --bind {directory}/kmsg /dev/kmsg && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, ROOT / "rackproof", "export"]
    command += ["--port", str(port), "--state", directory / "state", "--window", "3"]
    return start(command, directory / "exporter.log", nvml.environment(library, directory / "scenario"))


def running(directory: Path, plan: Any, host: str) -> LivePublisher:
    """A run of which the gang's stage has ended, and the benchmarks go on."""
    run = HostRun.begin(directory / "state" / "runs" / plan.run_id, host, json.dumps(to_json(plan)))
    run.append(launches=[builders.launch("preflight", (host,)), builders.launch("gang", HOSTS)])
    work = run.directory / "work"
    work.mkdir()
    observations = builders.results(plan, host, "benchmark")
    observations += [replace(item, stage="benchmark") for item in builders.results(plan, host, "gang")]
    if host == BAD:
        observations = [ruined(item) for item in observations]
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


def ruined(item: Any) -> Any:
    """What the bad host measures: less, wrong words, and no digest."""
    if item.name == "integrity.wrong_words" and item.scope == "gpu=1":
        return replace(item, value=3)
    if item.name == "digest.value":
        return replace(item, value=None, status="error", reason="the kernel was killed")
    if isinstance(item.value, float) and item.unit in ("FLOP/s", "B/s", "images/s", "tokens/s"):
        return replace(item, value=item.value * 0.8)
    return item


def reports() -> str:
    """verdicts.prom of a run that failed the bad host."""
    plan = builders.plan(*HOSTS, gpu_count=len(DEVICES))
    left = builders.evidence(plan)
    left[BAD] = builders.with_observations(left[BAD], ruined)
    return render_prometheus(merge(plan, left, read_packs([])))


def hurt(directory: Path) -> None:
    """The bad host has an XID, a fatal SXid, memory errors, heat, and counters that move."""
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
    """What Prometheus is to read, and the verdicts that it is to scrape."""
    (directory / "web").mkdir()
    (directory / "web" / "verdicts.prom").write_text(reports())
    (directory / "targets.json").write_text(json.dumps(targets))
    rules = RULES.read_text()
    for long, short in SHORTER.items():
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
            own = directory / host
            links.tree(own / "root")
            (own / "kmsg").write_text(BOOT)
            scenario(own)
            publishers.enter_context(running(own, plan, host))
            new_site.exporters[host] = export(own, library, port)
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
        hurt(directory / BAD)
        yield new_site
    finally:
        publishers.close()
        processes.end_all(new_site.started)


@pytest.mark.parametrize("ask", asked(), ids=lambda ask: f"{ask.dashboard} {ask.panel} {ask.letter}")
def test_every_query_returns_data(site: Site, ask: Ask) -> None:
    site.wait_for(filled(ask.promql, everything(ask.dashboard)), instant=ask.instant)
    site.wait_for(filled(ask.promql, CHOSEN), instant=ask.instant)


def ask_of(dashboard: str, panel: str, letter: str = "A") -> Ask:
    (ask,) = (
        one for one in asked() if (one.dashboard, one.panel, one.letter) == (f"rackproof-{dashboard}", panel, letter)
    )
    return ask


def values_of(site: Site, ask: Ask, values: dict[str, str] = EVERYTHING) -> dict[tuple[str, ...], float]:
    """Labels in alphabetical order of their names -> newest value."""
    series = site.values(filled(ask.promql, values), instant=ask.instant, seconds=5)
    return {tuple(labels[name] for name in sorted(labels)): numbers[-1] for labels, numbers in series}


def eventually(site: Site, ask: Ask, wanted: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """What the panel tells, once it has all that is wanted."""
    ends = time.monotonic() + PATIENCE_S
    while not (result := values_of(site, ask)).items() >= wanted.items():
        assert time.monotonic() < ends, f"{wanted} is not in {result}"
        time.sleep(0.5)
    return result


TABLES = [
    (path.stem, panel)
    for path in DASHBOARDS
    for panel in panels(json.loads(path.read_text()))
    if panel["type"] == "table"
]


@pytest.mark.parametrize(("dashboard", "panel"), TABLES, ids=lambda of: of if isinstance(of, str) else of["title"])
def test_a_table_has_a_column_for_each_label_that_comes(site: Site, dashboard: str, panel: dict[str, Any]) -> None:
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    matrix = steps.get("groupingToMatrix")
    columns = {matrix["rowField"], matrix["columnField"]} if matrix else set(steps["organize"]["renameByName"])
    sets = []
    for target in panel["targets"]:
        series = site.wait_for(filled(target["expr"], everything(dashboard)))
        sets.append({name for labels, _ in series for name in labels})
        assert sets[-1] <= columns
    if "merge" in steps:  # rows are joined by what all of them have
        keys = set.intersection(*sets)
        assert keys
        for target in panel["targets"]:
            series = site.values(filled(target["expr"], everything(dashboard)), instant=True)
            rows = [tuple(sorted((key, labels[key]) for key in keys)) for labels, _ in series]
            assert len(rows) == len(set(rows)), f"{target['refId']} has two rows for one place"


ANNOTATIONS = [
    (path.stem, annotation) for path in DASHBOARDS for annotation in json.loads(path.read_text())["annotations"]["list"]
]


@pytest.mark.parametrize(
    ("dashboard", "annotation"), ANNOTATIONS, ids=lambda of: of if isinstance(of, str) else of["name"]
)
def test_annotations_mark_runs_stages_and_xids(site: Site, dashboard: str, annotation: dict[str, Any]) -> None:
    series = site.wait_for(filled(annotation["expr"], EVERYTHING), instant=False)
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


@pytest.mark.parametrize(("dashboard", "variable"), VARIABLES, ids=lambda of: of if isinstance(of, str) else of["name"])
def test_variables_have_values(site: Site, dashboard: str, variable: dict[str, Any]) -> None:
    series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
    values = site.get(f"label/{label}/values", **{"match[]": filled(series, EVERYTHING)})
    wanted = {"rack": ["r1"], "host": list(HOSTS), "gpu": [str(device) for device in DEVICES], "run_id": ["r1"]}
    assert sorted(values) == wanted[variable["name"]]


# ---- what panels say ----


def test_tiles_show_the_gpu_that_is_bad_and_no_other(site: Site) -> None:
    state = values_of(site, ask_of("fleet", "Rack $rack: hosts and their GPUs"))
    assert len(state) == len(HOSTS) * len(DEVICES)
    bad = {(str(gpu), host): value for (gpu, host), value in state.items() if value}
    assert bad.items() >= {("1", BAD): 2, ("2", BAD): 2}.items()
    assert {host for _, host in bad} == {BAD}


def test_dashboard_shows_the_kernel_log(site: Site) -> None:
    gpu, switch = links.GPUS[0], links.NVSWITCHES[0]
    counts = values_of(site, ask_of("fleet", "XIDs and SXids"))
    assert counts == {(BAD, gpu, "r1", "79"): 1, ("yes", BAD, switch, "r1", "20034"): 1}


def test_dashboard_shows_by_how_much_counters_rose(site: Site) -> None:
    gpu = links.GPUS[0]
    wanted = {
        ("gpu_ecc_uncorrectable_volatile", "2", BAD, "r1"): 2.0,
        ("infiniband_link_downed", links.IB[0], BAD, "1", "r1"): 3.0,
        ("pcie_aer_correctable", BAD, gpu, "r1"): 90.0,
    }
    increases = values_of(site, ask_of("burnin", "Error counters that rose"))
    moved = {labels: value for labels, value in increases.items() if labels[0] != "host_oom_kills"}
    assert moved.keys() == wanted.keys()
    for labels, value in moved.items():  # Prometheus stretches a rise to the whole of the range
        assert wanted[labels] <= value < 1.5 * wanted[labels]


def test_the_slow_host_is_below_what_the_criteria_demand(site: Site) -> None:
    ratios = eventually(site, ask_of("run", "Fleet comparison, relative to the criteria"), {})
    by_host = {host: min(value for labels, value in ratios.items() if host in labels) for host in HOSTS}
    assert by_host[BAD] < 1 < min(by_host["h1"], by_host["h3"])


def test_dashboard_shows_the_decision(site: Site) -> None:
    assert values_of(site, ask_of("fleet", "Newest report")) == {("r1",): 3}
    decisions = values_of(site, ask_of("fleet", "Verdicts by host"))
    assert decisions.keys() == {
        ("accepted", "h1", "r1", "r1"),
        ("rejected", BAD, "r1", "r1"),
        ("accepted", "h3", "r1", "r1"),
    }
    assert values_of(site, ask_of("fleet", "Verdicts by host", "B"))[BAD, "r1", "r1"] > 0


def test_dashboard_shows_the_stages(site: Site) -> None:
    stages = values_of(site, ask_of("run", "Stages"))
    assert {state for (_, stage), state in stages.items() if stage == "benchmark"} == {2}
    assert {state for (_, stage), state in stages.items() if stage == "gang"} == {3}


FIGURES = [ask for ask in asked() if ask.instant and ask.panel in ("Hosts", "GPUs", "Alerts")]


@pytest.mark.parametrize("ask", FIGURES, ids=lambda ask: f"{ask.dashboard} {ask.panel} {ask.letter}")
def test_absent_hosts_show_no_data_instead_of_zero(site: Site, ask: Ask) -> None:
    assert values_of(site, ask, {**EVERYTHING, "$host": "nobody"}) == {}


def test_lost_host_stays_on_the_dashboard(site: Site) -> None:
    """The last test: it ends an exporter."""
    processes.end_all([site.exporters["h3"]])
    eventually(site, ask_of("fleet", "Hosts", "B"), {(): 1})
    eventually(site, ask_of("fleet", "Hosts over time"), {("h3", "r1"): 3})
    eventually(site, ask_of("fleet", "Rack $rack: hosts and their GPUs"), {(str(gpu), "h3"): 3 for gpu in DEVICES})
    assert values_of(site, ask_of("fleet", "Hosts")) == {(): 2}
