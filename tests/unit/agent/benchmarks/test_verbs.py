"""Test the benchmark `verbs`, which runs perftest on the RDMA ports of one host and between hosts.

Instead of perftest, fake programs run, because no adapters are available. They listen, connect and print captured results.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from agent.benchmarks.links import perftest_run, rdma_ports, verbs, verbs_pairs
from agent.benchmarks.links.nccl_rdma import nccl_rdma
from agent.benchmarks.links.perftest_run import Installation, VerbsTest
from schemas.catalogue import settings
from tests.rank_context import Recorder, SharedStore
from tests.unit.agent.benchmarks.test_perftest import CAPTURES
from tests.unit.agent.benchmarks.test_rdma_ports import add_adapter, write

PROGRAM = f"""#!{sys.executable}
import json, pathlib, socket, sys, time
here = pathlib.Path(__file__).resolve().parent
arguments, options = sys.argv[1:], dict(zip(sys.argv[1:], sys.argv[2:]))
if arguments == ["--help"]:
    print((here / "help").read_text()); sys.exit(0)
server = arguments[-1] if arguments[-1][0].isdigit() and arguments[-2] not in ("-p", "-s", "-x", "-D", "-n", "-i") else ""
with (here / "calls").open("a") as calls:
    calls.write(" ".join([here.joinpath(sys.argv[0]).name, *arguments]) + "\\n")
behaviour = json.loads((here / "behaviour").read_text()).get(("client " if server else "server ") + options["-d"], "good")
if server:
    socket.create_connection((server, int(options["-p"])), timeout=10).close()
elif behaviour != "deaf":
    listener = socket.create_server(("127.0.0.1", int(options["-p"])))
    listener.accept()
if behaviour in ("hang", "deaf"):
    time.sleep(600)
kind = "lat" if "_lat" in sys.argv[0] else "bw"
if behaviour == "fail":
    sys.stdout.write((here / "no-row").read_text()); sys.stderr.write((here / "retry").read_text()); sys.exit(1)
sys.stdout.write("garbage" if behaviour == "garbage" else (here / kind).read_text())
"""
FILES = {"bw": "v6-write-bw-ndr-4qp-client.stdout", "lat": "v45-write-lat-client.stdout",
         "no-row": "v45-error-different-test-client.stdout", "retry": "v45-error-retry-exceeded-client.stderr"}  # fmt: skip
QUICK = {**settings("verbs", {}), "directions": ["one_way"], "figures": ["bandwidth"]}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with fakes of perftest, first in PATH."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for name in ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_write_lat"):
        path = directory / name
        path.write_text(PROGRAM)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    for name, capture in FILES.items():
        (directory / name).write_text((CAPTURES / f"{capture}.txt").read_text())
    (directory / "help").write_text("--use_cuda=<device>")
    set_behaviour(directory)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(perftest_run, "MARGIN_S", 0.5)
    monkeypatch.setattr(perftest_run, "LISTEN_S", 5.0)
    return directory


def set_behaviour(directory: Path, **behaviour: str) -> None:
    """Set what the fakes do, by side and adapter, for example `client_mlx5_0="hang"`. Sides without an entry print a good result.

    A side can `hang`, `fail` or print `garbage`. A `deaf` server does not listen.
    """
    sides = {key.replace("_", " ", 1): value for key, value in behaviour.items()}
    (directory / "behaviour").write_text(json.dumps(sides))


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


def measure(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, Any],
    *,
    stage: str = "benchmark",
    fabric: bool = True,
    **request: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Run the benchmark on each member, in a thread; return host -> its observations. Every member has the adapters in `root`."""
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=root))
    members = request.get("members", ["h1"])
    contexts = {host: context_of(root, host, members, stage, {"fabric": fabric, **request}) for host in members}
    threads = [threading.Thread(target=verbs.run, args=(context, chosen)) for context in contexts.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return {host: context.observations for host, context in contexts.items()}


def context_of(root: Path, host: str, members: list[str], stage: str, request: dict[str, Any]) -> Recorder:
    work = root / f"work-{host}"
    work.mkdir()
    (work / "request.json").write_text(json.dumps(request))
    return Recorder(
        work=work, stage=stage, node=members.index(host), is_reporting_rank=True, kind="gpu", devices=(0,), observations=[],
        store=SharedStore(root / "store"), timeout_s=10.0, heartbeat=SimpleNamespace(record_progress=lambda: None),
    )  # fmt: skip


def pair(root: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Run the benchmark between the hosts h1 and h2; return host -> its observations."""
    members = ["h1", "h2"]
    addresses = dict.fromkeys(members, "127.0.0.1")
    return measure(root, monkeypatch, chosen, stage="gang", members=members, gang=members, addresses=addresses)


def figures(observations: list[dict[str, Any]], status: str = "measured") -> list[tuple[str, str, Any]]:
    """Return name, scope and value of each observation with this status."""
    return [(item["name"], item["scope"], item.get("value")) for item in observations if item["status"] == status]


def test_every_figure_of_a_port_is_measured_from_the_port_to_itself(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    observations = measure(tmp_path, monkeypatch, settings("verbs", {}))["h1"]
    rate, scope = 394.41e9 / 8, "hca=mlx5_0,port=1"  # B/s; the port has 400 Gb/s in each direction
    assert figures(observations) == [
        ("verbs.bandwidth", scope, pytest.approx(rate)),
        ("verbs.rate_ratio", scope, pytest.approx(0.986, abs=1e-3)),
        ("verbs.mtu", scope, 4096.0),
        ("verbs.bandwidth", scope, pytest.approx(rate)),
        ("verbs.rate_ratio", scope, pytest.approx(0.493, abs=1e-3)),
        ("verbs.mtu", scope, 4096.0),
        ("verbs.latency", scope, pytest.approx(3.998e-3, rel=1e-3)),
        ("verbs.message_rate", scope, pytest.approx(752278)),
    ]
    first = observations[0]["params"]
    assert (first["sharing"], first["pci_path"]) == ("alone", "pci0000:15/0000:15:01.0/0000:16:00.0")
    assert (first["rail"], first["numa_node"], first["gid_type"], first["mtu"]) == (0, "1", "IB", 4096)
    servers = [call for call in calls(programs) if not call.endswith("127.0.0.1")]
    assert [call.split(" -p ")[0] for call in servers] == [
        *["ib_write_bw -F -d mlx5_0 -i 1"] * 2, "ib_write_lat -F -d mlx5_0 -i 1", "ib_write_bw -F -d mlx5_0 -i 1"
    ]  # fmt: skip
    assert ["-b" in call for call in servers] == [False, True, False, False]
    assert all("--report_gbits" in call for call in servers if "_bw" in call)


def limit_links(root: Path, speed: str) -> None:
    """Give every device and port of the PCI bus a link with 16 lanes and this highest speed."""
    for device in [*root.glob("sys/devices/pci*/*"), *root.glob("sys/devices/pci*/*/*:*")]:
        (device / "max_link_speed").write_text(f"{speed} PCIe\n")
        (device / "max_link_width").write_text("16\n")


@pytest.mark.parametrize(
    ("speed", "virtual", "ratio", "allowed"),
    [
        ("64.0 GT/s", False, 0.493, []),
        ("32.0 GT/s", False, 0.869, [56.72e9]),
        ("32.0 GT/s", True, 0.493, []),
    ],
)
def test_rate_ratio_is_relative_to_the_slower_of_port_and_pcie_link(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, speed: str, virtual: bool, ratio: float,
    allowed: list[float],
) -> None:  # fmt: skip
    """In a virtual machine only the rate of the port counts, because the PCIe links that it shows are not those of the host."""
    add_adapter(tmp_path, "mlx5_0", "15", rate="800 Gb/sec (4X XDR)")
    limit_links(tmp_path, speed)
    observations = measure(tmp_path, monkeypatch, QUICK, virtual=virtual)["h1"]
    (share,) = (item for item in observations if item["name"] == "verbs.rate_ratio")
    assert share["value"] == pytest.approx(ratio, abs=1e-3)
    assert [share["params"][key] for key in share["params"] if key == "pcie_rate"] == pytest.approx(allowed, rel=1e-3)
    others = [item for item in observations if item["name"] != "verbs.rate_ratio"]
    assert not [item for item in others if "pcie_rate" in item["params"]]


def test_ports_of_one_adapter_share_its_pcie_link_if_they_are_measured_together(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        add_adapter(tmp_path, f"mlx5_{number}", "15", rate="400 Gb/sec (4X NDR)", function=number)
    limit_links(tmp_path, "32.0 GT/s")
    for of_host in pair(tmp_path, monkeypatch, QUICK | {"sharings": ["alone", "together"]}).values():
        shares = [item for item in of_host if item["name"] == "verbs.rate_ratio"]
        result = [(item["params"]["sharing"], item["params"].get("pcie_rate")) for item in shares]
        assert result == [*[("alone", None)] * 2, *[("together", pytest.approx(28.36e9, rel=1e-3))] * 2]
        best = [item for item in of_host if item["name"] == "verbs.best_ratio"]
        assert [item["params"]["pcie_rate"] for item in best] == pytest.approx([28.36e9] * 2, rel=1e-3)


def test_roce_port_is_used_with_its_gid(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", layer="Ethernet")
    assert len(figures(measure(tmp_path, monkeypatch, QUICK)["h1"])) == 3
    assert all("-x 3" in call for call in calls(programs))


def test_host_without_adapters_reports_nothing(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(tmp_path, monkeypatch, settings("verbs", {}))["h1"] == []
    assert not (programs / "calls").exists()


def test_missing_perftest_is_reported_once_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    (absent,) = measure(tmp_path, monkeypatch, QUICK)["h1"]
    assert (absent["scope"], absent["status"]) == ("host", "skipped")
    assert "ib_write_bw not found: install perftest" in absent["reason"]


def test_port_without_a_link_is_unsupported_with_its_reason(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", state="1: DOWN", link="3: Disabled")
    (absent,) = measure(tmp_path, monkeypatch, QUICK)["h1"]
    assert (absent["status"], absent["reason"]) == ("unsupported", "the port has no link")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"client_mlx5_0": "fail"}, "packets or their acknowledgements are lost"),
        ({"client_mlx5_0": "garbage"}, "no table of results"),
        ({"client_mlx5_0": "hang"}, "no result within"),
        ({"server_mlx5_0": "fail"}, "packets or their acknowledgements are lost"),
        ({"server_mlx5_0": "hang"}, "no result within"),
        ({"server_mlx5_0": "deaf"}, "did not listen within"),
    ],
)
def test_port_whose_test_fails_has_one_error_and_other_ports_are_measured(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, str], reason: str
) -> None:
    monkeypatch.setattr(perftest_run, "LISTEN_S", 1.5)
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    set_behaviour(programs, **behaviour)
    observations = measure(tmp_path, monkeypatch, QUICK | {"figures": ["bandwidth", "latency"]})["h1"]
    of_first = [item for item in observations if "mlx5_0" in item["scope"]]
    assert [item["status"] for item in of_first] == ["error", "skipped"]
    assert reason in of_first[0]["reason"]
    assert reason in of_first[1]["reason"]
    assert len([item for item in observations if "mlx5_1" in item["scope"] and item["status"] == "measured"]) == 4


def test_no_process_is_left_after_a_hang(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    set_behaviour(programs, client_mlx5_0="hang", server_mlx5_0="hang")
    measure(tmp_path, monkeypatch, QUICK)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in lines if str(programs).encode() in line]


def test_program_that_cannot_be_started_is_an_error(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    (programs / "ib_write_bw").write_text("#!/nonexistent\n")
    (absent,) = measure(tmp_path, monkeypatch, QUICK)["h1"]
    assert (absent["status"], absent["reason"]) == ("error", "ib_write_bw cannot be started: No such file or directory")


def without_device_file(root: Path) -> None:
    """Write two adapters, of which only the second has its device file in /dev/infiniband, as in a container."""
    for number, bus in enumerate(("15", "35")):
        add_adapter(root, f"mlx5_{number}", bus)
        write(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"mlx5_{number}")
    write(root / "dev/infiniband/uverbs1", "")


def test_port_without_its_device_file_is_an_error_with_a_remedy_and_other_ports_are_measured(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_device_file(tmp_path)
    observations = measure(tmp_path, monkeypatch, QUICK)["h1"]
    (absent,) = (item for item in observations if "mlx5_0" in item["scope"])
    assert absent["status"] == "error"
    assert "/dev/infiniband/uverbs0" in absent["reason"]
    assert "pass /dev/infiniband to it" in absent["reason"]
    assert {item["status"] for item in observations if "mlx5_1" in item["scope"]} == {"measured"}


# ---- GPU memory ----


def test_gpu_memory_is_unsupported_if_perftest_is_not_built_for_it(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    monkeypatch.setattr("agent.benchmarks.links.verbs_report.nearest_gpu", lambda *_: "0000:17:00.0")
    observations = measure(tmp_path, monkeypatch, QUICK | {"memories": ["gpu", "host"]})["h1"]
    assert [item["status"] for item in observations] == ["measured"] * 3 + ["unsupported"]
    assert "not built for CUDA" in observations[-1]["reason"]


@pytest.mark.parametrize(
    ("help_text", "module", "expected"),
    [
        ("--use_cuda_bus_id --use_cuda_dmabuf", "nvidia_peermem", ["--use_cuda_bus_id=0000:17:00.0"]),
        ("--use_cuda_bus_id --use_cuda_dmabuf", "", ["--use_cuda_bus_id=0000:17:00.0", "--use_cuda_dmabuf"]),
        ("--use_cuda_bus_id", "", "the kernel module nvidia_peermem is not loaded"),
    ],
)
def test_gpu_memory_uses_peermem_or_else_dmabuf(
    tmp_path: Path, programs: Path, help_text: str, module: str, expected: list[str] | str
) -> None:
    """`expected` is the list of options, or a part of the text that says why GPU memory cannot be used."""
    (programs / "help").write_text(help_text)
    if module:
        (tmp_path / "sys/module" / module).mkdir(parents=True)
    result = Installation().gpu_options("0000:17:00.0", tmp_path)
    assert result == expected if isinstance(expected, list) else expected in result


# ---- pairs of hosts ----


def test_pair_without_a_device_file_reports_the_missing_file(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_device_file(tmp_path)
    observations = pair(tmp_path, monkeypatch, QUICK)
    absent = [item for of_host in observations.values() for item in of_host if item["status"] == "error"]
    assert {item["scope"].partition(",")[0] for item in absent} == {"hca=mlx5_0"}
    assert all("/dev/infiniband/uverbs0" in item["reason"] for item in absent)


def test_both_hosts_report_the_bandwidth_of_every_rail(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    observations = pair(tmp_path, monkeypatch, QUICK | {"directions": ["one_way", "both_ways"]})
    for host, other in (("h1", "h2"), ("h2", "h1")):
        rates = [item for item in observations[host] if item["name"] == "verbs.bandwidth"]
        assert [(item["scope"], item["params"]["direction"], item["status"]) for item in rates] == [
            (f"hca=mlx5_{rail},port=1,partner={other}", direction, "measured")
            for direction in ("one_way", "both_ways")
            for rail in (0, 1)
        ]
        assert {item["params"]["sharing"] for item in rates} == {"together"}


def test_hosts_coordinate_through_a_prefix_store_of_torch(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    store = HashStore()
    monkeypatch.setattr("tests.unit.agent.benchmarks.test_verbs.SharedStore", lambda _: PrefixStore("launch", store))
    observations = pair(tmp_path, monkeypatch, QUICK)
    assert [len(figures(of_host)) for of_host in observations.values()] == [4, 4]


def test_rails_are_measured_one_after_the_other_if_the_profile_says_so(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    observations = pair(tmp_path, monkeypatch, QUICK | {"sharings": ["alone"]})
    assert [call.split()[3] for call in calls(programs)] == ["mlx5_0"] * 4 + ["mlx5_1"] * 4
    for of_host in observations.values():
        assert figures(of_host)[-2:] == [
            ("verbs.best_ratio", f"hca=mlx5_{rail},port=1", pytest.approx(0.986, abs=1e-3)) for rail in (0, 1)
        ]
        assert len(figures(of_host)) == 8


@pytest.mark.parametrize("behaviour", [{"client_mlx5_1": "fail"}, {"client_mlx5_1": "hang"}, {"server_mlx5_1": "deaf"}])
def test_rail_that_fails_is_left_out_of_the_rest_of_the_round(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, str]
) -> None:
    monkeypatch.setattr(perftest_run, "LISTEN_S", 1.5)
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    set_behaviour(programs, **behaviour)
    observations = pair(tmp_path, monkeypatch, QUICK | {"figures": ["bandwidth", "latency"]})
    failed = [item for of_host in observations.values() for item in of_host if "mlx5_1" in item["scope"]]
    assert [item["status"] for item in failed] == ["error", "skipped", "skipped"]
    assert all("mlx5_1" not in scope for of_host in observations.values() for _, scope, _ in figures(of_host))
    # On rail mlx5_0 both hosts report bandwidth, rate ratio, MTU and best ratio. h1, the first client, also reports the latency.
    assert [len(figures(of_host)) for of_host in observations.values()] == [5, 4]


@pytest.mark.parametrize(
    ("behaviour", "errors"),
    [
        ({"client_mlx5_0": "garbage"}, {"h1": 1, "h2": 0}),
        ({"server_mlx5_0": "garbage"}, {"h1": 0, "h2": 1}),
        ({"client_mlx5_0": "fail", "server_mlx5_0": "fail"}, {"h1": 1, "h2": 0}),
    ],
)
def test_side_that_fails_in_a_test_of_both_directions_reports_an_error(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, str], errors: dict[str, int]
) -> None:
    """h1 is the client, h2 the server. If both fail, only the client reports an error."""
    add_adapter(tmp_path, "mlx5_0", "15")
    set_behaviour(programs, **behaviour)
    observations = pair(tmp_path, monkeypatch, QUICK | {"directions": ["both_ways"]})
    assert {host: len(figures(items, "error")) for host, items in observations.items()} == errors


def test_partner_that_starts_no_server_causes_one_error(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    monkeypatch.setattr(verbs_pairs, "LISTEN_S", 0.5)
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=tmp_path))
    members = ["h1", "h2"]
    context = context_of(tmp_path, "h1", members, "gang", {"fabric": True, "members": members, "gang": members})
    context.store.set("verbs/ports/h2", json.dumps(["0000:16:00.0/1"]))
    context.store.set("verbs/1/round/h2", json.dumps("here"))
    began = time.monotonic()
    verbs.run(context, QUICK)  # type: ignore[arg-type]
    assert time.monotonic() - began < 20
    assert [item["status"] for item in context.observations] == ["error"]
    assert context.observations[0]["reason"] == "h2: did not start a server"


def test_bandwidth_stays_measured_if_the_partner_is_silent_after_the_test(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner serves the bandwidth test, but then publishes nothing. Only the latency test, which comes next, is skipped."""
    add_adapter(tmp_path, "mlx5_0", "15")
    monkeypatch.setattr(verbs_pairs, "LISTEN_S", 0.5)
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=tmp_path))
    request = {"fabric": True, "members": ["h1", "h2"], "gang": ["h1", "h2"], "addresses": {"h2": "127.0.0.1"}}
    context = context_of(tmp_path, "h1", ["h1", "h2"], "gang", request)
    with socket.create_server(("127.0.0.1", 0)) as server:
        posted = {
            "ports": ["0000:16:00.0/1"],
            "1/round": "here",
            "1/1/serve": {"0000:16:00.0/1": server.getsockname()[1]},
        }
        for key, value in posted.items():
            context.store.set(f"verbs/{key}/h2", json.dumps(value))
        verbs.run(context, QUICK | {"figures": ["bandwidth", "latency"]})  # type: ignore[arg-type]
    names = ("verbs.bandwidth", "verbs.latency")
    per_test = [(item["name"], item["status"]) for item in context.observations if item["name"] in names]
    assert per_test == [("verbs.bandwidth", "measured"), ("verbs.latency", "skipped")]


PARTNERS_PORT = {"ports/h2": ["0000:16:00.0/1"]}
"""Key and value with which the partner h2 publishes the slot of its only port."""


@pytest.mark.parametrize("posted", [{}, PARTNERS_PORT, {**PARTNERS_PORT, "1/round/h2": "here", "1/round/h2/gone": ""}])
def test_partner_that_does_not_take_part_causes_one_error(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, posted: dict[str, Any]
) -> None:
    """The three cases: the partner publishes nothing, it publishes only its ports, or it no longer waits for this host."""
    for number, bus in enumerate(("15", "35")):
        add_adapter(tmp_path, f"mlx5_{number}", bus)
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=tmp_path))
    members = ["h1", "h2"]
    context = context_of(tmp_path, "h1", members, "gang", {"fabric": True, "members": members, "gang": members})
    context.timeout_s = 0.5
    for key, value in posted.items():
        context.store.set(f"verbs/{key}", json.dumps(value))
    verbs.run(context, QUICK)  # type: ignore[arg-type]
    errors = [item for item in context.observations if item["status"] == "error"]
    assert [(item["scope"], item["reason"]) for item in errors] == [
        ("hca=mlx5_0,port=1,partner=h2", "h2 did not take part in round 1")
    ]
    # h1 waits for the partner in round 1 only if the partner has published its ports.
    assert context.store.check(["verbs/1/round/h1/gone"]) == bool(posted), "h1 must announce the end of this wait"


def test_other_ranks_wait_only_until_the_reporting_rank_has_left() -> None:
    """The reporting rank may leave the benchmark without running it, for example because its GPU is broken."""
    present = [True, True, False]
    context = SimpleNamespace(
        is_reporting_rank=False,
        is_present=lambda rank: present.pop(0) if rank == 0 else True,
        heartbeat=SimpleNamespace(record_progress=lambda: None),
    )
    verbs.run(context, QUICK)  # type: ignore[arg-type]
    assert present == []


def test_partner_without_ports_is_named(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=tmp_path))
    members = ["h1", "h2"]
    context = context_of(tmp_path, "h1", members, "gang", {"fabric": True, "members": members, "gang": members})
    context.store.set("verbs/ports/h2", json.dumps([]))
    verbs.run(context, QUICK)  # type: ignore[arg-type]
    assert [(item["status"], item["reason"]) for item in context.observations] == [("skipped", "h2 measures no port")]


@pytest.mark.parametrize(
    "answer", ['{"0000:16:00.0/1": 99999999}', '{"0000:16:00.0/1": "\\u001b[2J"}', "[1]", "{", "null"]
)
def test_hostile_answer_of_a_partner_is_an_error(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15")
    monkeypatch.setattr(verbs, "fabric_ports", partial(rdma_ports.fabric_ports, root=tmp_path))
    members = ["h1", "h2"]
    context = context_of(tmp_path, "h1", members, "gang", {"fabric": True, "members": members, "gang": members})
    context.store.set("verbs/ports/h2", json.dumps(["0000:16:00.0/1"]))
    context.store.set("verbs/1/round/h2", json.dumps("here"))
    for key in ("serve", "end"):
        context.store.set(f"verbs/1/1/{key}/h2", answer)
    context.store.set("verbs/1/2/end/h2", answer)
    verbs.run(context, QUICK)  # type: ignore[arg-type]
    assert [item["status"] for item in context.observations] == ["error"]
    assert context.observations[0]["reason"].isprintable()


def test_client_has_the_arguments_of_the_server_and_its_address() -> None:
    test = VerbsTest(figure="bandwidth", op="read", direction="both_ways", size_bytes=65536, seconds=2)
    server, client = test.arguments(PORT, 20000), test.arguments(PORT, 20000, server="10.0.0.2")
    assert client == [*server, "10.0.0.2"]
    assert " ".join(server) == "-F -d rxe0 -i 1 -p 20000 -s 65536 -x 1 -D 2 --report_gbits -b"
    assert test.program == "ib_read_bw"


@pytest.mark.parametrize(
    ("layer", "environment", "options"),
    [
        ("InfiniBand", {"NCCL_IB_PKEY": "1"}, ["--pkey_index=1"]),
        ("InfiniBand", {"NCCL_IB_PKEY": "0x2"}, ["--pkey_index=2"]),
        ("InfiniBand", {"NCCL_IB_PKEY": "010"}, ["--pkey_index=8"]),
        ("InfiniBand", {"NCCL_IB_PKEY": " 3,4"}, ["--pkey_index=3"]),
        ("InfiniBand", {"NCCL_IB_PKEY": "index 3"}, []),
        ("InfiniBand", {"NCCL_IB_PKEY": "0"}, []),
        ("InfiniBand", {"NCCL_IB_PKEY": "-1"}, []),
        ("InfiniBand", {"NCCL_IB_PKEY": ""}, []),
        ("InfiniBand", {}, []),
        ("InfiniBand", {"NCCL_IB_SL": "2", "NCCL_IB_TC": "106", "NCCL_IB_GID_INDEX": "3"}, ["--sl=2"]),
        ("Ethernet", {"NCCL_IB_PKEY": "1"}, ["-x", "3"]),
        ("Ethernet", {"NCCL_IB_SL": "3", "NCCL_IB_TC": "0x6a"}, ["-x", "3", "--sl=3", "--tclass=106"]),
        ("Ethernet", {"NCCL_IB_SL": "-1", "NCCL_IB_TC": "-1"}, ["-x", "3"]),
        ("Ethernet", {"NCCL_IB_GID_INDEX": "1"}, ["-x", "1"]),
    ],
)
def test_port_is_measured_with_the_settings_of_nccl(
    tmp_path: Path, layer: str, environment: dict[str, str], options: list[str]
) -> None:
    add_adapter(tmp_path, "mlx5_0", "15", layer=layer)
    (port,) = rdma_ports.fabric_ports(True, tmp_path, nccl=nccl_rdma(environment))
    (plain,) = rdma_ports.fabric_ports(True, tmp_path)
    for figure in ("bandwidth", "latency", "message_rate"):
        test = VerbsTest(figure=figure)
        for server in ("", "10.0.0.2"):
            usual = test.arguments(replace(plain, link_layer="InfiniBand"), 20000, server=server)
            arguments = test.arguments(port, 20000, server=server)
            start = arguments.index("-s") + 2  # after the size of the messages
            end = len(arguments) - len(usual) + start
            assert (arguments[start:end], arguments[:start] + arguments[end:]) == (options, usual)


@pytest.mark.parametrize(("environment", "index"), [({}, 5), ({"NCCL_IB_PKEY": "1"}, 1), ({"NCCL_IB_PKEY": ""}, 0)])
def test_settings_of_nccl_are_those_of_its_configuration_file_if_the_environment_has_none(
    tmp_path: Path, environment: dict[str, str], index: int
) -> None:
    (tmp_path / "nccl.conf").write_text("# partition of the job\nNCCL_IB_PKEY=5\n")
    assert nccl_rdma({"NCCL_CONF_FILE": str(tmp_path / "nccl.conf"), **environment}).pkey_index == index


def test_settings_of_nccl_are_read_from_the_environment_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_PKEY", "3")
    requested: list[Any] = []
    monkeypatch.setattr(verbs, "fabric_ports", lambda *_, **options: requested.append(options["nccl"]) or [])
    verbs.run(context_of(tmp_path, "h1", ["h1"], "benchmark", {}), QUICK)  # type: ignore[arg-type]
    assert [settings.pkey_index for settings in requested] == [3]


PORT = rdma_ports.RdmaPort(
    hca="rxe0", number=1, slot="eth0/1", rail=0, link_layer="Ethernet", rate=1e9, gid_index=1, gid_type="RoCE v2 IPv4",
    numa_node="unknown", pci_path="", cpus=(),
)  # fmt: skip
