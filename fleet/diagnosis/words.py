"""Describe in words what is wrong with a part. No code parses these texts."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.judge.advisories import PRODUCTS
from fleet.judge.fabric_ports import RATE
from fleet.judge.vulnerabilities import SCORES
from fleet.quantities import SIGNS, finite, format_pair, number, quantity
from schemas.records import Value
from schemas.reports import FAIL, OF_INVENTORY, RECORD, Verdict, VerdictKind
from schemas.scopes import Scope

_LIKE_A_VOWEL = ("A", "H", "L", "NVIDIA", "RTX")
"""Beginnings of the names of GPUs that need the article `an`."""
_ACRONYMS = {
    "aer": "PCIe error",
    "bios": "BIOS",
    "bmc": "BMC",
    "c2c": "C2C",
    "cpu": "CPU",
    "crc": "CRC",
    "ecc": "ECC",
    "gpu": "GPU",
    "gsp": "GSP",
    "hca": "adapter",
    "imex": "IMEX",
    "infiniband": "InfiniBand",
    "inforom": "InfoROM",
    "iommu": "IOMMU",
    "mig": "MIG",
    "mtu": "MTU",
    "nic": "NIC",
    "numa": "NUMA",
    "nvlink": "NVLink",
    "nvme": "NVMe",
    "nvswitch": "NVSwitch",
    "pci": "PCI",
    "pcie": "PCIe",
    "sm": "SM",
    "vbios": "VBIOS",
    "xid": "XID",
}
_FIGURES = {
    "gemm.throughput": "matrix products",
    "stress.throughput": "sustained matrix products",
    "stress.power": "power under load",
    "stress.flop_per_cycle": "work per clock cycle",
    "stress.efficiency": "work per joule",
    "pulse.work": "work under pulsed load",
    "pulse.work_share": "work under pulsed load",
    "pulse.amplitude": "power under pulsed load",
    "memory.bandwidth": "memory bandwidth",
    "gemm.wrong_products": "wrong matrix products",
    "memory.wrong_elements": "wrong elements in memory",
    "host_copy.wrong_bytes": "bytes copied wrongly to or from the host",
    "peer_copy.wrong_bytes": "bytes copied wrongly between GPUs",
    "pulse.kept_share": "share of pulses that the host began in time",
    "inference.wrong_tokens": "wrong tokens",
    "loss_curve.wrong_losses": "wrong losses",
    "transformer.wrong_losses": "losses that are not finite",
    "model_parallel.wrong_losses": "losses that are not finite",
    "fashion_mnist.wrong_parameters": "weights that differ between the GPUs",
    "pairs.wrong_elements": "elements received wrongly from another host",
    "mnnvl.wrong_elements": "wrong elements of collectives",
    "loss_curve.deviation": "deviation of the loss from the same training on a CPU",
    "gemm_shapes.throughput": "matrix products in the shapes of language models",
    "gemm_shapes.wrong_products": "wrong matrix products",
    "kernel_launch.latency": "time to launch a kernel",
    "kernel_launch.graph_latency": "time of a kernel in a CUDA graph",
    "pageable_copy.bandwidth": "copies to and from pageable memory of the host",
    "pageable_copy.wrong_bytes": "bytes copied wrongly to or from the host",
    "group_copy.bandwidth": "copies between a GPU and all others",
    "group_copy.wrong_bytes": "bytes copied wrongly between GPUs",
    "host_copy.bandwidth": "copies to and from the host",
    "peer_copy.bandwidth": "copies between GPUs",
    "peer_copy.latency": "latency between GPUs",
    "pairs.bandwidth": "bandwidth between hosts",
    "straggler.compute": "computing time of a step",
    "bmc.power_supply.fitted": "number of power supplies",
    "gpu.count": "number of GPUs",
    "gpu.pci_count": "number of GPUs on the PCI bus",
    "fabric_ports.active": "number of RDMA ports that are up",
    "host.dimm.count": "number of memory modules",
    "host.dimm.speed_rated": "rated speed",
    "optics.rx_power": "received light",
    "optics.temperature": "module temperature",
    "port.fec_uncorrectable": "uncorrectable FEC blocks",
    "port.symbol_errors": "symbol errors",
    "port.link_downs": "link losses",
    "port.link_recoveries": "link recoveries",
    "port.module_errors": "module errors",
    "port.pause_storms": "pause storms",
    "port.raw_ber": "bit error rate before FEC",
    "port.effective_ber": "bit error rate after FEC",
    "port.symbol_ber": "symbol error rate after FEC",
    "port.status_opcode": "link status",
    "local_storage.bandwidth": "disk bandwidth",
    "local_storage.iops": "disk operations per second",
    "local_storage.latency": "disk latency",
    "local_storage.wrong_blocks": "wrong blocks",
    "shared_storage.aggregate_bandwidth": "bandwidth of all clients together",
    "shared_storage.bandwidth": "bandwidth of the client",
    "shared_storage.file_bandwidth": "bandwidth at which other hosts read the file of this host",
    "shared_storage.metadata_rate": "files per second",
    "shared_storage.checkpoint_bandwidth": "checkpoint bandwidth",
    "shared_storage.misread_bytes": "bytes that only this client read wrong",
    "shared_storage.wrong_bytes": "wrong bytes",
    "host_memory.total_bandwidth": "bandwidth of the host's memory",
    "host_memory.bandwidth": "bandwidth of the host's memory",
    "host_memory.latency": "latency of the host's memory",
    "host_compute.throughput": "matrix products of the host's processors",
    "host_compute.clock": "clock of the host's processors under load",
    "optics.module.serial": "module serial",
    "verbs.bandwidth": "RDMA bandwidth",
    "verbs.rate_ratio": "RDMA bandwidth, as a share of what port and PCIe allow,",
    "verbs.best_ratio": "RDMA bandwidth with the best partner, as a share of what port and PCIe allow,",
    "verbs.latency": "RDMA latency",
    "verbs.message_rate": "RDMA message rate",
    "verbs.mtu": "RDMA MTU",
}
_MODULE_FLAGS = {
    "optics.module.fault": "has a module that switched itself off because of a fault",
    "optics.rx_los": "has a module that receives no signal",
    "optics.tx_fault": "has a module whose transmitter failed",
}
_MODULE_QUANTITIES = {
    "rx_power": "received light",
    "tx_power": "sent light",
    "bias": "laser current",
    "temperature": "temperature",
    "voltage": "supply voltage",
}
_COLLECTIVE = {"busbw": "bus bandwidth", "algbw": "algorithm bandwidth", "wrong_elements": "values"}
_SETTINGS = ("op", "dtype", "shape", "way", "direction", "workload", "pattern", "percentile", "sharing", "placement")
"""Parameters that distinguish the figures of a benchmark."""
_SHOWN = {
    "gpu.nvlink.missing_links": ("has {value} NVLink down", "has {value} NVLinks down"),
    "pcie.width": (
        "has a PCIe link of {value} lane instead of {limit}",
        "has a PCIe link of {value} lanes instead of {limit}",
    ),
    "gpu.pcie.width": (
        "has a PCIe link of {value} lane instead of {limit}",
        "has a PCIe link of {value} lanes instead of {limit}",
    ),
    "gpu.pcie.generation": ("has a PCIe link of generation {value} instead of {limit}",),
    "gpu.pcie.replays": ("had {value} PCIe replays during the run, at most {limit} are normal",),
    "gpu.power_limit_lowered": ("has its power limit lowered",),
    "gpu.clock.lowered": ("has its clocks lowered",),
    "gpu.ecc.enabled": ("has ECC switched off",),
    "gpu.ecc.change_pending": ("changes its ECC mode at the next reset",),
    "gpu.mig.enabled": ("has MIG switched on",),
    "gpu.mig.change_pending": ("changes its MIG mode at the next reset",),
    "gpu.ecc.uncorrectable_volatile": (
        "had {value} uncorrectable memory error",
        "had {value} uncorrectable memory errors",
    ),
    "gpu.remapped_rows.failed": ("has a memory row that could not be remapped",),
    "gpu.remapped_rows.pending": ("has a memory row to be remapped at the next reset",),
    "gpu.memory.unrepairable": ("has memory that cannot be repaired",),
    "gpu.inforom.valid": ("has an InfoROM with wrong checksums",),
    "collective.transport": ("is without NVLink between hosts: NCCL uses {value} instead of {limit}",),
    "fabric.imex.state": ("has the IMEX daemon (it joins the hosts of an NVLink domain) in the state {value}",),
    "fabric.imex.node_count": ("has {value} of the {limit} hosts of its NVLink domain in the configuration of IMEX",),
    "fabric.imex.connection": (
        "is not connected by IMEX to {value} other host of its NVLink domain",
        "is not connected by IMEX to {value} other hosts of its NVLink domain",
    ),
}
"""Reading -> phrase for a verdict that fails; of two phrases, the first is for a value of 1."""
_SHOWN |= {
    f"{SCORES}{key}": (f"has {product.title} with a published vulnerability of CVSS {{value}}",)
    for key, product in PRODUCTS.items()
}


def label(name: str) -> str:
    """Return the name of an observation as words: `PCIe replays` for `gpu.pcie.replays`."""
    if name in _FIGURES:
        return _FIGURES[name]
    parts = name.split(".")
    if parts[0] == "drift":
        return f"lowest level of {label('.'.join(parts[1:]))} during the soak"
    if parts[0] == "collective" and len(parts) == 3:
        return f"{parts[1]} {_COLLECTIVE.get(parts[2], parts[2])}"
    if parts[0] in ("gpu", "host", "network", "software", "storage") and len(parts) > 1:
        parts = parts[1:]
    return " ".join(_ACRONYMS.get(word, word) for part in parts for word in part.split("_"))


def describe(shown: Sequence[Verdict]) -> str:
    """Return what was found: a phrase of `_SHOWN`, or else value and limit. Without a value, only the observation is named."""
    first = shown[0]
    if first.value is None:
        return f"fails {label(first.name)}"
    value, limit = format_pair(first.value, first.limit, first.unit)
    if phrases := _SHOWN.get(first.name):
        is_one = isinstance(first.value, bool) or first.value == 1
        return phrases[0 if is_one else -1].format(value=value, limit=limit)
    return f"has {_with_settings(first)} {_compared(first, value, limit)}"


def _compared(verdict: Verdict, value: str, limit: str) -> str:
    change = " during the run" if verdict.kind == VerdictKind.CHANGE else ""
    if verdict.limit is None:
        return value
    if verdict.operator == "eq":
        return f"{value} instead of {limit}{change}"
    return f"{value}{change}, the limit is {SIGNS.get(verdict.operator, '')} {limit}"


def _with_settings(verdict: Verdict) -> str:
    settings = [str(verdict.params[key]).replace("_", " ") for key in _SETTINGS if key in verdict.params]
    return f"{label(verdict.name)} ({', '.join(settings)})" if settings else label(verdict.name)


def slow(shown: Sequence[Verdict]) -> str:
    """Return how far the first figure misses its limit, and how many more figures show the problem."""
    first = shown[0]
    if first.value is None:
        return describe(shown)
    value, limit = format_pair(first.value, first.limit, first.unit)
    others = len(shown) - 1
    more = f", and {others} more figure{'s' if others > 1 else ''}" if others else ""
    return f"is slow: {_with_settings(first)} {_compared(first, value, limit)}{_share(first)}{more}"


def slow_files(shown: Sequence[Verdict]) -> str:
    """Return that other hosts read the files of one host slowly: the storage of these files is at fault, not the host."""
    first = shown[0]
    value, limit = format_pair(first.value, first.limit, first.unit)
    return f"has files that other hosts read slowly: {value}, the limit is {SIGNS.get(first.operator, '')} {limit}"


def consequence(explained: Sequence[Verdict]) -> str:
    """Return the worst failed figure that follows from a cause; empty if there is none.

    For example `; memory bandwidth (copy) 21 % below the limit`.
    """
    figures = [
        item for item in explained if item.verdict == FAIL and distance(item) > 0 and item.kind not in OF_INVENTORY
    ]
    if not figures:
        return ""
    worst = max(figures, key=distance)
    side = "below" if worst.operator in ("ge", "gt") else "above"
    return f"; {_with_settings(worst)} {number(100 * distance(worst), 2)} % {side} the limit"


def _share(verdict: Verdict) -> str:
    share = distance(verdict)
    return f" ({number(100 * share, 2)} % off)" if share > 0 else ""


def distance(verdict: Verdict) -> float:
    """Return how far the value is beyond its limit, as a share of the limit.

    Return 0 if the value is within the limit, the limit is 0, one of them is not a number, or the operator is `eq` or empty.
    """
    value, limit = finite(verdict.value), finite(verdict.limit)
    if value is None or not limit or verdict.operator not in ("ge", "gt", "le", "lt"):
        return 0.0
    return max(0.0, (limit - value if verdict.operator in ("ge", "gt") else value - limit) / abs(limit))


def module(shown: Sequence[Verdict]) -> str:
    """Return what is wrong with the module at a port, or with the port, and on which lanes."""
    first = shown[0]
    lanes = {Scope.parse(verdict.scope).get("lane") for verdict in shown if verdict.name == first.name} - {""}
    where = (
        f" on lane{'s' if len(lanes) > 1 else ''} {', '.join(sorted(lanes, key=lambda lane: (len(lane), lane)))}"
        if lanes
        else ""
    )
    if first.name in _MODULE_FLAGS:
        return f"{_MODULE_FLAGS[first.name]}{where}"
    _, quantity_name, *level = first.name.split(".")
    if level in (["alarm"], ["warning"]) and isinstance(first.value, str):
        side = {"low": "below", "high": "above"}.get(first.value, "beyond")
        what = _MODULE_QUANTITIES.get(quantity_name, quantity_name)
        return f"has a module whose {what}{where} is {side} the module's own {level[0]} limit"
    return describe(shown) + where


def hot(shown: Sequence[Verdict]) -> str:
    """Return that a GPU is too hot or slowed down by heat, with its temperature and how long it was slowed down, if known.

    `shown` may end with a verdict on `stress.temperature` that passes.
    """
    temperatures = [verdict for verdict in shown if verdict.unit == "Cel" and finite(verdict.value) is not None]
    too_hot = [verdict for verdict in temperatures if verdict.verdict == FAIL]
    if too_hot:
        value, limit = format_pair(too_hot[0].value, too_hot[0].limit, "Cel")
        return f"is too hot: {label(too_hot[0].name)} {_compared(too_hot[0], value, limit)}"
    facts = [f"{quantity(verdict.value, 'Cel')} under load" for verdict in temperatures[:1]]
    shares = [finite(verdict.value) for verdict in shown if verdict.name == "stress.throttled_share"]
    facts += [f"for {number(100 * share, 2)} % of the stress test" for share in shares[:1] if share]
    return f"is slowed down by heat ({', '.join(facts)})" if facts else "is slowed down by heat"


def power_limited(shown: Sequence[Verdict]) -> str:
    """Return that the power or the clocks of a GPU are limited, with the current power limit if a verdict states it."""
    limits = [verdict for verdict in shown if verdict.unit == "W" and finite(verdict.value) is not None]
    if shown[0].name == "gpu.power_limit_lowered" and limits:
        value, wanted = format_pair(limits[0].value, limits[0].limit, "W")
        return f"has its power limit lowered to {value} instead of {wanted}"
    if shown[0].params.get("reason") == "hw_slowdown" and (share := finite(shown[0].value)):
        return f"is slowed down by its hardware (HW Slowdown), not by heat, for {number(100 * share, 2)} % of the stress test"
    return describe(shown)


def codes(shown: Sequence[Verdict]) -> str:
    """Return the error codes of the kernel log: ` (XID 79)`."""
    titles: dict[str, None] = {}
    for verdict in shown:
        scope = Scope.parse(verdict.scope)
        for kind, title in (("xid", "XID"), ("sxid", "SXid")):
            if code := scope.get(kind):
                titles[f"{title} {code}"] = None
    return f" ({', '.join(titles)})" if titles else ""


def gpu_missing(shown: Sequence[Verdict]) -> str:
    """Return how many GPUs a host has."""
    return f"has {quantity(shown[0].value, '1')} of {quantity(shown[0].limit, '1')} GPUs"


def module_missing(shown: Sequence[Verdict]) -> str:
    """Return that a slot has no memory module."""
    return "has no memory module, or one that the firmware does not detect"


def modules_missing(shown: Sequence[Verdict]) -> str:
    """Return how many memory modules a host has."""
    return f"has {quantity(shown[0].value, '1')} of {quantity(shown[0].limit, '1')} memory modules"


def memory_speed(shown: Sequence[Verdict]) -> str:
    """Return at what speed the memory of a host runs."""
    value, limit = format_pair(shown[0].value, shown[0].limit, shown[0].unit)
    return f"runs its memory at {value} instead of {limit}"


def _count(value: Value, noun: str) -> str:
    """Return `1 wrong word`, `2 wrong words`. The plural must be the noun with an `s`."""
    return f"{quantity(value, '1')} {noun if value == 1 else noun + 's'}"


def wrong_results(shown: Sequence[Verdict]) -> str:
    """Return in which way a part computes, copies or stores wrong data."""
    first = shown[0]
    if first.name == "integrity.wrong_words":
        addresses, bits = (first.params.get(name) for name in ("wrong_addresses", "wrong_bits"))
        where = f" at {addresses} address{'' if addresses == 1 else 'es'}, bits {bits}" if bits else ""
        return f"has memory that returns wrong data: {_count(first.value, 'wrong word')}{where}"
    if first.name == "local_storage.wrong_blocks":
        where = f", the first at {first.params['first_wrong']}" if "first_wrong" in first.params else ""
        return f"returns other data than were written: {_count(first.value, 'wrong block')} or more{where}"
    if first.name == "shared_storage.wrong_bytes":
        where = f", the first in {first.params['first_wrong']}" if "first_wrong" in first.params else ""
        by = f", as read by {first.params['readers']}" if "readers" in first.params else ""
        return f"holds other data than the host wrote: {_count(first.value, 'wrong byte')}{where}{by}"
    if first.name == "shared_storage.misread_bytes":
        return f"reads {_count(first.value, 'byte')} wrong that other hosts read right"
    if first.name.startswith("digest."):
        workload = str(first.params.get("workload", "")).replace("_", " ")
        return f"computes other results than its peers, without an error{f' ({workload})' if workload else ''}"
    suspects = _SUSPECTS.get(first.name.split(".")[0], "")
    unknown = f": not known whether {suspects} is at fault" if suspects else ""
    return f"gives wrong results: {_with_settings(first)}{unknown}"


_BETWEEN_GPUS = "a GPU or a link between GPUs"
_BETWEEN_RANKS = "a GPU, a link between GPUs or, between hosts, an adapter or the network"
_SUSPECTS = {
    "collective": _BETWEEN_RANKS,
    "mnnvl": _BETWEEN_GPUS,
    "fashion_mnist": _BETWEEN_RANKS,
    "loss_curve": "the GPU, its PCIe link, or the processor or memory of the host, which computes the reference,",
    "checkpoint": "a GPU, its PCIe link, the memory of the host or the storage",
}
"""Benchmark -> the parts that may have changed its data, if there is more than one."""


def wrong_copies(other: str, suspects: str) -> str:
    """Return that a GPU and `other`, the other end of the copies, copy wrong data, and which parts may be at fault."""
    return f"and {other} copy wrong data between them: not known whether {suspects} is at fault"


def wrong_peer_copies(shown: Sequence[Verdict]) -> str:
    """Return with which other GPUs of the host a GPU copies wrong data; verdicts on `group_copy` name none."""
    peers = dict.fromkeys(filter(None, (Scope.parse(verdict.scope).get("peer") for verdict in shown)))
    others = f"GPU {', '.join(peers)}" if peers else "the other GPUs"
    return wrong_copies(others, "one of the GPUs or a link")


def wrong_messages(shown: Sequence[Verdict]) -> str:
    """Return from which hosts a GPU receives wrong data."""
    partners = dict.fromkeys(filter(None, (Scope.parse(verdict.scope).get("partner") for verdict in shown)))
    unknown = "not known whether a GPU, an adapter or the network between them is at fault"
    return f"receives wrong data from {', '.join(partners)}: {unknown}"


def differs(shown: Sequence[Verdict]) -> str:
    """Return how a reading differs from that of its peers."""
    first = shown[0]
    value, limit = format_pair(first.value, first.limit, first.unit)
    return f"has {label(first.name)} {value}, most have {limit}" if first.limit is not None else describe(shown)


def bmc_part(shown: Sequence[Verdict]) -> str:
    """Return the health of a part, or the value of a sensor, as the BMC reports it."""
    first = shown[0]
    return f"reads {first.value}" if first.name == "bmc.sensor.alarm" else f"has the health {first.value}"


def bmc_event(shown: Sequence[Verdict]) -> str:
    """Return how many entries of an event log are new; the explanation of the cause has the text of the first entry."""
    entries = [verdict for verdict in shown if verdict.name == "bmc.event.severity"]
    if not entries:
        return f"has {quantity(shown[0].value, '1')} new {'entry' if shown[0].value == 1 else 'entries'}"
    kind = str(entries[0].value).lower()
    return f"has a new {kind} entry" if len(entries) == 1 else f"has {len(entries)} new entries, the first is {kind}"


def far_adapter(shown: Sequence[Verdict]) -> str:
    """Return that a GPU is farther from the nearest network adapter than most GPUs are."""
    first = shown[0]
    if first.limit is None:
        return describe(shown)
    return f"is not next to a network adapter as most are: its PCIe path is {first.value} instead of {first.limit}"


def in_use(shown: Sequence[Verdict]) -> str:
    """Return that the host is in use, and by whom."""
    return f"is in use by {shown[0].user or 'other processes'}"


def shared_machine(shown: Sequence[Verdict]) -> str:
    """Return that several hosts shared one machine, and how far the first figure misses its limit."""
    return f"was measured while several hosts shared one machine: {slow(shown).removeprefix('is slow: ')}"


def no_record(shown: Sequence[Verdict]) -> str:
    """Return that a host has no usable record."""
    return "left no usable record"


def contradictory_record(shown: Sequence[Verdict]) -> str:
    """Return that the records of a host contradict each other or the plan."""
    return "has records that contradict each other or the plan"


def clock_skew(shown: Sequence[Verdict]) -> str:
    """Return that the times in a record do not fit the clock of the control node."""
    return "has a clock that differs from that of the control node, or a record that was not made during this run"


def not_known(shown: Sequence[Verdict]) -> str:
    """Return which readings have no result, which measured values were not judged, or that the baseline lacks the part."""
    if shown[0].kind == VerdictKind.NO_BASELINE and shown[0].value is None:
        return "has no usable record in the baseline"
    verb = "has no result for" if shown[0].value is None else "was not judged on"
    names = list(dict.fromkeys(label(verdict.name) for verdict in shown))
    if len(names) > 3:
        return f"{verb} {', '.join(names[:2])} and {len(names) - 2} more readings"
    return f"{verb} {', '.join(names)}"


def swapped(shown: Sequence[Verdict]) -> str:
    """Return that two ports have each other's cable, or that some of several ports have wrong cables.

    If both ports are of one part, `shown` has two verdicts. Otherwise the title names two parts, so the text is in the plural.
    """
    if shown[0].verdict != FAIL:
        return "may have swapped cables: other hosts have these switches in another order or combination"
    return "has the cables of its ports swapped" if len(shown) > 1 else "have their cables swapped"


def wrong_cable(shown: Sequence[Verdict]) -> str:
    """Return the switch port at the other end of a cable, and the switch port at which the cable belongs."""
    first = shown[0]
    if first.limit is None:
        return f"is cabled to {first.value}"
    where = "most hosts have" if first.kind == VerdictKind.PEERS else "it belongs at"
    return f"is cabled to {first.value}; {where} {first.limit}{' there' if first.kind == VerdictKind.PEERS else ''}"


def gpu_model(shown: Sequence[Verdict]) -> str:
    """Return the model of a GPU, and the one that the inventory names."""
    name = str(shown[0].value)
    article = "an" if name.startswith(_LIKE_A_VOWEL) else "a"
    return f"is {article} {name}, but the inventory names {shown[0].limit}"


def stated(shown: Sequence[Verdict]) -> str:
    """Return the value that most hosts have, and the one that the inventory states."""
    value, limit = format_pair(shown[0].value, shown[0].limit, shown[0].unit)
    return f"has the {_with_settings(shown[0])} {value}, but the inventory states {limit}"


def stated_fabric(shown: Sequence[Verdict]) -> str:
    """Return number and rate of the fabric ports, and the rate that the inventory states."""
    return f"has {shown[0].detail}"


def limits_of_other_model(shown: Sequence[Verdict]) -> str:
    """Return that a host misses limits of a GPU model that it does not have."""
    return "misses limits of the model in the inventory, which is not the model of its GPUs"


def identity(shown: Sequence[Verdict]) -> str:
    """Return that a part is the wrong one, that its identity changed, or that two parts have the same identity."""
    first = shown[0]
    if first.criterion == "bmc-serial":
        return f"reports another serial than its BMC: {first.value} instead of {first.limit}"
    if first.criterion.startswith("manifest"):
        return f"differs from the manifest: {label(first.name)} {first.value}"
    if first.criterion == "identity-unique":
        return f"has the {label(first.name)} {first.value}, which must be unique"
    if first.criterion == "identity-constant":
        return f"reports another {label(first.name)} than before"
    if first.verdict != FAIL:
        return "has GPUs for which there is no criteria pack"
    return f"has the wrong {label(first.name)}"


def bmc_address(shown: Sequence[Verdict]) -> str:
    """Return that the inventory names the BMC of another host."""
    return f"has the BMC of {shown[0].value} in the inventory: correct rackproof_bmc_address"


def stopped_launch(shown: Sequence[Verdict]) -> str:
    """Return that a part stopped a launch of several hosts, or may have."""
    if shown[0].verdict == FAIL:
        return "stopped a launch of several hosts"
    return "took part in a failed launch of several hosts"


def network(shown: Sequence[Verdict]) -> str:
    """Return that a part is slow between hosts, or that it fails between hosts."""
    return slow(shown) if shown[0].limit is not None else "fails between hosts"


def why(first: Verdict) -> str:
    """Return the explanation that the title leaves out: the detail of the first verdict, or its reason."""
    if first.kind == VerdictKind.SUSPECT:
        return first.detail or first.reason.removeprefix(f"host {first.host} {first.scope} ")
    if first.name.partition(".")[0] == RECORD:
        return first.reason.removeprefix("no record: ")
    if first.name == RATE and first.kind == VerdictKind.INVENTORY:
        return ""  # the title has it
    has_value = first.value is not None and first.kind != VerdictKind.IDENTITY
    # The title states value and limit of a failure, but not why a value was not judged.
    return first.detail if has_value and (first.detail or first.verdict == FAIL) else first.reason
