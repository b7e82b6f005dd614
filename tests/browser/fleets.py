"""Build reports for browser tests: `lab` (three hosts), `demo` (racks with faults) and `large` (by default 10 000 hosts)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.planning.plan import make_plan, read_profile
from fleet.report.merge import merge
from fleet.simulate.timelines import make_timeline
from schemas.plans import Plan
from schemas.records import ERROR, Observation, Rank
from schemas.reports import (
    ACCEPTED,
    EXCEPTIONS,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    REJECTED,
    Acceptance,
    Coverage,
    FarthestPart,
    FleetReport,
    HostReport,
    Judged,
    LineKind,
    Spread,
    SummaryLine,
    Verdict,
)
from schemas.trace import Trace
from tests import builders
from tests.fakes import adapters

NOISE = 0.004
"""Relative standard deviation of a rate from part to part."""
_RATES = ("FLOP/s", "B/s", "images/s", "tokens/s")


def plan(racks: int, hosts: int, *, gpus: int = 8, profile: str = "standard", **variables: Any) -> Plan:
    """Return the plan of a fleet with `hosts` hosts per rack."""
    names = [f"r{rack:02}-h{host:02}" for rack in range(1, racks + 1) for host in range(1, hosts + 1)]
    inventory = builders.inventory(*names, rackproof_gpu_count=gpus, **variables)
    for name in names:
        inventory[name]["rackproof_rack"] = name[:3]
    return make_plan(
        read_profile(profile), inventory, run_id="20261121T040000Z", nonce=builders.NONCE, created=builders.WHEN
    )


def with_noise(evidence: Evidence, host: str) -> Evidence:
    """Return the evidence with rates that differ a little from part to part, as those of real GPUs do."""
    rng = random.Random(host)  # noqa: S311 - the same rates each time

    def add_noise(observation: Observation) -> Observation:
        if observation.name == "pairs.bandwidth":
            return replace(observation, value=4.81e10 * (1 + rng.gauss(0, NOISE)))
        if observation.unit not in _RATES or not isinstance(observation.value, float):
            return observation
        return replace(observation, value=observation.value * (1 + rng.gauss(0.004, NOISE)))

    return builders.with_observations(builders.with_observations(evidence, add_noise), add_noise, gang=True)


def with_trace(evidence: Evidence, gpus: int) -> Evidence:
    """Return the evidence with power, temperature and clocks over time in the benchmark stage. GPU 1 lacks some samples."""
    first, *rest = evidence.records
    samples = make_timeline("benchmark", gpus, {"gemm": 8.0, "stress": 20.0, "collective": 22.0}, start_s=10.0)
    powers = samples["gpus"]["1"]["power_w"].split()
    samples["gpus"]["1"]["power_w"] = " ".join([*powers[:10], ".", ".", *powers[12:]])
    samples["lost"] = {"1": "NVML: timed out <b>"}
    launch = replace(first.launches[0], duration_s=60.0, timeline=Trace(**samples))
    return replace(evidence, records=(replace(first, launches=(launch,)), *rest))


def slow_down(evidence: Evidence, scope: str, name: str, factor: float) -> Evidence:
    """Return the evidence with some rates of a part multiplied by `factor`: those whose names begin with `name`.

    `scope`: the part. Scopes with further labels, such as `gpu=3,peer=1` for `gpu=3`, are included.
    """

    def change(observation: Observation) -> Observation:
        is_affected = (
            observation.name.startswith(name)
            and f"{observation.scope},".startswith(f"{scope},")
            and isinstance(observation.value, float)
        )
        return (
            replace(observation, value=observation.value * factor)
            if is_affected and observation.unit in _RATES
            else observation
        )

    return builders.with_observations(builders.with_observations(evidence, change), change, gang=True)


def with_failed_launch(evidence: Evidence, log_tail: str) -> Evidence:
    """Return the evidence with a launch that was ended at its deadline, so that collectives and training have no values."""
    first, *rest = evidence.records
    rank = Rank(rank=3, local_rank=3, phase="collective all_reduce 1 GiB", exit_code=-9, log_tail=log_tail)
    ended = replace(first.launches[0], outcome="deadline", reason="not finished after 600 s", ranks=(rank,))

    def with_error(observation: Observation) -> Observation:
        if not observation.name.startswith(("collective.", "training.")):
            return observation
        return replace(observation, status=ERROR, value=None, reason="the launch was ended at its deadline")

    failed = builders.with_observations(evidence, with_error)
    return replace(failed, records=(replace(failed.records[0], launches=(ended,)), *rest))


def demo(racks: int = 2, hosts: int = 6, gpus: int = 8) -> FleetReport:
    """Return the report on racks with faults: slow and faulty GPUs, a dark optical lane, a hung launch, an unreachable host."""
    fleet_plan = plan(racks, hosts, gpus=gpus)
    evidence = {
        name: with_trace(with_noise(of_host, name), gpus) for name, of_host in builders.evidence(fleet_plan).items()
    }
    names = list(evidence)
    evidence[names[2]] = slow_down(evidence[names[2]], "gpu=3", "gemm", 0.85)
    evidence[names[2]] = slow_down(evidence[names[2]], "gpu=3", "memory", 0.9)
    ecc = {f"gpu={index}": 3 if index == gpus - 3 else 0 for index in range(gpus)}
    after = builders.snapshot(range(gpus), stage="benchmark", phase="after", gpu__ecc__uncorrectable_volatile=ecc)
    evidence[names[7]] = builders.with_snapshot(evidence[names[7]], after)
    evidence[names[9]] = slow_down(evidence[names[9]], f"gpu={gpus - 2}", "pairs", 0.55)
    hung = names[len(names) // 2 - 2]
    evidence[hung] = with_failed_launch(
        evidence[hung], "NCCL WARN socketProgress: Connection closed by remote peer\nkilled"
    )
    for number, name in enumerate(names):
        before = after = adapters.metrics(number, gpus=gpus)
        if number == 2:
            before, after = (
                adapters.metrics(number, module, gpus=gpus, symbol_errors=errors)
                for module, errors in ((adapters.HEALTHY, 2000), (adapters.DARK, 5000))
            )
        evidence[name] = adapters.with_adapters(evidence[name], before, after)
    evidence[names[-1]] = Evidence(problem="no record: it is missing")
    events = {names[-1]: ["unreachable at preflight: ssh: connect to host 10.0.0.24 port 22: Connection timed out"]}
    return merge(fleet_plan, evidence, read_packs([]), events=events)


def lab() -> FleetReport:
    """Return the report on three small hosts, one with a slow GPU."""
    fleet_plan = plan(1, 3, gpus=2)
    evidence = {name: with_noise(of_host, name) for name, of_host in builders.evidence(fleet_plan).items()}
    evidence["r01-h02"] = slow_down(evidence["r01-h02"], "gpu=1", "memory", 0.93)
    return merge(fleet_plan, evidence, read_packs([]))


def large(hosts: int = 10_000, bad: int = 300) -> FleetReport:
    """Return the report on a large fleet. It lists only the verdicts that do not pass; the passes are counted.

    `bad`: number of random draws of a host. The hosts of the first two thirds of the draws become rejected, those of the last
    third incomplete. If a host is drawn more than once, its last draw counts.
    """
    rng = random.Random(hosts)  # noqa: S311 - the same report each time
    decisions = {rng.randrange(hosts): kind for kind in (REJECTED, REJECTED, INCOMPLETE) for _ in range(bad // 3)}
    verdicts: list[Verdict] = []
    reports = []
    for number in range(hosts):
        name, decision = f"r{number // 32:03}-h{number % 32:02}", decisions.get(number, ACCEPTED)
        gpus = tuple(replace(builders.gpu(name, index), serial=f"165{number:07}{index:03}") for index in range(8))
        coverage = Coverage(
            expected=900,
            measured=900 - (decision == INCOMPLETE),
            missing=0,
            error=int(decision == INCOMPLETE),
            skipped=0,
            unsupported=0,
        )
        reports.append(
            HostReport(
                name=name,
                rack=name[:4],
                decision=decision,
                record=f"hosts/{name}.json",
                coverage=coverage,
                gpus=gpus,
                packs=("h200-sxm",),
            )
        )
        if decision != ACCEPTED:
            verdicts.append(_verdict(name, gpus[number % 8].serial, number % 8, decision, rng))
    failed_count = sum(verdict.verdict == FAIL for verdict in verdicts)
    return FleetReport(
        run_id="20261121T040000Z",
        profile="standard",
        rehearsal=False,
        measure_again="ansible-playbook -i INVENTORY playbooks/acceptance.yml -e rackproof_profile=standard",
        decision=REJECTED,
        acceptance=Acceptance(
            status="FAIL",
            lines=(
                SummaryLine(kind=LineKind.COUNT, title="Hosts", text=f"{hosts - len(verdicts)} of {hosts} accepted"),
                SummaryLine(kind=LineKind.CHECK, title="GEMM", text="FAIL", verdict=FAIL),
            ),
        ),
        began=builders.WHEN,
        ended="2026-11-21T04:21:07Z",
        rackproof="2.0.0",
        coverage=Coverage(
            expected=900 * hosts,
            measured=900 * hosts - (len(verdicts) - failed_count),
            missing=0,
            error=len(verdicts) - failed_count,
            skipped=0,
            unsupported=0,
        ),
        hosts=tuple(reports),
        verdicts=tuple(verdicts),
        causes=diagnose(verdicts, {}),
        judged=_judged(hosts, [verdict for verdict in verdicts if verdict.verdict == FAIL]),
        detail=EXCEPTIONS,
        left_out=700 * hosts,
    )


def _verdict(host: str, serial: str, gpu: int, decision: str, rng: random.Random) -> Verdict:
    common: dict[str, Any] = {"host": host, "scope": f"gpu={gpu}", "serial": serial, "stage": "benchmark"}
    if decision == INCOMPLETE:
        return Verdict(
            **{**common, "scope": "host"},
            name="collective.all_reduce.busbw",
            verdict=INCONCLUSIVE,
            criterion="plan",
            reason="error: the launch was ended at its deadline",
        )
    value = 6.9e14 * rng.uniform(0.8, 0.995)
    return Verdict(
        **common,
        name="gemm.throughput",
        verdict=FAIL,
        criterion="gemm-bf16",
        reason=f"found {value:.4g}",
        params={"dtype": "bf16"},
        value=value,
        limit=6.966e14,
        operator="ge",
        unit="FLOP/s",
        action="rma",
        source="measured, 4x H200 SXM, 3 runs",
        basis="measured",
    )


def _judged(hosts: int, failures: list[Verdict]) -> tuple[Judged, ...]:
    bins = tuple(
        round(8 * hosts / 20 * weight) for weight in (0.01, 0.02, 0.1, 0.4, 1.2, 3.1, 5.2, 5.1, 3.0, 1.1, 0.5, 0.2)
    )
    far = tuple(
        FarthestPart(host=item.host, scope=item.scope, value=item.value, serial=item.serial, verdict=FAIL)
        for item in sorted(failures, key=lambda item: float(str(item.value)))[:10]
    )
    rows = []
    for number, (name, unit, middle) in enumerate(
        [
            ("gemm.throughput", "FLOP/s", 7.9e14),
            ("memory.bandwidth", "B/s", 4.3e12),
            ("stress.power", "W", 691.0),
            ("host_copy.bandwidth", "B/s", 5.5e10),
        ]
    ):
        spread = Spread(
            n=8 * hosts,
            min=middle * 0.7,
            p05=middle * 0.97,
            p50=middle,
            p95=middle * 1.02,
            max=middle * 1.05,
            bins=bins,
        )
        rows.append(
            Judged(
                criterion=f"floor-{name}",
                name=name,
                stage="benchmark",
                params={"dtype": "bf16"},
                unit=unit,
                operator="ge",
                limit=middle * 0.88,
                source="measured",
                basis="measured",
                action="rma",
                passed=8 * hosts - (len(failures) if not number else 0),
                failed=0 if number else len(failures),
                spread=spread,
                farthest=() if number else far,
            )
        )
    return tuple(rows)
