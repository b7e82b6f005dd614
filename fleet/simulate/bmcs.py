"""The BMCs of a simulated fleet: the readings of a healthy BMC before the run and after each stage."""

from __future__ import annotations

from typing import Any

from fleet.simulate.records import serial, time_after
from schemas import VERSION
from schemas.plans import Plan, PlannedHost
from schemas.readings import BMC, READINGS
from schemas.records import RECORD_SCHEMA
from schemas.stages import PREFLIGHT

Doc = dict[str, Any]
LOG, FAULTY_SUPPLY = "1.SEL", "PSU2"
NONE = {"host": "unsupported: the BMC reports none"}
STAGE_S = 100.0
"""Seconds between two snapshots of the readings."""


def bmc_record(plan: Plan, host: PlannedHost, number: int) -> Doc:
    """Return the record of the BMC of a healthy host. `number` is the position of the host in the plan."""
    moments = [
        (PREFLIGHT, "before"),
        *((stage.name, "after") for stage in plan.stages if stage.name != "gang" or host.gang),
    ]
    times = [time_after(plan.created, 1.0 + STAGE_S * position) for position in range(len(moments))]
    return {
        "schema": RECORD_SCHEMA,
        "run_id": plan.run_id,
        "nonce": plan.nonce,
        "host": host.name,
        "began": times[0],
        "ended": times[-1],
        "rackproof": VERSION,
        "simulated": True,
        "snapshots": [
            {"stage": stage, "phase": phase, "at": at, "duration_s": 4.0, "metrics": _metrics(host, number)}
            for (stage, phase), at in zip(moments, times, strict=True)
        ],
    }


def _metrics(host: PlannedHost, number: int) -> list[Doc]:
    values: dict[str, Doc] = {
        "bmc.readable": {"host": True},
        "bmc.power_supply.fitted": {"host": 4},
        "bmc.power_supply.health": {f"psu=PSU{supply}": "OK" for supply in range(1, 5)},
        "bmc.power_redundancy.health": {"redundancy=PS_Redundancy": "OK"},
        "bmc.fan.health": {f"fan=FAN{fan}": "OK" for fan in range(1, 7)},
        "bmc.part.health": {"part=system.1": "OK", "part=chassis.1": "OK"},
        "bmc.sensor.alarm": {"sensor=Inlet_Temp": "none"},
        "bmc.inlet.temperature": {"sensor=Inlet_Temp": 24.0},
        "bmc.firmware.version": {"component=BMC": "1.0"},
        "bmc.gpu.serial": {f"processor=GPU_{gpu}": serial(number, gpu) for gpu in host.devices},
        "bmc.log.entries": {f"log={LOG}": 12},
        "bmc.log.newest": {f"log={LOG}": "12 2026-11-03T04:05:06Z"},
        "bmc.log.new_entries": {f"log={LOG}": 0},
    }
    return [
        {
            "name": name,
            "unit": READINGS[name].unit,
            **({"values": values[name]} if name in values else {"absent": {**NONE}}),
        }
        for name in READINGS
        if name.startswith(BMC)
    ]
