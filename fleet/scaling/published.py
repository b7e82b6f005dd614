"""Compare a scaling study with the published runs of "GKE GPU Experiment Testing" (V100, PyTorchJob, Fashion-MNIST)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.scaling.results import CellResult

DATASET = "fashion-mnist"


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run of the GKE experiment."""

    nodes: int
    """Number of nodes, which is compared with the hosts of a cell."""
    gpus: int
    """GPUs that each worker requested."""
    machine: str
    """GCE machine type of the nodes."""
    epochs: int
    batch_size: int
    seconds: float
    """How long the program ran in its pod."""
    accuracy: float
    loss: float


_FEW_CPUS, _MANY_CPUS = "n1-standard-4", "n1-standard-16"


def _run(
    nodes: int, gpus: int, machine: str, epochs: int, batch_size: int, seconds: float, accuracy: float, loss: float
) -> PublishedRun:
    return PublishedRun(
        nodes=nodes,
        gpus=gpus,
        machine=machine,
        epochs=epochs,
        batch_size=batch_size,
        seconds=seconds,
        accuracy=accuracy,
        loss=loss,
    )


RUNS: Sequence[PublishedRun] = (
    _run(1, 2, _FEW_CPUS, 1, 64, 153.741, 0.7317, 0.6655),
    _run(1, 2, _FEW_CPUS, 2, 64, 294.787, 0.7685, 0.5843),
    _run(1, 2, _MANY_CPUS, 1, 64, 38.602, 0.7322, 0.6646),
    _run(1, 2, _MANY_CPUS, 8, 64, 65.67, 0.7322, 0.6646),
    _run(1, 2, _MANY_CPUS, 8, 128, 57.146, 0.8470, 0.4273),
    _run(2, 4, _MANY_CPUS, 8, 128, 96.533, 0.8473, 0.4280),
    _run(2, 4, _MANY_CPUS, 10, 128, 80.745, 0.8638, 0.3840),
    _run(2, 4, _MANY_CPUS, 20, 128, 140.677, 0.8849, 0.3264),
    _run(4, 4, _MANY_CPUS, 8, 128, 102.795, 0.8502, 0.4259),
    _run(4, 4, _MANY_CPUS, 10, 128, 87.389, 0.8635, 0.3842),
    _run(4, 4, _MANY_CPUS, 20, 128, 152.848, 0.8850, 0.3262),
)
"""In the published order. The fourth run (8 epochs) has the same accuracy and loss as the third (1 epoch), as published."""


def closest_cell(run: PublishedRun, rows: Sequence[CellResult]) -> CellResult | None:
    """Return the cell with which the published run is compared; None if no cell is comparable.

    A comparable cell trained on Fashion-MNIST in fp32 with the same epochs and batch size, and completed its epochs. If the run
    was on n1-standard-4, which has few CPUs, the CPUs of the cell must be limited; otherwise they must not be.

    Of the comparable cells, those with the closest number of hosts are preferred, and of these the one with the closest number
    of GPUs per host.
    """
    has_few_cpus = run.machine == _FEW_CPUS
    comparable = [
        row
        for row in rows
        if row.data == DATASET
        and not row.cut
        and (row.cell.epochs, row.cell.batch_size, row.cell.precision) == (run.epochs, run.batch_size, "fp32")
        and bool(row.cell.cpus) == has_few_cpus
    ]
    return min(
        comparable, key=lambda row: (abs(row.cell.hosts - run.nodes), abs(row.cell.gpus - run.gpus)), default=None
    )
