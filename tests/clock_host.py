"""Run one host of a two-node launch in its own process, with a clock that may be shifted against that of the other host.

    python -m tests.clock_host PORT WORK NODE SHIFT_S

PORT is the port on 127.0.0.1 of the key store through which the two hosts exchange messages. WORK is a working directory, NODE
the number of the host (0 or 1), and SHIFT_S the shift in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agent.benchmarks.runtime.common_start import CommonStart
from agent.benchmarks.runtime.key_store import KeyStore
from agent.benchmarks.runtime.rank_context import RankContext

NAME = "launch"
HOSTS = ("h1", "h2")


def shifted(seconds: float) -> float:
    """Return the time of a clock that is `seconds` ahead of the monotonic clock."""
    return time.monotonic() + seconds


@contextmanager
def host_context(port: int, work: Path, node: int) -> Iterator[RankContext]:
    """Yield the context of the only rank of host `node`."""
    store = KeyStore("127.0.0.1", port, NAME, limit_s=10)
    yield RankContext(
        rank=node, world_size=2, local_rank=0, local_world_size=1, stage="gang", kind="cpu", devices=(0,),
        world_scope="gang=all", work=work, node=node, benchmark="pulse", timeout_s=20.0, store=store,
    )  # fmt: skip
    store.close()


def main(port: int, work: Path, node: int, shift_s: float) -> None:
    """Agree with the other host on a common start, using a clock that is `shift_s` seconds ahead.

    Print the start as a time of the monotonic clock (without the shift), and its uncertainty, both in seconds.
    """
    with host_context(port, work, node) as context:
        start = CommonStart(context, HOSTS, partial(shifted, shift_s)).agree("step")
        print(start.at - shift_s, start.uncertainty_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
