"""Print how well faults between RDMA ports are located in a simulated fleet of 16 hosts with 8 rails.

    .venv/bin/python docs/measurements/port_localisation.py --seeds 3

Each fleet is measured in one launch. In each round the hosts form pairs, and after the last round every two hosts were a pair.
Each row has a number of faults of one kind, or one fault of each kind, at random hosts and rails. A fault is found if exactly its
part is named: the port, the cable, the path between two hosts on one rail, the switch or the rail. Precision is the share of the
named parts that have a fault, recall the share of the faults whose part is named, and `clean` the number of fleets whose report
has one cause for each fault and no other.
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.judge.criteria import read_packs
from fleet.records.load import load
from fleet.report.merge import merge
from fleet.simulate.cabling import cabling_values
from fleet.simulate.fleet import Fleet, Injection, place_faults, write_run
from fleet.simulate.ports import verbs_seconds
from fleet.simulate.records import JUDGED
from schemas.reports import PASS, Verdict
from schemas.stages import GANG

Part = tuple[str, str]
"""Kind of a part, and its name."""
KINDS = {"slow_nic": "NIC", "slow_cable": "cable", "slow_path": "link", "slow_switch": "switch", "slow_rail": "rail"}
"""Fault -> the kind of part that must be named."""
CREATED = "2026-11-21T04:00:00Z"
PROFILE = Path(__file__).with_name("ports.yml")
_SUSPECT = re.compile(r"suspect (\w+) (.*?) \(confidence")


@dataclass(kw_only=True)
class Row:
    """The result of several fleets."""

    name: str
    faults: int
    right: int = 0
    """Named parts that have a fault."""
    named: int = 0
    present: int = 0
    """Parts that have a fault."""
    clean: int = 0
    fleets: int = 0
    launches: set[int] = field(default_factory=set)
    write_s: float = 0.0
    judge_s: float = 0.0

    def add(self, found: set[Part], expected: set[Part], causes: int) -> None:
        """Add a fleet."""
        self.right += len(found & expected)
        self.named += len(found)
        self.present += len(expected)
        self.clean += found == expected and causes == len(expected)
        self.fleets += 1

    def __str__(self) -> str:
        precision = self.right / self.named if self.named else float(not self.present)
        return (
            f"{self.name:<12} {self.faults:6}  {precision:9.3f}  {self.right / max(self.present, 1):6.3f}  "
            f"{self.clean:3} of {self.fleets:<3}  {'-'.join(map(str, sorted(self.launches))):>8}  "
            f"{self.write_s / self.fleets:7.1f}  {self.judge_s / self.fleets:7.1f}"
        )


def main() -> int:
    """Print one row per kind and number of faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rails", type=int, default=8)
    parser.add_argument("--hosts-per-leaf", type=int, default=4)
    parser.add_argument("--faults", type=int, default=5, help="largest number of faults of one kind")
    parser.add_argument("--seeds", type=int, default=2, help="fleets for each row")
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS, "each"], default=[*KINDS, "each"])
    options = parser.parse_args()
    fleet = Fleet(
        hosts=options.hosts, gpus=options.rails, racks=1, profile=str(PROFILE), gang="all",
        hosts_per_leaf=options.hosts_per_leaf, readings=JUDGED,
    )  # fmt: skip
    plan = fleet.plan("ports", CREATED)
    print(f"{options.hosts} hosts, {options.rails} rails, {options.hosts_per_leaf} hosts at a leaf switch; one launch takes "
          f"{verbs_seconds(plan, GANG):.0f} s for {options.hosts - 1} rounds")  # fmt: skip
    print("fault        number  precision  recall  clean       launches  write s  judge s")
    for kind in options.kinds:
        for count in range(1, options.faults + 1) if kind != "each" else (len(KINDS),):
            row = Row(name=kind, faults=count)
            for seed in range(options.seeds):
                measure(row, fleet, [kind] * count if kind != "each" else [*KINDS], seed)
            print(row, flush=True)
    return 0


def measure(row: Row, fleet: Fleet, kinds: Sequence[str], seed: int) -> None:
    """Simulate a fleet with these faults, judge it, and add the result to the row."""
    plan = fleet.plan("ports", CREATED)
    rng = random.Random(f"{row.name} {row.faults} {seed}")  # noqa: S311 - no secret
    hosts = rng.sample([host.name for host in plan.hosts], len(kinds))
    rails = rng.sample(range(fleet.gpus), len(kinds)) if len(kinds) <= fleet.gpus else [0] * len(kinds)
    requests = [f"{kind}:{host}:{rail}" for kind, host, rail in zip(kinds, hosts, rails, strict=True)]
    injections = place_faults(requests, plan, seed)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "ports"
        began = time.process_time()
        write_run(directory, fleet, injections, plan)
        written = time.process_time()
        run = load(directory)
        report = merge(run.plan, run.evidence, read_packs([]), events=run.events, quarantined=run.quarantined)
        row.write_s += written - began
        row.judge_s += time.process_time() - written
        row.launches |= {
            len(gang.launches) for evidence in run.evidence.values() for gang in evidence.records if gang.gang
        }
    found = {part for verdict in report.verdicts for part in suspects(verdict)}
    names = [host.name for host in plan.hosts]
    row.add(found, {expected(injection, fleet, names) for injection in injections}, len(report.causes))


def expected(injection: Injection, fleet: Fleet, names: Sequence[str]) -> Part:
    """Return the part that has the fault, as the report names it."""
    kind, host, rail = KINDS[injection.fault.kind], injection.host, injection.gpu
    number = names.index(host)
    if kind == "link":
        other = names[(number + 1) % len(names)]
        return kind, f"{' - '.join(sorted((host, other)))} rail {rail}"
    if kind == "switch":
        return kind, f"0x51400000{cabling_values(number, fleet.hosts_per_leaf)['pod_guid']}00{rail:02x}"
    return kind, f"{rail}" if kind == "rail" else f"{host} rail {rail}"  # the report says `suspect rail 1`


def suspects(verdict: Verdict) -> Iterator[Part]:
    """Yield the part that a verdict suspects."""
    found = _SUSPECT.search(verdict.reason) if verdict.verdict != PASS and verdict.name.startswith("verbs.") else None
    if found:
        yield found[1], found[2]
    elif verdict.verdict != PASS and not verdict.name.startswith("verbs."):
        yield "other", f"{verdict.host} {verdict.scope} {verdict.name}"


if __name__ == "__main__":
    raise SystemExit(main())
