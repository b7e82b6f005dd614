"""Simulate a BMC that supports IPMI, with OpenIPMI's `ipmi_sim`.

The BMC has a temperature sensor and two power supplies. One power supply has lost its input.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.bmc import PASSWORD, USER

CONFIGURATION = """name "bmc"
set_working_mc 0x20
  startlan 1
    addr 127.0.0.1 {port}
    priv_limit admin
    allowed_auths_callback none md2 md5 straight
    allowed_auths_user none md2 md5 straight
    allowed_auths_operator none md2 md5 straight
    allowed_auths_admin none md2 md5 straight
    guid a123456789abcdefa123456789abcdef
  endlan
  user 1 true "" "test" user 10 none md2 md5 straight
  user 2 true "{user}" "{password}" admin 10 none md2 md5 straight
"""
SENSORS = """mc_setbmc 0x20
mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02 persist_sdr
sel_enable 0x20 1000 0x0a
sensor_add 0x20 0 1 1 1
sensor_set_value 0x20 0 1 0x18 0
sensor_set_threshold 0x20 0 1 settable 111000 0xa0 0x90 0x70 00 00 00
sensor_set_event_support 0x20 0 1 enable scanning per-state {all} {all} {all} {all}
sensor_add 0x20 0 2 8 0x6f
sensor_set_event_support 0x20 0 2 enable scanning per-state {some} {some} {some} {some}
sensor_set_bit 0x20 0 2 0 1 0
sensor_add 0x20 0 3 8 0x6f
sensor_set_event_support 0x20 0 3 enable scanning per-state {some} {some} {some} {some}
sensor_set_bit 0x20 0 3 0 1 0
sensor_set_bit 0x20 0 3 3 1 0
{descriptions}
{event}
mc_enable 0x20
"""
AC_LOST = "sel_add 0x20 0x02 0x00 0x00 0x00 0x60 0x20 0x00 0x04 0x08 0x03 0x6f 0x03 0xff 0xff"
"""Command for `ipmi_sim`: add a log entry that the power supply PS2 (sensor 3) has lost its input."""


def _described(kind: int, body: bytes, name: str) -> str:
    """Return the command for `ipmi_sim` that adds the sensor data record of sensor `name` (IPMI 2.0, section 43)."""
    body += bytes([0xC0 | len(name)]) + name.encode()
    record = bytes([0, 0, 0x51, kind, len(body)]) + body
    return "main_sdr_add 0x20 " + " ".join(f"0x{byte:02x}" for byte in record)


def _temperature(number: int, name: str) -> str:
    masks = [0, 0, 0, 0, 0x3F, 0x3F]
    unit = [0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0]
    limits = [0xA0, 0x90, 0x70, 0, 0, 0, 0, 0, 0, 0, 0]
    return _described(1, bytes([0x20, 0, number, 7, number, 0x7F, 0x68, 1, 1, *masks, *unit, *limits]), name)


def _power_supply(number: int, name: str) -> str:
    masks = [0xFF, 0, 0xFF, 0, 0xFF, 0]
    rest = [0xC0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    return _described(2, bytes([0x20, 0, number, 10, number, 0x63, 0x40, 8, 0x6F, *masks, *rest]), name)


class Simulator:
    """A running process of `ipmi_sim`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process, self.port = process, port

    def command(self, text: str) -> None:
        """Send a command to the console of the simulator."""
        assert self._process.stdin
        self._process.stdin.write(f"{text}\n".encode())
        self._process.stdin.flush()
        time.sleep(0.2)


@contextmanager
def simulator(directory: Path) -> Iterator[Simulator]:
    """Run `ipmi_sim` on a free UDP port of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    described = [_temperature(1, "Inlet Temp"), _power_supply(2, "PS1 Status"), _power_supply(3, "PS2 Status")]
    texts = {
        "all": "000111111000000",
        "some": "000000000001111",
        "descriptions": "\n".join(described),
        "event": AC_LOST,
    }
    (directory / "state").mkdir()
    (directory / "lan.conf").write_text(CONFIGURATION.format(port=port, user=USER, password=PASSWORD[:16]))
    (directory / "commands").write_text(SENSORS.format(**texts))
    program = shutil.which("ipmi_sim")
    assert program, "install openipmi"
    process = subprocess.Popen(
        [program, "-c", directory / "lan.conf", "-f", directory / "commands", "-s", directory / "state"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        listening = Path("/proc/net/udp")
        for _ in range(100):
            if f":{port:04X} " in listening.read_text():
                break
            time.sleep(0.05)
        yield Simulator(process, port)
    finally:
        process.kill()
        process.communicate()
