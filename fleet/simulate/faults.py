"""Define the faults of simulated hosts. The function of a fault changes the records of a healthy host as the fault would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.simulate.bmcs import FAULTY_SUPPLY, LOG
from fleet.simulate.cabling import adapter_scope
from fleet.simulate.memory_modules import FAULTY_SLOT, LESS_INTERLEAVED, LOWER_SPEED, OF_MODULE, SLOTS, SPEED
from fleet.simulate.modules import darken_lane, degrade_cable
from fleet.simulate.records import pci, serial, time_after
from fleet.simulate.timelines import lose_gpu, throttle
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.plans import Plan, PlannedHost
from schemas.readings import BMC
from schemas.records import ERROR, SKIPPED, UNSUPPORTED
from schemas.scopes import Scope
from schemas.stages import BENCHMARK, PREFLIGHT

Doc = dict[str, Any]
HOST, PATH, SWITCH, RAIL = "host", "path", "switch", "rail"
SLOW_PORT = 0.6
PORT_SPEEDS = ("verbs.bandwidth", "verbs.rate_ratio")
LOST_GPU, MISSING_GPU = "NVML: GPU is lost", "NVML: no such device"
SHARED_SCOPE = "directory=mnt:shared"
DOWN_NVLINK = 11
"""Number of the NVLink that goes down."""


@dataclass(kw_only=True)
class FaultyHost:
    """A host, and the files that are written for it."""

    plan: Plan
    planned: PlannedHost
    gpu: int
    """Number of the GPU that has the fault."""
    twin: int
    """Position of another host in the plan. `duplicate_serial` and `serial_mismatch` derive the wrong serial from it."""
    documents: dict[str, Doc]
    """The records as JSON documents: `host`, and `gang` if the host is in a gang."""
    bmc: Doc | None = None
    """The record of the host's BMC, which the control node writes."""
    texts: dict[str, str | None] = field(default_factory=dict)
    """`host` or `gang` -> text that is written instead of this record; None: no file is written."""
    events: list[Doc] = field(default_factory=list)
    """Lines of events.jsonl."""

    @property
    def scope(self) -> str:
        """Return the scope of the GPU."""
        return f"gpu={self.gpu}"

    def metrics(self, name: str, *, late: bool = True, phase: str = "") -> Iterator[Doc]:
        """Yield the metric `name` of each snapshot.

        Args:
            name: name of the metric.
            late: whether to skip the snapshots that were taken before the first launch of the host (`is_early`).
            phase: the phase of the snapshots; empty: any phase.
        """
        bmcs = [self.bmc] if self.bmc else []
        for document in bmcs if name.startswith(BMC) else self.documents.values():
            for snapshot in document["snapshots"]:
                if (late and self.is_early(document, snapshot)) or (phase and snapshot["phase"] != phase):
                    continue
                yield from (metric for metric in snapshot["metrics"] if metric["name"] == name)

    @staticmethod
    def is_early(document: Doc, snapshot: Doc) -> bool:
        """Return whether a snapshot was taken before the first launch: a fault that appears under load is not yet visible."""
        return "gang" not in document and (snapshot["stage"] == PREFLIGHT or snapshot["phase"] == "before")

    def set_reading(self, name: str, value: Any, scope: str = "", **snapshots: Any) -> None:
        """Set a reading to `value`.

        Args:
            name: name of the reading.
            value: the new value.
            scope: scope of the reading; empty: the GPU with the fault.
            snapshots: arguments `late` and `phase` of `metrics`, which select the snapshots.
        """
        for metric in self.metrics(name, **snapshots):
            metric.setdefault("values", {})[scope or self.scope] = value
            metric.get("absent", {}).pop(scope or self.scope, None)

    def observations(self, *names: str, **params: Any) -> Iterator[Doc]:
        """Yield the observations of the faulty GPU, or of a pair with this GPU, that have one of `names` and all of `params`."""
        for document in self.documents.values():
            for item in document["observations"]:
                item_params = item.get("params", {})
                matches = item["name"] in names and all(item_params.get(key) == value for key, value in params.items())
                if matches and self.involves_gpu(item["scope"]):
                    yield item

    def involves_gpu(self, scope: str) -> bool:
        """Return whether the scope names the faulty GPU, alone or as one of a pair."""
        labels = Scope.parse(scope).labels
        return str(self.gpu) in (labels.get("gpu"), labels.get("peer"))

    def scale(self, factor: float, *names: str, **params: Any) -> None:
        """Multiply the observations that `observations` yields by `factor`."""
        for item in self.observations(*names, **params):
            scale_observation(item, factor)


def scale_observation(item: Doc, factor: float) -> None:
    """Multiply the value and the sample statistics of an observation by `factor`."""
    item["value"] = float(f"{item['value'] * factor:.7g}")
    for key in ("min", "p50", "max") if "samples" in item else ():
        item["samples"][key] = float(f"{item['samples'][key] * factor:.7g}")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of a fault on launches of the gang (the hosts of one multi-node launch)."""

    ended_by: str = ""
    """How a rank of the host makes a launch fail; empty: it does not fail.

    `rank_ended`: the process of the rank of the faulty GPU is killed. `rank_silent`: that process hangs. `rank_unable`: the last
    rank of the host finds no device.
    """
    speed: float = 1.0
    """Bandwidth of slow pairs of hosts, and of large collectives, as a share of the bandwidth on a healthy fabric.

    `reach` and `rails` select the slow pairs.
    """
    rails: tuple[int, ...] = ()
    """Numbers of the rails (one for each GPU) on which the pairs are slow; empty: all rails."""
    reach: str = HOST
    """Which pairs of hosts are slow.

    HOST: every pair with the faulty host. PATH: only its pair with the next host of the gang. SWITCH: every pair with a host at
    the leaf switch of the faulty host. RAIL: all pairs.
    """


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    kind: str
    description: str
    apply: Callable[[FaultyHost], None]
    of_gpu: bool = True
    """Whether the fault belongs to one GPU of the host (or to its adapter or rail); otherwise it belongs to the host."""
    in_gang: Callable[[int], Effect] = lambda _gpu: Effect()
    """Function that takes the number of the faulty GPU and returns the effect on launches of the gang."""
    is_unreachable: bool = False
    """Whether the host takes part in no launch."""
    of_bmc: bool = False
    """Whether the fault shows only in the readings of the BMC."""
    breaks_domain: bool = False
    """Whether the fault prevents NCCL from using NVLink between the hosts of the NVLink domain. The host must be in a domain."""
    least_gpus: int = 1
    """Minimum number of GPUs that a host must have for this fault."""
    least_hosts: int = 1
    """Minimum number of hosts that the fleet must have for this fault."""
    of_storage: bool = False
    """Whether the fault is in a measured directory. The inventory must then name directories."""


# --- faults of one GPU


def _xid79(host: FaultyHost) -> None:
    """Lose the GPU halfway through the benchmarks that the host runs alone."""
    benchmarks = list(host.plan.stage(BENCHMARK).benchmarks) if _has_stage(host, BENCHMARK) else []
    _log_xid(host, 79)
    _abort_rank(host, set(benchmarks[len(benchmarks) // 2 :]), phase=(benchmarks or [""])[-1])
    for document in host.documents.values():
        for snapshot in document["snapshots"]:
            if not host.is_early(document, snapshot):
                _lose_readings(snapshot, host)
        for timeline in _timelines(document):
            lose_gpu(timeline, str(host.gpu), LOST_GPU, after_share=0.0 if "gang" in document else 0.5)


def _timelines(document: Doc) -> list[Doc]:
    return [launch["timeline"] for launch in document["launches"] if "timeline" in launch]


def _missing_gpu(host: FaultyHost) -> None:
    """Remove the GPU from driver and PCI bus. The driver numbers the other GPUs from 0, so the last number is missing."""
    remaining = len(host.planned.devices) - 1
    for name in ("gpu.count", "gpu.pci_count", "pcie.device_count"):
        host.set_reading(name, remaining, "host", late=False)
    for document in host.documents.values():
        document["gpus"] = [
            {**gpu, "index": _new_index(host, gpu["index"])} for gpu in document["gpus"] if gpu["index"] != host.gpu
        ]
        document["observations"] = [
            {**item, "scope": _renumber(host, item["scope"])} for item in document["observations"]
        ]
        for timeline in _timelines(document):
            lose_gpu(timeline, str(host.gpu), MISSING_GPU)
            timeline["gpus"] = {str(_new_index(host, int(gpu))): texts for gpu, texts in timeline["gpus"].items()}
            timeline["lost"][str(remaining)] = timeline["lost"].pop(str(host.gpu))
        for snapshot in document["snapshots"]:
            for metric in snapshot["metrics"]:
                for kind in ("values", "absent"):
                    metric[kind] = {
                        _renumber(host, scope): value
                        for scope, value in metric.get(kind, {}).items()
                        if not _is_of_gpu(host, scope)
                    }
    host.gpu = remaining
    document = host.documents["host"]
    observations = (_observation_without_device(host, item) for item in document["observations"])
    document["observations"] = [item for item in observations if item]


def _observation_without_device(host: FaultyHost, item: Doc) -> Doc | None:
    """Return an observation as it is reported if CUDA has no device for the last rank; None if it is not reported.

    The other ranks run only the benchmarks that need no process group.
    """
    entry, reason = BENCHMARKS.get(item["name"].split(".")[0]), no_device_message(host.gpu)
    if item["name"] == DURATION.name:
        return None if BENCHMARKS[item["params"]["benchmark"]].needs_group else item
    if entry is None or entry.needs_group:
        return _error(item, f"rank {host.gpu} cannot take part: {reason}", SKIPPED)
    if Scope.parse(item["scope"]).device == host.scope:
        return _error(item, reason)
    return _error(item, "the other GPU was lost", SKIPPED) if host.involves_gpu(item["scope"]) else item


def no_device_message(gpu: int) -> str:
    """Return the message of the rank of `gpu` if CUDA finds only the devices before it."""
    return f"CUDA shows {gpu} devices: none is left for gpu={gpu}"


def _new_index(host: FaultyHost, gpu: int) -> int:
    """Return the new number of a GPU. The missing GPU gets the last number, which the driver does not report."""
    return len(host.planned.devices) - 1 if gpu == host.gpu else gpu - (gpu > host.gpu)


def _renumber(host: FaultyHost, scope: str) -> str:
    return re.sub(r"\b(gpu|peer)=(\d+)", lambda match: f"{match[1]}={_new_index(host, int(match[2]))}", scope)


def _has_stage(host: FaultyHost, stage: str) -> bool:
    return any(planned.name == stage for planned in host.plan.stages)


def _is_of_gpu(host: FaultyHost, scope: str) -> bool:
    return host.involves_gpu(scope) or Scope.parse(scope).get("pci") == pci(host.gpu)


def _abort_rank(host: FaultyHost, benchmarks: set[str], phase: str) -> None:
    """Abort the rank of the faulty GPU in `phase`.

    In `benchmarks`, the results of this rank and the results of all ranks together become errors. Other results stay.
    """
    document = host.documents["host"]
    kept = []
    for item in document["observations"]:
        first = item["name"].split(".")[0]
        is_of_all_ranks = item["scope"] == "host" and item["name"] != "benchmark.duration"
        if first in benchmarks and is_of_all_ranks:
            kept.append(_error(item, f"rank {host.gpu} is gone: GPU is lost"))
        elif first in benchmarks and host.involves_gpu(item["scope"]):
            kept.append(_error(item, "RuntimeError: GPU is lost"))
        else:
            kept.append(item)
    document["observations"] = kept
    for launch in document["launches"]:
        launch["ranks"][host.gpu].update(exit_code=-6, phase=phase, log_tail="CUDA error: GPU is lost")
        reason = f"the launcher exited with 1: rank {host.gpu} in {phase} (exit code -6)"
        launch.update(outcome="failed", reason=reason)


def _error(item: Doc, reason: str, status: str = ERROR) -> Doc:
    kept: Doc = {key: item[key] for key in ("name", "scope", "stage", "unit", "params") if key in item}
    return {**kept, "status": status, "reason": reason}


def _lose_readings(snapshot: Doc, host: FaultyHost) -> None:
    """Replace the readings of the faulty GPU in a snapshot with the error that NVML returns."""
    for metric in snapshot["metrics"]:
        values = metric.get("values", {})
        for scope in [scope for scope in values if Scope.parse(scope).device == host.scope]:
            del values[scope]
            metric.setdefault("absent", {})[scope] = f"{ERROR}: {LOST_GPU}"


def _log_xid(host: FaultyHost, code: int) -> None:
    """Add an XID error of the GPU to the readings of the kernel log."""
    host.set_reading("xid.count", 1, f"pci={pci(host.gpu)},xid={code}")
    for metric in host.metrics("xid.last_seen"):
        metric["values"]["host"] = 86_460.0


def _ecc(host: FaultyHost) -> None:
    for name in ("uncorrectable_volatile", "uncorrectable_aggregate", "uncorrectable_dram_volatile",
                 "uncorrectable_dram_aggregate"):  # fmt: skip
        host.set_reading(f"gpu.ecc.{name}", 1)


def _row_remap_pending(host: FaultyHost) -> None:
    host.set_reading("gpu.remapped_rows.pending", True)
    host.set_reading("gpu.remapped_rows.correctable", 1)


def _row_remap_failed(host: FaultyHost) -> None:
    host.set_reading("gpu.remapped_rows.failed", True, late=False)


def _pcie_narrow(host: FaultyHost) -> None:
    host.set_reading("gpu.pcie.width", 8, late=False)
    host.set_reading("pcie.width", 8, f"pci={pci(host.gpu)}", late=False)
    host.scale(0.5, "host_copy.bandwidth")


def _pcie_replays(host: FaultyHost) -> None:
    host.set_reading("gpu.pcie.replays", 412)


def _nvlink_down(host: FaultyHost) -> None:
    host.set_reading("gpu.nvlink.active", False, f"{host.scope},link={DOWN_NVLINK}", late=False)
    host.set_reading("gpu.nvlink.speed", 0, f"{host.scope},link={DOWN_NVLINK}", late=False)
    host.set_reading("gpu.nvlink.active_links", 17, late=False)
    host.set_reading("gpu.nvlink.missing_links", 1, late=False)
    host.scale(17 / 18, "peer_copy.bandwidth")


def _thermal(host: FaultyHost) -> None:
    """Overheat the GPU: its clock is limited, and it computes more slowly."""
    host.set_reading("gpu.throttle.active", True, f"{host.scope},reason=hw_thermal", phase="during")
    host.set_reading("gpu.throttle.time", 37.5, f"{host.scope},reason=hw_thermal")
    host.set_reading("gpu.temperature", 89, phase="during")
    host.scale(0.82, "gemm.throughput")
    host.scale(0.71, "stress.throughput", "stress.clock")
    host.scale(0.78, "stress.power")
    host.scale(0.91, "stress.efficiency")
    host.scale(1.21, "straggler.compute")
    for item in host.observations("stress.temperature", "straggler.temperature"):
        scale_observation(item, 88.0 / item["value"])
    for item in host.observations("stress.throttled_share", "straggler.throttled_share", reason="hw_thermal"):
        item["value"] = 0.63
    host.scale(0.8, "straggler.clock")
    for document in host.documents.values():
        for timeline in _timelines(document):
            throttle(timeline["gpus"][str(host.gpu)], watts=541, mhz=1125, hot_cel=88)


def _slow_gpu(host: FaultyHost) -> None:
    """Make the GPU compute less in each clock cycle, without a reading that shows why."""
    host.scale(0.86, "gemm.throughput", "stress.throughput", "stress.flop_per_cycle", "stress.efficiency")
    host.scale(1 / 0.86, "straggler.compute")


def _slow_hbm(host: FaultyHost) -> None:
    host.scale(0.94, "memory.bandwidth")


def _bad_memory_word(host: FaultyHost) -> None:
    for item in list(host.observations("integrity.wrong_words"))[-1:]:
        item["value"] = 3


def _silent_corruption(host: FaultyHost) -> None:
    """Make the GPU compute the same wrong bits each time, so that only a comparison with other GPUs shows the fault."""
    for item in host.observations("digest.value", workload="gemm"):
        item["value"] = item["value"][:-4] + format(int(item["value"][-4:], 16) ^ 0x0100, "04x")


def _power_limit(host: FaultyHost) -> None:
    for name in ("gpu.power_limit", "gpu.power_limit_set"):
        host.set_reading(name, 550.0, late=False)
    host.set_reading("gpu.power_limit_lowered", True, late=False)
    host.scale(0.88, "stress.throughput", "stress.clock")
    host.scale(550 / 693, "stress.power")
    host.scale(0.88 / (550 / 693), "stress.efficiency")
    host.scale(1.06, "straggler.compute")
    for document in host.documents.values():
        for timeline in _timelines(document):
            throttle(timeline["gpus"][str(host.gpu)], watts=550, mhz=1335)


def _wrong_vbios(host: FaultyHost) -> None:
    host.set_reading("gpu.vbios_version", "96.00.89.00.01", late=False)


def _duplicate_serial(host: FaultyHost) -> None:
    """Give the GPU the serial of a GPU in another host."""
    twin_serial = serial(host.twin, host.gpu)
    host.set_reading("gpu.serial", twin_serial, late=False)
    for document in host.documents.values():
        document["gpus"][host.gpu]["serial"] = twin_serial


def _missing_observations(host: FaultyHost) -> None:
    """Remove the observations of `memory` and `gemm` for one GPU, without an error in their place."""
    document = host.documents["host"]
    document["observations"] = [
        item
        for item in document["observations"]
        if not (item["scope"] == host.scope and item["name"].startswith(("memory.", "gemm.")))
    ]


# --- other faults


def _slow_port(host: FaultyHost) -> None:
    """Lower the speed at which the adapter of the GPU sends to itself."""
    for item in host.documents["host"]["observations"]:
        if item["scope"] == adapter_scope(host.gpu) and item["name"] in PORT_SPEEDS:
            scale_observation(item, SLOW_PORT)


def _no_change(_host: FaultyHost) -> None:
    """Change nothing. The fault shows only in the figures of the gang, or in the NVLink domain (`join_domain`)."""


def _wrong_driver(host: FaultyHost) -> None:
    for name in ("driver.version", "software.driver_module.version", "software.driver_library.version"):
        host.set_reading(name, "570.172.08", "host", late=False)


def _swapped_cables(host: FaultyHost) -> None:
    """Swap the cable of the GPU's adapter with the cable of the next GPU's adapter."""
    scopes = [adapter_scope(rail % len(host.planned.devices)) for rail in (host.gpu, host.gpu + 1)]
    for name in ("switch", "switch_id", "switch_port"):
        for metric in host.metrics(f"infiniband.{name}", late=False):
            values = metric["values"]
            values[scopes[0]], values[scopes[1]] = values[scopes[1]], values[scopes[0]]


def _unreachable(host: FaultyHost) -> None:
    host.texts |= {"host": None, "gang": None}
    host.events.append(
        {
            "what": "unreachable",
            "play": "Prepare the hosts",
            "host": host.planned.name,
            "task": "Check that the host can be measured",
            "message": f"Failed to connect to the host via ssh: connect to host {host.planned.address} port 22: "
            "Connection timed out",
        }
    )


def _no_record(host: FaultyHost) -> None:
    host.texts["host"] = None


def _truncated_record(host: FaultyHost) -> None:
    text = json.dumps(host.documents["host"], separators=(",", ":"))
    host.texts["host"] = text[: len(text) * 2 // 3]


def _stale_record(host: FaultyHost) -> None:
    host.documents["host"]["nonce"] = "0" * 32


def _hung(host: FaultyHost) -> None:
    """End the launch at its deadline, because a benchmark does not finish."""
    document = host.documents["host"]
    names = list(host.plan.stage(BENCHMARK).benchmarks)
    phase = names[len(names) // 2]
    unfinished = set(names[len(names) // 2 :])
    document["observations"] = [
        item
        for item in document["observations"]
        if item["name"].split(".")[0] not in unfinished and item.get("params", {}).get("benchmark") not in unfinished
    ]
    for launch in document["launches"]:
        _delay_what_follows(host, launch["stage"], launch["deadline_s"] + 10 - launch["duration_s"])
        launch.pop("timeline", None)  # the wait for the deadline has no simulated timeline
        for rank in launch["ranks"]:
            rank |= {"exit_code": None, "phase": phase}
        launch |= {
            "outcome": "deadline",
            "duration_s": launch["deadline_s"] + 10,
            "reason": f"not finished after {launch['deadline_s']:g} s ("
            + ", ".join(f"rank {rank['rank']} in {phase}" for rank in launch["ranks"])
            + ")",
        }


def _delay_what_follows(host: FaultyHost, stage: str, seconds: float) -> None:
    """Add `seconds` to the times of everything that the host does after the launch of `stage`."""
    for name, document in host.documents.items():
        is_later = name != "host"
        for snapshot in document["snapshots"]:
            if is_later or (snapshot["stage"], snapshot["phase"]) == (stage, "after"):
                snapshot["at"] = time_after(snapshot["at"], seconds)
                for metric in snapshot["metrics"]:
                    if metric["name"] == "host.uptime":
                        metric["values"]["host"] += seconds
        if is_later:
            document["began"] = time_after(document["began"], seconds)
            for launch in document["launches"]:
                launch["began"] = time_after(launch["began"], seconds)
        document["ended"] = time_after(document["ended"], seconds)


def _fabric_unhealthy(host: FaultyHost) -> None:
    host.set_reading("gpu.fabric.state", "unhealthy", late=False)


def _wrong_clique(host: FaultyHost) -> None:
    for gpu in host.planned.devices:
        host.set_reading("gpu.fabric.clique_id", 7, f"gpu={gpu}", late=False)


def _dark_lane(host: FaultyHost) -> None:
    for _, snapshot in _full_snapshots(host):
        darken_lane(snapshot["metrics"])


def _degrading_cable(host: FaultyHost) -> None:
    """Increase the error counters of one port in each launch of the host."""
    launches = 0
    for document, snapshot in _full_snapshots(host):
        launches += snapshot["phase"] == "after" and not FaultyHost.is_early(document, snapshot)
        degrade_cable(snapshot["metrics"], launches)


def _missing_dimm(host: FaultyHost) -> None:
    """Empty a memory slot, so that the host has less memory and one socket uses fewer memory channels than the other."""
    share = (len(SLOTS) - 1) / len(SLOTS)
    host.set_reading("host.dimm.populated", False, FAULTY_SLOT, late=False)
    for name in OF_MODULE:
        for metric in host.metrics(name, late=False):
            del metric["values"][FAULTY_SLOT]
            metric.setdefault("absent", {})[FAULTY_SLOT] = f"{UNSUPPORTED}: the slot is empty"
    host.set_reading("host.dimm.count", len(SLOTS) - 1, "host", late=False)
    for name in ("host.memory.total", "host.memory.available", "host.numa.memory_total", "host.numa.memory_free"):
        for metric in host.metrics(name, late=False):
            metric["values"] = {scope: round(value * share) for scope, value in metric["values"].items()}

    _slow_down_memory(host, LESS_INTERLEAVED)


def _slow_down_memory(host: FaultyHost, factor: float) -> None:
    for document in host.documents.values():
        for item in document["observations"]:
            if item["name"] in ("host_memory.total_bandwidth", "host_memory.bandwidth"):
                scale_observation(item, factor)


def _slow_dimm(host: FaultyHost) -> None:
    """Replace a memory module with one for a lower speed. The firmware then runs all modules at this speed."""
    host.set_reading("host.dimm.speed_rated", LOWER_SPEED, FAULTY_SLOT, late=False)
    host.set_reading("host.memory.speed", LOWER_SPEED, "host", late=False)
    _slow_down_memory(host, LOWER_SPEED / SPEED)


def _full_snapshots(host: FaultyHost) -> Iterator[tuple[Doc, Doc]]:
    """Yield (record, snapshot) in the order of time. Omit the phase `during`, whose snapshots lack some readings."""
    for document in host.documents.values():
        yield from ((document, snapshot) for snapshot in document["snapshots"] if snapshot["phase"] != "during")


def _figures_of(host: FaultyHost, scope: str, *names: str) -> Iterator[Doc]:
    """Yield the figures that have one of `names` and the scope of a directory."""
    for document in host.documents.values():
        yield from (item for item in document["observations"] if item["scope"] == scope and item["name"] in names)


def _slow_disk(host: FaultyHost) -> None:
    for item in _figures_of(host, "directory=data2", "local_storage.bandwidth", "local_storage.iops"):
        scale_observation(item, 0.45)
    for item in _figures_of(host, "directory=data2", "local_storage.latency"):
        scale_observation(item, 1 / 0.45)


def _slow_storage_client(host: FaultyHost) -> None:
    for item in _figures_of(host, SHARED_SCOPE, "shared_storage.bandwidth", "shared_storage.checkpoint_bandwidth"):
        scale_observation(item, 0.1)


def _storage_wrong_byte(host: FaultyHost) -> None:
    for item in _figures_of(host, SHARED_SCOPE, "shared_storage.wrong_bytes"):
        item["value"] = 1
        readers = ", ".join(sorted({host.planned.name, *(other.name for other in host.plan.hosts[:2])}))
        item["params"] |= {"first_wrong": "shard 0 byte 4321", "readers": readers}


def _on_every_rail(speed: float) -> Callable[[int], Effect]:
    return lambda _gpu: Effect(speed=speed)


def _bmc_psu_lost(host: FaultyHost) -> None:
    host.set_reading("bmc.power_supply.health", "Critical: it has no input (0 V)", f"psu={FAULTY_SUPPLY}")
    host.set_reading("bmc.power_redundancy.health", "Critical", "redundancy=PS_Redundancy")


def _bmc_event(host: FaultyHost) -> None:
    scope = f"log={LOG},entry=13"
    readings = {
        "bmc.event.severity": {scope: "Warning"},
        "bmc.event.message": {scope: "2026-11-03T04:09:11Z Correctable ECC (DIMM C1)"},
        "bmc.log.new_entries": {f"log={LOG}": 1},
    }
    for name, values in readings.items():
        metric = next(host.metrics(name))
        metric.pop("absent", None)
        metric["values"] = values
    host.set_reading("bmc.log.entries", 13, f"log={LOG}")
    host.set_reading("bmc.log.newest", "13 2026-11-03T04:09:11Z", f"log={LOG}")


def _serial_mismatch(host: FaultyHost) -> None:
    other = serial(host.twin, host.gpu + 50)
    host.set_reading("bmc.gpu.serial", other, f"processor=GPU_{host.gpu}", late=False)


FAULTS: Mapping[str, Fault] = {
    fault.kind: fault
    for fault in (
        Fault("xid79", "GPU falls off the bus during the run", apply=_xid79,
              in_gang=lambda _: Effect(ended_by="rank_ended")),
        Fault("missing_gpu", "GPU missing in the driver and on the PCI bus", apply=_missing_gpu,
              in_gang=lambda _: Effect(ended_by="rank_unable")),
        Fault("ecc", "uncorrectable memory error during the run", apply=_ecc),
        Fault("row_remap_pending", "memory row to be remapped at the next GPU reset", apply=_row_remap_pending),
        Fault("row_remap_failed", "memory row that could not be remapped", apply=_row_remap_failed),
        Fault("pcie_narrow", "PCIe link x8 instead of x16", apply=_pcie_narrow),
        Fault("pcie_replays", "many more PCIe replays than on a healthy link", apply=_pcie_replays),
        Fault("nvlink_down", "one NVLink of the GPU down", apply=_nvlink_down),
        Fault("fabric_unhealthy", "registration with the NVLink fabric completed, but the fabric is unhealthy",
              apply=_fabric_unhealthy),
        Fault("thermal", "thermal slowdown under load: clock limited, GEMM slow", apply=_thermal),
        Fault("slow_gpu", "GPU computes 14 % slower; no reading shows why", apply=_slow_gpu),
        Fault("slow_hbm", "GPU memory 6 % slower", apply=_slow_hbm),
        Fault("power_limit", "power limit lowered to 550 W", apply=_power_limit),
        Fault("bad_memory_word", "memory words that lose their value", apply=_bad_memory_word),
        Fault("silent_corruption", "wrong results without an error: only the digest differs", apply=_silent_corruption),
        Fault("duplicate_serial", "same serial as a GPU in another host", apply=_duplicate_serial, least_hosts=2),
        Fault("wrong_vbios", "VBIOS version that no other GPU has", apply=_wrong_vbios),
        Fault("missing_observations", "no observations of one GPU in `memory` and `gemm`", apply=_missing_observations),
        Fault("slow_nic", "NIC of one GPU at 60 % of its bandwidth, even when it sends to itself", apply=_slow_port,
              in_gang=lambda gpu: Effect(speed=SLOW_PORT, rails=(gpu,))),
        Fault("slow_cable", "half the rate on the cable between the NIC of one GPU and the switch", apply=_no_change,
              in_gang=lambda gpu: Effect(speed=0.5, rails=(gpu,))),
        Fault("slow_path", "half the bandwidth between the host and the next host of its gang, on the rail of one GPU",
              apply=_no_change, in_gang=lambda gpu: Effect(speed=0.5, rails=(gpu,), reach=PATH)),
        Fault("slow_switch", "leaf switch of one GPU's rail at half its bandwidth, for all hosts at this switch",
              apply=_no_change, in_gang=lambda gpu: Effect(speed=0.5, rails=(gpu,), reach=SWITCH)),
        Fault("slow_rail", "rail of one GPU at half its bandwidth on all hosts of the gang", apply=_no_change,
              in_gang=lambda gpu: Effect(speed=0.5, rails=(gpu,), reach=RAIL)),
        Fault("dark_lane", "an optical module of the host receives no light on one lane", apply=_dark_lane, of_gpu=False),
        Fault("degrading_cable", "a port of the host loses data in each launch", apply=_degrading_cable, of_gpu=False),
        Fault("missing_dimm", "memory module missing, or not detected by the firmware", apply=_missing_dimm, of_gpu=False),
        Fault("slow_dimm", "memory module rated for a lower speed than the others", apply=_slow_dimm, of_gpu=False),
        Fault("slow_host", "half the bandwidth to every other host", apply=_no_change, of_gpu=False,
              in_gang=_on_every_rail(0.5)),
        Fault("swapped_cables", "cables of two adapters swapped: those of one GPU and of the next GPU", apply=_swapped_cables,
              least_gpus=2),
        Fault("bmc_psu_lost", "power supply without input during the run (needs --bmcs)", apply=_bmc_psu_lost,
              of_gpu=False, of_bmc=True),
        Fault("bmc_event", "the BMC logs an event during the benchmarks (needs --bmcs)", apply=_bmc_event, of_gpu=False,
              of_bmc=True),
        Fault("serial_mismatch", "BMC and host report different serials of one GPU (needs --bmcs)", apply=_serial_mismatch,
              of_bmc=True),
        Fault("wrong_driver", "driver version that no other host has", apply=_wrong_driver, of_gpu=False),
        Fault("imex_down", "IMEX does not work on the host (needs --nvlink-domains)", apply=_no_change, of_gpu=False,
              breaks_domain=True),
        Fault("wrong_clique", "GPUs in another clique than the rest of the NVLink domain (needs --nvlink-domains)",
              apply=_wrong_clique, of_gpu=False, breaks_domain=True),
        Fault("slow_disk", "one disk of the host at 45 % of its rate (needs --storage)", apply=_slow_disk, of_gpu=False,
              of_storage=True),
        Fault("slow_storage_client", "client of the shared file system at a tenth of its rate (needs --storage)",
              apply=_slow_storage_client, of_gpu=False, of_storage=True),
        Fault("storage_wrong_byte", "one byte of the host's checkpoint is stored wrong (needs --storage)",
              apply=_storage_wrong_byte, of_gpu=False, of_storage=True),
        Fault("hung", "benchmarks do not finish, so the launch is ended at its deadline", apply=_hung,
              in_gang=lambda _: Effect(ended_by="rank_silent")),
        Fault("unreachable", "host not reachable over SSH during the run", apply=_unreachable, of_gpu=False, is_unreachable=True),
        Fault("no_record", "record of the host never fetched", apply=_no_record, of_gpu=False),
        Fault("truncated_record", "record of the host truncated", apply=_truncated_record, of_gpu=False),
        Fault("stale_record", "record of the host from an earlier run", apply=_stale_record, of_gpu=False),
    )
}  # fmt: skip
