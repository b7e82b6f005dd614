"""Snapshots: a collector that blocks or fails affects only its own readings, and every snapshot is valid in a record."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from agent.sampling import snapshot as snapshot_module
from agent.sampling import snapshot_sampler
from agent.sampling.snapshot import Stuck, collect, identities, take_snapshot
from collectors.base import HOST_LABELS, Absent, Family
from schemas import documents
from schemas.decode import record_from_json
from schemas.records import Record, Snapshot, to_json
from schemas.times import utc_now
from tests.fakes import host, nvml

NONCE = "0123456789abcdef" * 2
WHEN = "2026-11-21T04:00:00.000000Z"


class Fake:
    """A collector that calls the given function."""

    def __init__(self, name: str, function: Callable[[], Iterable[Family]]) -> None:
        self.name = name
        self.collect = function


def load(value: object = 0.5) -> list[Family]:
    """Return one family (readings of one kind) with one reading."""
    return [Family(name="host.load", unit="1", help="Load", readings=[(HOST_LABELS, value)])]  # type: ignore[list-item]


def broken() -> Iterator[Family]:
    """Yield one family, and fail before the next one."""
    yield from load()
    raise RuntimeError("the source went away")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return the event that a blocked collector waits for. It is set at the end of the test, so that no thread remains."""
    event = threading.Event()
    yield event
    event.set()


def blocked(gate: threading.Event) -> Callable[[], list[Family]]:
    """Return the function of a collector that blocks until `gate` is set."""

    def wait_for_gate() -> list[Family]:
        gate.wait()
        return load(9.0)

    return wait_for_gate


def record(*snapshots: Snapshot) -> Record:
    """Return a record with these snapshots."""
    return Record(
        run_id="r1", nonce=NONCE, host="h1", began=WHEN, ended=WHEN, rackproof="0", snapshots=tuple(snapshots)
    )


# ---- collect ----


def test_failed_collector_affects_only_its_readings() -> None:
    families, outcome = collect([Fake("bad", broken), Fake("good", load)])
    assert [family.name for family in families] == ["host.load"]
    assert outcome["bad"] == "RuntimeError: the source went away"
    assert isinstance(outcome["good"], float)


def test_blocked_collector_is_reported_and_not_awaited_after_the_deadline(gate: threading.Event) -> None:
    began = time.monotonic()
    families, outcome = collect([Fake("stuck", blocked(gate)), Fake("good", load)], deadline_s=0.1)
    assert time.monotonic() - began < 30
    assert families == load()
    assert outcome["stuck"] == "no answer within 0.1 s"


def test_collectors_run_in_parallel() -> None:
    meeting = threading.Barrier(3, timeout=5)

    def meets() -> list[Family]:
        meeting.wait()
        return []

    _, outcome = collect([Fake(name, meets) for name in ("one", "two", "three")])
    assert all(isinstance(result, float) for result in outcome.values())


def test_collectors_share_one_deadline(gate: threading.Event) -> None:
    began = time.monotonic()
    collect([Fake(f"stuck{number}", blocked(gate)) for number in range(200)], deadline_s=0.2)
    assert time.monotonic() - began < 20  # it would take 40 s if each collector had its own deadline


def test_last_of_many_collectors_is_started_while_the_others_block(gate: threading.Event) -> None:
    def opens_the_gate() -> list[Family]:
        gate.set()
        return load()

    stuck = [Fake(f"stuck{number}", blocked(gate)) for number in range(20)]
    _, outcome = collect([*stuck, Fake("last", opens_the_gate)])
    assert [name for name, result in outcome.items() if not isinstance(result, float)] == []


def test_collector_that_still_blocks_is_not_started_again(gate: threading.Event) -> None:
    stuck: Stuck = {}
    collectors = [Fake("stuck", blocked(gate)), Fake("good", load)]
    collect(collectors, 0.1, stuck)
    threads = threading.active_count()
    began = time.monotonic()
    for _ in range(5):
        families, outcome = collect(collectors, 10.0, stuck)
        assert families == load()
        assert outcome["stuck"] == "no answer within 10 s"
    assert time.monotonic() - began < 30  # it would take 50 s if each call waited for the deadline
    assert threading.active_count() == threads
    gate.set()
    stuck["stuck"].join()
    families, outcome = collect(collectors, 10.0, stuck)
    assert families == load(9.0) + load()
    assert isinstance(outcome["stuck"], float)


def test_sampler_starts_a_blocked_collector_only_once(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "COLLECT_DEADLINE_S", 0.02)
    monkeypatch.setattr(snapshot_sampler, "PERIOD_S", 0.001)
    starts, several = [], threading.Event()

    def block() -> list[Family]:
        starts.append("stuck")
        return blocked(gate)()

    def count() -> list[Family]:
        starts.append("good")
        if starts.count("good") == 5:
            several.set()
        return []

    with snapshot_sampler.SnapshotSampler([Fake("stuck", block), Fake("good", count)], "benchmark"):
        assert several.wait(60)
    assert starts.count("stuck") == 1


WITH_A_BLOCKED_DRIVER = """
import json, sys, time
from pathlib import Path
from agent.sampling.snapshot import collect
from collectors.host import HostCollector
from collectors.nvml import NvmlCollector
from collectors.xid import XidCollector
began = time.monotonic()
families, outcome = collect([NvmlCollector(), HostCollector(Path(sys.argv[1])), XidCollector(Path(sys.argv[2]))], 0.5)
print(json.dumps([time.monotonic() - began, [family.name for family in families], outcome]))
"""


def test_blocked_driver_affects_only_readings_of_the_driver(tmp_path: Path) -> None:
    root, log = host.build_tree(tmp_path / "root"), nvml.CHECKOUT / "tests/fakes/kmsg/healthy.txt"
    library = nvml.build(tmp_path / "library")
    printed = nvml.python(["-c", WITH_A_BLOCKED_DRIVER, root, log], library, nvml.scenario("blocked"))
    seconds, names, outcome = json.loads(printed)
    assert 0.5 <= seconds < 60
    assert names[0] == "host.kernel_version"
    assert {"gpu.pci_count", "xid.last_seen", "xid.count"} < set(names)
    assert not any(name.startswith("gpu.nvlink") for name in names)
    assert outcome.pop("nvml") == "no answer within 0.5 s"
    assert sorted(outcome) == ["host", "xid"]
    assert all(isinstance(seconds, float) for seconds in outcome.values())


# ---- take_snapshot ----


def test_snapshot_records_the_result_of_each_collector() -> None:
    snapshot, gpus = take_snapshot(
        [Fake("bad", broken), Fake("good", load)], stage="preflight", phase="before", clock=lambda: WHEN
    )
    assert (snapshot.stage, snapshot.phase, snapshot.at, gpus) == ("preflight", "before", WHEN, ())
    metrics = {metric.name: metric for metric in snapshot.metrics}
    assert metrics["host.load"].values == {"host": 0.5}
    assert metrics["collector.bad"].absent == {"host": "error: RuntimeError: the source went away"}
    assert metrics["collector.bad"].values == {}
    assert metrics["collector.good"].unit == "s"
    assert list(metrics["collector.good"].values) == ["host"]
    documents.validate(to_json(record(snapshot)), "record", source="the record")


def test_scopes_leave_out_the_uuid_and_absent_readings_have_a_reason() -> None:
    family = Family(name="gpu.nvlink.active", unit="1", help="Up")
    family.add({"gpu": "0", "uuid": "GPU-1", "link": "3"}, True)
    family.add({"gpu": "1", "link": "3"}, Absent(status="error", reason="NVML: GPU is lost"))
    family.add({"gpu": "2"}, Absent(status="unsupported", reason=""))
    snapshot, _ = take_snapshot([Fake("gpus", lambda: [family])], stage="soak", phase="during")
    metric = snapshot.metrics[0]
    assert metric.values == {"gpu=0,link=3": True}
    assert metric.absent == {
        "gpu=1,link=3": "error: NVML: GPU is lost",
        "gpu=2": "unsupported: no reason given",
    }
    documents.validate(to_json(record(snapshot)), "record", source="the record")


def test_long_texts_are_truncated() -> None:
    def fails() -> Iterator[Family]:
        raise OSError("x" * 5000)
        yield

    def long() -> list[Family]:
        absent = Absent(status="error", reason="y" * 5000)
        return [
            *load("z" * 5000),
            Family(name="host.uptime", unit="s", help="Uptime", readings=[(HOST_LABELS, absent)]),
        ]

    snapshot, _ = take_snapshot([Fake("bad", fails), Fake("long", long)], stage="preflight", phase="before")
    metrics = {metric.name: metric for metric in snapshot.metrics}
    assert metrics["host.load"].values == {"host": "z" * 1024}
    assert metrics["host.uptime"].absent == {"host": ("error: " + "y" * 5000)[:1024]}
    assert metrics["collector.bad"].absent == {"host": ("error: OSError: " + "x" * 5000)[:1024]}
    documents.validate(to_json(record(snapshot)), "record", source="the record")


def test_lone_surrogate_in_a_reason_is_replaced() -> None:
    def fails() -> Iterable[Family]:
        raise OSError("half \udc80")

    families = load(Absent.error("half \udc80"))
    collectors = [Fake("odd", lambda: families), Fake("fails", fails)]
    snapshot, _ = take_snapshot(collectors, stage="preflight", phase="before")
    absent = {metric.name: metric.absent for metric in snapshot.metrics}
    assert absent["host.load"] == {"host": "error: half ?"}
    assert absent["collector.fails"] == {"host": "error: OSError: half ?"}
    record_from_json(documents.parse(documents.text(to_json(record(snapshot))), source="the record"))


@pytest.mark.parametrize("value", [1 << 64, -(1 << 64), 10**40, math.nan, math.inf, 1e61, 15e-255, -1e300])
def test_number_that_a_record_may_not_contain_makes_its_reading_an_error(value: float) -> None:
    families = [*load(value), Family(name="host.uptime", unit="s", help="Uptime", readings=[(HOST_LABELS, 5.0)])]
    snapshot, _ = take_snapshot([Fake("odd", lambda: families)], stage="preflight", phase="before")
    metrics = {metric.name: metric for metric in snapshot.metrics}
    assert metrics["host.load"].absent["host"].startswith("error: not a measurement: ")
    assert metrics["host.uptime"].values == {"host": 5.0}
    record_from_json(documents.parse(documents.text(to_json(record(snapshot))), source="the record"))


def test_long_and_empty_labels_and_undecodable_texts_are_valid_in_a_record() -> None:
    family = Family(name="storage.mount.size", unit="B", help="Size")
    paths = [f"/{'x' * 300}/{end}" for end in "ab"]
    for path in ["", *paths]:
        family.add({"mount": path, "part": "y" * 300}, "a\udcffb")
    family.add({"mount": "/"}, Absent.error(" \n"))
    snapshot, _ = take_snapshot([Fake("odd", lambda: [family])], stage="preflight", phase="before")
    assert len(snapshot.metrics[0].values) == 3
    assert snapshot.metrics[0].absent == {"mount=_": "error: no reason given"}
    record_from_json(documents.parse(documents.text(to_json(record(snapshot))), source="the record"))


def test_utc_now_is_valid_in_a_record() -> None:
    snapshot, _ = take_snapshot([], stage="preflight", phase="before", clock=utc_now)
    documents.validate(to_json(record(snapshot)), "record", source="the record")


# ---- every scenario of the fake NVML library ----


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nvml.Reader]:
    """Yield a program that takes snapshots with the fake NVML library, each with the answers in a scenario file."""
    directory = tmp_path_factory.mktemp("nvml")
    with nvml.Reader(nvml.build(directory), directory / "now") as started:
        yield started


@pytest.mark.parametrize("name", sorted(path.stem for path in nvml.SCENARIOS.glob("*.conf") if path.stem != "blocked"))
def test_snapshot_of_every_scenario_is_valid_in_a_record(reader: nvml.Reader, name: str) -> None:
    taken = reader.take(name)
    document = {**to_json(record()), "snapshots": [taken["snapshot"]], "gpus": taken["gpus"]}
    text = json.dumps(document)
    assert len(text) < documents.MAX_BYTES / 10
    documents.validate(documents.parse(text, source=name), "record", source=name)
    read = record_from_json(document)
    assert to_json(read)["snapshots"] == document["snapshots"]
    observed = read.all_observations()
    assert all(item.reason for item in observed if item.status != "measured")
    assert "gpu.count" in {item.name for item in observed}


# ---- identities ----


def identity(name: str, *readings: tuple[str, str | Absent]) -> Family:
    """Return the family of one identity field, such as the serial, with its value for each GPU."""
    family = Family(name=name, unit="1", help="Identity")
    for gpu, value in readings:
        family.add({"gpu": gpu, "uuid": f"GPU-{gpu}"}, value)
    return family


def test_gpus_are_in_index_order_with_the_identity_fields_that_were_read() -> None:
    unreadable = Absent(status="error", reason="NVML: Corrupted infoROM")
    gpus = identities(
        [
            identity("gpu.name", ("10", "NVIDIA H200"), ("2", "NVIDIA H200")),
            identity("gpu.serial", ("10", "1650000000010"), ("2", unreadable)),
            identity("gpu.uuid", ("10", "GPU-10"), ("2", "GPU-2")),
            identity("gpu.pci_bus_id", ("10", "00000000:0a:00.0"), ("2", "00000000:02:00.0")),
            identity("gpu.vbios_version", ("10", "96.00"), ("2", "96.00")),
        ]
    )
    assert [(gpu.index, gpu.serial, gpu.uuid, gpu.pci_bus_id) for gpu in gpus] == [
        (2, "", "GPU-2", "00000000:02:00.0"),
        (10, "1650000000010", "GPU-10", "00000000:0a:00.0"),
    ]


def test_gpu_without_a_name_has_no_identity() -> None:
    assert identities([identity("gpu.serial", ("0", "1650000000000"))]) == ()
