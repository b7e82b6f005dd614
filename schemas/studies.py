"""A scaling study: the same training on more and more hosts and GPUs, cell by cell of a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORKLOAD = "scaling"
"""The benchmark that every cell runs."""
MOST_CELLS = 100
"""What a record has room for."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One launch: who takes part, and with which settings."""

    hosts: int
    gpus: int
    """Of each host; in a rehearsal, processes."""
    batch_size: int
    """Images a rank and step."""
    epochs: int
    cpus: int
    """That each rank may use; 0: whatever its host has."""
    precision: str

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.gpus

    @property
    def settings(self) -> dict[str, Any]:
        """Of the benchmark."""
        return {"batch_size": self.batch_size, "epochs": self.epochs, "precision": self.precision}

    @property
    def series(self) -> tuple[int, int, int, str]:
        """What cells have in common that differ in hosts and GPUs alone."""
        return self.batch_size, self.epochs, self.cpus, self.precision


@dataclass(frozen=True, kw_only=True)
class Study:
    """The cells in the order in which they are measured, and when it ends before the last."""

    cells: tuple[Cell, ...]
    price: float = 0.0
    """Of a host for an hour; 0: nobody said."""
    currency: str = ""
    stop_cost: float = 0.0
    """No cell is begun once those before it have cost so much; 0: no limit."""
    stop_hours: float = 0.0
    """The same of the time that they took."""


def study_from_json(document: Mapping[str, Any]) -> Study:
    """The study of a plan."""
    return Study(**{**document, "cells": tuple(Cell(**cell) for cell in document["cells"])})
