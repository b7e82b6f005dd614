"""Test `rackproof diff`, which lists changed parts and versions, and figures that changed by more than their noise.

A figure is a measured value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.diff.comparison import compare
from fleet.diff.figures import changed_figures
from fleet.judge.criteria import Criterion, VsBaseline, read_packs
from fleet.records import baseline_store
from fleet.records.host_state import Figure, HostState, merge_states
from fleet.records.load import load
from fleet.report.run_report import report_on_host
from schemas import documents
from schemas.baselines import Change, InstalledPart, Level
from schemas.plans import BenchmarkChoice, BudgetSelection
from schemas.records import Gpu, Record
from tests import builders
from tests.accepted import call, report_of, run_directory, slowed, swapped

CRITERIA = [
    Criterion(
        id=f"c-{name.partition('.')[0]}",
        name=name,
        operator="ge",
        unit="B/s",
        action="rma",
        source="a test",
        baseline=VsBaseline(fraction=0.98),
    )
    for name in ("memory.bandwidth", "pairs.bandwidth", "collective.all_reduce.busbw")
]


def gpu(serial: str, index: int = 0) -> Gpu:
    return Gpu(index=index, serial=serial, uuid=f"GPU-{serial}", name="NVIDIA H200", pci_bus_id=f"0000:{index:02}:00.0")


def figure(
    value: float, *, name: str = "memory.bandwidth", scope: str = "gpu=0", sigma: float | None = None, runs: int = 1
) -> Figure:
    """Return a figure that `runs` runs measured at `scope`, all with the same value.

    `sigma`: scatter between the runs as a fraction of the value; None: unknown.
    """
    within = scope.partition(",")[2] if scope.startswith("gpu=") else scope.replace("host", "")
    values = {f"r{number}": value for number in range(runs)}
    level = Level(
        name=name,
        unit="B/s",
        stage="benchmark",
        within=within,
        value=value,
        sigma=sigma,
        values=values,
        params={"op": "copy"},
    )
    return Figure(level=level, scope=scope)


def host(serials: Iterable[str] = ("S1",), figures: Sequence[tuple[str, Figure]] = (), **more: object) -> HostState:
    """Return the state of a host.

    Args:
        serials: serial of the GPU in each slot, or "" for an empty slot.
        figures: pairs of a serial and a figure. The serial is that of the measured GPU, or "" if the host was measured.
    """
    values: dict[str, dict[object, Figure]] = {}
    for serial, measured in figures:
        values.setdefault(serial, {})[measured.level.key] = measured
    gpus = tuple(gpu(serial, index) for index, serial in enumerate(serials) if serial)
    return HostState(gpus=gpus, figures=values, **{"last_run": "r0", **more})  # type: ignore[arg-type]


def listed_changes(old: dict[str, HostState], new: dict[str, HostState]) -> list[tuple[str, str, str]]:
    """Return kind, host and scope of each change."""
    return [(item.kind, item.host, item.scope) for item in changes(old, new)]


def changes(old: dict[str, HostState], new: dict[str, HostState]) -> tuple[Change, ...]:
    return compare(old, new, dict.fromkeys(new, CRITERIA)).changes()


# --- parts


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"h1": ["A", "B"]}, {"h1": ["A", "B"]}, []),
        ({"h1": ["A", "B"]}, {"h1": ["A", "C"]}, [("replaced", "h1", "gpu=1")]),
        ({"h1": ["A", "B"]}, {"h1": ["A", ""]}, [("gone", "h1", "gpu=1")]),
        ({"h1": ["A", ""]}, {"h1": ["A", "B"]}, [("new", "h1", "gpu=1")]),
        ({"h1": ["A", "B"]}, {"h1": ["B", "A"]}, [("moved", "h1", "gpu=0"), ("moved", "h1", "gpu=1")]),
        ({"h1": ["A"], "h2": ["B"]}, {"h1": ["B"], "h2": ["A"]}, [("moved", "h1", "gpu=0"), ("moved", "h2", "gpu=0")]),
        (
            {"h1": ["A"], "h2": ["B"]},
            {"h1": ["B"], "h2": ["C"]},
            [("moved", "h1", "gpu=0"), ("gone", "h1", "gpu=0"), ("new", "h2", "gpu=0")],
        ),
    ],
    ids=[
        "unchanged",
        "replaced",
        "removed",
        "added",
        "exchanged within a host",
        "exchanged between hosts",
        "GPU of h2 moved to h1, and h2 has a new GPU",
    ],
)
def test_gpus_are_compared_by_slot_and_serial(
    old: dict[str, list[str]], new: dict[str, list[str]], expected: list[tuple[str, str, str]]
) -> None:
    before = {name: host(serials) for name, serials in old.items()}
    assert listed_changes(before, {name: host(serials) for name, serials in new.items()}) == expected


def test_gpu_whose_index_changes_because_another_gpu_is_missing_is_unchanged() -> None:
    """GPU B is missing, so the NVML index of GPU C changes from 2 to 1. Its slot (the PCI address) stays the same."""
    old = host(["A", "B", "C"])
    new = replace(old, gpus=(gpu("A", 0), replace(gpu("C", 2), index=1)))
    assert listed_changes({"h1": old}, {"h1": new}) == [("gone", "h1", "gpu=1")]


def disks(*serials: str, kind: str = "disk") -> tuple[InstalledPart, ...]:
    return tuple(
        InstalledPart(kind=kind, slot=f"disk=nvme{number}n1", serial=serial) for number, serial in enumerate(serials)
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (disks("A", "B"), disks("B", "A"), []),  # only the kernel's numbering of the disks changed
        (disks("A", "B"), disks("A", "C"), ["replaced"]),
        (disks("A", "B"), disks("A"), ["gone"]),
        (disks("A"), disks("A", "B"), ["new"]),
        (disks("A"), (), ["unclear"]),  # serials are not reported any more, so the disk may still be there
        ((), disks("A"), []),
    ],
    ids=[
        "order changed",
        "replaced",
        "removed",
        "added",
        "serials no longer reported",
        "serials reported for the first time",
    ],
)
def test_disks_are_compared_by_serial(
    old: tuple[InstalledPart, ...], new: tuple[InstalledPart, ...], expected: list[str]
) -> None:
    assert [kind for kind, _, _ in listed_changes({"h1": host(parts=old)}, {"h1": host(parts=new)})] == expected


def nics(*addresses: str) -> tuple[InstalledPart, ...]:
    """Return interfaces with these MAC addresses; an empty address stands for no interface."""
    return tuple(
        InstalledPart(kind="NIC", slot=f"nic=eth{number}", serial=address)
        for number, address in enumerate(addresses)
        if address
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (nics("A", "A"), nics("A", "A"), []),
        (nics("A", "A"), nics("B", "B"), []),  # another member gave its address to the bond
        (nics("A", "A", "C"), nics("B", "B", "C"), []),
        (nics("A", "A", "C"), nics("A", "B", "C"), []),  # the new record has permanent addresses
        (nics("A", "B", "C"), nics("A", "A", "C"), []),  # the new record has no permanent addresses
        (nics("A", "A", "C"), nics("A", "A", "D"), ["replaced"]),
        (nics("A", "A", "C"), nics("A", "A"), ["gone"]),
        (nics("A", "A"), nics("A", "A", "C"), ["new"]),
        (nics("A", "B", "C"), nics("A", "", "C"), ["gone"]),
        (nics("A", "B"), nics("A", "C"), ["replaced"]),
    ],
)
def test_address_that_several_interfaces_share_is_no_serial(
    old: tuple[InstalledPart, ...], new: tuple[InstalledPart, ...], expected: list[str]
) -> None:
    assert [kind for kind, _, _ in listed_changes({"h1": host(parts=old)}, {"h1": host(parts=new)})] == expected


def test_host_with_a_record_in_only_one_of_the_two_runs_is_gone_or_new() -> None:
    lost = {"h1": HostState(has_record=False), "h3": host(["C"])}
    assert listed_changes({"h1": host(["A"]), "h2": host(["B"])}, lost) == [
        ("gone", "h1", "host"),
        ("gone", "h2", "host"),
        ("new", "h3", "host"),
    ]


def test_same_version_change_on_several_hosts_is_listed_once() -> None:
    old = {name: host([f"S-{name}"], versions={"driver.version": "570", "nccl": "2.28"}) for name in ("h1", "h2", "h3")}
    new = {name: replace(was, versions={"driver.version": "580", "nccl": "2.28"}) for name, was in old.items()}
    (change,) = changes(old, new)
    assert (change.kind, change.what, change.old, change.new) == ("version", "driver.version", "570", "580")
    assert change.text == "h1, h2, h3: driver.version 570 → 580"


def test_versions_of_all_parts_of_a_host_are_compared_together() -> None:
    old = {"h1": host(versions={"gpu.vbios_version": "96.00"})}
    new = {"h1": host(versions={"gpu.vbios_version[gpu=0]": "96.00", "gpu.vbios_version[gpu=1]": "97.00"})}
    (change,) = changes(old, new)
    assert (change.old, change.new) == ("96.00", "96.00, 97.00")


# --- figures and noise


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (figure(100.0), figure(98.5), []),
        (figure(100.0), figure(97.5), ["regressed"]),
        (figure(100.0), figure(102.5), ["improved"]),
        (figure(100.0, sigma=0.001, runs=4), figure(97.5), ["regressed"]),
        # The limit is 4.5 %: 4 × 1 % × √(1 + 1/4). The 1/4 is for the noise of the earlier value, a median of 4 runs.
        (figure(100.0, sigma=0.010, runs=4), figure(97.5), []),
        (figure(100.0, sigma=0.010, runs=4), figure(95.0), ["regressed"]),
        # The noise is so large that not even a loss of 50 % is clear.
        (figure(100.0, sigma=0.100, runs=4), figure(50.0), ["unclear"]),
        (figure(100.0, name="host_copy.bandwidth"), figure(85.0, name="host_copy.bandwidth"), []),
        (figure(100.0, name="host_copy.bandwidth"), figure(60.0, name="host_copy.bandwidth"), ["changed"]),
        (figure(16.0, name="gpu.pcie.width"), figure(8.0, name="gpu.pcie.width"), ["regressed"]),
        (
            figure(2.0, name="gpu.remapped_rows.uncorrectable"),
            figure(3.0, name="gpu.remapped_rows.uncorrectable"),
            ["regressed"],
        ),
    ],
    ids=[
        "loss within 2 %",
        "loss beyond 2 %",
        "gain beyond 2 %",
        "loss beyond 2 % with little noise",
        "loss within 4 times the noise",
        "loss beyond 4 times the noise",
        "noise too large",
        "no criterion, small loss",
        "no criterion, large loss",
        "fewer PCIe lanes",
        "more remapped rows",
    ],
)
def test_figure_is_listed_only_if_it_changed_by_more_than_its_noise(
    before: Figure, after: Figure, expected: list[str]
) -> None:
    old, new = host(figures=[("S1", before)]), host(figures=[("S1", after)])
    assert [kind for kind, _, _ in listed_changes({"h1": old}, {"h1": new})] == expected


@pytest.mark.parametrize(("operator", "kind"), [("ge", "regressed"), ("le", "improved"), ("eq", "changed")])
def test_operator_of_the_criterion_decides_whether_less_power_is_worse(operator: str, kind: str) -> None:
    before, after = (
        replace(item, level=replace(item.level, unit="W", name="stress.power"))
        for item in (figure(700.0), figure(500.0))
    )
    rule = replace(CRITERIA[0], name="stress.power", operator=operator, unit="W")
    result = changed_figures("h1", host(figures=[("S1", before)]), host(figures=[("S1", after)]), [rule], ["h1"])
    assert [item.kind for item in result] == [kind]


@pytest.mark.parametrize(("count", "texts"), [
    (1, {"h1: 1 earlier figure was not measured this time (a)", "h1: 1 figure has no earlier value to compare with"}),
    (2, {"h1: 2 earlier figures were not measured this time (a)", "h1: 2 figures have no earlier value to compare with"}),
])  # fmt: skip
def test_figures_that_only_one_run_has_are_counted(count: int, texts: set[str]) -> None:
    old, new = (
        host(
            figures=[
                ("S1", figure(1.0)),
                *(("S1", figure(1.0, name=name, scope=f"gpu=0,peer={at}")) for at in range(count)),
            ]
        )
        for name in "ab"
    )
    assert {item.text for item in changes({"h1": old}, {"h1": new})} == texts


def test_change_states_its_noise_and_the_source_of_the_noise() -> None:
    old = host(figures=[("S1", figure(100.0, sigma=0.01, runs=4))])
    (change,) = changes({"h1": old}, {"h1": host(figures=[("S1", figure(90.0))])})
    assert (change.share, change.noise) == (-0.1, pytest.approx(0.0447, abs=1e-4))
    assert change.basis == "4 × its own noise, 1.1 % (sigma) over 4 runs"
    assert "0.1 kB/s → 0.09 kB/s (-10 %), beyond 4.47 % noise" in change.text
    (of_one_run,) = changes({"h1": host(figures=[("S1", figure(100.0))])}, {"h1": host(figures=[("S1", figure(90.0))])})
    assert of_one_run.basis == "criterion c-memory; own noise unknown"


def test_figures_of_a_replaced_gpu_are_not_compared() -> None:
    old = {"h1": host(["A"], [("A", figure(100.0))])}
    assert listed_changes(old, {"h1": host(["B"], [("B", figure(50.0))])}) == [("replaced", "h1", "gpu=0")]


def test_figures_of_a_moved_gpu_are_compared_on_its_new_host() -> None:
    old = {"h1": host(["A"], [("A", figure(100.0))]), "h2": host(["B"], [("B", figure(100.0))])}
    new = {"h1": host(["B"], [("B", figure(50.0))]), "h2": host(["A"], [("A", figure(100.0))])}
    assert listed_changes(old, new) == [
        ("regressed", "h1", "gpu=0"),
        ("moved", "h1", "gpu=0"),
        ("moved", "h2", "gpu=0"),
    ]


def test_unmeasured_and_new_figures_are_no_regressions() -> None:
    old = host(figures=[("S1", figure(100.0)), ("S1", figure(9.0, name="stress.throughput"))])
    new = host(figures=[("S1", figure(100.0)), ("S1", figure(9.0, name="gemm.throughput"))])
    listed = changes({"h1": old}, {"h1": new})
    assert [(item.kind, item.old or item.new) for item in listed] == [("figures_gone", 1), ("figures_new", 1)]
    assert not any(item.counts for item in listed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"h1": host()}, {"h1": host(figures=[("S1", figure(1.0))])}),
        ({"h1": host()}, {"h1": host(figures=[("", figure(1.0, scope="host"))])}),
        ({"h1": host([]), "h2": host()}, {"h1": host(figures=[("S1", figure(1.0))]), "h2": host([])}),
    ],
    ids=["GPU", "host", "GPU that moved"],
)
def test_figures_of_a_part_that_had_none_before_are_counted(
    old: dict[str, HostState], new: dict[str, HostState]
) -> None:
    assert [(item.host, item.new) for item in changes(old, new) if item.kind == "figures_new"] == [("h1", 1)]


@pytest.mark.parametrize(
    ("serial", "scope", "last_run", "missing"),
    [
        ("S1", "gpu=0,peer=OLD", "r2", 0),
        ("S1", "gpu=0,peer=OLD", "r1", 1),
        ("S1", "gpu=0,peer=S2", "r2", 1),
        ("S1", "gpu=0,partner=h9", "r2", 0),
        ("S1", "gpu=0,partner=h9", "r1", 1),
        ("S1", "gpu=0,partner=h2", "r2", 1),
        ("", "hca=mlx5_9,port=1", "r2", 0),
        ("", "hca=mlx5_9,port=1", "r1", 1),
        ("", "hca=mlx5_0,port=1", "r2", 1),
        ("", "hca=mlx5_9,port=1,partner=h2", "r2", 0),
        ("", "hca=mlx5_0,port=1,partner=h9", "r2", 0),
        ("", "hca=mlx5_0,port=1,partner=h2", "r2", 1),
        ("", "interface=eth9", "r2", 0),
        ("", "interface=eth0", "r2", 1),
        ("S1", "gpu=0", "r2", 1),
        ("", "host", "r2", 1),
        ("", "numa=1", "r2", 1),
    ],
)
def test_missing_figure_of_a_former_part_is_not_counted(serial: str, scope: str, last_run: str, missing: int) -> None:
    """The runs r0 and r1 measured the figure, and the new run did not. `missing`: 1 if the figure counts as missing.

    A part that the new run lacks is a former part only if `last_run`, the last earlier run, did not measure it either (r2).
    The new run has the hosts h1 and h2. The host h1 has the GPUs S1 and S2, the adapter mlx5_0 and the interface eth0.
    """
    kept = figure(100.0, name="memory.bandwidth", runs=3)
    old = host(["S1", "S2"], [("S1", kept), (serial, figure(9.0, name="x", scope=scope, runs=2))], last_run=last_run)
    new = host(["S1", "S2"], [("S1", kept)], labels=frozenset({"gpu=0", "hca=mlx5_0", "port=1", "interface=eth0"}))
    listed = changes({"h1": old, "h2": host(["S3"])}, {"h1": new, "h2": host(["S3"])})
    assert [item.old for item in listed if item.kind == "figures_gone"] == [missing] * bool(missing)


def test_gpu_that_was_not_measured_again_is_listed() -> None:
    old = host(figures=[("S1", figure(100.0)), ("S1", figure(9.0, name="stress.throughput"))])
    (change,) = changes({"h1": old}, {"h1": host()})
    assert (change.kind, change.old, change.is_unreported) == ("figures_gone", 2, True)
    assert not changes({"h1": old}, {"h1": old})


def pairs(slow: str = "", share: float = 0.1) -> dict[str, HostState]:
    """Return three hosts with the bandwidths of each pair of hosts and of their gang (the hosts of one multi-node launch).

    Every bandwidth is 1.0. If `slow` names a host, the bandwidths of its pairs and of the gang are `share`.
    """
    names = ("h1", "h2", "h3")
    return {
        name: host(
            [f"S-{name}"],
            [
                (
                    f"S-{name}",
                    figure(share if slow in (name, partner) else 1.0, name="pairs.bandwidth", scope=f"gpu=0,partner={partner}"),
                )
                for partner in names
                if partner != name
            ]
            + [("", figure(share if slow else 1.0, name="collective.all_reduce.busbw", scope="gang=r1"))],
        )
        for name in names
    }  # fmt: skip


def test_slow_host_is_listed_and_its_partners_are_not() -> None:
    listed = changes(pairs(), pairs("h2"))
    assert [(item.kind, item.host, item.what) for item in listed] == [
        ("regressed", "h2", "collective.all_reduce.busbw"),
        ("regressed", "h2", "pairs.bandwidth"),
    ]
    assert "pairs.bandwidth with h1, h3 changed by -90 %, beyond" in listed[1].text
    assert "gang=r1: collective.all_reduce.busbw" in listed[0].text


@pytest.mark.parametrize(
    ("name", "unit", "worse", "worst"), [("busbw", "B/s", 80.0, 40.0), ("latency", "s", 150.0, 300.0)]
)
def test_regression_of_a_gang_is_listed_once_with_its_worst_value(
    name: str, unit: str, worse: float, worst: float
) -> None:
    name = f"collective.all_reduce.{name}"

    def hosts(**values: float) -> dict[str, HostState]:
        states = {}
        for each, value in values.items():
            measured = figure(value, name=name, scope="gang=r1")
            states[each] = host(figures=[("", replace(measured, level=replace(measured.level, unit=unit)))])
        return states

    criterion = replace(CRITERIA[0], name=name, unit=unit)
    old, new = hosts(h1=100.0, h2=100.0), hosts(h1=worse, h2=worst)
    (change,) = compare(old, new, {each: [criterion] for each in new}).changes()
    assert (change.kind, change.host, change.new, change.share) == ("regressed", "h2", worst, worst / 100 - 1)


@pytest.mark.parametrize(("name", "unit", "worst"), [("bandwidth", "B/s", 0.5), ("latency", "s", 3.0)])
def test_regression_of_all_pairs_of_a_host_is_listed_once_with_the_worst_value(
    name: str, unit: str, worst: float
) -> None:
    name = f"pairs.{name}"

    def hosts(to_h1: float, to_h3: float) -> dict[str, HostState]:
        partners = {"h1": to_h1, "h3": to_h3}
        measured = [figure(value, name=name, scope=f"gpu=0,partner={each}") for each, value in partners.items()]
        figures = [("S1", replace(item, level=replace(item.level, unit=unit))) for item in measured]
        return {"h2": host(figures=figures)}

    criterion = replace(CRITERIA[0], name=name, unit=unit)
    (change,) = compare(hosts(1.0, 1.0), hosts((1 + worst) / 2, worst), {"h2": [criterion]}).changes()
    assert (change.host, change.scope, change.new, change.share) == ("h2", "host", worst, worst - 1)
    assert "%, beyond 2 % noise (" in change.text
    assert change.text.endswith("the figure did not regress between other hosts")


def test_several_runs_are_merged_into_median_and_spread() -> None:
    runs = [host(figures=[("S1", figure(value))]) for value in (100.0, 101.0, 99.0)]
    for number, state in enumerate(runs):
        for key, measured in state.figures["S1"].items():
            level = replace(measured.level, values={f"r{number}": measured.level.value})
            state.figures["S1"][key] = replace(measured, level=level)  # type: ignore[index]
    (merged,) = merge_states(runs).figures["S1"].values()
    assert merged.level.value == 100.0
    # The standard deviation is 1 % of the median. 0.8862 corrects its bias for three values (STDEV_BIAS).
    assert merged.level.sigma == pytest.approx(0.01 / 0.8862)
    assert merge_states([HostState(has_record=False)]).has_record is False


# --- the command


def test_command_lists_the_changes_and_exits_1_for_regressions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_slow_and_replaced_gpu(record: Record) -> Record:
        return swapped("h2", 1, "S-NEW")(slowed("memory.bandwidth", 0.9, op="copy")(record))

    before, same = run_directory(tmp_path / "before"), run_directory(tmp_path / "same")
    after = run_directory(tmp_path / "after", change=with_slow_and_replaced_gpu)
    assert call("diff", before, same) == 0
    assert "run before → same: 2 hosts, 52 of 52 figures compared: nothing changed" in capsys.readouterr().out
    assert call("diff", before, after, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [(item["kind"], item["host"], item["scope"]) for item in document["changes"]] == [
        ("regressed", "h1", "gpu=0"),
        ("replaced", "h2", "gpu=1"),
    ]
    assert call("diff", before, after, "--markdown") == 1
    assert "| **replaced** | `h2` | `gpu=1` serial `S-NEW` |" in capsys.readouterr().out


def test_diff_exits_0_for_a_run_after_a_replaced_gpu_was_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline of the neighbour keeps its figures with the old GPU as peer. The new GPU has its own baseline."""
    baselines = tmp_path / "baselines"
    standard = builders.plan("h1", "h2", profile="standard", gpu_count=2, rackproof_gang="none")
    settings = standard.stage("benchmark").benchmarks["peer_copy"]
    plan = builders.with_benchmarks(standard, benchmark={"peer_copy": settings})

    def write(name: str, *functions: Callable[[Record], Record]) -> Path:
        def change(record: Record) -> Record:
            for function in functions:
                record = function(record)
            return record

        return run_directory(tmp_path / name, change=change, stages=plan.stages, expected=plan.expected)

    def without_pair(record: Record) -> Record:
        """Remove the figures that GPU 0 of h1 has with its peer."""
        kept = [item for item in record.observations if record.host != "h1" or not item.scope.startswith("gpu=0,peer=")]
        return replace(record, observations=tuple(kept))

    replaced = swapped("h1", 1, "S-NEW")
    for name, changes_of_run in (("r1", ()), ("r2", (replaced,))):
        run = write(name, *changes_of_run)
        assert call("report", run) == 0
        assert call("baseline", "accept", run, "--baseline", baselines) == 0
    assert call("diff", baselines, write("r3", replaced)) == 0, capsys.readouterr().out
    assert call("diff", baselines, write("r4", replaced, without_pair)) == 2
    capsys.readouterr()


def test_diff_exits_2_if_figures_were_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def with_only_stress(record: Record) -> Record:
        return replace(
            record,
            observations=tuple(
                observation for observation in record.observations if observation.name.startswith("stress")
            ),
        )

    before = run_directory(tmp_path / "before")
    assert call("diff", before, run_directory(tmp_path / "less", change=with_only_stress)) == 2
    output = capsys.readouterr().out
    assert re.search(r"^FIGURES GONE +h1 +h1: ", output, re.MULTILINE)
    assert "earlier figures were not measured this time (host_copy.bandwidth, " in output
    slow = slowed("stress.throughput", 0.5)
    assert (
        call("diff", before, run_directory(tmp_path / "both", change=lambda record: slow(with_only_stress(record))))
        == 1
    )
    assert call("diff", tmp_path / "less", before) == 0  # no earlier figure is missing


def report_against_baseline(tmp_path: Path, pattern: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return exit code and report of a run that is compared with the baseline of an earlier run with the same figures.

    Before the comparison, `fields` (field -> new value) are changed in each baseline file that matches the glob `pattern`.
    """
    base = tmp_path / "base"
    good = run_directory(tmp_path / "good")
    assert call("report", good) == 0
    assert call("baseline", "accept", good, "--baseline", base) == 0
    for path in base.glob(pattern):
        document = documents.read(path, "baseline")
        documents.write(path, {**document, **fields})
    after = tmp_path / "after"
    run_directory(after, baseline=baseline_store.snapshot_baseline(base, "gpu", ["h1", "h2"], after))
    return call("report", after), report_of(after)


def test_report_states_how_many_figures_were_compared(tmp_path: Path) -> None:
    code, report = report_against_baseline(tmp_path, "gpus/none.json")  # matches no file: the baseline is unchanged
    (line,) = [line for line in report["acceptance"]["summary"] if line.startswith("Against the accepted records")]
    assert line.endswith(": 52 of 52 figures compared, nothing regressed, same parts")
    assert (code, report["decision"]) == (0, "accepted")


def test_page_of_one_host_has_only_the_changes_of_that_host(tmp_path: Path) -> None:
    good = run_directory(tmp_path / "good")
    assert (call("report", good), call("baseline", "accept", good, "--baseline", tmp_path / "base")) == (0, 0)
    after = tmp_path / "after"
    baseline = baseline_store.snapshot_baseline(tmp_path / "base", "gpu", ["h1", "h2"], after)
    run_directory(after, change=slowed("stress.throughput", 0.5), baseline=baseline)
    for name, counts in (("h1", "1 regressed"), ("h2", "nothing regressed, same parts")):
        page = report_on_host(load(after), read_packs([]), name, jobs=1)
        (line,) = [line for line in page.acceptance.summary if line.startswith("Against the accepted records")]
        assert line.endswith(f": 26 of 26 figures compared, {counts}")
        assert {change.host for change in page.changes} <= {name}
        assert any(change.counts for change in page.changes) == (name == "h1")


def test_every_gpu_is_inconclusive_if_the_baseline_has_no_figures(tmp_path: Path) -> None:
    code, report = report_against_baseline(tmp_path, "gpus/*.json", figures=[])
    (line,) = [line for line in report["acceptance"]["summary"] if line.startswith("Against the accepted records")]
    assert line.endswith(": 0 of 52 figures compared, no earlier figures")
    assert (code, report["decision"]) == (2, "incomplete")
    not_passed = [item for item in report["verdicts"] if item["verdict"] != "pass"]
    assert [(item["host"], item["scope"], item["verdict"], item["criterion"]) for item in not_passed] == [
        (name, f"gpu={index}", "inconclusive", "baseline") for name in ("h1", "h2") for index in (0, 1)
    ]
    assert not_passed[0]["reason"].startswith("the accepted record of serial h1-0 has none of the figures")


def test_only_the_gpu_without_baseline_figures_is_inconclusive(tmp_path: Path) -> None:
    code, report = report_against_baseline(tmp_path, "gpus/h2-1.json", figures=[])
    not_passed = [item for item in report["verdicts"] if item["verdict"] != "pass"]
    assert (code, [(item["host"], item["scope"]) for item in not_passed]) == (2, [("h2", "gpu=1")])


def test_run_with_skipped_benchmarks_is_not_accepted_as_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [
        BenchmarkChoice(stage="benchmark", benchmark=name, chosen=name != "gemm", cost_s=1, why="")
        for name in ("memory", "gemm")
    ]
    run = run_directory(tmp_path / "r1", choice=BudgetSelection(budget_s=60, cost_s=20, runs=0, items=tuple(items)))
    assert call("report", run) == 0
    capsys.readouterr()
    assert call("baseline", "accept", run, "--baseline", tmp_path / "base") == 2
    assert (
        "run r1 skipped tests of the profile smoke because of rackproof_budget_s: gemm (benchmark)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "base").exists()


def test_change_within_the_scatter_of_several_earlier_runs_is_no_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = [
        run_directory(tmp_path / f"run{number}", change=slowed("memory.bandwidth", share, op="copy"))
        for number, share in enumerate((1.0, 1.02, 0.98))
    ]
    after = run_directory(tmp_path / "after", change=slowed("memory.bandwidth", 0.96, op="copy"))
    assert call("diff", earlier[0], after) == 1
    assert call("diff", *earlier, after) == 0
    capsys.readouterr()
    assert call("diff", earlier[0], earlier[0], after) == 64
    assert "is given twice" in capsys.readouterr().err


def test_diff_of_runs_that_cannot_be_compared_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_directory(tmp_path / "a", hosts=["h1"]), run_directory(tmp_path / "b", hosts=["h9"])
    assert call("diff", first, second) == 2
    assert "no host, part and figure in common" in capsys.readouterr().err
    assert call("diff", first, run_directory(tmp_path / "c", hosts=["h1"], simulated=False, rehearsal=True)) == 2
    assert call("diff", tmp_path / "nowhere", first) == 2
    assert call("diff", first) == 64
