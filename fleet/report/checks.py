"""Render criteria packs as a Markdown page: what each check reads, its limit, the action if it fails, and its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fleet.judge.criteria import Criterion, Pack
from fleet.judge.informational import INFORMATIONAL
from fleet.quantities import NONE
from fleet.report.criteria_table import criteria_of
from fleet.report.criterion_text import parameter_text, wanted_text
from fleet.report.formatting import ACTIONS
from schemas.catalogue import BENCHMARKS
from schemas.readings import READINGS

_COMPUTED = {
    "drift": "lowest level of the rate during a soak, plus a margin for random variation, as a share of the mean rate at the "
    "start of the soak; a level is the median over 3 or more consecutive time intervals; the start is the first hour, or "
    "the first tenth of a soak of less than ten hours",
    "fabric_ports.active": "number of InfiniBand and RoCE ports that are up",
    "fabric_ports.rate": "highest of three totals: rate of all InfiniBand ports that are up, rate of all RoCE ports that are up, "
    "speed of all Ethernet interfaces",
    "launch": "versions of torch, CUDA, cuDNN and NCCL that the ranks used",
}
"""Name of a value that the judge computes from readings or figures -> description of the value.

A key without a dot stands for all names that begin with this key and a dot.
"""
_CONDITION = re.compile(r"\b(if present|if the run has a baseline)\b")

HEAD = """# Checks

`rackproof criteria list PACK --markdown` prints a page like this one: the criteria of one pack and of the packs that it includes.
The page in Rackproof's documentation is that of the pack `common`. The pack of each GPU model includes `common`;
`rackproof criteria list h200-sxm` shows all criteria for one model. [criteria.md](criteria.md) describes how criteria work and
how to write your own.

| words | meaning |
|---|---|
| *if present* | no verdict in these cases: the host reports the reading as unsupported (for example because it lacks the part); \
there are too few parts to compare with; there is no accepted value to compare with. Without the words *if present*, the host is \
incomplete in these cases. But a `same as` check never gives a verdict if there are too few parts |
| the fleet | the hosts of the run with the same GPU model. For `same as`: only those in the same gang (the hosts of one \
multi-node launch); hosts without a gang are compared with each other |
| hosts of one order | hosts that were bought together and are built alike |
| new parts only | the check is not applied in a run with a baseline, in a re-validation, or by `rackproof doctor` |
| change during the run | sum of the increases from each snapshot (all readings of a host at one time) to the next; for a \
minimum (≥), the value in the last snapshot minus the value in the first |
| per hour before the run | first value of the counter in the run, divided by the time since the counter was cleared (if that is \
unknown, since the host booted), but by at least 24 hours |
| robust deviation | 1.4826 × the median absolute deviation |
| yes, or same as … | `yes` always passes; another value passes only if it is more common than any other |
| (policy), … | in brackets after the source, the basis of the limit: `datasheet`, `published`, `measured` (by us), `model` \
(derived from figures of other GPU models), `policy` (our choice) |
"""

INFORMATIONAL_HEAD = """Rackproof records the following readings (from snapshots) and figures (from benchmarks), but no check
judges them. For every other reading and figure, a check finds a bad value on a single part or a single host. If that check only
compares with most of the fleet, it does not find a value that is bad on every host."""


def checks(packs: Sequence[Pack]) -> str:
    """Return the page: each criterion of `packs` once, under the pack that defines it, then the readings without a check."""
    sections: dict[str, list[Criterion]] = {}
    for criterion in criteria_of(packs):
        sections.setdefault(criterion.origin, []).append(criterion)
    lines = [line for name, criteria in sections.items() for line in _section(name, criteria)]
    return "\n".join([HEAD, *lines, *_informational()]).rstrip() + "\n"


def _informational() -> Iterator[str]:
    yield "## Informational\n"
    yield f"{INFORMATIONAL_HEAD}\n"
    yield "| reading | why no check judges it |\n|---|---|"
    yield from (f"| `{name}` | {_plain(reason)} |" for name, reason in sorted(INFORMATIONAL.items()))


def _section(name: str, criteria: Iterable[Criterion]) -> Iterator[str]:
    yield f"## {name}\n"
    yield "| check | reading | required | action on failure | source |\n|---|---|---|---|---|"
    yield from (f"| {' | '.join(_cells(criterion))} |" for criterion in criteria)
    yield ""


def _cells(criterion: Criterion) -> Iterable[str]:
    yield f"`{criterion.id}`"
    where = ", ".join(f"{key} {parameter_text(value)}" for key, value in criterion.where.items())
    description = "; ".join(
        part for part in (_meaning(criterion), where, criterion.stage and f"stage {criterion.stage}") if part
    )
    yield f"`{criterion.name}`{f': {description}' if description else ''}"
    yield _CONDITION.sub(r"*\1*", wanted_text(criterion))
    others = (f"{ACTIONS[action].lower()} if {text}" for text, action in criterion.actions.items())
    yield "; ".join((ACTIONS[criterion.action].lower() or NONE, *others))
    yield _plain(f"{criterion.source} ({criterion.basis})")


def _meaning(criterion: Criterion) -> str:
    helps = [reading.help for name, reading in READINGS.items() if criterion.matches_name(name)]
    name = criterion.name.split(".")[0]
    figure = f"from the benchmark `{name}` ({BENCHMARKS[name].summary})" if name in BENCHMARKS else ""
    computed = _COMPUTED.get(criterion.name) or _COMPUTED.get(name, "")
    return _plain(helps[0] if helps else figure or computed)


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
