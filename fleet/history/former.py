"""What was known about parts before: their earlier causes and figures, for many parts in one query.

Renderers use this module beside `peers`: "seen before" on a cause, a trend beside a figure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from fleet.history.database import History

NEWEST = 20
"""Values of each figure that are returned."""
FigureKey = tuple[str, str, str, str, str]
"""Serial (of a host its name), figure, settings (`rows.settings_text`), stage, scope below the part."""


@dataclass(frozen=True, kw_only=True)
class FormerCause:
    """A failure of a part in an earlier run."""

    began: datetime
    """UTC, without a zone."""
    run: str
    host: str
    slot: str
    problem: str
    title: str
    action: str
    waived: bool


@dataclass(frozen=True, kw_only=True)
class FormerFigure:
    """A value of a figure in an earlier run."""

    began: datetime
    run: str
    driver: str
    value: float
    accepted: bool
    """Whether the host was accepted in that run."""


def former_causes(
    history: History, serials: Collection[str], hosts: Collection[str] = (), *, without_run: str = ""
) -> dict[str, list[FormerCause]]:
    """Return the earlier failures of parts by serial, and those of hosts themselves by name; the newest first.

    Args:
        history: the history of the kind of the run.
        serials: the parts.
        hosts: the hosts; failures of their GPUs are those of the GPUs.
        without_run: nonce of a run that is left out: that of the report.
    """
    rows = history.rows(
        """select case when serial <> '' and list_contains($serials, serial) then serial else host end as name, "began", run,
          host, slot, problem, any_value(title), any_value(action), bool_or(waived)
        from causes where nonce <> $without
          and ((serial <> '' and list_contains($serials, serial)) or (slot = '' and list_contains($hosts, host)))
        group by all order by name, "began" desc, problem""",
        {"serials": list(serials) or [""], "hosts": list(hosts) or [""], "without": without_run},
    )
    result: dict[str, list[FormerCause]] = {}
    for name, began, run, host, slot, problem, title, action, waived in rows:
        cause = FormerCause(
            began=began, run=run, host=host, slot=slot, problem=problem, title=title, action=action, waived=waived
        )
        result.setdefault(name, []).append(cause)
    return result


def former_figures(
    history: History, serials: Collection[str], hosts: Collection[str] = (), *, without_run: str = ""
) -> dict[FigureKey, list[FormerFigure]]:
    """Return the NEWEST earlier values of each figure of parts and hosts, the newest first; arguments as for `former_causes`."""
    rows = history.rows(
        """select case when serial <> '' then serial else host end as name, figures.name, settings, stage, within, "began", run,
          driver, value, accepted
        from figures where nonce <> $without and not duplicate
          and ((serial <> '' and list_contains($serials, serial)) or (serial = '' and list_contains($hosts, host)))
        qualify row_number() over (partition by serial, case when serial = '' then host end, figures.name, settings, stage, within
          order by "began" desc) <= $newest
        order by "began" desc""",
        {"serials": list(serials) or [""], "hosts": list(hosts) or [""], "without": without_run, "newest": NEWEST},
    )
    result: dict[FigureKey, list[FormerFigure]] = {}
    for name, figure, settings, stage, within, began, run, driver, value, accepted in rows:
        key = (name, figure, settings, stage, within)
        found = FormerFigure(began=began, run=run, driver=driver, value=value, accepted=accepted)
        result.setdefault(key, []).append(found)
    return result
