"""Write run directories of fleets of any size, healthy except for given faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.judge.criteria import Pack, read_packs
from fleet.planning.plan import make_plan, read_profile
from schemas import documents, quick
from schemas.plans import Plan
from schemas.records import Observation, Record, to_json
from tests import builders

Change = Callable[[Record], Record]
HOSTS_PER_RACK = 8
NOISY_UNITS = ("B/s", "FLOP/s", "images/s", "tokens/s", "s", "W", "Hz", "Cel", "FLOP/J", "FLOP/cycle")
NETWORK_PROFILE: dict[str, Any] = {
    "schema": "rackproof.profile/1",
    "summary": "benchmarks that a slow network slows down, and a GPU memory benchmark, which it does not affect",
    "device": "gpu",
    "stages": {
        "benchmark": {"deadline_s": 90, "collective_timeout_s": 30, "benchmarks": {"memory": {}}},
        "gang": {
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {
                "collective": {"ops": ["all_reduce", "all_gather", "all_to_all"], "sizes_bytes": [8, 1 << 30]},
                "pairs": {},
                "verbs": {"figures": ["bandwidth", "latency"]},
            },
        },
    },
}
"""Profile with few benchmarks, so that simulating a fleet takes less than half as long as with the profile `standard`."""


def packs_about(*families: str) -> list[Pack]:
    """Return the packs with only the criteria on names of these families, such as `gemm` for `gemm.throughput`.

    With a quarter of the criteria, judging takes about a quarter of the time. Use it in tests in which the others do not matter.
    """
    return [
        replace(pack, criteria=tuple(item for item in pack.criteria if item.name.partition(".")[0] in families))
        for pack in read_packs([])
    ]


def plan(count: int, *, profile: str = "smoke", gpu_count: int = 8, gangs: bool = True, **variables: Any) -> Plan:
    """Return a plan of `count` hosts named `r00000-h0` …, eight per rack.

    `gangs`: whether the hosts of each rack form a gang (the hosts of one multi-node launch). Otherwise there are no gangs.
    """
    names = [f"r{at // HOSTS_PER_RACK:05}-h{at % HOSTS_PER_RACK}" for at in range(count)]
    hosts = {
        name: {
            "ansible_host": f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}",
            "rackproof_rack": name[:6],
            "rackproof_gpu_count": gpu_count,
            "rackproof_gpu_model": "h200-sxm",
            "rackproof_gang": "rack" if gangs else "none",
            **variables,
        }
        for at, name in enumerate(names)
    }
    return make_plan(read_profile(profile), hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)


def records(fleet_plan: Plan, host: str, seed: int = 0, spread: float = 0.005) -> tuple[Record, ...]:
    """Return the records of a healthy host; `spread` is the relative standard deviation of figures with a unit in NOISY_UNITS."""
    noise = random.Random(f"{seed} {host}")  # noqa: S311

    def add_noise(observation: Observation) -> Observation:
        if isinstance(observation.value, float) and observation.unit in NOISY_UNITS:
            return replace(observation, value=observation.value * (1 + spread * max(-3.0, min(3.0, noise.gauss(0, 1)))))
        return observation

    part = fleet_plan.only(fleet_plan.gangs().get(fleet_plan.host(host).gang) or (host,))
    return tuple(
        replace(record, observations=tuple(map(add_noise, record.observations)))
        for record in builders.records(part, host)
    )


def write(
    directory: Path, fleet_plan: Plan, faults: Mapping[str, Change | None] | None = None, hosts: Iterable[str] = ()
) -> None:
    """Write the plan and the records of `hosts` (default: all) to a run directory.

    `faults`: host -> function that changes the host record; None: no host record is written. Gang records stay unchanged.
    """
    documents.write(directory / "plan.json", to_json(fleet_plan))
    for name in hosts or [host.name for host in fleet_plan.hosts]:
        change = (faults or {}).get(name, lambda record: record)
        for record in records(fleet_plan, name):
            if record.gang:
                documents.write_text(directory / "gangs" / record.gang / f"{name}.json", text(record), durable=False)
            elif change:
                documents.write_text(directory / "hosts" / f"{name}.json", text(change(record)), durable=False)


def text(record: Record) -> str:
    """Return the record as the text of a record file."""
    return quick.text(to_json(record))
