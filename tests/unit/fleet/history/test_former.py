"""Earlier causes and figures of parts and hosts, without those of the run itself."""

from __future__ import annotations

from pathlib import Path

from fleet.history.database import History
from fleet.history.former import NEWEST, former_causes, former_figures
from fleet.history.lemons import lemons
from schemas.baselines import SIMULATED
from tests.histories import Planted


def test_former_causes_of_a_part_and_of_a_host(fleet: tuple[Planted, Path]) -> None:
    history = History(fleet[1], SIMULATED)
    part, slot, host = (next(item for item in lemons(history) if item.is_lemon and item.kind == kind)
                        for kind in ("part", "slot", "host"))  # fmt: skip
    found = former_causes(history, [part.id, "unknown"], [host.id])
    assert {name: len(causes) for name, causes in found.items()} == {part.id: 5, host.id: 5}
    assert [cause.began for cause in found[part.id]] == sorted((cause.began for cause in found[part.id]), reverse=True)
    assert {(cause.problem, cause.slot) for cause in found[host.id]} == {("power-supply", "")}
    newest = history.rows("select nonce from runs where run = $run", {"run": found[part.id][0].run})[0][0]
    assert len(former_causes(history, [part.id], without_run=newest)[part.id]) == 4
    assert former_causes(history, slot.serials[:1], [slot.host]).keys() == {slot.serials[0]}, (
        "a GPU's failure is not the host's"
    )


def test_former_figures_of_a_part_and_of_a_host(fleet: tuple[Planted, Path]) -> None:
    history = History(fleet[1], SIMULATED)
    part = next(item for item in lemons(history) if item.kind == "part" and item.is_lemon)
    found = former_figures(history, [part.id], [part.host], without_run=f"{19:032x}")
    assert {key[0] for key in found} == {part.id, part.host}
    assert {key[1] for key in found if key[0] == part.host} == {"collective.all_reduce.busbw"}
    values = found[(part.id, "memory.bandwidth", "op=copy", "benchmark", "")]
    assert len(values) == 19 <= NEWEST
    assert values[0].began > values[-1].began
    assert {item.accepted for item in values} == {True, False}
    assert former_figures(history, []) == {}
