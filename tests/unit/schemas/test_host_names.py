"""A host name with an empty or too long part between dots causes an error message with this name, not a traceback."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent.exporter.web import Server
from agent.gang.discovery import discover_members
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang, GangError
from agent.gang.transport import check_addresses, listen, own_address, resolve
from agent.launch.request import LaunchRequest
from agent.launch.torchrun import LaunchError, launcher_command
from agent.run import preflight
from fleet.planning.plan import make_plan, read_profile
from schemas.errors import UsageError
from schemas.host_names import check_host_name
from tests import builders

INVALID = [
    "gpu1..cluster",
    ".gpu1",
    "gpu1..",
    "a" * 64,
    "a" * 64 + ".cluster",
    "gpu1." + "b" * 64,
    "gpu1.cluster.." + "c" * 70,
]
VALID = ["a" * 63, "a" * 63 + "." + "b" * 63, "gpu1.cluster.", "gpu_1", "gpü1", "127.0.0.1", "::1", "fe80::1%eth0"]
RULE = "not a valid host name"


@pytest.mark.parametrize("name", INVALID)
def test_check_raises_os_error_for_a_name_whose_lookup_raises_unicode_error(name: str) -> None:
    with pytest.raises(UnicodeError):
        socket.getaddrinfo(name, None)
    with pytest.raises(socket.gaierror, match=RULE):
        check_host_name(name)


@pytest.mark.parametrize("name", VALID)
def test_other_names_and_numeric_addresses_are_accepted(name: str) -> None:
    check_host_name(name)


@pytest.mark.parametrize("name", INVALID)
def test_lookups_of_the_agent_report_an_invalid_name_like_an_unknown_one(tmp_path: Path, name: str) -> None:
    plan = builders.plan("h1", "h2", profile="rehearsal")
    gang = Gang.from_plan(plan, plan.host("h2"), "gang", ["h1", "h2"], 29500, members_only=True)
    gang = Gang(**{**vars(gang), "addresses": {"h1": name, "h2": name}})
    with pytest.raises(OSError, match=RULE):
        resolve(name, 29500)
    with pytest.raises(GangError, match=f"{name} port 29500: {RULE}"):
        listen(name, 29500)
    with pytest.raises(GangError, match=f"{name} has no address here \\({RULE}"):
        _ = gang.allowed_addresses
    with pytest.raises(GangError, match=RULE):
        PeerChannel(gang)
    with pytest.raises(GangError, match=RULE):
        discover_members(gang, 0.01)
    assert own_address(gang) == name
    check_addresses(gang)
    request = LaunchRequest(stage=plan.stage("gang"), members=gang.members, port=29500)
    with pytest.raises(LaunchError, match=f"host h1: its address {name} cannot be resolved here: {RULE}"):
        launcher_command(plan, plan.host("h2"), request, gang=gang, work=tmp_path, data=tmp_path, uuids={})
    with pytest.raises(OSError, match=RULE):
        Server(CollectorRegistry(), name, 0)


@pytest.mark.parametrize("variable", ["address", "exporter_address"])
@pytest.mark.parametrize("name", INVALID)
def test_preflight_reports_an_invalid_name(name: str, variable: str) -> None:
    options = Namespace(**{"interface": "", "address": "", "exporter_address": "", variable: name})
    (problem,) = preflight.network_problems(options)
    setting = {"address": "rackproof_fabric_address", "exporter_address": "rackproof_exporter_listen"}[variable]
    assert problem.startswith(f"{setting} {name} is {RULE} (")


def test_preflight_reports_an_invalid_name_of_the_host_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the ranks looks up this name, even if /etc/hosts contains it.

    The kernel allows names of 64 characters. DNS allows only 63 characters between two dots.
    """
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    assert [
        text for text in preflight.own_name_problems() if text.startswith(f"the host's own name {'a' * 64} is {RULE}")
    ]


@pytest.mark.parametrize("profile", ["smoke", "scaling"])
@pytest.mark.parametrize("variable", ["ansible_host", "rackproof_fabric_address"])
@pytest.mark.parametrize("name", INVALID)
def test_plan_refuses_a_host_of_a_gang_with_an_invalid_name(name: str, variable: str, profile: str) -> None:
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=8)
    hosts["h2"][variable] = name
    with pytest.raises(UsageError, match=f"host h2: address '{name}' is {RULE}: .*; correct ansible_host or"):
        make_plan(read_profile(profile), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)


def test_plan_accepts_any_address_of_a_host_without_a_gang() -> None:
    """Other hosts do not connect to this host. Its address can be an alias of the SSH configuration."""
    hosts = builders.inventory("h1", rackproof_gpu_count=8, rackproof_gang="none", ansible_host=INVALID[0])
    make_plan(read_profile("smoke"), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)
