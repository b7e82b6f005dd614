"""Render the changes since a baseline or an earlier run, as Markdown and as a table for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from fleet.quantities import NONE, counted, quantity
from fleet.report.formatting import clean, join_names, params_text, signed_percent
from fleet.report.markup import code, section, table
from fleet.report.terminal import plain_table
from fleet.scope_text import describe_scope
from schemas.baselines import CHANGED, FIGURES_NEW, IMPROVED, PARTS, Change
from schemas.reports import FleetReport
from schemas.scopes import HOST, Scope

MAX_ROWS = 100
"""Maximum number of changes in Markdown."""
MAX_LINES = 200
"""Maximum number of rows on a terminal."""
MAX_NAMES = 4
"""Maximum number of parts, such as hosts and GPUs, that a row names."""
TEXT_LIMIT = 600
"""Maximum number of characters that describe a change."""
MINOR_KINDS = (CHANGED, IMPROVED, FIGURES_NEW)
"""Kinds of changes that `changes_blocks` only counts and does not list, unless its argument `everything` is true."""
TITLE = "Changes since acceptance"


def changes_section(report: FleetReport) -> list[str]:
    """Return the section on the changes since the baseline; an empty list if the run has no baseline."""
    if not report.baseline:
        return []
    head = f"Compared with the baseline {code(report.baseline[:12])}: {count_by_kind(report.changes)}."
    return [section(TITLE, f"{head}\n\n{changes_table(report.changes, '`report.json`')}" if report.changes else head)]


def count_by_kind(changes: Sequence[Change]) -> str:
    """Return `2 regressed, 1 replaced`, or `nothing changed`."""
    kinds = Counter(change.kind for change in changes)
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in kinds.items()) or "nothing changed"


def changes_table(changes: Sequence[Change], complete: str) -> str:
    """Return a Markdown table of the first MAX_ROWS changes. `complete` is Markdown that names the output with all changes."""
    shown = [_row(change) for change in changes[:MAX_ROWS]]
    more = f"\n\n… and {len(changes) - MAX_ROWS} more in {complete}." if len(changes) > MAX_ROWS else ""
    return table(("Kind", "Host", "Part", "What", "Before", "Now", "Change", "Noise"), shown) + more


def _row(change: Change) -> tuple[str, ...]:
    part = code(change.scope) + (f" serial {code(change.serial)}" if change.serial else "")
    name = code(f"{change.what} {params_text(change.params)}".strip())
    noise = f"{signed_percent(change.noise).lstrip('+')} ({code(change.basis)})" if change.noise is not None else NONE
    if not has_values(change):
        name = code(change.text, TEXT_LIMIT)
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


def changes_blocks(changes: Sequence[Change], *, everything: bool = False) -> list[Table | Text]:
    """Return a table of the changes for a terminal, and lines that count the changes that the table leaves out.

    Regressions and changed parts (`counts`), and unclear or missing values (`is_unreported`) come first. A row is for the changes
    of one kind to a part: it shows the first change and counts the others. Parts with equal changes share a row. Unless
    `everything` is true, MINOR_KINDS are only counted.
    """
    major = [change for change in changes if change.counts or change.is_unreported]
    others = [change for change in changes if not change.counts and not change.is_unreported]
    minor = [change for change in others if not everything and change.kind in MINOR_KINDS]
    groups = _by_part([*major, *(change for change in others if change not in minor)])
    rows = plain_table("CHANGE", "PART", "WHAT")
    for parts, of_part in groups[:MAX_LINES]:
        more = len(of_part) - 1
        each = " to each part" if len(parts) > 1 else ""
        rest = f" and {more} more change{'s' if more > 1 else ''} of this kind{each}" if more else ""
        what = Text.assemble(_what(of_part[0]), (rest, "dim"))
        kind = of_part[0].kind
        style = "bold red" if of_part[0].counts else "yellow" if of_part[0].is_unreported else ""
        rows.add_row(Text(kind.upper().replace("_", " "), style=style), _names(parts), what)
    blocks: list[Table | Text] = [rows] if groups else []
    if len(groups) > MAX_LINES:
        blocks.append(Text(f"… and {counted(len(groups) - MAX_LINES, 'more row')} (--json has all changes)"))
    if minor:
        blocks.append(Text(f"not shown: {count_by_kind(minor)} (--all lists them)"))
    return blocks


def _by_part(changes: Sequence[Change]) -> list[tuple[list[str], list[Change]]]:
    """Group the changes by kind and part; return the names of the parts and the changes of each group, in the order given.

    A change between two GPUs is assigned to the GPU that more changes involve. Groups of one kind with equal changes are merged
    into one group, with the names of all their parts and the changes of the first part.
    """
    ends = Counter((change.host, end) for change in changes for end in _ends(change))
    of_part: dict[tuple[str, str, str], list[Change]] = {}
    for change in changes:
        part = max(_ends(change), key=lambda end: ends[change.host, end])
        of_part.setdefault((change.kind, change.host, part), []).append(change)
    joined: dict[object, tuple[list[str], list[Change]]] = {}
    for (kind, host, part), of_one in of_part.items():
        name = host if part == HOST else f"{describe_scope(part)} of {host}"
        content = (kind, *(_content(change) for change in of_one))
        joined.setdefault(content, ([], of_one))[0].append(name)
    return list(joined.values())


def _content(change: Change) -> tuple[object, ...]:
    return (change.what, str(change.params), change.old, change.new) if has_values(change) else (change.text,)


def has_values(change: Change) -> bool:
    """Return whether the old and the new value explain the change. If not, `change.text` explains it."""
    return change.old is not None and change.new is not None and not change.is_unreported and change.kind not in PARTS


def _ends(change: Change) -> tuple[str, ...]:
    scope = Scope.parse(change.scope)
    return (scope.part, f"gpu={scope.get('peer')}") if scope.get("peer") else (scope.part,)


def _names(parts: Sequence[str]) -> str:
    return clean(join_names(parts, MAX_NAMES))


def _what(change: Change) -> str:
    """Return the old and the new value of a change, or its text if these values do not explain it."""
    if not has_values(change):
        return clean(change.text, TEXT_LIMIT)
    params = params_text(change.params)
    share = f" ({signed_percent(change.share)})" if change.share is not None else ""
    noise = f", noise {signed_percent(change.noise).lstrip('+')}" if change.noise is not None else ""
    values = f"{quantity(change.old, change.unit)} → {quantity(change.new, change.unit)}{share}{noise}"
    return clean(f"{change.what}{f' ({params})' if params else ''}: {values}", TEXT_LIMIT)


def changes_page(title: str, facts: Sequence[str], changes: Sequence[Change]) -> str:
    """Return the changes as a Markdown page, which `rackproof diff` prints for a ticket."""
    fact_list = "\n".join(f"- {fact}" for fact in facts)
    body = f"\n\n{changes_table(changes, 'the output of `rackproof diff --json`')}" if changes else ""
    return f"# {title}\n\n{fact_list}\n\n{count_by_kind(changes).capitalize()}.{body}\n"
