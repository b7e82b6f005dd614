"""A checkpoint in a shared directory: each host writes a shard for each of its ranks, and others read and compare every byte.

If a byte is wrong, the host that wrote the shard and a third host read it too. If all of them read it wrong, it is stored wrong;
otherwise the client that read it wrong is at fault.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agent.benchmarks.storage import shard
from agent.benchmarks.storage.shared_clients import Clients
from agent.benchmarks.storage.target import ACCESS_S, TargetReport, clean

SLOWEST = 20e6
"""Rate in B/s of one host below which its shards are given up."""
MOST_DISPUTED = 16
"""Number of wrong shards of one host that are read again."""


class CheckpointShards:
    """The shards of this host, and those that it reads."""

    def __init__(self, clients: Clients, report: TargetReport, settings: Mapping[str, Any]) -> None:
        self._clients, self._report = clients, report
        self._shards = max(1, clients.context.local_world_size)
        free = clients.target.free // 2 // max(1, len(clients.hosts)) // self._shards
        self._size = max(1, min(settings["shard_bytes"], free) // shard.BLOCK) * shard.BLOCK
        self._sizes: dict[str, tuple[int, int, bool]] = {}
        """Host -> number and size of its shards."""
        self._limit_s = ACCESS_S + self._size * self._shards / SLOWEST

    def run(self) -> None:
        """Write, read, compare, and settle who is at fault for a wrong byte."""
        clients = self._clients
        direct = clients.target.direct
        answers = clients.run(
            {
                str(number): self._command("write", clients.host, number, self._size, direct)
                for number in range(self._shards)
            },
            self._limit_s,
        )
        self._rate("write", answers, self._size * self._shards)
        written = clients.step("checkpoint/write", {"shards": self._shards, "size": self._size}, self._limit_s)
        self._sizes = {host: (int(value["shards"]), int(value["size"]), direct) for host, value in written.items()}
        owner = clients.next_host(1)
        read = self._read(owner, range(self._sizes[owner][0]))
        self._rate("read", read, self._sizes[owner][1] * self._sizes[owner][0])
        wrong = self._wrong(owner, read)
        first = clients.step("checkpoint/read", {"wrong": wrong}, self._limit_s)
        self._settle({host: value["wrong"] for host, value in first.items()})

    def _command(self, action: str, host: str, number: int, size: int, direct: bool) -> list[str]:
        path = self._clients.file_of(host, f"shard{number}")
        return [
            sys.executable,
            "-I",
            "-S",
            shard.__file__,
            action,
            path,
            f"{path}:{number}",
            str(size),
            str(int(direct)),
        ]

    def _read(self, owner: str, numbers: Sequence[int]) -> dict[str, dict[str, Any]]:
        _, size, direct = self._sizes[owner]
        commands = {str(number): self._command("read", owner, number, size, direct) for number in numbers}
        return self._clients.run(commands, self._limit_s)

    def _rate(self, op: str, answers: Mapping[str, Mapping[str, Any]], moved: int) -> None:
        """Report the bandwidth of this host: its shards are written or read when the slowest is."""
        seconds = max((float(answer["seconds"]) for answer in answers.values()), default=0.0)
        if seconds > 0 and not self._clients.target.problem:
            about = {"clients": len(self._clients.hosts), "moved_bytes": moved}
            self._report.figure(
                self._clients.target, "shared_storage.checkpoint_bandwidth", moved / seconds, about, op=op
            )

    @staticmethod
    def _wrong(owner: str, answers: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
        """Return owner, number, wrong bytes and offset of the first of each shard that was read wrong."""
        found = [
            [owner, int(number), int(answer["wrong"]), int(answer["first"])]
            for number, answer in answers.items()
            if answer["wrong"]
        ]
        return found[:MOST_DISPUTED]

    def _settle(self, first: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Report the wrong bytes that this host stored, and those that only this host read."""
        clients = self._clients
        readings = _by_shard(first)
        readers = {name: set(found) | {name[0]} for name, found in readings.items()}
        if readings:
            hosts = clients.hosts
            for name, found in readings.items():
                reader = next(iter(found))
                third = next((host for host in hosts if host not in (reader, name[0])), "")
                readers[name] |= {third} - {""}
            again: list[list[Any]] = []
            for owner, number in readings:
                if clients.host in readers[owner, number] - set(readings[owner, number]):
                    again += self._wrong(owner, self._read(owner, [number]))
            second = clients.step("checkpoint/again", {"wrong": again}, self._limit_s)
            for name, found in _by_shard({host: value["wrong"] for host, value in second.items()}).items():
                readings.setdefault(name, {}).update(found)
        stored, misread = 0, 0
        about: dict[str, Any] = {}
        for name, found in readings.items():
            if len(found) == len(readers.get(name, ())):
                if name[0] == clients.host:
                    bytes_, place = next(iter(found.values()))
                    stored += bytes_
                    about.setdefault("first_wrong", f"shard {name[1]} byte {place}")
                    about.setdefault("readers", clean(", ".join(sorted(found))))
            elif clients.host in found:
                misread += found[clients.host][0]
        self._report.figure(clients.target, "shared_storage.wrong_bytes", stored, about)
        self._report.figure(clients.target, "shared_storage.misread_bytes", misread)


def _by_shard(wrong: Mapping[str, Sequence[Sequence[Any]]]) -> dict[tuple[str, int], dict[str, tuple[int, int]]]:
    """Return owner and number of each shard -> reader -> wrong bytes and offset of the first."""
    shards: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    for reader, items in wrong.items():
        for owner, number, count, place in items:
            shards[str(owner), int(number)][reader] = (int(count), int(place))
    return dict(shards)
