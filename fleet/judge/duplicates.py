"""Find parts that two hosts report, and records that have the name of one host but were written by another machine.

If two machines report the same part, the part fails: one of the two reports is forged or wrong. If one machine wrote the records
of two hosts, no part is at fault: the inventory has the machine under two names, or a record was delivered under the name of
another host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from fleet.judge.bmc import HOST_SERIAL, is_serial
from fleet.judge.evidence import Evidence
from fleet.scope_text import describe_scope
from schemas.records import Gpu, Metric, Record
from schemas.reports import FAIL, INCONCLUSIVE, RECORD, Verdict, VerdictKind
from schemas.run_directory import record_name

Location = tuple[str, str]
"""Host and scope of a part."""
Identity = tuple[str, str]
"""Name of the reading that identifies a part, and its value."""
MAC_ADDRESS = "network.address"
ADAPTER_IDENTITIES = frozenset({"infiniband.hca.node_guid", MAC_ADDRESS})
VIRTUAL_MACHINE = "host.virtual_machine"
LISTED = 3
"""Maximum number of serials that a reason lists."""


class DuplicateSerials:
    """The locations of serials, UUIDs, GUIDs and MAC addresses."""

    def __init__(self) -> None:
        self._first: dict[Identity, Location] = {}
        self._more: dict[Identity, list[Location]] = {}
        self._gpus: Counter[str] = Counter()
        """Host -> number of identities (serials and UUIDs) of its GPUs."""
        self._disputed: defaultdict[Identity, set[str]] = defaultdict(set)
        """Identity -> hosts with a record that has it. A host is included only if different machines wrote its records."""
        self._confirmed: dict[Location, bool] = {}
        """Location of a GPU -> whether the BMC of its host reports its serial, for the GPUs that can be compared."""

    def add(
        self,
        host: str,
        evidence: Evidence,
        *,
        adapters: bool = True,
        confirmed_by_bmc: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """Add the GPUs of a host, and its network adapters unless the hosts may share them (`Plan.judges_ports`).

        `confirmed_by_bmc`: scope of a GPU -> whether the BMC of the host reports its serial, for the GPUs that can be compared.

        If the records of the host were written by different machines, the judge does not know which parts the host has. None of
        these parts then counts as a duplicate.
        """
        if evidence.foreign:
            for record in (*evidence.records, *evidence.foreign):
                for _, identity in _identities(record.gpus):
                    self._disputed[identity].add(host)
            return
        self._confirmed.update({(host, scope): value for scope, value in confirmed_by_bmc.items()})
        for gpu, identity in _identities(evidence.gpus()):
            self._gpus[host] += 1
            self._add_location(identity, (host, f"gpu={gpu.index}"))
        for scope, identity in _adapter_identities(evidence) if adapters else ():
            self._add_location(identity, (host, scope))

    def _add_location(self, identity: Identity, location: Location) -> None:
        if self._first.setdefault(identity, location) != location:
            self._more.setdefault(identity, []).append(location)

    def update(self, other: DuplicateSerials) -> None:
        """Add the parts of other hosts."""
        for identity, location in other._first.items():
            self._add_location(identity, location)
        for identity, locations in other._more.items():
            for location in locations:
                self._add_location(identity, location)
        self._gpus.update(other._gpus)
        self._confirmed.update(other._confirmed)
        for identity, hosts in other._disputed.items():
            self._disputed[identity] |= hosts

    def others(self, identity: Identity, location: Location) -> list[Location]:
        """Return the other locations of an identity, sorted by host."""
        return sorted({self._first.get(identity, location), *self._more.get(identity, ())} - {location})

    def is_rightful(self, location: Location, others: Iterable[Location]) -> bool:
        """Return whether the BMC confirms the serial of a GPU, and the BMCs of the other locations contradict theirs."""
        return self._confirmed.get(location, False) and not any(self._confirmed.get(other, True) for other in others)

    def same_machine(self, host: str, evidence: Evidence) -> list[str]:
        """Return the other hosts whose records were written by the same machine as those of `host`.

        That is so if all GPUs of one of the two hosts are also GPUs of the other. If `host` reports adapters, the two hosts must
        also have an adapter in common. Two hosts with equal GPUs but different adapters are two machines
        with forged GPU identities.
        """
        shared: Counter[str] = Counter()
        for gpu, identity in _identities(evidence.gpus()):
            shared.update({other for other, _ in self.others(identity, (host, f"gpu={gpu.index}"))} - {host})
        others = [other for other, count in sorted(shared.items()) if count >= min(self._gpus[host], self._gpus[other])]
        adapters = list(_adapter_identities(evidence)) if others else []
        with_adapter = {other for scope, identity in adapters for other, _ in self.others(identity, (host, scope))}
        return [other for other in others if not adapters or other in with_adapter]

    def hosts_with(self, identities: Iterable[Identity]) -> set[str]:
        """Return every host with a record that lists a GPU or adapter with one of these identities."""
        listed = [identity for identity in identities if identity in self._first]
        locations = [location for key in listed for location in (self._first[key], *self._more.get(key, ()))]
        disputed = {host for identity in identities for host in self._disputed.get(identity, ())}
        return {host for host, _ in locations} | disputed

    def hosts(self) -> set[str]:
        """Return the hosts with a part whose identity is also at another location."""
        return {host for key, locations in self._more.items() for host, _ in (self._first[key], *locations)}


def _identities(gpus: Iterable[Gpu]) -> Iterator[tuple[Gpu, Identity]]:
    """Yield each GPU with its serial, and again with its UUID. A serial of zeros counts as none.

    The GPUs of one board (an A16 has four) may all report the serial of the board. If they have UUIDs, only the first of them is
    yielded with this serial.
    """
    boards: set[str] = set()
    for gpu in gpus:
        if gpu.serial.strip("0 ") and not (gpu.uuid and gpu.serial in boards):
            yield gpu, ("gpu.serial", gpu.serial)
        if gpu.uuid:
            boards.add(gpu.serial)
            yield gpu, ("gpu.uuid", gpu.uuid)


def _adapter_identities(evidence: Evidence) -> Iterator[tuple[str, Identity]]:
    """Yield scope and identity of each network adapter, from the last snapshot with the reading of the identity.

    Adapters of a virtual machine have none: the hypervisor assigns their GUIDs and MAC addresses, and may assign one to several
    machines. Hyper-V takes them from a small pool, so that healthy virtual machines often share one.
    """
    last: dict[str, Metric] = {}
    for snapshot in evidence.snapshots():
        for metric in snapshot.metrics:
            if metric.name == VIRTUAL_MACHINE and True in metric.values.values():
                return
            if metric.name in ADAPTER_IDENTITIES:
                last[metric.name] = metric
    for name, metric in last.items():
        for scope, value in metric.values.items():
            if _is_unique(name, str(value)):
                yield scope, (name, str(value).lower())


_ASSIGNED = frozenset("014589cd")
"""Possible second hex digits of a GUID or MAC address that a manufacturer assigned. In these digits the bit with value 2, which
marks locally administered addresses, is 0."""
_OF_MAC = "fffe"
"""Hex digits in the middle of a GUID that a driver or hypervisor made from a MAC address (EUI-64)."""


def _is_unique(name: str, value: str) -> bool:
    """Return whether a manufacturer assigned the value: it is neither zero nor locally administered (IEEE 802).

    A GUID that was made from a MAC address is not unique. Some drivers invert the bit that marks local addresses, so only the
    MAC address itself shows whether it is one.
    """
    digits = value.replace(":", "").lower()
    is_of_mac = name != MAC_ADDRESS and digits[6:10] == _OF_MAC
    return digits.strip("0") != "" and digits[1:2] in _ASSIGNED and not is_of_mac


def duplicate_identities(evidence: Mapping[str, Evidence], known: DuplicateSerials) -> list[Verdict]:
    """Return failures of GPUs with an identity of another GPU, and of adapters with an identity of another host's adapter.

    The reason lists the other locations. Two hosts whose records were written by one machine, and a host whose records were
    written by two machines, get an inconclusive verdict instead. A GPU whose serial its BMC confirms does not fail if the BMCs of
    all other locations contradict theirs: these report a wrong serial, and fail for that.
    """
    verdicts = []
    for host, of_host in evidence.items():
        if of_host.foreign:
            verdicts.append(_contradictory(host, _of_two_machines(host, of_host, known)))
            continue
        if twins := known.same_machine(host, of_host):
            verdicts.append(_contradictory(host, _of_one_machine(host, of_host, twins)))
            continue
        for gpu, identity in _identities(of_host.gpus()):
            location = host, f"gpu={gpu.index}"
            others = known.others(identity, location)
            if others and not known.is_rightful(location, others):
                verdicts.append(_duplicate(host, f"gpu={gpu.index}", gpu.serial, identity, others))
        for scope, identity in _adapter_identities(of_host):
            # Interfaces of one host may share an address: members of a bond, functions of an adapter.
            if others := [other for other in known.others(identity, (host, scope)) if other[0] != host]:
                verdicts.append(_duplicate(host, scope, "", identity, others))
    return verdicts


def with_foreign_records(evidence: Evidence) -> Evidence:
    """Return the evidence of a host. Gang records written by another machine than the host record are moved to `foreign`.

    A gang record is the host's record of the multi-node launches; the host record has everything else.
    """
    host_records = [record for record in evidence.records if not record.gang]
    foreign = [
        record
        for record in evidence.records
        if record.gang and any(are_of_two_machines(host_record, record) for host_record in host_records)
    ]
    if not foreign:
        return evidence
    records = tuple(record for record in evidence.records if record not in foreign)
    return replace(evidence, records=records, foreign=tuple(foreign))


def are_of_two_machines(one: Record, other: Record) -> bool:
    """Return whether two machines wrote the records.

    That is so if both have identities of the same kind, such as GPU serials, but not one identity in common.
    """
    first = set(_identities_of_gpus(one))
    if not first.isdisjoint(_identities_of_gpus(other)):  # nearly always true, and fast
        return False
    first, second = set(_machine_identities(one)), set(_machine_identities(other))
    kinds = {name for name, _ in first} & {name for name, _ in second}
    return bool(kinds) and first.isdisjoint(second)


def _identities_of_gpus(record: Record) -> Iterator[Identity]:
    return (identity for _, identity in _identities(record.gpus))


def _machine_identities(record: Record) -> Iterator[Identity]:
    """Yield the identities of the GPUs, the network adapters and the host itself that a record reports."""
    yield from _identities_of_gpus(record)
    yield from (identity for _, identity in _adapter_identities(Evidence(records=(record,))))
    for snapshot in record.snapshots[:1]:
        for metric in snapshot.metrics:
            if metric.name == HOST_SERIAL:
                yield from ((HOST_SERIAL, str(value)) for value in metric.values.values() if is_serial(str(value)))


def _contradictory(host: str, reason: str) -> Verdict:
    return Verdict(
        host=host,
        scope="host",
        name=RECORD,
        verdict=INCONCLUSIVE,
        criterion="plan",
        kind=VerdictKind.CONTRADICTORY,
        reason=reason,
        source="plan",
    )


def _of_two_machines(host: str, evidence: Evidence, known: DuplicateSerials) -> str:
    """Return the reason for a host whose records were written by two machines.

    The reason lists the GPUs of each record, and the other hosts that report these GPUs too.
    """
    texts = []
    for record in (*evidence.records, *evidence.foreign):
        identities = list(_identities_of_gpus(record))
        others = sorted(known.hosts_with(identities) - {host})
        owner = f", which {' and '.join(others)} {'report' if len(others) > 1 else 'reports'} too" if others else ""
        texts.append(f"{record_name(host, record.gang)} lists {_serials(record.gpus)}{owner}")
    return (
        f"the records of this host are of different machines: {'; '.join(texts)}; a record of another host was delivered under "
        "this name, or a pod was replaced by one on another node: resume the run, and check that every name of the inventory "
        "leads to its own host"
    )


def _of_one_machine(host: str, evidence: Evidence, others: Sequence[str]) -> str:
    names = [record_name(name) for name in sorted({host, *others})]
    return (
        f"{' and '.join(names)} are of one machine: {record_name(host)} lists {_serials(evidence.gpus())}; the inventory "
        "names one machine twice, or the record of one host was delivered under the name of another: check that every name leads "
        "to its own host"
    )


def _serials(gpus: Sequence[Gpu]) -> str:
    """Return the serials of GPUs, or their UUIDs if they have no serials."""
    names = list(dict.fromkeys(filter(None, (gpu.serial or gpu.uuid for gpu in gpus))))
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"the GPUs {', '.join(names[:LISTED])}{more}" if names else "no GPU"


def _location(host: str, scope: str) -> str:
    """Return a location in words: `GPU 7 of h2`, or `h2` for the host itself."""
    return host if scope == "host" else f"{describe_scope(scope)} of {host}"


def _duplicate(host: str, scope: str, serial: str, identity: Identity, others: Sequence[Location]) -> Verdict:
    name, value = identity
    return Verdict(
        host=host,
        scope=scope,
        serial=serial,
        name=name,
        verdict=FAIL,
        criterion="identity-unique",
        kind=VerdictKind.IDENTITY,
        value=value,
        reason=f"also reported by {' and '.join(_location(*other) for other in others)}",
        action="inspect_hardware",
        source="a serial, UUID, GUID or MAC address identifies one part",
        basis="policy",
    )
