"""Compare floors (lower limits) with the datasheet.

A floor above the peak rejects every host. A floor far below the peak accepts every host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from fleet.judge.criteria import Criterion, Pack, Where
from fleet.judge.finding import FLOORS, Finding, finding_on
from schemas.records import is_number
from schemas.stages import GANG

LEAST_OF_DATASHEET = 0.05
"""Lowest fraction that the lint accepts in `vs_datasheet`. It also applies to `vs_inventory` if the basis is `model`."""
_DATASHEET_UNITS = {
    "flops": "FLOP/s",
    "memory_size": "B",
    "memory_bus": "1",
    "memory_clock": "Hz",
    "cores": "1",
    "sm_clock": "Hz",
    "memory_bandwidth": "B/s",
    "power": "W",
    "pcie": "B/s",
    "host_link": "B/s",
    "nvlink": "B/s",
    "all_nvlinks": "B/s",
}
MIN_COPY_FRACTION, MIN_GEMM_FRACTION, MIN_COLLECTIVE_FRACTION = 0.5, 0.4, 0.02
"""Lowest floors that the lint accepts, as fractions of the datasheet's peak: for copies, memory and power; for matrix products;
for collectives. They do not apply to floors that are given by `vs_datasheet`."""
UNIT_MISTAKES = (
    (1e-12, "a figure in tera-units"),
    (1e-9, "a figure in giga-units"),
    (1e-6, "a figure in mega-units"),
    (1e-3, "a figure a thousand times too low (GB written as MB)"),
    (1 / 8, "bytes divided by 8"),
    (8.0, "bits taken for bytes"),
    (1e3, "a figure a thousand times too high (MB written as GB)"),
    (1e6, "a figure a million times too high"),
)
"""Factor by which a mistake multiplies a figure, and the mistake in words."""


@dataclass(frozen=True, kw_only=True)
class _Peak:
    """The datasheet's maximum, and the fraction of it that a floor must reach. A lower floor would detect no fault."""

    value: float
    of: str
    """What the value is, as text that follows the unit: `over NVLink`."""
    least: float


def check_physics(criterion: Criterion, pack: Pack) -> Iterator[Finding]:
    """Compare a criterion with the datasheet.

    Checked are a floor, the expected value that the floor is a fraction of, and limits on PCIe and NVLink properties.
    """
    yield from _check_links(criterion, pack)
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    if criterion.operator not in FLOORS or not is_number(limit):
        return
    peak = _peak(criterion, pack)
    if peak is None:
        return
    ratio, mistake = limit / peak.value, _unit_mistake(limit / peak.value)
    remedy = f"the datasheet of {pack.name} has {peak.value:g} {criterion.unit} {peak.of}"
    if max(limit, 0.0 if criterion.datasheet else criterion.expected or 0.0) > peak.value:
        floor_is_low = f"the expected value is above the peak; the floor is {ratio:.3g} of the peak"
        why = f"above the peak: {ratio:.5g} times as high" if limit > peak.value else floor_is_low
        yield finding_on(criterion, float(limit), f"{why}{mistake}", remedy)
    elif ratio < peak.least and not criterion.datasheet:
        yield finding_on(criterion, float(limit), f"far too low, {ratio:.3g} of the peak{mistake}", remedy)


def check_share_of_datasheet(criterion: Criterion) -> Iterator[Finding]:
    """Check a limit that is a fraction of the datasheet: its unit, precision, operator and fraction."""
    figure = criterion.datasheet
    if not figure:
        return
    unit = _DATASHEET_UNITS[figure]
    if criterion.unit != unit:
        yield finding_on(
            criterion, figure, f"the datasheet has this figure in {unit}, not in {criterion.unit}", "use another figure"
        )
    if figure == "flops" and not isinstance(criterion.where.get("dtype"), str):
        yield finding_on(criterion, figure, "the datasheet has a figure for each precision", "add `dtype` to `where`")
    if criterion.operator not in FLOORS:
        yield finding_on(criterion, criterion.operator, "a datasheet states the most that a part can reach", "use `ge`")
    # `vs_datasheet` compares with the rate of one direction of a link. Both directions together can reach twice this rate.
    most = 2.0 if criterion.where.get("direction") == "both_ways" else 1.0
    if not LEAST_OF_DATASHEET <= criterion.fraction <= most:
        why = "above the peak" if criterion.fraction > most else "far too low"
        remedy = f"use a fraction from {LEAST_OF_DATASHEET:g} to {most:g}"
        yield finding_on(
            criterion, criterion.fraction, f"{why}, {criterion.fraction:g} of the datasheet's {figure}", remedy
        )


def _unit_mistake(ratio: float) -> str:
    """Return the ending of a message: the mistake that may explain a floor of `ratio` times the peak; empty if none does.

    A mistake of units explains the floor if the corrected floor is 0.3 to 1.1 of the peak.
    """
    if 1.8 <= ratio <= 2.2:
        return ", which looks like the figure with sparsity"
    return next((f", which looks like {text}" for factor, text in UNIT_MISTAKES if 0.3 <= ratio / factor <= 1.1), "")


def _check_links(criterion: Criterion, pack: Pack) -> Iterator[Finding]:
    """Report a limit that differs from the datasheet. Checked are PCIe generation, PCIe width and the number of NVLinks.

    Only limits with the operator `eq` or `ge` are checked.
    """
    for name, part, key in (
        ("gpu.pcie.generation", "pcie", "generation"),
        ("gpu.pcie.width", "pcie", "width"),
        ("gpu.nvlink.active_links", "nvlink", "links"),
    ):
        nominal, value = pack.datasheet.get(part, {}).get(key), criterion.value
        if nominal is None or not criterion.matches_name(name) or not isinstance(value, int | float):
            continue
        if criterion.operator in ("eq", "ge") and value != nominal:
            what = "number of NVLinks" if part == "nvlink" else f"PCIe {key}"
            why = f"{'lower' if value < nominal else 'higher'} than the part's {what}"
            yield finding_on(criterion, value, why, f"the datasheet of {pack.name} has {nominal}")


def _peak(criterion: Criterion, pack: Pack) -> _Peak | None:
    """Return the datasheet's maximum for what the criterion judges; None if the datasheet has none."""
    if criterion.stage == GANG:
        return None  # the network between the hosts limits these figures, and no GPU datasheet states the rate of the network
    first, _, rest = criterion.name.partition(".")
    bound = _PEAKS.get((first, rest.rpartition(".")[2]))
    return bound(criterion.where, pack) if bound else None


def _flops(where: Where, pack: Pack) -> _Peak | None:
    peaks = {key: value for key, value in pack.datasheet.get("flops", {}).items() if key != "source"}
    dtype = where.get("dtype")
    if not peaks or (dtype is not None and not (isinstance(dtype, str) and dtype in peaks)):
        return None
    value = min(peaks.values()) if dtype is None else peaks[dtype]
    return _Peak(value=value, of=f"in {dtype or 'its slowest precision'}, dense", least=MIN_GEMM_FRACTION)


def _figure(part: str, of: str, where: Where, pack: Pack) -> _Peak | None:
    value = pack.datasheet.get(part, {}).get("value")
    return _Peak(value=value, of=of, least=MIN_COPY_FRACTION) if value else None


def _pcie(where: Where, pack: Pack) -> _Peak | None:
    value = pack.datasheet.get("pcie", {}).get("bandwidth")
    ways = 2 if where.get("direction") == "both_ways" else 1
    # Without `sharing=alone`, all GPUs copy at once and share the bandwidth of the host, which is not in the GPU's datasheet.
    least = MIN_COPY_FRACTION if where.get("sharing") == "alone" else 0.0
    return _Peak(value=value * ways, of="over PCIe", least=least) if value else None


def _nvlink(where: Where, pack: Pack) -> _Peak | None:
    value = pack.datasheet.get("nvlink", {}).get("bandwidth")  # both directions together
    ways = 2 if where.get("direction") == "both_ways" else 1
    return _Peak(value=value / 2 * ways, of="over NVLink", least=MIN_COPY_FRACTION) if value else None


def _busbw(where: Where, pack: Pack) -> _Peak | None:
    """Return the maximum of busbw, NCCL's bus bandwidth: the NVLink rate of one direction, or twice that rate with NVLS.

    With NVLS (NVLink SHARP) the switch does the reduction, so busbw can exceed the rate of one direction.
    """
    value = pack.datasheet.get("nvlink", {}).get("bandwidth")
    ways = 2 if where.get("nvls") else 1
    return _Peak(value=value / 2 * ways, of="over NVLink", least=MIN_COLLECTIVE_FRACTION) if value else None


_PEAKS: Mapping[tuple[str, str], Callable[[Where, Pack], _Peak | None]] = {
    ("gemm", "throughput"): _flops,
    ("stress", "throughput"): _flops,
    ("stress", "power"): partial(_figure, "power", "at most"),
    ("memory", "bandwidth"): partial(_figure, "memory_bandwidth", "of memory bandwidth"),
    ("host_copy", "bandwidth"): _pcie,
    ("peer_copy", "bandwidth"): _nvlink,
    ("collective", "busbw"): _busbw,
}
