"""Find the causes behind verdicts that do not pass. Every such verdict belongs to exactly one cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType

from fleet.diagnosis import words
from fleet.diagnosis.problems import CERTAIN, LIKELY, OF_PORT, PROBLEMS, STOPPED, UNKNOWN, Problem, matches
from fleet.judge.link_faults import FOLLOWS_HOST, FOLLOWS_PART
from fleet.judge.localization.gang_pairs import LINK_PARAM, ON_PATH
from fleet.judge.required_ports import PARTNER_PARAM
from fleet.judge.wiring.cables import Cables, cable_of
from fleet.scope_text import describe_scope
from schemas.reports import (
    CRITICAL,
    FAIL,
    INCONCLUSIVE,
    OF_INVENTORY,
    PASS,
    Cause,
    CausePart,
    Verdict,
    VerdictKind,
    action_rank,
)
from schemas.scopes import HOST, Scope
from schemas.stages import GANG
from schemas.waivers import Waiver

NOT_VERIFIED = "not-verified"
"""Problem id of a cause whose verdicts are all inconclusive, and match no entry of `PROBLEMS` or `WITHOUT_COMPARISON`."""
WITHOUT_COMPARISON = {
    VerdictKind.TOO_FEW_PEERS: "too-few-peers",
    VerdictKind.NO_MAJORITY: "no-majority",
    VerdictKind.NO_BASELINE: "no-baseline",
    VerdictKind.NOISY_BASELINE: "noisy-baseline",
}
"""Kind of a verdict that is inconclusive although the part was measured -> problem id of the cause, in place of NOT_VERIFIED."""
_MAX_NAMES = 4
_CONFIDENCES = (CERTAIN, LIKELY, UNKNOWN)
_SHARED_KINDS = (
    *(VerdictKind.PEERS, VerdictKind.IDENTITY, VerdictKind.SUSPECT, *STOPPED, VerdictKind.IN_USE),
    *WITHOUT_COMPARISON,
)
"""Kinds of verdicts that may have the same cause on several hosts."""
_GangType = tuple[int, Waiver | None, bool, bool]


@dataclass(kw_only=True)
class _PartProblem:
    """A problem of one part, with its verdicts."""

    problem: Problem | None
    """None if no entry of `PROBLEMS` matches the verdicts."""
    host: str
    part: str
    shown: list[Verdict] = field(default_factory=list)
    """Verdicts that show the problem, the most important first."""
    explained: list[Verdict] = field(default_factory=list)
    """Other verdicts that follow from the problem."""
    passed: tuple[Verdict, ...] = ()
    """Verdicts on the same part that pass. Only the title of the problem `hot` uses them (`_add_temperatures`)."""
    cable: str = ""
    """Switch ports at the other ends of the cables of the part (`cable_of`). Empty if they are not known, or if the
    problem is not one of a network port."""

    @property
    def first(self) -> Verdict:
        return self.shown[0]

    @cached_property
    def ports(self) -> frozenset[str]:
        """Ports of the verdicts in `shown`, which must be complete when this is first read; `""` is a verdict on no port."""
        return frozenset(Scope.parse(verdict.scope).get("port") for verdict in self.shown)


def diagnose(
    verdicts: Sequence[Verdict], gangs: Mapping[str, Sequence[str]], cables: Cables = MappingProxyType({})
) -> tuple[Cause, ...]:
    """Return the causes of the verdicts that do not pass, the most urgent first.

    Args:
        verdicts: verdicts of the fleet. Causes refer to them by their index. Verdicts that pass are ignored, except those on
            `stress.temperature`: the title of the problem `hot` states this temperature.
        gangs: gang -> its hosts. If the fault of one host stops measurements on other hosts of its gang, the
            verdicts on these measurements belong to the cause on the faulty host.
        cables: the other ends of the cables, as far as they are known.
    """
    gang_of = {host: gang for gang, hosts in gangs.items() for host in hosts}
    positions = {id(verdict): position for position, verdict in enumerate(verdicts)}
    by_host: dict[tuple[str, object], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.verdict != PASS:
            by_host[verdict.host, verdict.waiver].append(verdict)
    problems: list[_PartProblem] = []
    unexplained: list[Verdict] = []
    for verdicts_of_host in by_host.values():
        problems_of_host, remaining = _problems_of_host(verdicts_of_host)
        problems += problems_of_host
        unexplained += remaining
    problems = _without_effects_in_gang(_without_followers(problems), gang_of)
    unexplained = _explain_by_gang(problems, unexplained, gang_of)
    problems = [*_without_gpu_suspects(problems), *_other_problems(unexplained)]
    _add_temperatures(problems, verdicts)
    for item in problems:
        if matches(item.first, OF_PORT):
            item.cable = cable_of(cables, item.host, item.part, [verdict.scope for verdict in item.shown])
    causes = (_cause(group, positions) for group in _joined(problems, gang_of))
    return tuple(sorted(causes, key=lambda cause: _urgency(cause, verdicts[cause.verdicts[0]])))


def _add_temperatures(problems: Iterable[_PartProblem], verdicts: Iterable[Verdict]) -> None:
    """Add a passing verdict on `stress.temperature` to each `hot` problem, because the title states this temperature."""
    hot = {(item.host, item.part): item for item in problems if item.problem and item.problem.id == "hot"}
    for verdict in verdicts if hot else ():
        item = hot.get((verdict.host, verdict.part_scope))
        if item and verdict.name == "stress.temperature" and verdict.verdict == PASS:
            item.passed = (verdict,)


def _problems_of_host(verdicts: Sequence[Verdict]) -> tuple[list[_PartProblem], list[Verdict]]:
    """Return the problems of one host, and the verdicts that belong to none.

    The verdicts must all have the same waiver, or all have no waiver.
    """
    problems: list[_PartProblem] = []
    remaining = dict(enumerate(verdicts))
    for problem in PROBLEMS:
        shown: dict[object, _PartProblem] = {}
        for index, verdict in list(remaining.items()):
            if problem.is_shown_by(verdict):
                part = HOST if problem.is_of_host else verdict.part_scope
                item = shown.setdefault(
                    (part, _distinction(problem, verdict)), _PartProblem(problem=problem, host=verdict.host, part=part)
                )
                item.shown.append(verdict)
                del remaining[index]
        for item in shown.values():
            item.shown.sort(key=lambda verdict: _importance_key(verdict, problem))
        _explain(sorted(shown.values(), key=lambda item: item.part), remaining)
        problems += shown.values()
    return problems, list(remaining.values())


def _explain(items: Sequence[_PartProblem], remaining: dict[int, Verdict]) -> None:
    """Move each remaining verdict to the first item that it follows from.

    A record may have thousands of faulty parts, so the function does not compare each verdict with each item. Items of one type
    explain the same verdicts on other parts. So a verdict that does not follow from an item on another part is compared with
    later items of this type only if they are on its own part.

    Args:
        items: problems of one host with the same entry of `PROBLEMS`, sorted by part.
        remaining: the verdicts that belong to no problem yet.
    """
    of_part: dict[str, list[int]] = defaultdict(list)
    for index, verdict in remaining.items() if items else ():
        for part in dict.fromkeys(_ends(verdict)):
            of_part[part].append(index)
    untried: dict[object, list[int]] = {}
    tried: set[object] = set()
    for item in items:
        type_ = _type_of(item)
        if (item.part, item.ports, type_) in tried:
            continue  # it explains the same verdicts as the item before it
        tried.add((item.part, item.ports, type_))
        own = of_part[item.part]
        for index in sorted({*own, *untried.get(type_, remaining)}):
            if index in remaining and _follows(remaining[index], item):
                item.explained.append(remaining.pop(index))
        untried[type_] = own


def _type_of(item: _PartProblem) -> tuple[bool, ...]:
    """Return the properties of a problem by which `_follows` decides whether verdicts on other parts follow from it."""
    is_gang = Scope.parse(item.part).is_gang
    return item.first.verdict == FAIL, item.first.kind == VerdictKind.SUSPECT, item.part == HOST, is_gang


def _distinction(problem: Problem, verdict: Verdict) -> object:
    """Return the value by which verdicts are grouped into problems.

    Verdicts of a host that show the same entry of `PROBLEMS` on the same part belong to one problem if this value is equal.
    """
    if problem.is_of_host:
        return verdict.user
    return verdict.name if problem.id in ONE_PER_READING else verdict.params.get(LINK_PARAM)


def _without_followers(problems: Iterable[_PartProblem]) -> list[_PartProblem]:
    """Return the problems, without those that follow from an error of another GPU. That GPU's problem gets their verdicts.

    Parameters of the verdicts name the other GPU (`fleet.judge.link_faults`). A problem is kept if that GPU has none of the
    problems in `_ERRORS_OF_A_GPU`.
    """
    remaining: list[_PartProblem] = []
    followers: list[tuple[_PartProblem, tuple[object, object]]] = []
    for item in problems:
        roots = {(verdict.params.get(FOLLOWS_HOST), verdict.params.get(FOLLOWS_PART)) for verdict in item.shown}
        root = roots.pop() if len(roots) == 1 else (None, None)
        if root == (None, None):
            remaining.append(item)
        else:
            followers.append((item, root))
    by_part = {
        (item.host, item.part, item.first.waiver): item
        for item in remaining
        if item.problem and item.problem.id in _ERRORS_OF_A_GPU
    }
    for item, (host, part) in followers:
        cause = by_part.get((str(host), str(part), item.first.waiver))
        if cause is None:
            remaining.append(item)
        else:
            cause.explained += [*item.shown, *item.explained]
    return remaining


def _without_gpu_suspects(problems: Sequence[_PartProblem]) -> list[_PartProblem]:
    """Return the problems, without GPUs that are slow with other hosts because of another problem on their path to the NIC.

    That other problem gets their verdicts. The judge suspects such a GPU only because of that problem (`ON_PATH`).
    """
    roots: dict[tuple[str, str, Waiver | None], _PartProblem] = {}
    for item in problems:
        if item.problem and not item.problem.kinds and matches(item.first, ON_PATH):
            roots.setdefault((item.host, item.part, item.first.waiver), item)
    remaining = []
    for item in problems:
        root = roots.get((item.host, item.part, item.first.waiver))
        is_suspect = item.problem is not None and item.problem.kinds == (VerdictKind.SUSPECT,)
        if root and is_suspect and Scope.parse(item.part).device_kind == "gpu":
            root.explained += [*item.shown, *item.explained]
        else:
            remaining.append(item)
    return remaining


_ERRORS_OF_A_GPU = ("gpu-fell-off-bus", "gpu-error")
"""Problems that an XID of a GPU shows. A GPU has at most one of them for each waiver, because `gpu-fell-off-bus` explains all
other verdicts on the GPU with the same waiver."""
ONE_PER_READING = ("differs", "identity", "in-use", "inventory")
"""Problems that a part may have several times: once for each reading."""
_WITHOUT_LINK = ("module", "port-protocol", "port-down")
"""Problems of a port that make measurements between it and ports of other hosts impossible."""
_OF_ONE_PORT = ("module", "port-protocol")
"""Problems of a single port. They do not explain why a whole host is slow."""


def _follows(verdict: Verdict, item: _PartProblem) -> bool:
    """Return whether the verdict follows from `item`, a problem of the same host."""
    problem = item.problem
    if problem is None or not _can_explain(item, verdict) or _is_of_another_port(verdict, item):
        return False
    part = verdict.part_scope
    same_reading = not problem.kinds and matches(verdict, problem.shown_by)
    if item.part in _ends(verdict) and (same_reading or matches(verdict, problem.explains)):
        return True
    is_suspect = item.first.kind == VerdictKind.SUSPECT
    # A host that is slow in measurements with other hosts explains adapters that are slow in the stage `gang`, which measures
    # between hosts. It does not explain adapters that are slow in other stages, which measure each port in loopback.
    may_explain_parts = not is_suspect or (item.part == HOST and verdict.stage == GANG)
    if (
        may_explain_parts
        and Scope.parse(part).device_kind in problem.explains_parts
        and matches(verdict, problem.explains)
    ):
        return True
    if problem.stops and verdict.kind in STOPPED and verdict.verdict == INCONCLUSIVE:
        return True
    is_one_part = item.part != HOST and not Scope.parse(item.part).is_gang
    if is_suspect and is_one_part and Scope.parse(verdict.scope).get("partner"):
        # fleet/judge/localization/pair_parts.py sets the part of a failed pair to the suspect that explains the failure.
        # If `item` were this suspect, the first `return True` above would have been reached.
        return False
    if problem.id in _OF_ONE_PORT and verdict.kind == VerdictKind.SUSPECT and part == HOST:
        return False  # if the port of this problem were slow, the verdict would suspect the port, not the host
    is_of_whole_host = part == HOST or Scope.parse(part).is_gang
    return is_of_whole_host and matches(verdict, problem.explains_host)


def _is_of_another_port(verdict: Verdict, item: _PartProblem) -> bool:
    """Return whether the verdict is on the same adapter, but on a port that does not have the problem.

    The problem of one port does not explain verdicts on another one, because each port has its own cable.
    """
    port = Scope.parse(verdict.scope).get("port")
    return verdict.part_scope == item.part and bool(port) and "" not in item.ports and port not in item.ports


def _can_explain(item: _PartProblem, verdict: Verdict) -> bool:
    """Return whether the problem can explain a verdict of this kind. Only a problem with a failed verdict explains a failure."""
    kinds = item.problem.explains_kinds if item.problem else ()
    return (item.first.verdict == FAIL or verdict.verdict != FAIL) and (not kinds or verdict.kind in kinds)


def _ends(verdict: Verdict) -> tuple[str, ...]:
    """Return the part of a verdict, or both GPUs of a pair if the verdict is not attributed to one of them."""
    peer = Scope.parse(verdict.scope).get("peer")
    return (verdict.part_scope,) if verdict.part or not peer else (verdict.part_scope, f"gpu={peer}")


def _without_effects_in_gang(problems: Sequence[_PartProblem], gang_of: Mapping[str, str]) -> list[_PartProblem]:
    """Return the problems, without failures of a whole gang that follow from a problem of one of its hosts.

    Every host of a gang has a verdict on each figure of the gang. All these verdicts are added to the problem that explains
    them. As within a host, a problem explains only problems that come after it in PROBLEMS.
    """
    candidates = [
        item
        for item in problems
        if item.problem and item.problem.explains_host and item.host in gang_of and not Scope.parse(item.part).is_gang
    ]
    of_gang: dict[str, list[tuple[int, _PartProblem]]] = defaultdict(list)
    for (gang, (rank, *_), host, part), items in _first_of_type(candidates, gang_of).items():
        if host is None and part is None:
            of_gang[gang] += [(rank, item) for item in items]
    for causes in of_gang.values():
        causes.sort(key=lambda cause: (cause[0], cause[1].host, cause[1].part))
    remaining = []
    for item in problems:
        verdicts = [*item.shown, *item.explained]
        may_follow = item.problem and not item.problem.kinds and Scope.parse(item.part).is_gang
        for rank, cause in of_gang.get(gang_of.get(item.host, ""), ()) if may_follow else ():
            if rank < PROBLEMS.index(item.problem) and all(_follows_in_gang(verdict, cause) for verdict in verdicts):
                cause.explained += verdicts
                break
        else:
            remaining.append(item)
    return remaining


def _explain_by_gang(
    problems: Sequence[_PartProblem], verdicts: Iterable[Verdict], gang_of: Mapping[str, str]
) -> list[Verdict]:
    """Add each verdict to the problem that explains it, on another host of the same gang.

    Return the verdicts that no such problem explains.
    """
    candidates = [
        item
        for item in problems
        if item.problem and (item.problem.stops or item.problem.explains_host) and item.host in gang_of
    ]
    first = _first_of_type(candidates, gang_of)
    types: dict[str, dict[_GangType, None]] = defaultdict(dict)
    for gang, type_, *_ in first:
        types[gang][type_] = None
    rest = []
    for verdict in verdicts:
        gang, partner = gang_of.get(verdict.host, ""), Scope.parse(verdict.scope).get("partner")
        hosts = (None, *{partner: None, str(verdict.params.get(PARTNER_PARAM, "")): None})
        keys = product([gang], types.get(gang, ()), hosts, (None, verdict.part_scope))
        causes = [item for key in keys for item in first.get(key, ()) if _follows_in_gang(verdict, item)]
        if causes:
            # PARTNER_PARAM names the only host with which the port of this verdict could be measured. The cause may be the port
            # of the same rail on that host. Hosts of the same build name the adapters of a rail alike, so a problem of the part
            # with the same name comes first.
            is_of_port = PARTNER_PARAM in verdict.params
            order = [
                (
                    item.host != partner,
                    is_of_port and item.part != verdict.part_scope,
                    PROBLEMS.index(item.problem),  # causes come before effects
                    item.host,
                    item.part,
                    item.first.verdict != FAIL,
                )
                for item in causes
            ]
            causes[order.index(min(order))].explained.append(verdict)
        else:
            rest.append(verdict)
    return rest


def _first_of_type(
    candidates: Iterable[_PartProblem], gang_of: Mapping[str, str]
) -> dict[tuple[str, _GangType, str | None, str | None], list[_PartProblem]]:
    """Return gang, type of problem, host and part -> the first problem by host and part, and the first one on another host.

    The host None is any host, and the part None is any part. A gang may have thousands of faulty parts, so a verdict is not
    compared with each problem. Two problems suffice: those of one type explain the same verdicts of other hosts, and at least one
    of the two is on another host than the verdict.
    """
    first: dict[tuple[str, _GangType, str | None, str | None], list[_PartProblem]] = defaultdict(list)
    for item in sorted(candidates, key=lambda item: (item.host, item.part)):
        for key in product([gang_of[item.host]], [_gang_type(item)], (None, item.host), (None, item.part)):
            if len(first[key]) < 2 and all(other.host != item.host for other in first[key]):
                first[key].append(item)
    return first


def _gang_type(item: _PartProblem) -> _GangType:
    """Return the properties of a problem, besides its host, by which `_follows_in_gang` decides what follows from it."""
    is_of_port = Scope.parse(item.part).device_kind in ("hca", "nic")
    rank = PROBLEMS.index(item.problem) if item.problem else len(PROBLEMS)
    return rank, item.first.waiver, item.first.verdict == FAIL, is_of_port


def _follows_in_gang(verdict: Verdict, item: _PartProblem) -> bool:
    problem = item.problem
    is_other = verdict.host != item.host and verdict.waiver == item.first.waiver
    if problem is None or not is_other or not _can_explain(item, verdict):
        return False
    is_stopped = verdict.stage == GANG and problem.stops and verdict.kind in STOPPED
    if Scope.parse(verdict.part_scope).is_gang:
        return matches(verdict, problem.explains_host) or (is_stopped and verdict.verdict == INCONCLUSIVE)
    if verdict.params.get(PARTNER_PARAM) == item.host and problem.id in _WITHOUT_LINK:
        return Scope.parse(item.part).device_kind in ("hca", "nic")
    return is_stopped


def _other_problems(verdicts: Iterable[Verdict]) -> list[_PartProblem]:
    """Return the remaining verdicts as problems without an entry in PROBLEMS.

    Each host has one problem for each part and reading that fails, and one for each reason why verdicts are inconclusive.
    """
    groups: dict[object, _PartProblem] = {}
    for verdict in verdicts:
        content = (verdict.part_scope, verdict.name) if verdict.verdict == FAIL else (verdict.reason,)
        key = (verdict.host, verdict.verdict, verdict.kind, content, verdict.waiver)
        groups.setdefault(key, _PartProblem(problem=None, host=verdict.host, part=verdict.part_scope)).shown.append(
            verdict
        )
    for item in groups.values():
        item.shown.sort(key=_importance_key)
        if len({verdict.part_scope for verdict in item.shown}) > 1:
            item.part = HOST
    return list(groups.values())


def _joined(problems: Iterable[_PartProblem], gang_of: Mapping[str, str]) -> list[list[_PartProblem]]:
    """Group the problems by cause: problems of several hosts may have the same cause."""
    groups: dict[object, list[_PartProblem]] = {}
    for index, item in enumerate(problems):
        content = _shared_content(item)
        figure = () if item.problem and item.problem.is_of_host else (item.first.name, item.first.criterion)
        if item.problem and Scope.parse(item.part).is_in_fabric:
            # Its hosts may be judged by different launches of the gang, in which its figures differ. A gang has rails of its own.
            gang = gang_of.get(item.host) if Scope.parse(item.part).device_kind == "rail" else None
            figure, content = (), (gang, item.part)
        key = (item.problem, item.first.waiver, *figure, *content) if content else index
        groups.setdefault(key, []).append(item)
    return list(groups.values())


def _shared_content(item: _PartProblem) -> tuple[object, ...]:
    """Return the values that must be equal for problems of several hosts to be one cause.

    The result is empty if the problem is a cause of its own.
    Hosts with the same wrong setting or version share a cause, and so do hosts that lack evidence for the same reason.
    If whole hosts fail the same criterion on a figure, they share a cause even if the values differ.
    """
    first = item.first
    if item.problem and item.problem.is_of_host:
        return (first.kind, first.user)
    if item.problem and item.problem.is_joint:
        return (first.kind, first.detail)
    if LINK_PARAM in first.params:
        return (first.kind, first.params[LINK_PARAM])
    if first.kind == VerdictKind.MODEL:
        return (first.kind, first.value, first.limit, first.action)
    if first.kind == VerdictKind.INVENTORY:
        return (first.kind, first.limit)  # figures of several hosts differ a little
    if first.kind == VerdictKind.SOFTWARE:
        return (first.kind, first.detail)
    if first.kind in _SHARED_KINDS:
        has_value = first.verdict == FAIL and first.value is not None
        return (first.kind, first.value, first.limit) if has_value else (first.kind, first.reason, first.user)
    is_figure = item.problem is None or item.problem.confidence == LIKELY
    is_whole = item.part == HOST or (Scope.parse(item.part).is_gang and (first.value, first.limit) != (None, None))
    return (first.kind, item.part) if is_figure and is_whole and first.verdict == FAIL else ()


def _cause(group: Sequence[_PartProblem], positions: Mapping[int, int]) -> Cause:
    group = sorted(group, key=lambda item: (item.first.verdict != FAIL, -words.distance(item.first)))
    item = group[0]
    first = item.first
    shown = [verdict for other in group for verdict in other.shown]
    explained = [verdict for other in group for verdict in other.explained]
    failing = [verdict for verdict in (*shown, *explained) if verdict.verdict == FAIL]
    return Cause(
        problem=_problem_id(item, is_failed=bool(failing)),
        title=f"{_subject(group)} {_predicate(item)}",
        why=words.why(first),
        verdict=FAIL if failing else INCONCLUSIVE,
        host=item.host,
        hosts=tuple(dict.fromkeys(other.host for other in group)),
        part=item.part,
        parts=tuple(dict.fromkeys(_cause_part(other) for other in group)),
        serial="" if item.problem and item.problem.is_of_host else first.serial,
        action=first.action,
        severity=CRITICAL if any(verdict.severity == CRITICAL for verdict in failing) else first.severity,
        confidence=item.problem.confidence if item.problem else (CERTAIN if failing else UNKNOWN),
        verdicts=tuple(positions[id(verdict)] for verdict in (*shown, *explained)),
        waiver=first.waiver,
    )


def _problem_id(item: _PartProblem, *, is_failed: bool) -> str:
    if item.problem:
        return item.problem.id
    return item.first.name if is_failed else WITHOUT_COMPARISON.get(item.first.kind, NOT_VERIFIED)


def _cause_part(item: _PartProblem) -> CausePart:
    serial = "" if item.problem and item.problem.is_of_host else item.first.serial
    return CausePart(host=item.host, scope=item.part, serial=serial, cable=item.cable)


def _predicate(item: _PartProblem) -> str:
    if item.problem:
        return item.problem.title([*item.shown, *item.passed]) + words.consequence(item.explained)
    return words.describe(item.shown) if item.first.verdict == FAIL else words.not_known(item.shown)


def _subject(group: Sequence[_PartProblem]) -> str:
    """Return the name of the part; for several parts or hosts, their number and the first names: `2 hosts (a, b): each`."""
    first = group[0]
    names = list(dict.fromkeys(_part_name(item) for item in group))
    if len(names) == 1:
        return names[0]
    shared = {item.part for item in group}
    if len(shared) == 1 and Scope.parse(first.part).is_in_fabric:
        return f"{describe_scope(first.part)} ({len({item.host for item in group})} hosts)"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    if first.problem and first.problem.is_joint:
        return f"{', '.join(sorted(names)[:_MAX_NAMES])}{more}" if more else " and ".join(sorted(names))
    kind = "hosts" if all(item.part == HOST for item in group) else "parts"
    return f"{len(names)} {kind} ({', '.join(names[:_MAX_NAMES])}{more}): each"


def _part_name(item: _PartProblem) -> str:
    if link := item.first.params.get(LINK_PARAM):
        return f"path {link}"
    name = item.host if item.part == HOST else f"{describe_scope(item.part)} of {item.host}"
    return f"{name} (cable to {item.cable})" if item.cable else name


def _importance_key(verdict: Verdict, problem: Problem | None = None) -> tuple[object, ...]:
    """Return the sort key that puts the most important verdict of a problem first.

    Failures come first; among them, critical ones; among those, verdicts whose own scope names the part at fault. Ties are sorted
    by action (the most severe first), by the order in which the problem lists its readings, and by distance beyond the limit.
    """
    urgency = (verdict.verdict != FAIL, verdict.severity != CRITICAL, verdict.part != "", action_rank(verdict.action))
    reading = (problem.reading_rank(verdict),) if problem else ()
    what = (verdict.name, verdict.scope, verdict.criterion, verdict.stage)
    # These keys only make the order of the causes independent of the order in which the verdicts are given.
    rest = repr(
        (verdict.value, verdict.limit, verdict.kind, verdict.reason, verdict.detail, verdict.user, verdict.params)
    )
    return *urgency, *reading, -words.distance(verdict), *what, verdict.value is None, rest


def _urgency(cause: Cause, first: Verdict) -> tuple[bool, bool, bool, bool, int, int]:
    return (
        cause.waiver is not None,
        cause.verdict != FAIL,
        first.kind not in OF_INVENTORY,  # a wrong inventory makes healthy parts fail
        cause.severity != CRITICAL,
        action_rank(cause.action),
        _CONFIDENCES.index(cause.confidence),
    )
