"""Test the benchmark `shared_storage` with three hosts, each a thread, and one shared directory.

A fake fio prints invented results. The shards of the checkpoint (one per rank of each host) are real files. Most tests run the
programs that access the directory in this process, because each start of Python takes longer than the access.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from agent.benchmarks.runtime import host_exchange
from agent.benchmarks.storage import child, directory, shard, shared_clients, shared_rates, shared_storage, target
from agent.benchmarks.storage.checkpoint_shards import CheckpointShards
from agent.benchmarks.storage.shared_clients import Clients
from agent.benchmarks.storage.shared_rates import SharedRates, numbers_of_clients
from schemas.catalogue import expand, settings
from tests.rank_context import Recorder

HOSTS = ("h1", "h2", "h3")
CHOSEN = settings("shared_storage", {"shard_bytes": 1 << 20, "metadata_seconds": 0.01, "jobs": 2, "rounds": 1})
PLANNED = [item for item in expand("gang", "shared_storage", CHOSEN) if item.scope == "directory"]
FIO = """#!/bin/sh
for word; do
  case $word in --rw=*) op=${word#*=} ;; --filename=*) path=${word#*=} ;; esac
done
[ "$op" ] || { echo libaio; exit; }
if [ $op = write ]; then
  : >> "$path"
elif [ ! -e "$path" ]; then
  echo "fio: pid=1, err=2/file:filesetup.c:1, $path is not there" >&2
  exit 1
fi
exec cat "${0%/*}/$op.json"
"""
"""A fake fio. It prints the file `read.json` or `write.json` of its directory.

It is a shell script, which starts fast, because the benchmark starts it more than twenty times.
"""
LATENCIES = {"percentile": {"50.000000": 1e5, "99.000000": 2e5, "99.900000": 3e5}}
RESULT = {"total_ios": 8, "bw_bytes": 1e9, "iops": 1e3, "io_bytes": 8 << 20, "clat_ns": LATENCIES}
PROGRAMS: dict[str, Callable[..., None]] = {directory.__file__: directory.main, shard.__file__: shard.main}
"""File of a program that the benchmark starts with Python -> its function `main`."""
_stdout = threading.Lock()
Observed = dict[str, list[dict[str, Any]]]
"""Host -> its observations."""


@pytest.fixture(autouse=True)
def _fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "fio").write_text(FIO)
    for op in ("read", "write"):
        (programs / f"{op}.json").write_text(json.dumps({"jobs": [{"error": 0, op: RESULT}] * 2}))
    (programs / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(shared_clients, "STEP_S", 5.0)
    monkeypatch.setattr(host_exchange, "MARGIN_S", 5.0)


def run_in_this_process(
    commands: Mapping[str, Sequence[str]], limit_s: float, progress: Callable[[], None]
) -> dict[str, child.Ended | OSError]:
    """Run the commands like `child.run_children`, but those that start one of PROGRAMS in this process."""
    ended: dict[str, child.Ended | OSError] = {}
    for key, command in commands.items():
        file = next((word for word in command if word in PROGRAMS), "")
        if file:
            with _stdout, contextlib.redirect_stdout(io.StringIO()) as output:
                PROGRAMS[file](*command[command.index(file) + 1 :])
            ended[key] = child.Ended(code=0, stdout=output.getvalue(), stderr="", at=time.monotonic())
    others = {key: command for key, command in commands.items() if key not in ended}
    return ended | child.run_children(others, limit_s, progress)


def measure(
    tmp_path: Path,
    *,
    paths: dict[str, Path] | None = None,
    absent: tuple[str, ...] = (),
    shards: int = 1,
    hosts: tuple[str, ...] = HOSTS,
    scope: str = "gang=all",
    in_children: bool = False,
    **chosen: Any,
) -> Observed:
    """Run the benchmark on several hosts, each in a thread; return host -> its observations.

    Args:
        tmp_path: directory for the shared directory and the hosts' work directories.
        paths: host -> the directory that it measures. Hosts that are not in `paths` measure `tmp_path`/shared.
        absent: hosts whose measuring rank has left the benchmark, because its GPU is broken.
        shards: number of shards that each host writes.
        hosts: hosts of the launch.
        scope: scope of the figures that all ranks of the launch measure together.
        in_children: start PROGRAMS in child processes, as the benchmark does, and not in this process.
        chosen: settings that replace those in CHOSEN.
    """
    (tmp_path / "shared").mkdir(exist_ok=True)
    store = PrefixStore("launch", HashStore())
    contexts: dict[str, Recorder] = {}
    for node, host in enumerate(hosts):
        if host in absent:
            store.set(f"left/{node}/shared_storage/0", "left")
            continue
        work = tmp_path / f"work-{host}"
        work.mkdir()
        path = (paths or {}).get(host, tmp_path / "shared")
        (work / "request.json").write_text(json.dumps({"shared_storage": [str(path)], "members": hosts}))
        contexts[host] = Recorder(
            work=work, stage="gang", node=node, is_reporting_rank=True, kind="gpu", observations=[], store=store,
            timeout_s=5.0, local_world_size=shards, world_scope=scope, benchmark="shared_storage",
            heartbeat=SimpleNamespace(record_progress=lambda: None),
        )  # fmt: skip
    threads = [
        threading.Thread(target=shared_storage.run, args=(context, {**CHOSEN, **chosen}))
        for context in contexts.values()
    ]
    run = child.run_children if in_children else run_in_this_process
    with patch.object(target, "run_children", run), patch.object(shared_clients, "run_children", run):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    for context in contexts.values():
        planned = {item.name for item in PLANNED}
        reported = [item for item in context.observations if item["name"] in planned]
        assert len(reported) == len(PLANNED), "every planned figure must be reported once, even if it is not measured"
    return {host: context.observations for host, context in contexts.items()}


def values(observed: Observed, name: str, **params: Any) -> dict[str, Any]:
    """Return host -> value of a figure with the parameters `params`. Hosts that did not measure it are left out."""
    return {
        host: item["value"]
        for host, items in observed.items()
        for item in items
        if item["name"] == f"shared_storage.{name}" and "value" in item and params.items() <= item["params"].items()
    }


def problems(observed: Observed) -> dict[str, set[str]]:
    """Return host -> reasons of its errors. Hosts without errors are left out."""
    result = {host: {item["reason"] for item in items if item["status"] == "error"} for host, items in observed.items()}
    return {host: reasons for host, reasons in result.items() if reasons}


def test_all_hosts_measure_every_figure_and_leave_nothing_behind(tmp_path: Path) -> None:
    observed = measure(tmp_path, first_clients=1, rounds=2, in_children=True)  # each client has 2 jobs of 1e9 B/s
    assert problems(observed) == {}
    assert values(observed, "wrong_bytes") == values(observed, "misread_bytes") == dict.fromkeys(HOSTS, 0)
    assert values(observed, "aggregate_bandwidth", op="read", clients=3) == dict.fromkeys(HOSTS, 6e9)
    assert values(observed, "ramp_bandwidth", op="write", clients=2) == dict.fromkeys(HOSTS, 4e9)
    assert values(observed, "saturation_clients", op="write") == dict.fromkeys(HOSTS, 3)
    assert {item["scope"] for items in observed.values() for item in items} == {
        f"directory={str(tmp_path / 'shared')[1:].replace('/', ':')}",
        f"gang=all,directory={str(tmp_path / 'shared')[1:].replace('/', ':')}",
    }
    assert list((tmp_path / "shared").iterdir()) == []


def test_scopes_of_a_host_that_measures_alone_are_valid(tmp_path: Path) -> None:
    """If one result had an invalid scope, all results of the rank would be lost."""
    scope = f"directory={str(tmp_path / 'shared')[1:].replace('/', ':')}"
    observed = measure(tmp_path, hosts=("h1",), scope="host")
    assert {item["scope"] for item in observed["h1"]} == {scope}
    assert values(observed, "aggregate_bandwidth", op="read") == {"h1": 2e9}


def test_gather_waits_for_a_late_collecting_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """h2 calls `gather` and waits for the values, which h1 collects. `sleep` plays h1.

    h1 is late: it calls `gather` 50 s later than h2. From then on it waits up to its limit of 60 s for h3, in vain. So h2 must
    wait 110 s.
    """
    now, store = [0.0], HashStore()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 50 and not store.check(["x/step/of/h1"]):
            store.set("x/step/of/h1", "1")
        if now[0] > 110:
            store.set("x/step/all", json.dumps({"h1": 1, "h2": 2}))

    monkeypatch.setattr(host_exchange, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    heartbeat = SimpleNamespace(record_progress=lambda: None)
    context: Any = SimpleNamespace(node=1, store=store, heartbeat=heartbeat, benchmark="shared_storage")
    exchange = host_exchange.HostExchange(context, HOSTS, "x")
    assert exchange.gather("step", 2, 60.0) == {"h1": 1, "h2": 2}


def test_byte_that_is_stored_wrong_is_found_by_all_hosts_and_reported_by_the_host_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Clients.step

    def flip_then_step(self: Clients, name: str, *arguments: Any) -> dict[str, Any]:
        if (name, self.host) == ("checkpoint/write", "h1"):
            with Path(self.file_of("h1", "shard1")).open("r+b") as file:
                file.seek(12345)
                byte = file.read(1)[0]
                file.seek(12345)
                file.write(bytes([byte ^ 1]))
        return step(self, name, *arguments)

    monkeypatch.setattr(Clients, "step", flip_then_step)
    observed = measure(tmp_path, shards=2)
    assert values(observed, "wrong_bytes") == {"h1": 1, "h2": 0, "h3": 0}
    assert values(observed, "misread_bytes") == dict.fromkeys(HOSTS, 0)
    (wrong,) = (item for item in observed["h1"] if item["name"] == "shared_storage.wrong_bytes")
    assert (wrong["params"]["first_wrong"], wrong["params"]["readers"]) == ("shard 1 byte 12345", "h1, h2, h3")


def test_host_that_alone_reads_wrong_bytes_reports_them_as_misread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = CheckpointShards._command

    def with_other_seed(self: CheckpointShards, action: str, *arguments: Any) -> list[str]:
        words = command(self, action, *arguments)
        if (action, self._clients.host) == ("read", "h3"):
            words[6] = "another seed"
        return words

    monkeypatch.setattr(CheckpointShards, "_command", with_other_seed)
    observed = measure(tmp_path)
    assert values(observed, "wrong_bytes") == dict.fromkeys(HOSTS, 0)
    misread = values(observed, "misread_bytes")
    assert (misread["h1"], misread["h2"]) == (0, 0)
    assert misread["h3"] > 1 << 19


def test_host_with_another_file_system_is_named_and_the_other_hosts_are_measured(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    observed = measure(tmp_path, paths={"h2": tmp_path / "other"})
    (reason,) = problems(observed)["h2"]
    assert "the directory does not have the files of h1, h3: on this host it is on another file system (" in reason
    assert values(observed, "aggregate_bandwidth", op="read") == {"h1": 4e9, "h3": 4e9}
    assert set(problems(observed)) == {"h2"}


def test_hosts_on_two_file_systems_name_the_hosts_whose_files_they_lack(tmp_path: Path) -> None:
    """h1 and h3 measure one directory, h2 and h4 another. Neither pair is a majority, so all four hosts report an error."""
    (tmp_path / "other").mkdir()
    hosts = (*HOSTS, "h4")
    observed = measure(tmp_path, hosts=hosts, paths={"h2": tmp_path / "other", "h4": tmp_path / "other"})
    lacking = {host: reason.split(": ")[1] for host, (reason,) in problems(observed).items()}
    assert lacking == {
        host: f"the directory does not have the files of {'h2, h4' if host in ('h1', 'h3') else 'h1, h3'}"
        for host in hosts
    }


def test_only_the_host_whose_files_are_hidden_reports_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h1 and h3 do not see the files of h2, for example because an overlay mount on h2 writes them to the local disk of h2."""
    see = shared_clients.run_directory_program

    def hide(context: Any, arguments: dict[str, list[str]]) -> Any:
        answers: Any = see(context, arguments)
        for answer in answers.values() if context.node != 1 else ():
            answer["seen"].remove(arguments[str(tmp_path / "shared")][3])
        return answers

    monkeypatch.setattr(shared_clients, "run_directory_program", hide)
    observed = measure(tmp_path)
    (reason,) = problems(observed)["h2"]
    assert "the directory has files that h1, h3 cannot see: the hosts do not have the same file system here (" in reason
    assert set(problems(observed)) == {"h2"}


def test_host_whose_mount_hangs_is_named_and_the_other_hosts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "directory.py"
    text = Path(directory.__file__).read_text()
    program.write_text(
        text.replace(
            'if __name__ == "__main__":', 'if "hanging" in sys.argv[2]:\n    __import__("time").sleep(600)\nelse:'
        )
    )
    monkeypatch.setattr(directory, "__file__", str(program))
    monkeypatch.setattr(target, "ACCESS_S", 2.0)
    (tmp_path / "hanging").symlink_to(tmp_path / "shared")
    observed = measure(tmp_path, paths={"h3": tmp_path / "hanging"})
    assert set(problems(observed)) == {"h3"}
    assert all("the file system hangs or is very slow" in reason for reason in problems(observed)["h3"])
    assert values(observed, "wrong_bytes") == {"h1": 0, "h2": 0}


def test_second_host_collects_the_values_if_the_rank_of_the_first_host_has_left(tmp_path: Path) -> None:
    observed = measure(tmp_path, absent=("h1",))
    assert problems(observed) == {}
    assert values(observed, "aggregate_bandwidth", op="write") == {"h2": 4e9, "h3": 4e9}


def test_host_without_directories_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"members": HOSTS}))
    context = Recorder(work=tmp_path, is_reporting_rank=True, observations=[])
    shared_storage.run(context, CHOSEN)  # type: ignore[arg-type]
    assert context.observations == []


@pytest.mark.parametrize(
    ("first", "hosts", "expected"),
    [(0, 5, [5]), (1, 1, [1]), (1, 5, [1, 2, 4, 5]), (1, 8, [1, 2, 4, 8]), (4, 3, [3])],
)
def test_number_of_clients_doubles_up_to_all_hosts(first: int, hosts: int, expected: list[int]) -> None:
    """`first` is the setting `first_clients`. If it is 0, only all hosts together are measured."""
    assert numbers_of_clients(first, hosts) == expected


def test_shard_that_is_truncated_or_has_swapped_blocks_or_flipped_bits_is_wrong(tmp_path: Path) -> None:
    path, size = tmp_path / "shard", 3 * shard.BLOCK
    shard.write(str(path), "seed", size, False)
    good = path.read_bytes()
    assert shard.read(str(path), "seed", size, False)["wrong"] == 0
    blocks = [good[number * shard.BLOCK : (number + 1) * shard.BLOCK] for number in range(3)]
    cases = {
        "swapped": blocks[1] + blocks[0] + blocks[2], "short": good[:-5], "empty": b"",
        "flipped": good[:70] + bytes([good[70] ^ 8]) + good[71:],
    }  # fmt: skip
    # Each block begins with its number (8 bytes, big-endian). Its other bytes are the same in all blocks. So blocks 0 and 1
    # differ only in byte 7.
    for name, content in cases.items():
        path.write_bytes(content)
        result = shard.read(str(path), "seed", size, False)
        assert result["wrong"] > 0, name
        assert result["first"] == {"swapped": 7, "short": size - 5, "flipped": 70, "empty": 0}[name]


def test_error_blames_the_setting_and_not_the_free_space_if_size_bytes_is_too_small(
    tmp_path: Path,
) -> None:
    observed = measure(tmp_path, size_bytes=1 << 20)
    reason = f"{tmp_path}/shared: size_bytes is 1048576, less than 1 MiB for each of 2 jobs: increase it in the profile"
    assert problems(observed) == {host: {reason} for host in HOSTS}


@pytest.mark.parametrize("failing_step", ["read/0/1", "checkpoint/read/0", "checkpoint/again"])
def test_only_the_host_that_fails_lacks_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_step: str
) -> None:
    """The shard of h2 has wrong bytes. h1 is to read this shard, but fails in `failing_step`."""
    step = Clients.step

    def flip_or_fail(self: Clients, name: str, *arguments: Any) -> dict[str, Any]:
        if (name, self.host) == ("checkpoint/write", "h2"):
            with Path(self.file_of("h2", "shard0")).open("r+b") as file:
                file.write(b"wrong")
        if (name, self.host) == (failing_step, "h1"):
            self.target.problem = "broken"
        return step(self, name, *arguments)

    monkeypatch.setattr(Clients, "step", flip_or_fail)
    observed = measure(tmp_path, rounds=2 if failing_step == "read/0/1" else 1)
    assert set(problems(observed)) == {"h1"}
    wrong = values(observed, "wrong_bytes")
    assert wrong["h2"] > 0, "if h1 fails, another host must read the shards that h1 was to read"
    assert wrong["h3"] == 0
    misread = values(observed, "misread_bytes")
    assert (misread["h2"], misread["h3"]) == (0, 0)


def test_host_whose_file_was_not_read_reports_that_the_reader_was_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has one reader in the only round. h3 reads the file of h1 and fails."""
    step = Clients.step

    def fail(self: Clients, name: str, *arguments: Any) -> dict[str, Any]:
        if (name, self.host) == ("read/0/1", "h3"):
            self.target.problem = "broken"
        return step(self, name, *arguments)

    monkeypatch.setattr(Clients, "step", fail)
    observed = measure(tmp_path)
    reason = "every host that should have read this host's file was excluded before it finished reading"
    assert problems(observed) == {"h1": {f"{tmp_path}/shared: {reason}"}, "h3": {f"{tmp_path}/shared: broken"}}
    assert values(observed, "bandwidth", op="read") == {"h1": 2e9, "h2": 2e9}


@pytest.mark.parametrize("slow_job", [{"io_bytes": 1 << 19}, {"io_bytes": 0, "total_ios": 0}], ids=["half", "nothing"])
def test_host_with_a_job_that_wrote_less_than_one_block_says_why_nothing_is_read(
    slow_job: dict[str, int], tmp_path: Path
) -> None:
    jobs = [{"error": 0, "write": result} for result in (RESULT, {**RESULT, **slow_job})]
    (tmp_path / "programs/write.json").write_text(json.dumps({"jobs": jobs}))
    too_short = f"{tmp_path}/shared: a job of this host wrote less than 1 MiB in {CHOSEN['seconds']:g} s"
    reasons = {too_short, f"{too_short}, and no other host wrote a file that this host could read"}
    assert problems(measure(tmp_path)) == dict.fromkeys(HOSTS, reasons)


def test_reason_of_a_missing_metadata_rate_names_the_host_that_created_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rates, "MOST_FILES", 0)
    observed = measure(tmp_path, hosts=("h1", "h2"))
    reasons = {host: f"{tmp_path}/shared: host {host} created no file within 0.01 s" for host in ("h1", "h2")}
    assert problems(observed) == {"h1": {*reasons.values()}, "h2": {*reasons.values()}}


def test_wrong_bytes_that_no_other_host_could_read_do_not_count_as_misread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h2 reads wrong bytes in the shard of h3. h1 and h3 read it too, but fail before their report (step `checkpoint/again`)."""
    step = Clients.step

    def flip_or_fail(self: Clients, name: str, *arguments: Any) -> dict[str, Any]:
        if (name, self.host) == ("checkpoint/write", "h3"):
            with Path(self.file_of("h3", "shard0")).open("r+b") as file:
                file.write(b"wrong")
        if name == "checkpoint/again" and self.host != "h2":
            self.target.problem = "broken"
        return step(self, name, *arguments)

    monkeypatch.setattr(Clients, "step", flip_or_fail)
    observed = measure(tmp_path)
    assert "h2" not in values(observed, "misread_bytes")
    assert any("no other host could read the same bytes" in reason for reason in problems(observed)["h2"])


def test_shards_of_all_hosts_use_at_most_a_quarter_of_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, used = 24 << 20, list[int]()
    init = SharedRates.__init__

    def with_little_space(self: SharedRates, clients: Clients, *arguments: Any) -> None:
        clients.target.free = free
        init(self, clients, *arguments)

    step = Clients.step

    def step_and_sum(self: Clients, name: str, value: Any, *arguments: Any) -> dict[str, Any]:
        if name == "checkpoint/write":
            used.append(value["shards"] * value["size"])
        return step(self, name, value, *arguments)

    monkeypatch.setattr(SharedRates, "__init__", with_little_space)
    monkeypatch.setattr(Clients, "step", step_and_sum)
    assert problems(measure(tmp_path, shards=2, shard_bytes=1 << 30)) == {}
    assert 0 < sum(used) <= free // 4, (
        "the shards may use only a quarter of the free space, because fio's files need another quarter"
    )
