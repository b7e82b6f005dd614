"""The Prometheus exporter: its output for a healthy GPU host (a golden file), metric names, failing collectors, HTTP server."""

from __future__ import annotations

import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent.exporter import exporter
from agent.exporter.defaults import COLLECT_S, COMPATIBLE
from agent.exporter.exporter import Exporter, serve
from agent.exporter.metric_names import prometheus_name
from collectors.base import Absent, Collector, Family
from collectors.nvml import absent_samples, reading_kinds
from rackproof.main import main
from tests import ROOT
from tests.fakes import host, nvml

GOLDEN = ROOT / "tests" / "golden" / "exporter.txt"
VARIES = re.compile(
    r"^(rackproof_host_cpus|rackproof_collector_(?:duration_seconds|last_success_timestamp_seconds)\{.*\}) .*$",
    re.MULTILINE,
)
"""Lines of a scrape whose values depend on the machine that runs the test, or on the time."""

LOST_READINGS = len(absent_samples(Absent(status="error", reason="lost"), full_snapshot=False, counters=True))
"""Number of readings that are missing for a lost GPU: NVML returns no handle for it, so none of its readings has a value."""

SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry, generate_latest
from agent.exporter.exporter import Exporter
from collectors.host import HostCollector
from collectors.nvml import NvmlCollector
from collectors.xid import XidCollector
exporter = Exporter([HostCollector(Path(sys.argv[1])), NvmlCollector([0, 1], keep_open=True), XidCollector(Path(sys.argv[2]))])
registry = CollectorRegistry()
registry.register(exporter)
print(generate_latest(registry).decode(), end="")
"""

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Sample name and sorted labels -> value."""


class Fake:
    """A collector that returns the families that `function` returns. `calls` counts the calls of `collect`."""

    def __init__(self, name: str, function: Callable[[], Iterable[Family]]) -> None:
        self.name = name
        self.calls = 0
        self._function = function

    def collect(self) -> Iterable[Family]:
        self.calls += 1
        return self._function()


def family(name: str, value: object, unit: str = "1", *, counter: bool = False, **labels: str) -> Family:
    return Family(name=name, unit=unit, help="Help", counter=counter, readings=[(labels, value)])  # type: ignore[list-item]


def load() -> list[Family]:
    return [family("host.load", 0.5)]


def breaks() -> list[Family]:
    raise OSError("the source went away")


def scrape(*collectors: Collector) -> str:
    return text_of(Exporter(collectors))


def text_of(instance: Exporter) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(instance)  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def parsed(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def series(text: str) -> Series:
    samples = [sample for metric in parsed(text) for sample in metric.samples]
    values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(values) == len(samples), "two samples have the same name and labels"
    return values


# ---- a healthy machine ----


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


def scrape_machine(library: Path, directory: Path, scenario: Path) -> str:
    """Run the real collectors (for the first two of four GPUs) in a separate process, and return the exported text.

    `scenario` is the file with the answers of the fake NVML. The kernel log contains faults in every scenario.
    """
    root, log = host.build_tree(directory / "root", gpus=4), nvml.CHECKOUT / "tests/fakes/kmsg/faults.txt"
    return nvml.python(["-c", SCRAPE, root, log], library, scenario)


@pytest.fixture(scope="module")
def healthy(library: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return scrape_machine(library, tmp_path_factory.mktemp("host"), nvml.scenario("healthy-h200x4"))


def test_scrape_of_a_healthy_machine_equals_the_golden_file(healthy: str) -> None:
    """To accept a change, run `UPDATE_GOLDEN=1 pytest tests/unit/agent/exporter/test_exporter.py` and review the diff."""
    text = VARIES.sub(r"\1 0.0", healthy)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_parsed_scrape_has_the_readings_of_the_machine(healthy: str) -> None:
    result = series(healthy)
    gpu = (("gpu", "0"), ("uuid", "GPU-41b7e0c5-2d93-4f68-ba10-5c8e96f3d702"))
    assert result[("rackproof_gpus", ())] == 2
    assert result[("rackproof_gpu_power_watts", gpu)] == 78.964
    assert result[("rackproof_gpu_energy_joules_total", gpu)] == 26991.95
    assert result[("rackproof_gpu_temperature_celsius", gpu)] == 29
    assert result[("rackproof_gpu_clock_memory_hertz", gpu)] == 3.201e9
    assert result[("rackproof_gpu_memory_total_bytes", gpu)] == 150754820096
    assert result[("rackproof_gpu_ecc_enabled", gpu)] == 1
    assert result[("rackproof_xid_errors", (("pci", "0000:5d:00.0"), ("xid", "79")))] == 1
    assert result[("rackproof_host_memory_total_bytes", ())] == 2113404636 * 1024


def test_metrics_with_names_of_dcgm_exporter_have_its_units_and_labels() -> None:
    def read() -> list[Family]:
        values = (("gpu.uuid", "GPU-1", "1"), ("gpu.name", "NVIDIA H200", "1"), ("gpu.clock.sm", 1.98e9, "Hz"))
        more = (
            ("gpu.memory.total", 3 << 30, "B"),
            ("gpu.memory.used", 1 << 30, "B"),
            ("gpu.utilization", 0.5, "ratio"),
        )
        return [family(name, value, unit, gpu="0") for name, value, unit in (*values, *more)] + [
            family("gpu.power", Absent(status="error", reason="lost"), "W", gpu="0")
        ]

    text = text_of(Exporter([Fake("nvml", read)], ["dcgm"]))
    exported = {
        name: (value, dict(labels)) for (name, labels), value in series(text).items() if name.startswith("DCGM_")
    }
    assert {name: value for name, (value, _) in exported.items()} == {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_GPU_UTIL": 50,
        "DCGM_FI_DEV_FB_USED": 1024,
        "DCGM_FI_DEV_FB_FREE": 2048,
    }
    labels = exported["DCGM_FI_DEV_SM_CLOCK"][1]
    assert (labels["gpu"], labels["device"], labels["UUID"], labels["modelName"]) == (
        "0",
        "nvidia0",
        "GPU-1",
        "NVIDIA H200",
    )
    assert "DCGM_" not in text_of(Exporter([Fake("nvml", read)]))


def test_gpm_readings_are_exported_under_the_names_of_dcgm_prof_fields() -> None:
    def read() -> list[Family]:
        values = (
            ("gpu.uuid", "GPU-1", "1"),
            ("gpu.gpm.tensor_active", 0.625, "ratio"),
            ("gpu.gpm.pcie_sent", 2e9, "B/s"),
        )
        unsupported = Absent(status="unsupported", reason="the GPU has no GPM")
        return [family(name, value, unit, gpu="0") for name, value, unit in values] + [
            family("gpu.gpm.memory_active", unsupported, "ratio", gpu="0")
        ]

    exported = {name: value for (name, _), value in series(text_of(Exporter([Fake("nvml", read)], ["dcgm"]))).items()}
    assert {name: value for name, value in exported.items() if name.startswith("DCGM_")} == {
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.625,
        "DCGM_FI_PROF_PCIE_TX_BYTES": 2e9,
    }


def test_dcgm_xid_metric_is_the_newest_xid() -> None:
    counts: dict[str, int] = {}

    def read() -> list[Family]:
        gpus = Family(name="gpu.pci_bus_id", unit="1", help="Help")
        gpus.readings = [({"gpu": "0"}, "00000000:5D:00.0"), ({"gpu": "1"}, "00000000:5E:00.0")]
        xids = Family(name="xid.count", unit="1", help="Help")
        xids.readings = [({"pci": "0000:5d:00.0", "xid": code}, count) for code, count in counts.items()]
        return [gpus, xids, family("xid.last_seen", 1.0, "s")]

    exporter = Exporter([Fake("all", read)], ["dcgm"])

    def last() -> dict[str, float]:
        result = series(text_of(exporter)).items()
        return {dict(labels)["gpu"]: value for (name, labels), value in result if name == "DCGM_FI_DEV_XID_ERRORS"}

    assert last() == {"0": 0, "1": 0}
    counts |= {"79": 1}
    assert last() == {"0": 79, "1": 0}
    counts |= {"48": 1}
    assert last() == {"0": 48, "1": 0}
    assert last() == {"0": 48, "1": 0}


def test_names_follow_the_rules_of_prometheus(healthy: str) -> None:
    for metric in parsed(healthy):
        assert metric.name.startswith("rackproof_")
        assert metric.documentation
        for sample in metric.samples:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", sample.name)
            assert sample.name.endswith("_total") == (metric.type == "counter"), sample.name
            assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in sample.labels)


def test_nvml_counters_are_exported_as_counters_and_other_readings_as_gauges(healthy: str) -> None:
    kinds = {metric.name: metric.type for metric in parsed(healthy)}
    for name, unit, change, *_ in reading_kinds(full_snapshot=False, counters=True):
        # A reading that is a text has no metric of its own: it is a label of the `_info` series.
        if prometheus_name(name, unit) in kinds:
            assert kinds[prometheus_name(name, unit)] == ("counter" if change == "counter" else "gauge")


def test_identity_is_in_one_info_series_per_scope(healthy: str) -> None:
    """A scope is what a reading is about: the host, a GPU, or the link of a GPU to its peer."""
    exported = {labels: value for (name, labels), value in series(healthy).items() if name.endswith("_info")}
    assert set(exported.values()) == {1.0}
    reported = [dict(labels) for labels in exported]
    assert (
        reported[0].items() > {"cpu_model": "Intel(R) Xeon(R) Platinum 8480C", "driver_version": "580.159.04"}.items()
    )
    gpus = [labels for labels in reported if "serial" in labels]
    assert [(labels["gpu"], labels["serial"], labels["name"]) for labels in gpus] == [
        ("0", "1650000000000", "NVIDIA H200"),
        ("1", "1650000000001", "NVIDIA H200"),
    ]
    peer = {"gpu": "0", "peer": "1", "peer_link": "NV18", "uuid": "GPU-41b7e0c5-2d93-4f68-ba10-5c8e96f3d702"}
    assert peer in reported


def test_lost_gpu_is_missing_in_the_scrape_and_the_other_gpu_is_unchanged(
    library: Path, healthy: str, tmp_path: Path
) -> None:
    scenario = nvml.write(tmp_path / "scenario", "healthy-h200x4", "gpu.1.*=!15")
    before, after = (series(VARIES.sub("", text)) for text in (healthy, scrape_machine(library, tmp_path, scenario)))
    gone = [dict(labels) for _, labels in before.keys() - after.keys()]
    # The series of GPU 0 about its link to GPU 1 disappear too.
    assert {labels["gpu"] for labels in gone if labels.get("peer") != "1"} == {"1"}
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    absences = ("rackproof_readings_absent", (("gpu", "1"), ("status", "error")))
    assert changed == {("rackproof_gpus", ()): 1, absences: LOST_READINGS}


# ---- failing and blocking collectors ----


def test_failed_collector_has_success_0_and_the_others_are_exported() -> None:
    result = series(scrape(Fake("bad", breaks), Fake("good", load)))
    assert result[("rackproof_host_load", ())] == 0.5
    assert result[("rackproof_collector_success", (("collector", "bad"),))] == 0
    assert result[("rackproof_collector_success", (("collector", "good"),))] == 1
    assert [labels for name, labels in result if name == "rackproof_collector_duration_seconds"] == [
        (("collector", "good"),)
    ]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield the event that a blocked collector waits for. The event is set after the test, so that no thread remains."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def limit_collectors() -> Iterator[Callable[[float], object]]:
    """Yield a function that sets the time limit of the collectors until the end of the test."""
    token = COLLECT_S.set(COLLECT_S.get())
    yield COLLECT_S.set
    COLLECT_S.reset(token)


def test_scrapes_stay_fast_while_a_collector_blocks(
    limit_collectors: Callable[[float], object], gate: threading.Event
) -> None:
    def blocks() -> list[Family]:
        gate.wait()
        return [family("host.uptime", 7.0, "s")]

    stuck = Fake("stuck", blocks)
    instance = Exporter([stuck, Fake("good", load)])
    limit_collectors(0.2)
    text_of(instance)
    limit_collectors(30.0)
    began = time.monotonic()
    result = series(text_of(instance))
    assert time.monotonic() - began < 5
    assert stuck.calls == 1
    assert result[("rackproof_collector_success", (("collector", "stuck"),))] == 0
    assert result[("rackproof_host_load", ())] == 0.5


def test_time_for_which_a_collector_has_been_stuck_is_exported(
    limit_collectors: Callable[[float], object], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks() -> list[Family]:
        gate.wait()
        return load()

    limit_collectors(0.1)
    instance = Exporter([Fake("stuck", blocks), Fake("bad", breaks)])
    stuck, bad = [("rackproof_collector_stuck_seconds", (("collector", name),)) for name in ("stuck", "bad")]
    assert series(text_of(instance))[stuck] == 0
    time.sleep(0.2)
    result = series(text_of(instance))
    assert 0.2 <= result[stuck] < 5
    assert result[bad] == 0
    after_a_step = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: after_a_step)
    assert series(text_of(instance))[stuck] < 3600, "a step of the host's clock counts as time"
    gate.set()
    time.sleep(0.05)
    assert series(text_of(instance))[stuck] == 0


class FakeSource:
    """An `exporter.Source`: it returns Prometheus families. (A collector returns objects of the class `Family`.)"""

    def __init__(self, name: str, function: Callable[[], Iterable[Metric]]) -> None:
        self.name, self.collect = name, function


def test_failed_source_has_success_0_like_a_failed_collector() -> None:
    def gives() -> list[Metric]:
        metric = Metric("rackproof_run_updated_timestamp_seconds", "Help", "gauge")
        metric.add_sample(metric.name, {}, 7.0)
        return [metric]

    def fails() -> list[Metric]:
        raise OSError("the file cannot be read")

    text = text_of(Exporter([Fake("good", load)], sources=[FakeSource("run", gives), FakeSource("sampler", fails)]))
    result = series(text)
    assert result[("rackproof_run_updated_timestamp_seconds", ())] == 7.0
    assert {
        dict(labels)["collector"]: value for (name, labels), value in result.items() if name.endswith("_success")
    } == {
        "good": 1,
        "run": 1,
        "sampler": 0,
    }


def test_missing_readings_have_no_series_and_are_counted_by_gpu_and_status() -> None:
    lost = Absent(status="error", reason="NVML: GPU is lost")
    families = [
        family("gpu.power", lost, "W", gpu="3"),
        family("gpu.name", lost, gpu="3"),
        family("gpu.serial", Absent(status="unsupported", reason="NVML: Not Supported"), gpu="2"),
        family("host.load", Absent(status="error", reason="/proc/loadavg: gone")),
    ]
    result = series(scrape(Fake("gpus", lambda: families)))
    assert {key: value for key, value in result.items() if "collector" not in key[0]} == {
        ("rackproof_readings_absent", (("gpu", ""), ("status", "error"))): 1,
        ("rackproof_readings_absent", (("gpu", "2"), ("status", "unsupported"))): 1,
        ("rackproof_readings_absent", (("gpu", "3"), ("status", "error"))): 2,
    }


@pytest.mark.parametrize(
    "hostile",
    [
        '"} 1\nfake 9',
        'x",y="z',
        "\\",
        '\\"',
        "line\nline",
        "# TYPE fake gauge",
        "{}",
        "",
        "é\u202e\x1b[31m",
        "a" * 5000,
    ],
)
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "label"])
def test_hostile_value_stays_inside_its_label(hostile: str, as_text: bool) -> None:
    reading = family("gpu.name", hostile, gpu="0") if as_text else family("gpu.processes", 3, gpu=hostile)
    result = series(scrape(Fake("gpus", lambda: [reading])))
    ours = {name: (dict(labels), value) for (name, labels), value in result.items() if "collector" not in name}
    if as_text:
        assert ours == {"rackproof_gpu_info": ({"gpu": "0", "name": hostile}, 1)}
    else:
        assert ours == {"rackproof_gpu_processes": ({"gpu": hostile}, 3)}


@pytest.mark.parametrize("as_text", [True, False], ids=["text", "label"])
def test_undecodable_text_does_not_end_the_page(as_text: bool) -> None:
    reading = family("gpu.name", "x\udcff", gpu="0") if as_text else family("gpu.processes", 3, gpu="x\udcff")
    result = series(scrape(Fake("odd", lambda: [reading]), Fake("good", load)))
    assert result[("rackproof_host_load", ())] == 0.5
    assert [value for (name, _), value in result.items() if name.startswith("rackproof_gpu_")] == [1 if as_text else 3]


@pytest.mark.parametrize("number", [10**400, 1 << 64, float("nan"), float("-inf"), 1e61])
def test_number_that_is_no_measurement_has_no_series_and_is_counted(number: float) -> None:
    result = series(scrape(Fake("odd", lambda: [family("gpu.power", number, "W", gpu="0")]), Fake("good", load)))
    assert result[("rackproof_host_load", ())] == 0.5
    assert result[("rackproof_readings_absent", (("gpu", "0"), ("status", "error")))] == 1
    assert not any(name.startswith("rackproof_gpu_power") for name, _ in result)


@pytest.mark.parametrize(
    ("reading", "name", "value"),
    [
        (family("host.load", 1.5), "rackproof_host_load", 1.5),
        (family("host.uptime", 60, "s"), "rackproof_host_uptime_seconds", 60),
        (family("gpu.energy", 9.5, "J", counter=True), "rackproof_gpu_energy_joules_total", 9.5),
        (family("gpu.ecc.enabled", True), "rackproof_gpu_ecc_enabled", 1),
        (family("gpu.utilization", 0.25, "ratio"), "rackproof_gpu_utilization_ratio", 0.25),
    ],
)
def test_reading_becomes_one_sample(reading: Family, name: str, value: float) -> None:
    assert series(scrape(Fake("one", lambda: [reading])))[(name, ())] == value


# ---- the server ----


@pytest.fixture
def serving() -> Iterator[Callable[..., str]]:
    """Yield a function that starts a server on a free port and returns the URL of /metrics. The servers stop after the test."""
    started = []

    def start(*collectors: Collector, fresh_s: float = 1.0) -> str:
        started.append(serve(collectors, "127.0.0.1", 0, fresh_s=fresh_s))
        return f"http://127.0.0.1:{started[-1].port}/metrics"

    yield start
    for server in started:
        server.close()


def test_server_answers_a_scrape(serving: Callable[..., str]) -> None:
    with urllib.request.urlopen(serving(Fake("good", load), Fake("bad", breaks)), timeout=5) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        result = series(answer.read().decode())
    assert result[("rackproof_host_load", ())] == 0.5
    assert result[("rackproof_collector_success", (("collector", "bad"),))] == 0
    assert result[("process_resident_memory_bytes", ())] > 0, "the exporter must report its own memory"


def scrape_over_http(url: str) -> Series:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return series(answer.read().decode())


def test_log_has_a_line_for_each_new_reason_of_a_failure_and_for_the_recovery(
    serving: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="agent")
    reasons = iter(["", "first", "first", "second", "", ""])

    def read() -> list[Family]:
        if reason := next(reasons):
            raise OSError(reason)
        return load()

    url = serving(Fake("disk", read), fresh_s=0.0)
    success = [scrape_over_http(url)[("rackproof_collector_success", (("collector", "disk"),))] for _ in range(6)]
    assert success == [1, 0, 0, 0, 1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "collector disk failed: OSError: first",
        "collector disk failed: OSError: second",
        "collector disk recovered",
    ]


def test_failed_conversion_to_dcgm_names_affects_only_these_names(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> Iterator[Metric]:
        raise KeyError("gpu")

    monkeypatch.setitem(exporter.COMPATIBLE_NAMES, "dcgm", lambda: refuse)
    with serve([Fake("good", load)], "127.0.0.1", 0, compat=["dcgm"]) as server:
        scraped = scrape_over_http(f"http://127.0.0.1:{server.port}/metrics")
    assert scraped[("rackproof_host_load", ())] == 0.5
    assert scraped[("rackproof_collector_success", (("collector", "dcgm"),))] == 0
    assert "metrics with the names of --compat dcgm cannot be exported" in caplog.text


def test_option_compat_accepts_every_key_of_compatible_names() -> None:
    assert sorted(exporter.COMPATIBLE_NAMES) == [*COMPATIBLE]


def test_only_a_scrape_reads_the_collectors_and_a_fresh_page_is_reused(serving: Callable[..., str]) -> None:
    collector = Fake("good", load)
    url = serving(collector, fresh_s=0.2)
    assert collector.calls == 0
    for calls in (1, 2):
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=5) as answer:
                answer.read()
        assert collector.calls == calls
        time.sleep(0.25)


def test_server_records_the_time_of_the_last_request() -> None:
    with serve([Fake("good", load)], "127.0.0.1", 0) as server:
        began = server.last_request
        time.sleep(0.01)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5):
            assert server.last_request > began


def test_port_in_use_is_an_error(serving: Callable[..., str]) -> None:
    port = int(serving(Fake("good", load)).rsplit(":", 1)[1].split("/")[0])
    with pytest.raises(OSError, match=r"(?i)address already in use"):
        serve([], "127.0.0.1", port)


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "3601", "0.5"])
@pytest.mark.parametrize("textfile", [True, False])
def test_invalid_interval_is_refused(
    seconds: str, textfile: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--textfile", str(tmp_path / "x.prom")] if textfile else ["--port", "0"]
    assert main(["export", *where, "--every", seconds, "--sample-hz", "0", "--state", str(tmp_path)]) == 64
    assert "give 1 to 3600 seconds" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("indexes", ["0,²", "0,", "GPU-1"])
def test_invalid_gpu_index_is_refused(indexes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--port=0", f"--gpus={indexes}", "--sample-hz=0", "--state", str(tmp_path)]) == 64
    assert "is not an NVML index" in capsys.readouterr().err
