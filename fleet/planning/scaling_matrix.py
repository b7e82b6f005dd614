"""Expand the matrix of a scaling study into cells. A cell is one launch: one value for each axis, such as `gpus: 4`."""

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
"""Keys of an item (block) of the matrix. The cells of a block are ordered by these axes; the last axis varies fastest."""
NOT_WITH_A_STUDY = {
    "rackproof_epochs": "the matrix of a study sets the epochs",
    "rackproof_batch_size": "the matrix of a study sets the batch sizes",
    "rackproof_validation_only": "a study runs training",
}
"""Variable of the inventory -> why it cannot be set for a study, as a part of an error message."""


def study_of(profile: Mapping[str, Any], variables: Variables) -> Study | None:
    """Return the study of a profile, or None if it has none.

    Raises:
        UsageError: the profile has anything but the stage `gang` with the benchmark WORKLOAD, or sets `may_choose: true`; the
            matrix has more than MOST_CELLS cells; the study has a cost limit, but no price; or the inventory sets a variable of
            NOT_WITH_A_STUDY.
    """
    study = profile.get("study")
    if not study:
        return None
    where = f"profile {profile['name']}"
    stages = [f"{stage}: {', '.join(sorted(content['benchmarks']))}" for stage, content in profile["stages"].items()]
    if stages != [f"gang: {WORKLOAD}"]:
        raise UsageError(
            f"{where} has a study and runs {'; '.join(stages)}: a study has only the stage gang "
            f"with the benchmark {WORKLOAD}"
        )
    if profile.get("may_choose", False):
        raise UsageError(
            f"{where} has a study and `may_choose: true`, but a study runs all of its cells: remove `may_choose`"
        )
    for name, why in NOT_WITH_A_STUDY.items():
        if variables.get(name):
            raise UsageError(f"{name} is {variables[name]!r}, but {where} is a study: {why}; remove the variable")
    price, stop = study.get("price", {}), study.get("stop", {})
    if "cost" in stop and not price:
        raise UsageError(
            f"{where}: study.stop.cost is {stop['cost']:g}, but there is no price: "
            "add study.price.per_host_hour, or use study.stop.hours"
        )
    blocks = _axis_values(study["matrix"], settings(WORKLOAD, profile["stages"]["gang"]["benchmarks"][WORKLOAD]))
    # Count the cells before building them: a typing error can give millions. `listed` counts a cell once for each block that has
    # it. If it is more than the bound below, one block alone has more than MOST_CELLS cells.
    listed = sum(math.prod(map(len, block)) for block in blocks)
    cells = _cells(blocks) if listed <= len(blocks) * MOST_CELLS else ()
    if (count := len(cells) or listed) > MOST_CELLS:
        raise UsageError(
            f"{where}: the matrix has {count} cells; the maximum is {MOST_CELLS}: shorten its lists, or split it into two studies"
        )
    return Study(
        cells=cells,
        price=float(price.get("per_host_hour", 0.0)),
        currency=str(price.get("currency", "")),
        stop_cost=float(stop.get("cost", 0.0)),
        stop_hours=float(stop.get("hours", 0.0)),
    )


def _axis_values(matrix: list[Mapping[str, Any]], workload: Mapping[str, Any]) -> list[list[list[Any]]]:
    """Return, for each block of the matrix, the distinct values of each axis in the order of AXES.

    A value such as `2.0` becomes 2: the schema accepts it as an integer.
    """
    defaults = {"hosts": 1, "cpus": 0, **workload}

    def values_of(block: Mapping[str, Any], axis: str) -> list[Any]:
        values = dict.fromkeys(block.get(axis, [defaults.get(axis)]))
        return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]

    return [[values_of(block, axis) for axis in AXES] for block in matrix]


def _cells(blocks: list[list[list[Any]]]) -> tuple[Cell, ...]:
    """Return the cells of all blocks: every combination of the values of a block, without duplicates."""
    cells: dict[Cell, None] = {}
    for block in blocks:
        for values in itertools.product(*block):
            cells[Cell(**dict(zip(AXES, values, strict=True)))] = None
    return tuple(cells)
