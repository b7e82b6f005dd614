"""A scaling study: the same training with each combination of settings, such as the number of hosts. A combination is a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORKLOAD = "scaling"
"""The benchmark that every cell runs."""
MOST_CELLS = 100
"""Maximum number of cells, which limits the size of a record."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One launch of a study: its number of hosts and GPUs, and its settings."""

    hosts: int
    gpus: int
    """GPUs of each host; in a rehearsal, processes."""
    batch_size: int
    """Images for each rank and step."""
    epochs: int
    cpus: int
    """Processors that each rank may use; 0: all of its host."""
    precision: str

    @property
    def ranks(self) -> int:
        """Number of ranks of all hosts."""
        return self.hosts * self.gpus

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the benchmark."""
        return {"batch_size": self.batch_size, "epochs": self.epochs, "precision": self.precision}

    @property
    def series(self) -> tuple[int, int, int, str]:
        """The key shared by cells that differ only in hosts and GPUs."""
        return self.batch_size, self.epochs, self.cpus, self.precision


@dataclass(frozen=True, kw_only=True)
class Study:
    """The cells in the order of measurement, and the limits of cost and time."""

    cells: tuple[Cell, ...]
    price: float = 0.0
    """Price of a host for an hour; 0: unknown."""
    currency: str = ""
    stop_cost: float = 0.0
    """No further cell starts when the previous cells have reached this cost; 0: no limit."""
    stop_hours: float = 0.0
    """No further cell starts when the previous cells have taken this many hours; 0: no limit."""


def study_from_json(document: Mapping[str, Any]) -> Study:
    """Return the study of a plan."""
    return Study(**{**document, "cells": tuple(Cell(**cell) for cell in document["cells"])})
