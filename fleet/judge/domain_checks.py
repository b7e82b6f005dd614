"""Judge NVLink domains of several hosts: whether each GPU is in a domain, IMEX connects the hosts, and NCCL uses the domain.

IMEX is the NVIDIA daemon on each host by which the hosts of a domain share GPU memory (see `nvlink_domains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.nvlink_domains import (
    CLUSTER,
    CONNECTION,
    NO_DOMAIN,
    READY,
    STATE,
    DomainMember,
    NvlinkDomains,
    last_values,
    measured,
)
from fleet.quantities import counted
from schemas.records import ERROR, MEASURED, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import HOST, Scope
from schemas.stages import GANG

CRITERION = "nvlink-domain"
NODES, TRANSPORT = "fabric.imex.node_count", "collective.transport"
TO_SWITCH = "gpu.nvlink.missing_links"
"""Reading that has a value only if NVLinks of the GPU are up and end at a switch."""
MULTI_NODE = "P2P/MNNVL"
"""NCCL's name of its transport over NVLink between hosts; a suffix such as /read may follow."""
_CONFIGURED = ("version_mismatch", "node_map_mismatch")
"""States of a broken IMEX connection whose cause is a wrong version or configuration of IMEX."""
_CHECK_TRANSPORT = (
    "check NCCL_MNNVL_ENABLE and NCCL_CUMEM_ENABLE in the environment, nvidia-imex-ctl -N, and that processes may use "
    "/dev/nvidia-caps-imex-channels"
)
_SOURCES = {
    CLUSTER: "NVIDIA Mission Control, high-speed fabric management: the GPUs of an NVL72 rack report the UUID of its domain",
    STATE: "NVIDIA/DCGM DcgmImexManager: READY is the state of a daemon that works",
    NODES: "NVIDIA IMEX guide: the node configuration file lists every host of the domain",
    CONNECTION: "NVIDIA IMEX guide, nvidia-imex-ctl -N: `C` marks a connection that is ready for operation",
    TRANSPORT: "NVIDIA/nccl src/transport/p2p.cc, src/mnnvl.cc: ranks of one clique share memory over NVLink (P2P/MNNVL)",
}


def judge_domains(views: Iterable[HostView], domains: NvlinkDomains) -> Iterator[Verdict]:
    """Yield the verdicts on each host that has a record and must share an NVLink domain (`HostView.nvlink_domain`)."""
    launches: set[tuple[str, ...]] = set()
    for view in views:
        if view.nvlink_domain and view.has_record:
            yield from _judge_membership(view, domains)
            yield from _judge_imex(view, domains)
            transports = [item for item in view.observations[TRANSPORT] if _is_of_gang(item)]
            # One verdict for each launch, not for each of its hosts.
            if transports and view.members(GANG) not in launches:
                launches.add(view.members(GANG))
                yield from _judge_transport(view, transports[-1], domains)


def _is_of_gang(item: Observation) -> bool:
    return item.status == MEASURED and item.stage == GANG and Scope.parse(item.scope).is_gang


def _judge_membership(view: HostView, domains: NvlinkDomains) -> Iterator[Verdict]:
    """Yield a verdict on each GPU: the cluster UUID that it reports must be that of a domain.

    A GPU that reports no UUID is judged only in three cases: the inventory names the domain, a GPU of the domain's hosts
    reports a UUID other than NO_DOMAIN, or the NVLinks of this GPU end at a switch. In other cases the NVLinks possibly join only
    the GPUs of one board, which are in no domain. GPUs without any measurement are not judged here.
    """
    where = f"the GPU model implies that the hosts of rack {view.host.rack} are one NVLink domain"
    if view.host.nvlink_domain:
        where = f"the inventory has the host in NVLink {view.nvlink_domain}"
    uuids = last_values(view, CLUSTER)
    is_joined = bool(view.host.nvlink_domain) or domains.is_reported(view.nvlink_domain)
    at_switch = last_values(view, TO_SWITCH)
    for scope in view.host.scopes:
        if scope in uuids:
            passed = uuids[scope] != NO_DOMAIN
            reason = f"found {uuids[scope]}" if passed else f"the GPU is in no NVLink domain, but {where}"
            yield _verdict(view, CLUSTER, scope, PASS if passed else FAIL, reason, uuids[scope], action="reboot")
        elif (is_joined or scope in at_switch) and scope not in view.unmeasured_gpus:
            why = next(
                (item.reason for item in reversed(view.observations[CLUSTER]) if item.scope == scope), "not read"
            )
            yield _verdict(view, CLUSTER, scope, INCONCLUSIVE, f"{where}, but the GPU reports no domain: {why}")


def _judge_imex(view: HostView, domains: NvlinkDomains) -> Iterator[Verdict]:
    """Yield the verdicts on IMEX.

    A scheduler may start IMEX with each job. So two cases are judged only if the inventory names the domain: a host without IMEX,
    and a domain in which no host reports that IMEX is ready.
    """
    member = domains.member(view)
    observed = view.observations[STATE]
    if member.is_ready is None:
        if view.host.nvlink_domain or any(item.status == ERROR for item in observed):
            yield _without_imex(view, observed)
        return
    if not view.host.nvlink_domain and not domains.has_imex(view.nvlink_domain):
        return
    bad = [item.value for item in measured(view, STATE) if item.value != READY]
    state = bad[-1] if bad else READY
    yield _verdict(
        view, STATE, HOST, FAIL if bad else PASS, f"found {state}, wanted {READY}", state, READY, "recover_imex_domain"
    )
    yield from _judge_node_count(view)
    if not member.address:
        unread = [item for item in view.observations[CONNECTION] if item.status == ERROR]
        why = unread[-1].reason if unread else "the address of this host in the IMEX domain is not known"
        yield _verdict(
            view, CONNECTION, HOST, INCONCLUSIVE, f"the IMEX connections of the host could not be read: {why}"
        )
    elif member.peers or domains.broken(view):
        yield _judge_connections(view, domains.broken(view), member)


def _without_imex(view: HostView, observed: list[Observation]) -> Verdict:
    last = observed[-1] if observed else None
    reason = f"{last.status}: {last.reason}" if last else "not read"
    if last is None or last.status == ERROR:
        return _verdict(view, STATE, HOST, INCONCLUSIVE, reason)
    detail = f"IMEX is not set up ({last.reason}), but the inventory has the host in NVLink {view.nvlink_domain}"
    return _verdict(view, STATE, HOST, FAIL, detail, "absent", READY, "configure", detail)


def _judge_node_count(view: HostView) -> Iterator[Verdict]:
    """Yield the verdict on the number of hosts in the configuration of IMEX, if the inventory has several hosts in the domain."""
    planned = sum(host.nvlink_domain == view.host.nvlink_domain for host in view.plan.hosts)
    counts = [item.value for item in measured(view, NODES) if isinstance(item.value, int)]
    if view.host.nvlink_domain and planned > 1 and counts:
        passed = counts[-1] >= planned
        where = f"NVLink {view.nvlink_domain}"
        reason = (
            f"found {counted(counts[-1], 'host')} in the configuration of IMEX; the inventory has {planned} in {where}"
        )
        yield _verdict(
            view, NODES, HOST, PASS if passed else FAIL, reason, counts[-1], planned, "configure", operator="ge"
        )


def _judge_connections(view: HostView, broken: Mapping[str, str], member: DomainMember) -> Verdict:
    """Return the verdict on the connections of a host. `broken` has only those that are broken because of this host."""
    if not broken and member.unreported:
        reason = (
            f"the domain is not up, and IMEX does not report the connection to {counted(member.unreported, 'host')}"
        )
        return _verdict(view, CONNECTION, HOST, INCONCLUSIVE, reason)
    if not broken and member.peers == len(member.broken):
        reason = f"no connection works: {counted(member.peers, 'host')} at fault or absent from this run"
        return _verdict(view, CONNECTION, HOST, INCONCLUSIVE, reason)
    if not broken:
        connected = member.peers - len(member.broken)
        reason = f"{connected} of {member.peers} hosts are connected; the others are at fault or absent from this run"
        return _verdict(
            view,
            CONNECTION,
            HOST,
            PASS,
            reason if member.broken else f"connected to {counted(member.peers, 'host')}",
            0,
            0,
        )
    shown = ", ".join(f"{other} ({state.replace('_', ' ')})" for other, state in sorted(broken.items())[:4])
    more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
    action = "configure" if any(state in _CONFIGURED for state in broken.values()) else "recover_imex_domain"
    detail = f"not connected: {shown}{more}"
    return _verdict(view, CONNECTION, HOST, FAIL, detail, len(broken), 0, action, detail)


def _judge_transport(view: HostView, item: Observation, domains: NvlinkDomains) -> Iterator[Verdict]:
    """Yield the verdict on NCCL's transport in a launch of several hosts whose GPUs are all in one clique of one domain.

    A clique is a partition of an NVLink domain. Other launches get no verdict.
    """
    members = view.members(GANG)
    cliques = domains.cliques(view.nvlink_domain, members)
    if len(members) < 2 or len(cliques) != 1 or NO_DOMAIN in {uuid for uuid, _ in cliques}:
        return  # other verdicts report hosts that are not in the domain
    if all(name.startswith(MULTI_NODE) for name in str(item.value).split("+")):
        yield _verdict(view, TRANSPORT, item.scope, PASS, f"found {item.value}", item.value, MULTI_NODE, stage=GANG)
        return
    culprit = domains.host_at_fault(view.nvlink_domain, members)
    cause = f"IMEX does not connect {culprit} to the others" if culprit else _CHECK_TRANSPORT
    if view.host.environment.get("NCCL_MNNVL_ENABLE") == "0":
        cause = "rackproof_environment sets NCCL_MNNVL_ENABLE=0"
    detail = f"NCCL does not use NVLink between the hosts of {view.nvlink_domain}; {cause}"
    verdict = _verdict(
        view, TRANSPORT, item.scope, FAIL, f"found {item.value}, wanted {MULTI_NODE}: {detail}", item.value, MULTI_NODE,
        "configure", detail, stage=GANG,
    )  # fmt: skip
    # The verdict is on the host at fault, not on the host that reports the launch.
    yield replace(verdict, host=culprit or verdict.host)


def _verdict(
    view: HostView,
    name: str,
    scope: str,
    verdict: str,
    reason: str,
    value: Value = None,
    limit: Value = None,
    action: str = "none",
    detail: str = "",
    *,
    operator: str = "eq",
    stage: str = "",
) -> Verdict:
    return Verdict(
        host=view.host.name,
        scope=scope,
        serial=view.serial(scope),
        name=name,
        stage=stage,
        verdict=verdict,
        criterion=CRITERION,
        kind=VerdictKind.MISSING if verdict == INCONCLUSIVE else VerdictKind.LIMIT,
        value=value,
        limit=limit,
        operator=operator if limit is not None else "",
        unit="1" if value is not None else "",
        reason=reason,
        detail=detail,
        action=action if verdict == FAIL else "none",
        source=_SOURCES[name],
        basis="published",
    )
