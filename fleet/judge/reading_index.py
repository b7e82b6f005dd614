"""Look up the readings of one host by name, without a pass over all of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from schemas.readings import BMC
from schemas.records import Metric, Snapshot

MAX_FORMS = 256
"""Maximum number of cached `_Form` objects. Most hosts of a fleet have the same readings in the same order, and share one."""
_names, _tokens = operator.attrgetter("name"), operator.attrgetter("token")


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What hosts with the same readings in the same order have in common."""

    places: Mapping[str, tuple[int, ...]]
    """Name -> positions, in `ReadingIndex.readings`, of the readings with this name."""
    names: tuple[str, ...]
    """The keys of `places`."""
    snapshots: tuple[int, ...]
    """For each of `ReadingIndex.readings`: the index of its snapshot; snapshots of the host come before those of its BMC."""


class ReadingIndex(Mapping[str, list[tuple[Snapshot, Metric]]]):
    """Name of a reading -> for each snapshot that has the reading: a pair of the snapshot and the reading (a `Metric`).

    Snapshots of the BMC come last.

    A list is built on the first lookup of its name. Readings of BMCs (names that begin with `bmc.`) are taken only from
    `bmc_snapshots`, and all others only from `snapshots`, so a host cannot forge the readings of its BMC.
    """

    def __init__(self, snapshots: Sequence[Snapshot], bmc_snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = (*snapshots, *bmc_snapshots)
        self.readings = list(chain.from_iterable([snapshot.metrics for snapshot in self._snapshots]))
        """The readings of all snapshots. `places` has positions in this list."""
        self._form = _form(
            tuple(map(_names, self.readings)),
            tuple([len(snapshot.metrics) for snapshot in self._snapshots]),
            len(snapshots),
        )
        self._built: dict[str, list[tuple[Snapshot, Metric]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the readings, each once. Hosts with the same readings in the same order share one tuple."""
        return self._form.names

    @property
    def places(self) -> Mapping[str, tuple[int, ...]]:
        """Return name -> positions, in `readings`, of the readings with this name. It is shared like `names`."""
        return self._form.places

    def tokens(self) -> list[int]:
        """Return the token of each of `readings` (`Metric.token`): equal tokens mean equal readings, 0 means no token."""
        return list(map(_tokens, self.readings))

    def __getitem__(self, name: str) -> list[tuple[Snapshot, Metric]]:
        built = self._built.get(name)
        if built is None:
            numbers, readings, snapshots = self._form.snapshots, self.readings, self._snapshots
            places = self._form.places[name]
            built = self._built[name] = [(snapshots[numbers[place]], readings[place]) for place in places]
        return built

    def __contains__(self, name: object) -> bool:
        return name in self._form.places

    def __iter__(self) -> Iterator[str]:
        return iter(self._form.names)

    def __len__(self) -> int:
        return len(self._form.names)


@lru_cache(maxsize=MAX_FORMS)
def _form(names: tuple[str, ...], sizes: tuple[int, ...], of_host: int) -> _Form:
    """Return the form of a host's snapshots.

    Args:
        names: the names of the readings of all snapshots, one after the other.
        sizes: the number of readings of each snapshot.
        of_host: the number of snapshots of the host itself. They come first; the others are of its BMC.
    """
    snapshots = tuple(chain.from_iterable([number] * size for number, size in enumerate(sizes)))
    places: dict[str, list[int]] = {}
    for place, (name, snapshot) in enumerate(zip(names, snapshots, strict=True)):
        if name.startswith(BMC) == (snapshot >= of_host):
            places.setdefault(name, []).append(place)
    return _Form(
        places={name: tuple(of_name) for name, of_name in places.items()}, names=tuple(places), snapshots=snapshots
    )
