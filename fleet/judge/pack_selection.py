"""Select the packs (YAML files of criteria) that apply to a host, and the criteria that result from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.criteria import Criterion, Pack, with_datasheet
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu

REHEARSAL = "rehearsal"
"""Name of the pack for rehearsals."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The criteria that result from some packs."""

    criteria: dict[str, Criterion]
    """Id -> criterion."""
    replaced: Mapping[str, tuple[Criterion, ...]]
    """Id of a criterion -> the shipped criteria that it replaces."""


_CRITERIA: BoundedCache[tuple[int, ...], tuple[list[Pack], dict[str, Criterion]]] = BoundedCache(64)
"""Cache: `id()` of each pack -> the packs and their criteria. The packs are kept so that no other object gets the same `id()`."""


OF_PORTS = ("fabric_ports.", "infiniband.", "network.", "optics.", "port.", "verbs.", "software.perftest.")
"""Prefixes of the names of readings of network ports, and of figures measured on such ports."""
_PORT_PACKS: BoundedCache[int, tuple[Pack, Pack]] = BoundedCache(8)
"""Cache: `id()` of a pack -> the pack, and a copy that has only its criteria on ports."""


def criteria_by_id(packs: list[Pack]) -> dict[str, Criterion]:
    """Return id -> criterion, for the criteria that `resolve` selects from these packs.

    A limit that is a fraction of the datasheet uses the datasheet of the first pack that has one: the pack of the GPU model.
    """
    key = tuple(map(id, packs))
    if key not in _CRITERIA:
        datasheet = next((pack.datasheet for pack in packs if pack.datasheet), {})
        criteria = resolve(packs).criteria
        _CRITERIA[key] = packs, {name: with_datasheet(item, datasheet) for name, item in criteria.items()}
    return _CRITERIA[key][1]


def resolve(packs: Iterable[Pack]) -> Selection:
    """Return the criteria of these packs.

    If several shipped packs define a criterion with the same id, the last one counts. A criterion of a pack that the operator
    chose is added only if no earlier criterion has its id. If its field `replaces` has the id of an earlier criterion, that
    earlier criterion is removed first. If the pack itself includes that criterion from another pack, that copy is not added.
    """
    criteria: dict[str, Criterion] = {}
    replaced: dict[str, tuple[Criterion, ...]] = {}
    of_operator: set[str] = set()
    for pack in packs:
        if not pack.chosen:
            criteria |= {item.id: item for item in pack.criteria}
            continue
        included = {item.id: item for item in pack.criteria if item.replaces != item.id}
        names = {item.replaces for item in pack.criteria} & (criteria.keys() | included.keys())
        removed = {name: criteria.pop(name) if name in criteria else included[name] for name in names}
        # Example: an operator's criterion B replaces the shipped criterion A, and C replaces B. Then C is listed as replacing A.
        shipped = {name: replaced.pop(name, () if name in of_operator else (item,)) for name, item in removed.items()}
        for item in pack.criteria:
            if item.id not in criteria and (item.id not in names or item.replaces == item.id):
                criteria[item.id] = item
                of_operator.add(item.id)
                if shipped.get(item.replaces):
                    replaced[item.id] = shipped[item.replaces]
    return Selection(criteria=criteria, replaced=replaced)


def port_pack(pack: Pack) -> Pack:
    """Return a copy of a pack that has only its criteria on network ports, their cables and their modules."""
    if id(pack) not in _PORT_PACKS:
        of_ports = tuple(item for item in pack.criteria if item.name.startswith(OF_PORTS))
        _PORT_PACKS[id(pack)] = pack, replace(pack, criteria=of_ports)
    return _PORT_PACKS[id(pack)][1]


def select_packs(plan: Plan, host: PlannedHost, gpus: Sequence[Gpu], packs: Sequence[Pack]) -> tuple[list[Pack], str]:
    """Return the packs that apply to `host`, and why no pack covers its GPU model (empty if one does)."""
    of_operator = [pack for pack in packs if pack.chosen]
    shipped = [pack for pack in packs if not pack.chosen]
    if plan.rehearsal:
        of_rehearsal = [pack for pack in shipped if pack.name == REHEARSAL]
        of_ports = [port_pack(pack) for pack in shipped if pack.name == "common" and plan.judges_ports(host)]
        return [*of_rehearsal, *of_ports, *of_operator], ""
    gpu_names = sorted({gpu.name for gpu in gpus})
    if host.gpu_model:
        of_model = [pack for pack in shipped if pack.name == host.gpu_model]
    else:
        of_model = [pack for pack in shipped if gpu_names and set(gpu_names) <= set(pack.gpu_names)]
    common = [pack for pack in shipped if pack.name == "common"]
    if len(of_model) == 1:
        return [*of_model, *of_operator], ""
    model = host.gpu_model or ", ".join(gpu_names) or "an unknown GPU"
    return [*common, *of_operator], f"no criteria pack for {model}"
