"""An error in the kernel log gives the same readings in every format of the log.

Formats differ in the driver branch, the time before the message, the white space and the notation of PCI addresses. They are
taken from public logs, from the source files kernel_rc.c, osinit.c and error_nvswitch.c of NVIDIA's open kernel modules (R535 to
R595), from the documentation of Linux (ABI/testing/dev-kmsg), dmesg(1), journalctl(1) and rsyslog (traditional and ISO format),
and from the issues NVIDIA/NVSentinel 155, leptonai/gpud 1209 and NVIDIA/open-gpu-kernel-modules 1150.
"""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors import kernel_log
from collectors.base import Absent, Family, Value
from collectors.kernel_events import EVENTS, VOLUME_EVENTS, parse_event
from collectors.xid import ErrorCounts, XidCollector
from tests import ROOT

PREFIXES = {
    "kmsg": "3,1234,123456789,-;",
    "kmsg, with the caller": "3,1234,123456789,-,caller=T4242;",
    "without a prefix": "",
    "dmesg": "[  123.456789] ",
    "dmesg, after two days": "[171167.620236] ",
    "dmesg --raw": "<3>[  123.456789] ",
    "dmesg --decode": "kern  :err   : [  123.456789] ",
    "dmesg --ctime": "[Tue Nov  3 04:05:06 2026] ",
    "dmesg --ctime --decode": "kern  :err   : [Tue Nov  3 04:05:06 2026] ",
    "dmesg --time-format iso": "2026-11-03T04:05:06,123456+00:00 ",
    "dmesg --time-format iso --decode": "kern  :warn  : 2026-11-03T04:05:06,123456+01:00 ",
    "dmesg --reltime": "[Nov 3 04:05] ",
    "dmesg --reltime, second line": "[  +0.000012] ",
    "CONFIG_PRINTK_CALLER": "[  123.456789][ T4242] ",
    "CONFIG_PRINTK_CALLER, processor": "[  123.456789][   C12] ",
    "journalctl": "Nov 03 04:05:06 host7 kernel: ",
    "journalctl of a container": "Nov 03 04:05:06 kernel: ",
    "journalctl -o short-precise": "Nov 03 04:05:06.123456 host7 kernel: ",
    "journalctl -o short-iso": "2026-11-03T04:05:06+0000 host7 kernel: ",
    "journalctl -o short-iso-precise": "2026-11-03T04:05:06.123456+00:00 host7.example.com kernel: ",
    "journalctl -o short-full": "Tue 2026-11-03 04:05:06 UTC host7 kernel: ",
    "journalctl -o short-full, other zone": "Tue 2026-11-03 04:05:06 CEST host7 kernel: ",
    "journalctl -o short-monotonic": "[  123.456789] host7 kernel: ",
    "journalctl -o short-unix": "1793678706.123456 host7 kernel: ",
    "syslog": "Nov  3 04:05:06 host7 kernel: [  123.456789] ",
    "syslog, with the caller": "Nov  3 04:05:06 host7 kernel: [  123.456789][ T4242] ",
    "rsyslog, ISO": "2026-11-03T04:05:06.123456+00:00 host7 kernel: [  123.456789] ",
    "rsyslog, ISO in UTC": "2026-11-03T04:05:06Z host7 kernel: ",
    "BSD syslog": "<3>Nov  3 04:05:06 host7 kernel: ",
}
"""Log format -> the text before each message."""
ADDRESSES = {
    f"{marker}{address}{rest}": "0048:48:00.0" if "0048" in address else "0000:48:00.0"
    for marker in ("PCI:", "")
    for address in (
        "0000:48:00",
        "0000:48:00.0",
        "00000000:48:00",
        "00000000:48:00.0",
        "0048:48:00",
        "00000048:48:00.0",
    )
    for rest in ("", " GPU-I:05", " GPU-I:05 GPU-CI:01", " GPU-e3406b9a-17dc-4f82-b5e3-2c90a87fd461")
}
"""Text in parentheses after `Xid` -> PCI address as sysfs writes it."""
PROCESSES = (
    "",
    "pid=47110, name=ray::WorkerDict, ",
    "pid='<unknown>', name=<unknown>, ",
    "pid=1, ",
    "pid=7, name=a Fatal XC flaw, ",
    "pid=7, name=(x): 79, Nonfatal Link, ",
    "name=python3, ",
)
"""Text between the code of an XID and its message: empty, or the process. Some of these process names look like XID messages."""
WORDS = "0x021425c6 0x00000000 0x00000000 0x00000000"
ENDS = (
    f"XC0 i0 Link 01 ({WORDS})",
    f"XC1 i0 Link -1 ({WORDS} 0x0 0x0)",
    "XC 1 i 2 Link 01 [0x0000000a]",
    "Link 01 (0x1)",
)
"""Text after the severity (`Fatal` or `Nonfatal`) in the line of an NVLink 5 XID."""
UNITS = {
    "149": "NETIR_LINK_EVT",
    "145": "RLW_RXPIPE",
    "146": "TLW_RX/TLW_RX_PIPE0",
    "150": "MSE_WATCHDOG",
    "148": "NVLPW_CTRL/NVLPW",
}
"""Code of an NVLink 5 XID -> the hardware unit that the line names."""
PADDINGS = ((" ", " "), ("  ", "   "), ("   ", " "), ("\t", "\t"), ("             ", "         "))
"""White space before and after the severity in the line of an NVLink 5 XID."""


def dict_of(family: Family) -> dict[str, Value]:
    """Return scope -> value of the readings of a family."""
    return {
        ",".join(f"{label}={text}" for label, text in labels.items()): value
        for labels, value in family.readings
        if not isinstance(value, Absent)
    }


def counts(*lines: str) -> ErrorCounts:
    """Return the counts after these lines of a kernel log."""
    result = ErrorCounts()
    result.add(lines)
    return result


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_xid_of_nvlink_5_is_read_in_every_format(prefix: str) -> None:
    beginnings = [("PCI:0000:48:00", process) for process in PROCESSES]
    beginnings += [(printed, "") for printed in ADDRESSES if prefix == PREFIXES["kmsg"]]
    for (printed, process), (code, unit), (severity, is_fatal), end, (left, right) in itertools.product(
        beginnings, UNITS.items(), (("Fatal", 1), ("Nonfatal", 0)), ENDS, PADDINGS
    ):
        line = f"{prefix}NVRM: Xid ({printed}): {code}, {process}{unit}{left}{severity}{right}{end}"
        result, error = counts(line), (ADDRESSES[printed], code)
        assert (result.xid, +result.fatal) == ({error: 1}, {error: 1} if is_fatal else {}), line


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_other_xids_are_read_in_every_format(prefix: str) -> None:
    codes = ("13", "31", "43", "45", "48", "63", "79", "94", "119", "154", "175")
    beginnings = [("PCI:0000:48:00", "0000:48:00.0", process) for process in PROCESSES]
    beginnings += [(printed, address, "") for printed, address in ADDRESSES.items()]
    for (printed, address, process), code, separator in itertools.product(
        beginnings, codes, (", ", ",  ", ",", " ", "\t")
    ):
        line = f"{prefix}NVRM: Xid ({printed}): {code}{separator}{process}GPU recovery action changed from 0x0 (None)"
        result = counts(line)
        assert (result.xid, +result.fatal) == ({(address, code): 1}, {}), line


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize(
    ("severity", "fatal"), [("Fatal", "yes"), ("Non-fatal", "no"), ("Nonfatal", "no"), ("Correctable", "no")]
)
def test_sxid_is_read_in_every_format(prefix: str, severity: str, fatal: str) -> None:
    for address, separator in itertools.product(
        ("PCI:0000:C1:00.0", "PCI:00000000:c1:00.0", "0000:c1:00"), (", ", ",  ", ",")
    ):
        head = f"{prefix}nvidia-nvswitch3: SXid ({address}): 20034{separator}"
        lines = (
            f"{severity}, Link 30 LTSSM Fault Up",
            "Severity 1 Engine instance 30",
            "Data {0x50610002, 0x10100030}",
        )
        assert counts(*(head + line for line in lines)).sxid == {("0000:c1:00.0", fatal, "20034"): 1}


LOST = {
    "R535 and later": ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system has",
                       "NVRM: fallen off the bus and is not responding to commands."),
    "older": ("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330)", "NVRM: installed in this system has",
              "NVRM: fallen off the bus and is not responding to commands."),
    "without its PCI ID": ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: installed in this system has",
                           "NVRM: fallen off the bus and is not responding to commands."),
    "two lines": ("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this",
                  "NVRM: system has fallen off the bus and is not responding to commands."),
    "one line": ("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has fallen off the bus.",),
    "short": ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.",),
}  # fmt: skip
"""Form of the message that a GPU has fallen off the bus -> the lines of the message."""


def forms(prefix: str, lines: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield three logs. Each has one message, which consists of these lines.

    The logs differ in form: one record per line; the second and later lines indented, without a prefix; all lines in one
    record. In /dev/kmsg, a record of several lines has escaped line ends and is followed by lines with its properties.
    """
    yield [prefix + line for line in lines]
    yield [f"{prefix}{lines[0]}", *(f"               {line}" for line in lines[1:])]
    if prefix.startswith("3,"):
        yield [prefix + "\\x0a".join(lines), " SUBSYSTEM=pci", " DEVICE=+pci:0000:18:00.0"]
    else:
        yield ["\n".join([prefix + lines[0], *lines[1:]])]


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("lines", LOST.values(), ids=LOST)
def test_gpu_lost_without_an_xid_is_read_in_every_format(prefix: str, lines: tuple[str, ...]) -> None:
    for log in forms(prefix, lines):
        interleaved = [text for line in log for text in (line, f"{prefix}workqueue: hogged CPU for >10000us 4 times")]
        for variant in (log, interleaved):
            assert counts(*variant).messages == {("0000:18:00.0", "fallen_off_the_bus"): 1}, variant


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x26:0x56:1463)", "init_failed"),
        ("nvidia: probe of 0000:18:00.0 failed with error -1", "probe_failed"),
        ("nvidia 0000:18:00.0: probe with driver nvidia failed with error -1", "probe_failed"),
        ("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:1b30) installed in this system is not supported", ""),
        ("NVRM: GPU at PCI:0000:18:00: GPU-e3406b9a-17dc-4f82-b5e3-2c90a87fd461", ""),
        ("NVRM: The NVIDIA probe routine failed for 1 device(s).", ""),
        ("mlx5_core 0000:18:00.0: probe with driver mlx5_core failed with error -22", ""),
        ("traps: NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", ""),
    ],
)
def test_other_messages_are_classified_or_ignored(message: str, kind: str) -> None:
    for prefix in PREFIXES.values():
        assert counts(prefix + message).messages == ({("0000:18:00.0", kind): 1} if kind else {})


_SENTENCE = "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2901)"
_INIT_FAILED = "NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x22:0x3f:744)"
_PROBE_FAILED = "nvidia: probe of 0000:18:00.0 failed with error -1"
START_FAILURES: dict[str, list[tuple[str, ...]]] = {
    "no_address_space": [
        (
            "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:",
            "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:18:00.0)",
            _PROBE_FAILED,
        ),
        (
            "NVRM: request_mem_region failed for 0M @ 0x0. This can",
            "NVRM: occur when a driver such as rivatv is loaded and claims",
            "NVRM: ownership of the device's registers.",
            _PROBE_FAILED,
        ),
    ],
    "other_driver": [
        ("NVRM: request_mem_region failed for 16M @ 0xd8000000. This can", "NVRM: occur when a driver such as:", _PROBE_FAILED),
        ("NVRM: GPU 0000:18:00.0 is already bound to nouveau.",),
    ],
    "open_modules_required": [
        (_SENTENCE, "NVRM: installed in this system requires use of the NVIDIA", "NVRM: open kernel modules.", _INIT_FAILED),
        (f"{_SENTENCE} installed in this system requires use of the NVIDIA open kernel modules.",),
    ],
    "open_modules_unsupported": [
        (_SENTENCE, "NVRM: installed in this system is not supported by open", "NVRM: nvidia.ko because it does not",
         _PROBE_FAILED),
    ],
    "unsupported_by_driver": [
        (_SENTENCE, "NVRM: installed in this system is not supported by the", "NVRM: NVIDIA 535.309.01 driver", _PROBE_FAILED),
    ],
    "firmware_missing": [
        ("nvidia 0000:18:00.0: Direct firmware load for nvidia/580.95.05/gsp_ga10x.bin failed with error -2", _INIT_FAILED),
    ],
    "confidential_computing": [
        ("NVRM: confComputeConstructEngine_IMPL: GPU confidential compute capability is not enabled.", "NVRM: osInitNvMapping: x",
         _INIT_FAILED),
    ],
}  # fmt: skip
"""Reason why a GPU does not start -> excerpts of logs with this reason.

The lines are from NVIDIA/gpu-operator issues 232 and 492, from NVIDIA/nvtrust issue 124, and from the driver's nv-pci.c and
osapi.c.
"""


@pytest.mark.parametrize("reason", START_FAILURES)
def test_reason_why_a_gpu_does_not_start_is_reported(reason: str) -> None:
    for lines in START_FAILURES[reason]:
        # `forms` also joins lines. A log of one line has nothing to join. A log that ends with _PROBE_FAILED must not be joined:
        # the kernel itself logs this line, always as a separate record.
        for prefix in PREFIXES.values():
            for log in (
                forms(prefix, lines) if len(lines) > 1 and lines[-1] != _PROBE_FAILED else [[prefix + x for x in lines]]
            ):
                assert ("0000:18:00.0", reason) in counts(*log).messages, log


def test_reason_without_an_address_is_attributed_only_to_the_next_gpu() -> None:
    lines = START_FAILURES["confidential_computing"][0]
    other = "NVRM: GPU 0000:2a:00.0: RmInitAdapter failed! (0x62:0x65:1784)"
    assert counts(*lines, other).messages == {
        ("0000:18:00.0", "init_failed"): 1,
        ("0000:18:00.0", "confidential_computing"): 1,
        ("0000:2a:00.0", "init_failed"): 1,
    }


def test_reason_without_an_address_is_not_attributed_to_a_gpu_that_fails_much_later() -> None:
    reason, *_, failed = START_FAILURES["confidential_computing"][0]
    for after_s, messages in ((60, {"init_failed", "confidential_computing"}), (61, {"init_failed"})):
        log = (f"3,1,1000000,-;{reason}", f"3,2,{(1 + after_s) * 1_000_000},-;{failed}")
        assert {message for _, message in counts(*log).messages} == messages


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("45, pid=1582, name=python3, Ch 00000008", False),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", False),
        ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", True),
        ("154, GPU recovery action changed from )0x1 GPU( to", True),
        ("31, pid=1582, name=to 0x0, Ch 00000008", True),
        ("43, pid=1582, name=python3, Ch 00000008", True),
        ("79, GPU has fallen off the bus.", True),
    ],
)
def test_only_an_xid_that_reports_a_fault_sets_the_time_of_the_last_xid(text: str, is_fault: bool) -> None:
    """XID 45 is not a fault: the driver logs it for every process that ends abnormally on a GPU.

    See NVIDIA/NVSentinel issues 1710 and 1440. An XID 154 that withdraws a recovery action (`to 0x0`) is not a fault either.
    """
    for prefix in PREFIXES.values():
        result = counts(f"{prefix}NVRM: Xid (PCI:0000:18:00): {text}")
        assert result.xid.total() == 1
        assert bool(result.last_xid) is is_fault


def test_unsupported_gpu_is_not_reported_as_lost_if_another_gpu_is_lost() -> None:
    unsupported = (
        "NVRM: The NVIDIA GPU 0000:03:00.0 (PCI ID: 10de:1b30)\nNVRM: installed in this system is not supported"
    )
    lost = "NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."
    assert counts(*unsupported.split("\n"), lost).messages == {("0000:18:00.0", "fallen_off_the_bus"): 1}


def test_two_gpus_lost_at_once_are_both_reported() -> None:
    lines = [line.replace("18:00", bus) for bus in ("18:00", "2a:00") for line in LOST["R535 and later"]]
    assert set(counts(*lines).messages) == {
        ("0000:18:00.0", "fallen_off_the_bus"),
        ("0000:2a:00.0", "fallen_off_the_bus"),
    }


def test_uuid_is_replaced_by_the_address_that_an_earlier_line_gives_for_it() -> None:
    uuid = "GPU-e3406b9a-17dc-4f82-b5e3-2c90a87fd461"
    xid = f"NVRM: Xid ({uuid}): 79, GPU has fallen off the bus."
    assert counts(f"NVRM: GPU at PCI:0000:18:00: {uuid}", xid).xid == {("0000:18:00.0", "79"): 1}
    assert counts(xid).xid == {(uuid, "79"): 1}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize(
    "text",
    [
        "traps: NVRM: Xid (PCI:0000:4c:00): 79[8123] general protection fault",
        "systemd[1]: NVRM: Xid (PCI:0000:4c:00): 79, GPU has fallen off the bus.",
        "audit: comm=\"NVRM: Xid (PCI:0000:4c:00): 79, x\"",
        "NVRM: Xid (PCI:../../etc): 79, pid=1",
        "NVRM: Xid (PCI:0000:4c:00): , pid=1",
    ],
)  # fmt: skip
def test_line_that_only_looks_like_an_xid_is_not_read(prefix: str, text: str) -> None:
    assert counts(prefix + text).xid == {}


@given(st.text(), st.sampled_from(list(PREFIXES.values())))
def test_no_text_raises_an_exception(text: str, prefix: str) -> None:
    counts(
        prefix + text,
        f"{prefix}NVRM: Xid ({text}): 79, x",
        f"{prefix}NVRM: The NVIDIA GPU {text}",
        f"{prefix}NVRM: {text}",
    )


@pytest.mark.parametrize(
    "prefix", [prefix for prefix in PREFIXES.values() if "123.456789" in prefix or "123456789" in prefix]
)
def test_uptime_is_read_from_every_format_that_has_it(prefix: str) -> None:
    assert kernel_log.uptime(f"{prefix}NVRM: Xid (PCI:0000:48:00): 79, x") == 123.456789


def test_journal_message_of_several_lines_is_one_record(tmp_path: Path) -> None:
    first, *rest = LOST["R535 and later"]
    journal = tmp_path / "journal.txt"
    journal.write_text(
        "\n".join(
            [
                "[    0.000000] host7 kernel: Linux version 6.8.0-45-generic",
                f"[ 1843.308145] host7 kernel: {first}",
                *(f"                             {line}" for line in rest),
                "[ 1843.439662] host7 kernel: NVRM: The NVIDIA probe routine failed for 1 device(s).",
            ]
        )
    )
    families = XidCollector(tmp_path / "kmsg", full_snapshot=True, commands=(("cat", str(journal)),)).collect()
    (message,) = [reading for family in families if family.name == "xid.message" for reading in family.readings]
    assert message == ({"pci": "0000:18:00.0", "message": "fallen_off_the_bus"}, 1)


# ---- a log of every kind of event ----

LOG = ROOT / "tests" / "data" / "kernel_log.txt"


def paragraphs() -> list[tuple[set[str], list[str]]]:
    """Return the expected readings and the log lines of each paragraph of LOG.

    The first line of a paragraph lists the expected readings. The header of LOG is skipped.
    """
    result = []
    for paragraph in LOG.read_text().split("\n\n")[1:]:
        head, *lines = paragraph.rstrip("\n").split("\n")
        expected = head.removeprefix("= ")
        assert head.startswith("= "), head
        result.append((set() if expected.startswith("nothing: ") else set(expected.split("; ")), lines))
    return result


def everything_read(lines: list[str]) -> set[str]:
    """Return the readings of these lines, each as text in the form that LOG uses, such as `xid 79 0000:cb:00.0`."""
    result = counts(*lines)
    xids = {f"xid {code} {pci}{' fatal' if result.fatal[pci, code] else ''}" for pci, code in result.xid}
    sxids = {f"sxid {fatal} {code} {pci}" for pci, fatal, code in result.sxid}
    messages = {f"message {kind} {pci}" for pci, kind in result.messages}
    events = {
        f"event {event}" + (f" {kind}={name}" if kind else "") for event, (kind, name), _ in result.events.by_part()
    }
    return xids | sxids | messages | events


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_every_paragraph_of_the_log_gives_its_readings_in_every_format(prefix: str) -> None:
    for expected, lines in paragraphs():
        assert everything_read([prefix + line for line in lines]) == expected, lines
    together = [prefix + line for _, lines in paragraphs() for line in lines]
    assert everything_read(together) == set().union(*(expected for expected, _ in paragraphs()))


def test_every_event_except_hardware_corrected_nvme_reset_and_those_of_volumes_and_gpus_is_in_the_log() -> None:
    named = {item.split()[1] for expected, _ in paragraphs() for item in expected if item.startswith("event ")}
    assert named | {"hardware_corrected", "nvme_reset", "gpu_page_offlined", *VOLUME_EVENTS.values()} == set(EVENTS)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_message_in_which_a_process_repeats_the_text_of_an_event_is_no_event(prefix: str) -> None:
    for _, lines in paragraphs():
        for line in lines:
            assert (
                everything_read(
                    [f"{prefix}traps: {line}", f"{prefix}audit: comm={line}", f"{prefix}python3[7]: {line}"]
                )
                == set()
            )


def test_number_of_parts_with_separate_counts_is_limited() -> None:
    lines = [f"nvme nvme{number}: Disabling device after reset failure: -19" for number in range(10_000)]
    read = counts(*lines).events.counts
    # The first 256 drives have separate counts. The events of all others count for the host.
    assert (len(read) <= 257, read.total(), read["nvme_lost", ("", "")]) == (True, 10_000, 10_000 - 256)


FATAL = "pcieport 0000:15:01.0: AER: Uncorrectable (Fatal) error message received from 0000:17:00.0"
OLD_FATAL = "pcieport 0000:15:01.0: AER: Multiple Uncorrected (Fatal) error received: 0000:17:00.0"
"""A root port's message that a device has reported a fatal error, in the forms of newer and of older kernels."""
DETAILS = "nvidia 0000:17:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (Unregistered Agent ID)"
"""The kernel's message about the error itself. It follows FATAL or OLD_FATAL."""
BAD_PAGE = (
    "mce: Uncorrected hardware memory error in user-access at 2f5a3c1040",
    "Memory failure: 0x2f5a3c1: Sending SIGBUS to python3:4711 due to hardware memory corruption",
    "Memory failure: 0x2f5a3c1: recovery action for dirty LRU page: Recovered",
    "Memory failure: 0x2f5a3c1: already hardware poisoned",
)
"""Messages about one bad page of memory."""
GPU_AT_17, ROOT_PORT = ("pci", "0000:17:00.0"), ("pci", "0000:15:01.0")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([FATAL], {GPU_AT_17: 1}),
        ([DETAILS], {GPU_AT_17: 1}),
        ([FATAL, DETAILS], {GPU_AT_17: 1}),
        ([OLD_FATAL, DETAILS], {GPU_AT_17: 1}),
        ([FATAL, DETAILS, FATAL, DETAILS], {GPU_AT_17: 2}),
        ([FATAL, DETAILS, DETAILS], {GPU_AT_17: 2}),
        ([FATAL, FATAL, DETAILS], {GPU_AT_17: 2}),
        ([FATAL, DETAILS, DETAILS.replace("17:00.0", "15:01.0")], {GPU_AT_17: 1, ROOT_PORT: 1}),
        ([FATAL, FATAL.replace("17:00.0", "15:01.0"), DETAILS], {GPU_AT_17: 1, ROOT_PORT: 1}),
    ],
)
def test_fatal_pcie_error_and_its_details_are_counted_as_one_event(
    lines: list[str], expected: dict[tuple[str, str], int]
) -> None:
    read = counts(*(f"3,{number},{number}000000,-;{line}" for number, line in enumerate(lines, start=1))).events
    assert {part: times for _, part, times in read.by_part()} == expected
    assert max(read.newest.values()) == len(lines)


def test_details_are_awaited_for_a_limited_number_of_devices() -> None:
    addresses = [f"0000:{number:02x}:00.0" for number in range(20)]
    read = counts(*(line.replace("0000:17:00.0", address) for line in (FATAL, DETAILS) for address in addresses)).events
    # For the first four devices, the details count as a second event: FATAL is remembered only for the newest 16 devices.
    assert [read.counts["pcie_fatal", ("pci", address)] for address in addresses] == [2] * 4 + [1] * 16


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_bad_page_of_memory_is_counted_once_in_whatever_order_its_messages_come(order: tuple[int, ...]) -> None:
    lines = [BAD_PAGE[number] for number in order]
    other = [line.replace("2f5a3c1", "2f5a3c2") for line in lines]
    for read, expected in ((counts(*lines), 1), (counts(*lines, *other, *lines), 2), (counts(*lines[:1]), 1)):
        assert list(read.events.by_part()) == [("memory_uncorrected", ("", ""), expected)]
    later = counts(*(f"3,{number},{number}000000,-;{line}" for number, line in enumerate(lines, start=1)))
    assert later.events.newest == {("memory_uncorrected", ("", "")): 4}


def test_number_of_known_bad_pages_is_limited() -> None:
    read = counts(
        *(f"Memory failure: {page:#x}: recovery action for free page: Delayed" for page in [*range(4097), 4096])
    ).events
    # Only pages 0 to 4095 are remembered, so both messages about page 4096 count.
    assert read.counts.total() == 4098


@pytest.mark.parametrize(("page", "event"), [(0x40, "gpu_page_offlined"), (0x3F, "memory_uncorrected")])
def test_page_of_gpu_memory_is_no_error_of_the_memory_of_the_host(tmp_path: Path, page: int, event: str) -> None:
    """NVIDIA's driver has the kernel take pages of GPU memory out of use, if this memory is a NUMA node (GH200, GB200).

    Here, a block of memory has 64 pages. Block 1 is in the node of a GPU.
    """
    files = {
        "proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:                1\nStatus:              online\n",
        "sys/devices/system/node/node1/cpulist": "\n",
        "sys/devices/system/node/node1/memory1/state": "online\n",
        "sys/devices/system/node/node0/memory0/state": "online\n",
        "sys/devices/system/memory/block_size_bytes": f"{64 * resource.getpagesize():x}\n",
        "kmsg": f"3,0,1000000,-;Memory failure: {page:#x}: recovery action for free page: Recovered\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for full_snapshot in (True, False):
        collector = XidCollector(tmp_path / "kmsg", full_snapshot=full_snapshot, commands=(), root=tmp_path)
        families = {family.name: dict_of(family) for family in collector.collect()}
        assert families["kernel.event.count"] == {f"event={event}": 1}
        assert {scope for scope, at in families["kernel.event.last_seen"].items() if at} == {f"event={event}"}


def test_command_that_a_locked_disk_denied_is_no_error_of_the_disk() -> None:
    """The messages about the command, from the driver and from the block layer, are rate-limited separately."""
    denied = "nvme7c7n1: Read(0x2) @ LBA 0, 8 blocks, Access Denied (sct 0x2 / sc 0x86) DNR "
    failed = "critical medium error, dev nvme7n1, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2"
    other = failed.replace("nvme7n1", "nvme8n1")
    broken = "nvme7n1: Read(0x2) @ LBA 0, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR "
    for lines, errors in (
        ([(5, denied), (5, failed), (6, failed), (64, failed)], {}),
        ([(5, denied), (66, failed)], {"nvme7n1": 1}),
        ([(5, failed), (5, denied)], {"nvme7n1": 1}),
        ([(5, denied), (5, other)], {"nvme8n1": 1}),
        ([(5, denied), (5, broken)], {"nvme7n1": 1}),
        ([(5, denied), (6, "nvme nvme8: pci function 0000:5d:00.0"), (7, failed)], {}),
        ([(5, denied), (6, "nvme nvme7: pci function 0000:5d:00.0"), (7, failed)], {"nvme7n1": 1}),
    ):
        read = counts(*(f"3,{number},{at}000000,-;{line}" for number, (at, line) in enumerate(lines)))
        assert {part[1]: times for event, part, times in read.events.by_part() if event == "disk_error"} == errors


@pytest.mark.parametrize(
    ("found", "name", "other"),
    [
        ("nvme nvme1: pci function 0000:5d:00.0", "nvme1", "nvme11"),
        ("sd 0:0:4:0: [sdb] 7814037168 512-byte logical blocks: (4.00 TB/3.64 TiB)", "sdb", "sdbb"),
    ],
)
def test_events_before_a_name_was_given_to_another_disk_are_of_a_former_disk(found: str, name: str, other: str) -> None:
    """A disk that replaces a faulty one often gets its name. The kernel log does not have the serials."""
    namespace = "n1" if name.startswith("nvme") else ""
    errors = [
        f"critical medium error, dev {name}{namespace}, sector 0",
        f"md/raid1:md0: Disk failure on {name}{namespace}{'p2' if namespace else '2'}, disabling device.",
        f"critical medium error, dev {other}{namespace}, sector 0",
    ]
    others = [("disk_error", f"{other}{namespace}", 1)]
    if namespace:
        errors.append(f"nvme {other}: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10")
        others.append(("nvme_reset", other, 1))
    current = [(event, disk) for event, (_, disk), _ in counts(*errors[:2]).events.by_part()]
    former = [(event, f"{disk}.former", 1) for event, disk in current]
    for lines, expected in (
        ([found, *errors], [(event, disk, 1) for event, disk in current] + others),
        ([found, *errors, found], former + others),
        ([*errors, found, errors[0]], [*former, ("disk_error", f"{name}{namespace}", 1), *others]),
    ):
        read = counts(*(f"3,{number},{number}000000,-;{line}" for number, line in enumerate(lines))).events
        assert sorted(expected) == sorted((event, part[1], times) for event, part, times in read.by_part())
        assert read.newest.keys() == read.counts.keys()


def test_disk_that_is_locked_when_the_kernel_finds_it_is_no_former_disk() -> None:
    """The messages are those of an external disk with a password. The kernel reads the disk again to find its partitions."""
    found = (
        "sd 6:0:0:0: [sdc] Unit Not Ready",
        "sd 6:0:0:0: [sdc] Sense Key : Data Protect [current] ",
        "sd 6:0:0:0: [sdc] Add. Sense: Logical unit access not authorized",
        "sd 6:0:0:0: [sdc] 1952151552 512-byte logical blocks: (999 GB/930 GiB)",
    )
    denied = "critical target error, dev sdc, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2"
    later = "sd 6:0:0:0: [sdc] 7814037168 512-byte logical blocks: (4.00 TB/3.64 TiB)"
    for lines, expected in (
        ((*found, denied), {"sdc": "disk_locked"}),
        ((*found, denied, later), {"sdc.former": "disk_locked"}),
    ):
        times = (f"[{90 if line == later else 3}.000000] {line}" for line in lines)
        assert {part[1]: event for event, part, _ in counts(*times).events.by_part()} == expected


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_disk_that_is_write_protected_is_not_locked(operation: str) -> None:
    """An SSD at the end of its life may reject all writes."""
    lines = (
        "sd 8:0:0:0: [sdb] tag#48 Sense Key : Data Protect [current] ",
        "sd 8:0:0:0: [sdb] tag#48 Add. Sense: Write protected",
        f"critical target error, dev sdb, sector 0 op 0x1:({operation}) flags 0x0 phys_seg 1 prio class 0",
    )
    assert [*counts(*lines).events.by_part()] == [("disk_error", ("disk", "sdb"), 1)]


def test_firmware_records_with_different_numbers_are_counted_separately() -> None:
    (record,) = [lines for expected, lines in paragraphs() if expected == {"event memory_corrected dimm=P1-DIMMC1"}]
    again = [line.replace("{3}", f"{{{number}}}") for number in range(4, 24) for line in record]
    assert list(counts(*record, *again).events.by_part()) == [("memory_corrected", ("dimm", "P1-DIMMC1"), 21)]


BOOT_RECORDS = "BERT: Error records from previous boot:"
PCIE_RECORD = (
    "[Hardware Error]: event severity: fatal",
    "[Hardware Error]:  Error 0, type: fatal",
    "[Hardware Error]:   section_type: PCIe error",
    "[Hardware Error]:   device_id: 0000:18:00.0",
)
"""A firmware record without a number, as the kernel writes it for errors that the firmware recorded before the boot."""
OTHER_DRIVER = "igc 0000:05:00.0 enp5s0: NIC Link is Up 1000 Mbps Full Duplex, Flow Control: RX/TX"


def numbered(number: int) -> list[str]:
    """Return PCIE_RECORD as the kernel writes it for an error of this boot."""
    return [f"{{{number}}}{line}" for line in PCIE_RECORD]


@pytest.mark.parametrize(
    ("lines", "previous", "fatal"),
    [
        ([BOOT_RECORDS, *PCIE_RECORD], 1, 0),
        ([BOOT_RECORDS, *PCIE_RECORD, *PCIE_RECORD], 2, 0),
        ([BOOT_RECORDS, *PCIE_RECORD, OTHER_DRIVER, *PCIE_RECORD], 2, 0),
        ([BOOT_RECORDS, *PCIE_RECORD, *numbered(1)], 1, 1),
        ([BOOT_RECORDS, *PCIE_RECORD, *numbered(1), *numbered(2), *PCIE_RECORD], 2, 2),
        ([*numbered(1), BOOT_RECORDS, *PCIE_RECORD], 1, 1),
        ([*PCIE_RECORD, BOOT_RECORDS, *PCIE_RECORD], 1, 1),
        ([BOOT_RECORDS], 0, 0),
        ([*PCIE_RECORD], 0, 1),
    ],
)
def test_unnumbered_records_after_the_boot_message_are_of_the_previous_boot(
    lines: list[str], previous: int, fatal: int
) -> None:
    """The boot message is BOOT_RECORDS. All other records are of this boot.

    `previous` and `fatal`: expected number of records of the previous boot and of this boot.
    """
    interleaved = [text for line in lines for text in (line, OTHER_DRIVER)]
    for log in (lines, interleaved):
        read = counts(*log).events
        result = {event: times for event, part, times in read.by_part() if part == ("pci", "0000:18:00.0")}
        assert (result.get("previous_boot", 0), result.get("pcie_fatal", 0)) == (previous, fatal)
        assert {event for event, _ in read.newest} == set(result)


def test_records_of_the_previous_boot_that_the_kernel_skipped_are_counted() -> None:
    read = counts("BERT: [Hardware Error]: Skipped 3 error records", "BERT: Total records found: 3").events
    assert list(read.by_part()) == [("previous_boot", ("", ""), 3)]


@pytest.mark.parametrize(
    ("uptime", "event"),
    [(2, "previous_boot"), (299, "previous_boot"), (300, "machine_check"), (90_000, "machine_check")],
)
def test_machine_check_without_a_time_is_of_the_previous_boot_only_if_it_is_reported_at_the_boot(
    uptime: int, event: str
) -> None:
    """The kernel writes the time 0 for errors that it finds in the banks at its start, and with its timer, every 5 minutes."""
    lines = (
        "mce: [Hardware Error]: CPU 7: Machine Check: 0 Bank 5: be00000000800400",
        "mce: [Hardware Error]: TSC 0 ADDR 7f0012345678 MISC 7f0012345678 ",
        "mce: [Hardware Error]: PROCESSOR 0:806f8 TIME 1793678706 SOCKET 0 APIC e microcode 2b0004d0",
    )
    read = counts(*(f"[{uptime}.000000] {line}" for line in lines)).events
    assert list(read.by_part()) == [(event, ("processor", "7"), 1)]
    assert {event for event, _ in read.newest} == {event}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("driver", "own_message"),
    [
        ("mlx5_core", "TX timeout detected"),
        ("bnxt_en", "TX timeout detected, starting reset task!"),
        ("ice", "tx_timeout: VSI_num: 6, Q 14, NTC: 0x0, HW_HEAD: 0x0, NTU: 0x0, INT: 0x4000001"),
        ("i40e", "tx_timeout: VSI_seid: 390, Q 5, NTC: 0x0, HWB: 0x0, NTU: 0x0, TAIL: 0x0, INT: 0x0"),
        ("igb", "Reset adapter"),
        ("mlx5_core", ""),
    ],
)
def test_transmit_time_out_of_linux_6_8_counts_once_whether_or_not_the_driver_logs_it_too(
    driver: str, own_message: str, times: int
) -> None:
    adapter = f"{driver} 0000:b1:00.0 ens801f0np0"
    lines = [f"{adapter}: NETDEV WATCHDOG: CPU: 38: transmit queue 14 timed out 5376 ms"]
    lines += [f"{adapter}: {own_message}"] if own_message else []
    assert list(counts(*lines * times).events.by_part()) == [("nic_reset", ("pci", "0000:b1:00.0"), times)]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("state", ["pre-initializing", "initializing"])
@pytest.mark.parametrize(
    "end",
    [
        "mlx5_core: probe of 0000:5d:00.0 failed with error -16",
        "mlx5_core: probe of 0000:5d:00.0 failed with error -110",
        "mlx5_core 0000:5d:00.0: probe with driver mlx5_core failed with error -16",
        "mlx5_core 0000:5d:00.0: probe with driver mlx5_core failed with error -110",
        "mlx5_core 0000:5d:00.0: mlx5_health_try_recover:339:(pid 12): health recovery failed",
    ],
)
def test_firmware_that_does_not_start_counts_once_whatever_error_the_kernel_returns(
    end: str, state: str, times: int
) -> None:
    function = "mlx5_core 0000:5d:00.0: mlx5_function_setup:1105:(pid 500): "
    lines = (
        f"{function}Firmware over 120000 MS in {state} state, aborting",
        "mlx5_core 0000:5d:00.0: probe_one:1594:(pid 500): mlx5_init_one failed with error code -16",
        end,
    )
    assert list(counts(*lines * times).events.by_part()) == [("nic_firmware", ("pci", "0000:5d:00.0"), times)]


DAMAGE = [
    "BTRFS error (device vdb): parent transid verify failed on 30736384 wanted 10 found 8",
    "BTRFS error (device vdb): parent transid verify failed on logical 30736384 mirror 1 wanted 10 found 8",
    "BTRFS error (device vdb): bdev /dev/vdb errs: wr 1, rd 0, flush 0, corrupt 0, gen 0",
    "BTRFS error (device vdb state EA): bdev /dev/vdb errs: wr 0, rd 0, flush 0, corrupt 8, gen 0",
    "BTRFS error (device vdb): bad tree block start, mirror 1 want 22036480 have 0",
    "BTRFS error (device vdb): bad tree block start, want 22036480 have 0",
    "BTRFS error (device vdb): bad tree block level, mirror 1 level 9 on logical 22036480",
    "BTRFS error (device vdb): bad fsid on block 22036480",
    "BTRFS error (device vdb): block=22036480 read time tree block corruption detected",
    "BTRFS error (device vdb): block=22036480 write time tree block corruption detected",
    "BTRFS error (device vdb): level verify failed on logical 22036480 mirror 1 wanted 1 found 0",
    "BTRFS error (device vdb): tree first key mismatch detected, bytenr=1 parent_transid=2 key expected=(3,4,5) has=(6,7,8)",
    "BTRFS error (device vdb): unable to fixup (regular) error at logical 298844160 on dev /dev/vdb physical 298844160",
    "BTRFS error (device vdb): fixed up error at logical 298844160 on dev /dev/vdb physical 298844160",
    "BTRFS error (device vdb): failed to read block groups: -5",
    "BTRFS error (device vdb): failed to read chunk root",
    "BTRFS error (device vdb): failed to read log tree",
    "BTRFS error (device vdb): failed to verify dev extents against chunks: -117",
    "BTRFS error (device vdb): super block corruption detected before writing it to disk",
    "BTRFS error (device vdb): superblock checksum mismatch",
    "BTRFS error (device vdb): lost page write due to IO error on /dev/vdb (-5)",
    "BTRFS error (device vdb): error writing primary super block to device 1",
    "BTRFS error (device vdb): open_ctree failed: -5",
    "BTRFS critical (device vdb): corrupt leaf: root=5 block=30457856 slot=3 ino=257, invalid inode generation",
    "BTRFS critical (device vdb state EA): unable to find logical 4096 length 4096",
    "BTRFS: error (device vdb) in btrfs_finish_ordered_io:3193: errno=-5 IO failure",
    "BTRFS: error (device vdb state A) in btrfs_run_delayed_refs:2146: errno=-117 Filesystem corrupted",
    "EXT4-fs error (device vdb): ext4_lookup:1785: inode #2: comm ls: deleted inode referenced: 12",
    "EXT4-fs (vdb): Remounting filesystem read-only",
    "XFS (vdb): Metadata corruption detected at xfs_inode_buf_verify+0x14d/0x160, xfs_inode block 0x80",
    "XFS (vdb): Corruption of in-memory data (0x8) detected at xfs_defer_finish. Shutting down filesystem.",
    'XFS (vdb): metadata I/O error in "xfs_trans_read_buf_map" at daddr 0x2 len 1 error 5',
    "XFS (vdb): Log I/O Error Detected. Shutting down filesystem",
]
"""Messages about damaged file systems, from the sources of Linux 4.19 to 6.13 and the documentation of btrfs."""
NO_DAMAGE = [
    "BTRFS error (device vdb): unrecognized mount option 'compres=zstd'",
    "BTRFS error (device vdb): unrecognized mount option 'corrupt'",
    "BTRFS error (device vdb): unsupported compression level",
    "BTRFS error (device vdb): unsupported checksum algorithm: 9",
    "BTRFS error (device vdb): cannot mount because of unsupported optional features (0x1000)",
    "BTRFS error (device vdb): cannot mount read-write because of unsupported optional features (0x8)",
    "BTRFS error (device vdb): sectorsize 65536 not yet supported for page size 4096",
    "BTRFS error (device vdb): qgroup generation mismatch, marked as inconsistent",
    "BTRFS error (device vdb): open_ctree failed",
    "BTRFS error (device vdb): open_ctree failed: -22",
    "BTRFS error (device vdb): failed to read the system array: -2",
    "BTRFS error (device vdb): failed to read chunk tree: -2",
    "BTRFS error (device vdb): devid 2 uuid 3f5b8c52-6d4c-4b0a-9d63-0f4dbb0e5a10 is missing",
    "BTRFS error (device vdb): Remounting read-write after error is not allowed",
    "BTRFS error (device vdb): swapfile is compressed",
    "BTRFS error (device vdb): balance: invalid convert data profile raid5",
    "BTRFS error (device vdb): zoned: data raid1 needs raid-stripe-tree",
    "BTRFS warning (device vdb): csum failed root 5 ino 257 off 0 csum 0x1 expected csum 0x2 mirror 1",
    "BTRFS info (device vdb): bdev /dev/vdb errs: wr 0, rd 0, flush 0, corrupt 8, gen 0",
    'EXT4-fs (vdb): Unrecognized mount option "x" or missing value',
    "EXT4-fs (vdb): VFS: Can't find ext4 filesystem",
    "EXT4-fs (vdb): Couldn't mount because of unsupported optional features (4000)",
    "XFS (vdb): unknown mount option [x].",
    "XFS (vdb): unknown mount option [Corruption].",
    "XFS (vdb): Filesystem has duplicate UUID 3f5b8c52-6d4c-4b0a-9d63-0f4dbb0e5a10 - can't mount",
    "XFS (vdb): User initiated shutdown received. Shutting down filesystem",
    "XFS (vdb): User initiated shutdown (0x1) detected at xfs_fs_goingdown+0x4f/0x90 (fs/xfs/xfs_fsops.c:470).  Shutting down "
    "filesystem.",
]
"""Messages of file systems at the level of errors, without damage. btrfs repeats an old count of errors at each mount (info)."""


@pytest.mark.parametrize("message", DAMAGE)
def test_message_about_damage_of_a_file_system_is_an_event_of_its_disk(message: str) -> None:
    assert parse_event(message) == ("file_system", ("disk", "vdb"))


@pytest.mark.parametrize("message", NO_DAMAGE)
def test_mistake_of_a_user_is_no_damage_of_a_file_system(message: str) -> None:
    assert parse_event(message) is None
