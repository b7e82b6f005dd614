"""Benchmarks of file systems, in directories that the inventory names."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.benchmarks import Benchmark, Cost, Output

_WHERE = {
    "filesystem": str,  # type of the file system
    "device": str,  # block device or server
    "model": str,  # models of the disks
    "direct": bool,  # whether the page cache was bypassed (O_DIRECT)
    "engine": str,  # fio's I/O engine
    "jobs": int,  # number of fio's jobs
    "directories": int,  # number of directories on these disks that were measured at the same time
    "moved_bytes": int,  # bytes that fio read or wrote
}
"""Where and how a figure was measured."""
_OPS, _SHARING = {"op": "ops"}, {"sharing": "sharings"}

STORAGE: Mapping[str, Benchmark] = {
    "local_storage": Benchmark(
        group="storage",
        title="Local storage",
        summary="fio in the directories of rackproof_local_storage: rates, latencies, and written data read back and compared",
        settings={
            "ops": ["read", "write"],
            "percentiles": ["p50", "p99"],
            "sharings": ["together"],  # `together`: all directories at once; `alone`: one after the other
            "seconds": 1.0,  # for each rate
            # Maximum that is written to a directory. Directories on the same disks together use at most half of the free space.
            "size_bytes": 32 << 30,
            "jobs": 4,
        },
        choices={"sharings": ("together", "alone"), "percentiles": ("p50", "p99", "p99_9")},
        outputs=[
            Output(name="local_storage.bandwidth", unit="B/s", scope="directory", over={**_OPS, **_SHARING}),
            Output(name="local_storage.iops", unit="1/s", scope="directory", over={**_OPS, **_SHARING}),
            Output(
                name="local_storage.latency",
                unit="s",
                scope="directory",
                over={**_OPS, "percentile": "percentiles", **_SHARING},
            ),
            Output(
                name="local_storage.wrong_blocks",
                unit="1",
                scope="directory",
                over=_SHARING,
                params={"first_wrong": str},
            ),
        ],
        params=_WHERE,
        cost_s=0.0,
        # Four rates (reads and writes, sequential and random), then the comparison of the blocks.
        costs=[Cost(seconds=2.5, timed=["seconds"] * 5, over=["sharings"])],
        parts=["storage"],
        directories="local_storage",
        needs_torch=False,
    ),
    "shared_storage": Benchmark(
        group="storage",
        title="Shared storage",
        summary="the directories of rackproof_shared_storage, used by all hosts at once: rates of each client and of all "
        "together, files per second, and a checkpoint that other hosts read back and compare",
        settings={
            "ops": ["read", "write"],
            "metadata_ops": ["create", "stat", "remove"],
            # Clients in the first step of the ramp; 0: no ramp. Each further step doubles the number. The last step has all.
            "first_clients": 0,
            "rounds": 2,  # in a round, every host writes its own file, or reads that of another host; the best round counts
            "seconds": 1.0,  # for each rate
            "metadata_seconds": 0.3,  # for each of `metadata_ops`
            # Maximum that a host writes. All hosts together write at most half of the free space.
            "size_bytes": 16 << 30,
            "shard_bytes": 64 << 20,  # size of a rank's shard of the checkpoint
            "jobs": 4,
        },
        outputs=[
            Output(name="shared_storage.bandwidth", unit="B/s", scope="directory", over=_OPS),
            Output(name="shared_storage.file_bandwidth", unit="B/s", scope="directory"),
            Output(name="shared_storage.metadata_rate", unit="1/s", scope="directory", over={"op": "metadata_ops"}),
            Output(name="shared_storage.checkpoint_bandwidth", unit="B/s", scope="directory", over=_OPS),
            Output(
                name="shared_storage.wrong_bytes",
                unit="1",
                scope="directory",
                params={"first_wrong": str, "readers": str},
            ),
            Output(name="shared_storage.misread_bytes", unit="1", scope="directory"),
            *(
                Output(name=f"shared_storage.{name}", unit=unit, scope="directory", over=_OPS, demanded=False)
                for name, unit in (
                    ("aggregate_bandwidth", "B/s"),
                    ("ramp_bandwidth", "B/s"),
                    ("saturation_clients", "1"),
                )
            ),
        ],
        params={**_WHERE, "clients": int},
        cost_s=3.4,
        costs=[
            Cost(timed=["seconds"], over=["ops", "rounds"]),
            Cost(timed=["metadata_seconds"], over=["metadata_ops"]),
        ],
        parts=["storage"],
        directories="shared_storage",
        needs_peers=True,
        needs_torch=False,
    ),
}
