"""Proposed limits have the stated rate of false alarms, and find slowdowns with the stated probability (power).

A few bad parts do not widen the limits; with many parts that differ there is no limit. The criteria pack with the limits passes
the lint.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import pytest

from fleet.criteria_lint.lint import lint
from fleet.history.database import History
from fleet.history.propose import Floor, Part, floor_of, pack_text, propose, tolerance_factor
from fleet.history.rows import HostRows, RunRows
from fleet.history.store import add_run
from fleet.judge.criteria import read_pack
from schemas.baselines import REAL
from tests.accepted import rackproof

MODEL = "NVIDIA H200"
HOSTS, RUNS = 40, 4
LEVEL, PART_SIGMA, RUN_SIGMA = 7.0e14, 0.01, 0.004
"""Average gemm.throughput in FLOP/s, and its relative standard deviations from GPU to GPU and from run to run."""
LATENCY = 2e-5
"""Average all-reduce latency in seconds."""


def runs(bad_share: float, seed: int) -> Iterator[RunRows]:
    """Yield accepted runs of hosts with one GPU each. The share `bad_share` of the GPUs is 10 to 40 % slower than the others."""
    generator = random.Random(seed)  # noqa: S311
    parts = [LEVEL * generator.gauss(1, PART_SIGMA) for _ in range(HOSTS)]
    parts = [
        value * generator.uniform(0.6, 0.9) if number < bad_share * HOSTS else value
        for number, value in enumerate(parts)
    ]
    for run in range(RUNS):
        hosts = []
        for number, value in enumerate(parts):
            place = {"host": f"h{number}", "rack": "r1", "model": MODEL, "driver": "580", "accepted": True, "stage": "benchmark",
                     "within": ""}  # fmt: skip
            gpu = {
                **place,
                "slot": "gpu=0",
                "serial": f"s{number}",
                "name": "gemm.throughput",
                "settings": "dtype=bf16 size=8192",
            }
            host = {**place, "slot": "", "serial": "", "name": "collective.all_reduce.latency",
                    "settings": "backend=nccl dtype=fp32 placement=in_place size_bytes=8"}  # fmt: skip
            on_four_hosts = {
                **gpu,
                "name": "memory.bandwidth",
                "settings": "op=copy",
                "unit": "B/s",
                "value": 4e12 + number,
            }
            figures = [
                {**gpu, "unit": "FLOP/s", "value": value * generator.gauss(1, RUN_SIGMA)},
                {**host, "unit": "s", "value": LATENCY * generator.gauss(1, 0.02)},
                *([on_four_hosts] if number < 4 else []),
            ]
            hosts.append(HostRows(parts=(), figures=tuple(figures)))
        began = f"2026-01-0{run + 1}"
        entry = {"run": f"r{run}", "began": f"{began} 00:00:00", "ended": f"{began} 01:00:00", "profile": "standard",
                 "decision": "accepted", "rackproof": "2", "hosts": HOSTS, "gpus": HOSTS, "notes": []}  # fmt: skip
        yield RunRows(kind=REAL, nonce=f"{run:032x}", entry=entry, causes=(), hosts=iter(hosts))


def history_of(directory: Path, bad_share: float = 0.0, seed: int = 1) -> History:
    for rows in runs(bad_share, seed):
        add_run(directory, rows)
    return History(directory)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a history without bad parts."""
    directory = tmp_path_factory.mktemp("healthy")
    history_of(directory)
    return directory


def floors(history: History, **options: float) -> dict[str, Floor]:
    """Return figure -> proposed limit."""
    return {item.name: item for item in propose(history, MODEL, **options).floors}


@pytest.mark.parametrize(("count", "factor"), [(20, 3.295), (50, 2.862), (100, 2.684)])
def test_tolerance_factor_matches_published_tables(count: int, factor: float) -> None:
    """The tables are for a one-sided limit that 99 % of the population meet, with 95 % confidence.

    Source: NBS Handbook 91, table A.7.
    """
    assert tolerance_factor(count, 0.99) == pytest.approx(factor, rel=0.02)


def test_floor_fits_the_healthy_parts_if_a_few_percent_are_bad(tmp_path: Path) -> None:
    floor = floors(history_of(tmp_path, bad_share=0.05))["gemm.throughput"]
    sigma = (PART_SIGMA**2 + RUN_SIGMA**2) ** 0.5
    assert floor.left_out == 0.05 * HOSTS
    assert floor.hosts == 0.95 * HOSTS
    assert floor.centre == pytest.approx(LEVEL, rel=3 * PART_SIGMA / HOSTS**0.5)
    assert 0.6 * sigma < floor.sigma / floor.centre < 1.7 * sigma
    assert 2.5 < (LEVEL - floor.limit) / (LEVEL * sigma) < 7, (
        "the limit for 0.1 % false alarms is about 4 sigma below LEVEL, but level and sigma are only estimates"
    )
    assert floor.finds < 0.12


@pytest.mark.parametrize("bad_share", [0.1, 0.2, 0.4])
def test_figure_that_differs_on_more_than_a_few_percent_of_the_accepted_parts_gets_no_limit(
    tmp_path: Path, bad_share: float
) -> None:
    proposal = propose(history_of(tmp_path, bad_share), MODEL)
    (reason,) = [text for text in proposal.left_out if text.startswith("gemm")]
    assert f"{bad_share * HOSTS:.0f} of {HOSTS} parts differ too much from the others" in reason
    assert reason.endswith("at most 5% may be left out")


STRESS = ("stress.throughput", "benchmark", "dtype=bf16", "", True, "FLOP/s")


def parts_of(hosts: int, gpus: int, draw: random.Random, sigmas: tuple[float, float, float]) -> list[Part]:
    """Return healthy parts with three runs each. `sigmas`: standard deviations from host to host, part to part and run to run."""
    of_host, of_part, of_run = sigmas
    return [
        Part(host=f"h{host}", values=[1 + level + part + draw.gauss(0, of_run) for _ in range(3)], runs=3)
        for host in range(hosts)
        for level in [draw.gauss(0, of_host)]
        for part in [draw.gauss(0, of_part) for _ in range(gpus)]
    ]


SIGMAS = [(0.0, 0.008, 0.003), (0.006, 0.006, 0.003), (0.01, 0.004, 0.003), (0.01, 0.001, 0.001)]


@pytest.mark.parametrize(
    ("hosts", "gpus", "sigmas"),
    [
        *[(hosts, gpus, sigmas) for hosts, gpus in ((5, 4), (8, 1)) for sigmas in SIGMAS],
        *[(8, 8, sigmas) for sigmas in SIGMAS[::3]],
        (32, 2, SIGMAS[3]),
    ],
)
def test_limit_has_the_stated_rate_of_false_alarms_in_95_percent_of_the_fleets(
    hosts: int, gpus: int, sigmas: tuple[float, float, float]
) -> None:
    """GPUs of one host may differ less from each other than from those of other hosts."""
    draw = random.Random(f"{hosts} {gpus} {sigmas}")  # noqa: S311
    limits = [
        result.limit
        for _ in range(400)
        if isinstance(result := floor_of(STRESS, parts_of(hosts, gpus, draw, sigmas), 0.99, 0.001), Floor)
    ]
    healthy_value = NormalDist(1, math.hypot(*sigmas))
    too_strict = sum(healthy_value.cdf(limit) > 0.001 for limit in limits)
    assert len(limits) > 300
    three_standard_errors = 3 * (0.05 * 0.95 / len(limits)) ** 0.5
    assert too_strict / len(limits) <= 0.05 + three_standard_errors


@pytest.mark.parametrize("others", [range(6), range(1), range(2)])
def test_accepted_gpus_with_another_level_are_never_below_a_proposed_limit(others: range) -> None:
    """The memory of H200 with two part numbers differs by 1.7 % (measured), and by 0.1 % within a part number."""
    draw = random.Random(7)  # noqa: S311
    parts = [
        Part(host=f"h{host}", values=[level * draw.gauss(1, 0.0002) for _ in range(3)], runs=3)
        for host in range(16)
        for level in [draw.gauss(4.389e12 if host in others else 4.4635e12, 3e9) for _ in range(4)]
    ]
    key = ("memory.bandwidth", "benchmark", "op=read", "", True, "B/s")
    result = floor_of(key, parts, 0.99, 0.001)
    assert isinstance(result, str)
    assert f"{4 * len(others)} of 64 parts differ too much" in result


def test_floor_has_the_stated_power_and_rate_of_false_alarms(healthy: Path) -> None:
    floor = floors(History(healthy), power=0.99, false_alarm=0.001)["gemm.throughput"]
    generator = random.Random(7)  # noqa: S311

    def failing(factor: float) -> float:
        """Return the share of measurements below the limit, if all GPUs have `factor` times their usual throughput."""
        values = (
            factor * LEVEL * generator.gauss(1, PART_SIGMA) * generator.gauss(1, RUN_SIGMA) for _ in range(20_000)
        )
        return sum(value < floor.limit for value in values) / 20_000

    assert failing(1.0) <= 0.001
    assert failing(1 - floor.finds) >= 0.98


def test_limit_with_fewer_false_alarms_finds_only_larger_slowdowns(healthy: Path) -> None:
    history = History(healthy)
    strict, lenient = (floors(history, false_alarm=share)["gemm.throughput"] for share in (0.01, 1e-6))
    assert lenient.limit < strict.limit
    assert lenient.finds > strict.finds


def test_latency_gets_an_upper_limit_and_a_figure_of_too_few_parts_gets_no_limit(healthy: Path) -> None:
    proposal = propose(History(healthy), MODEL)
    limits = {item.name: item for item in proposal.floors}
    assert limits["collective.all_reduce.latency"].operator == "le"
    assert limits["collective.all_reduce.latency"].limit > LATENCY * 1.05
    assert "memory.bandwidth" not in limits
    (reason,) = proposal.left_out
    assert reason.startswith("memory.bandwidth op=copy benchmark: 4 hosts with 3 or more runs, at least 5 are needed")


def test_proposal_is_a_valid_pack_that_is_not_selected_automatically(tmp_path: Path, healthy: Path) -> None:
    done = rackproof("criteria", "propose", "--model", MODEL, "--history", healthy)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "proposed.yml"
    path.write_text(done.stdout)
    pack = read_pack(str(path))
    assert not lint(pack)
    assert not pack.gpu_names
    gemm = next(item for item in pack.criteria if item.name == "gemm.throughput")
    assert (gemm.where, gemm.scope, gemm.operator) == ({"dtype": "bf16", "size": 8192}, "gpu", "ge")
    assert "with 95% confidence, this limit fails a healthy part with probability at most 0.001" in gemm.source
    assert "# No limit: memory.bandwidth" in done.stdout
    assert pack_text(propose(History(healthy), MODEL)) == done.stdout


def test_message_for_an_unknown_model_names_the_known_models(healthy: Path) -> None:
    done = rackproof("criteria", "propose", "--model", "NVIDIA B200", "--history", healthy)
    assert (done.returncode, done.stdout) == (64, "")
    assert "has this model: give one of NVIDIA H200" in done.stderr
