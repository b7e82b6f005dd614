"""Write the history of a simulated fleet with known faults to a history store.

    .venv/bin/python -m tests.histories /tmp/fleet --racks 40 --hosts 8 --gpus 8 --months 24

This command writes the history, queries it, and prints the planted faults and the faults that the queries find. If they differ,
it exits with 1.

The figures of each GPU, host and rack deviate by a constant factor from the average, and each run adds noise. The figure
`stress.throughput` varies with the season. GPUs fail at random and are replaced. In addition, these faults are planted:

- GPUs that become slower with age, and a GPU that becomes slower in one step
- a GPU that fails again and again, and a slot in which the replacement GPUs fail too
- a host with repeated power supply failures, one that repeatedly loses all its GPUs, and one that repeatedly loses a DIMM
- a rack that becomes slower and repeatedly loses power
- driver updates that change figures
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fleet.history.database import History
from fleet.history.driver_effects import CLEAR, driver_effects
from fleet.history.lemons import lemons
from fleet.history.rows import HostRows, RunRows
from fleet.history.store import add_run
from fleet.history.trends import drifts
from schemas.baselines import SIMULATED

MODEL = "NVIDIA H200"
START = datetime(2024, 1, 15, 6)
DRIVERS = ("560.35.03", "570.86.15", "580.65.06")
FIGURES = {
    "gemm.throughput": ("dtype=bf16 size=8192", "FLOP/s", 7.1e14),
    "memory.bandwidth": ("op=copy", "B/s", 4.2e12),
    "stress.throughput": ("dtype=bf16", "FLOP/s", 6.4e14),
    "host_copy.bandwidth": ("direction=host_to_device sharing=alone", "B/s", 5.5e10),
}
"""Figure of each GPU -> settings, unit, and average level in this unit."""
HOST_FIGURE = ("collective.all_reduce.busbw", "dtype=fp32 size_bytes=8589934592", "B/s", 4.7e11)
DRIVER_EFFECTS = {  # figure, old driver, new driver -> relative change of the figure
    ("gemm.throughput", DRIVERS[0], DRIVERS[1]): 0.02,
    ("memory.bandwidth", DRIVERS[1], DRIVERS[2]): -0.015,
}
AGING_PER_YEAR, RACK_DRIFT_PER_YEAR, STEP = -0.06, -0.05, -0.04
"""Changes of ln(figure): per year for an aging GPU, per year for the rack that becomes slower, once for the GPU with a step."""
FAILURES_PER_YEAR = 0.01
"""Random failures per GPU and year."""


@dataclass(kw_only=True)
class Faults:
    """Faults of a history. Those that were planted must equal those that the queries find."""

    drifts: dict[tuple[str, str], str] = field(default_factory=dict)
    """(`gpu`, serial) or (`rack`, name) -> `drift` or `step`."""
    lemons: set[tuple[str, str]] = field(default_factory=set)
    """Kind and id of each lemon: a `part`, `slot`, `host` or `rack` that fails again and again."""
    effects: set[tuple[str, str, str]] = field(default_factory=lambda: set(DRIVER_EFFECTS))
    """Figure, old driver and new driver of each driver update that changed the figure."""


SMALLEST = {"racks": 6, "hosts": 3, "gpus": 4, "months": 1}
"""The smallest fleet that has a place for each planted fault. In a short history, the queries do not find all faults."""


class FleetHistory:
    """A simulated fleet that yields its runs month by month."""

    def __init__(self, *, racks: int, hosts: int, gpus: int, months: int, seed: int = 0) -> None:
        self.racks, self.hosts, self.gpus, self.months = racks, hosts, gpus, months
        self._random = random.Random(seed)  # noqa: S311
        self._levels: dict[str, float] = {}
        self._serial_count = 0
        self.serials = {place: self._new_serial() for place in self._places()}
        self.planted = Faults()
        self._plant()

    def _places(self) -> Iterator[tuple[str, str]]:
        for rack in range(self.racks):
            for host in range(self.hosts):
                for gpu in range(self.gpus):
                    yield f"r{rack:02}-h{host:02}", f"gpu={gpu}"

    def _new_serial(self) -> str:
        self._serial_count += 1
        return f"16528{self._serial_count:08}"

    def _plant(self) -> None:
        """Choose the faulty parts, in six racks."""
        racks = self._random.sample(range(self.racks), 6)
        aging = [(f"r{racks[0]:02}-h{host:02}", f"gpu={host}") for host in (0, 1)] + [(f"r{racks[1]:02}-h01", "gpu=2")]
        self._aging = {self.serials[place] for place in aging}
        self._stepped = self.serials[(f"r{racks[2]:02}-h00", "gpu=1")]
        self._rack = f"r{racks[3]:02}"
        self._lemon = self.serials[(f"r{racks[4]:02}-h00", "gpu=0")]
        self._bad_slot = (f"r{racks[4]:02}-h01", "gpu=3")
        self._bad_host = f"r{racks[5]:02}-h02"
        self.planted.drifts = {
            **{("gpu", serial): "drift" for serial in self._aging},
            ("gpu", self._stepped): "step",
            ("rack", self._rack): "drift",
        }
        self._bus_host, self._dimm = f"r{racks[2]:02}-h01", (f"r{racks[1]:02}-h00", "dimm=A1")
        self.planted.lemons = {
            ("part", self._lemon), ("slot", " ".join(self._bad_slot)), ("host", self._bad_host),
            ("host", self._bus_host), ("slot", " ".join(self._dimm)), ("rack", self._rack),
        }  # fmt: skip
        planted_serials = {self._lemon, self._stepped, *self._aging}
        self._without_random_failures = {
            place for place, serial in self.serials.items() if serial in planted_serials
        } | {self._bad_slot}

    def _level(self, key: str, sigma: float) -> float:
        """Return how much one GPU, host or rack adds to ln(figure). `key` has its name, and the name of the figure.

        The first call with a key draws the value at random.
        """
        if key not in self._levels:
            self._levels[key] = self._random.gauss(0, sigma)
        return self._levels[key]

    def _driver(self, rack: int, month: int) -> str:
        """Return the driver of a rack. Every second rack gets a new driver one month later than the others."""
        late = rack % 2
        return DRIVERS[(month >= self.months // 3 + late) + (month >= 2 * self.months // 3 + late)]

    def rack_runs(self) -> Iterator[RunRows]:
        """Yield one run a month for each rack, as in a fleet that is re-validated rack by rack."""
        for number, rows in enumerate(self.runs()):
            for rack in range(self.racks):
                name = f"r{rack:02}"
                yield replace(
                    rows,
                    nonce=f"{number * self.racks + rack:032x}",
                    entry={**rows.entry, "run": f"{rows.entry['run']}-{name}", "hosts": self.hosts},
                    causes=tuple(cause for cause in rows.causes if cause["rack"] == name),
                    hosts=iter(tuple(rows.hosts)[rack * self.hosts : (rack + 1) * self.hosts]),
                )

    def runs(self) -> Iterator[RunRows]:
        """Yield one run a month over the whole fleet."""
        for month in range(self.months):
            causes = list(self._causes(month))
            failed = {cause["host"] for cause in causes}
            hosts = [self._host(rack, host, month, failed) for rack in range(self.racks) for host in range(self.hosts)]
            began = START + timedelta(days=30.4 * month)
            yield RunRows(
                kind=SIMULATED,
                nonce=f"{month:032x}",
                entry={
                    "run": f"fleet-{began:%Y%m%d}", "began": f"{began:%Y-%m-%d %H:%M:%S}",
                    "ended": f"{began + timedelta(minutes=8):%Y-%m-%d %H:%M:%S}", "profile": "standard",
                    "decision": "rejected" if causes else "accepted", "rackproof": "2.0.0", "hosts": len(hosts),
                    "gpus": len(hosts) * self.gpus, "notes": [],
                },
                causes=tuple(causes),
                hosts=tuple(hosts),
            )  # fmt: skip
            self._repair(causes)

    def _causes(self, month: int) -> Iterator[dict[str, Any]]:
        failing = {place for place in self.serials
                   if place not in self._without_random_failures and self._random.random() < FAILURES_PER_YEAR / 12}  # fmt: skip
        for place, serial in self.serials.items():
            is_lemon = serial == self._lemon and month % 4 == 1
            is_bad_slot = place == self._bad_slot and month % 4 == 2
            if place in failing or is_lemon or is_bad_slot:
                yield _cause(*place, serial, "gpu-memory", "rma")
            elif month % 4 == 2 and place[0] == self._bus_host:
                yield _cause(*place, serial, "gpu-missing", "reboot")
        if month % 4 == 3:
            yield _cause(self._bad_host, "", "", "power-supply", "inspect_hardware")
        if month % 5 == 4:
            for host in range(self.hosts):
                yield _cause(f"{self._rack}-h{host:02}", "", "", "power-lost", "inspect_hardware")
        if month % 4 == 0:
            yield _cause(*self._dimm, "", "dimm-missing", "reseat")
        # A wrong setting in every run: the queries must not report the host as a lemon.
        yield _cause("r00-h00", "", "", "wrong-setting", "configure")

    def _repair(self, causes: list[dict[str, Any]]) -> None:
        """Replace the GPUs to be returned (`rma`), except the planted lemon, which passes again without a repair."""
        for cause in causes:
            if cause["action"] == "rma" and cause["serial"] != self._lemon:
                self.serials[(cause["host"], cause["slot"])] = self._new_serial()

    def _host(self, rack: int, number: int, month: int, failed: set[str]) -> HostRows:
        name, years, driver = f"r{rack:02}-h{number:02}", month / 12, self._driver(rack, month)
        decision = "rejected" if name in failed else "accepted"
        place = {"host": name, "rack": name[:3], "model": MODEL, "driver": driver}
        parts = [{**place, "slot": "", "serial": f"S-{name}", "part": "host", "decision": decision}]
        figures = []
        for index in range(self.gpus):
            slot = f"gpu={index}"
            serial = self.serials[(name, slot)]
            parts.append({**place, "slot": slot, "serial": serial, "part": "gpu", "decision": decision})
            for figure, (settings, unit, level) in FIGURES.items():
                change = self._change(figure, serial, name, driver, years, month)
                figures.append(_figure(place, slot, serial, figure, settings, unit, level * math.exp(change), decision))
        figure, settings, unit, level = HOST_FIGURE
        noise = self._level(f"{name} {figure}", 0.005) + self._random.gauss(0, 0.003)
        figures.append(_figure(place, "", "", figure, settings, unit, level * math.exp(noise), decision))
        test = {
            "host": name,
            "stage": "benchmark",
            "benchmark": "gemm",
            "measured": True,
            "failed": False,
            "seconds": 5.0,
        }
        return HostRows(parts=tuple(parts), figures=tuple(figures), tests=(test,))

    def _change(self, figure: str, serial: str, host: str, driver: str, years: float, month: int) -> float:
        """Return ln(figure of this GPU / its average level in FIGURES)."""
        change = self._level(f"{serial} {figure}", 0.008) + self._level(f"{host} {figure}", 0.004)
        change += self._level(f"{host[:3]} {figure}", 0.004) + self._random.gauss(0, 0.003)
        change += sum(math.log1p(effect) for (name, _, new), effect in DRIVER_EFFECTS.items()
                      if name == figure and DRIVERS.index(driver) >= DRIVERS.index(new))  # fmt: skip
        if figure == "stress.throughput":
            change -= 0.02 * math.sin(2 * math.pi * years) ** 2  # the season
            change += RACK_DRIFT_PER_YEAR * years * (host[:3] == self._rack)
        if figure in ("gemm.throughput", "stress.throughput"):
            change += AGING_PER_YEAR * years * (serial in self._aging)
        if figure == "memory.bandwidth":
            change += STEP * (serial == self._stepped and month >= self.months // 2)
        return change


def _cause(host: str, slot: str, serial: str, problem: str, action: str) -> dict[str, Any]:
    title = f"{host} {slot}: {problem}"
    return {"host": host, "rack": host[:3], "slot": slot, "serial": serial, "problem": problem, "title": title, "action": action,
            "severity": "critical", "confidence": "certain", "waived": False}  # fmt: skip


def _figure(place: dict[str, str], slot: str, serial: str, name: str, settings: str, unit: str, value: float,
            decision: str) -> dict[str, Any]:  # fmt: skip
    return {**place, "slot": slot, "serial": serial, "name": name, "stage": "benchmark", "within": "", "settings": settings,
            "unit": unit, "value": value, "accepted": decision == "accepted"}  # fmt: skip


def found_faults(history: History) -> Faults:
    """Return the faults that the queries of the history find."""
    return Faults(
        drifts={(item.level, item.id): item.shape for item in drifts(history)},
        lemons={(item.kind, item.id) for item in lemons(history) if item.is_lemon},
        effects={(item.name, item.old, item.new) for item in driver_effects(history) if item.finding == CLEAR},
    )


def main() -> int:
    """Write and query a history, and print the planted and the found faults. Return 1 if they differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--rack-runs", action="store_true", help="write one run a month for each rack, instead of one for the fleet"
    )
    defaults = {"racks": 40, "hosts": 8, "gpus": 8, "months": 24, "seed": 0}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for name, least in SMALLEST.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: the planted faults need at least {least}")
    fleet = FleetHistory(
        **{key: value for key, value in vars(options).items() if key not in ("directory", "rack_runs")}
    )
    began = time.monotonic()
    runs = 0
    for rows in fleet.rack_runs() if options.rack_runs else fleet.runs():
        add_run(options.directory, rows)
        runs += 1
    history = History(options.directory, SIMULATED)
    imported = time.monotonic()
    result = found_faults(history)
    print(f"{options.racks * options.hosts * options.gpus} GPUs, {runs} runs, imported in {imported - began:.1f} s, "
          f"queried in {time.monotonic() - imported:.1f} s")  # fmt: skip
    for name in ("drifts", "lemons", "effects"):
        print(f"{name}:\n  planted {sorted(getattr(fleet.planted, name))}\n  found   {sorted(getattr(result, name))}")
    print("equal" if result == fleet.planted else "DIFFERENT")
    return int(result != fleet.planted)


if __name__ == "__main__":
    sys.exit(main())
