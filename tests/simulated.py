"""Write simulated runs of two hosts of four GPUs, r01-h01 and r01-h02, and change their records."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fleet.simulate.fleet import Fleet, place_faults, write_run

Document = dict[str, Any]


def simulate(run: Path, *faults: str, day: int = 1, change: Callable[[Document], None] = lambda record: None) -> Path:
    """Write a run that began on this day of November 2026; return `run`. `change` changes the JSON of each record.

    Runs with the same name, faults and day are simulated only once in this process.
    """
    for name, content in _contents(run.name, faults, day).items():
        path = run / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(content)
    for path in [*run.glob("hosts/*.json"), *run.glob("gangs/*/*.json")]:
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))
    return run


@cache
def _contents(name: str, faults: tuple[str, ...], day: int) -> dict[str, bytes | None]:
    """Return the path of each file of the run -> its content, and the path of each directory -> None."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / name
        fleet = Fleet(hosts=2, gpus=4, profile="smoke", seed=day)
        plan = fleet.plan(name, f"2026-11-{day:02}T04:00:00Z")
        write_run(run, fleet, place_faults(faults, plan, fleet.seed), plan, jobs=1)
        paths = [run, *sorted(run.rglob("*"))]  # a directory comes before its files
        return {str(path.relative_to(run)): path.read_bytes() if path.is_file() else None for path in paths}


def with_serials(serial_of: Callable[[str], str]) -> Callable[[Document], None]:
    """Return a change of the serials of all GPUs. `serial_of` returns the new serial for a serial of the simulation."""

    def change(record: Document) -> None:
        for gpu in record["gpus"]:
            gpu["serial"] = serial_of(gpu["serial"])
        for snapshot in record["snapshots"]:
            for metric in snapshot["metrics"]:
                if metric["name"] == "gpu.serial":
                    metric["values"] = {scope: serial_of(serial) for scope, serial in metric["values"].items()}

    return change


def own(record: Document) -> None:
    """Change nothing: each GPU keeps its own serial."""


on_boards = with_serials(lambda serial: serial[:-1] + str(int(serial[-1]) // 2 * 2))
"""Give GPUs 0 and 1 of each host one serial, and GPUs 2 and 3 another one, as on GB200 and GB300."""
