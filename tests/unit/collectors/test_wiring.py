"""The wiring collector asks lldpd and infiniband-diags which switch port each network port of the host is connected to."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.wiring import WiringCollector
from collectors.wiring.infiniband import NOT_INSTALLED as NO_DIAGS
from collectors.wiring.infiniband import parse_neighbor, switch_name
from collectors.wiring.lldp import NOT_A_SWITCH, parse_lldp
from collectors.wiring.lldp import NOT_INSTALLED as NO_LLDPD
from collectors.wiring.neighbor import MAX_TEXT, NO_PORT, Neighbor, clean_text
from tests import ROOT
from tests.fakes import links, wiring

LLDP, FABRICS = ROOT / "tests/data/lldp", ROOT / "tests/data/infiniband"
NIC = links.PLAIN_INTERFACE
CUMULUS = Neighbor(id="9c:05:91:aa:01:00", name="leaf01.fab.example", port="swp1s0", label="host01 rail0")
SONIC = Neighbor(id="9c:05:91:aa:02:00", name="sonic-leaf02", port="Ethernet8", label="etp3b")
SIX_NEIGHBORS: dict[str, Neighbor | Absent] = {
    "ens8f0np0": CUMULUS,
    "ens9np0": SONIC,
    "ens10np0": Neighbor(id="44:4c:a8:aa:03:00", name="arista-leaf03.fab.example", port="Ethernet3/1"),
    "ens11np0": Neighbor(id="f4:cc:55:aa:04:00", name="jnpr-leaf04", port="et-0/0/12:1", label="et-0/0/12:1"),
    "ens12np0": Neighbor(id="50:9a:4c:aa:05:00", name="dell-leaf05", port="ethernet1/1/5", label="ethernet1/1/5"),
    "ens13np0": NOT_A_SWITCH,
}
CAPTURES = {
    "lldpctl-all-six.json": SIX_NEIGHBORS,
    "lldpctl-cumulus-one.json": {"ens8f0np0": CUMULUS},
    "lldpctl-cumulus-one.json0": {"ens8f0np0": CUMULUS},
    "lldpctl-nic-agent-no-sysname.json": {"ens13np0": NOT_A_SWITCH},
    "lldpctl-none.json": {},
    "lldpctl-sonic.json": {"ens9np0": SONIC},
    "lldpctl-two.json": {"ens8f0np0": CUMULUS, "ens9np0": SONIC},
}
"""File in tests/data/lldp with output of lldpctl -> result of `parse_lldp`."""


def readings(root: Path) -> dict[str, dict[str, Value | Absent]]:
    """Take a full snapshot. Return scope -> name of the reading without `network.` or `infiniband.` -> value."""
    result: dict[str, dict[str, Value | Absent]] = {}
    for family in WiringCollector(root, full_snapshot=True).collect():
        for labels, value in family.readings:
            result.setdefault(scope(labels), {})[family.name.partition(".")[2]] = value
    return result


@pytest.fixture
def root() -> Iterator[Path]:
    with links.temporary_tree(gpus=2) as root:
        yield root


# ---- LLDP ----


@pytest.mark.parametrize("name", CAPTURES)
def test_each_capture_of_lldpctl_is_parsed(name: str) -> None:
    assert parse_lldp((LLDP / name).read_text()) == CAPTURES[name]


def test_every_capture_of_lldpctl_is_tested() -> None:
    assert {path.name for path in LLDP.glob("*.json*")} == CAPTURES.keys()


def test_port_of_an_unnamed_switch_is_read() -> None:
    item = wiring.neighbor(NIC, "leaf01", "swp7")
    del item["chassis"][0]["name"]
    (neighbor,) = parse_lldp(wiring.lldp(item)).values()
    assert isinstance(neighbor, Neighbor)
    assert (neighbor.name, neighbor.port) == ("", "swp7")
    assert isinstance(neighbor.readings()["switch"], Absent)


@pytest.mark.parametrize(
    ("kind", "port", "description", "expected"),
    [
        ("ifname", "swp1", "to host 7", ("swp1", "to host 7")),
        ("local", "537", "et-0/0/12", ("et-0/0/12", "et-0/0/12")),
        ("local", "537", "", ("537", "")),
        ("mac", "aa:bb:cc:00:00:01", "Gi1/0/7", ("Gi1/0/7", "Gi1/0/7")),
        ("ifalias", "Eth1", "", ("Eth1", "")),
    ],
)
def test_description_names_the_port_if_the_port_id_is_a_number_or_a_mac_address(
    kind: str, port: str, description: str, expected: tuple[str, str]
) -> None:
    item = wiring.neighbor(NIC, "leaf", port, kind=kind, description=description)
    (neighbor,) = parse_lldp(wiring.lldp(item)).values()
    assert isinstance(neighbor, Neighbor)
    assert (neighbor.port, neighbor.label) == expected


def test_second_switch_on_a_port_is_an_error_and_the_lldp_agent_of_an_adapter_is_ignored() -> None:
    first, second = (wiring.neighbor(NIC, name, "swp1") for name in ("leaf01", "leaf02"))
    agent = json.loads((LLDP / "lldpctl-nic-agent-no-sysname.json").read_text())["lldp"]["interface"]["ens13np0"]
    (neighbor,) = parse_lldp(wiring.lldp(first, {**agent, "name": NIC})).values()
    assert isinstance(neighbor, Neighbor)
    assert neighbor.name == "leaf01"
    assert parse_lldp(wiring.lldp(first, second)) == {
        NIC: Absent.error("2 LLDP neighbors on one port: leaf01 swp1, leaf02 swp1")
    }


def test_port_name_is_preferred_to_a_chassis_id() -> None:
    """SONiC sends the chassis ID as the port ID until it has configured LLDP; afterwards it sends the name of the port.

    lldpd on the host keeps the old entry for some time. During this time it lists two neighbors for one switch port (lldpd/lldpd
    issue 502).
    """
    named = wiring.neighbor(NIC, "leaf01", "Ethernet8")
    chassis_id = named["chassis"][0]["id"][0]["value"]
    unnamed = wiring.neighbor(NIC, "leaf01", chassis_id, kind="mac")
    (neighbor,) = parse_lldp(wiring.lldp(unnamed)).values()
    assert isinstance(neighbor, Neighbor)
    assert (neighbor.id, neighbor.name, neighbor.readings()["switch_port"]) == (chassis_id, "leaf01", NO_PORT)
    for both in ((unnamed, named), (named, unnamed)):
        (neighbor,) = parse_lldp(wiring.lldp(*both)).values()
        assert isinstance(neighbor, Neighbor)
        assert (neighbor.name, neighbor.port) == ("leaf01", "Ethernet8")
    for_vlan = wiring.neighbor(NIC, "leaf01", "Ethernet8.665")  # an entry for one VLAN: netboxlabs/orb-agent issue 245
    assert parse_lldp(wiring.lldp(for_vlan, named)) == parse_lldp(wiring.lldp(named))
    assert parse_lldp(wiring.lldp(unnamed, wiring.neighbor(NIC, "leaf02", "swp1"))) == {
        NIC: Absent.error("2 LLDP neighbors on one port: leaf01, leaf02 swp1")
    }


HOSTILE = (
    "\x1b[31mleaf\x07\r\nroot:x:0:0",
    "../../etc/passwd",
    "<script>alert(1)</script>",
    "\u202eevil\u202c\u200b",
    "{{ lookup('pipe', 'id') }}",
    "x" * 5000,
    "leaf\0\ud7ff01",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_name_becomes_one_short_printable_line(text: str, root: Path) -> None:
    output = root / "hostile.json"
    output.write_text(wiring.lldp(wiring.neighbor(NIC, text, text, description=text)), encoding="utf-8")
    wiring.write_program(root, "lldpctl", f"#!/bin/sh\ncat {output}\n")
    for value in readings(root)[f"nic={NIC}"].values():
        assert isinstance(value, str)
        assert 0 < len(value) <= MAX_TEXT
        assert value.isprintable()
    assert clean_text(switch_name(f"MF0;{text}:MQM9700/U1")).isprintable()


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\r\n", "\u2028", "\v"])
def test_lines_of_a_message_become_words_of_one_line(space: str) -> None:
    assert clean_text(f"cannot open\x07{space}the port\n") == "cannot open the port"


@pytest.mark.parametrize(
    "output",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"lldp": 7}',
        '{"lldp": {"interface": [7]}}',
        '{"lldp": {"interface": {"a": {}}}}',
        "[" * 9999,
    ],
    ids=[
        "empty",
        "null",
        "list",
        "empty object",
        "number in place of the neighbors",
        "number in place of an interface",
        "neighbor without properties",
        "nesting too deep",
    ],
)
def test_malformed_output_of_lldpctl_is_an_error(output: str, root: Path) -> None:
    (root / "output").write_text(output)
    wiring.write_program(root, "lldpctl", f"#!/bin/sh\ncat {root}/output\n")
    value = readings(root)[f"nic={NIC}"]["switch_id"]
    assert isinstance(value, Absent)
    assert (value.status, value.reason.partition(":")[0]) == ("error", "lldpctl")


def test_dead_lldpd_is_an_error_and_not_reported_as_a_missing_neighbor(root: Path) -> None:
    message = (LLDP / "lldpctl-daemon-dead.stderr.txt").read_text().strip()
    wiring.write_program(root, "lldpctl", f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    value = readings(root)[f"nic={NIC}"]["switch_id"]
    assert value == Absent.error(f"lldpctl: exit code 1: {message[:MAX_TEXT]}: lldpd must run, and lldpctl needs root")


def test_reading_of_a_port_without_a_neighbor_names_the_reason(root: Path) -> None:
    wiring.write_program(root, "lldpctl", f"#!/bin/sh\necho '{wiring.lldp()}'\n")
    value = readings(root)[f"nic={NIC}"]["switch_id"]
    assert isinstance(value, Absent)
    assert value.status == "error"
    assert value.reason.startswith("no LLDP neighbor: the switch sends no LLDP frames")
    (links.interface(root, NIC) / "carrier").write_text("0\n")
    assert readings(root)[f"nic={NIC}"]["switch_id"] == Absent.unsupported("no link")


@pytest.mark.parametrize(
    ("driver", "flag", "setting", "remedy"),
    [("ice", "fw-lldp-agent", "on", "fw-lldp-agent off"), ("i40e", "disable-fw-lldp", "off", "disable-fw-lldp on")],
)
def test_lldp_agent_in_the_firmware_is_reported_with_the_remedy(
    driver: str, flag: str, setting: str, remedy: str, root: Path
) -> None:
    link = links.pci(root, links.PLAIN_NIC) / "driver"
    link.unlink()
    link.symlink_to(f"../../../bus/pci/drivers/{driver}")
    wiring.write_program(root, "lldpctl", f"#!/bin/sh\necho '{wiring.lldp()}'\n")
    wiring.write_program(
        root,
        "ethtool",
        f"#!/bin/sh\necho 'Private flags for '$2:\necho 'legacy-rx : off'\necho '{flag}   : {setting}'\n",
    )
    value = readings(root)[f"nic={NIC}"]["switch_id"]
    assert isinstance(value, Absent)
    assert value.reason.endswith(f"ethtool --set-priv-flags {NIC} {remedy}")


@contextmanager
def two_lldp_daemons(directory: Path) -> Iterator[Path]:
    """Run lldpd at both ends of a virtual cable between two network namespaces; yield the socket of the host's daemon."""
    names, ends = ("rp-lldp-host", "rp-lldp-switch"), (NIC, "swp7")
    sockets = [directory / f"{name}.sock" for name in names]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip -n {names[0]} link add {NIC} type veth peer name swp7 netns {names[1]}",
        *(f"ip -n {name} link set {end} up" for name, end in zip(names, ends, strict=True)),
    ]
    daemons = []
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        for name, end, socket in zip(names, ends, sockets, strict=True):
            command = f"ip netns exec {name} lldpd -d -u {socket} -I {end} -O /dev/null"
            daemons.append(subprocess.Popen(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for setting in ("system hostname leaf07", "system capabilities enabled bridge", "lldp tx-interval 1"):
            wait_until_done(["lldpcli", "-u", str(sockets[1]), "configure", *setting.split()])
        wait_until_done(["lldpctl", "-u", str(sockets[0])])
        yield sockets[0]
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def wait_until_done(command: list[str], **environment: str) -> None:
    """Repeat a command until it succeeds, that is, until its server answers. Fail the test after 100 attempts."""
    for _ in range(100):
        if not subprocess.run(command, env={**os.environ, **environment}, capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)
    raise AssertionError(f"{' '.join(command)}: failed 100 times")


def test_real_lldpd_names_the_switch_port(root: Path) -> None:
    root.chmod(0o755)  # lldpctl is setuid and runs as another user, who must reach the socket in this directory
    with two_lldp_daemons(root) as socket:
        wiring.write_program(root, "lldpctl", f'#!/bin/sh\nexec /usr/sbin/lldpctl -u {socket} "$@"\n')
        for _ in range(40):
            read = readings(root)[f"nic={NIC}"]
            if not isinstance(read["switch_id"], Absent):
                break
            assert read["switch_id"].reason.startswith("no LLDP neighbor: the switch sends no LLDP frames")
            time.sleep(0.5)
    assert (read["switch"], read["switch_port"]) == ("leaf07", "swp7")
    wiring.write_program(root, "lldpctl", f'#!/bin/sh\nexec /usr/sbin/lldpctl -u {root}/none "$@"\n')
    assert "unable to connect to socket" in str(readings(root)[f"nic={NIC}"]["switch_id"])


# ---- LLDP and InfiniBand ----


def test_readings_are_unsupported_without_lldpd_and_infiniband_diags(root: Path) -> None:
    read = readings(root)
    assert {
        value
        for name in ("nic", "hca")
        for key, values in read.items()
        if key.startswith(name)
        for value in values.values()
    } == {
        NO_LLDPD,
        NO_DIAGS,
    }
    assert all(
        value.status == "unsupported"
        for values in read.values()
        for value in values.values()
        if isinstance(value, Absent)
    )


def test_host_without_network_ports_has_no_reading(tmp_path: Path) -> None:
    wiring.write_program(tmp_path, "lldpctl", "#!/bin/sh\nexit 1\n")
    assert readings(tmp_path) == {}


def test_scrape_runs_no_program(root: Path) -> None:
    for name in ("lldpctl", "smpquery"):
        wiring.write_program(root, name, f"#!/bin/sh\ntouch {root}/called\n")
    assert list(WiringCollector(root).collect()) == []
    assert not (root / "called").exists()


def test_program_that_hangs_is_an_error_after_its_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.programs.run_program.__kwdefaults__", {"deadline_s": 0.3})
    for name in ("lldpctl", "smpquery"):
        wiring.write_program(root, name, "#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    read = readings(root)
    assert time.monotonic() - began < 10
    assert {value for values in read.values() for value in values.values()} == {
        Absent.error("lldpctl -f: no answer within 0.3 s"),
        Absent.error("smpquery -C: no answer within 0.3 s"),
    }


# ---- InfiniBand ----

NODE_INFO = """# Node info: DR path slid 65535; dlid 65535; 0,1
BaseVers:........................1
NodeType:........................{kind}
NumPorts:........................64
SystemGuid:......................{guid}
Guid:............................{guid}
PortGuid:........................{guid}
LocalPort:.......................{port}
VendorId:........................0x0002c9
"""


def node_description(name: str) -> str:
    return f"Node Description:{'.' * 22}{name}\n"


CABLE = re.compile(
    r'^\[(\d+)\]\(?(?:[0-9a-f]{16})?\)? *\t"([SH])-([0-9a-f]{16})"\[(\d+)\].*?# (?:lid \d+ lmc \d+ )?"([^"]*)"',
    re.MULTILINE,
)


def test_each_cable_of_a_captured_fabric_is_parsed() -> None:
    """The capture has 7 cables, and one line for each end of a cable. CABLE matches these lines.

    From each line, the test builds the output of smpquery.
    """
    cable_ends = CABLE.findall((FABRICS / "ibnetdiscover-quantum2.txt").read_text())
    assert len(cable_ends) == 14
    for _, kind, digits, port, name in cable_ends:
        guid = f"0x{digits}"
        answer = NODE_INFO.format(kind={"S": "Switch", "H": "Channel Adapter"}[kind], guid=guid, port=port)
        neighbor = parse_neighbor(answer, node_description(name))
        if kind == "S":
            assert neighbor == Neighbor(id=guid, name=name.removeprefix("MF0;").removesuffix(":MQM9700/U1"), port=port)
        else:
            assert neighbor == Absent.error(f"the neighbor is an adapter ({name}), not a switch")
    assert "Mellanox Technologies Aggregation Node" in {name for *_, name in cable_ends}


@pytest.mark.parametrize(("kind", "words"), [("Router", "a router"), ("7", "of type 7")])
def test_reason_names_the_type_of_a_neighbor_that_is_neither_switch_nor_adapter(kind: str, words: str) -> None:
    answer = NODE_INFO.format(kind=kind, guid="0x0002c90300000001", port=1)
    reason = f"the neighbor is {words} (edge1), not a switch"
    assert parse_neighbor(answer, node_description("edge1")) == Absent.error(reason)


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("MF0;leaf01:MQM9700/U1", "leaf01"),
        ("Quantum Mellanox Technologies", "Quantum Mellanox Technologies"),
        ("SwitchX -  Mellanox Technologies", "SwitchX - Mellanox Technologies"),
        ("MF0;:", "MF0;:"),
    ],
)
def test_name_of_a_switch_is_read_from_its_node_description(description: str, expected: str) -> None:
    assert switch_name(description) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "garbage",
        NODE_INFO.format(kind="Switch", guid="0x12", port=1),
        NODE_INFO.format(kind="Switch", guid="0x" + "f" * 16, port=0),
    ],
    ids=["empty", "garbage", "GUID too short", "port 0"],
)
def test_malformed_answer_of_smpquery_is_an_error(answer: str, root: Path) -> None:
    (root / "answer").write_text(answer)
    wiring.write_program(
        root, "smpquery", f"#!/bin/sh\n[ $6 = nodedesc ] && echo 'Node Description:....x' || cat {root}/answer\n"
    )
    value = readings(root)["hca=mlx5_0,port=1"]["switch_id"]
    assert isinstance(value, Absent)
    assert value.reason.startswith("smpquery: output is not understood")


def test_missing_permission_to_send_packets_is_an_error(root: Path) -> None:
    message = (FABRICS / "ibnetdiscover-no-umad.stderr.txt").read_text().splitlines()[0]
    wiring.write_program(root, "smpquery", f'#!/bin/sh\necho "{message}" >&2\nexit 255\n')
    value = readings(root)["hca=mlx5_1,port=1"]["switch_id"]
    assert value == Absent.error(
        f"smpquery nodeinfo: exit code 255: {message[:MAX_TEXT]}: smpquery needs root and the module ib_umad"
    )


def test_port_without_a_link_is_not_queried(root: Path) -> None:
    wiring.write_program(root, "smpquery", wiring.SMPQUERY)
    (links.port(root, "mlx5_0") / "phys_state").write_text("2: Polling\n")
    read = readings(root)
    assert read["hca=mlx5_0,port=1"]["switch_id"] == Absent.unsupported("no link")
    assert read["hca=mlx5_1,port=1"]["switch_id"] == "0xfc6a1c0300aa0100"


@contextmanager
def simulated_fabric(name: str, directory: Path) -> Iterator[dict[str, str]]:
    """Run the InfiniBand simulator `ibsim` with the fabric in the file `name` of FABRICS.

    Yield the environment variables that make a program use the simulator instead of an adapter.
    """
    (library,) = Path("/usr/lib").glob("*/umad2sim/libumad2sim.so")
    server = f"rackproof-{os.getpid()}"
    environment = {"IBSIM_SOCKNAME": server, "LD_PRELOAD": str(library)}
    with (directory / "ibsim.log").open("w") as log:
        simulator = subprocess.Popen(
            ["/usr/bin/ibsim", "-s", FABRICS / name],
            env={**os.environ, "IBSIM_SOCKNAME": server},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    with simulator:
        try:
            wait_until_done(["/usr/sbin/smpquery", "-D", "nodeinfo", "0"], **environment)
            yield environment
        finally:
            simulator.kill()


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (
            "two-rails.net",
            {"h01": [("leaf-rail0", "1"), ("leaf-rail1", "1")], "h02": [("leaf-rail0", "2"), ("leaf-rail1", "2")]},
        ),
        (
            "two-rails-swapped.net",
            {"h01": [("leaf-rail0", "1"), ("leaf-rail1", "1")], "h02": [("leaf-rail1", "2"), ("leaf-rail0", "2")]},
        ),
    ],
)
def test_real_smpquery_reads_the_switch_ports_of_a_simulated_fabric(
    fabric: str, expected: dict[str, list[tuple[str, str]]], root: Path, tmp_path: Path
) -> None:
    assert shutil.which("ibsim"), "install the packages of tests/debian-packages.txt"
    with simulated_fabric(fabric, tmp_path) as environment:
        exports = "".join(f"export {name}={value}\n" for name, value in environment.items())
        for host, ports in expected.items():
            # In the simulator each adapter is a separate node; a program sees only the adapter that SIM_HOST names.
            wiring.write_program(
                root,
                "smpquery",
                f"#!/bin/bash\n{exports}export SIM_HOST={host}-mlx${{2#mlx5_}}\nexec /usr/sbin/smpquery -C ibsim0 ${{@:3}}\n",
            )
            read = readings(root)
            neighbors = [read[f"hca=mlx5_{number},port=1"] for number in range(2)]
            assert [(port["switch"], port["switch_port"]) for port in neighbors] == ports
            assert all(re.fullmatch("0x[0-9a-f]{16}", str(port["switch_id"])) for port in neighbors)
