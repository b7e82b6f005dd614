"""The parameters that a criterion asks for: one that no observation has, or has otherwise, makes it judge nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fleet.judge.criteria import Criterion
from fleet.judge.finding import Finding, about, one_of
from schemas.catalogue import BENCHMARKS, DURATION, Benchmark, Output
from schemas.documents import nearest
from schemas.readings import READINGS
from schemas.records import Value

_WHOLE, _TRUTH, _NUMBER, _TEXT = "a whole number", "true or false", "a number", "a text"
TOLD: Mapping[str, frozenset[str]] = {
    "benchmark": frozenset({"benchmark"}),
    "checkpoint": frozenset({"batch_size", "network", "optimizer", "steps", "world_size"}),
    "collective": frozenset({"dtype", "world_size"}),
    "dataloader": frozenset({"batch_size", "cpus_per_rank", "network"}),
    "digest": frozenset({"repetitions", "size"}),
    "fashion_mnist": frozenset({"batch_size", "data", "epochs", "graphed", "learning_rate", "world_size"}),
    "gemm": frozenset({"size"}),
    "host_copy": frozenset({"devices", "numa", "size_bytes"}),
    "integrity": frozenset({"bytes", "free_bytes"}),
    "memory": frozenset({"size_bytes"}),
    "model_parallel": frozenset({"batch_size", "left_out", "replicas", "steps", "width", "world_size"}),
    "overlap": frozenset({"dtype", "size", "size_bytes", "world_size"}),
    "peer_copy": frozenset({"access", "size_bytes"}),
    "straggler": frozenset({"batch_size", "dtype", "layers", "sequence", "width"}),
    "stress": frozenset({"samples_per_second", "size"}),
    "training": frozenset({"backend", "batch_size", "data", "epochs", "world_size"}),
    "transformer": frozenset(
        {"batch_size", "data", "dtype", "heads", "layers", "peak", "sequence", "width", "world_size"}
    ),
    "variants": frozenset({"data", "graphed", "world_size"}),
}
"""Benchmark -> what its observations carry beside the parameters of the catalogue."""
TOLD_OF_OPERATIONS = frozenset(
    {"algorithm", "backend", "moved_bytes", "nccl_log", "nvls", "placement", "places", "protocol", "transport"}
)
"""What bandwidth, latency and values of a collective carry beside those."""
KINDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("batch_size", "bytes", "devices", "epochs", "free_bytes", "heads", "layers", "left_out", "moved_bytes",
         "places", "repetitions", "replicas", "sequence", "size", "size_bytes", "steps", "width", "workers", "world_size"),
        _WHOLE,
    ),
    **dict.fromkeys(("access", "graphed", "nvls"), _TRUTH),
    **dict.fromkeys(("cpus_per_rank", "learning_rate", "samples_per_second"), _NUMBER),
}  # fmt: skip
"""Parameter -> what it is; the others are texts."""
VALUES: Mapping[str, Sequence[str]] = {
    "algorithm": ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"),
    "backend": ("nccl", "gloo"),
    "benchmark": tuple(BENCHMARKS),
    "data": ("fashion-mnist", "cifar-10", "synthetic"),
    "dtype": BENCHMARKS["gemm"].settings["dtypes"],
    "overlap.dtype": ("bfloat16", "float32"),
    "straggler.dtype": ("bfloat16", "float16", "float32"),
    "network": BENCHMARKS["training"].settings["networks"],
    "numa": ("local", "remote", "unknown"),
    "protocol": ("LL", "LL128", "SIMPLE"),
    "reason": BENCHMARKS["stress"].settings["reasons"],
    "gpu.reason": [*BENCHMARKS["stress"].settings["reasons"], "thermal", "sync_boost", "board_limit", "reliability"],
}
"""Parameter, or parameter of one benchmark -> the texts that it can be, where no list of the benchmark says."""
COLLECTED_LABELS = frozenset({"phase"} | {label for reading in READINGS.values() for label in reading.labels})
"""What our own collectors and snapshots say of a reading."""
LABELS = frozenset({"gpu", "cpu", "peer", "gang", "host", "reason", "link", "chip", "fan"}) | COLLECTED_LABELS - {
    "phase"
}
"""Labels of scopes, which are texts."""
OURS = tuple({f"{name.split('.')[0]}." for name in READINGS})

Spoken = Sequence[tuple[Output, Benchmark | None]]


def check_parameters(criterion: Criterion, spoken: Spoken) -> Iterator[Finding]:
    """Each parameter of the criterion, against the observations that it speaks of; `spoken` is empty for a collector's."""
    known = frozenset().union(*(_carried(criterion.name, output) for output, _ in spoken))
    if not spoken and criterion.name.startswith(OURS):
        known = COLLECTED_LABELS
    for key, value in criterion.where.items():
        if known and key not in (known | LABELS if spoken else known):
            why = f"no such parameter{nearest(key, known)}"
            yield about(criterion, key, why, "name one of the observation's")
        else:
            yield from _value(criterion, key, value, _listed(criterion.name, key, spoken))


def _carried(name: str, output: Output) -> frozenset[str]:
    first, last = name.split(".")[0], output.name.rpartition(".")[2]
    told = TOLD.get(first, frozenset())
    if output.name.startswith("collective.{op}") and last != "graph_latency":
        told |= TOLD_OF_OPERATIONS
    elif output.name.startswith("collective.{op}"):
        told |= {"backend", "placement", "nccl_log"}
    if output.name == DURATION.name:
        return told
    return told | {key for key in output.over if f"{{{key}}}" not in output.name}


def _listed(name: str, key: str, spoken: Spoken) -> list[str]:
    """The texts that the parameter can be; empty where any will do."""
    known = [
        item
        for output, benchmark in spoken
        if benchmark and key in output.over
        for setting in [output.over[key]]
        for item in benchmark.choices.get(setting, benchmark.settings[setting])
        if isinstance(item, str)
    ]
    own = f"{name.split('.')[0]}.{key}"
    return known or list(VALUES.get(own, VALUES.get(key, ())))


def _value(criterion: Criterion, key: str, value: Value, listed: Sequence[str]) -> Iterator[Finding]:
    kind = _TEXT if key in LABELS else KINDS.get(key, _TEXT)
    if not _is(kind, value):
        shown = repr(value) if isinstance(value, str) else value
        yield about(criterion, shown, f"{key} is {kind}, so this is never met", f"write {kind}")
    elif isinstance(value, int) and kind == _WHOLE and value < 1:
        yield about(criterion, value, f"{key} is never that", "write a number over 0")
    elif isinstance(value, int) and key == "size_bytes" and value.bit_count() != 1:
        yield about(criterion, value, "no size of any profile: sizes are powers of two", "write the size in bytes")
    elif kind == _TEXT and listed and value not in listed:
        yield about(criterion, value, f"no such {key}{nearest(str(value), listed)}", one_of(listed))


def _is(kind: str, value: Value) -> bool:
    if isinstance(value, bool):
        return kind == _TRUTH
    if kind == _WHOLE:
        return isinstance(value, int)
    return isinstance(value, int | float) if kind == _NUMBER else kind == _TEXT and isinstance(value, str)
