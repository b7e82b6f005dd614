"""Render the changes between two runs as Markdown and as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fleet.quantities import quantity
from fleet.report.formatting import clean, params_text, signed_percent
from fleet.report.markup import code, section, table
from schemas.baselines import CHANGED, FIGURES_GONE, FIGURES_NEW, IMPROVED, Change
from schemas.reports import FleetReport

MAX_ROWS = 100
MAX_LINES = 200
MINOR_KINDS = (CHANGED, IMPROVED, FIGURES_GONE, FIGURES_NEW)
"""Kinds that come last. A terminal shows only their number unless `everything` is asked for."""
TITLE = "Changes since acceptance"


def changes_section(report: FleetReport) -> list[str]:
    """Return the section on changes since the accepted records; no section if the run has no baseline."""
    if not report.baseline:
        return []
    head = f"Compared with the baseline {code(report.baseline[:12])}: {count_by_kind(report.changes)}."
    return [section(TITLE, f"{head}\n\n{changes_table(report.changes)}" if report.changes else head)]


def count_by_kind(changes: Sequence[Change]) -> str:
    """Return `2 regressed, 1 replaced`, or `nothing changed`."""
    kinds = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items()) or "nothing changed"


def changes_table(changes: Sequence[Change]) -> str:
    """Return a Markdown table of the changes."""
    shown = [_row(change) for change in changes[:MAX_ROWS]]
    more = f"\n\n… and {len(changes) - MAX_ROWS} more in `report.json`." if len(changes) > MAX_ROWS else ""
    return table(("Kind", "Host", "Part", "What", "Before", "Now", "Change", "Noise"), shown) + more


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


def changes_text(changes: Sequence[Change], *, everything: bool = False) -> str:
    """Return lines for a terminal, most important first; minor kinds are counted, or listed with `everything`."""
    shown = [change for change in changes if everything or change.kind not in MINOR_KINDS]
    lines = [f"{change.kind.upper().replace('_', ' ')}: {clean(change.text, 600)}" for change in shown[:MAX_LINES]]
    if len(shown) > MAX_LINES:
        lines.append(f"… and {len(shown) - MAX_LINES} more (--json has all)")
    minor = [change for change in changes if change not in shown and change.kind in MINOR_KINDS]
    if minor:
        lines.append(f"not shown: {count_by_kind(minor)} (--all)")
    return "\n".join(lines)


def changes_page(title: str, facts: Sequence[str], changes: Sequence[Change]) -> str:
    """Return a Markdown page for a ticket."""
    fact_list = "\n".join(f"- {fact}" for fact in facts)
    body = changes_table(changes) if changes else "Nothing changed."
    return f"# {title}\n\n{fact_list}\n\n{count_by_kind(changes).capitalize()}.\n\n{body}\n"
