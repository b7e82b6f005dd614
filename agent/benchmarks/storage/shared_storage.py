"""Measure a directory that all hosts of the gang (the hosts of one multi-node launch) share, while all of them use it.

One rank of each host is a client of the file system. The benchmark has three parts:

- Rates: each client writes a file and reads the file of another client. First a few clients do so at the same time, then twice as
  many, and so on, until all clients do so.
- Metadata: the clients create, look up and remove files.
- Checkpoint: each client writes one shard (file) per rank of its host. Another client reads these shards and checks every byte.

A client that fails or hangs is excluded from the remaining measurements, and only its own figures are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent.benchmarks.runtime.host_exchange import ExchangeError, HostExchange
from agent.benchmarks.runtime.host_rank import read_request, wait_for_reporting_rank
from agent.benchmarks.storage.checkpoint_shards import CheckpointShards
from agent.benchmarks.storage.local_storage import NO_FIO
from agent.benchmarks.storage.shared_clients import Clients, ExcludedError
from agent.benchmarks.storage.shared_rates import SharedRates, measure_metadata
from agent.benchmarks.storage.target import FioRunner, TargetReport, prepare_targets, remove_targets

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext


def run(context: RankContext, settings: Mapping[str, Any]) -> None:
    """Report `shared_storage.*` of every directory in `rackproof_shared_storage` of the inventory; nothing if there is none."""
    if not context.is_reporting_rank:
        wait_for_reporting_rank(context)
        return
    request = read_request(context)
    members = [str(name) for name in request.get("members", [])]
    for number, path in enumerate(request.get("shared_storage", [])):
        context.set_phase(f"shared_storage: {path}"[:200])
        exchange = HostExchange(context, members, f"shared_storage/{number}")
        _measure(context, settings, exchange, str(path))


def _measure(context: RankContext, settings: Mapping[str, Any], exchange: HostExchange, path: str) -> None:
    report = TargetReport(context, "shared_storage", settings)
    runner = FioRunner(context=context, jobs=settings["jobs"])
    (target,) = prepare_targets(context, [path])
    target.problem = target.problem or ("" if runner.path else NO_FIO)
    target.about |= {"engine": runner.engine, "jobs": runner.jobs}
    try:
        clients = Clients(context, exchange, target)
        clients.join()
        SharedRates(clients, runner, report, settings).run()
        measure_metadata(clients, report, settings)
        CheckpointShards(clients, report, settings).run()
        clients.step("end", {})
    except (ExcludedError, ExchangeError) as error:
        target.problem = target.problem or str(error)
    finally:
        report.absent(target)
        remove_targets(context, [target])
