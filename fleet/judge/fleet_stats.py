"""What the judge must know of the whole fleet to judge one host: gathered host by host, in any order, and put together."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.judge.digests import Digests
from fleet.judge.evidence import HostView, Planned
from fleet.judge.expectations import Twins
from fleet.judge.missing import Slots
from fleet.judge.outliers import Fleet
from fleet.judge.paths import Path
from fleet.judge.stragglers import Ranks
from fleet.judge.uniformity import Groups


class Known:
    """Figures, versions, digests, serials and slots of all hosts, as far as others are compared with them."""

    def __init__(self, planned: Planned, views: Iterable[HostView] = ()) -> None:
        self.fleet = Fleet(planned)
        self.groups = Groups()
        self.digests = Digests(planned)
        self.ranks = Ranks()
        self.twins = Twins()
        self.slots = Slots()
        self.normal: set[Path] = set()
        """Paths that explain no slowness, besides those of the hosts that are judged."""
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Takes what one host shows."""
        self.compare(view)
        if view.has_record:
            self.digests.add(view)
        self.name(view)

    def name(self, view: HostView) -> None:
        """Takes which GPUs a host has, and where."""
        self.twins.add(view.host.name, view.evidence)
        self.slots.add(view)

    def compare(self, view: HostView) -> None:
        """Takes the figures and versions of one host."""
        self.fleet.add(view)
        self.groups.add(view)
        self.ranks.add(view)

    def update(self, other: Known) -> None:
        """Takes what is known of other hosts."""
        self.fleet.update(other.fleet)
        self.groups.update(other.groups)
        self.digests.update(other.digests)
        self.ranks.update(other.ranks)
        self.twins.update(other.twins)
        self.slots.update(other.slots)
        self.normal |= other.normal
