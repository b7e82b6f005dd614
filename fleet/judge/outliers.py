"""Compare a figure of one part with those of all parts of its kind in the fleet, for criteria with `vs_fleet`.

The limit is a fraction of the fleet's median, or a number of robust deviations from it (scaled median absolute deviations).

The median and the median absolute deviation are robust: several outliers hardly move them, unlike the mean and the
standard deviation. If a fleet is too small for a limit of this kind, the other limits of the packs still apply.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleet.judge.criteria import Criterion
from fleet.judge.drift import is_drift
from fleet.judge.evidence import Planned
from fleet.judge.finding import FLOORS
from fleet.judge.host_view import HostView
from schemas.records import MEASURED, Observation, Value
from schemas.reports import Verdict
from schemas.scopes import Scope

MIN_PEERS_FOR_MEDIAN = 3
"""Number of peers below which there is no median: of two values, either may be the outlier."""
LOWEST_FLOOR = 0.5
"""If a criterion has a fraction and deviations, the deviations lower a floor at most to this share of the limit of the fraction.
Otherwise, figures that vary a lot between the parts would give a floor below 0, which finds nothing."""
MIN_PEERS_FOR_DEVIATION = 8
"""Number of peers below which there is no deviation: the deviation of eight peers has a standard error of 40 %."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""
KINDS = {
    "gpu": ("GPU", "GPUs"),
    "cpu": ("process", "processes"),
    "host": ("host", "hosts"),
    "peer": ("pair of GPUs", "pairs of GPUs"),
    "gang": ("gang", "gangs"),
    "link": ("link", "links"),
    "lane": ("lane", "lanes"),
    "port": ("port", "ports"),
    "numa": ("NUMA node", "NUMA nodes"),
    "partner": ("pair of ports", "pairs of ports"),
    "directory": ("directory", "directories"),
}
"""Kind of scope -> its name in singular and plural."""

MODULE_READINGS, MODULE_MODEL = "optics.", "optics.module.part_number"
"""Prefix of readings of modules (transceivers or cable ends), and the reading of their model. Only equal models are compared."""
UNKNOWN_MODULE = "an unknown model"

MEMORY_FIGURES = "memory."
"""Prefix of the figures of the GPU's memory. They are compared only with those of GPUs with the same part number: boards of one
model with different part numbers differ by 2 % in memory bandwidth (measured, H200)."""
DISK_FIGURES = "local_storage."
"""Prefix of the figures of disks. Their parameter `model` has the level of an array, the encryption, and number, models and sizes
of the disks. Only figures with the same text are compared. Virtual disks have no model."""
HOST_FIGURES = ("host_memory.", "host_compute.", "host_copy.", "dataloader.")
"""Prefixes of the figures that depend on processors, memory or PCIe slots of the host. Only hosts of the same product are
compared (`HostView.server`), because servers of two vendors with the same GPUs differ in these parts. Other figures are compared
across products."""
WIRED_FIGURES = (
    "collective.", "fashion_mnist.", "group_copy.", "mixture_of_experts.", "model_parallel.", "training.", "transformer.",
    "variants.",
)  # fmt: skip
"""Prefixes of the figures for which the GPUs of a host exchange data. They are compared only between hosts whose GPUs are joined
in the same way, by NVLinks or PCIe. If no NVLink joins some of the GPUs, the data pass PCIe switches, processors or memory of the
host, so that only hosts of the same product are compared."""

SHARED_FIGURES = "dataloader."
"""Prefix of the figures for which the ranks of all GPUs share the processors of the host at the same time. They are compared only
between hosts with the same number of GPUs."""

FigureKey = tuple[str, str, str, str, tuple[tuple[str, Value], ...], str]
"""Model (of the GPU, module or disk; for figures that depend on the host, also its product), name, stage, kind of scope and
settings: comparable figures share all of these. The last item is the part number of the GPU; empty if this is unknown or if the
figure is not of a GPU's memory."""
_ModelKey = tuple[str, str, str, str, tuple[tuple[str, Value], ...]]
"""A FigureKey without the part number."""


@dataclass(frozen=True, kw_only=True)
class PeerGroup:
    """The figures that one figure is compared with, including itself."""

    model: str
    kind: str
    """Kind of scope, such as `gpu` or `host`."""
    values: tuple[float, ...]
    position: str = ""
    """Position of the parts in their hosts (`gpu=3`) if only parts in that position are compared; otherwise empty."""
    part_number: str = ""
    """Part number of the GPUs, or `unknown`, if only some GPUs of the model, those with this part number, are compared; otherwise
    empty."""

    @property
    def count(self) -> str:
        """Return the number of peers in words: `16 GPUs`; `16 GPUs with part number 692-2G520-0282-001 at gpu=3`."""
        part_number = f" with part number {self.part_number}" if self.part_number else ""
        where = f" at {self.position}" if self.position else ""
        singular, plural = KINDS.get(self.kind, ("part", "parts"))
        return f"{len(self.values)} {singular if len(self.values) == 1 else plural}{part_number}{where}"

    @property
    def has_median(self) -> bool:
        """Return whether there are enough peers for a median."""
        return len(self.values) >= MIN_PEERS_FOR_MEDIAN

    @cached_property
    def median(self) -> float:
        """Return the median of the values. Raises statistics.StatisticsError if there are none."""
        return statistics.median(self.values)

    @cached_property
    def deviation(self) -> float | None:
        """Return the robust standard deviation of the values; None if they are too few."""
        if len(self.values) < MIN_PEERS_FOR_DEVIATION:
            return None
        middle = self.median
        return SIGMA_OF_MAD * statistics.median(abs(value - middle) for value in self.values)


class FleetFigures:
    """Every figure that a criterion compares with the fleet: the last value of each part.

    Only the value of an observation and the position of its part in the host are kept, so 100 000 hosts fit into memory. Figures
    of different hosts can be merged in any order.
    """

    def __init__(self, planned: Planned, views: Iterable[HostView] = ()) -> None:
        self._planned = planned
        self._values: dict[_ModelKey, dict[tuple[str, str], array[float]]] = {}
        """Key without part number -> (part number, position in the host) -> figures."""
        self._of_gangs: dict[_ModelKey, dict[str, float]] = {}
        self._peers: dict[tuple[_ModelKey, str | None, str], PeerGroup] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Add the figures of one host."""
        for name in compared_names(view, view.observations):
            for key, scope, number in self.figures(view, name):
                self.add_figures(key, scope, [number])

    def figures(self, view: HostView, name: str) -> Iterator[tuple[FigureKey, str, float]]:
        """Yield key, scope and number of each figure of that name on a host."""
        for (key, scope), observation in self.latest(view, view.observations[name]).items():
            yield key, scope, float(observation.value or 0)

    def latest(self, view: HostView, observations: Iterable[Observation]) -> dict[tuple[FigureKey, str], Observation]:
        """Return the last numeric observation of each figure and scope, except of modules and disks of an unknown model."""
        latest = {}
        for observation in observations:
            value = observation.value
            if observation.status == MEASURED and isinstance(value, int | float) and math.isfinite(value):
                latest[(self.key(view, observation), observation.scope)] = observation
        return {item: observation for item, observation in latest.items() if item[0][0] != UNKNOWN_MODULE}

    def add_figures(self, key: FigureKey, scope: str, numbers: Sequence[float]) -> None:
        """Add the figures that one or more hosts have for this key and scope.

        A drift above 1 counts as 1: the rate did not fall. How far it is above 1 depends on how much the rate varies.
        """
        self._peers.clear()
        if is_drift(key[1]):
            numbers = [min(number, 1.0) for number in numbers]
        parsed = Scope.parse(scope)
        if parsed.is_gang:
            # Every member of a gang reports the same figure of the gang. Count it once.
            self._of_gangs.setdefault(key[:5], {})[scope] = numbers[-1]
            return
        self._values.setdefault(key[:5], {}).setdefault((key[5], parsed.device), array("d")).extend(numbers)

    def update(self, other: FleetFigures) -> None:
        """Add the figures of other hosts."""
        for key, positions in other._values.items():
            merged = self._values.setdefault(key, {})
            for position, values in positions.items():
                merged.setdefault(position, array("d")).extend(values)
        for key, of_gangs in other._of_gangs.items():
            self._of_gangs.setdefault(key, {}).update(of_gangs)
        self._peers.clear()

    def peers(self, view: HostView, observation: Observation, criterion: Criterion | None = None) -> PeerGroup:
        """Return the peers of a figure of this host: the parts with which it is compared.

        Peers are all parts of the model. For figures of memory, they are only the parts with the same part number. Parts of an
        unknown part number count as those of the only part number that the fleet has; if it has several, they are compared only
        with each other. If the criterion has `by_position`, peers are only the parts in the same position of their hosts, if
        these are enough for a deviation.
        """
        return self.peers_at(self.key(view, observation), observation.scope, criterion)

    def peers_at(self, key: FigureKey, scope: str, criterion: Criterion | None = None) -> PeerGroup:
        """Return the peers of a figure by its key and scope."""
        position = Scope.parse(scope).device if criterion and criterion.by_position else ""
        part_numbers = {number for number, _ in self._values.get(key[:5], ()) if number}
        part_number = key[5] if len(part_numbers | {key[5]} - {""}) > 1 else None
        if position:
            same_position = self._peer_group(key[:5], part_number, position)
            if len(same_position.values) >= MIN_PEERS_FOR_DEVIATION:
                return same_position
        return self._peer_group(key[:5], part_number, "")

    def _peer_group(self, key: _ModelKey, part_number: str | None, position: str) -> PeerGroup:
        """Return the parts with this part number (empty: unknown; None: any) in this position (empty: any) of their hosts."""
        chosen = (key, part_number, position)
        if chosen not in self._peers:
            groups = self._values.get(key, {})
            values = [
                value
                for (number, place), numbers in groups.items()
                if part_number in (None, number) and position in ("", place)
                for value in numbers
            ]
            values += [
                value
                for scope, value in self._of_gangs.get(key, {}).items()
                if part_number is None and position in ("", Scope.parse(scope).device)
            ]
            self._peers[chosen] = PeerGroup(
                model=key[0] or "this kind",
                kind=key[3],
                values=tuple(sorted(values)),
                position=position,
                part_number="" if part_number is None else part_number or "unknown",
            )
        return self._peers[chosen]

    def key(self, view: HostView, item: Observation | Verdict) -> FigureKey:
        """Return the key that a figure of this host shares with its peers."""
        scope = Scope.parse(item.scope)
        name = view.names.get(scope.device)
        if item.name.startswith(DISK_FIGURES):
            disks, sharing = item.params.get("model"), item.params.get("directories", 1)
            # Directories on the same disk share its rate, so only disks with equally many directories are compared.
            name = str(disks) + (f", {sharing} directories" if sharing != 1 else "") if disks else UNKNOWN_MODULE
        if item.name.startswith(MODULE_READINGS):
            name = view.module_models.get(scope.without("lane"), UNKNOWN_MODULE)
        model = name if name is not None else view.peer_key[0]
        if view.server and _depends_on_host(view, item.name):
            model = f"{model} in {view.server}"
        part_number = view.part_numbers.get(scope.device, "") if item.name.startswith(MEMORY_FIGURES) else ""
        settings = tuple(self._planned.params(item).items())
        if item.name.startswith(WIRED_FIGURES) and not scope.is_gang:
            settings += (("nvlinks", view.wiring),)
        if item.name.startswith(SHARED_FIGURES):
            settings += (("gpus", len(view.host.devices)),)
        return model, item.name, item.stage, scope.kind, settings, part_number


def _depends_on_host(view: HostView, name: str) -> bool:
    """Return whether a figure depends on processors, memory or PCIe of the host."""
    return name.startswith(HOST_FIGURES) or (name.startswith(WIRED_FIGURES) and 0 in view.nvlinks.values())


def model_readings(criterion: Criterion) -> tuple[str, ...]:
    """Return the readings that decide which parts a criterion compares with each other, besides the model of the GPUs."""
    return (MODULE_MODEL,) if criterion.vs_fleet and criterion.name.startswith(MODULE_READINGS) else ()


def compared_names(view: HostView, names: Collection[str]) -> list[str]:
    """Return those of the names whose observations a criterion compares with the fleet."""
    criteria = [item for item in view.criteria().values() if item.vs_fleet]
    compared = {name for criterion in criteria for name in criterion.matched(names)}
    return [name for name in names if name in compared]


def has_enough_peers(criterion: Criterion | None, peers: PeerGroup) -> bool:
    """Return whether there are enough peers for the limit of the criterion; without a criterion, for a median."""
    needs_median = criterion is None or criterion.fleet_fraction is not None
    return peers.has_median if needs_median else peers.deviation is not None


def limit(criterion: Criterion, peers: PeerGroup) -> float:
    """Return the limit from the fleet. If fraction and deviations are both set, the limit farther from the median counts.

    But a floor is at least LOWEST_FLOOR times the limit of the fraction. Call this function only if `has_enough_peers`.

    Raises:
        ValueError: there are no peers, or too few for a criterion that has deviations only.
    """
    return _limit(criterion, peers)[0]


def _limit(criterion: Criterion, peers: PeerGroup) -> tuple[float, float | None]:
    """Return the limit, and its share of the median. The share is None if the limit is a number of deviations from the median."""
    middle, deviation, deviations = peers.median, peers.deviation, criterion.fleet_deviations
    fraction, is_floor = criterion.fleet_fraction, criterion.operator in FLOORS
    if deviations is None or deviation is None:
        if fraction is None:
            raise ValueError(f"{peers.count} are too few for criterion `{criterion.id}`")
        return fraction * middle, fraction
    by_deviations = middle - deviations * deviation if is_floor else middle + deviations * deviation
    if fraction is None:
        return by_deviations, None
    if not is_floor:
        by_fraction = fraction * middle
        return (by_fraction, fraction) if by_fraction >= by_deviations else (by_deviations, None)
    lowest = LOWEST_FLOOR * fraction
    found = max(min(by_deviations, fraction * middle), min(lowest * middle, fraction * middle))
    return found, next((share for share in (fraction, lowest) if found == share * middle), None)


def explanation(criterion: Criterion, peers: PeerGroup, median: str) -> str:
    """Return the origin of the limit: `the limit is 95 % of the fleet's median 4200 GB/s over 16 GPUs`."""
    fraction = _limit(criterion, peers)[1]
    if fraction is not None:
        return f"the limit is {fraction * 100:g} % of the fleet's median {median} over {peers.count}"
    share = (peers.deviation or 0.0) / abs(peers.median) * 100 if peers.median else None
    of_median = f" (a deviation is {share:.2g} % of the median)" if share is not None else ""
    deviations = f"{criterion.fleet_deviations:g} robust deviations"
    return f"the limit is {deviations} from the fleet's median {median} over {peers.count}{of_median}"


def too_few_reason(peers: PeerGroup, criterion: Criterion) -> str:
    """Return why the fleet is too small for a limit."""
    needs = (
        f"a deviation needs at least {MIN_PEERS_FOR_DEVIATION}"
        if criterion.fleet_fraction is None
        else f"a median needs at least {MIN_PEERS_FOR_MEDIAN}"
    )
    return f"the run has {peers.count} of {peers.model} with this figure, but {needs}"
