"""Test `CommonStart`, by which the ranks of several hosts agree on the moment at which all of them start.

The cases: all hosts are healthy, one host hangs, some hosts have left the benchmark. Each rank is a thread of the test.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from agent.benchmarks.runtime import common_start
from agent.benchmarks.runtime.common_start import CommonStart, Start
from agent.benchmarks.runtime.rank_context import RankContext

HOSTS = ("h1", "h2", "h3", "h4")
TIMEOUT_S = 1.0

Outcome = Start | str
"""The agreed start, or the error text of a rank that got none."""


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_start, "MARGIN_S", 0.5, raising=False)
    monkeypatch.setattr(common_start, "GANG_LEAD_S", 0.05)


def agree(tmp_path: Path, *, hung: str = "", left: tuple[str, ...] = (), ranks: int = 1) -> dict[str, Outcome]:
    """Let ranks agree on a common start; return "HOST LOCAL_RANK" -> outcome.

    The ranks of the host `hung` and of the hosts `left` do not take part, and have no outcome. Unlike the host `hung`, the hosts
    `left` have announced that they left the benchmark.
    """
    store, outcomes = HashStore(), dict[str, Outcome]()
    for host in left:
        store.set(f"left/{HOSTS.index(host)}/pulse/0", "left")

    def run(node: int, local_rank: int) -> None:
        context = RankContext(
            rank=node * ranks + local_rank, world_size=len(HOSTS) * ranks, local_rank=local_rank,
            local_world_size=ranks, stage="gang", kind="cpu", devices=tuple(range(ranks)), world_scope="gang=all",
            work=tmp_path, node=node, benchmark="pulse", timeout_s=TIMEOUT_S, store=store,
            heartbeat=SimpleNamespace(record_progress=lambda: None),  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            outcomes[f"{HOSTS[node]} {local_rank}"] = CommonStart(context, HOSTS).agree("step")
        except Exception as error:  # noqa: BLE001 - the outcome
            outcomes[f"{HOSTS[node]} {local_rank}"] = str(error)
        finally:
            context.leave()

    threads = [
        threading.Thread(target=run, args=(node, rank), daemon=True)
        for node, host in enumerate(HOSTS)
        for rank in range(ranks)
        if host not in (hung, *left)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), outcomes
    return outcomes


def test_healthy_hosts_start_at_the_same_moment(tmp_path: Path) -> None:
    outcomes = agree(tmp_path, ranks=2)
    starts = [item for item in outcomes.values() if isinstance(item, Start)]
    assert len(starts) == 8, outcomes
    moments = [item.at for item in starts]
    assert max(moments) - min(moments) <= 2 * starts[0].uncertainty_s
    assert len({item.uncertainty_s for item in starts}) == 1


@pytest.mark.parametrize("hung", HOSTS)
def test_every_rank_of_the_other_hosts_names_the_hung_host(tmp_path: Path, hung: str) -> None:
    began = time.monotonic()
    outcomes = agree(tmp_path, hung=hung, ranks=2)
    assert len(outcomes) == 6
    assert {str(item) for item in outcomes.values()} == {f"{hung} did not reach the common start"}
    assert time.monotonic() - began < 5 * TIMEOUT_S


@pytest.mark.parametrize("left", [("h1",), ("h1", "h2"), ("h3",)])
def test_hosts_that_have_left_do_not_delay_the_common_start(tmp_path: Path, left: tuple[str, ...]) -> None:
    began = time.monotonic()
    outcomes = agree(tmp_path, left=left)
    assert time.monotonic() - began < TIMEOUT_S
    assert set(outcomes) == {f"{host} 0" for host in HOSTS if host not in left}
    moments = [item.at for item in outcomes.values() if isinstance(item, Start)]
    assert len(moments) == len(outcomes), outcomes
    assert max(moments) - min(moments) < 0.5


def test_hung_first_rank_is_reported_by_the_other_ranks_of_its_host(tmp_path: Path) -> None:
    context = RankContext(
        rank=1, world_size=8, local_rank=1, local_world_size=2, stage="gang", kind="cpu", devices=(0, 1),
        world_scope="gang=all", work=tmp_path, benchmark="pulse", timeout_s=0.2, store=HashStore(),
        heartbeat=SimpleNamespace(record_progress=lambda: None),  # type: ignore[arg-type]
    )  # fmt: skip
    # Local rank 0 reaches the barrier at the beginning of `agree`, and then hangs.
    context.store.set("barrier/0/pulse/step/1/0", "here")
    with pytest.raises(common_start.NoStartError, match="the first rank of this host did not answer"):
        CommonStart(context, HOSTS).agree("step")


def test_host_that_stops_asking_for_the_time_does_not_block_the_other_hosts(tmp_path: Path) -> None:
    store = HashStore()
    store.set("name/clock/1/ask/0", "now")  # host 1 asks for the time once, then hangs

    def host(node: int) -> RankContext:
        return RankContext(
            rank=node, world_size=3, local_rank=0, local_world_size=1, stage="gang", kind="cpu", devices=(0,),
            world_scope="gang=all", work=tmp_path, node=node, benchmark="pulse", timeout_s=TIMEOUT_S, store=store,
            heartbeat=SimpleNamespace(record_progress=lambda: None),  # type: ignore[arg-type]
        )  # fmt: skip

    results: list[dict[int, float]] = []
    server = threading.Thread(
        target=lambda: results.append(common_start.answer_hosts(host(0), "name", (1, 2), time.monotonic))
    )
    server.start()
    offset = common_start.measure_offset(host(2), "name", 0, "h1", time.monotonic)
    server.join(10)
    assert results == [{2: offset.uncertainty_s}]
    assert offset.uncertainty_s < common_start.TURN_S
