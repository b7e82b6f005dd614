"""XID errors out of kernel logs: which lines count, and how the log is read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectors import xid
from collectors.base import Absent, scope
from collectors.xid import XidCollector, xids

LOGS = Path(__file__).parents[1] / "fakes" / "kmsg"
FALLEN = "4,1203,91827364554,-;NVRM: Xid (PCI:0000:5d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


def counts(log: Path) -> dict[str, object]:
    """The readings of both families, by scope; the host's is the time of the newest."""
    newest, count = XidCollector(log=log).collect()
    assert (newest.name, newest.unit, count.name, count.unit) == ("xid.last_seen", "s", "xid.count", "1")
    return {scope(labels): value for labels, value in (*newest.readings, *count.readings)}


def test_the_time_of_a_line_is_read_in_both_forms() -> None:
    assert xid.uptime(FALLEN) == 91827.364554
    assert xid.uptime("[  12.345678] NVRM: Xid (PCI:0000:4c:00.0): 48") == 12.345678
    assert xid.uptime("NVRM: Xid (PCI:0000:4c:00.0): 48") > 0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (FALLEN, [("0000:5d:00", "79")]),
        ("NVRM: Xid (PCI:0000:5D:00): 79, pid=1, GPU has fallen off the bus.", [("0000:5d:00", "79")]),
        (
            "[  12.3] NVRM: Xid (PCI:0000:4c:00.0): 48, pid=1, An uncorrectable double bit error",
            [("0000:4c:00.0", "48")],
        ),
        ("NVRM: Xid (PCI:0000:4c:00): 63, Row Remapper: New row marked for remapping", [("0000:4c:00", "63")]),
        ("NVRM: Xid (PCI:0000:4c:00): 94, pid=2, Contained: SM (0x1). RST: No, D-RST: No", [("0000:4c:00", "94")]),
        ("NVRM: Xid (PCI:0009:01:00): 119, Timeout after 6s of waiting for RPC response", [("0009:01:00", "119")]),
        ("NVRM: GPU 0000:5d:00.0: GPU has fallen off the bus.", []),
        ("NVRM: GPU at PCI:0000:5d:00: GPU-e3406b9a-17dc-4f82-b5e3-2c90a87fd461", []),
        ("nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 12028, Non-fatal, Link 32", []),
        ("systemd[1]: Started Xid 79 watcher.", []),
        ("NVRM: Xid (PCI:0000:5d:00): , pid=1", []),
        ("", []),
    ],
)
def test_the_lines_that_count(line: str, found: list[tuple[str, str]]) -> None:
    assert xids(line) == found


def test_a_log_with_faults_is_counted_by_address_and_code() -> None:
    assert counts(LOGS / "faults.txt") == {
        "host": 93100.00009,
        "pci=0000:4c:00,xid=48": 1,
        "pci=0000:4c:00,xid=63": 1,
        "pci=0000:4c:00,xid=94": 2,
        "pci=0000:5d:00,xid=79": 1,
    }


def test_a_healthy_log_has_none() -> None:
    assert counts(LOGS / "healthy.txt") == {"host": 0.0}


@pytest.mark.parametrize("before", range(8100, 8200, 9))
def test_a_line_across_two_reads_counts_once(tmp_path: Path, before: int) -> None:
    log = tmp_path / "kern.log"
    log.write_text("x" * (before - 1) + "\n" + FALLEN)
    assert counts(log) == {"host": 91827.364554, "pci=0000:5d:00,xid=79": 1}


def test_a_log_that_is_not_utf8_is_still_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\xff\xfe\n" + FALLEN.encode())
    assert counts(log)["host"] == 91827.364554


def test_a_log_that_stays_open_ends_where_nothing_is_left(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    try:
        os.write(writer, FALLEN.encode() * 3)
        assert counts(log)["pci=0000:5d:00,xid=79"] == 3
    finally:
        os.close(writer)


def test_a_record_overwritten_before_it_was_read_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [FALLEN.encode(), BrokenPipeError(), FALLEN.encode(), BlockingIOError()]

    def read(descriptor: int, size: int) -> bytes:
        assert (descriptor, size) == (99, 8192)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    closed: list[int] = []
    kernel = SimpleNamespace(O_RDONLY=0, O_NONBLOCK=0, open=lambda *_: 99, read=read, close=closed.append)
    monkeypatch.setattr(xid, "os", kernel)
    assert counts(Path("/dev/kmsg"))["pci=0000:5d:00,xid=79"] == 2
    assert closed == [99]


def test_a_log_that_cannot_be_read_is_an_error_not_a_zero(tmp_path: Path) -> None:
    missing = tmp_path / "kmsg"
    assert counts(missing) == {"host": Absent(status="error", reason=f"{missing}: No such file or directory")}
    assert counts(tmp_path) == {"host": Absent(status="error", reason=f"{tmp_path}: Is a directory")}
