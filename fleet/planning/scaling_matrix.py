"""The study in a profile -> its cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from fleet.inventory.ansible import Variables
from schemas.catalogue import settings
from schemas.errors import UsageError
from schemas.studies import MOST_CELLS, WORKLOAD, Cell, Study

AXES = ("hosts", "gpus", "cpus", "precision", "batch_size", "epochs")
"""The last one runs fastest."""
NOT_WITH_A_STUDY = {
    "rackproof_epochs": "its matrix has epochs",
    "rackproof_batch_size": "its matrix has batch sizes",
    "rackproof_validation_only": "it is a training",
}


def study_of(profile: Mapping[str, Any], variables: Variables) -> Study | None:
    """The study that a profile asks for; None where it asks for none.

    Raises:
        UsageError: it has other stages or benchmarks than a study's, more cells than there is room for, a limit in money without
            a price, or the operator chose what its matrix chooses.
    """
    asked = profile.get("study")
    if not asked:
        return None
    where = f"profile {profile['name']}"
    ran = [f"{stage}: {', '.join(sorted(content['benchmarks']))}" for stage, content in profile["stages"].items()]
    if ran != [f"gang: {WORKLOAD}"]:
        raise UsageError(
            f"{where} has a study and runs {'; '.join(ran)}: a study has the stage gang with the benchmark {WORKLOAD} alone"
        )
    if profile.get("may_choose", False):
        raise UsageError(
            f"{where}: may_choose: true: a study runs every cell that there is room for; take the line out"
        )
    for name, why in NOT_WITH_A_STUDY.items():
        if variables.get(name):
            raise UsageError(f"{name} is {variables[name]!r} and {where} is a study: {why}; leave the variable out")
    price, stop = asked.get("price", {}), asked.get("stop", {})
    if "cost" in stop and not price:
        raise UsageError(
            f"{where}: study.stop.cost is {stop['cost']:g} and no price is given: add study.price.per_host_hour, or stop by hours"
        )
    lists = _lists(asked["matrix"], settings(WORKLOAD, profile["stages"]["gang"]["benchmarks"][WORKLOAD]))
    # Counted before they are made: a slip of the hand is soon millions of cells.
    largest = max(math.prod(map(len, block)) for block in lists)
    cells = _cells(lists) if largest <= MOST_CELLS else ()
    if (count := max(len(cells), largest)) > MOST_CELLS:
        raise UsageError(
            f"{where}: the matrix has {count} cells, {MOST_CELLS} at most: shorten its lists, or make two studies of it"
        )
    return Study(
        cells=cells,
        price=float(price.get("per_host_hour", 0.0)),
        currency=str(price.get("currency", "")),
        stop_cost=float(stop.get("cost", 0.0)),
        stop_hours=float(stop.get("hours", 0.0)),
    )


def _lists(matrix: list[Mapping[str, Any]], chosen: Mapping[str, Any]) -> list[list[list[Any]]]:
    """Block by block and axis by axis, what is written there, each value once; `2.0`, an integer to the schema, as 2."""
    others = {"hosts": 1, "cpus": 0, **chosen}

    def of(block: Mapping[str, Any], axis: str) -> list[Any]:
        values = dict.fromkeys(block.get(axis, [others.get(axis)]))
        return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]

    return [[of(block, axis) for axis in AXES] for block in matrix]


def _cells(lists: list[list[list[Any]]]) -> tuple[Cell, ...]:
    """Return every combination of each block, in order and without duplicates."""
    result: dict[Cell, None] = {}
    for block in lists:
        for values in itertools.product(*block):
            result[Cell(**dict(zip(AXES, values, strict=True)))] = None
    return tuple(result)
