"""A checkpoint in a shared directory: each host writes a shard for each of its ranks, and another host reads and checks them.

If bytes of a shard are wrong, the host that wrote the shard (its owner) and a third host, if there is one, read the shard, too.
If every host that read the shard, or two hosts other than the owner, read wrong bytes, the file system stored the shard wrong.
Otherwise each host that read wrong bytes is at fault.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from agent.benchmarks.storage import shard
from agent.benchmarks.storage.shared_clients import Clients
from agent.benchmarks.storage.target import ACCESS_S, TargetReport, clean

SLOWEST = 20e6
"""Lowest accepted rate of a host in B/s. If a host writes or reads shards slower than this, the access is abandoned."""
MOST_DISPUTED = 16
"""Maximum number of wrong shards of one owner that a host reports. Only reported shards are read again."""

Readings = dict[tuple[str, int], dict[str, tuple[int, int]]]
"""Owner and number of a shard -> host that read wrong bytes in it -> number of wrong bytes, and offset of the first one."""


class CheckpointShards:
    """Writes the shards of this host, and reads those of another host."""

    def __init__(self, clients: Clients, report: TargetReport, settings: Mapping[str, Any]) -> None:
        self._clients, self._report = clients, report
        self._shards = max(1, clients.context.local_world_size)
        free = clients.target.free // 4 // max(1, len(clients.hosts)) // self._shards
        self._size = max(1, min(settings["shard_bytes"], free) // shard.BLOCK) * shard.BLOCK
        self._sizes: dict[str, tuple[int, int, bool]] = {}
        """Host -> number of its shards, bytes of each shard, and whether this host reads them without the page cache."""
        self._limit_s = ACCESS_S + self._size * self._shards / SLOWEST

    def run(self) -> None:
        """Write, read and compare the shards. Report for wrong bytes whether the file system or a host is at fault."""
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
        self._report_wrong_bytes(self._read_all())

    def _read_all(self) -> dict[str, list[list[Any]]]:
        """Return reader -> the shards in which it read wrong bytes, each as an item of `_wrong`.

        Each host reads the shards of the next host. If `Clients.step` excludes a reader that has not reported its result, a
        further round follows. In this round the host before the excluded reader reads the same shards.
        """
        clients, wrong = self._clients, defaultdict[str, list[list[Any]]](list)
        unread = set(clients.hosts)
        for number in count():
            readers = dict(zip((*clients.hosts[1:], *clients.hosts[:1]), clients.hosts, strict=True))
            owner = clients.next_host()
            read = self._read(owner, range(self._sizes[owner][0])) if owner in unread else {}
            if not number:
                self._rate("read", read, self._sizes[owner][1] * self._sizes[owner][0])
            answers = clients.step(f"checkpoint/read/{number}", {"wrong": self._wrong(owner, read)}, self._limit_s)
            for host, value in answers.items():
                wrong[host] += value["wrong"]
            unread = {host for host in unread & answers.keys() if readers[host] not in answers}
            if not unread:
                break
        return wrong

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
        """Report the bandwidth of this host: `moved` (bytes of all shards that it wrote or read) / time of the slowest shard."""
        seconds = max((float(answer["seconds"]) for answer in answers.values()), default=0.0)
        if seconds > 0 and not self._clients.target.problem:
            about = {"clients": len(self._clients.hosts), "moved_bytes": moved}
            self._report.figure(
                self._clients.target, "shared_storage.checkpoint_bandwidth", moved / seconds, about, op=op
            )

    @staticmethod
    def _wrong(owner: str, answers: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
        """Return up to MOST_DISPUTED shards that have wrong bytes.

        Each item has the owner and the number of the shard, the count of wrong bytes, and the offset of the first wrong byte.
        """
        wrong_shards = [
            [owner, int(number), int(answer["wrong"]), int(answer["first"])]
            for number, answer in answers.items()
            if answer["wrong"]
        ]
        return wrong_shards[:MOST_DISPUTED]

    def _report_wrong_bytes(self, first: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Report how many bytes of this host's shards are stored wrong, and how many bytes this host misread in any shard.

        If this host read wrong bytes in another host's shard, and no other host could read that shard, set a problem of the
        directory instead.
        """
        clients, readings = self._clients, _by_shard(first)
        readers = self._read_again(readings) if readings else {}
        if any(
            wrong_by_host.keys() == readers[shard_id] == {clients.host} != {shard_id[0]}
            for shard_id, wrong_by_host in readings.items()
        ):
            clients.target.problem = (
                "this host read wrong bytes, and no other host could read the same bytes to confirm that they are wrong"
            )
            return
        stored, misread = 0, 0
        about: dict[str, Any] = {}
        for shard_id, wrong_by_host in readings.items():
            # Two hosts other than the owner suffice, because the owner may read its shard correctly from a cache.
            if wrong_by_host.keys() == readers[shard_id] or len(wrong_by_host.keys() - {shard_id[0]}) > 1:
                if shard_id[0] == clients.host:
                    bytes_, offset = next(iter(wrong_by_host.values()))
                    stored += bytes_
                    about.setdefault("first_wrong", f"shard {shard_id[1]} byte {offset}")
                    about.setdefault("readers", clean(", ".join(sorted(wrong_by_host))))
            elif clients.host in wrong_by_host:
                misread += wrong_by_host[clients.host][0]
        self._report.figure(clients.target, "shared_storage.wrong_bytes", stored, about)
        self._report.figure(clients.target, "shared_storage.misread_bytes", misread)

    def _read_again(self, readings: Readings) -> dict[tuple[str, int], set[str]]:
        """Let the owner of each wrong shard and a third host read the shard, too.

        Add the wrong bytes that they read to `readings`. Return owner and number of each wrong shard -> hosts that have read it.
        """
        clients = self._clients
        readers: dict[tuple[str, int], set[str]] = {}
        for shard_id, wrong_by_host in readings.items():
            owner, reader = shard_id[0], next(iter(wrong_by_host))
            third = next((host for host in clients.hosts if host not in (reader, owner)), "")
            # If the owner was excluded after the first reading, it has removed its shards, so no host can read them again.
            readers[shard_id] = {*wrong_by_host, *({owner, third} - {""} if owner in clients.hosts else ())}
        again: list[list[Any]] = []
        for owner, number in readings:
            if clients.host in readers[owner, number] - set(readings[owner, number]):
                again += self._wrong(owner, self._read(owner, [number]))
        second = clients.step("checkpoint/again", {"wrong": again}, self._limit_s)
        for shard_id, wrong_by_host in _by_shard({host: value["wrong"] for host, value in second.items()}).items():
            if shard_id in readings:
                readings[shard_id].update(wrong_by_host)
        return {shard_id: {*readings[shard_id], *(hosts & second.keys())} for shard_id, hosts in readers.items()}


def _by_shard(wrong: Mapping[str, Sequence[Sequence[Any]]]) -> Readings:
    """Return owner and number of each shard -> reader -> number of wrong bytes and offset of the first wrong byte."""
    shards: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    for reader, items in wrong.items():
        for owner, number, bytes_, offset in items:
            shards[str(owner), int(number)][reader] = (int(bytes_), int(offset))
    return dict(shards)
