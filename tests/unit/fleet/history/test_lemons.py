"""A lemon (a rack, host, slot or part that fails repeatedly) is reported, but not the parts that fail only because of it.

For example, a host that fails repeatedly is reported, and its GPUs are not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from fleet.history.database import History
from fleet.history.lemons import Lemon, _exposures, expected, lemons, poisson_tail
from tests.unit.fleet.history.memory import MemoryHistory

RACKS, HOSTS, GPUS, RUNS = 8, 4, 8, 24
Failures = Iterator[tuple[int, str, str, str]]
"""Run number, host, slot and serial of each failure. Slot and serial are empty if the host itself failed."""


def history_of(
    failures: Failures, *, busy_rack: str = "", wrong: tuple[int, ...] = (), short: tuple[int, ...] = ()
) -> History:
    """Return the history of a fleet that is measured once a month.

    Args:
        failures: failures of the benchmark `peer_copy`.
        busy_rack: number of a rack that has 1000 additional runs, one an hour; empty: there is no such rack.
        wrong: runs with a wrong date.
        short: runs that do not measure `peer_copy`.
    """
    history, failed = MemoryHistory(), list(failures)
    failing = {(str(number), host) for number, host, *_ in failed}
    place = '"began" timestamp, nonce varchar, host varchar, rack varchar'
    for table, more in {
        "parts": "slot varchar, serial varchar, part varchar", "tests": "benchmark varchar, measured boolean, failed boolean",
        "causes": "slot varchar, serial varchar, problem varchar, action varchar, waived boolean", "runs": "clock varchar",
    }.items():  # fmt: skip
        history.database.execute(f"create table {table} ({place}, {more})")
    runs = [(number, rack) for number in range(RUNS) for rack in range(RACKS)]
    runs += [(RUNS + number, int(busy_rack)) for number in range(1000) if busy_rack]
    parts: list[tuple[Any, ...]] = []
    for number, rack in runs:
        for host in range(HOSTS):
            name = f"r{rack}-h{host}"
            parts.append((*_key(number, name), "", "", "host"))
            parts += [(*_key(number, name), f"gpu={gpu}", f"{name}-{gpu}", "gpu") for gpu in range(GPUS)]
    history.insert("parts", f"{_PLACE}, slot, serial, part", parts)
    tests = [
        (*row[:4], benchmark, True, benchmark == "peer_copy" and (row[1], row[2]) in failing)
        for row in parts for benchmark in ("memory", "peer_copy")
        if row[6] == "host" and (benchmark == "memory" or int(row[1]) not in short)
    ]  # fmt: skip
    history.insert("tests", f"{_PLACE}, benchmark, measured, failed", tests)
    causes = [(*_key(number, host), slot, serial, "broken", "rma", False) for number, host, slot, serial in failed]
    history.insert("causes", f"{_PLACE}, slot, serial, problem, action, waived", causes)
    history.insert("runs", "nonce, clock", [(str(number), "wrong" * (number in wrong)) for number in range(RUNS)])
    return cast("History", history)


_PLACE = '"began", nonce, host, rack'


def _key(number: int, host: str) -> tuple[datetime, str, str, str]:
    return datetime(2024, 1, 1) + timedelta(days=30 * min(number, RUNS), hours=number), str(number), host, host[:2]


def repeated_failures(*failures: Failures, **options: Any) -> list[Lemon]:
    """Return every rack, host, slot and part that failed repeatedly, even if perhaps by chance."""
    rows = iter([item for each in failures for item in each])
    return lemons(history_of(rows, **options))


def lemon_ids(*failures: Failures, **options: Any) -> set[tuple[str, str, int]]:
    """Return kind, id and number of separate failures of each lemon."""
    return {(item.kind, item.id, item.episodes) for item in repeated_failures(*failures, **options) if item.is_lemon}


def chance() -> Failures:
    """Yield random failures of 1 % of the GPUs a year, each replaced by a new part. GPUs of r0-h0 are left out."""
    generator = random.Random(1)  # noqa: S311
    for number in range(RUNS):
        for rack in range(RACKS):
            for host in range(HOSTS):
                for gpu in range(GPUS):
                    if generator.random() < 0.01 / 12 and (rack, host) != (0, 0):
                        yield number, f"r{rack}-h{host}", f"gpu={gpu}", f"r{rack}-h{host}-{gpu}-{number}"


def of_host(*numbers: int, gpus: int = GPUS, first: int = 0) -> Failures:
    """Yield, for each of these runs, failures of `gpus` GPUs of r0-h0, from GPU `first` on."""
    for number in numbers:
        for gpu in range(first, first + gpus):
            yield number, "r0-h0", f"gpu={gpu}", f"r0-h0-{gpu}"


def of_part(*numbers: int, slot: str = "gpu=0", serial: str = "r0-h0-0", host: str = "r0-h0") -> Failures:
    """Yield a failure of one part in each of these runs."""
    for number in numbers:
        yield number, host, slot, serial


def of_rack(*numbers: int) -> Failures:
    """Yield, for each of these runs, a failure of every host of rack r0."""
    for number in numbers:
        for host in range(HOSTS):
            yield number, f"r0-h{host}", "", ""


@pytest.mark.parametrize(
    ("failures", "expected_lemons"),
    [
        (lambda: of_host(2, 8, 14, 20), {("host", "r0-h0", 4)}),  # all GPUs of the host fail together
        (lambda: of_host(2, 3, 4, 8, 14, 20, gpus=2), {("host", "r0-h0", 4)}),  # the first failure lasts for runs 2 to 4
        (lambda: of_part(2, 8, 14, 20, slot="", serial=""), {("host", "r0-h0", 4)}),
        (lambda: of_part(2, 8, 14, 20), {("part", "r0-h0-0", 4)}),
        (lambda: of_part(2, 8, 14, 20, slot="gpu=0,link=3"), {("part", "r0-h0-0", 4)}),
        (lambda: of_part(2, 8, 14, 20, slot="mc=0,dimm=1", serial=""), {("slot", "r0-h0 mc=0,dimm=1", 4)}),
        (lambda: of_part(2, 8, 14, 20, slot="hca=mlx5_0", serial=""), {("slot", "r0-h0 hca=mlx5_0", 4)}),
        (lambda: of_part(2, 8, 14, 20, slot="directory=data", serial=""), {("slot", "r0-h0 directory=data", 4)}),
        (lambda: (item for number in (2, 8, 14, 20) for item in of_part(number, serial=f"new-{number}")),
         {("slot", "r0-h0 gpu=0", 4)}),
        (lambda: (item for number in (2, 8, 14, 20) for item in of_part(number, number + 2, serial=f"new-{number}")),
         {("slot", "r0-h0 gpu=0", 4)}),  # each GPU failed twice before it was replaced
        (lambda: (item for at, number in enumerate((2, 5, 8, 11, 14, 17)) for item in of_part(
            number, slot=f"gpu={at}", serial=f"r0-h0-{at}")), {("host", "r0-h0", 6)}),  # one GPU after another
        (lambda: (item for at, number in enumerate((2, 5, 8, 11)) for item in of_part(
            number, host=f"r0-h{at}", slot=f"gpu={at}")), {("part", "r0-h0-0", 4)}),  # moved from host to host
        (lambda: of_rack(2, 8, 14, 20), {("rack", "r0", 4)}),
        (lambda: of_part(2, 3, 4, 5, 6, 7, 8, 9), set()),  # one failure: the part waits for its replacement
        (lambda: of_part(2, slot="hca=mlx5_0", serial=""), set()),
        (lambda: iter(()), set()),
    ],
    ids=["all GPUs of a host", "two GPUs of a host", "host", "GPU", "link of a GPU", "DIMM", "adapter", "directory",
         "new GPUs in one slot", "new GPUs that fail twice in one slot", "each GPU of a host once", "GPU in changing hosts",
         "rack", "one failure in many runs", "one failure in one run", "no failures"],
)  # fmt: skip
def test_only_what_explains_repeated_failures_is_a_lemon(
    failures: Callable[[], Failures], expected_lemons: set[tuple[str, str, int]]
) -> None:
    assert lemon_ids(failures(), chance()) == expected_lemons


def test_runs_without_a_failure_count_as_runs_of_the_rack() -> None:
    failures = ((number, f"r0-h{host}", "", "") for number, host in [(2, 0), (2, 1), (2, 2), (8, 0), (8, 1), (8, 3)])
    (rack,) = repeated_failures(failures)
    assert (rack.kind, rack.episodes, rack.runs) == ("rack", 2, RUNS)


def test_bad_gpu_in_a_bad_host_is_also_reported() -> None:
    result = lemon_ids(of_host(2, 8, 14, 20), of_part(4, 6, 10, 12, 16, slot="gpu=3", serial="r0-h0-3"), chance())
    assert result == {("host", "r0-h0", 5), ("part", "r0-h0-3", 5)}


def test_failures_of_the_whole_fleet_are_not_attributed_to_racks() -> None:
    everywhere = [
        (number, f"r{rack}-h{host}", "", "")
        for number in (2, 8, 14, 20)
        for rack in range(RACKS)
        for host in range(HOSTS)
    ]
    assert lemon_ids(iter(everywhere)) == set()


def test_many_runs_alone_make_no_rack_a_lemon() -> None:
    """Each rack has three failures in 24 runs. Rack 0 has eight more in 1000 additional runs, which is a lower rate."""
    usual = [
        (number, f"r{rack}-h{rack % 4}", "gpu=1", f"x-{number}-{rack}")
        for number in range(0, RUNS, 8)
        for rack in range(RACKS)
    ]
    of_busy_rack = [(RUNS + 111 * at, f"r0-h{at % 4}", "gpu=1", f"r0-h{at % 4}-1") for at in range(8)]
    assert lemon_ids(iter(usual), iter(of_busy_rack), busy_rack="0") == set()


def test_run_with_a_wrong_date_is_ignored() -> None:
    assert [item.episodes for item in repeated_failures(of_part(2, 8, 14, 20), wrong=(0, 8))] == [3]


def test_runs_with_a_wrong_date_do_not_count_as_runs_of_the_parts() -> None:
    exposures = _exposures(history_of(iter(()), wrong=(0, 8)))
    assert exposures == {
        ("part", "gpu"): {RUNS - 2: RACKS * HOSTS * GPUS},
        ("slot", "gpu"): {RUNS - 2: RACKS * HOSTS * GPUS},
        ("host", ""): {RUNS - 2: RACKS * HOSTS},
        ("rack", ""): {RUNS - 2: RACKS},
    }


def test_run_without_the_failed_benchmark_does_not_end_a_failure() -> None:
    """Only every fourth run has the benchmark `peer_copy`, in which the GPU fails. So only such a run can end the failure."""
    short = tuple(number for number in range(RUNS) if number % 4)
    assert repeated_failures(of_part(0, 4, 8, 12, 16, 20), short=short) == []
    assert [item.episodes for item in repeated_failures(of_part(0, 4, 12, 20), short=short)] == [3]


def test_failures_with_and_without_the_serial_are_those_of_one_gpu() -> None:
    (item,) = repeated_failures(of_part(2, 8), of_part(2, 8, serial=""))
    assert (item.kind, item.episodes) == ("part", 2)


def test_expected_number_of_repeated_failures_matches_a_simulation() -> None:
    """The simulation distributes 30 failures at random over 300 parts, and counts the parts with two or more failures."""
    generator = random.Random(4)  # noqa: S311
    parts, total, trials = 300, 30, 200
    hits = 0
    for _ in range(trials):
        counts = [0] * parts
        for _ in range(total):
            counts[generator.randrange(parts)] += 1
        hits += sum(count >= 2 for count in counts)
    assert hits / trials == pytest.approx(expected(2, total, {12: parts}, 0), rel=0.1)
    assert poisson_tail(1, 0.1) == pytest.approx(0.09516, abs=1e-5)
