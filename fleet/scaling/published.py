"""Figures as published by the GKE experiment ("GKE GPU Experiment Testing": V100, PyTorchJob, Fashion-MNIST)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.scaling.outcome import Row

DATA = "fashion-mnist"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One of its runs."""

    nodes: int
    gpus: int
    """That each of its workers asked for."""
    machine: str
    epochs: int
    batch_size: int
    seconds: float
    accuracy: float
    loss: float


_SMALL, _LARGE = "n1-standard-4", "n1-standard-16"


def _run(
    nodes: int, gpus: int, machine: str, epochs: int, batch_size: int, seconds: float, accuracy: float, loss: float
) -> Published:
    return Published(
        nodes=nodes,
        gpus=gpus,
        machine=machine,
        epochs=epochs,
        batch_size=batch_size,
        seconds=seconds,
        accuracy=accuracy,
        loss=loss,
    )


RUNS: Sequence[Published] = (
    _run(1, 2, _SMALL, 1, 64, 153.741, 0.7317, 0.6655),
    _run(1, 2, _SMALL, 2, 64, 294.787, 0.7685, 0.5843),
    _run(1, 2, _LARGE, 1, 64, 38.602, 0.7322, 0.6646),
    _run(1, 2, _LARGE, 8, 64, 65.67, 0.7322, 0.6646),
    _run(1, 2, _LARGE, 8, 128, 57.146, 0.8470, 0.4273),
    _run(2, 4, _LARGE, 8, 128, 96.533, 0.8473, 0.4280),
    _run(2, 4, _LARGE, 10, 128, 80.745, 0.8638, 0.3840),
    _run(2, 4, _LARGE, 20, 128, 140.677, 0.8849, 0.3264),
    _run(4, 4, _LARGE, 8, 128, 102.795, 0.8502, 0.4259),
    _run(4, 4, _LARGE, 10, 128, 87.389, 0.8635, 0.3842),
    _run(4, 4, _LARGE, 20, 128, 152.848, 0.8850, 0.3262),
)
"""In its order. The fourth has the accuracy and the loss of the third, at eight times the epochs; its author wondered, too."""


def ours(run: Published, rows: Sequence[Row]) -> Row | None:
    """Our cell with the same epochs and batch on as many hosts, else on the most alike; None where none was measured.

    Ours must have been of Fashion-MNIST and gone through all of it. Where theirs had too few CPUs, ours must have had few as
    well, and the other way round.
    """
    starved = run.machine == _SMALL
    like = [
        row
        for row in rows
        if row.data == DATA
        and not row.cut
        and (row.cell.epochs, row.cell.batch_size, row.cell.precision) == (run.epochs, run.batch_size, "fp32")
        and bool(row.cell.cpus) == starved
    ]
    return min(like, key=lambda row: (abs(row.cell.hosts - run.nodes), abs(row.cell.gpus - run.gpus)), default=None)
