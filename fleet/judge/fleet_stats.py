"""Statistics of the whole fleet that the judge needs to judge one host."""

from __future__ import annotations

from fleet.judge.bmc import serials_of_gpus
from fleet.judge.bmc_owner import HostSerials
from fleet.judge.changed_software import SoftwareChanges
from fleet.judge.digests import DigestCounts
from fleet.judge.duplicates import DuplicateSerials
from fleet.judge.evidence import Planned
from fleet.judge.host_inventory import HostInventory, host_inventory
from fleet.judge.host_view import HostView
from fleet.judge.link_faults import LinkFaults
from fleet.judge.missing import SlotMap
from fleet.judge.nvlink_domains import NvlinkDomains
from fleet.judge.one_machine import Machines
from fleet.judge.outliers import FleetFigures
from fleet.judge.paths import NormalPaths
from fleet.judge.reading_support import ReadingSupport
from fleet.judge.slot_limits import LaneCounts
from fleet.judge.stated_values import StatedValues
from fleet.judge.stragglers import RankFigures
from fleet.judge.uniformity import ValueGroups
from fleet.judge.wiring.links import HostLinks, host_links


class FleetStats:
    """The figures, versions, digests, parts and links with which hosts are compared.

    Statistics of different hosts can be merged in any order. Call `complete` after the last merge, before hosts are judged.
    """

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.figures = FleetFigures(planned)
        self.groups = ValueGroups()
        self.digests = DigestCounts(planned)
        self.ranks = RankFigures()
        self.duplicates = DuplicateSerials()
        self.serials = HostSerials()
        self.slots = SlotMap()
        self.lanes = LaneCounts()
        self.domains = NvlinkDomains()
        self.machines = Machines()
        self.link_faults = LinkFaults()
        self.paths = NormalPaths()
        self.support = ReadingSupport()
        self.stated = StatedValues()
        self.software = SoftwareChanges()
        self.inventories: list[HostInventory] = []
        """The parts of each host; only if the plan has a manifest."""
        self.links: list[HostLinks] = []
        """The network ports of each host."""

    def add_identities(self, view: HostView) -> None:
        """Add what is counted for each host separately: parts, slots, lanes, NVLink domain, machine, links, digests, support."""
        adapters, confirmed = view.plan.judges_ports(view.host), serials_of_gpus(view)
        self.duplicates.add(view.host.name, view.evidence, adapters=adapters, confirmed_by_bmc=confirmed)
        self.serials.add(view)
        self.slots.add(view)
        self.lanes.add(view)
        self.domains.add(view)
        self.machines.add(view)
        self.link_faults.add(view)
        self.support.add(view)
        self.stated.add(view, self.figures)
        self.software.add(view, self.figures)
        if view.has_record:
            self.digests.add(view)
        self.links.append(host_links(view))
        if self.planned.has_manifest:
            self.inventories.append(host_inventory(view))

    def add_values(self, view: HostView) -> None:
        """Add the figures, versions and transport paths of one host. `gather` does this for several hosts at once if it can."""
        self.figures.add(view)
        self.groups.add(view)
        self.ranks.add(view)
        if view.has_record:
            self.paths.add(view, self.figures)

    def update(self, other: FleetStats) -> None:
        """Add the statistics of other hosts."""
        self.figures.update(other.figures)
        self.groups.update(other.groups)
        self.digests.update(other.digests)
        self.ranks.update(other.ranks)
        self.duplicates.update(other.duplicates)
        self.serials.update(other.serials)
        self.slots.update(other.slots)
        self.lanes.update(other.lanes)
        self.domains.update(other.domains)
        self.machines.update(other.machines)
        self.link_faults.update(other.link_faults)
        self.paths.update(other.paths)
        self.support.update(other.support)
        self.stated.update(other.stated)
        self.software.update(other.software)
        self.inventories += other.inventories
        self.links += other.links

    def complete(self) -> None:
        """Compute what requires the statistics of all hosts."""
        self.paths.find_normal_paths(self.figures)
        self.machines.complete()
        self.stated.complete()
        self.software.complete()
