"""The problems that a part can have: which verdicts show each problem, and which other verdicts follow from it.

Causes come before their effects in the list. A GPU that fell off the bus fails every other check, and a GPU that is too hot
computes slowly. A verdict belongs to the first problem in the list that it shows or that explains it.

A pattern is the name of an observation, with the wildcards `*` and `?`. A comma and a label of the scope or a parameter may
follow: `gpu.throttle.*,reason=*thermal*`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from fleet.diagnosis import words
from fleet.judge.advisories import PRODUCTS
from fleet.judge.fabric_ports import RATE
from fleet.judge.firmware_settings import NUMA, SMT
from fleet.judge.localization.gang_pairs import LINK_PARAM
from fleet.judge.vulnerabilities import SCORES
from schemas.records import ERROR, SKIPPED
from schemas.reports import FAIL, RECORD, Verdict, VerdictKind
from schemas.scopes import Scope

CERTAIN, LIKELY, UNKNOWN = "certain", "likely", "unknown"
"""`certain`: a reading shows the cause; `likely`: figures suggest it; `unknown`: evidence is missing; there may be no fault."""
STOPPED = (VerdictKind.MISSING, ERROR, SKIPPED, VerdictKind.UNFINISHED, VerdictKind.CONTRADICTORY)
"""Kinds of verdicts without a value, because something ended or disturbed the measurement."""

_ALL = ("*",)
_COMPUTE = (
    "gemm.*",
    "gemm_shapes.*",
    "stress.*",
    "pulse.*",
    "straggler.*",
    "training.*",
    "transformer.*",
    "inference.*",
    "mixture_of_experts.*",
    "loss_curve.*",
    "fashion_mnist.*",
    "variants.*",
    "model_parallel.*",
    "overlap.*",
    "drift.*",
)
_COPIES = ("host_copy.*", "pageable_copy.*", "dataloader.*", "checkpoint.*")
_WRONG_HOST_COPIES = ("host_copy.wrong_bytes", "pageable_copy.wrong_bytes", "digest.*,workload=copy")
_WRONG_PEER_COPIES = ("peer_copy.wrong_bytes", "group_copy.wrong_bytes", "digest.wrong_peer_copies")
_WRONG_MESSAGES = ("pairs.wrong_elements",)
_WRONG_TRANSFERS = (*_WRONG_HOST_COPIES, *_WRONG_PEER_COPIES, *_WRONG_MESSAGES)
_PEERS = ("peer_copy.*", "group_copy.*", "collective.*", "gpu.peer.*")
_WIRING = ("network.switch*", "infiniband.switch*")
_PORT = (
    "port.*",
    *(f"infiniband.{name}" for name in ("*err*", "link_*", "*state", "active", "rate", "width", "narrowed")),
    *(f"network.{name}" for name in ("rx_*", "carrier*", "operstate", "speed")),
)
OF_PORT = (*_PORT, "optics.*", "network.mtu", "infiniband.link_layer", "verbs.*", "pairs.*")
"""Readings and figures of a network port. If the first verdict of a problem is on one of them, the cause also names the cable."""
_HOST_MEMORY = (
    "host.dimm.count",
    "host.memory.total",
    "host.memory.speed",
    "host.numa.memory_*",
    "host_memory.*",
)
_NETWORK = ("pairs.*", "verbs.*", "collective.*", "gang.*")
_FABRIC_FIGURES = (*_NETWORK, "mnnvl.*")
_FABRIC = (RATE, *_FABRIC_FIGURES)
"""The rate of the fabric ports, and figures with limits that follow from it."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that can be wrong with a part."""

    id: str
    title: Callable[[Sequence[Verdict]], str]
    """Takes the verdicts that show the problem, the most important first, and for `hot` also a verdict that passes. Returns the
    predicate of a sentence whose subject is the part."""
    shown_by: tuple[str, ...]
    """Patterns of observations that show the problem. If several verdicts are equally severe, the title names the one whose
    pattern is first in this tuple, so the clearest patterns come first."""
    not_shown_by: tuple[str, ...] = ()
    """Patterns of observations that do not show the problem, although a pattern in `shown_by` matches them."""
    kinds: tuple[str, ...] = ()
    """Kinds of the verdicts that show the problem, failed or inconclusive; empty: failed verdicts of any kind."""
    explains: tuple[str, ...] = ()
    """Patterns of observations of the same part that follow from the problem."""
    explains_host: tuple[str, ...] = ()
    """Patterns of observations of the whole host, or of its gang, that follow from the problem."""
    explains_kinds: tuple[str, ...] = ()
    """Kinds of the verdicts that follow from the problem; empty: verdicts of any kind."""
    explains_parts: tuple[str, ...] = ()
    """Kinds of parts, such as `nic`: the problem also explains the observations in `explains` on all such parts of the host."""
    stops: bool = False
    """Whether missing results of the host and its gang follow from the problem."""
    confidence: str = CERTAIN
    is_joint: bool = False
    """Whether several parts have one problem together, such as swapped cables, so that the title does not say `each`."""
    is_of_host: bool = False
    """Whether the host has the problem, instead of the parts whose verdicts show it."""

    def is_shown_by(self, verdict: Verdict) -> bool:
        is_of_kind = verdict.kind in self.kinds if self.kinds else verdict.verdict == FAIL
        return is_of_kind and matches(verdict, self.shown_by) and not matches(verdict, self.not_shown_by)

    def reading_rank(self, verdict: Verdict) -> int:
        """Return the position of the first pattern in `shown_by` that matches the verdict."""
        ranks = (number for number, pattern in enumerate(self.shown_by) if matches(verdict, (pattern,)))
        return next(ranks, len(self.shown_by))


def matches(verdict: Verdict, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern matches the observation of the verdict."""
    return any(not label or _has_label(verdict, label) for label in _labels(patterns, verdict.name))


@lru_cache(maxsize=65536)
def _labels(patterns: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the pattern of labels (empty if it has none) of each pattern that matches the name."""
    parts = (pattern.partition(",") for pattern in patterns)
    return tuple(label for name_pattern, _, label in parts if fnmatchcase(name, name_pattern))


def _has_label(verdict: Verdict, pattern: str) -> bool:
    labels = (*Scope.parse(verdict.scope).labels.items(), *verdict.params.items())
    return any(fnmatchcase(f"{key}={value}", pattern) for key, value in labels)


PROBLEMS = (
    Problem(
        id="no-record",
        title=words.no_record,
        shown_by=(RECORD,),
        kinds=(VerdictKind.MISSING,),
        explains=_ALL,
        stops=True,
        confidence=UNKNOWN,
    ),
    Problem(
        id="contradictory-record",
        title=words.contradictory_record,
        shown_by=(RECORD,),
        kinds=(VerdictKind.CONTRADICTORY,),
        stops=True,
        confidence=UNKNOWN,
    ),
    Problem(
        id="clock-skew",
        title=words.clock_skew,
        shown_by=("record.clock",),
        kinds=(VerdictKind.CONTRADICTORY,),
        confidence=UNKNOWN,
    ),
    Problem(
        id="in-use", title=words.in_use, shown_by=_ALL, kinds=(VerdictKind.IN_USE,), stops=True, confidence=UNKNOWN
    ),
    Problem(
        id="gpu-fell-off-bus",
        title=lambda shown: f"fell off the PCIe bus{words.codes(shown)}",
        shown_by=("xid.count,xid=79", "xid.message,message=fallen_off_the_bus"),
        explains=_ALL,
        explains_host=_NETWORK,
        stops=True,
    ),
    Problem(
        id="gpu-model",
        title=words.gpu_model,
        shown_by=("gpu.name",),
        kinds=(VerdictKind.MODEL,),
        explains=_ALL,
        explains_host=_ALL,
        explains_kinds=(VerdictKind.MODEL,),
    ),
    # This problem is found only if a waiver covers the verdicts on the model itself. Otherwise `gpu-model` explains its verdicts.
    Problem(
        id="limits-of-other-model",
        title=words.limits_of_other_model,
        shown_by=_ALL,
        kinds=(VerdictKind.MODEL,),
        is_of_host=True,
    ),
    Problem(
        id="inventory-gpu-count",
        title=words.stated,
        shown_by=("gpu.count", "gpu.pci_count"),
        kinds=(VerdictKind.INVENTORY,),
        explains=("gpu", "gpu.*"),
        explains_host=_FABRIC,
        stops=True,
    ),
    Problem(
        id="inventory-fabric",
        title=words.stated_fabric,
        shown_by=(RATE,),
        kinds=(VerdictKind.INVENTORY,),
        explains=_FABRIC,
        explains_host=_FABRIC,
        explains_kinds=(VerdictKind.INVENTORY,),
    ),
    Problem(
        id="inventory", title=words.stated, shown_by=_ALL, not_shown_by=_FABRIC_FIGURES, kinds=(VerdictKind.INVENTORY,)
    ),
    Problem(
        id="gpu-missing",
        title=words.gpu_missing,
        shown_by=("gpu.count", "gpu.pci_count"),
        explains=("gpu.*",),
        explains_host=_NETWORK,
        stops=True,
    ),
    Problem(
        id="gpu-error",
        title=lambda shown: f"reported an error to its driver{words.codes(shown)}",
        shown_by=("xid.*", "gpu.recovery_action", "kernel.event.*,event=gpu_*"),
        explains=("gpu.ecc.*volatile*", "gpu.remapped_rows.pending", *_PEERS, *_COMPUTE),
        stops=True,
    ),
    Problem(
        id="nvswitch-error",
        title=lambda shown: f"reported an NVSwitch error{words.codes(shown)}",
        shown_by=("sxid.*",),
        explains=("sxid.*", "xid.*"),
        explains_host=_PEERS,
        stops=True,
    ),
    Problem(
        id="nvlink-domain",
        title=words.describe,
        shown_by=("fabric.imex.state", "fabric.imex.node_count", "fabric.imex.connection"),
        kinds=(VerdictKind.LIMIT,),
        explains=("fabric.imex.*",),
        explains_host=("fabric.imex.*", *_NETWORK),
        stops=True,
    ),
    # Settings of a GPU. A pending change comes before the setting itself: if a change is pending, only a reset is missing.
    Problem(id="ecc-mode", title=words.describe, shown_by=("gpu.ecc.change_pending", "gpu.ecc.enabled")),
    Problem(
        id="mig-mode",
        title=words.describe,
        shown_by=("gpu.mig.change_pending", "gpu.mig.enabled"),
        explains=("gpu.nvlink.active*", "gpu.nvlink.missing_links", "memory.bandwidth", *_COPIES, *_PEERS, *_COMPUTE),
        explains_host=("collective.*", *_COMPUTE),
        stops=True,
    ),
    Problem(id="compute-mode", title=words.describe, shown_by=("gpu.compute_mode",)),
    Problem(
        id="wrong-results",
        title=words.wrong_results,
        shown_by=(
            "integrity.wrong_words",
            "local_storage.wrong_blocks",
            "shared_storage.wrong_bytes",
            "shared_storage.misread_bytes",
            "*.accuracy",
            "digest.*",
            "*.wrong_*",
            "loss_curve.deviation",
            "*.loss_finite",
            "*.loss_ratio",
            "checkpoint.identical",
        ),
        not_shown_by=_WRONG_TRANSFERS,
        explains=("gpu.ecc.*", *_WRONG_TRANSFERS),
    ),
    # The next three problems are only `likely`, because a wrong copy does not show which part of the path is at fault.
    Problem(
        id="wrong-host-copies",
        title=lambda shown: words.wrong_copies("the host", "the GPU, its PCIe link or the memory of the host"),
        shown_by=_WRONG_HOST_COPIES,
        confidence=LIKELY,
    ),
    Problem(
        id="wrong-peer-copies",
        title=words.wrong_peer_copies,
        shown_by=_WRONG_PEER_COPIES,
        confidence=LIKELY,
    ),
    Problem(id="wrong-messages", title=words.wrong_messages, shown_by=_WRONG_MESSAGES, confidence=LIKELY),
    Problem(
        id="gpu-memory-errors",
        title=words.describe,
        shown_by=("gpu.ecc.*", "gpu.remapped_rows.*", "gpu.retired_pages.*", "gpu.memory.unrepairable", "gpu.repair.*"),
    ),
    Problem(
        id="swapped-cables",
        title=words.swapped,
        shown_by=_WIRING,
        kinds=(VerdictKind.SWAPPED,),
        explains=_NETWORK,
        explains_host=_NETWORK,
        explains_parts=("nic",),
        is_joint=True,
    ),
    Problem(
        id="wrong-cable",
        title=words.wrong_cable,
        shown_by=_WIRING,
        explains=_NETWORK,
        explains_host=_NETWORK,
        explains_parts=("nic",),
    ),
    Problem(
        id="memory-module-missing",
        title=words.module_missing,
        shown_by=("host.dimm.populated",),
        explains=_HOST_MEMORY,
        explains_host=_HOST_MEMORY,
        explains_parts=("numa",),
    ),
    Problem(
        id="memory-modules-missing",
        title=words.modules_missing,
        shown_by=("host.dimm.count",),
        explains=_HOST_MEMORY,
        explains_parts=("numa",),
    ),
    Problem(
        id="memory-module-differs",
        title=words.differs,
        shown_by=("host.dimm.size", "host.dimm.speed_rated"),
        explains=_HOST_MEMORY,
        explains_host=_HOST_MEMORY,
        explains_parts=("numa",),
    ),
    Problem(
        id="memory-speed",
        title=words.memory_speed,
        shown_by=("host.memory.speed",),
        explains=("host_memory.*",),
        explains_parts=("numa",),
    ),
    Problem(
        id="bmc-address",
        title=words.bmc_address,
        shown_by=("bmc.readable",),
        kinds=(VerdictKind.IDENTITY,),
    ),
    Problem(
        id="bmc-serial",
        title=words.identity,
        shown_by=("bmc.gpu.serial", "bmc.system.serial"),
        kinds=(VerdictKind.IDENTITY,),
        explains=("gpu.serial", "gpu.uuid"),
    ),
    Problem(id="identity", title=words.identity, shown_by=_ALL, kinds=(VerdictKind.IDENTITY,)),
    Problem(
        id="nvlink",
        title=words.describe,
        shown_by=(
            "gpu.nvlink.missing_links",
            "gpu.nvlink.active*",
            "gpu.nvlink.speed",
            "gpu.nvlink.*errors",
            "gpu.nvlink.*ratio",
            "gpu.nvlink.*recoveries",
            "gpu.nvlink.replays",
            "gpu.fabric.state",
            "gpu.fabric.degraded_bandwidth",
            "gpu.fabric.route*",
            "gpu.c2c.missing_links",
        ),
        explains=(*_PEERS, "straggler.*", "gpu.nvlink.*", "gpu.fabric.*"),
        explains_host=("collective.*",),
    ),
    Problem(
        id="pcie-link",
        title=words.describe,
        shown_by=(
            "gpu.pcie.width",
            "gpu.pcie.generation",
            "gpu.pcie.replays",
            "pcie.width",
            "pcie.narrowed",
            "pcie.slowed",
            "pcie.aer.*",
            "pcie.port.aer.*",
        ),
        explains=("gpu.pcie.*", "pcie.*", *_COPIES),
    ),
    Problem(
        id="module",
        title=words.module,
        shown_by=("optics.module.fault", "optics.tx_fault", "optics.rx_los", "optics.*.alarm"),
        explains=("optics.*", *_PORT),
        explains_host=_NETWORK,
    ),
    Problem(
        id="port",
        title=words.module,
        shown_by=(
            "port.fec_uncorrectable",
            "port.link_*",
            "port.symbol_*",
            "port.*_ber",
            "port.status_opcode",
            "port.module_errors",
            "port.pause_storms",
            "optics.*",
        ),
        explains=("optics.*", *_PORT),
    ),
    Problem(
        id="port-protocol",
        title=words.differs,
        shown_by=("infiniband.link_layer",),
        kinds=(VerdictKind.PEERS,),
        explains=("optics.*", *_PORT, "verbs.*"),
        explains_host=("fabric_ports.*", *_NETWORK),
    ),
    # A port with a link that no subnet manager has activated. The link itself is normal, so no cable is to be reseated.
    Problem(
        id="port-unmanaged",
        title=words.describe,
        shown_by=("infiniband.unmanaged",),
        explains=("infiniband.state", "infiniband.active", "verbs.*"),
        explains_host=("fabric_ports.*", *_NETWORK),
    ),
    Problem(
        id="port-down",
        title=words.differs,
        shown_by=(
            "infiniband.phys_state",
            "infiniband.state",
            "infiniband.active",
            "network.carrier",
            "network.operstate",
        ),
        explains=("optics.*", *_PORT, "network.duplex", "verbs.*", *_WIRING),
        explains_host=("fabric_ports.*",),
    ),
    Problem(id="mtu", title=words.differs, shown_by=("network.mtu", "verbs.mtu"), explains=("verbs.*",)),
    Problem(
        id="hot",
        title=words.hot,
        shown_by=(
            "gpu.throttle.*,reason=*thermal*",
            "gpu.temperature*",
            "gpu.memory.temperature",
            "stress.temperature",
            "stress.throttled_share,reason=*thermal*",
        ),
        explains=("gpu.throttle.*", "gpu.clock.*", "stress.temperature", "memory.bandwidth", *_COMPUTE),
        explains_host=("collective.*", *_COMPUTE),
    ),
    Problem(
        id="power-limited",
        title=words.power_limited,
        shown_by=(
            "gpu.power_limit_lowered",
            "gpu.power_limit",
            "gpu.throttle.*,reason=*power_brake",
            "stress.throttled_share,reason=*power_brake",
            "stress.throttled_share,reason=hw_slowdown",
            "gpu.clock.lowered",
        ),
        explains=("gpu.power_limit*", "gpu.throttle.*", "gpu.clock.*", *_COMPUTE),
        explains_host=_COMPUTE,
    ),
    Problem(
        id="stopped-launch",
        title=words.stopped_launch,
        shown_by=("gang.fault",),
        kinds=(VerdictKind.SUSPECT,),
        explains=("gang.*",),
        explains_host=_NETWORK,
        stops=True,
        confidence=LIKELY,
    ),
    # Several hosts of the inventory are the same machine. This problem is before all problems of slow parts, because parts
    # that two hosts measure at the same time may be slow although they are healthy.
    Problem(
        id="shared-machine",
        title=words.shared_machine,
        shown_by=_ALL,
        kinds=(VerdictKind.SHARED_MACHINE,),
        is_of_host=True,
    ),
    Problem(id="software-changed", title=words.slow, shown_by=_ALL, kinds=(VerdictKind.SOFTWARE,), confidence=LIKELY),
    Problem(
        id="slow-path",
        title=words.network,
        shown_by=(f"*,{LINK_PARAM}=*",),
        kinds=(VerdictKind.SUSPECT,),
        explains=_NETWORK,
        explains_host=_NETWORK,
        confidence=LIKELY,
    ),
    Problem(
        id="slow-network",
        title=words.network,
        shown_by=_ALL,
        kinds=(VerdictKind.SUSPECT,),
        explains=_NETWORK,
        explains_host=_NETWORK,
        explains_parts=("hca",),
        confidence=LIKELY,
    ),
    Problem(
        id="bmc-part",
        title=words.bmc_part,
        shown_by=(
            "bmc.leak_detector.health",
            "bmc.power_supply.health",
            "bmc.fan.health",
            "bmc.sensor.alarm",
            "bmc.*_redundancy.health",
            "bmc.part.health",
        ),
    ),
    Problem(id="bmc-event", title=words.bmc_event, shown_by=("bmc.event.severity", "bmc.log.new_entries")),
    Problem(id="far-adapter", title=words.far_adapter, shown_by=("pcie.nic_path",)),
    # These problems are before `differs`, which advises the version that most hosts have. That version may be vulnerable, too.
    *(
        Problem(id=f"{SCORES}{key}", title=words.describe, shown_by=(f"{SCORES}{key}",), explains=(product.reading,))
        for key, product in PRODUCTS.items()
        if product.reading
    ),
    # Settings of the firmware. These problems are before `differs`, of which a host has one for each reading.
    Problem(
        id="smt",
        title=words.differs,
        shown_by=(SMT.reading,),
        kinds=(VerdictKind.PEERS,),
        explains=SMT.effects,
    ),
    Problem(
        id="numa-nodes",
        title=words.differs,
        shown_by=(NUMA.reading,),
        kinds=(VerdictKind.PEERS,),
        explains=(*NUMA.effects, "*.numa_node"),
        explains_parts=("numa", "pci", "hca"),
    ),
    Problem(id="differs", title=words.differs, shown_by=_ALL, kinds=(VerdictKind.PEERS,)),
    Problem(
        id="transport",
        title=words.describe,
        shown_by=("collective.transport",),
        explains=_NETWORK,
        explains_host=_NETWORK,
    ),
    Problem(
        id="slow-memory",
        title=words.slow,
        shown_by=("memory.bandwidth",),
        explains=("drift.memory.*",),
        confidence=LIKELY,
    ),
    Problem(
        id="slow-host-memory",
        title=words.slow,
        shown_by=("host_memory.bandwidth", "host_memory.total_bandwidth", "host_memory.latency"),
        explains=("host_memory.*",),
        explains_host=("host_memory.*",),
        explains_parts=("numa",),
        confidence=LIKELY,
    ),
    Problem(
        id="slow-host-compute",
        title=words.slow,
        shown_by=("host_compute.clock", "host_compute.throughput"),
        explains=("host_compute.*", "host_memory.*"),
        confidence=LIKELY,
    ),
    Problem(
        id="slow-compute",
        title=words.slow,
        shown_by=("gemm.*", "stress.throughput", "stress.*"),
        explains=_COMPUTE,
        explains_host=_COMPUTE,
        confidence=LIKELY,
    ),
    Problem(
        id="late-load", title=words.describe, shown_by=("pulse.kept_share",), explains=("pulse.*",), confidence=LIKELY
    ),
    Problem(id="pulsed-load", title=words.slow, shown_by=("pulse.*",), explains=("pulse.*",), confidence=LIKELY),
    Problem(
        id="slow-host-copies",
        title=words.slow,
        shown_by=("host_copy.*", "pageable_copy.*"),
        explains=_COPIES,
        confidence=LIKELY,
    ),
    Problem(
        id="slow-peer-copies",
        title=words.slow,
        shown_by=("peer_copy.*", "group_copy.*"),
        explains=_PEERS,
        explains_host=("collective.*",),
        confidence=LIKELY,
    ),
    Problem(
        id="slow-collectives",
        title=words.slow,
        shown_by=("collective.*", "pairs.*"),
        explains=_NETWORK,
        confidence=LIKELY,
    ),
    Problem(
        id="slow-files",
        title=words.slow_files,
        shown_by=("shared_storage.file_bandwidth",),
        explains=("shared_storage.*",),
        confidence=LIKELY,
    ),
    Problem(
        id="slow-storage",
        title=words.slow,
        shown_by=("local_storage.*", "shared_storage.*"),
        explains=("local_storage.*", "shared_storage.*"),
        confidence=LIKELY,
    ),
    Problem(id="slow-workload", title=words.slow, shown_by=_COMPUTE, explains=_COMPUTE, confidence=LIKELY),
)
"""Every known problem; causes come before their effects."""
