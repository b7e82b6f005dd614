"""Every captured output of ethtool and mlxlink gives the readings of a module or a port.

A value that is missing in the output is recorded with the reason, never as zero.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.base import Absent, ReadingError, Value, scope
from collectors.optics import OpticsCollector
from collectors.optics.ethtool_link import parse_fec, parse_statistics
from collectors.optics.ethtool_module import parse_module
from collectors.optics.mlxlink import fastest, has_link, module_of, parse_rows, port_of
from collectors.optics.module import MAX_TEXT, Readings, clean_text
from collectors.optics.port import absent_port, merge
from tests.fakes import links, optics
from tests.fakes.host import write_program

MODULE_CAPTURES = sorted(path.name for path in (optics.DATA / "ethtool").glob("*.v*.*"))
Families = dict[str, dict[str, Value | Absent]]
"""Name of a reading -> scope -> value."""
LINK_CAPTURES = sorted(path.name for path in (optics.DATA / "mlxlink").glob("c*"))
VENDORS = {"ACMEOPTICS", "ACMECOPPER", "ACMEAOC"}
COPPER = ("osfp-800g-dac-flat", "qsfp28-dac-no-dom", "sfp28-dac")
BEYOND_LIMITS: Mapping[str, dict[tuple[str, str], str]] = {
    "osfp-800g-lane5-dark": {("rx_power.alarm", "5"): "low", ("rx_power.warning", "5"): "low"},
    "qsfp28-hot-warning": {("temperature.warning", ""): "high"},
    "qsfp28-sr4-lane3-dark": {("rx_power.alarm", "3"): "low", ("rx_power.warning", "3"): "low"},
    "qsfpdd-400g-module-fault-tec": {("temperature.alarm", ""): "high", ("temperature.warning", ""): "high"},
    "sfp28-dark": {("rx_power.alarm", "1"): "low", ("rx_power.warning", "1"): "low"},
}
"""Name of a capture, without its version -> (name of a reading, lane) -> its value: `low` or `high`. Lane "" is the whole module.

A capture is not listed if the module has no limits, or if every value is within them. In `qsfp28-sr4-lane1-rx-low-warning`, the
power is within the limits again, but the module still has the warning flag set. The collector does not use this flag.
"""


def kind(capture: str) -> str:
    """Return the name of a capture without version and format."""
    return re.sub(r"\.v\d.*$", "", capture)


def read(capture: str, *, up: bool = True) -> Readings:
    """Return the readings of the module in a capture; `up`: whether its port has a link."""
    return parse_module(optics.ethtool(capture)).readings(has_link=up)


def measured(readings: Mapping[tuple[str, str], Value | Absent]) -> dict[tuple[str, str], Value]:
    """Return the readings that have a value."""
    return {key: value for key, value in readings.items() if not isinstance(value, Absent)}


# ---- ethtool -m ----


@pytest.mark.parametrize("capture", MODULE_CAPTURES)
def test_vendor_part_number_serial_and_type_of_each_module_are_read(capture: str) -> None:
    readings = read(capture)
    assert readings["module.vendor", ""] in VENDORS
    assert re.fullmatch(r"A[A-Z0-9]+-[A-Z0-9-]+", str(readings["module.part_number", ""]))
    assert re.fullmatch(r"A[A-Z]\d{10}", str(readings["module.serial", ""]))
    assert re.match(r"SFP$|QSFP28|QSFP\+|QSFP-DD|OSFP", str(readings["module.type", ""]))


@pytest.mark.parametrize("capture", MODULE_CAPTURES)
def test_alarm_or_warning_is_set_only_for_values_beyond_the_limits_of_the_module(capture: str) -> None:
    sides = {key: value for key, value in measured(read(capture)).items() if key[0].endswith((".alarm", ".warning"))}
    assert {key: value for key, value in sides.items() if value != "none"} == BEYOND_LIMITS.get(kind(capture), {})
    # Copper cables and this AOC report no limits, so they have no readings of alarms and warnings.
    assert bool(sides) is not kind(capture).startswith((*COPPER, "qsfp56-aoc-no-thresholds"))


@pytest.mark.parametrize("name", sorted({kind(capture) for capture in MODULE_CAPTURES}))
def test_all_versions_and_formats_of_ethtool_give_the_same_readings_of_a_module(name: str) -> None:
    captures = [capture for capture in MODULE_CAPTURES if kind(capture) == name]
    first = measured(read(captures[0]))
    for capture in captures[1:]:
        other = measured(read(capture))
        in_one = {key for key in first.keys() ^ other.keys() if key[0] not in ("rx_los", "tx_fault")}
        assert not in_one, f"only one of the captures {captures[0]} and {capture} has {in_one}"
        for key in first.keys() & other.keys():
            value = other[key]
            expected = pytest.approx(first[key], abs=1e-7) if isinstance(value, float) else first[key]
            assert value == expected, (key, capture)


@pytest.mark.parametrize("capture", [item for item in MODULE_CAPTURES if kind(item).startswith(COPPER)])
def test_copper_cable_has_no_temperature_and_no_light(capture: str) -> None:
    values = {name for name, _ in measured(read(capture)) if not name.startswith("module.")}
    assert not values


def test_powers_are_in_watts_and_currents_in_amperes() -> None:
    readings = read("osfp-800g-healthy.v6.15.txt")
    assert readings["rx_power", "1"] == 0.0012882
    assert readings["tx_power", "8"] == 0.0015849
    assert readings["bias", "8"] == 0.0818
    assert (readings["temperature", ""], readings["voltage", ""]) == (52.0, 3.26)
    assert readings["module.firmware_version", ""] == "46.120"


@pytest.mark.parametrize("capture", ["qsfp28-sr4-lane3-dark.v6.15.json", "qsfp28-sr4-lane3-dark.v6.15.txt"])
def test_dark_lane_has_no_power_and_no_signal(capture: str) -> None:
    readings = read(capture)
    assert (readings["rx_power", "3"], readings["rx_los", "3"], readings["tx_fault", "3"]) == (0.0, True, False)


def test_powers_of_a_module_in_low_power_mode_are_unsupported() -> None:
    readings = read("qsfpdd-400g-lowpwr.v6.15.txt")
    assert readings["module.fault", ""] is False
    assert readings["tx_power", "1"] == Absent.unsupported("the module is in the state ModuleLowPwr")


def test_module_fault_is_reported() -> None:
    assert read("qsfpdd-400g-module-fault-tec.v6.15.txt")["module.fault", ""] is True


def test_lanes_without_any_light_have_an_alarm_only_if_the_port_has_a_link() -> None:
    text = re.sub(
        r"(?m)^(\tRcvr signal.*: ).*$", r"\g<1>0.0000 mW / -inf dBm", optics.ethtool("qsfp28-sr4-healthy.v6.7.txt")
    )
    lost = text.replace(
        "Rx loss of signal                         : None", "Rx loss of signal : [ Yes, Yes, Yes, Yes ]"
    )
    dark, unused = (parse_module(lost).readings(has_link=up) for up in (True, False))
    assert [dark["rx_power.alarm", str(lane)] for lane in range(1, 5)] == ["low"] * 4
    reason = Absent.unsupported("the port has no link, and no lane receives light")
    assert [unused["rx_power.alarm", str(lane)] for lane in range(1, 5)] == [reason] * 4
    assert unused["tx_power", "1"] == dark["tx_power", "1"]
    # `text` shows no light on any lane, but no loss of signal either. Such a cable cannot measure light, so it has no alarm.
    assert isinstance(parse_module(text).readings(has_link=True)["rx_power.alarm", "1"], Absent)


def test_single_dark_lane_of_a_port_without_a_link_has_an_alarm() -> None:
    assert read("qsfp28-sr4-lane3-dark.v6.15.txt", up=False)["rx_power.alarm", "3"] == "low"


def test_lanes_without_current_and_light_are_not_in_use() -> None:
    text = re.sub(
        r"(?m)^(\t\S.*\(Channel [5-8]\) *: ).*$",
        lambda match: match[1] + ("0.000 mA" if "bias" in match[1] else "0.0000 mW / -inf dBm"),
        optics.ethtool("osfp-800g-healthy.v6.15.txt"),
    ).replace(
        "Rx loss of signal                         : None",
        "Rx loss of signal                         : [ No, No, No, No, Yes, Yes, Yes, Yes ]",
    )
    readings = parse_module(text).readings(has_link=True)
    assert readings["rx_power.alarm", "4"] == "none"
    assert readings["rx_power.alarm", "5"] == readings["rx_los", "5"] == Absent.unsupported("the lane is not in use")


def test_measurements_are_errors_if_their_memory_page_cannot_be_read() -> None:
    """An unreadable page has only bytes of 0xFF. As a voltage, 0xFFFF is 6.5535 V."""
    text = optics.ethtool("qsfp28-sr4-healthy.v6.7.txt").replace("3.2800 V", "6.5535 V")
    readings = parse_module(text).readings(has_link=True)
    assert isinstance(readings["temperature", ""], Absent)
    assert readings["temperature", ""].status == "error"
    assert readings["module.vendor", ""] == "ACMEOPTICS"


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("Offset\t\tValues\n------\t\t------\n0x0000:\t\t19 50 00 07\n", "unsupported"),
        ("", "error"),
        ("[ ]", "error"),
        ('[ { "identifier": 17, ', "error"),
        ("garbage\x00\x1b[31m\n" * 1000, "error"),
        ("[" * 100_000, "error"),
    ],
    ids=["hex dump", "empty", "empty list", "cut off", "control characters", "nesting too deep"],
)
def test_output_without_readable_data_of_a_module_raises_a_reading_error(output: str, status: str) -> None:
    with pytest.raises(ReadingError) as caught:
        parse_module(output)
    assert caught.value.absent.status == status


@given(st.text(max_size=300))
def test_hostile_texts_of_a_module_are_shortened_and_made_printable(text: str) -> None:
    cleaned = clean_text(text)
    assert len(cleaned) <= MAX_TEXT
    assert cleaned.isprintable()


@given(st.sampled_from(MODULE_CAPTURES), st.data())
def test_damaged_ethtool_output_raises_only_reading_errors(capture: str, data: st.DataObject) -> None:
    text = optics.ethtool(capture)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 80)))
    damaged = text[:start] + data.draw(st.text(max_size=20)) + text[end:]
    with contextlib.suppress(ReadingError):  # the collector records the reason in this error
        parse_module(damaged).readings(has_link=True)


def test_lanes_of_a_field_are_read_although_a_line_without_a_lane_precedes_them() -> None:
    text = optics.ethtool("osfp-800g-healthy.v6.15.txt")
    label = next(line.partition("(Channel")[0].strip() for line in text.splitlines() if "(Channel 1)" in line)
    head, *rest = text.splitlines()
    damaged = "\n".join([head, f"\t{label} : damaged", *rest])
    assert parse_module(damaged).lanes == parse_module(text).lanes


# ---- ethtool -S and --show-fec ----


def test_errors_of_a_bad_cable_are_in_the_statistics_of_mlx5() -> None:
    readings = parse_statistics(optics.ethtool("ethtool-S-mlx5-bad-cable.txt"))
    assert readings["symbol_errors", ""] == 812
    assert readings["link_downs", ""] == 6
    assert [readings["raw_errors", str(lane)] for lane in range(1, 5)] == [1201, 8211231, 1100, 1043]


@pytest.mark.parametrize("pcs", [0, 812])
@pytest.mark.parametrize("mac", [0, 911])
def test_symbol_errors_of_mlx5_are_those_of_its_pcs_or_mac(pcs: int, mac: int) -> None:
    text = optics.ethtool("ethtool-S-mlx5-healthy.txt")
    text = text.replace("rx_pcs_symbol_err_phy: 0", f"rx_pcs_symbol_err_phy: {pcs}")
    text = text.replace("rx_symbol_err_phy: 0", f"rx_symbol_err_phy: {mac}")
    assert parse_statistics(text)["symbol_errors", ""] == max(pcs, mac)


def test_mlx5_statistics_of_a_healthy_port_have_no_errors() -> None:
    readings = parse_statistics(optics.ethtool("ethtool-S-mlx5-healthy.txt"))
    values = {name: value for (name, lane), value in measured(readings).items() if not lane and value}
    assert values == {"corrected_bits": 5821, "ecn_marked": 12, "pfc_received": 44}


def test_bnxt_ring_names_with_a_colon_are_not_mistaken_for_counters() -> None:
    readings = parse_statistics(optics.ethtool("ethtool-S-bnxt-healthy.txt"))
    values = {name: value for (name, _), value in measured(readings).items() if value}
    assert values == {"link_downs": 1, "fec_corrected": 4411, "corrected_bits": 5521}
    assert readings["fec_uncorrectable", ""] == 0


def test_ena_driver_counts_only_packets_beyond_the_allowance_of_a_cloud_instance() -> None:
    readings = parse_statistics(optics.ethtool("ethtool-S-ena.txt"))
    assert measured(readings) == {("allowance_exceeded", ""): 912}
    for name in ("symbol_errors", "raw_errors"):
        assert readings[name, ""] == Absent.unsupported("the driver does not count it (ethtool -S)")


@pytest.mark.parametrize(
    ("capture", "corrected", "uncorrectable"),
    [("show-fec-stats-rs.txt", 88211, 0), ("show-fec-stats.json", 88211, 3), ("show-fec-rs.txt", None, None)],
)
def test_fec_mode_and_counters_are_read(capture: str, corrected: int | None, uncorrectable: int | None) -> None:
    readings = parse_fec(optics.ethtool(capture))
    assert readings["fec_mode", ""] == "RS"
    assert (readings.get(("fec_corrected", "")), readings.get(("fec_uncorrectable", ""))) == (corrected, uncorrectable)


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("", "unsupported"),
        *(
            (output, "error")
            for output in ("[ broken", "[ ]", '[ "RS" ]', "[ null ]", '[ { "active": {} } ]', '[ { "active": 3 } ]')
        ),
        ('[ { "statistics": [ 5 ] } ]', "unsupported"),
    ],
)
def test_fec_mode_that_is_not_reported_has_a_reason(output: str, status: str) -> None:
    value = parse_fec(output)["fec_mode", ""]
    assert isinstance(value, Absent)
    assert value.status == status


def test_fec_mode_is_read_although_the_counters_have_an_unknown_structure() -> None:
    assert parse_fec('[ { "active": [ "RS" ], "statistics": [ 5 ] } ]') == {("fec_mode", ""): "RS"}


# ---- mlxlink ----


@pytest.mark.parametrize("capture", LINK_CAPTURES)
def test_link_state_is_read_from_each_mlxlink_output(capture: str) -> None:
    rows = parse_rows(optics.mlxlink(capture))
    assert has_link(rows) is ("no-cable" not in capture)
    counts = {name for name, _ in measured(port_of(rows))}
    assert bool(counts) is has_link(rows)


@pytest.mark.parametrize("text", ["15E-255", "15e-255", "1E-254", "0", "0E0"])
def test_bit_error_rate_without_errors_is_zero_in_every_notation(text: str) -> None:
    """mlxlink prints a rate of 0 as `15E-255`."""
    rows = {**parse_rows(optics.mlxlink("cx7-ndr-optical-healthy.mft431.json")), "Symbol BER": text}
    assert port_of(rows)["symbol_ber", ""] == 0.0


def test_healthy_port_has_no_errors_after_correction() -> None:
    readings = port_of(parse_rows(optics.mlxlink("cx7-ndr-optical-healthy.mft431.json")))
    assert readings["raw_ber", ""] == 2e-10
    assert (readings["effective_ber", ""], readings["symbol_ber", ""], readings["fec_uncorrectable", ""]) == (
        0.0,
        0.0,
        0,
    )
    assert readings["counter_age", ""] == pytest.approx(1432.7 * 60)
    assert readings["status_opcode", ""] == 0


@pytest.mark.parametrize("capture", LINK_CAPTURES)
def test_link_speed_enabled_speed_and_cable_speed_are_read(capture: str) -> None:
    rows = parse_rows(optics.mlxlink(capture))
    speeds = [port_of(rows)[name, ""] for name in ("speed", "enabled_speed", "cable_speed")]
    if has_link(rows):
        assert speeds == (["200G", "400G_8X", "400G_4X"] if capture.startswith("cx6dx") else ["IB-NDR", "NDR", "NDR"])
    else:
        assert all(isinstance(speed, Absent) for speed in speeds)


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("SDR,EDR,NDR,HDR", "NDR"), ("0x000000f1 (HDR,EDR,SDR)", "HDR"), ("FDR10,QDR", "FDR10"), ("100G_2X,25G,50G", "100G_2X"),
        ("2.5G,1G", "2.5G"), ("", ""), ("new,\x1b[0m", ""), ("0x0 ()", ""),
    ],
)  # fmt: skip
def test_fastest_speed_of_a_list_is_selected(text: str, speed: str) -> None:
    assert fastest(text) == speed


def test_bad_signal_shows_in_rates_counters_and_status() -> None:
    rows = parse_rows(optics.mlxlink("cx7-ndr-bad-signal.mft431.json"))
    readings = port_of(rows)
    expected = {"effective_ber": 3e-13, "symbol_ber": 7e-12, "symbol_errors": 48211, "fec_uncorrectable": 912, "link_downs": 3,
                "status_opcode": 15, "status": "Bad signal integrity"}  # fmt: skip
    assert {name: readings[name, ""] for name in expected} == expected
    assert readings["raw_errors", "2"] == 9120034
    module = module_of(rows).readings(has_link=True)
    assert module["rx_power", "2"] == pytest.approx(1.2246e-4, rel=1e-3)
    assert module["rx_power.alarm", "2"] == "none"


def test_port_without_a_cable_has_no_counters_and_names_the_reason() -> None:
    rows = parse_rows(optics.mlxlink("cx7-no-cable.mft431.json"))
    with pytest.raises(ReadingError) as caught:
        module_of(rows)
    assert caught.value.absent == Absent.unsupported("no module")
    readings = port_of(rows)
    assert not measured(readings)
    assert readings["symbol_errors", ""] == Absent.unsupported("the port has no link: Cable is unplugged (opcode 1024)")


def test_colours_in_the_output_are_ignored() -> None:
    coloured, plain = (parse_rows(optics.mlxlink(f"cx6dx-200g-roce.{kind}.txt")) for kind in ("text-with-ansi", "text"))
    assert port_of(coloured) == port_of(plain)
    assert module_of(plain).identity["serial"] == "MT2601VS00001"


def test_copper_cable_in_the_output_of_mlxlink_has_no_measurements() -> None:
    readings = module_of(parse_rows(optics.mlxlink("cx7-ndr-dac-no-ddm.mft431.json"))).readings(has_link=True)
    assert {name for name, _ in measured(readings)} == {
        "module.vendor", "module.part_number", "module.serial", "module.type",
    }  # fmt: skip


@pytest.mark.parametrize(
    "output",
    [
        optics.mlxlink("error-no-device.stdout.txt"), "", "{}", "{" * 50_000,
        '{"status": {"code": 1, "message": "x"}, "result": {}}',
        '{"status": {"code": 1, "message": "FW is not running"}, "result": {"output": {}}}', "null", "[]",
    ],
    ids=["text of an error", "empty", "empty object", "nesting too deep", "error without output", "error with empty output",
         "null", "list"],
)  # fmt: skip
def test_invalid_mlxlink_output_is_an_error(output: str) -> None:
    with pytest.raises(ReadingError) as caught:
        parse_rows(output)
    assert caught.value.absent.status == "error"


@given(st.sampled_from(LINK_CAPTURES), st.data())
def test_damaged_mlxlink_output_raises_only_reading_errors(capture: str, data: st.DataObject) -> None:
    text = optics.mlxlink(capture)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 80)))
    with contextlib.suppress(ReadingError):  # the collector records the reason in this error
        rows = parse_rows(text[:start] + data.draw(st.text(max_size=20)) + text[end:])
        port_of(rows)
        module_of(rows).readings(has_link=True)


# ---- merging and collecting ----


def test_first_tool_that_measured_a_reading_wins_and_errors_win_over_unsupported() -> None:
    first = {
        ("symbol_errors", ""): 1,
        ("raw_ber", ""): Absent.unsupported("none"),
        ("raw_errors", ""): Absent.unsupported("none"),
    }
    second = {("symbol_errors", ""): 2, ("raw_ber", ""): Absent.error("broken"), ("raw_errors", "1"): 7}
    merged = merge(first, second, absent_port(Absent.unsupported("no tool"), without=frozenset({"raw_errors"})))
    assert merged["symbol_errors", ""] == 1
    assert merged["raw_ber", ""] == Absent.error("broken")
    assert ("raw_errors", "") not in merged
    assert merged["raw_errors", "1"] == 7
    assert merged["link_downs", ""] == Absent.unsupported("no tool")


def collect(root: Path) -> Families:
    """Return name of a reading -> scope -> value, for the ports of the simulated host under `root`."""
    families = OpticsCollector(root, full_snapshot=True).collect()
    return {family.name: {scope(labels): value for labels, value in family.readings} for family in families}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    links.build_tree(tmp_path, gpus=1)
    optics.install_programs(tmp_path)
    return tmp_path


def test_ports_of_adapters_and_interfaces_are_read_once_each(root: Path) -> None:
    readings = collect(root)
    assert list(readings["optics.module.serial"]) == [
        "hca=mlx5_0,port=1",
        f"hca={links.ROCE},port=1",
        f"nic={links.PLAIN_INTERFACE},port=1",
    ]
    assert readings["optics.module.serial"][f"hca={links.ROCE},port=1"] == "AX2601000001"
    assert readings["port.fec_mode"][f"hca={links.ROCE},port=1"] == "RS"
    assert readings["port.raw_ber"][f"hca={links.ROCE},port=1"] == 2e-10  # only mlxlink reports a bit error rate
    # mlxlink reports the age of its own counters. Here the counters come from ethtool, so their age is unknown.
    assert isinstance(readings["port.counter_age"][f"hca={links.ROCE},port=1"], Absent)


def test_uplink_that_is_not_the_first_port_of_its_adapter_is_read_with_mlxlink(root: Path) -> None:
    """In switchdev mode, the ports of representors may come before that of the uplink."""
    links.add_roce_port(root, 3, "p0", ("4: ACTIVE", "5: LinkUp"))
    links.add_roce_port(root, 1, "pf0vf0", ("4: ACTIVE", "5: LinkUp"))
    assert list(collect(root)["port.raw_ber"]) == [
        "hca=mlx5_0,port=1",
        f"hca={links.ROCE},port=3",
        f"nic={links.ROCE_INTERFACE},port=1",
        f"nic={links.PLAIN_INTERFACE},port=1",
    ]
    assert collect(root)["port.raw_ber"][f"hca={links.ROCE},port=3"] == 2e-10


TWIN = "osfp-800g-healthy.v6.15.txt"
"""A module with eight lanes, which two ports with four lanes each can share."""
SECOND_HALF = (5, 6, 7, 8)


def twin(dark: Sequence[int], serial: str = "AO2602000001") -> str:
    """Return what ethtool prints for the module TWIN if these lanes receive no light."""
    text = optics.ethtool(TWIN).replace("AO2602000001", serial)
    for lane in dark:
        text = re.sub(rf"(Rcvr signal avg optical power \(Channel {lane}\)\s*:).*", r"\1 0.0001 mW / -40.00 dBm", text)
    flags = ", ".join("Yes" if lane in dark else "No" for lane in range(1, 9))
    return re.sub(r"(Rx loss of signal +:) None", rf"\1 [ {flags} ]", text) if dark else text


def silent(lanes: Sequence[int]) -> str:
    """Return what ethtool prints for the module TWIN if the lasers of these lanes are switched off."""
    text = optics.ethtool(TWIN)
    for lane in lanes:
        text = re.sub(rf"(Transmit avg optical power \(Channel {lane}\)\s*:).*", r"\1 0.0000 mW / -inf dBm", text)
        text = re.sub(rf"(Laser tx bias current \(Channel {lane}\)\s*:).*", r"\1 0.000 mA", text)
    return text


def show_module(root: Path, first: str, second: str, *, links_up: tuple[bool, bool]) -> Families:
    """Return the readings of two ports that show these modules. `links_up`: whether each port has a link."""
    for interface, text in ((links.ROCE_INTERFACE, first), (links.PLAIN_INTERFACE, second)):
        optics.set_output(root, interface, "module", text)
    links.write(
        root,
        str((links.port(root, links.ROCE) / "phys_state").relative_to(root)),
        "5: LinkUp\n" if links_up[0] else "3: Disabled\n",
    )
    links.write(root, str((links.interface(root, links.PLAIN_INTERFACE) / "carrier").relative_to(root)),
                f"{links_up[1]:d}\n")  # fmt: skip
    return collect(root)


def low_lanes(readings: Families, name: str) -> set[tuple[str, str]]:
    """Return port and lane of each alarm of a quantity."""
    alarms = [key for key, value in readings[f"optics.{name}.alarm"].items() if value == "low"]
    return {(key.split(",")[0].split("=")[0], key.rpartition("=")[2]) for key in alarms}


def dark_lanes(root: Path, first: str, second: str, *, links_up: tuple[bool, bool]) -> set[tuple[str, str]]:
    """Return port and lane of each alarm, if two ports show these modules. `links_up`: whether each port has a link."""
    readings = show_module(root, first, second, links_up=links_up)
    lost = {key for key, value in readings["optics.rx_los"].items() if value is True}
    alarms = low_lanes(readings, "rx_power")
    assert {(key.split(",")[0].split("=")[0], key.rpartition("=")[2]) for key in lost} == alarms
    return alarms


@pytest.mark.parametrize(
    ("dark", "links_up", "alarms"),
    [
        (SECOND_HALF, (True, False), set()),
        (SECOND_HALF, (False, True), set()),
        (SECOND_HALF, (False, False), set()),
        ((), (True, False), set()),
        (SECOND_HALF, (True, True), {(port, str(lane)) for port in ("hca", "nic") for lane in SECOND_HALF}),
        ((5,), (True, True), {("hca", "5"), ("nic", "5")}),
        ((5,), (True, False), {("hca", "5"), ("nic", "5")}),  # the fault that prevents the link
        (
            (2, *SECOND_HALF),
            (True, False),
            {(port, str(lane)) for port in ("hca", "nic") for lane in (2, *SECOND_HALF)},
        ),
        (range(1, 9), (True, False), {("hca", str(lane)) for lane in range(1, 9)}),
    ],
)
def test_dark_lanes_that_can_belong_to_a_port_without_a_link_have_no_alarm(
    root: Path, dark: Sequence[int], links_up: tuple[bool, bool], alarms: set[tuple[str, str]]
) -> None:
    """Two ports share the module. Each port uses four of the eight lanes. `alarms`: port and lane of each alarm."""
    assert dark_lanes(root, twin(dark), twin(dark), links_up=links_up) == alarms


@pytest.mark.parametrize(
    ("lanes", "links_up", "alarms"),
    [
        (SECOND_HALF, (True, False), ()),
        (SECOND_HALF, (False, True), ()),
        (SECOND_HALF, (False, False), ()),
        (range(1, 9), (False, False), ()),
        (SECOND_HALF, (True, True), SECOND_HALF),
        ((5,), (True, True), (5,)),
        ((5,), (True, False), (5,)),  # the fault that prevents the link
        ((2, *SECOND_HALF), (True, False), (2, *SECOND_HALF)),
    ],
)
def test_lanes_whose_lasers_are_off_because_a_port_is_disabled_have_no_alarm(
    root: Path, lanes: Sequence[int], links_up: tuple[bool, bool], alarms: Sequence[int]
) -> None:
    """Two ports share the module. The adapter switches the lasers of a disabled port off; the switch still sends light."""
    readings = show_module(root, silent(lanes), silent(lanes), links_up=links_up)
    expected = {(port, str(lane)) for port in ("hca", "nic") for lane in alarms}
    assert (low_lanes(readings, "tx_power"), low_lanes(readings, "bias")) == (expected, expected)
    assert low_lanes(readings, "rx_power") == set()


def test_lasers_of_a_disabled_port_may_be_off() -> None:
    module = parse_module(silent(range(1, 9)))
    enabled, disabled = (module.readings(has_link=up) for up in (True, False))
    for name in ("tx_power", "bias"):
        assert {enabled[f"{name}.alarm", str(lane)] for lane in range(1, 9)} == {"low"}
        reason = Absent.unsupported("the port has no link, and no lane sends light")
        assert {disabled[f"{name}.alarm", str(lane)] for lane in range(1, 9)} == {reason}
    assert disabled["tx_fault", "1"] is False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (twin(SECOND_HALF), twin(SECOND_HALF, serial="AO2602000002")),
        *((twin(SECOND_HALF, serial=serial), twin(SECOND_HALF, serial=serial))
          for serial in ("N/A", "0000000000", "none", "", "11111111", "00000001")),
        (twin(SECOND_HALF), twin((1, 2, 3, 4))),  # the two ends of a cable have one serial
        (twin(SECOND_HALF), twin(())),
    ],
)  # fmt: skip
def test_two_modules_are_not_taken_for_one(root: Path, first: str, second: str) -> None:
    assert {lane for port, lane in dark_lanes(root, first, second, links_up=(True, False)) if port == "hca"} == {
        str(lane) for lane in SECOND_HALF
    }


def test_scrape_has_no_readings_of_modules_and_ports(root: Path) -> None:
    assert not list(OpticsCollector(root).collect())


def test_no_program_is_started_on_a_host_without_ports(tmp_path: Path) -> None:
    write_program(tmp_path / optics.ETHTOOL, f"touch {tmp_path}/started; exit 1")
    assert collect(tmp_path) == {}
    assert not (tmp_path / "started").exists()


def test_readings_are_unsupported_without_ethtool_and_mlxlink(root: Path) -> None:
    (root / optics.ETHTOOL).unlink()
    (root / optics.MLXLINK).unlink()
    values = [value for readings in collect(root).values() for value in readings.values()]
    assert values
    assert all(isinstance(value, Absent) and value.status == "unsupported" for value in values)


def refuse(root: Path, message: str, interface: str = links.PLAIN_INTERFACE) -> dict[str, Value | Absent]:
    """Let ethtool fail with this message on standard error. Return name -> value for the port of the interface."""
    (root / "message").write_text(message)
    write_program(root / optics.ETHTOOL, 'cat "${0%/usr/sbin/ethtool}/message" >&2; exit 1')
    return {
        name: by_scope[f"nic={interface},port=1"]
        for name, by_scope in collect(root).items()
        if f"nic={interface},port=1" in by_scope
    }


@pytest.mark.parametrize(
    ("capture", "up", "status"),
    [
        ("error-not-supported.stderr.txt", True, "unsupported"),
        ("error-no-device.stderr.txt", True, "unsupported"),
        ("error-no-module.stderr.txt", True, "error"),
        ("error-no-module.stderr.txt", False, "unsupported"),
        ("error-invalid.stderr.txt", False, "unsupported"),
        ("error-invalid.stderr.txt", True, "error"),
    ],
)
def test_message_and_link_decide_whether_a_refusal_of_ethtool_is_an_error(
    root: Path, capture: str, up: bool, status: str
) -> None:
    (links.interface(root, links.PLAIN_INTERFACE) / "carrier").write_text(f"{int(up)}\n")
    readings = refuse(root, optics.ethtool(capture))
    for value in (readings["optics.module.serial"], readings["port.fec_mode"]):
        assert isinstance(value, Absent)
        assert value.status == status


def test_port_without_a_link_has_no_fec_mode_although_ethtool_prints_one(root: Path) -> None:
    (links.interface(root, links.PLAIN_INTERFACE) / "carrier").write_text("0\n")
    mode = collect(root)["port.fec_mode"][f"nic={links.PLAIN_INTERFACE},port=1"]
    assert mode == Absent.unsupported("the port has no link")


DRIVER_TEXTS = {
    "no text of the driver": "",
    "ConnectX-6": "netlink error: mlx5_core: Query module eeprom by page failed, read 0 bytes, err -5\n",
    "ConnectX-4 Lx": "netlink error: mlx5_core: Query module eeprom by page failed, read 0 bytes, err -5, status 3\n",
}
"""Line that ethtool prints before the kernel's error. It is the driver's own text (Linux, commit d1c94bc5b90c)."""


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENXIO, errno.ENETDOWN, errno.EREMOTEIO])
@pytest.mark.parametrize("driver_text", DRIVER_TEXTS.values(), ids=DRIVER_TEXTS)
def test_unreadable_module_is_an_error_only_if_its_port_has_a_link(
    root: Path, driver_text: str, number: int, up: bool
) -> None:
    (links.interface(root, links.PLAIN_INTERFACE) / "carrier").write_text(f"{int(up)}\n")
    message = f"{driver_text}netlink error: {os.strerror(number)}\n"
    serial = refuse(root, message)["optics.module.serial"]
    assert isinstance(serial, Absent)
    assert serial.status == ("error" if up else "unsupported")
    assert message.splitlines()[0] in serial.reason


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENODEV])
@pytest.mark.parametrize("driver_text", DRIVER_TEXTS.values(), ids=DRIVER_TEXTS)
def test_module_that_the_driver_does_not_report_is_unsupported(
    root: Path, driver_text: str, number: int, up: bool
) -> None:
    (links.interface(root, links.PLAIN_INTERFACE) / "carrier").write_text(f"{int(up)}\n")
    serial = refuse(root, f"{driver_text}netlink error: {os.strerror(number)}\n")["optics.module.serial"]
    assert isinstance(serial, Absent)
    assert serial.status == "unsupported"


@pytest.mark.parametrize("driver_text", DRIVER_TEXTS.values(), ids=DRIVER_TEXTS)
def test_missing_permission_is_an_error_that_names_the_remedy(root: Path, driver_text: str) -> None:
    message = f"{driver_text}netlink error: Operation not permitted\n"
    serial = refuse(root, message)["optics.module.serial"]
    assert serial == Absent.error(f"ethtool: {message.splitlines()[0]}: run as root on the host")


def test_old_ethtool_without_json_is_read_as_text(root: Path) -> None:
    optics.set_output(root, links.PLAIN_INTERFACE, "module", optics.ethtool("sfp28-aoc-healthy.v6.7.txt"))
    write_program(
        root / optics.ETHTOOL,
        'case "$*" in *-j*) echo "ethtool: JSON output not available for this subcommand" >&2; exit 1;; "-m "*) what=module;;'
        ' "-S "*) what=statistics;; "--show-fec "*) what=fec;; *) exit 1;; esac;'
        ' for interface; do :; done; exec cat "$0.d/$interface.$what"',
    )
    readings = collect(root)
    assert readings["optics.rx_power"][f"nic={links.PLAIN_INTERFACE},port=1,lane=1"] == 0.0005754
    assert readings["port.fec_mode"][f"nic={links.PLAIN_INTERFACE},port=1"] == "RS"


def test_old_mlxlink_without_json_is_read_as_text(root: Path) -> None:
    optics.set_link(root, "mlx5_0", optics.mlxlink("cx6dx-200g-roce.text-with-ansi.txt"))
    write_program(
        root / optics.MLXLINK,
        'case "$*" in *--json*) echo "-E- Unknown argument: --json" >&2; exit 1;; esac; exec cat "$0.d/$2"',
    )
    assert collect(root)["port.raw_ber"]["hca=mlx5_0,port=1"] == 1e-9


def test_failing_mlxlink_is_an_error_with_its_message(root: Path) -> None:
    (root / "out").write_text(optics.mlxlink("error-no-device.stdout.txt"))
    (root / "err").write_text(optics.mlxlink("error-no-device.stderr.txt"))
    write_program(root / optics.MLXLINK, 'cat "${0%/usr/bin/mlxlink}/out"; cat "${0%/usr/bin/mlxlink}/err" >&2; exit 1')
    value = collect(root)["port.raw_ber"]["hca=mlx5_0,port=1"]
    expected = 'mlxlink -d mlx5_0: exit code 1: -E- Failed to open device: "mlx5_9", No such file or directory'
    assert value == Absent.error(expected)


def test_hanging_mlxlink_affects_only_its_port(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.optics.mlxlink_program.DEADLINE_S", 0.2)
    write_program(root / optics.MLXLINK, 'case "$2" in mlx5_0) exec sleep 60;; esac; exec cat "$0.d/$2"')
    readings = collect(root)
    hung = readings["port.raw_ber"]["hca=mlx5_0,port=1"]
    assert isinstance(hung, Absent)
    assert hung.status == "error"
    assert "no answer within 0.2 s" in hung.reason
    assert readings["port.raw_ber"][f"hca={links.ROCE},port=1"] == 2e-10


@pytest.mark.parametrize("device_id", ["0x101e", "0x101c"])
def test_virtual_function_in_a_virtual_machine_is_not_read(root: Path, device_id: str) -> None:
    (links.pci(root, links.HCAS[0]) / "device").write_text(f"{device_id}\n")
    assert "hca=mlx5_0,port=1" not in collect(root)["port.raw_ber"]


def test_module_of_a_virtual_interface_is_not_read(root: Path) -> None:
    driver = links.pci(root, links.PLAIN_NIC) / "driver"
    driver.unlink()
    driver.symlink_to("../../../bus/pci/drivers/ena")
    optics.set_output(root, links.PLAIN_INTERFACE, "statistics", optics.ethtool("ethtool-S-ena.txt"))
    readings = collect(root)
    port = f"nic={links.PLAIN_INTERFACE},port=1"
    assert readings["optics.module.serial"][port] == Absent.unsupported("the interface is virtual and has no module")
    assert isinstance(readings["port.fec_mode"][port], Absent)
    assert readings["port.allowance_exceeded"][port] == 912
