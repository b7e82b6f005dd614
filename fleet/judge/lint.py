"""Criteria packs against physics and the catalogue: a limit that cannot be right is told before it judges a rack.

A floor above the part's peak rejects every host, one a thousand times too low accepts every host, and a name that nothing
is ever called judges none: none of them shows in a report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fleet.judge.criteria import Criterion, Pack
from schemas.catalogue import BENCHMARKS, DURATION, Benchmark, Output
from schemas.documents import nearest
from schemas.records import Value

COLLECTED = frozenset({"gpu", "host", "driver", "xid", "collector"})
"""First components of what the collectors read. The control node does not know collectors, so the rest is not checked."""
EXTRA = frozenset(
    {
        "algorithm", "backend", "batch_size", "benchmark", "data", "dtype", "epochs", "network", "numa", "nvls", "protocol",
        "size", "size_bytes", "transport", "world_size",
    }
)  # fmt: skip
"""Parameters that benchmarks add to the ones that the catalogue lists."""
SCOPES: Mapping[str, frozenset[str]] = {
    "device": frozenset({"gpu", "cpu"}),
    "pair": frozenset({"peer"}),
    "host": frozenset({"host"}),
    "world": frozenset({"host", "gang"}),
}
COLLECTED_SCOPES = frozenset({"host", "gpu", "reason", "link", "nic", "port"})
TRUTHS = frozenset(
    {"peer_copy.access", "training.loss_finite", "variants.loss_finite", "checkpoint.identical", "collective.nvls"}
)
TEXTS = frozenset({"collective.transport", "digest.value"})
FLOORS, CEILINGS = ("ge", "gt"), ("le", "lt")
LEAST_OF_EXPECTED = 0.75
LEAST_OF_COPY, LEAST_OF_PRODUCT, LEAST_OF_COLLECTIVE = 0.5, 0.4, 0.02
SLIPS = (
    (1e-12, "a figure in tera-units"),
    (1e-9, "a figure in giga-units"),
    (1e-6, "a figure in mega-units, a million times too low"),
    (1e-3, "a figure a thousand times too low (GB written as MB)"),
    (1 / 8, "bytes taken for bits"),
    (8.0, "bits taken for bytes"),
    (1e3, "a figure a thousand times too high (MB written as GB)"),
    (1e6, "a figure a million times too high"),
)
MUST_SPEAK = (
    "gemm.throughput", "memory.bandwidth", "host_copy.bandwidth", "peer_copy.bandwidth", "stress.throughput", "stress.power",
    "collective.all_reduce.busbw", "gpu.pcie.generation", "gpu.pcie.width",
)  # fmt: skip
"""What the pack of a GPU model judges by a figure of its own, or lists under `unknown`."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing in a pack that cannot be right."""

    pack: str
    criterion: str
    value: Value
    why: str
    remedy: str

    def __str__(self) -> str:
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.pack}: {self.criterion}: {shown}: {self.why}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class _Peak:
    """The most that the datasheet allows, and the share of it under which a floor guards nothing."""

    value: float
    of: str
    least: float


def lint(pack: Pack) -> list[Finding]:
    """Everything in `pack`, and in what it includes, that cannot be right; the same finding once."""
    found = [*_pack(pack)]
    for criterion in pack.criteria:
        for check in (_contract, _type, _expectation):
            found += check(criterion)
        found += _physics(criterion, pack)
    return list(dict.fromkeys(found))


def _finding(criterion: Criterion, value: Value, why: str, remedy: str) -> Finding:
    return Finding(pack=criterion.origin, criterion=criterion.id, value=value, why=why, remedy=remedy)


def _catalogue() -> Iterator[tuple[str, Output, Benchmark | None]]:
    yield DURATION.name, DURATION, None
    for benchmark in BENCHMARKS.values():
        for output in benchmark.outputs:
            ops = benchmark.settings[output.over["op"]] if "{op}" in output.name else [""]
            yield from ((output.name.replace("{op}", op), output, benchmark) for op in ops)


_KNOWN = tuple(_catalogue())


def _unknown_name(name: str) -> str:
    """Why nothing can be called that; empty where something is."""
    if name.split(".")[0] in COLLECTED or any(name == known for known, _, _ in _KNOWN):
        return ""
    return f"no observation is called {name}{nearest(name, (known for known, _, _ in _KNOWN))}"


def _pack(pack: Pack) -> Iterator[Finding]:
    """What holds for the pack as a whole."""

    def finding(value: Value, why: str, remedy: str) -> Finding:
        return Finding(pack=pack.name, criterion="(pack)", value=value, why=why, remedy=remedy)

    for part, names in (("unknown", pack.unknown), ("lacks", pack.lacks)):
        for name in names:
            if why := _unknown_name(name):
                yield finding(name, f"{part}: {why}", "name an observation of schemas/catalogue.py")
    if not pack.gpu_names:
        return
    if not pack.datasheet:
        yield finding(
            pack.gpu_names[0], "a GPU model without a datasheet cannot be checked", "add the datasheet's peaks"
        )
    for name in MUST_SPEAK:
        own = (item for item in pack.criteria if item.speaks_of(name) and item.fleet_fraction is None)
        if name not in pack.unknown and not any(item.stage != "gang" for item in own):
            yield finding(name, "neither judged nor called unknown", "add a criterion, or a line under unknown")


def _contract(criterion: Criterion) -> Iterator[Finding]:
    """Name, unit, scope and parameters, against the catalogue."""
    spoken = [(output, benchmark) for name, output, benchmark in _KNOWN if criterion.speaks_of(name)]
    if not spoken and criterion.name.split(".")[0] in COLLECTED:
        if criterion.scope and criterion.scope not in COLLECTED_SCOPES:
            yield _finding(criterion, criterion.scope, "unknown kind of scope", _one_of(COLLECTED_SCOPES))
        return
    if not spoken:
        yield _finding(criterion, criterion.name, _unknown_name(criterion.name), "name one of schemas/catalogue.py")
        return
    units = {output.unit for output, _ in spoken}
    if criterion.unit not in units:
        yield _finding(criterion, criterion.unit, "not the unit of the observation", _one_of(units))
    scopes = frozenset().union(*(SCOPES[output.scope] for output, _ in spoken))
    if criterion.scope and criterion.scope not in scopes:
        yield _finding(criterion, criterion.scope, "not a scope of the observation", _one_of(scopes))
    for key, value in criterion.where.items():
        named = [
            benchmark.settings[output.over[key]] for output, benchmark in spoken if benchmark and key in output.over
        ]
        if not named and key not in EXTRA:
            known = EXTRA.union(*(output.over for output, _ in spoken))
            yield _finding(criterion, key, f"no such parameter{nearest(key, known)}", "name one of the observation's")
        known_values = [item for values in named for item in values]
        if key == "dtype":  # a profile may choose other precisions for the stress than the catalogue does
            known_values += BENCHMARKS["gemm"].settings["dtypes"]
        if named and isinstance(known_values[0], str) and value not in known_values:
            yield _finding(criterion, value, f"no such {key}{nearest(str(value), known_values)}", _one_of(known_values))


def _one_of(values: object) -> str:
    assert isinstance(values, frozenset | set | list)  # noqa: S101 - for the type checker
    return f"use {' or '.join(sorted(map(str, values)))}"


def _type(criterion: Criterion) -> Iterator[Finding]:
    """Whether the limit is of the observation's kind, and can be compared like that."""
    value, name = criterion.value, criterion.name
    if isinstance(value, str | bool) and criterion.operator != "eq":
        kind = "text" if isinstance(value, str) else "true and false"
        yield _finding(criterion, value, f"{kind} cannot be compared by {criterion.operator}", "use eq, or a number")
        return
    number = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if name in TRUTHS and not isinstance(value, bool):
        yield _finding(criterion, value, "the observation is true or false", "write true or false")
    elif name in TEXTS and not isinstance(value, str):
        yield _finding(criterion, value, "the observation is a text", "write the text")
    elif name.split(".")[0] not in COLLECTED and name not in TRUTHS | TEXTS and not number:
        yield _finding(criterion, value, "the observation is a number", "write a number")
    elif criterion.unit != "1" and not number:
        yield _finding(criterion, value, f"a figure in {criterion.unit} is a number", "write a number")


def _expectation(criterion: Criterion) -> Iterator[Finding]:
    """Whether the limit is near what is expected: the part's figure, the inventory's or the fleet's median."""
    fraction = criterion.fraction if criterion.fleet_fraction is None else criterion.fleet_fraction
    if criterion.expected is None and not criterion.variable and criterion.fleet_fraction is None:
        return
    remedy = f"keep within {(1 - LEAST_OF_EXPECTED) * 100:.0f} % of it, or correct the expectation"
    if criterion.operator in FLOORS and fraction < LEAST_OF_EXPECTED:
        yield _finding(criterion, fraction, f"floor {(1 - fraction) * 100:.0f} % under the expectation", remedy)
    if criterion.operator in CEILINGS and fraction > 2 - LEAST_OF_EXPECTED:
        yield _finding(criterion, fraction, f"ceiling {(fraction - 1) * 100:.0f} % over the expectation", remedy)
    if (criterion.operator in FLOORS and fraction > 1) or (criterion.operator in CEILINGS and fraction < 1):
        yield _finding(criterion, fraction, "half of the healthy parts miss it", "turn the fraction or the operator")


def _physics(criterion: Criterion, pack: Pack) -> Iterator[Finding]:
    """A floor, and the expectation behind it, against the datasheet."""
    yield from _links(criterion, pack)
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    if criterion.operator not in FLOORS or not isinstance(limit, int | float) or isinstance(limit, bool):
        return
    peak = _peak(criterion, pack)
    if peak is None:
        return
    ratio, slip = limit / peak.value, _slip(limit / peak.value)
    remedy = f"the datasheet of {pack.name} has {peak.value:g} {criterion.unit} {peak.of}"
    if max(limit, criterion.expected or 0.0) > peak.value:
        yield _finding(criterion, float(limit), f"above the peak, {ratio:.3g} of it{slip}", remedy)
    elif ratio < peak.least:
        yield _finding(criterion, float(limit), f"absurdly low, {ratio:.3g} of the peak{slip}", remedy)


def _slip(ratio: float) -> str:
    """Which slip of the unit a limit looks like: real floors are between 0.3 and 1 of the peak."""
    if 1.8 <= ratio <= 2.2:
        return ", which looks like the figure with sparsity"
    return next((f", which looks like {text}" for factor, text in SLIPS if 0.3 <= ratio / factor <= 1.1), "")


def _links(criterion: Criterion, pack: Pack) -> Iterator[Finding]:
    """Generation, width and number of links, which have one right value a part."""
    for name, part, key in (
        ("gpu.pcie.generation", "pcie", "generation"),
        ("gpu.pcie.width", "pcie", "width"),
        ("gpu.nvlink.active_links", "nvlink", "links"),
    ):
        own, value = pack.datasheet.get(part, {}).get(key), criterion.value
        if own is None or not criterion.speaks_of(name) or not isinstance(value, int | float):
            continue
        if criterion.operator in ("eq", "ge") and value != own:
            why = f"{'under' if value < own else 'over'} the part's own {key}"
            yield _finding(criterion, value, why, f"the datasheet of {pack.name} has {own}")


def _peak(criterion: Criterion, pack: Pack) -> _Peak | None:
    """The peak that bounds what the criterion speaks of; None where the datasheet bounds nothing of it."""
    if criterion.stage == "gang":
        return None  # the fabric's rate is the inventory's to say
    first, _, rest = criterion.name.partition(".")
    bound = _PEAKS.get((first, rest.rpartition(".")[2]))
    return bound(criterion.where, pack) if bound else None


def _flops(where: Mapping[str, Value], pack: Pack) -> _Peak | None:
    peaks = {key: value for key, value in pack.datasheet.get("flops", {}).items() if key != "source"}
    dtype = where.get("dtype")
    if not peaks or (dtype and dtype not in peaks):
        return None
    value = peaks[dtype] if isinstance(dtype, str) else min(peaks.values())
    return _Peak(value=value, of=f"in {dtype or 'its slowest precision'}, dense", least=LEAST_OF_PRODUCT)


def _figure(part: str, of: str) -> Callable[[Mapping[str, Value], Pack], _Peak | None]:
    def peak(where: Mapping[str, Value], pack: Pack) -> _Peak | None:
        value = pack.datasheet.get(part, {}).get("value")
        return _Peak(value=value, of=of, least=LEAST_OF_COPY) if value else None

    return peak


def _pcie(where: Mapping[str, Value], pack: Pack) -> _Peak | None:
    value = pack.datasheet.get("pcie", {}).get("bandwidth")
    ways = 2 if where.get("direction") == "both_ways" else 1
    # All GPUs at once share what the host has: how little that may be is not the part's to say.
    least = LEAST_OF_COPY if where.get("sharing") == "alone" else 0.0
    return _Peak(value=value * ways, of="over PCIe", least=least) if value else None


def _nvlink(where: Mapping[str, Value], pack: Pack) -> _Peak | None:
    value = pack.datasheet.get("nvlink", {}).get("bandwidth")
    ways = 2 if where.get("direction") == "both_ways" else 1
    return _Peak(value=value / 2 * ways, of="over NVLink", least=LEAST_OF_COPY) if value else None


def _busbw(where: Mapping[str, Value], pack: Pack) -> _Peak | None:
    """With NVLS the switch adds, and busbw goes past one way's rate; it never reaches both ways'."""
    value = pack.datasheet.get("nvlink", {}).get("bandwidth")
    ways = 2 if where.get("nvls") else 1
    return _Peak(value=value / 2 * ways, of="over NVLink", least=LEAST_OF_COLLECTIVE) if value else None


_PEAKS: Mapping[tuple[str, str], Callable[[Mapping[str, Value], Pack], _Peak | None]] = {
    ("gemm", "throughput"): _flops,
    ("stress", "throughput"): _flops,
    ("stress", "power"): _figure("power", "at most"),
    ("memory", "bandwidth"): _figure("memory_bandwidth", "of memory bandwidth"),
    ("host_copy", "bandwidth"): _pcie,
    ("peer_copy", "bandwidth"): _nvlink,
    ("collective", "busbw"): _busbw,
}
