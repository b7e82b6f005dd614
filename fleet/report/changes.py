"""What is not as it was: the changes of a comparison as Markdown and as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fleet.quantities import quantity
from fleet.report.formatting import clean, params_text, signed_percent
from fleet.report.markup import code, section, table
from schemas.baselines import CHANGED, FIGURES_GONE, FIGURES_NEW, IMPROVED, Change
from schemas.reports import FleetReport

MOST_ROWS = 100
MOST_LINES = 200
QUIET = (CHANGED, IMPROVED, FIGURES_GONE, FIGURES_NEW)
"""Kinds that come last, and of which a terminal shows the number alone unless asked."""
TITLE = "Since it was accepted"


def changes_section(report: FleetReport) -> list[str]:
    """The section on what changed against the accepted records; nothing where the run was compared with none."""
    if not report.baseline:
        return []
    head = f"Compared with the baseline {code(report.baseline[:12])}: {counts(report.changes)}."
    return [section(TITLE, f"{head}\n\n{rows(report.changes)}" if report.changes else head)]


def counts(changes: Sequence[Change]) -> str:
    """`2 regressed, 1 replaced`; says so where nothing changed."""
    kinds = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items()) or "nothing changed"


def rows(changes: Sequence[Change]) -> str:
    """A table of the changes."""
    shown = [_row(change) for change in changes[:MOST_ROWS]]
    more = f"\n\n… and {len(changes) - MOST_ROWS} more in `report.json`." if len(changes) > MOST_ROWS else ""
    return table(("Change", "Host", "Part", "What", "Was", "Is", "By", "Taken for noise"), shown) + more


def _row(change: Change) -> tuple[str, ...]:
    part = code(change.scope) + (f" serial {code(change.serial)}" if change.serial else "")
    name = code(f"{change.what} {params_text(change.params)}".strip())
    noise = f"{signed_percent(change.noise).lstrip('+')} ({code(change.basis)})" if change.noise is not None else "–"
    return (
        f"**{change.kind.replace('_', ' ')}**",
        code(change.host),
        part,
        name,
        code(quantity(change.old, change.unit)),
        code(quantity(change.new, change.unit)),
        signed_percent(change.share),
        noise,
    )


def text(changes: Sequence[Change], *, everything: bool = False) -> str:
    """Return lines for a terminal, most important first; minor kinds are counted, or listed with `everything`."""
    shown = [change for change in changes if everything or change.kind not in QUIET]
    lines = [f"{change.kind.upper().replace('_', ' ')}: {clean(change.text, 600)}" for change in shown[:MOST_LINES]]
    if len(shown) > MOST_LINES:
        lines.append(f"… and {len(shown) - MOST_LINES} more (--json has all)")
    quiet = [change for change in changes if change not in shown and change.kind in QUIET]
    if quiet:
        lines.append(f"not shown: {counts(quiet)} (--all)")
    return "\n".join(lines)


def markdown(title: str, facts: Sequence[str], changes: Sequence[Change]) -> str:
    """A page for a ticket."""
    reported = "\n".join(f"- {fact}" for fact in facts)
    body = rows(changes) if changes else "Nothing changed."
    return f"# {title}\n\n{reported}\n\n{counts(changes).capitalize()}.\n\n{body}\n"
