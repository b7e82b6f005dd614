"""The page docs/metrics.md lists every metric of a complete fake GPU host, and promtool accepts these metrics.

UPDATE_GOLDEN=1 rewrites the page.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from agent.exporter.metric_names import COUNTER, EVERY, HISTOGRAM, label_name, prometheus_name
from schemas.readings import PROMETHEUS_NAMES, READINGS
from tests import ROOT
from tests.fakes import links, nvml, whole

DOCS = ROOT / "docs" / "metrics.md"
SCRAPE = """
import sys
from pathlib import Path
from prometheus_client import generate_latest
from agent.exporter.exporter import registry
from agent.exporter.sampler import GpuSampler
from tests.fakes.whole import build_collectors
readers = list(build_collectors(Path(sys.argv[1]), full_snapshot=False, keep_nvml_open=True))
sys.stdout.buffer.write(generate_latest(registry(readers, sys.argv[2:], [GpuSampler(None, 10.0, 30.0)])))
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Build a complete fake GPU host with faults in its kernel log.

    Return its root directory, the directory of the fake NVML library, and the file with the answers of this library.
    """
    directory = tmp_path_factory.mktemp("host")
    root = whole.build_host(directory / "root")
    gpu, switch = links.GPUS[0].removesuffix(".0"), links.NVSWITCHES[0]
    whole.append_kernel_log(root, f"NVRM: Xid (PCI:{gpu}): 79, pid=1, GPU has fallen off the bus.")
    whole.append_kernel_log(
        root, f"NVRM: Xid (PCI:{gpu}): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)"
    )
    whole.append_kernel_log(root, f"NVRM: GPU {links.GPUS[0]}: GPU has fallen off the bus.")
    whole.append_kernel_log(root, f"nvidia-nvswitch0: SXid (PCI:{switch}): 20034, Fatal, Link 30 LTSSM Fault Up")
    whole.append_kernel_log(root, "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4711]")
    links.write(root, "proc/spl/kstat/zfs/tank/state", "ONLINE\n")
    links.add_bond(root, "bond0", {links.PLAIN_INTERFACE: "up", links.ROCE_INTERFACE: "up"})
    links.add_efa(root)
    return (
        root,
        nvml.build(directory / "nvml"),
        nvml.write(directory / "scenario", "healthy-h100x8", *whole.NVML),
    )


def test_metrics_page_lists_the_exported_metrics(machine: tuple[Path, Path, Path]) -> None:
    root, library, scenario = machine
    page = nvml.python(["-m", "tests.fakes.whole", root, "metrics"], library, scenario)
    if os.environ.get("UPDATE_GOLDEN"):
        DOCS.write_text(page)
    assert page == DOCS.read_text()


def scrape(machine: tuple[Path, Path, Path], *compat: str) -> str:
    root, library, scenario = machine
    text: str = nvml.python(["-c", SCRAPE, root, *compat], library, scenario)
    return text


def promtool_errors(text: str) -> str:
    """Return the messages of `promtool check metrics` about the metrics in `text`; empty if it accepts them."""
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode == 0) == (checked.stderr == "")
    return checked.stderr


def test_promtool_accepts_the_metrics_of_a_complete_host(machine: tuple[Path, Path, Path]) -> None:
    text = scrape(machine)
    assert "rackproof_xid_errors" in text
    assert promtool_errors(text) == ""


def test_names_of_release_1_0_and_of_dcgm_exporter_are_exported_on_request(machine: tuple[Path, Path, Path]) -> None:
    text = scrape(machine, "1.0", "dcgm")
    assert "DCGM_FI_DEV_GPU_TEMP" in text
    values = dict(re.findall(r"^(rackproof_\S+) (\S+)$", text, re.MULTILINE))
    assert values["rackproof_gpu_count"] == values["rackproof_gpus"] == "8.0"
    old, new = "rackproof_xid_count{", "rackproof_xid_errors{"
    counts = {name.removeprefix(old): value for name, value in values.items() if name.startswith(old)}
    assert counts
    assert counts == {name.removeprefix(new): value for name, value in values.items() if name.startswith(new)}
    # promtool rejects the old names, because Prometheus reserves the ending `_count` for histograms and summaries.
    rejected = set(re.findall(r"^(rackproof_\w+_count) non-histogram", promtool_errors(text), re.MULTILINE))
    renamed_readings = {name for name in PROMETHEUS_NAMES if not READINGS[name].full_only}
    assert rejected == {f"rackproof_{name.replace('.', '_')}" for name in renamed_readings}
    default_scrape = scrape(machine)
    assert not any(f"{name} " in default_scrape or f"{name}{{" in default_scrape for name in rejected)


def specified() -> Iterator[Metric]:
    """Yield one series for each metric that does not come from a collector.

    A scrape is not used, because it has some of these metrics only during a run.
    """
    for spec in EVERY.values():
        labels = [label_name(label) for label in spec.labels]
        values = ["x"] * len(labels)
        if spec.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(spec.name, spec.help, labels=labels)
            histogram.add_metric(values, [("1.0", 1.0), ("+Inf", 1.0)], 1.0)
            yield histogram
        else:
            kind = CounterMetricFamily if spec.kind == COUNTER else GaugeMetricFamily
            metric = kind(spec.name, spec.help, labels=labels)
            metric.add_metric(values, 1.0)
            yield metric


def test_promtool_accepts_the_metrics_that_do_not_come_from_collectors() -> None:
    class Specified:
        def collect(self) -> Iterator[Metric]:
            return specified()

    registry = CollectorRegistry()
    registry.register(Specified())  # type: ignore[arg-type]
    assert promtool_errors(generate_latest(registry).decode()) == ""


def test_each_reading_has_its_own_metric_and_no_name_ends_in_count() -> None:
    names = [prometheus_name(name, item.unit) + ("_total" if item.counter else "") for name, item in READINGS.items()]
    assert [name for name in names if name.endswith("_count")] == [], (
        "add another name for these readings to PROMETHEUS_NAMES"
    )
    assert len(set(names)) == len(names)
    assert set(PROMETHEUS_NAMES) <= set(READINGS)
