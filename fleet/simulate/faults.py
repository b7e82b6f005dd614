"""What can be wrong with a simulated host: each fault is one small function on the records that a host in order would leave."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.simulate.records import pci, serial
from fleet.simulate.traces import held_back, lose
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.plans import Plan, PlannedHost
from schemas.records import ERROR, SKIPPED
from schemas.scopes import Scope
from schemas.stages import BENCHMARK, PREFLIGHT

Doc = dict[str, Any]
LOST, MISSING = "NVML: GPU is lost", "NVML: no such device"
NVLINK = 11
"""The link that goes down."""


@dataclass(kw_only=True)
class Case:
    """A host, and what it leaves behind."""

    plan: Plan
    host: PlannedHost
    gpu: int
    neighbour: int
    """Number of the host whose GPU it shares a serial with."""
    documents: dict[str, Doc]
    """`alone`, and `gang` where it took part in one: the records as JSON."""
    texts: dict[str, str | None] = field(default_factory=dict)
    """What is written in place of a record: text that is no record, or None for no file at all."""
    events: list[Doc] = field(default_factory=list)

    @property
    def scope(self) -> str:
        """The GPU."""
        return f"gpu={self.gpu}"

    def metrics(self, name: str, *, late: bool = True, phase: str = "") -> Iterator[Doc]:
        """A family in every snapshot; `late`: once the host has worked; `phase`: in those alone."""
        for document in self.documents.values():
            for taken in document["snapshots"]:
                if (late and self.is_early(document, taken)) or (phase and taken["phase"] != phase):
                    continue
                yield from (metric for metric in taken["metrics"] if metric["name"] == name)

    @staticmethod
    def is_early(document: Doc, taken: Doc) -> bool:
        """Whether a snapshot was taken before the host had any work: nothing was wrong yet."""
        return "gang" not in document and (taken["stage"] == PREFLIGHT or taken["phase"] == "before")

    def read(self, name: str, value: Any, scope: str = "", **when: Any) -> None:
        """Has a reading show something else."""
        for metric in self.metrics(name, **when):
            metric.setdefault("values", {})[scope or self.scope] = value
            metric.get("absent", {}).pop(scope or self.scope, None)

    def seen(self, *names: str, **params: Any) -> Iterator[Doc]:
        """Observations of these names and parameters that the GPU has a part in, or the host where it is no GPU's."""
        for document in self.documents.values():
            for item in document["observations"]:
                texts = item.get("params", {})
                asked = item["name"] in names and all(texts.get(key) == value for key, value in params.items())
                if asked and self.concerns(item["scope"]):
                    yield item

    def concerns(self, scope: str) -> bool:
        """Whether the GPU, as one of two or alone, is what the scope names."""
        labels = Scope.parse(scope).labels
        return str(self.gpu) in (labels.get("gpu"), labels.get("peer"))

    def slow(self, factor: float, *names: str, **params: Any) -> None:
        """Multiplies figures."""
        for item in self.seen(*names, **params):
            scale(item, factor)


def scale(item: Doc, factor: float) -> None:
    """Multiplies an observation's value and what it was made of."""
    item["value"] = float(f"{item['value'] * factor:.7g}")
    for key in ("min", "p50", "max"):
        if "samples" in item:
            item["samples"][key] = float(f"{item['samples'][key] * factor:.7g}")


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a fault does to those who launch with the host."""

    stops: str = ""
    """How a rank of it ends a launch of its gang: `rank_ended`, `rank_silent` or, the last of its ranks, `rank_unable`; empty: it
    does not."""
    speed: float = 1.0
    """What is left of the bandwidth between it and any other host."""
    rails: tuple[int, ...] = ()
    """The GPUs by which it is slow; none: all of them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault."""

    kind: str
    about: str
    apply: Callable[[Case], None]
    of_gpu: bool = True
    """It is a GPU's, not the whole host's."""
    in_gang: Callable[[int], Effect] = lambda _gpu: Effect()
    """GPU -> what it does to the gang."""
    away: bool = False
    """The host is in no launch."""


# --- a GPU in its host


def _xid79(case: Case) -> None:
    """Lost in the middle of what each GPU measures alone."""
    benchmarks = list(case.plan.stage(BENCHMARK).benchmarks) if _has(case, BENCHMARK) else []
    _log_xid(case, 79)
    _without(
        case,
        set(benchmarks[len(benchmarks) // 2 :]),
        "GPU is lost",
        "killed by SIGABRT",
        phase=(benchmarks or [""])[-1],
    )
    for document in case.documents.values():
        for taken in document["snapshots"]:
            if not case.is_early(document, taken):
                _unread(taken, case)
        for timeline in _timelines(document):
            lose(timeline, str(case.gpu), LOST, until=0.0 if "gang" in document else 0.5)


def _timelines(document: Doc) -> list[Doc]:
    return [launch["timeline"] for launch in document["launches"] if "timeline" in launch]


def _missing_gpu(case: Case) -> None:
    """Neither driver nor bus has it. The driver numbers those that it has from 0, so that the last number is missing."""
    rest = len(case.host.devices) - 1
    for name in ("gpu.count", "gpu.pci_count", "pcie.device_count"):
        case.read(name, rest, "host", late=False)
    for document in case.documents.values():
        document["gpus"] = [
            {**gpu, "index": _index(case, gpu["index"])} for gpu in document["gpus"] if gpu["index"] != case.gpu
        ]
        document["observations"] = [
            {**item, "scope": _numbered(case, item["scope"])} for item in document["observations"]
        ]
        for timeline in _timelines(document):
            lose(timeline, str(case.gpu), MISSING)
            timeline["gpus"] = {str(_index(case, int(gpu))): texts for gpu, texts in timeline["gpus"].items()}
            timeline["lost"][str(rest)] = timeline["lost"].pop(str(case.gpu))
        for taken in document["snapshots"]:
            for metric in taken["metrics"]:
                for kind in ("values", "absent"):
                    texts = metric.get(kind, {})
                    metric[kind] = {
                        _numbered(case, scope): value for scope, value in texts.items() if not _of(case, scope)
                    }
    case.gpu = rest
    alone = case.documents["alone"]
    alone["observations"] = [texts for item in alone["observations"] if (texts := _with_none_left(case, item))]


def _with_none_left(case: Case, item: Doc) -> Doc | None:
    """What the ranks say where CUDA has no device for the last of them: each alone measures, all together cannot."""
    entry, why = BENCHMARKS.get(item["name"].split(".")[0]), none_left(case.gpu)
    if item["name"] == DURATION.name:
        return None if BENCHMARKS[item["params"]["benchmark"]].needs_group else item
    if entry is None or entry.needs_group:
        return _error(item, f"rank {case.gpu} cannot take part: {why}", SKIPPED)
    if Scope.parse(item["scope"]).device == case.scope:
        return _error(item, why)
    return _error(item, "the other GPU was lost", SKIPPED) if case.concerns(item["scope"]) else item


def none_left(gpu: int) -> str:
    """What the rank says that finds no device."""
    return f"CUDA shows {gpu} devices: none is left for gpu={gpu}"


def _index(case: Case, gpu: int) -> int:
    """By which number it goes: the missing one by the last, of which the driver then knows nothing."""
    return len(case.host.devices) - 1 if gpu == case.gpu else gpu - (gpu > case.gpu)


def _numbered(case: Case, scope: str) -> str:
    return re.sub(r"\b(gpu|peer)=(\d+)", lambda result: f"{result[1]}={_index(case, int(result[2]))}", scope)


def _has(case: Case, stage: str) -> bool:
    return any(planned.name == stage for planned in case.plan.stages)


def _of(case: Case, scope: str) -> bool:
    return case.concerns(scope) or Scope.parse(scope).get("pci") == pci(case.gpu)


def _without(case: Case, benchmarks: set[str] | None, why: str, how: str, *, phase: str) -> None:
    """The benchmarks (None: all) as they end without the GPU: the others alone, nothing together."""
    document = case.documents["alone"]
    kept = []
    for item in document["observations"]:
        first = item["name"].split(".")[0]
        together = item["scope"] == "host" and item["name"] != "benchmark.duration"
        if benchmarks is not None and first not in benchmarks:
            kept.append(item)
        elif case.concerns(item["scope"]) or together:
            if benchmarks is not None:
                kept.append(_error(item, f"RuntimeError: {why}" if not together else f"rank {case.gpu} is gone: {why}"))
        else:
            kept.append(item)
    document["observations"] = kept
    for launch in document["launches"]:
        code = -6 if "SIGABRT" in how else 1
        launch["ranks"][case.gpu].update(exit_code=code, phase=phase, log_tail=f"CUDA error: {why}")
        reason = f"the launcher ended with 1: rank {case.gpu} in {phase} ({how})"
        launch.update(outcome="failed", reason=reason)


def _error(item: Doc, reason: str, status: str = ERROR) -> Doc:
    kept: Doc = {key: item[key] for key in ("name", "scope", "stage", "unit", "params") if key in item}
    return {**kept, "status": status, "reason": reason}


def _unread(taken: Doc, case: Case) -> None:
    """Return the readings of a driver that has lost the GPU."""
    for metric in taken["metrics"]:
        values = metric.get("values", {})
        for scope in [scope for scope in values if Scope.parse(scope).device == case.scope]:
            del values[scope]
            metric.setdefault("absent", {})[scope] = f"{ERROR}: {LOST}"


def _log_xid(case: Case, code: int) -> None:
    """A line of the driver in the kernel's log."""
    case.read("xid.count", 1, f"pci={pci(case.gpu)},xid={code}")
    for metric in case.metrics("xid.last_seen"):
        metric["values"]["host"] = 86_460.0


def _ecc(case: Case) -> None:
    for name in ("uncorrectable_volatile", "uncorrectable_aggregate", "uncorrectable_dram_volatile",
                 "uncorrectable_dram_aggregate"):  # fmt: skip
        case.read(f"gpu.ecc.{name}", 1)


def _row_remap_pending(case: Case) -> None:
    case.read("gpu.remapped_rows.pending", True)
    case.read("gpu.remapped_rows.correctable", 1)


def _row_remap_failed(case: Case) -> None:
    case.read("gpu.remapped_rows.failed", True, late=False)


def _pcie_narrow(case: Case) -> None:
    case.read("gpu.pcie.width", 8, late=False)
    case.read("pcie.width", 8, f"pci={pci(case.gpu)}", late=False)
    case.slow(0.5, "host_copy.bandwidth")


def _pcie_replays(case: Case) -> None:
    case.read("gpu.pcie.replays", 412)


def _nvlink_down(case: Case) -> None:
    case.read("gpu.nvlink.active", False, f"{case.scope},link={NVLINK}", late=False)
    case.read("gpu.nvlink.speed", 0, f"{case.scope},link={NVLINK}", late=False)
    case.read("gpu.nvlink.active_links", 17, late=False)
    case.read("gpu.nvlink.missing_links", 1, late=False)
    case.slow(17 / 18, "peer_copy.bandwidth")


def _thermal(case: Case) -> None:
    """Too hot: clocks are held down, and what the GPU computes comes slower."""
    case.read("gpu.throttle.active", True, f"{case.scope},reason=hw_thermal", phase="during")
    case.read("gpu.throttle.time", 37.5, f"{case.scope},reason=hw_thermal")
    case.read("gpu.temperature", 89, phase="during")
    case.slow(0.82, "gemm.throughput")
    case.slow(0.71, "stress.throughput", "stress.clock")
    case.slow(0.78, "stress.power")
    case.slow(0.91, "stress.efficiency")
    case.slow(1.21, "straggler.compute")
    for item in case.seen("stress.temperature", "straggler.temperature"):
        item["value"] = 88.0
    for item in case.seen("stress.throttled_share", "straggler.throttled_share", reason="hw_thermal"):
        item["value"] = 0.63
    case.slow(0.8, "straggler.clock")
    for document in case.documents.values():
        for timeline in _timelines(document):
            held_back(timeline["gpus"][str(case.gpu)], watts=541, mhz=1125, hot=88)


def _slow_gpu(case: Case) -> None:
    """It does less in each cycle, and nothing that is read of it says why."""
    case.slow(0.86, "gemm.throughput", "stress.throughput", "stress.flop_per_cycle", "stress.efficiency")
    case.slow(1 / 0.86, "straggler.compute")


def _slow_hbm(case: Case) -> None:
    case.slow(0.94, "memory.bandwidth")


def _bad_memory_word(case: Case) -> None:
    for item in list(case.seen("integrity.wrong_words"))[-1:]:
        item["value"] = 3


def _silent_corruption(case: Case) -> None:
    """The same wrong bits each time: only the other GPUs' digests reveal it."""
    for item in case.seen("digest.value", workload="gemm"):
        item["value"] = item["value"][:-4] + format(int(item["value"][-4:], 16) ^ 0x0100, "04x")


def _power_limit(case: Case) -> None:
    for name in ("gpu.power_limit", "gpu.power_limit_set"):
        case.read(name, 550.0, late=False)
    case.read("gpu.power_limit_lowered", True, late=False)
    case.slow(0.88, "stress.throughput", "stress.clock")
    case.slow(550 / 693, "stress.power")
    case.slow(0.88 / (550 / 693), "stress.efficiency")
    case.slow(1.06, "straggler.compute")
    for document in case.documents.values():
        for timeline in _timelines(document):
            held_back(timeline["gpus"][str(case.gpu)], watts=550, mhz=1335)


def _wrong_vbios(case: Case) -> None:
    case.read("gpu.vbios_version", "96.00.89.00.01", late=False)


def _duplicate_serial(case: Case) -> None:
    """Its serial is that of a GPU in another host."""
    texts = serial(case.neighbour, case.gpu)
    case.read("gpu.serial", texts, late=False)
    for document in case.documents.values():
        document["gpus"][case.gpu]["serial"] = texts


def _missing_observations(case: Case) -> None:
    """What each rank wrote of some benchmarks is not there, and nothing says why."""
    document = case.documents["alone"]
    document["observations"] = [
        item
        for item in document["observations"]
        if not (item["scope"] == case.scope and item["name"].startswith(("memory.", "gemm.")))
    ]


# --- a host


def _nothing(_case: Case) -> None:
    """Only the gang's figures show it."""


def _wrong_driver(case: Case) -> None:
    for name in ("driver.version", "software.driver_module.version", "software.driver_library.version"):
        case.read(name, "570.172.08", "host", late=False)


def _unreachable(case: Case) -> None:
    case.texts |= {"alone": None, "gang": None}
    case.events.append(
        {
            "what": "unreachable",
            "play": "Prepare the hosts",
            "host": case.host.name,
            "task": "Check that the host can be measured",
            "message": f"Failed to connect to the host via ssh: connect to host {case.host.address} port 22: "
            "Connection timed out",
        }
    )


def _no_record(case: Case) -> None:
    case.texts["alone"] = None


def _truncated_record(case: Case) -> None:
    text = json.dumps(case.documents["alone"], separators=(",", ":"))
    case.texts["alone"] = text[: len(text) * 2 // 3]


def _stale_record(case: Case) -> None:
    case.documents["alone"]["nonce"] = "0" * 32


def _hung(case: Case) -> None:
    """A rank that came to no end: the supervisor ended the launch at its deadline."""
    document = case.documents["alone"]
    names = list(case.plan.stage(BENCHMARK).benchmarks)
    at = names[len(names) // 2]
    after = set(names[len(names) // 2 :])
    document["observations"] = [
        item
        for item in document["observations"]
        if item["name"].split(".")[0] not in after and item.get("params", {}).get("benchmark") not in after
    ]
    for launch in document["launches"]:
        launch.pop("timeline", None)  # the wait for the deadline has no simulated timeline
        for rank in launch["ranks"]:
            rank |= {"exit_code": None, "phase": at}
        launch |= {
            "outcome": "deadline",
            "duration_s": launch["deadline_s"] + 10,
            "reason": f"not finished after {launch['deadline_s']:g} s ("
            + ", ".join(f"rank {rank['rank']} in {at}" for rank in launch["ranks"])
            + ")",
        }


def _every_rail(speed: float) -> Callable[[int], Effect]:
    return lambda _gpu: Effect(speed=speed)


FAULTS: Mapping[str, Fault] = {
    fault.kind: fault
    for fault in (
        Fault(kind="xid79", about="GPU falls off the bus in mid-run", apply=_xid79,
              in_gang=lambda _: Effect(stops="rank_ended")),
        Fault(kind="missing_gpu", about="neither driver nor PCI bus has the GPU", apply=_missing_gpu,
              in_gang=lambda _: Effect(stops="rank_unable")),
        Fault(kind="ecc", about="uncorrectable memory error during the run", apply=_ecc),
        Fault(kind="row_remap_pending", about="a memory row waits for a reset to be remapped", apply=_row_remap_pending),
        Fault(kind="row_remap_failed", about="a memory row could not be remapped", apply=_row_remap_failed),
        Fault(kind="pcie_narrow", about="PCIe link x8 in place of x16", apply=_pcie_narrow),
        Fault(kind="pcie_replays", about="PCIe packets sent again, far more than healthy links need", apply=_pcie_replays),
        Fault(kind="nvlink_down", about="one of the GPU's NVLinks is down", apply=_nvlink_down),
        Fault(kind="thermal", about="thermal slowdown under load: clocks held down, matrix products slow", apply=_thermal),
        Fault(kind="slow_gpu", about="GPU computes 14 % slower, and no reading says why", apply=_slow_gpu),
        Fault(kind="slow_hbm", about="GPU's memory is 6 % slow", apply=_slow_hbm),
        Fault(kind="power_limit", about="power limit lowered to 550 W", apply=_power_limit),
        Fault(kind="bad_memory_word", about="words of memory that do not hold what is written", apply=_bad_memory_word),
        Fault(kind="silent_corruption", about="wrong results and no error: only the digest differs", apply=_silent_corruption),
        Fault(kind="duplicate_serial", about="serial of a GPU in another host", apply=_duplicate_serial),
        Fault(kind="wrong_vbios", about="VBIOS unlike all the others'", apply=_wrong_vbios),
        Fault(kind="missing_observations", about="some benchmarks left nothing of one GPU", apply=_missing_observations),
        Fault(kind="slow_nic", about="the NIC of one GPU at 60 % of its speed", apply=_nothing,
              in_gang=lambda gpu: Effect(speed=0.6, rails=(gpu,))),
        Fault(kind="slow_host", about="host at half the speed with every other host", apply=_nothing, of_gpu=False,
              in_gang=_every_rail(0.5)),
        Fault(kind="wrong_driver", about="driver of another version", apply=_wrong_driver, of_gpu=False),
        Fault(kind="hung", about="benchmarks that come to no end: ended at the deadline", apply=_hung,
              in_gang=lambda _: Effect(stops="rank_silent")),
        Fault(kind="unreachable", about="no SSH from the beginning on", apply=_unreachable, of_gpu=False, away=True),
        Fault(kind="no_record", about="the host's record was never fetched", apply=_no_record, of_gpu=False),
        Fault(kind="truncated_record", about="the host's record ends in the middle", apply=_truncated_record, of_gpu=False),
        Fault(kind="stale_record", about="the host's record is of an earlier run", apply=_stale_record, of_gpu=False),
    )
}  # fmt: skip
