"""Test the XID collector, which counts XIDs and SXids in kernel logs, and the criteria on XIDs and SXids."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectors import kernel_log
from collectors.base import Absent, scope
from collectors.kernel_events import EVENTS, VOLUME_EVENTS
from collectors.kernel_log import messages
from collectors.xid import XidCollector, parse_sxid, parse_xid, sysfs_address
from fleet.judge.criteria import Criterion, read_pack, read_packs
from fleet.judge.judge import Evidence, judge
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import ROOT, builders
from tests.fakes import links, whole

LOG_DIRECTORY = ROOT / "tests" / "fakes" / "kmsg"
XID_79 = "4,1203,91827364554,-;NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
BOOT_LINE = "5,0,0,-;Linux version 6.8.0-45-generic\n"
LATER_LINE = "6,7001,93000000000,-;eth0: link up\n"


def readings(collector: XidCollector) -> dict[str, dict[str, object]]:
    """Return name of the reading -> scope -> value."""
    return {family.name: {scope(labels): value for labels, value in family.readings} for family in collector.collect()}


def read(log: Path, *commands: Sequence[str], full_snapshot: bool = False) -> dict[str, dict[str, object]]:
    """Return the readings of an XidCollector that reads the file `log`.

    For a full snapshot, it may also run `commands`, which replace journalctl and dmesg.
    """
    return readings(XidCollector(log, full_snapshot, commands))


def journal_command(tmp_path: Path, *lines: str) -> Sequence[str]:
    """Return a command that prints these lines, in place of journalctl."""
    output = tmp_path / "journal.txt"
    output.write_text("\n".join(lines))
    return (sys.executable, "-c", f"print(open({str(output)!r}).read())")


# ---- lines ----


def test_uptime_is_parsed_from_kmsg_dmesg_and_journal() -> None:
    assert kernel_log.uptime(XID_79) == 91827.364554
    assert kernel_log.uptime("[  12.345678] NVRM: Xid (PCI:0000:4c:00.0): 48") == 12.345678
    assert kernel_log.uptime("[91827.364554] gpu-7 kernel: NVRM: Xid (PCI:0000:4c:00.0): 48") == 91827.364554
    # This line has no time. `uptime` must not return 0: in `xid.last_seen`, 0 means that no error has ever occurred.
    assert kernel_log.uptime("NVRM: Xid (PCI:0000:4c:00.0): 48") > 0


@pytest.mark.parametrize(
    ("line", "result"),
    [
        (XID_79, ("0000:5d:00.0", "79")),
        ("NVRM: Xid (PCI:0000:5D:00): 79, pid=1, GPU has fallen off the bus.", ("0000:5d:00.0", "79")),
        ("[  12.3] NVRM: Xid (PCI:0000:4c:00.0): 48, pid=1, An uncorrectable", ("0000:4c:00.0", "48")),
        ("[  12.3][ T1234] NVRM: Xid (PCI:0000:4c:00): 48, pid=1", ("0000:4c:00.0", "48")),
        ("[91827.364554] gpu-7 kernel: NVRM: Xid (PCI:0000:4c:00): 63, Row Remapper", ("0000:4c:00.0", "63")),
        ("[91827.364554] kernel: NVRM: Xid (PCI:0000:4c:00): 63, Row Remapper", ("0000:4c:00.0", "63")),
        ("NVRM: Xid (PCI:0009:01:00): 119, Timeout after 6s of waiting for RPC response", ("0009:01:00.0", "119")),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel", ("0000:01:00.0", "94")),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, Contained", ("0000:01:00.0", "94")),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", ("0000:03:00.0", "14")),
        ("NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.", None),
        ("NVRM: GPU at PCI:0000:5d:00: GPU-e3406b9a-17dc-4f82-b5e3-2c90a87fd461", None),
        ("nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 12028, Non-fatal, Link 32", None),
        ("systemd[1]: Started Xid 79 watcher.", None),
        ("NVRM: Xid (PCI:0000:5d:00): , pid=1", None),
        ("NVRM: Xid (PCI:../../etc): 79, pid=1", None),
        # A process can choose a name that looks like an XID message.
        ("4,12,9,-;NVRM: Xid (PCI:0000:5d:00): 13, name=NVRM: Xid (PCI:0000:4c:00): 79, x", ("0000:5d:00.0", "13")),
        ("4,12,9,-;traps: NVRM: Xid (PCI:0000:4c:00): 79[8123] general protection fault", None),
        ("", None),
    ],
)
def test_xid_lines_are_recognized(line: str, result: tuple[str, str] | None) -> None:
    (message,) = messages(line.strip())
    xid = parse_xid(message)
    assert (xid and (xid.pci, xid.code)) == result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("20034, Fatal, Link 30 LTSSM Fault Up", ("yes", "20034")),
        ("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", ("no", "12028")),
        ("12021, Correctable, Link 08 egress nxbar hdr ECC limit", ("no", "12021")),
        ("10003, Fatal, unhandled interrupt in _nvswitch_service(12)", ("yes", "10003")),
        ("26006, SOE HALTED", ("unknown", "26006")),
        ("20034, Severity 1 Engine instance 30 Sub-engine instance 00", None),
        ("20034, Data {0x50610002, 0x10100030}", None),
        ("xyz, Fatal error", None),
    ],
)
def test_sxid_is_parsed_with_its_severity_and_lines_with_details_are_ignored(
    text: str, result: tuple[str, str] | None
) -> None:
    line = f"[131453.740743] nvidia-nvswitch0: SXid (PCI:0000:C1:00.0): {text}"
    assert parse_sxid(*messages(line)) == (result and ("0000:c1:00.0", *result))


def test_addresses_have_the_sysfs_form() -> None:
    assert sysfs_address("0000:5D:00") == "0000:5d:00.0"
    assert sysfs_address("0000:C1:00.0") == "0000:c1:00.0"


# ---- the log ----


NVME_LINES = (
    ("nvme_timeout", "nvme {}: I/O 252 QID 2 timeout, aborting"),
    (
        "nvme_timeout",
        "nvme {}: I/O tag 252 (10fc) opcode 0x2 (I/O Cmd) QID 2 timeout, aborting req_op:READ(0) size:4096",
    ),
    ("nvme_lost", "nvme {}: Removing after probe failure status: -19"),
    ("nvme_reset", "nvme {}: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10"),
)
VOLUMES = ("Amazon Elastic Block Store", "nvme_card-pd", "MSFT NVMe Accelerator v1.0", "QEMU NVMe Ctrl")
DISKS = ("Amazon EC2 NVMe Instance Storage", "nvme_card0", "Microsoft NVMe Direct Disk v2", "SAMSUNG MZWLR3T8HBLS")


@pytest.mark.parametrize("model", [*VOLUMES, *DISKS, None])
@pytest.mark.parametrize(("event", "line"), NVME_LINES)
def test_nvme_events_of_volumes_have_names_of_their_own(
    tmp_path: Path, event: str, line: str, model: str | None
) -> None:
    """Without a model, the controller is no longer there."""
    log, controller = tmp_path / "kmsg", tmp_path / "sys/class/nvme/nvme3"
    log.write_text(f"{BOOT_LINE}4,9,7000000,-;{line.format('nvme3')}\n4,10,9000000,-;{line.format('nvme4')}\n")
    if model:
        controller.mkdir(parents=True)
        (controller / "model").write_text(f"{model:<40}\n")
    result = readings(XidCollector(log, root=tmp_path))
    name = VOLUME_EVENTS[event] if model in VOLUMES else event
    assert result["kernel.event.count"] == {f"disk=nvme3,event={name}": 1, f"disk=nvme4,event={event}": 1}
    seen = {key: value for key, value in result["kernel.event.last_seen"].items() if value}
    assert seen == {f"event={name}": 7.0, f"event={event}": 9.0}


def test_errors_are_counted_by_address_and_code() -> None:
    result = read(LOG_DIRECTORY / "faults.txt")
    assert result["xid.last_seen"] == {"host": 93100.00009}
    assert result["xid.count"] == {
        "pci=0000:4c:00.0,xid=48": 1,
        "pci=0000:4c:00.0,xid=63": 1,
        "pci=0000:4c:00.0,xid=94": 2,
        "pci=0000:5d:00.0,xid=79": 1,
    }
    assert result["xid.message"] == {"pci=0000:5d:00.0,message=fallen_off_the_bus": 1}
    assert result["sxid.last_seen"] == {"host": 94000.0}
    assert result["sxid.count"] == {"pci=0000:07:00.0,fatal=no,sxid=12028": 1}
    # The first record in the file has the sequence number 812, so earlier records are missing.
    assert result["xid.log_complete"] == {"host": False}


def test_healthy_log_has_no_errors() -> None:
    assert {name: values for name, values in read(LOG_DIRECTORY / "healthy.txt").items() if values} == {
        "xid.last_seen": {"host": 0.0},
        "xid.log_complete": {"host": False},  # the first record in the file has the sequence number 812
        "sxid.last_seen": {"host": 0.0},
        "kernel.event.last_seen": {f"event={event}": 0.0 for event in EVENTS},
    }


def test_three_lines_of_one_sxid_count_once() -> None:
    result = read(LOG_DIRECTORY / "switch.txt")
    assert result["sxid.count"] == {
        "pci=0000:c1:00.0,fatal=yes,sxid=20034": 1,
        "pci=0000:c2:00.0,fatal=no,sxid=12021": 1,
        "pci=0000:c2:00.0,fatal=unknown,sxid=10004": 1,
        "pci=0000:c4:00.0,fatal=no,sxid=22013": 1,
    }
    assert result["sxid.last_seen"] == {"host": 94000.0002}
    assert result["xid.log_complete"] == {"host": True}


def test_fatal_nvlink_5_xids_are_counted_separately(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text(
        f"{BOOT_LINE}4,9,1,-;NVRM: Xid (PCI:0000:1b:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00000013 0x0)\n"
        "4,10,2,-;NVRM: Xid (PCI:0000:1b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x0)\n"
        "4,11,3,-;NVRM: Xid (PCI:0000:1c:00): 31, pid=7, name=a Fatal flaw, MMU Fault\n"
    )
    result = read(log)
    assert result["xid.count"] == {"pci=0000:1b:00.0,xid=149": 2, "pci=0000:1c:00.0,xid=31": 1}
    assert result["xid.fatal"] == {"pci=0000:1b:00.0,xid=149": 1}


def test_last_seen_is_the_uptime_of_the_newest_error(tmp_path: Path) -> None:
    links.write(tmp_path, "dev/kmsg", whole.BOOTED)
    uptimes = []
    for code in (79, 48, 63):
        whole.append_kernel_log(tmp_path, f"NVRM: Xid (PCI:0000:5d:00): {code}, pid=1, x", "eth0: link up")
        uptimes.append(read(tmp_path / "dev/kmsg")["xid.last_seen"]["host"])
    assert uptimes == [5.000001, 5.000003, 5.000005]


@pytest.mark.parametrize("bytes_before", range(8100, 8200, 9))
def test_line_across_two_reads_counts_once(tmp_path: Path, bytes_before: int) -> None:
    """The collector reads a file in blocks of 8192 bytes."""
    log = tmp_path / "kern.log"
    log.write_text("x" * (bytes_before - 1) + "\n" + XID_79)
    assert read(log)["xid.count"] == {"pci=0000:5d:00.0,xid=79": 1}


def test_log_with_invalid_utf8_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\xff\xfe\n" + XID_79.encode())
    assert read(log)["xid.last_seen"] == {"host": 91827.364554}


def test_scrapes_accumulate_counts(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    try:
        os.write(writer, BOOT_LINE.encode() + XID_79.encode() * 3)
        collector = XidCollector(log)
        first = readings(collector)
        assert (first["xid.count"], first["xid.log_complete"]) == ({"pci=0000:5d:00.0,xid=79": 3}, {"host": True})
        assert readings(collector) == first
        os.write(writer, XID_79.replace("91827", "91900").encode())
        assert readings(collector)["xid.count"] == {"pci=0000:5d:00.0,xid=79": 4}
        assert readings(collector)["xid.last_seen"] == {"host": 91900.364554}
    finally:
        os.close(writer)


def replace_kmsg(monkeypatch: pytest.MonkeyPatch, answers: list[bytes | OSError]) -> list[int]:
    """Replace /dev/kmsg: each read returns or raises the next answer. Return the list of closed descriptors."""

    def read(descriptor: int, size: int) -> bytes:
        assert (descriptor, size) == (99, 8192)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    closed: list[int] = []
    fake = SimpleNamespace(O_RDONLY=0, O_NONBLOCK=0, open=lambda *_: 99, read=read, close=closed.append, environ={})
    monkeypatch.setattr(kernel_log, "os", fake)
    return closed


@pytest.mark.parametrize("full_snapshot", [False, True])
def test_overwritten_records_make_the_log_incomplete(monkeypatch: pytest.MonkeyPatch, full_snapshot: bool) -> None:
    answers = [BOOT_LINE.encode(), XID_79.encode(), BrokenPipeError(), XID_79.encode(), BlockingIOError()]
    closed = replace_kmsg(monkeypatch, answers)
    result = read(Path("/dev/kmsg"), full_snapshot=full_snapshot)
    assert result["xid.count"] == {"pci=0000:5d:00.0,xid=79": 2}
    assert result["xid.log_complete"] == {"host": False}
    assert closed == ([99] if full_snapshot else [])


def test_scrape_after_an_error_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [XID_79.encode(), BlockingIOError()]
    closed = replace_kmsg(monkeypatch, [*answers, OSError(errno.EIO, "Input/output error"), *answers])
    collector = XidCollector()
    assert readings(collector)["xid.count"] == {"pci=0000:5d:00.0,xid=79": 1}
    lost = readings(collector)
    assert lost["xid.last_seen"] == {"host": Absent(status="error", reason="/dev/kmsg: Input/output error")}
    assert (lost["xid.count"], closed) == ({}, [99])
    assert readings(collector)["xid.count"] == {"pci=0000:5d:00.0,xid=79": 1}


@pytest.mark.parametrize("full_snapshot", [False, True])
def test_unreadable_log_is_an_error_not_zero(tmp_path: Path, full_snapshot: bool) -> None:
    for log, why in (
        (tmp_path / "kmsg", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (Path(os.devnull), "empty, without even the boot messages: not a kernel log"),
    ):
        absent = {"host": Absent(status="error", reason=f"{log}: {why}")}
        result = {name: values for name, values in read(log, full_snapshot=full_snapshot).items() if values}
        assert result == dict.fromkeys(("xid.last_seen", "xid.log_complete", "sxid.last_seen"), absent)


def test_permission_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(kernel_log.os, "open", refused)
    (absent,) = read(Path("/dev/kmsg"))["xid.last_seen"].values()
    assert isinstance(absent, Absent)
    assert absent.reason == (
        "/dev/kmsg: Operation not permitted: run as root, or with CAP_SYSLOG if kernel.dmesg_restrict is 1"
    )


# ---- the journal ----

JOURNAL = (
    "[    0.000000] kernel: Linux version 6.8.0-45-generic",
    "[91827.364554] kernel: NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.",
    "[93000.000000] kernel: eth0: link up",
    "[93000.500000] kernel: NVRM: Xid (PCI:0000:4c:00): 48, pid=1",
)


def test_full_snapshot_adds_overwritten_records_from_the_journal_once(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LATER_LINE + "4,7002,93000500000,-;NVRM: Xid (PCI:0000:4c:00): 48, pid=1\n")
    result = read(log, journal_command(tmp_path, *JOURNAL), full_snapshot=True)
    assert result["xid.count"] == {"pci=0000:4c:00.0,xid=48": 1, "pci=0000:5d:00.0,xid=79": 1}
    assert result["xid.log_complete"] == {"host": True}


@pytest.mark.parametrize("kept", range(len(JOURNAL) + 1))
def test_log_is_complete_only_if_the_journal_reaches_the_ring_buffer(tmp_path: Path, kept: int) -> None:
    """The ring buffer has the last two records. A journal that lacks the first of them may lack records before it, too."""
    log = tmp_path / "kmsg"
    log.write_text(LATER_LINE + "4,7002,93000500000,-;NVRM: Xid (PCI:0000:4c:00): 48, pid=1\n")
    result = read(log, journal_command(tmp_path, *JOURNAL[:kept]), full_snapshot=True)
    assert result["xid.log_complete"] == {"host": kept > 2}


def test_log_with_dates_instead_of_uptimes_is_incomplete(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("Nov 20 14:03:20 gpu-7 kernel: NVRM: Xid (PCI:0000:4c:00): 48, pid=1\n")
    for full_snapshot in (False, True):
        result = read(log, journal_command(tmp_path, *JOURNAL), full_snapshot=full_snapshot)
        assert result["xid.count"] == {"pci=0000:4c:00.0,xid=48": 1}
        assert result["xid.log_complete"] == {"host": False}


def test_collector_starts_no_process_unless_the_snapshot_is_full(tmp_path: Path) -> None:
    """When Prometheus scrapes the exporter, the collector runs without `full_snapshot` and must be fast."""
    log, trace = tmp_path / "kmsg", tmp_path / "started"
    log.write_text(LATER_LINE)
    assert read(log, ("touch", str(trace)))["xid.log_complete"] == {"host": False}
    assert not trace.exists()


def test_journal_is_not_read_if_the_buffer_is_complete(tmp_path: Path) -> None:
    log, trace = tmp_path / "kmsg", tmp_path / "started"
    log.write_text(BOOT_LINE + LATER_LINE)
    assert read(log, ("touch", str(trace)), full_snapshot=True)["xid.log_complete"] == {"host": True}
    assert not trace.exists()


def test_first_command_with_output_replaces_an_unreadable_buffer(tmp_path: Path) -> None:
    empty, failing = (sys.executable, "-c", ""), (sys.executable, "-c", "raise SystemExit('not permitted')")
    commands = (("no-such-program",), empty, failing, journal_command(tmp_path, *JOURNAL[1:]))
    result = read(tmp_path / "kmsg", *commands, full_snapshot=True)
    assert result["xid.count"] == {"pci=0000:4c:00.0,xid=48": 1, "pci=0000:5d:00.0,xid=79": 1}
    assert result["xid.last_seen"] == {"host": 93000.5}
    assert result["xid.log_complete"] == {"host": False}


def test_error_names_the_commands_that_were_tried(tmp_path: Path) -> None:
    (absent,) = read(tmp_path / "kmsg", ("no-such-program",), ("true",), full_snapshot=True)["xid.last_seen"].values()
    assert isinstance(absent, Absent)
    assert absent.reason.endswith(
        "kmsg: No such file or directory; no-such-program and true did not return the kernel log"
    )


# ---- the judge ----

PACKS = read_packs(())
XID_CRITERIA = ("xid-", "sxid-")


def judged(
    counts: Mapping[str, object], *, observed: Sequence[float | str] = (0.0, 0.0), name: str = "xid.count"
) -> list[Verdict]:
    """Return the XID and SXid verdicts on h1.

    Args:
        counts: scope -> number of errors, the same in all three snapshots
        observed: two values of `xid.last_seen`: the first is in snapshots 1 and 2, the second is in snapshot 3. A number is the
            reading in s. A text is the reason why the reading is absent
        name: name of the reading with the counts
    """
    plan = builders.plan(profile="smoke")
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    taken = tuple(
        replace(snapshot, metrics=(*filter(lambda metric: metric.name != "xid.last_seen", snapshot.metrics), *extra))
        for snapshot, when in zip(first.snapshots, (observed[0], *observed), strict=True)
        for extra in [
            (
                Metric(name=name, unit="1", values=counts),
                Metric(name="xid.last_seen", unit="s", absent={"host": when})
                if isinstance(when, str)
                else Metric(name="xid.last_seen", unit="s", values={"host": when}),
            )
        ]
    )
    verdicts = judge(plan, evidence | {"h1": Evidence(records=(replace(first, snapshots=taken), *rest))}, PACKS)
    return [item for item in verdicts if item.host == "h1" and item.criterion.startswith(XID_CRITERIA)]


def not_passed(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    """Return (criterion, verdict, scope, serial) of every verdict that is not a pass."""
    return [(item.criterion, item.verdict, item.scope, item.serial) for item in verdicts if item.verdict != PASS]


def test_xid_79_fails_with_serial_and_action() -> None:
    verdicts = judged({"pci=0000:01:00.0,xid=79": 1}, observed=(30.0, 30.0))
    assert not_passed(verdicts) == [("xid-79", FAIL, "gpu=1,xid=79", "h1-1")]
    (failed,) = (item for item in verdicts if item.verdict == FAIL)
    assert (failed.action, failed.value) == ("reboot", 1)
    assert failed.reason.startswith("found 1, wanted = 0; the kernel log keeps this message until the next boot: ")
    assert "GPU has fallen off the bus" in failed.source


def test_xid_at_a_pci_address_without_a_known_gpu_fails_with_this_address() -> None:
    assert not_passed(judged({"pci=0000:5d:00.0,xid=79": 1})) == [("xid-79", FAIL, "pci=0000:5d:00.0,xid=79", "")]


def test_codes_without_a_criterion_pass_if_they_were_logged_before_the_run() -> None:
    codes = ("13", "31", "43", "45", "63", "68", "92", "93", "94", "121", "137", "149", "154", "999")
    counts = {f"pci=0000:01:00.0,xid={code}": 3 for code in codes}
    assert not_passed(judged(counts, observed=(30.0, 30.0))) == []


@pytest.mark.parametrize("code", ["13", "43", "63", "999"])
def test_code_without_a_criterion_fails_if_it_is_logged_during_the_run(code: str) -> None:
    verdicts = judged({f"pci=0000:01:00.0,xid={code}": 1}, observed=(0.0, 91827.4))
    assert not_passed(verdicts) == [("xid-during-run", FAIL, "host", "")]


def test_log_without_xids_passes() -> None:
    assert [(item.criterion, item.verdict) for item in judged({})] == [("xid-during-run", PASS)]


@pytest.mark.parametrize(
    "observed",
    [("error: refused", "error: refused"), (0.0, "error: refused"), ("error: refused", 0.0)],
    ids=["in all snapshots", "in the last snapshot", "in the first two snapshots"],
)
def test_unreadable_log_is_inconclusive(observed: Sequence[float | str]) -> None:
    assert not_passed(judged({}, observed=observed)) == [("xid-during-run", INCONCLUSIVE, "host", "")]


def test_fatal_nvlink_5_xid_fails() -> None:
    counts = {"pci=0000:01:00.0,xid=149": 1}
    assert not_passed(judged(counts, name="xid.fatal")) == [("xid-149-fatal", FAIL, "gpu=1,xid=149", "h1-1")]


@pytest.mark.parametrize(
    ("fatal", "code", "criterion"),
    [
        ("yes", "20034", "sxid-fatal"),
        ("yes", "99999", "sxid-fatal"),
        ("no", "20034", ""),
        ("no", "22013", ""),
        ("unknown", "10004", "sxid-10004"),
        ("unknown", "10005", ""),
        ("unknown", "99999", ""),
    ],
)
def test_switch_error_fails_only_if_it_is_fatal_or_its_code_has_a_criterion(
    fatal: str, code: str, criterion: str
) -> None:
    location = f"pci=0000:c1:00.0,fatal={fatal},sxid={code}"
    expected = [(criterion, FAIL, location, "")] if criterion else []
    assert not_passed(judged({location: 2}, name="sxid.count")) == expected


CRITERIA_OF_CODES = [item for item in read_pack("xid").criteria if item.where and "xid" in item.where]


@pytest.mark.parametrize("name", sorted({item.name for item in CRITERIA_OF_CODES}))
def test_each_code_fails_only_its_criterion(name: str) -> None:
    by_code = {str(item.where["xid"]): item.id for item in CRITERIA_OF_CODES if item.name == name}
    verdicts = judged({f"pci=0000:01:00.0,xid={code}": 1 for code in by_code}, name=name)
    failed = [(criterion, location) for criterion, _, location, _ in not_passed(verdicts)]
    assert sorted(failed) == sorted((criterion, f"gpu=1,xid={code}") for code, criterion in by_code.items())


@pytest.mark.parametrize("item", CRITERIA_OF_CODES, ids=lambda item: item.id)
def test_source_of_a_criterion_names_its_code(item: Criterion) -> None:
    assert re.search(rf"\b{item.where['xid']}\b", item.source)
