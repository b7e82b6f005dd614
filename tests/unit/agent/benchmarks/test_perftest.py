"""Test the parsers of perftest's output with the files in tests/data/perftest and altered copies of them.

A file name has the version of perftest (`v45`: 4.5, `v6`: 6), the test or the error, the side (client or server) and the stream.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from agent.benchmarks.links import perftest
from agent.benchmarks.links.perftest import (
    MAX_REASON,
    PerftestError,
    failure_reason,
    parse_bandwidth,
    parse_latency,
)

CAPTURES = Path(__file__).parents[3] / "data" / "perftest"
MIB, GBIT = float(1 << 20), 1e9 / 8
BANDWIDTHS = {
    "v45-mtu-lowered-client": (65536, 94.54 * MIB, 1513, 1024, 1),
    "v45-read-bw-gbits-client": (65536, 0.82 * GBIT, 1568, 1024, 1),
    "v45-write-bw-all-sizes-client": (8388608, 92.54 * MIB, 12, 1024, 1),
    "v45-write-bw-bidirectional-2qp-client": (65536, 95.37 * MIB, 1526, 1024, 1),
    "v45-write-bw-client": (65536, 98.89 * MIB, 1582, 1024, 1),
    "v45-write-bw-duration-client": (65536, 0.78 * GBIT, 1487, 1024, 1),
    "v45-write-bw-server": (65536, 98.89 * MIB, 1582, 1024, 1),
    "v6-write-bw-ndr-4qp-client": (65536, 394.41 * GBIT, 752278, 4096, 0),
}
"""File -> size of a message in bytes, bandwidth in B/s, messages per second, MTU in bytes, GID index."""
WITHOUT_RESULT = ("v45-error-different-test-client", "v45-error-use-cuda-client")
"""Files whose stdout has no row of results."""
REASONS = {
    "v45-error-bad-gid-client": "the port has no such GID index",
    "v45-error-different-test-client": "the other side refused the request",
    "v45-error-different-test-server": "Couldn't read remote address",
    "v45-error-link-down-client": "the port is down",
    "v45-error-no-device-client": "the adapter is gone",
    "v45-error-no-host-client": "cannot be resolved",
    "v45-error-no-port-client": "the adapter has no such port",
    "v45-error-no-server-client": "the other side does not listen",
    "v45-error-retry-exceeded-client": "packets or their acknowledgements are lost",
    "v45-error-use-cuda-client": "this version of perftest lacks the option",
    "v45-read-bw-client": "no message",
    "v6-error-mr-client": "load nvidia_peermem",
    "v6-error-rtr-client": "the queue pairs cannot be connected",
    "v6-error-version-too-old-client": "the perftest of the other host is too old",
}
"""File -> words that the text of `failure_reason` must contain. All but `v45-read-bw-client` have an error message."""


def text(name: str, stream: str) -> str:
    return (CAPTURES / f"{name}.{stream}.txt").read_text()


def test_every_captured_output_has_a_case() -> None:
    outputs = {path.name.removesuffix(".stdout.txt") for path in CAPTURES.glob("*.stdout.txt")}
    assert outputs == {*BANDWIDTHS, *WITHOUT_RESULT, "v45-write-lat-client"}
    assert {path.name.removesuffix(".stderr.txt") for path in CAPTURES.glob("*.stderr.txt")} == {*REASONS}


@pytest.mark.parametrize("name", BANDWIDTHS)
def test_bandwidth_is_read_from_the_last_row_in_bytes_per_second(name: str) -> None:
    size, rate, messages, mtu, gid_index = BANDWIDTHS[name]
    result = parse_bandwidth(text(name, "stdout"))
    assert (result.size_bytes, result.conditions.mtu, result.conditions.gid_index) == (size, mtu, gid_index)
    assert result.bytes_per_second == pytest.approx(rate)
    assert result.messages_per_second == pytest.approx(messages)


def test_typical_latency_is_read_in_seconds() -> None:
    result = parse_latency(text("v45-write-lat-client", "stdout"))
    assert (result.size_bytes, result.conditions.mtu) == (2, 1024)
    assert result.typical == pytest.approx(3997.83e-6)


@pytest.mark.parametrize("name", WITHOUT_RESULT)
def test_output_without_a_row_is_an_error(name: str) -> None:
    with pytest.raises(PerftestError, match=r"no result|no table"):
        parse_bandwidth(text(name, "stdout"))


@pytest.mark.parametrize(("unit", "factor"), [("MB/sec", MIB), ("MiB/sec", MIB), ("Gb/sec", GBIT)])
def test_unit_is_read_from_the_column(unit: str, factor: float) -> None:
    output = text("v45-write-bw-client", "stdout").replace("MB/sec", unit)
    assert parse_bandwidth(output).bytes_per_second == pytest.approx(98.89 * factor)


def test_unknown_unit_is_an_error() -> None:
    with pytest.raises(PerftestError, match="known unit"):
        parse_bandwidth(text("v45-write-bw-client", "stdout").replace("MB/sec", "furlongs"))


@pytest.mark.parametrize("value", ["nan", "inf", "-1.00", "1e400", "1.2.3", "9" * 400, ""])
def test_row_with_an_invalid_number_is_an_error(value: str) -> None:
    with pytest.raises(PerftestError):
        parse_bandwidth(text("v45-write-bw-client", "stdout").replace("98.89", value))


def test_output_without_an_mtu_is_an_error() -> None:
    with pytest.raises(PerftestError, match="MTU"):
        parse_bandwidth(text("v45-write-bw-client", "stdout").replace("Mtu", "Mtv"))


@pytest.mark.parametrize("name", [*BANDWIDTHS, *WITHOUT_RESULT, "v45-write-lat-client"])
def test_truncated_or_corrupted_output_raises_only_perftest_error(name: str) -> None:
    output, random_numbers = text(name, "stdout"), random.Random(name)  # noqa: S311 - not for security
    for _ in range(200):
        damaged = list(output[: random_numbers.randrange(len(output))])
        for _ in range(3):
            if damaged:
                damaged[random_numbers.randrange(len(damaged))] = random_numbers.choice("\x1b\x00ü9. #[:\n")
        for parse in (parse_bandwidth, parse_latency):
            with contextlib.suppress(PerftestError):
                assert parse("".join(damaged)).size_bytes >= 0


@pytest.mark.parametrize("name", REASONS)
def test_reason_names_the_cause_and_not_its_consequences(name: str) -> None:
    stdout = text(name, "stdout") if (CAPTURES / f"{name}.stdout.txt").exists() else ""
    reason = failure_reason(1, stdout, text(name, "stderr"))
    assert REASONS[name] in reason
    assert "Usage" not in reason


def test_status_is_read_from_the_wording_of_newer_versions() -> None:
    assert "are lost" in failure_reason(
        1, "", " Failed status-transport retry counter exceeded (12): wr_id 0 syndrom 0x81\n"
    )


@pytest.mark.parametrize(
    ("stdout", "stderr", "meaning"),
    [
        (
            " Did not detect devices \n If device exists, check if driver is up\n",
            " Unable to find the Infiniband/RoCE device\n",
            "pass /dev/infiniband",
        ),
        (" Did not detect devices \n If device exists, check if driver is up\n", "", "pass /dev/infiniband"),
        ("", "Couldn't get context for the device\n Unable to open the device\n", "cannot be opened"),
    ],
)
def test_reason_states_that_no_device_may_be_used(stdout: str, stderr: str, meaning: str) -> None:
    assert meaning in failure_reason(1, stdout, stderr)


def test_reason_of_a_refused_queue_pair_names_the_partition_key() -> None:
    stderr = " Failed to modify QP to INIT, ret=22\nUnable to Connect the HCA's through the link\n"
    assert "NCCL_IB_PKEY, if set, must be the index" in failure_reason(1, "", stderr)


def test_reason_has_the_number_of_an_unknown_status() -> None:
    assert failure_reason(1, "", " Failed status 4: wr_id 0").startswith("the transfer failed with status 4")


def test_reason_of_hostile_text_is_one_short_printable_line() -> None:
    reason = failure_reason(1, "", "\x1b[2J\x07" + "A" * 100_000 + "\nB\u202e\x00C\n" * 1000)
    assert len(reason) <= MAX_REASON
    assert reason.isprintable()


def test_only_the_beginning_of_an_endless_output_is_read() -> None:
    output = "x\n" * perftest.MAX_OUTPUT + text("v45-write-bw-client", "stdout")
    with pytest.raises(PerftestError):
        parse_bandwidth(output)
