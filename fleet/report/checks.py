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
    "drift": "lowest level of this rate in a soak, as a share of its mean in the first hour (or in the first tenth, if shorter)",
    "fabric_ports.active": "number of InfiniBand and RoCE ports that are up",
    "fabric_ports.rate": "highest of three sums of rates: active InfiniBand ports, active RoCE ports, Ethernet interfaces",
    "launch": "versions of torch, CUDA, cuDNN and NCCL that the ranks used",
}
"""Name of a value that the judge computes, or the part of the name before the first dot -> what the value is.

These names are neither readings nor outputs of benchmarks.
"""
_CONDITION = re.compile(r"\b(if present|if the run has a baseline)\b")

HEAD = """# Checks

`rackproof criteria list PACK --markdown` prints this page: the criteria of a pack and of the packs that it includes. Rackproof's
documentation has the page of the pack `common`. The pack of each GPU model includes `common`; `rackproof criteria list h200-sxm`
shows all criteria for one model. [criteria.md](criteria.md) describes how criteria work and how to write your own.

| words | meaning |
|---|---|
| *if present* | hosts without the part are not judged. In any other check, a missing reading makes the host incomplete |
| the fleet | the hosts with the same GPU model; for `same as`, only those of the same gang (the hosts of one multi-node launch) |
| hosts of one order | hosts that were bought together and are built alike |
| new parts only | not judged in a run with a baseline, in a re-validation and by `rackproof doctor` |
| change during the run | sum of the increases from snapshot to snapshot; for a minimum (≥), last snapshot minus first snapshot |
| per hour before the run | the counter divided by the time since the host was booted or the counter was cleared |
| robust deviation | 1.4826 × the median absolute deviation |
| yes, or same as … | `yes` always passes; another value passes only if most other parts have it too |
| (policy), … | the basis of the limit: datasheet, published, measured by us, model (from other GPU models), policy (our choice) |
"""

INFORMATIONAL_HEAD = """The report and the exporter include the following readings, but no check judges them. Every other reading
and figure has a check that finds a bad value on a single part or a single host. A check that compares with most of the fleet does
not find a value that is bad on every host."""


def checks(packs: Sequence[Pack]) -> str:
    """Return the page: each criterion once, under the pack that defines it."""
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
