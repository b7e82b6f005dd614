"""Test that the text and JSON output of `nvidia-imex-ctl` is parsed.

If the program is missing, hangs, fails or prints garbage, the readings that need its output must have the reason instead of a
value.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from collectors import imex
from collectors.base import Absent, Value, scope
from collectors.fabric import FabricCollector
from collectors.imex import imex_families
from collectors.imex_domain import parse_json, parse_text
from collectors.wiring.neighbor import MAX_TEXT
from tests.fakes.host import write_program

DATA = Path(__file__).parents[2] / "data/imex"
UP, DEGRADED, R570 = "imex-ctl-N-up.txt", "imex-ctl-N-degraded.txt", "imex-ctl-N-r570-no-version.txt"
JSON = "imex-ctl-N-j-degraded.json"
FIB_TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
Local:
     |-- 10.88.0.0
        /24 link UNICAST
     |-- {address}
        /32 host LOCAL
     |-- 10.88.0.255
        /32 link BROADCAST
"""


def host(root: Path, *, table: str = "", document: str = "", state: str = "READY", address: str = "10.88.0.10") -> Path:
    """Build a host with a fake nvidia-imex-ctl under `root`; return `root`.

    Args:
        root: directory of the host's files.
        table: file in DATA that the program prints with -N; empty: it fails.
        document: file in DATA that it prints with -N -j; empty: it rejects -j, as in early versions of driver R570.
        state: state of the daemon that it prints with -q.
        address: IP address of the host.
    """
    root.mkdir(exist_ok=True)
    for name, source in (("table", table), ("document", document)):
        if source:
            shutil.copy(DATA / source, root / name)
    json_case = f"cat {root}/document" if document else "echo 'unrecognized option -j' >&2; exit 1"
    text_case = f"cat {root}/table" if table else "exit 1"
    script = f'case "$*" in "-q") echo {state};; "-N -j") {json_case};; "-N") {text_case};; *) exit 2;; esac'
    write_program(root / "usr/bin/nvidia-imex-ctl", script)
    (root / "proc/net").mkdir(parents=True)
    (root / "proc/net/fib_trie").write_text(FIB_TRIE.format(address=address))
    return root


def read(root: Path) -> dict[str, Value | Absent]:
    """Return `NAME SCOPE` -> reading: `state host` is the reading `fabric.imex.state` with the scope `host`."""
    return {
        f"{family.name.removeprefix('fabric.imex.')} {scope(labels)}": value
        for family in imex_families(root)
        for labels, value in family.readings
    }


def connections(readings: dict[str, Value | Absent]) -> dict[str, Value | Absent]:
    """Return number of another host in the IMEX domain -> state of the connection from this host to that host."""
    return {name.partition("=")[2]: value for name, value in readings.items() if name.startswith("connection ")}


def test_this_host_is_connected_to_every_other_host_of_a_domain_that_is_up(tmp_path: Path) -> None:
    readings = read(host(tmp_path, table=UP, address="10.88.0.12"))
    assert connections(readings) == {"0": "connected", "1": "connected", "3": "connected"}
    assert {name: readings[f"{name} host"] for name in ("state", "domain_state", "node_count", "address")} == {
        "state": "ready",
        "domain_state": "up",
        "node_count": 4,
        "address": "10.88.0.12",
    }
    assert readings["node_version imex=3"] == "580.95"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.88.0.10", {"1": "connected", "2": "never_connected", "3": "connected"}),
        ("10.88.0.13", {"0": "connected", "1": "connected", "2": "disconnected"}),
        ("10.88.0.12", {"0": "invalid", "1": "invalid", "3": "invalid"}),
    ],
)
def test_connections_are_those_of_this_host_only(tmp_path: Path, address: str, expected: dict[str, str]) -> None:
    readings = read(host(tmp_path, table=DEGRADED, address=address))
    assert connections(readings) == expected
    assert readings["domain_state host"] == "degraded"


def test_domain_includes_a_host_that_json_lists_only_as_a_peer(tmp_path: Path) -> None:
    """The peer is host 2 (10.88.0.12)."""
    readings = read(host(tmp_path, document=JSON, address="10.88.0.13"))
    assert connections(readings) == {"1": "connected", "2": "never_connected"}
    assert (readings["node_count host"], readings["node_address imex=2"]) == (3, "10.88.0.12")
    assert readings["node_version imex=2"] == Absent.unsupported("not reported")
    other = read(host(tmp_path / "other", document=JSON, address="10.88.0.11"))
    assert connections(other) == {"2": "not_reported", "3": "connected"}


def test_early_r570_reports_no_versions(tmp_path: Path) -> None:
    readings = read(host(tmp_path, table=R570))
    assert readings["node_count host"] == 1
    assert readings["node_version imex=0"] == Absent.unsupported("not reported")
    assert connections(readings) == {}


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("!V!", "version_mismatch"),
        ("!M!", "node_map_mismatch"),
        ("R", "recovering"),
        ("A", "authenticating"),
        ("?\x1b[2J", "?[2j"),
    ],
)
def test_each_code_of_the_table_becomes_a_state(code: str, state: str) -> None:
    text = (DATA / UP).read_text().replace("       0        C   C   C   C", f"       0        C   {code}   C   C")
    assert parse_text(text).nodes[0].connections[1] == state


def test_text_and_json_give_the_same_names_of_states() -> None:
    table = parse_text((DATA / DEGRADED).read_text())
    document = parse_json((DATA / JSON).read_text())
    assert (table.state, document.state) == ("degraded", "degraded")
    assert table.nodes[3].connections[1] == document.nodes[3].connections[1] == "connected"


@pytest.mark.parametrize("state", sorted(imex.STATES))
def test_each_state_of_the_daemon_is_read(tmp_path: Path, state: str) -> None:
    assert read(host(tmp_path, table=UP, state=state.upper()))["state host"] == state


def test_host_without_imex_is_unsupported(tmp_path: Path) -> None:
    readings = read(tmp_path)
    assert set(readings.values()) == {Absent.unsupported("no nvidia-imex-ctl")}
    assert {name.split()[1] for name in readings} == {"host"}


def test_host_without_a_configured_domain_is_unsupported(tmp_path: Path) -> None:
    message = (DATA / "imex-ctl-N-not-configured.stderr.txt").read_text().strip()
    write_program(tmp_path / "usr/bin/nvidia-imex-ctl", f"echo '{message}' >&2; exit 1")
    assert {value.status for value in read(tmp_path).values() if isinstance(value, Absent)} == {"unsupported"}


def test_program_that_hangs_is_an_error_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imex, "DEADLINE_S", 0.2)
    write_program(tmp_path / "usr/bin/nvidia-imex-ctl", f"echo run >>{tmp_path}/runs; exec sleep 60")
    readings = read(tmp_path)
    assert set(readings.values()) == {Absent.error("nvidia-imex-ctl -q: no answer within 0.2 s")}
    assert (tmp_path / "runs").read_text() == "run\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Permission denied' >&2; exit 1", "exit code 1: 'Permission denied'"),
        ("printf 'what\\033[2J\\n'", "not a state of the daemon: 'what[2J'"),
        ("true", "not a state of the daemon: ''"),
        ('[ "$*" = -q ] && echo READY || printf "{\\"nodes\\": 3"', "no connectivity table: '{\"nodes\": 3'"),
        ('[ "$*" = -q ] && echo READY || exit 7', "exit code 7"),
    ],
)
def test_failure_or_garbage_output_of_the_program_has_a_reason(tmp_path: Path, script: str, reason: str) -> None:
    write_program(tmp_path / "usr/bin/nvidia-imex-ctl", script)
    value = read(tmp_path)["domain_state host"]
    assert isinstance(value, Absent)
    assert value.status == "error"
    assert reason in value.reason


def test_connections_of_a_host_whose_address_is_not_in_the_domain_are_errors(tmp_path: Path) -> None:
    readings = read(host(tmp_path, table=UP, address="10.99.0.1"))
    assert {value.status for value in connections(readings).values() if isinstance(value, Absent)} == {"error"}
    assert len(connections(readings)) == 4


def test_this_host_is_found_in_the_domain_by_its_ipv6_address_or_name(tmp_path: Path) -> None:
    def domain(address: str) -> str:
        nodes = {"0": {"host": address, "status": "READY", "connections": {"1": {"host": "x", "status": "CONNECTED"}}}}
        return json.dumps({"nodes": nodes, "status": "UP"})

    root = host(tmp_path, document=JSON)
    (root / "proc/net/if_inet6").write_text("fd000000000000000000000000000007 02 40 00 80     eth0\n")
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/hostname").write_text("tray7.example\n")
    for address in ("fd00::7", "FD00:0::7", "tray7", "tray7.example"):
        (root / "document").write_text(domain(address))
        assert connections(read(root)) == {"1": "connected"}, address


@pytest.mark.parametrize(
    "document",
    ["", "[]", "{}", '{"nodes": {}, "status": "UP"}', '{"nodes": {"x": {"host": "a"}}, "status": "UP"}',
     '{"nodes": {"0": 1}, "status": "UP"}', '{"nodes": {"0": {"host": "a"}}, "status": "sideways"}', "[" * 100_000],
)  # fmt: skip
def test_json_that_describes_no_imex_domain_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|not an IMEX domain|number of a host"):
        parse_json(document)


def test_text_from_other_hosts_is_truncated_and_has_no_control_characters() -> None:
    nodes = {"0": {"host": "a\x1b[2J" + "b" * 5000, "version": "1\n2", "status": "READY"}}
    node = parse_json(json.dumps({"nodes": nodes, "status": "UP"})).nodes[0]
    assert len(node.address) == MAX_TEXT
    assert node.address.isprintable()
    assert node.version == "1 2"


def test_scrape_does_not_run_the_program(tmp_path: Path) -> None:
    root = host(tmp_path, table=UP)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    names = {family.name for family in FabricCollector(root).collect()}
    assert not [name for name in names if "imex" in name]
    assert "fabric.imex.connection" in {family.name for family in FabricCollector(root, full_snapshot=True).collect()}
